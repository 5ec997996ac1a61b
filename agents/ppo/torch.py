"""PPO in torch: one iteration is collect, advantages, update, and on a GPU one replayed graph.

Schulman et al., "Proximal Policy Optimization Algorithms" (2017). The same sections, in the same order, as
ppo/jax.py. T steps, B environments, N = T * B, M = minibatch rows.
"""

from typing import NamedTuple

import torch

from rlgraph.agents.networks.torch import ActorCritic, Gaussian
from rlgraph.agents.parts.moments_torch import merge_moments
from rlgraph.agents.ppo.config import PPOConfig
from rlgraph.agents.trainer_torch import Trainer
from rlgraph.devices import torch_device
from rlgraph.environment import Environment
from rlgraph.kernels.rollouts import FusedCollector, why_not
from rlgraph.rollout import EpisodeTotals, Rollout
from rlgraph.rollout.torch import Collector


class Batch(NamedTuple):
    """An iteration's N = T * B steps, flattened."""

    obs: torch.Tensor  # [N, *observation shape]
    action: torch.Tensor  # [N] or [N, *action shape]
    log_prob: torch.Tensor  # [N]
    value: torch.Tensor  # [N]
    advantage: torch.Tensor  # [N]


def ppo_loss(policy: ActorCritic, batch: Batch, rows_M: torch.Tensor, config: PPOConfig):
    """The clipped surrogate, value loss and entropy bonus of one minibatch.

    Args:
        policy: the one being trained.
        batch: all N steps.
        rows_M: [M] int64, the minibatch.

    Returns:
        loss []; and metrics [5], without gradient: policy loss, value loss, entropy, approximate KL, clip fraction.
    """
    obs, action, old_log_prob, old_value, advantage = (x[rows_M] for x in batch)
    target = old_value + advantage
    if config.normalize_advantage:
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)

    normalized = policy.normalized(obs)
    parameters = policy.actor(normalized)
    log_ratio = policy.distribution.log_prob(parameters, action) - old_log_prob
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - config.clip_range, 1 + config.clip_range)
    policy_loss = -torch.minimum(ratio * advantage, clipped * advantage).mean()  # eq. 7

    value = policy.critic(normalized).squeeze(-1)
    error = (value - target) ** 2
    if config.clip_value is not None:
        near = old_value + (value - old_value).clamp(-config.clip_value, config.clip_value)
        error = torch.maximum(error, (near - target) ** 2)
    value_loss = 0.5 * error.mean()

    entropy = policy.distribution.entropy(parameters).mean()
    loss = policy_loss + config.value_coef * value_loss - config.entropy_coef * entropy  # eq. 9

    with torch.no_grad():
        approx_kl = (ratio - 1 - log_ratio).mean()  # Schulman, "Approximating KL divergence" (2020), k3
        clip_fraction = ((ratio - 1).abs() > config.clip_range).float().mean()
        metrics = torch.stack([policy_loss, value_loss, entropy, approx_kl, clip_fraction])
    return loss, metrics.detach()


class PPO(Trainer):
    """A PPO run on one device.

    Args:
        config: see PPOConfig.
        env: built by rlgraph.make.

    `iterate()` makes one launch and returns at once on a GPU: read its metrics after the next launch.
    """

    # ---- the iteration

    def _iteration(self) -> torch.Tensor:
        """Collect, advantages, update. Nothing here reads a device value on the host. Returns METRICS' vector."""
        rollout, episodes, batch = self._before_updates()
        totals = self._updates(batch) if self.updates is None else self.updates.run(rollout, batch.advantage)
        self._after_updates(rollout)
        means = totals[:6] / self.config.num_updates
        return torch.stack([*means, self.learning_rate, totals[6], *episodes])

    def _before_updates(self) -> tuple[Rollout, EpisodeTotals, Batch]:
        config = self.config
        rollout, episodes = self.collector.collect()
        with torch.no_grad():
            batch = self._advantages(rollout)
            if config.anneal_lr:
                left = (1 - self._share_done()).clamp(min=0)
                self.learning_rate.copy_(config.learning_rate * left)
        return rollout, episodes, batch

    def _after_updates(self, rollout: Rollout) -> None:
        if self.config.normalize_obs:
            flat = self.policy.flat(rollout.obs).flatten(0, 1)
            merge_moments(self.policy.obs_mean, self.policy.obs_var, self.obs_count, flat)
        self.iteration += 1

    def _advantages(self, rollout: Rollout) -> Batch:
        config = self.config
        reward_TB = rollout.reward_TB
        if config.normalize_reward:
            done_TB = rollout.terminated_TB | rollout.truncated_TB
            g_TB, carried_B = self._returns.discounted_returns(reward_TB, done_TB, self.reward_return_B, config.gamma)
            self.reward_return_B.copy_(carried_B)
            merge_moments(self.reward_mean, self.reward_var, self.reward_count, g_TB.reshape(-1, 1))
            reward_TB = reward_TB / torch.sqrt(self.reward_var + 1e-8)
        advantage_TB = self._returns.gae(
            reward_TB,
            rollout.value_TB,
            rollout.final_value_TB,
            rollout.terminated_TB,
            rollout.truncated_TB,
            config.gamma,
            config.gae_lambda,
        )
        batch = Batch(rollout.obs, rollout.action, rollout.log_prob_TB, rollout.value_TB, advantage_TB)
        return Batch(*(x.flatten(0, 1) for x in batch))

    def _updates(self, batch: Batch) -> torch.Tensor:
        """All epochs. Returns [7]: sums of what `_update` gives."""
        config = self.config
        totals, stopped = (torch.zeros(shape, dtype=torch.float32, device=self.device) for shape in (7, ()))
        for _ in range(config.num_epochs):
            order = torch.randperm(config.batch_size, generator=self.generator, device=self.device)
            for rows_M in order.chunk(config.num_minibatches):
                totals += self._update(batch, rows_M, stopped)
        return totals

    def _update(self, batch: Batch, rows_M: torch.Tensor, stopped: torch.Tensor) -> torch.Tensor:
        """One optimiser step, unless `stopped` ([], 0 or 1) is set or becomes set by the target KL.

        Returns:
            [7]: ppo_loss's metrics, the gradient norm, and 1 if the step was taken.
        """
        config = self.config
        self.optimizer.zero_grad(set_to_none=True)
        loss, metrics = self._loss(self.policy, batch, rows_M, config)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.policy.parameters(), config.max_grad_norm)
        if config.target_kl is not None:
            # The fused Adam leaves out a step whose `found_inf` is 1, on the device: no host branch.
            stopped.copy_(torch.maximum(stopped, (metrics[3] > config.target_kl).float()))
            self.optimizer.found_inf = stopped
        self.optimizer.step()
        if isinstance(self.policy.distribution, Gaussian):
            self.policy.distribution.bound_()
        return torch.stack([*metrics, norm, 1 - stopped])

    # ---- what the run holds

    def _create(self, collector_mode: str) -> None:
        config, device = self.config, self.device
        self.generator = torch.Generator(device).manual_seed(config.seed)
        self.policy = self.build_policy(config, self.env)
        sizes = (config.num_envs, config.num_steps, self.generator)
        self.learning_rate = torch.tensor(config.learning_rate, dtype=torch.float32, device=device)
        self.iteration = torch.zeros((), dtype=torch.int64, device=device)
        self.updates = None
        if collector_mode == "fused":
            updates = self._fused_updates()  # first: it moves the parameters
            self.collector = FusedCollector(self.env, self.policy.for_kernels(), *sizes, config.precision)
            self.updates = updates if updates is not None and updates.fits(self.collector.rollout) else None
        else:
            self.collector = Collector(self.env, self.policy.act, self.policy.value, *sizes, collector_mode)
        if self.updates is None:
            self._loss = self._in_mode(ppo_loss)
            self.optimizer = self._adam(self.policy.parameters(), self.learning_rate, eps=1e-5)
        numbers = {"dtype": torch.float32, "device": device}
        self.obs_count, self.reward_count = torch.tensor(1e-4, **numbers), torch.tensor(1e-4, **numbers)
        self.reward_mean, self.reward_var = torch.zeros(1, **numbers), torch.ones(1, **numbers)
        self.reward_return_B = torch.zeros(config.num_envs, **numbers)
        self._returns = self._returns_module(in_kernels=collector_mode == "fused")

    def _state(self) -> dict:
        """Every tensor that one iteration leaves to the next, by name."""
        in_kernels = {} if self.updates is None else {"order_key": self.updates.shuffle.key}
        return {
            **in_kernels,
            "collector": self.collector.state(),
            "policy": self.policy.state_dict(),
            "optimizer": dict(zip(dict(self.policy.named_parameters()), self._optimizer_state())),
            "learning_rate": self.learning_rate,
            "iteration": self.iteration,
            "obs_count": self.obs_count,
            "reward_mean": self.reward_mean,
            "reward_var": self.reward_var,
            "reward_count": self.reward_count,
            "reward_return_B": self.reward_return_B,
        }

    def _fused_updates(self):
        """All updates in kernels; None where they have no form there."""
        from rlgraph.kernels import ppo_updates  # imports Triton, which torch for a CPU lacks

        if ppo_updates.why_not(self.policy) is not None:
            return None
        schedule = (self.learning_rate, self.iteration)
        return ppo_updates.FusedUpdates(self.env, self.policy, self.config, *schedule, self.generator)

    def _optimizer_state(self) -> list[dict]:
        """Of each parameter, in their order."""
        if self.updates is not None:
            return self.updates.adam.state()
        return [self.optimizer.state[parameter] for parameter in self.policy.parameters()]

    def _in_kernels(self) -> str:
        return "rollouts in one kernel, updates compiled" if self.updates is None else "rollouts and updates in kernels"

    @classmethod
    def why_not_fused(cls, config: PPOConfig, env: Environment) -> str | None:
        """Why rollouts do not fit into one kernel, in one line; None where they do."""
        policy = cls.build_policy(config, env)
        return why_not(env, policy.for_kernels(), policy.obs_mean.device)

    @staticmethod
    def build_policy(config: PPOConfig, env: Environment) -> ActorCritic:
        """A policy with fresh weights, on the config's device."""
        generator = torch.Generator().manual_seed(config.seed)
        policy = ActorCritic(env.observation_space, env.action_space, config.hidden, config.activation, generator)
        return policy.to(torch_device(config.device))
