"""Environments as expression graphs: they compute what their functions compute, and say what they cannot hold."""

import re
import sys
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
import torch
from diagnostics import Diagnostic, NoParams, Wander
from fused_tools import Sink, interpreted
from gymnasium.spaces import Box, Discrete

import rlgraph
from rlgraph.backend import namespace
from rlgraph.environment import DISABLED, NEXT_STEP, SAME_STEP, Environment, build
from rlgraph.errors import UsageError
from rlgraph.kernels import arrays, trace
from rlgraph.kernels.arrays import Tracer
from rlgraph.kernels.nodes import DTYPES, FLOAT, INT, Program, TraceError, entries, evaluate
from rlgraph.kernels.rollouts import why_not
from rlgraph.kernels.trace import trace_observe

MODES = (SAME_STEP, NEXT_STEP, DISABLED)


def split(name, array):
    """A batch [B, ...] as the arrays [B] that a program takes or gives, by name."""
    names = entries(name, array.shape[1:])
    return dict(zip(names, array.reshape(len(array), len(names)).T, strict=True))


def inputs_of(carry, action, u):
    arrays = carry.state._asdict() | {"elapsed": carry.elapsed_B, "done": carry.done_B, "action": action, "u": u}
    return {entry: x for name, array in arrays.items() for entry, x in split(name, array).items()}


def outputs_of(step):
    arrays = {f"next_{name}": leaf for name, leaf in step.carry.state._asdict().items()}
    arrays |= {"next_elapsed": step.carry.elapsed_B, "next_done": step.carry.done_B, "obs": step.obs}
    arrays |= {"reward": step.reward_B, "terminated": step.terminated_B, "truncated": step.truncated_B}
    arrays["final_obs"] = step.final_obs
    return {entry: x for name, array in arrays.items() for entry, x in split(name, array).items()}


def random_actions(env, rng, B):
    space = env.action_space
    if isinstance(space, Discrete):
        return rng.integers(space.start, space.start + space.n, size=B)
    return rng.normal(0, 2, (B, *space.shape)).astype(np.float32)


def check_against_numpy(env, mode, same, steps=30, B=50):
    """`same(got, expected, name)` for every output of every step. Returns how many episodes ended."""
    program, observed = trace.trace_step(env, mode), trace_observe(env)
    rng = np.random.default_rng(0)
    carry, _ = env.reset(np, rng.random((B, env.reset_draws), np.float32))
    ended = 0
    for _ in range(steps):
        state = {entry: x for name, leaf in carry.state._asdict().items() for entry, x in split(name, leaf).items()}
        for name, got in evaluate(observed, np, state).items():
            same(np.broadcast_to(got, B), split("obs", env.definition.observe(np, carry.state, env.params))[name], name)
        action, u = random_actions(env, rng, B), rng.random((B, env.draws), np.float32)
        given = inputs_of(carry, action, u)
        step = env.step(np, carry, action, u, mode)
        expected = outputs_of(step)
        results = evaluate(program, np, given)
        assert results.keys() == expected.keys()
        # `kept` is the step without a reset.
        kept = outputs_of(env.step(np, carry, action, u, DISABLED))
        results_kept = evaluate(Program(program.inputs, program.kept), np, given)
        for name, got in [*results.items(), *results_kept.items()]:
            assert got.dtype == expected[name].dtype, name
        for name, got in results.items():
            same(np.broadcast_to(got, B), expected[name], name)
            same(np.broadcast_to(results_kept[name], B), kept[name], name)
        ended += (step.terminated_B | step.truncated_B).sum()
        carry = step.carry
    return ended


def bit_for_bit(got, expected, name):
    np.testing.assert_array_equal(got, expected, err_msg=name)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("id", sorted(rlgraph.ENVIRONMENTS))
def test_a_traced_step_is_the_step(id, mode):
    assert check_against_numpy(rlgraph.make(id, max_episode_steps=7), mode, bit_for_bit) >= 3 * 50


@pytest.mark.parametrize("mode", MODES)
def test_vectors_integers_draws_and_an_offset(mode):
    assert check_against_numpy(build(Wander), mode, bit_for_bit) > 50


# ---- every function and operator


def nearly(got, expected, name):
    """To the last bit, but for what follows from `rounded`."""
    if expected.dtype != np.float32 or name.startswith("next_w"):
        bit_for_bit(got, expected, name)
    else:
        np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("mode", MODES)
def test_every_function_and_operator(mode, monkeypatch):
    used = set()

    class Watched(arrays.Namespace):
        def __getattribute__(self, name):
            used.add(name)
            return super().__getattribute__(name)

    monkeypatch.setattr(Tracer, "xp", property(Watched))
    assert check_against_numpy(build(Sink), mode, nearly, steps=12) > 50
    assert {name for name in vars(arrays.Namespace) if not name.startswith("_")} - used == set()
    assert set(DTYPES) - used == {"bool", "int16"}


# ---- what it folds and finds again


def ops_of(fn):
    """The operations of a program of x [B, 2] and n [B] int32, in order, with constants as their values."""
    tracer = Tracer()
    result = fn(tracer.xp, tracer.input("x", (2,), FLOAT), tracer.input("n", (), INT))
    nodes = np.atleast_1d(result.nodes).flat
    program = Program(tracer.inputs, {f"out_{i}": node for i, node in enumerate(nodes)})
    return [node.value if node.is_const or node.op == "input" else node.op for node in program.nodes()]


@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        (lambda xp, x, n: x[:, 0] * x[:, 1] + x[:, 0] * x[:, 1], ["x_0", "x_1", "mul", "add"]),
        (lambda xp, x, n: xp.sin(x[:, 0]) ** 2 + xp.sin(x[:, 0]), ["x_0", "sin", "mul", "add"]),
        (lambda xp, x, n: (x + 1 > x)[:, 0] & (x > 1)[:, 0], ["x_0", 1.0, "add", "gt", "gt", "and"]),
        (lambda xp, x, n: xp.ones_like(n, dtype=xp.float32) * 2 + 3, [5.0]),
        (lambda xp, x, n: xp.full_like(x[:, 0], 0.1) * 3, [float(np.float32(0.1) * np.float32(3))]),
        (lambda xp, x, n: xp.where(xp.ones_like(n) > 0, n, n // 0), ["n"]),
        (lambda xp, x, n: xp.where(n > 0, x[:, 0], x[:, 0]), ["x_0"]),
        (lambda xp, x, n: 1 * x[:, 0] / 1, ["x_0"]),
        (lambda xp, x, n: (n > 0) & True, ["n", 0, "gt"]),
        (lambda xp, x, n: (n > 0) | xp.ones_like(n, dtype=xp.bool), [True]),
        (lambda xp, x, n: (n > 0) + (n < 0), ["n", 0, "gt", "lt", "or"]),  # one bit plus one bit would be 0
        (lambda xp, x, n: (n > 0) * (n < 0), ["n", 0, "gt", "lt", "and"]),
        (lambda xp, x, n: xp.sum(x > 0, axis=1), ["x_0", "x_1", 0.0, "gt", "gt", "cast", "cast", "add"]),
        (lambda xp, x, n: xp.any(x, axis=1), ["x_0", "x_1", "cast", "cast", "or"]),
        (
            lambda xp, x, n: xp.sum(x > 0, axis=1, dtype=xp.float32),
            ["x_0", "x_1", 0.0, "gt", "gt", "cast", "cast", "add"],
        ),
        (lambda xp, x, n: 0 * x[:, 0], [0.0, "x_0", "mul"]),  # which NaN would show
        (lambda xp, x, n: xp.stack([xp.zeros_like(n), xp.zeros_like(n), n], axis=1), [0, "n"]),
        (lambda xp, x, n: xp.astype(n, xp.float32) + 0.5 * n, ["n", "cast", 0.5, "mul", "add"]),
        (lambda xp, x, n: xp.astype(n, xp.int32), ["n"]),
        (lambda xp, x, n: xp.sum(x[:, ::-1], axis=1), ["x_1", "x_0", "add"]),
    ],
)
def test_common_subexpressions_and_constants_are_found(fn, expected):
    found = ops_of(fn)
    assert sorted(map(str, found)) == sorted(map(str, expected)), found


def test_constants_that_compare_equal_are_kept_apart():
    assert list(
        map(repr, ops_of(lambda xp, x, n: xp.stack([0.0 * xp.ones_like(x), -0.0 * xp.ones_like(x)], axis=1)))
    ) == [
        "0.0",
        "-0.0",
    ]
    assert ops_of(lambda xp, x, n: xp.full_like(x, xp.nan))[0] != 0
    assert len(ops_of(lambda xp, x, n: xp.full_like(x, xp.nan))) == 1


def test_nodes_have_the_names_of_the_environments_variables():
    names = {node.name for node in trace.trace_step(rlgraph.make("CartPole-v1"), SAME_STEP).nodes()}
    assert {"push", "force", "cos", "sin", "temp", "theta_acc", "x_acc", "terminated", "state_x_dot"} - names <= {
        "push"
    }
    names = {node.name for node in trace.trace_step(build(Wander), SAME_STEP).nodes()}
    assert {"push", "wind", "at_0", "at_1", "u_3", "steps", "reward", "elapsed_B"} <= names


# ---- what it refuses


class Bad(Diagnostic):
    """Its reward is whatever a test asks for."""

    ID = "Bad-v0"

    @classmethod
    def reward(cls, xp, s, action):
        return cls.reward_of(xp, s.x)


def error_of(**attributes):
    definition = type("Bad", (Bad,), {"__file__": __file__, **attributes})
    env = Environment("Bad-v0", definition, NoParams(), 5)  # not `build`, which runs it on numpy
    with pytest.raises(TraceError) as error:
        trace.trace_step(env, SAME_STEP)
    assert "\n" not in str(error.value)
    return str(error.value)


def assigns(xp, x):
    x[:, None][:, 0] = 1
    return x


def raises(xp, x):
    raise KeyError("own error")


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (lambda xp, x: x if x > 0 else -x, "a Python `if`, `and`, `or` or `not` on an array: use xp.where"),
        (lambda xp, x: x > 0 and x < 1, "a Python `if`, `and`, `or` or `not` on an array"),
        (lambda xp, x: float(x) + x, "a Python number made of an array"),
        (lambda xp, x: int(x) + x, "a Python number made of an array"),
        (lambda xp, x: xp.sort(x), "xp.sort has no form inside a kernel"),
        (lambda xp, x: xp.linalg.norm(x), "xp.linalg has no form inside a kernel"),
        (
            lambda xp, x: x[x > 0],
            r"indexing by an array: choose with xp.where and the mask xp.stack\(\[i == k for k in",
        ),
        (lambda xp, x: x[0], "indexing the batch axis"),
        (lambda xp, x: x[1:], "indexing the batch axis"),
        (assigns, "assigning to entries of an array: choose with xp.where and the mask"),
        (lambda xp, x: xp.sum(x, axis=0), "axis=0 would mix environments"),
        (lambda xp, x: xp.sum(x), "axis=None would mix environments"),
        (lambda xp, x: xp.stack([x, x]), "axis=0 would mix environments"),
        (lambda xp, x: x.reshape(3, -1), "the first axis must stay the batch"),
        (lambda xp, x: x**x, r"x \*\* array: the exponent must be a number"),
        (lambda xp, x: x**2.5, r"x \*\* 2.5: the exponent must be 0.5 or a whole number"),
        (lambda xp, x: 2**x, r"2 \*\* an array: use xp.exp"),
        (lambda xp, x: x @ x, "a matrix product: write it as sums"),
        (lambda xp, x: np.ones((2, 1), np.float32) @ x, "a matrix product: write it as sums"),
        (lambda xp, x: np.arange(3)[x], "a numpy function or index on an array: use xp's"),
        (lambda xp, x: np.where(x > 0, x, x), "a numpy function or index on an array: use xp's"),
        (lambda xp, x: xp.astype(x, xp.float64), "xp.float64 has no form inside a kernel"),
        (lambda xp, x: xp.astype(x, np.float64), "float64: a kernel holds bool, float32"),
        (lambda xp, x: x.at[:, 0].set(1), "the array attribute .at: use a function of xp"),
        (lambda xp, x: sum(x), "iterating over the batch axis"),
        (lambda xp, x: -(x > 0), "neg of booleans: use ~ or xp.astype"),
        (lambda xp, x: x & x, "and of floats: it takes booleans or integers"),
        (lambda xp, x: x + "a", "a str among arrays"),
        (lambda xp, x: np.sin(x), "TypeError"),
        (raises, "KeyError: 'own error'"),
    ],
)
def test_what_has_no_form_in_a_kernel_is_named_with_its_line(fn, message):
    line = fn.__code__.co_firstlineno + (fn.__name__ != "<lambda>")
    error = error_of(reward_of=staticmethod(fn))
    assert error.startswith(f"environment 'Bad-v0' cannot be fused: test_fused_trace.py, line {line}: "), error
    assert re.search(message, error), error


def masked(xp, x, i, v):
    """What the errors advise: x [B, 4] with v at i, and x at i."""
    mask = xp.stack([i == k for k in range(4)], axis=-1)
    put = xp.where(mask, v[:, None], x)
    return put, xp.sum(xp.where(mask, x, xp.zeros_like(x)), axis=-1)


def test_a_mask_chooses_entries_on_every_backend_and_device():
    x, i, v = np.arange(8, dtype=np.float32).reshape(2, 4), np.array([3, 0], np.int32), np.array([9, 8], np.float32)
    expected = [[0, 1, 2, 9], [8, 5, 6, 7]], [3, 4]
    xp = namespace("torch")
    results = [masked(np, x, i, v), masked(xp, *map(xp.from_numpy, (x, i, v)))]
    results.append(jax.jit(lambda *arrays: masked(jax.numpy, *arrays))(x, i, v))
    for result in results:
        for got, right in zip(result, expected):
            assert str(got.dtype).endswith("float32")
            np.testing.assert_array_equal(np.asarray(got), right)
    elsewhere = masked(xp, *(xp.from_numpy(array).to("meta") for array in (x, i, v)))  # a mask on the CPU would fail
    assert [array.device.type for array in elsewhere] == ["meta", "meta"]
    tracer = arrays.Tracer()
    traced = masked(
        tracer.xp, *(tracer.input(*given) for given in (("x", (4,), FLOAT), ("i", (), INT), ("v", (), FLOAT)))
    )
    for row in range(2):
        numbers = {f"x_{k}": x[row, k] for k in range(4)} | {"i": i[row], "v": v[row]}
        outputs = dict(zip(["a", "b", "c", "d", "at"], [*traced[0].nodes, traced[1].nodes.item()]))
        got = list(evaluate(Program(tracer.inputs, outputs), np, numbers).values())
        assert got == [*expected[0][row], expected[1][row]]


def sized(observed=2, action=0, state=1, draws=1, operations=1):
    """A definition with so many numbers of each kind."""

    class Sized(Diagnostic):
        ID, RESET_DRAWS = "Sized-v0", draws

        class State(NamedTuple):
            x: Any

        @staticmethod
        def observation_space(p):
            return Box(-9, 9, (observed,))

        @staticmethod
        def action_space(p):
            return Box(-1, 1, (action,)) if action else Discrete(2)

        @classmethod
        def reset(cls, xp, u, p):
            return cls.State(xp.stack([u[:, 0]] * state, axis=-1))

        @classmethod
        def step(cls, xp, s, a, u, p):
            x = s.x
            for i in range(operations):
                x = x * (1 + i / 1024)
            return cls.State(x), s.x[:, 0], s.x[:, 0] > 5

        @staticmethod
        def observe(xp, s, p):
            return xp.stack([s.x[:, 0] + i for i in range(observed)], axis=-1)

    return Sized


LIMITS = [
    ("observed", 64, "an observation of at most 64 numbers, and environment 'Sized-v0' has {}"),
    ("action", 32, "an action of at most 32 numbers, and environment 'Sized-v0' has {}"),
    ("state", 128, "a state of at most 128 numbers, and environment 'Sized-v0' has {}"),
    ("draws", 128, "the uniforms of a step of at most 128 numbers, and environment 'Sized-v0' has {}"),
]


@pytest.mark.parametrize(("kind", "most", "message"), LIMITS)
def test_what_would_make_too_long_a_kernel_goes_to_mode_graph(kind, most, message):
    assert trace.trace_step(build(sized(**{kind: most})), SAME_STEP).outputs
    for too_many in (most + 1, 300):
        with pytest.raises(UsageError) as error:
            trace.trace_step(build(sized(**{kind: too_many})), SAME_STEP)
        assert str(error.value) == f"mode fused holds {message.format(too_many)}; use mode graph"


def test_too_many_operations_on_few_numbers_are_found_early():
    with pytest.raises(TraceError, match=r"line \d+: more than 3000 operations .*; use mode graph$"):
        trace.trace_step(build(sized(state=128, operations=10_000)), SAME_STEP)


@interpreted
def test_why_not_says_how_large_an_observation_may_be():
    reason = why_not(build(sized(observed=300)), None, torch.device("cpu"))
    assert reason == f"mode fused holds {LIMITS[0][2].format(300)}; use mode graph"


class Halves(NamedTuple):
    x: Any
    t: Any


class Taken(NamedTuple):
    done: Any
    t: Any


@pytest.mark.parametrize(
    ("state", "dtype", "message"),
    [
        (Halves, np.float16, "x is of float16, which a kernel does not hold; use one of bool, float32"),
        (Taken, np.float32, "two inputs of a step are called 'done': rename the leaf of State"),
    ],
)
def test_leaves_that_no_kernel_holds(state, dtype, message):
    def reset(xp, u, p):
        return state(xp.astype(u[:, 0], dtype), 0 * u[:, 0])

    error = error_of(State=state, reset=staticmethod(reset), observe=lambda xp, s, p: s.t)
    assert error.startswith(f"environment 'Bad-v0' cannot be fused: test_fused_trace.py: {message}"), error


def test_tracing_leaves_no_profiler_behind():
    before = sys.getprofile()
    error_of(reward_of=staticmethod(raises))
    assert sys.getprofile() is before
