"""Train PPO until it is solved by one launch of a CUDA graph: the host does nothing in between.

    python scripts/train_in_one_launch.py --env CartPole-v1 --seeds 10 --out one-launch.json

The graph is a WHILE node around a training iteration. After each in which an episode has ended, the device plays
--eval-episodes greedy ones and compares their mean return with the target, as `rlgraph bench solve` does from the host;
with --eval-episodes 0 the mean return of training decides. At the end the host evaluates the policy once more, from
other starts. Seconds are from the launch until the device is done, and what is built and compiled before is not in
them. Without a GPU the host loops, and with TRITON_INTERPRET=1 it takes long.
"""

import argparse
import dataclasses
import statistics
import sys
import time

import torch

import rlgraph
from rlgraph.agents.ppo.config import PPOConfig
from rlgraph.agents.ppo.one_launch import UntilSolved
from rlgraph.agents.ppo.torch import PPO
from rlgraph.bench.results import count, errors_in_a_line, out_options, write_measured
from rlgraph.environment import Environment
from rlgraph.errors import UsageError
from rlgraph.runs.finite import check_learned
from rlgraph.runs.train import default_config, evaluation_seed


def train(config: PPOConfig, env: Environment, target: float, eval_episodes: int) -> dict:
    """Build, launch, wait, evaluate: what one seed came to."""
    began = time.perf_counter()
    trainer = PPO(config, env)
    run = UntilSolved(trainer, target, eval_episodes)
    wait(trainer.device)
    built = time.perf_counter()
    run.run()
    launched = time.perf_counter()
    wait(trainer.device)
    done = time.perf_counter()
    iterations = run.loop.iterations()
    check_learned(trainer, f"after {iterations} iterations")
    seed = evaluation_seed(config)
    returns = trainer.evaluate_policy(trainer.policy, env, config.eval_episodes, seed)
    return {
        "seed": config.seed,
        "solved": run.solved(),
        "seconds": done - built,
        "host_us": 1e6 * (launched - built),
        "one_launch": run.loop.captured,
        "iterations": iterations,
        "steps": iterations * config.batch_size,
        "evaluations": int(run.evaluations),
        "training_return": float(run.mean_return),
        "deciding_return": float(run.greedy_return if eval_episodes else run.mean_return),
        "greedy_return": float(returns.mean()),
        "build_s": built - began,
    }


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def summary(config: PPOConfig, target: float, rows: list[dict]) -> dict:
    """A row for each seed, and medians over them."""
    figures = ("seconds", "host_us", "iterations", "evaluations", "greedy_return")
    medians = {name: statistics.median(row[name] for row in rows) for name in figures}
    rows = [{name: None if x != x else x for name, x in row.items()} for row in rows]  # JSON has no NaN
    return {"config": dataclasses.asdict(config), "target": target, "median": medians, "rows": rows}


def measure(args) -> None:
    env = rlgraph.make(args.env)
    target = env.definition.REWARD_THRESHOLD if args.target is None else args.target
    if target is None:
        raise UsageError(f"environment {args.env!r} does not say what counts as solved: give a mean return as --target")
    chosen = ("num_envs", "num_steps", "num_epochs", "total_steps", "target_kl")
    chosen = {name: getattr(args, name) for name in chosen if getattr(args, name) is not None}
    config = dataclasses.replace(default_config("ppo", args.env), mode="fused", **chosen)
    eval_episodes = config.eval_episodes if args.eval_episodes is None else args.eval_episodes
    decides = f"{eval_episodes} greedy episodes" if eval_episodes else "training"
    print(f"{config.env} to a mean return of {target:g} of {decides}, B = {config.num_envs}, T = {config.num_steps}")
    print("seed  solved  iterations  evaluations  seconds  host µs  deciding return  greedy return")
    rows = []
    for seed in range(args.seed, args.seed + args.seeds):
        rows.append(train(dataclasses.replace(config, seed=seed), env, target, eval_episodes))
        row = {**rows[-1], "solved": "yes" if rows[-1]["solved"] else "no"}
        print(
            "{seed:4}  {solved:>6}  {iterations:10}  {evaluations:11}  {seconds:7.3f}  {host_us:7.0f}  "
            "{deciding_return:15.1f}  {greedy_return:13.1f}".format(**row),
            flush=True,
        )
        measured = summary(config, target, rows)
        write_measured(args, "python scripts/train_in_one_launch.py", sys.argv[1:], measured)
    if not rows[0]["one_launch"]:
        print("Without a GPU the host's part is the whole loop.")
    print("median: " + ", ".join(f"{name} {value:g}" for name, value in measured["median"].items()))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--env", default="CartPole-v1")
    parser.add_argument("--target", type=float, help="mean return; the environment's own mark if left out")
    parser.add_argument("--eval-episodes", type=int, help="greedy ones that decide; 0: training does; 100 if left out")
    parser.add_argument("--seed", type=int, default=0, help="the first one; the others follow")
    parser.add_argument("--seeds", type=count, default=1)
    for option in ("--num-envs", "--num-steps", "--num-epochs", "--total-steps"):
        parser.add_argument(option, type=int, help="as `rlgraph train ppo`'s")
    parser.add_argument("--target-kl", type=float, help="as `rlgraph train ppo`'s")
    out_options(parser)
    args = parser.parse_args()
    measure(args)


if __name__ == "__main__":
    with errors_in_a_line():
        main()
