"""DQN's configuration, shared by both backends, and the one that ships for each environment.

Mnih et al., "Human-level control through deep reinforcement learning" (2015), with the double estimator of van
Hasselt et al., "Deep Reinforcement Learning with Double Q-learning" (2016), the dueling network of Wang et al.,
"Dueling Network Architectures for Deep Reinforcement Learning" (2016), and n-step returns.
"""

from dataclasses import dataclass

from rlgraph.agents.parts.replay import num_rows
from rlgraph.config import TrainConfig, check_network
from rlgraph.errors import UsageError
from rlgraph.fields import check_counts, check_positive, check_product, check_unit_interval

# What one iteration reports, in this order, in one vector on the device. The first three are means over the
# iteration's updates, 0 before the first one; the last three are sums over the episodes that ended in it.
METRICS = (
    "loss",
    "q_value",
    "grad_norm",
    "learning_rate",
    "epsilon",
    "updates",
    "episode_return_sum",
    "episode_length_sum",
    "episodes",
)


@dataclass(frozen=True)
class DQNConfig(TrainConfig):
    num_steps: int = 4
    """Steps an iteration in each environment, T."""
    num_updates: int = 8
    """Optimiser steps an iteration."""
    minibatch_size: int = 128
    """Transitions drawn from the replay for each optimiser step."""
    replay_capacity: int = 100_000
    """Environment steps that the replay keeps, rounded up to whole iterations."""
    learning_starts: int = 10_000
    """Environment steps stored before the first optimiser step."""
    learning_rate: float = 5e-4
    """Adam's step size at the start."""
    anneal_lr: bool = True
    """Let the learning rate fall linearly to zero over the run."""
    gamma: float = 0.99
    """Discount factor a step."""
    n_step: int = 5
    """Steps of reward before a target bootstraps from the target network."""
    double: bool = True
    """Let the network choose the action that the target network values (double DQN)."""
    dueling: bool = False
    """Give the network a value and an advantage head (dueling DQN)."""
    epsilon_start: float = 1.0
    """Probability of a random action at the start."""
    epsilon_end: float = 0.05
    """Probability of a random action once exploration has fallen off."""
    exploration_fraction: float = 0.3
    """Share of the run over which epsilon falls linearly from start to end."""
    target_period: int = 1
    """Optimiser steps from one update of the target network to the next."""
    target_tau: float = 0.05
    """Share of the network in each update of the target network: 1 copies it, less averages (Polyak)."""
    max_grad_norm: float = 10.0
    """Scale the gradient down to this norm if it is larger."""
    hidden: tuple[int, ...] = (128, 128)
    """Widths of the hidden layers."""
    activation: str = "relu"
    """tanh, relu or silu."""
    precision: str = "tf32"
    """Matrix products on a GPU: ieee (float32), tf32 (JAX's own default) or bf16; see rlgraph/precision.py."""

    def __post_init__(self):
        super().__post_init__()
        names = ("num_updates", "minibatch_size", "replay_capacity", "learning_starts", "n_step", "target_period")
        check_counts(self, names)
        check_product(self, "num_updates", "minibatch_size")
        check_unit_interval(self, ("gamma", "epsilon_start", "epsilon_end", "exploration_fraction", "target_tau"))
        check_positive(self, ("learning_rate", "exploration_fraction", "target_tau", "max_grad_norm"))
        check_network(self)
        kept = num_rows(self.replay_capacity, self.num_steps, self.num_envs) * self.num_envs
        needed = self.first_rows * self.num_envs
        for limit, name in ((kept, "replay_capacity"), (self.num_iterations * self.batch_size, "total_steps")):
            if needed > limit:
                raise UsageError(
                    f"learning_starts and n_step ask for {needed} stored steps before the first update, "
                    f"{name} = {getattr(self, name)} allows {limit}; lower them or raise it"
                )

    @property
    def first_rows(self) -> int:
        """Steps stored in each environment before the first optimiser step."""
        return max(self.n_step, -(-self.learning_starts // self.num_envs))


DEFAULTS = {
    "Acrobot-v1": DQNConfig(env="Acrobot-v1", total_steps=300_000, n_step=3),
    "CartPole-v1": DQNConfig(env="CartPole-v1", total_steps=300_000),
    # Large steps against a target that stands still for a while: with the settings above it does not find the flag.
    "MountainCar-v0": DQNConfig(
        env="MountainCar-v0",
        num_envs=16,
        num_steps=8,
        learning_starts=1_000,
        learning_rate=1e-2,
        n_step=3,
        exploration_fraction=0.1,
        target_period=50,
        target_tau=1.0,
        hidden=(64, 64),
    ),
}
