"""`python -m rlgraph`: the `rlgraph` command."""

import sys

from rlgraph.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
