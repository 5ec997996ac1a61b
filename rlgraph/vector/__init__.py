"""Vector environments: `make_vec` gives a `gymnasium.vector.VectorEnv` on the backend that it is asked for.

`base` holds what both backends share; `torch` and `jax` are thin, and imported only when asked for.
"""

import numbers
from typing import Any

from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AutoresetMode, VectorEnv

from rlgraph import registry
from rlgraph.backend import BACKENDS
from rlgraph.definition.errors import errors_of
from rlgraph.definition.trial import check_on
from rlgraph.errors import UsageError, unknown

OUTPUTS = ("tensor", "numpy")


def make_vec(
    id: str,
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
        device: "cpu", "cuda", "cuda:1"; None for a GPU where there is one.
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
        UsageError: an argument that is none of these; the message names what to write instead.
    """
    if backend not in BACKENDS:
        raise unknown("backend", str(backend), BACKENDS)
    if output not in OUTPUTS:
        raise unknown("output", str(output), OUTPUTS)
    if not isinstance(num_envs, numbers.Integral) or isinstance(num_envs, bool) or num_envs < 1:
        raise UsageError(f"num_envs must be an integer of at least 1, but is {num_envs!r}")
    autoreset_mode = _autoreset_mode(autoreset_mode)
    env = registry.make(id, max_episode_steps, **params)

    # So that gymnasium.make_vec(env.spec, num_envs=...) makes another one.
    kwargs = {
        "id": id,
        "backend": backend,
        "device": None if device is None else str(device),
        "mode": mode,
        "seed": seed,
        "autoreset_mode": autoreset_mode.value,
        "output": output,
        **({"max_episode_steps": -1} if env.max_episode_steps is None else {}),
        **params,
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
    with errors_of(env):
        return Backend(env, spec, int(num_envs), device, mode, seed, autoreset_mode, output)


def _autoreset_mode(mode: str | AutoresetMode) -> AutoresetMode:
    if isinstance(mode, AutoresetMode):
        return mode
    known = [m.value for m in AutoresetMode]
    if mode not in known:
        raise unknown("autoreset_mode", str(mode), known)
    return AutoresetMode(mode)
