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

import numpy as np

from rlgraph.checkpoint import write_atomically
from rlgraph.config import TrainConfig
from rlgraph.errors import UsageError, unknown

CONFIG, LOCK = "config.json", "lock"
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
    """The folder of a run that has begun."""
    folder = Path(run_dir)
    if not (folder / CONFIG).is_file():
        raise UsageError(f"{run_dir!r} is not a run folder: it has no config.json")
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


@contextlib.contextmanager
def locked(folder: Path):
    """Keep out every other process that would write to the run. The system ends the lock with the process."""
    with open(folder / LOCK, "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UsageError(f"another process is training run {str(folder)!r}; wait for it or end it") from error
        yield


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


def write_config(folder: Path, agent: str, config: TrainConfig) -> None:
    write_json(folder / CONFIG, {"agent": agent, **dataclasses.asdict(config)})


def read_config(folder: Path, config_class: Callable[[str], type[TrainConfig]]) -> tuple[str, TrainConfig]:
    """The agent and config of a run; `config_class` gives the class by the agent's name."""
    path = folder / CONFIG
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(settings, dict) or not {"agent", "env"} <= settings.keys():
            raise UsageError("it does not say which agent and environment")
        agent = str(settings.pop("agent"))
        cls = config_class(agent)
        return agent, cls(**_known(settings, cls))
    except ValueError as error:
        raise UsageError(f"{str(path)!r} is damaged: {error}") from error


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
    write_json(folder / "versions.json", versions)
