"""Precision of float32 matrix products on a GPU, and JAX's widths: chosen, not inherited from the process.

"ieee" is float32 throughout; "tf32" rounds the factors to 19 bits and "bf16" to 16 (bfloat16), with float32 sums.
Weights, optimiser, log-probs, losses and returns stay float32 in all three. With "bf16" torch also keeps activations
between layers in bfloat16 (its autocast); XLA keeps them in float32. A CPU computes in float32 whatever the setting.
"""

import contextlib

PRECISIONS = ("ieee", "tf32", "bf16")
TORCH_NAMES = {"ieee": "highest", "tf32": "high", "bf16": "high"}
# "bfloat16" would not do: JAX takes it for "as fast as the platform likes", which is TF32 on a GPU.
JAX_NAMES = {"ieee": "highest", "tf32": "tensorfloat32", "bf16": "BF16_BF16_F32"}


@contextlib.contextmanager
def torch_matmul_precision(precision: str):
    """For torch calls inside; a graph captured inside keeps it in every replay."""
    import torch

    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(TORCH_NAMES[precision])
    try:
        # Without autocast's cache of cast weights, which would outlive an optimiser step inside one capture.
        enabled = precision == "bf16" and torch.cuda.is_available()
        with torch.autocast("cuda", torch.bfloat16, enabled=enabled, cache_enabled=False):
            yield
    finally:
        torch.set_float32_matmul_precision(before)


def jax_matmul_precision(precision: str):
    """For JAX functions traced inside."""
    import jax

    return jax.default_matmul_precision(JAX_NAMES[precision])


def jax_32_bits():
    """For JAX functions called inside: as if `jax_enable_x64` were off, so that a run is the same where it is on."""
    import jax

    return jax.enable_x64(False) if jax.config.jax_enable_x64 else contextlib.nullcontext()
