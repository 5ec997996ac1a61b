"""SAC in JAX: one iteration is collect, store, update, compiled as one function with donated state.

Haarnoja et al., "Soft Actor-Critic Algorithms and Applications" (2018). The same sections, in the same order, as
sac/torch.py. T steps, B environments, K updates, M = rows of a minibatch, A = action size.
"""

import math
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

from rlgraph.agents.networks.jax import SquashedActor, TwinCritic
from rlgraph.agents.parts.count_jax import Count
from rlgraph.agents.parts.moments_jax import Moments, merge_moments
from rlgraph.agents.parts.replay_jax import Replay, Transitions, add, create, discounted, sample
from rlgraph.agents.sac.config import SACConfig, check_action_space
from rlgraph.agents.trainer_jax import Trainer
from rlgraph.devices import jax_device
from rlgraph.environment import Environment
from rlgraph.rollout.jax import Collector, collect, start


class Learner(NamedTuple):
    """What the optimiser moves."""

    policy: SquashedActor
    critics: TwinCritic
    log_temperature: jax.Array  # []


class TrainState(NamedTuple):
    """Everything that one iteration leaves to the next."""

    learner: Learner
    target_critics: TwinCritic
    optimizer: Any
    collector: Collector
    replay: Replay
    key: jax.Array
    iteration: Count
    noise: jax.Array  # [B, *action shape] standard normals, unless noise_correlation is 0
    obs_count: jax.Array  # [] float32, rows behind the policy's obs_mean and obs_var


def critic_loss(
    critics: TwinCritic,
    target_critics: TwinCritic,
    actor: SquashedActor,
    temperature: jax.Array,
    batch: Transitions,
    noise: jax.Array,
):
    """The soft Bellman error of both critics.

    Args:
        critics: those being trained.
        target_critics, actor: what the target is made of, without gradient.
        temperature: [], alpha.
        batch: M transitions.
        noise: [M, *action shape] standard normals, of the next actions.

    Returns:
        loss []; and the mean action value [].

    Entropy counts in units of the bounds: without that, a task in other units of its actions would be another task.
    """
    action, log_prob = actor.act(batch.next_obs, noise)
    q = target_critics(actor.features(batch.next_obs, action)).min(axis=0)
    soft_value = q - temperature * (log_prob + actor.log_volume)  # eq. 3
    target = batch.reward + discounted(batch.discount, soft_value)  # eq. 2
    q = critics(actor.features(batch.obs, batch.action))
    loss = 0.5 * ((q - target) ** 2).mean(axis=-1).sum()  # eq. 5
    return loss, q.mean()


def actor_loss(actor: SquashedActor, critics: TwinCritic, temperature: jax.Array, obs: jax.Array, noise: jax.Array):
    """How far the policy is from the softmax of the smaller critic.

    Args:
        actor: the one being trained.
        critics: as they are.
        temperature: [], alpha.
        obs: [M, *observation shape].
        noise: [M, *action shape] standard normals.

    Returns:
        loss []; and the mean log-prob [].
    """
    action, log_prob = actor.act(obs, noise)
    q = critics(actor.features(obs, action)).min(axis=0)
    return (temperature * (log_prob + actor.log_volume) - q).mean(), log_prob.mean()  # eq. 9


def temperature_loss(log_temperature: jax.Array, log_prob: jax.Array, target_entropy: float):
    """Whose gradient raises the temperature while the entropy is below its target. All []; eq. 18."""
    return -jnp.exp(log_temperature) * (log_prob + target_entropy)


class SAC(Trainer):
    """A SAC run on one device.

    Args:
        config: see SACConfig.
        env: built by rlgraph.make.

    `iterate()` makes one launch and returns at once on a GPU: read its metrics after the next launch.
    """

    def __init__(self, config: SACConfig, env: Environment):
        check_action_space(env)
        self.optimizer = optax.scale_by_adam()
        super().__init__(config, env)

    # ---- the iteration

    def _iteration(self, state: TrainState) -> tuple[TrainState, jax.Array]:
        """Collect, store, update. Returns the new state and METRICS' vector."""
        config = self.config
        key, exploration_key, collect_key, sample_key, noise_key = jax.random.split(state.key, 5)
        state = state._replace(key=key, noise=self._moved_noise(state.noise, exploration_key))
        collector, rollout, episodes = collect(
            self.env, self._actor_of(state), None, state.collector, config.num_steps, collect_key, self.unroll
        )
        state = state._replace(collector=collector, replay=add(state.replay, rollout))
        if config.normalize_obs:
            state = self._merge_obs(state, rollout.obs)
        learning_rate = jnp.float32(config.learning_rate)
        if config.anneal_lr:
            learning_rate = learning_rate * jnp.maximum(0, 1 - state.iteration.share(config.num_iterations))

        K, M = config.num_updates, config.minibatch_size
        batches = sample(state.replay, K * M, sample_key, 1, config.gamma)
        batches = Transitions(*(x.reshape(K, M, *x.shape[1:]) for x in batches))
        noise = jax.random.normal(noise_key, (K, 2, M, *self.env.action_space.shape), jnp.float32)
        at_random = self._at_random(state)

        def update(learned, inputs):
            new, metrics = self._update(learned, *inputs, learning_rate)
            return jax.tree.map(lambda new, old: jnp.where(at_random, old, new), new, learned), metrics

        learned = (state.learner, state.target_critics, state.optimizer)
        learned, metrics_K5 = jax.lax.scan(update, learned, (batches, noise))
        learner, target_critics, optimizer = learned
        state = state._replace(
            learner=learner, target_critics=target_critics, optimizer=optimizer, iteration=state.iteration.next()
        )
        updates = jnp.where(at_random, 0, jnp.float32(K))
        return state, jnp.stack([*metrics_K5.mean(axis=0), learning_rate, updates, *episodes])

    def _update(self, learned, batch: Transitions, noise: jax.Array, learning_rate: jax.Array):
        """One step of critics, actor and temperature, each by the gradient of its own loss where all three stand.

        Args:
            learned: learner, target critics, optimiser state.
            batch: M transitions.
            noise: [2, M, *action shape] standard normals.

        Returns:
            The new `learned`, and [5]: critic loss, actor loss, mean action value, entropy, temperature.
        """
        learner, target_critics, optimizer = learned
        actor, critics, log_temperature = learner
        temperature = jnp.exp(log_temperature)
        (q_loss, q_value), critics_gradient = jax.value_and_grad(critic_loss, has_aux=True)(
            critics, target_critics, actor, temperature, batch, noise[0]
        )
        (pi_loss, log_prob), actor_gradient = jax.value_and_grad(actor_loss, has_aux=True)(
            actor, critics, temperature, batch.obs, noise[1]
        )
        target_entropy = actor.log_volume - math.prod(self.env.action_space.shape)  # the paper's -A, as above
        temperature_gradient = jax.grad(temperature_loss)(log_temperature, log_prob, target_entropy)
        gradient = Learner(actor_gradient, critics_gradient, temperature_gradient)
        direction, optimizer = self.optimizer.update(gradient, optimizer)
        learner = jax.tree.map(lambda p, d: p - learning_rate * d, learner, direction)
        target_critics = jax.tree.map(
            lambda target, new: target + self.config.target_tau * (new - target), target_critics, learner.critics
        )
        return (learner, target_critics, optimizer), jnp.stack([q_loss, pi_loss, q_value, -log_prob, temperature])

    def _merge_obs(self, state: TrainState, obs: jax.Array) -> TrainState:
        policy = state.learner.policy
        before = Moments(policy.obs_mean, policy.obs_var, state.obs_count)
        flat = policy.flat(obs)
        mean, var, count = merge_moments(before, flat.reshape(-1, flat.shape[-1]))
        policy = eqx.tree_at(lambda p: (p.obs_mean, p.obs_var), policy, (mean, var))
        return state._replace(learner=state.learner._replace(policy=policy), obs_count=count)

    # ---- acting while it learns

    def _actor_of(self, state: TrainState):
        """The policy's action, or a uniformly random one in the first iterations."""
        policy, at_random = state.learner.policy, self._at_random(state)

        def act(obs, noise):
            if self.config.noise_correlation:
                noise = state.noise
            action, log_prob_B = policy.act(obs, noise)
            return jnp.where(at_random, policy.uniform(noise), action), log_prob_B

        return act

    def _at_random(self, state: TrainState) -> jax.Array:
        return state.iteration.below(self.config.random_iterations)

    def _moved_noise(self, noise: jax.Array, key: jax.Array) -> jax.Array:
        """A step of an autoregressive process whose every state is standard normal."""
        correlation = self.config.noise_correlation
        if not correlation:
            return noise
        fresh = jax.random.normal(key, noise.shape, jnp.float32)
        return correlation * noise + math.sqrt(1 - correlation**2) * fresh

    # ---- what the run holds

    def _create(self) -> TrainState:
        config, env = self.config, self.env
        keys = jax.random.split(jax.random.key(config.seed), 5)
        policy_key, critics_key, start_key, noise_key, key = keys
        policy, critics = self.build_policy(config, env, policy_key), build_critics(config, env, critics_key)
        learner = Learner(policy, critics, jnp.float32(0))
        collector = start(env, config.num_envs, start_key)
        _, rollout, _ = jax.eval_shape(
            lambda key: collect(env, policy.act, None, collector, config.num_steps, key), key
        )
        return TrainState(
            learner,
            critics,
            self.optimizer.init(learner),
            collector,
            create(rollout, config.replay_capacity),
            key,
            Count.of(0),
            jax.random.normal(noise_key, (config.num_envs, *env.action_space.shape), jnp.float32),
            jnp.float32(1e-4),
        )

    # ---- the trained policy

    @property
    def policy(self) -> SquashedActor:
        return self.state.learner.policy

    @staticmethod
    def build_policy(config: SACConfig, env: Environment, key: jax.Array | None = None) -> SquashedActor:
        """An actor with fresh weights, on the config's device; `key` is the config's seed by default."""
        key = jax.random.key(config.seed) if key is None else key
        policy = SquashedActor(env.observation_space, env.action_space, config.hidden, config.activation, key)
        return jax.device_put(policy, jax_device(config.device))


def build_critics(config: SACConfig, env: Environment, key: jax.Array) -> TwinCritic:
    """Critics with fresh weights, on the config's device."""
    inputs = math.prod(env.observation_space.shape) + math.prod(env.action_space.shape)
    return jax.device_put(TwinCritic(inputs, config.hidden, config.activation, key), jax_device(config.device))
