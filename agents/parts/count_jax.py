"""A count on the device that goes on beyond 2^31, where JAX has 32-bit integers only, as torch's of 64 bits does."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

WORD = 2**32


class Count(NamedTuple):
    """A whole number below 2^64 in two words."""

    low: jax.Array  # [] uint32
    high: jax.Array  # [] uint32

    @classmethod
    def of(cls, number: int) -> "Count":
        return cls(jnp.uint32(number % WORD), jnp.uint32(number // WORD))

    def next(self) -> "Count":
        """The number after this one."""
        low = self.low + jnp.uint32(1)
        return Count(low, self.high + (low == 0).astype(jnp.uint32))

    def share(self, total: int) -> jax.Array:
        """Its quotient by a Python number of any size, [] float32."""
        return (self.high.astype(jnp.float32) * float(WORD) + self.low.astype(jnp.float32)) / float(total)

    def below(self, limit: int) -> jax.Array:
        """Whether it is less than a Python number of any size, [] bool."""
        other = Count.of(min(limit, WORD**2 - 1))
        return (self.high < other.high) | ((self.high == other.high) & (self.low < other.low))
