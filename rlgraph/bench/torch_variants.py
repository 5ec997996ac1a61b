"""torch: one variant for every mode of the library."""

import time

import gymnasium
import torch

from rlgraph.agents.ppo.torch import PPO
from rlgraph.bench.variants import COMPARED_STEPS, Prepared, Skipped, Workload, means, training_outcome, variant
from rlgraph.environment import Environment
from rlgraph.errors import UsageError
from rlgraph.graph.capture import Graph, capture
from rlgraph.kernels.rollouts import FusedCollector
from rlgraph.modes import MODES, Mode
from rlgraph.precision import torch_matmul_precision
from rlgraph.rollout.torch import Collector
from rlgraph.runs.train import trainer_class

REFERENCE = "torch-eager"


def _register(mode_name: str, mode: Mode) -> None:
    parts = "+".join(part for part, on in (("compile", mode.compile), ("graph", mode.graph)) if on) or "eager"
    name = f"torch-{'fused' if mode.fused else parts}"
    reference = None if name == REFERENCE else REFERENCE

    # A fused rollout draws its own numbers, so it is compared in distribution.
    @variant(name, "torch", reference, same_draws=not mode.fused, gpu_only=mode.graph)
    def prepare(work: Workload) -> Prepared:
        try:
            return _training(work, mode_name) if work.column == "train" else _rollout(work, mode_name)
        except UsageError as reason:  # what a mode does not apply to
            raise Skipped(str(reason)) from reason


for _name, _mode in MODES["torch"].items():
    _register(_name, _mode)


def _rollout(work: Workload, mode: str) -> Prepared:
    env, config = work.environment(), work.config("torch", mode)
    policy = PPO.build_policy(config, env)
    generator = torch.Generator(policy.obs_mean.device).manual_seed(work.seed)
    sizes = work.num_envs, work.num_steps, generator
    with torch_matmul_precision(work.precision):
        if MODES["torch"][mode].fused:
            described = policy.for_kernels() if work.column == "policy" else None
            collector = FusedCollector(env, described, *sizes, work.precision)
            tensors = {"state": collector.state(), "generators": [generator]}
            graph = capture(collector.collect, **tensors, watch=False)  # all that it reads is rlgraph's own
            collect = graph.replay
        else:
            act, value = (policy.act, policy.value) if work.column == "policy" else random_policy(env)
            collector = Collector(env, act, value, *sizes, mode)
            graph, collect = collector.graph, collector.collect

    def run():
        with torch_matmul_precision(work.precision):
            collect()

    def outcome() -> dict:
        r = collector.rollout
        obs, reward, done = (x.numpy(force=True) for x in (r.obs, r.reward_TB, r.terminated_TB | r.truncated_TB))
        return {"obs": obs[:COMPARED_STEPS].copy(), "means": means(obs, reward, done)}

    return Prepared(
        timer(run, collector.device),
        outcome,
        launches=lambda: count_replays(run, graph),
        capture_seconds=capture_seconds(graph),
    )


def random_policy(env: Environment):
    """(act, value): uniform actions from the noise that the collector draws, and a critic that costs nothing."""
    space, per_env = env.action_space, len(env.observation_space.shape)

    def value(obs):
        return obs.new_zeros((), dtype=torch.float32).expand(obs.shape[: obs.ndim - per_env])

    if isinstance(space, gymnasium.spaces.Discrete):
        n = int(space.n)
        return lambda obs, u: ((u * n).long(), torch.zeros_like(u)), value
    half = float((space.high - space.low).max()) / 2
    return lambda obs, noise: (noise * half, noise.flatten(1).sum(1) * 0), value


def _training(work: Workload, mode: str) -> Prepared:
    agent = trainer_class(work.agent, "torch")(work.training_config("torch", mode), work.environment())
    last = []

    def run():
        last[:] = [agent.iterate()]

    for _ in range(getattr(agent.config, "random_iterations", 0)):  # in which it would not learn
        run()
    graph = agent.graph
    return Prepared(
        timer(run, agent.device),
        lambda: training_outcome(last[0].get()[-1], agent.config.batch_size, work.agent),
        launches=lambda: count_replays(run, graph),
        capture_seconds=capture_seconds(graph),
    )


def count_replays(run, graph: Graph | None) -> int:
    """Graph launches in one call of `run`."""
    if graph is None or not graph.captured:
        return 0
    before = graph.replays
    run()
    return graph.replays - before


def capture_seconds(graph: Graph | None) -> float:
    """For capturing and instantiating."""
    return 0.0 if graph is None else graph.capture_seconds + graph.instantiate_seconds


def timer(run, device: torch.device):
    """n repeats between two events on the device; by the clock on a CPU."""

    def seconds(n: int = 1) -> float:
        if device.type != "cuda":
            started = time.perf_counter()
            for _ in range(n):
                run()
            return time.perf_counter() - started
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(device)
        before.record()
        for _ in range(n):
            run()
        after.record()
        after.synchronize()
        return before.elapsed_time(after) / 1e3

    return seconds
