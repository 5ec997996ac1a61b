"""SAC's configuration, shared by both backends, and the one that ships for each environment.

Haarnoja et al., "Soft Actor-Critic Algorithms and Applications" (arXiv 1812.05905, 2018).
"""

from dataclasses import dataclass

import gymnasium
import numpy as np

from rlgraph.agents.parts.replay import num_rows
from rlgraph.config import TrainConfig, check_network
from rlgraph.environment import Environment
from rlgraph.errors import UsageError
from rlgraph.fields import check_counts, check_positive, check_product, check_unit_interval

# What one iteration reports, in this order, in one vector on the device. Means over the iteration's updates, whether
# taken or not, up to the temperature; the last three are sums over the episodes that ended in it.
METRICS = (
    "critic_loss",
    "actor_loss",
    "q_value",
    "entropy",
    "temperature",
    "learning_rate",
    "updates",
    "episode_return_sum",
    "episode_length_sum",
    "episodes",
)


@dataclass(frozen=True)
class SACConfig(TrainConfig):
    num_envs: int = 32
    """Environments stepped side by side, B."""
    num_steps: int = 4
    """Steps an iteration in each environment, T."""
    num_updates: int = 16
    """Optimiser steps an iteration."""
    minibatch_size: int = 256
    """Transitions drawn from the replay for each optimiser step."""
    replay_capacity: int = 100_000
    """Environment steps that the replay keeps, rounded up to whole iterations."""
    learning_starts: int = 1_000
    """Environment steps taken at random, and stored, before the first optimiser step; rounded up to iterations."""
    learning_rate: float = 3e-3
    """Adam's step size at the start, for actor, critics and temperature."""
    anneal_lr: bool = True
    """Let the learning rate fall linearly to zero over the run."""
    gamma: float = 0.99
    """Discount factor a step."""
    target_tau: float = 0.02
    """Share of the critics in each update of the target critics (Polyak averaging)."""
    noise_correlation: float = 0.0
    """0: exploration noise is new at every step; else it is kept for an iteration and correlates so with the last."""
    normalize_obs: bool = False
    """Normalise observations with running statistics, updated once an iteration."""
    hidden: tuple[int, ...] = (64, 64)
    """Widths of the hidden layers of the actor and of each critic."""
    activation: str = "relu"
    """tanh, relu or silu."""
    precision: str = "tf32"
    """Matrix products on a GPU: ieee (float32), tf32 (JAX's own default) or bf16; see rlgraph/precision.py."""

    def __post_init__(self):
        super().__post_init__()
        check_counts(self, ("num_updates", "minibatch_size", "replay_capacity", "learning_starts"))
        check_product(self, "num_updates", "minibatch_size")
        check_unit_interval(self, ("gamma", "target_tau", "noise_correlation"))
        check_positive(self, ("learning_rate", "target_tau"))
        check_network(self)
        num_rows(self.replay_capacity, self.num_steps, self.num_envs)
        if self.random_iterations >= self.num_iterations:
            raise UsageError(
                f"learning_starts = {self.learning_starts} leaves nothing of total_steps = {self.total_steps} for "
                "learning; lower it or raise total_steps"
            )

    @property
    def random_iterations(self) -> int:
        """Iterations that act at random and do not learn."""
        return -(-self.learning_starts // self.batch_size)


def check_action_space(env: Environment) -> None:
    """Raise a UsageError unless the actions are a Box that tanh can be scaled into."""
    space = env.action_space
    if not isinstance(space, gymnasium.spaces.Box):
        raise UsageError(f"sac needs a Box action space, {env.id} has {type(space).__name__}; use dqn, pqn or ppo")
    finite = np.isfinite(space.low) & np.isfinite(space.high)
    if not (finite & (space.low < space.high)).all():
        raise UsageError(f"sac needs actions of finite bounds, low < high, {env.id} has others; use ppo")


# The car is out of the valley only after dozens of pushes one way and then the other: noise that is drawn anew at every
# step hardly ever gets there, noise that stays as it is for a while does.
DEFAULTS = {
    "MountainCarContinuous-v0": SACConfig(
        env="MountainCarContinuous-v0",
        total_steps=100_000,
        num_steps=8,
        learning_starts=10_000,
        noise_correlation=0.8,
        normalize_obs=True,
    ),
    "Pendulum-v1": SACConfig(env="Pendulum-v1", total_steps=40_000, gamma=0.95, target_tau=0.05),
}
