"""rlgraph: reinforcement-learning environments, rollouts and updates replayed as CUDA graphs.

Importing this package loads nothing else, neither torch nor jax: a name is loaded when it is first asked for, and
`make_vec` loads the backend that it is asked for.
"""

import importlib

__all__ = ["ENVIRONMENTS", "UsageError", "make", "make_vec", "register"]
__version__ = "0.1.0"

_PLACES = {
    "ENVIRONMENTS": "rlgraph.registry",
    "UsageError": "rlgraph.errors",
    "make": "rlgraph.registry",
    "make_vec": "rlgraph.vector",
    "register": "rlgraph.registry",
}


def __getattr__(name: str):
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_PLACES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_PLACES])
