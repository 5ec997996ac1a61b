"""Measure what each part of docs/graphs.md costs and gains. Needs an NVIDIA GPU.

python scripts/graph_parts.py --out graph-parts.json
"""

import argparse
import dataclasses
import functools
import statistics
import sys
import time
import warnings
from pathlib import Path

import torch

import rlgraph
from rlgraph.agents.ppo.torch import PPO
from rlgraph.bench.results import out_options, write_measured
from rlgraph.graph.auto import auto
from rlgraph.graph.capture import capture
from rlgraph.graph.device.branches import branches
from rlgraph.graph.device.control import if_graph, while_graph
from rlgraph.graph.device.relaunch import relaunching
from rlgraph.graph.pool import SIZES, GraphPool
from rlgraph.kernels.rollouts import FusedCollector
from rlgraph.rollout.torch import Collector
from rlgraph.runs.train import default_config

REPEATS, REPLAYS, ITERATIONS = 20, 200, 1000
DEVICE = "cuda"


def device_us(run, count: int = REPLAYS) -> float:
    """Microseconds of a call on the device, median of repeats of `count` calls."""
    times = []
    for _ in range(REPEATS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(count):
            run()
        end.record()
        end.synchronize()
        times.append(1e3 * start.elapsed_time(end) / count)
    return statistics.median(times)


def host_us(run) -> float:
    """Microseconds of a call on the host, median; each begins on an idle device."""
    times = []
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        started = time.perf_counter()
        run()
        times.append(1e6 * (time.perf_counter() - started))
    torch.cuda.synchronize()
    return statistics.median(times)


def network(observations: int = 4, outputs: int = 2) -> torch.nn.Module:
    hidden = [torch.nn.Linear(observations, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64), torch.nn.Tanh()]
    return torch.nn.Sequential(*hidden, torch.nn.Linear(64, outputs)).to(DEVICE).requires_grad_(False)


# ---- buckets


def bucket_costs() -> list[dict]:
    """MiB of all graphs together and apart; microseconds of a call, with its copies and added rows."""
    policy = network()

    def greedy(obs):
        return policy(obs).argmax(-1)

    shared, example = GraphPool(greedy), torch.randn(max(SIZES), 4, device=DEVICE)
    shared.capture(example)
    apart = [GraphPool(greedy, sizes=(size,)) for size in shared.sizes]
    for pool in apart:
        pool.capture(example[: pool.sizes[0]])
    mib = shared.memory() / 2**20, sum(pool.memory() for pool in apart) / 2**20
    rows = [{"graphs": len(shared.graphs), "shared_mib": mib[0], "apart_mib": mib[1]}]
    for B in (1, 3, 100, 1000):
        obs = example[:B]
        with torch.no_grad():
            pooled, eager = (device_us(functools.partial(run, obs)) for run in (shared, greedy))
        rows.append({"B": B, "pool_us": pooled, "eager_us": eager})
    return rows


# ---- update against recapture


def chain(kernels: int):
    """A function of `kernels` launches with a number baked into each."""
    x = torch.zeros(1, device=DEVICE)

    def made(number: float):
        def run():
            for _ in range(kernels):
                x.add_(number)

        return run, x

    return made


def rollout(num_envs: int = 64, num_steps: int = 16):
    """A rollout with random actions in a CartPole whose gravity is baked in."""
    generator = torch.Generator(DEVICE).manual_seed(0)

    def act(obs, noise):
        return (noise > 0.5).long(), noise

    def made(gravity: float):
        env = rlgraph.make("CartPole-v1", gravity=gravity)
        collector = Collector(env, act, None, num_envs, num_steps, generator, "eager")
        return collector.collect, collector.state()

    return made, generator


def update_costs(name: str, made, generators=()) -> dict:
    """Milliseconds, without the warm-up: what both pay (capture), and what an update saves."""
    fn, state = made(1.0)
    graph = capture(fn, state=state, generators=generators)
    rows = []
    for i in range(REPEATS):
        fn, state = made(2.0 + i)
        anew = capture(fn, state=state, generators=generators)
        update = graph.update(fn, state=state)
        rows.append((anew.capture_seconds, anew.instantiate_seconds, update.seconds - graph.capture_seconds))
        anew.reset()
    names = ("capture_ms", "instantiate_ms", "update_ms")
    medians = {n: 1e3 * statistics.median(column) for n, column in zip(names, zip(*rows))}
    return {"what": name, **medians, "in_place": update.in_place, "reason": update.reason}


def update_rows() -> list[dict]:
    made, generator = rollout()
    chains = [update_costs(f"{n} kernels", chain(n)) for n in (10, 100, 1000)]
    return [*chains, update_costs("CartPole-v1, 16 steps", made, [generator])]


# ---- loops and branches


def control_costs() -> list[dict]:
    """Microseconds of an iteration, of a branch taken and not taken, around one small kernel."""
    x, limit = torch.zeros((), dtype=torch.int32, device=DEVICE), torch.tensor(1000, device=DEVICE)
    on = torch.ones((), dtype=torch.bool, device=DEVICE)

    def count():
        x.add_(1)
        on.copy_(x < limit)

    rows = []
    for most in (1, 100, 1000):
        loop = while_graph(count, on, state=x, most=most)
        limit.fill_(2**31 - 1)
        rows.append({"what": f"a loop of {most}, an iteration", "us": device_us(loop.replay, 5) / most})
        x.zero_()
    torch.cuda.synchronize()
    started = time.perf_counter()
    loop.replay()
    rows.append({"what": "host, for a launch of 1000 iterations", "us": 1e6 * (time.perf_counter() - started)})
    for value in (True, False):
        on.fill_(value)
        branch = if_graph(on, lambda: x.add_(1), state=x)
        rows.append({"what": f"a branch, {'' if value else 'not '}taken", "us": device_us(branch.replay)})
    plain = capture(count, state=[x, on])
    rows.append({"what": "the loop's body, a replay", "us": device_us(plain.replay)})
    return rows


# ---- a loop by the host, by a WHILE node, by a graph that launches itself again


def one_kernel():
    x = torch.zeros((), device=DEVICE)
    return lambda: x.add_(1), [x]


def fused_rollout(num_envs: int = 64, num_steps: int = 16):
    """A rollout with random actions, all of it in one kernel, and a few that count."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    collector = FusedCollector(rlgraph.make("CartPole-v1"), None, num_envs, num_steps, generator, "ieee")
    return collector.collect, collector.state()


def loop_costs(name: str, body, state) -> list[dict]:
    """Microseconds of an iteration on the device, and of the host for all of them."""
    graph, on = capture(body, state=state), torch.ones((), dtype=torch.bool, device=DEVICE)

    def replays():
        for _ in range(ITERATIONS):
            graph.replay()

    ways = {
        "replays": replays,
        "a WHILE node": while_graph(body, on, state=state, most=ITERATIONS).replay,
        "tail launches": relaunching(body, on, state=state, most=ITERATIONS).replay,
    }
    rows = []
    for way, run in ways.items():
        run()  # which takes it to the device
        us = device_us(run, 1) / ITERATIONS
        rows.append({"what": name, "by": way, "us_an_iteration": us, "host_us": host_us(run)})
    return rows


def loop_rows() -> list[dict]:
    one = loop_costs("one kernel", *one_kernel())
    return one + loop_costs("a fused rollout, B = 64, T = 16", *fused_rollout())


# ---- parallel branches


def branch_gains(networks: int, num_envs: int) -> dict:
    """Microseconds of a forward pass of independent networks: 2 are an actor and a critic."""
    modules = [network() for _ in range(networks)]
    obs = torch.randn(num_envs, 4, device=DEVICE)
    functions = [lambda m=module: m(obs) for module in modules]
    serial, forked = capture(lambda: [f() for f in functions]), capture(lambda: branches(*functions))
    times = {"serial_us": device_us(serial.replay), "parallel_us": device_us(forked.replay)}
    return {"networks": networks, "num_envs": num_envs, **times}


def branch_rows() -> list[dict]:
    return [branch_gains(n, B) for n in (2, 8) for B in (64, 1024, 16384)]


# ---- knowing when not to capture


def awkward() -> dict:
    """Functions of x that a graph holds, and others that it does not."""
    return {
        "kernels alone": lambda x: (2 * x).tanh(),
        "an if on a value": lambda x: 2 * x if x.sum() > 0 else x,
        "a number read on the host": lambda x: x * x.max().item(),
        "a shape that depends on data": lambda x: x[x > 0],
        "a copy to the host": lambda x: x.cpu().tanh().to(x.device),
    }


def what_auto_does() -> list[dict]:
    """The mode that it takes, why, and whether the results are those of direct calls, up to rounding."""
    rows = []
    for name, fn in awkward().items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it says the reason, which is in the row
            run = auto(fn, torch.randn(1000, device=DEVICE))
        given = [torch.randn(1000, device=DEVICE) for _ in range(5)]
        right = all(torch.allclose(run(x), fn(x)) for x in (*given, -given[0].abs()))
        reason = (run.reason or "").replace(f"{Path.cwd()}/", "")
        rows.append({"what": name, "mode": run.mode, "right": right, "reason": reason})
    return rows


# ---- inspection


def contents() -> list[dict]:
    """Of PPO's graphs on CartPole-v1, B = T = 64: an iteration, and the rollout in it."""
    config = dataclasses.replace(default_config("ppo", "CartPole-v1"), mode="fused", num_envs=64, num_steps=64)
    trainer = PPO(config, rlgraph.make("CartPole-v1"))
    rollout = capture(trainer.collector.collect, state=trainer.collector.state())
    rows = []
    for name, graph in (("an iteration, mode fused", trainer.graph), ("the rollout in it", rollout)):
        info = graph.info()
        kept = ("nodes", "copies", "edges", "critical_path", "memory_bytes", "capture_seconds", "instantiate_seconds")
        rows.append({"what": name, **{field: getattr(info, field) for field in kept}})
    return rows


PARTS = {
    "buckets": bucket_costs,
    "update": update_rows,
    "control": control_costs,
    f"loops of {ITERATIONS}": loop_rows,
    "branches": branch_rows,
    "inspection": contents,
    "auto": what_auto_does,
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    out_options(parser)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("error: this needs an NVIDIA GPU, and torch finds none")
    measured = {}
    for part, measure in PARTS.items():
        measured[part] = measure()
        print(part)
        for row in measured[part]:
            words = (f"{k} {v:.2f}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items())
            print("  ", "  ".join(words), flush=True)
        write_measured(args, "python scripts/graph_parts.py", sys.argv[1:], measured)


if __name__ == "__main__":
    main()
