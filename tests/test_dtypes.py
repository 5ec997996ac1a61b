"""Agents compute in float32: whatever dtype a space has, and whatever torch's and JAX's defaults are."""

import contextlib
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from agent_tools import BACKENDS
from diagnostics import OneStep
from gymnasium.spaces import Box, Discrete

import rlgraph
from rlgraph.agents.parts import replay_jax, replay_torch
from rlgraph.environment import build
from rlgraph.rollout.jax import collect, start
from rlgraph.rollout.torch import Collector
from rlgraph.runs.train import config_class, metric_names, trainer_class

pytestmark = pytest.mark.usefixtures("quick_compilation", "own_kernel_cache", "quick_interpreter")

TINY = {"num_envs": 4, "num_steps": 4, "hidden": (4,), "device": "cpu", "total_steps": 1000}
OFF_POLICY = {"num_updates": 1, "minibatch_size": 4, "replay_capacity": 64, "learning_starts": 1}
ON_POLICY = {"num_epochs": 1, "num_minibatches": 1}


class Bytes(OneStep):
    @staticmethod
    def observation_space(p):
        return Box(0, 255, (2,), np.uint8)

    @staticmethod
    def observe(xp, s, p):
        return xp.astype(xp.stack([s.x + 1, s.t], axis=-1), xp.uint8)


class DoubleActions(OneStep):
    @staticmethod
    def action_space(p):
        return Box(-2.0, 2.0, (1,), np.float64)


class Exact(DoubleActions):
    """Looks at the action that it is given."""

    @staticmethod
    def reward(xp, s, action):
        assert action.dtype == xp.float32, action.dtype
        return xp.ones_like(s.x)


@contextlib.contextmanager
def wide_defaults(backend):
    """64 bits wherever nothing else is asked for."""
    if backend == "jax":
        with jax.enable_x64(True):
            yield
        return
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def make(agent, env, backend="torch", **changes):
    config = dataclasses.replace(config_class(agent)(), **{"backend": backend, **TINY, **changes})
    return trainer_class(agent, backend)(config, env)


def train(agent, definition, backend="torch", **changes):
    """Metrics of the second of two iterations, and the policy's weights."""
    trainer = make(agent, build(definition()), backend, **changes)
    trainer.iterate()
    return trainer.iterate().get(), trainer.arrays()


@pytest.mark.parametrize(("agent", "changes"), [("dqn", OFF_POLICY), ("pqn", ON_POLICY), ("ppo", ON_POLICY)])
def test_observations_of_bytes(agent, changes):
    metrics, arrays = train(agent, Bytes, **changes)
    assert np.isfinite(metrics).all()
    assert {array.dtype for array in arrays.values()} == {np.dtype(np.float32)}


def test_actions_of_double_precision():
    metrics, arrays = train("sac", DoubleActions, **OFF_POLICY)
    assert np.isfinite(metrics).all()
    assert {array.dtype for array in arrays.values()} == {np.dtype(np.float32)}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("agent", "changes"), [("sac", OFF_POLICY), ("ppo", ON_POLICY)])
def test_a_step_sees_actions_of_float32_whatever_the_bounds_dtype(agent, changes, backend):
    with wide_defaults(backend):
        train(agent, Exact, backend, **changes)


class Counting(OneStep):
    """A leaf of whole numbers as sums give them, of 64 bits where there are any; and a start of numpy's."""

    @staticmethod
    def action_space(p):
        return Discrete(2, start=np.int64(3))

    @classmethod
    def reset(cls, xp, u, p):
        one = xp.ones_like(u[:, 0])
        return cls.State(xp.where(u[:, 0] < 0.5, -one, one), xp.sum(u < 0, axis=-1))

    @classmethod
    def step(cls, xp, s, action, u, p):
        t = s.t + xp.sum(xp.stack([s.t >= 0, action > 3], axis=-1), axis=-1)
        return cls.State(s.x, t), xp.astype(t, s.x.dtype) * 0.1, t > 5

    @staticmethod
    def observe(xp, s, p):
        return xp.stack([s.x, xp.astype(s.t, s.x.dtype)], axis=-1)


RUNS = {
    "dqn": ("dqn", Counting, {**OFF_POLICY, "n_step": 3, "learning_starts": 17}),
    "pqn": ("pqn", "CartPole-v1", ON_POLICY),
    "ppo": ("ppo", "Pendulum-v1", {**ON_POLICY, "normalize_obs": True, "normalize_reward": True}),
    "ppo-fused": ("ppo", "CartPole-v1", {**ON_POLICY, "normalize_reward": True, "mode": "fused"}),
    "sac": ("sac", "Pendulum-v1", {**OFF_POLICY, "normalize_obs": True, "noise_correlation": 0.5}),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", RUNS)
@pytest.mark.filterwarnings("ignore:no CUDA graph on cpu")
def test_a_run_is_the_same_to_the_last_bit_whatever_the_defaults(name, backend):
    """Metrics and everything that it holds; and it goes on from the other's checkpoint."""
    if name == "ppo-fused" and backend == "torch":
        pytest.importorskip("triton", reason="needs the package triton, which is for Linux only")
    agent, env, changes = RUNS[name]
    env = rlgraph.make(env) if isinstance(env, str) else build(env)

    def iterated(run):
        metrics = np.array([run.iterate().get() for _ in range(2)])
        return metrics, run.state_arrays()

    run = make(agent, env, backend, **changes)
    narrow, narrow_later = iterated(run), iterated(run)
    with wide_defaults(backend):
        run = make(agent, env, backend, **changes)
        wide = iterated(run)
        run.iterate()
        run.load_state(narrow[1])
        wide_later = iterated(run)
    for (metrics, state), (others, other_state) in ((narrow, wide), (narrow_later, wide_later)):
        np.testing.assert_array_equal(metrics, others)
        assert {name: x.dtype for name, x in state.items()} == {name: x.dtype for name, x in other_state.items()}
        for name, x in state.items():
            np.testing.assert_array_equal(x, other_state[name], err_msg=name)


@pytest.mark.parametrize(
    ("agent", "backend", "changes"),
    [
        ("dqn", "torch", OFF_POLICY),
        ("pqn", "torch", ON_POLICY),
        ("pqn", "jax", ON_POLICY),
        ("ppo", "torch", ON_POLICY),
        ("sac", "torch", OFF_POLICY),
    ],
)
def test_a_learning_rate_of_a_whole_number_anneals_as_any_other(agent, backend, changes):
    env = rlgraph.make("Pendulum-v1" if agent == "sac" else "CartPole-v1")
    runs = (make(agent, env, backend, **changes, total_steps=160, learning_rate=one) for one in (1, 1.0))
    whole, real = ([run.iterate().get()[0] for _ in range(3)] for run in runs)
    np.testing.assert_array_equal(whole, real)
    rates = np.array(whole)[:, metric_names(agent).index("learning_rate")]
    np.testing.assert_allclose(rates, [1, 0.9, 0.8], rtol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_greedy_returns_are_the_same_whatever_the_defaults(backend):
    run = make("dqn", build(Counting), backend, **OFF_POLICY)
    narrow = run.evaluate_policy(run.policy, run.env, 3, seed=0)
    with wide_defaults(backend):
        wide = run.evaluate_policy(run.load_policy(run.config, run.env, run.arrays()), run.env, 3, seed=0)
    assert narrow.dtype == wide.dtype == np.float32
    np.testing.assert_array_equal(narrow, wide)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_vector_environment_and_a_rollout_are_the_same_whatever_the_defaults(backend):
    def stepped():
        envs = rlgraph.make_vec("CartPole-v1", 3, backend, device="cpu", seed=0, output="numpy")
        results = [envs.reset()[0]]
        for _ in range(3):
            results += envs.step(np.ones(3, np.int64))[:4]
        return [np.asarray(x) for x in (*results, *envs._carry.state, *envs._carry[1:])]

    def rolled_out():
        env = rlgraph.make("CartPole-v1")
        if backend == "torch":
            act = lambda obs, noise: ((noise < 0.5).long(), noise)  # noqa: E731
            collector = Collector(env, act, None, 3, 4, torch.Generator().manual_seed(0))
            rollout, _ = collector.collect()
            ring = replay_torch.Replay(rollout, 12)
            ring.add(rollout)
            batch = ring.sample(8, collector.generator, 3, 0.9)
            return [x.numpy() for x in (*batch, *collector.carry.state, *rollout) if x is not None]

        @jax.jit
        def collected(key):
            act = lambda obs, noise: ((noise < 0.5).astype(jnp.int32), noise)  # noqa: E731
            collector, rollout, _ = collect(env, act, None, start(env, 3, key), 4, key)
            ring = replay_jax.add(replay_jax.create(rollout, 12), rollout)
            return replay_jax.sample(ring, 8, key, 3, 0.9), collector, ring, rollout

        return [np.asarray(x) for x in jax.tree.leaves(collected(jax.random.key(0)))]

    jax.clear_caches()  # a program that another module has compiled without polish may round otherwise
    for function in (stepped, rolled_out):
        narrow = function()
        with wide_defaults(backend):
            wide = function()
        for a, b in zip(narrow, wide, strict=True):
            assert a.dtype == b.dtype
            np.testing.assert_array_equal(a, b)
