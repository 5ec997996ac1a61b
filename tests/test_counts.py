"""Counts at the edge of what holds them: nothing wraps, and nothing that has no end comes to one."""

import array_api_compat.torch
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from agent_tools import BACKENDS, make
from diagnostics import OneStep, TwoSteps
from gymnasium.spaces import Box

from rlgraph.agents.dqn.config import DQNConfig
from rlgraph.agents.parts.count_jax import Count
from rlgraph.agents.ppo.config import PPOConfig
from rlgraph.agents.pqn.config import PQNConfig
from rlgraph.agents.sac.config import SACConfig
from rlgraph.environment import DISABLED, MOST_ELAPSED, NEXT_STEP, SAME_STEP, build

pytestmark = pytest.mark.usefixtures("quick_compilation", "own_kernel_cache", "quick_interpreter")
XP = {"numpy": np, "torch": array_api_compat.torch, "jax": jnp}


class Endless(OneStep):
    """It neither terminates nor has a limit."""

    MAX_EPISODE_STEPS, steps = None, np.inf


class EndlessPush(Endless):
    @staticmethod
    def action_space(p):
        return Box(-1, 1, (1,))


# ---- the steps of an episode


def stepped(env, xp, elapsed, autoreset):
    """Whether a step is the last, and the count after it, of two environments that have taken so many steps."""
    u = xp.full((2, 1), 0.5, dtype=xp.float32)
    carry, _ = env.reset(xp, u)
    carry = carry._replace(elapsed_B=xp.full((2,), elapsed, dtype=xp.int32))
    step = env.step(xp, carry, xp.full((2,), 0, dtype=xp.int32), u, autoreset)
    return np.asarray(step.truncated_B).tolist(), np.asarray(step.carry.elapsed_B).tolist()


@pytest.mark.parametrize("xp", XP)
@pytest.mark.parametrize("autoreset", [SAME_STEP, NEXT_STEP, DISABLED])
def test_an_episode_without_a_time_limit_is_never_cut_off(xp, autoreset):
    for elapsed in (0, 2**31 - 4, 2**31 - 3, 2**31 - 2):
        truncated, after = stepped(build(Endless), XP[xp], elapsed, autoreset)
        assert truncated == [False] * 2
        assert after == [min(elapsed + 1, MOST_ELAPSED)] * 2


@pytest.mark.parametrize("xp", XP)
def test_a_limit_as_large_as_a_count_can_be_holds(xp):
    env = build(Endless, max_episode_steps=2**31 - 1)
    assert stepped(env, XP[xp], 2**31 - 3, DISABLED) == ([False] * 2, [2**31 - 2] * 2)
    assert stepped(env, XP[xp], 2**31 - 2, DISABLED) == ([True] * 2, [2**31 - 1] * 2)
    assert stepped(env, XP[xp], 2**31 - 2, SAME_STEP) == ([True] * 2, [0] * 2)


class Ends(Endless):
    """It terminates after the step that is taken now, however long it has been going on."""

    steps = 0


def test_a_kernel_does_not_cut_it_off_either():
    pytest.importorskip("triton", reason="needs the package triton, which is for Linux only")
    from rlgraph.kernels.rollouts import FusedCollector

    for definition, lengths in ((Endless, 0), (Ends, 3 * (2**31 - 2))):
        collector = FusedCollector(build(definition), None, 3, 1, torch.Generator().manual_seed(0), "ieee")
        collector.carry.elapsed_B.fill_(2**31 - 3)
        for _ in range(2):
            rollout, totals = collector.collect()
            assert not rollout.truncated_TB.any()
            assert totals.length_sum.item() == np.float32(lengths)
            if definition is Ends:
                break
        assert collector.carry.elapsed_B.tolist() == [0 if definition is Ends else MOST_ELAPSED] * 3


# ---- iterations

SMALL = {"num_envs": 1, "num_steps": 1, "hidden": (2,), "device": "cpu"}
OFF_POLICY = {"num_updates": 1, "minibatch_size": 2, "replay_capacity": 8, "learning_starts": 1}
CONFIGS = {
    "dqn": DQNConfig(**SMALL, **OFF_POLICY, n_step=1),
    "pqn": PQNConfig(**SMALL, num_epochs=1, num_minibatches=1),
    "ppo": PPOConfig(**SMALL, num_epochs=1, num_minibatches=1, normalize_advantage=False),
    "sac": SACConfig(**SMALL, **OFF_POLICY),
}
HALF = 2**31 + 5  # iterations, of twice as many


def at(number, name):
    """Arrays of a checkpoint that put the count of iterations there."""
    words = {"iteration/low": np.uint32(number % 2**32), "iteration/high": np.uint32(number // 2**32)}
    return {"iteration": np.int64(number)} if name == "torch" else words


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("agent", CONFIGS)
def test_iterations_are_counted_beyond_32_bits(agent, backend):
    """The learning rate falls as it should on both sides of 2^31 and of 2^32."""
    total = 2 * HALF
    run = make(agent, CONFIGS[agent], backend, build(EndlessPush if agent == "sac" else TwoSteps), total_steps=total)
    column = {"dqn": 3, "pqn": 3, "ppo": 6, "sac": 5}[agent]
    for start in (2**31 - 1, 2**32 - 1):
        run.load_state(run.state_arrays() | {k: np.asarray(v) for k, v in at(start, backend).items()})
        for done in (start, start + 1):
            rate = run.iterate().get()[0][column]
            assert rate == pytest.approx(run.config.learning_rate * (1 - done / total), rel=1e-5, abs=1e-9)
        after = run.state_arrays()
        assert {k: int(after[k]) for k in at(0, backend)} == {k: int(v) for k, v in at(start + 2, backend).items()}


def test_a_count_in_two_words():
    numbers = (0, 1, 7, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 5 * 2**32 - 1, 2**63)
    for number in numbers:
        count = Count.of(number)
        after = jax.jit(Count.next)(count)
        assert int(after.high) * 2**32 + int(after.low) == number + 1
        assert float(count.share(10**12)) == pytest.approx(number / 10**12, rel=1e-6)
        for limit in (*numbers, 10**25):
            assert bool(count.below(limit)) == (number < limit)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_target_network_keeps_its_period_where_the_count_of_updates_ends(backend):
    """Every third update; the edge is that of an int32, which torch's count is not."""
    config = CONFIGS["dqn"]
    run = make("dqn", config, backend, build(TwoSteps), target_period=3, target_tau=1.0, total_steps=10**6)
    run.iterate()
    edge = (2**31 - 1) // 3 * 3
    dtype = run.state_arrays()["updates"].dtype
    run.load_state(run.state_arrays() | {"updates": np.asarray(edge - 1, dtype)})
    moved, counts = [], []
    for _ in range(5):
        before = run.state_arrays()
        run.iterate()
        after = run.state_arrays()
        moved.append(any((before[k] != after[k]).any() for k in after if k.startswith("target")))
        counts.append(int(after["updates"]) % 3)
    assert moved == [True, False, False, True, False]
    assert counts == [0, 1, 2, 0, 1]
