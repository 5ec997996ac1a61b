"""torch.compile for functions that are captured."""

import contextlib
import contextvars
import inspect
import logging
import types
import warnings
from collections.abc import Callable

import torch


def compiled(fn: Callable) -> Callable:
    """`torch.compile` for a function that is captured by hand.

    Inductor's own CUDA graphs are off, so that neither its graph tree nor a second pool stands inside the capture;
    shapes are fixed; a graph break is an error rather than a silent slow path, but where `graph_breaks_allowed`.
    """
    # A notice about Inductor itself, that a user can do nothing about; and one about what `precision` has chosen.
    warnings.filterwarnings("ignore", message=r"\s*Online softmax is disabled")
    warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores for float32 matrix multiplication available")
    whole, options = not _BREAKS.get(), {"triton.cudagraphs": False}
    if not whole:
        logging.getLogger("torch._dynamo.variables.tensor").addFilter(_is_news)
    # What reads numbers on the host is compiled anew for each of them, were it not for `dynamic`.
    return torch.compile(_with_own_code(fn), fullgraph=whole, dynamic=False if whole else None, options=options)


def _is_news(record: logging.LogRecord) -> bool:
    """Not twelve lines on a read by the host: whoever allows for graph breaks has named it in one."""
    return not record.getMessage().startswith("Graph break from `Tensor.item()`")


_BREAKS = contextvars.ContextVar("graph breaks", default=False)


@contextlib.contextmanager
def graph_breaks_allowed():
    """What is `compiled` meanwhile may consist of parts: for a function that is not captured."""
    token = _BREAKS.set(True)
    try:
        yield
    finally:
        _BREAKS.reset(token)


def _with_own_code(fn: Callable) -> Callable:
    """A copy of a function or method with a code object of its own.

    Dynamo counts compilations by code object, and refuses the ninth: the ninth environment of a process, say.
    """
    if inspect.ismethod(fn):
        return types.MethodType(_with_own_code(fn.__func__), fn.__self__)
    if not inspect.isfunction(fn):
        return fn
    copy = types.FunctionType(fn.__code__.replace(), fn.__globals__, fn.__name__, fn.__defaults__, fn.__closure__)
    copy.__kwdefaults__ = fn.__kwdefaults__
    return copy
