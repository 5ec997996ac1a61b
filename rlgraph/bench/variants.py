"""What is compared: a table of variants, each registered by one function that prepares a piece of work."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

import rlgraph
from rlgraph.agents.ppo.config import PPOConfig
from rlgraph.config import TrainConfig
from rlgraph.environment import Environment
from rlgraph.runs.train import default_config, metric_names

# The columns, after Isaac Lab. A step is one advance of all B environments; a repeat is T of them.
COLUMNS = {
    "env": "environment only: actions drawn at random on the device",
    "policy": "environment and policy: rollouts with actor and critic, recorded",
    "train": "training: whole iterations, rollout and update",
}
COMPARED_STEPS = 8  # rounding differs between kernels and grows along a trajectory, so few steps are compared


@dataclass(frozen=True)
class Workload:
    """What every variant is given to do."""

    column: str
    env: str = "CartPole-v1"
    num_envs: int = 4096
    num_steps: int = 128
    hidden: tuple[int, ...] = (64, 64)
    precision: str = "tf32"
    num_epochs: int = 4
    num_minibatches: int = 4
    device: str = "auto"
    seed: int = 0
    agent: str = "ppo"  # of the train column

    def environment(self) -> Environment:
        return rlgraph.make(self.env)

    def config(self, backend: str, mode: str) -> PPOConfig:
        """The same network, T, B, epochs and minibatches for whoever acts, or trains by PPO."""
        names = ("env", "num_envs", "num_steps", "hidden", "precision", "num_epochs", "num_minibatches")
        shared = {name: getattr(self, name) for name in names}
        return PPOConfig(learning_rate=2.5e-4, **shared, **self._run(backend, mode))

    def training_config(self, backend: str, mode: str) -> TrainConfig:
        """PPO's is `config`; another agent's is what ships but for B, T and precision, and it learns from the start."""
        if self.agent == "ppo":
            return self.config(backend, mode)
        default = default_config(self.agent, self.env)
        shared = {name: getattr(self, name) for name in ("num_envs", "num_steps", "precision")}
        if hasattr(default, "learning_starts"):
            shared["learning_starts"] = 1
        return replace(default, **shared, **self._run(backend, mode))

    def _run(self, backend: str, mode: str) -> dict:
        """So long that the schedules stay where they start."""
        total_steps = 10**6 * self.num_envs * self.num_steps
        return {"backend": backend, "mode": mode, "device": self.device, "seed": self.seed, "total_steps": total_steps}


@dataclass
class Prepared:
    """A variant, ready to run a workload over and over.

    Attributes:
        seconds: run one repeat (T steps, or one training iteration), wait for it, and return how long it took. With an
            argument n, n repeats back to back, and the seconds of all.
        outcome: what the last repeat computed, for the check. "obs" [steps, B, ...] or "metrics" [n] are compared
            entry by entry where draws are the same; "means" {name: (mean, standard error)} in distribution.
        launches: run one repeat and count its graph launches; None where nothing can count them.
        capture_seconds: the part of preparing that was capture and instantiation.
        step_seconds: where a repeat is a loop of separate steps: run n of them and return the seconds. A repeat that
            takes long is then timed by fewer steps. None where a repeat cannot be divided.
    """

    seconds: Callable[..., float]
    outcome: Callable[[], dict]
    launches: Callable[[], int | None] = lambda: None
    capture_seconds: float = 0.0
    step_seconds: Callable[[int], float] | None = None


class Skipped(Exception):  # noqa: N818 - not an error
    """Why a variant does not run this workload; listed in the results."""


@dataclass(frozen=True)
class Variant:
    name: str
    backend: str  # torch, jax, or the peer's own name
    prepare: Callable[[Workload], Prepared]
    reference: str | None  # the variant it must agree with; None for the references themselves
    same_draws: bool  # compare entry by entry; otherwise in distribution
    gpu_only: bool
    columns: tuple[str, ...]
    requires: tuple[str, ...]  # packages beyond rlgraph's own


VARIANTS: dict[str, Variant] = {}


def variant(
    name: str,
    backend: str,
    reference: str | None = None,
    same_draws: bool = True,
    gpu_only: bool = False,
    columns: tuple[str, ...] = tuple(COLUMNS),
    requires: tuple[str, ...] = (),
):
    """Register the decorated function, Workload -> Prepared, as a variant. It runs in a process of its own."""

    def register(prepare: Callable[[Workload], Prepared]) -> Callable[[Workload], Prepared]:
        VARIANTS[name] = Variant(name, backend, prepare, reference, same_draws, gpu_only, columns, requires)
        return prepare

    return register


def disagreement(variant: Variant, got: dict, expected: dict) -> str | None:
    """Why an outcome is wrong, or None.

    Same draws: differences must stay under 2 % of the largest entry for observations of the first steps (TF32 products
    and fused kernels round differently), and for each metric of a first training iteration under 10 % of it, or of 0.1
    where it is less (losses are differences of larger numbers).
    In distribution: means must lie within six standard errors.
    """
    if variant.same_draws:
        for name, limit in (("obs", 0.02), ("metrics", 0.1)):
            if name in expected:
                a, b = np.asarray(got[name], float), np.asarray(expected[name], float)
                if a.shape != b.shape:
                    return f"{name} has shape {list(a.shape)}, {variant.reference} has {list(b.shape)}"
                scale = max(np.abs(b).max(), 1e-12) if name == "obs" else np.maximum(np.abs(b), 0.1)
                error = np.abs(a - b) / scale
                if not (error < limit).all():  # NaN fails
                    return f"{name} differs from {variant.reference} by {np.max(error):.1e} of what it is"
        return None
    for name in got["means"].keys() & expected["means"].keys():
        (a, error_a), (b, error_b) = got["means"][name], expected["means"][name]
        spread = max((error_a**2 + error_b**2) ** 0.5, 1e-6)
        if not abs(a - b) < 6 * spread:
            return f"mean {name} is {a:.4g}, {variant.reference} has {b:.4g} (standard error {spread:.1g})"
    return None


def means(
    obs: np.ndarray, reward: np.ndarray, done: np.ndarray, counted: np.ndarray | None = None
) -> dict[str, tuple[float, float]]:
    """Mean and standard error of what a rollout saw, over its B environments.

    Args:
        obs: [T, B, ...]; reward, done: [T, B]. Steps of one environment depend on each other, environments do not.
        counted: [T, B] bool, the steps that count: not those in which an environment only resets.

    Of each environment the first 3/4 T steps that count are taken: all have as many, and how often episodes end depends
    on how long one has been watching.
    """
    counted = np.ones(reward.shape, bool) if counted is None else counted
    counted = counted & (counted.cumsum(axis=0) <= max(1, len(counted) * 3 // 4))
    series = {"reward": reward, "episode ends": done, "abs(obs)": np.abs(obs.reshape(*reward.shape, -1)).mean(-1)}
    steps_B = np.maximum(counted.sum(axis=0), 1)
    per_env = {name: (np.asarray(x, float) * counted).sum(axis=0) / steps_B for name, x in series.items()}
    return {name: (float(x.mean()), float(x.std() / max(len(x), 1) ** 0.5)) for name, x in per_env.items()}


def training_outcome(metrics: list[float], batch_size: int, agent: str = "ppo") -> dict:
    """The outcome of a training iteration, from METRICS' vector: all of it, and how often episodes ended."""
    ends = dict(zip(metric_names(agent), metrics, strict=True))["episodes"]
    return {"metrics": metrics, "means": {"episode ends": (ends / batch_size, max(ends, 1.0) ** 0.5 / batch_size)}}
