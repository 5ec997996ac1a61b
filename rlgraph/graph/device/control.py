"""Loops and branches that the device decides on: a body that runs while, or if, a value on the device is not zero."""

from collections.abc import Callable, Sequence

import torch

from rlgraph.errors import UsageError
from rlgraph.graph.bindings import check_driver
from rlgraph.graph.capture import Graph
from rlgraph.graph.device import nodes
from rlgraph.graph.recording import RECORDING
from rlgraph.graph.state import check_tensors, is_count, tensors_of

Body = Callable | Sequence["Callable | Conditional"]


def while_graph(
    body: Body,
    condition: torch.Tensor,
    *,
    state: object = (),
    most: int | None = None,
    watch: bool = True,
) -> "Conditional":
    """A loop in one launch: `while condition: body()`, with no host in it.

    The condition is looked at before every iteration, the first one too: set it before `replay`.

    Args:
        body: a function without arguments that updates tensors in place, as `capture` takes it; what it returns is
            dropped. Or a sequence of such functions and of other loops and branches, which run one after the other.
        condition: [] bool or int32 on the device, which the body writes. The loop goes on while it is not zero.
        state: every tensor that the functions update in place, see `capture`.
        most: iterations of one replay at most. None: as many as it takes; a body that never clears the condition
            then keeps the device busy until the process is killed.
        watch: whether replays notice that Python values which the functions read have changed, see `capture`.

    What it needs: a driver for CUDA 12.4 or later and the package cuda-bindings. It costs a few microseconds an
    iteration: worth it around a training iteration, not around a step of an environment. Each function is warmed up
    and captured by itself, and those of a loop or branch inside before those around it, so what one leaves to another
    must be in a tensor made beforehand, and must already make sense there (an index: not outside).

    What it does not do: torch's generators do not advance inside, so drawing from one is an error; use draws that count
    on the device (rlgraph.kernels's: Philox of a key and a counter). It does not stop for Ctrl-C, and has no outputs.

    Raises:
        CaptureError: a function does something that a graph inside another one cannot hold.
        GraphError: the driver or cuda-bindings does not offer it; the message says what to install.
        UsageError: the condition is no such tensor, or a number makes no sense.
    """
    return Conditional(body, condition, state, most, loop=True, watch=watch)


def if_graph(predicate: torch.Tensor, body: Body, *, state: object = (), watch: bool = True) -> "Conditional":
    """A branch in one launch: `if predicate: body()`, decided by the device.

    Arguments, needs and errors are those of `while_graph`. The predicate is looked at before the body, and may be
    written by whatever runs before it.
    """
    return Conditional(body, predicate, state, None, loop=False, watch=watch)


class Decided:
    """Functions that run as often as the device decides; subclasses say by which means of CUDA.

    Without CUDA the same object does the same by a loop on the host.

    Attributes:
        captured: True if `replay` launches a CUDA graph.
        replays: how often `replay` has run; as a part of another one it does not count.
    """

    NEEDS: tuple[int, str]  # the oldest CUDA, and for what
    MADE_BY: str  # the public functions

    def __init__(self, body, condition, state, most, loop, watch):
        _check(condition, most)
        self.device = condition.device
        self._condition, self._loop = condition, loop
        self._state = [*tensors_of(state), condition]  # warming up writes that too
        self._watches = watch
        self._most = nodes.NEVER if most is None else most
        self._count = torch.zeros((), dtype=torch.int64, device=self.device)
        self.captured = condition.is_cuda
        self.replays = 0
        if self.captured:
            check_driver(*self.NEEDS)
        self._parts = []
        for part in list(body) if isinstance(body, Sequence) else [body]:
            self._parts.append(self._part(part, self._parts))
        if not self._parts:
            raise UsageError("the body of a loop or a branch needs at least one function")

    def replay(self) -> None:
        """Run it: one launch, which is not waited for."""
        self.check_unchanged()
        self.replays += 1
        if not self.captured:
            self._run_on_host()
            return
        with RECORDING, torch.cuda.device(self.device):
            self._graph.launch()

    def check_unchanged(self) -> None:
        """Raises GraphError if a Python value that a function reads has changed; `replay` does it."""
        for part in self._all_parts():
            part.check_unchanged()

    def _all_parts(self) -> list:
        return self._parts

    def iterations(self) -> int:
        """How often the body ran in the last replay; that of a part, when it was last come to.

        Waits for the current stream, which must be the one that was replayed on.
        """
        return int(self._count)

    def _part(self, part, before: list) -> Graph:
        """A function captured, to run after the parts `before` it."""
        if isinstance(part, Graph):
            raise UsageError("a body holds functions, not what `capture` made of them: give the function itself")
        if isinstance(part, Decided):
            raise UsageError(f"{type(part).MADE_BY} makes no part of what {self.MADE_BY} makes: give functions")
        check_tensors((), part)
        # They run one after the other, in the order of their captures: one piece of memory will do.
        pool = next((other.pool for other in before if isinstance(other, Graph)), None)
        return Graph(part, (), self._state, (), self.device, pool, 2, part=True, watch=self._watches)

    def _build(self) -> None:
        """Make what `replay` launches; the last thing that a constructor does."""
        if self.captured:
            with RECORDING, torch.cuda.device(self.device):
                self._graph = self._built()

    def _built(self) -> nodes.Handmade:
        raise NotImplementedError

    def _run_on_host(self) -> None:
        count = 0
        while bool(self._condition) and count < (self._most if self._loop else 1):
            for part in self._parts:
                if isinstance(part, Decided):
                    part._run_on_host()
                else:
                    part.replay()
            count += 1
        self._count.fill_(count)


class Conditional(Decided):
    """What `while_graph` and `if_graph` make: a conditional node, which can be part of another one."""

    NEEDS = nodes.CONDITIONAL_NODES, "a loop or a branch inside a graph"
    MADE_BY = "while_graph or if_graph"

    def __init__(self, body, condition, state, most, loop, watch):
        super().__init__(body, condition, state, most, loop, watch)
        self._build()

    def _part(self, part, before) -> "Graph | Conditional":
        if not isinstance(part, Conditional):
            return super()._part(part, before)
        if part.device != self.device:
            raise UsageError(f"a loop or a branch on {part.device} cannot be part of one on {self.device}")
        return part

    def _built(self) -> nodes.Handmade:
        made = nodes.Handmade()
        self._add_to(made.graph, None)
        made.instantiate()
        return made

    def _add_to(self, graph, after):
        """Add the nodes to a graph, after one of its nodes (None: at its beginning). Returns the last one."""
        arguments = self._condition, self._count, self._most, self._loop
        node, body, close = nodes.add_conditional(graph, after, *arguments)
        last = None
        for part in self._parts:
            # CUDA takes no conditional node inside a child graph: those are added to the body itself.
            nested = isinstance(part, Conditional)
            last = part._add_to(body, last) if nested else nodes.add_child(body, last, part.raw)
        close(last)
        return node


def _check(condition: torch.Tensor, most: int | None) -> None:
    if not isinstance(condition, torch.Tensor):
        raise UsageError(f"a condition is a tensor, one bool or int32 on the device, not a {type(condition).__name__}")
    if condition.numel() != 1 or condition.dtype not in (torch.bool, torch.int32):
        kind = f"{condition.dtype}{list(condition.shape)}"
        raise UsageError(f"a condition is one bool or int32 on the device, not {kind}")
    if most is not None and not is_count(most):
        raise UsageError(f"most must be at least 1, but is {most!r}")
