"""Precision of matrix products on a GPU, chosen, not inherited from the process.

"ieee" is float32 throughout; "tf32" rounds the factors to 19 bits, "bf16" to bfloat16; sums are float32, and weights
and optimiser stay float32, in all three. On a CPU it is always float32 in torch.
"""

import contextlib

TORCH_NAMES = {"ieee": "highest", "tf32": "high", "bf16": "high"}
JAX_NAMES = {"ieee": "highest", "tf32": "tensorfloat32", "bf16": "bfloat16"}


@contextlib.contextmanager
def torch_matmul_precision(precision: str):
    """For torch calls inside; a graph captured inside keeps it in every replay."""
    import torch

    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(TORCH_NAMES[precision])
    try:
        # Without its cache of cast weights, which would outlive an optimiser step inside one capture.
        with torch.autocast("cuda", torch.bfloat16, enabled=precision == "bf16", cache_enabled=False):
            yield
    finally:
        torch.set_float32_matmul_precision(before)


def jax_matmul_precision(precision: str):
    """For JAX functions traced inside."""
    import jax

    return jax.default_matmul_precision(JAX_NAMES[precision])
