"""What a definition's constants, parameters and spaces must be: each other thing is an error of one line."""

import math

import numpy as np
import pytest
from environment_tools import definition_text

import rlgraph

LIMIT = "MAX_EPISODE_STEPS, unless it is None, must be an integer of at least 1 and at most 2147483647, but is"
MARK = "REWARD_THRESHOLD must be a finite int or float, or None, but is"
DRAWS = "RESET_DRAWS must be an int of at least 0 and at most 65536, but is"
ID = "ID of an environment must be a name like 'Reach-v0'"
PARAM = "of plain numbers (bool, int or float), but speed is"


def made(tmp_path, *changes, **params):
    path = tmp_path / "cart.py"
    path.write_text(definition_text(*changes))
    return rlgraph.make(str(path), **params)


def constant(name: str, old: str, new: str) -> tuple[str, str]:
    return f"{name} = {old}", f"{name} = {new}"


def limit(new):
    return constant("MAX_EPISODE_STEPS", "20", new)


def mark(new):
    return constant("REWARD_THRESHOLD", "None", new)


def draws(new):
    return constant("RESET_DRAWS, STEP_DRAWS", "2, 1", f"{new}, 1")


def name(new):
    return constant("ID", '"Cart-v0"', new)


def speed(new):
    return "speed: float = 0.1", f"speed: object = {new}"


def actions(new):
    return "return Discrete(3)", f"return {new}"


def observations(new):
    return "return Box(-np.inf, np.inf, (2,), np.float32)", f"return {new}"


REFUSED = [  # what is changed, and what the line says
    (limit("0"), f"{LIMIT} 0"),
    (limit("-1"), f"{LIMIT} -1"),
    (limit("20.0"), f"{LIMIT} 20.0"),
    (limit("'20'"), f"{LIMIT} '20'"),
    (limit("True"), f"{LIMIT} True"),
    (limit("2**31"), f"{LIMIT} 2147483648"),
    (limit("[20]"), f"{LIMIT} [20]"),
    (mark("'high'"), f"{MARK} 'high'"),
    (mark("np.float32(475)"), f"{MARK} np.float32(475.0)"),
    (mark("math.nan"), f"{MARK} nan"),
    (mark("-math.inf"), f"{MARK} -inf"),
    (mark("10**400"), f"{MARK} 1000"),
    (mark("True"), f"{MARK} True"),
    (mark("[475]"), f"{MARK} [475]"),
    (draws("-1"), f"{DRAWS} -1"),
    (draws("2.0"), f"{DRAWS} 2.0"),
    (draws("None"), f"{DRAWS} None"),
    (draws("True"), f"{DRAWS} True"),
    (draws("np.int64(2)"), f"{DRAWS} np.int64(2)"),
    (draws("10**9"), f"{DRAWS} 1000000000"),
    (name("None"), ID),
    (name("''"), ID),
    (name("3"), ID),
    (name("'two\\nlines'"), ID),
    (name("'a b'"), ID),
    (name("'a/b/c'"), ID),
    (name("'cart.py'"), ID),
    (name("'x' * 500"), ID),
    (speed("'fast'"), f"{PARAM} 'fast'"),
    (speed("np.float64(1)"), f"{PARAM} np.float64(1.0)"),
    (speed("(1.0, 2.0)"), f"{PARAM} (1.0, 2.0)"),
    (speed("math.nan"), f"{PARAM} nan"),
    (("speed: float = 0.1", "speed: float"), "Params needs a default for each field: give one to speed"),
    (("frozen=True", ""), "Params must be a dataclass with frozen=True"),
    (
        ("on: bool = True", "on: bool = True\n    def __post_init__(self): raise ValueError('odd')"),
        "fails: cart.py, line 25: `raise ValueError('odd')`: ValueError: odd",
    ),
    (
        ("on: bool = True", "on: bool = True\n    def __post_init__(self): raise SystemExit(0)"),
        "fails: cart.py, line 25: `raise SystemExit(0)`: SystemExit: 0",
    ),
    (
        ("class State(NamedTuple):\n    x: Any\n    n: Any", "class State(NamedTuple):\n    pass"),
        "State must be a Named",
    ),
    (("class State(NamedTuple)", "class State(dict)"), "State must be a NamedTuple of at least one array"),
    (("def reset(", "reset = 3\ndef other("), "reset must be a function, but is 3"),
    (actions("Discrete(0)"), "action_space fails: cart.py, line 32: `Discrete(0)`"),
    (actions("1 / 0"), "action_space fails: cart.py, line 32: `1 / 0`: ZeroDivisionError: division by zero"),
    (actions("exit(0)"), "action_space fails: cart.py, line 32: `exit(0)`: SystemExit: 0"),
    (actions("None"), "action_space must be Discrete or Box, not None"),
    (actions("Discrete(2**40)"), "at least 1 and at most 65536 actions, not 1099511627776"),
    (actions("Discrete(3, start=2**31)"), "must number its actions within int32, but starts at 2147483648"),
    (actions("Box(0, 9, (2,), np.int64)"), "action_space is a Box of int64, must be of float32; or use Discrete"),
    (actions("Box(-1, 1, (2, 0))"), "action_space has shape [2, 0], which holds no number"),
    (actions("Box(-1, math.nan, (2,))"), "action_space"),
    (actions("Box(np.float32([3, 0]), np.float32([1, 2]))"), "action_space"),
    (observations("Box(-1, 1, (0,))"), "observation_space has shape [0], which holds no number"),
    (observations("Box(-1, 1, (2,), np.float64)"), "observation_space is of float64, must be of bool, uint8"),
    (observations("Box(np.float32([np.nan, 0]), np.float32([1, 1]))"), "observation_space"),
    (observations("Box(np.float32([2, 0]), np.float32([1, 1]))"), "observation_space"),
    (observations("p.missing"), "observation_space fails: cart.py, line 28: `p.missing`: AttributeError"),
    (observations("3"), "observation_space must be a Box, not 3"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED, ids=[change[1][:50] for change, _ in REFUSED])
def test_what_the_contract_does_not_allow_is_refused_in_one_line(change, message, tmp_path):
    with pytest.raises(rlgraph.UsageError) as error:
        made(tmp_path, change)
    text = str(error.value)
    assert message in text
    assert "\n" not in text
    assert len(text) < 500


def test_what_the_contract_allows(tmp_path):
    changes = [limit("np.int32(7)"), mark("-5"), draws("0")]
    env = made(tmp_path, *changes, ("u[:, 0], xp.zeros", "u[:, 0] * 0, xp.zeros"))
    assert (env.max_episode_steps, type(env.max_episode_steps)) == (7, int)
    assert (env.definition.REWARD_THRESHOLD, env.reset_draws, env.draws) == (-5, 1, 2)
    assert made(tmp_path, limit("None")).max_episode_steps is None
    assert made(tmp_path, limit("2**31 - 1")).max_episode_steps == 2**31 - 1
    assert made(tmp_path, name("'own/Cart-v0'")).id == "own/Cart-v0"
    box = made(tmp_path, actions("Box(-np.inf, 5, (1,), np.float64)"), ("a - 1", "a[:, 0] - 1")).action_space
    assert (box.shape, box.dtype) == ((1,), np.float64)


@pytest.mark.parametrize("asked", [0, -2, 2**31, 2.0, "9", True, 10**25, math.nan])
def test_no_such_time_limit(asked):
    with pytest.raises(rlgraph.UsageError, match=r"^max_episode_steps must be ") as error:
        rlgraph.make("CartPole-v1", max_episode_steps=asked)
    assert "\n" not in str(error.value)


def test_a_time_limit_of_numpy_is_a_python_number():
    env = rlgraph.make("CartPole-v1", max_episode_steps=np.int64(9))
    assert (env.max_episode_steps, type(env.max_episode_steps)) == (9, int)


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ({"speed": 1}, 1.0),
        ({"speed": np.float32(0.5)}, 0.5),
        ({"speed": 10**25}, 1e25),
        ({"count": np.int8(5)}, 5),
        ({"on": np.bool_(False)}, False),
    ],
)
def test_a_parameter_is_converted_to_the_type_of_what_it_replaces(given, kept, tmp_path):
    params = made(tmp_path, **given).params
    (field,) = given
    assert getattr(params, field) == kept
    assert type(getattr(params, field)) is type(kept)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"speed": True}, "'speed' must be a number, but is True"),
        ({"speed": "1"}, "'speed' must be a number, but is '1'"),
        ({"speed": math.nan}, "'speed' must be a number, but is nan"),
        ({"speed": 10**400}, "'speed' must be a number, but is 1000"),
        ({"speed": None}, "'speed' must be a number, but is None"),
        ({"count": 2.5}, "'count' must be an integer"),
        ({"count": 10**25}, "'count' must be an integer of at least"),
        ({"on": 1}, "'on' must be True or False, but is 1"),
        ({"sped": 1.0}, "unknown environment parameter 'sped'; did you mean 'speed'?"),
    ],
)
def test_a_parameter_of_another_kind_is_refused_in_one_line(given, message, tmp_path):
    with pytest.raises(rlgraph.UsageError) as error:
        made(tmp_path, **given)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("raised", ["ValueError('too fast')", "SystemExit(0)"])
def test_parameters_that_params_itself_refuses(raised, tmp_path):
    check = f"on: bool = True\n    def __post_init__(self):\n        if self.speed > 1:\n            raise {raised}"
    assert made(tmp_path, ("on: bool = True", check), speed=1).params.speed == 1.0
    with pytest.raises(rlgraph.UsageError, match=r"^environment parameters speed=2.0 are refused: cart.py, line 27: "):
        made(tmp_path, ("on: bool = True", check), speed=2)
