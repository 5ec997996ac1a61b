"""JAX: operation by operation, one compiled step a call, and scans with command buffers off, on, and unrolled."""

import tempfile
import time
from pathlib import Path

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np

from rlgraph.agents.ppo_jax import PPO
from rlgraph.agents.trainer_jax import GPU_UNROLL
from rlgraph.bench.variants import COMPARED_STEPS, Prepared, Workload, means, training_outcome, variant
from rlgraph.devices import jax_device
from rlgraph.environment import Environment
from rlgraph.graph.xla import prepare
from rlgraph.precision import jax_matmul_precision
from rlgraph.rollout import Rollout
from rlgraph.rollout.jax import collect, start
from rlgraph.train import trainer_class

REFERENCE = "jax-eager"


def _register(name: str, mode: str, unroll: int = 1, gpu_only: bool = False) -> None:
    @variant(name, "jax", reference=None if name == REFERENCE else REFERENCE, gpu_only=gpu_only)
    def build(work: Workload) -> Prepared:
        if work.column == "train":
            agent = trainer_class(work.agent, "jax")(work.training_config("jax", mode), work.environment())
            agent.unroll = unroll
            for _ in range(getattr(agent.config, "random_iterations", 0)):  # in which it would not learn
                agent.iterate()

            def outcome(pending) -> dict:
                return training_outcome(pending.get(), agent.config.batch_size, work.agent)

            return repeated(work, lambda held: agent.iterate(), outcome)
        return _rollout(work, mode, work.num_steps, unroll)


_register("jax-eager", "eager")
_register("jax-scan-no-graph", "jit")
_register("jax-scan", "graph", gpu_only=True)
_register(f"jax-scan-unroll{GPU_UNROLL}", "graph", GPU_UNROLL, gpu_only=True)


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
        act, value = (policy.act, policy.value) if work.column == "policy" else random_policy(env)
        state = jax.tree.map(jnp.copy, (start(env, work.num_envs, start_key), key))

    def some_steps(state, num_steps):
        collector, key = state
        key, use = jax.random.split(key)
        collector, rollout, totals = collect(env, act, value, collector, num_steps, use, unroll)
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
    """CUDA graph launches in one call of `run`, counted by the profiler.

    The process must have been started with XLA_FLAGS=--xla_enable_command_buffers_during_profiling=true: the profiler
    turns command buffers off otherwise.
    """
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run()
        (path,) = Path(folder).rglob("*.xplane.pb")
        planes = jax.profiler.ProfileData.from_file(str(path)).planes
        return sum("GraphLaunch" in event.name for plane in planes for line in plane.lines for event in line.events)
