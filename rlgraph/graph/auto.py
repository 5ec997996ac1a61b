"""A function run in the fastest way that is right: as a captured graph, by torch.compile, or operation by operation."""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch
from torch.utils._pytree import tree_map

from rlgraph.errors import CaptureError, GraphError, UsageError, first_line, is_out_of_memory
from rlgraph.graph.capture import capture
from rlgraph.graph.compile import compiled, graph_breaks_allowed
from rlgraph.graph.state import check_tensors, device_of, generators_of, is_count, leaving_no_trace, tensors_of
from rlgraph.graph.uncapturable import HostDraws
from rlgraph.graph.watch import Watch
from rlgraph.graph.words import name_of, warn

T = TypeVar("T")

MOST = 8  # captures of one function


def first_that_works(attempts: Mapping[str, Callable[[], T]]) -> tuple[str, T, str | None]:
    """Try modes in turn.

    Args:
        attempts: what each mode needs to run, in order. The last one's errors are the caller's; of others a
            CaptureError leads on, and of "compile" any error, but where memory has run out.

    Returns:
        The mode, what its attempt gave, and in one line what stopped those before it; None: it was the first.
    """
    reasons, last = [], list(attempts)[-1]
    for mode, attempt in attempts.items():
        try:
            return mode, attempt(), "; ".join(reasons) or None
        except Exception as error:
            expected = isinstance(error, CaptureError) or mode == "compile"
            if mode == last or not expected or is_out_of_memory(error):
                raise
            reasons.append(first_line(error) if mode != "compile" else f"torch.compile failed: {first_line(error)}")
    raise UsageError("there is no mode to try")


def check_that_it_runs(fn: Callable, *inputs: torch.Tensor, state: object, generators: Sequence[torch.Generator]):
    """Call `fn` once, which compiles it, and put back the state, the inputs and the generators."""
    with leaving_no_trace((state, inputs), generators):
        fn(*inputs)


def auto(
    fn: Callable,
    *inputs: torch.Tensor,
    state: object = (),
    generators: Sequence[torch.Generator] = (),
    device: torch.device | str | None = None,
    most: int = MOST,
) -> "Auto":
    """`fn` as a captured graph; where it cannot be one, by torch.compile; where that fails, operation by operation.

    Args:
        fn: a function of tensors; given as `compiled(fn)`, what is captured is the compiled one.
        inputs, state, generators, device: as `rlgraph.graph.capture.capture` takes them.
        most: how many times to capture, see `Auto`.

    Returns:
        An `Auto`, to be called like `fn`. If it is not a graph on a GPU, a warning says why in one line.

    Raises:
        UsageError: an input is not a tensor, or `most` is less than 1.
    """
    return Auto(fn, inputs, state, generators_of(generators), device, most)


class Auto:
    """What `auto` makes: `run(*inputs)` is `fn(*inputs)`, whichever way it runs.

    In every mode inputs are copied, so that `fn` cannot write to the caller's; outputs are copies, the caller's to
    keep; and no gradient flows from one to the other, though `fn` may compute some inside. Random numbers are those of
    as many direct calls, where they come from `generators`.

    **Inputs of another shape or dtype** than those of the first capture get a graph of their own. **A Python value that
    `fn` reads and that has changed,** by the rule of `rlgraph.graph.watch`, means a new capture. After
    `most` captures in all, whatever fits none of the graphs runs operation by operation, and a warning says so once.

    What it needs: tensors on one device, and `state` and `generators` that are complete: a capture runs `fn` a few
    times, to try it, and puts those back. On a CPU nothing is tried, and `fn` is called.

    What it does not do: it does not see what the rule of `rlgraph.graph.watch` leaves out, such as items of arrays, a
    file or the time of day. It does not order calls from several threads or streams.

    Attributes:
        mode: "graph", "compile" or "eager": how it runs.
        reason: one line: what stopped the modes before it, where, and what would help; None on a GPU in mode "graph".
        captures: how many there were.
    """

    def __init__(self, fn, inputs, state, generators, device, most):
        if not is_count(most):
            raise UsageError(f"most must be at least 1 capture, but is {most!r}")
        check_tensors(inputs, fn)
        self._fn, self._name = fn, name_of(fn)
        self._state, self._generators, self._most = tensors_of(state), generators, most
        self.device = device_of(inputs, self._state, device)
        self._graphs, self.captures = {}, 0  # by shapes and dtypes; None: these run directly
        self._run, self._said = _uncompiled(fn), set()
        if not _can_capture(self.device):
            self.mode, self.reason = "eager", f"no CUDA graph on {self.device.type}: operation by operation"
            return
        inputs = tuple(given.detach().to(self.device, copy=True) for given in inputs)
        ways = {
            "graph": lambda: self._capture(inputs),
            "compile": lambda: self._compiled(inputs),
            "eager": lambda: self._run,
        }
        self.mode, way, self.reason = first_that_works(ways)
        if self.mode != "graph":
            self._run = way
            self._say_once("mode", f"{self._name} runs in mode {self.mode}: {self.reason}")

    def __call__(self, *inputs: torch.Tensor):
        """`fn(*inputs)`; its tensors are the caller's.

        Raises:
            UsageError: an input is not a tensor, or is on another device.
        """
        check_tensors(inputs, self._fn)
        for i, given in enumerate(inputs):
            if given.device != self.device:
                raise UsageError(
                    f"input {i} of {self._name} is on {given.device}, but it runs on {self.device}: move it there "
                    f"first, by .to({str(self.device)!r})"
                )
        if self.mode == "graph":
            return self._by_graph(inputs)
        return self._directly(inputs)

    def _directly(self, inputs):
        return _owned(self._run(*(given.detach().clone() for given in inputs)))

    def _by_graph(self, inputs):
        key = _key(inputs)
        change = "there are other shapes or dtypes"
        if self._graphs.get(key) is not None:
            try:
                return _owned(self._graphs[key].replay(*inputs))
            except GraphError:  # nothing has been launched
                change = self._graphs[key].change()
                self._graphs.pop(key).reset()
        if key not in self._graphs:
            self._capture_another(inputs, key, change)
        graph = self._graphs.get(key)
        return self._directly(inputs) if graph is None else _owned(graph.replay(*inputs))

    def _capture_another(self, inputs, key, change):
        if self.captures >= self._most:
            self._say_once(
                "most",
                f"{self._name} was captured {self._most} times, the most allowed, and now {change}: what fits none of "
                "its graphs runs operation by operation; pad inputs to a few shapes, or keep in tensors what changes",
            )
            return
        try:
            self._capture(inputs)
        except CaptureError as error:
            self._graphs[key] = None
            self._say_once(key, f"{self._name} runs operation by operation for some inputs: {first_line(error)}")

    def _capture(self, inputs):
        self.captures += 1
        options = {"state": self._state, "generators": self._generators, "device": self.device}
        self._graphs[_key(inputs)] = capture(self._fn, *inputs, **options)

    def _compiled(self, inputs):
        plain = self._run
        with graph_breaks_allowed():
            way = compiled(plain)
        once = {"state": self._state, "generators": self._generators}
        before, draws = Watch(plain), HostDraws(on_gpu=self.device.type == "cuda")
        try:
            for run in (plain, way):
                call = functools.partial(check_that_it_runs, run, *inputs, **once)
                call()
                if run is plain and (source := draws.drawn_by(call)) is not None:
                    raise CaptureError(f"it draws others than those of {source}")
        finally:
            before.put_back()
        return way

    def _say_once(self, about, line):
        if about not in self._said:
            self._said.add(about)
            warn(line)


def _can_capture(device) -> bool:
    return device.type == "cuda"


def _key(inputs):
    return tuple((given.shape, given.dtype) for given in inputs)


def _owned(outputs):
    return tree_map(lambda t: t.detach().clone() if isinstance(t, torch.Tensor) else t, outputs)


def _uncompiled(fn: Callable) -> Callable:
    """The function itself, of one that was given compiled: a whole one refuses what parts would take."""
    return inspect.getattr_static(fn, "_torchdynamo_orig_callable", fn)
