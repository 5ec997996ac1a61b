"""Rollouts: T steps of policy, environment and autoreset into [T, B, ...] buffers, one module a backend."""

from typing import Any, NamedTuple

Array = Any

# The critic runs over T * B observations after the steps; at most so many at once, or its activations would take
# several times the memory of the rollout itself.
VALUE_ROWS = 2**22


class Rollout(NamedTuple):
    """T steps of B environments. Row t holds what was seen before the action of step t, and what the step gave.

    An episode may end in any row; the next row then starts the next one. `final_obs` and `final_value` belong to
    the observation that the step led to, before any reset: they bootstrap an episode that was cut off, and the last
    row. They are never the first observation of the next episode.
    """

    obs: Array  # [T, B, *observation shape], before the action
    action: Array  # [T, B] integers from 0 (Discrete) or [T, B, *action shape] float32, before clipping (Box)
    log_prob_TB: Array  # [T, B] float32, of the policy that acted
    value_TB: Array | None  # [T, B] float32, at obs; None if collected without a critic
    reward_TB: Array  # [T, B] float32
    terminated_TB: Array  # [T, B] bool
    truncated_TB: Array  # [T, B] bool, may be True together with terminated
    final_obs: Array  # [T, B, *observation shape]
    final_value_TB: Array | None  # [T, B] float32, at final_obs; None if collected without a critic


class EpisodeTotals(NamedTuple):
    """Sums over the episodes that ended in a rollout, on the device."""

    return_sum: Array  # [] float32
    length_sum: Array  # [] float32, steps
    count: Array  # [] float32
