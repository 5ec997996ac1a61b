"""Benchmark variants whose results and times a test knows. Imported by workers, so it stays light."""

import os
import time
from pathlib import Path

import numpy as np

from rlgraph.bench.variants import Prepared, Workload, variant


def _fake(name, scale=1.0, pause=0.06, frozen=False, dies=False, divisible=False, **options):
    @variant(name, "fake", **options)
    def prepare(work: Workload) -> Prepared:
        if name == "fake-raises":
            raise RuntimeError("this variant always fails\nand says so in two lines")
        if name == "fake-hungry" and _crowded():
            raise MemoryError
        rng, held = np.random.default_rng(work.seed), {}

        def seconds(n=1):
            if not frozen or not held:
                held["obs"] = scale * rng.random((work.num_steps, work.num_envs))
            if "BENCH_FAKES_LOG" in os.environ:
                with Path(os.environ["BENCH_FAKES_LOG"]).open("a") as log:
                    log.write(name + "\n")
            held["runs"] = held.get("runs", 0) + 1
            if dies and held["runs"] == 5:
                os._exit(3)
            time.sleep(pause)
            return pause * n

        def outcome():
            x = held["obs"].mean(0)
            return {"obs": held["obs"], "means": {"reward": (x.mean(), x.std() / len(x) ** 0.5)}}

        def step_seconds(num_steps):
            return num_steps * 0.1

        return Prepared(
            seconds,
            outcome,
            launches=lambda: 1 if seconds() else 0,
            step_seconds=step_seconds if divisible else None,
        )


def _crowded() -> bool:
    """True the first time: the card is full as long as the other variants are there."""
    mark = Path(os.environ["BENCH_FAKES_LOG"] + ".crowded")
    if mark.exists():
        return False
    mark.touch()
    return True


_fake("fake-eager")
_fake("fake-good", reference="fake-eager")
_fake("fake-wrong", scale=1.5, reference="fake-eager")
_fake("fake-wrong-means", scale=3.0, reference="fake-eager", same_draws=False)
_fake("fake-other-draws", reference="fake-eager", same_draws=False)
_fake("fake-frozen", frozen=True, reference="fake-eager")
_fake("fake-raises", reference="fake-eager")
_fake("fake-unchecked", reference="fake-raises")
_fake("fake-dies", dies=True, reference="fake-eager")
_fake("fake-gpu", gpu_only=True, reference="fake-eager")
_fake("fake-peer", requires=("no_such_package",))
_fake("fake-training", columns=("train",), reference="fake-eager")
_fake("fake-slow", pause=0.5, reference="fake-eager")
_fake("fake-long", pause=1.25, divisible=True, reference="fake-eager")
_fake("fake-hungry", reference="fake-eager")


@variant("heavy-cartpole", "torch", reference="torch-eager", columns=("env",))
def _wrong_dynamics(work: Workload) -> Prepared:
    """torch's eager rollout, of a cart that weighs twice as much: what the check is there to catch."""
    import torch

    import rlgraph
    from rlgraph.bench.torch_variants import random_policy, timer
    from rlgraph.rollout.torch import Collector

    env = rlgraph.make("CartPole-v1", masscart=2.0)
    generator = torch.Generator().manual_seed(work.seed)
    collector = Collector(env, *random_policy(env), work.num_envs, work.num_steps, generator)
    return Prepared(timer(collector.collect, torch.device("cpu")), lambda: {"obs": collector.rollout.obs[:8].numpy()})
