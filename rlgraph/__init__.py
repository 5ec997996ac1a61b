"""rlgraph: reinforcement-learning environments, rollouts and updates replayed as CUDA graphs.

Importing this package loads neither torch nor jax; `make_vec` loads the backend that it is asked for.
"""

from rlgraph.errors import UsageError
from rlgraph.registry import ENVIRONMENTS, make, register
from rlgraph.vector import make_vec

__all__ = ["ENVIRONMENTS", "UsageError", "make", "make_vec", "register"]
__version__ = "0.1.0"
