"""What an environment's definition must be: autoreset and the time limit, the contract's errors, its page."""

import math
import re
import types
from collections.abc import Callable
from dataclasses import make_dataclass
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import pytest
from environment_tools import BACKENDS, array, assert_dtypes, play, tree

import rlgraph
from rlgraph.backend import namespace
from rlgraph.environment import DISABLED, NEXT_STEP, SAME_STEP, build
from rlgraph.registry import ENVIRONMENTS

pytestmark = pytest.mark.usefixtures("compilation_once")
ROOT = Path(__file__).parent.parent


MISSING = object()


def counter(**changes) -> types.ModuleType:
    """A definition with known values: starts at its uniform, counts 1 + action a step, ends from 3 on."""

    class State(NamedTuple):
        count: Any

    def step(xp, s, action_B, u_B0, p):
        count = s.count + 1 + xp.astype(action_B, s.count.dtype)
        return type(s)(count), count, count >= 3

    names = {
        "ID": "Counter-v0",
        "MAX_EPISODE_STEPS": 3,
        "REWARD_THRESHOLD": None,
        "RESET_DRAWS": 1,
        "STEP_DRAWS": 0,
        "State": State,
        "Params": make_dataclass("Params", [("speed", float, 1.0)], frozen=True),
        "observation_space": lambda p: gymnasium.spaces.Box(0, 9, (1,), np.float32),
        "action_space": lambda p: gymnasium.spaces.Discrete(2),
        "reset": lambda xp, u, p: State(u[:, 0]),
        "step": step,
        "observe": lambda xp, s, p: s.count[:, None],
    }
    module = types.ModuleType("counter")
    vars(module).update({k: v for k, v in (names | changes).items() if v is not MISSING})
    return module


# Two environments, which start at 0.5 and at 0.25: (observation, reward, terminated, truncated, final
# observation) after every step. The second takes action 1 in its first step, and so gets to 3 in two.
F, T = False, True
ENDS_BOTH_WAYS = {
    SAME_STEP: (
        [(1.5, 1.5, F, F, 1.5), (2.5, 2.5, F, F, 2.5), (0.5, 3.5, T, T, 3.5), (1.5, 1.5, F, F, 1.5)],
        [
            (2.25, 2.25, F, F, 2.25),
            (0.25, 3.25, T, F, 3.25),
            (1.25, 1.25, F, F, 1.25),
            (2.25, 2.25, F, F, 2.25),
        ],
    ),
    NEXT_STEP: (
        [(1.5, 1.5, F, F, 1.5), (2.5, 2.5, F, F, 2.5), (3.5, 3.5, T, T, 3.5), (0.5, 0.0, F, F, 0.5)],
        [
            (2.25, 2.25, F, F, 2.25),
            (3.25, 3.25, T, F, 3.25),
            (0.25, 0.0, F, F, 0.25),
            (1.25, 1.25, F, F, 1.25),
        ],
    ),
    DISABLED: (
        [(1.5, 1.5, F, F, 1.5), (2.5, 2.5, F, F, 2.5), (3.5, 3.5, T, T, 3.5), (4.5, 4.5, T, T, 4.5)],
        [
            (2.25, 2.25, F, F, 2.25),
            (3.25, 3.25, T, F, 3.25),
            (4.25, 4.25, T, T, 4.25),
            (5.25, 5.25, T, T, 5.25),
        ],
    ),
}
# What follows, with the time limit: it counts from the reset, which is not a step.
ELAPSED = {SAME_STEP: (1, 2), NEXT_STEP: (0, 1), DISABLED: (4, 4)}


def steps_of_counter(env, backend: str, autoreset: str, actions: np.ndarray) -> list:
    xp = namespace(backend)
    u = array(backend, np.array([[0.5], [0.25]], dtype=np.float32))
    carry, _ = env.reset(xp, u)
    steps = []
    for action in actions:
        steps.append(env.step(xp, carry, array(backend, action), u, autoreset))
        carry = steps[-1].carry
    return [tree(np.asarray, step) for step in steps]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("autoreset", ENDS_BOTH_WAYS)
def test_autoreset_known_values(autoreset, backend):
    # NEXT_STEP's step after an end is given action 1 here, which it must ignore.
    first, second = ([0, 0, 0, 1], [1, 0, 1, 0]) if autoreset == NEXT_STEP else ([0, 0, 0, 0], [1, 0, 0, 0])
    steps = steps_of_counter(build(counter()), backend, autoreset, np.array([first, second]).T)
    for i, expected in enumerate(ENDS_BOTH_WAYS[autoreset]):
        got = [(s.obs[i, 0], s.reward_B[i], s.terminated_B[i], s.truncated_B[i], s.final_obs[i, 0]) for s in steps]
        assert got == expected
    assert tuple(steps[-1].carry.elapsed_B) == ELAPSED[autoreset]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("limit", "truncated", "terminated"),
    [
        (2, [F, T, F, T, F, T], [F, F, F, F, F, F]),
        (3, [F, F, T, F, F, T], [F, F, T, F, F, T]),
        (4, [F, F, F, F, F, F], [F, F, T, F, F, T]),
        (1, [T, T, T, T, T, T], [F, F, F, F, F, F]),
        (-1, [F, F, F, F, F, F], [F, F, T, F, F, T]),
    ],
)
def test_time_limit_alone_and_with_termination(limit, truncated, terminated, backend):
    env = build(counter(), max_episode_steps=limit)
    steps = steps_of_counter(env, backend, SAME_STEP, np.zeros((6, 2), dtype=np.int64))
    assert [s.truncated_B.tolist() for s in steps] == [[x, x] for x in truncated]
    assert [s.terminated_B.tolist() for s in steps] == [[x, x] for x in terminated]


@pytest.mark.parametrize("backend", BACKENDS)
def test_time_limit_under_next_step_counts_from_the_reset(backend):
    env = build(counter(), max_episode_steps=2)
    steps = steps_of_counter(env, backend, NEXT_STEP, np.zeros((7, 2), dtype=np.int64))
    assert [bool(s.truncated_B[0]) for s in steps] == [F, T, F, F, T, F, F]
    assert [int(s.carry.elapsed_B[0]) for s in steps] == [1, 2, 0, 1, 2, 0, 1]
    assert [float(s.reward_B[0]) for s in steps] == [1.5, 2.5, 0, 1.5, 2.5, 0, 1.5]


def step_giving(reward=lambda c: c, terminated=lambda c: c >= 3, count=lambda c: c + 1) -> Callable:
    """A step of the counter with other results."""

    def step(xp, s, action_B, u_B0, p):
        after = type(s)(count(s.count))
        return after, reward(after.count), terminated(after.count)

    return step


class Pair(NamedTuple):
    count: Any


BROKEN = [  # what is changed in the counter, and the one line that it gives
    (
        {"observe": MISSING, "Params": MISSING},
        "environment 'counter' lacks Params, observe: add it to its file",
    ),
    (
        {"step": step_giving(reward=lambda c: c.astype(np.float64))},
        "reward of step is float64[3], must be float32[3]",
    ),
    (
        {"step": step_giving(reward=lambda c: c[:, None])},
        "reward of step is float32[3, 1], must be float32[3]",
    ),
    ({"step": step_giving(reward=lambda c: -1.0)}, "reward of step is a float, must be float32[3]"),
    (
        {"step": step_giving(terminated=lambda c: (c >= 3).astype(np.float32))},
        "terminated of step is float32[3], must be bool[3]",
    ),
    ({"step": step_giving(terminated=lambda c: False)}, "terminated of step is a bool, must be bool[3]"),
    (
        {"step": step_giving(count=lambda c: np.where(c > 1, 1.0, 0.0))},
        "state leaf 'count' after step is float64[3], must be float32[3]",
    ),
    (
        {"step": step_giving(count=lambda c: c + c.missing)},
        "AttributeError: 'numpy.ndarray' object has no attribute 'missing'",
    ),
    ({"step": lambda xp, s, a, u, p: s}, "step must return (State, reward, terminated)"),
    (
        {"observe": lambda xp, s, p: s.count},
        "observe after reset is float32[3], must be float32[3, 1]",
    ),
    (
        {"observe": lambda xp, s, p: s.count[:, None].astype(np.float64)},
        "observe after reset is float64[3, 1], must be float32[3, 1]",
    ),
    ({"reset": lambda xp, u, p: u[:, 0]}, "reset must return a State, a NamedTuple, not float32[3]"),
    (
        {"State": Pair, "reset": lambda xp, u, p: Pair(0.0)},
        "state leaf 'count' is a float, must be an array [3, ...] and not of float64",
    ),
    (
        {
            "State": Pair,
            "reset": lambda xp, u, p: Pair(u[:, 0].astype(np.float64)),
            "observe": lambda xp, s, p: s.count[:, None].astype(np.float32),
        },
        "state leaf 'count' is float64[3], must be an array [3, ...] and not of float64",
    ),
    (
        {"action_space": lambda p: gymnasium.spaces.MultiDiscrete([2, 2])},
        "action_space must be Discrete or Box, not MultiDiscrete([2 2])",
    ),
    (
        {"observation_space": lambda p: gymnasium.spaces.Discrete(2)},
        "observation_space must be a Box, not Discrete(2)",
    ),
    (
        {"Params": make_dataclass("Params", [])},
        "Params must be a dataclass with frozen=True, but is",
    ),
    ({"Params": dict}, "Params must be a dataclass with frozen=True"),
]


@pytest.mark.parametrize(("changes", "message"), BROKEN, ids=[message for _, message in BROKEN])
def test_broken_definition_gives_one_line(changes, message):
    assert build(counter()).id == "Counter-v0"  # so that the change is what breaks it
    with pytest.raises(rlgraph.UsageError) as error:
        build(counter(**changes))
    text = str(error.value)
    assert message in text
    assert text.startswith(("environment 'Counter-v0': ", "environment 'counter' "))
    assert "\n" not in text


@pytest.mark.parametrize("limit", [0, -2])
def test_time_limit_below_one_is_refused(limit):
    with pytest.raises(rlgraph.UsageError, match=f"at least 1, or -1 for no limit, but is {limit}$"):
        rlgraph.make("CartPole-v1", max_episode_steps=limit)


def test_unknown_names_give_the_near_miss():
    with pytest.raises(rlgraph.UsageError, match=r"^unknown environment 'cartpole-v1'; did you mean 'CartPole-v1'\?$"):
        rlgraph.make("cartpole-v1")
    with pytest.raises(rlgraph.UsageError, match=r"^unknown environment parameter 'gravty'; .* 'gravity'\?$"):
        rlgraph.make("CartPole-v1", gravty=1.0)
    with pytest.raises(rlgraph.UsageError, match=r"no environment file 'absent\.py'"):
        rlgraph.make("absent.py")


def test_register_makes_a_definition_known(monkeypatch):
    monkeypatch.setattr("rlgraph.registry.ENVIRONMENTS", dict(ENVIRONMENTS))
    definition = counter()
    rlgraph.register(definition)
    assert rlgraph.make("Counter-v0", speed=2.0).definition is definition
    with pytest.raises(rlgraph.UsageError, match="reward of step"):
        rlgraph.register(counter(ID="Other-v0", step=step_giving(reward=lambda c: 1.0)))
    with pytest.raises(rlgraph.UsageError, match="unknown environment 'Other-v0'"):
        rlgraph.make("Other-v0")


def test_equal_environments_are_equal_and_hash_alike():
    """So that one compilation serves all environments made with the same arguments."""
    first, second = rlgraph.make("Pendulum-v1", g=9.81), rlgraph.make("Pendulum-v1", g=9.81)
    assert first == second
    assert hash(first) == hash(second)
    assert first != rlgraph.make("Pendulum-v1")


def test_parameters_are_plain_numbers():
    """A numpy number would turn float32 state into float64, and a string fail somewhere inside a step."""
    env = rlgraph.make("Pendulum-v1", g=np.float64(9.81))
    assert env == rlgraph.make("Pendulum-v1", g=9.81)
    assert type(env.params.g) is float
    with pytest.raises(rlgraph.UsageError, match=r"^environment parameter 'g' must be a number, but is '9.81'$"):
        rlgraph.make("Pendulum-v1", g="9.81")


def documented_environment() -> str:
    """The example of docs/environments.md: its first block of Python."""
    page = (ROOT / "docs" / "environments.md").read_text()
    return re.search(r"```python\n(.*?)```", page, re.DOTALL).group(1)


@pytest.mark.parametrize("backend", BACKENDS)
def test_documented_environment_runs(backend, tmp_path):
    path = tmp_path / "my_env.py"
    path.write_text(documented_environment())
    env = rlgraph.make(str(path), gust=0.1)
    assert_dtypes(env, backend, SAME_STEP, np.int64)

    rng, B = np.random.default_rng(0), 64
    u = rng.random((151, B, env.draws), dtype=np.float32)

    def towards_target(t, obs):
        return np.clip(4 * (obs[:, 2:] - obs[:, :1]) - 3 * obs[:, 1:2], -2, 2).astype(np.float32)

    steps = play(env, backend, u, towards_target)
    assert sum(s.terminated_B.sum() for s in steps) > 2 * B  # steering there arrives, several times over
    targets = np.stack([s.obs[:, 2] for s in steps])
    assert abs(targets.mean()) < 0.1
    assert targets.std() == pytest.approx(1 / math.sqrt(3), abs=0.1)  # uniform in +-1
    numpys = play(env, "numpy", u, towards_target)
    for ours, other in zip(steps[:50], numpys):
        np.testing.assert_allclose(ours.final_obs, other.final_obs, atol=1e-4)


def test_documented_gaussian_is_normal(tmp_path, monkeypatch):
    monkeypatch.setattr("rlgraph.registry.ENVIRONMENTS", dict(ENVIRONMENTS))
    (tmp_path / "my_reach_env.py").write_text(documented_environment())
    monkeypatch.syspath_prepend(tmp_path)
    import my_reach_env

    rlgraph.register(my_reach_env)
    assert rlgraph.make("Reach-v0").definition is my_reach_env

    u = np.random.default_rng(0).random((100_000, 2), dtype=np.float32)
    u[0] = 0.0  # the least uniform must not give infinity
    z = my_reach_env.gaussian(np, u)
    assert z.dtype == np.float32
    assert np.isfinite(z).all()
    assert z.mean() == pytest.approx(0, abs=0.02)
    assert z.std() == pytest.approx(1, abs=0.02)
    assert (abs(z) < 1).mean() == pytest.approx(0.6827, abs=0.01)
