"""Environments by name: the ones that ship, the ones that a program registers, and a user's own file."""

import importlib
import os
import stat
from pathlib import Path
from types import ModuleType

from rlgraph.arguments import choice, text
from rlgraph.definition.files import source_files
from rlgraph.definition.modules import load
from rlgraph.environment import Environment, build
from rlgraph.errors import UsageError, shown

__all__ = ["ENVIRONMENTS", "make", "register", "source_files"]

# Written out: nothing is scanned, and nothing is imported before it is asked for.
ENVIRONMENTS: dict[str, str | ModuleType] = {
    "Acrobot-v1": "rlgraph.envs.acrobot",
    "CartPole-v1": "rlgraph.envs.cartpole",
    "MountainCar-v0": "rlgraph.envs.mountain_car",
    "MountainCarContinuous-v0": "rlgraph.envs.mountain_car_continuous",
    "Pendulum-v1": "rlgraph.envs.pendulum",
}


def register(definition: ModuleType) -> None:
    """Make a definition known under its `ID`, replacing an earlier one of that name.

    Args:
        definition: a module that keeps the contract of `rlgraph.environment`.

    Raises:
        UsageError: it is no module, or breaks the contract.
    """
    if not isinstance(definition, ModuleType):
        raise UsageError(
            f"definition must be a module, as `import my_env` gives it, but is {shown(definition)}; rlgraph.make takes "
            "the path of a file"
        )
    build(definition)
    ENVIRONMENTS[definition.ID] = definition


def make(id: str | os.PathLike, max_episode_steps: int | None = None, **params) -> Environment:
    """The environment of a registered name, or of a Python file.

    Args:
        id: "CartPole-v1", or the path of a definition, "my_env.py".
        max_episode_steps: None for the environment's own time limit, -1 for none.
        params: fields of its `Params` to replace, such as `g=9.81`.

    Raises:
        UsageError: no such name, file or parameter, or a definition that breaks the contract.
    """
    return build(_definition(text("id", id)), max_episode_steps=max_episode_steps, **params)


def _definition(id: str) -> ModuleType:
    if id.endswith(".py"):
        return _from_file(Path(id))
    if id not in ENVIRONMENTS and (Path(id).suffix.lower() == ".py" or "/" in id):
        raise UsageError(f"no environment {shown(id)}: the name of an environment file must end in .py")
    found = ENVIRONMENTS[choice("environment", id, ENVIRONMENTS)]
    return importlib.import_module(found) if isinstance(found, str) else found


def _from_file(path: Path) -> ModuleType:
    try:
        why = (
            None if stat.S_ISREG(path.stat().st_mode) else "it is no file that holds text"
        )  # opening a pipe would hang
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
    if why:
        raise UsageError(
            f"no environment file {shown(str(path))} ({why}): give the path of a Python file, or a known name"
        )
    return load(path)
