"""The environments against Gymnasium's own, on numpy, torch and JAX; autoreset, the contract, its page."""

import functools
import math
import os
import re
import subprocess
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass, make_dataclass
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import pytest

import rlgraph
from rlgraph.backend import namespace
from rlgraph.environment import DISABLED, NEXT_STEP, SAME_STEP, build
from rlgraph.registry import ENVIRONMENTS

pytestmark = pytest.mark.usefixtures("compilation_once")
ROOT = Path(__file__).parent.parent
BACKENDS = ("numpy", "torch", "jax")
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


def array(backend: str, x: np.ndarray) -> Any:
    if backend == "numpy":
        return x
    if backend == "torch":
        return namespace("torch").from_numpy(np.ascontiguousarray(x))
    return namespace("jax").asarray(x)


def tree(f: Callable, value: Any) -> Any:
    """`f` of every array in nested NamedTuples."""
    if isinstance(value, tuple):
        return type(value)(*(tree(f, v) for v in value))
    return f(value)


def jitted(f: Callable, backend: str) -> Callable:
    if backend != "jax":
        return f
    import jax

    return jax.jit(f)


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


def play(env, backend: str, u: np.ndarray, choose: Callable) -> list:
    """A SAME_STEP trajectory of u's environments from the uniforms u [T + 1, B, draws], as numpy `Step`s."""
    xp = namespace(backend)
    step = jitted(lambda carry, action, u: env.step(xp, carry, action, u, SAME_STEP), backend)
    carry, obs = env.reset(xp, array(backend, u[0, :, : env.reset_draws]))
    steps, obs = [], np.asarray(obs)
    for t in range(len(u) - 1):
        out = step(carry, array(backend, choose(t, obs)), array(backend, u[t + 1]))
        carry = out.carry
        steps.append(tree(np.asarray, out))
        obs = steps[-1].obs
    return steps


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


def assert_dtypes(env, backend: str, autoreset: str, action_dtype) -> None:
    """Everything that reset and step give has its contractual dtype; a carry keeps its own for scan."""
    xp, B = namespace(backend), 5
    u = array(backend, np.full((B, env.draws), 0.3, dtype=np.float32))
    action = np.zeros((B, *env.action_space.shape), dtype=np.float32 if env.action_space.shape else action_dtype)
    start, obs = env.reset(xp, u[:, : env.reset_draws])
    step = env.step(xp, start, array(backend, action), u, autoreset)

    def dtypes(value):
        return tree(lambda x: np.asarray(x).dtype, value)

    assert dtypes(obs) == dtypes(step.obs) == dtypes(step.final_obs) == env.observation_space.dtype
    assert dtypes(step.reward_B) == np.float32
    assert dtypes(step.terminated_B) == dtypes(step.truncated_B) == np.bool_
    assert dtypes(step.carry) == dtypes(start)
    assert dtypes(start.elapsed_B) == np.int32
    assert dtypes(start.done_B) == np.bool_
    assert obs.shape == step.obs.shape == (B, *env.observation_space.shape)


def test_dtypes_match_the_spaces_under_jax_enable_x64():
    """There a stray float64 array or loose constant would show, which JAX otherwise rounds to float32."""
    script = """
import jax, numpy as np, rlgraph
from test_envs import CASES, DISABLED, NEXT_STEP, SAME_STEP, assert_dtypes
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
        "step fails on numpy arrays: AttributeError(\"'numpy.ndarray' object has no attribute 'missing'\")",
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
        "Params must be a dataclass with frozen=True and of plain numbers",
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

    rng = np.random.default_rng(0)
    u = rng.random((151, ENVS, env.draws), dtype=np.float32)

    def towards_target(t, obs):
        return np.clip(4 * (obs[:, 2:] - obs[:, :1]) - 3 * obs[:, 1:2], -2, 2).astype(np.float32)

    steps = play(env, backend, u, towards_target)
    assert sum(s.terminated_B.sum() for s in steps) > 2 * ENVS  # steering there arrives, several times over
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
