"""How errors and warnings name a user's function and line."""

import contextlib
import functools
import sys
import traceback
import warnings
from pathlib import Path

import torch

# Where code begins that is not the user's.
INSIDE = (*(str(Path(file).parent) for file in (torch.__file__, __file__)), warnings.__file__, "<")


def warn(message: str) -> None:
    """A warning at the line that called this package, from however deep in it."""
    frame, level = sys._getframe(), 1
    while frame is not None and frame.f_globals.get("__name__", "").startswith("rlgraph."):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)


def name_of(value) -> str:
    if isinstance(value, functools.partial):
        return name_of(value.func)
    name = None
    with contextlib.suppress(Exception):  # of a __getattr__, which may also make one up
        name = value.__name__
    return name if isinstance(name, str) else type(value).__name__


def line_of(error: BaseException | None) -> str:
    """file:line of the innermost frame outside torch and this package, of an error or of the current call."""
    frames = traceback.extract_tb(error.__traceback__) if error else traceback.extract_stack()
    outside = [frame for frame in frames if not frame.filename.startswith(INSIDE)]
    if not outside:
        return "an unknown line"
    frame, most = outside[-1], 100
    line = frame.line if len(frame.line) <= most else f"{frame.line[:most]}..."
    return f"{frame.filename}:{frame.lineno} ({line})"
