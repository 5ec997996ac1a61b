"""Policies on disk: safetensors, the same names and layout on both backends, written whole or not at all."""

import os
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from rlgraph.errors import UsageError


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


def save_policy(path: Path, arrays: dict[str, np.ndarray]) -> None:
    """Write weights and statistics by name."""
    write_atomically(path, save({name: np.ascontiguousarray(array) for name, array in arrays.items()}))


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
