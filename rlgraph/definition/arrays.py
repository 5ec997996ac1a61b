"""How a trial makes, runs and looks at the arrays of each backend."""

from collections.abc import Callable
from typing import Any

import numpy as np

from rlgraph.backend import namespace


class Numpy:
    """Arrays that cannot be written to: a function that writes into its arguments fails at that line."""

    where = "on numpy arrays"

    def __init__(self):
        self.xp = np

    def array(self, values: np.ndarray) -> Any:
        return sealed(values)

    def run(self, function: Callable, *args) -> Any:
        return each(sealed, function(self.xp, *args))

    def kind(self, x: Any) -> tuple[str, tuple[int, ...]] | None:
        """dtype and shape; None for what is no array of this backend."""
        return (x.dtype.name, x.shape) if isinstance(x, np.ndarray) else None

    def dtype(self, dtype: np.dtype) -> str:
        """What this backend makes of a space's dtype."""
        return np.dtype(dtype).name

    def copy(self, x: Any) -> Any:
        """A result that stays as it is, whatever a later call does."""
        return np.array(x)

    def mixed(self, ended_B: Any, chosen: np.ndarray, new: tuple, old: tuple) -> tuple:
        """A state: `new` where an episode has ended or the row is chosen, else `old`."""
        taken_B = ended_B | self.array(chosen)
        leaves = (self.xp.where(taken_B.reshape(-1, *[1] * (o.ndim - 1)), n, o) for n, o in zip(new, old))
        return each(self.array, type(old)(*leaves))


class Torch(Numpy):
    def __init__(self, device: Any):
        import torch

        self.xp, self.device = namespace("torch"), device
        self.where, self.Tensor = f"in torch on {self.device.type}", torch.Tensor

    def array(self, values):
        return values if isinstance(values, self.Tensor) else self.xp.asarray(values.copy()).to(self.device)

    def run(self, function, *args):
        return function(self.xp, *args)

    def kind(self, x):
        if not isinstance(x, self.Tensor) or x.device.type != self.device.type:
            return None
        return str(x.dtype).removeprefix("torch."), tuple(x.shape)

    def copy(self, x):
        return x


class JAX(Numpy):
    """Traced, as all modes of training trace it: nothing is computed."""

    where = "in JAX, where a function is traced"

    def __init__(self):
        import jax

        self.xp, self.jax = namespace("jax"), jax

    def array(self, values):
        return self.jax.ShapeDtypeStruct(values.shape, self.dtype(values.dtype))

    def run(self, function, *args):
        *arrays, params = args
        return self.jax.eval_shape(lambda *traced: function(self.xp, *traced, params), *arrays)

    def kind(self, x):
        return (np.dtype(x.dtype).name, x.shape) if hasattr(x, "dtype") and hasattr(x, "shape") else None

    def dtype(self, dtype):
        return np.dtype(self.jax.dtypes.canonicalize_dtype(dtype)).name  # int64 is int32 there

    def copy(self, x):
        return x

    def mixed(self, ended_B, chosen, new, old):
        return old


def each(f: Callable, value: Any) -> Any:
    """`f` of every value in nested NamedTuples and tuples."""
    if isinstance(value, tuple):
        values = [each(f, v) for v in value]
        return type(value)(*values) if hasattr(value, "_fields") else tuple(values)
    return f(value)


def sealed(x: Any) -> Any:
    """An array that cannot be written to, and anything else as it is."""
    if isinstance(x, np.ndarray):
        x.flags.writeable = False
    return x


def leaves(value: Any) -> list:
    found: list = []
    each(found.append, value)
    return found
