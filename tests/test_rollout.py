"""Rollouts on both backends: what the buffers hold, and that every mode computes the same."""

import functools
import math
import os
import subprocess
import sys

import array_api_compat.torch
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diagnostics import Diagnostic

import rlgraph
from rlgraph.environment import SAME_STEP, build
from rlgraph.rollout.jax import collect, start
from rlgraph.rollout.jax import evaluate as evaluate_jax
from rlgraph.rollout.torch import Collector, evaluate

pytestmark = pytest.mark.usefixtures("quick_compilation")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
ENVIRONMENTS = sorted(rlgraph.ENVIRONMENTS)


def torch_policy(env, device, seed=0):
    """A small random policy and critic; noise decides discrete actions, and is added to continuous ones."""
    weight = torch.randn(env.observation_space.shape[0], generator=torch.Generator().manual_seed(seed)).to(device)
    last_action = None if env.action_space.shape else int(env.action_space.n) - 1

    def act(obs, noise):
        score = torch.tanh(obs @ weight)
        if last_action is None:
            return score.unsqueeze(-1) + 0.5 * noise, -noise.squeeze(-1)
        prob = 0.5 + 0.3 * score
        return (noise < prob).long() * last_action, torch.log(prob)

    return act, lambda obs: obs @ weight


def torch_collector(id, B, T, device="cpu", seed=0, mode="eager", max_episode_steps=None):
    env = rlgraph.make(id, max_episode_steps=max_episode_steps)
    generator = torch.Generator(device).manual_seed(seed)
    return Collector(env, *torch_policy(env, device), B, T, generator, mode)


def clone(result):
    return [t.clone() for part in result for t in part]


class Flash(Diagnostic):
    """Four steps that pay 1, 1, infinity and 1."""

    steps = 4

    @staticmethod
    def reward(xp, s, action):
        one = xp.ones_like(s.x)
        return xp.where(s.t == 2, np.inf * one, one)


class ShortOrInfinite(Flash):
    """One step that pays 1 where x is -1, else Flash's four."""

    @classmethod
    def step(cls, xp, s, action, u, p):
        state, reward, terminated = super().step(xp, s, action, u, p)
        return state, reward, terminated | (s.x < 0)


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_an_infinite_return_stays_in_its_episode(backend):
    """Sums over two rollouts of three steps: no episode has ended in the first, and one in the second."""
    env, totals, running = build(Flash), [], []
    if backend == "torch":
        collector = Collector(env, *torch_policy(env, "cpu"), 5, 3, torch.Generator().manual_seed(0))
        for _ in range(2):
            totals.append([x.item() for x in collector.collect()[1]])
            running.append(collector.return_B.tolist())
    else:
        collector = start(env, 5, jax.random.key(0))
        for i in range(2):
            act = lambda obs, noise: (jnp.zeros(5, jnp.int32), noise)  # noqa: E731
            collector, _, episodes = collect(env, act, None, collector, 3, jax.random.key(i))
            totals.append([float(x) for x in episodes])
            running.append(collector.return_B.tolist())
    assert totals == [[0, 0, 0], [math.inf, 20, 5]]
    assert running == [[math.inf] * 5, [2] * 5]


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_what_follows_the_first_episode_is_not_evaluated_even_if_it_is_infinite(backend):
    env, B = build(ShortOrInfinite), 64
    if backend == "torch":
        greedy = lambda obs: torch.zeros(B, dtype=torch.int64)  # noqa: E731
        returns = evaluate(env, greedy, B, torch.Generator().manual_seed(0)).tolist()
    else:
        returns = evaluate_jax(env, lambda obs: jnp.zeros(B, jnp.int32), B, jax.random.key(0)).tolist()
    assert set(returns) == {1, math.inf}


@pytest.mark.parametrize("id", ENVIRONMENTS)
def test_the_buffers_hold_what_stepping_by_hand_gives(id):
    """The same uniforms, one step at a time, without the collector."""
    B, T = 6, 40
    collector = torch_collector(id, B, T, max_episode_steps=13)
    env, act, value = collector.env, collector.act, collector.value
    carry, obs = collector.carry, collector.obs.clone()
    carry = type(carry)(type(carry.state)(*(s.clone() for s in carry.state)), *(c.clone() for c in carry[1:]))
    hand = torch.Generator().set_state(collector.generator.get_state())
    rollout, totals = collector.collect()

    u_TBN = torch.rand(T, B, env.draws, generator=hand)
    box = bool(env.action_space.shape)
    noise = torch.randn(T, B, *env.action_space.shape, generator=hand) if box else torch.rand(T, B, generator=hand)
    returns_B, lengths_B, finished = torch.zeros(B), torch.zeros(B), []
    for t in range(T):
        action, log_prob = act(obs, noise[t])
        low, high = env.action_space.low if box else 0, env.action_space.high if box else 0
        env_action = action.clamp(torch.as_tensor(low), torch.as_tensor(high)) if box else action
        step = env.step(array_api_compat.torch, carry, env_action, u_TBN[t], SAME_STEP)
        for name, expected in {
            "obs": obs,
            "action": action,
            "log_prob_TB": log_prob,
            "value_TB": value(obs),
            "reward_TB": step.reward_B,
            "terminated_TB": step.terminated_B,
            "truncated_TB": step.truncated_B,
            "final_obs": step.final_obs,
            "final_value_TB": value(step.final_obs),
        }.items():
            torch.testing.assert_close(getattr(rollout, name)[t], expected, rtol=1e-5, atol=1e-6, msg=f"{name} {t}")
        returns_B, lengths_B = returns_B + step.reward_B, lengths_B + 1
        for b in (step.terminated_B | step.truncated_B).nonzero().flatten().tolist():
            finished.append((returns_B[b].item(), lengths_B[b].item()))
            returns_B[b] = lengths_B[b] = 0
        carry, obs = step.carry, step.obs
    assert len(finished) >= 3 * B  # the time limit cuts in: episodes end within the rollout
    assert totals.count.item() == len(finished)
    assert totals.length_sum.item() == sum(length for _, length in finished)
    assert totals.return_sum.item() == pytest.approx(sum(r for r, _ in finished), rel=1e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("id", ENVIRONMENTS)
def test_replayed_rollouts_equal_eager_ones_to_the_last_bit(id, device):
    """Ten replays, a reset among them, the same kernels: graph == eager, bit for bit."""
    eager, replayed = (
        torch_collector(id, 32, 25, device, mode=mode, max_episode_steps=30) for mode in ("eager", "graph-uncompiled")
    )
    seen = set()
    for i in range(10):
        if i == 5:
            eager.reset()
            replayed.reset()
        if i == 7:
            eager.generator.manual_seed(123)
            replayed.generator.manual_seed(123)
        expected, got = clone(eager.collect()), clone(replayed.collect())
        for a, b in zip(expected, got):
            assert torch.equal(a, b), f"replay {i}"
        seen.add(tuple(got[4].flatten().tolist()) if eager.env.action_space.shape else tuple(got[0].flatten().tolist()))
    assert len(seen) == 10


@pytest.mark.gpu
@pytest.mark.parametrize("B", [1, 7, 64])
@pytest.mark.parametrize("id", ENVIRONMENTS)
def test_compiled_and_captured_rollouts_equal_eager_ones(id, B):
    """Fused kernels round differently, so over few steps and to float32 tolerance; odd B gives unaligned rows."""
    eager = torch_collector(id, B, 12, "cuda", max_episode_steps=5)
    fast = torch_collector(id, B, 12, "cuda", mode="graph", max_episode_steps=5)
    for i in range(4):
        for collector in (eager, fast):
            collector.reset()
        for name, a, b in zip(eager.rollout._fields, eager.collect()[0], fast.collect()[0]):
            torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-4, msg=lambda m: f"{name}, replay {i}: {m}")  # noqa: B023


@pytest.mark.parametrize("id", ["CartPole-v1", "Pendulum-v1"])
def test_compiled_rollouts_equal_eager_ones(id):
    eager, compiled = (torch_collector(id, 7, 12, mode=mode, max_episode_steps=5) for mode in ("eager", "compile"))
    for _ in range(3):
        for name, a, b in zip(eager.rollout._fields, eager.collect()[0], compiled.collect()[0]):
            torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-4, msg=name)


@functools.cache
def jax_rollouts(id, mode_unroll=1, seed=0, iterations=3):
    env = rlgraph.make(id, max_episode_steps=13)
    weight = jnp.asarray(torch_policy_weight(env))

    def act(obs, noise):
        score = jnp.tanh(obs @ weight)
        if env.action_space.shape:
            return score[..., None] + 0.5 * noise, -noise.squeeze(-1)
        prob = 0.5 + 0.3 * score
        return (noise < prob).astype(jnp.int32) * (int(env.action_space.n) - 1), jnp.log(prob)

    @jax.jit
    def iterate(collector, key):
        return collect(env, act, lambda obs: obs @ weight, collector, 20, key, mode_unroll)

    collector = start(env, 8, jax.random.key(seed))
    results = []
    for key in jax.random.split(jax.random.key(seed + 1), iterations):
        collector, rollout, totals = iterate(collector, key)
        results.append((rollout, totals))
    return env, results


def torch_policy_weight(env):
    return torch.randn(env.observation_space.shape[0], generator=torch.Generator().manual_seed(0)).numpy()


@pytest.mark.parametrize("id", ENVIRONMENTS)
def test_jax_rollouts_are_consistent(id):
    """Each row follows from the row before it by the environment's own step."""
    env, results = jax_rollouts(id)
    for rollout, totals in results:
        r = jax.tree.map(np.asarray, rollout)
        done = r.terminated_TB | r.truncated_TB
        assert totals.count == done.sum() >= 8
        assert totals.length_sum / totals.count <= 13
        going_on = ~done[:-1]
        # Not to the last bit: XLA may compute an observation twice, in two fusions.
        np.testing.assert_allclose(r.obs[1:][going_on], r.final_obs[:-1][going_on], rtol=1e-5, atol=1e-5)
        assert (abs(r.obs[1:][done[:-1]] - r.final_obs[:-1][done[:-1]]) > 1e-4).any(axis=-1).all()
        weight = torch_policy_weight(env)
        np.testing.assert_allclose(r.value_TB, r.obs @ weight, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(r.final_value_TB, r.final_obs @ weight, rtol=1e-4, atol=1e-4)
    first, second = (np.asarray(rollout.obs) for rollout, _ in results[:2])
    assert not np.array_equal(first, second)


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_values_are_computed_in_parts_where_there_are_many(backend, monkeypatch):
    """13 steps of 8 environments, at most 40 rows at once: parts of 5, 5 and 3 steps."""
    rows = []

    def value(obs):
        rows.append(obs.shape[:2])
        return obs[..., 2]

    monkeypatch.setattr(f"rlgraph.rollout.{backend}.VALUE_ROWS", 40)
    env = rlgraph.make("CartPole-v1")
    if backend == "torch":
        generator = torch.Generator().manual_seed(0)
        rollout, _ = Collector(env, torch_policy(env, "cpu")[0], value, 8, 13, generator).collect()
    else:

        def act(obs, noise):
            return (noise < 0.5).astype(jnp.int32), noise

        state = start(env, 8, jax.random.key(0))
        _, rollout, _ = jax.jit(collect, static_argnums=(0, 1, 2, 4))(env, act, value, state, 13, jax.random.key(1))
    assert sorted(rows) == sorted([(5, 8), (5, 8), (3, 8)] * 2)
    np.testing.assert_array_equal(rollout.value_TB, rollout.obs[..., 2])
    np.testing.assert_array_equal(rollout.final_value_TB, rollout.final_obs[..., 2])


@pytest.mark.parametrize("id", ENVIRONMENTS)
def test_unrolling_the_scan_changes_nothing(id):
    for (plain, _), (unrolled, _) in zip(jax_rollouts(id)[1], jax_rollouts(id, mode_unroll=3)[1]):
        for a, b in zip(plain[4:7], unrolled[4:7]):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


COUNT_LAUNCHES = """
import glob, sys, tempfile
import jax
import rlgraph
from rlgraph.agents.ppo.config import PPOConfig
from rlgraph.agents.ppo.jax import PPO

env = rlgraph.make("CartPole-v1")
agent = PPO(PPOConfig(backend="jax", mode=sys.argv[1], num_envs=64, num_steps=32), env)
for _ in range(3):
    agent.iterate().get()
with tempfile.TemporaryDirectory() as folder:
    with jax.profiler.trace(folder):
        agent.iterate().get()
    (path,) = glob.glob(folder + "/**/*.xplane.pb", recursive=True)
    names = [e.name for p in jax.profiler.ProfileData.from_file(path).planes for l in p.lines for e in l.events]
launches = sum("GraphLaunch" in n for n in names)
kernels = sum("fusion" in n for n in names)
print("launches", launches, kernels)
"""


@pytest.mark.gpu
def test_jax_graph_mode_really_uses_command_buffers():
    """The profiler sees graph launches in mode graph, and none in mode jit."""
    launches = {}
    for mode in ("graph", "jit"):
        run = subprocess.run(
            [sys.executable, "-c", COUNT_LAUNCHES, mode],
            env={
                **os.environ,
                # The profiler turns command buffers off unless told otherwise.
                "XLA_FLAGS": "--xla_enable_command_buffers_during_profiling=true",
                "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
            },
            capture_output=True,
            text=True,
            check=False,
        )
        assert run.returncode == 0, run.stderr[-2000:]
        launches[mode] = [int(n) for n in run.stdout.split("launches")[1].split()]
    print(launches)
    assert launches["graph"][0] > 0
    assert launches["jit"][0] == 0
    assert launches["jit"][1] > 0  # the profiler did see its work
