"""Graphs that the device launches: one that launches itself again, and one that is started beside another."""

from collections.abc import Callable, Sequence

import torch

from rlgraph.errors import GraphError
from rlgraph.graph.device import nodes
from rlgraph.graph.device.control import Decided


def relaunching(
    body: Callable | Sequence[Callable],
    condition: torch.Tensor,
    *,
    state: object = (),
    most: int | None = None,
    watch: bool = True,
) -> "Relaunching":
    """A loop in one launch, as `while_graph`: a graph whose last kernel launches it again while the condition holds.

    Such a launch is called a tail launch: it begins when the graph has ended. The first one is decided on before the
    body, by a graph of one kernel. What is launched after `replay` on the same stream waits for the last iteration.

    Args:
        body: a function without arguments, as `while_graph` takes it, or a sequence of them, which run one after the
            other; loops and branches are no part of it.
        condition, state, most, watch: as for `while_graph`.

    What it needs: a driver for CUDA 12.0 or later and the package cuda-bindings. The body may hold kernels, and copies
    and fills within the device, all of one device, and no conditional nodes.

    What it does not do: what `while_graph` does not do. Beside that, a launch that the device refuses ends the loop
    silently; `iterations()` raises then.

    Raises:
        CaptureError, UsageError: as `while_graph`.
        GraphError: the driver or cuda-bindings does not offer it, or CUDA does not let kernels launch this body; the
            message says why.
    """
    return Relaunching(body, condition, state, most, watch)


def launch_beside(
    predicate: torch.Tensor,
    aside: Callable | Sequence[Callable],
    body: Callable,
    *,
    first: Callable | None = None,
    state: object = (),
    watch: bool = True,
) -> "Beside":
    """In one launch: `first()`; if the predicate holds, start `aside()` and do not wait for it; `body()`.

    A kernel launches the graph of `aside`, "fire and forget". So an evaluation can run beside a training iteration,
    now and then, with no host that decides. The whole is over when both are: what is launched after `replay` on the
    same stream waits for `aside` too.

    Args:
        predicate: [] bool or int32 on the device, which `first` may write.
        aside: a function without arguments, or several, one after the other. What it reads or writes, `body` must not
            write, nor may it write what `body` reads. That is not checked; `first` is the place to copy it.
        body: a function without arguments, which runs in any case.
        first: another one, which runs before the predicate is looked at.
        state, watch: as for `while_graph`.

    What it needs, what it does not do, errors: those of `relaunching`; the limits on what a graph may hold are for
    `aside` alone. Without CUDA `aside` runs before `body`.
    """
    return Beside(first, predicate, aside, body, state, watch)


class _Launching(Decided):
    """What is common: launches by a kernel, which can fail on the device."""

    NEEDS = nodes.DEVICE_LAUNCH, "a launch from the device"

    def __init__(self, body, condition, state, most, loop, watch):
        super().__init__(body, condition, state, most, loop, watch)
        self._error = torch.zeros((), dtype=torch.int32, device=self.device)

    def iterations(self) -> int:
        """How often the body ran in the last replay. Waits for it.

        Raises:
            GraphError: the device refused a launch.
        """
        count = super().iterations()
        if code := int(self._error):
            raise GraphError(f"cudaGraphLaunch failed on the device: {nodes.error_name(code)}")
        return count

    def _add_launch(self, graph, after, launched, stream, when):
        arguments = launched, stream, self._condition, self._count, self._most, when, self._error
        return nodes.add_launch(graph, after, *arguments)


class Relaunching(_Launching):
    """What `relaunching` makes."""

    MADE_BY = "relaunching"

    def __init__(self, body, condition, state, most, watch):
        super().__init__(body, condition, state, most, True, watch)
        self._build()

    def _built(self) -> nodes.Handmade:
        self._again = nodes.Handmade()
        last = _add_children(self._again.graph, None, self._parts)
        self._add_launch(self._again.graph, last, 0, nodes.TAIL, nodes.AFTER_ITERATION)
        again = self._again.instantiate_for_kernels()
        before = nodes.Handmade()
        self._add_launch(before.graph, None, again, nodes.TAIL, nodes.BEFORE_LOOP)
        before.instantiate()
        return before


class Beside(_Launching):
    """What `launch_beside` makes. `iterations()` says whether `aside` ran in the last replay, 1 or 0."""

    MADE_BY = "launch_beside"

    def __init__(self, first, predicate, aside, body, state, watch):
        super().__init__(aside, predicate, state, None, False, watch)
        # In memory of their own: `aside` runs at the same time.
        self._first = [] if first is None else [self._part(first, [])]
        self._body = [self._part(body, self._first)]
        self._build()

    def _all_parts(self) -> list:
        return [*self._first, *self._parts, *self._body]

    def _built(self) -> nodes.Handmade:
        self._aside = nodes.Handmade()
        _add_children(self._aside.graph, None, self._parts)
        aside = self._aside.instantiate_for_kernels()
        whole = nodes.Handmade()
        last = _add_children(whole.graph, None, self._first)
        last = self._add_launch(whole.graph, last, aside, nodes.FIRE_AND_FORGET, nodes.AS_IF)
        _add_children(whole.graph, last, self._body)
        whole.instantiate()
        return whole

    def _run_on_host(self) -> None:
        for part in self._first:
            part.replay()
        super()._run_on_host()
        for part in self._body:
            part.replay()


def _add_children(graph, after, parts):
    """Add captured parts to a graph, one after the other. Returns the last node."""
    for part in parts:
        after = nodes.add_child(graph, after, part.raw)
    return after
