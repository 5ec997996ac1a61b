"""Rollouts in JAX by one kernel: T steps of actor and environment with all that they carry in registers.

Written with Pallas, which compiles the kernel by Triton. Each program of its grid plays a block of environments from
the first step to the last: it loads the actor's weights and its environments' state once, and stores what each step
gave. Random numbers are drawn before, and the critic runs over all observations after, both by XLA, as in
`rlgraph.rollout.jax`.

Shape letters: T steps, B environments, N uniforms a step, D observation entries, A outputs of the actor, K rows of a
block.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import gymnasium
import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from rlgraph.environment import SAME_STEP, Carry, Environment
from rlgraph.errors import UsageError
from rlgraph.kernels.nodes import Program, entries, evaluate
from rlgraph.kernels.trace import trace_step
from rlgraph.kernels.weights import ACTIVATIONS, MOST_OUTPUTS, Layer, Policy, rounded_up
from rlgraph.precision import jax_matmul_precision
from rlgraph.rollout import EpisodeTotals, Rollout
from rlgraph.rollout.jax import Collector, draw, in_parts

try:
    from jax.experimental.pallas import triton as plgpu
except ImportError:  # jax 0.11 calls this backend deprecated
    plgpu = None


class Launch(NamedTuple):
    """How the kernel is laid out over a GPU, which does not change what it computes."""

    block: int  # environments a program, a power of two; Triton's matrix products take at least 16 rows
    warps: int  # of 32 threads, a program
    stages: int = 1  # of software pipelining. Nothing to win: a step's loads are issued before its network, used after


# Few environments are spread over as many programs as there can be. With many, 64 rows and 4 warps are what Hopper's
# matrix instructions take, with the weights in shared memory. In float32 there are no such instructions, and one warp's
# registers do not hold its part of a product. Chosen so that ptxas spills next to nothing for hidden layers of 64.
FEW, MANY, IEEE = Launch(16, 2), Launch(64, 4), Launch(16, 4)
FEW_UP_TO = 16_384  # environments
WIDE = 64  # a layer wider than this takes several times the warps
WIDE_WARPS = {FEW: 4, MANY: 8, IEEE: 8}

# What a kernel can hold.
MAX_WEIGHT_BYTES = 2**17  # of the matrices between hidden layers, in shared memory or registers

OBS, RETURN = "-obs", "-return"  # names that no field of a State can have
APPLY = {"tanh": jnp.tanh, "relu": jax.nn.relu, "silu": jax.nn.silu}


def collect(
    env: Environment,
    policy: Policy,
    collector: Collector,
    num_steps: int,
    key: jax.Array,
    precision: str,
    interpret: bool = False,
    launch: Launch | None = None,
) -> tuple[Collector, Rollout, EpisodeTotals]:
    """Take T = `num_steps` steps: what `rlgraph.rollout.jax.collect` gives from the same key, up to rounding.

    Args:
        env: the environment.
        policy: whose actor acts, and whose critic, if it has one, gives `value_TB` and `final_value_TB`.
        collector: from `rlgraph.rollout.jax.start` or the last `collect`.
        key: every random number of the rollout comes from it.
        precision: of the products between hidden layers, and of the critic's; the rest is float32, but for a tanh of
            11 bits in "bf16". See rlgraph/precision.py.
        interpret: run the kernel's operations by XLA, on a CPU; slow.
        launch: by default, by the numbers of environments and weights.

    Raises:
        UsageError: the kernel cannot run this environment or policy; it says why.
    """
    check(env, policy)
    (B,) = collector.return_B.shape
    launch = launch or default_launch(B, policy, precision)
    noise, u_TBN = draw(env, num_steps, B, key)
    plan = _plan(env, policy, collector, num_steps, None if interpret else precision)
    padding = -B % launch.block
    given = _Given(
        _columns(collector, padding),
        _padded(noise.reshape(num_steps, B, -1), 1, padding),
        _padded(u_TBN, 1, padding),
        _weights(policy),
    )
    carried, steps, totals = pl.pallas_call(
        functools.partial(_kernel, plan, launch.block),
        out_shape=_results(plan, B + padding),
        grid=((B + padding) // launch.block,),
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(num_warps=launch.warps, num_stages=launch.stages),
        name="rollout",
    )(given)
    carried, totals = jax.tree.map(lambda x: x[:B], (carried, totals))
    with jax_matmul_precision(precision):
        rollout = _rollout(env, policy, jax.tree.map(lambda x: x[:, :B], steps))
    return _collector(collector, carried), rollout, EpisodeTotals(*(total_B.sum() for total_B in totals))


def check(env: Environment, policy: Policy) -> None:
    """Raise a UsageError unless the kernel can run them."""
    if plgpu is None:
        raise UsageError(f"mode fused needs Pallas's Triton backend, which jax {jax.__version__} does not have")
    program(env)
    outputs = policy.actor[-1].bias.shape[0]
    between = sum(math.prod(_padded_shape(layer)) * 4 for layer in policy.actor[1:-1])
    space = env.action_space
    problems = {
        f"its actions are {type(space).__name__}, not Discrete or Box": not isinstance(
            space, gymnasium.spaces.Discrete | gymnasium.spaces.Box
        ),
        f"the actor has {outputs} outputs, at most {MOST_OUTPUTS} fit": outputs > MOST_OUTPUTS,
        f"the actor's hidden layers take {between} bytes, at most {MAX_WEIGHT_BYTES} fit": between > MAX_WEIGHT_BYTES,
        f"the activation is {policy.activation}, not one of {', '.join(ACTIVATIONS)}": policy.activation not in APPLY,
    }
    for problem, holds in problems.items():
        if holds:
            raise UsageError(f"mode fused cannot run {env.id}: {problem}; another mode can")


@functools.cache
def program(env: Environment) -> Program:
    """One step of the environment. Raises a TraceError if it has no form inside a kernel."""
    return trace_step(env, SAME_STEP)


def default_launch(num_envs: int, policy: Policy, precision: str) -> Launch:
    launch = IEEE if precision == "ieee" else FEW if num_envs <= FEW_UP_TO else MANY
    widest = max((layer.bias.shape[0] for layer in policy.actor[:-1]), default=0)
    return launch._replace(warps=WIDE_WARPS[launch]) if widest > WIDE else launch


# ---- what goes in, and what comes out: arrays [B, entries] and [T, B, entries]


class _Given(NamedTuple):
    carried: dict[str, Any]  # [B, entries] by name: the state's leaves, elapsed, done, OBS, RETURN
    noise: Any  # [T, B, 1 or A]
    u: Any  # [T, B, N]
    weights: "_Weights"


class _Weights(NamedTuple):
    """The actor's, widths padded by zeros, which every activation leaves zeros."""

    obs_mean: Any  # [D]
    first: Any  # [D, width] of the first layer, hidden or not, over the observations' standard deviation
    between: tuple[Any, ...]  # [width, width], of the hidden layers after the first
    biases: tuple[Any, ...]  # [width], of all hidden layers
    heads: Any  # [A, width] of the last layer; None if it is the first
    head_bias: Any  # [A]
    log_std: Any  # [A] or None


@dataclass(frozen=True)
class _Plan:
    """What is compiled in."""

    env: Environment
    shapes: dict[str, tuple[tuple[int, ...], Any]]  # beyond the batch axis, and dtype, of what is carried
    num_steps: int
    width: int  # of the actor's first layer, without padding
    outputs: int  # A
    activation: str
    precision: str | None  # None: as given, by XLA

    @property
    def obs(self) -> tuple[tuple[int, ...], Any]:
        return self.shapes[OBS]


def _plan(env: Environment, policy: Policy, collector: Collector, num_steps: int, precision: str | None) -> _Plan:
    shapes = {name: (x.shape[1:], x.dtype) for name, x in _carried(collector).items()}
    outputs = policy.actor[-1].bias.shape[0]
    width = policy.actor[0].bias.shape[0]
    return _Plan(env, shapes, num_steps, width, outputs, policy.activation, precision)


def _carried(collector: Collector) -> dict[str, jax.Array]:
    """By the names of a program's inputs, but for OBS and RETURN, which it does not take."""
    state, elapsed_B, done_B = collector.carry
    return state._asdict() | {"elapsed": elapsed_B, "done": done_B, OBS: collector.obs, RETURN: collector.return_B}


def _columns(collector: Collector, padding: int) -> dict[str, jax.Array]:
    return {name: _padded(x.reshape(len(x), -1), 0, padding) for name, x in _carried(collector).items()}


def _collector(before: Collector, columns: dict[str, jax.Array]) -> Collector:
    """What `_columns` took apart, together again."""
    after = {name: columns[name].reshape(x.shape) for name, x in _carried(before).items()}
    obs, return_B = after.pop(OBS), after.pop(RETURN)
    elapsed_B, done_B = after.pop("elapsed"), after.pop("done")
    return Collector(Carry(type(before.carry.state)(**after), elapsed_B, done_B), obs, return_B)


def _padded(x: jax.Array, axis: int, padding: int) -> jax.Array:
    return x if padding == 0 else jnp.pad(x, [(0, padding if i == axis else 0) for i in range(x.ndim)])


def _padded_shape(layer: Layer) -> tuple[int, int]:
    out, inputs = layer.weight.shape
    return rounded_up(out), rounded_up(inputs)


def _weights(policy: Policy) -> _Weights:
    *hidden, last = policy.actor
    first = policy.actor[0].weight.T / jnp.sqrt(policy.obs_var + 1e-8)[:, None]
    heads = None
    if hidden:
        first, heads = _to_shape(first), _to_shape(last.weight)
    between = tuple(_to_shape(layer.weight, _padded_shape(layer)).T for layer in hidden[1:])
    biases = tuple(_to_shape(layer.bias) for layer in hidden)
    return _Weights(policy.obs_mean, first, between, biases, heads, last.bias, policy.log_std)


def _to_shape(x: jax.Array, shape: tuple[int, ...] | None = None) -> jax.Array:
    """With zeros up to `shape`, by default up to the padded width of the last axis."""
    shape = shape or (*x.shape[:-1], rounded_up(x.shape[-1]))
    return jnp.pad(x, [(0, to - size) for size, to in zip(x.shape, shape)])


def _results(plan: _Plan, B: int):
    """Shapes of what the kernel writes: carried, a step's records, and episode totals."""

    def of(*shape, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(shape, dtype)

    carried = {name: of(B, math.prod(shape), dtype=dtype) for name, (shape, dtype) in plan.shapes.items()}
    T, (shape, dtype) = plan.num_steps, plan.obs
    obs = of(T, B, math.prod(shape), dtype=dtype)
    discrete = isinstance(plan.env.action_space, gymnasium.spaces.Discrete)
    action = of(T, B, 1, dtype=jnp.int32) if discrete else of(T, B, plan.outputs)
    steps = (obs, action, of(T, B), of(T, B), of(T, B, dtype=jnp.bool_), of(T, B, dtype=jnp.bool_), obs)
    return carried, _Records(*steps), EpisodeTotals(of(B), of(B), of(B))


class _Records(NamedTuple):
    """Of one step, or of all."""

    obs: Any  # [T, B, D]
    action: Any  # [T, B, 1 or A]
    log_prob: Any  # [T, B]
    reward: Any  # [T, B]
    terminated: Any  # [T, B]
    truncated: Any  # [T, B]
    final_obs: Any  # [T, B, D]


def _rollout(env: Environment, policy: Policy, steps: _Records) -> Rollout:
    T_B = steps.reward.shape
    obs, final_obs = (x.reshape(*T_B, *env.observation_space.shape) for x in (steps.obs, steps.final_obs))
    action = steps.action.reshape(*T_B, *env.action_space.shape)
    value_TB = final_value_TB = None
    if policy.critic is not None:
        value_TB, final_value_TB = (in_parts(functools.partial(_value, policy), x) for x in (obs, final_obs))
    return Rollout(
        obs,
        action,
        steps.log_prob,
        value_TB,
        steps.reward,
        steps.terminated,
        steps.truncated,
        final_obs,
        final_value_TB,
    )


def _value(policy: Policy, obs: jax.Array) -> jax.Array:
    """[T, B, *observation shape] -> [T, B]"""
    x = (obs.reshape(*obs.shape[:2], -1) - policy.obs_mean) / jnp.sqrt(policy.obs_var + 1e-8)
    *hidden, last = policy.critic
    for layer in hidden:
        x = APPLY[policy.activation](x @ layer.weight.T + layer.bias)
    return (x @ last.weight.T + last.bias).squeeze(-1)


# ---- the kernel: numbers of the K environments of its block are arrays [K]


class _Running(NamedTuple):
    """What a step leaves to the next: numbers by the names of their entries."""

    inputs: dict[str, Any]  # of the program: the state's leaves, elapsed, done
    obs: list[Any]
    return_: Any
    totals: EpisodeTotals


def _kernel(plan: _Plan, block: int, given: _Given, carried, records: _Records, totals: EpisodeTotals) -> None:
    """T steps of one block. Arguments after `block` are references to whole arrays."""
    rows = pl.ds(pl.program_id(0) * block, block)
    weights = _loaded(given.weights)
    columns = {name: [ref[rows, i] for i in range(ref.shape[1])] for name, ref in given.carried.items()}
    zeros = jnp.zeros(block, jnp.float32)

    def step(t, running: _Running) -> _Running:
        noise, u = ([ref[t, rows, i] for i in range(ref.shape[2])] for ref in (given.noise, given.u))
        running, record = _step(plan, weights, running, noise, u)
        for ref, x in zip(records, record):
            _store(ref, (t, rows), x)
        return running

    obs, (return_,) = columns.pop(OBS), columns.pop(RETURN)
    inputs = {entry: x for name, xs in columns.items() for entry, x in zip(entries(name, plan.shapes[name][0]), xs)}
    running = _Running(inputs, obs, return_, EpisodeTotals(zeros, zeros, zeros))
    running = jax.lax.fori_loop(0, plan.num_steps, step, running)

    after = {name: [running.inputs[entry] for entry in entries(name, plan.shapes[name][0])] for name in columns}
    for name, xs in (after | {OBS: running.obs, RETURN: [running.return_]}).items():
        _store(carried[name], (rows,), xs)
    for ref, x in zip(totals, running.totals):
        _store(ref, (rows,), x)


def _store(ref, index: tuple, x: Any) -> None:
    """One array, or a list of them along the last axis."""
    if not isinstance(x, list):
        ref[index] = x
        return
    for i, entry in enumerate(x):
        ref[*index, i] = entry


def _step(plan: _Plan, weights: _Weights, running: _Running, noise: list, u: list) -> tuple[_Running, _Records]:
    """Act, step, count."""
    parameters = _actor(plan, weights, running.obs)
    space = plan.env.action_space
    sample = _categorical if isinstance(space, gymnasium.spaces.Discrete) else _gaussian
    action, log_prob = sample(parameters, noise, weights.log_std)
    taken = _environment_action(space, action)
    inputs = dict(zip(entries("action", space.shape), taken)) | dict(zip(entries("u", (len(u),)), u))
    # Constants as numpy's scalars: a kernel takes no arrays but its arguments.
    out = evaluate(program(plan.env), jnp, running.inputs | inputs, lambda value, dtype: dtype.type(value))

    def array(name, dtype):
        """An output, which may be a constant."""
        return jnp.broadcast_to(out[name], noise[0].shape).astype(dtype)

    def arrays(name, shape, dtype):
        return [array(entry, dtype) for entry in entries(name, shape)]

    terminated, truncated = (array(name, jnp.bool_) for name in ("terminated", "truncated"))
    reward, done = array("reward", jnp.float32), terminated | truncated
    return_ = running.return_ + reward
    length = (running.inputs["elapsed"] + 1).astype(jnp.float32)
    ended = (return_, length, jnp.ones_like(length))
    totals = EpisodeTotals(*(total + jnp.where(done, x, 0.0) for total, x in zip(running.totals, ended)))
    after = {name: array(f"next_{name}", x.dtype) for name, x in running.inputs.items()}
    obs, final_obs = (arrays(name, *plan.obs) for name in ("obs", "final_obs"))
    record = _Records(running.obs, action, log_prob, reward, terminated, truncated, final_obs)
    return _Running(after, obs, jnp.where(done, 0.0, return_), totals), record


# ---- the actor


def _loaded(weights: _Weights) -> _Weights:
    """Values of references. What is used row by row is a list of rows: Triton cannot take a loaded array apart."""

    def rows(ref):
        return None if ref is None else [ref[i] for i in range(ref.shape[0])]

    def numbers(ref):
        return [[ref[i, j] for j in range(ref.shape[1])] for i in range(ref.shape[0])]

    return _Weights(
        rows(weights.obs_mean),
        rows(weights.first) if weights.biases else numbers(weights.first),
        tuple(ref[...] for ref in weights.between),
        tuple(ref[...] for ref in weights.biases),
        rows(weights.heads),
        rows(weights.head_bias),
        rows(weights.log_std),
    )


def _actor(plan: _Plan, weights: _Weights, obs: list) -> list:
    """A outputs [K] from D observation entries [K]."""
    x = [entry.astype(jnp.float32) - mean for entry, mean in zip(obs, weights.obs_mean)]
    if not weights.biases:
        return [
            bias + sum(entry * row[a] for entry, row in zip(x, weights.first))
            for a, bias in enumerate(weights.head_bias)
        ]
    activation = _activation(plan)
    # D is too small for a matrix product: one outer product an entry.
    h = sum(entry[:, None] * row[None, :] for entry, row in zip(x, weights.first))
    if h.shape[1] > plan.width:  # an infinite observation times a weight of padding is NaN
        h = jnp.where(jax.lax.broadcasted_iota(jnp.int32, h.shape, 1) < plan.width, h, 0.0)
    h = activation(h + weights.biases[0][None, :])
    for weight, bias in zip(weights.between, weights.biases[1:]):
        h = activation(_product(h, weight, plan.precision) + bias[None, :])
    return [jnp.sum(h * row[None, :], axis=1) + bias for row, bias in zip(weights.heads, weights.head_bias)]


def _activation(plan: _Plan) -> Callable[[jax.Array], jax.Array]:
    """With a tanh that does not branch, as libdevice's does: a block computes thousands of them a step."""
    if plan.activation != "tanh":
        return APPLY[plan.activation]
    # The instruction of that name is good to 11 bits, bfloat16's factors have 8.
    return plgpu.approx_tanh if plan.precision == "bf16" else _tanh


def _tanh(x: jax.Array) -> jax.Array:
    """To 1e-6, of powers of two, which are what a GPU has an instruction for."""
    return 1 - 2 / (jnp.exp2(2 * math.log2(math.e) * x) + 1)


def _product(a: jax.Array, b: jax.Array, precision: str | None) -> jax.Array:
    """a @ b in float32, the factors rounded as the precision says. XLA's names for it are not all known to Pallas."""
    if precision == "bf16":
        return jnp.dot(a.astype(jnp.bfloat16), b.astype(jnp.bfloat16), preferred_element_type=jnp.float32)
    names = {"tf32": jax.lax.DotAlgorithmPreset.TF32_TF32_F32}
    return jnp.dot(a, b, precision=names.get(precision, jax.lax.Precision.HIGHEST))


def _categorical(logits: list, noise: list, log_std: None) -> tuple[list, jax.Array]:
    """Inverse CDF of one uniform; as Categorical of agents/networks/jax.py, action by action."""
    (u,) = noise
    largest = functools.reduce(jnp.maximum, logits)
    shifted = [logit - largest for logit in logits]
    exps = [jnp.exp(x) for x in shifted]
    total = sum(exps)
    action, cdf, chosen = jnp.zeros(u.shape, jnp.int32), jnp.zeros_like(u), shifted[0]
    for exp, next_one in zip(exps[:-1], shifted[1:]):
        cdf += exp / total
        beyond = u >= cdf
        action += beyond.astype(jnp.int32)
        chosen = jnp.where(beyond, next_one, chosen)  # the last one that it is beyond: the CDF does not fall
    return [action], chosen - jnp.log(total)


def _gaussian(means: list, noise: list, log_stds: list) -> tuple[list, jax.Array]:
    """As Gaussian of agents/networks/jax.py, entry by entry."""
    action = [mean + jnp.exp(log_std) * x for mean, log_std, x in zip(means, log_stds, noise)]
    log_prob = 0.0
    for a, mean, log_std in zip(action, means, log_stds):
        z = (a - mean) * jnp.exp(-log_std)
        log_prob = log_prob - 0.5 * z * z - log_std - 0.5 * math.log(2 * math.pi)
    return action, log_prob


def _environment_action(space: gymnasium.Space, action: list) -> list:
    """As `rlgraph.rollout.jax.environment_action`."""
    if isinstance(space, gymnasium.spaces.Discrete):
        return [action[0] + int(space.start)]
    bounds = zip(space.low.reshape(-1).tolist(), space.high.reshape(-1).tolist())
    return [jnp.minimum(jnp.maximum(x, low), high) for x, (low, high) in zip(action, bounds)]
