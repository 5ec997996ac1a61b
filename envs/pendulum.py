"""Pendulum-v1: swing a pendulum up with a torque too weak to lift it, and hold it there.

Parameters, bounds, reward and integration (semi-implicit Euler) as in Gymnasium's Pendulum-v1.
B = number of environments.

Observation [B, 3]: cos theta, sin theta, theta_dot.  Action [B, 1]: torque in N m, clipped to +-max_torque.
Reward: -(theta^2 + 0.1 theta_dot^2 + 0.001 torque^2), with theta in [-pi, pi).  Never terminates.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from gymnasium.spaces import Box

ID = "Pendulum-v1"
MAX_EPISODE_STEPS = 200
REWARD_THRESHOLD = None
RESET_DRAWS, STEP_DRAWS = 2, 0


class State(NamedTuple):
    theta: Any  # [B] rad, angle from upright, not wrapped
    theta_dot: Any  # [B] rad/s


@dataclass(frozen=True)
class Params:
    g: float = 10.0  # m/s^2
    m: float = 1.0  # kg
    l: float = 1.0  # noqa: E741  m, Gymnasium's name
    dt: float = 0.05  # s
    max_speed: float = 8.0  # rad/s
    max_torque: float = 2.0  # N m
    x_init: float = math.pi  # rad, bound of |theta| at reset
    y_init: float = 1.0  # rad/s, bound of |theta_dot| at reset


def observation_space(p: Params) -> Box:
    high = np.array([1.0, 1.0, p.max_speed], dtype=np.float32)
    return Box(-high, high, dtype=np.float32)


def action_space(p: Params) -> Box:
    return Box(-p.max_torque, p.max_torque, shape=(1,), dtype=np.float32)


def reset(xp, u_B2, p: Params) -> State:
    s_B2 = 2 * u_B2 - 1
    return State(p.x_init * s_B2[:, 0], p.y_init * s_B2[:, 1])


def step(xp, s: State, action_B1, u_B0, p: Params):
    torque = xp.clip(action_B1[:, 0], -p.max_torque, p.max_torque)
    angle = (s.theta + math.pi) % (2 * math.pi) - math.pi
    cost = angle**2 + 0.1 * s.theta_dot**2 + 0.001 * torque**2

    theta_acc = 3 * p.g / (2 * p.l) * xp.sin(s.theta) + 3.0 / (p.m * p.l**2) * torque
    theta_dot = xp.clip(s.theta_dot + theta_acc * p.dt, -p.max_speed, p.max_speed)
    state = State(s.theta + theta_dot * p.dt, theta_dot)
    return state, -cost, xp.zeros_like(s.theta, dtype=xp.bool)


def observe(xp, s: State, p: Params):
    return xp.stack([xp.cos(s.theta), xp.sin(s.theta), s.theta_dot], axis=-1)
