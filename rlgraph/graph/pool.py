"""Any batch size from a few captured graphs: each call is served by the smallest one that covers it."""

import bisect
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

import torch
from torch.utils._pytree import tree_leaves, tree_map

from rlgraph.devices import torch_device
from rlgraph.errors import UsageError
from rlgraph.graph.capture import Graph, capture
from rlgraph.graph.recording import pool_bytes
from rlgraph.graph.state import check_tensors, generators_of, is_count, leaving_no_trace, own_generator, tensors_of
from rlgraph.graph.words import name_of

SIZES = tuple(2**n for n in range(11))  # 1 to 1024


class GraphPool:
    """`pool(*inputs)` is `fn(*inputs)` for any number of rows, by the smallest captured graph that covers them.

    Args:
        fn: a function of tensors with one row a sample (dimension 0), all with the same number of rows. It returns
            tensors of as many rows, in any nesting of tuples, lists and dicts, and computes each from its own row.
        sizes: the batch sizes to capture.
        state, generators: as `rlgraph.graph.capture.capture` takes them.
        device: where the graphs live, by a name in `rlgraph.devices`; that of the first input of the first call by
            default. Inputs are copied there.
        most: how many graphs to keep; when there is one more, the one that has not been used for longest is released.
            None: all of them. Each size, and each set of row shapes and dtypes, is a graph of its own.

    A graph is captured when it is first needed, or by `capture`. Rows beyond those of the call are zeros: never what an
    earlier call left there, and a row of zeros is false in a mask. The results are copies, the caller's to keep, since
    graphs of all sizes share one piece of memory. Calls may come from several threads and streams: they take turns.

    What it needs: what a capture needs, and rows that do not depend on each other. A sum or a mean over rows, in what
    `fn` returns or in what it updates in place, would count the added rows too; unless `fn` takes one more input, given
    as `torch.ones(B, dtype=torch.bool)`, and leaves out the rows where it is False. Replays after each capture, put
    back again, try whether other added rows make a difference, which is an error. State of single rows, like that of a
    recurrent policy, is an input and an output. Random numbers are drawn for the added rows as well.

    What it does not do: it keeps no gradients, finds no dependence that copies of the first rows do not show (they may
    all be zero, like those added; a maximum hides them; `len(x)` is the graph's size whatever they are; less than a
    thousandth of a column's largest result is taken for rounding), and does not return the very bits of `fn(*inputs)`,
    but those of `fn` at the size of the graph: a matrix product may round otherwise there.

    Where there is no CUDA device it calls `fn` with the same added rows.

    Attributes:
        graphs: what is captured, the one that has not been used for longest first: Graphs by size, row shapes and
            dtypes.
        evicted: how many graphs were released because of `most`.
    """

    def __init__(
        self,
        fn: Callable,
        sizes: Sequence[int] = SIZES,
        *,
        state: object = (),
        generators: Sequence[torch.Generator] = (),
        device: torch.device | str | None = None,
        most: int | None = None,
    ):
        check_tensors((), fn)
        self.sizes = _checked_sizes(sizes)
        if most is not None and not is_count(most):
            raise UsageError(f"most must be at least 1 graph, but is {most!r}")
        self.graphs: OrderedDict[tuple, Graph] = OrderedDict()
        self.evicted = 0
        self.device = None if device is None else torch_device(device)
        self._fn, self._name = _without_gradients(fn), name_of(fn)
        self._state, self._generators, self._most = tensors_of(state), generators_of(generators), most
        self._turn = threading.RLock()
        self._last_stream = None

    def __call__(self, *inputs: torch.Tensor):
        """`fn(*inputs)`, for inputs [B, ...] with 1 <= B <= the largest of `sizes`.

        Returns:
            What `fn` returns, each tensor [B, ...], copied.

        Raises:
            UsageError: an input that is no tensor, no rows, more than the largest size, inputs that differ in their
                number of rows, or a function that mixes rows, does not return as many as it is given, or draws from or
                updates what was not named.
            CaptureError: `fn` does something that a graph cannot hold.
            GraphError: a Python value that `fn` reads has changed since a graph was captured; `reset` releases them.
        """
        rows = self._rows(inputs)
        size = self.sizes[bisect.bisect_left(self.sizes, rows)]
        with self._turn:
            self._begin(inputs)
            graph = self._graph(size, inputs)
            _fill(graph.inputs, inputs)
            outputs = graph.replay()
            return tree_map(lambda output: self._first(rows, size, output), outputs)

    def capture(self, *inputs: torch.Tensor) -> None:
        """Capture every size now, for inputs with rows like these (one row or more).

        The largest comes first, so that the others find room in its memory.

        Raises:
            UsageError: `most` is less than the number of sizes, or the inputs are not as a call takes them.
            CaptureError: as a call.
        """
        if self._most is not None and self._most < len(self.sizes):
            raise UsageError(f"{len(self.sizes)} sizes need as many graphs, but `most` is {self._most}")
        self._rows(inputs)
        with self._turn:
            self._begin(inputs)
            for size in reversed(self.sizes):
                self._graph(size, [given[:size] for given in inputs])

    def memory(self) -> int:
        """Bytes held on the device: what torch has reserved for the graphs together, and their inputs.

        It does not count what CUDA itself keeps for a captured graph, which torch cannot measure.
        """
        graphs = list(self.graphs.values())
        inputs = sum(buffer.nbytes for graph in graphs for buffer in graph.inputs)
        if not any(graph.captured for graph in graphs):
            return inputs
        return inputs + pool_bytes(graphs[0].pool)

    def report(self) -> str:
        """A line for the pool and one for each graph: rows, inputs, replays, time to capture."""
        lines = [
            f"{self._name}: {len(self.graphs)} graphs on {self.device}, {self.memory() / 2**20:.1f} MiB, "
            f"{self.evicted} evicted"
        ]
        for (size, rows), graph in sorted(self.graphs.items(), key=lambda item: item[0][0]):
            shapes = ", ".join(f"{str(dtype).removeprefix('torch.')}{[size, *shape]}" for shape, dtype in rows)
            how = f"captured in {graph.capture_seconds:.3f} s" if graph.captured else "not captured"
            lines.append(f"  {size:>6} rows: {shapes}; {graph.replays} replays, {how}")
        return "\n".join(lines)

    def reset(self) -> None:
        """Release all graphs and their memory. The next call captures anew."""
        with self._turn:
            while self.graphs:
                self.graphs.popitem()[1].reset()

    def _rows(self, inputs) -> int:
        check_tensors(inputs, self._fn)
        counts = [given.shape[0] if given.dim() else None for given in inputs]
        if not counts or None in counts or len(set(counts)) > 1:
            shapes = ", ".join(str(list(given.shape)) for given in inputs)
            raise UsageError(f"{self._name} takes inputs with one number of rows, but was given {shapes or 'none'}")
        if not 1 <= counts[0] <= self.sizes[-1]:
            raise UsageError(f"{self._name} was given {counts[0]} rows: from 1 to {self.sizes[-1]}, its largest size")
        return counts[0]

    def _graph(self, size, inputs) -> Graph:
        key = size, tuple((tuple(given.shape[1:]), given.dtype) for given in inputs)
        if key not in self.graphs:
            self.graphs[key] = self._captured(size, inputs)
            if self._most is not None and len(self.graphs) > self._most:
                # Only now: memory whose last graph is gone cannot be shared any more.
                self.graphs.popitem(last=False)[1].reset()
                self.evicted += 1
        self.graphs.move_to_end(key)
        return self.graphs[key]

    def _captured(self, size, inputs) -> Graph:
        examples = [given.new_zeros((size, *given.shape[1:]), device=self.device) for given in inputs]
        _fill(examples, inputs)
        pool = next(iter(self.graphs.values())).pool if self.graphs else None
        graph = capture(
            self._fn, *examples, state=self._state, generators=self._generators, device=self.device, pool=pool
        )
        try:
            self._check_rows(graph, size, inputs)
        except BaseException:
            graph.reset()
            raise
        graph.replays = 0
        return graph

    def _check_rows(self, graph: Graph, size: int, inputs) -> None:
        """Raises UsageError if what is in the added rows makes a difference: zeros, or rows like those given."""
        if size == 1:
            return
        rows = min(len(inputs[0]), size - 1)
        given = [each[:rows] for each in inputs]
        start = [tensor.detach().clone() for tensor in self._state]
        results, state = self._tried(graph, size, given, 0)
        for copied in {1, rows}:  # copies of several rows can cancel in a sum; one row may be zero where others are not
            other_results, other_state = self._tried(graph, size, given, copied)
            same_results = all(map(_close, results, other_results))
            if not (same_results and all(map(_close, state, other_state, start))):
                self._check_repeats(graph, size, given)
                raise UsageError(
                    f"{self._name} mixes rows: what is in the rows that are added changes its "
                    f"{'state' if same_results else 'results'}; leave them out by one more input, "
                    "torch.ones(B, dtype=torch.bool), which is False there, or eval() a BatchNorm"
                )

    def _check_repeats(self, graph: Graph, size: int, given) -> None:
        """Raises UsageError if the same rows give other results the second time: then it is not the added ones."""
        (first, _), (second, _) = (self._tried(graph, size, given, 0) for _ in range(2))
        if not all(map(_close, first, second)):
            raise UsageError(
                f"{self._name} gives other results for the same inputs: name in `generators` what it draws from, "
                "and in `state` what it updates in place"
            )

    def _tried(self, graph: Graph, size: int, given, copied: int) -> tuple[list, list]:
        """Results and state of a replay, with rows of zeros added, or copies of as many of the given as `copied` says.

        Copies, since other numbers could be what the function cannot take, such as an index beyond a table. A mask is
        False in the added rows, as in a call.
        """
        rows = len(given[0])
        # With torch's own generator, which needs no naming: else draws would differ, and look like a mixture.
        with leaving_no_trace((self._state, graph.inputs), (*self._generators, own_generator(graph.device))):
            _fill(graph.inputs, given)
            filled = [buffer for buffer in graph.inputs if copied and buffer.dtype != torch.bool]
            if filled:
                added = torch.arange(1, size - rows + 1, device=graph.device) % copied
                source = _fullest_first(filled, rows)[added]  # of several from the second on: the first is tried alone
            for buffer in filled:
                buffer[rows:] = buffer[source]
            outputs = tree_map(lambda output: self._first(rows, size, output), graph.replay())
            state = [tensor.detach().clone() for tensor in self._state]
        return [output for output in tree_leaves(outputs) if isinstance(output, torch.Tensor)], state

    def _first(self, rows, size, output):
        if not isinstance(output, torch.Tensor):
            return output
        if output.dim() == 0 or output.shape[0] != size:
            raise UsageError(f"{self._name} must return a row for each of {size}, but returns {list(output.shape)}")
        return output[:rows].clone()

    def _begin(self, inputs):
        if self.device is None:
            self.device = inputs[0].device
        if self.device.type != "cuda":
            return
        stream = torch.cuda.current_stream(self.device)
        if self._last_stream not in (None, stream):  # where a graph may be at work in the memory that this one takes
            stream.wait_stream(self._last_stream)
        self._last_stream = stream


def _without_gradients(fn) -> Callable:
    @torch.no_grad()
    def run(*inputs):
        return fn(*inputs)

    run.__name__, run.__wrapped__ = name_of(fn), fn  # what a capture looks at, to notice changes
    return run


def _checked_sizes(sizes) -> list[int]:
    if not isinstance(sizes, Iterable) or not (given := list(sizes)) or not all(map(is_count, given)):
        raise UsageError(f"sizes must be batch sizes, whole numbers of 1 or more, but are {sizes!r}")
    return sorted(set(given))


def _fullest_first(buffers, rows: int) -> torch.Tensor:
    """The given rows, those with the fewest zeros first: a copy of a row of zeros would show nothing."""
    counts = [buffer[:rows, None].bool().flatten(1).sum(1) for buffer in buffers]
    return sum(counts).argsort(descending=True, stable=True)


def _close(before: torch.Tensor, after: torch.Tensor, start: torch.Tensor | None = None) -> bool:
    """Up to what sums of floats in another order may differ by.

    For each column of results by itself, and for state by how far it has come from `start`: else a large column, or a
    large value that is changed little, would hide a difference.
    """
    if before.is_complex():
        parts = (None if each is None else torch.view_as_real(each.resolve_conj()) for each in (before, after, start))
        return _close(*parts)
    if not before.is_floating_point() or not before.numel():
        return torch.equal(before, after)
    eps = torch.finfo(before.dtype).eps
    before, after = before.double(), after.double()
    change = _size(before).amax(0) if start is None else _size(before - start.double()).max()
    slack = 1e-3 * change + 8 * eps * _size(before).max() + 1e-12
    same = (before == after) | (before.isnan() & after.isnan()) | ((before - after).abs() <= slack)
    return bool(same.all())


def _size(values: torch.Tensor) -> torch.Tensor:
    return values.nan_to_num(posinf=0, neginf=0).abs()


def _fill(buffers, inputs) -> None:
    for buffer, given in zip(buffers, inputs):
        # From the host it is waited for: its owner may write the next observations to it at once.
        buffer[: len(given)].copy_(given.detach(), non_blocking=given.is_cuda)
        buffer[len(given) :].zero_()
