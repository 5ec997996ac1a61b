"""Rollouts of one kernel in JAX equal the scan's from the same key. On a CPU the kernel is interpreted."""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agent_tools import make
from diagnostics import Diagnostic
from gymnasium.spaces import Box, Discrete

import rlgraph
from rlgraph.agents.dqn.config import DQNConfig
from rlgraph.agents.networks.jax import ActorCritic
from rlgraph.environment import build
from rlgraph.errors import UsageError
from rlgraph.precision import jax_matmul_precision
from rlgraph.rollout import fused_jax
from rlgraph.rollout.fused_jax import FEW, IEEE, MANY
from rlgraph.rollout.jax import Collector, collect

pytestmark = pytest.mark.usefixtures("quick_compilation")
ENVIRONMENTS = sorted(rlgraph.ENVIRONMENTS)


class Odd(Diagnostic):
    """What the five that ship have not: bytes on two axes, a leaf of two, whole numbers, and actions from 1."""

    STEP_DRAWS = 1

    class State(NamedTuple):
        x: Any  # [B, 2]
        count: Any  # [B] int32

    @staticmethod
    def observation_space(p):
        return Box(0, 255, (2, 2), np.uint8)

    @staticmethod
    def action_space(p):
        return Discrete(3, start=1)

    @classmethod
    def reset(cls, xp, u, p):
        return cls.State(xp.stack([u[:, 0], 1 - u[:, 0]], axis=-1), xp.astype(5 * u[:, 0], xp.int32))

    @classmethod
    def step(cls, xp, s, action, u, p):
        moved = s.x + xp.where(action[:, None] == 3, u[:, :1], 0.1 * xp.ones_like(u[:, :1]))
        return (
            cls.State(moved, s.count + xp.astype(action, xp.int32)),
            moved[:, 0] - xp.astype(action, xp.float32),
            s.count % 4 == 3,
        )

    @staticmethod
    def observe(xp, s, p):
        rows = [xp.stack([30 * s.x[:, 0], 30 * s.x[:, 1]], axis=-1), xp.stack([1 + s.x[:, 0], s.x[:, 1]], axis=-1)]
        return xp.astype(xp.stack(rows, axis=1), xp.uint8)


class Far(Diagnostic):
    """One of its observations is infinite, which tanh takes."""

    steps = 2

    @staticmethod
    def reward(xp, s, action):
        return s.x

    @staticmethod
    def observe(xp, s, p):
        return xp.stack([s.x * np.inf, s.t], axis=-1)


# Hidden layers, activation and B; five environments do not fill a block of the kernel. CartPole has its own test.
CASES = {
    "Acrobot-v1": ((24, 40), "tanh", 16),
    "MountainCar-v0": ((), "tanh", 5),
    "MountainCarContinuous-v0": ((8,), "silu", 16),
    "Pendulum-v1": ((64, 64), "tanh", 5),
}


def random_policy(env, hidden, activation):
    """All weights and statistics large enough to matter; with numpy, which compiles nothing."""
    shapes = eqx.filter_eval_shape(
        ActorCritic, env.observation_space, env.action_space, hidden, activation, jax.random.key(0)
    )
    rng = np.random.default_rng(0)
    policy = jax.tree.map(lambda x: 0.4 * rng.standard_normal(x.shape, np.float32), shapes)
    return eqx.tree_at(lambda p: p.obs_var, policy, abs(policy.obs_var))


def begin(env, B):
    carry, obs = env.reset(np, np.random.default_rng(1).random((B, env.reset_draws), np.float32))
    return Collector(carry, obs, np.zeros(B, np.float32))


def rollouts(env, hidden, activation, B, T=12, precision="ieee", critic=True, device=None):
    """Two in a row of (collector, rollout, totals) by the scan, and two by the kernel, from the same keys."""

    def scan(policy, collector, key):
        return collect(env, policy.act, policy.value if critic else None, collector, T, key)

    def fused(policy, collector, key):
        kernels = policy.for_kernels()._replace(**({} if critic else {"critic": None}))
        return fused_jax.collect(env, kernels, collector, T, key, precision, interpret=device is None)

    with jax.default_device(device or jax.devices("cpu")[0]), jax_matmul_precision(precision):
        policy = random_policy(env, hidden, activation)
        for rollout in (jax.jit(scan), jax.jit(fused)):
            results, collector = [], begin(env, B)
            for seed in range(2):
                results.append(rollout(policy, collector, jax.random.key(seed) if critic else draws(env, T, B, seed)))
                collector = results[-1][0]
            yield results


def draws(env, T, B, seed):
    """See `given_draws`."""
    rng = np.random.default_rng(seed)
    noise = rng.standard_normal((T, B, *env.action_space.shape), np.float32)
    noise = noise if env.action_space.shape else rng.random((T, B), np.float32)
    return noise, rng.random((T, B, env.draws), np.float32)


@pytest.fixture
def given_draws(monkeypatch):
    """In place of a key come the random numbers: to compile a generator takes longer than the rest of a rollout."""
    for module in (fused_jax, rlgraph.rollout.jax):
        monkeypatch.setattr(module, "draw", lambda env, T, B, key: key)


def assert_close(expected, got, rtol=1e-4, atol=2e-5):
    """Structure, shapes and types; actions, flags and counts exactly, floats nearly."""
    assert jax.tree.structure(expected) == jax.tree.structure(got)
    for (path, a), b in zip(jax.tree.leaves_with_path(expected), jax.tree.leaves(got)):
        assert (a.shape, a.dtype) == (b.shape, b.dtype), path
        exact = not jnp.issubdtype(a.dtype, jnp.floating)
        np.testing.assert_allclose(b, a, 0 if exact else rtol, 0 if exact else atol, err_msg=jax.tree_util.keystr(path))


def check_kernel(env, hidden, activation, B, critic=False):
    """Against the scan. Returns the kernel's second rollout."""
    expected, got = rollouts(env, hidden, activation, B, critic=critic)
    assert_close(expected, got)
    for _, rollout, totals in got:
        assert totals.count >= B  # episodes ended inside
        assert len(np.unique(rollout.action)) > 1
        assert np.std(rollout.log_prob_TB) > 0.01
    return got[1][1]


@pytest.mark.usefixtures("given_draws")
@pytest.mark.parametrize("id", CASES)
def test_the_kernel_gives_what_the_scan_gives(id):
    check_kernel(rlgraph.make(id, max_episode_steps=4), *CASES[id])


@pytest.mark.usefixtures("given_draws")
def test_an_infinite_observation_stays_out_of_the_padding_of_a_layer():
    rollout = check_kernel(build(Far), (8,), "tanh", 5)
    assert np.isinf(rollout.obs).any()
    assert np.isfinite(rollout.log_prob_TB).all()


def test_the_kernel_gives_what_the_scan_gives_from_one_key():
    """With the critic, too."""
    check_kernel(rlgraph.make("CartPole-v1", max_episode_steps=4), (64, 64), "relu", 5, critic=True)


@pytest.mark.usefixtures("given_draws")
def test_the_kernel_gives_what_the_scan_gives_of_other_types_and_shapes():
    rollout = check_kernel(build(Odd), (8, 8, 8), "tanh", 5)
    assert rollout.obs.dtype == jnp.uint8
    assert rollout.obs.shape == (12, 5, 2, 2)
    assert set(np.unique(rollout.action)) == {0, 1, 2}
    assert np.any(rollout.terminated_TB)


@pytest.mark.parametrize(("id", "precision"), [("Acrobot-v1", "tf32"), ("Pendulum-v1", "bf16")])
def test_the_kernel_has_a_form_in_triton(id, precision):
    """Without a GPU: each operation is written out as Triton's, though not compiled."""
    env = rlgraph.make(id)
    policy, collector, key = random_policy(env, (64, 64), "tanh"), begin(env, 32), jax.random.key(0)
    gpu = jax.sharding.AbstractDevice("NVIDIA H200", 132, "gpu")
    collect = jax.jit(lambda p, c, key: fused_jax.collect(env, p.for_kernels(), c, 8, key, precision))
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((1,), ("x",), abstract_device=gpu)):
        text = collect.trace(policy, collector, key).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("xla.gpu.triton") == 1


def test_other_agents_and_vectors_have_no_mode_fused():
    small = DQNConfig(num_envs=4, num_steps=2, hidden=(4,), device="cpu")
    with pytest.raises(UsageError, match="needs an MLP actor-critic: agent ppo, not dqn"):
        make("dqn", small, "jax", "CartPole-v1", mode="fused")
    with pytest.raises(UsageError, match="no such mode"):
        rlgraph.make_vec("CartPole-v1", 2, backend="jax", mode="fused")


class Branching(Odd):
    @classmethod
    def step(cls, xp, s, action, u, p):
        return super().step(xp, s, action if action.max() > 1 else action + 1, u, p)


class Wide(Odd):
    @staticmethod
    def observation_space(p):
        return Box(0, 1, (100,))

    @staticmethod
    def observe(xp, s, p):
        return s.x[:, :1] * xp.asarray(np.ones(100, np.float32))


@pytest.mark.parametrize(
    ("definition", "hidden", "message"),
    [
        (Branching, (8,), "cannot be fused: test_fused_jax.py, line .*max"),
        (Wide, (8,), "holds an observation of at most 64 numbers, and environment .* has 100; use mode graph"),
        (Odd, (256, 256), "262144 bytes, at most 131072"),
    ],
)
def test_what_it_cannot_run_it_refuses_in_one_line(definition, hidden, message):
    env = build(definition)
    policy = random_policy(env, hidden, "tanh")
    with pytest.raises(UsageError, match=message) as error:
        fused_jax.check(env, policy.for_kernels())
    assert "\n" not in str(error.value)


def test_what_decides_the_launch():
    env = rlgraph.make("CartPole-v1")
    narrow, wide = (random_policy(env, hidden, "tanh").for_kernels() for hidden in ((64, 64), (64, 128)))
    assert fused_jax.default_launch(4096, narrow, "tf32") == FEW
    assert fused_jax.default_launch(65536, narrow, "bf16") == MANY
    assert fused_jax.default_launch(65536, narrow, "ieee") == IEEE
    for B, precision in ((4096, "tf32"), (65536, "tf32"), (4096, "ieee")):
        assert fused_jax.default_launch(B, wide, precision).warps > fused_jax.default_launch(B, narrow, precision).warps


# ---- on a GPU

# Share of environments in which all that is recorded over 8 steps is that close, relative to 1 + its size. Where two
# roundings of a probability lie on either side of its uniform the actions differ, and all that follows.
BOUNDS = {"ieee": (0.995, 1e-3), "tf32": (0.95, 0.03), "bf16": (0.7, 0.2)}


@pytest.mark.gpu
@pytest.mark.parametrize("precision", BOUNDS)
@pytest.mark.parametrize("id", ENVIRONMENTS)
def test_on_a_gpu_the_kernel_gives_what_the_scan_gives(id, precision):
    B, T, (share, tolerance) = 4096, 8, BOUNDS[precision]
    env = rlgraph.make(id, max_episode_steps=4)
    for B_now in (B, B - 3):  # the other does not fill the last block
        expected, got = rollouts(env, (64, 64), "tanh", B_now, T, precision, device=jax.devices("gpu")[0])
        (_, expected, expected_totals), (_, got, totals) = expected[0], got[0]
        close_B = np.ones(B_now, bool)
        for a, b in zip(expected, got):
            a, b = (np.asarray(x, np.float32).reshape(T, B_now, -1) for x in (a, b))
            close_B &= (abs(a - b) <= tolerance * (1 + abs(a))).all(axis=(0, 2))
        assert close_B.mean() >= share
        np.testing.assert_allclose(totals.count, expected_totals.count, rtol=1 - share)


@pytest.mark.gpu
@pytest.mark.parametrize("launch", [(16, 2), (32, 1), (32, 4), (64, 4), (128, 4)])
def test_on_a_gpu_every_launch_computes_the_same(launch):
    env = rlgraph.make("CartPole-v1", max_episode_steps=4)
    policy, key = random_policy(env, (64, 64), "tanh"), jax.random.key(0)
    collector = begin(env, 300)
    expected, got = (
        jax.jit(lambda p, c, k, how=how: fused_jax.collect(env, p.for_kernels(), c, 8, k, "tf32", launch=how))(
            policy, collector, key
        )
        for how in (None, fused_jax.Launch(*launch))
    )
    same_B = (expected[1].action == got[1].action).all(axis=0)
    assert same_B.mean() > 0.95
    difference = abs(expected[1].log_prob_TB - got[1].log_prob_TB)[:, same_B]
    assert difference.max() < 0.03
