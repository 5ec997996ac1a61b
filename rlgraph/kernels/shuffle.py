"""A random order of rows for every epoch, without a sort, and the moments of a quantity over each minibatch."""

import torch
import triton
import triton.language as tl

from rlgraph.errors import UsageError
from rlgraph.kernels.build import cdiv, drawn_key

TILE = 1024  # rows whose moments are taken together


@triton.jit
def _hashed(x, key):
    """32 bits mixed with a key (the last steps of MurmurHash3; Appleby, 2011)."""
    x = (x ^ key) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def _rounds(left, right, a, b, c, d, BITS: tl.constexpr):
    """Four rounds of a Feistel network (Luby & Rackoff, 1988), one for each key."""
    high: tl.constexpr = (1 << (BITS - BITS // 2)) - 1
    low: tl.constexpr = (1 << BITS // 2) - 1
    left ^= _hashed(right, a) & high
    right ^= _hashed(left, b) & low
    left ^= _hashed(right, c) & high
    right ^= _hashed(left, d) & low
    return left, right


@triton.jit
def _permuted(x, a, b, c, d, e, f, g, h, BITS: tl.constexpr):
    """A bijection of numbers of BITS bits, another one for other keys."""
    half: tl.constexpr = BITS // 2
    left, right = x >> half, x & ((1 << half) - 1)
    left, right = _rounds(left, right, a, b, c, d, BITS)
    left, right = _rounds(left, right, e, f, g, h, BITS)
    return (left << half) | right


@triton.jit
def _shuffled(key_ptr, time_ptr, x_ptr, order_ptr, moments_ptr, N, M, BITS: tl.constexpr, TILE: tl.constexpr):
    """A tile of one minibatch: which rows it has, and the mean of x over them and its sum of squared distances."""
    tile, minibatch = tl.program_id(0), tl.program_id(1)
    at = tile * TILE + tl.arange(0, TILE)
    here = at < M
    epoch = minibatch // (N // M)
    key, time = tl.load(key_ptr), tl.load(time_ptr)
    row = ((minibatch - epoch * (N // M)) * M + tl.minimum(at, M - 1)).to(tl.uint32)
    early, late = time.to(tl.uint32), (time >> 32).to(tl.uint32)
    a, b, c, d = tl.philox(key, epoch.to(tl.uint32), early, late, 0)
    e, f, g, h = tl.philox(key, epoch.to(tl.uint32), early, late, 1)
    row = _permuted(row, a, b, c, d, e, f, g, h, BITS)
    while tl.max(row.to(tl.int32), axis=0) >= N:  # a walk along the cycle ends inside, where it began
        row = tl.where(row.to(tl.int32) >= N, _permuted(row, a, b, c, d, e, f, g, h, BITS), row)
    row = row.to(tl.int32)
    tl.store(order_ptr + minibatch.to(tl.int64) * M + at, row, mask=here)
    x = tl.load(x_ptr + row, mask=here, other=0.0)
    mean = tl.sum(x, axis=0) / tl.minimum(M - tile * TILE, TILE)
    distance = tl.where(here, x - mean, 0.0)
    moments_ptr += 2 * (minibatch * tl.num_programs(0) + tile)
    tl.store(moments_ptr, mean)
    tl.store(moments_ptr + 1, tl.sum(distance * distance, axis=0))


class Shuffle:
    """Orders N rows anew for every epoch, all epochs of an iteration in one launch.

    Args:
        rows: N, at most 2**30.
        epochs: passes over the rows.
        minibatches: of each epoch; they divide N.
        generator: on the device; a key is drawn from it here.

    The order is a keyed bijection of the row number: it needs no memory and no sort, and depends on key, epoch and
    time alone.

    Raises:
        UsageError: N is larger.

    Attributes:
        order_UM: [epochs * minibatches, N / minibatches] int32.
        moments_U: [epochs * minibatches, tiles, 2] float32, for `rlgraph.kernels.library.mean_and_deviation`.
    """

    def __init__(self, rows: int, epochs: int, minibatches: int, generator: torch.Generator):
        device = generator.device
        if rows > 2**30:
            raise UsageError(f"mode fused shuffles up to 2**30 steps an iteration, not {rows}; use mode graph")
        self.rows, self.size = rows, rows // minibatches
        self.key = drawn_key(generator)
        # Zeros: rows that exist, should an epoch be warmed up before an order was drawn.
        self.order_UM = torch.zeros(epochs * minibatches, self.size, dtype=torch.int32, device=device)
        tiles = cdiv(self.size, TILE)
        self.moments_U = torch.empty(epochs * minibatches, tiles, 2, dtype=torch.float32, device=device)

    def draw(self, time: torch.Tensor, x_N: torch.Tensor) -> None:
        """Fill `order_UM` and `moments_U`.

        Args:
            time: [] int64 on the device, another in every call.
            x_N: [N] float32, whose moments over each minibatch are wanted.
        """
        bits = max(2, (self.rows - 1).bit_length())
        minibatches, tiles, _ = self.moments_U.shape
        grid = tiles, minibatches
        _shuffled[grid](self.key, time, x_N, self.order_UM, self.moments_U, self.rows, self.size, bits, TILE)
