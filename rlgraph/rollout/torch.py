"""Rollouts in torch: every tensor is allocated once, so that `collect` can be captured and replayed.

Shape letters: T steps, B environments, N uniforms a step, A action size.
"""

from collections.abc import Callable

import array_api_compat.torch as xp
import gymnasium
import numpy as np
import torch

from rlgraph.environment import SAME_STEP, Environment
from rlgraph.graph.capture import capture
from rlgraph.graph.compile import compiled
from rlgraph.modes import MODES, compiles, resolve
from rlgraph.rollout import VALUE_ROWS, EpisodeTotals, Rollout


class Collector:
    """Steps `num_envs` environments with a policy and records `num_steps` steps a call.

    Args:
        env: the environment.
        act: policy, (obs [B, ...], noise) -> (action, log-prob [B]). noise is [B] uniforms in [0, 1) for a Discrete
            action space, [B, *action shape] standard normals for a Box.
        value: critic, obs [..., *observation shape] -> [...]; None records no values: `value_TB` and `final_value_TB`
            are None.
        num_envs, num_steps: B and T.
        generator: on the device; every random number of the rollout comes from it.
        mode: "eager"; "compile" (each step through torch.compile); "graph" (compiled, and the whole rollout captured
            and replayed as one CUDA graph); "graph-uncompiled" (the eager kernels, captured).

    `rollout` and what `collect` returns are overwritten by the next call. With "eager" and "compile", `collect` only
    launches kernels, on the same addresses in every call: a larger captured function may call it. `state()` lists the
    tensors that must survive between calls.
    """

    def __init__(
        self,
        env: Environment,
        act: Callable,
        value: Callable | None,
        num_envs: int,
        num_steps: int,
        generator: torch.Generator,
        mode: str = "eager",
    ):
        self.env, self.act, self.value = env, act, value
        self.num_envs, self.num_steps = num_envs, num_steps
        self.generator, self.device = generator, generator.device
        self._box = isinstance(env.action_space, gymnasium.spaces.Box)
        self._to_env = environment_action(env, self.device)
        with torch.no_grad():
            self.carry, self.obs = env.reset(xp, self._uniform(num_envs, env.reset_draws))
            self.carry = type(self.carry)(owned(self.carry.state), *map(owned, self.carry[1:]))
        self.return_B, *totals = (torch.zeros(num_envs, dtype=torch.float32, device=self.device) for _ in range(4))
        self.totals = EpisodeTotals(*totals)
        self.rollout = empty_rollout(env, num_steps, num_envs, self.device, values=value is not None)
        on_gpu = self.device.type == "cuda"
        mode = resolve("torch", mode, on_gpu)
        self._step = compiled(self._record_step) if compiles(mode, on_gpu) else self._record_step
        self.graph, self._run = None, self._take_steps
        if MODES["torch"][mode].graph:
            self.graph = capture(self._take_steps, state=self.state(), generators=[generator])
            self._run = self.graph.replay

    def state(self) -> dict:
        """The tensors that one `collect` leaves to the next, by name."""
        return {"carry": self.carry, "obs": self.obs, "return_B": self.return_B}

    def reset(self) -> None:
        """Start new episodes everywhere, in place: safe for a captured `collect`."""
        carry, obs = self.env.reset(xp, self._uniform(self.num_envs, self.env.reset_draws))
        copy_into(self.carry, carry)
        self.obs.copy_(obs)
        self.return_B.zero_()

    def collect(self) -> tuple[Rollout, EpisodeTotals]:
        """Take T steps. Returns the buffers and the totals of the episodes that ended, [] each."""
        return self._run()

    @torch.no_grad()
    def _take_steps(self) -> tuple[Rollout, EpisodeTotals]:
        T, B = self.num_steps, self.num_envs
        u_TBN = self._uniform(T, B, self.env.draws)
        noise = self._normal(T, B, *self.env.action_space.shape) if self._box else self._uniform(T, B)
        for total_B in self.totals:
            total_B.zero_()
        steps = self.rollout._replace(value_TB=None, final_value_TB=None)
        for t in range(T):
            self._step(noise[t], u_TBN[t], *(buffer[t] for buffer in steps if buffer is not None))
        if self.value is not None:
            self.rollout.value_TB.copy_(in_parts(self.value, self.rollout.obs))
            self.rollout.final_value_TB.copy_(in_parts(self.value, self.rollout.final_obs))
        return self.rollout, EpisodeTotals(*(total_B.sum() for total_B in self.totals))

    def _record_step(self, noise, u_BN, obs, action, log_prob_B, reward_B, terminated_B, truncated_B, final_obs):
        """One step, written to row t of each buffer. All of it is one function, so that it compiles to few kernels."""
        obs.copy_(self.obs)
        new_action, new_log_prob_B = self.act(self.obs, noise)
        action.copy_(new_action)
        log_prob_B.copy_(new_log_prob_B)

        step = self.env.step(xp, self.carry, self._to_env(new_action), u_BN, SAME_STEP)
        reward_B.copy_(step.reward_B)
        terminated_B.copy_(step.terminated_B)
        truncated_B.copy_(step.truncated_B)
        final_obs.copy_(step.final_obs)

        done_B = step.terminated_B | step.truncated_B
        return_B = self.return_B + step.reward_B
        length_B = self.carry.elapsed_B + 1
        # Selected where a number may be infinite, not multiplied: 0 times infinity is NaN.
        self.totals.return_sum.add_(torch.where(done_B, return_B, 0))
        self.totals.length_sum.add_(done_B * length_B)
        self.totals.count.add_(done_B)
        self.return_B.copy_(torch.where(done_B, 0, return_B))
        copy_into(self.carry, step.carry)
        self.obs.copy_(step.obs)

    def _uniform(self, *shape):
        return uniform(self.generator, *shape)

    def _normal(self, *shape):
        return torch.randn(shape, generator=self.generator, dtype=torch.float32, device=self.device)


def uniform(generator: torch.Generator, *shape: int) -> torch.Tensor:
    """Uniforms in [0, 1) on the generator's device: float32, whatever torch's default is."""
    return torch.rand(shape, generator=generator, dtype=torch.float32, device=generator.device)


def empty_rollout(env: Environment, num_steps: int, num_envs: int, device: torch.device, values: bool) -> Rollout:
    """Buffers of T steps of B environments, zeros; without `values` those of a critic are None."""
    T, B, space = num_steps, num_envs, env.observation_space
    box = isinstance(env.action_space, gymnasium.spaces.Box)
    obs, final_obs = (torch.zeros((T, B, *space.shape), dtype=torch_type(space.dtype), device=device) for _ in range(2))
    log_prob, value, reward, final_value = (torch.zeros(T, B, dtype=torch.float32, device=device) for _ in range(4))
    terminated, truncated = (torch.zeros(T, B, dtype=torch.bool, device=device) for _ in range(2))
    action_type = torch.float32 if box else torch.int64
    action = torch.zeros((T, B, *env.action_space.shape), dtype=action_type, device=device)
    rollout = Rollout(obs, action, log_prob, value, reward, terminated, truncated, final_obs, final_value)
    return rollout if values else rollout._replace(value_TB=None, final_value_TB=None)


def torch_type(dtype: np.dtype) -> torch.dtype:
    """torch's name for a numpy dtype."""
    return torch.from_numpy(np.zeros(1, dtype)).dtype


def in_parts(value: Callable, obs: torch.Tensor) -> torch.Tensor:
    """value(obs), [T, B, ...] -> [T, B], of at most VALUE_ROWS rows at once."""
    parts = [value(steps) for steps in obs.split(max(1, VALUE_ROWS // obs.shape[1]))]
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def environment_action(env: Environment, device: torch.device) -> Callable:
    """From a policy's action to the environment's: clipped into a Box, or shifted by a Discrete space's `start`."""
    space = env.action_space
    if isinstance(space, gymnasium.spaces.Box):
        low, high = (torch.tensor(bound, dtype=torch.float32, device=device) for bound in (space.low, space.high))
        return lambda action: torch.clamp(action, low, high)
    start = int(space.start)
    return lambda action: action + start


@torch.no_grad()
def evaluate(env: Environment, greedy: Callable, num_episodes: int, generator: torch.Generator) -> torch.Tensor:
    """Returns of `num_episodes` first episodes, played side by side.

    Every episode counts once, however short: a count of the first to finish would favour short episodes.

    Args:
        env: the environment, with a time limit.
        greedy: obs [B, ...] -> action.
        generator: on the device to play on.

    Returns:
        [num_episodes] float32, undiscounted.
    """
    to_env = environment_action(env, generator.device)
    carry, obs = env.reset(xp, uniform(generator, num_episodes, env.reset_draws))
    returns_B = torch.zeros(num_episodes, dtype=torch.float32, device=generator.device)
    playing_B = torch.ones(num_episodes, dtype=torch.bool, device=generator.device)
    for t in range(env.max_episode_steps):
        step = env.step(xp, carry, to_env(greedy(obs)), uniform(generator, num_episodes, env.draws), SAME_STEP)
        carry, obs = step.carry, step.obs
        returns_B += torch.where(playing_B, step.reward_B, 0)
        playing_B &= ~(step.terminated_B | step.truncated_B)
        if t % 50 == 49 and not playing_B.any():
            break
    return returns_B


def owned(value):
    """Contiguous copies: a definition may return views of one tensor, which must not be updated in place as such."""
    if isinstance(value, tuple):
        return type(value)(*map(owned, value))
    return value.clone(memory_format=torch.contiguous_format)


def copy_into(old, new) -> None:
    if isinstance(old, tuple):
        for o, n in zip(old, new):
            copy_into(o, n)
    else:
        old.copy_(new)
