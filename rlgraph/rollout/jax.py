"""Rollouts in JAX: a scan over T steps, pure, so that it becomes part of one compiled iteration.

Shape letters: T steps, B environments, N uniforms a step, A action size.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import gymnasium
import jax
import jax.numpy as jnp

from rlgraph.environment import SAME_STEP, Carry, Environment
from rlgraph.rollout import VALUE_ROWS, EpisodeTotals, Rollout


class Collector(NamedTuple):
    """What one `collect` leaves to the next."""

    carry: Carry
    obs: jax.Array  # [B, *observation shape]
    return_B: jax.Array  # [B] float32, return so far of the running episode


def start(env: Environment, num_envs: int, key: jax.Array) -> Collector:
    """Start new episodes in `num_envs` environments."""
    carry, obs = env.reset(jnp, _uniform(key, num_envs, env.reset_draws))
    return Collector(carry, obs, jnp.zeros(num_envs, jnp.float32))


def collect(
    env: Environment,
    act: Callable,
    value: Callable | None,
    collector: Collector,
    num_steps: int,
    key: jax.Array,
    unroll: int = 1,
) -> tuple[Collector, Rollout, EpisodeTotals]:
    """Take T = `num_steps` steps.

    Args:
        env: the environment.
        act: policy, (obs [B, ...], noise) -> (action, log-prob [B]). noise is [B] uniforms in [0, 1) for a Discrete
            action space, [B, *action shape] standard normals for a Box.
        value: critic, obs [..., *observation shape] -> [...]; None records no values: `value_TB` and `final_value_TB`
            are None.
        collector: from `start` or the last `collect`.
        key: every random number of the rollout comes from it.
        unroll: steps an iteration of the compiled loop. XLA runs the loop on the host and replays one command buffer
            an iteration, so more steps in each mean less work for the host, and a longer compilation.
    """
    (B,) = collector.return_B.shape
    draws = draw(env, num_steps, B, key)

    def record_step(running, draws):
        return _record_step(env, act, running, *draws)

    totals = EpisodeTotals(*(jnp.zeros(B, jnp.float32) for _ in range(3)))
    (collector, totals), steps = jax.lax.scan(record_step, (collector, totals), draws, unroll=min(unroll, num_steps))
    if value is not None:
        steps = steps._replace(value_TB=in_parts(value, steps.obs), final_value_TB=in_parts(value, steps.final_obs))
    return collector, steps, EpisodeTotals(*(total_B.sum() for total_B in totals))


def draw(env: Environment, num_steps: int, num_envs: int, key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """All random numbers of a rollout: noise [T, B] or [T, B, *action shape] for `act`, and uniforms [T, B, N]."""
    uniform_key, noise_key = jax.random.split(key)
    u_TBN = _uniform(uniform_key, num_steps, num_envs, env.draws)
    if isinstance(env.action_space, gymnasium.spaces.Box):
        shape = (num_steps, num_envs, *env.action_space.shape)
        return jax.random.normal(noise_key, shape, jnp.float32), u_TBN
    return _uniform(noise_key, num_steps, num_envs), u_TBN


def in_parts(value: Callable, obs: jax.Array) -> jax.Array:
    """value(obs), [T, B, ...] -> [T, B], of at most VALUE_ROWS rows at once."""
    steps_at_once = max(1, VALUE_ROWS // obs.shape[1])
    parts = [value(obs[t : t + steps_at_once]) for t in range(0, obs.shape[0], steps_at_once)]
    return jnp.concatenate(parts) if len(parts) > 1 else parts[0]


def _record_step(env: Environment, act: Callable, running, noise, u_BN):
    (carry, obs, return_B), totals = running
    action, log_prob_B = act(obs, noise)
    step = env.step(jnp, carry, environment_action(env, action), u_BN, SAME_STEP)

    done_B = step.terminated_B | step.truncated_B
    return_B = return_B + step.reward_B
    length_B = carry.elapsed_B + 1
    # Selected, not multiplied: 0 times infinity is NaN.
    totals = EpisodeTotals(*(t + jnp.where(done_B, a, 0) for t, a in zip(totals, (return_B, length_B, 1))))
    recorded = Rollout(
        obs,
        action,
        log_prob_B,
        None,
        step.reward_B,
        step.terminated_B,
        step.truncated_B,
        step.final_obs,
        None,
    )
    return (Collector(step.carry, step.obs, jnp.where(done_B, 0, return_B)), totals), recorded


def environment_action(env: Environment, action: Any) -> Any:
    """From a policy's action to the environment's: clipped into a Box, or shifted by a Discrete space's `start`."""
    space = env.action_space
    if isinstance(space, gymnasium.spaces.Box):
        return jnp.clip(action, space.low.astype(jnp.float32), space.high.astype(jnp.float32))
    return action + int(space.start)


def evaluate(env: Environment, greedy: Callable, num_episodes: int, key: jax.Array) -> jax.Array:
    """Returns of `num_episodes` first episodes, played side by side.

    Every episode counts once, however short: a count of the first to finish would favour short episodes.

    Args:
        env: the environment, with a time limit.
        greedy: obs [B, ...] -> action.
        key: every random number comes from it.

    Returns:
        [num_episodes] float32, undiscounted.
    """
    reset_key, step_key = jax.random.split(key)
    carry, obs = env.reset(jnp, _uniform(reset_key, num_episodes, env.reset_draws))
    playing_B = jnp.ones(num_episodes, bool)

    def play(running, step_key):
        carry, obs, playing_B, returns_B = running
        u_BN = _uniform(step_key, num_episodes, env.draws)
        step = env.step(jnp, carry, environment_action(env, greedy(obs)), u_BN, SAME_STEP)
        returns_B = returns_B + jnp.where(playing_B, step.reward_B, 0)
        playing_B = playing_B & ~(step.terminated_B | step.truncated_B)
        return (step.carry, step.obs, playing_B, returns_B), None

    running = (carry, obs, playing_B, jnp.zeros(num_episodes, jnp.float32))
    running, _ = jax.lax.scan(play, running, jax.random.split(step_key, env.max_episode_steps))
    return running[3]


def _uniform(key: jax.Array, *shape: int) -> jax.Array:
    return jax.random.uniform(key, shape, jnp.float32)
