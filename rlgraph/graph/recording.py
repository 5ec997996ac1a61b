"""Recording into a CUDA graph: whose turn it is, on which stream, in which memory, and what torch needs after it."""

import contextlib
import functools
import gc
import threading
import warnings
import weakref
from collections.abc import Sequence
from typing import NamedTuple

import torch

STREAMS = 32  # torch hands out that many of each priority in turns
PRIORITY = -1  # of the streams that are captured on; torch's default is 0
CAPTURED_ON = 24  # of the STREAMS, by graphs; the others are for branches inside them

# One capture at a time in a process, from its warm-up on: that sets a debug mode which the whole process shares.
PREPARING = threading.RLock()
# While one is recorded, no other thread may replay or release a graph of ours: releasing waits for the whole device,
# which ends a capture in any thread, and before torch 2.12 a capture holds the default generator, which replays use.
RECORDING = threading.RLock()
# Captured graphs, to know their streams.
ALIVE = weakref.WeakSet()
# Graphs whose capture CUDA has ended: before torch 2.13 the allocator of pinned memory goes on reading them.
_FAILED = []


class MemoryPool(NamedTuple):
    """Device memory that graphs share, and the stream they are captured on: torch keeps each stream's memory apart."""

    handle: tuple[int, int]  # torch's own
    stream: torch.cuda.Stream


class Streams(NamedTuple):
    """torch's of one device and PRIORITY, apart: a branch on another graph's stream would share its workspace."""

    captures: list[torch.cuda.Stream]
    branches: list[torch.cuda.Stream]


@functools.cache
def streams_of(device: torch.device) -> Streams:
    """Args: device: with its index."""
    asked = (torch.cuda.Stream(device, priority=PRIORITY) for _ in range(4 * STREAMS))  # another thread may ask, too
    streams = {stream.cuda_stream: stream for stream in asked}
    streams = [streams[address] for address in sorted(streams)]
    return Streams(streams[:CAPTURED_ON], streams[CAPTURED_ON:])


def stream_of_its_own(device: torch.device) -> torch.cuda.Stream:
    """A stream that no other live graph was captured on, if there is one.

    Captures on one stream share its cuBLAS workspace, so their graphs would disturb each other if they ran at once.
    And it is none of those that `torch.cuda.Stream()` hands out, again and again: what another thread launched on it
    during the capture would be captured too.
    """
    pools = [graph.pool for graph in ALIVE]
    taken = {pool.stream for pool in pools if pool is not None}  # None: another thread has reset it
    streams = streams_of(device).captures
    return next((stream for stream in streams if stream not in taken), streams[0])


def new_graph(generators: Sequence[torch.Generator]) -> torch.cuda.CUDAGraph:
    """To be captured; its replays draw from the generators."""
    graph = torch.cuda.CUDAGraph(keep_graph=True)  # what was captured stays readable
    for generator in generators:
        graph.register_generator_state(generator)
    return graph


def capturing(graph: torch.cuda.CUDAGraph, pool: MemoryPool):
    # A capture of mode "thread_local" is not broken by what other threads allocate.
    return torch.cuda.graph(graph, pool=pool.handle, stream=pool.stream, capture_error_mode="thread_local")


@contextlib.contextmanager
def an_empty_graph_is_an_error():
    """torch warns, and every replay would do nothing."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="The CUDA Graph is empty")
        yield


@contextlib.contextmanager
def no_garbage_collection():
    """What a collection would release here could end the capture: graphs of others, memory on the device."""
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def put_torch_right(failed: torch.cuda.CUDAGraph, generators: Sequence[torch.Generator], pool: MemoryPool) -> None:
    """Undo what a capture that CUDA has invalidated leaves behind in torch before 2.13 (pytorch #180395).

    The allocator takes the capture for one under way, and fails at the next `empty_cache`. So do the generators,
    and refuse to draw, until a capture ends well.
    """
    if torch.__version__ < "2.13":
        _FAILED.append(failed)
    with contextlib.suppress(RuntimeError):  # torch has done it itself
        torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool.handle)
        torch._C._cuda_releasePool(torch.cuda.current_device(), pool.handle)
    with capturing(new_graph(generators), MemoryPool(torch.cuda.graph_pool_handle(), pool.stream)):
        torch.zeros((), device="cuda")  # torch warns of an empty graph


def pool_bytes(pool: MemoryPool) -> int:
    """What torch's allocator has reserved for a memory pool."""
    segments = torch.cuda.memory_snapshot()
    return sum(segment["total_size"] for segment in segments if tuple(segment["segment_pool_id"]) == pool.handle)
