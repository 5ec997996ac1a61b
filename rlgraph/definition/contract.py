"""What of the contract can be seen without running a step: a definition's constants, parameters and spaces."""

import dataclasses
import math
import re
from types import ModuleType
from typing import Any

import gymnasium

from rlgraph import arguments
from rlgraph.definition.errors import described, files_of
from rlgraph.errors import UsageError, unknown

FUNCTIONS = ("reset", "step", "observe", "observation_space", "action_space")
REQUIRED = ("ID", "RESET_DRAWS", "STEP_DRAWS", "Params", "State", "reset", "step", "observe")
REQUIRED += ("observation_space", "action_space", "MAX_EPISODE_STEPS", "REWARD_THRESHOLD")

LONGEST = 2**31 - 1  # steps: they are counted in int32
MOST_DRAWS = 2**16  # uniforms for one environment and step
MOST_ACTIONS = 2**16  # of a Discrete space: each is an output of a policy
DTYPES = ("bool", "uint8", "int8", "int16", "int32", "int64", "float32")  # which both backends have
NAME = re.compile(r"[\w:.-]{1,100}(/[\w:.-]{1,100})?")  # as Gymnasium takes it, and a file system


def check_constants(definition: ModuleType) -> None:
    """Raise a UsageError unless everything is there, and of its kind."""
    missing = [name for name in REQUIRED if not hasattr(definition, name)]
    if missing:
        name = getattr(definition, "__name__", type(definition).__name__).rpartition(".")[2]
        raise UsageError(f"environment {name!r} lacks {', '.join(missing)}: add it to its file")
    _check_id(definition.ID)
    where = f"environment {definition.ID!r}"
    for name in FUNCTIONS:
        if not callable(getattr(definition, name)):
            raise UsageError(f"{where}: {name} must be a function, but is {arguments.shown(getattr(definition, name))}")
    for name in ("RESET_DRAWS", "STEP_DRAWS"):
        count = getattr(definition, name)
        if type(count) is not int or not 0 <= count <= MOST_DRAWS:
            raise UsageError(
                f"{where}: {name} must be an int of at least 0 and at most {MOST_DRAWS}, "
                f"but is {arguments.shown(count)}"
            )
    mark = definition.REWARD_THRESHOLD
    if mark is not None and not (_is_plain(mark) and not isinstance(mark, bool) and _is_finite(mark)):
        raise UsageError(
            f"{where}: REWARD_THRESHOLD must be a finite int or float, or None, but is {arguments.shown(mark)}"
        )
    State = definition.State
    if not (isinstance(State, type) and issubclass(State, tuple) and getattr(State, "_fields", ())):
        raise UsageError(f"{where}: State must be a NamedTuple of at least one array, but is {arguments.shown(State)}")


def _check_id(id: Any) -> None:
    if not isinstance(id, str) or not NAME.fullmatch(id) or id.endswith(".py"):
        raise UsageError(
            f"ID of an environment must be a name like 'Reach-v0', of letters, digits, '-', '_', '.' and ':', "
            f"but is {arguments.shown(id)}"
        )


def time_limit(definition: ModuleType, asked: int | None) -> int | None:
    """The definition's own, or the one that is asked for; None for none."""
    own = definition.MAX_EPISODE_STEPS
    if own is not None:
        name = f"environment {definition.ID!r}: MAX_EPISODE_STEPS, unless it is None,"
        own = arguments.integer(name, own, least=1, most=LONGEST)
    if asked is None:
        return own
    asked = arguments.integer("max_episode_steps", asked, most=LONGEST)
    if asked < 1 and asked != -1:
        raise UsageError(f"max_episode_steps must be at least 1, or -1 for no limit, but is {asked}")
    return None if asked == -1 else asked


# ---- parameters


def default_params(definition: ModuleType) -> Any:
    """`Params()`, if it is a frozen dataclass of plain numbers."""
    where, Params = f"environment {definition.ID!r}", definition.Params
    frozen = isinstance(Params, type) and dataclasses.is_dataclass(Params) and Params.__dataclass_params__.frozen
    if not frozen:
        raise UsageError(f"{where}: Params must be a dataclass with frozen=True, but is {arguments.shown(Params)}")
    bare = [field.name for field in dataclasses.fields(Params) if field.init and _has_no_default(field)]
    if bare:
        raise UsageError(f"{where}: Params needs a default for each field: give one to {', '.join(bare)}")
    params = called(definition, Params, where)
    for field in dataclasses.fields(params):
        value = getattr(params, field.name, None)
        if not _is_plain(value) or value != value:
            raise UsageError(
                f"{where}: Params must be a dataclass with frozen=True and of plain numbers (bool, int or float), "
                f"but {field.name} is {arguments.shown(value)}"
            )
    try:
        hash(params)  # jax.jit keys its cache on it
    except Exception as error:
        raise UsageError(f"{where}: Params must be hashable: {described(error, ())}") from error
    return params


def replace_params(params: Any, changes: dict[str, Any]) -> Any:
    """`params` with fields replaced, each converted to the type of what it replaces.

    Raises:
        UsageError: no such field, with the nearest one named; a value of another kind; or Params refuses it.
    """
    fields = {field.name: field for field in dataclasses.fields(params) if field.init}
    plain = {}
    for name, value in changes.items():
        if name not in fields:
            raise unknown("environment parameter", name, fields)
        plain[name] = _converted(f"environment parameter {name!r}", value, fields[name], getattr(params, name))
    try:
        return dataclasses.replace(params, **plain)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        given = ", ".join(f"{name}={value!r}" for name, value in plain.items())
        raise UsageError(
            f"environment parameters {given} are refused: {described(error, _files_of(params))}"
        ) from error


def _converted(name: str, value: Any, field: dataclasses.Field, default: Any) -> bool | int | float:
    """A Python number: one of numpy's would decide the dtype of what it is multiplied with."""
    if isinstance(default, bool):
        return arguments.truth(name, value)
    if isinstance(default, int) and field.type in (int, "int"):
        return arguments.integer(name, value, least=-(2**63), most=2**63 - 1)
    number = arguments.real(name, value)
    if number != number:
        raise UsageError(f"{name} must be a number, but is {arguments.shown(value)}")
    return number


def _files_of(params: Any) -> set[str]:
    code = getattr(getattr(params, "__post_init__", None), "__code__", None)
    return {code.co_filename} if code else set()


def _has_no_default(field: dataclasses.Field) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _is_plain(value: Any) -> bool:
    return type(value) in (bool, int, float)


def _is_finite(number: int | float) -> bool:
    try:
        return math.isfinite(number)
    except OverflowError:  # an int beyond every float
        return False


# ---- spaces


def check_spaces(definition: ModuleType, params: Any) -> None:
    """Raise a UsageError unless both spaces are such as agents and backends can have."""
    where = f"environment {definition.ID!r}"
    obs, action = (
        called(definition, getattr(definition, name), f"{where}: {name}", params)
        for name in ("observation_space", "action_space")
    )
    if not isinstance(obs, gymnasium.spaces.Box):
        raise UsageError(f"{where}: observation_space must be a Box, not {arguments.shown(obs)}")
    if obs.dtype.name not in DTYPES:
        raise UsageError(
            f"{where}: observation_space is of {obs.dtype}, must be of {', '.join(DTYPES)}; pass Box dtype=np.float32"
        )
    _check_box(f"{where}: observation_space", obs)
    if isinstance(action, gymnasium.spaces.Discrete):
        _check_discrete(f"{where}: action_space", action)
    elif not isinstance(action, gymnasium.spaces.Box):
        raise UsageError(f"{where}: action_space must be Discrete or Box, not {arguments.shown(action)}")
    else:
        if action.dtype.kind != "f":
            raise UsageError(f"{where}: action_space is a Box of {action.dtype}, must be of float32; or use Discrete")
        _check_box(f"{where}: action_space", action)


def _check_box(what: str, space: gymnasium.spaces.Box) -> None:
    if 0 in space.shape:
        raise UsageError(f"{what} has shape {list(space.shape)}, which holds no number")
    if not (space.low <= space.high).all():  # NaN is neither
        raise UsageError(f"{what} must have bounds low <= high, none of them NaN")


def _check_discrete(what: str, space: gymnasium.spaces.Discrete) -> None:
    start, n = int(space.start), int(space.n)
    if not 1 <= n <= MOST_ACTIONS:
        raise UsageError(f"{what} must have at least 1 and at most {MOST_ACTIONS} actions, not {n}")
    if not -(2**31) <= start <= 2**31 - 1 - n:
        raise UsageError(f"{what} must number its actions within int32, but starts at {start}")


def called(definition: ModuleType, function: Any, where: str, *args) -> Any:
    """What a function of the definition gives; what it raises comes out as one line, the cause attached."""
    try:
        return function(*args)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit too
        text = described(error, files_of(definition))
        raise UsageError(f"{where} fails: {text}") from error
