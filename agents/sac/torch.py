"""SAC in torch: one iteration is collect, store, update, and on a GPU one replayed graph.

Haarnoja et al., "Soft Actor-Critic Algorithms and Applications" (2018). The same sections, in the same order, as
sac/jax.py. T steps, B environments, K updates, M = rows of a minibatch, A = action size.
"""

import copy
import math

import torch

from rlgraph.agents.networks.torch import SquashedActor, TwinCritic
from rlgraph.agents.parts.moments_torch import merge_moments
from rlgraph.agents.parts.replay_torch import Replay, Transitions, discounted
from rlgraph.agents.sac.config import SACConfig, check_action_space
from rlgraph.agents.trainer_torch import Trainer
from rlgraph.devices import torch_device
from rlgraph.environment import Environment
from rlgraph.rollout.torch import Collector


def critic_loss(
    critics: TwinCritic,
    target_critics: TwinCritic,
    actor: SquashedActor,
    temperature: torch.Tensor,
    batch: Transitions,
    noise: torch.Tensor,
):
    """The soft Bellman error of both critics.

    Args:
        critics: those being trained.
        target_critics, actor: what the target is made of, without gradient.
        temperature: [], alpha.
        batch: M transitions.
        noise: [M, *action shape] standard normals, of the next actions.

    Returns:
        loss []; and the mean action value [], without gradient.

    Entropy counts in units of the bounds: without that, a task in other units of its actions would be another task.
    """
    with torch.no_grad():
        action, log_prob = actor.act(batch.next_obs, noise)
        q = target_critics(actor.features(batch.next_obs, action)).amin(0)
        soft_value = q - temperature * (log_prob + actor.log_volume)  # eq. 3
        target = batch.reward + discounted(batch.discount, soft_value)  # eq. 2
    q = critics(actor.features(batch.obs, batch.action))
    loss = 0.5 * ((q - target) ** 2).mean(-1).sum()  # eq. 5
    return loss, q.detach().mean()


def actor_loss(
    actor: SquashedActor, critics: TwinCritic, temperature: torch.Tensor, obs: torch.Tensor, noise: torch.Tensor
):
    """How far the policy is from the softmax of the smaller critic.

    Args:
        actor: the one being trained.
        critics: as they are.
        temperature: [], alpha.
        obs: [M, *observation shape].
        noise: [M, *action shape] standard normals.

    Returns:
        loss []; and the mean log-prob [], without gradient.
    """
    action, log_prob = actor.act(obs, noise)
    q = critics(actor.features(obs, action)).amin(0)
    return (temperature * (log_prob + actor.log_volume) - q).mean(), log_prob.detach().mean()  # eq. 9


def temperature_loss(log_temperature: torch.Tensor, log_prob: torch.Tensor, target_entropy: float):
    """Whose gradient raises the temperature while the entropy is below its target. All []; eq. 18."""
    return -log_temperature.exp() * (log_prob + target_entropy)


class SAC(Trainer):
    """A SAC run on one device.

    Args:
        config: see SACConfig.
        env: built by rlgraph.make.

    `iterate()` makes one launch and returns at once on a GPU: read its metrics after the next launch.
    """

    def __init__(self, config: SACConfig, env: Environment):
        check_action_space(env)
        super().__init__(config, env)

    # ---- the iteration

    def _iteration(self) -> torch.Tensor:
        """Collect, store, update. Nothing here reads a device value on the host. Returns METRICS' vector."""
        config = self.config
        with torch.no_grad():
            self._move_noise()
            rollout, episodes = self.collector.collect()
            self.replay.add(rollout)
            if config.normalize_obs:
                flat = self.policy.flat(rollout.obs).flatten(0, 1)
                merge_moments(self.policy.obs_mean, self.policy.obs_var, self.obs_count, flat)
            if config.anneal_lr:
                left = (1 - self._share_done()).clamp(min=0)
                self.learning_rate.copy_(config.learning_rate * left)
            K, M = config.num_updates, config.minibatch_size
            batches = self.replay.sample(K * M, self.generator, 1, config.gamma)
            noise = self._normal(K, 2, M, *self.env.action_space.shape)
        # The fused Adam leaves out a step whose `found_inf` is 1, on the device: no host branch.
        self.optimizer.found_inf = self._at_random().float()
        totals = torch.zeros(5, dtype=torch.float32, device=self.device)
        for k in range(K):
            batch = Transitions(*(x[k * M : (k + 1) * M] for x in batches))
            totals += self._update(batch, noise[k])
        updates = K * (1 - self.optimizer.found_inf)
        self.iteration += 1
        return torch.stack([*totals / K, self.learning_rate, updates, *episodes])

    def _update(self, batch: Transitions, noise: torch.Tensor) -> torch.Tensor:
        """One step of critics, actor and temperature, each by the gradient of its own loss where all three stand.

        Args:
            batch: M transitions.
            noise: [2, M, *action shape] standard normals.

        Returns:
            [5]: critic loss, actor loss, mean action value, entropy, temperature.
        """
        actor, critics, target_critics = self.policy, self.critics, self.target_critics
        self.optimizer.zero_grad(set_to_none=True)
        temperature = self.log_temperature.detach().exp()
        q_loss, q_value = self._critic_loss(critics, target_critics, actor, temperature, batch, noise[0])
        q_loss.backward(inputs=list(critics.parameters()))
        pi_loss, log_prob = self._actor_loss(actor, critics, temperature, batch.obs, noise[1])
        pi_loss.backward(inputs=list(actor.parameters()))
        target_entropy = actor.log_volume - math.prod(self.env.action_space.shape)  # the paper's -A, as above
        temperature_loss(self.log_temperature, log_prob, target_entropy).backward(inputs=[self.log_temperature])
        self.optimizer.step()
        with torch.no_grad():
            # Before the first step taken both are the same, and this moves nothing.
            torch._foreach_lerp_(list(target_critics.parameters()), list(critics.parameters()), self.config.target_tau)
        return torch.stack([q_loss.detach(), pi_loss.detach(), q_value, -log_prob, temperature])

    # ---- acting while it learns

    def _act(self, obs, noise):
        """The policy's action, or a uniformly random one in the first iterations."""
        if self.config.noise_correlation:
            noise = self.noise
        action, log_prob_B = self.policy.act(obs, noise)
        return torch.where(self._at_random(), self.policy.uniform(noise), action), log_prob_B

    def _at_random(self) -> torch.Tensor:
        return self.iteration < self.config.random_iterations

    def _move_noise(self) -> None:
        """A step of an autoregressive process whose every state is standard normal."""
        correlation = self.config.noise_correlation
        if correlation:
            fresh = self._normal(*self.noise.shape)
            self.noise.mul_(correlation).add_(fresh, alpha=math.sqrt(1 - correlation**2))

    def _normal(self, *shape):
        return torch.randn(shape, generator=self.generator, dtype=torch.float32, device=self.device)

    # ---- what the run holds

    def _create(self, collector_mode: str) -> None:
        config, device = self.config, self.device
        self.generator = torch.Generator(device).manual_seed(config.seed)
        self.policy = self.build_policy(config, self.env)
        self.critics = build_critics(config, self.env)
        self.target_critics = copy.deepcopy(self.critics).requires_grad_(False)
        self.log_temperature = torch.zeros((), dtype=torch.float32, device=device, requires_grad=True)
        self.iteration = torch.zeros((), dtype=torch.int64, device=device)
        self.noise = self._normal(config.num_envs, *self.env.action_space.shape)
        self.collector = Collector(
            self.env, self._act, None, config.num_envs, config.num_steps, self.generator, collector_mode
        )
        self.replay = Replay(self.collector.rollout, config.replay_capacity)
        self.learning_rate = torch.tensor(config.learning_rate, dtype=torch.float32, device=device)
        self._critic_loss = self._in_mode(critic_loss)
        self._actor_loss = self._in_mode(actor_loss)
        trained = [*self.policy.parameters(), *self.critics.parameters(), self.log_temperature]
        self.optimizer = self._adam(trained, self.learning_rate, eps=1e-8)
        self.obs_count = torch.tensor(1e-4, dtype=torch.float32, device=device)

    def _state(self) -> dict:
        """Every tensor that one iteration leaves to the next, by name."""
        networks = {"policy": self.policy, "critics": self.critics}
        trained = {f"{net}.{name}": p for net, module in networks.items() for name, p in module.named_parameters()}
        trained["log_temperature"] = self.log_temperature
        return {
            "collector": self.collector.state(),
            "replay": self.replay.state(),
            "policy": self.policy.state_dict(),
            "critics": self.critics.state_dict(),
            "target_critics": self.target_critics.state_dict(),
            "log_temperature": self.log_temperature,
            "optimizer": {name: self.optimizer.state[p] for name, p in trained.items()},
            "learning_rate": self.learning_rate,
            "iteration": self.iteration,
            "noise": self.noise,
            "obs_count": self.obs_count,
        }

    @staticmethod
    def build_policy(config: SACConfig, env: Environment) -> SquashedActor:
        """An actor with fresh weights, on the config's device."""
        generator = torch.Generator().manual_seed(config.seed)
        policy = SquashedActor(env.observation_space, env.action_space, config.hidden, config.activation, generator)
        return policy.to(torch_device(config.device))


def build_critics(config: SACConfig, env: Environment) -> TwinCritic:
    """Critics with fresh weights, on the config's device."""
    generator = torch.Generator().manual_seed(config.seed)
    inputs = math.prod(env.observation_space.shape) + math.prod(env.action_space.shape)
    return TwinCritic(inputs, config.hidden, config.activation, generator).to(torch_device(config.device))
