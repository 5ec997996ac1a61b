"""Vector environments: `make_vec` gives a `gymnasium.vector.VectorEnv` on the backend that it is asked for.

`base` holds what both backends share; `torch` and `jax` are thin, and imported only when asked for.
"""

import os
from typing import Any

from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AutoresetMode, VectorEnv

from rlgraph import registry
from rlgraph.arguments import choice, integer, text
from rlgraph.backend import BACKENDS
from rlgraph.definition.errors import errors_of
from rlgraph.definition.trial import check_on
from rlgraph.devices import device_name
from rlgraph.vector.base import check_spaces_fit, checked_seed, short_memory_is_an_error

OUTPUTS = ("tensor", "numpy")


def make_vec(
    id: str | os.PathLike,
    num_envs: int = 1,
    backend: str = "torch",
    device: Any = None,
    mode: str = "auto",
    seed: int | None = None,
    autoreset_mode: str | AutoresetMode = AutoresetMode.NEXT_STEP,
    output: str = "tensor",
    max_episode_steps: int | None = None,
    **params,
) -> VectorEnv:
    """`num_envs` copies of an environment, stepped together: a `rlgraph.vector.base.VectorEnv`.

    Args:
        id: a registered name, "CartPole-v1", or the path of a definition, "my_env.py".
        num_envs: B, at least 1.
        backend: "torch" or "jax"; the other one is never imported.
        device: "cpu", "cuda", "cuda:1", or a device of torch or of JAX; None for a GPU where there is one.
        mode: how a step runs. torch: "eager", "compile", "graph-uncompiled" or "graph" (compiled, then
            replayed as one CUDA graph), "fused" (one kernel, captured); jax: "eager", "jit" or "graph" (with
            command buffers). "auto" is "graph" on a GPU, else "eager" (torch) or "jit" (jax); in torch, where a
            step cannot be captured, it is "compile" or "eager", and a warning says what stopped it.
        seed: in [0, 2**32), of all random numbers until `reset(seed=...)` gives another; None for one from the
            system.
        autoreset_mode: Gymnasium's `AutoresetMode` or its value: "NextStep", "SameStep" or "Disabled".
        output: "tensor" returns torch tensors or jax arrays on the device, "numpy" returns numpy arrays.
        max_episode_steps: None for the environment's own time limit, -1 for none.
        params: fields of the environment's `Params` to replace, such as `g=9.81`.

    Raises:
        UsageError: an argument that is none of these, or more environments than there is memory for; the message names
            what to write instead.
    """
    id = text("id", id)
    backend, output = choice("backend", backend, BACKENDS), choice("output", output, OUTPUTS)
    num_envs = integer("num_envs", num_envs, least=1)
    seed = None if seed is None else checked_seed(seed)
    device = None if device is None else device_name(device)
    autoreset_mode = _autoreset_mode(autoreset_mode)
    env = registry.make(id, max_episode_steps, **params)
    check_spaces_fit(env, num_envs)

    # So that gymnasium.make_vec(env.spec, num_envs=...) makes another one.
    kwargs = {
        "id": id,
        "backend": backend,
        "device": device,
        "mode": mode,
        "seed": seed,
        "autoreset_mode": autoreset_mode.value,
        "output": output,
        **({"max_episode_steps": -1} if env.max_episode_steps is None else {}),
        **{name: getattr(env.params, name) for name in params},  # as Python's own numbers
    }
    spec = EnvSpec(
        env.id,
        reward_threshold=env.definition.REWARD_THRESHOLD,
        max_episode_steps=env.max_episode_steps,
        kwargs=kwargs,
        vector_entry_point="rlgraph:make_vec",
    )
    if backend == "torch":
        from rlgraph.vector.torch import TorchVectorEnv as Backend
    else:
        from rlgraph.vector.jax import JaxVectorEnv as Backend
    check_on(env, backend, device)
    with short_memory_is_an_error(num_envs), errors_of(env):
        return Backend(env, spec, num_envs, device, mode, seed, autoreset_mode, output)


def _autoreset_mode(mode: str | AutoresetMode) -> AutoresetMode:
    if isinstance(mode, AutoresetMode):
        return mode
    return AutoresetMode(choice("autoreset_mode", mode, [m.value for m in AutoresetMode]))
