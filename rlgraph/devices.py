"""Devices by name, the same names for both backends: "cpu", "cuda" (or "gpu"), "cuda:1"."""

import contextlib
import os
import re
import sys
from typing import Any

from rlgraph.errors import UsageError, shown, unknown

KNOWN = ("auto", "cpu", "cuda", "cuda:0", "gpu")  # examples, for errors


def torch_device(name: Any = None):
    """The `torch.device` of a name.

    Args:
        name: "cpu", "cuda" (the current one), "cuda:1", a device of torch or of JAX, or None or "auto" for a GPU
            where there is one.

    Returns:
        A `torch.device`, for a GPU with its index.

    Raises:
        UsageError: no such name, or no such device here.
    """
    import torch

    gpus = [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    name = device_name(name)
    if name == "auto":
        name = "cuda" if gpus else "cpu"
    platform, index = _parse(name)
    if platform == "cpu":
        return _pick(name, [torch.device("cpu")], index or 0, "torch")
    return _pick(name, gpus, torch.cuda.current_device() if gpus and index is None else index or 0, "torch")


def jax_device(name: Any = None):
    """The `jax.Device` of a name.

    Args:
        name: "cpu", "cuda" or "gpu" (the first one), "cuda:1", a device of torch or of JAX, or None or "auto" for
            JAX's own default.

    Raises:
        UsageError: no such name, or no such device here.
    """
    import jax

    if isinstance(name, jax.Device):
        return name
    name = device_name(name)
    if name == "auto":
        return jax.devices()[0]
    platform, index = _parse(name)
    try:
        found = jax.devices("gpu" if platform == "cuda" else "cpu")
    except RuntimeError:  # JAX's answer where it has no such platform
        found = []
    return _pick(name, found, index or 0, "jax")


def device_name(device: Any) -> str:
    """What a caller calls a device, as text: a name, a device of torch or of JAX, or None for "auto".

    Raises:
        UsageError: it is none of these.
    """
    if device is None:
        return "auto"
    if isinstance(device, str):
        return str(device)
    torch, jax = sys.modules.get("torch"), sys.modules.get("jax")  # else it can be no device of theirs
    if torch is not None and isinstance(device, torch.device):
        return str(device)
    if jax is not None and isinstance(device, jax.Device):
        platform = "cuda" if device.platform == "gpu" else device.platform
        return platform if (platform, device.id) == ("cpu", 0) else f"{platform}:{device.id}"
    raise unknown("device", shown(device), KNOWN)


@contextlib.contextmanager
def torch_single_thread(device):
    """On a CPU, one thread for the torch operations inside, unless OMP_NUM_THREADS asks for a number.

    A rollout is thousands of operations on a few thousand numbers each: too little to share. Threads gain nothing
    there, and where another program uses the cores they wait for each other at every operation (PPO on
    CartPole, two cores that other processes kept busy: 375 steps/s with two threads, 10,900 with one).
    """
    import torch

    if device.type != "cpu" or "OMP_NUM_THREADS" in os.environ:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _parse(name: str) -> tuple[str, int | None]:
    match = re.fullmatch(r"(cpu|cuda|gpu)(?::([0-9]{1,50}))?", name)
    if match is None:
        raise unknown("device", name, KNOWN)
    platform, index = match.groups()
    return "cpu" if platform == "cpu" else "cuda", None if index is None else int(index)


def _pick(name: str, found: list, index: int, backend: str):
    if index < len(found):
        return found[index]
    kind = name.split(":")[0]
    seen = f"only {len(found)}" if found else "none"
    raise UsageError(f"device {name!r} is not available: {backend} finds {seen} of kind {kind!r} here")
