"""Two runs of a function compared: their outputs, and what they leave in tensors."""

from collections.abc import Mapping

import torch
from torch.utils._pytree import tree_leaves


def snapshot(trees: Mapping[str, object]) -> dict[str, object]:
    """The leaves of trees, copied, by the tree's name and their number: "output 0"."""
    return {
        f"{name} {i}": leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf
        for name, tree in trees.items()
        for i, leaf in enumerate(tree_leaves(tree))
    }


def difference(one: Mapping[str, object], other: Mapping[str, object]) -> str | None:
    """The first leaf that differs between two snapshots, and by how much, in words; None: all have the same bits."""
    if one.keys() != other.keys():
        return f"{len(one)} outputs and tensors in place of {len(other)}"
    for name, value in one.items():
        if (found := _difference(value, other[name])) is not None:
            return f"{name}: {found}"
    return None


def _difference(one, other) -> str | None:
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return None if repr(one) == repr(other) else f"{one!r} in place of {other!r}"
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return f"{one.dtype}{list(one.shape)} in place of {other.dtype}{list(other.shape)}"
    differs = (one != other) & ~((one != one) & (other != other))  # a NaN is the same as a NaN
    count = int(differs.sum())
    if count == 0:
        return None
    if one.dtype != torch.bool:
        wide = torch.complex128 if one.is_complex() else torch.float64
        most = (one.to(wide) - other.to(wide)).abs()[differs].max().item()
        return f"{count} of {one.numel()} elements differ, by up to {most:.3g}"
    return f"{count} of {one.numel()} elements differ"
