"""What the vector environments of both backends share: Gymnasium's interface, its checks and infos."""

import contextlib
import dataclasses
import math
import os
import secrets
from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np
from gymnasium.error import ClosedEnvironmentError, ResetNeeded
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space

from rlgraph.arguments import integer
from rlgraph.config import check_seed
from rlgraph.definition.contract import replace_params
from rlgraph.definition.errors import errors_of
from rlgraph.environment import DISABLED, SAME_STEP, Environment
from rlgraph.errors import UsageError, first_line, is_out_of_memory, shown
from rlgraph.vector.arrays import is_on_cuda, on_host

Array = Any
STEPS_BETWEEN_CHECKS = 256  # of the out-of-range flag, where nothing else reads the device
# numpy's dtype.kind, in words
KINDS = {"b": "booleans", "f": "floats", "c": "complex numbers", "U": "texts", "S": "bytes", "O": "objects"}


def checked_seed(seed: Any) -> int:
    """UsageError where it is no integer in [0, 2**32)."""
    try:
        seed = integer("seed", seed)
    except UsageError:
        raise UsageError(f"seed must be one integer for the whole batch, but is {shown(seed)}") from None
    check_seed(seed)
    return seed


def check_spaces_fit(env: Environment, num_envs: int) -> None:
    """UsageError where Gymnasium's spaces of so many environments would take half of the memory: a system that is out
    of it may kill the process without a word."""
    space = env.observation_space
    # Lower and upper bounds, and for each whether there is one; twice, while they are made.
    needed = 4 * num_envs * math.prod(space.shape) * (space.dtype.itemsize + 1)
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if 2 * needed > there:
        raise UsageError(
            f"num_envs = {shown(num_envs)} is too many: the bounds of their observations alone would take half of this "
            f"machine's {there / 2**30:.3g} GiB; choose fewer"
        )


@contextlib.contextmanager
def short_memory_is_an_error(num_envs: int):
    """UsageError where so many environments find no memory."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise UsageError(f"there is not enough memory for num_envs = {num_envs}: choose fewer") from error


class VectorEnv(gymnasium.vector.VectorEnv):
    """B environments stepped together on one device; made by `rlgraph.make_vec`.

    What `reset` and `step` return is the caller's to keep and to change. Shape letter: B = num_envs.

    Actions are arrays of any library (torch, JAX, numpy, what has DLPack or `__array__`), on any device, or lists.
    No gradient flows back to them. What is on a GPU stays there where the environments are on one. Discrete: integers
    [B] of any width. Box: numbers [B, *single_action_space.shape], converted to float32; beyond the bounds, and
    infinite, they go to the environment as they are, as in Gymnasium.

    A Discrete action out of range is an error at once where the actions are on the host. On a GPU, reading
    them at every step would stall it: there the step takes the nearest valid action and sets a flag on the
    device. The flag is read where the host waits for the device anyway (every step with output "numpy" or
    with AutoresetMode.DISABLED; `reset`; `close`) and every 256 steps, and raises then. A NaN in a Box action is
    an error where the actions are on the host; on a GPU it goes to the environment.

    At the end of a `with` block it is closed.

    Attributes:
        metadata: "autoreset_mode" holds the `AutoresetMode`.
        device: where the environments live.
        mode: the mode that runs, "auto" resolved.
    """

    array_type: type  # the backend's own arrays

    # A backend sets `_carry`, `device` and `_on_gpu`, and implements the methods at the end of this class.

    def __init__(
        self,
        env: Environment,
        spec: gymnasium.envs.registration.EnvSpec,
        num_envs: int,
        seed: int | None,
        autoreset_mode: AutoresetMode,
        output: str,
    ):
        self.env, self.spec, self.num_envs, self.output = env, spec, num_envs, output
        self.metadata = {"render_modes": [], "autoreset_mode": autoreset_mode}
        self.autoreset_mode = autoreset_mode
        self.single_observation_space, self.single_action_space = env.observation_space, env.action_space
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self._discrete = isinstance(self.single_action_space, gymnasium.spaces.Discrete)
        if self._discrete:
            self._low = int(self.single_action_space.start)
            self._high = self._low + int(self.single_action_space.n) - 1
        self._errors = errors_of(env)
        self._started = False
        self._unverified = 0  # steps taken with device actions since the flag was last read
        self._reseed(secrets.randbits(32) if seed is None else seed)

    def __enter__(self) -> "VectorEnv":
        return self

    def __exit__(self, *raised) -> None:
        self.close()

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[Array, dict]:
        """Start new episodes: clears their step counters and flags.

        Args:
            seed: one integer in [0, 2**32) for the whole batch; None goes on with the running generator.
            options: "reset_mask", a [B] bool array of any library, restarts only these. Every other key is a
                field of the environment's `Params`, for this reset only, such as `low`.
                JAX compiles a reset for every set of values.

        Returns:
            Observations [B, *single_observation_space.shape] of all environments, also of those that a mask
            leaves running, and an empty dict.

        Raises:
            ClosedEnvironmentError: after `close`.
            ResetNeeded: a mask before the first full reset.
            UsageError: a bad seed, options that are no dict, or a key that is no parameter of the environment.
            TypeError, ValueError: a bad mask; ValueError: an earlier action was out of range, see the class.
        """
        self._require_open("reset")
        self._read_flag()
        changes = _checked_options(options)
        mask_B = changes.pop("reset_mask", None)
        if mask_B is not None:
            mask_B = self._valid_mask(mask_B)
        env = dataclasses.replace(self.env, params=replace_params(self.env.params, changes))
        if seed is not None:
            self._reseed(seed)
        with short_memory_is_an_error(self.num_envs), self._errors:
            obs = self._start(env, mask_B)
        self._started = True
        return self._given_away(obs), {}

    def step(self, actions: Array) -> tuple[Array, Array, Array, Array, dict]:
        """Take one action in every environment.

        An episode that ends is followed by the next one as `metadata["autoreset_mode"]` says.

        NEXT_STEP: the next step ignores its action (which must still be a valid one) and returns the first
        observation, reward 0 and no flags.

        SAME_STEP: the observation is already the next episode's first. infos hold "final_obs", where the step
        led to, "final_info" (empty) and the masks "_final_obs" and "_final_info" [B] bool. With output
        "numpy" these keys come only when an episode ended, and "final_obs" is an object array [B], None
        elsewhere, as in Gymnasium. With output "tensor" they always come, and "final_obs" has every row filled,
        [B, *single_observation_space.shape]: to know whether an episode ended would stall the device.

        DISABLED: the caller resets, with a "reset_mask". To say where it did not, every step waits for the
        device.

        Args:
            actions: see the class.

        Returns:
            obs [B, *single_observation_space.shape], reward [B] float32, terminated [B] bool, truncated [B]
            bool (an episode may end by both) and infos, empty but for SAME_STEP.

        Raises:
            ResetNeeded: before the first `reset`, or (DISABLED) an episode has ended and was not reset.
            ClosedEnvironmentError: after `close`.
            TypeError: actions of a wrong kind; ValueError: of a wrong shape, not to be read, NaN, or out of range, now
                or earlier.
        """
        self._require_open("step")
        if not self._started:
            raise ResetNeeded("step() before the first reset(): call reset() first")
        actions = self._valid_actions(actions)
        disabled = self.autoreset_mode.value == DISABLED
        if disabled and (done_B := self._to_host(self._carry.done_B)).any():
            raise ResetNeeded(
                f"{done_B.sum()} of {self.num_envs} episodes have ended: "
                'call reset(options={"reset_mask": terminated | truncated}) before the next step()'
            )
        with self._errors:
            *results, final_obs = self._advance(actions)
        if disabled or self.output == "numpy" or self._unverified >= STEPS_BETWEEN_CHECKS:
            self._read_flag()
        obs, reward_B, terminated_B, truncated_B = map(self._given_away, results)
        infos = {}
        if self.autoreset_mode.value == SAME_STEP:
            infos = self._final_infos(self._given_away(final_obs), terminated_B | truncated_B)
        return obs, reward_B, terminated_B, truncated_B, infos

    def steps(self, actions: Array) -> tuple[Array, Array, Array, Array, dict]:
        """Take K steps by K actions that are known beforehand: one launch in mode "fused", a loop in every other.

        Args:
            actions: [K, B] integers or [K, B, *single_action_space.shape] numbers, otherwise as for `step`.

        Returns:
            As K calls of `step` (which in mode "fused" draw other numbers), stacked: obs
            [K, B, *single_observation_space.shape], reward, terminated and truncated [K, B]. infos are empty but for
            SAME_STEP: "final_obs" [K, B, ...], where each step led to, and its mask "_final_obs" [K, B], with every
            output.

        Raises:
            As `step`; UsageError with AutoresetMode.DISABLED, which needs the caller between steps.
        """
        self._require_open("steps")
        if self.autoreset_mode.value == DISABLED:
            raise UsageError("steps() cannot reset between its steps: use step() with AutoresetMode.DISABLED")
        if not self._started:
            raise ResetNeeded("steps() before the first reset(): call reset() first")
        actions = self._valid_actions(actions, several=True)
        with self._errors:
            *results, final_obs = self._advance_several(actions)
        if self.output == "numpy" or self._unverified >= STEPS_BETWEEN_CHECKS:
            self._read_flag()
        given = self._to_host if self.output == "numpy" else lambda array: array
        obs, reward_KB, terminated_KB, truncated_KB = map(given, results)
        infos = {}
        if self.autoreset_mode.value == SAME_STEP:
            infos = {"final_obs": given(final_obs), "_final_obs": terminated_KB | truncated_KB}
        return obs, reward_KB, terminated_KB, truncated_KB, infos

    def close_extras(self, **kwargs) -> None:
        """Release the device memory. ValueError if an earlier action was out of range, see the class."""
        self.closed = True  # also when the flag raises
        try:
            self._read_flag()
        finally:
            self._release()

    def _require_open(self, what: str) -> None:
        if self.closed:
            raise ClosedEnvironmentError(f"{what}() after close(): make a new one with rlgraph.make_vec")

    def _reseed(self, seed: int) -> None:
        seed = checked_seed(seed)
        super().reset(seed=seed)  # Gymnasium's own np_random_seed
        self._seed(seed)

    def _valid_mask(self, mask_B: Array) -> np.ndarray:
        if not self._started:
            raise ResetNeeded("options['reset_mask'] before the first full reset(): call reset() without it first")
        if not hasattr(mask_B, "__array__") and not hasattr(mask_B, "__dlpack__"):
            kind = f"{type(mask_B).__module__}.{type(mask_B).__qualname__}"
            raise TypeError(f"options['reset_mask'] must be a numpy or {self.array_type.__name__} array, got {kind}")
        mask_B = self._as_array(mask_B, "options['reset_mask']", (self.num_envs,))
        if not isinstance(mask_B, np.ndarray):
            mask_B = self._to_host(mask_B)
        if mask_B.shape != (self.num_envs,):
            raise ValueError(f"options['reset_mask'] must have shape [{self.num_envs}], got {list(mask_B.shape)}")
        if mask_B.dtype != np.bool_:
            raise TypeError(f"options['reset_mask'] must be of dtype bool, got {mask_B.dtype}")
        if not mask_B.any():
            raise ValueError("options['reset_mask'] must hold at least one True")
        return mask_B

    def _valid_actions(self, actions: Array, several: bool = False) -> Array:
        """The actions on the device: [B] integers or [B, *action shape] float32, or `several` steps' of them."""
        expected = (self.num_envs, *self.single_action_space.shape)
        array = self._as_array(actions, "actions", expected)
        if several:
            K = array.shape[0] if array.ndim else 0
            if K < 1:
                raise ValueError(f"actions of several steps must have shape [K, {str(list(expected))[1:]} with K >= 1")
            expected = (K, *expected)
        if tuple(array.shape) != expected:
            raise ValueError(f"actions must have shape {list(expected)}, got {list(array.shape)}")
        kind = self._kind(array)
        if kind not in ("iu" if self._discrete else "iuf"):
            wanted = "integers: convert them, as with .astype(int) or argmax" if self._discrete else "floats"
            raise TypeError(f"actions must be {wanted}; got {KINDS.get(kind, array.dtype)}")
        if not isinstance(array, np.ndarray):
            self._unverified += self._discrete * (len(array) if several else 1)
        elif self._discrete and not (self._low <= array.min() and array.max() <= self._high):
            raise ValueError(f"actions must be in [{self._low}, {self._high}], got {array.min()} to {array.max()}")
        elif kind == "f" and np.count_nonzero(np.isnan(array)):  # a third of the time of any()
            raise ValueError("actions must be numbers, got NaN: look for what made the policy give it")
        return self._to_device(array)

    def _as_array(self, given: Array, name: str, expected: tuple) -> Array:
        """What is on a GPU as an array of the backend, where the environments are on one too; all else as numpy."""
        if type(given) is np.ndarray and given.dtype.kind in "biuf":  # the usual case, at once
            return given
        try:
            if isinstance(given, self.array_type):
                return self._own_array(given)
            if self._on_gpu and not isinstance(given, (np.ndarray, list, tuple)) and is_on_cuda(given):
                return self._own_array(self._imported(given))
            return on_host(given)
        except Exception as error:  # whatever its library raises
            raise ValueError(
                f"{name} must be an array of shape {list(expected)}; cannot read {type(given).__qualname__}: "
                f"{first_line(error)}"
            ) from error

    def _read_flag(self) -> None:
        steps, self._unverified = self._unverified, 0
        if steps and self._take_flag():
            raise ValueError(
                f"an action outside [{self._low}, {self._high}] was passed in one of the last {steps} steps "
                "with device actions; the nearest valid one was taken"
            )

    def _final_infos(self, final_obs: Array, done_B: Array) -> dict:
        if self.output == "numpy":
            ended = np.flatnonzero(done_B)
            if not len(ended):
                return {}
            rows, final_obs = final_obs, np.full(self.num_envs, None, dtype=object)
            for i in ended:
                final_obs[i] = rows[i]
        return {
            "final_obs": final_obs,
            "_final_obs": done_B,
            "final_info": {},
            "_final_info": done_B | done_B,  # a copy, on either backend
        }

    def _given_away(self, array: Array) -> Array:
        return self._to_host(array) if self.output == "numpy" else self._keepable(array)

    def _kind(self, array: Array) -> str:
        """numpy's dtype.kind of what `_as_array` gave, or "V" for what numpy has not."""
        return array.dtype.kind

    def _seed(self, seed: int) -> None:
        """Reseed the generator that every random number comes from."""
        raise NotImplementedError

    def _start(self, env: Environment, mask_B: np.ndarray | None) -> Array:
        """Reset `env` everywhere, or where the mask holds, into the carry. Returns all observations."""
        raise NotImplementedError

    def _advance(self, actions: Array) -> tuple[Array, ...]:
        """One step. Returns obs, reward, terminated, truncated and final_obs, valid until the next call."""
        raise NotImplementedError

    def _advance_several(self, actions: Array) -> tuple[Array, ...]:
        """The same for each of the first axis, stacked: new arrays."""
        steps = [tuple(map(self._keepable, self._advance(action))) for action in actions]
        return tuple(self._stack(arrays) for arrays in zip(*steps))

    def _stack(self, arrays: list[Array]) -> Array:
        """Arrays of one shape, along a new first axis."""
        raise NotImplementedError

    def _own_array(self, array: Array) -> Array:
        """One of the backend's arrays, floats as float32: itself where it and the environments are on GPUs, else as
        numpy."""
        raise NotImplementedError

    def _imported(self, array: Array) -> Array:
        """An array of another library on a GPU, as one of the backend's: without the host."""
        raise NotImplementedError

    def _to_device(self, actions: Array) -> Array:
        """Checked actions on the device, in the dtype that the environment takes."""
        raise NotImplementedError

    def _to_host(self, array: Array) -> np.ndarray:
        """A numpy copy."""
        raise NotImplementedError

    def _keepable(self, array: Array) -> Array:
        """An array that no later step changes."""
        raise NotImplementedError

    def _take_flag(self) -> bool:
        """Read and clear the flag that an action was out of range."""
        raise NotImplementedError

    def _release(self) -> None:
        """Let go of what the device holds."""
        raise NotImplementedError


def _checked_options(options: Any) -> dict:
    """A copy of the options of `reset`; UsageError where they are no dict of names."""
    if options is None:
        return {}
    if not isinstance(options, Mapping) or not all(isinstance(name, str) for name in options):
        raise UsageError(f"options must be None or a dict of names and values, but is {shown(options)}")
    return dict(options)
