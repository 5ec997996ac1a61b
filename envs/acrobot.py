"""Acrobot-v1: swing the tip of a two-link chain above a line, with a torque at the middle joint only.

Sutton, "Generalization in Reinforcement Learning: Successful Examples Using Sparse Coarse Coding" (1996); the
dynamics are those of Sutton & Barto, "Reinforcement Learning: An Introduction", section 11.3 of the first
edition, which Gymnasium's Acrobot-v1 calls "book". Parameters, bounds, reward and integration (one
fourth-order Runge-Kutta step) as there. B = number of environments.

Observation [B, 6]: cos and sin of theta1, cos and sin of theta2, theta1_dot, theta2_dot.
Action [B]: 0, 1, 2 for a torque of -1, 0, 1 N m.  Reward: -1 a step, 0 at the end.
Ends when the tip is more than 1 m, a default link's length, above the joint that the chain hangs from.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from gymnasium.spaces import Box, Discrete

ID = "Acrobot-v1"
MAX_EPISODE_STEPS = 500
REWARD_THRESHOLD = -100.0
RESET_DRAWS, STEP_DRAWS = 4, 0


class State(NamedTuple):
    theta1: Any  # [B] rad, first joint, 0 hangs down
    theta2: Any  # [B] rad, second joint, relative to the first link
    theta1_dot: Any  # [B] rad/s
    theta2_dot: Any  # [B] rad/s


@dataclass(frozen=True)
class Params:
    dt: float = 0.2  # s
    link_length_1: float = 1.0  # m
    link_mass_1: float = 1.0  # kg
    link_mass_2: float = 1.0  # kg
    link_com_pos_1: float = 0.5  # m, centre of mass along the link
    link_com_pos_2: float = 0.5  # m
    link_moi: float = 1.0  # kg m^2, moment of inertia of either link
    gravity: float = 9.8  # m/s^2
    max_vel_1: float = 4 * math.pi  # rad/s
    max_vel_2: float = 9 * math.pi  # rad/s
    low: float = -0.1  # bounds of every state variable at reset
    high: float = 0.1


def observation_space(p: Params) -> Box:
    high = np.array([1.0, 1.0, 1.0, 1.0, p.max_vel_1, p.max_vel_2], dtype=np.float32)
    return Box(-high, high, dtype=np.float32)


def action_space(p: Params) -> Discrete:
    return Discrete(3)


def reset(xp, u_B4, p: Params) -> State:
    s_B4 = p.low + (p.high - p.low) * u_B4
    return State(s_B4[:, 0], s_B4[:, 1], s_B4[:, 2], s_B4[:, 3])


def _derivative(xp, s: State, torque, p: Params) -> State:
    """ds/dt; m, l, lc, I and g as in the book's equations."""
    m1, m2, l1 = p.link_mass_1, p.link_mass_2, p.link_length_1
    lc1, lc2, moi, g = p.link_com_pos_1, p.link_com_pos_2, p.link_moi, p.gravity
    cos2, sin2 = xp.cos(s.theta2), xp.sin(s.theta2)

    d1 = m1 * lc1**2 + m2 * (l1**2 + lc2**2 + 2 * l1 * lc2 * cos2) + 2 * moi
    d2 = m2 * (lc2**2 + l1 * lc2 * cos2) + moi
    phi2 = m2 * lc2 * g * xp.cos(s.theta1 + s.theta2 - math.pi / 2)
    phi1 = (
        -m2 * l1 * lc2 * s.theta2_dot**2 * sin2
        - 2 * m2 * l1 * lc2 * s.theta2_dot * s.theta1_dot * sin2
        + (m1 * lc1 + m2 * l1) * g * xp.cos(s.theta1 - math.pi / 2)
        + phi2
    )
    theta2_acc = (torque + d2 / d1 * phi1 - m2 * l1 * lc2 * s.theta1_dot**2 * sin2 - phi2) / (
        m2 * lc2**2 + moi - d2**2 / d1
    )
    theta1_acc = -(d2 * theta2_acc + phi1) / d1
    return State(s.theta1_dot, s.theta2_dot, theta1_acc, theta2_acc)


def _moved(s: State, rate: State, dt: float) -> State:
    return State(*(x + dt * dx for x, dx in zip(s, rate)))


def step(xp, s: State, action_B, u_B0, p: Params):
    torque = xp.astype(action_B - 1, s.theta1.dtype)
    k1 = _derivative(xp, s, torque, p)
    k2 = _derivative(xp, _moved(s, k1, p.dt / 2), torque, p)
    k3 = _derivative(xp, _moved(s, k2, p.dt / 2), torque, p)
    k4 = _derivative(xp, _moved(s, k3, p.dt), torque, p)
    slope = State(*(a + 2 * b + 2 * c + d for a, b, c, d in zip(k1, k2, k3, k4)))
    n = _moved(s, slope, p.dt / 6)

    state = State(
        (n.theta1 + math.pi) % (2 * math.pi) - math.pi,
        (n.theta2 + math.pi) % (2 * math.pi) - math.pi,
        xp.clip(n.theta1_dot, -p.max_vel_1, p.max_vel_1),
        xp.clip(n.theta2_dot, -p.max_vel_2, p.max_vel_2),
    )
    terminated = -xp.cos(state.theta1) - xp.cos(state.theta2 + state.theta1) > 1.0
    reward = xp.where(terminated, xp.zeros_like(s.theta1), -xp.ones_like(s.theta1))
    return state, reward, terminated


def observe(xp, s: State, p: Params):
    return xp.stack(
        [xp.cos(s.theta1), xp.sin(s.theta1), xp.cos(s.theta2), xp.sin(s.theta2), s.theta1_dot, s.theta2_dot],
        axis=-1,
    )
