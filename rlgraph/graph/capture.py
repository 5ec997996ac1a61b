"""Capture a function's CUDA work once, replay it as one launch."""

import contextlib
import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from rlgraph.errors import CaptureError, GraphError, first_line
from rlgraph.graph import bindings
from rlgraph.graph.inspect.info import GraphInfo, describe
from rlgraph.graph.recording import (
    ALIVE,
    PREPARING,
    RECORDING,
    MemoryPool,
    an_empty_graph_is_an_error,
    capturing,
    new_graph,
    no_garbage_collection,
    pool_bytes,
    put_torch_right,
    stream_of_its_own,
)
from rlgraph.graph.state import (
    check_tensors,
    device_of,
    generators_of,
    leaving_no_trace,
    own_generator,
    tensors_of,
)
from rlgraph.graph.topology import flatten
from rlgraph.graph.trial import Trial
from rlgraph.graph.verify import difference, snapshot
from rlgraph.graph.watch import Watch
from rlgraph.graph.words import name_of, warn


def capture(
    fn: Callable,
    *inputs: torch.Tensor,
    state: object = (),
    generators: Sequence[torch.Generator] = (),
    device: torch.device | str | None = None,
    pool: MemoryPool | None = None,
    warmup: int = 2,
    watch: bool = True,
) -> "Graph":
    """Capture `fn(*inputs)` into a CUDA graph.

    Args:
        fn: a function of tensors that launches the same kernels on the same addresses in every call.
        inputs: example tensors. The graph keeps buffers of their shape, dtype and device; `replay` copies into them.
        state: every tensor that `fn` updates in place and that outlives the call: environment state, buffers,
            parameters, optimiser moments; in any nesting of tuples, lists and dicts. A module stands for its parameters
            and buffers, an optimiser for what it keeps of its steps. Warm-up runs `fn` for real; these, and the
            generators, are put back after each call, so that a capture leaves no trace.
        generators: every explicit `torch.Generator` that `fn` draws from. Each replay draws fresh numbers, the same
            ones that as many direct calls would; `manual_seed` after the capture takes effect at the next replay.
        device: where to capture, by a name in `rlgraph.devices`; by default that of the first input or state tensor
            that is on a GPU, or else of the first, and without any a GPU where there is one.
        pool: `other.pool` to share a live graph's memory. A replay of either may then overwrite the outputs of the
            other, and they must not run at the same time; `rlgraph.graph.pool.GraphPool` sees to both.
        warmup: calls before the capture, on the capturing stream: lazy initialisation and compilation happen there.
        watch: whether replays notice that Python values which `fn` reads have changed, see `rlgraph.graph.watch`. It
            costs each about 0.06 µs a value.

    Returns:
        A `Graph`. On a device without CUDA it runs `fn` directly, and a warning says so once a process.

    Other threads may go on launching work and waiting for their own streams meanwhile, and their replays wait for the
    capture. They must not call `torch.cuda.synchronize()` on this device, which ends the capture with a CaptureError;
    before torch 2.12 they must not draw from the default generator either.

    Raises:
        CaptureError: `fn` does something that a graph cannot hold, or rebinds what it reads in the next call. The
            process remains usable, and what was rebound is as before. Or it returns something that a replay could not
            fill: neither tensors, in any nesting of tuples, lists and dicts, nor a constant.
        UsageError: an input is not a tensor, `state` holds something without tensors or an optimiser that has none yet,
            `generators` something else than generators, or there is no such device.
    """
    check_tensors(inputs, fn)
    state = tensors_of(state)
    device = device_of(inputs, state, device)
    graph = Graph(fn, inputs, state, generators_of(generators), device, pool, warmup, watch=watch)
    graph.instantiate()
    return graph


@dataclass(frozen=True)
class Update:
    """What `Graph.update` came to."""

    in_place: bool  # False: the graph was instantiated anew
    reason: str  # why, in words
    seconds: float  # for capturing, and updating or instantiating; without the warm-up


class Graph:
    """A captured function. `replay(*inputs)` runs it; build one with `capture`.

    What it needs: fixed shapes, no read of a device value on the host, no random numbers from an unregistered
    generator, and no Python value that should change between replays: it is baked in. Keep it in a tensor, or call
    `update`; a replay after a change is a GraphError, also where nothing is captured. `rlgraph.graph.watch` says which
    values are watched, and `verify` finds the others.

    What it does not do: it does not copy its outputs. `replay` returns the same tensors every time, overwritten by
    the next replay; clone what you keep. It does not free tensors that `fn` closes over, and does not synchronise.
    Beside the graph that is launched it keeps the one that was captured, in the host's memory: `info`, updates and
    other graphs start from it.

    Where there is no CUDA device the same object calls `fn`, with the same static input and output buffers.

    Attributes:
        captured: True if `replay` launches a CUDA graph.
        replays: how often `replay` has run.
        capture_seconds: time for capturing, without the warm-up that may compile.
        instantiate_seconds: time for making what is launched out of what was captured.
        outputs: what `fn` returned: static tensors, filled by the first replay.
        inputs: the static tensors that `replay(*inputs)` copies into; `replay()` runs on what is written here.
        pool: the memory, to be given to another `capture`; None without CUDA and after `reset`.
    """

    def __init__(self, fn, inputs, state, generators, device, pool, warmup, part=False, watch=True):
        self._fn, self._name = fn, name_of(fn)
        with torch.inference_mode(False):  # buffers that a caller in that mode can fill, and one that is not
            self.inputs = tuple(t.detach().to(device, copy=True) for t in inputs)
        self._state = tensors_of(state)
        self._generators = generators
        self.device = device
        self.captured = device.type == "cuda"
        self.replays = 0
        self.capture_seconds = self.instantiate_seconds = 0.0
        self.outputs = self.pool = None
        self._part = part  # of another graph
        self._template = None  # after an update: what holds the graph that was captured last
        self._watches = watch
        if not self.captured:
            _say_once_that_nothing_is_captured(device)
        trial = Trial(fn, self.inputs, self._state, generators, device, part, watch)
        with PREPARING, trial.putting_back_after_an_error():
            if self.captured:
                self._capture(trial, pool, warmup)
            else:
                trial.warm_up_directly()
        self._watch, self._drawn = trial.watch, trial.drawn  # the latter: by how much a call advances the generators

    @property
    def raw(self) -> int:
        """The address of the cudaGraph_t that was captured last: what another graph can hold. Only with CUDA."""
        return (self._template or self)._graph.raw_cuda_graph()

    def instantiate(self) -> None:
        """Make what is launched out of what was captured; `capture` does it."""
        if self.captured:
            with RECORDING, torch.cuda.device(self.device):
                started = time.perf_counter()
                self._graph.instantiate()
                self.instantiate_seconds = time.perf_counter() - started

    def replay(self, *inputs: torch.Tensor):
        """Run the function on `inputs` (none: on what the static inputs hold) and return its static outputs.

        Raises:
            GraphError: a Python value that the function reads is not what it was at the capture.
            ValueError: another number of inputs than captured, or another type, shape, dtype or device.
            RuntimeError: after `reset`.
        """
        self._check_alive()
        self.check_unchanged()
        if inputs:
            self._fill(inputs)
        self.replays += 1
        if self.captured:
            with RECORDING:
                self._graph.replay()  # on its own device, whichever is the current one
        else:
            self._run_directly()
        return self.outputs

    def change(self) -> str | None:
        """What has changed of the Python values that the function reads, in words; None: nothing, or not watched."""
        return None if self._watch is None else self._watch.change()

    def check_unchanged(self) -> None:
        """Raises GraphError if a Python value that the function reads has changed; `replay` does it."""
        if (change := self.change()) is not None:
            raise GraphError(
                f"{change}, but {self._name} was captured with what it was: {self._to_capture_again()}, or keep it in "
                "a tensor and write that in place"
            )

    def verify(self) -> None:
        """Compare one replay with one call of the function, to the last bit, from the same state, inputs and draws.

        It finds what `rlgraph.graph.watch` cannot see: a value from an array, an iterator or a file that was baked in;
        a tensor that is updated and not in `state`; a generator that is not in `generators`. It leaves no trace in
        what was named to `capture`, in the outputs and in watched Python values. Where nothing is captured, it
        compares two calls, which shows whether a call begins where the last one did. It waits for the device.

        Raises:
            GraphError: the two differ; the message names the first output or state tensor that does, and by how much.
                Or a watched Python value has changed.
            RuntimeError: after `reset`.
        """
        self._check_alive()
        self.check_unchanged()
        before, outputs, replays = Watch(self._fn), self.outputs, self.replays
        shown = [
            t
            for t in tree_leaves(outputs)
            if isinstance(t, torch.Tensor) and 0 not in t.stride() and not t.is_inference()
        ]
        try:
            with leaving_no_trace(shown, ()):
                found = difference(*(self._tried(run) for run in (self.replay, lambda: self._fn(*self.inputs))))
        finally:
            before.put_back()
            self.outputs, self.replays = outputs, replays
        if found is not None:
            raise GraphError(
                f"a {'replay' if self.captured else 'second call'} of {self._name} gives other results than a call: "
                f"{found}; keep in tensors what changes, and name in `state` what is updated and in `generators` what "
                "is drawn from"
            )

    def _tried(self, run) -> dict:
        """What a run comes to, and leaves no trace of in the state, the inputs and the generators."""
        generators = {own_generator(self.device), *self._generators}
        on_device = torch.cuda.device(self.device) if self.captured else contextlib.nullcontext()
        with on_device, leaving_no_trace((self._state, self.inputs), generators):
            return snapshot({"output": run(), "state tensor": self._state, "input": self.inputs})

    def _to_capture_again(self) -> str:
        if self._part:
            return "make the loop or branch anew"
        return "call graph.update(fn), or reset() of a GraphPool, to capture again"

    def info(self) -> GraphInfo:
        """What the graph holds: nodes, kernels by name, edges, critical path, copies, memory, times.

        It needs the package cuda-bindings, which torch for CUDA brings along. It reads what was captured: it launches
        nothing, waits for nothing, does not time kernels, and does not look into the bodies of conditional nodes. After
        an `update` it is the last function's.

        Raises:
            GraphError: there is no CUDA graph, as on a CPU; cuda-bindings is missing, or one of its calls failed.
            RuntimeError: after `reset`.
        """
        self._check_alive()
        if not self.captured:
            raise GraphError(
                f"{self._name} holds no CUDA graph: on {self.device.type} it is run directly, and there is nothing to "
                "inspect; capture it on an NVIDIA GPU"
            )
        with torch.cuda.device(self.device):
            contents = bindings.read(self.raw)
        return describe(
            flatten(contents),
            self._name,
            memory_bytes=pool_bytes(self.pool),
            state_bytes=_tensor_bytes(self._state),
            input_bytes=_tensor_bytes(self.inputs),
            output_bytes=_tensor_bytes(self.outputs),
            capture_seconds=self.capture_seconds,
            instantiate_seconds=self.instantiate_seconds,
        )

    def update(self, fn: Callable, *, state: object = None, warmup: int = 2) -> Update:
        """Capture `fn` in place of the function so far, and let `replay` launch it from now on.

        A Python number, a tensor at another address, an environment with other parameters: what was baked in is
        exchanged. Where both functions launch the same kinds of nodes in the same order, the graph that is launched
        is updated in place (`cudaGraphExecUpdate`); otherwise it is instantiated anew. Either way the next replay
        runs `fn`, and launches under way are not disturbed.

        It needs inputs as before, and draws from no generator but those named to `capture`. It does not save the
        capture of `fn`, only what comes after. It hands out new outputs: those of `fn`, after the next replay; the
        static inputs are other tensors, too, that hold what the old ones held.

        Args:
            fn: as for `capture`.
            state: what `fn` updates in place, see `capture`; the same as before by default.
            warmup: calls before the capture.

        Returns:
            Whether it was updated in place, why, and how long it took. Without CUDA nothing is captured, and `fn` is
            what will be called.

        Raises:
            CaptureError: `fn` cannot be captured; the graph remains what it was.
            RuntimeError: after `reset`.
        """
        self._check_alive()
        check_tensors((), fn)
        state = self._state if state is None else state
        new = Graph(fn, self.inputs, state, self._generators, self.device, self.pool, warmup, watch=self._watches)
        started = time.perf_counter()
        refused = self._replace_by(new) if self.captured else None
        seconds = new.capture_seconds + time.perf_counter() - started
        self._fn, self._name, self.outputs = new._fn, new._name, new.outputs
        self.inputs, self._state, self._drawn = new.inputs, new._state, new._drawn
        self._watch = new._watch
        self.capture_seconds, self._template = new.capture_seconds, new
        done = "updated in place" if self.captured else f"no CUDA graph on {self.device.type}: nothing to update"
        return Update(refused is None, refused or done, seconds)

    def _replace_by(self, new: "Graph") -> str | None:
        """Launch what `new` captured from now on. None if that could be done in place, else why not, in words."""
        with RECORDING:
            refused = self._refused(new)
            if refused is not None:
                new.instantiate()
                torch.cuda.synchronize(self.device)
                self._graph.reset()
                self._graph, self.instantiate_seconds = new._graph, new.instantiate_seconds
        return refused

    def _refused(self, new: "Graph") -> str | None:
        """Let what is launched run what `new` captured; in words why that cannot be, None if it is done."""
        if new._drawn != self._drawn:
            return "it draws more or fewer random numbers, and replays would draw some twice"
        if any(new._drawn) and torch.__version__ >= "2.12":
            return "it draws random numbers, whose state torch 2.12 and later keep for each capture"
        with torch.cuda.device(self.device):
            return bindings.update(self._graph.raw_cuda_graph_exec(), self.raw, new.raw)

    def reset(self) -> None:
        """Release the graph and its memory. Outputs handed out earlier must no longer be used."""
        if self.captured and self._fn is not None:
            with RECORDING:
                torch.cuda.synchronize(self.device)
                self._graph.reset()
        self._fn = self.outputs = self.pool = self._template = self._watch = None
        self.inputs, self._state = (), []

    def _check_alive(self):
        if self._fn is None:
            raise RuntimeError(f"the graph of {self._name} was released by reset(); capture it again")

    def _fill(self, inputs):
        if len(inputs) != len(self.inputs):
            raise ValueError(f"{self._name} was captured with {len(self.inputs)} inputs, got {len(inputs)}")
        for i, (static, given) in enumerate(zip(self.inputs, inputs)):
            if not isinstance(given, torch.Tensor):
                raise ValueError(f"input {i} of {self._name} is a tensor, not of type {type(given).__name__}")
            if given.shape != static.shape or given.dtype != static.dtype:
                raise ValueError(
                    f"input {i} of {self._name} was captured as {static.dtype}{list(static.shape)}, "
                    f"got {given.dtype}{list(given.shape)}"
                )
            if given.device != static.device:
                raise ValueError(
                    f"input {i} of {self._name} was captured on {static.device}, got one on {given.device}: move it "
                    f"there first, by .to({str(static.device)!r})"
                )
            if given is not static:
                static.copy_(given.detach(), non_blocking=True)

    def _run_directly(self):
        result = self._fn(*self.inputs)
        with torch.inference_mode(False):  # as for `inputs`
            if self.outputs is None:
                leaves, spec = tree_flatten(result)
                owned = [t.detach().clone() if isinstance(t, torch.Tensor) else t for t in leaves]
                self.outputs = tree_unflatten(owned, spec)
                return
            for static, new in zip(tree_leaves(self.outputs), tree_leaves(result)):
                if isinstance(static, torch.Tensor):
                    static.copy_(new.detach())

    def _capture(self, trial, pool, warmup):
        with torch.cuda.device(self.device):
            pool = pool or MemoryPool(torch.cuda.graph_pool_handle(), stream_of_its_own(self.device))
            pool.stream.wait_stream(torch.cuda.current_stream())
            # Named around the capture too: torch does not leave the stream of a capture that fails.
            with torch.cuda.stream(pool.stream):
                try:
                    trial.warm_up(warmup)
                finally:
                    pool.stream.synchronize()  # if it failed, others go on with what was put back here
                with RECORDING, no_garbage_collection():
                    torch.cuda.synchronize()
                    started = time.perf_counter()
                    try:
                        self._record(trial, pool)
                    finally:
                        # torch has set the generators' place on the device to 0, on this stream. A replay on another
                        # one sets it too, and the 0 must not come after that.
                        pool.stream.synchronize()
                    self.capture_seconds = time.perf_counter() - started
            self.pool = pool
            ALIVE.add(self)

    def _record(self, trial, pool):
        self._graph = new_graph(self._generators)
        failed = None
        try:
            with an_empty_graph_is_an_error(), capturing(self._graph, pool):
                try:
                    self.outputs = self._fn(*self.inputs)
                except BaseException as error:
                    failed = error
                    raise
        except BaseException as error:
            if error is not failed and not isinstance(error, UserWarning):  # CUDA has invalidated the capture
                put_torch_right(self._graph, self._generators, pool)
            if failed is None:
                self._not_ended(error)
            elif isinstance(failed, Exception):
                raise trial.error(failed) from failed
            else:
                raise failed from None  # Ctrl-C
        finally:
            del failed  # it holds this frame: while this frame held it, what `fn` has made waited for the collector
        trial.check_outputs(self.outputs)
        if trial.watch is not None and (change := trial.watch.change()) is not None:
            raise trial.rebound_error(change)

    def _not_ended(self, error: BaseException) -> None:
        """What an error at the end of a capture means, whose function has run."""
        if isinstance(error, UserWarning):
            if any(isinstance(t, torch.Tensor) and t.device == self.device for t in tree_leaves(self.outputs)):
                return  # views of its inputs
            raise CaptureError(
                f"{self._name} launches nothing on {self.device}: name the device that it works on as `device`"
            ) from error
        if not isinstance(error, Exception):
            raise error
        raise CaptureError(
            f"{self._name} cannot be captured: {first_line(error)}; it must wait for every stream that it "
            "uses, and no other thread may wait for the whole device meanwhile"
        ) from error


def _tensor_bytes(tree) -> int:
    """Of all tensors in a tree; what is listed twice counts once."""
    tensors = [t for t in tree_leaves(tree) if isinstance(t, torch.Tensor)]
    return sum({t.data_ptr(): t.nbytes for t in tensors}.values())


def _can_be_put_back(output: torch.Tensor) -> bool:
    """Not if it is expanded, so that elements share memory, or made in inference mode."""
    return 0 not in output.stride() and not output.is_inference()


@functools.cache
def _say_once_that_nothing_is_captured(device: torch.device) -> None:
    warn(f"no CUDA graph on {device.type}: the function is run directly, with the same buffers")
