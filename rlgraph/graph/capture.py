"""Capture a function's CUDA work once, replay it as one launch."""

import contextlib
import functools
import gc
import inspect
import time
import traceback
import types
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

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


def compiled(fn: Callable) -> Callable:
    """`torch.compile` for a function that is captured by hand.

    Inductor's own CUDA graphs are off, so that neither its graph tree nor a second pool stands inside the capture;
    shapes are fixed; a graph break is an error rather than a silent slow path.
    """
    # A notice about Inductor itself, that a user can do nothing about; and one about what `precision` has chosen.
    warnings.filterwarnings("ignore", message=r"\s*Online softmax is disabled")
    warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores for float32 matrix multiplication available")
    return torch.compile(_with_own_code(fn), fullgraph=True, dynamic=False, options={"triton.cudagraphs": False})


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


def capture(
    fn: Callable,
    *inputs: torch.Tensor,
    state: object = (),
    generators: Sequence[torch.Generator] = (),
    device: torch.device | str | None = None,
    pool: object = None,
    warmup: int = 2,
) -> "Graph":
    """Capture `fn(*inputs)` into a CUDA graph.

    Args:
        fn: a function of tensors that launches the same kernels on the same addresses in every call.
        inputs: example tensors. The graph keeps buffers of their shape, dtype and device; `replay` copies into them.
        state: every tensor (any nesting of tuples, lists and dicts) that `fn` updates in place and that outlives the
            call: environment state, buffers, parameters, optimiser moments. Warm-up runs `fn` for real; these, and
            the generators, are put back afterwards, so that a capture leaves no trace.
        generators: every explicit `torch.Generator` that `fn` draws from. Each replay draws fresh numbers, the same
            ones that as many direct calls would; `manual_seed` after the capture takes effect at the next replay.
        device: where to capture; the device of the first input or state tensor by default.
        pool: `other.pool` to share another graph's memory (only for graphs always replayed in the order captured).
        warmup: calls before the capture, on the capturing stream: lazy initialisation and compilation happen there.

    Returns:
        A `Graph`. On a device without CUDA it runs `fn` directly, and a warning says so once a process.

    Raises:
        CaptureError: `fn` does something that a graph cannot hold.
    """
    if device is None:
        tensors = [t for t in tree_leaves((inputs, state)) if isinstance(t, torch.Tensor)]
        device = tensors[0].device if tensors else torch.get_default_device()
    return Graph(fn, inputs, state, tuple(generators), torch.device(device), pool, warmup)


class Graph:
    """A captured function. `replay(*inputs)` runs it; build one with `capture`.

    What it needs: fixed shapes, no read of a device value on the host, no random numbers from an unregistered
    generator, and no Python value that should change between replays (it is baked in: keep it in a tensor).

    What it does not do: it does not copy its outputs. `replay` returns the same tensors every time, overwritten by
    the next replay; clone what you keep. It does not notice a changed Python attribute of `fn`, does not free
    tensors that `fn` closes over, and does not synchronise.

    Where there is no CUDA device the same object calls `fn`, with the same static input and output buffers.

    Attributes:
        captured: True if `replay` launches a CUDA graph.
        replays: how often `replay` has run.
        capture_seconds: time for capturing and instantiating, without the warm-up that may compile.
        outputs: what `fn` returned: static tensors, filled by the first replay.
    """

    def __init__(self, fn, inputs, state, generators, device, pool, warmup):
        self._fn, self._name = fn, getattr(fn, "__name__", repr(fn))
        self._inputs = tuple(t.detach().to(device, copy=True) for t in inputs)
        self._state = [t for t in tree_leaves(state) if isinstance(t, torch.Tensor)]
        self._generators = generators
        self.device = device
        self.captured = device.type == "cuda"
        self.replays = 0
        self.capture_seconds = 0.0
        self.outputs = None
        if self.captured:
            self._capture(pool, warmup)
        else:
            _say_once_that_nothing_is_captured(device)
            with self._leaving_no_trace():
                self._diagnose()

    @property
    def pool(self):
        """The memory pool, to be given to another `capture`; None without CUDA."""
        return self._graph.pool() if self.captured else None

    def replay(self, *inputs: torch.Tensor):
        """Run the function on `inputs` (none: on what the static inputs hold) and return its static outputs.

        Raises:
            ValueError: another number of inputs than captured, or another shape or dtype.
            RuntimeError: after `reset`.
        """
        if self._fn is None:
            raise RuntimeError(f"the graph of {self._name} was released by reset(); capture it again")
        if inputs:
            self._fill(inputs)
        self.replays += 1
        if self.captured:
            self._graph.replay()  # on its own device, whichever is the current one
        else:
            self._run_directly()
        return self.outputs

    def reset(self) -> None:
        """Release the graph and its memory. Outputs handed out earlier must no longer be used."""
        if self.captured and self._fn is not None:
            torch.cuda.synchronize(self.device)
            self._graph.reset()
        self._fn = self.outputs = None
        self._inputs, self._state = (), []

    def _fill(self, inputs):
        if len(inputs) != len(self._inputs):
            raise ValueError(f"{self._name} was captured with {len(self._inputs)} inputs, got {len(inputs)}")
        for i, (static, given) in enumerate(zip(self._inputs, inputs)):
            if given.shape != static.shape or given.dtype != static.dtype:
                raise ValueError(
                    f"input {i} of {self._name} was captured as {static.dtype}{list(static.shape)}, "
                    f"got {given.dtype}{list(given.shape)}"
                )
            if given is not static:
                static.copy_(given.detach(), non_blocking=True)

    def _run_directly(self):
        result = self._fn(*self._inputs)
        if self.outputs is None:
            leaves, spec = tree_flatten(result)
            owned = [t.detach().clone() if isinstance(t, torch.Tensor) else t for t in leaves]
            self.outputs = tree_unflatten(owned, spec)
            return
        for static, new in zip(tree_leaves(self.outputs), tree_leaves(result)):
            if isinstance(static, torch.Tensor):
                static.copy_(new.detach())

    def _capture(self, pool, warmup):
        with torch.cuda.device(self.device):
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream), self._leaving_no_trace():
                self._warm_up(warmup)
            torch.cuda.synchronize()
            started = time.perf_counter()
            self._graph = torch.cuda.CUDAGraph()
            for generator in self._generators:
                self._graph.register_generator_state(generator)
            try:
                # A collection that frees CUDA objects inside a capture would invalidate it.
                with (
                    _no_garbage_collection(),
                    torch.cuda.graph(self._graph, pool=pool, stream=stream, capture_error_mode="thread_local"),
                ):
                    self.outputs = self._fn(*self._inputs)
            except Exception as error:
                raise self._error(error) from error
            # torch writes the generators' offsets there as a capture begins; a replay writes its own on another stream.
            stream.synchronize()
            self.capture_seconds = time.perf_counter() - started

    def _warm_up(self, warmup):
        try:
            for i in range(max(2, warmup)):
                # The first call may compile, and autotuning synchronises. From the second on, a synchronising call
                # is an error here, before it can break a capture.
                with _synchronising_is_an_error() if i else contextlib.nullcontext():
                    self._fn(*self._inputs)
        except Exception as error:
            self._diagnose()
            raise self._error(error) from error

    def _error(self, error: Exception) -> CaptureError:
        return CaptureError(
            f"{self._name} cannot be captured: {_first_line(error)} at {_line_of(error)}; constants must be made "
            "before the capture, generators named in `generators`, and no value read on the host"
        )

    @contextlib.contextmanager
    def _leaving_no_trace(self):
        tensors = [t.detach() for t in self._state]
        kept = [t.clone() for t in tensors]
        kept_inputs = [t.clone() for t in self._inputs]
        random_states = [g.get_state() for g in self._generators]
        try:
            yield
        finally:
            with torch.no_grad():
                for tensor, value in zip([*tensors, *self._inputs], [*kept, *kept_inputs]):
                    tensor.copy_(value)
            for generator, value in zip(self._generators, random_states):
                generator.set_state(value)

    def _diagnose(self):
        """Run `fn` once, watching its operations, and raise for the first that a graph cannot hold."""
        # What is compiled runs uncompiled here: inside compiled code there are no operations to watch.
        with torch.compiler.set_stance("force_eager"), _Watch(self._name):
            self._fn(*self._inputs)


class _Watch(TorchDispatchMode):
    """Raises CaptureError at the first operation that cannot be captured."""

    def __init__(self, name):
        super().__init__()
        self._name = name

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        found = _uncapturable(func, args, kwargs)
        if found is not None:
            raise CaptureError(f"{self._name} cannot be captured: {found} at {_line_of(None)}")
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


def _line_of(error: BaseException | None) -> str:
    """file:line of the innermost frame outside torch and this module, of an error or of the current call."""
    frames = traceback.extract_tb(error.__traceback__) if error else traceback.extract_stack()
    torch_root, here = str(Path(torch.__file__).parent), __file__
    outside = [f for f in frames if not f.filename.startswith((torch_root, "<")) and f.filename != here]
    if not outside:
        return "an unknown line"
    return f"{outside[-1].filename}:{outside[-1].lineno} ({outside[-1].line})"


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0] or type(error).__name__


@contextlib.contextmanager
def _synchronising_is_an_error():
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


@contextlib.contextmanager
def _no_garbage_collection():
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@functools.cache
def _say_once_that_nothing_is_captured(device: torch.device) -> None:
    warnings.warn(f"no CUDA graph on {device.type}: the function is run directly, with the same buffers", stacklevel=5)
