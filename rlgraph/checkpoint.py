"""Policies and checkpoints on disk: safetensors and JSON, written whole or not at all, nothing that unpickles.

A policy file has the same names and layout on both backends. A checkpoint holds everything that determines the rest of
a run, as arrays "state/...", the policy file's arrays as "policy/...", and a header in the file's metadata.
"""

import dataclasses
import hashlib
import inspect
import json
import math
import os
import re
import sys
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file, save

import rlgraph
from rlgraph.config import TrainConfig
from rlgraph.environment import Environment
from rlgraph.errors import UsageError

FOLDER = "checkpoints"  # in a run's
LAYOUT = 1  # of checkpoints: raised when an older version could not read them

# ---- files


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file so that a reader, or a crash, finds the old content or the new one, never a part."""
    part = path.with_name(path.name + ".part")
    try:
        with open(part, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    """A new name survives a loss of power only if its folder is on disk too."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ---- policies


def save_policy(path: Path, arrays: dict[str, np.ndarray]) -> None:
    """Write weights and statistics by name."""
    write_atomically(path, save(_dense(arrays)))


def load_policy(path: Path) -> dict[str, np.ndarray]:
    """What `save_policy` wrote.

    Raises:
        UsageError: no such file, or a damaged one.
    """
    if not path.is_file():
        raise UsageError(f"no policy at {str(path)!r}: give a run folder that `rlgraph train` wrote")
    try:
        return load_file(path)
    except SafetensorError as error:
        raise UsageError(f"policy file {str(path)!r} is damaged: {error}") from error


def check_same_layout(expected: dict[str, tuple[int, ...]], arrays: dict[str, np.ndarray]) -> None:
    """Raise a UsageError that names the first array which is missing, unknown or of another shape."""
    for name, shape in expected.items():
        if name not in arrays:
            raise UsageError(f"the policy file has no {name!r}: it is of another network or agent")
        if arrays[name].shape != shape:
            raise UsageError(
                f"{name!r} has shape {list(arrays[name].shape)} in the policy file, {list(shape)} in this network"
            )
    for name in arrays:
        if name not in expected:
            raise UsageError(f"the policy file has {name!r}, which this network lacks")


def check_same_state(expected: dict[str, str], arrays: dict[str, np.ndarray]) -> None:
    """Raise a UsageError that names the first array of a checkpoint which is missing, unknown or another.

    Args:
        expected: dtype and shape by name, "float32[3, 4]".
        arrays: those of the checkpoint.
    """
    found = {name: f"{array.dtype}{list(array.shape)}" for name, array in arrays.items()}
    for name in [*expected, *found]:
        here, there = expected.get(name, "missing"), found.get(name, "missing")
        if here != there:
            raise UsageError(f"{name!r} is {there} in the checkpoint, {here} in this run")


# ---- checkpoints

# What a header says of a run that has no checkpoint yet.
BEGINNING = {"iterations": 0, "steps": 0, "seconds": 0.0, "train_seconds": 0.0, "timed_iterations": 0, "score": None}


@dataclass(frozen=True)
class Checkpoint:
    path: Path
    header: dict[str, Any]  # `identity`, and what BEGINNING has
    state: dict[str, np.ndarray]
    policy: dict[str, np.ndarray]


class Checkpoints:
    """The checkpoints of one run: the latest ones, and the one with the best score.

    Args:
        run: the run's folder.
        keep: how many of the latest to keep.
        identity: of the run.
    """

    def __init__(self, run: Path, keep: int, identity: dict[str, Any]):
        self.run, self.keep, self.identity = run, keep, identity

    def save(self, done: dict[str, Any], state: dict[str, np.ndarray], policy: dict[str, np.ndarray]) -> None:
        """Write one, then delete those that are no longer to be kept.

        Args:
            done: as BEGINNING: how far the run is, and the "score" since the last checkpoint, None if there is none.
            state: everything that determines the rest of the run.
            policy: what a policy file holds.

        Raises:
            OSError: the disk is full or gone. The earlier checkpoints are still there.
        """
        arrays = _dense({f"state/{name}": array for name, array in state.items()})
        arrays |= _dense({f"policy/{name}": array for name, array in policy.items()})
        metadata = {name: json.dumps(value) for name, value in (self.identity | done).items()}
        metadata["crc32"] = str(_checksum(metadata, arrays))
        folder = self.run / FOLDER
        if not folder.exists():
            folder.mkdir()
            _sync_folder(self.run)
        write_atomically(folder / f"{done['steps']:012d}.safetensors", save(arrays, metadata))
        self._delete_others(done["steps"])

    def _delete_others(self, newest: int) -> None:
        paths = saved(self.run)
        # One of more steps than the newest is damaged, and was passed over when the run went on.
        past = {steps: path for steps, path in paths.items() if steps <= newest}
        scores = {steps: _score(path) for steps, path in past.items()}
        kept = {*sorted(past)[-self.keep :], max(past, key=lambda steps: (scores[steps], steps))}
        for steps, path in paths.items():
            if steps not in kept:
                path.unlink()
        for part in (self.run / FOLDER).glob("*.part"):  # of a process that was killed while it wrote
            part.unlink()


def saved(run: Path) -> dict[int, Path]:
    """The checkpoints of a run by their steps, in that order, whole or not."""
    paths = [path for path in (run / FOLDER).glob("*.safetensors") if re.fullmatch(r"\d{12,}", path.stem)]
    return {int(path.stem): path for path in sorted(paths, key=lambda path: int(path.stem))}


def newest(run: Path) -> Checkpoint | None:
    """The last checkpoint of a run that is whole, None if it has none yet. A damaged one is named on stderr.

    Raises:
        UsageError: there are some, and all are damaged.
    """
    return _first_whole(reversed(saved(run).values()))


def choose(run: Path, which: str) -> Checkpoint:
    """A checkpoint of a run: "last"; "best", the one of the best score; or the number of its steps.

    Raises:
        UsageError: there is none such, or it is damaged.
    """
    paths = saved(run)
    if which in ("last", "best"):
        order = sorted(paths, key=(lambda steps: (_score(paths[steps]), steps)) if which == "best" else None)
    else:
        order = [steps for steps in paths if which.isdecimal() and steps == int(which)]
    found = _first_whole(paths[steps] for steps in reversed(order))
    if found is None:
        known = f"known: last, best, {', '.join(map(str, paths))}" if paths else "it has none"
        raise UsageError(f"run {str(run)!r} has no checkpoint {which!r}; {known}")
    return found


def _read(path: Path) -> Checkpoint:
    try:
        with safe_open(path, "numpy") as file:
            metadata = file.metadata() or {}
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no dict
        # safetensors itself does not notice a changed byte in the middle of a tensor.
        if metadata.pop("crc32", None) != str(_checksum(metadata, arrays)):
            raise DamagedError("its checksum is not that of its content")
        header = {name: json.loads(text) for name, text in metadata.items()}
    except (SafetensorError, OSError, ValueError) as error:
        raise DamagedError(str(error) or type(error).__name__) from error
    return Checkpoint(path, header, _under("state/", arrays), _under("policy/", arrays))


class DamagedError(Exception):
    """A checkpoint that is not as it was written."""


def _first_whole(paths) -> Checkpoint | None:
    damaged = []
    for path in paths:
        try:
            checkpoint = _read(path)
        except DamagedError as error:
            damaged.append((path, error))
            continue
        for other, error in damaged:
            say(f"checkpoint {str(other)!r} is damaged ({error}): {str(path)!r} is used instead")
        return checkpoint
    if damaged:
        path, error = damaged[0]
        raise UsageError(f"checkpoint {str(path)!r} is damaged ({error}), and there is none to use instead")
    return None


def _score(path: Path) -> float:
    """From the file's header alone."""
    try:
        with safe_open(path, "numpy") as file:
            score = json.loads((file.metadata() or {})["score"])
    except (SafetensorError, OSError, ValueError, KeyError):
        return -math.inf  # damaged
    return score if score is not None and math.isfinite(score) else -math.inf


def _checksum(metadata: dict[str, str], arrays: dict[str, np.ndarray]) -> int:
    """CRC-32 of the header and of every array with its name, dtype and shape."""
    crc = zlib.crc32(json.dumps(metadata, sort_keys=True).encode())
    for name, array in sorted(arrays.items()):
        crc = zlib.crc32(f"{name} {array.dtype} {array.shape}".encode(), crc)
        crc = zlib.crc32(array, crc)
    return crc


def _dense(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Rows after each other, which safetensors takes for granted."""
    return {name: np.asarray(array, order="C") for name, array in arrays.items()}


def _under(prefix: str, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}


def say(message: str) -> None:
    """A line on stderr about a run that goes on all the same."""
    print("rlgraph:", " ".join(message.splitlines()), file=sys.stderr)


# ---- what a checkpoint belongs to


def identity(agent: str, config: TrainConfig, env: Environment) -> dict[str, Any]:
    """The part of a checkpoint's header that must be the same when its run goes on, as JSON would give it back."""
    header = {
        "layout": LAYOUT,
        "rlgraph": rlgraph.__version__,
        "agent": agent,
        "environment": _digest(env),
        "config": dataclasses.asdict(config),
    }
    return json.loads(json.dumps(header))


def check_same_run(checkpoint: Checkpoint, expected: dict[str, Any]) -> None:
    """Raise a UsageError that names the first difference between a checkpoint and a run's `identity`."""
    names = {
        "layout": "the layout of checkpoints",
        "rlgraph": "the version of rlgraph",
        "agent": "the agent",
    }
    pairs = [(text, expected[name], checkpoint.header.get(name)) for name, text in names.items()]
    here, there = expected["config"], checkpoint.header.get("config") or {}
    pairs += [(f"{name} in config.json", here.get(name), there.get(name)) for name in [*here, *there]]
    source = "the SHA-256 of the environment's source"
    pairs.append((source, expected["environment"], checkpoint.header.get("environment")))
    for text, ours, theirs in pairs:
        if ours != theirs:
            raise UsageError(
                f"{text} is {ours!r}, but {theirs!r} in checkpoint {str(checkpoint.path)!r}: put it back, or start a "
                "new run"
            )


def _digest(env: Environment) -> str:
    """A hash of the definition's source; of its name alone where there is none, as at Python's prompt."""
    try:
        source = inspect.getsource(env.definition)
    except (OSError, TypeError):
        source = env.definition.__name__
    return hashlib.sha256(source.encode()).hexdigest()
