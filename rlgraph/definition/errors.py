"""What a definition raises, in one line: where, by which expression, what it says, and what to write instead."""

import itertools
import linecache
import re
from collections.abc import Collection
from pathlib import Path
from types import TracebackType
from typing import Any

from rlgraph.definition.files import source_files
from rlgraph.errors import CaptureError, GraphError, UsageError, in_one_line, is_out_of_memory

# What an error or a wrong result says, and what to write in place of what caused it. The first that fits counts. Each
# is a row of the table of traps in docs/environments.md.
TRAPS = (
    (r"arange.*(same device|expected device)", "`xp.stack([i_B == k for k in range(n)], axis=-1)`"),
    (r"truth value of an array|Boolean value of Tensor|boolean conversion", "`xp.where`; `a & b`, `a | b`, `~a`"),
    (r"`-` operator|neg does not accept dtype bool|sub does not accept dtype bool", "`~mask`"),
    (r"return_types|\(not .* to tuple|'tuple' and|and 'tuple'|Tensor, not tuple", "`xp.max(x, axis=-1)`"),
    (r"has no attribute '?astype|has no attribute '?to'?$", "`xp.astype(x, d)`"),
    (r"no attribute '?device|expected all tensors to be on the same device|is not on the expected device",
     "`xp.zeros_like(leaf)`, `xp.full_like(leaf, value)`, Python numbers"),
    (r"(Tensor|ndarray|Tracer)'? (object )?has no attribute", "a function of `xp`"),
    (r"boolean indices must be concrete|NonConcreteBoolean", "`xp.where`"),
    (r"out of bounds|index out of range", "clip the index first"),
    (r"support in-place item assignment",
     "`xp.stack([xp.where(i_B == k, v_B, x[:, k]) for k in range(n)], axis=-1)`"),
    (r"read-only", "`x = x + v`"),
    (r"can only convert an array|Python scalar|converted to Scalar|to a scalar index|converted to an index"
     r"|conversion method __array__|device type tensor to numpy|concrete value is expected|is a numpy.ndarray",
     "a function of `xp`, such as `xp.cos(x)`"),
    (r"differs from call to call|draws random numbers", "the uniforms passed in, or a leaf of `State`"),
    (r"depends on the others", "an axis other than the first, such as `xp.sum(x, axis=-1)`, `x[:, 0]`"),
    (r"is float64", "`xp.full_like(x, value)`, Python numbers such as `math.sqrt(2.0)`, `xp.astype(x, xp.float32)`"),
    (r"is int(32|64)\[.*must be int(32|64)", "`xp.sum(mask, axis=-1, dtype=xp.int32)`, `xp.astype(x, xp.int32)`"),
)  # fmt: skip


class errors_of:  # noqa: N801 - a context manager
    """What an environment's definition raises while it is used becomes a UsageError; SystemExit too.

    An interrupt, what does not come from its files, and errors that say already what to do, pass.
    """

    def __init__(self, env: Any):
        self.env = env

    def __enter__(self):
        return self

    def __exit__(self, kind, error, traceback):
        if error is None or isinstance(error, (KeyboardInterrupt, GeneratorExit, UsageError, CaptureError, GraphError)):
            return
        if is_out_of_memory(error):
            return
        files = files_of(self.env.definition)
        if _place(error, files) is not None:
            raise UsageError(f"environment {self.env.id!r} fails: {described(error, files)}") from error


def files_of(definition: Any) -> set[str]:
    """The files whose lines are the definition's, as tracebacks name them."""
    functions = (getattr(definition, name, None) for name in ("reset", "step", "observe"))
    codes = (getattr(function, "__code__", None) for function in functions)
    return {*map(str, source_files(definition)), *(code.co_filename for code in codes if code)}


def described(error: BaseException, files: Collection) -> str:
    """An error that a definition raised: place, expression, what it says, and what to write instead."""
    place, says = _place(error, {str(file) for file in files}), _said(error)
    return advised(f"{line_of(*place)}: {says}" if place else says)


def advised(text: str) -> str:
    """With what to write instead, where the text is of a known trap."""
    advice = next((advice for pattern, advice in TRAPS if re.search(pattern, text, re.IGNORECASE)), None)
    return text if advice is None else f"{text}; write instead: {advice}"


def line_of(file: str, number: int, expression: str = "") -> str:
    """ "my_env.py, line 78: `x.max(axis=-1)`": the whole line, unless an expression is given."""
    linecache.checkcache(file)
    expression = expression or linecache.getline(file, number)
    words = " ".join(expression.split())
    words = f"{words[:97]}..." if len(words) > 100 else words
    return f"{Path(file).name}, line {number}" + (f": `{words}`" if words else "")


def _place(error: BaseException, files: Collection[str]) -> tuple[str, int, str] | None:
    """The innermost place in the files that an error went through: file, line, expression."""
    if isinstance(error, SyntaxError) and error.filename in files and error.lineno:
        return error.filename, error.lineno, ""
    read = [f for f in getattr(error, "real_stack", None) or () if f.filename in files]  # by torch.compile, not run
    if read:
        return read[-1].filename, read[-1].lineno, ""
    found, traceback = None, error.__traceback__
    while traceback is not None:
        if traceback.tb_frame.f_code.co_filename in files:
            found = traceback
        traceback = traceback.tb_next
    return found and _failed(found)


def _failed(traceback: TracebackType) -> tuple[str, int, str]:
    """File, line and expression; none where the expression is longer than the line."""
    code, number = traceback.tb_frame.f_code, traceback.tb_lineno
    first, last, start, end = next(itertools.islice(code.co_positions(), traceback.tb_lasti // 2, None))
    if start is None or not first == last == number:
        return code.co_filename, number, ""
    linecache.checkcache(code.co_filename)  # the file may have changed since it was last shown
    line = linecache.getline(code.co_filename, number)
    return code.co_filename, number, line.encode()[start:end].decode(errors="replace")


def _said(error: BaseException) -> str:
    """An error's type and the first line of what it says, whatever its class makes of that."""
    try:
        text = error.msg if isinstance(error, SyntaxError) else str(error)
        text = next((line for line in text.splitlines() if line.strip()), "").strip()
    except Exception:
        text = ""
    name = type(error).__name__
    return f"{name}: {_readable(text)}" if text else name


def _readable(text: str) -> str:
    """A text in one line, not longer than one can read."""
    words = in_one_line(text)
    return words if len(words) <= 200 else words[:197] + "..."
