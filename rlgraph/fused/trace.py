"""Trace an environment into an expression graph of single numbers: what a kernel holds in registers.

An environment's functions are run once with the namespace below in place of `xp`. Its arrays hold, for each entry
beyond the batch axis, a node of the graph; every operation makes a new node, or finds the one that is there already
(common subexpressions), or a constant (folding). The result, a `Program`, is written out as Triton by
`rlgraph.fused.rollouts`, and evaluated on arrays by `evaluate`.

Types follow torch and JAX: floats are float32; integers and floats together give float32; Python numbers adapt to the
array that they meet.
"""

import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from rlgraph import environment
from rlgraph.environment import DISABLED, Carry, Environment, Step
from rlgraph.errors import UsageError

BATCH = 999_983  # stands for B in shapes: a prime that no other axis has
FLOAT, INT, BOOL = np.dtype(np.float32), np.dtype(np.int32), np.dtype(np.bool_)
DTYPES = {"bool": BOOL, "float32": FLOAT} | {
    name: np.dtype(name) for name in ("int8", "int16", "int32", "int64", "uint8")
}


class TraceError(UsageError):
    """An operation that has no form inside a kernel; the message names it and the line that asked for it."""


@dataclass(eq=False)
class Node:
    """One number for each environment."""

    op: str  # a key of OPS, "input", "const" or "cast"
    args: tuple["Node", ...]
    dtype: np.dtype
    value: Any = None  # of a const: a Python number; of an input: its name
    name: str = ""  # what the environment calls it, if it does

    @property
    def is_const(self) -> bool:
        return self.op == "const"


@dataclass(frozen=True)
class Program:
    """Outputs as expressions of inputs, by name. Names of vector entries end in their index: `u_0`, `obs_3`.

    `kept` has the outputs of a step that resets nothing: the same where no episode has ended.
    """

    inputs: dict[str, Node]
    outputs: dict[str, Node]
    kept: dict[str, Node] = field(default_factory=dict)

    def nodes(self) -> list[Node]:
        """All nodes that the outputs need, arguments before their users."""
        found: dict[Node, None] = {}
        waiting = [(node, False) for node in (*reversed(self.outputs.values()), *self.kept.values())]
        while waiting:
            node, arguments_are_there = waiting.pop()
            if node in found:
                continue
            if arguments_are_there:
                found[node] = None
            else:
                waiting += [(node, True), *((arg, False) for arg in reversed(node.args))]
        return list(found)


# Each operation as a function of arrays; `xp` is numpy, jax.numpy or torch's compatible namespace.
OPS: dict[str, Callable] = {
    "add": lambda xp, a, b: a + b,
    "sub": lambda xp, a, b: a - b,
    "mul": lambda xp, a, b: a * b,
    "div": lambda xp, a, b: a / b,
    "floordiv": lambda xp, a, b: a // b,
    "mod": lambda xp, a, b: a % b,
    "neg": lambda xp, a: -a,
    "lt": lambda xp, a, b: a < b,
    "le": lambda xp, a, b: a <= b,
    "gt": lambda xp, a, b: a > b,
    "ge": lambda xp, a, b: a >= b,
    "eq": lambda xp, a, b: a == b,
    "ne": lambda xp, a, b: a != b,
    "and": lambda xp, a, b: a & b,
    "or": lambda xp, a, b: a | b,
    "xor": lambda xp, a, b: a ^ b,
    "not": lambda xp, a: ~a,
    "minimum": lambda xp, a, b: xp.minimum(a, b),
    "maximum": lambda xp, a, b: xp.maximum(a, b),
    "where": lambda xp, c, a, b: xp.where(c, a, b),
    "abs": lambda xp, a: abs(a),
    "floor": lambda xp, a: xp.floor(a),
    "ceil": lambda xp, a: xp.ceil(a),
    "sqrt": lambda xp, a: xp.sqrt(a),
    "exp": lambda xp, a: xp.exp(a),
    "log": lambda xp, a: xp.log(a),
    "sin": lambda xp, a: xp.sin(a),
    "cos": lambda xp, a: xp.cos(a),
    "tanh": lambda xp, a: xp.tanh(a),
}
COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")
OF_BOOLEANS = {"add": "or", "maximum": "or", "mul": "and", "minimum": "and"}
FLOAT_ONLY = ("div", "floor", "ceil", "sqrt", "exp", "log", "sin", "cos", "tanh")


def evaluate(
    program: Program, xp: ModuleType, inputs: dict[str, Any], constant: Callable[[Any, np.dtype], Any] | None = None
) -> dict[str, Any]:
    """The program's outputs by name, for arrays of one shape (or numbers) given by name.

    `constant`, (value, dtype) -> what stands for it, makes something other than an array of each constant.
    """
    constant = constant or (lambda value, dtype: xp.asarray(value, dtype=getattr(xp, dtype.name)))
    values: dict[Node, Any] = {}
    for node in program.nodes():
        args = [values[arg] for arg in node.args]
        if node.op == "input":
            values[node] = inputs[node.value]
        elif node.is_const:
            values[node] = constant(node.value, node.dtype)
        elif node.op == "cast":
            values[node] = args[0].astype(getattr(xp, node.dtype.name))
        else:
            values[node] = OPS[node.op](xp, *args)
    return {name: values[node] for name, node in program.outputs.items()}


def trace_step(env: Environment, autoreset: str) -> Program:
    """One step, with time limit and autoreset.

    Inputs: the state's leaves by their names, `elapsed`, `done`, `action` (or `action_0`, …: an integer counted as the
    definition counts, or float32), and the uniforms `u_0`, …. Outputs: `next_` and each leaf's name, `next_elapsed`,
    `next_done`, `obs_…`, `reward`, `terminated`, `truncated` and `final_obs_…`; a scalar has no index.

    Raises:
        TraceError: an operation that is not supported, or one that mixes environments.
        UsageError: the definition raises something else.
    """
    tracer = Tracer()
    with _lines_of(env, tracer):
        carry = _carry_inputs(tracer, env)
        shape = env.action_space.shape
        action = tracer.input("action", shape, FLOAT if shape or not _discrete(env) else INT)
        u_BN = tracer.input("u", (env.draws,), FLOAT)
        kept = _named_outputs(env, tracer, env.step(tracer.xp, carry, action, u_BN, DISABLED))
        outputs = _named_outputs(env, tracer, env.step(tracer.xp, carry, action, u_BN, autoreset))
        return Program(tracer.inputs, outputs, kept)


def _named_outputs(env: Environment, tracer: "Tracer", step: Step) -> dict[str, Node]:
    """A step's numbers by name, in the types that a definition declares: on arrays they come out so by themselves."""
    types = {f"next_{name}": dtype for name, (_, dtype) in leaves(env).items()}
    types |= dict.fromkeys(("obs", "final_obs"), env.observation_space.dtype)
    arrays = {f"next_{name}": array for name, array in _carry_arrays(step.carry).items()}
    arrays |= {"obs": step.obs, "reward": step.reward_B, "terminated": step.terminated_B}
    arrays |= {"truncated": step.truncated_B, "final_obs": step.final_obs}
    return _flat({name: tracer.xp.astype(array, types.get(name, array.dtype)) for name, array in arrays.items()})


def trace_reset(env: Environment) -> Program:
    """Inputs: the uniforms `u_0`, … of a reset; outputs: the state's leaves by their names. Raises as `trace_step`."""
    tracer = Tracer()
    with _lines_of(env, tracer):
        carry, _ = env.reset(tracer.xp, tracer.input("u", (env.reset_draws,), FLOAT))
        types = {name: dtype for name, (_, dtype) in leaves(env).items()}
        arrays = carry.state._asdict()
        return Program(tracer.inputs, _flat({name: tracer.xp.astype(x, types[name]) for name, x in arrays.items()}))


def trace_observe(env: Environment) -> Program:
    """Inputs: the state's leaves; outputs `obs_…`. Raises as `trace_step`."""
    tracer = Tracer()
    with _lines_of(env, tracer):
        state = _carry_inputs(tracer, env).state
        obs = env.definition.observe(tracer.xp, state, env.params)
        return Program(tracer.inputs, _flat({"obs": tracer.xp.astype(obs, env.observation_space.dtype)}))


def leaves(env: Environment) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
    """Shape beyond the batch axis, and dtype, of each leaf of the state, by name."""
    carry, _ = env.reset(np, np.full((1, env.reset_draws), 0.5, np.float32))
    return {name: (leaf.shape[1:], leaf.dtype) for name, leaf in carry.state._asdict().items()}


def entries(name: str, shape: tuple[int, ...]) -> list[str]:
    """The names of an array's entries: the array's own where it has one entry and no axis."""
    return [name + "".join(f"_{i}" for i in index) for index in np.ndindex(*shape)]


def _discrete(env: Environment) -> bool:
    return hasattr(env.action_space, "n")


def _carry_inputs(tracer: "Tracer", env: Environment) -> Carry:
    state = {name: tracer.input(name, *kind) for name, kind in leaves(env).items()}
    return Carry(env.definition.State(**state), tracer.input("elapsed", (), INT), tracer.input("done", (), BOOL))


def _carry_arrays(carry: Carry) -> dict[str, "Array"]:
    return carry.state._asdict() | {"elapsed": carry.elapsed_B, "done": carry.done_B}


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
            self.known[key] = make()
        return self.known[key]


def _flat(arrays: dict[str, "Array"]) -> dict[str, Node]:
    named = {}
    for name, array in arrays.items():
        named |= zip(entries(name, array.nodes.shape), array.nodes.flat)
    return named


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
            raise TraceError("indexing by an array: choose with xp.where(xp.arange(n) == i, ...) in its place")
        if not (isinstance(index[0], slice) and index[0] == slice(None)):
            raise TraceError("indexing the batch axis: an environment sees only its own numbers; begin with [:, ...]")
        return self._with(self.nodes[index[1:]])

    def __setitem__(self, index, value):
        raise TraceError("assigning to entries of an array: choose with xp.where(xp.arange(n) == i, value, x)")

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
        raise TraceError(
            "a numpy function or index on an array: use xp's, and xp.where(xp.arange(n) == i, ...) to choose"
        )

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


class _lines_of:  # noqa: N801 - a context manager
    """While a definition is traced: names of its variables go to their nodes, and errors get their line."""

    def __init__(self, env: Environment, tracer: Tracer):
        self.env, self.file = env, _file_of(env.definition)

    def __enter__(self):
        self.before = sys.getprofile()
        sys.setprofile(self._at_return)

    def __exit__(self, kind, error, traceback):
        sys.setprofile(self.before)
        if not isinstance(error, Exception):
            return
        line = _last_line(traceback, self.file)
        if isinstance(error, TraceError):
            what = f"{error} has no form inside a kernel" if str(error).startswith("xp.") else str(error)
        elif isinstance(error, UsageError):
            return
        else:
            what = f"{type(error).__name__}: {error}"
        raise TraceError(f"environment {self.env.id!r} cannot be fused: {line}: {what}") from error

    def _at_return(self, frame, event, _):
        if event == "return" and frame.f_code.co_filename in (self.file, environment.__file__):
            for name, value in frame.f_locals.items():
                for entry, node in _named_nodes(name, value):
                    if not node.name and not node.is_const:
                        node.name = entry


def _file_of(definition: Any) -> str:
    """A module's file; of a definition that has none, the one that its `step` was read from."""
    code = getattr(definition.step, "__code__", None)
    return getattr(definition, "__file__", None) or getattr(code, "co_filename", definition.__name__)


def _named_nodes(name: str, value: Any) -> Iterator[tuple[str, Node]]:
    if isinstance(value, Array):
        yield from zip(entries(name, value.nodes.shape), value.nodes.flat)
    elif isinstance(value, tuple) and hasattr(value, "_asdict"):
        for leaf, array in value._asdict().items():
            yield from _named_nodes(f"{name}_{leaf}", array)


def _last_line(traceback, file: str) -> str:
    """The innermost line of a definition in a traceback: "cartpole.py, line 78"."""
    lines = []
    while traceback is not None:
        if traceback.tb_frame.f_code.co_filename == file:
            lines.append(traceback.tb_lineno)
        traceback = traceback.tb_next
    return f"{Path(file).name}, line {lines[-1]}" if lines else Path(file).name
