"""`kill -9` at random moments of training: what comes of a run must be what comes of one that nothing disturbed.

    python scripts/kill.py --kills 64
    python scripts/kill.py --kills 10 --agents ppo --backends torch

Every agent is killed on either backend: while it sets up, between its iterations and in them, while it writes a
checkpoint or the policy, and while it evaluates. It goes on after each, until it ends. A checkpoint is written after
every iteration.
"""

import argparse
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fork_server import Command, Process, Server
from fuzz_commands import OPTIONS
from rich.console import Console
from rich.table import Table
from safetensors.numpy import load_file

from rlgraph.agents import AGENTS
from rlgraph.backend import BACKENDS
from rlgraph.bench.results import count

RUN = {"total_steps": 320, "eval_episodes": 10, "checkpoint_seconds": 0, "device": "cpu"}  # 40 iterations
TIMES = ("seconds", "steps_per_second")  # of a row of metrics.jsonl: no two runs share them
SLOWEST = 120.0  # seconds that a run may take


@dataclass(frozen=True)
class Schedule:
    """Seconds at which an undisturbed run came so far."""

    first_checkpoint: float
    policy: float
    end: float


# ---- when to kill: each moment is drawn before a life begins, and then watched for

Moment = Callable[[Path, float], bool]  # (run folder, seconds so far) -> whether it has come


def in_setup(draw: random.Random, times: Schedule) -> Moment:
    after = draw.uniform(0, times.first_checkpoint)
    return lambda run, seconds: seconds >= after


def in_training(draw: random.Random, times: Schedule) -> Moment:
    after = draw.uniform(times.first_checkpoint, times.policy)
    return lambda run, seconds: seconds >= after


def in_a_checkpoint(draw: random.Random, times: Schedule) -> Moment:
    """While one is written, or just after."""
    wanted, seen, delay = draw.randrange(1, 15), set(), draw.uniform(0, 2e-3)

    def has_come(run: Path, seconds: float) -> bool:
        new = {path.name for path in (run / "checkpoints").glob("*.part")} - seen
        seen.update(new)
        if len(seen) < wanted:
            return False
        time.sleep(delay)
        return True

    return has_come


def in_the_policy(draw: random.Random, times: Schedule) -> Moment:
    """While it is written, or just after."""
    delay = draw.uniform(0, 2e-3)

    def has_come(run: Path, seconds: float) -> bool:
        if not list(run.glob("policy.safetensors*")):
            return False
        time.sleep(delay)
        return True

    return has_come


def in_evaluation(draw: random.Random, times: Schedule) -> Moment:
    delay = draw.uniform(0, times.end - times.policy)

    def has_come(run: Path, seconds: float) -> bool:
        if not (run / "policy.safetensors").exists():
            return False
        time.sleep(delay)
        return True

    return has_come


MOMENTS = {
    "setup": in_setup,
    "training": in_training,
    "checkpoint": in_a_checkpoint,
    "policy": in_the_policy,
    "evaluation": in_evaluation,
}


# ---- runs


class Runs:
    """The runs of one agent on one backend.

    Args:
        server: that starts commands.
        folder: for all of them.
    """

    def __init__(self, server: Server, agent: str, backend: str, folder: Path):
        self.server, self.folder = server, folder
        options = OPTIONS[agent] | RUN | {"backend": backend}
        self.options = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]
        self.agent = agent
        folder.mkdir()

    def start(self, name: str) -> Process:
        """Begin a run, or go on with it."""
        begun = (self.folder / name / "config.json").exists()
        argv = ["train", "--resume", name] if begun else ["train", self.agent, *self.options, "--run-dir", name]
        return self.server.start(Command(tuple(argv), str(self.folder), "/dev/null", str(self.folder / "stderr")))

    def end(self, process: Process) -> int:
        """Returns the exit code of a life: 0, or minus 9."""
        if not process.has_ended(SLOWEST):
            process.kill()
        code = process.end()
        words = (self.folder / "stderr").read_text() if (self.folder / "stderr").exists() else ""
        if code not in (0, -9) or "damaged" in words or "Traceback" in words:
            raise SystemExit(f"kill: a run of {self.agent} ended with code {code}: {words.strip()}")
        return code

    def undisturbed(self, name: str) -> Schedule:
        began, process = time.perf_counter(), self.start(name)
        seen = {}
        while not process.has_ended():
            for what, pattern in (("checkpoint", "checkpoints/*"), ("policy", "policy.safetensors")):
                if what not in seen and list((self.folder / name).glob(pattern)):
                    seen[what] = time.perf_counter() - began
            time.sleep(1e-3)
        seconds = time.perf_counter() - began
        if self.end(process):
            raise SystemExit(f"kill: a run of {self.agent} did not end in {SLOWEST:g} s")
        return Schedule(seen["checkpoint"], seen.get("policy", seconds), seconds)

    def killed(self, name: str, moment: Moment) -> bool:
        """Run one life until the moment has come. Returns whether it was killed, and had not ended before."""
        began, process = time.perf_counter(), self.start(name)
        while not process.has_ended() and time.perf_counter() - began < SLOWEST:
            if moment(self.folder / name, time.perf_counter() - began):
                process.kill()
                break
            time.sleep(2e-4)
        return self.end(process) != 0


def difference(run: Path, whole: Path) -> str | None:
    """What is not the same in two runs, but for times."""
    policies = [load_file(folder / "policy.safetensors") for folder in (run, whole)]
    if policies[0].keys() != policies[1].keys():
        return "names in the policy"
    for name in policies[1]:
        left, right = (policy[name] for policy in policies)
        if (left.dtype, left.shape, left.tobytes()) != (right.dtype, right.shape, right.tobytes()):
            return f"{name} in the policy"
    if rows(run) != rows(whole):
        return "rows of metrics.jsonl"
    results = [json.loads((folder / "result.json").read_text()) for folder in (run, whole)]
    unlike = [
        n for n in ("steps", "eval_return_mean", "eval_return_std", "interrupted") if results[0][n] != results[1][n]
    ]
    parts = [str(path.relative_to(run)) for path in run.rglob("*.part")]
    return f"{unlike[0]} of the result" if unlike else f"{parts[0]} is left" if parts else None


def rows(run: Path) -> list[dict]:
    read = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{name: row[name] for name in row if name not in TIMES} for row in read]


@dataclass(frozen=True)
class Trial:
    agent: str
    backend: str
    kills: Counter  # by moment
    runs: int
    differences: list[str]


def trial(server: Server, agent: str, backend: str, kills: int, draw: random.Random, folder: Path) -> Trial:
    """Kill runs of one agent so many times, and compare each that has come to its end with an undisturbed one."""
    runs = Runs(server, agent, backend, folder)
    runs.undisturbed("first")  # JAX compiles, and is not timed
    times = runs.undisturbed("whole")
    done, finished, differences = Counter(), 0, [*filter(None, [difference(folder / "first", folder / "whole")])]
    while sum(done.values()) < kills:
        name = f"run-{finished}"
        alive = True
        while alive and sum(done.values()) < kills:
            wanted = min(MOMENTS, key=lambda moment: (done[moment], draw.random()))
            alive = runs.killed(name, MOMENTS[wanted](draw, times))
            done[wanted] += alive
        if alive:
            runs.undisturbed(name)
        finished += 1
        differences += filter(None, [difference(folder / name, folder / "whole")])
    return Trial(agent, backend, done, finished, differences)


def print_trials(trials: list[Trial]) -> None:
    table = Table("agent", "backend", "kills", *MOMENTS, "runs", "identical")
    for t in trials:
        identical = "yes" if not t.differences else f"no: {'; '.join(t.differences)}"
        table.add_row(
            t.agent, t.backend, str(t.kills.total()), *(str(t.kills[m]) for m in MOMENTS), str(t.runs), identical
        )
    Console(width=120).print(table)
    same = sum(t.runs - len(t.differences) for t in trials)
    print(f"{sum(t.kills.total() for t in trials)} kills, {same} of {sum(t.runs for t in trials)} runs identical")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kills", type=count, default=64, help="in all")
    parser.add_argument("--agents", nargs="+", choices=AGENTS, default=[*AGENTS])
    parser.add_argument("--backends", nargs="+", choices=BACKENDS, default=[*BACKENDS])
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    args = parser.parse_args()
    pairs = [(agent, backend) for agent in args.agents for backend in args.backends]
    each, trials = -(-args.kills // len(pairs)), []
    with tempfile.TemporaryDirectory() as folder:
        server = Server(Path(folder, "xla"))
        for agent, backend in pairs:
            print(f"{agent} {backend} …", file=sys.stderr)
            draw = random.Random(f"{args.seed} {agent} {backend}")
            trials.append(trial(server, agent, backend, each, draw, Path(folder, f"{agent}-{backend}")))
        server.close()
    print_trials(trials)
    return int(any(t.differences for t in trials))


if __name__ == "__main__":
    sys.exit(main())
