"""What determines the rest of a run in JAX: as a list for compiled calls, and as named arrays, for checkpoints.

The same names as state_torch.py.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from rlgraph.runs.checkpoint import check_same_state


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


def numbers_of(state: Any) -> tuple[list[jax.Array], Callable[[list[jax.Array]], Any]]:
    """A state as the plain arrays that it is made of, and the function that makes a state of such arrays again.

    A compiled function is called with these: the host neither takes apart and builds modules in every call, nor loses
    JAX's fast path, which knows no arrays of random keys.
    """
    leaves, structure = jax.tree.flatten(state)
    impls = [jax.random.key_impl(leaf) if _is_key(leaf) else None for leaf in leaves]

    def state_of(numbers: list[jax.Array]) -> Any:
        pairs = zip(numbers, impls, strict=True)
        return jax.tree.unflatten(
            structure, [x if impl is None else jax.random.wrap_key_data(x, impl=impl) for x, impl in pairs]
        )

    return [_numbers(leaf) for leaf in leaves], state_of


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
