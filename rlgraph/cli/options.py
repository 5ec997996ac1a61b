"""Options on the command line, into a dataclass of them; every mistake is a UsageError of one line."""

import contextlib
import dataclasses
import difflib
import io
import re
import types
import typing

import tyro

from rlgraph.errors import HelpPrinted, OutOfMemoryError, UsageError, is_out_of_memory, shown, unknown

# Those that memory depends on, in the order in which one would lower them.
SIZES = ("num_envs", "num_steps", "replay_capacity", "minibatch_size", "hidden", "episodes", "eval_episodes")


def parse(cls: type, argv: list[str], prog: str, default=None):
    """The options that words give.

    Args:
        cls: a dataclass of options.
        argv: the words after the command.
        prog: the command, for help and errors.
        default: an instance, of what is not given; None for the class's own defaults.

    Raises:
        UsageError: a wrong word.
        HelpPrinted: help was asked for.
    """
    kwargs = {} if default is None else {"default": default}
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            parsed, rest = tyro.cli(cls, args=argv, prog=prog, return_unknown_args=True, **kwargs)
    except SystemExit as stop:
        if stop.code in (0, None):
            raise HelpPrinted from None
        raise _own_complaint(stop) or _wrong_value(complaint.getvalue(), argv, cls, prog) from None
    if rest:
        raise _unknown_option(rest[0], argv, cls, prog)
    return parsed


def values(argv: list[str], option: str) -> list[str]:
    """The words given to an option; to its last mention, if there are several."""
    found, taking = [], False
    for word in argv:
        name, equals, value = word.partition("=")
        if name.startswith("--"):
            taking = name.replace("_", "-") == option
            if taking:
                found = [value] if equals else []
        elif taking:
            found.append(word)
    return found


def sizes_to_lower(options: type, env: str) -> str:
    """Advice where memory runs out: those of a command's options that it depends on, and a user's own environment."""
    given = {field.name for field in dataclasses.fields(options) if field.init}
    sizes = ["--" + name.replace("_", "-") for name in SIZES if name in given]
    sizes += [f"what {env} allocates"] if env.endswith(".py") else []
    return "lower " + (f"{', '.join(sizes[:-1])} or {sizes[-1]}" if len(sizes) > 1 else sizes[0])


@contextlib.contextmanager
def advice_on_memory(advice: str):
    """What to do where memory runs out inside."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise OutOfMemoryError(f"out of memory: {advice}") from error


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
    given = values(argv, name)
    if not given:
        return UsageError(f"option {name} needs a value: {_describe_type(kind)}")
    if typing.get_origin(kind) is typing.Literal:
        return unknown(f"value of {name}", given[0], map(str, typing.get_args(kind)))
    words = " ".join(given if typing.get_origin(kind) is tuple else given[:1])
    return UsageError(f"option {name} takes {_describe_type(kind)}, not {shown(words)}")


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
        if word in values(argv, yes) + values(argv, no):
            return UsageError(f"option {yes} takes no value, got {shown(word)}: write {yes} or {no}")
    if not word.startswith("-"):
        return UsageError(f"unexpected argument {shown(word)}; see {prog} --help")
    near = difflib.get_close_matches(word.split("=")[0].replace("_", "-"), names + negated, n=1, cutoff=0.5)
    return UsageError(f"unknown option {shown(word)}; {f'did you mean {near[0]}?' if near else f'see {prog} --help'}")
