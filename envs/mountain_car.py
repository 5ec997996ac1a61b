"""MountainCar-v0: rock an underpowered car out of a valley.

Moore, "Efficient Memory-based Learning for Robot Control" (1990); parameters, bounds and reward as in
Gymnasium's MountainCar-v0. B = number of environments.

Observation [B, 2]: position, velocity.  Action [B]: 0 pushes left, 1 coasts, 2 pushes right.
Reward: -1 a step.  Ends at the flag.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from gymnasium.spaces import Box, Discrete

ID = "MountainCar-v0"
MAX_EPISODE_STEPS = 200
REWARD_THRESHOLD = -110.0
RESET_DRAWS, STEP_DRAWS = 1, 0


class State(NamedTuple):
    position: Any  # [B], along the track
    velocity: Any  # [B], position a step


@dataclass(frozen=True)
class Params:
    goal_velocity: float = 0.0  # least velocity at the goal
    goal_position: float = 0.5
    min_position: float = -1.2
    max_position: float = 0.6
    max_speed: float = 0.07
    force: float = 0.001
    gravity: float = 0.0025
    low: float = -0.6  # bounds of the position at reset
    high: float = -0.4


def observation_space(p: Params) -> Box:
    low = np.array([p.min_position, -p.max_speed], dtype=np.float32)
    high = np.array([p.max_position, p.max_speed], dtype=np.float32)
    return Box(low, high, dtype=np.float32)


def action_space(p: Params) -> Discrete:
    return Discrete(3)


def reset(xp, u_B1, p: Params) -> State:
    position = p.low + (p.high - p.low) * u_B1[:, 0]
    return State(position, xp.zeros_like(position))


def step(xp, s: State, action_B, u_B0, p: Params):
    push = p.force * xp.astype(action_B - 1, s.position.dtype)
    velocity = s.velocity + push - p.gravity * xp.cos(3 * s.position)
    velocity = xp.clip(velocity, -p.max_speed, p.max_speed)
    position = xp.clip(s.position + velocity, p.min_position, p.max_position)
    stopped = (position <= p.min_position) & (velocity < 0)  # the wall on the left is inelastic
    velocity = xp.where(stopped, xp.zeros_like(velocity), velocity)

    terminated = (position >= p.goal_position) & (velocity >= p.goal_velocity)
    return State(position, velocity), -xp.ones_like(position), terminated


def observe(xp, s: State, p: Params):
    return xp.stack([s.position, s.velocity], axis=-1)
