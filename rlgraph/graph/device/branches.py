"""Independent work beside each other: in a captured graph, nodes that no edge orders."""

import contextlib
import threading
from collections.abc import Callable, Iterator

import torch
from torch.utils._pytree import tree_leaves

from rlgraph.errors import UsageError
from rlgraph.graph.recording import PRIORITY, STREAMS, streams_of

MOST_STREAMS = 8  # beside the current one


def branches(*functions: Callable, device: torch.device | str | None = None) -> list:
    """Run functions beside each other, and go on when all are done.

    The first runs on the current stream, the others on streams forked from it; they are joined at the end. Inside
    `capture` the forks become parallel branches of the graph; outside it the same happens launch by launch, where the
    host is seldom fast enough to keep two streams busy.

    Args:
        functions: without arguments. More than nine share streams; inside a capture, nested ones count together.
        device: whose streams; the current CUDA device by default, the CPU where there is none.

    What it needs: work that is independent: what one function writes, no other reads or writes. What they read was made
    before the call, and is held until after it. It gains where each branch leaves most of the device idle (small
    batches), and costs two events a branch.

    What it does not do: it does not look for conflicts. Graphs with branches share the streams of the branches, and
    with them cuBLAS's workspaces, so they must not replay at the same time. Without CUDA the functions run one after
    the other.

    Random numbers are the same as one after the other: the host gives each draw its place in a generator's sequence
    when it is launched, in the order of the functions. A counter on the device (rlgraph.kernels) must not be in two
    branches: they would race for it. Work inside a branch may fork again; autograd runs the backward of a branch on the
    branch's stream.

    Returns:
        What each function returned, in their order, ready for use on the current stream.

    Raises:
        UsageError: something given is no function.
    """
    for function in functions:
        if not callable(function):
            kind = type(function).__name__
            raise UsageError(f"branches(f, g) takes functions, not a value of type {kind}; write lambda: actor(obs)")
    device = _device(device)
    if device.type != "cuda":
        return [function() for function in functions]
    current = torch.cuda.current_stream(device)
    with _streams(device, current, len(functions) - 1) as beside:
        streams = [current, *beside]
        for stream in beside:
            stream.wait_stream(current)
        results = []
        try:
            for i, function in enumerate(functions):
                with torch.cuda.stream(streams[i % len(streams)]):
                    results.append(function())
        finally:  # joined after an error too: a capture with loose ends could not even be ended
            for stream in beside:
                current.wait_stream(stream)
    _used_on(current, results)
    return results


def _device(device) -> torch.device:
    """With its number: a thread keeps streams for each."""
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    return torch.device("cuda", torch.cuda.current_device()) if device == torch.device("cuda") else device


def _used_on(current: torch.cuda.Stream, results: list) -> None:
    """A branch's tensors belong to its stream: let the allocator know that another one uses them."""
    for tensor in tree_leaves(results):
        if isinstance(tensor, torch.Tensor) and tensor.is_cuda:
            tensor.record_stream(current)


class _OfThread(threading.local):
    """A thread's streams for each device and priority, and those that calls under way have taken.

    The same streams in every call: torch keeps memory and a workspace for matrix products for each.
    """

    def __init__(self):
        self.made: dict[tuple[torch.device, int], list] = {}
        self.taken: list[torch.cuda.Stream] = []


_of_thread = _OfThread()


@contextlib.contextmanager
def _streams(device: torch.device, current: torch.cuda.Stream, count: int) -> Iterator[list[torch.cuda.Stream]]:
    """Up to `count` streams that nobody up the call stack is on."""
    busy = [current, *_of_thread.taken]
    free = [stream for stream in _candidates(device, current.priority) if stream not in busy]
    chosen = free[: max(0, min(count, MOST_STREAMS))]
    before = list(_of_thread.taken)
    _of_thread.taken += [current, *chosen]
    try:
        yield chosen
    finally:
        _of_thread.taken[:] = before


def _candidates(device: torch.device, priority: int) -> list[torch.cuda.Stream]:
    """Of the current stream's priority: inside a capture none that another thread may be launching on.

    There autograd wants the streams of a warm-up again, which are the same for all captures, as those take turns.
    """
    if priority == PRIORITY:
        return streams_of(device).branches
    made = _of_thread.made
    if (device, priority) not in made:
        streams = (torch.cuda.Stream(device, priority=priority) for _ in range(STREAMS))
        made[device, priority] = list(dict.fromkeys(streams))  # others may ask for some meanwhile
    return made[device, priority]
