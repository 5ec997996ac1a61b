"""The unit of an environment's actions is a matter of taste: SAC learns the same of a task in any of them."""

import numpy as np
import pytest
from agent_tools import BACKENDS, make, metrics_of, stored
from diagnostics import Diagnostic
from gymnasium.spaces import Box

from rlgraph.agents.sac.config import SACConfig
from rlgraph.environment import build

pytestmark = pytest.mark.usefixtures("quick_compilation")

CONFIG = SACConfig(
    num_envs=8,
    num_steps=2,
    num_updates=8,
    minibatch_size=16,
    replay_capacity=256,
    learning_starts=32,
    learning_rate=3e-3,
    anneal_lr=False,
    gamma=0.9,
    hidden=(8,),
    total_steps=10**6,
    device="cpu",
)
BOUNDS = {
    "a tenth": ((-0.1, -0.1), (0.1, 0.1)),
    "each its own": ((-0.02, -5), (0.02, 5)),
    "off the middle": ((1, -3), (2, 9)),
}


def aim(low, high):
    """Minus the squared distance of two actions, as shares of their ranges, from x / 2 and -x / 2; four steps."""
    low, high = np.array(low, np.float32), np.array(high, np.float32)

    class Aim(Diagnostic):
        steps = 4

        @staticmethod
        def action_space(p):
            return Box(low, high)

        @staticmethod
        def reward(xp, s, action):
            a, b = ((action[:, i] - float(low[i])) / float((high - low)[i] / 2) - 1 for i in range(2))
            return -((a - s.x / 2) ** 2) - (b + s.x / 2) ** 2

    return build(Aim)


def trained(backend, low, high, iterations=30):
    """Metrics by name, [iterations] each, and what the run holds afterwards."""
    agent = make("sac", CONFIG, backend, aim(low, high))
    rows = [agent.iterate().get()[0] for _ in range(iterations)]
    return dict(zip(metrics_of(agent), np.array(rows).T)), stored(agent)


@pytest.fixture(scope="module", params=BACKENDS)
def plain(request):
    return request.param, *trained(request.param, (-1, -1), (1, 1))


@pytest.mark.parametrize("bounds", BOUNDS)
def test_a_task_in_other_units_is_learnt_the_same(plain, bounds):
    """Over 200 updates from the same seed: losses, values, temperature and weights; the entropy moves by the unit."""
    backend, expected, weights = plain
    low, high = BOUNDS[bounds]
    got, rescaled = trained(backend, low, high)
    assert expected["temperature"][-1] < 0.8  # it has moved, and where to depends on the target
    log_volume = np.log(np.subtract(high, low) / 2).sum()
    got["entropy"] = got["entropy"] - log_volume
    for name, values in expected.items():
        np.testing.assert_allclose(got[name], values, rtol=2e-3, atol=2e-3, err_msg=name)
    for name, array in weights.items():
        if name.startswith(("policy", "learner", "critics", "target_critics", "log_temperature")):
            np.testing.assert_allclose(rescaled[name], array, rtol=2e-3, atol=2e-3, err_msg=name)
