"""What a graph cannot hold: found by watching a call of the function, and said with its line and its cure."""

import contextlib
import threading
import traceback
import warnings
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rlgraph.errors import CaptureError

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
    "draws that count on the device, such as those of rlgraph.fused"
)

SYNCHRONISES = "called a synchronizing CUDA operation"  # torch's words in its synchronisation debug mode


class Uncapturable(TorchDispatchMode):
    """Raises CaptureError at the first operation that cannot be captured."""

    def __init__(self, name, may_draw):
        super().__init__()
        self._name, self._may_draw = name, may_draw

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        with self:  # in inference mode an operation made of others, such as item(), arrives whole: look at its parts
            result = func.decompose(*args, **kwargs)
        if result is not NotImplemented:
            return result
        found = _uncapturable(func, args, kwargs)
        if found is None and not self._may_draw and torch.Tag.nondeterministic_seeded in func.tags:
            found = f"{func.overloadpacket.__name__}: {A_DRAW},"
        if found is not None:
            raise CaptureError(f"{self._name} cannot be captured: {found} at {line_of(None)}")
        return func(*args, **kwargs)


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


def line_of(error: BaseException | None) -> str:
    """file:line of the innermost frame outside torch and this package, of an error or of the current call."""
    frames = traceback.extract_tb(error.__traceback__) if error else traceback.extract_stack()
    inside = (*(str(Path(file).parent) for file in (torch.__file__, __file__)), warnings.__file__, "<")
    outside = [frame for frame in frames if not frame.filename.startswith(inside)]
    if not outside:
        return "an unknown line"
    frame, most = outside[-1], 100
    line = frame.line if len(frame.line) <= most else f"{frame.line[:most]}..."
    return f"{frame.filename}:{frame.lineno} ({line})"


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
