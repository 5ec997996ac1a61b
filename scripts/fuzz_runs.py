"""Damaged run folders: a copy of a small run, with one or two files changed, to be evaluated or gone on with."""

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
from fuzz_environments import Definition
from fuzz_oracle import EITHER, HARMLESS, REFUSED, Case, worst
from safetensors import safe_open
from safetensors.numpy import save

from rlgraph.checkpoint import _checksum

OPTIONS = {
    "ppo": ["ppo", "--num-minibatches", "2"],
    "dqn": ["dqn", "--learning-starts", "8", "--replay-capacity", "64", "--minibatch-size", "4", "--num-updates", "1"],
    "mine": ["ppo", "--env", "env.py", "--num-minibatches", "2"],  # on an environment's file
}
SHARED = ["--total-steps", "64", "--num-envs", "2", "--num-steps", "4", "--eval-episodes", "1", "--hidden", "8"]
LAST, STEP = 64, 8  # steps in all, and of an iteration


class Bases:
    """Whole runs, to be copied and not changed.

    Args:
        folder: where they are made.
        command: (argv, folder to run in) runs one `rlgraph` command.
    """

    def __init__(self, folder: Path, command: Callable[[list[str], Path], None]):
        self.folder, self.command = folder, command

    def make(self) -> None:
        for name, backend in (("ppo", "torch"), ("dqn", "jax")):
            self._train(name, backend, self.folder, f"{name}-{backend}")

    def _train(self, name: str, backend: str, folder: Path, run: str) -> None:
        words = ["--backend", backend, "--checkpoint-seconds", "0", "--device", "cpu", "--run-dir", run]
        self.command(["train", *OPTIONS[name], *SHARED, *words], folder)

    def run(self, name: str, backend: str) -> Path:
        return self.folder / f"{name}-{backend}"

    def copy(self, name: str, backend: str, folder: Path, unfinished: bool) -> Path:
        """A run as `run` in a folder; `unfinished`: as if it had been killed after its last but one iteration."""
        run = folder / "run"
        if name == "mine":  # its checkpoints know the path of the environment's file
            Definition("torch", box=False).write(folder)
            self._train(name, backend, folder, "run")
        else:
            shutil.copytree(self.run(name, backend), run)
        if unfinished:
            for path in ("result.json", "policy.safetensors", checkpoint(LAST)):
                (run / path).unlink()
        return run


def checkpoint(steps: int) -> str:
    return f"checkpoints/{steps:012d}.safetensors"


def case(i, draw, bases):
    raise NotImplementedError
