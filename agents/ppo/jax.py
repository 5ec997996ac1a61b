"""PPO in JAX: one iteration is collect, advantages, update, compiled as one function with donated state.

Schulman et al., "Proximal Policy Optimization Algorithms" (2017). The same sections, in the same order, as
ppo/torch.py. T steps, B environments, N = T * B, M = minibatch rows.
"""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

from rlgraph.agents.networks.jax import ActorCritic, Gaussian
from rlgraph.agents.parts.count_jax import Count
from rlgraph.agents.parts.moments_jax import Moments, merge_moments
from rlgraph.agents.parts.returns_jax import discounted_returns, gae
from rlgraph.agents.ppo.config import PPOConfig
from rlgraph.agents.trainer_jax import Trainer
from rlgraph.devices import jax_device
from rlgraph.environment import Environment
from rlgraph.rollout import Rollout, fused_jax
from rlgraph.rollout.jax import Collector, collect, start

# Optimiser steps in one turn of XLA's host loop on a GPU. Fewer turns are fewer launches and more to compile; with more
# rows a minibatch than these, steps that share a turn are slower. See docs/performance.md.
UPDATE_UNROLL = 4
MOST_ROWS_UNROLLED = 8192


class Batch(NamedTuple):
    """An iteration's N = T * B steps, flattened."""

    obs: jax.Array  # [N, *observation shape]
    action: jax.Array  # [N] or [N, *action shape]
    log_prob: jax.Array  # [N]
    value: jax.Array  # [N]
    advantage: jax.Array  # [N]


class TrainState(NamedTuple):
    """Everything that one iteration leaves to the next."""

    policy: ActorCritic
    optimizer: Any
    collector: Collector
    key: jax.Array
    iteration: Count
    obs_count: jax.Array  # [] float32, rows behind the policy's obs_mean and obs_var
    reward_moments: Moments  # of the discounted return, D = 1
    reward_return_B: jax.Array  # [B] float32


def ppo_loss(policy: ActorCritic, batch: Batch, rows_M: jax.Array, config: PPOConfig):
    """The clipped surrogate, value loss and entropy bonus of one minibatch.

    Args:
        policy: the one being trained.
        batch: all N steps.
        rows_M: [M] int32, the minibatch.

    Returns:
        loss []; and metrics [5]: policy loss, value loss, entropy, approximate KL, clip fraction.
    """
    obs, action, old_log_prob, old_value, advantage = (x[rows_M] for x in batch)
    target = old_value + advantage
    if config.normalize_advantage:
        advantage = (advantage - advantage.mean()) / (advantage.std(ddof=1) + 1e-8)

    normalized = policy.normalized(obs)
    parameters = policy.actor(normalized)
    log_ratio = policy.distribution.log_prob(parameters, action) - old_log_prob
    ratio = jnp.exp(log_ratio)
    clipped = jnp.clip(ratio, 1 - config.clip_range, 1 + config.clip_range)
    policy_loss = -jnp.minimum(ratio * advantage, clipped * advantage).mean()  # eq. 7

    value = policy.critic(normalized).squeeze(-1)
    error = (value - target) ** 2
    if config.clip_value is not None:
        near = old_value + jnp.clip(value - old_value, -config.clip_value, config.clip_value)
        error = jnp.maximum(error, (near - target) ** 2)
    value_loss = 0.5 * error.mean()

    entropy = policy.distribution.entropy(parameters).mean()
    loss = policy_loss + config.value_coef * value_loss - config.entropy_coef * entropy  # eq. 9

    approx_kl = (ratio - 1 - log_ratio).mean()  # Schulman, "Approximating KL divergence" (2020), k3
    clip_fraction = (abs(ratio - 1) > config.clip_range).mean(dtype=jnp.float32)
    return loss, jnp.stack([policy_loss, value_loss, entropy, approx_kl, clip_fraction])


def updates_a_turn(minibatch_rows: int, platform: str) -> int:
    """How far to unroll the loop over updates, on a device of JAX's `platform`."""
    return UPDATE_UNROLL if platform == "gpu" and minibatch_rows <= MOST_ROWS_UNROLLED else 1


class PPO(Trainer):
    """A PPO run on one device.

    Args:
        config: see PPOConfig.
        env: built by rlgraph.make.

    `iterate()` makes one launch and returns at once on a GPU: read its metrics after the next launch.
    """

    fuses = True

    def __init__(self, config: PPOConfig, env: Environment):
        self.optimizer = optax.chain(optax.clip_by_global_norm(config.max_grad_norm), optax.scale_by_adam(eps=1e-5))
        super().__init__(config, env)
        if self.fused:
            fused_jax.check(env, self.policy.for_kernels())

    # ---- the iteration

    def _iteration(self, state: TrainState) -> tuple[TrainState, jax.Array]:
        """Collect, advantages, update. Returns the new state and METRICS' vector."""
        config, policy = self.config, state.policy
        key, collect_key, order_key = jax.random.split(state.key, 3)
        collector, rollout, episodes = self._collect(policy, state.collector, collect_key)
        state, batch = self._advantages(state, rollout)
        learning_rate = jnp.float32(config.learning_rate)
        if config.anneal_lr:
            learning_rate = learning_rate * jnp.maximum(0, 1 - state.iteration.share(config.num_iterations))

        rows_N = jnp.arange(config.batch_size, dtype=jnp.int32)
        order = [jax.random.permutation(k, rows_N) for k in jax.random.split(order_key, config.num_epochs)]
        rows_UM = jnp.concatenate(order).reshape(config.num_updates, -1)

        def update(learner, rows_M):
            return self._update(learner, batch, rows_M, learning_rate)

        learner = (policy, state.optimizer, jnp.float32(0))
        unroll = updates_a_turn(rows_UM.shape[1], self.device.platform)
        (policy, optimizer, _), metrics_U7 = jax.lax.scan(update, learner, rows_UM, unroll=unroll)
        state = state._replace(
            policy=policy, optimizer=optimizer, collector=collector, key=key, iteration=state.iteration.next()
        )
        if config.normalize_obs:
            state = self._merge_obs(state, rollout.obs)
        means, updates = metrics_U7[:, :6].mean(axis=0), metrics_U7[:, 6].sum()
        return state, jnp.stack([*means, learning_rate, updates, *episodes])

    def _collect(self, policy: ActorCritic, collector: Collector, key: jax.Array):
        config, env = self.config, self.env
        if self.fused:
            interpret = self.device.platform != "gpu"
            kernels = policy.for_kernels()
            return fused_jax.collect(env, kernels, collector, config.num_steps, key, config.precision, interpret)
        return collect(env, policy.act, policy.value, collector, config.num_steps, key, self.unroll)

    def _advantages(self, state: TrainState, rollout: Rollout) -> tuple[TrainState, Batch]:
        config = self.config
        reward_TB = rollout.reward_TB
        if config.normalize_reward:
            done_TB = rollout.terminated_TB | rollout.truncated_TB
            g_TB, carried_B = discounted_returns(reward_TB, done_TB, state.reward_return_B, config.gamma)
            moments = merge_moments(state.reward_moments, g_TB.reshape(-1, 1))
            state = state._replace(reward_return_B=carried_B, reward_moments=moments)
            reward_TB = reward_TB / jnp.sqrt(moments.var_D + 1e-8)
        advantage_TB = gae(
            reward_TB,
            rollout.value_TB,
            rollout.final_value_TB,
            rollout.terminated_TB,
            rollout.truncated_TB,
            config.gamma,
            config.gae_lambda,
        )
        batch = Batch(rollout.obs, rollout.action, rollout.log_prob_TB, rollout.value_TB, advantage_TB)
        return state, Batch(*(x.reshape(-1, *x.shape[2:]) for x in batch))

    def _update(self, learner, batch: Batch, rows_M: jax.Array, learning_rate: jax.Array):
        """One optimiser step, unless `stopped` ([], 0 or 1) is set or becomes set by the target KL.

        Returns:
            The learner, and [7]: ppo_loss's metrics, the gradient norm, and 1 if the step was taken.
        """
        config = self.config
        policy, optimizer, stopped = learner
        gradient, metrics = jax.grad(ppo_loss, has_aux=True)(policy, batch, rows_M, config)
        direction, new_optimizer = self.optimizer.update(gradient, optimizer)
        new_policy = jax.tree.map(lambda p, d: p - learning_rate * d, policy, direction)
        if isinstance(new_policy.distribution, Gaussian):
            new_policy = eqx.tree_at(lambda p: p.distribution, new_policy, new_policy.distribution.bounded())
        if config.target_kl is not None:
            stopped = jnp.maximum(stopped, (metrics[3] > config.target_kl).astype(jnp.float32))
            new_policy, new_optimizer = jax.tree.map(
                lambda new, old: jnp.where(stopped > 0, old, new),
                (new_policy, new_optimizer),
                (policy, optimizer),
            )
        norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(gradient)))
        return (new_policy, new_optimizer, stopped), jnp.stack([*metrics, norm, 1 - stopped])

    def _merge_obs(self, state: TrainState, obs: jax.Array) -> TrainState:
        policy = state.policy
        before = Moments(policy.obs_mean, policy.obs_var, state.obs_count)
        flat = policy.flat(obs)
        mean, var, count = merge_moments(before, flat.reshape(-1, flat.shape[-1]))
        policy = eqx.tree_at(lambda p: (p.obs_mean, p.obs_var), policy, (mean, var))
        return state._replace(policy=policy, obs_count=count)

    # ---- what the run holds

    def _create(self) -> TrainState:
        config, env = self.config, self.env
        policy_key, start_key, key = jax.random.split(jax.random.key(config.seed), 3)
        policy = self.build_policy(config, env, policy_key)
        return TrainState(
            policy,
            self.optimizer.init(policy),
            start(env, config.num_envs, start_key),
            key,
            Count.of(0),
            jnp.float32(1e-4),
            Moments(jnp.zeros(1, jnp.float32), jnp.ones(1, jnp.float32), jnp.float32(1e-4)),
            jnp.zeros(config.num_envs, jnp.float32),
        )

    # ---- the trained policy

    @property
    def policy(self) -> ActorCritic:
        return self.state.policy

    @staticmethod
    def build_policy(config: PPOConfig, env: Environment, key: jax.Array | None = None) -> ActorCritic:
        """A policy with fresh weights, on the config's device; `key` is the config's seed by default."""
        key = jax.random.key(config.seed) if key is None else key
        policy = ActorCritic(env.observation_space, env.action_space, config.hidden, config.activation, key)
        return jax.device_put(policy, jax_device(config.device))
