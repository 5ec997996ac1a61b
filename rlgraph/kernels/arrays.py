"""The arrays that a traced function sees, and their namespace: entry by entry they make nodes.

Types follow torch and JAX: floats are float32; integers and floats together give float32; Python numbers adapt to the
array that they meet.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlgraph.kernels.nodes import (
    BOOL,
    COMPARISONS,
    DTYPES,
    FLOAT,
    FLOAT_ONLY,
    INT,
    OF_BOOLEANS,
    OPS,
    Node,
    TraceError,
    entries,
)

# Which of n entries i [B] is, [B, n]: on every backend, on the state's device. (xp.arange lies on torch's CPU.)
MASK = "the mask xp.stack([i == k for k in range(n)], axis=-1)"
MOST_OPERATIONS = 3000  # of a step with its reset: each is a line of the kernel
BATCH = 999_983  # stands for B in shapes: a prime that no other axis has


@dataclass
class Tracer:
    """Nodes made so far. `xp` is the namespace to trace with."""

    known: dict[tuple, Node] = field(default_factory=dict)
    inputs: dict[str, Node] = field(default_factory=dict)

    @property
    def xp(self) -> "Namespace":
        return Namespace(self)

    def input(self, name: str, shape: tuple[int, ...], dtype: np.dtype) -> "Array":
        if dtype not in DTYPES.values():
            raise TraceError(f"{name} is of {dtype}, which a kernel does not hold; use one of {', '.join(DTYPES)}")
        if taken := sorted(self.inputs.keys() & set(entries(name, shape))):
            raise TraceError(f"two inputs of a step are called {taken[0]!r}: rename the leaf of State")
        nodes = [Node("input", (), dtype, entry, entry) for entry in entries(name, shape)]
        self.inputs |= {node.value: node for node in nodes}
        return Array(self, _filled(nodes, shape), dtype)

    def const(self, value: Any, dtype: np.dtype) -> Node:
        with np.errstate(over="ignore"):
            value = dtype.type(value).item()
        # NaN is not equal to itself, and 0.0 is to -0.0: their texts are what tells constants apart.
        return self._known(("const", repr(value), dtype), lambda: Node("const", (), dtype, value))

    def cast(self, node: Node, dtype: np.dtype) -> Node:
        if node.dtype == dtype:
            return node
        if node.is_const:
            return self.const(node.value, dtype)
        return self._known(("cast", node, dtype), lambda: Node("cast", (node,), dtype))

    def apply(self, op: str, args: list[Node], dtype: np.dtype) -> Node:
        """A node for `op`, whose arguments already have the types that it takes."""
        if all(arg.is_const for arg in args):
            with np.errstate(all="ignore"):
                return self.const(OPS[op](np, *(arg.dtype.type(arg.value) for arg in args)), dtype)
        simpler = self._simpler(op, args)
        if simpler is not None:
            return simpler
        return self._known((op, *args), lambda: Node(op, tuple(args), dtype))

    def _simpler(self, op: str, args: list[Node]) -> Node | None:
        """An argument, where it is the result whatever the others are."""
        if op == "where":
            condition, a, b = args
            if condition.is_const:
                return a if condition.value else b
            return a if a is b else None
        if op in ("and", "or") and args[0].dtype == BOOL:
            for one, other in (args, args[::-1]):
                if one.is_const:
                    return other if one.value == (op == "and") else one
        if op == "mul":
            for one, other in (args, args[::-1]):
                if one.is_const and one.value == 1:
                    return other
        if op == "div" and args[1].is_const and args[1].value == 1:
            return args[0]
        return None

    def _known(self, key: tuple, make: Callable[[], Node]) -> Node:
        if key not in self.known:
            if len(self.known) >= MOST_OPERATIONS:
                raise TraceError(f"more than {MOST_OPERATIONS} operations on single numbers in a step; use mode graph")
            self.known[key] = make()
        return self.known[key]


def _filled(nodes: list[Node], shape: tuple[int, ...]) -> np.ndarray:
    array = np.empty(len(nodes), dtype=object)
    array[:] = nodes
    return array.reshape(shape)


class Array:
    """What a traced function sees in place of an array [B, ...]."""

    __array_ufunc__ = None  # numpy arrays leave operators to this class

    def __init__(self, tracer: Tracer, nodes: np.ndarray, dtype: np.dtype):
        self._tracer, self.nodes, self.dtype = tracer, nodes, dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return (BATCH, *self.nodes.shape)

    @property
    def ndim(self) -> int:
        return 1 + self.nodes.ndim

    def __getitem__(self, index):
        index = index if isinstance(index, tuple) else (index,)
        if index[0] is Ellipsis:
            index = (slice(None), *index)
        if any(isinstance(i, Array) for i in index):
            raise TraceError(f"indexing by an array: choose with xp.where and {MASK} in its place")
        if not (isinstance(index[0], slice) and index[0] == slice(None)):
            raise TraceError("indexing the batch axis: an environment sees only its own numbers; begin with [:, ...]")
        return self._with(self.nodes[index[1:]])

    def __setitem__(self, index, value):
        raise TraceError(f"assigning to entries of an array: choose with xp.where and {MASK}")

    def _with(self, nodes: Any) -> "Array":
        return Array(self._tracer, nodes if isinstance(nodes, np.ndarray) else _filled([nodes], ()), self.dtype)

    def reshape(self, *shape):
        shape = shape[0] if len(shape) == 1 and isinstance(shape[0], tuple | list) else shape
        if not shape or shape[0] not in (BATCH, -1):
            raise TraceError(f"reshape to {list(shape)}: the first axis must stay the batch")
        return self._with(self.nodes.reshape(shape[1:]))

    def __bool__(self):
        raise TraceError("a Python `if`, `and`, `or` or `not` on an array: use xp.where, &, | and ~")

    def __array__(self, *_, **__):
        raise TraceError(f"a numpy function or index on an array: use xp's, and xp.where and {MASK} to choose")

    def __matmul__(self, other):
        raise TraceError("a matrix product: write it as sums, xp.sum(x[:, :, None] * w, axis=1)")

    __rmatmul__ = __matmul__

    def __rpow__(self, base):
        raise TraceError(f"{base} ** an array: use xp.exp")

    def _no_number(self, *_):
        raise TraceError("a Python number made of an array: the value differs between environments; use xp functions")

    __float__ = __int__ = __index__ = __complex__ = _no_number

    def __iter__(self):
        raise TraceError("iterating over the batch axis: take columns with x[:, i]")

    def __len__(self):
        return BATCH

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        raise TraceError(f"the array attribute .{name}: use a function of xp")

    __hash__ = None


def _binary(op: str) -> tuple[Callable, Callable]:
    return (lambda self, other: self._tracer.xp._apply(op, self, other)), (
        lambda self, other: self._tracer.xp._apply(op, other, self)
    )


for _op, _dunder in {
    "add": "add", "sub": "sub", "mul": "mul", "div": "truediv", "floordiv": "floordiv", "mod": "mod",
    "and": "and", "or": "or", "xor": "xor",
}.items():  # fmt: skip
    _forward, _reflected = _binary(_op)
    setattr(Array, f"__{_dunder}__", _forward)
    setattr(Array, f"__r{_dunder}__", _reflected)
for _op in COMPARISONS:
    setattr(Array, f"__{_op}__", _binary(_op)[0])
Array.__neg__ = lambda self: self._tracer.xp._apply("neg", self)
Array.__pos__ = lambda self: self
Array.__invert__ = lambda self: self._tracer.xp._apply("not", self)
Array.__abs__ = lambda self: self._tracer.xp._apply("abs", self)
Array.__pow__ = lambda self, exponent: self._tracer.xp.pow(self, exponent)


class Namespace:
    """The part of the array API that has a form inside a kernel."""

    pi, e, inf, nan, newaxis = math.pi, math.e, math.inf, math.nan, None

    def __init__(self, tracer: Tracer):
        self._tracer = tracer

    def __getattr__(self, name):
        if name in DTYPES:
            return DTYPES[name].type  # a call of it makes a constant
        if name.startswith("__"):
            raise AttributeError(name)
        raise TraceError(f"xp.{name}")

    # ---- entry by entry

    def _apply(self, op: str, *args: Any) -> Array:
        dtype = _result_type(args[1:] if op == "where" else args)
        if op in FLOAT_ONLY:
            dtype = FLOAT
        if op in ("neg", "sub") and dtype == BOOL:
            raise TraceError(f"{op} of booleans: use ~ or xp.astype")
        if op in ("and", "or", "xor", "not") and dtype == FLOAT:
            raise TraceError(f"{op} of floats: it takes booleans or integers")
        if dtype == BOOL:
            op = OF_BOOLEANS.get(op, op)  # numpy's meaning; one bit plus one bit would be 0
        kinds = [BOOL, dtype, dtype] if op == "where" else [dtype] * len(args)
        nodes = [self._nodes(arg, kind) for arg, kind in zip(args, kinds)]
        result = BOOL if op in COMPARISONS else dtype
        broadcast = np.broadcast(*nodes)
        made = [self._tracer.apply(op, list(entry), result) for entry in broadcast]
        return Array(self._tracer, _filled(made, broadcast.shape), result)

    def _nodes(self, arg: Any, dtype: np.dtype) -> np.ndarray:
        """An array's nodes as `dtype`; constants for a Python number or a numpy array."""
        if isinstance(arg, Array):
            return _filled([self._tracer.cast(node, dtype) for node in arg.nodes.flat], arg.nodes.shape)
        values = np.asarray(arg)
        return _filled([self._tracer.const(value, dtype) for value in values.flat], values.shape)

    def where(self, condition, a, b):
        return self._apply("where", condition, a, b)

    def pow(self, x, exponent):
        if isinstance(exponent, Array):
            raise TraceError("x ** array: the exponent must be a number, or write xp.exp(y * xp.log(x))")
        if exponent == 0.5:
            return self.sqrt(x)
        if not isinstance(exponent, int | float) or exponent != int(exponent) or abs(exponent) > 16:
            raise TraceError(f"x ** {exponent}: the exponent must be 0.5 or a whole number up to 16")
        result = self.ones_like(x)
        for _ in range(abs(int(exponent))):
            result = result * x
        return 1 / result if exponent < 0 else result

    def power(self, x, exponent):
        return self.pow(x, exponent)

    def square(self, x):
        return x * x

    def clip(self, x, min=None, max=None):  # noqa: A002 - the array API's names
        if min is not None:
            x = self._apply("maximum", x, min)
        return x if max is None else self._apply("minimum", x, max)

    def sign(self, x):
        return self.where(x > 0, self.ones_like(x), self.where(x < 0, -self.ones_like(x), self.zeros_like(x)))

    def tan(self, x):
        return self.sin(x) / self.cos(x)

    def isnan(self, x):
        return x != x

    def isinf(self, x):
        return abs(x) == math.inf

    def isfinite(self, x):
        return abs(x) < math.inf

    def astype(self, x, dtype, copy=True):
        dtype = _dtype(dtype)
        return Array(self._tracer, self._nodes(x, dtype), dtype)

    # ---- constants

    def full_like(self, x, value, dtype=None):
        dtype = x.dtype if dtype is None else _dtype(dtype)
        if isinstance(value, Array):
            return self.astype(value + self.zeros_like(x), dtype)
        return Array(self._tracer, np.broadcast_to(self._nodes(value, dtype), x.nodes.shape), dtype)

    def zeros_like(self, x, dtype=None):
        return self.full_like(x, 0, dtype)

    def ones_like(self, x, dtype=None):
        return self.full_like(x, 1, dtype)

    def asarray(self, values, dtype=None):
        if isinstance(values, Array):
            return values if dtype is None else self.astype(values, dtype)
        return np.asarray(values, dtype)

    def arange(self, *args, dtype=None):
        return np.arange(*args, dtype=dtype or INT)

    # ---- over the axes beyond the batch

    def stack(self, arrays, axis=0):
        arrays = self._of_one_type(arrays)
        axis = self._beyond_batch(axis, arrays[0].ndim + 1)
        return Array(self._tracer, np.stack([a.nodes for a in arrays], axis), arrays[0].dtype)

    def concat(self, arrays, axis=0):
        arrays = self._of_one_type(arrays)
        axis = self._beyond_batch(axis, arrays[0].ndim)
        return Array(self._tracer, np.concatenate([a.nodes for a in arrays], axis), arrays[0].dtype)

    concatenate = concat

    def expand_dims(self, x, axis=0):
        return x._with(np.expand_dims(x.nodes, self._beyond_batch(axis, x.ndim + 1)))

    def squeeze(self, x, axis):
        return x._with(np.squeeze(x.nodes, self._beyond_batch(axis, x.ndim)))

    def reshape(self, x, shape):
        return x.reshape(tuple(shape))

    def broadcast_to(self, x, shape):
        return x._with(np.broadcast_to(x.nodes, shape[1:]))

    def sum(self, x, axis=None, keepdims=False, dtype=None):
        return self._reduce("add", self._summand(x, dtype), axis, keepdims)

    def prod(self, x, axis=None, keepdims=False, dtype=None):
        return self._reduce("mul", self._summand(x, dtype), axis, keepdims)

    def _summand(self, x: Array, dtype) -> Array:
        """Booleans are counted."""
        if dtype is None:
            dtype = INT if x.dtype == BOOL else x.dtype
        return self.astype(x, dtype)

    def any(self, x, axis=None, keepdims=False):
        return self._reduce("or", self.astype(x, BOOL), axis, keepdims)

    def all(self, x, axis=None, keepdims=False):
        return self._reduce("and", self.astype(x, BOOL), axis, keepdims)

    def mean(self, x, axis=None, keepdims=False):
        total = self.sum(x, axis=axis, keepdims=keepdims)
        return total / (x.nodes.size // max(total.nodes.size, 1))

    def _reduce(self, op: str, x: Array, axis, keepdims: bool) -> Array:
        axis = self._beyond_batch(axis, x.ndim)
        first, *rest = (x._with(part) for part in np.moveaxis(x.nodes, axis, 0))
        for part in rest:
            first = self._apply(op, first, part)
        return self.expand_dims(first, axis + 1) if keepdims else first

    def _of_one_type(self, arrays) -> list[Array]:
        dtype = _result_type(arrays)
        return [self.astype(array, dtype) for array in arrays]

    def _beyond_batch(self, axis: int | None, ndim: int) -> int:
        """The axis, counted from the first one beyond the batch."""
        if not isinstance(axis, int) or axis % ndim == 0:
            raise TraceError(f"axis={axis} would mix environments: name an axis other than the batch, such as -1")
        return axis % ndim - 1


def _register_functions() -> None:
    """Functions of one or two arrays that are an operation, by the array API's names."""
    unary = ("abs", "floor", "ceil", "sqrt", "exp", "log", "sin", "cos", "tanh")
    other = {
        "add": "add", "subtract": "sub", "multiply": "mul", "divide": "div", "floor_divide": "floordiv",
        "remainder": "mod", "mod": "mod", "negative": "neg", "minimum": "minimum", "maximum": "maximum", "less": "lt",
        "less_equal": "le", "greater": "gt", "greater_equal": "ge", "equal": "eq", "not_equal": "ne",
        "bitwise_and": "and", "bitwise_or": "or", "bitwise_xor": "xor", "bitwise_invert": "not",
    }  # fmt: skip
    for name, op in ({name: name for name in unary} | other).items():
        setattr(Namespace, name, lambda self, *args, _op=op: self._apply(_op, *args))
    for op in ("and", "or", "xor", "not"):  # of truths: anything but 0 is one
        setattr(
            Namespace,
            f"logical_{op}",
            lambda self, *args, _op=op: self._apply(_op, *(self.astype(arg, BOOL) for arg in args)),
        )
    for name, op in {"min": "minimum", "max": "maximum"}.items():
        setattr(
            Namespace,
            name,
            lambda self, x, axis=None, keepdims=False, _op=op: self._reduce(_op, x, axis, keepdims),
        )


_register_functions()


def _dtype(dtype: Any) -> np.dtype:
    dtype = np.dtype({bool: BOOL, int: INT, float: FLOAT}.get(dtype, dtype))
    if dtype not in DTYPES.values():
        raise TraceError(f"{dtype}: a kernel holds {', '.join(DTYPES)}")
    return dtype


def _result_type(args: Any) -> np.dtype:
    arrays = [arg.dtype for arg in args if isinstance(arg, Array)]
    dtypes = [*arrays, *(_constant_type(arg, arrays) for arg in args if not isinstance(arg, Array))]
    if any(dtype.kind == "f" for dtype in dtypes):
        return FLOAT
    return np.result_type(*dtypes)


def _constant_type(value: Any, arrays: list[np.dtype]) -> np.dtype:
    """What a Python number or numpy array counts as beside arrays: no wider than it must."""
    if not isinstance(value, int | float | np.generic | np.ndarray | list | tuple):
        raise TraceError(f"a {type(value).__name__} among arrays")
    kind = np.asarray(value).dtype.kind
    if kind in "iu":
        integers = [dtype for dtype in arrays if dtype.kind in "iu"]
        return integers[0] if integers else INT
    return {"b": BOOL, "f": FLOAT}.get(kind) or _dtype(np.asarray(value).dtype)
