"""Count what XLA asks of the GPU's driver in an iteration of PPO, for several unrollings of the loop over updates.

    python scripts/profile_jax.py --out profile-jax.json

Counted by the profiler, under CUPTI's names: launches of graphs (command buffers), launches of single kernels, and
copies from the host. A CPU has none of them.
"""

import argparse
import dataclasses
import os
import sys
import time

# Before JAX starts: the profiler turns command buffers off unless told otherwise.
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_enable_command_buffers_during_profiling=true"

import rlgraph
from rlgraph.agents.ppo import jax as ppo_jax
from rlgraph.bench.jax_variants import event_names
from rlgraph.bench.results import count, errors_in_a_line, out_options, write_measured
from rlgraph.runs.train import default_config

COUNTED = {"graph launches": "GraphLaunch", "kernel launches": "LaunchKernel", "copies from host": "MemcpyH2D"}
WARMUP = 3  # launches: XLA records its command buffers in the first ones


def measure(config, unroll: int | bool, launches: int) -> dict:
    ppo_jax.updates_a_turn = lambda minibatch_rows, platform: unroll
    agent = ppo_jax.PPO(config, rlgraph.make(config.env))
    started = time.perf_counter()
    for _ in range(WARMUP):
        agent.iterate().get()
    setup_seconds, started = time.perf_counter() - started, time.perf_counter()
    for _ in range(launches):
        pending = agent.iterate()
    pending.get()
    seconds = time.perf_counter() - started
    names = event_names(lambda: agent.iterate().get())
    K = config.iterations_per_launch
    return {
        "unroll": "all" if unroll is True else unroll,
        "iterations_per_launch": K,
        "execution": agent.execution(),
        "setup_seconds": setup_seconds,
        "iteration_us": 1e6 * seconds / (launches * K),
        **{key: sum(word in name for name in names) / K for key, word in COUNTED.items()},
    }


def unrolling(text: str) -> int | str:
    return text if text == "all" else count(text)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--env", default="CartPole-v1")
    parser.add_argument("--mode", default="auto", help="of the JAX backend")
    parser.add_argument("--num-envs", type=int, default=64)
    parser.add_argument("--num-steps", type=int, default=64)
    parser.add_argument("--iterations-per-launch", type=int, nargs="+", default=[1, 4])
    parser.add_argument(
        "--unroll", nargs="+", type=unrolling, default=[1, 4, "all"], help="updates in one turn of their loop"
    )
    parser.add_argument("--launches", type=count, default=50, help="to time, for each row")
    out_options(parser)
    args = parser.parse_args()

    print("  K unroll  setup s   µs an iteration", "".join(f"{name:>18}" for name in COUNTED), sep="")
    rows = []
    for K in args.iterations_per_launch:
        config = dataclasses.replace(
            default_config("ppo", args.env),
            backend="jax",
            mode=args.mode,
            num_envs=args.num_envs,
            num_steps=args.num_steps,
            iterations_per_launch=K,
            total_steps=10**9,
        )
        for word in args.unroll:
            row = measure(config, True if word == "all" else word, args.launches)
            counts = "".join(f"{row[name]:18.1f}" for name in COUNTED)
            print(f"{K:3} {word:>6}{row['setup_seconds']:9.1f}{row['iteration_us']:18.1f}{counts}", flush=True)
            rows.append(row)
            write_measured(args, "python scripts/profile_jax.py", sys.argv[1:], {"rows": rows})


if __name__ == "__main__":
    with errors_in_a_line():
        main()
