"""Rollouts in one generated kernel: the same numbers as Collector's from the same draws, and everything around them.

Without a GPU, Triton runs the kernels in Python: small sizes. With one, the tests marked `gpu` run.
"""

import itertools
import math
from copy import deepcopy

import gymnasium
import numpy as np
import pytest
import torch
from agent_tools import copy, differ
from diagnostics import Aim, Match, Wander
from fused_tools import (
    DEVICES,
    KERNEL_MARKS,
    Sink,
    Told,
    cartpole_sources,
    draws,
    interpreted,
    make_env,
    make_policy,
    philox,
    rounding,
    uniforms,
)

import rlgraph
from rlgraph.agents.ppo.config import PPOConfig
from rlgraph.agents.ppo.torch import PPO
from rlgraph.environment import SAME_STEP
from rlgraph.errors import UsageError
from rlgraph.graph.capture import capture
from rlgraph.kernels import build
from rlgraph.kernels import rollouts as fused
from rlgraph.kernels.rollouts import FusedCollector
from rlgraph.rollout.torch import Collector

pytest.importorskip("triton", reason="needs the package triton, which is for Linux only")

pytestmark = KERNEL_MARKS
ENVIRONMENTS = sorted(rlgraph.ENVIRONMENTS)


def make_fused(env, B, T, policy=None, device="cpu", seed=0, precision="ieee"):
    described = None if policy is None else policy.for_kernels()
    return FusedCollector(env, described, B, T, torch.Generator(device).manual_seed(seed), precision)


def random_policy(env):
    """What FusedCollector does without a policy."""
    space = env.action_space
    if isinstance(space, gymnasium.spaces.Discrete):
        return lambda obs, u: ((u * int(space.n)).long(), 0 * u)
    half = float((space.high - space.low).max()) / 2
    return lambda obs, noise: (noise * half, 0 * noise.flatten(1).sum(1))


def as_numpy(result):
    return {name: copy(x) for part in result for name, x in part._asdict().items() if x is not None}


# ---- random numbers


def test_the_philox_of_these_tests_is_philox():
    """Known answers from Random123's kat_vectors."""
    ones = 0xFFFFFFFF
    pi = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
    for counter, key, expected in (
        ((0, 0, 0, 0), 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ones,) * 4, ones << 32 | ones, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (pi, 0x299F31D0 << 32 | 0xA4093822, (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
    ):
        assert tuple(int(word) for word in philox(counter, key)) == expected


KERNEL = """@triton.jit
def draw(key_ptr, step_ptr, u_ptr, n_ptr, B, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    env = tl.arange(0, BLOCK)
    key, step = tl.load(key_ptr), tl.load(step_ptr)
    a, b, c, d, e = library.uniforms(key, env, step, GROUP)
    x, y = library.normals(a, e)
    tl.store(u_ptr + env, a)
    tl.store(u_ptr + BLOCK + env, b)
    tl.store(u_ptr + 2 * BLOCK + env, c)
    tl.store(u_ptr + 3 * BLOCK + env, d)
    tl.store(u_ptr + 4 * BLOCK + env, e)
    tl.store(n_ptr + env, x)
    tl.store(n_ptr + BLOCK + env, y)
"""


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("key", "step", "group"),
    [(0, 0, 0), (5, 7, 3), (-1, 2**32 + 3, 0), (-(2**63) + 12345, 2**40 - 1, 1), (2**62 + 2**31, 2**31, 2)],
)
def test_uniforms_and_normals_of_a_kernel(key, step, group, device):
    kernel = build.load("test: draws", [KERNEL]).draw
    u, n = torch.zeros(5, 64, device=device), torch.zeros(2, 64, device=device)
    arrays = (torch.tensor([x], dtype=torch.int64, device=device) for x in (key, step))
    kernel[(1,)](*arrays, u, n, 64, GROUP=group, BLOCK=64)
    expected = np.stack(uniforms(key & (2**64 - 1), np.arange(64), step, group))
    np.testing.assert_array_equal(copy(u), expected)
    assert (expected < 1).all() and len(np.unique(expected)) == expected.size
    radius = np.sqrt(-2 * np.log(1 - expected[0].astype(np.float64)))
    angle = 2 * np.pi * expected[4].astype(np.float64)
    np.testing.assert_allclose(copy(n), [radius * np.cos(angle), radius * np.sin(angle)], *rounding(device))


# ---- against the Collector, on the same draws


def assert_alike(got, expected, rtol, atol):
    """Two rollouts with their totals: flags and integers to the last bit, floats closely."""
    assert got.keys() == expected.keys()
    for name, a in got.items():
        b = expected[name]
        assert (a.shape, a.dtype) == (b.shape, b.dtype), name
        if name in ("length_sum", "count") or a.dtype != np.float32:
            np.testing.assert_array_equal(a, b, err_msg=name)
        else:
            np.testing.assert_allclose(a, b, rtol=rtol, atol=atol, err_msg=name)


def assert_same_carry(collector, reference, rtol, atol):
    *_, elapsed, done = (copy(x) for x in (*collector.carry.state, *collector.carry[1:]))
    *_, elapsed_too, done_too = (copy(x) for x in (*reference.carry.state, *reference.carry[1:]))
    np.testing.assert_array_equal(elapsed, elapsed_too)
    np.testing.assert_array_equal(done, done_too)
    for name, leaf in collector.carry.state._asdict().items():
        np.testing.assert_allclose(copy(leaf), copy(getattr(reference.carry.state, name)), rtol, atol, err_msg=name)
    np.testing.assert_allclose(copy(collector.return_B), copy(reference.return_B), rtol, atol)


def check_equality(env, B, T, policy, collects=2):
    """Two rollouts in a row, and after a reset a third."""
    rtol, atol = rounding("cpu")
    collector = make_fused(env, B, T, policy, seed=3)
    act, value = (random_policy(env), None) if policy is None else (policy.act, policy.value)
    reference = Told(collector, act, value)
    ended = 0
    for i in range(collects):
        if i == 2:
            before = [copy(leaf) for leaf in collector.carry.state]
            collector.reset()
            assert (copy(collector.carry.elapsed_B) == 0).all()
            assert (copy(collector.return_B) == 0).all()
            assert differ(before, [copy(leaf) for leaf in collector.carry.state])
            reference.follow(collector)
        got = as_numpy(collector.collect())
        expected = as_numpy(reference.collect_as(collector))
        assert_alike(got, expected, rtol, atol)
        assert_same_carry(collector, reference, rtol, atol)
        assert copy(collector.counter) == (i + 1 if i < 2 else i - 1) * T  # `reset` begins anew
        ended += got["count"]
    assert ended >= collects * B * (T // env.max_episode_steps)


# B of neither a whole block nor less than one; Acrobot takes ten times as many operations as others.
CASES = [(name, 5, 6 if name == "Acrobot-v1" else 12) for name in (*ENVIRONMENTS, Wander, Aim)]


@interpreted
@pytest.mark.parametrize(("name", "B", "T"), [*CASES, ("CartPole-v1", 21, 12), (Wander, 21, 5)])
def test_a_rollout_is_the_collectors_on_the_same_draws(name, B, T):
    env = make_env(name, max_episode_steps=5 if T > 6 else 4)
    check_equality(env, B, T, make_policy(env), collects=3 if name == "MountainCar-v0" else 2)


@interpreted
@pytest.mark.parametrize("name", ["MountainCar-v0", Aim, Match])
def test_random_actions_are_the_collectors_on_the_same_draws(name):
    env = make_env(name, max_episode_steps=3)
    check_equality(env, 5, 4, None, collects=3)


@interpreted
def test_the_limit_may_be_missing_and_parameters_count():
    env = make_env("CartPole-v1", max_episode_steps=-1, low=0.15, high=0.25, sutton_barto_reward=True)
    policy = make_policy(env)
    collector = make_fused(env, 5, 6, policy)
    reference = Told(collector, policy.act, policy.value)
    got, expected = as_numpy(collector.collect()), as_numpy(reference.collect_as(collector))
    assert_alike(got, expected, 1e-5, 1e-5)
    assert got["terminated_TB"].any() and not got["truncated_TB"].any()
    assert set(np.unique(got["reward_TB"])) == {-1, 0}


@pytest.mark.parametrize("device", DEVICES)
def test_every_function_has_its_form_in_a_kernel(device):
    """Against numpy, in which the environment is written: torch cannot mix its arrays with numpy's."""
    env, B, T = make_env(Sink), 16, 4
    collector = make_fused(env, B, T, None, device)
    carry = type(collector.carry)(
        env.definition.State(*(copy(leaf) for leaf in collector.carry.state)), *map(copy, collector.carry[1:])
    )
    got = as_numpy(collector.collect())
    noise, u = draws(env, collector.key.item() & (2**64 - 1), 0, T, B)
    np.testing.assert_allclose(got["action"], noise, *rounding(device))
    for t in range(T):
        action = np.clip(got["action"][t], -1, 1)  # the space's bounds; its own, so that nothing drifts apart
        step = env.step(np, carry, action, u[t], SAME_STEP)
        for name, expected in {"reward_TB": step.reward_B, "final_obs": step.final_obs}.items():
            np.testing.assert_allclose(got[name][t], expected, rtol=1e-4, atol=1e-4, err_msg=f"{name} {t}")
        np.testing.assert_array_equal(got["terminated_TB"][t], step.terminated_B)
        np.testing.assert_array_equal(got["truncated_TB"][t], step.truncated_B)
        carry = step.carry
    for leaf, expected in zip(collector.carry.state, carry.state):
        np.testing.assert_allclose(copy(leaf), expected, rtol=1e-4, atol=1e-4)


# How many steps agree closely, and which share of the whole rollout agrees to a hundredth. Rounding, 1e-7, grows along
# a trajectory: by e^4 a second in CartPole until it falls, by about e a second in Pendulum (0.05 s a step) and in
# Acrobot (0.2 s a step). A draw next to a probability (one in a million) makes another action, and from there on
# another trajectory. In the interpreter the shares are 0.9928 for Acrobot, 0.9997 for Pendulum, and 1.
GPU_CASES = {
    "Acrobot-v1": (20, 0.9),
    "CartPole-v1": (20, 0.99),
    "MountainCar-v0": (40, 0.99),
    "MountainCarContinuous-v0": (40, 0.99),
    "Pendulum-v1": (20, 0.97),
    Wander: (220, 0.99),
    Aim: (220, 0.99),
}


def check_long_equality(name, B=1000, T=220, device="cuda"):
    """As far as the first whole episode."""
    close, share = GPU_CASES[name]
    env = make_env(name, max_episode_steps=200)
    policy = make_policy(env, device=device)
    collector = make_fused(env, B, T, policy, device)
    reference = Told(collector, policy.act, policy.value)
    got, expected = as_numpy(collector.collect()), as_numpy(reference.collect_as(collector))
    discrete = [key for key in ("terminated_TB", "truncated_TB", "action") if got[key].dtype != np.float32]
    alike = np.stack([(got[key] == expected[key])[:close].all(axis=0) for key in discrete]).all(axis=0)
    assert alike.mean() >= 0.995, f"{(~alike).sum()} of {B} took another action in the first {close} steps"
    for key in ("obs", "action", "log_prob_TB", "value_TB", "reward_TB", "final_obs", "final_value_TB"):
        a, b = got[key][:close][:, alike], expected[key][:close][:, alike]
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3, err_msg=key)
    axes = tuple(range(2, got["obs"].ndim))
    apart = np.abs(got["obs"] - expected["obs"]).max(axis=axes)
    print(name, "share within a hundredth:", (apart < 0.01).mean(), "strictly alike:", alike.mean())
    assert (apart < 0.01).mean() >= share
    assert got["count"] >= 0.9 * B
    for key in ("count", "length_sum", "return_sum"):
        assert got[key] == pytest.approx(expected[key], rel=0.05), key


@pytest.mark.gpu
@pytest.mark.parametrize("name", GPU_CASES)
def test_long_rollouts_are_the_collectors_on_the_same_draws(name):
    check_long_equality(name)


# ---- networks


def exact_networks(policy, rollout):
    """Log-probabilities of the actions taken and values of everything seen, in float64 by the module."""
    policy = deepcopy(policy).double()
    obs, final_obs, action = rollout.obs.double(), rollout.final_obs.double(), rollout.action
    action = action if action.dtype == torch.int64 else action.double()
    parameters = policy.actor(policy.normalized(obs))
    log_prob = policy.distribution.log_prob(parameters.flatten(0, 1), action.flatten(0, 1)).reshape(obs.shape[:2])
    return {"log_prob_TB": log_prob, "value_TB": policy.value(obs), "final_value_TB": policy.value(final_obs)}


NETWORKS = list(zip([(), (8,), (64, 64), (24, 40, 16)], ["tanh", "relu", "tanh", "silu"]))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["MountainCar-v0", "Pendulum-v1"])
@pytest.mark.parametrize(("hidden", "activation"), NETWORKS)
def test_networks_are_the_modules(hidden, activation, name, device):
    """On the observations that the rollout recorded, which have a mean and variance."""
    env = make_env(name, max_episode_steps=1)  # every row's final observation is valued apart
    policy = make_policy(env, hidden, activation, device)
    rollout, _ = make_fused(env, 3, 2, policy, device).collect()
    for field, expected in exact_networks(policy, rollout).items():
        np.testing.assert_allclose(copy(getattr(rollout, field)), copy(expected), *rounding(device), err_msg=field)
    assert rollout.value_TB.unique().numel() == 6


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["CartPole-v1", "Pendulum-v1"])
@pytest.mark.parametrize(("hidden", "activation"), NETWORKS[1:])
def test_ieee_networks_are_the_modules_on_many_rows(hidden, activation, name):
    check_precision(name, "ieee", hidden, activation, 1e-5, 1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["CartPole-v1", "Pendulum-v1"])
@pytest.mark.parametrize(("precision", "of_values", "of_log_probs"), [("tf32", 3e-3, 2e-2), ("bf16", 2e-2, 5e-2)])
def test_a_lower_precision_differs_by_its_rounding(precision, of_values, of_log_probs, name):
    """Measured on an H200: 4e-4 and 2.5e-3 of the values; 3e-4 and 1.3e-3 of most log-probabilities, in the worst of
    eight million rows 1.5e-2."""
    check_precision(name, precision, (64, 64), "tanh", of_values, of_log_probs)


def check_precision(name, precision, hidden, activation, of_values, of_log_probs, B=1024, T=32, device="cuda"):
    env = make_env(name, max_episode_steps=20)
    policy = PPO.build_policy(PPOConfig(env=name, hidden=hidden, activation=activation, device=device), env)
    policy = policy.requires_grad_(False)
    rollout, _ = make_fused(env, B, T, policy, device, precision=precision).collect()
    exact = exact_networks(policy, rollout)
    for field in ("value_TB", "final_value_TB"):
        error = torch.linalg.norm(getattr(rollout, field) - exact[field]) / torch.linalg.norm(exact[field])
        assert error < of_values, field
    if isinstance(env.action_space, gymnasium.spaces.Discrete):
        assert (rollout.log_prob_TB - exact["log_prob_TB"]).abs().max() < of_log_probs
    else:  # of the normal that was drawn, which the rounded mean is part of
        assert (rollout.log_prob_TB - exact["log_prob_TB"]).abs().max() < 5 * of_log_probs


@pytest.mark.parametrize("device", DEVICES)
def test_weights_updated_in_place_take_effect(device):
    env = make_env("CartPole-v1", max_episode_steps=5)
    policy = make_policy(env, device=device)
    collector = make_fused(env, 5, 2, policy, device)
    collector.collect()
    with torch.no_grad():
        for tensor in (*policy.parameters(), policy.obs_mean, policy.obs_var):
            tensor.mul_(1.7)
    rollout, _ = collector.collect()
    for field, expected in exact_networks(policy, rollout).items():
        np.testing.assert_allclose(copy(getattr(rollout, field)), copy(expected), *rounding(device), err_msg=field)


# ---- fresh numbers, and the same ones


@pytest.mark.parametrize("device", DEVICES)
def test_every_collect_draws_anew_and_a_seed_repeats_it(device):
    env = make_env("CartPole-v1", max_episode_steps=2)  # starts are drawn, too
    policy = make_policy(env, device=device)

    def two(seed):
        collector = make_fused(env, 5, 3, policy, device, seed=seed)
        return [as_numpy(collector.collect())["obs"] for _ in range(2)]

    first, again, other = two(0), two(0), two(1)
    for a, b in zip(first, again):
        np.testing.assert_array_equal(a, b)
    starts = [x[1 + i % 2] for i, x in enumerate(first)] + [x[1 + i % 2] for i, x in enumerate(other)]
    assert len(np.unique(np.concatenate(starts)[:, 0])) == 4 * 5


@interpreted
def test_the_buffers_stay_where_they_are():
    env = make_env("CartPole-v1", max_episode_steps=2)
    collector = make_fused(env, 5, 3, make_policy(env))
    tensors = [*collector.rollout, *torch.utils._pytree.tree_leaves(collector.state())]
    before = [x.data_ptr() for x in tensors]
    for _ in range(2):
        collector.collect()
        collector.reset()
    tensors = [*collector.rollout, *torch.utils._pytree.tree_leaves(collector.state())]
    assert [x.data_ptr() for x in tensors] == before


def captured(env, B, T, seed=0):
    policy = make_policy(env, device="cuda")
    collector = make_fused(env, B, T, policy, "cuda", seed)
    graph = capture(collector.collect, state=collector.state())
    return collector, graph


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["CartPole-v1", "Pendulum-v1"])
def test_replays_equal_direct_calls_to_the_last_bit(name):
    env = make_env(name, max_episode_steps=20)
    direct = make_fused(env, 100, 8, make_policy(env, device="cuda"), "cuda")
    collector, graph = captured(env, 100, 8)
    runs = []
    for i in range(10):
        if i == 4:
            for one in (direct, collector):
                one.reset()
        if i in (6, 8):  # a seed set after the capture takes effect at the next reset, and repeats what it gave
            for one in (direct, collector):
                one.generator.manual_seed(123)
                one.reset()
        got, expected = as_numpy(graph.replay()), as_numpy(direct.collect())
        for field in expected:
            np.testing.assert_array_equal(got[field], expected[field], err_msg=f"{field} {i}")
        if i in (6, 8):
            runs.append(got["obs"].copy())
    np.testing.assert_array_equal(*runs)


@pytest.mark.gpu
def test_a_graph_launched_without_torch_draws_fresh_numbers():
    """The count of steps is on the device."""
    from cuda.bindings import runtime

    env = make_env("CartPole-v1", max_episode_steps=1)  # every step shows a fresh start
    collector, graph = captured(env, 64, 4)
    graph.replay()
    torch.cuda.synchronize()
    executable, stream = graph._graph.raw_cuda_graph_exec(), torch.cuda.current_stream().cuda_stream
    starts, actions = [copy(collector.rollout.obs[1:])], []
    for _ in range(3):
        (error,) = runtime.cudaGraphLaunch(executable, stream)
        assert error == runtime.cudaError_t.cudaSuccess
        torch.cuda.synchronize()
        starts.append(copy(collector.rollout.obs[1:]))
        actions.append(copy(collector.rollout.action))
    assert len(np.unique(np.concatenate(starts)[..., 0])) > 0.99 * 4 * 3 * 64
    assert all((a != b).any() for a, b in itertools.pairwise(actions))
    assert copy(collector.counter) == 4 * 4


# ---- distribution


def estimates(rollouts, T):
    """Mean and standard error of actions, of returns and of lengths of the episodes that began in the rollouts."""
    action, reward, done = (
        np.concatenate([copy(part) for part in parts]).astype(np.float64).reshape(T * len(rollouts), -1)
        for parts in zip(*((r[0], r[1], r[2]) for r in rollouts))
    )
    returns, lengths, actions = [], [], action.reshape(len(action), -1).mean(axis=0)
    for b in range(done.shape[1]):
        ends = np.flatnonzero(done[:, b])
        for start, end in itertools.pairwise([-1, *ends]):
            returns.append(reward[start + 1 : end + 1, b].sum())
            lengths.append(end - start)
    return {
        name: (np.mean(x), np.std(x) / math.sqrt(len(x)))
        for name, x in (("action", actions), ("return", returns), ("length", lengths))
    }


def parts_of(collector, collects):
    """Clones of (action, reward, done)."""
    parts = []
    for _ in range(collects):
        r, _ = collector.collect()
        parts.append((r.action.clone(), r.reward_TB.clone(), r.terminated_TB | r.truncated_TB))
    return parts


def check_distribution(name, limit, B, T, collects, device, precision="ieee"):
    """Five standard errors of the difference: with fixed seeds it holds or it does not. An environment's actions are
    correlated, so that an environment's mean counts as one."""
    env = make_env(name, max_episode_steps=limit)
    policy = make_policy(env, (), device=device)
    got = estimates(parts_of(make_fused(env, B, T, policy, device, precision=precision), collects), T)
    reference = Collector(env, policy.act, policy.value, B, T, torch.Generator(device).manual_seed(77))
    expected = estimates(parts_of(reference, collects), T)
    for what in got:
        (a, error_a), (b, error_b) = got[what], expected[what]
        print(name, what, a, b, math.hypot(error_a, error_b))
        assert abs(a - b) <= 5 * math.hypot(error_a, error_b) + 1e-12, what


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["CartPole-v1", "Pendulum-v1"])
def test_a_million_steps_are_distributed_as_the_collectors(name):
    check_distribution(name, None, 4096, 256, 2, "cuda")


@interpreted
def test_two_thousand_steps_are_distributed_as_the_collectors(monkeypatch):
    """In one block, for which the interpreter takes as long as for a smaller one."""
    in_one_block(monkeypatch, 64)
    check_distribution("CartPole-v1", 12, 64, 32, 1, "cpu")


def in_one_block(monkeypatch, size):
    import triton

    config = triton.Config({"BLOCK": size})
    monkeypatch.setattr(build, "tuned", lambda kernel, _: triton.autotune([config], key=["B"])(kernel))
    monkeypatch.setattr(fused, "MOST_ROWS", size)
    monkeypatch.setattr(fused, "_kernels", fused._kernels.__wrapped__)


# ---- generated text


def test_the_text_of_cartpoles_kernels():
    """So that a change of the generator shows as a change of what it writes."""
    for path, text in cartpole_sources().items():
        assert text == path.read_text(encoding="utf-8"), "if it is meant, `python tests/fused_tools.py` writes it anew"


def test_the_text_is_the_same_in_every_process_and_compiles():
    sources = cartpole_sources()
    assert sources == cartpole_sources()
    for path, text in sources.items():
        compile(text, path.name, "exec")


@pytest.mark.parametrize("place", ["file", "missing"])
def test_a_source_that_cannot_be_written_is_one_line(place, tmp_path, monkeypatch):
    """A file in the folder's place; a file system that takes no files, as /proc."""
    folder = tmp_path / "cache" if place == "file" else "/proc/1/nothing"
    if place == "file":
        folder.write_text("in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    with pytest.raises(UsageError, match=r"cannot write a kernel's source to .*; set XDG_CACHE_HOME") as error:
        build.load("test: draws", [KERNEL])
    assert "\n" not in str(error.value)


def test_a_source_is_written_once(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    modules = [build.load("Some-v1: draws", [KERNEL]) for _ in range(2)]
    (path,) = (p for p in (tmp_path / "rlgraph").iterdir() if p.name != "__pycache__")  # nothing else is left
    assert path.name.startswith("some_v1_") and [module.__file__ for module in modules] == [str(path)] * 2
