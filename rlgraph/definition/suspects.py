"""Which line of a definition is to blame for a wrong result: the call that gave it is made again and watched."""

import contextlib
import random
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from rlgraph.definition.errors import line_of
from rlgraph.errors import UsageError


def generators() -> tuple:
    """The state of the random generators that a whole program shares."""
    kind, keys, *rest = np.random.get_state()  # noqa: NPY002 - it is not drawn from
    torch = sys.modules.get("torch")
    return kind, keys.tobytes(), rest, random.getstate(), torch and bytes(torch.get_rng_state())


def returning(call: Callable[[], Any], files: set[str]) -> str:
    """The line that the result is returned from."""
    lines = _watched(call, files, lambda frame, value: None)
    return line_of(*lines[-1][:2]) if lines else ""


def differing(call: Callable[[], Any], files: set[str]) -> str:
    """The first line after which two equal calls see something else."""

    def look(frame, value):
        return {name: _seen(x) for name, x in frame.f_locals.items()}, _seen(value)

    for (file, line, one), (*_, other) in zip(_watched(call, files, look), _watched(call, files, look)):
        if one != other:
            return line_of(file, line)
    return ""


def drawing(call: Callable[[], Any], files: set[str]) -> str:
    """The first line after which a generator of the whole program has moved."""
    before = generators()
    for file, line, state in _watched(call, files, lambda frame, value: generators()):
        if state != before:
            return line_of(file, line)
    return ""


def _watched(call: Callable[[], Any], files: set[str], look: Callable) -> list[tuple[str, int, Any]]:
    """After each line of the files that the call runs: file, line, and what a look at the frame saw."""
    seen, last = [], {}

    def at_line(frame, event, value):
        if event != "exception":
            file = frame.f_code.co_filename
            seen.append((file, last.get(frame, frame.f_lineno), look(frame, value if event == "return" else None)))
            last[frame] = frame.f_lineno
        return at_line

    before = sys.gettrace()
    sys.settrace(lambda frame, event, _: at_line if frame.f_code.co_filename in files else None)
    try:
        with contextlib.suppress(UsageError):  # a result that differs may also be an error: what was seen so far counts
            call()
    finally:
        sys.settrace(before)
    return seen


def _seen(value: Any) -> Any:
    """A value, as far as it can be compared with an equal call's."""
    if isinstance(value, np.ndarray | np.generic):
        return value.dtype, value.tobytes()
    if isinstance(value, tuple | list):
        return tuple(map(_seen, value))
    return repr(value) if isinstance(value, bool | int | float | str) else None
