"""What determines the rest of a run in torch, as named arrays, for checkpoints. The same names as state_jax.py."""

from typing import Any

import numpy as np
import torch

from rlgraph.runs.checkpoint import check_same_state


def flat_state(state: dict[str, Any], generator: torch.Generator) -> dict[str, np.ndarray]:
    """Copies on the host.

    Args:
        state: tensors in any nesting of dicts and NamedTuples, whose keys and fields make up the names.
        generator: every random number to come is drawn from it; stored as "generator".
    """
    arrays = {name: tensor.detach().to("cpu", copy=True).numpy() for name, tensor in _named(state)}
    return {**arrays, "generator": generator.get_state().numpy()}


def restore(state: dict[str, Any], generator: torch.Generator, arrays: dict[str, np.ndarray]) -> None:
    """Write back what `flat_state` gave, in place: a captured graph goes on with it.

    Raises:
        UsageError: a name, shape or dtype differs.
    """
    tensors = [*_named(state), ("generator", generator.get_state())]
    check_same_state({name: f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for name, t in tensors}, arrays)
    for name, tensor in _named(state):
        tensor.detach().copy_(torch.tensor(arrays[name]))
    generator.set_state(torch.tensor(arrays["generator"]))


def _named(state: Any, name: str = "") -> list[tuple[str, torch.Tensor]]:
    """("policy/actor.layers.0.weight", tensor), and so on."""
    if isinstance(state, torch.Tensor):
        return [(name, state)]
    children = state if isinstance(state, dict) else state._asdict()
    return [pair for key, child in children.items() for pair in _named(child, f"{name}/{key}" if name else key)]
