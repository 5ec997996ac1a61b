"""PQN's configuration, shared by both backends, and the one that ships for each environment.

Gallici et al., "Simplifying Deep Temporal Difference Learning" (2024): Q-learning in many environments side by side,
stable through layer normalisation and lambda-returns, without a replay buffer and without a target network.
"""

from dataclasses import dataclass

from rlgraph.config import TrainConfig, check_minibatches, check_network
from rlgraph.fields import check_counts, check_positive, check_product, check_unit_interval

# What one iteration reports, in this order, in one vector on the device. The first three are means over the
# iteration's minibatches, the last three sums over the episodes that ended in it.
METRICS = (
    "loss",
    "q_value",
    "grad_norm",
    "learning_rate",
    "epsilon",
    "episode_return_sum",
    "episode_length_sum",
    "episodes",
)


@dataclass(frozen=True)
class PQNConfig(TrainConfig):
    num_steps: int = 32
    """Steps an iteration in each environment, T."""
    learning_rate: float = 1e-3
    """Adam's step size at the start."""
    anneal_lr: bool = True
    """Let the learning rate fall linearly to zero over the run."""
    gamma: float = 0.99
    """Discount factor a step."""
    q_lambda: float = 0.95
    """Lambda of the returns: 0 looks one step ahead, 1 to the end of the episode or rollout."""
    num_epochs: int = 4
    """Passes over each iteration's steps."""
    num_minibatches: int = 8
    """Minibatches a pass."""
    epsilon_start: float = 1.0
    """Probability of a random action at the start."""
    epsilon_end: float = 0.05
    """Probability of a random action once exploration has fallen off."""
    exploration_fraction: float = 0.3
    """Share of the run over which epsilon falls linearly from start to end."""
    max_grad_norm: float = 10.0
    """Scale the gradient down to this norm if it is larger."""
    hidden: tuple[int, ...] = (128, 128)
    """Widths of the hidden layers, each with layer normalisation."""
    activation: str = "relu"
    """tanh, relu or silu."""
    precision: str = "tf32"
    """Matrix products on a GPU: ieee (float32), tf32 (JAX's own default) or bf16; see rlgraph/precision.py."""

    def __post_init__(self):
        super().__post_init__()
        check_counts(self, ("num_epochs", "num_minibatches"))
        check_product(self, "num_epochs", "num_envs", "num_steps")
        check_minibatches(self)
        check_unit_interval(self, ("gamma", "q_lambda", "epsilon_start", "epsilon_end", "exploration_fraction"))
        check_positive(self, ("learning_rate", "exploration_fraction", "max_grad_norm"))
        check_network(self)

    @property
    def num_updates(self) -> int:
        """Optimiser steps an iteration."""
        return self.num_epochs * self.num_minibatches


DEFAULTS = {
    "Acrobot-v1": PQNConfig(env="Acrobot-v1"),
    "CartPole-v1": PQNConfig(env="CartPole-v1"),
}
