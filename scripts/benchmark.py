"""Time CartPole rollouts and PPO iterations in every mode, and write the figures with their provenance.

    python scripts/benchmark.py --num-envs 4096 --num-steps 128 --out benchmarks/results/h200.json

Every variant is built, compiled, captured and checked against its backend's slowest mode before anything is timed.
A repeat of each variant follows a repeat of every other, so that drift hits all alike.
"""

import argparse
import dataclasses
import datetime
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import time
from pathlib import Path

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch and jax share the card

import jax
import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

import rlgraph
from rlgraph.agents import ppo_jax, ppo_torch
from rlgraph.agents.ppo import PPOConfig
from rlgraph.graph.xla import prepare
from rlgraph.precision import jax_matmul_precision, torch_matmul_precision
from rlgraph.rollout.jax import collect
from rlgraph.rollout.torch import Collector

CHECKED_STEPS = 8  # rounding differs between kernels and grows along a trajectory, so the comparison is short


def torch_rollout(config, mode):
    """(run, observations of a first rollout): `run()` enqueues one rollout."""
    policy = ppo_torch.build_policy(config, ENV)
    generator = torch.Generator(policy.obs_mean.device).manual_seed(config.seed)
    with torch_matmul_precision(config.precision):
        collector = Collector(ENV, policy.act, policy.value, config.num_envs, config.num_steps, generator, mode)

    def run():
        with torch_matmul_precision(config.precision):
            collector.collect()

    run()
    return run, collector.rollout.obs[:CHECKED_STEPS].numpy(force=True)


def jax_rollout(config, mode, unroll):
    agent = ppo_jax.PPO(dataclasses.replace(config, mode=mode), ENV)
    policy = agent.policy

    def rollout(collector, key):
        key, use = jax.random.split(key)
        collector, steps, totals = collect(ENV, policy.act, policy.value, collector, config.num_steps, use, unroll)
        return (collector, key), steps, totals

    fn = prepare(rollout, mode, donate_argnums=(0, 1))
    held = [agent.state.collector, agent.state.key]

    def run():
        with jax_matmul_precision(config.precision):
            held[:], steps, _ = fn(*held)
        return steps

    return run, np.asarray(run().obs[:CHECKED_STEPS])


def torch_ppo(config, mode):
    agent = ppo_torch.PPO(dataclasses.replace(config, mode=mode), ENV)
    return agent.iterate, np.array(agent.iterate().get())


def jax_ppo(config, mode):
    agent = ppo_jax.PPO(dataclasses.replace(config, mode=mode), ENV)
    return agent.iterate, np.array(agent.iterate().get())


def seconds_torch(run):
    if not torch.cuda.is_available():
        return seconds_jax(run)
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    before.record()
    run()
    after.record()
    after.synchronize()
    return before.elapsed_time(after) / 1e3


def seconds_jax(run):
    started = time.perf_counter()
    result = run()
    jax.block_until_ready(getattr(result, "_array", result))
    return time.perf_counter() - started


def main():
    args = arguments()
    config = PPOConfig(num_envs=args.num_envs, num_steps=args.num_steps, precision=args.precision, total_steps=10**10)
    jax_config = dataclasses.replace(config, backend="jax")
    build = {
        **{f"rollout torch {m}": (torch_rollout, config, m) for m in ("eager", "compile", "graph-uncompiled", "graph")},
        "rollout jax jit": (jax_rollout, jax_config, "jit", 1),
        "rollout jax graph": (jax_rollout, jax_config, "graph", 1),
        f"rollout jax graph unroll={ppo_jax.GPU_UNROLL}": (jax_rollout, jax_config, "graph", ppo_jax.GPU_UNROLL),
        **{f"ppo torch {m}": (torch_ppo, config, m) for m in ("eager", "compile", "graph-uncompiled", "graph")},
        **{f"ppo jax {m}": (jax_ppo, jax_config, m) for m in ("jit", "graph")},
    }
    variants, setup, first = {}, {}, {}
    for name in track(build, description="building and checking"):
        started = time.perf_counter()
        maker, *rest = build[name]
        variants[name], first[name] = maker(*rest)
        setup[name] = time.perf_counter() - started
    agrees = {name: check(name, first) for name in variants}

    times = {name: [] for name in variants}
    for repeat in track(range(args.repeats + 2), description="timing"):
        for name, run in variants.items():
            seconds = (seconds_torch if " torch " in name else seconds_jax)(run)
            if repeat >= 2:  # the first two warm up: XLA records its command buffers in them
                times[name].append(seconds)
    report(args, times, setup, agrees)


def check(name, first):
    """Largest difference from the same work in the backend's plainest mode, relative to the largest entry."""
    reference = first[f"{name.split(' ')[0]} {'torch eager' if ' torch ' in name else 'jax jit'}"]
    difference = np.abs(first[name] - reference).max() / np.abs(reference).max()
    limit = 2e-2 if name.startswith("rollout") else 5e-2
    return {"relative_difference": float(difference), "agrees": bool(difference < limit)}


def report(args, times, setup, agrees):
    steps = args.num_envs * args.num_steps
    rows = {}
    for name, seconds in times.items():
        median = statistics.median(seconds)
        rows[name] = {
            "median_s": median,
            "min_s": min(seconds),
            "max_s": max(seconds),
            "us_per_step": median / args.num_steps * 1e6,
            "steps_per_second": steps / median,
            "setup_s": setup[name],
            **agrees[name],
        }
    result = {"command": f"python scripts/benchmark.py {args.words}", **provenance(args), "results": rows}
    Path(args.out).parent.mkdir(parents=True, exist_ok=True)
    Path(args.out).write_text(json.dumps(result, indent=2) + "\n")

    table = Table("variant", "µs a step", "M steps/s", "min-max ms", "setup s", "agrees")
    for name, row in rows.items():
        table.add_row(
            name,
            f"{row['us_per_step']:.1f}",
            f"{row['steps_per_second'] / 1e6:.2f}",
            f"{row['min_s'] * 1e3:.2f}-{row['max_s'] * 1e3:.2f}",
            f"{row['setup_s']:.1f}",
            "yes" if row["agrees"] else f"NO ({row['relative_difference']:.1e})",
        )
    Console(width=110).print(table)


def provenance(args):
    def git(*words):
        run = subprocess.run(["git", *words], capture_output=True, text=True, check=False)
        return run.stdout.strip() if run.returncode == 0 else None

    gpu = torch.cuda.is_available()
    return {
        "device": torch.cuda.get_device_name() if gpu else platform.processor(),
        "driver": driver() if gpu else None,
        "cuda": torch.version.cuda,
        "versions": {p: importlib.metadata.version(p) for p in ("rlgraph", "torch", "jax", "jaxlib", "numpy")},
        "python": platform.python_version(),
        "commit": args.commit or git("rev-parse", "HEAD"),
        "num_envs": args.num_envs,
        "num_steps": args.num_steps,
        "precision": args.precision,
        "repeats": args.repeats,
        "environment": {k: v for k, v in os.environ.items() if k.startswith(("XLA_", "CUDA_", "TORCH", "OMP_"))},
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def driver():
    run = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        check=False,
    )
    return run.stdout.split("\n")[0].strip() or None


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--num-envs", type=int, default=4096)
    parser.add_argument("--num-steps", type=int, default=128)
    parser.add_argument("--precision", default="tf32", choices=("ieee", "tf32"))
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--commit", default="", help="commit of the tree, where there is no git checkout")
    parser.add_argument("--out", required=True, help="JSON file to write")
    args = parser.parse_args()
    args.words = f"--num-envs {args.num_envs} --num-steps {args.num_steps} --precision {args.precision} "
    args.words += f"--repeats {args.repeats}"
    return args


if __name__ == "__main__":
    ENV = rlgraph.make("CartPole-v1")
    main()
