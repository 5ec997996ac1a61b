"""JAX's modes are the same agent: operation by operation, one XLA program, and with command buffers.

In one file, and of one size, because operation by operation JAX compiles each of hundreds of operations for each shape
that it meets, and then knows them: that is most of what these tests take.
"""

import jax
import numpy as np
import pytest
from agent_tools import (
    assert_close_after_one_iteration,
    assert_equal,
    assert_same_run,
    make,
    metrics_of,
    run,
    with_xlas_own_fusions,
)
from diagnostics import TwoSteps
from gymnasium.spaces import Box

from rlgraph.agents import AGENTS
from rlgraph.agents.dqn.config import DQNConfig
from rlgraph.agents.parts.count_jax import Count
from rlgraph.agents.ppo.config import PPOConfig
from rlgraph.agents.pqn.config import PQNConfig
from rlgraph.agents.sac.config import SACConfig
from rlgraph.environment import build
from rlgraph.runs.train import trainer_class

pytestmark = pytest.mark.usefixtures("quick_compilation")


class Continuous(TwoSteps):
    @staticmethod
    def action_space(p):
        return Box(-1, 1, (1,))


COMMON = {"num_envs": 4, "num_steps": 2, "hidden": (4,), "anneal_lr": True, "total_steps": 80, "device": "cpu"}
REPLAY = {"num_updates": 1, "minibatch_size": 4, "replay_capacity": 16, "learning_rate": 1e-3}
MINIBATCHES = {"num_epochs": 1, "num_minibatches": 2, "learning_rate": 0.01}
NORMALIZED = {"normalize_obs": True, "normalize_reward": True}
CONFIGS = {
    "dqn": DQNConfig(**COMMON, **REPLAY, learning_starts=1, n_step=2, dueling=True, target_tau=0.1, target_period=1),
    "ppo": PPOConfig(**COMMON, **MINIBATCHES, **NORMALIZED, clip_value=0.5, target_kl=0.05),
    "pqn": PQNConfig(**COMMON, **MINIBATCHES),
    "sac": SACConfig(**COMMON, **REPLAY, learning_starts=8, noise_correlation=0.0, normalize_obs=False),
}


def one_iteration(name, mode, **changes):
    """Metrics and everything after an iteration that learns."""
    env = build(Continuous if name == "sac" else TwoSteps)
    agent = make(name, CONFIGS[name], "jax", env, mode=mode, **changes)
    if name == "sac":  # which acts at random in its first
        agent.state = agent.state._replace(iteration=jax.device_put(Count.of(1), agent.device))
    metrics, after = run(agent, 1)
    learned = {"dqn": "updates", "ppo": "updates", "pqn": "grad_norm", "sac": "updates"}[name]
    assert metrics[0, metrics_of(agent).index(learned)] > 0
    return metrics, after


ATOL = {"sac": 1e-3}  # of metrics, where not as for the others


@pytest.mark.parametrize("name", AGENTS)
def test_jit_is_close_to_operation_by_operation(name):
    jit, graph, eager = (one_iteration(name, mode) for mode in ("jit", "graph", "eager"))
    assert_close_after_one_iteration(jit, eager, ATOL.get(name, 2e-4))
    assert_same_run(jit, graph)  # a CPU has no command buffers: the same program
    if trainer_class(name, "jax").fuses:
        assert_close_after_one_iteration(one_iteration(name, "fused"), jit)


def test_iterations_of_a_launch(quick_environment):
    with_xlas_own_fusions("test_modes_of_agents.check_iterations_of_a_launch()", quick_environment)


def check_iterations_of_a_launch():
    """Are those of as many launches, bit for bit. Of PPO: the loop around them is the same for every agent."""
    one, chained = (make("ppo", CONFIGS["ppo"], "jax", build(TwoSteps), iterations_per_launch=K) for K in (1, 2))
    assert "one XLA program for 2 iterations" in chained.execution()
    expected = [one.iterate().get()[0] for _ in range(4)]
    assert len({tuple(row) for row in expected}) == 4
    given = chained._numbers
    assert chained.iterate().get() == expected[:2]
    assert all(isinstance(x, jax.Array) and x.dtype.kind in "fiub" for x in given)  # keys would be slow to call with
    assert all(x.is_deleted() for x in given)  # donated, every one
    middle = chained.state_arrays()
    for _ in range(2):
        assert chained.iterate().get() == expected[2:]
        left, right = chained.state_arrays(), one.state_arrays()
        assert left.keys() == right.keys()
        assert_equal(left.values(), right.values())
        chained.load_state(middle)


@pytest.mark.gpu
def test_iterations_of_a_launch_on_a_gpu():
    """Inside a loop XLA may fuse otherwise, so the first is close, and later ones differ."""
    options = {"mode": "graph", "device": "cuda", "precision": "ieee"}
    one, chained = (
        make("ppo", CONFIGS["ppo"], "jax", build(TwoSteps), iterations_per_launch=K, **options) for K in (1, 4)
    )
    rows = [row for _ in range(3) for row in chained.iterate().get()]  # one command buffer may fail in a second run
    np.testing.assert_allclose(rows[0], one.iterate().get()[0], rtol=2e-3, atol=2e-4)
    assert np.isfinite(rows).all()
    assert len({tuple(row) for row in rows}) == 12


@pytest.mark.gpu
@pytest.mark.parametrize("name", AGENTS)
def test_modes_are_close_on_a_gpu(name):
    jit, graph, eager = (
        one_iteration(name, mode, device="cuda", precision="ieee") for mode in ("jit", "graph", "eager")
    )
    assert_close_after_one_iteration(graph, jit, ATOL.get(name, 2e-4))
    assert_close_after_one_iteration(eager, jit, ATOL.get(name, 2e-4))
    if trainer_class(name, "jax").fuses:
        assert_close_after_one_iteration(one_iteration(name, "fused", device="cuda", precision="ieee"), jit)
