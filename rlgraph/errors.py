"""Errors that a user causes, each one line that says what to do."""

import difflib
from collections.abc import Iterable
from typing import Any

INTERRUPTED = 130  # the shell's code for a program ended by Ctrl-C


class UsageError(ValueError):
    """A wrong name, option or value. The command line prints it as one line and exits with code 2."""


class CaptureError(RuntimeError):
    """A function cannot be captured. The message names the operation, its line, and what to write instead."""


class GraphError(RuntimeError):
    """Something that this CUDA graph, or this driver, torch or CUDA version, does not offer."""


class NonFiniteError(RuntimeError):
    """A training or an evaluation has come to NaN or infinity. The message names the quantity and the iteration."""


class OutOfMemoryError(RuntimeError):
    """Memory ran out. The message names what to lower."""


class HelpPrinted(Exception):  # noqa: N818 - not an error
    """Help was asked for and printed: there is nothing left to do."""


def first_line(error: BaseException) -> str:
    """What an error says, in one line; its type where it says nothing."""
    return str(error).strip().split("\n")[0] or type(error).__name__


def is_out_of_memory(error: BaseException) -> bool:
    """Whether torch, JAX or numpy ran out of memory, on a device or on the host; each says it in its own way."""
    marks = ("out of memory", "resource_exhausted", "allocate memory", "overflowed")
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(mark in str(error).lower() for mark in marks)
    )


def in_one_line(text: str) -> str:
    """A text without line breaks, and without characters that would steer a terminal: those are written as escapes."""
    words = " ".join(text.split())
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in words)


def cut(words: str) -> str:
    """Not longer than one can read."""
    return words if len(words) <= 80 else f"{words[:77]}..."


def shown(value: Any) -> str:
    """A value in an error: in one line, and not longer than one can read."""
    try:
        words = " ".join(repr(value).split())
    except Exception:  # an int of 5,000 digits, say, which Python refuses to write
        words = f"a {type(value).__name__}"
    return cut(words)


def unknown(kind: str, name: str, known: Iterable[str]) -> UsageError:
    """An error for a name that is not in `known`, with the nearest known name in it.

    Matching ignores case, so `cartpole-v1` finds `CartPole-v1`.
    """
    known = list(known)
    folded = {k.casefold(): k for k in known}
    near = difflib.get_close_matches(name.casefold(), folded, n=1, cutoff=0.5)
    hint = f"did you mean {folded[near[0]]!r}?" if near else f"known: {', '.join(sorted(known))}"
    return UsageError(f"unknown {kind} {shown(name)}; {hint}")
