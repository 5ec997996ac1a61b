"""Running mean and variance on the device.

The count of rows is float32. Once a batch is less than 2^-24 of it, it stays as it is, and each batch moves the moments
by that share: the oldest are forgotten, slowly. Nothing overflows.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Moments(NamedTuple):
    """Population moments of `count` rows."""

    mean_D: jax.Array  # [D] float32
    var_D: jax.Array  # [D] float32
    count: jax.Array  # [] float32


def merge_moments(moments: Moments, batch_ND: jax.Array) -> Moments:
    """Running moments with a batch [N, D] merged in (Chan, Golub & LeVeque, 1979)."""
    mean_D, var_D, count = moments
    n = batch_ND.shape[0]
    delta_D, total = jnp.mean(batch_ND, axis=0) - mean_D, count + n
    merged_D = (var_D * count + jnp.var(batch_ND, axis=0) * n + delta_D**2 * (count * n / total)) / total
    return Moments(mean_D + delta_D * (n / total), merged_D, total)
