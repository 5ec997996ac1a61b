"""Environments of a few states whose values are known, for testing agents (in the style of rejax's)."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from gymnasium.spaces import Box, Discrete

OBSERVATIONS = np.array([[-1, 0], [1, 0], [-1, 1], [1, 1]], np.float32)  # x, and steps taken


@dataclass(frozen=True)
class NoParams:
    pass


class Diagnostic:
    """What they share: a start and a step count for state; `x` is drawn from -1 and 1 in every episode."""

    ID, REWARD_THRESHOLD, MAX_EPISODE_STEPS = "Diagnostic-v0", None, 20
    RESET_DRAWS, STEP_DRAWS = 1, 0
    Params = NoParams
    steps = 1  # after which it terminates

    class State(NamedTuple):
        x: Any  # [B]
        t: Any  # [B] steps taken

    @staticmethod
    def observation_space(p):
        return Box(-9, 9, (2,))

    @staticmethod
    def action_space(p):
        return Discrete(2)

    @classmethod
    def reset(cls, xp, u, p):
        one = xp.ones_like(u[:, 0])
        return cls.State(xp.where(u[:, 0] < 0.5, -one, one), 0 * one)

    @classmethod
    def step(cls, xp, s, action, u, p):
        t = s.t + 1
        return cls.State(s.x, t), cls.reward(xp, s, action), t >= cls.steps

    @staticmethod
    def observe(xp, s, p):
        return xp.stack([s.x, s.t], axis=-1)


class OneStep(Diagnostic):
    """Reward 1, and it is over: every value is 1."""

    @staticmethod
    def reward(xp, s, action):
        return xp.ones_like(s.x)

    @staticmethod
    def value(obs):
        return np.ones(len(obs))


class TwoSteps(Diagnostic):
    """Nothing, then 1: with gamma = 0.9 the value is 0.9, then 1."""

    steps = 2

    @staticmethod
    def reward(xp, s, action):
        return s.t

    @staticmethod
    def value(obs):
        return np.where(obs[:, 1] == 0, 0.9, 1)


class Seen(Diagnostic):
    """The reward is what was observed."""

    @staticmethod
    def reward(xp, s, action):
        return s.x

    @staticmethod
    def value(obs):
        return obs[:, 0]


class CutOff(OneStep):
    """Reward 1 for ever, cut off after 3 steps: with gamma = 0.9 worth 10 from everywhere, because a cut is no end.

    Taken for an end, it would be worth 1, 1.9 or 2.71.
    """

    MAX_EPISODE_STEPS = 3
    steps = 10**6

    @staticmethod
    def observe(xp, s, p):
        return xp.stack([s.x, 0 * s.t], axis=-1)

    @staticmethod
    def value(obs):
        return np.full(len(obs), 10.0)


class Match(Diagnostic):
    """Reward 1 for the action of three, from -1 on, that is the observation's first number."""

    @staticmethod
    def action_space(p):
        return Discrete(3, start=-1)

    @staticmethod
    def reward(xp, s, action):
        one = xp.ones_like(s.x)
        return xp.where(action == s.x, one, 0 * one)


class Aim(Diagnostic):
    """Minus the squared distance of two actions from x / 2 and -x / 2. Observations and actions are matrices."""

    @staticmethod
    def observation_space(p):
        return Box(-9, 9, (2, 1))

    @staticmethod
    def action_space(p):
        return Box(-1, 1, (1, 2))

    @staticmethod
    def reward(xp, s, action):
        return -((action[:, 0, 0] - s.x / 2) ** 2) - (action[:, 0, 1] + s.x / 2) ** 2

    @staticmethod
    def observe(xp, s, p):
        return xp.stack([s.x, s.t], axis=-1)[:, :, None]


class Wander(Diagnostic):
    """A walk in the plane with wind: leaves of three types, one a vector, and more random numbers than one group."""

    MAX_EPISODE_STEPS = 5
    RESET_DRAWS, STEP_DRAWS = 2, 5

    class State(NamedTuple):
        at: Any  # [B, 2]
        steps: Any  # [B] int32
        windy: Any  # [B] bool

    @staticmethod
    def observation_space(p):
        return Box(-np.inf, np.inf, (2, 2))

    @staticmethod
    def action_space(p):
        return Discrete(3, start=-1)

    @classmethod
    def reset(cls, xp, u, p):
        return cls.State(2 * u[:, :2] - 1, xp.zeros_like(u[:, 0], dtype=xp.int32), u[:, 0] < 0.25)

    @classmethod
    def step(cls, xp, s, action, u, p):
        push = xp.astype(action, s.at.dtype)
        wind = xp.where(s.windy, u[:, 0] - u[:, 1], 0 * u[:, 0])
        at = s.at + xp.stack([0.3 * push + wind, 0.5 * (u[:, 2] - u[:, 3])], axis=-1)
        steps = xp.astype(s.steps + 1, xp.int32)
        reward = xp.sum(at * at, axis=-1) - 0.1 * xp.astype(steps % 3, at.dtype)
        return cls.State(at, steps, u[:, 4] < 0.5), reward, abs(at[:, 0]) > 1.2

    @staticmethod
    def observe(xp, s, p):
        last = xp.stack([xp.astype(s.steps, s.at.dtype), xp.astype(s.windy, s.at.dtype)], axis=-1)
        return xp.stack([s.at, last], axis=1)
