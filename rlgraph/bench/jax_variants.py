"""JAX: operation by operation, one compiled step a call, scans with command buffers off, on, and unrolled, and rollouts
in one kernel.
"""

import math
import tempfile
import time
from pathlib import Path

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np

from rlgraph.agents.networks.jax import ActorCritic
from rlgraph.agents.ppo.jax import PPO
from rlgraph.agents.trainer_jax import GPU_UNROLL
from rlgraph.bench.variants import COMPARED_STEPS, Prepared, Skipped, Workload, means, training_outcome, variant
from rlgraph.devices import jax_device
from rlgraph.environment import Environment
from rlgraph.kernels.weights import Layer, Policy
from rlgraph.modes import MODES
from rlgraph.precision import jax_matmul_precision
from rlgraph.rollout import Rollout, fused_jax
from rlgraph.rollout.jax import collect, start
from rlgraph.runs.train import trainer_class
from rlgraph.xla import prepare

REFERENCE = "jax-eager"


def _register(name: str, mode: str, unroll: int = 1, gpu_only: bool = False) -> None:
    @variant(name, "jax", reference=None if name == REFERENCE else REFERENCE, gpu_only=gpu_only)
    def build(work: Workload) -> Prepared:
        if work.column == "train":
            if MODES["jax"][mode].fused and work.agent != "ppo":
                raise Skipped(f"trains by PPO only, not by {work.agent}")
            agent = trainer_class(work.agent, "jax")(work.training_config("jax", mode), work.environment())
            agent.unroll = unroll
            for _ in range(getattr(agent.config, "random_iterations", 0)):  # in which it would not learn
                agent.iterate()

            def outcome(pending) -> dict:
                return training_outcome(pending.get()[-1], agent.config.batch_size, work.agent)

            return repeated(work, lambda held: agent.iterate(), outcome)
        return _rollout(work, mode, work.num_steps, unroll)


_register("jax-eager", "eager")
_register("jax-scan-no-graph", "jit")
_register("jax-scan", "graph", gpu_only=True)
_register(f"jax-scan-unroll{GPU_UNROLL}", "graph", GPU_UNROLL, gpu_only=True)
_register("jax-fused", "fused", gpu_only=True)


@variant("jax-jit", "jax", reference=REFERENCE, same_draws=False, columns=("env", "policy"))
def _one_step_a_call(work: Workload) -> Prepared:
    """What a loop in Python around a jitted step costs: T calls, the host in between."""
    return _rollout(work, "graph", 1, 1)


def _rollout(work: Workload, mode: str, steps_a_call: int, unroll: int) -> Prepared:
    env, config = work.environment(), work.config("jax", mode)
    device = jax_device(work.device)
    with jax.default_device(device):
        policy_key, start_key, key = jax.random.split(jax.random.key(work.seed), 3)
        policy = PPO.build_policy(config, env, policy_key)
        acting = policy if work.column == "policy" else None
        state = jax.tree.map(jnp.copy, (start(env, work.num_envs, start_key), key))

    take_steps = _fused(env, acting, work) if MODES["jax"][mode].fused else _scanned(env, acting, unroll)

    def some_steps(state, num_steps):
        collector, key = state
        key, use = jax.random.split(key)
        collector, rollout, totals = take_steps(collector, num_steps, use)
        return (collector, key), rollout, totals

    call = prepare(some_steps, mode, donate_argnums=(0,), static_argnums=(1,), device=device)
    held = {"state": jax.device_put(state, device)}

    def run(held, num_steps=work.num_steps):
        rollouts = []
        for done in range(0, num_steps, steps_a_call):
            held["state"], rollout, _ = call(held["state"], min(steps_a_call, num_steps - done))
            rollouts.append(rollout)
        return rollouts

    return repeated(work, run, _rollout_outcome, held, divisible=mode == "eager" or steps_a_call == 1)


def _scanned(env: Environment, policy: ActorCritic | None, unroll: int):
    """(collector, number of steps, key) -> what `collect` gives; without a policy, of random actions."""
    act, value = random_policy(env) if policy is None else (policy.act, policy.value)
    return lambda collector, num_steps, key: collect(env, act, value, collector, num_steps, key, unroll)


def _fused(env: Environment, policy: ActorCritic | None, work: Workload):
    """The same, in one kernel."""
    kernels = _random_mlp(env) if policy is None else policy.for_kernels()
    interpret = jax_device(work.device).platform != "gpu"

    def take_steps(collector, num_steps, key):
        return fused_jax.collect(env, kernels, collector, num_steps, key, work.precision, interpret)

    return take_steps


def _rollout_outcome(rollouts: list[Rollout]) -> dict:
    parts = [(r.obs, r.reward_TB, r.terminated_TB | r.truncated_TB) for r in rollouts]
    obs, reward, done = (np.concatenate([np.asarray(p) for p in column]) for column in zip(*parts))
    return {"obs": obs[:COMPARED_STEPS], "means": means(obs, reward, done)}


def random_policy(env: Environment):
    """(act, value): uniform actions from the noise that the collector draws, and a critic that costs nothing."""
    space = env.action_space

    def value(obs):
        return jnp.zeros(obs.shape[: obs.ndim - len(env.observation_space.shape)], jnp.float32)

    if isinstance(space, gymnasium.spaces.Discrete):
        n = int(space.n)
        return lambda obs, u: ((u * n).astype(jnp.int32), jnp.zeros_like(u)), value
    half = float((space.high - space.low).max()) / 2
    return lambda obs, noise: (noise * half, noise.reshape(len(noise), -1).sum(1) * 0), value


def _random_mlp(env: Environment) -> Policy:
    """What acts as `random_policy`: one layer of zeros, and no critic."""
    space, inputs = env.action_space, math.prod(env.observation_space.shape)
    discrete = isinstance(space, gymnasium.spaces.Discrete)
    outputs = int(space.n) if discrete else math.prod(space.shape)
    layer = Layer(jnp.zeros((outputs, inputs), jnp.float32), jnp.zeros(outputs, jnp.float32))
    log_std = None if discrete else jnp.full(outputs, math.log(float((space.high - space.low).max()) / 2), jnp.float32)
    return Policy((layer,), None, "tanh", jnp.zeros(inputs, jnp.float32), jnp.ones(inputs, jnp.float32), log_std)


def repeated(work: Workload, run, read, held=None, divisible: bool = False) -> Prepared:
    """Time `run(held)` by the clock, waiting for everything that it returns; if divisible, also `run(held, steps)`."""
    last = []

    def seconds(n: int = 1, *num_steps: int) -> float:
        started = time.perf_counter()
        with jax_matmul_precision(work.precision):
            for _ in range(n):
                last[:] = [run(held, *num_steps)]
        jax.block_until_ready([getattr(x, "array", x) for x in last])
        return time.perf_counter() - started

    on_gpu = jax_device(work.device).platform == "gpu"
    return Prepared(
        seconds,
        lambda: read(last[0]),
        launches=lambda: count_graph_launches(seconds) if on_gpu else 0,
        step_seconds=(lambda num_steps: seconds(1, num_steps)) if divisible else None,
    )


def count_graph_launches(run) -> int:
    """CUDA graph launches in one call of `run`, counted by the profiler: see `event_names`."""
    return sum("GraphLaunch" in name for name in event_names(run))


def event_names(run) -> list[str]:
    """What the profiler saw in one call of `run`, by name: of the host, of the driver, of the device.

    The process must have been started with XLA_FLAGS=--xla_enable_command_buffers_during_profiling=true: the profiler
    turns command buffers off otherwise.
    """
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run()
        (path,) = Path(folder).rglob("*.xplane.pb")
        planes = jax.profiler.ProfileData.from_file(str(path)).planes
        return [event.name for plane in planes for line in plane.lines for event in line.events]
