"""Measure what an iteration of PPO costs the host: launching it, and recording what it came to.

    python scripts/host_time.py --out host-time.json
    python scripts/host_time.py --modes torch-graph jax-graph --num-envs 1024 --iterations-per-launch 1 8

Each launch is timed from the moment when the device has nothing to do, so that no full queue holds the host up; medians
are divided by the iterations of a launch. "Thread" is the processor time of the main thread alone. Where XLA hands
launches to a thread of its own they are in neither figure: scripts/profile_jax.py counts them. On a CPU an iteration's
work is done by the host itself, and launching it takes as long.
"""

import argparse
import contextlib
import dataclasses
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

import rlgraph
from rlgraph.bench.results import count, errors_in_a_line, out_options, write_measured
from rlgraph.runs.checkpoint import BEGINNING
from rlgraph.runs.loop import Clock, Loop
from rlgraph.runs.metrics import MetricsLog
from rlgraph.runs.train import default_config, metric_names, trainer_class

WARMUP = 5  # launches, the first of which compile
FIGURES = ("launch_wall_us", "launch_thread_us", "record_wall_us", "record_thread_us")


def timed(call) -> tuple[object, float, float]:
    """What a call returns, and its microseconds: by the clock, and of this thread."""
    thread, wall = time.thread_time(), time.perf_counter()
    result = call()
    wall, thread = time.perf_counter() - wall, time.thread_time() - thread
    return result, 1e6 * wall, 1e6 * thread


def measure(config, launches: int) -> dict:
    """Microseconds an iteration, medians over launches."""
    trainer = trainer_class("ppo", config.backend)(config, rlgraph.make(config.env))
    times = []
    with tempfile.TemporaryDirectory() as folder, contextlib.closing(MetricsLog(Path(folder))) as log:
        loop = Loop(config, metric_names("ppo"), None, log, Clock(BEGINNING), 0, None)
        for _ in range(WARMUP + launches):
            pending, *launch = timed(trainer.iterate)
            pending.get()  # the device is done
            _, *record = timed(lambda pending=pending: loop.record(pending))
            times.append([*launch, *record])
    medians = [statistics.median(column) / config.iterations_per_launch for column in zip(*times[WARMUP:])]
    return {
        "mode": f"{config.backend}-{trainer.mode}",
        "execution": trainer.execution(),
        "iterations_per_launch": config.iterations_per_launch,
        **dict(zip(FIGURES, medians, strict=True)),
    }


def main():
    on_gpu = torch.cuda.is_available()
    modes = ["torch-graph", "torch-fused", "jax-graph"] if on_gpu else ["torch-eager", "jax-jit"]
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--env", default="CartPole-v1")
    parser.add_argument("--modes", nargs="+", default=modes, help="backend-mode")
    parser.add_argument("--num-envs", type=int, default=64)
    parser.add_argument("--num-steps", type=int, default=64)
    parser.add_argument("--iterations-per-launch", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--launches", type=count, default=200, help="to time, for each row")
    out_options(parser)
    args = parser.parse_args()
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # or JAX would leave torch no memory

    print("µs an iteration                  launch         record")
    print("mode                 K      wall  thread    wall  thread")
    rows = []
    for name in args.modes:
        backend, _, mode = name.partition("-")
        for K in args.iterations_per_launch:
            config = dataclasses.replace(
                default_config("ppo", args.env),
                backend=backend,
                mode=mode,
                num_envs=args.num_envs,
                num_steps=args.num_steps,
                iterations_per_launch=K,
                total_steps=10**9,
            )
            rows.append(measure(config, args.launches))
            figures = "".join(f"{rows[-1][figure]:8.1f}" for figure in FIGURES)
            print(f"{rows[-1]['mode']:18} {K:3}  {figures}", flush=True)
            write_measured(args, "python scripts/host_time.py", sys.argv[1:], {"rows": rows})
    if not on_gpu:
        print("Without a GPU a launch takes as long as the iteration itself.")


if __name__ == "__main__":
    with errors_in_a_line():
        main()
