"""PPO's configuration, shared by both backends, and the one that ships for each environment.

Schulman et al., "Proximal Policy Optimization Algorithms" (2017); the details follow Huang et al., "The 37
Implementation Details of Proximal Policy Optimization" (2022).
"""

from dataclasses import dataclass

from rlgraph.config import TrainConfig, check_minibatches, check_network
from rlgraph.errors import UsageError
from rlgraph.fields import check_counts, check_not_negative, check_positive, check_product, check_unit_interval

# What one iteration reports, in this order, in one vector on the device. Means over the iteration's minibatches,
# but for the last three, which are sums over the episodes that ended in it.
METRICS = (
    "policy_loss",
    "value_loss",
    "entropy",
    "approx_kl",
    "clip_fraction",
    "grad_norm",
    "learning_rate",
    "updates",
    "episode_return_sum",
    "episode_length_sum",
    "episodes",
)


@dataclass(frozen=True)
class PPOConfig(TrainConfig):
    learning_rate: float = 2.5e-3
    """Adam's step size at the start."""
    anneal_lr: bool = True
    """Let the learning rate fall linearly to zero over the run."""
    gamma: float = 0.99
    """Discount factor a step."""
    gae_lambda: float = 0.95
    """Lambda of generalised advantage estimation."""
    num_epochs: int = 4
    """Passes over each iteration's steps."""
    num_minibatches: int = 4
    """Minibatches a pass."""
    clip_range: float = 0.2
    """Clip the probability ratio to 1 +- this."""
    clip_value: float | None = None
    """Clip the value's change to +- this; None does not clip."""
    normalize_advantage: bool = True
    """Give each minibatch's advantages mean 0 and standard deviation 1."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""
    value_coef: float = 0.5
    """Weight of the value loss."""
    max_grad_norm: float = 0.5
    """Scale the gradient down to this norm if it is larger."""
    target_kl: float | None = None
    """Stop an iteration's updates at the first minibatch whose approximate KL divergence exceeds this."""
    normalize_obs: bool = False
    """Normalise observations with running statistics, updated once an iteration."""
    normalize_reward: bool = False
    """Divide rewards by the running standard deviation of the discounted return."""
    hidden: tuple[int, ...] = (64, 64)
    """Widths of the hidden layers of actor and critic."""
    activation: str = "tanh"
    """tanh, relu or silu."""
    precision: str = "tf32"
    """Matrix products on a GPU: ieee (float32), tf32 (JAX's own default) or bf16; see rlgraph/precision.py."""

    def __post_init__(self):
        super().__post_init__()
        check_counts(self, ("num_epochs", "num_minibatches"))
        check_product(self, "num_epochs", "num_envs", "num_steps")
        check_minibatches(self)
        if self.normalize_advantage and self.batch_size // self.num_minibatches < 2:
            raise UsageError(
                "normalize_advantage needs minibatches of at least 2 steps; lower num_minibatches or set it to False"
            )
        check_unit_interval(self, ("gamma", "gae_lambda"))
        check_positive(self, ("learning_rate", "clip_range", "max_grad_norm", "clip_value", "target_kl"))
        check_not_negative(self, ("entropy_coef", "value_coef"))
        check_network(self)

    @property
    def num_updates(self) -> int:
        """Optimiser steps an iteration."""
        return self.num_epochs * self.num_minibatches


# Where rewards are rare or large, running statistics bring observations and returns to a common scale. The two mountain
# cars see a reward only at the flag: a longer credit (lambda, gamma) and an entropy bonus let them find it.
# CartPole pays 1 a step whatever the action: once the pole stays up, advantages are little but the critic's errors,
# which normalize_advantage scales up to updates of full size. With PPOConfig's own, larger step size and raw returns of
# up to 100 for the critic, some seeds on a GPU unlearned what they had solved, or never came to it.
_NORMALIZED = {"normalize_obs": True, "normalize_reward": True}
_RARE_REWARD = {**_NORMALIZED, "total_steps": 1_000_000, "gae_lambda": 0.98, "entropy_coef": 0.01}

DEFAULTS = {
    "Acrobot-v1": PPOConfig(env="Acrobot-v1", **_NORMALIZED),
    "CartPole-v1": PPOConfig(env="CartPole-v1", learning_rate=1e-3, normalize_reward=True),
    "MountainCar-v0": PPOConfig(env="MountainCar-v0", **_RARE_REWARD),
    "MountainCarContinuous-v0": PPOConfig(env="MountainCarContinuous-v0", gamma=0.999, **_RARE_REWARD),
    "Pendulum-v1": PPOConfig(env="Pendulum-v1", gamma=0.95, learning_rate=1e-3, num_epochs=10, normalize_reward=True),
}
