"""The array namespaces that one definition runs over, imported only when asked for."""

import importlib
from types import ModuleType

from rlgraph.errors import unknown

# numpy serves the contract checks and the tests; agents and vector environments run on torch or jax.
NAMESPACES = {"torch": "array_api_compat.torch", "jax": "jax.numpy", "numpy": "numpy"}
BACKENDS = ("torch", "jax")


def namespace(backend: str) -> ModuleType:
    """The array namespace `xp` of a backend: "torch", "jax" or "numpy".

    Raises:
        UsageError: the backend is none of these.
    """
    if backend not in NAMESPACES:
        raise unknown("backend", backend, NAMESPACES)
    return importlib.import_module(NAMESPACES[backend])
