"""JAX's side of the same idea: XLA replays compiled work through command buffers, its CUDA graphs."""

import functools
from collections.abc import Callable, Sequence

import jax
import numpy as np

from rlgraph.modes import MODES

# An empty list turns command buffers off for one function; leaving the option out keeps XLA's own list.
NO_COMMAND_BUFFERS = {"xla_gpu_enable_command_buffer": ""}


def prepare(
    fn: Callable,
    mode: str,
    donate_argnums: Sequence[int] = (),
    static_argnums: Sequence[int] = (),
    device: jax.Device | None = None,
) -> Callable:
    """`fn` as a JAX mode runs it.

    Args:
        fn: a pure function of arrays (and pytrees of them).
        mode: "eager" (operation by operation), "jit" (compiled, command buffers off) or "graph" (compiled, command
            buffers on, XLA's default). On a CPU, which has no command buffers, "graph" is "jit". "fused" is "graph"
            here: what it fuses is up to `fn`.
        donate_argnums: arguments whose buffers the result may take over. Stable addresses keep XLA from recording
            its command buffers again; the caller must not use a donated argument afterwards.
        static_argnums: arguments that are compiled in.
        device: where it will run, the default device if None: only there to know whether it is a GPU.
    """
    chosen = MODES["jax"][mode]
    if not chosen.compile:
        return functools.wraps(fn)(_without_jit(fn))
    platform = (device or jax.devices()[0]).platform
    options = NO_COMMAND_BUFFERS if platform == "gpu" and not chosen.graph else None
    return jax.jit(fn, donate_argnums=donate_argnums, static_argnums=static_argnums, compiler_options=options)


def _without_jit(fn: Callable) -> Callable:
    def run(*args, **kwargs):
        with jax.disable_jit():
            return fn(*args, **kwargs)

    return run


class Readback:
    """A small array on its way to the host while the GPU goes on."""

    def __init__(self, array: jax.Array):
        array.copy_to_host_async()
        self.array = array

    def get(self) -> list:
        """The values as Python numbers, nested as the array's shape; waits for that array alone."""
        return np.asarray(self.array).tolist()
