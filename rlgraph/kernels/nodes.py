"""An expression graph of single numbers: its nodes, what each operation computes, and a program of them."""

from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import numpy as np

from rlgraph.errors import UsageError

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


def entries(name: str, shape: tuple[int, ...]) -> list[str]:
    """The names of an array's entries: the array's own where it has one entry and no axis."""
    return [name + "".join(f"_{i}" for i in index) for index in np.ndindex(*shape)]
