"""`python scripts/train.py ppo --env CartPole-v1` is `rlgraph train ppo --env CartPole-v1`."""

import sys

from rlgraph.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
