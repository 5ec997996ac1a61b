"""The `rlgraph` command: train, eval, envs, bench."""

import contextlib
import dataclasses
import difflib
import io
import math
import re
import sys
from dataclasses import dataclass
from typing import Annotated

import gymnasium
import numpy as np
import tyro
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from rlgraph.agents import AGENTS
from rlgraph.errors import UsageError, unknown
from rlgraph.registry import ENVIRONMENTS, make
from rlgraph.train import Result, config_class, default_config, evaluate_run, train

USAGE = """usage: rlgraph COMMAND ...

  rlgraph train AGENT [--env ID] [options]   train an agent ({agents}) and save the run
  rlgraph eval RUN [options]                 play a saved run's policy greedily
  rlgraph envs                               list the environments
  rlgraph bench [options]                    time every way of stepping on this machine
  rlgraph bench report FILE... [options]     tables, plots and comparisons of such timings

Each command explains its options with --help."""

INTERRUPTED = 130  # the shell's code for a program ended by Ctrl-C


def main(argv: list[str] | None = None) -> int:
    """Run the command line. Returns the exit code: 0, 2 for wrong usage, 1 for a failed run, 130 after Ctrl-C."""
    argv = sys.argv[1:] if argv is None else argv
    try:
        return _dispatch(argv)
    except UsageError as error:
        print(f"rlgraph: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"rlgraph: cannot write or read {error.filename or 'a file'}: {error.strerror}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("rlgraph: interrupted; no policy was saved", file=sys.stderr)
        return INTERRUPTED


def _dispatch(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE.format(agents=", ".join(AGENTS)))
        return 0
    if argv[0] not in COMMANDS:
        raise unknown("command", argv[0], COMMANDS)
    return COMMANDS[argv[0]](argv[1:])


def _train(argv: list[str]) -> int:
    if argv and argv[0] in ("-h", "--help"):
        print(USAGE.format(agents=", ".join(AGENTS)))
        return 0
    if not argv or argv[0].startswith("-"):
        raise UsageError(f"name an agent after `rlgraph train`: {', '.join(AGENTS)}")
    agent, options = argv[0], argv[1:]
    default = default_config(agent, _option(options, "--env") or "CartPole-v1")
    config = _parse(config_class(agent), options, f"rlgraph train {agent}", default)
    console = Console()
    with _progress(console) as progress:
        task = progress.add_task("setting up", total=config.num_iterations * config.batch_size, note="")

        def show(steps: int, total: int, metrics: dict) -> None:
            progress.update(task, description="training", completed=steps, note=_note(metrics))

        result = train(agent, config, show)
    _print_result(console, result)
    return INTERRUPTED if result.interrupted else 0


@dataclass(frozen=True)
class EvalOptions:
    run: Annotated[str, tyro.conf.Positional]
    """The run folder that `rlgraph train` printed."""
    episodes: int = 100
    """Episodes to play, each from a fresh start."""
    seed: int = 0
    """Of the starts."""
    backend: str | None = None
    """torch or jax; the one that trained the policy if left out. Either loads it."""
    device: str = "auto"
    """auto (a GPU if there is one), cpu, cuda, cuda:1."""


def _eval(argv: list[str]) -> int:
    if not argv:
        raise UsageError("name a run folder after `rlgraph eval`")
    options = _parse(EvalOptions, argv, "rlgraph eval")
    returns = evaluate_run(options.run, options.episodes, options.seed, options.backend, options.device)
    print(
        f"return {np.mean(returns):.2f} ± {np.std(returns):.2f} (least {np.min(returns):.2f}, "
        f"greatest {np.max(returns):.2f}) over {len(returns)} greedy episodes"
    )
    return 0


def _envs(argv: list[str]) -> int:
    if argv:
        raise UsageError(f"`rlgraph envs` takes no arguments, got {argv[0]!r}")
    table = Table("environment", "observation", "action", "time limit", "solved at")
    for id in ENVIRONMENTS:
        env = make(id)
        action, threshold = env.action_space, env.definition.REWARD_THRESHOLD
        discrete = isinstance(action, gymnasium.spaces.Discrete)
        table.add_row(
            id,
            f"{list(env.observation_space.shape)} float32",
            f"one of {action.n}" if discrete else f"{list(action.shape)} in [{action.low.min()}, {action.high.max()}]",
            "none" if env.max_episode_steps is None else f"{env.max_episode_steps} steps",
            "not defined" if threshold is None else f"{threshold:g}",
        )
    Console().print(table)
    return 0


def _bench(argv: list[str]) -> int:
    from rlgraph.bench import cli  # loads torch, jax and the plots' table: only when asked for

    return cli.main(argv, _parse)


COMMANDS = {"train": _train, "eval": _eval, "envs": _envs, "bench": _bench}


def _parse(cls: type, argv: list[str], prog: str, default=None):
    """Options by tyro; every mistake becomes a UsageError of one line."""
    kwargs = {} if default is None else {"default": default}
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            parsed, rest = tyro.cli(cls, args=argv, prog=prog, return_unknown_args=True, **kwargs)
    except SystemExit as stop:
        if stop.code in (0, None):
            raise
        raise _own_complaint(stop) or UsageError(_first_paragraph(complaint.getvalue())) from None
    if rest:
        raise _unknown_option(rest[0], cls, prog)
    return parsed


def _own_complaint(stop: SystemExit) -> UsageError | None:
    """What the config class itself raised about its values, if that is why tyro gave up."""
    error = stop.__context__
    while error is not None and not isinstance(error, UsageError):
        error = error.__context__
    return error


def _first_paragraph(box: str) -> str:
    """The message in tyro's box, as one line: what stands between its title and the first rule or the help text."""
    message = []
    for line in box.splitlines()[1:]:
        text = line.strip("│| ")
        if message and (not text.strip("─-") or text.startswith(("Argument helptext", "For full helptext"))):
            break
        message += text.strip("─-").split()
    text = " ".join(message).removeprefix("Error parsing ").split(". Got errors:")[0]
    text = re.sub(r"invalid literal for int\(\) with base 10: (.*)", r"\1 is not a whole number", text)
    return re.sub(r"could not convert string to float: (.*)", r"\1 is not a number", text)


def _unknown_option(word: str, cls: type, prog: str) -> UsageError:
    if not word.startswith("-"):
        return UsageError(f"unexpected argument {word!r}; see {prog} --help")
    fields = dataclasses.fields(cls)
    names = [f.name for f in fields] + [f"no-{f.name}" for f in fields if isinstance(f.default, bool)]
    known = ["--" + name.replace("_", "-") for name in names]
    near = difflib.get_close_matches(word.split("=")[0].replace("_", "-"), known, n=1, cutoff=0.5)
    return UsageError(f"unknown option {word!r}; {f'did you mean {near[0]}?' if near else f'see {prog} --help'}")


def _option(argv: list[str], name: str) -> str | None:
    """The value of one option (the last, if given twice), read ahead because the others' defaults depend on it."""
    value = None
    for word, following in zip(argv, [*argv[1:], None]):
        if word == name:
            value = following
        elif word.startswith(name + "="):
            value = word.split("=", 1)[1]
    return value


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("steps  {task.fields[note]}"),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,  # a file or pipe gets the summary alone
    )


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
        "time": f"{result.train_seconds:.1f} s training, {result.setup_seconds:.1f} s setup and first iteration",
        "speed": "one iteration only"
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
        return f"not evaluated; run `rlgraph eval {result.run_dir}`"
    text = f"{result.eval_return_mean:.2f} ± {result.eval_return_std:.2f} over {result.eval_episodes} episodes"
    if result.reward_threshold is None:
        return text
    solved = result.eval_return_mean >= result.reward_threshold
    return f"{text} ({'solved' if solved else 'not solved'}: the mark is {result.reward_threshold:g})"


if __name__ == "__main__":
    sys.exit(main())
