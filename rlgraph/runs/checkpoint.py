"""Policies and checkpoints on disk: safetensors and JSON, written whole or not at all, nothing that unpickles.

A policy file has the same names and layout on both backends. A checkpoint holds everything that determines the rest of
a run, as arrays "state/...", and the policy file's arrays as "policy/...". Both have the same header: what run they are
of, see `rlgraph.runs.identity`, and how far it was, see `BEGINNING`.
"""

import math
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rlgraph.arguments import integer, real
from rlgraph.config import TrainConfig
from rlgraph.errors import UsageError, shown
from rlgraph.files import DamagedError, cannot_read, is_there, say, sync_folder, write_atomically
from rlgraph.runs.arrays_file import read_arrays, read_header, write_arrays

FOLDER = "checkpoints"  # in a run's
NONE_YET = "none-yet"  # a file in it until it has a checkpoint: a run without both has lost them, or left them behind

# What a header says of a run that has no checkpoint yet.
BEGINNING = {"iterations": 0, "steps": 0, "seconds": 0.0, "train_seconds": 0.0, "timed_iterations": 0, "score": None}


@dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint holds, or a policy file, whose state is empty."""

    path: Path
    header: dict[str, Any]  # `identity`, and what BEGINNING has
    state: dict[str, np.ndarray]
    policy: dict[str, np.ndarray]

    @property
    def in_words(self) -> str:
        return f"{'checkpoint' if self.state else 'policy file'} {str(self.path)!r}"


def check_progress(last: Checkpoint, config: TrainConfig) -> None:
    """Raise a UsageError unless a run of this config can have been where a checkpoint says it was."""
    iterations, steps, timed = (last.header[name] for name in ("iterations", "steps", "timed_iterations"))
    possible = iterations % config.iterations_per_launch == 0 and iterations <= config.num_iterations
    possible &= steps == iterations * config.batch_size and timed <= iterations
    if not possible or (timed and not last.header["train_seconds"]):
        raise UsageError(
            f"{last.in_words} says {iterations} iterations, {steps} steps and {timed} timed iterations, which no run "
            "of its config comes to: delete it to go on from another one, or start a new run"
        )


def check_numbers(played: Checkpoint) -> None:
    """Raise a UsageError that names the first array of a policy that is not of finite float32."""
    for name, array in played.policy.items():
        if array.dtype != np.float32:
            raise UsageError(f"{name!r} is {array.dtype} in {played.in_words}, but must be float32")
        if not np.isfinite(array).all():
            raise UsageError(
                f"{name!r} holds NaN or infinity in {played.in_words}: take an earlier checkpoint, or start a new run"
            )


# ---- policies


def save_policy(path: Path, header: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
    """Write weights and statistics by name."""
    write_arrays(path, header, arrays)


def load_policy(path: Path) -> Checkpoint:
    """What `save_policy` wrote.

    Raises:
        UsageError: no such file, a damaged one, or one whose arrays are not of finite float32.
    """
    try:
        header, arrays = read_arrays(path)
        policy = Checkpoint(path, _checked(header), {}, arrays)
    except FileNotFoundError as error:
        raise UsageError(f"no policy at {str(path)!r}: give a run folder that `rlgraph train` wrote") from error
    except DamagedError as error:
        raise UsageError(f"policy file {str(path)!r} is damaged: {error}") from error
    check_numbers(policy)
    return policy


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


class Checkpoints:
    """The checkpoints of one run: the latest ones, and the one with the best score.

    Args:
        run: the run's folder.
        keep: how many of the latest to keep.
        identity: of the run.
    """

    def __init__(self, run: Path, keep: int, identity: dict[str, Any]):
        self.run, self.keep, self.identity = run, keep, identity

    def begin(self) -> None:
        """Note that there is none yet, before a run writes anything that it could lose."""
        self._make_folder()
        write_atomically(self.run / FOLDER / NONE_YET, b"The run has saved no checkpoint yet.\n")

    def save(self, done: dict[str, Any], state: dict[str, np.ndarray], policy: dict[str, np.ndarray]) -> None:
        """Write one, then delete those that are no longer to be kept.

        Args:
            done: as BEGINNING: how far the run is, and the "score" since the last checkpoint, None if there is none.
            state: everything that determines the rest of the run.
            policy: what a policy file holds.

        Raises:
            OSError: the disk is full or gone. The earlier checkpoints are still there.
        """
        arrays = {f"state/{name}": array for name, array in state.items()}
        arrays |= {f"policy/{name}": array for name, array in policy.items()}
        score = done["score"] if done["score"] is not None and math.isfinite(done["score"]) else None
        self._make_folder()
        write_arrays(self.run / FOLDER / _name(done["steps"]), self.identity | done | {"score": score}, arrays)
        self._delete_others(done["steps"])

    def _make_folder(self) -> None:
        folder = self.run / FOLDER
        if not folder.exists():
            folder.mkdir()
            sync_folder(self.run)

    def _delete_others(self, newest: int) -> None:
        paths = {steps: path for steps, path in saved(self.run).items() if path.is_file()}
        # One of more steps than the newest is damaged, and was passed over when the run went on.
        past = {steps: path for steps, path in paths.items() if steps <= newest}
        best = max(past, key=lambda steps: (_score_if_whole(past[steps]), steps))
        kept = {*sorted(past)[-self.keep :], best}
        for steps, path in paths.items():
            if steps not in kept:
                path.unlink(missing_ok=True)
        folder = self.run / FOLDER
        (folder / NONE_YET).unlink(missing_ok=True)
        for part in folder.glob("*.part"):  # of a process that was killed while it wrote
            if part.is_file():
                part.unlink()


def saved(run: Path) -> dict[int, Path]:
    """The checkpoints of a run by their steps, in that order, whole or not.

    Raises:
        UsageError: the folder cannot be read.
    """
    folder = run / FOLDER
    try:
        names = set(os.listdir(folder))
    except FileNotFoundError as error:
        if folder.is_symlink():
            raise cannot_read(folder, error) from error
        return {}
    except OSError as error:
        raise cannot_read(folder, error) from error
    numbers = sorted(int(name.split(".")[0]) for name in names if re.fullmatch(r"[0-9]{12,20}\.safetensors", name))
    return {steps: folder / _name(steps) for steps in numbers if _name(steps) in names}


def _name(steps: int) -> str:
    return f"{steps:012d}.safetensors"


def has_saved_none(run: Path) -> bool:
    """Whether a run without checkpoints never had one, so that it may start from the beginning."""
    return is_there(run / FOLDER / NONE_YET)


def newest(run: Path) -> Checkpoint | None:
    """The last checkpoint of a run that is whole, None if it has none. A damaged one is named on stderr.

    Raises:
        UsageError: there are some, and all are damaged; or one cannot be read.
    """
    return _first_whole(lambda: reversed(saved(run).values()))


def choose(run: Path, which: str) -> Checkpoint:
    """A checkpoint of a run: "last"; "best", the one of the best score; or the number of its steps.

    Raises:
        UsageError: there is none such, or it is damaged, or cannot be read; or its policy is not of finite float32.
    """

    def chosen() -> list[Path]:
        known = saved(run).items()
        paths = [path for steps, path in reversed(known) if which in ("last", "best", str(steps), path.stem)]
        return sorted(paths, key=_score_or_least, reverse=True) if which == "best" else paths  # of equals, the later

    found = _first_whole(chosen)
    if found is None:
        known = f"known: last, best, {', '.join(map(str, saved(run)))}" if saved(run) else "it has none"
        raise UsageError(f"run {str(run)!r} has no checkpoint {shown(which)}; {known}")
    check_numbers(found)
    return found


def _first_whole(list_paths: Callable[[], Iterable[Path]]) -> Checkpoint | None:
    """The first of the checkpoints that is whole.

    They are listed again where one is gone before it is read: a training beside has written a newer one.
    """
    for _ in range(100):
        try:
            return _first_whole_of(list_paths())
        except FileNotFoundError:
            continue
    raise UsageError("checkpoints are deleted faster than they can be read: try again")


def _first_whole_of(paths: Iterable[Path]) -> Checkpoint | None:
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


def _read(path: Path) -> Checkpoint:
    header, arrays = read_arrays(path)
    if path.name != _name(_checked(header)["steps"]):
        raise DamagedError(f"its header says {header['steps']} steps")
    return Checkpoint(path, header, _under("state/", arrays), _under("policy/", arrays))


def _checked(header: dict[str, Any]) -> dict[str, Any]:
    """A header of which all that BEGINNING has is of the right type; `check_same_run` compares the rest."""
    try:
        for name in ("iterations", "steps", "timed_iterations"):
            integer(name, header.get(name), least=0)
        for name in ("seconds", "train_seconds"):
            if real(name, header.get(name)) < 0:
                raise UsageError(f"{name} is {header[name]}")
        _score_in(header)
    except UsageError as error:
        raise DamagedError(str(error)) from error
    return header


def _score_in(header: dict[str, Any]) -> float:
    score = header.get("score")
    return -math.inf if score is None else real("score", score)


def _score(path: Path) -> float:
    """From the file's header alone. Raises what `read_header` does."""
    return _score_in(_checked(read_header(path)))


def _score_if_whole(path: Path) -> float:
    """The same, of one that is perhaps to be deleted."""
    try:
        return _score(path)
    except (DamagedError, UsageError, FileNotFoundError):
        return -math.inf


def _score_or_least(path: Path) -> float:
    """The same; what is damaged is not the best, and is named on stderr."""
    try:
        return _score(path)
    except DamagedError as error:
        say(f"checkpoint {str(path)!r} is damaged ({error}): it is not taken for the best")
        return -math.inf


def _under(prefix: str, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}
