"""`rlgraph bench solve`: seconds of training until the greedy policy reaches a mark, once everything is compiled."""

import contextlib
import dataclasses
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import tyro
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

from rlgraph.bench import results
from rlgraph.bench.provenance import clocks, provenance
from rlgraph.cli.options import advice_on_memory, parse, sizes_to_lower, values
from rlgraph.cli.terminal import terminal_console
from rlgraph.config import SEEDS, TrainConfig
from rlgraph.definition.errors import errors_of
from rlgraph.definition.trial import check_on
from rlgraph.environment import Environment
from rlgraph.errors import UsageError
from rlgraph.fields import check_counts
from rlgraph.registry import make
from rlgraph.runs.finite import check_learned, check_returns
from rlgraph.runs.train import config_class, default_config, evaluation_seed, trainer_class

VERSION = 1  # of the file's layout
PROGRAM = "rlgraph bench solve"
WARM_UPS = 2  # iterations, and evaluations, before the clock starts: XLA records its command buffers in its first runs
SHOWN_EVERY = 1.0  # seconds: what takes less is not disturbed by its own progress
NAMES_OF_FIGURES = {"median": "median", "min": "least", "max": "most"}

Show = Callable[[str, int], None]  # what is being done, and steps so far


# ---- one seed


def solve(agent: str, config: TrainConfig, env: Environment, target: float, check_every: int, show: Show) -> dict:
    """Train from one seed until the greedy policy's mean return reaches the target.

    The clock runs from the first iteration to the end of the evaluation that decides: both were compiled before, run
    WARM_UPS times, and the trainer's state put back.

    Args:
        agent, config, env: what trains on what; no more than config.total_steps.
        target: mean of config.eval_episodes returns.
        check_every: iterations from one evaluation to the next.
        show: called now and then.

    Returns:
        A row of the result file.
    """
    show("compiling", 0)
    began = time.perf_counter()
    trainer = trainer_class(agent, config.backend)(config, env)
    built = time.perf_counter()
    play, how = trainer.evaluator(config.eval_episodes, evaluation_seed(config))
    _warm_up(trainer, play)
    show("training", 0)
    started = time.perf_counter()
    evaluations = _train(trainer, play, target, check_every, show)
    seconds = time.perf_counter() - started
    steps, mean_return = evaluations[-1]
    check_learned(trainer, f"after {steps} steps")
    return {
        "seed": config.seed,
        "solved": mean_return >= target,
        "seconds": seconds,
        "steps": steps,
        "mean_return": mean_return,
        "evaluations": evaluations,
        "build_s": built - began,
        "warm_up_s": started - built,
        "device": str(trainer.device),
        "mode": trainer.mode,
        "execution": trainer.execution(),
        "evaluation": how,
    }


def _warm_up(trainer, play: Callable[[], np.ndarray]) -> None:
    state = trainer.state_arrays()
    for _ in range(WARM_UPS):
        trainer.iterate()
        play()
    trainer.load_state(state)
    trainer.state_arrays()  # waits until everything is there


def _train(trainer, play: Callable[[], np.ndarray], target: float, check_every: int, show: Show) -> list:
    """[steps, mean return] of each evaluation. The last one is of the target, or after all steps."""
    config, evaluations, shown = trainer.config, [], time.perf_counter()
    K = config.iterations_per_launch
    for iteration in range(K, config.num_iterations + 1, K):
        trainer.iterate()
        if iteration % check_every >= K and iteration < config.num_iterations:  # not the first launch since
            continue
        returns = play()  # waits for the device
        check_returns(returns)
        evaluations.append([iteration * config.batch_size, float(returns.mean())])
        if evaluations[-1][1] >= target:
            break
        if time.perf_counter() - shown >= SHOWN_EVERY:
            show(f"return {evaluations[-1][1]:.1f}", evaluations[-1][0])
            shown = time.perf_counter()
    return evaluations


def summary(rows: list[dict]) -> dict:
    """Over the seeds: a run that did not solve it takes for ever, which the file writes as null."""
    seconds = [row["seconds"] if row["solved"] else math.inf for row in rows] or [math.inf]
    figures = {"median_s": statistics.median(seconds), "min_s": min(seconds), "max_s": max(seconds)}
    figures = {name: value if math.isfinite(value) else None for name, value in figures.items()}
    return {"seeds": len(rows), "solved": sum(row["solved"] for row in rows), **figures}


# ---- the command


def options_class(base: type[TrainConfig]) -> type:
    """The options: those of an agent's training, and how it is measured."""

    @dataclass(frozen=True)
    class SolveOptions(base):
        seed: int = 0
        """The first one; the others follow."""
        eval_episodes: int = 100
        """Episodes of each evaluation, played greedily."""
        seeds: int = 10
        """Seeds to train with, one after the other."""
        check_every: int = 4
        """Iterations from one evaluation to the next, rounded up to whole launches."""
        target: float | None = None
        """Mean return that counts as solved; the environment's own mark if left out."""
        out: str = ""
        """Result file; by default benchmarks/results/solve-ENV-AGENT-BACKEND-DEVICE-DATE.json."""
        commit: str = ""
        """Commit to note where there is no git checkout to ask."""
        # No options: there is no run to keep.
        run_dir: tyro.conf.Suppress[str] = field(default=base.run_dir, init=False)
        checkpoint_seconds: tyro.conf.Suppress[float] = field(default=base.checkpoint_seconds, init=False)
        keep_checkpoints: tyro.conf.Suppress[int] = field(default=base.keep_checkpoints, init=False)

        def __post_init__(self):
            super().__post_init__()
            check_counts(self, ("seeds", "check_every"))
            if self.seed + self.seeds > SEEDS:
                raise UsageError(f"seed + seeds must be at most 2**32, but is {self.seed + self.seeds}")

    return SolveOptions


def main(argv: list[str]) -> int:
    """Run `rlgraph bench solve ARGV`. Returns 0, or 130 after Ctrl-C."""
    named = bool(argv) and not argv[0].startswith("-")
    agent, words = (argv[0], argv[1:]) if named else ("ppo", argv)
    asked = values(words, "--env")  # read ahead, because the other options' defaults depend on it
    default, options = default_config(agent, asked[0] if asked else "CartPole-v1"), options_class(config_class(agent))
    options = parse(options, words, f"{PROGRAM} {agent}", options(**_chosen(default, options)))
    env, target = _environment(options)
    trainer_class(agent, options.backend)  # a wrong name is found out before anything is written
    check_on(env, options.backend, options.device)

    on_gpu = torch.cuda.is_available() and options.device != "cpu"
    device = torch.cuda.get_device_name() if on_gpu else "cpu"
    settings = {"agent": agent, **_chosen(options, type(options)), "target": target}
    path = results.free_path(options.out, f"solve-{env.id}-{agent}-{options.backend}-{device}")
    content = {
        "version": VERSION,
        "command": " ".join([PROGRAM, *results.without_out(argv)]),
        "interrupted": True,
        "settings": {name: value for name, value in settings.items() if name not in ("out", "commit")},
        "provenance": provenance(options.commit),
        "clocks": {"before": clocks() if on_gpu else None, "after": None},
        "summary": summary([]),
        "rows": [],
    }
    console = terminal_console()
    try:
        advice = advice_on_memory(sizes_to_lower(type(options), options.env))
        with contextlib.suppress(KeyboardInterrupt), advice, errors_of(env):
            _measure(content, agent, options, env, path, console)
            content["interrupted"] = False
    except UsageError:  # the trainer's, of the first seed
        path.unlink()
        raise
    content["clocks"]["after"] = clocks() if on_gpu else None
    results.write(path, content, results.check_solve)
    _print(content, console)
    console.print(f"saved in {path}" + (" (interrupted)" if content["interrupted"] else ""), soft_wrap=True)
    return 130 if content["interrupted"] else 0


def _environment(options) -> tuple[Environment, float]:
    """The environment, and what counts as solved."""
    env = make(options.env)
    if env.max_episode_steps is None:
        raise UsageError(f"environment {env.id!r} has no time limit: give it MAX_EPISODE_STEPS, evaluation needs it")
    target = env.definition.REWARD_THRESHOLD if options.target is None else options.target
    if target is None:
        raise UsageError(f"environment {env.id!r} does not say what counts as solved: give a mean return as --target")
    return env, float(target)


def _chosen(config: TrainConfig, options: type) -> dict:
    """Those fields of a config that are options."""
    names = {field.name for field in dataclasses.fields(options) if field.init}
    return {name: value for name, value in dataclasses.asdict(config).items() if name in names}


def _measure(content: dict, agent: str, options, env: Environment, path: Path, console: Console) -> None:
    """One seed after the other; the file has each as soon as it is there."""
    results.write(path, content, results.check_solve)  # now, so that a wrong path costs no measurement
    base = config_class(agent)
    config = base(**{name: getattr(options, name) for name in base.__dataclass_fields__})
    columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed:,} steps")
    # Drawn when it changes and not by a thread, which would take its share of the time.
    drawn = {"console": console, "auto_refresh": False, "transient": True, "disable": not console.is_terminal}
    with Progress(*columns, **drawn) as progress:
        task = progress.add_task("", total=config.num_iterations * config.batch_size)
        for seed in range(options.seed, options.seed + options.seeds):

            def show(what: str, steps: int, seed=seed) -> None:
                progress.update(task, description=f"seed {seed}: {what}", completed=steps, refresh=True)

            one, target = dataclasses.replace(config, seed=seed), content["settings"]["target"]
            content["rows"].append(solve(agent, one, env, target, options.check_every, show))
            content["summary"] = summary(content["rows"])
            results.write(path, content, results.check_solve)


def _print(content: dict, console: Console) -> None:
    settings, rows, figures = content["settings"], content["rows"], content["summary"]
    title = f"{settings['agent']} on {settings['env']} to a mean return of {settings['target']:g}"
    table = Table("seed", "solved", "seconds", "steps", "mean return", "setup, s", title=title)
    for row in rows:
        setup, solved = f"{row['build_s'] + row['warm_up_s']:.1f}", "yes" if row["solved"] else "no"
        seconds, steps = f"{row['seconds']:.3f}", f"{row['steps']:,}"
        table.add_row(str(row["seed"]), solved, seconds, steps, f"{row['mean_return']:.1f}", setup)
    console.print(table)
    if rows:
        seconds = (f"{name} {_seconds(figures[f'{key}_s'])}" for key, name in NAMES_OF_FIGURES.items())
        lines = [f"solved {figures['solved']} of {figures['seeds']}: {', '.join(seconds)}"]
        lines += [f"iterations: {rows[-1]['execution']}", f"evaluation: {rows[-1]['evaluation']}"]
        console.print(*lines, sep="\n", markup=False, highlight=False, soft_wrap=True)


def _seconds(figure: float | None) -> str:
    return "never" if figure is None else f"{figure:.3f} s"
