"""What a capture is given, checked; and the tensors among it that are put back."""

import contextlib
import numbers
from collections.abc import Callable, Iterator, Sequence

import torch
from torch.utils._pytree import tree_leaves

from rlgraph.devices import torch_device
from rlgraph.errors import UsageError
from rlgraph.graph.words import name_of


def check_tensors(inputs: Sequence, fn: Callable) -> None:
    """Raises UsageError where an input of `fn` is no tensor, or a sparse one, and where `fn` is no function."""
    if not callable(fn):
        raise UsageError(f"what is captured is a function of tensors, not a value of type {type(fn).__name__}")
    for i, given in enumerate(inputs):
        if not isinstance(given, torch.Tensor):
            raise UsageError(
                f"input {i} of {name_of(fn)} is of type {type(given).__name__}: an input is a tensor; bind what is "
                "none, and does not change, with functools.partial"
            )
        if given.layout != torch.strided:
            raise UsageError(f"input {i} of {name_of(fn)} is sparse: give it as to_dense() makes it")


def is_count(value: object) -> bool:
    """A whole number of at least 1."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool) and value >= 1


def tensors_of(state: object) -> list[torch.Tensor]:
    """All tensors of a `state`, see `capture`; UsageError where something in it is none and holds none."""
    return list(_each_tensor(state))


def _each_tensor(state) -> Iterator[torch.Tensor]:
    for leaf in tree_leaves(state):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif isinstance(leaf, torch.nn.Module):
            yield from (*leaf.parameters(), *leaf.buffers())
        elif isinstance(leaf, torch.optim.Optimizer):
            yield from _of_optimizer(leaf)
        elif isinstance(leaf, Iterator):  # module.parameters()
            yield from _each_tensor(list(leaf))
        elif leaf is not None:
            raise UsageError(
                f"state holds a value of type {type(leaf).__name__}: give tensors, modules or optimisers, in any "
                "nesting of tuples, lists and dicts"
            )


def _of_optimizer(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    keeps_nothing = isinstance(optimizer, torch.optim.SGD) and not any(g["momentum"] for g in optimizer.param_groups)
    if not (optimizer.state or keeps_nothing):
        raise UsageError(
            f"state holds an optimiser, {type(optimizer).__name__}, that has taken no step: what it keeps is made by "
            "the first one, so take that before the capture"
        )
    kept = [*optimizer.state.values(), *(group["lr"] for group in optimizer.param_groups)]
    yield from (leaf for leaf in tree_leaves(kept) if isinstance(leaf, torch.Tensor))


def device_of(inputs, state, device: torch.device | str | None) -> torch.device:
    """The device that is named, with its index; else of the first tensor on a GPU, else of the first, else a GPU's."""
    if device is None:
        devices = [tensor.device for tensor in (*inputs, *tensors_of(state))]
        device = next((device for device in devices if device.type == "cuda"), devices[0] if devices else None)
    return torch_device(device)


def generators_of(generators: object) -> tuple[torch.Generator, ...]:
    """The `generators` of a capture; UsageError where they are no torch.Generators in a list or a tuple."""
    if isinstance(generators, list | tuple) and all(isinstance(each, torch.Generator) for each in generators):
        return tuple(generators)
    raise UsageError(f"generators are torch.Generators in a list or a tuple, not {generators!r}")


def own_generator(device: torch.device) -> torch.Generator:
    """The one that draws without a generator come from; `device` with its index."""
    return torch.cuda.default_generators[device.index] if device.type == "cuda" else torch.default_generator


@contextlib.contextmanager
def leaving_no_trace(state, generators):
    """Afterwards, every tensor in `state` and every generator is as it was."""
    tensors = [tensor.detach() for tensor in tensors_of(state)]
    kept = [t.clone() for t in tensors]
    random_states = [g.get_state() for g in generators]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, value in zip(tensors, kept):
                tensor.copy_(value)
        for generator, value in zip(generators, random_states):
            generator.set_state(value)
