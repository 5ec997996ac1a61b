"""Train an agent, go on with a run, and play a trained policy: what `rlgraph train` and `rlgraph eval` do."""

import contextlib
import dataclasses
import importlib
import numbers
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from rlgraph.agents import AGENTS
from rlgraph.arguments import choice, integer, real, text, truth
from rlgraph.backend import BACKENDS
from rlgraph.config import SEEDS, TrainConfig, check_episodes, check_seed
from rlgraph.definition.errors import errors_of
from rlgraph.definition.trial import check_on
from rlgraph.devices import device_name
from rlgraph.environment import Environment
from rlgraph.errors import UsageError, cut, shown
from rlgraph.files import DamagedError, is_there, read_object, say
from rlgraph.registry import make
from rlgraph.runs.checkpoint import (
    BEGINNING,
    Checkpoint,
    Checkpoints,
    check_numbers,
    check_progress,
    choose,
    has_saved_none,
    load_policy,
    newest,
    save_policy,
    saved,
)
from rlgraph.runs.finite import check_returns
from rlgraph.runs.folder import (
    CONFIG,
    METRICS,
    POLICY,
    RESULT,
    existing_folder,
    locked,
    named_in_errors,
    new_folder,
    read_config,
    removed_on_error,
    write_config,
    write_json,
    write_versions,
)
from rlgraph.runs.identity import Sources, check_before_import, check_imported, check_same_run, hash_sources, identity
from rlgraph.runs.loop import Clock, Loop, deferred_interrupt
from rlgraph.runs.metrics import MetricsLog

EVAL_SEED_OFFSET = 1_000_003  # evaluation never replays the starts seen in training


@dataclasses.dataclass(frozen=True)
class Result:
    """What a run came to, over all the processes that it took."""

    agent: str
    env: str
    backend: str
    mode: str
    execution: str  # in words: how iterations ran, and whether graphs were replayed
    device: str
    steps: int  # environment steps taken
    setup_seconds: float  # building, compiling, capturing, and the first launch, of each process
    train_seconds: float  # the other iterations
    steps_per_second: float  # over train_seconds; NaN after a single launch
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
    env = text("env", env)
    defaults = importlib.import_module(_agent(agent).config).DEFAULTS
    return defaults.get(env) or dataclasses.replace(config_class(agent)(), env=env)


def trainer_class(agent: str, backend: str) -> type:
    """What trains (see rlgraph.agents.trainer_torch and trainer_jax), and plays what was trained."""
    entry, backend = _agent(agent), choice("backend", backend, BACKENDS)
    return getattr(importlib.import_module(getattr(entry, backend)), entry.trainer)


def evaluation_seed(config: TrainConfig) -> int:
    """The seed of the evaluation after training."""
    return (config.seed + EVAL_SEED_OFFSET) % SEEDS


def run_config(run_dir: str) -> TrainConfig:
    """The config of a run.

    Raises:
        UsageError: not a run folder, or a damaged one.
    """
    return read_config(existing_folder(run_dir), config_class)[1]


def metric_names(agent: str) -> tuple[str, ...]:
    """What an agent's iteration reports, in order."""
    return importlib.import_module(_agent(agent).config).METRICS


def train(agent: str, config: TrainConfig, progress: Callable[[int, int, dict], Any] | None = None) -> Result:
    """Train, evaluate, and write a run folder: config, versions, metrics, checkpoints, policy, result.

    Ctrl-C ends the training early; the policy so far is saved and the evaluation left out. Another one, a second or
    more later, ends it without saving. `resume` goes on with the run then, or after whatever else has ended it.

    Args:
        agent: a name in rlgraph.agents.AGENTS.
        config: of that agent's config class.
        progress: called with (steps so far, steps in all, metrics) after every iteration.

    Raises:
        UsageError: a wrong name or value, or no folder can be made where the run should go.
        OSError: the disk is full or gone.
        NonFiniteError: a metric, what was learned, or a return of the evaluation is NaN or infinite. Checkpoints
            from before are kept.
        KeyboardInterrupt: Ctrl-C before there was a policy to save, or a second one.
    """
    if not isinstance(config, cls := config_class(agent)):
        raise UsageError(f"config must be a {cls.__name__}, which {agent} takes, but is {shown(config)}")
    _check_progress(progress)
    env = make(config.env)
    if env.max_episode_steps is None:
        raise UsageError(f"environment {env.id!r} has no time limit: give it MAX_EPISODE_STEPS, evaluation needs it")
    if config.env.endswith(".py"):  # in full, so that the run can be evaluated from any folder
        config = dataclasses.replace(config, env=str(Path(config.env).resolve()))
    trainer_class(agent, config.backend)  # imported before there is a folder, so that a wrong name leaves none
    check_on(env, config.backend, config.device, config.num_envs)
    folder, made = new_folder(agent, config)
    with named_in_errors(folder), locked(folder), errors_of(env):
        with removed_on_error(folder, made):
            sources = hash_sources(env.definition)
            write_config(folder, agent, config, sources)  # a run that is killed from here on can go on
            run = _Run(folder, config, env, identity(agent, config, sources))
        return run.to_the_end(progress)


def resume(run_dir: str | os.PathLike, progress: Callable[[int, int, dict], Any] | None = None) -> Result:
    """Go on with a run that was killed or interrupted, from its last checkpoint, as if nothing had happened.

    A damaged checkpoint is passed over. What is unusual is said on stderr.

    Args:
        run_dir: the folder that `train` wrote.
        progress: as `train`'s.

    Returns:
        The result; that of a finished run at once.

    Raises:
        UsageError: not a run folder, one in use, or one whose checkpoints are damaged or of another run.
        OSError, NonFiniteError, KeyboardInterrupt: as `train`.
    """
    run_dir = text("run_dir", run_dir)
    _check_progress(progress)
    folder = existing_folder(run_dir)
    with named_in_errors(folder), locked(folder):
        agent, config, sources = read_config(folder, config_class)
        finished = _finished(folder, agent, config)
        if finished is not None:
            say(f"run {run_dir!r} is finished: there is nothing left to do")
            return finished
        of_run, last = identity(agent, config, sources), newest(folder)
        if last is None:
            _check_nothing_is_lost(folder)
        else:
            check_same_run(of_run, last.header, last.in_words)
            check_progress(last, config)
            check_numbers(last)
        env = _recorded_env(folder, config, sources)
        if last is None:
            say(f"run {run_dir!r} has no checkpoint yet: it starts from the beginning")
        with errors_of(env):
            return _Run(folder, config, env, of_run, last).to_the_end(progress)


def _check_nothing_is_lost(folder: Path) -> None:
    """Raise a UsageError if a run without a checkpoint had one: it would write over what is left of that."""
    left = [name for name in (POLICY, RESULT) if is_there(folder / name)]
    if is_there(folder / METRICS) and (folder / METRICS).stat().st_size and not has_saved_none(folder):
        left.append(METRICS)
    if left:
        raise UsageError(
            f"run {str(folder)!r} has no checkpoint, though it has {left[0]}: put its folder checkpoints back, or "
            "start a new run"
        )


def _recorded_env(folder: Path, config: TrainConfig, sources: Sources) -> Environment:
    """The environment that a run was trained with: of a user's file, nothing is imported that is not the same."""
    check_before_import(config.env, sources, folder / CONFIG)
    env = make(config.env)
    check_imported(env.definition, sources, folder / CONFIG)
    return env


def _finished(folder: Path, agent: str, config: TrainConfig) -> Result | None:
    """The result of a run that has nothing left to do."""
    path = folder / RESULT
    if not is_there(path):
        return None
    try:
        result = Result(**_checked_result(read_object(path)) | {"run_dir": str(folder)})
        steps = config.num_iterations * config.batch_size
        if not result.interrupted and (result.agent, result.steps) != (agent, steps):
            raise DamagedError(f"it says {result.steps} steps of {result.agent}, config.json {steps} of {agent}")
    except DamagedError as error:
        raise UsageError(f"{str(path)!r} is damaged ({error}): delete it, and the run can go on") from error
    return None if result.interrupted else result


def _checked_result(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields of a Result, each of its type. NaN, which JSON lacks, is null there."""
    kinds = {field.name: field.type for field in dataclasses.fields(Result)}
    if fields.keys() != kinds.keys():
        raise DamagedError(f"it does not hold {', '.join(kinds)}")
    convert = {str: text, int: integer, float: real, bool: truth, float | None: real}
    empty = {float: np.nan, float | None: None}
    try:
        return {
            name: empty[kinds[name]] if value is None and kinds[name] in empty else convert[kinds[name]](name, value)
            for name, value in fields.items()
        }
    except UsageError as error:
        raise DamagedError(str(error)) from error


class _Run:
    """The part of a run that falls to this process: from a checkpoint, or from the beginning, to the result."""

    def __init__(
        self,
        folder: Path,
        config: TrainConfig,
        env: Environment,
        of_run: dict[str, Any],
        last: Checkpoint | None = None,
    ):
        self.folder, self.config, self.env, self.identity = folder, config, env, of_run
        self.agent = of_run["agent"]
        self.done = last.header if last else BEGINNING
        self.clock = Clock(self.done)
        self.trainer = trainer_class(self.agent, config.backend)(config, env)
        if last:
            self.trainer.load_state(last.state)

    def to_the_end(self, progress) -> Result:
        config, folder = self.config, self.folder
        write_versions(folder, config.backend, str(self.trainer.device))
        checkpoints = Checkpoints(folder, config.keep_checkpoints, self.identity)
        if self.done is BEGINNING:
            checkpoints.begin()
        with contextlib.closing(MetricsLog(folder, self.done["steps"])) as log, deferred_interrupt() as interrupt:
            loop = Loop(
                config, metric_names(self.agent), checkpoints, log, self.clock, self.done["iterations"], progress
            )
            loop.run(self.trainer, interrupt)
            arrays = self.trainer.arrays()
            header = self.identity | BEGINNING | {"iterations": loop.iterations, "steps": loop.steps}
            save_policy(folder / POLICY, header | self.clock.state(), arrays)
        interrupted, returns = bool(interrupt), np.array([np.nan])
        try:
            if not interrupted:
                # As `evaluate_run` does, from the arrays: elsewhere in memory a product may round otherwise.
                policy = self.trainer.load_policy(config, self.env, arrays)
                seed = evaluation_seed(config)
                returns = self.trainer.evaluate_policy(policy, self.env, config.eval_episodes, seed)
                check_returns(returns)
        except KeyboardInterrupt:  # the policy is saved already, only its evaluation is lost
            interrupted = True
        result = self._result(loop, returns, interrupted)
        write_json(folder / RESULT, dataclasses.asdict(result))
        return result

    def _result(self, loop: Loop, returns: np.ndarray, interrupted: bool) -> Result:
        times = self.clock.state()
        return Result(
            agent=self.agent,
            env=self.env.id,
            backend=self.config.backend,
            mode=self.trainer.mode,
            execution=self.trainer.execution(),
            device=str(self.trainer.device),
            steps=loop.steps,
            setup_seconds=times["seconds"] - times["train_seconds"],
            train_seconds=times["train_seconds"],
            steps_per_second=loop.steps_per_second(),
            interrupted=interrupted,
            eval_episodes=0 if interrupted else len(returns),
            eval_return_mean=float(np.mean(returns)),
            eval_return_std=float(np.std(returns)),
            reward_threshold=self.env.definition.REWARD_THRESHOLD,
            run_dir=str(self.folder),
        )


def evaluate_run(
    run_dir: str | os.PathLike,
    episodes: int = 100,
    seed: int = 0,
    backend: str | None = None,
    device: str = "auto",
    checkpoint: str | int | None = None,
) -> np.ndarray:
    """Returns [episodes] of a run's policy, played greedily.

    Args:
        run_dir: the folder that `train` wrote.
        episodes: how many, each from a fresh start, 1 to 2^20.
        seed: of the starts; `evaluation_seed(config)` was that of the evaluation after training.
        backend: None for the one that trained it; a policy file loads in either.
        device: see `rlgraph.devices`.
        checkpoint: "last", "best" or a number of steps: the policy in that checkpoint. None for the one at the end.

    Raises:
        UsageError: not a run folder, a damaged one, no such checkpoint, a wrong name, or no such number of episodes.
        NonFiniteError: a return is NaN or infinite.
    """
    episodes, seed = integer("episodes", episodes), integer("seed", seed)
    check_episodes("episodes", episodes)
    folder = existing_folder(text("run_dir", run_dir))
    check_seed(seed)
    backend = None if backend is None else choice("backend", backend, BACKENDS)
    checkpoint = None if checkpoint is None else _checkpoint_name(checkpoint)
    agent, config, sources = read_config(folder, config_class)
    trainer = trainer_class(agent, backend or config.backend)
    played = _policy_at_the_end(folder, config) if checkpoint is None else choose(folder, checkpoint)
    check_same_run(identity(agent, config, sources), played.header, played.in_words)
    env = _recorded_env(folder, config, sources)
    config = dataclasses.replace(config, device=device_name(device))
    check_on(env, backend or config.backend, config.device)
    with errors_of(env):
        returns = trainer.evaluate_policy(trainer.load_policy(config, env, played.policy), env, episodes, seed)
    check_returns(returns)
    return returns


def _policy_at_the_end(folder: Path, config: TrainConfig) -> Checkpoint:
    """Of the run, or of its last interruption."""
    path = folder / POLICY
    if not is_there(path) and (saved(folder) or not is_there(folder / RESULT)):
        play = "play its last checkpoint by --checkpoint last, or " if saved(folder) else ""
        raise UsageError(
            f"no policy at {str(path)!r}: the run has not come to its end; {play}go on with `rlgraph train --resume "
            f"{folder}`"
        )
    policy = load_policy(path)
    steps = policy.header["steps"]
    if policy.header["iterations"] < config.num_iterations and (newer := max(saved(folder), default=0)) > steps:
        say(f"{policy.in_words} is of step {steps}; --checkpoint last plays that of step {newer}")
    return policy


def _agent(name: str):
    return AGENTS[choice("agent", name, AGENTS)]


def _check_progress(progress: Any) -> None:
    if progress is not None and not callable(progress):
        raise UsageError(f"progress must be a function, but is {shown(progress)}")


def _checkpoint_name(checkpoint: str | int) -> str:
    if not isinstance(checkpoint, (str, numbers.Integral)) or isinstance(checkpoint, bool):
        raise UsageError(f"checkpoint must be last, best or a number of steps, but is {shown(checkpoint)}")
    return cut(str(checkpoint))
