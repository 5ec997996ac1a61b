"""The `rlgraph` command."""
