"""Train an agent, and play a trained one: what `rlgraph train` and `rlgraph eval` do."""

import contextlib
import dataclasses
import datetime
import importlib
import importlib.metadata
import json
import os
import platform
import signal
import threading
import time
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from rlgraph.agents import AGENTS
from rlgraph.backend import BACKENDS
from rlgraph.checkpoint import load_policy, save_policy, write_atomically
from rlgraph.config import SEEDS, TrainConfig, check_seed
from rlgraph.environment import Environment
from rlgraph.errors import UsageError, unknown
from rlgraph.metrics import MetricsLog
from rlgraph.registry import make

EVAL_SEED_OFFSET = 1_000_003  # evaluation never replays the starts seen in training


@dataclasses.dataclass(frozen=True)
class Result:
    """What a run came to."""

    agent: str
    env: str
    backend: str
    mode: str
    execution: str  # in words: how iterations ran, and whether graphs were replayed
    device: str
    steps: int  # environment steps taken
    setup_seconds: float  # building, compiling, capturing, and the first iteration
    train_seconds: float  # the iterations after the first
    steps_per_second: float  # over train_seconds; NaN after a single iteration
    interrupted: bool
    eval_episodes: int
    eval_return_mean: float  # greedy, undiscounted; NaN if interrupted
    eval_return_std: float
    reward_threshold: float | None  # the environment's own mark of "solved"
    run_dir: str


def config_class(agent: str) -> type[TrainConfig]:
    """The config dataclass of an agent."""
    entry = _agent(agent)
    return getattr(importlib.import_module(entry.config), entry.config_class)


def default_config(agent: str, env: str) -> TrainConfig:
    """The configuration that ships for an agent on an environment, else the agent's own defaults."""
    defaults = importlib.import_module(_agent(agent).config).DEFAULTS
    return defaults.get(env) or dataclasses.replace(config_class(agent)(), env=env)


def trainer_class(agent: str, backend: str) -> type:
    """What trains: built from a config and an environment, `iterate()` runs one iteration."""
    return getattr(_module(agent, backend), _agent(agent).trainer)


def metric_names(agent: str) -> tuple[str, ...]:
    """What an agent's iteration reports, in order."""
    return importlib.import_module(_agent(agent).config).METRICS


def train(agent: str, config: TrainConfig, progress: Callable[[int, int, dict], Any] | None = None) -> Result:
    """Train, evaluate, and write a run folder: config, versions, metrics, policy, result.

    Ctrl-C ends the training early; the policy so far is saved and the evaluation left out. Another one, a second or
    more later, ends it without saving.

    Args:
        agent: a name in rlgraph.agents.AGENTS.
        config: of that agent's config class.
        progress: called with (steps so far, steps in all, metrics) after every iteration.

    Raises:
        UsageError: a wrong name or value, or no folder can be made where the run should go.
        OSError: the disk is full or gone.
        KeyboardInterrupt: Ctrl-C before there was a policy to save, or a second one.
    """
    env = make(config.env)
    if env.max_episode_steps is None:
        raise UsageError(f"environment {env.id!r} has no time limit: give it MAX_EPISODE_STEPS, evaluation needs it")
    if config.env.endswith(".py"):  # in full, so that the run can be evaluated from any folder
        config = dataclasses.replace(config, env=str(Path(config.env).resolve()))
    module = _module(agent, config.backend)
    folder = _new_folder(agent, config)
    with _named_in_errors(folder):
        return _train_in(folder, agent, config, env, module, progress)


def _train_in(folder: Path, agent: str, config: TrainConfig, env: Environment, module, progress) -> Result:
    started = time.perf_counter()
    try:
        trainer = trainer_class(agent, config.backend)(config, env)
    except BaseException:
        _remove_if_empty(folder)
        raise
    _write_json(folder / "config.json", {"agent": agent, **dataclasses.asdict(config)})
    _write_json(folder / "versions.json", _versions(config.backend, str(trainer.device)))

    loop = _Loop(agent, config, folder, started, progress)
    with contextlib.closing(loop.log), _deferred_interrupt() as interrupt:
        loop.run(trainer, interrupt)
        save_policy(folder / "policy.safetensors", trainer.arrays())
    loop.interrupted = bool(interrupt)
    returns = np.array([np.nan])
    try:
        if not loop.interrupted:
            seed = (config.seed + EVAL_SEED_OFFSET) % SEEDS
            returns = module.evaluate_policy(trainer.policy, env, config.eval_episodes, seed)
    except KeyboardInterrupt:  # the policy is saved already, only its evaluation is lost
        loop.interrupted = True
    result = loop.result(trainer, env, returns)
    _write_json(folder / "result.json", dataclasses.asdict(result))
    return result


def evaluate_run(
    run_dir: str, episodes: int = 100, seed: int = 0, backend: str | None = None, device: str = "auto"
) -> np.ndarray:
    """Returns [episodes] of a run's policy, played greedily.

    Args:
        run_dir: the folder that `train` wrote.
        episodes: how many, each from a fresh start.
        seed: of the starts.
        backend: None for the one that trained it; a policy file loads in either.
        device: see `rlgraph.devices`.

    Raises:
        UsageError: not a run folder, a damaged one, or a wrong name.
    """
    if episodes < 1:
        raise UsageError(f"episodes must be at least 1, but is {episodes}")
    folder = Path(run_dir)
    if not (folder / "config.json").is_file():
        raise UsageError(f"{run_dir!r} is not a run folder: it has no config.json")
    check_seed(seed)
    agent, config = _read_config(folder / "config.json")
    config = dataclasses.replace(config, device=device)
    env = make(config.env)
    module = _module(agent, backend or config.backend)
    policy = module.load_policy(config, env, load_policy(folder / "policy.safetensors"))
    return module.evaluate_policy(policy, env, episodes, seed)


def _read_config(path: Path) -> tuple[str, TrainConfig]:
    """The agent and config of a run."""
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(settings, dict) or not {"agent", "env"} <= settings.keys():
            raise UsageError("it does not say which agent and environment")
        agent = str(settings.pop("agent"))
        cls = config_class(agent)
        return agent, cls(**_checked(settings, typing.get_type_hints(cls)))
    except ValueError as error:
        raise UsageError(f"{str(path)!r} is damaged: {error}") from error


def _checked(settings: dict, types: dict[str, Any]) -> dict:
    """The settings of a config file, with JSON's lists as tuples, if each is known and of its type."""
    checked = {}
    for name, value in settings.items():
        if name not in types:
            raise unknown("setting", name, types)
        right = isinstance(value, list) and all(type(v) is int for v in value)
        if types[name] != tuple[int, ...]:
            right = isinstance(value, types[name]) or (type(value) is int and isinstance(0.0, types[name]))
        if not right:
            raise UsageError(f"{name} cannot be {value!r}")
        checked[name] = tuple(value) if isinstance(value, list) else value
    return checked


class _Loop:
    """The iterations of one run, with their metrics and times."""

    def __init__(self, agent: str, config: TrainConfig, folder: Path, started: float, progress):
        self.agent, self.config, self.folder, self.progress = agent, config, folder, progress
        self.names = metric_names(agent)
        self.log = MetricsLog(folder)
        self.started, self.first_done, self.last_done = started, None, started
        self.iterations, self.interrupted = 0, False

    def run(self, trainer, interrupt: list) -> None:
        """Launch iteration i + 1 before reading what iteration i came to, so that the GPU never waits for the host."""
        # But the first is read at once: where iterations run synchronously, the second would be done before the
        # clock of `steps_per_second` starts.
        self._record(trainer.iterate())
        pending = None
        for _ in range(self.config.num_iterations - 1):
            if interrupt:
                break
            launched = trainer.iterate()
            if pending is not None:
                self._record(pending)
            pending = launched
        if pending is not None:
            self._record(pending)

    def _record(self, pending) -> None:
        raw = dict(zip(self.names, pending.get(), strict=True))
        self.last_done = time.perf_counter()
        self.first_done = self.first_done or self.last_done
        self.iterations += 1
        steps = self.iterations * self.config.batch_size
        return_sum, length_sum = raw.pop("episode_return_sum"), raw.pop("episode_length_sum")
        episodes = raw["episodes"]
        metrics = {
            "episode_return": return_sum / episodes if episodes else float("nan"),
            "episode_length": length_sum / episodes if episodes else float("nan"),
            **raw,
            "seconds": self.last_done - self.started,
            "steps_per_second": self.steps_per_second(),
        }
        self.log.write(steps, metrics)
        if self.progress:
            self.progress(steps, self.config.num_iterations * self.config.batch_size, metrics)

    def steps_per_second(self) -> float:
        """Over the iterations after the first, which compiles; NaN before there are any."""
        if self.iterations < 2:
            return float("nan")
        return (self.iterations - 1) * self.config.batch_size / (self.last_done - self.first_done)

    def result(self, trainer, env: Environment, returns: np.ndarray) -> Result:
        first_done = self.first_done or self.last_done
        return Result(
            agent=self.agent,
            env=env.id,
            backend=self.config.backend,
            mode=trainer.mode,
            execution=trainer.execution(),
            device=str(trainer.device),
            steps=self.iterations * self.config.batch_size,
            setup_seconds=first_done - self.started,
            train_seconds=self.last_done - first_done,
            steps_per_second=self.steps_per_second(),
            interrupted=self.interrupted,
            eval_episodes=0 if self.interrupted else len(returns),
            eval_return_mean=float(np.mean(returns)),
            eval_return_std=float(np.std(returns)),
            reward_threshold=env.definition.REWARD_THRESHOLD,
            run_dir=str(self.folder),
        )


@contextlib.contextmanager
def _deferred_interrupt():
    """Note when Ctrl-C was pressed in a list, so that it cannot fall between an update and its result.

    One that comes a second or more after the first is raised: a double press is meant as one, and must not cost the
    policy. Outside the main thread, where Python delivers no signals, and where the shell has Ctrl-C ignored, as for a
    background job, the list stays empty.
    """
    pressed = []
    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        yield pressed
        return

    def handle(signum, frame):
        pressed.append(time.monotonic())
        if pressed[-1] - pressed[0] >= 1:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)


def _agent(name: str):
    if name not in AGENTS:
        raise unknown("agent", name, AGENTS)
    return AGENTS[name]


def _module(agent: str, backend: str):
    if backend not in BACKENDS:
        raise unknown("backend", backend, BACKENDS)
    return importlib.import_module(getattr(_agent(agent), backend))


def _new_folder(agent: str, config: TrainConfig) -> Path:
    """A folder of its own for every run: an existing run is never written over."""
    try:
        return _named_folder(Path(config.run_dir)) if config.run_dir else _dated_folder(agent, config)
    except (NotADirectoryError, FileExistsError, PermissionError) as error:
        raise UsageError(
            f"cannot make a run folder {error.filename!r}: {error.strerror}; name one by --run-dir"
        ) from error


def _named_folder(folder: Path) -> Path:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"run_dir {str(folder)!r} exists and is not empty; name another folder")
    folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK):
        raise UsageError(f"run_dir {str(folder)!r} cannot be written to; name another folder")
    return folder


def _dated_folder(agent: str, config: TrainConfig) -> Path:
    runs = Path("runs")
    runs.mkdir(exist_ok=True)
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    name = f"{agent}-{Path(config.env).stem}-{config.backend}-seed{config.seed}-{stamp}"
    for i in range(1000):
        folder = runs / (f"{name}-{i}" if i else name)
        with contextlib.suppress(FileExistsError):
            folder.mkdir()
            return folder
    raise UsageError(f"no free name for a run like runs/{name}; name one with --run-dir")


def _remove_if_empty(folder: Path) -> None:
    if not any(folder.iterdir()):
        folder.rmdir()


@contextlib.contextmanager
def _named_in_errors(folder: Path):
    """A full disk is reported without a file's name: add the folder's."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(folder)
        raise


def _write_json(path: Path, content: dict) -> None:
    def finite(value):
        return None if isinstance(value, float) and not np.isfinite(value) else value

    content = {key: finite(value) for key, value in content.items()}
    write_atomically(path, (json.dumps(content, indent=2) + "\n").encode())


def _versions(backend: str, device: str) -> dict[str, str]:
    packages = {"torch": ["torch", "array-api-compat"], "jax": ["jax", "jaxlib", "equinox", "optax"]}[backend]
    names = ["rlgraph", "gymnasium", "numpy", "safetensors", *packages]
    return {
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in names},
        "platform": platform.platform(),
        "device": device,
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
