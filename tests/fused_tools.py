"""What the tests of fused rollouts share: a kernel's random numbers in numpy, and an environment that uses everything.

`python tests/fused_tools.py` writes the golden files anew.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from diagnostics import Wander
from gymnasium.spaces import Box

import rlgraph
from rlgraph.agents.networks.torch import ActorCritic
from rlgraph.environment import SAME_STEP
from rlgraph.environment import build as build_env
from rlgraph.kernels import build
from rlgraph.kernels.networks import Network, values_kernel
from rlgraph.kernels.rollout_writer import RolloutWriter
from rlgraph.rollout.torch import Collector, copy_into

interpreted = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="Triton compiles here: the tests on the GPU are run"
)
KERNEL_MARKS = [
    pytest.mark.usefixtures("own_kernel_cache", "quick_interpreter"),
    pytest.mark.filterwarnings("ignore:no CUDA graph on cpu"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton"),  # of numpy, in rows beyond the last environment
]
DEVICES = [pytest.param("cpu", marks=interpreted), pytest.param("cuda", marks=pytest.mark.gpu)]


def make_env(name, max_episode_steps=None, **params):
    """Of a name, or a definition."""
    made = rlgraph.make if isinstance(name, str) else build_env
    return made(name, max_episode_steps=max_episode_steps, **params)


def make_policy(env, hidden=(8,), activation="tanh", device="cpu"):
    """All of its numbers matter: biases, statistics, and logits that differ."""
    generator = torch.Generator().manual_seed(1)
    policy = ActorCritic(env.observation_space, env.action_space, hidden, activation, generator)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
        policy.obs_mean.add_(0.1 * torch.randn(policy.obs_mean.shape, generator=generator))
        policy.obs_var.mul_(1 + torch.rand(policy.obs_var.shape, generator=generator))
    return policy.to(device).requires_grad_(False)


def rounding(device):
    """Relative and absolute: a GPU's logarithm, exponential and quotient are good to a few units in the last place."""
    return (1e-5, 1e-5) if device == "cpu" else (5e-5, 5e-5)


class Sorted(Wander):
    ID, __file__ = "Sorted-v0", __file__

    @staticmethod
    def observe(xp, s, p):
        ordered = xp.sort(s.at)  # LINE
        return xp.stack([ordered, ordered], axis=1)


SORTED_LINE = Sorted.observe.__code__.co_firstlineno + 2


# ---- random numbers


def philox(counter, key):
    """Philox 4x32-10 (Salmon et al., 2011, section 3.3). Four words of uint32 arrays; key: an integer of 64 bits."""
    c = [np.asarray(word, np.uint64) for word in np.broadcast_arrays(*counter)]
    k = [key & 0xFFFFFFFF, key >> 32 & 0xFFFFFFFF]
    for _ in range(10):
        high, low = zip(*((product >> np.uint64(32), product & np.uint64(0xFFFFFFFF)) for product in (
            c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57))))  # fmt: skip
        c = [high[1] ^ c[1] ^ np.uint64(k[0]), low[1], high[0] ^ c[3] ^ np.uint64(k[1]), low[0]]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c


def uniforms(key, env, step, group):
    """Five arrays of float32: four words' upper 24 bits, and the last 8 bits of three of them."""
    words = philox((env, step & 0xFFFFFFFF, step >> 32, group), key)
    last = [word & np.uint64(255) for word in words]
    bits = [*(word >> np.uint64(8) for word in words)]
    bits.append(last[0] << np.uint64(16) | last[1] << np.uint64(8) | last[2])
    return [(b.astype(np.float64) / 2**24).astype(np.float32) for b in bits]


def draws(env, key, first_step, T, B):
    """What a rollout draws: noise [T, B] or [T, B, *action shape], and the step's uniforms [T, B, N]."""
    box = isinstance(env.action_space, Box)
    A = int(np.prod(env.action_space.shape))
    of_noise = A + A % 2 if box else 1
    number = of_noise + env.draws
    step, row = np.arange(first_step, first_step + T)[:, None], np.arange(B)[None]
    groups = (uniforms(key, row, step, group) for group in range(-(-number // 5)))
    u = np.stack([column for five in groups for column in five], axis=-1)[..., :number]
    if not box:
        return u[..., 0], u[..., 1:]
    radius = np.sqrt(-2 * np.log(1 - u[..., 0:of_noise:2].astype(np.float64)))
    angle = 2 * np.pi * u[..., 1:of_noise:2].astype(np.float64)
    normals = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=-1).reshape(T, B, of_noise)
    return normals[..., :A].astype(np.float32).reshape(T, B, *env.action_space.shape), u[..., of_noise:]


class Told(Collector):
    """A Collector that starts as a FusedCollector does, and then follows it: it is told what that has drawn."""

    def __init__(self, fused, act, value):
        super().__init__(fused.env, act, value, fused.num_envs, fused.num_steps, torch.Generator(fused.device))
        self.follow(fused)

    def follow(self, fused):
        copy_into(self.carry, fused.carry)
        self.obs.copy_(self.env.definition.observe(torch_namespace(), self.carry.state, self.env.params))
        self.return_B.copy_(fused.return_B)

    def collect_as(self, fused):
        """What `fused` should have given in its last `collect`."""
        T, B = self.num_steps, self.num_envs
        key = fused.key.item() & 0xFFFFFFFFFFFFFFFF
        self.told = draws(self.env, key, fused.counter.item() - T, T, B)
        result = self.collect()
        del self.told
        return result

    def _uniform(self, *shape):
        if not hasattr(self, "told"):  # the first reset, which does not count
            return super()._uniform(*shape)
        return self._given(0 if len(shape) == 2 else 1, shape)

    def _normal(self, *shape):
        return self._given(0, shape)

    def _given(self, which, shape):
        array = torch.tensor(self.told[which], device=self.device)
        assert array.shape == shape and array.dtype == torch.float32
        return array


def torch_namespace():
    import array_api_compat.torch as xp

    return xp


# ---- the text of a kernel

GOLDEN = Path(__file__).parent / "golden"


def cartpole_sources():
    """Golden files and their texts: what mode fused writes for PPO's networks on a GPU."""
    from rlgraph.kernels.ppo_updates import GradientWriter  # imports Triton, which other tests here do without

    env = rlgraph.make("CartPole-v1")
    actor = Network("actor", (4, 64, 64, 2), "tanh", "tf32", relative=True)
    critic = Network("critic", (4, 64, 64, 1), "tanh", "tf32")
    rollout = [RolloutWriter(env, SAME_STEP, actor).kernel(), values_kernel(env, critic)]
    gradients = [GradientWriter(env, actor, critic, normalize=True).text()]
    return {
        GOLDEN / "cartpole_rollout.py": build.source("CartPole-v1: rollouts in one kernel.", rollout),
        GOLDEN / "cartpole_gradients.py": build.source("CartPole-v1: PPO gradients in one kernel.", gradients),
    }


# ---- an environment that uses everything


@dataclass(frozen=True)
class Params:
    scale: float = 0.75


class Sink:
    """Calls everything that a kernel has a form for; each step's numbers depend on all of it."""

    ID, MAX_EPISODE_STEPS, REWARD_THRESHOLD = "Sink-v0", 6, None
    RESET_DRAWS, STEP_DRAWS, Params = 5, 3, Params

    class State(NamedTuple):
        v: Any  # [B, 3]
        w: Any  # [B, 3] within [-4, 4]
        n: Any  # [B] int32
        flag: Any  # [B] bool

    @staticmethod
    def observation_space(p):
        return Box(-np.inf, np.inf, (4, 3))

    @staticmethod
    def action_space(p):
        return Box(-1, 1, (2, 2))

    @classmethod
    def reset(cls, xp, u, p):
        v = xp.stack([2 * u[:, 0] - 1.5, 2 * u[:, 1] - 0.5, 2 * u[:, 2] + 0.25], axis=-1)
        n = xp.astype(xp.floor(u[:, 3] * 9), xp.int32) - 4
        return cls.State(v, xp.full_like(u[:, :3], p.scale), n, u[:, 4] < 0.5)

    @classmethod
    def step(cls, xp, s, action, u, p):
        floats, whole, flags = cls.floats(xp, s, p), cls.integers(xp, s.n), cls.booleans(xp, s, u)
        v = 3 * xp.tanh(cls.rounded(xp, s) / 8)
        w = cls.shapes(xp, s, action, u, floats)
        n = xp.remainder(xp.where(flags, whole, -whole), 9) - 4
        reward = xp.mean(v, axis=-1) + xp.max(xp.square(u), axis=1) * 0.5
        return cls.State(v, w, xp.astype(n, xp.int32), flags), reward, xp.all(abs(v) > 0.7, axis=-1)

    @staticmethod
    def rounded(xp, s):
        """What numpy rounds in another way: powers, and sums of many. [B, 3]"""
        v, w = s.v, s.w
        some = v**3 + (abs(v) + 1) ** -2 + xp.pow(w, 4) / 8 + (abs(v) + 2) ** -3 + xp.tan(w / 5) + xp.power(abs(v), 0.5)
        return some + xp.mean(xp.concat([v, w, v * w], axis=-1), axis=-1, keepdims=True)

    @staticmethod
    def floats(xp, s, p):
        """Operators and functions of floats, entry by entry, and their broadcasts. [B, 3]"""
        v, w = s.v, s.w
        some = (v // 0.7) + (-v // w) + (v % 0.7) + (v % -0.7) + 5 // (w + 9) + (7 % (w + 9)) + xp.mod(w, 3)
        some = some + xp.floor_divide(v, 2) - xp.remainder(w, -1.5) + xp.divide(v, w + 9) + 1 / (w + 9)
        some = some + v**0 + v**1 + v**2 + xp.pow(w, 2) + abs(w) ** 0.5
        some = xp.add(some, 1.5 - v) + xp.subtract(v, w) + xp.multiply(v, w) + xp.negative(v) + (+w) + (-w) + 2 * v
        some = some + xp.sqrt(xp.abs(v)) + xp.exp(-abs(v)) + xp.log(abs(w) + 1) + xp.tanh(v)
        some = some + xp.sin(v) * xp.cos(w) + xp.floor(v) - xp.ceil(w) + xp.sign(v) + xp.square(w)
        some = some + xp.minimum(v, w) - xp.maximum(v, 0.3) + xp.clip(v, max=1.0) + xp.clip(v, 0.0, None)
        some = some + xp.where(xp.isnan(v), 0 * v, v) + xp.where(xp.isfinite(v) & ~xp.isinf(w), v, 0 * v)
        some = some + xp.where((v < w) | (v <= 0), v, w) + xp.where((v > w) ^ (v >= 0.5), w, v)
        return some * p.scale + xp.e / xp.pi + xp.where(v < xp.inf, 0 * v, xp.nan * v)

    @staticmethod
    def integers(xp, n):
        """Python's division, rounding down, of negative numbers too. [B] int32"""
        some = n // 3 + n % 3 + n // -3 + n % -3 + 7 // (n + 9) + 7 % (n + 9) + (-n) // 2 + xp.abs(n) + n**3
        some = some + xp.minimum(n, 1) * xp.maximum(n, -2) + (n & 3) - (n | 4) + (n ^ 5) + ~n + (6 & n) + (1 | n)
        some = some + xp.bitwise_and(n, 6) + xp.bitwise_or(n, 1) + xp.bitwise_xor(n, 3) + xp.bitwise_invert(n)
        some = some + xp.astype(n > 0, xp.int32) + xp.astype(xp.astype(n, xp.float32) * 1.75, xp.int32)
        return some + xp.astype(xp.astype(n, xp.int8), xp.int64) + xp.astype(n == 2, xp.uint8) + xp.sign(n)

    @staticmethod
    def booleans(xp, s, u):
        """[B] bool"""
        near, n = xp.less(u[:, 0], 0.5), s.n
        some = xp.logical_and(near, s.flag) ^ xp.logical_or(xp.greater(n, 1), ~s.flag)
        some = some ^ xp.logical_xor(xp.less_equal(n, -1), xp.greater_equal(n, 3)) ^ xp.logical_not(xp.equal(n, 0))
        some = some ^ (xp.not_equal(n, 1) & (n != 2) & True) ^ (False | near) ^ (True ^ s.flag) ^ (near == s.flag)
        some = some ^ (near + s.flag) ^ (near * s.flag) ^ xp.maximum(near, n > 0)
        some = some ^ xp.logical_not(n) ^ xp.logical_and(n, s.v[:, 0]) ^ xp.where(n, near, s.flag)
        count = xp.sum(s.v > 0, axis=-1, dtype=xp.int32) + xp.sum(s.w > 0, axis=1)
        return some ^ xp.any(s.v > 1, axis=-1) ^ xp.all(s.w, axis=-1) ^ (count > 2) ^ xp.asarray(near)

    @staticmethod
    def shapes(xp, s, action, u, floats):
        """What moves entries about, and reductions. [B, 3]"""
        B = s.v.shape[0]
        square = xp.stack([s.v, s.w, floats], axis=1)  # [B, 3, 3]
        both = xp.concat([square, square[:, ::-1]], axis=-1) + xp.concatenate([2 * square, square], axis=2)  # [B, 3, 6]
        both = both * np.linspace(0.5, 1.5, 6, dtype=np.float32)
        rows = xp.sum(both, axis=-1) + xp.prod(square, axis=2) - xp.min(both, axis=-1) + xp.max(both, axis=1)[:, 3:]
        rows = rows + xp.squeeze(xp.sum(square, axis=1, keepdims=True), axis=1) + xp.mean(square, axis=-1)
        rows = (
            rows + xp.reshape(square, (B, 9))[:, 2:5] + square.reshape(-1, 3, 3)[:, 1] + both.reshape((B, 18))[:, -3:]
        )
        rows = rows + xp.expand_dims(u[:, 1], axis=-1) + u[..., 2][:, None] + xp.broadcast_to(u[:, :1], (B, 3))
        taken = xp.where(xp.arange(3) == s.n[:, None] % 3, rows, s.w)
        mask = xp.stack([s.n % 3 == k for k in range(3)], axis=-1)  # the same on every backend and device
        taken = taken + xp.where(mask, 2 * rows, s.v)
        lookup = xp.asarray([0.5, -1.0, 2.0], dtype=xp.float32) * xp.ones_like(s.v) + xp.zeros_like(s.v)
        taken = taken + lookup + xp.full_like(s.v, action[:, 0, 1][:, None]) + xp.full_like(s.v, 2, dtype=xp.float32)
        mixed = xp.zeros_like(s.n, dtype=xp.float32) + xp.ones_like(s.flag, dtype=xp.float32) * action[:, 1, 0]
        assert taken.ndim == 2 and taken.dtype == xp.float32 and taken[:, xp.newaxis].shape == (B, 1, 3)
        return xp.clip(taken + mixed[:, None], -4, 4)

    @classmethod
    def observe(cls, xp, s, p):
        return xp.stack(
            [s.v, s.w, 0 * s.v + xp.astype(s.n, xp.float32)[:, None], xp.where(s.flag[:, None], s.v, s.w)], axis=1
        )


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for path, text in cartpole_sources().items():
        path.write_text(text, encoding="utf-8")
