"""Which line of a definition is to blame for a wrong result: the call that gave it is made again and watched."""

import contextlib
import random
import sys
import types
from collections.abc import Callable
from typing import Any

import numpy as np

from rlgraph.definition.errors import line_of
from rlgraph.definition.modules import PREFIX
from rlgraph.errors import UsageError

LONG = 1000  # entries of what is not looked through


def generators() -> tuple:
    """The states of the random generators that a whole program shares: Python's, numpy's, torch's if it is there."""
    kind, keys, *rest = np.random.get_state()  # noqa: NPY002 - nothing is drawn
    torch = sys.modules.get("torch")
    return random.getstate(), (kind, tuple(keys), *rest), torch and tuple(torch.get_rng_state().tolist())


def put_back(states: tuple) -> None:
    """Set these generators to what `generators` gave."""
    of_python, of_numpy, of_torch = states
    random.setstate(of_python)
    np.random.set_state(of_numpy)  # noqa: NPY002
    if of_torch:
        torch = sys.modules["torch"]
        torch.set_rng_state(torch.tensor(of_torch, dtype=torch.uint8))


def memory(definition: Any) -> dict[str, str]:
    """What a definition keeps between calls, as text: its globals and those of the modules in its package, by name."""
    package = getattr(definition, "__package__", None) or ""
    beside = [m for name, m in list(sys.modules.items()) if package and name.startswith(f"{package}.")]
    homes = [definition, *(beside if package.startswith(PREFIX) else [])]
    found = {}
    for home in homes:
        for name, value in list(vars(home).items()):
            if not isinstance(value, types.ModuleType) and not name.startswith("__"):
                found[name] = _text(value)
    return found


def _text(value: Any) -> str:
    try:
        if hasattr(value, "__len__") and len(value) > LONG:
            return f"{len(value)} entries"
        own = getattr(value, "__dict__", None)
        return f"{value!r} {own and dict(own)!r}"
    except Exception:  # whatever a foreign object raises, it is not told apart from itself
        return ""


def making(call: Callable[[], Any], files: set[str], is_it: Callable[[Any], bool] = lambda value: False) -> str:
    """The first line after which a variable is one that `is_it`; else the line that the result is returned from."""

    def look(frame, value):
        return {name for name, x in frame.f_locals.items() if is_it(x)}

    lines, known = _watched(call, files, look), {}
    for file, line, frame, names in lines:
        if names - known.setdefault(frame, names):  # those of its first line are the arguments
            return line_of(file, line)
    return line_of(*lines[-1][:2]) if lines else ""


def differing(call: Callable[[], Any], files: set[str]) -> str:
    """The first line after which two equal calls see something else."""

    def look(frame, value):
        return {name: _seen(x) for name, x in frame.f_locals.items()}, _seen(value)

    for (file, line, _, one), (*_, other) in zip(_watched(call, files, look), _watched(call, files, look)):
        if one != other:
            return line_of(file, line)
    return ""


def changing(call: Callable[[], Any], files: set[str], definition: Any) -> str:
    """The first line after which the definition keeps something else than before."""
    before = memory(definition)
    for file, line, _, now in _watched(call, files, lambda frame, value: memory(definition)):
        if now != before:
            return line_of(file, line)
    return ""


def drawing(call: Callable[[], Any], files: set[str], states: tuple) -> str:
    """The first line after which a generator of the whole program has moved from these states."""
    put_back(states)
    for file, line, _, now in _watched(call, files, lambda frame, value: generators()):
        if now != states:
            return line_of(file, line)
    return ""


def _watched(call: Callable[[], Any], files: set[str], look: Callable) -> list[tuple[str, int, Any, Any]]:
    """After each line of the files that the call runs: file, line, its frame, and what a look at that saw."""
    seen, last = [], {}

    def at_line(frame, event, value):
        if event != "exception":
            file = frame.f_code.co_filename
            line, result = last.get(frame, frame.f_lineno), value if event == "return" else None
            seen.append((file, line, frame, look(frame, result)))
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
