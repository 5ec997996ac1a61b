"""The environment contract, and what every environment shares: the time limit and autoreset.

An environment is one Python module (its *definition*) of pure functions over an array namespace `xp`
(`jax.numpy`, `array_api_compat.torch` or `numpy`):

    ID                               "CartPole-v1"
    MAX_EPISODE_STEPS                steps before an episode is cut off, or None
    REWARD_THRESHOLD                 mean return that counts as solved, or None
    RESET_DRAWS, STEP_DRAWS          uniforms in [0, 1) consumed per environment by `reset` and by `step`
    Params                           frozen dataclass of Python numbers: static to jit, constant in a graph
    State                            NamedTuple of arrays, each [B] or [B, n], none of float64
    observation_space(params)        -> gymnasium.spaces.Box
    action_space(params)             -> gymnasium.spaces.Discrete or Box
    reset(xp, u_BR, params)          -> State
    step(xp, state, action, u_BS, params)  -> State, reward [B] float32, terminated [B] bool
    observe(xp, state, params)       -> observation [B, *observation_space.shape], of the space's dtype

`u_BR` always has at least one column, so that a definition without random starts can take shape and device
from `u_BR[:, 0]`. Discrete actions arrive as integers [B]; Box actions as float32 [B, *action_space.shape],
not clipped.

Randomness comes in as arrays, so the same uniforms give the same trajectory on every backend.
Shape letters: B environments, R and S draws of a reset and of a step, D observation size.
"""

import dataclasses
from types import ModuleType
from typing import Any, NamedTuple

import gymnasium

from rlgraph.definition import contract, trial

Array = Any
SAME_STEP, NEXT_STEP, DISABLED = "SameStep", "NextStep", "Disabled"  # gymnasium.vector.AutoresetMode's values
MOST_ELAPSED = 2**31 - 2  # where the count of an episode without a time limit stays; one more is an int32 as well


class Carry(NamedTuple):
    """What a batch of environments remembers between steps."""

    state: NamedTuple  # the definition's State: leaves [B] or [B, n]
    elapsed_B: Array  # [B] int32, steps taken in the running episode, at most MOST_ELAPSED
    done_B: Array  # [B] bool, the last step ended the episode and no reset has followed


class Step(NamedTuple):
    """What one step gives. With SAME_STEP, `obs` is the first of the next episode where one ended."""

    carry: Carry
    obs: Array  # [B, *observation shape]
    reward_B: Array  # [B] float32
    terminated_B: Array  # [B] bool, the environment reached an end
    truncated_B: Array  # [B] bool, the time limit was reached (may be True together with terminated)
    final_obs: Array  # [B, *observation shape], the observation that the step led to, before any reset


@dataclasses.dataclass(frozen=True)
class Environment:
    """A definition with its parameters and time limit: hashable, so static to jit and to a capture."""

    id: str
    definition: ModuleType
    params: Any
    max_episode_steps: int | None

    @property
    def observation_space(self) -> gymnasium.spaces.Box:
        return self.definition.observation_space(self.params)

    @property
    def action_space(self) -> gymnasium.spaces.Space:
        return self.definition.action_space(self.params)

    @property
    def reset_draws(self) -> int:
        """Columns of uniforms that `reset` takes: at least one, see the module's text."""
        return max(1, self.definition.RESET_DRAWS)

    @property
    def draws(self) -> int:
        """Columns of uniforms that `step` takes: the definition's own, then those of the autoreset."""
        return self.definition.STEP_DRAWS + self.reset_draws

    @property
    def without_limit(self) -> "Environment":
        """The same, never cut off: what a trial of the definition depends on."""
        return dataclasses.replace(self, max_episode_steps=None)

    def reset(self, xp: ModuleType, u_BR: Array) -> tuple[Carry, Array]:
        """Start B episodes.

        Args:
            xp: array namespace.
            u_BR: [B, reset_draws] float32 uniforms in [0, 1).

        Returns:
            The carry and the first observations [B, *observation shape].
        """
        state = self.definition.reset(xp, u_BR, self.params)
        elapsed_B = xp.zeros_like(u_BR[:, 0], dtype=xp.int32)
        carry = Carry(state, elapsed_B, elapsed_B > 0)
        return carry, self.definition.observe(xp, state, self.params)

    def step(self, xp: ModuleType, carry: Carry, action: Array, u_BN: Array, autoreset: str) -> Step:
        """One step of B environments, with the time limit and Gymnasium's autoreset.

        Args:
            xp: array namespace.
            carry: from `reset` or the last `step`.
            action: [B] integers (Discrete) or [B, *action shape] float32 (Box).
            u_BN: [B, draws] float32 uniforms in [0, 1).
            autoreset: SAME_STEP (reset at once, `final_obs` keeps the last observation), NEXT_STEP (the step
                after the end ignores its action, resets, and gives reward 0 and no flags) or DISABLED (the
                caller resets).
        """
        n = self.definition.STEP_DRAWS
        state, reward_B, terminated_B = self.definition.step(xp, carry.state, action, u_BN[:, :n], self.params)
        # As they were: a Python number may have given them torch's or JAX's own, wider default.
        state = type(state)(*(of_type(xp, new, old.dtype) for new, old in zip(state, carry.state)))
        reward_B = of_type(xp, reward_B, xp.float32)
        elapsed_B, truncated_B = self._time(xp, carry.elapsed_B)

        if autoreset == NEXT_STEP:
            fresh, _ = self.reset(xp, u_BN[:, n:])
            state = select(xp, carry.done_B, fresh.state, state)
            elapsed_B = xp.where(carry.done_B, fresh.elapsed_B, elapsed_B)
            reward_B = xp.where(carry.done_B, xp.zeros_like(reward_B), reward_B)
            terminated_B, truncated_B = terminated_B & ~carry.done_B, truncated_B & ~carry.done_B

        done_B = terminated_B | truncated_B
        final_obs = self.definition.observe(xp, state, self.params)
        if autoreset != SAME_STEP:
            return Step(Carry(state, elapsed_B, done_B), final_obs, reward_B, terminated_B, truncated_B, final_obs)

        fresh, fresh_obs = self.reset(xp, u_BN[:, n:])
        carry = Carry(
            select(xp, done_B, fresh.state, state),
            xp.where(done_B, fresh.elapsed_B, elapsed_B),
            fresh.done_B,
        )
        obs = select(xp, done_B, fresh_obs, final_obs)
        return Step(carry, obs, reward_B, terminated_B, truncated_B, final_obs)

    def _time(self, xp: ModuleType, before_B: Array) -> tuple[Array, Array]:
        """Steps taken after one more, and whether that was the last that the time limit allows."""
        if self.max_episode_steps is None:
            return xp.clip(before_B, None, MOST_ELAPSED - 1) + 1, xp.zeros_like(before_B, dtype=xp.bool)
        elapsed_B = before_B + 1
        return elapsed_B, elapsed_B >= self.max_episode_steps


def of_type(xp: ModuleType, array: Array, dtype: Any) -> Array:
    """The array in a dtype: itself where it has it."""
    return array if array.dtype == dtype else xp.astype(array, dtype)


def select(xp: ModuleType, mask_B: Array, new: Any, old: Any) -> Any:
    """`new` where the mask holds, else `old`: arrays [B, ...] or a NamedTuple of them."""
    if isinstance(new, tuple):
        return type(new)(*(select(xp, mask_B, n, o) for n, o in zip(new, old)))
    return xp.where(mask_B.reshape(mask_B.shape + (1,) * (new.ndim - 1)), new, old)


def build(definition: ModuleType, /, max_episode_steps: int | None = None, **params) -> Environment:
    """An `Environment` from its definition, checked against the contract.

    Args:
        definition: the module, see this module's text.
        max_episode_steps: None for the definition's own limit, -1 for none (as in `gymnasium.make`).
        params: fields of the definition's `Params` to replace.

    Raises:
        UsageError: an unknown parameter, a limit below 1, or a definition that breaks the contract.
    """
    contract.check_constants(definition)
    limit = contract.time_limit(definition, max_episode_steps)
    values = contract.replace_params(contract.default_params(definition), params)
    contract.check_spaces(definition, values)
    env = Environment(definition.ID, definition, values, limit)
    trial.check_on_numpy(env.without_limit)
    return env
