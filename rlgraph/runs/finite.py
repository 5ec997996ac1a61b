"""NaN and infinity stop a run. They are found in what the host reads anyway, so that the device does nothing more."""

import math

import numpy as np

from rlgraph.errors import NonFiniteError

# Parts of a trainer's state that are the environment's own. An infinity may belong there, as "the best so far" does;
# what comes of one shows in a loss.
THE_ENVIRONMENTS = ("collector/carry/", "collector/obs", "replay/obs", "replay/final_obs")
ADVICE = "look for NaN and infinity in the environment's rewards and observations, or lower the learning rate"


def bad_metric(metrics: dict[str, float]) -> str | None:
    """The first metric that is NaN or infinite, in words: "'loss' is nan"; None where all are finite."""
    return next((f"{name!r} is {value}" for name, value in metrics.items() if not math.isfinite(value)), None)


def bad_array(state: dict[str, np.ndarray]) -> str | None:
    """The same for the arrays of what an agent learns or is paid, of those that a trainer's `state_arrays` gives."""
    for name, array in state.items():
        if array.dtype.kind == "f" and not name.startswith(THE_ENVIRONMENTS):
            bad = array[~np.isfinite(array)]
            if bad.size:
                return f"{name!r} holds {bad[0]}"
    return None


def check_learned(trainer, when: str) -> None:
    """Raise a NonFiniteError that names what is NaN or infinite in a trainer's state.

    Args:
        trainer: of rlgraph.agents.
        when: "after 3 iterations".
    """
    if bad := bad_array(trainer.state_arrays()):
        raise NonFiniteError(f"{bad} {when}: {ADVICE}")


def check_returns(returns: np.ndarray) -> None:
    """Raise a NonFiniteError unless the returns [episodes] of an evaluation are finite."""
    bad = returns[~np.isfinite(returns)]
    if bad.size:
        raise NonFiniteError(
            f"the return is {bad[0]} in {bad.size} of {returns.size} greedy episodes: look for NaN and infinity in the "
            "environment's rewards"
        )
