"""A replay ring on the device: rows of time by environments, written and drawn from without the host.

The same names as replay_torch.py. T steps of a rollout, B environments, S rows of the ring, M transitions drawn,
n steps of a return.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from rlgraph.agents.parts.replay import num_rows
from rlgraph.rollout import Rollout


class Transitions(NamedTuple):
    """M transitions of up to n steps each."""

    obs: jax.Array  # [M, *observation shape]
    action: jax.Array  # [M] or [M, *action shape], the first step's
    reward: jax.Array  # [M] float32, discounted sum over the steps, none after an episode's end
    next_obs: jax.Array  # [M, *observation shape], what the last of them led to, before any reset
    discount: jax.Array  # [M] float32, of the value at next_obs: gamma^steps, 0 where the episode terminated


def discounted(discount: jax.Array, value: jax.Array) -> jax.Array:
    """Their product, and 0 where the discount is 0: what follows an end counts for nothing, even if it is NaN."""
    return jnp.where(discount == 0, 0, discount * value)


class Replay(NamedTuple):
    """The last steps of B environments. Donate it: then `add` writes in place."""

    obs: jax.Array  # [S, B, *observation shape] float32
    action: jax.Array  # [S, B] or [S, B, *action shape]
    reward: jax.Array  # [S, B] float32
    terminated: jax.Array  # [S, B] bool
    truncated: jax.Array  # [S, B] bool
    final_obs: jax.Array  # [S, B, *observation shape] float32
    cursor: jax.Array  # [] int32, the row that is written next
    fill: jax.Array  # [] int32, rows written so far, at most S


def create(rollout: Rollout, capacity: int) -> Replay:
    """An empty ring.

    Args:
        rollout: one that will be added, or its shapes (`jax.eval_shape`).
        capacity: steps to keep over all environments, rounded up to whole rollouts.
    """
    T, B = rollout.reward_TB.shape
    S = num_rows(capacity, T, B)

    def buffer(like, dtype):
        return jnp.zeros((S, *like.shape[1:]), dtype)

    return Replay(
        buffer(rollout.obs, jnp.float32),
        buffer(rollout.action, rollout.action.dtype),
        buffer(rollout.reward_TB, jnp.float32),
        buffer(rollout.terminated_TB, bool),
        buffer(rollout.truncated_TB, bool),
        buffer(rollout.final_obs, jnp.float32),
        jnp.int32(0),
        jnp.int32(0),
    )


def add(replay: Replay, rollout: Rollout) -> Replay:
    """With a rollout's T rows written over the oldest ones."""
    T, S = rollout.reward_TB.shape[0], replay.reward.shape[0]
    new = (rollout.obs, rollout.action, rollout.reward_TB, rollout.terminated_TB, rollout.truncated_TB)
    buffers = (
        jax.lax.dynamic_update_slice_in_dim(buffer, value.astype(buffer.dtype), replay.cursor, axis=0)
        for buffer, value in zip(replay[:-2], (*new, rollout.final_obs), strict=True)
    )  # S is a multiple of T: it does not wrap
    return Replay(*buffers, (replay.cursor + T) % S, jnp.minimum(replay.fill + T, S))


def sample(replay: Replay, batch_size: int, key: jax.Array, num_steps: int, gamma: float) -> Transitions:
    """M = `batch_size` transitions, uniform over the steps whose n = `num_steps` steps have all been stored.

    With fewer than n rows stored there is none such; then what it returns is of the right shape, and meaningless.
    """
    S, B = replay.reward.shape
    u_2M = jax.random.uniform(key, (2, batch_size), jnp.float32)
    oldest = (replay.cursor - replay.fill) % S
    choices = jnp.maximum(replay.fill - num_steps + 1, 1)
    age_M = jnp.minimum((u_2M[0] * choices).astype(jnp.int32), choices - 1)  # rounding may give `choices`
    env_M = jnp.minimum((u_2M[1] * B).astype(jnp.int32), B - 1)
    return transitions(replay, (oldest + age_M) % S, env_M, num_steps, gamma)


def transitions(replay: Replay, row_M: jax.Array, env_M: jax.Array, num_steps: int, gamma: float) -> Transitions:
    """The transitions that begin at the given rows and environments."""
    S = replay.reward.shape[0]
    step_n1 = jnp.arange(num_steps, dtype=jnp.int32)[:, None]
    rows_nM = (row_M + step_n1) % S
    done_nM = (replay.terminated[rows_nM, env_M] | replay.truncated[rows_nM, env_M]).astype(jnp.int32)
    # No end before this step; the step that ends counts.
    alive_nM = jnp.cumsum(done_nM, axis=0, dtype=jnp.int32) == done_nM
    reward_nM = jnp.where(alive_nM, replay.reward[rows_nM, env_M], 0)  # not a product: 0 times infinity is NaN
    reward_M = jnp.sum(_power(gamma, step_n1) * reward_nM, axis=0)
    steps_M = jnp.sum(alive_nM, axis=0, dtype=jnp.int32)
    last_M = (row_M + steps_M - 1) % S
    return Transitions(
        replay.obs[row_M, env_M],
        replay.action[row_M, env_M],
        reward_M,
        replay.final_obs[last_M, env_M],
        _power(gamma, steps_M) * ~replay.terminated[last_M, env_M],
    )


def _power(gamma: float, steps: jax.Array) -> jax.Array:
    """gamma^steps, float32 also where JAX's default is wider."""
    return jnp.float32(gamma) ** steps
