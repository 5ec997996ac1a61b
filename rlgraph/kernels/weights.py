"""What a kernel needs to know of a policy. The same for both backends; `Array` is theirs."""

from typing import Any, NamedTuple

Array = Any
ACTIVATIONS = ("tanh", "relu", "silu")
MOST_OUTPUTS = 32  # of an actor in a kernel: each is a sum, and a register, of its own
LOG_STD_RANGE = (-5.0, 2.0)  # keeps the standard deviation finite and above zero, however long the run


class Layer(NamedTuple):
    weight: Array  # [out, in] float32
    bias: Array  # [out] float32


class Policy(NamedTuple):
    """Fully connected actor and critic over flattened, normalised observations. They may share their first layers.

    An actor's outputs are logits of a Discrete space's actions, or means of a Box's, flattened.
    """

    actor: tuple[Layer, ...]
    critic: tuple[Layer, ...] | None  # its last layer has one output; None records no values
    activation: str  # of ACTIVATIONS, after every layer but the last
    obs_mean: Array  # [D] float32
    obs_var: Array  # [D] float32
    log_std: Array | None  # [A] float32, of Gaussian actions; None where actions are discrete


def rounded_up(width: int) -> int:
    """The width that a kernel gives to a layer: a power of two that the matrix units take."""
    return max(16, 1 << (width - 1).bit_length())
