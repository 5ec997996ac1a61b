"""The vector environments against Gymnasium's SyncVectorEnv, and everything else that a caller can see."""

import itertools
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import NamedTuple

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from gymnasium.error import ClosedEnvironmentError, ResetNeeded
from gymnasium.spaces import Box, Discrete
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers.vector import NormalizeObservation, RecordEpisodeStatistics

import rlgraph

pytestmark = [
    pytest.mark.filterwarnings("ignore:no CUDA graph on cpu"),
    pytest.mark.usefixtures("compilation_once"),
]
BACKENDS = ("torch", "jax")
AUTORESET = tuple(AutoresetMode)

# Short limits and starts close to the end, so that episodes end both ways within few steps.
SETTINGS = {
    "CartPole-v1": (18, {}),
    "Pendulum-v1": (20, {}),
    "MountainCar-v0": (25, {"low": 0.4, "high": 0.49}),
    "MountainCarContinuous-v0": (25, {"low": 0.35, "high": 0.44}),
    "Acrobot-v1": (12, {"low": -2.5, "high": 2.5}),
}


def make(name="CartPole-v1", num_envs=3, backend="torch", **kwargs):
    return rlgraph.make_vec(name, num_envs, backend, device="cpu", **kwargs)


def as_numpy(array):
    """A copy."""
    return np.asarray(array).copy()


def state_of(env):
    """[B, n] of an rlgraph environment."""
    return np.stack([np.asarray(leaf) for leaf in env._carry.state], axis=-1)


def impose(state, single):
    """Put a state into one of Gymnasium's environments. Returns the observation that it gives there."""
    single = single.unwrapped
    single.state = np.array(state, dtype=np.float64)
    for name in ("_get_obs", "_get_ob"):
        if hasattr(single, name):
            return getattr(single, name)()
    return single.state.astype(np.float32)


def actions_for(env, rng):
    """[B, ...] actions; in the mountain cars all but the first environment push right, to reach the flag."""
    pushing_B = np.arange(env.num_envs) > (0 if env.spec.id.startswith("Mountain") else env.num_envs)
    if isinstance(env.single_action_space, Discrete):
        n = env.single_action_space.n
        return np.where(pushing_B, n - 1, rng.integers(n, size=env.num_envs))
    # Beyond the bounds too: clipping is the environment's own affair.
    force = rng.uniform(-3, 3, size=env.action_space.shape).astype(np.float32)
    return np.where(pushing_B[:, None], abs(force) + 0.5, force)


def close(a, b):
    np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-4, atol=2e-5)


def assert_same_infos(ours, theirs):
    assert set(ours) == set(theirs)
    if not theirs:
        return
    assert ours["final_obs"].dtype == theirs["final_obs"].dtype == object
    assert ours["final_info"] == theirs["final_info"] == {}
    for key in ("_final_obs", "_final_info"):
        assert ours[key].dtype == np.bool_
        assert ours[key].tolist() == theirs[key].tolist()
    for mine, other in zip(ours["final_obs"], theirs["final_obs"]):
        assert (mine is None) == (other is None)
        if mine is not None:
            assert mine.dtype == other.dtype
            close(mine, other)


@pytest.mark.parametrize("autoreset_mode", AUTORESET)
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_step_is_gymnasiums(backend, name, autoreset_mode):
    """Both step from our state, which is put into Gymnasium's environments before every step."""
    (limit, params), B = SETTINGS[name], 6
    ours = make(
        name,
        B,
        backend,
        seed=1,
        autoreset_mode=autoreset_mode,
        output="numpy",
        max_episode_steps=limit,
        **params,
    )
    single = partial(gymnasium.make, name, max_episode_steps=limit, disable_env_checker=True)
    theirs = SyncVectorEnv([single] * B, autoreset_mode=autoreset_mode)
    rng = np.random.default_rng(0)
    obs, infos = ours.reset()
    theirs.reset()
    assert infos == {}
    done_B, fresh_B = np.zeros(B, bool), np.ones(B, bool)
    pairs = {"first obs": [], "obs": [], "reward": [], "terminated": [], "truncated": []}

    for _ in range(500):
        imposed = np.stack([impose(*pair) for pair in zip(state_of(ours), theirs.envs)])
        pairs["first obs"].append((obs[fresh_B], imposed[fresh_B]))
        actions = actions_for(ours, rng)
        obs, *mine, infos = ours.step(actions)
        their_obs, *other, their_infos = theirs.step(actions)

        assert_same_infos(infos, their_infos)
        for key, pair in zip(("reward", "terminated", "truncated"), zip(mine, other)):
            pairs[key].append(pair)
        was_done_B, done_B = done_B, mine[1] | mine[2]
        # Where an episode began, the two drew different starts.
        fresh_B = {"NextStep": was_done_B, "SameStep": done_B}.get(autoreset_mode.value, np.zeros(B, bool))
        pairs["obs"].append((obs[~fresh_B], their_obs[~fresh_B]))
        if autoreset_mode is AutoresetMode.DISABLED and done_B.any():
            before, fresh_B = obs, done_B
            obs, _ = ours.reset(options={"reset_mask": done_B})
            theirs.reset(options={"reset_mask": done_B})
            np.testing.assert_array_equal(obs[~done_B], before[~done_B])

    for key in pairs:
        close(*(np.concatenate(side) for side in zip(*pairs[key])))
    terminated, truncated = (np.concatenate([mine for mine, _ in pairs[key]]) for key in ("terminated", "truncated"))
    assert (truncated & ~terminated).sum() > 20
    assert (terminated & ~truncated).sum() > 20 or name == "Pendulum-v1"


@pytest.mark.parametrize("output", ["tensor", "numpy"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_shapes_and_dtypes_match_the_spaces(backend, output):
    B = 2
    for name, autoreset_mode in zip(SETTINGS, itertools.cycle(AUTORESET)):
        env = make(name, B, backend, output=output, autoreset_mode=autoreset_mode)
        single = gymnasium.make(name)
        assert isinstance(env, gymnasium.vector.VectorEnv)
        assert env.single_observation_space == single.observation_space
        assert env.single_action_space == single.action_space
        assert env.observation_space == gymnasium.vector.utils.batch_space(single.observation_space, B)
        assert env.action_space == gymnasium.vector.utils.batch_space(single.action_space, B)
        assert env.metadata["autoreset_mode"] is autoreset_mode
        kind = np.ndarray if output == "numpy" else {"torch": torch.Tensor, "jax": jax.Array}[backend]
        obs, _ = env.reset(seed=3)
        results = (obs, *env.step(env.action_space.sample())[:4])
        assert all(isinstance(r, kind) for r in results)
        host = [np.asarray(r) for r in results]
        assert env.observation_space.contains(host[0])
        assert [r.dtype for r in host] == [np.float32, np.float32, np.float32, np.bool_, np.bool_]
        assert [r.shape for r in host] == [env.observation_space.shape] * 2 + [(B,)] * 3
        if output == "numpy":
            assert all(r.flags.writeable for r in results)


def test_dtypes_under_jax_64_bit():
    program = """
import json, numpy as np, rlgraph
found = set()
for id in ("CartPole-v1", "MountainCarContinuous-v0", "Pendulum-v1"):
    for autoreset in ("NextStep", "SameStep") if id == "Pendulum-v1" else ("SameStep",):
        params = {"g": np.float64(9.0)} if id == "Pendulum-v1" else {}
        env = rlgraph.make_vec(id, 2, "jax", device="cpu", autoreset_mode=autoreset, **params)
        obs, _ = env.reset(seed=1)
        for _ in range(2):
            step = env.step(env.action_space.sample())
        final = step[4].get("final_obs", obs)
        found.add(tuple(str(r.dtype) for r in (obs, *step[:4], final, env._carry.elapsed_B)))
        found.add(tuple({str(leaf.dtype) for leaf in env._carry.state}))
print(json.dumps(sorted(found)))
"""
    run = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "JAX_ENABLE_X64": "1", "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    step = ["float32", "float32", "float32", "bool", "bool", "float32", "int32"]
    assert json.loads(run.stdout) == [["float32"], step]


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_same_seed_is_the_same_run(backend):
    def trajectory(env, seed, steps=60):
        rng = np.random.default_rng(0)
        seen = [env.reset(seed=seed)[0]]
        return np.stack(seen + [env.step(rng.integers(2, size=3))[0] for _ in range(steps)])

    env = make(backend=backend, output="numpy")
    first, other, again = (trajectory(env, seed) for seed in (5, 6, 5))
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)
    np.testing.assert_array_equal(first, trajectory(make(backend=backend, output="numpy", seed=5), None))
    assert not np.array_equal(*(trajectory(make(backend=backend, output="numpy"), None) for _ in range(2))), (
        "two environments without a seed are two runs"
    )
    env.reset(seed=7)
    assert env.np_random_seed == 7


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_two_episodes_start_alike(backend):
    env = make(backend=backend, seed=1, output="numpy", max_episode_steps=2, autoreset_mode="SameStep")
    starts = [env.reset()[0], env.reset()[0]]
    for _ in range(20):
        obs, _, terminated, truncated, _ = env.step(np.zeros(3, int))
        if (terminated | truncated).all():
            starts.append(obs)
    starts = np.concatenate(starts)
    assert len(starts) == 36
    assert len(np.unique(starts, axis=0)) == len(starts)
    assert (np.abs(starts) <= 0.05).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_explicit_reset_clears_the_step_counter(backend):
    env = make("Pendulum-v1", 2, backend, max_episode_steps=5, output="numpy")
    env.reset()
    for _ in range(3):
        env.step(np.zeros((2, 1)))
    env.reset()
    truncated = [env.step(np.zeros((2, 1)))[3].tolist() for _ in range(5)]
    assert truncated == [[False, False]] * 4 + [[True, True]]

    env.reset()  # and the pending autoreset: this step is a real one
    assert (env.step(np.zeros((2, 1)))[1] != 0).all()

    env.reset(options={"reset_mask": np.array([False, True])})
    truncated = [env.step(np.zeros((2, 1)))[3].tolist() for _ in range(5)]
    assert truncated == [[False, False]] * 3 + [[True, False]] + [[False, True]]


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_reset_mask(backend):
    env = make(backend=backend, seed=1)
    before = np.asarray(env.reset()[0])
    own = {"torch": torch.tensor, "jax": jnp.array}[backend]
    for mask in (np.array([True, False, True]), own([True, False, True])):
        options = {"reset_mask": mask, "low": 1.0, "high": 2.0}
        after = np.asarray(env.reset(options=options)[0])
        assert set(options) == {"reset_mask", "low", "high"}, "the caller's dict is left as it was"
        np.testing.assert_array_equal(after[1], before[1])
        assert (after[[0, 2]] >= 1).all()
        assert (after[[0, 2]] <= 2).all()

    errors = [
        ([True, False, True], TypeError, "numpy or"),
        (np.ones(2, bool), ValueError, r"shape \[3\], got \[2\]"),
        (np.ones(3, int), TypeError, "dtype bool, got int64"),
        (own([1, 0, 1]), TypeError, "dtype bool, got int"),
        (np.zeros(3, bool), ValueError, "at least one True"),
    ]
    for mask, kind, text in errors:
        with pytest.raises(kind, match=text):
            env.reset(options={"reset_mask": mask})
    with pytest.raises(ResetNeeded, match="reset_mask"):
        make(backend=backend).reset(options={"reset_mask": np.ones(3, bool)})


@pytest.mark.parametrize("backend", BACKENDS)
def test_reset_options_are_parameters_for_one_reset(backend):
    env = make("Pendulum-v1", 50, backend, seed=1, output="numpy")
    env.reset(options={"x_init": 0.1, "y_init": np.float64(0.2)})
    assert (np.abs(state_of(env)) <= [0.1, 0.2]).all()
    env.reset()
    assert np.abs(state_of(env)).max() > 1
    with pytest.raises(rlgraph.UsageError, match="did you mean 'x_init'"):
        env.reset(options={"x_innit": 0.1})


@pytest.mark.parametrize("backend", BACKENDS)
def test_limit_and_parameters(backend):
    env = make("Pendulum-v1", 2, backend, max_episode_steps=-1, output="numpy", seed=1)
    env.reset()
    assert not any(env.step(np.zeros((2, 1)))[3].any() for _ in range(250))
    assert env.spec.max_episode_steps is None

    ends = {}
    for g in (10.0, 1.0):
        env = make("Pendulum-v1", 2, backend, g=g, seed=1, output="numpy")
        env.reset()
        ends[g] = env.step(np.zeros((2, 1)))[0]
        reference = gymnasium.make("Pendulum-v1", g=g)
        reference.reset()
        again = make("Pendulum-v1", 2, backend, g=g, seed=1)
        again.reset()
        impose(state_of(again)[0], reference)
        close(ends[g][0], reference.step(np.zeros(1, np.float32))[0])
    assert not np.allclose(ends[10.0], ends[1.0])


@pytest.mark.parametrize("backend", BACKENDS)
def test_actions_of_every_sort_do_the_same(backend):
    def obs_after(name, actions):
        env = make(name, 2, backend, seed=1, output="numpy")
        env.reset()
        return env.step(actions)[0]

    want = obs_after("CartPole-v1", np.array([1, 0]))
    discrete = [np.array([1, 0], kind) for kind in ("i1", "u1", "i2", "i4", "u4", "u8", ">i8")]
    discrete += [
        np.array([0, 1])[::-1],
        [1, 0],
        (np.int64(1), 0),
        jnp.array([1, 0]),
        jnp.array([1, 0], jnp.uint8),
    ]
    discrete += [
        torch.tensor([1, 0]),
        torch.tensor([1, 0], dtype=torch.int16),
        [torch.tensor(1), torch.tensor(0)],
    ]
    for actions in discrete:
        np.testing.assert_array_equal(obs_after("CartPole-v1", actions), want)

    rows = [[0.5], [-1.5]]
    want = obs_after("Pendulum-v1", np.array(rows, np.float32))
    box = [rows, np.array(rows), np.array(rows, np.float16), torch.tensor(rows), torch.tensor(rows).double()]
    if backend == "torch":
        box += [torch.tensor(rows).bfloat16(), torch.tensor(rows, requires_grad=True)]
    else:
        box += [jnp.array(rows), jnp.array(rows, jnp.bfloat16)]
    for actions in box:
        np.testing.assert_array_equal(obs_after("Pendulum-v1", actions), want)
    np.testing.assert_array_equal(
        obs_after("Pendulum-v1", [[2], [-2]]), obs_after("Pendulum-v1", np.array([[9.0], [-9.0]]))
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_wrong_actions_are_errors_and_change_nothing(backend):
    own = {"torch": torch.tensor, "jax": jnp.array}[backend]
    env = make(num_envs=2, backend=backend, seed=1)
    start = np.asarray(env.reset()[0])
    errors = [
        ([1, 0, 1], ValueError, r"shape \[2\], got \[3\]"),
        (1, ValueError, r"shape \[2\], got \[\]"),
        (np.zeros((2, 1), int), ValueError, r"shape \[2\], got \[2, 1\]"),
        ([[1, 0], [1]], ValueError, r"array of shape \[2\]"),
        ([1.0, 0.0], TypeError, "must be integers.*got floats"),
        (own([1.0, 0.0]), TypeError, "must be integers.*got floats"),
        ([True, False], TypeError, "must be integers.*got booleans"),
        (own([True, False]), TypeError, "must be integers.*got booleans"),
        (["a", "b"], TypeError, "must be integers"),
        (None, ValueError, r"shape \[2\]"),
        ([0, 2], ValueError, r"in \[0, 1\], got 0 to 2"),
        ([-1, 0], ValueError, r"in \[0, 1\], got -1 to 0"),
        (np.array([0, 2**64 - 1], np.uint64), ValueError, r"in \[0, 1\]"),
        (own([0, 2]), ValueError, r"in \[0, 1\], got 0 to 2"),
    ]
    for actions, kind, text in errors:
        with pytest.raises(kind, match=text) as caught:
            env.step(actions)
        assert "\n" not in str(caught.value)
    np.testing.assert_array_equal(state_of(env), start)

    env = make("Pendulum-v1", 2, backend)
    env.reset()
    with pytest.raises(ValueError, match=r"shape \[2, 1\], got \[2\]"):
        env.step([0.0, 1.0])
    with pytest.raises(TypeError, match="must be floats; got booleans"):
        env.step([[True], [False]])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("trigger", ["steps", "reset", "close", "numpy", "disabled"])
def test_an_unread_action_out_of_range_is_reported_later(backend, trigger, monkeypatch):
    """What a GPU does, where actions are not read at every step: here the host's check is left out."""
    env = make(
        num_envs=2,
        backend=backend,
        output="numpy" if trigger == "numpy" else "tensor",
        autoreset_mode="Disabled" if trigger == "disabled" else "SameStep",
    )
    own = {"torch": torch.tensor, "jax": jnp.array}[backend]
    monkeypatch.setattr(env, "_own_array", lambda array: array)
    env.reset()
    env.step(own([0, 1]))
    if trigger in ("numpy", "disabled"):
        with pytest.raises(ValueError, match="last 1 steps"):
            env.step(own([0, 2]))
        env.reset()
        return
    env.step(own([0, 2]))
    with pytest.raises(ValueError, match=r"outside \[0, 1\].*one of the last .* steps"):
        if trigger == "steps":
            for _ in range(255):
                env.step(own([0, 1]))
        else:
            getattr(env, trigger)()
    if trigger == "close":
        assert env.closed
    else:
        env.reset()  # reported once


class Pair(NamedTuple):
    a: object
    b: object


@dataclass(frozen=True)
class NoParams:
    pass


@pytest.fixture
def odd(monkeypatch):
    """An environment with an action offset, whose step swaps two leaves, one of them the observation."""
    module = ModuleType("odd")
    module.ID, module.MAX_EPISODE_STEPS, module.REWARD_THRESHOLD = "Odd-v0", 4, None
    module.RESET_DRAWS, module.STEP_DRAWS, module.Params = 2, 0, NoParams
    module.State = Pair
    module.observation_space = lambda p: Box(-1, 1, (1,), np.float32)
    module.action_space = lambda p: Discrete(3, start=-1)
    module.reset = lambda xp, u, p: Pair(u[:, :1], u[:, 1:2])
    module.observe = lambda xp, s, p: s.a

    def step(xp, s, action, u, p):
        return Pair(s.b, s.a), xp.astype(action, s.a.dtype), s.a[:, 0] > 2

    module.step = step
    monkeypatch.setitem(rlgraph.ENVIRONMENTS, "Odd-v0", module)


@pytest.mark.parametrize("mode", ["eager", "jit", "graph"])
@pytest.mark.parametrize("autoreset_mode", AUTORESET)
def test_an_environment_that_hands_its_leaves_on(odd, autoreset_mode, mode):
    backend = "jax" if mode == "jit" else "torch"
    env = make("Odd-v0", 2, backend, mode=mode, seed=1, autoreset_mode=autoreset_mode)
    obs, _ = env.reset()
    a, b = (as_numpy(leaf) for leaf in env._carry.state)
    seen = [obs]
    for t in range(4):
        obs, reward, _, truncated, infos = env.step([-1, 1])
        np.testing.assert_array_equal(np.asarray(reward), [-1, 1])
        last = infos.get("final_obs", obs)
        np.testing.assert_array_equal(np.asarray(last), b if t % 2 == 0 else a)
        seen.append(obs)
    assert np.asarray(truncated).all()
    if autoreset_mode is not AutoresetMode.SAME_STEP:
        for t, obs in enumerate(seen):  # not one of them was overwritten
            np.testing.assert_array_equal(np.asarray(obs), a if t % 2 == 0 else b)
    with pytest.raises(ValueError, match=r"in \[-1, 1\]"):
        env.step([0, 2])


@pytest.mark.parametrize("mode", ["eager", "graph-uncompiled", "graph"])
@pytest.mark.parametrize("output", ["tensor", "numpy"])
def test_what_is_returned_is_the_callers(output, mode):
    def run(spoil):
        env = make(num_envs=3, mode=mode, seed=2, output=output, autoreset_mode="SameStep", max_episode_steps=7)
        results = [env.reset()[0]]
        copies = [as_numpy(results[0])]
        for t in range(30):
            *arrays, infos = env.step([t % 2, 1, 0])
            arrays += [array for key, array in sorted(infos.items()) if key not in ("final_info", "final_obs")]
            results += arrays
            copies += [as_numpy(a) for a in arrays]
            if spoil:
                for array in arrays:
                    array[:] = 1
        return results, copies

    results, copies = run(spoil=False)
    for array, copy in zip(results, copies):
        np.testing.assert_array_equal(np.asarray(array), copy)
    for copy, spoiled in zip(copies, run(spoil=True)[1]):
        np.testing.assert_array_equal(copy, spoiled)


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("autoreset_mode", AUTORESET)
def test_graph_equals_eager_to_the_last_bit(name, autoreset_mode):
    limit, params = SETTINGS[name]

    def run(mode):
        env = make(name, 3, mode=mode, seed=4, autoreset_mode=autoreset_mode, max_episode_steps=limit, **params)
        rng = np.random.default_rng(0)
        seen = [env.reset()[0]]
        for t in range(120):
            if t == 50:
                seen += [env.reset()[0]]
            if t == 80:
                seen += [env.reset(seed=9)[0]]
            *results, infos = env.step(actions_for(env, rng))
            seen += results + [infos[k] for k in sorted(infos) if k != "final_info"]
            done = results[2] | results[3]
            if autoreset_mode is AutoresetMode.DISABLED and done.any():
                seen += [env.reset(options={"reset_mask": done})[0]]
        return seen

    eager = run("eager")
    for mode in ("graph", "graph-uncompiled"):
        for a, b in zip(eager, run(mode), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize(("backend", "mode"), [("torch", "compile"), ("jax", "eager"), ("jax", "graph")])
def test_the_other_modes_compute_the_same(backend, mode):
    def run(mode):
        env = make(
            num_envs=3,
            backend=backend,
            mode=mode,
            seed=4,
            autoreset_mode="SameStep",
            max_episode_steps=3,
            output="numpy",
        )
        env.reset()
        return [env.step([1, t % 2, 0])[:4] for t in range(5)]

    for a, b in zip(run("auto"), run(mode), strict=True):
        for x, y in zip(a, b):
            close(x, y)


@pytest.mark.parametrize("backend", BACKENDS)
def test_tensor_infos_are_dense(backend):
    env = make(num_envs=4, backend=backend, seed=1, autoreset_mode="SameStep", max_episode_steps=15)
    env.reset()
    ended = 0
    for _ in range(40):
        obs, _, terminated, truncated, infos = env.step([0, 1, 0, 1])
        assert set(infos) == {"final_obs", "_final_obs", "final_info", "_final_info"}
        done, final_obs = np.asarray(terminated | truncated), np.asarray(infos["final_obs"])
        np.testing.assert_array_equal(np.asarray(infos["_final_obs"]), done)
        np.testing.assert_array_equal(np.asarray(infos["_final_info"]), done)
        assert infos["final_info"] == {}
        np.testing.assert_array_equal(final_obs[~done], np.asarray(obs)[~done])
        assert (final_obs[done] != np.asarray(obs)[done]).all()
        ended += done.sum()
    assert ended > 8


@pytest.mark.parametrize("backend", BACKENDS)
def test_use_before_reset_after_the_end_and_after_close(backend):
    env = make(num_envs=2, backend=backend, autoreset_mode="Disabled", max_episode_steps=1)
    with pytest.raises(ResetNeeded, match=r"call reset\(\) first"):
        env.step([0, 1])
    env.reset()
    env.step([0, 1])
    with pytest.raises(ResetNeeded, match=r"2 of 2 episodes have ended.*reset_mask"):
        env.step([0, 1])
    env.reset(options={"reset_mask": np.array([True, False])})
    with pytest.raises(ResetNeeded, match="1 of 2"):
        env.step([0, 1])
    env.reset()
    env.step([0, 1])

    assert not env.closed
    env.close()
    env.close()
    assert env.closed
    for use in (env.reset, lambda: env.step([0, 1])):
        with pytest.raises(ClosedEnvironmentError, match="make a new one"):
            use()


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_spec_makes_another_one(backend):
    env = make(num_envs=2, backend=backend, autoreset_mode="SameStep", output="numpy", gravity=9.0)
    spec = env.spec
    assert (spec.id, spec.max_episode_steps, spec.reward_threshold) == ("CartPole-v1", 500, 475.0)
    assert spec.vector_entry_point == "rlgraph:make_vec"
    assert spec.kwargs["gravity"] == 9.0
    assert repr(env) == f"{type(env).__name__}(CartPole-v1, num_envs=2)"
    json.loads(spec.to_json())
    for limit, expected in ((None, 500), (-1, None), (30, 30)):
        spec = make(backend=backend, autoreset_mode="SameStep", gravity=9.0, max_episode_steps=limit).spec
        again = gymnasium.make_vec(spec, num_envs=5)
        assert (type(again), again.num_envs) == (type(env), 5)
        assert again.env.max_episode_steps == expected
        assert again.env.params.gravity == 9.0
        assert again.metadata["autoreset_mode"] is AutoresetMode.SAME_STEP


@pytest.mark.parametrize("autoreset_mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
@pytest.mark.parametrize("backend", BACKENDS)
def test_gymnasiums_wrappers_work(backend, autoreset_mode):
    env = make(backend=backend, output="numpy", autoreset_mode=autoreset_mode, max_episode_steps=15, seed=1)
    env = RecordEpisodeStatistics(env)
    if autoreset_mode is AutoresetMode.NEXT_STEP:
        env = NormalizeObservation(env)
    env.reset(seed=3)
    episodes = []
    for t in range(100):
        obs, _, terminated, truncated, infos = env.step([0, 1, t % 2])
        assert obs.shape == (3, 4)
        if "episode" in infos:
            np.testing.assert_array_equal(infos["_episode"], terminated | truncated)
            for i in np.flatnonzero(infos["_episode"]):
                episodes.append((infos["episode"]["r"][i], infos["episode"]["l"][i]))
    assert len(episodes) > 15
    assert all(r == length for r, length in episodes)  # CartPole: one a step
    assert {length for _, length in episodes} >= {15}
    env.close()


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_environment(backend):
    env = make("CartPole-v1", 1, backend, output="numpy", autoreset_mode="SameStep", seed=1)
    obs, _ = env.reset()
    assert obs.shape == (1, 4)
    finals = [env.step([1])[4] for _ in range(12)]
    assert any("final_obs" in f and f["final_obs"][0].shape == (4,) for f in finals)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_envs": 0}, "num_envs must be an integer of at least 1, but is 0"),
        ({"num_envs": 2.0}, "num_envs must be an integer"),
        ({"num_envs": True}, "num_envs must be an integer"),
        ({"id": "Cartpole-v1"}, "did you mean 'CartPole-v1'"),
        ({"backend": "jaxx"}, "unknown backend 'jaxx'; did you mean 'jax'"),
        ({"backend": None}, "unknown backend"),
        ({"mode": "grph"}, "unknown torch mode 'grph'; did you mean 'graph'"),
        ({"mode": "jit"}, "unknown torch mode 'jit'"),
        ({"backend": "jax", "mode": "compile"}, "unknown jax mode 'compile'"),
        ({"device": "cdua"}, "unknown device 'cdua'; did you mean 'cuda'"),
        ({"backend": "jax", "device": "cdua"}, "unknown device 'cdua'; did you mean 'cuda'"),
        ({"device": "cuda:99"}, "device 'cuda:99' is not available"),
        ({"backend": "jax", "device": "cuda:99"}, "device 'cuda:99' is not available"),
        ({"output": "tensors"}, "unknown output 'tensors'; did you mean 'tensor'"),
        ({"autoreset_mode": "next_step"}, "unknown autoreset_mode 'next_step'; did you mean 'NextStep'"),
        ({"autoreset_mode": None}, "unknown autoreset_mode"),
        ({"max_episode_steps": 0}, "max_episode_steps must be at least 1"),
        ({"gravitee": 1.0}, "unknown environment parameter 'gravitee'; did you mean 'gravity'"),
        ({"gravity": "high"}, "environment parameter 'gravity' must be a number, but is 'high'"),
        ({"seed": -1}, "seed must be in [0, 2**32), but is -1"),
        ({"seed": 2**32}, "seed must be in"),
        ({"seed": [1, 2]}, "seed must be one integer"),
    ],
)
def test_wrong_arguments_are_one_line(arguments, message):
    with pytest.raises(rlgraph.UsageError) as caught:
        rlgraph.make_vec(**{"id": "CartPole-v1", **arguments})
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
