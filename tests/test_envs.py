"""The environments against Gymnasium's own, on numpy, torch and JAX."""

import functools
import math
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import gymnasium
import numpy as np
import pytest
from environment_tools import BACKENDS, array, assert_dtypes, jitted, play

import rlgraph
from rlgraph.backend import namespace
from rlgraph.environment import DISABLED, NEXT_STEP, SAME_STEP

pytestmark = pytest.mark.usefixtures("compilation_once")
ROOT = Path(__file__).parent.parent
PAIRS = 12_000  # state/action pairs an environment
PI = math.pi
POLE = 12 * PI / 180  # rad, where CartPole ends


@dataclass(frozen=True)
class Case:
    """Where to look in an environment's state space, and how close float32 answers come to float64 ones."""

    low: tuple[float, ...]  # region that states are drawn from, one bound a state variable
    high: tuple[float, ...]
    edges: tuple[tuple[int, float], ...]  # (column, value): walls, limits and thresholds to crowd around
    thresholds: Callable[[np.ndarray], list[np.ndarray]]  # states [N, k] -> distances [N] to each jump
    atol: Callable[[np.ndarray], np.ndarray]  # states [N, k] -> tolerance [N] of what one step from there gives
    margin: float  # a pair this close to a jump is decided by rounding
    limit: int  # episode length in the trajectory test
    drift: float  # how far backends may part over such an episode
    lean: Callable[[np.ndarray], np.ndarray]  # observations -> sign of an action that makes episodes eventful
    angles: tuple[int, ...] = ()  # columns compared modulo a turn


def _acrobot_height(s: np.ndarray) -> np.ndarray:
    return -np.cos(s[:, 0]) - np.cos(s[:, 0] + s[:, 1])


def _flat(value: float) -> Callable[[np.ndarray], np.ndarray]:
    return lambda s: np.full(len(s), value)


def _car_jumps(s: np.ndarray, goal: float) -> list[np.ndarray]:
    """Goal, least speed there (0 or 0.03), and the wall, unless the car stands at it exactly."""
    wall = s[:, 0] == np.float32(-1.2)
    return [s[:, 0] - goal, *(np.where(wall, 1.0, d) for d in (s[:, 0] + 1.2, s[:, 1], s[:, 1] - 0.03))]


def _acrobot_atol(s: np.ndarray) -> np.ndarray:
    """Up to 8 and 16 rad/s a step is well conditioned. At the limits of 12 and 28 rad/s, an angle turns by up
    to 5.6 rad within the step, and squared speeds of 800 multiply the rounding of its sine."""
    slow = (abs(s[:, 2]) < 8) & (abs(s[:, 3]) < 16)
    return np.where(slow, 2e-4, 2e-2)


def _car(goal: float, limit: int, drift: float) -> Case:
    return Case(
        low=(-1.2, -0.07),
        high=(0.6, 0.07),
        edges=((0, -1.2), (0, goal), (0, 0.6), (1, -0.07), (1, 0.0), (1, 0.07)),
        thresholds=lambda s: _car_jumps(s, goal),
        atol=_flat(3e-7),
        margin=1e-6,
        limit=limit,
        drift=drift,
        lean=lambda obs: obs[:, 1],
    )


# A float32 step rounds each quantity a few times, at about 6e-8 of its size. The tolerances are two to four
# times the largest difference seen, and hold for the worst column: CartPole's speeds of 4, a car's position
# of 1, Pendulum's cost of up to 17, which squares a wrapped angle. That the formulas themselves are the same
# is what the float64 comparison says, to 1e-12.
#
# Over a trajectory rounding grows: little for the cars, tenfold every 25 to 30 steps for the unstable
# CartPole, and in bursts for the chaotic Acrobot (3e-5 after 60 steps, 2e-3 after 90, 0.1 after 250, no
# likeness left after 400). So the trajectories are 400 steps of episodes no longer than `limit`, each of
# which starts afresh, and `drift` is some ten times the largest difference seen (for MountainCar three).
CASES = {
    "CartPole-v1": Case(
        low=(-2.6, -4.0, -0.26, -4.0),
        high=(2.6, 4.0, 0.26, 4.0),
        edges=((0, -2.4), (0, 2.4), (2, -POLE), (2, POLE)),
        thresholds=lambda s: [abs(s[:, 0]) - 2.4, abs(s[:, 2]) - POLE],
        atol=_flat(2e-6),
        margin=1e-6,
        limit=100,
        drift=2e-3,
        lean=lambda obs: obs[:, 2] + obs[:, 3],
    ),
    "Pendulum-v1": Case(
        low=(-6 * PI, -8.0),
        high=(6 * PI, 8.0),
        edges=((0, -PI), (0, PI), (0, 3 * PI), (0, 0.0), (1, -8.0), (1, 8.0)),
        thresholds=lambda s: [],  # the cost is continuous where the angle wraps: (-pi)^2 = pi^2
        atol=_flat(3e-5),
        margin=0.0,
        limit=100,
        drift=1e-2,
        lean=lambda obs: obs[:, 2],
        angles=(0,),
    ),
    "MountainCar-v0": _car(goal=0.5, limit=200, drift=1e-5),
    "MountainCarContinuous-v0": _car(goal=0.45, limit=150, drift=2e-4),
    "Acrobot-v1": Case(
        low=(-PI, -PI, -4 * PI, -9 * PI),
        high=(PI, PI, 4 * PI, 9 * PI),
        edges=((0, PI), (0, -PI), (1, PI), (1, -PI), (2, 4 * PI), (2, -4 * PI), (3, 9 * PI), (3, -9 * PI)),
        thresholds=lambda s: [_acrobot_height(s) - 1.0],
        atol=_acrobot_atol,
        margin=1e-4,
        limit=90,
        drift=2e-2,
        lean=lambda obs: -obs[:, 4],
        angles=(0, 1),
    ),
}
VARIANTS = [(name, ()) for name in CASES] + [
    ("CartPole-v1", (("sutton_barto_reward", True),)),
    ("Pendulum-v1", (("g", 9.81),)),
    ("MountainCar-v0", (("goal_velocity", 0.03),)),
    ("MountainCarContinuous-v0", (("goal_velocity", 0.03),)),
]
VARIANT_NAMES = [" ".join([name, *(f"{k}={v}" for k, v in params)]) for name, params in VARIANTS]


class Outcome(NamedTuple):
    state: np.ndarray  # [N, k]
    obs: np.ndarray  # [N, *observation shape]
    reward: np.ndarray  # [N]
    terminated: np.ndarray  # [N]


def draw_actions(rng: np.random.Generator, space: gymnasium.Space, n: int, sign: np.ndarray | None = None):
    """Random actions [n, ...], of the sign where one is given. Box actions go to 1.5 times the bounds."""
    if isinstance(space, gymnasium.spaces.Discrete):
        if sign is None:
            return rng.integers(0, space.n, n)
        return np.where(sign > 0, space.n - 1, 0)
    size = rng.uniform(-1.5, 1.5, (n, 1)) if sign is None else np.sign(sign)[:, None] * rng.uniform(0, 1.5, (n, 1))
    exact = rng.random((n, 1)) < 0.1
    return (space.high * np.where(exact, np.sign(size), size)).astype(np.float32)


@functools.cache
def pairs(name: str) -> tuple[np.ndarray, np.ndarray]:
    """PAIRS float32 states [N, k] and actions: 40 % over the whole region, the rest crowded around the edges,
    a fifth of those exactly on the edge."""
    case, rng = CASES[name], np.random.default_rng(7)
    low, high = np.array(case.low), np.array(case.high)
    states = rng.uniform(low, high, (PAIRS, len(low)))
    for i in range(int(0.4 * PAIRS), PAIRS):
        column, value = case.edges[i % len(case.edges)]
        near = rng.normal() * 0.01 * (high - low)[column]
        states[i, column] = value + near * (rng.random() > 0.2)
    states = np.clip(states, low, high).astype(np.float32)
    return states, draw_actions(rng, rlgraph.make(name).action_space, PAIRS)


@functools.cache
def gymnasium_answers(name: str, params: tuple) -> Outcome:
    """Gymnasium's own step of all pairs.

    States and continuous actions go in as float64 copies of float32 numbers, so that Gymnasium's arithmetic
    is in float64 throughout (it otherwise depends on the type of what it is given) and all rounding is ours.
    """
    env = gymnasium.make(name, **dict(params)).unwrapped
    env.reset(seed=0)
    states, actions = pairs(name)
    if actions.dtype == np.float32:
        actions = actions.astype(np.float64)
    rows = []
    for state, action in zip(states.astype(np.float64), actions):
        env.state = state.copy()
        env.steps_beyond_terminated = None  # CartPole warns, and pays nothing, from the second step past the end
        obs, reward, terminated, _, _ = env.step(action)
        rows.append((np.array(env.state, dtype=np.float64), obs, reward, terminated))
    return Outcome(*(np.array(column) for column in zip(*rows)))


def our_answers(env, backend: str, states: np.ndarray, actions: np.ndarray) -> Outcome:
    xp, definition = namespace(backend), env.definition

    def step(state, action, u):
        state, reward, terminated = definition.step(xp, state, action, u, env.params)
        return state, definition.observe(xp, state, env.params), reward, terminated

    state = definition.State(*(array(backend, column) for column in states.T))
    u = array(backend, np.zeros((len(states), definition.STEP_DRAWS), dtype=np.float32))
    state, obs, reward, terminated = jitted(step, backend)(state, array(backend, actions), u)
    return Outcome(np.stack(state, axis=-1), np.asarray(obs), np.asarray(reward), np.asarray(terminated))


def rounding_decides(case: Case, *outcomes: Outcome) -> np.ndarray:
    """Rows where any of the answers lies within the margin of a jump, where rounding may decide the side."""
    near = np.zeros(len(outcomes[0].state), dtype=bool)
    for outcome in outcomes:
        for distance in case.thresholds(outcome.state.astype(np.float32)):
            near |= abs(distance) < case.margin
    return near


def assert_same_step(case: Case, ours: Outcome, theirs: Outcome, atol: np.ndarray) -> None:
    """The same flags exactly, the same numbers within `atol` [N], save for the few that rounding decides."""
    decided = ~rounding_decides(case, ours, theirs)
    assert decided.mean() > 0.999, f"{(~decided).sum()} of {len(decided)} pairs left out as too near a threshold"
    np.testing.assert_array_equal(ours.terminated[decided], theirs.terminated[decided])

    turned = ours.state - theirs.state
    for column in case.angles:
        turned[:, column] = (turned[:, column] + PI) % (2 * PI) - PI
    for what, difference, size in (
        ("state", turned, theirs.state),
        ("observation", ours.obs - theirs.obs, theirs.obs),
        ("reward", (ours.reward - theirs.reward)[:, None], theirs.reward[:, None]),
    ):
        excess = (abs(difference) - atol[:, None] - 2e-7 * abs(size))[decided]
        assert (excess <= 0).all(), f"{what}: {(excess > 0).any(axis=1).sum()} pairs differ, by up to {excess.max()}"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("name", "params"), VARIANTS, ids=VARIANT_NAMES)
def test_one_step_equals_gymnasium(name, params, backend):
    env, case = rlgraph.make(name, **dict(params)), CASES[name]
    states, actions = pairs(name)
    assert len(states) >= 10_000
    theirs = gymnasium_answers(name, params)
    ours = our_answers(env, backend, states, actions)
    assert_same_step(case, ours, theirs, case.atol(states))

    assert ours.obs.dtype == env.observation_space.dtype == np.float32
    assert ours.state.dtype == ours.reward.dtype == np.float32
    assert ours.terminated.dtype == np.bool_
    inside = (ours.obs >= env.observation_space.low) & (ours.obs <= env.observation_space.high)
    assert inside.all()


@pytest.mark.parametrize(("name", "params"), VARIANTS, ids=VARIANT_NAMES)
def test_formulas_equal_gymnasium_in_float64(name, params):
    """Without float32 rounding nothing is left to tolerate, but that MountainCarContinuous stores float32."""
    states, actions = pairs(name)
    wide = actions.astype(np.float64) if actions.dtype == np.float32 else actions
    ours = our_answers(rlgraph.make(name, **dict(params)), "numpy", states.astype(np.float64), wide)
    theirs = gymnasium_answers(name, params)
    ours = ours._replace(obs=ours.obs.astype(np.float32))  # as Gymnasium's is
    atol = 6e-8 if name == "MountainCarContinuous-v0" else 1e-12
    assert_same_step(CASES[name], ours, theirs, np.full(PAIRS, atol))


@pytest.mark.parametrize("name", CASES)
def test_pairs_cover_both_sides(name):
    """The comparison would say little if the pairs seldom ended an episode, hit a limit or a wall."""
    _, actions = pairs(name)
    after = gymnasium_answers(name, ())
    if name != "Pendulum-v1":
        assert 0.1 < after.terminated.mean() < 0.9
    if name.startswith("MountainCar"):
        walls = (after.state[:, 0] <= -1.2) & (after.state[:, 1] == 0)
        stops = [walls, after.state[:, 0] >= 0.6, abs(after.state[:, 1]) >= 0.07]
    else:
        top = abs(after.state[:, -1]) >= CASES[name].high[-1] - 1e-6
        stops = [top]
    assert all(stop.mean() > 0.02 for stop in stops)
    if actions.dtype == np.float32:
        assert (abs(actions) > rlgraph.make(name).action_space.high).mean() > 0.2


WRONG = [  # file, right, wrong: slips of the kind that real reimplementations have had
    ("cartpole", "force + p.masspole * p.length *", "force + (p.masspole + p.length) *"),
    ("cartpole", "s.x + p.tau * s.x_dot,", "s.x + p.tau * (s.x_dot + p.tau * x_acc),"),
    ("cartpole", "12 * math.pi / 180", "12.01 * math.pi / 180"),
    ("pendulum", "s.theta + theta_dot * p.dt", "s.theta + s.theta_dot * p.dt"),
    ("pendulum", "0.1 * s.theta_dot**2", "0.1 * (s.theta_dot + 0.01) ** 2"),
    ("pendulum", "0.001 * torque**2", "0.001 * action_B1[:, 0] ** 2"),
    ("mountain_car", "position <= p.min_position", "position < p.min_position"),
    ("mountain_car", "(velocity >= p.goal_velocity)", "(velocity > p.goal_velocity - 1)"),
    ("mountain_car_continuous", "bonus - 0.1 * action**2", "bonus - 0.1 * force**2"),
    ("mountain_car_continuous", "goal_position: float = 0.45", "goal_position: float = 0.5"),
    ("acrobot", " - m2 * l1 * lc2 * s.theta1_dot**2 * sin2 - phi2", " - phi2"),  # the paper's, not the book's
    ("acrobot", "> 1.0", "> 1.01"),
]


@pytest.mark.parametrize(("file", "right", "wrong"), WRONG, ids=[f"{w[0]} {w[2]}" for w in WRONG])
def test_comparison_catches_wrong_dynamics(file, right, wrong, tmp_path):
    text = (ROOT / "envs" / f"{file}.py").read_text()
    assert text.count(right) == 1
    path = tmp_path / f"wrong_{file}.py"
    path.write_text(text.replace(right, wrong))
    env = rlgraph.make(str(path))
    states, actions = pairs(env.id)
    ours = our_answers(env, "numpy", states, actions)
    with pytest.raises(AssertionError):
        assert_same_step(CASES[env.id], ours, gymnasium_answers(env.id, ()), CASES[env.id].atol(states))


@pytest.mark.parametrize("name", CASES)
def test_spaces_limit_and_threshold_equal_gymnasium(name):
    ours, theirs, spec = rlgraph.make(name), gymnasium.make(name), gymnasium.spec(name)
    for our_space, their_space in (
        (ours.observation_space, theirs.observation_space),
        (ours.action_space, theirs.action_space),
    ):
        assert our_space == their_space
        assert our_space.dtype == their_space.dtype
        if isinstance(their_space, gymnasium.spaces.Box):  # Box's == is only approximate
            np.testing.assert_array_equal(our_space.low, their_space.low)
            np.testing.assert_array_equal(our_space.high, their_space.high)
    assert ours.id == ours.definition.ID == spec.id
    assert ours.max_episode_steps == ours.definition.MAX_EPISODE_STEPS == spec.max_episode_steps
    assert spec.reward_threshold == ours.definition.REWARD_THRESHOLD


@pytest.mark.parametrize("name", CASES)
def test_reset_equals_gymnasium_from_the_same_uniforms(name):
    """Gymnasium draws `low + (high - low) * random()`, so its seeded generator gives the uniforms it used."""
    env, theirs = rlgraph.make(name), gymnasium.make(name).unwrapped
    seeds = range(200)
    observations = np.stack([theirs.reset(seed=seed)[0] for seed in seeds])
    u = [gymnasium.utils.seeding.np_random(seed)[0].random(env.reset_draws) for seed in seeds]
    _, obs = env.reset(np, np.array(u, dtype=np.float32))
    # u is rounded to float32 here and not there: 6e-8 of a range of up to 2 pi.
    np.testing.assert_allclose(obs, observations, rtol=0, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CASES)
def test_reset_bounds_are_half_open_in_float32(name, backend):
    """No uniform below 1 may round up to the upper bound, nor 0 below the lower one."""
    env = rlgraph.make(name)
    largest = np.nextafter(np.float32(1), np.float32(0))
    u = np.array([[0.0] * env.reset_draws, [largest] * env.reset_draws], dtype=np.float32)
    carry, _ = env.reset(namespace(backend), array(backend, u))
    p = env.params
    bounds = [(-p.x_init, p.x_init), (-p.y_init, p.y_init)] if name == "Pendulum-v1" else [(p.low, p.high)] * 4
    for leaf, (low, high) in zip(carry.state[: env.reset_draws], bounds):
        first, last = np.asarray(leaf)
        assert first == np.float32(low)
        assert last < np.float32(high)
        assert last == pytest.approx(high, rel=1e-6)


STEPS, ENVS = 400, 64


@functools.cache
def numpy_trajectory(name: str):
    """Uniforms, the actions that a mostly sensible policy took on numpy, and what came of them."""
    env, case, rng = (
        rlgraph.make(name, max_episode_steps=CASES[name].limit),
        CASES[name],
        np.random.default_rng(3),
    )
    u = rng.random((STEPS + 1, ENVS, env.draws), dtype=np.float32)
    actions = []

    def choose(t, obs):
        sensible = draw_actions(rng, env.action_space, ENVS, case.lean(obs))
        random = draw_actions(rng, env.action_space, ENVS)
        mostly = (rng.random(ENVS) < 0.65).reshape((ENVS,) + (1,) * (random.ndim - 1))
        actions.append(np.where(mostly, sensible, random))
        return actions[-1]

    return env, u, actions, play(env, "numpy", u, choose)


@pytest.mark.parametrize("name", CASES)
def test_trajectories_end_both_ways(name):
    _, _, _, steps = numpy_trajectory(name)
    terminated, truncated = (np.stack([getattr(s, f) for s in steps]) for f in ("terminated_B", "truncated_B"))
    assert truncated.any()
    assert terminated.any() == (name != "Pendulum-v1")


def _state_seen(name: str, obs: np.ndarray) -> np.ndarray:
    """The state behind an observation, but for whole turns."""
    if name == "Acrobot-v1":
        angles = [np.arctan2(obs[:, 1], obs[:, 0]), np.arctan2(obs[:, 3], obs[:, 2])]
        return np.stack([*angles, obs[:, 4], obs[:, 5]], axis=-1)
    return obs


@pytest.mark.parametrize("backend", ["torch", "jax"])
@pytest.mark.parametrize("name", CASES)
def test_trajectories_agree_across_backends(name, backend):
    """Each environment is followed until its answers part, which may happen only at a threshold (a wall or an
    end, where rounding decides) and to very few."""
    env, u, actions, reference = numpy_trajectory(name)
    case, followed = CASES[name], np.ones(ENVS, dtype=bool)
    for t, (ours, numpys) in enumerate(zip(play(env, backend, u, lambda t, _: actions[t]), reference)):
        same = (ours.terminated_B == numpys.terminated_B) & (ours.truncated_B == numpys.truncated_B)
        same &= ours.carry.elapsed_B == numpys.carry.elapsed_B
        for mine, other in ((ours.obs, numpys.obs), (ours.final_obs, numpys.final_obs)):
            same &= (abs(mine - other) <= case.drift).all(axis=1)
        same &= abs(ours.reward_B - numpys.reward_B) <= case.drift
        near = np.zeros(ENVS, dtype=bool)
        for distance in case.thresholds(_state_seen(name, numpys.final_obs)):
            near |= abs(distance) < case.drift
        assert (same | near)[followed].all(), f"step {t}: environments {np.flatnonzero(followed & ~same & ~near)}"
        followed &= same
    assert followed.sum() >= ENVS - 3


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("autoreset", [SAME_STEP, NEXT_STEP, DISABLED])
@pytest.mark.parametrize("name", CASES)
def test_dtypes_match_the_spaces(name, autoreset, backend):
    assert_dtypes(rlgraph.make(name), backend, autoreset, np.int64)


def test_dtypes_match_the_spaces_under_jax_enable_x64():
    """There a stray float64 array or loose constant would show, which JAX otherwise rounds to float32."""
    script = """
import jax, numpy as np, rlgraph
from environment_tools import assert_dtypes
from test_envs import CASES, DISABLED, NEXT_STEP, SAME_STEP
assert jax.numpy.zeros(1, dtype="float64").dtype == "float64"
for name in CASES:
    for autoreset in (SAME_STEP, NEXT_STEP, DISABLED):
        for action in (np.int32, np.int64):
            assert_dtypes(rlgraph.make(name), "jax", autoreset, action)
print("checked", len(CASES))
"""
    path = [str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"JAX_ENABLE_X64": "1", "PYTHONPATH": os.pathsep.join(path)}
    run = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert run.stdout == "checked 5\n", run.stderr
