"""PQN in torch: one iteration is collect, lambda-returns, update, and on a GPU one replayed graph.

Gallici et al., "Simplifying Deep Temporal Difference Learning" (2024). The same sections, in the same order, as
pqn/jax.py. T steps, B environments, N = T * B, M = minibatch rows.
"""

from typing import NamedTuple

import torch

from rlgraph.agents.networks.torch import LayerNormQNetwork, epsilon_greedy
from rlgraph.agents.pqn.config import PQNConfig
from rlgraph.agents.trainer_torch import Trainer
from rlgraph.config import check_discrete
from rlgraph.devices import torch_device
from rlgraph.environment import Environment
from rlgraph.rollout import Rollout
from rlgraph.rollout.torch import Collector, in_parts


class Batch(NamedTuple):
    """An iteration's N = T * B steps, flattened."""

    obs: torch.Tensor  # [N, *observation shape]
    action: torch.Tensor  # [N] int64
    target: torch.Tensor  # [N] float32, lambda-returns


def pqn_loss(policy: LayerNormQNetwork, batch: Batch, rows_M: torch.Tensor):
    """The squared error of one minibatch's action values.

    Args:
        policy: the one being trained.
        batch: all N steps.
        rows_M: [M] int64, the minibatch.

    Returns:
        loss []; and metrics [2], without gradient: loss, mean value of the actions taken.
    """
    obs, action, target = (x[rows_M] for x in batch)
    q_value = policy(obs).gather(-1, action.unsqueeze(-1)).squeeze(-1)
    loss = 0.5 * ((q_value - target) ** 2).mean()  # algorithm 1, the targets held fixed
    return loss, torch.stack([loss, q_value.mean()]).detach()


class PQN(Trainer):
    """A PQN run on one device.

    Args:
        config: see PQNConfig.
        env: built by rlgraph.make, with a Discrete action space.

    `iterate()` makes one launch and returns at once on a GPU: read its metrics after the next launch.
    """

    def __init__(self, config: PQNConfig, env: Environment):
        check_discrete("pqn", env)
        super().__init__(config, env)

    # ---- the iteration

    def _iteration(self) -> torch.Tensor:
        """Collect, lambda-returns, update. Nothing here reads a device value on the host. Returns METRICS' vector."""
        config = self.config
        self._schedule()
        rollout, episodes = self.collector.collect()
        batch = self._targets(rollout)
        totals = torch.zeros(3, dtype=torch.float32, device=self.device)
        for _ in range(config.num_epochs):
            order = torch.randperm(config.batch_size, generator=self.generator, device=self.device)
            for rows_M in order.chunk(config.num_minibatches):
                totals += self._update(batch, rows_M)
        self.iteration += 1
        return torch.stack([*(totals / config.num_updates), self.learning_rate, self.epsilon, *episodes])

    def _schedule(self) -> None:
        """This iteration's learning rate and epsilon, on the device."""
        config = self.config
        done = self._share_done()
        if config.anneal_lr:
            self.learning_rate.copy_(config.learning_rate * (1 - done).clamp(min=0))
        exploring = (1 - done / config.exploration_fraction).clamp(min=0)
        self.epsilon.copy_(config.epsilon_end + (config.epsilon_start - config.epsilon_end) * exploring)

    def _act(self, obs, noise):
        """Epsilon-greedy: ([B, *observation shape], uniforms [B]) -> (action [B], log-prob [B], which nothing uses)."""
        return epsilon_greedy(self.policy(obs), noise, self.epsilon), torch.zeros_like(noise)

    @torch.no_grad()
    def _targets(self, rollout: Rollout) -> Batch:
        config = self.config
        target_TB = self._returns.lambda_returns(
            rollout.reward_TB,
            in_parts(lambda obs: self.policy(obs).amax(-1), rollout.final_obs),
            rollout.terminated_TB,
            rollout.truncated_TB,
            config.gamma,
            config.q_lambda,
        )
        return Batch(*(x.flatten(0, 1) for x in (rollout.obs, rollout.action, target_TB)))

    def _update(self, batch: Batch, rows_M: torch.Tensor) -> torch.Tensor:
        """One optimiser step. Returns [3]: pqn_loss's metrics, the gradient norm."""
        self.optimizer.zero_grad(set_to_none=True)
        loss, metrics = self._loss(self.policy, batch, rows_M)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.policy.parameters(), self.config.max_grad_norm)
        self.optimizer.step()
        return torch.stack([*metrics, norm])

    # ---- what the run holds

    def _create(self, collector_mode: str) -> None:
        config, device = self.config, self.device
        self.generator = torch.Generator(device).manual_seed(config.seed)
        self.policy = self.build_policy(config, self.env)
        self.learning_rate = torch.tensor(config.learning_rate, dtype=torch.float32, device=device)
        self.epsilon = torch.tensor(config.epsilon_start, dtype=torch.float32, device=device)
        self.iteration = torch.zeros((), dtype=torch.int64, device=device)
        self.collector = Collector(
            self.env, self._act, None, config.num_envs, config.num_steps, self.generator, collector_mode
        )
        # Where the mode compiles: what runs the eager kernels equals `eager` to the last bit.
        self._returns = self._returns_module(in_kernels=self._compiles and device.type == "cuda")
        # The paper's RAdam is Adam after a warm-up of its own; torch has no fused one, and on a CPU it reads its step
        # counts on the host.
        self._loss = self._in_mode(pqn_loss)
        self.optimizer = self._adam(self.policy.parameters(), self.learning_rate, eps=1e-5)

    def _state(self) -> dict:
        """Every tensor that one iteration leaves to the next, by name."""
        return {
            "collector": self.collector.state(),
            "policy": self.policy.state_dict(),
            "optimizer": {name: self.optimizer.state[p] for name, p in self.policy.named_parameters()},
            "learning_rate": self.learning_rate,
            "epsilon": self.epsilon,
            "iteration": self.iteration,
        }

    @staticmethod
    def build_policy(config: PQNConfig, env: Environment) -> LayerNormQNetwork:
        """A policy with fresh weights, on the config's device."""
        generator = torch.Generator().manual_seed(config.seed)
        policy = LayerNormQNetwork(env.observation_space, env.action_space, config.hidden, config.activation, generator)
        return policy.to(torch_device(config.device))
