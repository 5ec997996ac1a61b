"""CartPole-v1: balance a pole on a cart by pushing it left or right.

Barto, Sutton & Anderson, "Neuronlike Adaptive Elements That Can Solve Difficult Learning Control Problems"
(1983); dynamics from Florian, "Correct equations for the dynamics of the cart-pole system" (2007), eqs. 23
and 24, without friction; parameters, bounds and reward as in Gymnasium's CartPole-v1.
B = number of environments.

Observation [B, 4]: x, x_dot, theta, theta_dot.  Action [B]: 0 pushes left, 1 pushes right.
Reward: 1 a step.  Ends when the pole leans over 12 degrees or the cart leaves the track.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from gymnasium.spaces import Box, Discrete

ID = "CartPole-v1"
MAX_EPISODE_STEPS = 500
REWARD_THRESHOLD = 475.0
RESET_DRAWS, STEP_DRAWS = 4, 0


class State(NamedTuple):
    x: Any  # [B] m, cart position
    x_dot: Any  # [B] m/s
    theta: Any  # [B] rad, pole angle from upright
    theta_dot: Any  # [B] rad/s


@dataclass(frozen=True)
class Params:
    gravity: float = 9.8  # m/s^2
    masscart: float = 1.0  # kg
    masspole: float = 0.1  # kg
    length: float = 0.5  # m, half the pole's length
    force_mag: float = 10.0  # N
    tau: float = 0.02  # s, one Euler step
    theta_threshold: float = 12 * math.pi / 180  # rad
    x_threshold: float = 2.4  # m
    sutton_barto_reward: bool = False  # 0 a step and -1 at the fall, in place of 1 a step
    low: float = -0.05  # bounds of every state variable at reset
    high: float = 0.05


def observation_space(p: Params) -> Box:
    # Twice the thresholds, so that the last observation of an episode lies inside.
    high = np.array([2 * p.x_threshold, np.inf, 2 * p.theta_threshold, np.inf], dtype=np.float32)
    return Box(-high, high, dtype=np.float32)


def action_space(p: Params) -> Discrete:
    return Discrete(2)


def reset(xp, u_B4, p: Params) -> State:
    s_B4 = p.low + (p.high - p.low) * u_B4
    return State(s_B4[:, 0], s_B4[:, 1], s_B4[:, 2], s_B4[:, 3])


def step(xp, s: State, action_B, u_B0, p: Params):
    push = xp.full_like(s.x, p.force_mag)
    force = xp.where(action_B == 1, push, -push)
    cos, sin = xp.cos(s.theta), xp.sin(s.theta)
    total_mass = p.masscart + p.masspole

    temp = (force + p.masspole * p.length * s.theta_dot**2 * sin) / total_mass
    theta_acc = (p.gravity * sin - cos * temp) / (p.length * (4.0 / 3.0 - p.masspole * cos**2 / total_mass))  # eq. 23
    x_acc = temp - p.masspole * p.length * theta_acc * cos / total_mass  # eq. 24

    state = State(
        s.x + p.tau * s.x_dot,
        s.x_dot + p.tau * x_acc,
        s.theta + p.tau * s.theta_dot,
        s.theta_dot + p.tau * theta_acc,
    )
    terminated = (abs(state.x) > p.x_threshold) | (abs(state.theta) > p.theta_threshold)
    one = xp.ones_like(s.x)
    reward = xp.where(terminated, -one, 0 * one) if p.sutton_barto_reward else one
    return state, reward, terminated


def observe(xp, s: State, p: Params):
    return xp.stack([s.x, s.x_dot, s.theta, s.theta_dot], axis=-1)
