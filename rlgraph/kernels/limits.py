"""What a kernel holds of an environment: each number is a register, and each operation a line of the kernel's text.

Triton takes three times as long over twice as much, and compiles a rollout for six shapes. With an observation of 64
numbers one of them takes ten times as long as CartPole's, with one of 300 it would be hundreds.
"""

import math

from rlgraph.environment import Environment
from rlgraph.errors import UsageError

MOST_OBSERVED = 64
MOST_ACTIONS = 32
MOST_STATE = 128
MOST_DRAWS = 128


def check_size(env: Environment, state: int) -> None:
    """Raise a UsageError if a kernel would be too long.

    Args:
        env: the environment.
        state: how many numbers its state has.
    """
    for what, numbers, most in (
        ("an observation", math.prod(env.observation_space.shape), MOST_OBSERVED),
        ("an action", math.prod(env.action_space.shape), MOST_ACTIONS),
        ("a state", state, MOST_STATE),
        ("the uniforms of a step", env.draws, MOST_DRAWS),
    ):
        if numbers > most:
            raise UsageError(
                f"mode fused holds {what} of at most {most} numbers, and environment {env.id!r} has {numbers}; "
                f"use mode graph"
            )
