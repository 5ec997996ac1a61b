"""What a run is of: its agent, config, environment and version. It must be the same when the run goes on or is played.

An environment is known by the bytes of its files. They are hashed before they are imported, so that a run folder from
elsewhere, or a file that has changed, runs no code that was not trained with.
"""

import dataclasses
import hashlib
import json
import os
from pathlib import Path
from types import ModuleType
from typing import Any

import rlgraph
from rlgraph.config import TrainConfig
from rlgraph.errors import UsageError, shown
from rlgraph.files import cannot_read, is_there
from rlgraph.registry import source_files

LAYOUT = 2  # of checkpoints and policy files: raised when an older version could not read them
NEW_RUN = "put it back, or start a new run"
SOURCE = "the SHA-256 of the environment's source"

NO_FILE = "no file"  # in place of a hash

Sources = dict[str, str]  # SHA-256 of a definition's files, by their paths from its own folder


def identity(agent: str, config: TrainConfig, sources: Sources) -> dict[str, Any]:
    """The part of a file's header that must be the same when its run goes on, as JSON would give it back."""
    header = {
        "layout": LAYOUT,
        "rlgraph": rlgraph.__version__,
        "agent": agent,
        "environment": sources,
        "config": dataclasses.asdict(config),
    }
    return json.loads(json.dumps(header))


def check_same_run(expected: dict[str, Any], header: dict[str, Any], where: str) -> None:
    """Raise a UsageError that names the first difference between a run's `identity` and a file's header.

    Args:
        expected: the run's.
        header: the file's.
        where: which file, in words.
    """
    names = {
        "layout": "the layout of checkpoints",
        "rlgraph": "the version of rlgraph",
        "agent": "the agent",
    }
    pairs = [(text, expected[name], header.get(name)) for name, text in names.items()]
    pairs += _pairs(expected["config"], header.get("config"), "{} in config.json")
    pairs += _pairs(expected["environment"], header.get("environment"), SOURCE + ", {},")
    for text, ours, theirs in pairs:
        if ours != theirs:
            raise UsageError(f"{text} is {_quoted(ours)}, but {_quoted(theirs)} in {where}: {NEW_RUN}")


def _quoted(value: Any) -> str:
    """A text whole: two paths may differ only at their ends."""
    return repr(value) if isinstance(value, str) else shown(value)


def _pairs(here: dict[str, Any], there: Any, text: str) -> list[tuple[str, Any, Any]]:
    there = there if isinstance(there, dict) else {}
    return [(text.format(name), here.get(name), there.get(name)) for name in [*here, *there]]


# ---- the environment's files


def hash_sources(definition: ModuleType) -> Sources:
    """Of the files that a definition was read from; its name alone where there is none, as at Python's prompt."""
    files = source_files(definition)
    if not files:
        return {definition.__name__: NO_FILE}
    return {Path(os.path.relpath(path, files[0].parent)).as_posix(): _sha256(path) for path in files}


def check_before_import(env: str, sources: Sources, where: Path) -> None:
    """Raise a UsageError unless an environment's files are those that a run was trained with.

    Args:
        env: the run's. What is no file of a user's is part of the program that runs, and is trusted.
        sources: what the run has recorded.
        where: the file that it is recorded in.
    """
    if not env.endswith(".py"):
        return
    path = Path(env)
    for name in dict.fromkeys([path.name, *sources]):
        _check_source(path.parent / name, sources.get(name), where)


def check_imported(definition: ModuleType, sources: Sources, where: Path) -> None:
    """The same of a definition that is imported: now it is known which files it has."""
    found = hash_sources(definition)
    if found != sources:
        name = next(name for name in [*found, *sources] if found.get(name) != sources.get(name))
        raise UsageError(_differs(found.get(name), name, sources.get(name), where))


def _check_source(path: Path, recorded: str | None, where: Path) -> None:
    if not is_there(path):
        raise UsageError(f"no environment file {str(path)!r}, which the run was trained with: put it back")
    found = _sha256(path)
    if found != recorded:
        raise UsageError(_differs(found, str(path), recorded, where))


def _differs(found: str | None, name: str, recorded: str | None, where: Path) -> str:
    return f"{SOURCE} is {_quoted(found)} in {name!r}, but {_quoted(recorded)} in {str(where)!r}: {NEW_RUN}"


def _sha256(path: Path) -> str:
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise cannot_read(path, error) from error
