"""PQN in JAX: one iteration is collect, lambda-returns, update, compiled as one function with donated state.

Gallici et al., "Simplifying Deep Temporal Difference Learning" (2024). The same sections, in the same order, as
pqn/torch.py. T steps, B environments, N = T * B, M = minibatch rows.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from rlgraph.agents.networks.jax import LayerNormQNetwork, epsilon_greedy
from rlgraph.agents.parts.count_jax import Count
from rlgraph.agents.parts.returns_jax import lambda_returns
from rlgraph.agents.pqn.config import PQNConfig
from rlgraph.agents.trainer_jax import Trainer
from rlgraph.config import check_discrete
from rlgraph.devices import jax_device
from rlgraph.environment import Environment
from rlgraph.rollout import Rollout
from rlgraph.rollout.jax import Collector, collect, in_parts, start


class Batch(NamedTuple):
    """An iteration's N = T * B steps, flattened."""

    obs: jax.Array  # [N, *observation shape]
    action: jax.Array  # [N] int32
    target: jax.Array  # [N] float32, lambda-returns


class TrainState(NamedTuple):
    """Everything that one iteration leaves to the next."""

    policy: LayerNormQNetwork
    optimizer: Any
    collector: Collector
    key: jax.Array
    iteration: Count


def pqn_loss(policy: LayerNormQNetwork, batch: Batch, rows_M: jax.Array):
    """The squared error of one minibatch's action values.

    Args:
        policy: the one being trained.
        batch: all N steps.
        rows_M: [M] int32, the minibatch.

    Returns:
        loss []; and metrics [2]: loss, mean value of the actions taken.
    """
    obs, action, target = (x[rows_M] for x in batch)
    q_value = jnp.take_along_axis(policy(obs), action[:, None], axis=-1).squeeze(-1)
    loss = 0.5 * ((q_value - target) ** 2).mean()  # algorithm 1, the targets held fixed
    return loss, jnp.stack([loss, q_value.mean()])


class PQN(Trainer):
    """A PQN run on one device.

    Args:
        config: see PQNConfig.
        env: built by rlgraph.make, with a Discrete action space.

    `iterate()` makes one launch and returns at once on a GPU: read its metrics after the next launch.
    """

    def __init__(self, config: PQNConfig, env: Environment):
        check_discrete("pqn", env)
        # Adam, where the paper has RAdam: as in pqn/torch.py.
        self.optimizer = optax.chain(optax.clip_by_global_norm(config.max_grad_norm), optax.scale_by_adam(eps=1e-5))
        super().__init__(config, env)

    # ---- the iteration

    def _iteration(self, state: TrainState) -> tuple[TrainState, jax.Array]:
        """Collect, lambda-returns, update. Returns the new state and METRICS' vector."""
        config, policy = self.config, state.policy
        learning_rate, epsilon = self._schedule(state.iteration)
        key, collect_key, order_key = jax.random.split(state.key, 3)

        def act(obs, noise):
            """Epsilon-greedy: ([B, *observation shape], uniforms [B]) -> (action [B], log-prob [B], not used)."""
            return epsilon_greedy(policy(obs), noise, epsilon), jnp.zeros_like(noise)

        collector, rollout, episodes = collect(
            self.env, act, None, state.collector, config.num_steps, collect_key, self.unroll
        )
        batch = self._targets(policy, rollout)

        rows_N = jnp.arange(config.batch_size, dtype=jnp.int32)
        order = [jax.random.permutation(k, rows_N) for k in jax.random.split(order_key, config.num_epochs)]
        rows_UM = jnp.concatenate(order).reshape(config.num_updates, -1)

        def update(learner, rows_M):
            return self._update(learner, batch, rows_M, learning_rate)

        (policy, optimizer), metrics_U3 = jax.lax.scan(update, (policy, state.optimizer), rows_UM)
        state = TrainState(policy, optimizer, collector, key, state.iteration.next())
        return state, jnp.stack([*metrics_U3.mean(axis=0), learning_rate, epsilon, *episodes])

    def _schedule(self, iteration: Count) -> tuple[jax.Array, jax.Array]:
        """This iteration's learning rate and epsilon, on the device."""
        config = self.config
        done = iteration.share(config.num_iterations)
        learning_rate = jnp.float32(config.learning_rate)
        if config.anneal_lr:
            learning_rate = learning_rate * jnp.maximum(0, 1 - done)
        exploring = jnp.maximum(0, 1 - done / config.exploration_fraction)
        return learning_rate, config.epsilon_end + (config.epsilon_start - config.epsilon_end) * exploring

    def _targets(self, policy: LayerNormQNetwork, rollout: Rollout) -> Batch:
        config = self.config
        target_TB = lambda_returns(
            rollout.reward_TB,
            in_parts(lambda obs: policy(obs).max(axis=-1), rollout.final_obs),
            rollout.terminated_TB,
            rollout.truncated_TB,
            config.gamma,
            config.q_lambda,
        )
        return Batch(*(x.reshape(-1, *x.shape[2:]) for x in (rollout.obs, rollout.action, target_TB)))

    def _update(self, learner, batch: Batch, rows_M: jax.Array, learning_rate: jax.Array):
        """One optimiser step. Returns the learner, and [3]: pqn_loss's metrics, the gradient norm."""
        policy, optimizer = learner
        gradient, metrics = jax.grad(pqn_loss, has_aux=True)(policy, batch, rows_M)
        direction, optimizer = self.optimizer.update(gradient, optimizer)
        policy = jax.tree.map(lambda p, d: p - learning_rate * d, policy, direction)
        norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(gradient)))
        return (policy, optimizer), jnp.stack([*metrics, norm])

    # ---- what the run holds

    def _create(self) -> TrainState:
        config, env = self.config, self.env
        policy_key, start_key, key = jax.random.split(jax.random.key(config.seed), 3)
        policy = self.build_policy(config, env, policy_key)
        return TrainState(policy, self.optimizer.init(policy), start(env, config.num_envs, start_key), key, Count.of(0))

    # ---- the trained policy

    @property
    def policy(self) -> LayerNormQNetwork:
        return self.state.policy

    @staticmethod
    def build_policy(config: PQNConfig, env: Environment, key: jax.Array | None = None) -> LayerNormQNetwork:
        """A policy with fresh weights, on the config's device; `key` is the config's seed by default."""
        key = jax.random.key(config.seed) if key is None else key
        policy = LayerNormQNetwork(env.observation_space, env.action_space, config.hidden, config.activation, key)
        return jax.device_put(policy, jax_device(config.device))
