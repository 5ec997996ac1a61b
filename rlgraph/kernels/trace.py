"""Trace an environment into an expression graph of single numbers: what a kernel holds in registers.

An environment's functions are run once with the namespace of `rlgraph.kernels.arrays` in place of `xp`. Its arrays
hold, for each entry beyond the batch axis, a node of the graph; every operation makes a new node, or finds the one
that is there already (common subexpressions), or a constant (folding). The result, a `Program`, is written out as
Triton by `rlgraph.kernels.rollout_writer`, and evaluated on arrays by `rlgraph.kernels.nodes.evaluate`.
"""

import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from rlgraph import environment
from rlgraph.environment import DISABLED, Carry, Environment, Step
from rlgraph.errors import UsageError
from rlgraph.kernels.arrays import Array, Tracer
from rlgraph.kernels.limits import check_size
from rlgraph.kernels.nodes import BOOL, FLOAT, INT, Node, Program, TraceError, entries


def trace_step(env: Environment, autoreset: str) -> Program:
    """One step, with time limit and autoreset.

    Inputs: the state's leaves by their names, `elapsed`, `done`, `action` (or `action_0`, …: an integer counted as the
    definition counts, or float32), and the uniforms `u_0`, …. Outputs: `next_` and each leaf's name, `next_elapsed`,
    `next_done`, `obs_…`, `reward`, `terminated`, `truncated` and `final_obs_…`; a scalar has no index.

    Raises:
        TraceError: an operation that is not supported, or one that mixes environments.
        UsageError: the definition raises something else, or a kernel of it would be too long.
    """
    check_size(env, sum(math.prod(shape) for shape, _ in leaves(env).values()))
    tracer = Tracer()
    with _lines_of(env, tracer):
        carry = _carry_inputs(tracer, env)
        shape = env.action_space.shape
        action = tracer.input("action", shape, FLOAT if shape or not _discrete(env) else INT)
        u_BN = tracer.input("u", (env.draws,), FLOAT)
        kept = _named_outputs(env, tracer, env.step(tracer.xp, carry, action, u_BN, DISABLED))
        outputs = _named_outputs(env, tracer, env.step(tracer.xp, carry, action, u_BN, autoreset))
        return Program(tracer.inputs, outputs, kept)


def _named_outputs(env: Environment, tracer: Tracer, step: Step) -> dict[str, Node]:
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


def _discrete(env: Environment) -> bool:
    return hasattr(env.action_space, "n")


def _carry_inputs(tracer: Tracer, env: Environment) -> Carry:
    state = {name: tracer.input(name, *kind) for name, kind in leaves(env).items()}
    return Carry(env.definition.State(**state), tracer.input("elapsed", (), INT), tracer.input("done", (), BOOL))


def _carry_arrays(carry: Carry) -> dict[str, Array]:
    return carry.state._asdict() | {"elapsed": carry.elapsed_B, "done": carry.done_B}


def _flat(arrays: dict[str, Array]) -> dict[str, Node]:
    named = {}
    for name, array in arrays.items():
        named |= zip(entries(name, array.nodes.shape), array.nodes.flat)
    return named


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
