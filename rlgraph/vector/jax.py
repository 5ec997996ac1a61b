"""Vector environments in JAX: one step is a pure function of carry, key, flag and actions."""

import jax
import jax.numpy as jnp
import numpy as np

from rlgraph import modes
from rlgraph.devices import jax_device
from rlgraph.environment import select
from rlgraph.graph import xla
from rlgraph.vector import base


class JaxVectorEnv(base.VectorEnv):
    """See `rlgraph.vector.base.VectorEnv`. `device` is a `jax.Device`."""

    array_type = jax.Array

    def __init__(self, env, spec, num_envs, device, mode, seed, autoreset_mode, output):
        self.device = jax_device(device)
        self.mode = modes.resolve("jax", mode, on_gpu=self.device.platform == "gpu")
        super().__init__(env, spec, num_envs, seed, autoreset_mode, output)
        self._carry = None
        self._out_of_range = jax.device_put(jnp.zeros((), bool), self.device)
        self._run = xla.prepare(self._update, self.mode, donate_argnums=(0,), device=self.device)
        self._restart = xla.prepare(self._reset, self.mode, static_argnums=(0,), device=self.device)

    def _update(self, carry, key, out_of_range, actions):
        if self._discrete:
            valid = jnp.clip(actions, self._low, self._high)
            out_of_range |= (valid != actions).any()
            actions = valid
        key, u_BN = self._uniform(key, self.env.draws)
        step = self.env.step(jnp, carry, actions, u_BN, self.autoreset_mode.value)
        return step.carry, key, out_of_range, tuple(step[1:])

    def _reset(self, env, carry, key, mask_B):
        key, u_BR = self._uniform(key, env.reset_draws)
        fresh, _ = env.reset(jnp, u_BR)
        carry = fresh if mask_B is None else select(jnp, mask_B, fresh, carry)
        return carry, key, env.definition.observe(jnp, carry.state, self.env.params)

    def _advance(self, actions):
        self._carry, self._key, self._out_of_range, results = self._run(
            self._carry, self._key, self._out_of_range, actions
        )
        return results

    def _start(self, env, mask_B):
        # Without a mask the old carry plays no part; leaving it out keeps one compiled reset, not two.
        carry = None if mask_B is None else self._carry
        self._carry, self._key, obs = self._restart(env, carry, self._key, mask_B)
        return obs

    def _uniform(self, key, draws):
        key, now = jax.random.split(key)
        return key, jax.random.uniform(now, (self.num_envs, draws), dtype=jnp.float32)

    def _seed(self, seed):
        # JAX drops the upper half of a seed where it runs without 64-bit integers.
        key = jax.random.fold_in(jax.random.key(seed % 2**32), seed >> 32)
        self._key = jax.device_put(key, self.device)

    def _own_array(self, array):
        if jnp.issubdtype(array.dtype, jnp.floating):
            array = array.astype(jnp.float32)  # numpy has no bfloat16
        on_gpu = all(device.platform == "gpu" for device in array.devices())
        return array if on_gpu and self.device.platform == "gpu" else np.asarray(array)

    def _to_device(self, actions):
        # Always a copy of a host array: device_put may alias it, and the caller may change it.
        if isinstance(actions, np.ndarray):
            actions = np.array(actions, np.int32 if self._discrete else np.float32)
        elif not self._discrete:
            actions = actions.astype(jnp.float32)
        return jax.device_put(actions, self.device)

    def _to_host(self, array):
        return np.array(array)

    def _keepable(self, array):
        return array

    def _take_flag(self):
        flag = bool(self._out_of_range)
        self._out_of_range = self._out_of_range & False
        return flag

    def _release(self):
        self._carry = self._key = self._out_of_range = self._run = self._restart = None
