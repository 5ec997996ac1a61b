"""Sums along time on a GPU, each in one kernel: what agents/parts/returns_torch.py computes, which defines the results.

Import it only where Triton is there. A program has a block of environments and takes T in chunks: each chunk is one
associative scan (Blelloch, 1990), so few steps wait for another; the last row of a chunk is carried to the next.
Scans that run back in time take its rows from the last step on. T steps, B environments.
"""

import torch
import triton
import triton.language as tl

from rlgraph.kernels import build

# Of a program: few enough environments that 4,096 of them are two programs for each processor of an H200, and enough
# that a row of float32 is two whole sectors of memory. The tiles then stay in registers.
MOST_ENVS, MOST_STEPS, WARPS = 16, 128, 4


def gae(reward_TB, value_TB, final_value_TB, terminated_TB, truncated_TB, gamma: float, gae_lambda: float):
    """Generalised advantage estimation, as `rlgraph.agents.parts.returns_torch.gae`.

    Args:
        reward_TB, value_TB, final_value_TB: [T, B] float32.
        terminated_TB, truncated_TB: [T, B] bool.

    Returns:
        Advantages [T, B], a new tensor.
    """
    advantage_TB = _empty_like(reward_TB)
    inputs = (reward_TB, value_TB, final_value_TB, terminated_TB, truncated_TB)
    _launch(_gae, inputs, [advantage_TB], gamma, gamma * gae_lambda)
    return advantage_TB


def discounted_returns(reward_TB, done_TB, return_B, gamma: float):
    """Running discounted returns, as `rlgraph.agents.parts.returns_torch.discounted_returns`.

    Args:
        reward_TB: [T, B] float32.
        done_TB: [T, B] bool, step t ended its episode.
        return_B: [B] float32, the running return before the first step, 0 where an episode starts.

    Returns:
        g [T, B], and the [B] to start the next rollout with: new tensors.
    """
    g_TB, carried_B = _empty_like(reward_TB), _empty_like(return_B)
    _launch(_discounted_returns, (reward_TB, done_TB, return_B), [g_TB, carried_B], gamma)
    return g_TB, carried_B


def lambda_returns(reward_TB, final_value_TB, terminated_TB, truncated_TB, gamma: float, q_lambda: float):
    """Peng's Q(lambda), as `rlgraph.agents.parts.returns_torch.lambda_returns`.

    Args:
        reward_TB, final_value_TB: [T, B] float32.
        terminated_TB, truncated_TB: [T, B] bool.

    Returns:
        G [T, B], a new tensor.
    """
    return_TB = _empty_like(reward_TB)
    _launch(_lambda_returns, (reward_TB, final_value_TB, terminated_TB, truncated_TB), [return_TB], gamma, q_lambda)
    return return_TB


def _empty_like(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _launch(kernel, inputs, outputs, *numbers: float) -> None:
    T, B = inputs[0].shape
    CHUNK, BLOCK = (min(most, triton.next_power_of_2(n)) for most, n in ((MOST_STEPS, T), (MOST_ENVS, B)))
    arrays = [x.contiguous() for x in inputs] + outputs
    with build.on(inputs[0].device):
        kernel[(build.cdiv(B, BLOCK),)](*arrays, *map(float, numbers), T, B, CHUNK=CHUNK, BLOCK=BLOCK, num_warps=WARPS)


# ---- kernels: [CHUNK, BLOCK] tiles, row by row in the order of the scan


@triton.jit
def _gae(
    reward_ptr,
    value_ptr,
    final_value_ptr,
    terminated_ptr,
    truncated_ptr,
    advantage_ptr,
    gamma,
    decay,
    T,
    B,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    carry = tl.zeros([BLOCK], tl.float32)
    for start in range(0, T, CHUNK):
        at, here = _tile(T - 1 - start - tl.arange(0, CHUNK), T, B, BLOCK)
        reward = tl.load(reward_ptr + at, mask=here, other=0.0)
        value = tl.load(value_ptr + at, mask=here, other=0.0)
        final_value = tl.load(final_value_ptr + at, mask=here, other=0.0)
        terminated = tl.load(terminated_ptr + at, mask=here, other=0).to(tl.int1)
        truncated = tl.load(truncated_ptr + at, mask=here, other=0).to(tl.int1)
        delta = reward + gamma * tl.where(terminated, 0.0, final_value) - value
        advantage, carry = _scan(tl.where(terminated | truncated, 0.0, decay), delta, carry, CHUNK)
        tl.store(advantage_ptr + at, advantage, mask=here)


@triton.jit
def _discounted_returns(
    reward_ptr, done_ptr, return_ptr, g_ptr, carried_ptr, gamma, T, B, CHUNK: tl.constexpr, BLOCK: tl.constexpr
):
    env = _envs(BLOCK)
    carry = tl.load(return_ptr + env, mask=env < B, other=0.0)
    for start in range(0, T, CHUNK):
        step = start + tl.arange(0, CHUNK)
        at, here = _tile(step, T, B, BLOCK)
        reward = tl.load(reward_ptr + at, mask=here, other=0.0)
        starts = tl.load(done_ptr + at - B, mask=here & (step > 0)[:, None], other=0).to(tl.int1)
        g, carry = _scan(tl.where(starts, 0.0, gamma), reward, carry, tl.minimum(T - start, CHUNK))
        tl.store(g_ptr + at, g, mask=here)
    at, here = _tile(T - 1 + tl.arange(0, 1), T, B, BLOCK)
    done = tl.load(done_ptr + at, mask=here, other=0).to(tl.int1)
    tl.store(carried_ptr + env[None, :], tl.where(done, 0.0, carry[None, :]), mask=here)


@triton.jit
def _lambda_returns(
    reward_ptr,
    final_value_ptr,
    terminated_ptr,
    truncated_ptr,
    return_ptr,
    gamma,
    q_lambda,
    T,
    B,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    carry = tl.zeros([BLOCK], tl.float32)
    for start in range(0, T, CHUNK):
        step = T - 1 - start - tl.arange(0, CHUNK)
        at, here = _tile(step, T, B, BLOCK)
        reward = tl.load(reward_ptr + at, mask=here, other=0.0)
        final_value = tl.load(final_value_ptr + at, mask=here, other=0.0)
        terminated = tl.load(terminated_ptr + at, mask=here, other=0).to(tl.int1)
        truncated = tl.load(truncated_ptr + at, mask=here, other=0).to(tl.int1)
        ends = terminated | truncated | (step == T - 1)[:, None]
        mix = tl.where(ends, 0.0, q_lambda)
        x = reward + gamma * (1.0 - mix) * tl.where(terminated | (mix == 1.0), 0.0, final_value)
        returns, carry = _scan(gamma * mix, x, carry, CHUNK)
        tl.store(return_ptr + at, returns, mask=here)


@triton.jit
def _envs(BLOCK: tl.constexpr):
    return tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)


@triton.jit
def _tile(step, T, B, BLOCK: tl.constexpr):
    """Where the program's environments stand in a [T, B] array at some steps, and which of them exist."""
    env = _envs(BLOCK)
    here = ((step >= 0) & (step < T))[:, None] & (env < B)[None, :]
    return step[:, None].to(tl.int64) * B + env[None, :], here


@triton.jit
def _scan(c, x, carry, rows):
    """y[i] = x[i] + c[i] y[i - 1], with `carry` in place of y[-1]; and the last of so many rows of y."""
    c, x = tl.associative_scan((c, x), 0, _chain)
    y = tl.where(c == 0.0, x, x + c * carry[None, :])
    row = tl.arange(0, y.shape[0])[:, None]
    return y, tl.sum(tl.where(row == rows - 1, y, 0.0), axis=0)


@triton.jit
def _chain(c_before, x_before, c, x):
    """Two stretches of rows as one, each of them y -> x + c y. A c of 0 lets nothing through, no NaN either."""
    return c * c_before, tl.where(c == 0.0, x, x + c * x_before)
