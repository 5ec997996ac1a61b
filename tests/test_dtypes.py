"""An environment's spaces may have any dtype: agents compute in float32 all the same."""

import dataclasses

import numpy as np
import pytest
from diagnostics import OneStep
from gymnasium.spaces import Box

from rlgraph.environment import build
from rlgraph.train import config_class, trainer_class

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


def train(agent, definition, **changes):
    """Metrics of the second of two iterations, and the policy's weights."""
    config = dataclasses.replace(config_class(agent)(), **TINY, **changes)
    trainer = trainer_class(agent, "torch")(config, build(definition()))
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
