"""The size of a replay ring, shared by both backends."""

from rlgraph.errors import UsageError

# A row is drawn by a float32 uniform, which tells so many apart; JAX's have 23 bits.
MAX_ROWS = 2**23


def num_rows(capacity: int, num_steps: int, num_envs: int) -> int:
    """Rows of time, S, that hold `capacity` steps of all environments: a multiple of a rollout's T = `num_steps`.

    Raises:
        UsageError: more rows than a draw can tell apart.
    """
    rows = -(-capacity // (num_steps * num_envs)) * num_steps
    if rows > MAX_ROWS:
        raise UsageError(
            f"a replay of {capacity} steps in {num_envs} environments has {rows} rows, more than {MAX_ROWS}; "
            "lower the capacity or step more environments"
        )
    return rows
