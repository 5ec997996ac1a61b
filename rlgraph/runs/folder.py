"""A run's folder: made, locked while a process writes to it, and its config, versions and result as JSON."""

import contextlib
import dataclasses
import datetime
import fcntl
import importlib.metadata
import json
import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from rlgraph.arguments import text
from rlgraph.config import TrainConfig
from rlgraph.errors import UsageError, first_line, shown, unknown
from rlgraph.files import DamagedError, is_there, read_object, write_atomically
from rlgraph.runs.identity import Sources

CONFIG, VERSIONS, METRICS = "config.json", "versions.json", "metrics.jsonl"
POLICY, RESULT, LOCK = "policy.safetensors", "result.json", "lock"
SOURCES = "environment_sha256"  # what config.json says beside the config
UNBEGUN = {LOCK, CONFIG + ".part"}  # what a process may leave that was killed before the config was written


# ---- the folder


def new_folder(agent: str, config: TrainConfig) -> tuple[Path, list[Path]]:
    """A folder of its own for every run: an existing run is never written over.

    Returns:
        The folder; and those that were made for it, itself the first, if it was not there.
    """
    try:
        return _named_folder(Path(config.run_dir)) if config.run_dir else _dated_folder(agent, config)
    except OSError as error:
        raise UsageError(
            f"cannot make a run folder {error.filename!r}: {error.strerror}; name one by --run-dir"
        ) from error


def _named_folder(folder: Path) -> tuple[Path, list[Path]]:
    if folder.exists() and (not folder.is_dir() or any(path.name not in UNBEGUN for path in folder.iterdir())):
        raise UsageError(f"run_dir {str(folder)!r} exists and is not empty; name another folder")
    made = _make(folder)
    if not os.access(folder, os.W_OK):
        raise UsageError(f"run_dir {str(folder)!r} cannot be written to; name another folder")
    return folder, made


def _dated_folder(agent: str, config: TrainConfig) -> tuple[Path, list[Path]]:
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    name = f"{agent}-{Path(config.env).stem}-{config.backend}-seed{config.seed}-{stamp}"
    for i in range(1000):
        folder = Path("runs", f"{name}-{i}" if i else name)
        if not folder.exists():
            with contextlib.suppress(FileExistsError):  # of another process, meanwhile
                return folder, _make(folder, exist_ok=False)
    raise UsageError(f"no free name for a run like runs/{name}; name one with --run-dir")


def _make(folder: Path, exist_ok: bool = True) -> list[Path]:
    """Make a folder and those that it is in. Returns those that were not there, the innermost first."""
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=exist_ok)
    except OSError:
        _remove_empty(made)
        raise
    return made


def _remove_empty(folders: list[Path]) -> None:
    for folder in folders:
        with contextlib.suppress(OSError):  # one that was never made, or that another process uses
            folder.rmdir()


def existing_folder(run_dir: str) -> Path:
    """The folder of a run that has begun.

    Raises:
        UsageError: it is none, or something is in the place of one of its files.
    """
    folder = Path(run_dir)
    if not is_there(folder / CONFIG):
        raise UsageError(f"{run_dir!r} is not a run folder: it has no config.json")
    for name in (VERSIONS, METRICS, POLICY, RESULT, LOCK):
        is_there(folder / name)
    return folder


@contextlib.contextmanager
def removed_on_error(folder: Path, made: list[Path]):
    """A run that cannot even begin leaves nothing: of its folder, those that `new_folder` made."""
    try:
        yield
    except BaseException:
        for path in folder.iterdir():
            if path.name in UNBEGUN | {CONFIG}:
                path.unlink()
        _remove_empty(made)
        raise


_locks: set[int] = set()  # descriptors of the locks that this process holds


@contextlib.contextmanager
def locked(folder: Path):
    """Keep out every other process that would write to the run. The system ends the lock with the process."""
    path = folder / LOCK
    is_there(path)
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK, 0o666)
    _locks.add(lock)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UsageError(f"another process is training run {str(folder)!r}; wait for it or end it") from error
        yield
    finally:
        if lock in _locks:  # else this is a child, which has let go of it
            _locks.remove(lock)
            os.close(lock)


def _let_go_of_locks() -> None:
    """In a forked child, which would keep its parent's locks when the parent is killed."""
    while _locks:
        os.close(_locks.pop())


os.register_at_fork(after_in_child=_let_go_of_locks)


@contextlib.contextmanager
def named_in_errors(folder: Path):
    """A full disk is reported without a file's name: add the folder's."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(folder)
        raise


# ---- its JSON files


def write_json(path: Path, content: dict) -> None:
    """NaN and infinity, which JSON lacks, as null."""

    def finite(value):
        return None if isinstance(value, float) and not np.isfinite(value) else value

    content = {key: finite(value) for key, value in content.items()}
    write_atomically(path, (json.dumps(content, indent=2) + "\n").encode())


def write_config(folder: Path, agent: str, config: TrainConfig, sources: Sources) -> None:
    write_json(folder / CONFIG, {"agent": agent, **dataclasses.asdict(config), SOURCES: sources})


def read_config(folder: Path, config_class: Callable[[str], type[TrainConfig]]) -> tuple[str, TrainConfig, Sources]:
    """The agent and config of a run, and the hashes of its environment's files.

    Args:
        folder: the run's.
        config_class: gives the class of the config by the agent's name.
    """
    path = folder / CONFIG
    try:
        settings = read_object(path)
    except DamagedError as error:
        raise _damaged(path, error) from error
    try:
        if not {"agent", "env", SOURCES} <= settings.keys():
            raise UsageError(f"it does not say agent, env and {SOURCES}, as this version of rlgraph does")
        agent, sources = text("agent", settings.pop("agent")), _checked_sources(settings.pop(SOURCES))
        cls = config_class(agent)
        return agent, cls(**_known(settings, cls)), sources
    except ValueError as error:
        raise _damaged(path, error) from error


def _damaged(path: Path, error: Exception) -> UsageError:
    return UsageError(f"{str(path)!r} is damaged: {first_line(error)}")


def _checked_sources(sources: Any) -> Sources:
    if not isinstance(sources, dict) or not all(isinstance(value, str) for value in sources.values()):
        raise UsageError(f"{SOURCES} must be hashes by file, but is {shown(sources)}")
    return sources


def _known(settings: dict, cls: type[TrainConfig]) -> dict:
    """The settings of a config file, if the config has each; it converts and checks them itself."""
    names = [field.name for field in dataclasses.fields(cls)]
    for name in settings:
        if name not in names:
            raise unknown("setting", name, names)
    return settings


def write_versions(folder: Path, backend: str, device: str) -> None:
    """Of the process that writes: a run that went on elsewhere says where it ended."""
    packages = {"torch": ["torch", "array-api-compat"], "jax": ["jax", "jaxlib", "equinox", "optax"]}[backend]
    names = ["rlgraph", "gymnasium", "numpy", "safetensors", *packages]
    versions = {
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in names},
        "platform": platform.platform(),
        "device": device,
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
    write_json(folder / VERSIONS, versions)
