"""PPO in torch: one iteration is collect, advantages, update, and on a GPU one replayed graph.

Schulman et al., "Proximal Policy Optimization Algorithms" (2017). The same sections, in the same order, as
ppo_jax.py. T steps, B environments, N = T * B, M = minibatch rows.
"""

from typing import NamedTuple

import numpy as np
import torch

from rlgraph.agents.moments_torch import merge_moments
from rlgraph.agents.networks_torch import ActorCritic, Gaussian, from_arrays, to_arrays
from rlgraph.agents.ppo import PPOConfig
from rlgraph.agents.returns_torch import discounted_returns, gae
from rlgraph.devices import torch_device, torch_single_thread
from rlgraph.environment import Environment
from rlgraph.graph.capture import capture, compiled
from rlgraph.graph.readback import Readback
from rlgraph.modes import MODES, compiles, resolve
from rlgraph.precision import torch_matmul_precision
from rlgraph.rollout import Rollout
from rlgraph.rollout.torch import Collector, evaluate


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


class PPO:
    """A PPO run on one device.

    Args:
        config: see PPOConfig.
        env: built by rlgraph.make.

    `iterate()` runs one iteration and returns at once on a GPU: read its metrics after launching the next one.
    """

    def __init__(self, config: PPOConfig, env: Environment):
        self.config, self.env = config, env
        self.device = torch_device(config.device)
        self.mode = resolve("torch", config.mode, on_gpu=self.device.type == "cuda")
        compile = compiles(self.mode, on_gpu=self.device.type == "cuda")
        self._create("compile" if compile else "eager")
        self._loss = compiled(ppo_loss) if compile else ppo_loss
        self.graph, self._run = None, self._iteration
        if MODES["torch"][self.mode].graph:
            with torch_matmul_precision(config.precision):
                self.graph = capture(
                    self._iteration, state=self._state(), generators=[self.generator], device=self.device
                )
            self._run = self.graph.replay

    # ---- the iteration

    def iterate(self) -> Readback:
        """One iteration: T * B steps and num_epochs * num_minibatches updates. Its METRICS are on their way."""
        with torch_matmul_precision(self.config.precision), torch_single_thread(self.device):
            return Readback(self._run())

    def _iteration(self) -> torch.Tensor:
        """Collect, advantages, update. Nothing here reads a device value on the host. Returns METRICS' vector."""
        config = self.config
        rollout, episodes = self.collector.collect()
        with torch.no_grad():
            batch = self._advantages(rollout)
            if config.anneal_lr:
                left = (1 - self.iteration / config.num_iterations).clamp(min=0)
                self.learning_rate.copy_(config.learning_rate * left)
        totals, stopped = torch.zeros(7, device=self.device), torch.zeros((), device=self.device)
        for _ in range(config.num_epochs):
            order = torch.randperm(config.batch_size, generator=self.generator, device=self.device)
            for rows_M in order.chunk(config.num_minibatches):
                totals += self._update(batch, rows_M, stopped)
        if config.normalize_obs:
            flat = self.policy.flat(rollout.obs).flatten(0, 1)
            merge_moments(self.policy.obs_mean, self.policy.obs_var, self.obs_count, flat)
        self.iteration += 1
        means = totals[:6] / config.num_updates
        return torch.stack([*means, self.learning_rate, totals[6], *episodes])

    def _advantages(self, rollout: Rollout) -> Batch:
        config = self.config
        reward_TB = rollout.reward_TB
        if config.normalize_reward:
            done_TB = rollout.terminated_TB | rollout.truncated_TB
            g_TB, carried_B = discounted_returns(reward_TB, done_TB, self.reward_return_B, config.gamma)
            self.reward_return_B.copy_(carried_B)
            merge_moments(self.reward_mean, self.reward_var, self.reward_count, g_TB.reshape(-1, 1))
            reward_TB = reward_TB / torch.sqrt(self.reward_var + 1e-8)
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
        return Batch(*(x.flatten(0, 1) for x in batch))

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
        self.policy = build_policy(config, self.env)
        self.collector = Collector(
            self.env,
            self.policy.act,
            self.policy.value,
            config.num_envs,
            config.num_steps,
            self.generator,
            collector_mode,
        )
        self.learning_rate = torch.tensor(config.learning_rate, device=device)
        self.optimizer = torch.optim.Adam(
            self.policy.parameters(),
            self.learning_rate,
            eps=1e-5,
            fused=True,
            capturable=device.type == "cuda",
        )
        _materialise(self.optimizer)
        self.iteration = torch.zeros((), device=device)
        self.obs_count, self.reward_count = (
            torch.tensor(1e-4, device=device),
            torch.tensor(1e-4, device=device),
        )
        self.reward_mean, self.reward_var = torch.zeros(1, device=device), torch.ones(1, device=device)
        self.reward_return_B = torch.zeros(config.num_envs, device=device)

    def _state(self) -> list:
        """Every tensor that one iteration leaves to the next."""
        moments = [self.obs_count, self.reward_count, self.reward_mean, self.reward_var, self.reward_return_B]
        optimizer = [list(s.values()) for s in self.optimizer.state.values()]
        network = [*self.policy.parameters(), *self.policy.buffers()]
        return [self.collector.state(), network, optimizer, self.learning_rate, self.iteration, moments]

    def execution(self) -> str:
        """In words, how iterations run."""
        if self.graph is None:
            return "compiled, launched step by step" if self.mode == "compile" else "operation by operation"
        if not self.graph.captured:
            return f"no CUDA graph on {self.device.type}: operation by operation"
        return f"one CUDA graph an iteration, replayed {self.graph.replays} times"

    # ---- the trained policy

    def arrays(self) -> dict[str, np.ndarray]:
        """The policy's weights and observation statistics by name, the same names as ppo_jax.py's."""
        return to_arrays(self.policy)


def build_policy(config: PPOConfig, env: Environment) -> ActorCritic:
    """A policy with fresh weights, on the config's device."""
    generator = torch.Generator().manual_seed(config.seed)
    policy = ActorCritic(env.observation_space, env.action_space, config.hidden, config.activation, generator)
    return policy.to(torch_device(config.device))


def load_policy(config: PPOConfig, env: Environment, arrays: dict[str, np.ndarray]) -> ActorCritic:
    """The policy whose `arrays` either backend wrote.

    Raises:
        UsageError: the arrays are those of another network.
    """
    policy = build_policy(config, env)
    from_arrays(policy, arrays)
    return policy


def evaluate_policy(policy: ActorCritic, env: Environment, num_episodes: int, seed: int) -> np.ndarray:
    """Undiscounted returns [num_episodes] of the greedy policy."""
    generator = torch.Generator(policy.obs_mean.device).manual_seed(seed)
    return evaluate(env, policy.greedy, num_episodes, generator).numpy(force=True)


def _materialise(optimizer: torch.optim.Adam) -> None:
    """Create Adam's moments and step counts, at zero: a capture must find every tensor that it will update."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()  # zero gradients move nothing
    for state in optimizer.state.values():
        for tensor in state.values():
            tensor.zero_()
