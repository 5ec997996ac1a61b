"""PPO in mode fused: that it trains, what it refuses in a line, and names and types that are awkward in a kernel."""

import dataclasses
import importlib.util
from collections import namedtuple

import gymnasium
import numpy as np
import pytest
import torch
from agent_tools import copy, differ, everything, iterate
from diagnostics import Match
from fused_tools import (
    DEVICES,
    KERNEL_MARKS,
    SORTED_LINE,
    Sorted,
    interpreted,
    make_env,
    make_policy,
)

import rlgraph
from rlgraph.agents.ppo.config import DEFAULTS, PPOConfig
from rlgraph.agents.ppo.torch import PPO
from rlgraph.cli.main import main
from rlgraph.environment import SAME_STEP
from rlgraph.environment import build as build_env
from rlgraph.errors import UsageError
from rlgraph.kernels import build
from rlgraph.kernels.rollouts import FusedCollector, why_not

pytest.importorskip("triton", reason="needs the package triton, which is for Linux only")

pytestmark = KERNEL_MARKS
TINY = PPOConfig(
    device="cpu", mode="fused", num_envs=4, num_steps=4, num_minibatches=2, num_epochs=1, hidden=(8,), eval_episodes=2
)


@interpreted
def test_an_iteration_of_ppo_trains(tmp_path):
    """Also every statistic that a kernel reads."""
    config = dataclasses.replace(TINY, normalize_obs=True, normalize_reward=True)
    agent = PPO(config, make_env("CartPole-v1", max_episode_steps=3))
    assert agent.mode == "fused"
    assert isinstance(agent.collector, FusedCollector)
    assert agent.execution() == "rollouts and updates in kernels, no CUDA graph on cpu: operation by operation"
    before, counted = agent.arrays(), copy(agent.collector.counter)
    assert counted == 0  # making the graph has left no trace
    metrics = iterate(agent)
    assert np.isfinite(list(metrics.values())).all()
    assert metrics["episodes"] == 4 and metrics["episode_length_sum"] == 4 * 3
    for name, array in agent.arrays().items():
        assert (array != before[name]).any(), name
    rollout = agent.collector.rollout
    assert copy(agent.collector.counter) == 4 and (copy(rollout.obs) != 0).any()
    # The next rollout begins where the last ended, with the new weights; and a checkpoint of here goes on as it does.
    arrays = agent.state_arrays()
    metrics = iterate(agent)
    again = PPO(config, agent.env)
    again.load_state(arrays)
    assert iterate(again) == metrics
    for a, b in zip(everything(agent), everything(again), strict=True):
        np.testing.assert_array_equal(a, b)


def cli_error(capsys, *options):
    """What the command says, in one line."""
    assert main(["train", *options, "--device=cpu", "--mode=fused", "--num-envs=4", "--run-dir=/nowhere"]) == 2
    out, error = capsys.readouterr()
    assert (out, error.count("\n"), error[:9]) == ("", 1, "rlgraph: "), (out, error)
    return error


@interpreted
def test_what_cannot_be_fused_is_one_line(capsys, monkeypatch):
    monkeypatch.setitem(rlgraph.ENVIRONMENTS, "Sorted-v0", Sorted)
    error = cli_error(capsys, "dqn")
    assert "mode fused needs an actor-critic whose actor is an MLP, which DQN has not; use mode graph" in error
    error = cli_error(capsys, "ppo", "--hidden", "256")
    assert "a kernel holds hidden layers of up to 128 units, not 256; use mode graph" in error
    error = cli_error(capsys, "ppo", "--env=Sorted-v0")
    assert f"environment 'Sorted-v0' cannot be fused: fused_tools.py, line {SORTED_LINE}: xp.sort has no form" in error


def test_without_a_gpu_or_triton_it_is_one_line(capsys, monkeypatch):
    monkeypatch.setattr(build, "interpreted", lambda: False)
    assert "mode fused needs an NVIDIA GPU; use another" in cli_error(capsys, "ppo")
    with pytest.raises(UsageError, match="needs an NVIDIA GPU"):
        rlgraph.make_vec("CartPole-v1", device="cpu", mode="fused")
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "triton" else find(name, *rest)
    )
    assert "mode fused needs the package triton" in cli_error(capsys, "ppo")
    with pytest.raises(UsageError, match="needs the package triton"):
        rlgraph.make_vec("CartPole-v1", device="cpu", mode="fused")


@interpreted
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"activation": "gelu"}, "a kernel has no activation 'gelu'; it has tanh, relu, silu"),
        ({"log_std": torch.zeros(2)}, "logits for a Discrete action space"),
    ],
)
def test_policies_that_have_no_form_are_refused(change, message):
    env = make_env("CartPole-v1")
    policy = make_policy(env).for_kernels()._replace(**change)
    assert message in why_not(env, policy, torch.device("cpu"))
    with pytest.raises(UsageError, match=message):
        FusedCollector(env, policy, 3, 2, torch.Generator(), "ieee")


@interpreted
def test_many_outputs_are_refused():
    class Many(Match):
        @staticmethod
        def action_space(p):
            return gymnasium.spaces.Discrete(33)

    env = build_env(Many)
    assert "chooses among up to 32 actions, not 33" in why_not(env, make_policy(env).for_kernels(), torch.device("cpu"))


@interpreted
@pytest.mark.parametrize("name", ["step", "action", "reward", "row", "obs", "ends", "seen_0", "done", "counter"])
def test_a_leaf_with_the_name_of_something_else_is_refused(name):
    """It would be overwritten, without a word."""
    state = namedtuple("State", [name, "t"])

    class Named(Match):
        State = state

        @staticmethod
        def reset(xp, u, p):
            return state(u[:, 0], 0 * u[:, 0])

        @staticmethod
        def step(xp, s, action, u, p):
            return state(s[0], s.t + 1), s.t, s.t > 3

        @staticmethod
        def observe(xp, s, p):
            return xp.stack([s[0], s.t], axis=-1)

    env = build_env(Named)
    assert f"'{name}'" in why_not(env, make_policy(env).for_kernels(), torch.device("cpu"))
    Named.State = state = namedtuple("State", ["name", "t"])
    env = build_env(Named)
    assert why_not(env, make_policy(env).for_kernels(), torch.device("cpu")) is None


class Awkward(Match):
    """Names beyond ASCII and of Python's own, an int64 leaf of actions, small integers clipped by constants."""

    State = namedtuple("State", ["θ", "ω", "last", "few"])

    @staticmethod
    def observation_space(p):
        return gymnasium.spaces.Box(-np.inf, np.inf, (4,), np.float32)

    @staticmethod
    def action_space(p):
        return gymnasium.spaces.Discrete(3, start=3)

    @classmethod
    def reset(cls, xp, u, p):
        zero = xp.zeros_like(u[:, 0])
        return cls.State(zero + 1, zero + 2, xp.astype(zero, xp.int64), xp.astype(zero, xp.int8))

    @classmethod
    def step(cls, xp, s, action, u, p):
        θ = s.θ + 0.1 * s.ω
        ω = s.ω - 0.1 * s.θ
        range = xp.where(xp.isfinite(θ), θ, 0 * θ)  # noqa: A001
        few = xp.clip(xp.astype(s.few + xp.astype(action, xp.int8), xp.int8), -4, 5)
        return cls.State(θ, ω, xp.astype(action, xp.int64), few), xp.clip(range, 1e-40, 3.4028234e38), θ > 1.6

    @classmethod
    def observe(cls, xp, s, p):
        return xp.stack([s.θ, s.ω, xp.astype(s.last, xp.float32), xp.astype(s.few, xp.float32)], axis=-1)


@pytest.mark.parametrize("device", DEVICES)
def test_awkward_names_and_types_are_what_they_are_in_eager_mode(device):
    env = build_env(Awkward)
    generator = torch.Generator(device).manual_seed(0)
    fused_env = FusedCollector(env, make_policy(env).to(device).for_kernels(), 5, 12, generator, "ieee")
    steps, _ = fused_env.collect()
    carry, obs = env.reset(np, np.zeros((5, 1), np.float32))
    for t in range(12):
        np.testing.assert_allclose(steps.obs[t].numpy(force=True), obs, rtol=1e-5)
        step = env.step(np, carry, steps.action[t].numpy(force=True) + 3, np.zeros((5, 1), np.float32), SAME_STEP)
        np.testing.assert_allclose(steps.reward_TB[t].numpy(force=True), step.reward_B, rtol=1e-5)
        np.testing.assert_array_equal(steps.terminated_TB[t].numpy(force=True), step.terminated_B)
        carry, obs = step.carry, step.obs
    assert steps.terminated_TB.any()


@pytest.mark.parametrize("device", DEVICES)
def test_an_infinite_observation_does_not_depend_on_padding(device):
    """Weights beyond a width that is no power of two are zeros, and infinity times zero is NaN."""

    class Endless(Match):
        @staticmethod
        def observe(xp, s, p):
            finite = 0 * Match.observe(xp, s, p)[:, 1]
            return xp.stack([xp.full_like(finite, xp.inf), finite], axis=-1)

    env = build_env(Endless)
    policy = make_policy(env, hidden=(6, 6)).to(device)
    steps, _ = FusedCollector(env, policy.for_kernels(), 3, 2, torch.Generator(device), "ieee").collect()
    np.testing.assert_allclose(copy(steps.value_TB), copy(policy.value(steps.obs)), rtol=1e-5)
    assert torch.isfinite(steps.value_TB).all()


@pytest.mark.gpu
def test_ppo_says_how_it_runs():
    agent = PPO(dataclasses.replace(TINY, device="cuda", num_envs=64, num_steps=16), make_env("CartPole-v1"))
    iterate(agent)
    assert "rollouts and updates in kernels, one CUDA graph an iteration, replayed 1 times" in agent.execution()


@pytest.mark.gpu
def test_ppo_in_mode_fused_solves_cartpole():
    config = dataclasses.replace(DEFAULTS["CartPole-v1"], device="cuda", mode="fused")
    env = make_env("CartPole-v1")
    agent = PPO(config, env)
    for _ in range(config.num_iterations):
        agent.iterate()
    assert PPO.evaluate_policy(agent.policy, env, 100, seed=1).mean() >= 475


@pytest.mark.gpu
def test_ppo_in_mode_fused_repeats_itself():
    config = dataclasses.replace(TINY, device="cuda", num_envs=64, num_steps=16, hidden=(64, 64))

    def run(seed):
        agent = PPO(dataclasses.replace(config, seed=seed), make_env("CartPole-v1", max_episode_steps=50))
        metrics = [list(iterate(agent).values()) for _ in range(5)]
        return [np.array(metrics), *everything(agent)]

    first, again, other = run(0), run(0), run(1)
    for a, b in zip(first, again, strict=True):
        np.testing.assert_array_equal(a, b)
    assert differ(first, other)
