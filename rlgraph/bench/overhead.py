"""What a launch costs on this card: chains of N tiny kernels, launched one by one and replayed as a graph."""

import statistics
import time

import numpy as np
import torch

from rlgraph.graph.capture import capture

CHAIN_LENGTHS = (1, 10, 100, 300, 1000)
REPEATS = 30

# The rule of thumb that is passed around, each part with the figure here that it is about, and the range it says.
RULES = (
    ("a kernel launched eagerly costs 5 to 10 µs", "eager_us_per_kernel", 5, 10, "{:.2f} µs"),
    ("a replayed kernel costs under 1 µs of the host's time", "replay_cpu_us_per_kernel", -1, 1, "{:.3f} µs"),
    ("replaying cuts launch overhead 5 to 10 times", "overhead_ratio", 5, 10, "{:.1f} times"),
    ("small-kernel work gains 20 to 40 % throughput", "throughput_gain", 0.2, 0.4, "{:.0%}"),
)


def measure_launch_overhead(device: torch.device) -> dict:
    """Time chains of N one-element additions, torch's smallest kernel, on a CUDA device.

    Returns:
        "chains": microseconds of host and device time for each N, eager and replayed, medians;
        fitted over N, slope (per kernel) and intercept (per launch of a chain), in µs; and "rules": what the rule of
        thumb says, "holds" or "does not hold here", and what it is here.
    """
    x = torch.zeros(1, device=device)
    rows = []
    for n in CHAIN_LENGTHS:

        def chain(n=n):
            for _ in range(n):
                x.add_(1)

        graph = capture(chain, state=[x], device=device, watch=False)  # CUDA's part alone
        for kind, run in (("eager", chain), ("replay", graph.replay)):
            rows.append({"kernels": n, "kind": kind, **_times(run, device)})
        graph.reset()
    figures = {}
    for kind in ("eager", "replay"):
        mine = [row for row in rows if row["kind"] == kind]
        for what in ("cpu", "gpu"):
            kernels, times = (np.array([r[key] for r in mine]) for key in ("kernels", f"{what}_us"))
            # Relative errors, or the jitter of the longest chain would decide what a single launch costs.
            slope, intercept = np.polyfit(kernels, times, 1, w=1 / times)
            figures[f"{kind}_{what}_us_per_kernel"] = float(slope)
            figures[f"{kind}_{what}_us_per_launch"] = float(intercept)
    figures["eager_us_per_kernel"] = max(figures["eager_cpu_us_per_kernel"], figures["eager_gpu_us_per_kernel"])
    replay = max(figures["replay_cpu_us_per_kernel"], figures["replay_gpu_us_per_kernel"])
    figures["overhead_ratio"] = figures["eager_us_per_kernel"] / replay
    figures["throughput_gain"] = figures["overhead_ratio"] - 1
    return {"chains": rows, **figures, "rules": [_verdict(figures, *rule) for rule in RULES]}


def _verdict(figures: dict, rule: str, name: str, low: float, high: float, form: str) -> dict[str, str]:
    measured = form.format(figures[name])
    return {
        "rule": rule,
        "verdict": "holds" if low <= figures[name] <= high else "does not hold here",
        "here": measured,
    }


def _times(run, device: torch.device) -> dict[str, float]:
    """Median host time until everything is enqueued, and device time from first to last kernel, in µs."""
    cpu, gpu = [], []
    for repeat in range(REPEATS + 3):  # the first three warm up
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(device)
        before.record()
        started = time.perf_counter()
        run()
        enqueued = time.perf_counter() - started
        after.record()
        after.synchronize()
        if repeat >= 3:
            cpu.append(enqueued * 1e6)
            gpu.append(before.elapsed_time(after) * 1e3)
    return {"cpu_us": statistics.median(cpu), "gpu_us": statistics.median(gpu)}
