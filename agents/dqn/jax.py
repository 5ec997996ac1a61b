"""DQN in JAX: one iteration is collect, store, update, compiled as one function with donated state.

Mnih et al., "Human-level control through deep reinforcement learning" (2015). The same sections, in the same order, as
dqn/torch.py. T steps, B environments, K updates, M = minibatch rows.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from rlgraph.agents.dqn.config import DQNConfig
from rlgraph.agents.networks.jax import QNetwork, epsilon_greedy
from rlgraph.agents.parts import replay_jax
from rlgraph.agents.parts.count_jax import Count
from rlgraph.agents.parts.replay_jax import Replay, Transitions, discounted
from rlgraph.agents.trainer_jax import Trainer
from rlgraph.config import check_discrete
from rlgraph.devices import jax_device
from rlgraph.environment import Environment
from rlgraph.rollout import EpisodeTotals, Rollout
from rlgraph.rollout.jax import Collector, collect, start

MOST = 2**31 - 1  # optimiser steps that an int32 counts


class TrainState(NamedTuple):
    """Everything that one iteration leaves to the next."""

    policy: QNetwork
    target: QNetwork
    optimizer: Any
    collector: Collector
    replay: Replay
    key: jax.Array
    iteration: Count
    updates: jax.Array  # [] int32, optimiser steps taken; from 0 again after the last whole period below 2^31


def dqn_loss(policy: QNetwork, target: QNetwork, batch: Transitions, config: DQNConfig):
    """Half the squared temporal difference, mean over one minibatch.

    Args:
        policy: the one being trained.
        target: the network that values what comes after.
        batch: M transitions.

    Returns:
        loss []; and metrics [2]: loss, mean value of the actions taken.
    """
    # van Hasselt et al. (2016), eq. 4; without the double estimator Mnih et al. (2015), algorithm 1.
    next_action = (policy if config.double else target).greedy(batch.next_obs)
    next_value = _value_of(next_action, target(batch.next_obs))
    target_M = jax.lax.stop_gradient(batch.reward + discounted(batch.discount, next_value))
    q_value = _value_of(batch.action, policy(batch.obs))
    # Not clipped as in the paper, where rewards are too: the rare and large errors at an episode's end must count.
    loss = 0.5 * ((q_value - target_M) ** 2).mean()
    return loss, jnp.stack([loss, q_value.mean()])


def _value_of(action_M, value_MA):
    return jnp.take_along_axis(value_MA, action_M[..., None], axis=-1).squeeze(-1)


class DQN(Trainer):
    """A DQN run on one device.

    Args:
        config: see DQNConfig.
        env: built by rlgraph.make, with a Discrete action space.

    `iterate()` makes one launch and returns at once on a GPU: read its metrics after the next launch.
    """

    def __init__(self, config: DQNConfig, env: Environment):
        check_discrete("dqn", env)
        self.optimizer = optax.chain(optax.clip_by_global_norm(config.max_grad_norm), optax.scale_by_adam(eps=1e-5))
        super().__init__(config, env)

    # ---- the iteration

    def _iteration(self, state: TrainState) -> tuple[TrainState, jax.Array]:
        """Collect, store, update. Returns the new state and METRICS' vector."""
        config = self.config
        learning_rate, epsilon = self._schedule(state.iteration)
        key, collect_key, sample_key = jax.random.split(state.key, 3)
        collector, rollout, episodes = self._collect(state.policy, state.collector, epsilon, collect_key)
        replay = replay_jax.add(state.replay, rollout)
        K, M = config.num_updates, config.minibatch_size
        # What the replay holds does not change between the updates: all of their minibatches are drawn at once.
        batches = replay_jax.sample(replay, K * M, sample_key, config.n_step, config.gamma)
        batches = jax.tree.map(lambda x: x.reshape(K, M, *x.shape[1:]), batches)
        learning = replay.fill >= config.first_rows

        def update(learner, batch):
            return self._update(learner, batch, learning, learning_rate)

        learner = (state.policy, state.target, state.optimizer, state.updates)
        (policy, target, optimizer, updates), metrics_K3 = jax.lax.scan(update, learner, batches)
        state = TrainState(policy, target, optimizer, collector, replay, key, state.iteration.next(), updates)
        means = jnp.where(learning, metrics_K3.mean(axis=0), 0)
        return state, jnp.stack([*means, learning_rate, epsilon, learning * jnp.float32(K), *episodes])

    def _schedule(self, iteration: Count) -> tuple[jax.Array, jax.Array]:
        """An iteration's learning rate and epsilon."""
        config = self.config
        done = iteration.share(config.num_iterations)
        learning_rate = jnp.float32(config.learning_rate)
        if config.anneal_lr:
            learning_rate = learning_rate * jnp.maximum(0, 1 - done)
        exploring = jnp.maximum(0, 1 - done / config.exploration_fraction)
        return learning_rate, config.epsilon_end + (config.epsilon_start - config.epsilon_end) * exploring

    def _collect(
        self, policy: QNetwork, collector: Collector, epsilon: jax.Array, key: jax.Array
    ) -> tuple[Collector, Rollout, EpisodeTotals]:
        def act(obs, noise):
            return epsilon_greedy(policy(obs), noise, epsilon), jnp.zeros_like(noise)  # nothing uses a log-prob

        return collect(self.env, act, None, collector, self.config.num_steps, key, self.unroll)

    def _update(self, learner, batch: Transitions, learning: jax.Array, learning_rate: jax.Array):
        """One optimiser step, and the target network's where it is due; nothing moves unless `learning` ([] bool).

        Returns:
            The learner, and [3]: dqn_loss's metrics, the gradient norm.
        """
        config = self.config
        policy, target, optimizer, updates = learner
        gradient, metrics = jax.grad(dqn_loss, has_aux=True)(policy, target, batch, config)
        direction, new_optimizer = self.optimizer.update(gradient, optimizer)
        new_policy = jax.tree.map(lambda p, d: p - learning_rate * d, policy, direction)
        period = min(config.target_period, MOST)
        updates = jnp.where(updates == MOST // period * period, 0, updates) + 1
        due, share = updates % period == 0, jnp.float32(config.target_tau)
        new_target = jax.tree.map(
            lambda old, new: jnp.where(due, (1 - share) * old + share * new, old), target, new_policy
        )
        learner = jax.tree.map(
            lambda new, old: jnp.where(learning, new, old), (new_policy, new_target, new_optimizer, updates), learner
        )
        norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(gradient)))
        return learner, jnp.stack([*metrics, norm])

    # ---- what the run holds

    def _create(self) -> TrainState:
        config, env = self.config, self.env
        policy_key, start_key, key = jax.random.split(jax.random.key(config.seed), 3)
        policy = self.build_policy(config, env, policy_key)
        collector = start(env, config.num_envs, start_key)
        _, rollout, _ = jax.eval_shape(self._collect, policy, collector, jnp.float32(0), key)
        return TrainState(
            policy,
            policy,
            self.optimizer.init(policy),
            collector,
            replay_jax.create(rollout, config.replay_capacity),
            key,
            Count.of(0),
            jnp.int32(0),
        )

    # ---- the trained policy

    @property
    def policy(self) -> QNetwork:
        return self.state.policy

    @staticmethod
    def build_policy(config: DQNConfig, env: Environment, key: jax.Array | None = None) -> QNetwork:
        """A policy with fresh weights, on the config's device; `key` is the config's seed by default."""
        key = jax.random.key(config.seed) if key is None else key
        policy = QNetwork(
            env.observation_space, env.action_space, config.hidden, config.activation, config.dueling, key
        )
        return jax.device_put(policy, jax_device(config.device))
