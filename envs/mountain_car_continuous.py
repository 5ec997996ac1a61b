"""MountainCarContinuous-v0: rock an underpowered car out of a valley, with a continuous force.

Moore, "Efficient Memory-based Learning for Robot Control" (1990); parameters, bounds and reward as in
Gymnasium's MountainCarContinuous-v0. B = number of environments.

Observation [B, 2]: position, velocity.  Action [B, 1]: force, clipped to +-1 (the cost counts it unclipped).
Reward: 100 at the flag, less 0.1 force^2 a step.  Ends at the flag.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from gymnasium.spaces import Box

ID = "MountainCarContinuous-v0"
MAX_EPISODE_STEPS = 999
REWARD_THRESHOLD = 90.0
RESET_DRAWS, STEP_DRAWS = 1, 0


class State(NamedTuple):
    position: Any  # [B], along the track
    velocity: Any  # [B], position a step


@dataclass(frozen=True)
class Params:
    goal_velocity: float = 0.0  # least velocity at the goal
    goal_position: float = 0.45
    min_position: float = -1.2
    max_position: float = 0.6
    max_speed: float = 0.07
    max_action: float = 1.0
    power: float = 0.0015
    gravity: float = 0.0025
    low: float = -0.6  # bounds of the position at reset
    high: float = -0.4


def observation_space(p: Params) -> Box:
    low = np.array([p.min_position, -p.max_speed], dtype=np.float32)
    high = np.array([p.max_position, p.max_speed], dtype=np.float32)
    return Box(low, high, dtype=np.float32)


def action_space(p: Params) -> Box:
    return Box(-p.max_action, p.max_action, shape=(1,), dtype=np.float32)


def reset(xp, u_B1, p: Params) -> State:
    position = p.low + (p.high - p.low) * u_B1[:, 0]
    return State(position, xp.zeros_like(position))


def step(xp, s: State, action_B1, u_B0, p: Params):
    action = action_B1[:, 0]
    force = xp.clip(action, -p.max_action, p.max_action)
    velocity = s.velocity + p.power * force - p.gravity * xp.cos(3 * s.position)
    velocity = xp.clip(velocity, -p.max_speed, p.max_speed)
    position = xp.clip(s.position + velocity, p.min_position, p.max_position)
    stopped = (position <= p.min_position) & (velocity < 0)  # the wall on the left is inelastic
    velocity = xp.where(stopped, xp.zeros_like(velocity), velocity)

    terminated = (position >= p.goal_position) & (velocity >= p.goal_velocity)
    bonus = xp.where(terminated, xp.full_like(position, 100.0), xp.zeros_like(position))
    return State(position, velocity), bonus - 0.1 * action**2, terminated


def observe(xp, s: State, p: Params):
    return xp.stack([s.position, s.velocity], axis=-1)
