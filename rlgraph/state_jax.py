"""What determines the rest of a run in JAX, as named arrays, for checkpoints. The same names as state_torch.py."""

from typing import Any

import jax
import numpy as np

from rlgraph.checkpoint import check_same_state


def flat_state(state: Any) -> dict[str, np.ndarray]:
    """Copies on the host.

    Args:
        state: a pytree of arrays and random keys, whose keys and fields make up the names.
    """
    leaves, _ = jax.tree.flatten_with_path(state)
    return {_name(path): np.array(_numbers(leaf)) for path, leaf in leaves}


def restore(state: Any, arrays: dict[str, np.ndarray]) -> Any:
    """What `flat_state` gave, as a new tree of the structure of `state` and on its device.

    Raises:
        UsageError: a name, shape or dtype differs.
    """
    leaves, structure = jax.tree.flatten_with_path(state)
    numbers = {_name(path): _numbers(leaf) for path, leaf in leaves}
    check_same_state({name: f"{x.dtype}{list(x.shape)}" for name, x in numbers.items()}, arrays)
    return jax.tree.unflatten(structure, [_like(leaf, arrays[_name(path)]) for path, leaf in leaves])


def _like(leaf: jax.Array, array: np.ndarray) -> jax.Array:
    # What an iteration takes is donated: it must not be the memory of the numpy array.
    new = jax.device_put(array, _numbers(leaf).sharding, may_alias=False)
    return jax.random.wrap_key_data(new, impl=jax.random.key_impl(leaf)) if _is_key(leaf) else new


def _numbers(leaf: jax.Array) -> jax.Array:
    return jax.random.key_data(leaf) if _is_key(leaf) else leaf


def _is_key(leaf: jax.Array) -> bool:
    return jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _name(path) -> str:
    """ "policy/actor/layers/0/weight", and so on."""
    return jax.tree_util.keystr(path, simple=True, separator="/")
