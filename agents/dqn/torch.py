"""DQN in torch: one iteration is collect, store, update, and on a GPU one replayed graph.

Mnih et al., "Human-level control through deep reinforcement learning" (2015). The same sections, in the same order, as
dqn/jax.py. T steps, B environments, K updates, M = minibatch rows.
"""

import copy

import torch

from rlgraph.agents.dqn.config import DQNConfig
from rlgraph.agents.networks.torch import QNetwork, epsilon_greedy
from rlgraph.agents.parts.replay_torch import Replay, Transitions, discounted
from rlgraph.agents.trainer_torch import Trainer
from rlgraph.config import check_discrete
from rlgraph.devices import torch_device
from rlgraph.environment import Environment
from rlgraph.rollout.torch import Collector


def dqn_loss(policy: QNetwork, target: QNetwork, batch: Transitions, config: DQNConfig):
    """Half the squared temporal difference, mean over one minibatch.

    Args:
        policy: the one being trained.
        target: the network that values what comes after.
        batch: M transitions.

    Returns:
        loss []; and metrics [2], without gradient: loss, mean value of the actions taken.
    """
    with torch.no_grad():
        # van Hasselt et al. (2016), eq. 4; without the double estimator Mnih et al. (2015), algorithm 1.
        next_action = (policy if config.double else target).greedy(batch.next_obs)
        next_value = _value_of(next_action, target(batch.next_obs))
        target_M = batch.reward + discounted(batch.discount, next_value)
    q_value = _value_of(batch.action, policy(batch.obs))
    # Not clipped as in the paper, where rewards are too: the rare and large errors at an episode's end must count.
    loss = 0.5 * ((q_value - target_M) ** 2).mean()
    return loss, torch.stack([loss, q_value.mean()]).detach()


def _value_of(action_M, value_MA):
    return value_MA.gather(-1, action_M.unsqueeze(-1)).squeeze(-1)


class DQN(Trainer):
    """A DQN run on one device.

    Args:
        config: see DQNConfig.
        env: built by rlgraph.make, with a Discrete action space.

    `iterate()` makes one launch and returns at once on a GPU: read its metrics after the next launch.
    """

    def __init__(self, config: DQNConfig, env: Environment):
        check_discrete("dqn", env)
        super().__init__(config, env)

    # ---- the iteration

    def _iteration(self) -> torch.Tensor:
        """Collect, store, update. Nothing here reads a device value on the host. Returns METRICS' vector."""
        config = self.config
        self._schedule()
        rollout, episodes = self.collector.collect()
        self.replay.add(rollout)
        K, M = config.num_updates, config.minibatch_size
        # What the replay holds does not change between the updates: all of their minibatches are drawn at once.
        batches = self.replay.sample(K * M, self.generator, config.n_step, config.gamma)
        learning = (self.replay.fill >= config.first_rows).float()
        totals = torch.zeros(3, dtype=torch.float32, device=self.device)
        for batch in zip(*(x.split(M) for x in batches)):
            totals += self._update(Transitions(*batch), learning)
        self.iteration += 1
        means = torch.where(learning > 0, totals / K, 0)
        return torch.stack([*means, self.learning_rate, self.epsilon, learning * K, *episodes])

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

    def _update(self, batch: Transitions, learning: torch.Tensor) -> torch.Tensor:
        """One optimiser step, and the target network's where it is due; nothing moves while `learning` ([]) is 0.

        Returns:
            [3]: dqn_loss's metrics, the gradient norm.
        """
        config = self.config
        self.optimizer.zero_grad(set_to_none=True)
        loss, metrics = self._loss(self.policy, self.target, batch, config)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.policy.parameters(), config.max_grad_norm)
        # The fused Adam leaves out a step whose `found_inf` is 1, on the device: no host branch.
        self.optimizer.found_inf = 1 - learning
        self.optimizer.step()
        with torch.no_grad():
            self.updates += learning.long()
            due = (learning > 0) & (self.updates % config.target_period == 0)
            old = list(self.target.parameters())
            # Towards itself where it is not due: a share of 0 would let an infinity through.
            new = [torch.where(due, n, o) for n, o in zip(self.policy.parameters(), old)]
            torch._foreach_lerp_(old, new, config.target_tau)
        return torch.stack([*metrics, norm])

    # ---- what the run holds

    def _create(self, collector_mode: str) -> None:
        config, device = self.config, self.device
        self.generator = torch.Generator(device).manual_seed(config.seed)
        self.policy = self.build_policy(config, self.env)
        self.target = copy.deepcopy(self.policy).requires_grad_(False)
        self.learning_rate = torch.tensor(config.learning_rate, dtype=torch.float32, device=device)
        self.epsilon = torch.tensor(config.epsilon_start, dtype=torch.float32, device=device)
        self.iteration = torch.zeros((), dtype=torch.int64, device=device)
        self.updates = torch.zeros((), dtype=torch.int64, device=device)
        self.collector = Collector(
            self.env, self._act, None, config.num_envs, config.num_steps, self.generator, collector_mode
        )
        self.replay = Replay(self.collector.rollout, config.replay_capacity)
        self._loss = self._in_mode(dqn_loss)
        self.optimizer = self._adam(self.policy.parameters(), self.learning_rate, eps=1e-5)

    def _state(self) -> dict:
        """Every tensor that one iteration leaves to the next, by name."""
        return {
            "collector": self.collector.state(),
            "replay": self.replay.state(),
            "policy": self.policy.state_dict(),
            "target": self.target.state_dict(),
            "optimizer": {name: self.optimizer.state[p] for name, p in self.policy.named_parameters()},
            "learning_rate": self.learning_rate,
            "epsilon": self.epsilon,
            "iteration": self.iteration,
            "updates": self.updates,
        }

    @staticmethod
    def build_policy(config: DQNConfig, env: Environment) -> QNetwork:
        """A policy with fresh weights, on the config's device."""
        generator = torch.Generator().manual_seed(config.seed)
        policy = QNetwork(
            env.observation_space, env.action_space, config.hidden, config.activation, config.dueling, generator
        )
        return policy.to(torch_device(config.device))
