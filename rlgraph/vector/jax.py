"""Vector environments in JAX: one step is a pure function of carry, key, flag and actions."""

import jax
import jax.numpy as jnp
import numpy as np
from gymnasium.spaces import Discrete

from rlgraph import modes, xla
from rlgraph.devices import jax_device
from rlgraph.environment import select
from rlgraph.errors import UsageError
from rlgraph.vector import base
from rlgraph.vector.arrays import copied, is_tensor, on_host, plain_tensor


class JaxVectorEnv(base.VectorEnv):
    """See `rlgraph.vector.base.VectorEnv`. `device` is a `jax.Device`."""

    array_type = jax.Array

    def __init__(self, env, spec, num_envs, device, mode, seed, autoreset_mode, output):
        self.device = jax_device(device)
        self._on_gpu = self.device.platform == "gpu"
        self.mode = modes.resolve("jax", mode, self._on_gpu)
        if modes.MODES["jax"][self.mode].fused:
            raise UsageError(
                "mode fused runs whole rollouts with their policy; a JAX vector environment has no such mode"
            )
        super().__init__(env, spec, num_envs, seed, autoreset_mode, output)
        self._carry = None
        self._out_of_range = jax.device_put(jnp.zeros((), bool), self.device)
        self._run = xla.prepare(_step, self.mode, static_argnums=(0, 1, 2), donate_argnums=(3,), device=self.device)
        self._restart = xla.prepare(_reset, self.mode, static_argnums=(0, 1, 2), device=self.device)

    def _advance(self, actions):
        self._carry, self._key, self._out_of_range, results = self._run(
            self.env,
            self.num_envs,
            self.autoreset_mode.value,
            self._carry,
            self._key,
            self._out_of_range,
            actions,
        )
        return results

    def _start(self, env, mask_B):
        # Without a mask the old carry plays no part; leaving it out keeps one compiled reset, not two.
        carry = None if mask_B is None else self._carry
        self._carry, self._key, obs = self._restart(env, self.env, self.num_envs, carry, self._key, mask_B)
        return obs

    def _seed(self, seed):
        self._key = jax.device_put(jax.random.key(seed), self.device)

    def _own_array(self, array):
        if isinstance(array, jax.core.Tracer):
            raise ValueError("a step cannot be traced: call it outside jax.jit and the like")
        if not self._on_gpu or any(device.platform != "gpu" for device in array.devices()):
            return on_host(array)
        return array.astype(jnp.float32) if jnp.issubdtype(array.dtype, jnp.floating) else array

    def _imported(self, array):
        # A copy, which nobody writes to while JAX still reads it.
        if not is_tensor(array):
            array = jax.dlpack.from_dlpack(array) if hasattr(array, "__dlpack__") else array
            return jnp.array(array, copy=True).block_until_ready()
        tensor = plain_tensor(array)
        if str(tensor.dtype).startswith(("torch.int", "torch.uint")):
            # JAX cuts integers to 32 bits; the nearest of those is out of range where the number is.
            tensor = tensor.long().clamp(-(2**31), 2**31 - 1).int()
        return jax.dlpack.from_dlpack(tensor.clone().contiguous())

    def _kind(self, array):
        if isinstance(array, np.ndarray):
            return super()._kind(array)
        kinds = {"b": jnp.bool_, "i": jnp.integer, "f": jnp.floating, "c": jnp.complexfloating}
        return next((kind for kind, of in kinds.items() if jnp.issubdtype(array.dtype, of)), "V")

    def _to_device(self, actions):
        # Always a copy of a host array: device_put may alias it, and the caller may change it.
        if isinstance(actions, np.ndarray):
            actions = copied(actions, np.int32 if self._discrete else np.float32)
        else:  # the widest integers that JAX has: they are narrowed after the range check
            widest = jax.dtypes.canonicalize_dtype(np.int64)
            actions = actions.astype(widest if self._discrete else jnp.float32)
        return jax.device_put(actions, self.device)

    def _to_host(self, array):
        return np.array(array)

    def _keepable(self, array):
        return array

    def _stack(self, arrays):
        return jnp.stack(arrays)

    def _take_flag(self):
        flag = bool(self._out_of_range)
        self._out_of_range = self._out_of_range & False
        return flag

    def _release(self):
        self._carry = self._key = self._out_of_range = self._run = self._restart = None


# Functions of the module, with what is fixed as static arguments: environments that are alike compile once.


def _step(env, num_envs, autoreset, carry, key, out_of_range, actions):
    space = env.action_space
    if isinstance(space, Discrete):
        valid = jnp.clip(actions, int(space.start), int(space.start + space.n) - 1)
        out_of_range |= (valid != actions).any()
        actions = valid.astype(jnp.int32)
    key, u_BN = _uniform(key, num_envs, env.draws)
    step = env.step(jnp, carry, actions, u_BN, autoreset)
    return step.carry, key, out_of_range, tuple(step[1:])


def _reset(start, env, num_envs, carry, key, mask_B):
    """Episodes that begin as `start` has it; what is seen of them is `env`'s."""
    key, u_BR = _uniform(key, num_envs, env.reset_draws)
    fresh, _ = start.reset(jnp, u_BR)
    carry = fresh if mask_B is None else select(jnp, mask_B, fresh, carry)
    return carry, key, env.definition.observe(jnp, carry.state, env.params)


def _uniform(key, num_envs, draws):
    key, now = jax.random.split(key)
    return key, jax.random.uniform(now, (num_envs, draws), dtype=jnp.float32)
