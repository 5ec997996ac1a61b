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
    "_unique2": "its shape depends on data; use a fixed-size torch.sort or torch.bincount(minlength=...)",
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
        found = _uncapturable(func, args, kwargs)
        if found is None and not self._may_draw and torch.Tag.nondeterministic_seeded in func.tags:
            found = f"{func.overloadpacket.__name__}: {A_DRAW},"
        if found is not None:
            raise CaptureError(f"{self._name} cannot be captured: {found} at {line_of(None)}")
        return func(*args, **kwargs)


def _uncapturable(func, args, kwargs) -> str | None:
    name = func.overloadpacket.__name__
    if name in ("index", "index_put", "index_put_") and any(
        isinstance(i, torch.Tensor) and i.dtype in (torch.bool, torch.uint8) for i in args[1]
    ):
        name = "masked"
    to = kwargs.get("device")
    if name == "_to_copy" and to is not None and torch.device(to).type == "cpu" and args[0].is_cuda:
        name = "copy to host"
    return f"{name}: {UNCAPTURABLE[name]}," if name in UNCAPTURABLE else None


def line_of(error: BaseException | None) -> str:
    """file:line of the innermost frame outside torch and this package, of an error or of the current call."""
    frames = traceback.extract_tb(error.__traceback__) if error else traceback.extract_stack()
    inside = (*(str(Path(file).parent) for file in (torch.__file__, __file__)), warnings.__file__, "<")
    outside = [frame for frame in frames if not frame.filename.startswith(inside)]
    if not outside:
        return "an unknown line"
    return f"{outside[-1].filename}:{outside[-1].lineno} ({outside[-1].line})"


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
