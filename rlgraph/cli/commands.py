"""`rlgraph train`, `rlgraph eval` and `rlgraph envs`."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import gymnasium
import numpy as np
import tyro
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column, Table
from rich.text import Text

from rlgraph.agents import AGENTS
from rlgraph.cli.options import advice_on_memory, parse, sizes_to_lower, values
from rlgraph.cli.terminal import terminal_console
from rlgraph.config import check_episodes, check_seed
from rlgraph.errors import INTERRUPTED, CaptureError, UsageError, shown
from rlgraph.fields import convert_fields
from rlgraph.registry import ENVIRONMENTS, make
from rlgraph.runs.train import (
    Result,
    config_class,
    default_config,
    evaluate_run,
    evaluation_seed,
    resume,
    run_config,
    train,
)

# ---- train


def train_command(argv: list[str]) -> int:
    """Run `rlgraph train ARGV`. Returns 0, or 130 after Ctrl-C."""
    if any(word.partition("=")[0] == "--resume" for word in argv):
        run = _run_to_resume(argv)
        with advice_on_memory(f"free some, or train anew with smaller sizes than those in {run}/config.json"):
            return _show_training(lambda progress: resume(run, progress))
    if not argv or argv[0].startswith("-"):
        raise UsageError(f"name an agent after `rlgraph train`: {', '.join(AGENTS)}")
    agent, words = argv[0], argv[1:]
    env = values(words, "--env")  # read ahead, because the other options' defaults depend on it
    default = default_config(agent, env[0] if env else "CartPole-v1")
    config = parse(config_class(agent), words, f"rlgraph train {agent}", default)
    with advice_on_memory(sizes_to_lower(type(config), config.env)):
        try:
            return _show_training(lambda progress: train(agent, config, progress))
        except CaptureError as error:
            raise CaptureError(f"{error}; --mode eager runs without a graph") from error


def _run_to_resume(argv: list[str]) -> str:
    runs = values(argv, "--resume")
    if runs == [""]:
        raise UsageError("name a run folder after `rlgraph train --resume`")
    if len(runs) != 1 or len(argv) > 2 or not argv[0].startswith("--resume"):
        raise UsageError(
            "`rlgraph train --resume RUN` takes a run folder and nothing else: the rest is in its config.json"
        )
    return runs[0]


def _show_training(run: Callable[[Callable], Result]) -> int:
    """Run a training with a progress bar, which it is given a function for; then print what it came to."""
    console = terminal_console()
    try:
        with _progress(console) as progress:
            task = progress.add_task("setting up", total=None, note="")

            def show(steps: int, total: int, metrics: dict) -> None:
                progress.update(task, description="training", completed=steps, total=total, note=_note(metrics))

            result = run(show)
    except KeyboardInterrupt:  # also one that falls into the end of the progress bar: a double press
        raise KeyboardInterrupt("interrupted; no policy was saved") from None
    _print_result(console, result)
    return INTERRUPTED if result.interrupted else 0


def _progress(console: Console) -> Progress:
    rest = Column(ratio=1, no_wrap=True, overflow="ellipsis")  # the note alone is cut where there is no room for all
    note = TextColumn("steps  {task.fields[note]}", table_column=rest)
    columns = [TextColumn("{task.description}"), MofNCompleteColumn(), note]
    if console.width >= 100:
        columns = [columns[0], BarColumn(bar_width=20), *columns[1:], TimeRemainingColumn()]
    # A file or pipe gets the summary alone.
    return Progress(*columns, console=console, expand=True, disable=not console.is_terminal)


def _note(metrics: dict) -> str:
    episode_return, speed = metrics["episode_return"], metrics["steps_per_second"]
    parts = [] if math.isnan(episode_return) else [f"return {episode_return:.1f}"]
    parts += [] if math.isnan(speed) else [f"{speed:,.0f} steps/s"]
    return "  ".join(parts)


def _print_result(console: Console, result: Result) -> None:
    table = Table(show_header=False, title=Text(f"{result.agent} on {result.env}"))
    rows = {
        "backend": f"{result.backend}, mode {result.mode}, {result.device}",
        "execution": result.execution,
        "steps": f"{result.steps:,}" + (" (interrupted)" if result.interrupted else ""),
        "time": f"{result.train_seconds:.1f} s training, {result.setup_seconds:.1f} s setup and first launch",
        "speed": "one launch only"
        if math.isnan(result.steps_per_second)
        else f"{result.steps_per_second:,.0f} steps/s",
        "greedy return": _describe_evaluation(result),
    }
    for name, value in rows.items():
        table.add_row(name, Text(value))  # Text, so that brackets in a path are not taken for markup
    console.print(table)
    console.print(Text(f"saved in {result.run_dir}"), soft_wrap=True)  # never folded: it is there to be copied


def _describe_evaluation(result: Result) -> str:
    if result.interrupted:
        go_on = f"go on with `rlgraph train --resume {result.run_dir}`"
        return f"not evaluated; run `rlgraph eval {result.run_dir}`, or {go_on}"
    text = f"{result.eval_return_mean:.2f} ± {result.eval_return_std:.2f} over {result.eval_episodes} episodes"
    if result.reward_threshold is None:
        return text
    solved = result.eval_return_mean >= result.reward_threshold
    return f"{text} ({'solved' if solved else 'not solved'}: the mark is {result.reward_threshold:g})"


# ---- eval


@dataclass(frozen=True)
class EvalOptions:
    run: Annotated[str, tyro.conf.Positional]
    """The run folder that `rlgraph train` printed."""
    episodes: int | None = None
    """Episodes to play, each from a fresh start; as many as after training if left out."""
    seed: int | None = None
    """Of the starts; that of the evaluation after training if left out. The same seed, episodes, backend and device
    give the return that was printed then."""
    backend: str | None = None
    """torch or jax; the one that trained the policy if left out. Either loads it."""
    device: str = "auto"
    """auto (a GPU if there is one), cpu, cuda, cuda:1."""
    checkpoint: str | None = None
    """The policy in a checkpoint: last, best, or a number of steps; the one at the run's end if left out."""

    def __post_init__(self):
        convert_fields(self)
        for name in ("run", "backend", "checkpoint"):
            if getattr(self, name) == "":
                raise UsageError(f"{name} is empty: give it a value, or leave it out")
        if self.episodes is not None:
            check_episodes("episodes", self.episodes)
        if self.seed is not None:
            check_seed(self.seed)


def eval_command(argv: list[str]) -> int:
    """Run `rlgraph eval ARGV`. Returns 0."""
    if not argv:
        raise UsageError("name a run folder after `rlgraph eval`")
    options = parse(EvalOptions, argv, "rlgraph eval")
    config = run_config(options.run)
    then = config.eval_episodes, evaluation_seed(config)
    episodes = then[0] if options.episodes is None else options.episodes
    seed = then[1] if options.seed is None else options.seed
    with advice_on_memory(sizes_to_lower(EvalOptions, config.env)):
        returns = evaluate_run(options.run, episodes, seed, options.backend, options.device, options.checkpoint)
    as_then = " as after training" if (episodes, seed) == then else f"; after training: {then[0]} from seed {then[1]}"
    print(
        f"return {np.mean(returns):.2f} ± {np.std(returns):.2f} (least {np.min(returns):.2f}, "
        f"greatest {np.max(returns):.2f}) over {len(returns)} greedy episodes from seed {seed}{as_then}"
    )
    return 0


# ---- envs


def envs_command(argv: list[str]) -> int:
    """Run `rlgraph envs ARGV`. Returns 0."""
    if argv and argv[0] in ("-h", "--help"):
        print("usage: rlgraph envs\n\nList the environments. It has no options.")
        return 0
    if argv:
        raise UsageError(f"`rlgraph envs` takes no arguments, got {shown(argv[0])}")
    rows = [_describe_env(id) for id in ENVIRONMENTS]
    table = Table(*rows[0], box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for row in rows:
        table.add_row(*map(Text, row.values()))
    console = terminal_console()
    if Console(width=200).measure(table).maximum <= console.width:
        console.print(table)
        return 0
    for row in rows:  # too narrow for columns
        name, *facts = row.items()
        console.print(Text("\n".join([name[1], *(f"  {title}: {fact}" for title, fact in facts)])))
    return 0


def _describe_env(id: str) -> dict[str, str]:
    env = make(id)
    action, threshold = env.action_space, env.definition.REWARD_THRESHOLD
    discrete = isinstance(action, gymnasium.spaces.Discrete)
    return {
        "environment": id,
        "observation": f"{list(env.observation_space.shape)}",
        "action": f"one of {action.n}"
        if discrete
        else f"{list(action.shape)} in [{action.low.min():g}, {action.high.max():g}]",
        "time limit": "none" if env.max_episode_steps is None else f"{env.max_episode_steps} steps",
        "solved at": "not defined" if threshold is None else f"{threshold:g}",
    }
