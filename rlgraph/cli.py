"""The `rlgraph` command: train, eval, envs, bench, graph."""

import contextlib
import dataclasses
import difflib
import io
import math
import os
import re
import signal
import sys
import types
import typing
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
from rlgraph.errors import CaptureError, GraphError, UsageError, is_out_of_memory, unknown
from rlgraph.registry import ENVIRONMENTS, make
from rlgraph.terminal import terminal_console
from rlgraph.train import Result, config_class, default_config, evaluate_run, resume, train

USAGE = """usage: rlgraph COMMAND ...

  rlgraph train AGENT [--env ID] [options]   train an agent ({agents}) and save the run
  rlgraph train --resume RUN                 go on with a run that was killed or interrupted
  rlgraph eval RUN [options]                 play a saved run's policy greedily
  rlgraph envs                               list the environments
  rlgraph bench [options]                    time every way of stepping on this machine
  rlgraph bench solve [AGENT] [options]      time training until the environment is solved
  rlgraph bench report FILE... [options]     tables, plots and comparisons of such timings
  rlgraph graph show [options]               what an iteration's CUDA graph holds, in words and as a picture

Each command explains its options with --help."""

INTERRUPTED = 130  # the shell's code for a program ended by Ctrl-C


def main(argv: list[str] | None = None) -> int:
    """Run the command line. Returns the exit code: 0, 2 for wrong usage, 1 for a failed run, 130 after Ctrl-C."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # not every terminal can show a frame or ±
    words = sys.argv[1:] if argv is None else argv
    command = words[0] if words else ""
    try:
        code = _dispatch(words)
        sys.stdout.flush()  # here, where a failure to write is still caught
    except UsageError as error:
        return _complain(str(error), 2)
    except CaptureError as error:
        return _complain(f"{error}; --mode eager runs without a graph" if command == "train" else str(error), 1)
    except GraphError as error:
        return _complain(str(error), 1)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        sizes = "--episodes" if command == "eval" else "--num-envs, --num-steps or --hidden"
        return _complain(f"out of memory: lower {sizes}", 1)
    except BrokenPipeError:  # the reader, such as `| head`, has what it wanted
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python would complain at exit
        return 1
    except OSError as error:
        return _complain(f"cannot write or read {error.filename or 'a file'}: {error.strerror or error}", 1)
    except SystemExit as stop:
        if stop.code == 1:  # how rich ends where the reader has left
            return 1
        return _complain(f"ended by a SystemExit({stop.code!r}) that is not rlgraph's", 1)
    except KeyboardInterrupt as interrupt:
        if argv is None:  # the program ends here: another Ctrl-C would only interrupt Python's own clearing up
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        return _complain(str(interrupt) or "interrupted", INTERRUPTED)
    return code


def _complain(message: str, code: int) -> int:
    print("rlgraph:", " ".join(message.splitlines()), file=sys.stderr)
    return code


def _dispatch(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE.format(agents=", ".join(AGENTS)))
        return 0
    if argv[0] not in COMMANDS:
        raise unknown("command", argv[0], COMMANDS)
    try:
        return COMMANDS[argv[0]](argv[1:])
    except _HelpShown:
        return 0


def _train(argv: list[str]) -> int:
    if argv and argv[0] in ("-h", "--help"):
        print(USAGE.format(agents=", ".join(AGENTS)))
        return 0
    if any(word.partition("=")[0] == "--resume" for word in argv):
        run = _run_to_resume(argv)
        return _show_training(lambda progress: resume(run, progress))
    if not argv or argv[0].startswith("-"):
        raise UsageError(f"name an agent after `rlgraph train`: {', '.join(AGENTS)}")
    agent, options = argv[0], argv[1:]
    env = _values(options, "--env")  # read ahead, because the other options' defaults depend on it
    default = default_config(agent, env[0] if env else "CartPole-v1")
    config = _parse(config_class(agent), options, f"rlgraph train {agent}", default)
    return _show_training(lambda progress: train(agent, config, progress))


def _run_to_resume(argv: list[str]) -> str:
    runs = _values(argv, "--resume")
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
    checkpoint: str | None = None
    """The policy in a checkpoint: last, best, or a number of steps; the one at the run's end if left out."""


def _eval(argv: list[str]) -> int:
    if not argv:
        raise UsageError("name a run folder after `rlgraph eval`")
    options = _parse(EvalOptions, argv, "rlgraph eval")
    returns = evaluate_run(
        options.run, options.episodes, options.seed, options.backend, options.device, options.checkpoint
    )
    print(
        f"return {np.mean(returns):.2f} ± {np.std(returns):.2f} (least {np.min(returns):.2f}, "
        f"greatest {np.max(returns):.2f}) over {len(returns)} greedy episodes"
    )
    return 0


def _envs(argv: list[str]) -> int:
    if argv and argv[0] in ("-h", "--help"):
        print("usage: rlgraph envs\n\nList the environments. It has no options.")
        return 0
    if argv:
        raise UsageError(f"`rlgraph envs` takes no arguments, got {argv[0]!r}")
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


def _bench(argv: list[str]) -> int:
    from rlgraph.bench import cli  # loads torch, jax and the plots' table: only when asked for

    return cli.main(argv, _parse, _values)


def _graph(argv: list[str]) -> int:
    from rlgraph.graph import show  # loads torch: only when asked for

    return show.main(argv, _parse, _values)


COMMANDS = {"train": _train, "eval": _eval, "envs": _envs, "bench": _bench, "graph": _graph}


class _HelpShown(Exception):  # noqa: N818 - all went well
    """In place of the SystemExit by which tyro ends: nothing else may end the program as if all had gone well."""


def _parse(cls: type, argv: list[str], prog: str, default=None):
    """Options by tyro; every mistake becomes a UsageError of one line."""
    kwargs = {} if default is None else {"default": default}
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            parsed, rest = tyro.cli(cls, args=argv, prog=prog, return_unknown_args=True, **kwargs)
    except SystemExit as stop:
        if stop.code in (0, None):
            raise _HelpShown from None
        raise _own_complaint(stop) or _wrong_value(complaint.getvalue(), argv, cls, prog) from None
    if rest:
        raise _unknown_option(rest[0], argv, cls, prog)
    return parsed


def _own_complaint(stop: SystemExit) -> UsageError | None:
    """What the config class itself raised about its values, if that is why tyro gave up."""
    error = stop.__context__
    while error is not None and not isinstance(error, UsageError):
        error = error.__context__
    return error


def _wrong_value(box: str, argv: list[str], cls: type, prog: str) -> UsageError:
    """In place of tyro's complaint, a box of several lines: only which option it is about is taken from there."""
    kinds = typing.get_type_hints(cls)
    found = re.search(r"--[a-z][a-z0-9-]*", box)
    name = found[0] if found else ""
    kind = kinds.get(name.removeprefix("--").replace("-", "_"))
    if kind is None:  # the box names no option: an argument is missing
        required = [f.name.upper() for f in dataclasses.fields(cls) if f.default is dataclasses.MISSING]
        return UsageError(f"{prog} needs {' '.join(required)}; see {prog} --help")
    values = _values(argv, name)
    if not values:
        return UsageError(f"option {name} needs a value: {_describe_type(kind)}")
    if typing.get_origin(kind) is typing.Literal:
        return unknown(f"value of {name}", values[0], map(str, typing.get_args(kind)))
    given = values if typing.get_origin(kind) is tuple else values[:1]
    return UsageError(f"option {name} takes {_describe_type(kind)}, not {' '.join(given)!r}")


def _describe_type(kind) -> str:
    known = {int: "a whole number", float: "a number", tuple[int, ...]: "whole numbers", type(None): "None"}
    if isinstance(kind, types.UnionType):
        return " or ".join(map(_describe_type, typing.get_args(kind)))
    if typing.get_origin(kind) is typing.Literal:
        return f"one of {', '.join(map(str, typing.get_args(kind)))}"
    return known.get(kind, "a text")


def _unknown_option(word: str, argv: list[str], cls: type, prog: str) -> UsageError:
    fields = [field for field in dataclasses.fields(cls) if field.init]
    names = ["--" + field.name.replace("_", "-") for field in fields]
    flags = [name for name, field in zip(names, fields) if isinstance(field.default, bool)]
    negated = [name.replace("--", "--no-", 1) for name in flags]
    for yes, no in zip(flags, negated):
        if word in _values(argv, yes) + _values(argv, no):
            return UsageError(f"option {yes} takes no value, got {word!r}: write {yes} or {no}")
    if not word.startswith("-"):
        return UsageError(f"unexpected argument {word!r}; see {prog} --help")
    near = difflib.get_close_matches(word.split("=")[0].replace("_", "-"), names + negated, n=1, cutoff=0.5)
    return UsageError(f"unknown option {word!r}; {f'did you mean {near[0]}?' if near else f'see {prog} --help'}")


def _values(argv: list[str], option: str) -> list[str]:
    """The words given to an option; to its last mention, if there are several."""
    values, taking = [], False
    for word in argv:
        name, equals, value = word.partition("=")
        if name.startswith("--"):
            taking = name.replace("_", "-") == option
            if taking:
                values = [value] if equals else []
        elif taking:
            values.append(word)
    return values


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


if __name__ == "__main__":
    sys.exit(main())
