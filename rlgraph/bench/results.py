"""The JSON files of `rlgraph bench`, `rlgraph bench solve` and scripts that measure: their layout, and where they go.

What is written is checked, and so is what is read. docs/benchmarks.md explains every field.
"""

import argparse
import contextlib
import datetime
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from rlgraph.bench.provenance import provenance
from rlgraph.errors import CaptureError, GraphError, NonFiniteError, UsageError
from rlgraph.files import DamagedError, read_object, write_atomically

VERSION = 1
OPTIONAL = type(None)

# Field -> allowed types, of the file and of each row. Rows that were not timed end with "seconds": [].
FILE = {
    "version": int,
    "command": str,
    "interrupted": bool,
    "columns": dict,
    "settings": dict,
    "provenance": dict,
    "clocks": dict,
    "launch_overhead": (dict, OPTIONAL),
    "rows": list,
}
ROW = {
    "variant": str,
    "backend": str,
    "column": str,
    "env": str,
    "num_envs": int,
    "num_steps": int,
    "status": str,
    "reason": (str, OPTIONAL),
    "seconds": list,
}
TIMED = {
    "median_s": float,
    "min_s": float,
    "max_s": float,
    "us_per_step": float,
    "steps_per_second": float,
    "wide_spread": bool,
    "import_s": float,
    "build_s": float,
    "capture_s": float,
    "first_call_s": float,
}
COUNTED = {"graph_launches": (int, OPTIONAL), "peak_memory_bytes": (int, OPTIONAL), "calls": int, "steps_timed": int}
OVERHEAD = {
    "chains": list,
    "rules": list,
    **{f"{kind}_{what}": float for kind in ("eager", "replay") for what in ("cpu_us_per_kernel", "gpu_us_per_kernel")},
    **{f"{kind}_{what}": float for kind in ("eager", "replay") for what in ("cpu_us_per_launch", "gpu_us_per_launch")},
}
RULE = {"rule": str, "verdict": str, "here": str}
STATUS = ("ok", "skipped", "wrong", "failed", "interrupted")

# The same of `rlgraph bench solve`.
SOLVE_FILE = {
    "version": int,
    "command": str,
    "interrupted": bool,
    "settings": dict,
    "provenance": dict,
    "clocks": dict,
    "summary": dict,
    "rows": list,
}
SUMMARY = {"seeds": int, "solved": int, **{f"{which}_s": (float, OPTIONAL) for which in ("median", "min", "max")}}
SOLVE_ROW = {
    "seed": int,
    "solved": bool,
    "seconds": float,
    "steps": int,
    "mean_return": float,
    "evaluations": list,
    "build_s": float,
    "warm_up_s": float,
    "device": str,
    "mode": str,
    "execution": str,
    "evaluation": str,
}


def free_path(out: str, name: str) -> Path:
    """Where to write: `out`, or without it a name that is free, NAME-DATE.json in benchmarks/results/.

    Raises:
        UsageError: `out` exists: an earlier result is never written over.
    """
    if out:
        path = Path(out)
        if path.exists():
            raise UsageError(f"{out!r} exists; name another file with --out")
        return path
    name = f"{re.sub('[^a-z0-9]+', '-', name.lower())}-{datetime.date.today().isoformat()}"
    for i in range(1000):
        path = Path("benchmarks/results") / f"{name}{f'-{i}' if i else ''}.json"
        if not path.exists():
            return path
    raise UsageError(f"no free name like benchmarks/results/{name}.json; name a file with --out")


def without_out(words: list[str]) -> list[str]:
    """A command less where it wrote, which is nobody else's concern."""
    kept, words = [], list(words)
    while words:
        word = words.pop(0)
        if word == "--out":
            words = words[1:]
        elif not word.startswith("--out="):
            kept.append(word)
    return kept


def out_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that `write_measured` looks at."""
    parser.add_argument("--out", type=file_to_write, help="JSON file to write")
    parser.add_argument("--commit", default="", help="to note where there is no git checkout to ask")


def file_to_write(path: str) -> str:
    """A path, as the type of an option: one that cannot be written is found out before anything is measured."""
    if not Path(path).parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {str(Path(path).parent)!r}: make it, or name another")
    if Path(path).is_dir():
        raise argparse.ArgumentTypeError(f"{path!r} is a folder: name a file in it")
    return path


def count(text: str) -> int:
    """A whole number of at least 1, as the type of an option."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 1")
    return int(text)


@contextlib.contextmanager
def errors_in_a_line() -> Iterator[None]:
    """Around what a script does: mistakes are printed as one line, and it exits with code 2."""
    try:
        yield
    except (UsageError, GraphError, CaptureError, NonFiniteError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def write_measured(args: argparse.Namespace, program: str, words: list[str], measured: dict) -> None:
    """Write what a script measured, with its command and provenance, to `args.out`; nowhere if that is None.

    Args:
        args: of its options, `out` and `commit` among them.
        program, words: how it was called.
        measured: what it found.
    """
    if args.out is None:
        return
    settings = {name: value for name, value in vars(args).items() if name not in ("out", "commit")}
    command = " ".join([program, *without_out(words)])
    content = {"command": command, "settings": settings, "provenance": provenance(args.commit), **measured}
    Path(args.out).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def read(path: Path) -> dict:
    """Read and check a result file.

    Raises:
        UsageError: no such file, or not one of ours; names the first field that is wrong.
    """
    try:
        content = read_object(path)
    except FileNotFoundError:
        raise UsageError(f"no result file {str(path)!r}") from None
    except DamagedError as error:
        raise UsageError(f"{str(path)!r} is not a result file: {error}") from error
    check(content, str(path))
    return content


def check(content: dict, name: str) -> None:
    """Raise a UsageError for the first field that is missing or of another type."""
    _check_fields(content, FILE, name)
    if content["version"] != VERSION:
        raise UsageError(f"{name!r} has layout {content['version']}; this rlgraph reads layout {VERSION}")
    if content["launch_overhead"] is not None:
        _check_fields(content["launch_overhead"], OVERHEAD, f"{name}, launch_overhead")
        for rule in content["launch_overhead"]["rules"]:
            _check_fields(rule, RULE, f"{name}, launch_overhead")
    for i, row in enumerate(content["rows"]):
        where = f"{name}, row {i}"
        _check_fields(row, ROW, where)
        if row["status"] not in STATUS:
            raise UsageError(f"{where}: status {row['status']!r} is none of {', '.join(STATUS)}")
        if row["seconds"]:
            _check_fields(row, TIMED, where)
        if row["status"] == "ok":
            _check_fields(row, {**TIMED, **COUNTED}, where)


def check_solve(content: dict, name: str) -> None:
    """As `check`, for a file of `rlgraph bench solve`."""
    _check_fields(content, SOLVE_FILE, name)
    _check_fields(content["summary"], SUMMARY, f"{name}, summary")
    for i, row in enumerate(content["rows"]):
        _check_fields(row, SOLVE_ROW, f"{name}, row {i}")


def write(path: Path, content: dict, check: Callable[[dict, str], None] = check) -> None:
    """Check and write a result file, whole or not at all."""
    check(content, str(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, (json.dumps(content, indent=1) + "\n").encode())


def _check_fields(content, fields: dict, where: str) -> None:
    if not isinstance(content, dict):
        raise UsageError(f"{where!r} is not a result file of `rlgraph bench`")
    for field, types in fields.items():
        if field not in content:
            raise UsageError(f"{where!r} lacks {field!r}: not a result file of `rlgraph bench`")
        allowed = types if isinstance(types, tuple) else (types,)
        allowed += (int,) if float in allowed else ()
        if not isinstance(content[field], allowed):
            raise UsageError(f"{where!r}: {field!r} is {type(content[field]).__name__}, not {allowed[0].__name__}")
