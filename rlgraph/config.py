"""What every training run is told, whatever the agent. Each agent's config adds its own fields."""

from dataclasses import dataclass

from rlgraph.errors import UsageError

SEEDS = 2**32  # seeds are in [0, SEEDS): what both backends tell apart


def check_seed(seed: int) -> None:
    """Raise a UsageError for a seed that some backend cannot take, or would take for another one."""
    if not 0 <= seed < SEEDS:
        raise UsageError(f"seed must be in [0, 2**32), but is {seed}")


@dataclass(frozen=True)
class TrainConfig:
    env: str = "CartPole-v1"
    """Environment: a known name (see `rlgraph envs`) or the path of a Python file that defines one."""
    backend: str = "torch"
    """torch or jax."""
    device: str = "auto"
    """auto (a GPU if there is one), cpu, cuda, cuda:1."""
    mode: str = "auto"
    """torch: eager, compile, graph-uncompiled, graph; jax: eager, jit, graph. auto: graph on a GPU."""
    seed: int = 0
    """Same seed, same run; in [0, 2**32)."""
    total_steps: int = 500_000
    """Environment steps to train for, over all environments, rounded up to whole iterations."""
    eval_episodes: int = 100
    """Episodes that the trained policy plays greedily at the end."""
    run_dir: str = ""
    """Folder for config, metrics and policy; by default a new one under runs/."""
