"""Files of a run: written whole or not at all, and read only where they are plain files that can be read.

"Is not there" and "cannot be read" are told apart: only what is not there may be made anew.
"""

import contextlib
import json
import math
import os
import stat
import sys
from pathlib import Path
from typing import Any

from rlgraph.errors import UsageError, in_one_line

LARGEST_JSON = 2**20  # bytes; config.json and result.json have a few thousand


class DamagedError(Exception):
    """A file that is not as it was written."""


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file so that a reader, or a crash, finds the old content or the new one, never a part."""
    part = path.with_name(path.name + ".part")
    part.unlink(missing_ok=True)  # of a process that was killed; a pipe of that name would keep us waiting
    try:
        with open(part, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """A new name survives a loss of power only if its folder is on disk too."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_there(path: Path) -> bool:
    """Whether a file is there; False only if nothing is.

    Raises:
        UsageError: something else than a plain file is there, such as a folder, or a pipe, which one would wait for;
            or it cannot be told.
    """
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError as error:
        if os.path.islink(path):
            raise UsageError(f"{str(path)!r} is a link to what is not there: put that back, or delete it") from error
        return False
    except (OSError, ValueError) as error:
        raise cannot_read(path, error) from error
    if not stat.S_ISREG(mode):
        raise UsageError(f"{str(path)!r} is no plain file, as it must be: move it away")
    return True


def cannot_read(path: Path, error: Exception) -> UsageError:
    """For what is there, or may be. ValueError is raised for a path that no file can have."""
    reason = (error.strerror or error) if isinstance(error, OSError) else error
    return UsageError(f"cannot read {str(path)!r}: {reason}")


def read(path: Path, most: int | None = None) -> bytes:
    """The content of a file.

    Args:
        path: of the file.
        most: as many bytes are read; None for all.

    Raises:
        FileNotFoundError: it is not there.
        UsageError: it is there, but cannot be read.
    """
    is_there(path)
    try:
        with open(path, "rb") as file:
            return file.read(most)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise cannot_read(path, error) from error


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a small file.

    Raises:
        DamagedError: there is something else in it.
        FileNotFoundError, UsageError: as `read`.
    """
    data = read(path, LARGEST_JSON + 1)
    if len(data) > LARGEST_JSON:
        raise DamagedError("it is too large")
    try:
        content = parse_json(data)
    except ValueError as error:
        raise DamagedError(str(error)) from error
    if not isinstance(content, dict):
        raise DamagedError("it holds no JSON object")
    return content


def parse_json(data: bytes | str) -> Any:
    """As `json.loads`, but only JSON: finite numbers, and no name twice. Everything else is a ValueError."""
    text = data.decode("utf-8") if isinstance(data, bytes) else data
    try:
        return json.loads(text, object_pairs_hook=_once, parse_constant=_finite, parse_float=_finite)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("it says something twice")
    return found


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError(f"{digits} is no finite number")
    return number


def say(message: str) -> None:
    """A line on stderr, for what goes on all the same, and for what has ended."""
    with contextlib.suppress(OSError):  # of a stderr that takes nothing there is nowhere to tell
        print("rlgraph:", in_one_line(message), file=sys.stderr)
