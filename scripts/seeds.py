"""Train one agent on one environment with many seeds, and write what each came to.

    python scripts/seeds.py ppo --env CartPole-v1 --backend torch --seeds 10 --jobs 2 --out cartpole.json

Every seed is a run of `rlgraph train` in a process of its own; options after `--` go to it.
"""

import argparse
import concurrent.futures
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.progress import track

from rlgraph.bench.results import file_to_write

MOST_POINTS = 130  # of a curve: more than a plot shows only make the file larger


def train(args, seed, folder):
    """The run's result.json, versions.json and the rows of its metrics.jsonl."""
    run_dir = folder / str(seed)
    command = [sys.executable, "-m", "rlgraph", "train", args.agent, "--env", args.env, "--backend", args.backend]
    command += ["--seed", str(seed), "--run-dir", str(run_dir), *args.options]
    environment = dict(os.environ)
    if args.jobs > 1:
        # Side by side, threads get in each other's way, and no run may take all of a GPU's memory.
        environment |= {"OMP_NUM_THREADS": "1", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if run.returncode:
        raise SystemExit(f"seed {seed} failed: {run.stderr.strip()}")
    result, versions = (json.loads((run_dir / name).read_text()) for name in ("result.json", "versions.json"))
    return result, versions, [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def curve(rows_per_seed):
    """Environment steps so far, and for each seed the mean return of the episodes that ended in that iteration (null
    where none did); of every n-th iteration, counted from the last."""
    every = -(-len(rows_per_seed[0]) // MOST_POINTS)
    kept = [rows[::-every][::-1] for rows in rows_per_seed]
    rounded = [[None if (x := row["episode_return"]) is None else round(x, 1) for row in rows] for rows in kept]
    return {"step": [row["step"] for row in kept[0]], "episode_return_per_seed": rounded}


def as_json(summary):
    """Indented, but a list of numbers on one line."""
    text = json.dumps(summary, indent=2)
    return re.sub(r"\[\n([^][]*)\]", lambda found: f"[{' '.join(found[1].split())}]", text) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("agent")
    parser.add_argument("--env", required=True)
    parser.add_argument("--backend", default="torch")
    parser.add_argument("--seeds", type=int, default=10, help="train with seeds 0 to this, exclusive")
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side")
    parser.add_argument("--out", required=True, type=file_to_write, help="JSON file to write")
    words = sys.argv[1:]
    split = words.index("--") if "--" in words else len(words)
    args = parser.parse_args(words[:split])
    args.options = words[split + 1 :]

    with tempfile.TemporaryDirectory() as folder, concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        runs = pool.map(lambda seed: train(args, seed, Path(folder)), range(args.seeds))
        runs = list(track(runs, total=args.seeds, description=f"{args.env} {args.backend}"))

    returns = [result["eval_return_mean"] for result, _, _ in runs]
    options = f" -- {' '.join(args.options)}" if args.options else ""
    summary = {
        "command": f"python scripts/seeds.py {args.agent} --env {args.env} --backend {args.backend} "
        f"--seeds {args.seeds} --jobs {args.jobs}{options}",
        "versions": runs[0][1],
        "processor": platform.processor() or platform.machine(),
        "cpu_cores": os.cpu_count(),
        "eval_return_per_seed": returns,
        "eval_return_mean": statistics.mean(returns),
        "eval_return_min": min(returns),
        "steps": runs[0][0]["steps"],
        "train_seconds_median": statistics.median(result["train_seconds"] for result, _, _ in runs),
        "setup_seconds_median": statistics.median(result["setup_seconds"] for result, _, _ in runs),
        "curve": curve([rows for _, _, rows in runs]),
    }
    Path(args.out).write_text(as_json(summary))
    print(f"{args.env} {args.backend}: mean {summary['eval_return_mean']:.1f}, least {min(returns):.1f}, {returns}")


if __name__ == "__main__":
    main()
