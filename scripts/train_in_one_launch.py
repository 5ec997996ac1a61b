"""Train PPO until it is solved by one launch of a CUDA graph: the host does nothing in between.

    python scripts/train_in_one_launch.py --env CartPole-v1

The graph is a WHILE node around a training iteration; the device compares the mean return of training with the target.
Then the policy plays greedily. Without a GPU the host loops, and with TRITON_INTERPRET=1 it takes long.
"""

import argparse
import dataclasses
import sys
import time

import torch

import rlgraph
from rlgraph.agents.one_launch import UntilSolved
from rlgraph.agents.ppo_torch import PPO
from rlgraph.errors import CaptureError, GraphError, UsageError
from rlgraph.train import EVAL_SEED_OFFSET, default_config


def train(args) -> None:
    env = rlgraph.make(args.env)
    target = env.definition.REWARD_THRESHOLD if args.target is None else args.target
    if target is None:
        raise UsageError(f"environment {args.env!r} does not say what counts as solved: give a mean return as --target")
    sizes = {name: getattr(args, name) for name in ("num_envs", "num_steps", "total_steps") if getattr(args, name)}
    config = dataclasses.replace(default_config("ppo", args.env), mode="fused", seed=args.seed, **sizes)
    started = time.perf_counter()
    trainer = PPO(config, env)
    run = UntilSolved(trainer, target)
    wait(trainer.device)
    built = time.perf_counter()
    run.run()
    launched = time.perf_counter()
    wait(trainer.device)
    done = time.perf_counter()
    iterations = run.loop.iterations()
    returns = trainer.evaluate_policy(trainer.policy, env, config.eval_episodes, args.seed + EVAL_SEED_OFFSET)
    print(f"{config.env}, seed {config.seed}, B = {config.num_envs}, T = {config.num_steps}, on {trainer.device}")
    print(f"building, compiling and capturing: {built - started:.1f} s")
    print(
        f"host, for the launch: {1e6 * (launched - built):.0f} µs" + ("" if run.loop.captured else " (it is the loop)")
    )
    print(f"training: {done - built:.3f} s, {iterations} iterations, {iterations * config.batch_size:,} steps")
    print(f"mean return in training {run.mean_return.item():.1f}, target {target:g}")
    print(f"greedy return {returns.mean():.1f} ± {returns.std():.1f} over {len(returns)} episodes")


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--env", default="CartPole-v1")
    parser.add_argument("--target", type=float, help="mean return in training; the environment's mark if left out")
    parser.add_argument("--seed", type=int, default=0)
    for option in ("--num-envs", "--num-steps", "--total-steps"):
        parser.add_argument(option, type=int, help="as `rlgraph train ppo`'s")
    try:
        train(parser.parse_args())
    except (UsageError, GraphError, CaptureError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
