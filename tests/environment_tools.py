"""What the tests of environments share: arrays of each backend, trajectories, and the contractual dtypes."""

from collections.abc import Callable
from typing import Any

import numpy as np

from rlgraph.backend import namespace
from rlgraph.environment import SAME_STEP

BACKENDS = ("numpy", "torch", "jax")

# A definition's file that keeps the contract, for a test to change: `definition_text`.
CART = """
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from gymnasium.spaces import Box, Discrete

ID = "Cart-v0"
MAX_EPISODE_STEPS = 20
REWARD_THRESHOLD = None
RESET_DRAWS, STEP_DRAWS = 2, 1


class State(NamedTuple):
    x: Any
    n: Any


@dataclass(frozen=True)
class Params:
    speed: float = 0.1
    count: int = 3
    on: bool = True


def observation_space(p):
    return Box(-np.inf, np.inf, (2,), np.float32)


def action_space(p):
    return Discrete(3)


def reset(xp, u, p):
    return State(u[:, 0], xp.zeros_like(u[:, 0], dtype=xp.int32))


def step(xp, s, a, u, p):
    x = s.x + p.speed * xp.astype(a - 1, s.x.dtype) + 0.01 * u[:, 0]
    reward = -abs(x)
    pass
    return State(x, s.n + 1), reward, abs(x) > 3


def observe(xp, s, p):
    return xp.stack([s.x, xp.astype(s.n, s.x.dtype)], axis=-1)
"""


def array(backend: str, x: np.ndarray) -> Any:
    if backend == "numpy":
        return x
    if backend == "torch":
        return namespace("torch").from_numpy(np.ascontiguousarray(x))
    return namespace("jax").asarray(x)


def tree(f: Callable, value: Any) -> Any:
    """`f` of every array in nested NamedTuples."""
    if isinstance(value, tuple):
        return type(value)(*(tree(f, v) for v in value))
    return f(value)


def jitted(f: Callable, backend: str) -> Callable:
    if backend != "jax":
        return f
    import jax

    return jax.jit(f)


def play(env, backend: str, u: np.ndarray, choose: Callable) -> list:
    """A SAME_STEP trajectory of u's environments from the uniforms u [T + 1, B, draws], as numpy `Step`s."""
    xp = namespace(backend)
    step = jitted(lambda carry, action, u: env.step(xp, carry, action, u, SAME_STEP), backend)
    carry, obs = env.reset(xp, array(backend, u[0, :, : env.reset_draws]))
    steps, obs = [], np.asarray(obs)
    for t in range(len(u) - 1):
        out = step(carry, array(backend, choose(t, obs)), array(backend, u[t + 1]))
        carry = out.carry
        steps.append(tree(np.asarray, out))
        obs = steps[-1].obs
    return steps


def assert_dtypes(env, backend: str, autoreset: str, action_dtype) -> None:
    """Everything that reset and step give has its contractual dtype; a carry keeps its own for scan."""
    xp, B = namespace(backend), 5
    u = array(backend, np.full((B, env.draws), 0.3, dtype=np.float32))
    action = np.zeros((B, *env.action_space.shape), dtype=np.float32 if env.action_space.shape else action_dtype)
    start, obs = env.reset(xp, u[:, : env.reset_draws])
    step = env.step(xp, start, array(backend, action), u, autoreset)

    def dtypes(value):
        return tree(lambda x: np.asarray(x).dtype, value)

    assert dtypes(obs) == dtypes(step.obs) == dtypes(step.final_obs) == env.observation_space.dtype
    assert dtypes(step.reward_B) == np.float32
    assert dtypes(step.terminated_B) == dtypes(step.truncated_B) == np.bool_
    assert dtypes(step.carry) == dtypes(start)
    assert dtypes(start.elapsed_B) == np.int32
    assert dtypes(start.done_B) == np.bool_
    assert obs.shape == step.obs.shape == (B, *env.observation_space.shape)


def definition_text(*changes: tuple[str, str]) -> str:
    """CART with some of its text replaced; `pass` stands in `step` before what it returns."""
    text = CART
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    return text


def line_in(text: str, part: str) -> int:
    """The number of the line that holds a part of the text."""
    return next(i for i, line in enumerate(text.splitlines(), 1) if part in line)
