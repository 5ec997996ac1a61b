"""Precision of float32 matrix products on a GPU: "ieee" or "tf32" (19 bits in, float32 sums), chosen, not inherited."""

import contextlib

TORCH_NAMES = {"ieee": "highest", "tf32": "high"}
JAX_NAMES = {"ieee": "highest", "tf32": "tensorfloat32"}


@contextlib.contextmanager
def torch_matmul_precision(precision: str):
    """For torch calls inside; a graph captured inside keeps it in every replay."""
    import torch

    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(TORCH_NAMES[precision])
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def jax_matmul_precision(precision: str):
    """For JAX functions traced inside."""
    import jax

    return jax.default_matmul_precision(JAX_NAMES[precision])
