"""JAX's modes are the same agent: operation by operation, one XLA program, and with command buffers.

In one file, and of one size, because operation by operation JAX compiles each of hundreds of operations for each shape
that it meets, and then knows them: that is most of what these tests take.
"""

import jax
import jax.numpy as jnp
import pytest
from agent_tools import assert_close_after_one_iteration, assert_same_run, make, metrics_of, run
from diagnostics import TwoSteps
from gymnasium.spaces import Box

from rlgraph.agents import AGENTS
from rlgraph.agents.dqn import DQNConfig
from rlgraph.agents.ppo import PPOConfig
from rlgraph.agents.pqn import PQNConfig
from rlgraph.agents.sac import SACConfig
from rlgraph.environment import build
from rlgraph.train import trainer_class

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
        agent.state = agent.state._replace(iteration=jax.device_put(jnp.float32(1), agent.device))
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
