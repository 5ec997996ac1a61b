"""A replay ring on the device: rows of time by environments, written and drawn from without the host.

The same names as replay_jax.py. T steps of a rollout, B environments, S rows of the ring, M transitions drawn,
n steps of a return.
"""

from typing import NamedTuple

import torch

from rlgraph.agents.parts.replay import num_rows
from rlgraph.rollout import Rollout


class Transitions(NamedTuple):
    """M transitions of up to n steps each."""

    obs: torch.Tensor  # [M, *observation shape]
    action: torch.Tensor  # [M] or [M, *action shape], the first step's
    reward: torch.Tensor  # [M] float32, discounted sum over the steps, none after an episode's end
    next_obs: torch.Tensor  # [M, *observation shape], what the last of them led to, before any reset
    discount: torch.Tensor  # [M] float32, of the value at next_obs: gamma^steps, 0 where the episode terminated


def discounted(discount: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Their product, and 0 where the discount is 0: what follows an end counts for nothing, even if it is NaN."""
    return (discount * value).masked_fill(discount == 0, 0)


class Replay:
    """The last steps of B environments, in buffers [S, B, ...].

    Args:
        rollout: one that will be added, for its shapes and device.
        capacity: steps to keep over all environments, rounded up to whole rollouts.

    `add` and `sample` only launch kernels, on the same addresses in every call: a captured function may call them.

    Attributes:
        cursor: [] int64, the row that is written next.
        fill: [] int64, rows written so far, at most S.
    """

    def __init__(self, rollout: Rollout, capacity: int):
        T, B = rollout.reward_TB.shape
        self.num_rows = S = num_rows(capacity, T, B)
        device = rollout.reward_TB.device

        def buffer(like, dtype):
            return torch.zeros((S, *like.shape[1:]), dtype=dtype, device=device)

        self.obs = buffer(rollout.obs, torch.float32)
        self.action = buffer(rollout.action, rollout.action.dtype)
        self.reward = buffer(rollout.reward_TB, torch.float32)
        self.terminated = buffer(rollout.terminated_TB, torch.bool)
        self.truncated = buffer(rollout.truncated_TB, torch.bool)
        self.final_obs = buffer(rollout.final_obs, torch.float32)
        self.cursor, self.fill = (torch.zeros((), dtype=torch.int64, device=device) for _ in range(2))

    def state(self) -> dict[str, torch.Tensor]:
        """Every tensor of it, by name."""
        return {**self._buffers(), "cursor": self.cursor, "fill": self.fill}

    def _buffers(self) -> dict[str, torch.Tensor]:
        names = ("obs", "action", "reward", "terminated", "truncated", "final_obs")
        return {name: getattr(self, name) for name in names}

    @torch.no_grad()
    def add(self, rollout: Rollout) -> None:
        """Write a rollout's T rows over the oldest ones."""
        T = rollout.reward_TB.shape[0]
        # S is a multiple of T: it does not wrap.
        rows_T = self.cursor + torch.arange(T, dtype=torch.int64, device=self.cursor.device)
        new = (rollout.obs, rollout.action, rollout.reward_TB, rollout.terminated_TB, rollout.truncated_TB)
        for buffer, value in zip(self._buffers().values(), (*new, rollout.final_obs), strict=True):
            buffer.index_copy_(0, rows_T, value.to(buffer.dtype))
        self.cursor.copy_((self.cursor + T) % self.num_rows)
        self.fill.copy_((self.fill + T).clamp(max=self.num_rows))

    @torch.no_grad()
    def sample(self, batch_size: int, generator: torch.Generator, num_steps: int, gamma: float) -> Transitions:
        """M = `batch_size` transitions, uniform over the steps whose n = `num_steps` steps have all been stored.

        With fewer than n rows stored there is none such; then what it returns is of the right shape, and meaningless.
        """
        device = self.cursor.device
        u_2M = torch.rand(2, batch_size, generator=generator, dtype=torch.float32, device=device)
        oldest = (self.cursor - self.fill) % self.num_rows
        choices = (self.fill - num_steps + 1).clamp(min=1)
        age_M = torch.minimum((u_2M[0] * choices).long(), choices - 1)  # rounding may give `choices`
        B = self.reward.shape[1]
        env_M = (u_2M[1] * B).long().clamp(max=B - 1)
        return self.transitions((oldest + age_M) % self.num_rows, env_M, num_steps, gamma)

    @torch.no_grad()
    def transitions(self, row_M: torch.Tensor, env_M: torch.Tensor, num_steps: int, gamma: float) -> Transitions:
        """The transitions that begin at the given rows and environments."""
        step_n1 = torch.arange(num_steps, dtype=torch.int64, device=row_M.device).unsqueeze(1)
        rows_nM = (row_M + step_n1) % self.num_rows
        done_nM = (self.terminated[rows_nM, env_M] | self.truncated[rows_nM, env_M]).long()
        alive_nM = done_nM.cumsum(0) == done_nM  # no end before this step; the step that ends counts
        reward_nM = self.reward[rows_nM, env_M].masked_fill(~alive_nM, 0)  # not a product: 0 times infinity is NaN
        reward_M = (gamma ** step_n1.float() * reward_nM).sum(0)
        steps_M = alive_nM.sum(0)
        last_M = (row_M + steps_M - 1) % self.num_rows
        return Transitions(
            self.obs[row_M, env_M],
            self.action[row_M, env_M],
            reward_M,
            self.final_obs[last_M, env_M],
            gamma ** steps_M.float() * ~self.terminated[last_M, env_M],
        )
