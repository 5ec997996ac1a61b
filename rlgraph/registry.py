"""Environments by name: the ones that ship, the ones that a program registers, and a user's own file."""

import functools
import importlib
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

from rlgraph.arguments import choice, integer, shown, text
from rlgraph.environment import Environment, build
from rlgraph.errors import UsageError

# Written out: nothing is scanned, and nothing is imported before it is asked for.
ENVIRONMENTS: dict[str, str | ModuleType] = {
    "Acrobot-v1": "rlgraph.envs.acrobot",
    "CartPole-v1": "rlgraph.envs.cartpole",
    "MountainCar-v0": "rlgraph.envs.mountain_car",
    "MountainCarContinuous-v0": "rlgraph.envs.mountain_car_continuous",
    "Pendulum-v1": "rlgraph.envs.pendulum",
}
MOST_STEPS = 2**31 - 1  # of an episode: they are counted in an int32


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
    if max_episode_steps is not None:
        max_episode_steps = integer("max_episode_steps", max_episode_steps, most=MOST_STEPS)
    return build(_definition(text("id", id)), max_episode_steps=max_episode_steps, **params)


def source_files(definition: ModuleType) -> tuple[Path, ...]:
    """The files that a definition was read from, its own first; none where it came from no file, as at a prompt."""
    path = getattr(definition, "__file__", None)
    return () if path is None else (Path(path),)


def _definition(id: str) -> ModuleType:
    if id.endswith(".py"):
        return _from_file(Path(id))
    found = ENVIRONMENTS[choice("environment", id, ENVIRONMENTS)]
    return importlib.import_module(found) if isinstance(found, str) else found


def _from_file(path: Path) -> ModuleType:
    try:
        found = path.is_file()
    except OSError as error:  # a name that is too long, a folder that nobody may look into
        raise UsageError(f"cannot read environment file {shown(str(path))}: {error.strerror}") from error
    if not found:
        raise UsageError(f"no environment file {str(path)!r}: give the path of a Python file, or a known name")
    return _load(path.resolve(), path.stat().st_mtime_ns)


@functools.cache  # one module a file, so that two environments made from it are equal and compile once
def _load(path: Path, modified_ns: int) -> ModuleType:
    name = f"rlgraph_user_env_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up by name
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise UsageError(f"environment file {str(path)!r} fails to load: {error!r}") from error
    return module
