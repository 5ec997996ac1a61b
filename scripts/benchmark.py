"""`python scripts/benchmark.py [options]` is `rlgraph bench [options]`."""

import sys

from rlgraph.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["bench", *sys.argv[1:]]))
