"""Time the kernels of one PPO iteration in torch on a GPU, by name, as the profiler sees them inside the graph.

    python scripts/kernel_times.py --num-envs 4096 --num-steps 128 --out kernel-times.json

The sum over kernels is less than the iteration's own time by the gaps between them.
"""

import argparse
import collections
import dataclasses
import re
import sys

import torch

import rlgraph
from rlgraph.agents.ppo.config import PPOConfig
from rlgraph.agents.ppo.torch import PPO
from rlgraph.bench.results import count, errors_in_a_line, out_options, write_measured
from rlgraph.bench.torch_variants import timer
from rlgraph.precision import PRECISIONS

WARMUP = 3  # launches


def measure(config: PPOConfig, launches: int) -> dict:
    """Microseconds an iteration, as a whole and of each kernel."""
    agent = PPO(config, rlgraph.make(config.env))
    for _ in range(WARMUP):
        agent.iterate()
    seconds = min(timer(agent.iterate, agent.device)(launches) for _ in range(3)) / launches
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        for _ in range(launches):
            agent.iterate()
        torch.cuda.synchronize()
    times, counts = collections.Counter(), collections.Counter()
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            times[_short(event.name)] += event.time_range.elapsed_us() / launches
            counts[_short(event.name)] += 1 / launches
    kernels = [{"name": name, "launches": round(counts[name], 2), "us": us} for name, us in times.most_common()]
    return {"execution": agent.execution(), "iteration_us": 1e6 * seconds, "kernels": kernels}


def _short(name: str) -> str:
    """A kernel's name without its C++ namespaces, templates and arguments."""
    name = re.sub(r"^void |\(anonymous namespace\)::", "", name).split("<")[0].split("(")[0]
    return name.split("::")[-1]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--env", default="CartPole-v1")
    parser.add_argument("--mode", default="fused")
    parser.add_argument("--precision", default="tf32", choices=PRECISIONS)
    parser.add_argument("--num-envs", type=int, default=4096)
    parser.add_argument("--num-steps", type=int, default=128)
    parser.add_argument("--hidden", type=int, nargs="+", default=[64, 64])
    parser.add_argument("--launches", type=count, default=20)
    out_options(parser)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("kernels run on a GPU: there is none")
    given = {name: getattr(args, name) for name in ("env", "mode", "precision", "num_envs", "num_steps")}
    config = dataclasses.replace(PPOConfig(), hidden=tuple(args.hidden), total_steps=10**9, device="cuda", **given)
    result = measure(config, args.launches)
    print(f"{result['execution']}: {result['iteration_us']:.1f} µs an iteration")
    print("launches        µs  kernel")
    for kernel in result["kernels"]:
        print(f"{kernel['launches']:8.1f}  {kernel['us']:8.1f}  {kernel['name']}")
    print(f"{'':8}  {sum(kernel['us'] for kernel in result['kernels']):8.1f}  all")
    write_measured(args, "python scripts/kernel_times.py", sys.argv[1:], result)


if __name__ == "__main__":
    with errors_in_a_line():
        main()
