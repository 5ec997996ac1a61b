"""What every training run is told, whatever the agent. Each agent's config adds its own fields."""

import itertools
from dataclasses import dataclass

import gymnasium

from rlgraph.devices import device_name
from rlgraph.environment import Environment
from rlgraph.errors import UsageError, shown
from rlgraph.fields import MOST, check_counts, check_not_negative, check_product, convert_fields
from rlgraph.precision import PRECISIONS

MOST_STEPS = 2**62  # of a run: rounded up to whole launches, they still fit into 64 bits
MOST_WIDTH = 2**20  # of a layer: of any batch, its outputs have a size in bytes
MOST_EPISODES = 2**20  # of an evaluation
SEEDS = 2**32  # seeds are in [0, SEEDS): what both backends tell apart


def check_episodes(name: str, episodes: int) -> None:
    """They are played side by side, so that memory bounds them."""
    if not 1 <= episodes <= MOST_EPISODES:
        raise UsageError(f"{name} must be at least 1 and at most {MOST_EPISODES}, but is {shown(episodes)}")


def check_seed(seed: int) -> None:
    """Raise a UsageError for a seed that some backend cannot take, or would take for another one."""
    if not 0 <= seed < SEEDS:
        raise UsageError(f"seed must be in [0, 2**32), but is {shown(seed)}")


@dataclass(frozen=True)
class TrainConfig:
    """Fields take any library's numbers, a `Path` for a text, and a device for its name; they hold plain Python values.

    Raises:
        UsageError: a value that a field cannot take; the message names the field.
    """

    env: str = "CartPole-v1"
    """Environment: a known name (see `rlgraph envs`) or the path of a Python file that defines one."""
    backend: str = "torch"
    """torch or jax."""
    device: str = "auto"
    """auto (a GPU if there is one), cpu, cuda, cuda:1."""
    mode: str = "auto"
    """torch: eager, compile, graph-uncompiled, graph, fused; jax: eager, jit, graph, fused. auto, on a GPU: graph, or
    fused where torch has it; in torch compile or eager where an iteration cannot be captured."""
    seed: int = 0
    """Same seed, same run; in [0, 2**32)."""
    num_envs: int = 64
    """Environments stepped side by side, B."""
    num_steps: int = 64
    """Steps an iteration in each environment, T."""
    total_steps: int = 500_000
    """Environment steps to train for, over all environments, rounded up to whole iterations and launches."""
    iterations_per_launch: int = 1
    """Iterations that one launch chains, K: less work for the host where iterations are short. Ctrl-C and checkpoints
    come between launches."""
    eval_episodes: int = 100
    """Episodes that the trained policy plays greedily at the end."""
    run_dir: str = ""
    """Folder for config, metrics, checkpoints and policy; by default a new one under runs/."""
    checkpoint_seconds: float = 60.0
    """Seconds between checkpoints; 0 saves one after every launch."""
    keep_checkpoints: int = 3
    """Latest checkpoints to keep, beside the best."""

    def __post_init__(self):
        object.__setattr__(self, "device", device_name(self.device))
        convert_fields(self)
        check_seed(self.seed)
        check_counts(self, ("num_envs", "num_steps", "iterations_per_launch", "keep_checkpoints"))
        check_counts(self, ("total_steps",), most=MOST_STEPS)
        check_episodes("eval_episodes", self.eval_episodes)
        check_not_negative(self, ("checkpoint_seconds",))
        check_product(self, "num_envs", "num_steps")

    @property
    def batch_size(self) -> int:
        """Steps an iteration over all environments, T * B."""
        return self.num_envs * self.num_steps

    @property
    def num_iterations(self) -> int:
        """A multiple of `iterations_per_launch`."""
        launches = -(-self.total_steps // (self.batch_size * self.iterations_per_launch))
        return launches * self.iterations_per_launch

    @property
    def launch_in_words(self) -> str:
        """What one launch is for: "an iteration", or "for 4 iterations"."""
        K = self.iterations_per_launch
        return "an iteration" if K == 1 else f"for {K} iterations"


# What several agents' configs check, beside what rlgraph.fields has.


def check_minibatches(config: TrainConfig) -> None:
    """The field num_minibatches."""
    if config.batch_size % config.num_minibatches:
        raise UsageError(
            f"num_envs * num_steps = {config.batch_size} does not divide into num_minibatches = "
            f"{config.num_minibatches}; choose a divisor"
        )


def check_network(config: TrainConfig) -> None:
    """The fields hidden, activation and precision."""
    if not config.hidden or min(config.hidden) < 1 or max(config.hidden) > MOST_WIDTH:
        raise UsageError(
            f"hidden must name at least one layer, each of width 1 to {MOST_WIDTH}, but is {shown(config.hidden)}"
        )
    for before, after in itertools.pairwise(config.hidden):
        if before * after > MOST:
            raise UsageError(f"hidden must have at most {MOST} weights between two layers, but has {before} * {after}")
    for name, known in (("activation", ("tanh", "relu", "silu")), ("precision", PRECISIONS)):
        if getattr(config, name) not in known:
            raise UsageError(f"{name} must be one of {', '.join(known)}, but is {shown(getattr(config, name))}")


def check_discrete(agent: str, env: Environment) -> None:
    """Raise a UsageError unless the actions can be enumerated."""
    if not isinstance(env.action_space, gymnasium.spaces.Discrete):
        kind = type(env.action_space).__name__
        raise UsageError(f"{agent} needs a Discrete action space, {env.id} has {kind}; use sac or ppo")
