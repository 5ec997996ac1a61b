"""What a graph cannot hold: found by watching a call of the function, and said with its line and its cure."""

import contextlib
import pickle
import random
import threading
import traceback
import types
import warnings
from collections.abc import Callable, Iterable

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rlgraph.errors import CaptureError
from rlgraph.graph.words import INSIDE, line_of

# Operations that need the host in the middle of the work, and what to write in their place.
# The names are ATen's; `masked` stands for indexing by a boolean tensor.
UNCAPTURABLE = {
    "_local_scalar_dense": "reading a tensor on the host (.item(), float(), bool(), `if tensor:`) waits for the "
    "GPU; keep the value in a tensor and choose with torch.where",
    "nonzero": "the shape of nonzero's result depends on data; use torch.where(mask, a, b) or a masked sum",
    "masked": "indexing by a boolean mask gives a shape that depends on data; use torch.where(mask, a, b)",
    "masked_select": "its shape depends on data; use torch.where(mask, a, b)",
    **dict.fromkeys(
        ("_unique2", "unique_dim", "unique_consecutive"), "its shape depends on data; use a fixed-size torch.sort"
    ),
    "bincount": "its size depends on data; use torch.zeros(n).scatter_add_(0, x, ones)",
    "repeat_interleave": "its size depends on data; give it as output_size",
    "equal": "comparing on the host waits for the GPU; keep (a == b).all() in a tensor",
    "allclose": "comparing on the host waits for the GPU; keep torch.isclose(a, b).all() in a tensor",
    "_linalg_check_errors": "looking for errors on the host waits for the GPU; use torch.linalg.inv_ex, solve_ex and "
    "the like",
    "copy to host": "a copy to the host waits for the GPU; copy after replay(), outside the captured function",
}
# What a graph inside another one cannot hold beside: `replay` alone tells torch's generators to advance.
A_DRAW = (
    "inside another graph torch's generators do not advance, and every iteration would draw the same numbers; use "
    "draws that count on the device, such as those of rlgraph.kernels"
)

SYNCHRONISES = "called a synchronizing CUDA operation"  # torch's words in its synchronisation debug mode


class Uncapturable(TorchDispatchMode):
    """Raises CaptureError at the first operation that cannot be captured.

    Args:
        name: of the function, for the error.
        may_draw: whether it may draw from torch's generators.
        captures: whether this device captures. Where it does not, an optimiser may read its numbers if it need not on
            a GPU, by `capturable=True`: torch takes that option on no CPU.
    """

    def __init__(self, name: str, may_draw: bool, captures: bool):
        super().__init__()
        self._name, self._may_draw, self._captures = name, may_draw, captures

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        with self:  # in inference mode an operation made of others, such as item(), arrives whole: look at its parts
            result = func.decompose(*args, **kwargs)
        if result is not NotImplemented:
            return result
        found = _uncapturable(func, args, kwargs)
        if found is None and not self._may_draw and torch.Tag.nondeterministic_seeded in func.tags:
            found = f"{func.overloadpacket.__name__}: {A_DRAW},"
        if found is None:
            return func(*args, **kwargs)
        optimizer = optimizer_in(frame for frame, _ in traceback.walk_stack(None))
        if optimizer is not None:
            if not self._captures and "capturable" in optimizer.defaults:
                return func(*args, **kwargs)
            found = f"{func.overloadpacket.__name__}: {_reads_on_the_host(optimizer)},"
        raise CaptureError(f"{self._name} cannot be captured: {found} at {line_of(None)}")


def _uncapturable(func, args, kwargs) -> str | None:
    name = func.overloadpacket.__name__
    if name in ("index", "index_put", "index_put_") and any(map(_is_mask, args[1])) and not _is_a_fill(name, args):
        name = "masked"
    to = kwargs.get("device")
    if name == "_to_copy" and to is not None and torch.device(to).type == "cpu" and args[0].is_cuda:
        name = "copy to host"
    if name == "repeat_interleave" and kwargs.get("output_size") is not None:
        return None
    return f"{name}: {UNCAPTURABLE[name]}," if name in UNCAPTURABLE else None


def _is_mask(index) -> bool:
    return isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8)


def _is_a_fill(name, args) -> bool:
    """x[mask] = number, which torch runs as a masked_fill where the mask is on the device of x."""
    if name == "index" or len(args) > 3:
        return False
    indices, value = [index for index in args[1] if index is not None], args[2]
    one_mask = len(indices) == 1 and indices[0].device == args[0].device
    return one_mask and value.device.type == "cpu" and value.numel() == 1


def optimizer_in(frames: Iterable[types.FrameType]) -> torch.optim.Optimizer | None:
    """torch's optimiser whose own code runs: not the user's, in a closure or in a `step`.

    Args:
        frames: the innermost first.
    """
    for frame in frames:
        if not frame.f_code.co_filename.startswith(INSIDE):
            return None
        if isinstance(owner := frame.f_locals.get("self"), torch.optim.Optimizer):
            return owner
    return None


def missing_option(optimizer: torch.optim.Optimizer) -> str | None:
    """The option that an optimiser lacks for reading nothing on the host; None: it has it, or there is none."""
    option = next((name for name in ("capturable", "fused") if name in optimizer.defaults), None)
    return None if option is None or all(group[option] for group in optimizer.param_groups) else option


def _reads_on_the_host(optimizer: torch.optim.Optimizer) -> str:
    reads, option = f"{type(optimizer).__name__} reads its numbers on the host", missing_option(optimizer)
    if option is None:
        return f"{reads}, and no option keeps it from that; use another one, such as Adam with capturable=True"
    return f"{reads}; make it with {option}=True"


@contextlib.contextmanager
def synchronising_is_an_error_in_this_thread():
    """torch's debug mode is the whole process's: with "error", `.item()` in another thread would raise there.

    So it warns, and what shows warnings raises in this thread and keeps quiet in the others.
    """
    here, mode, show = threading.get_ident(), torch.cuda.get_sync_debug_mode(), warnings.showwarning

    def show_or_raise(message, *args):
        if not str(message).startswith(SYNCHRONISES):
            show(message, *args)
        elif threading.get_ident() == here:
            raise RuntimeError(SYNCHRONISES)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype")
        warnings.filterwarnings("always", message=SYNCHRONISES)
        warnings.showwarning = show_or_raise
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(mode)


class HostDraws:
    """Where the host's random generators stand: a graph draws nothing from them."""

    def __init__(self, on_gpu: bool):
        self._sources = {
            "Python's random": (random.getstate, random.setstate),
            "np.random": (np.random.get_state, np.random.set_state),
        }
        if on_gpu:  # else it is the device's own
            self._sources["torch's generator on the CPU"] = (torch.get_rng_state, torch.set_rng_state)
        self._states = {name: get() for name, (get, _) in self._sources.items()}

    def drawn_by(self, call: Callable) -> str | None:
        """The first that is not where it was and that each of two calls moves: else it was another thread's draw.

        Those that `call` draws from are put back.
        """
        now, drawn = self._states, list(self._sources)
        for i in range(3):
            if i and drawn:
                with contextlib.suppress(Exception):
                    call()
            before, now = now, {name: self._sources[name][0]() for name in drawn}
            drawn = [name for name in drawn if _content(before[name]) != _content(now[name])]
        for name in drawn:
            self._sources[name][1](self._states[name])
        return next(iter(drawn), None)


def _content(state) -> object:
    """Equal for equal states. A pickled tensor may hold the address of its memory."""
    return state.tolist() if isinstance(state, torch.Tensor) else pickle.dumps(state)
