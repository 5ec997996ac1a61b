"""Where figures come from: device, driver, versions, commit, flags, clocks, date."""

import datetime
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path

import torch

PACKAGES = ("rlgraph", "torch", "jax", "jaxlib", "triton", "numpy", "gymnasium", "gymnax", "rejax")
PLACES = ("TORCHINDUCTOR_CACHE_DIR",)  # a place on this machine, which changes no figure
FLAGS = ("XLA_", "CUDA_VISIBLE", "CUDA_LAUNCH", "CUDA_MODULE", "TORCH", "OMP_", "JAX_", "NVIDIA_TF32")


def provenance(commit: str = "") -> dict:
    """Everything about the machine and the tree that a reader needs to repeat a measurement.

    Args:
        commit: of the tree, where there is no git checkout to ask.
    """
    on_gpu = torch.cuda.is_available()
    found, clean = _tree()
    return {
        "device": torch.cuda.get_device_name() if on_gpu else _processor(),
        "driver": _smi("driver_version") if on_gpu else None,
        "cuda": torch.version.cuda,
        "cpu_cores": os.cpu_count(),
        "versions": {name: _version(name) for name in PACKAGES},
        "python": platform.python_version(),
        "system": platform.platform(),
        "commit": commit or found,
        "clean_tree": None if commit else clean,
        "flags": {name: value for name, value in os.environ.items() if name.startswith(FLAGS) and name not in PLACES},
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def clocks() -> str | None:
    """Multiprocessor and memory clocks, temperature and power, as nvidia-smi reads them; None without it."""
    return _smi("clocks.sm,clocks.mem,temperature.gpu,power.draw")


def _tree() -> tuple[str | None, bool | None]:
    root = Path(__file__).resolve().parents[2]
    commit = _output("git", "-C", str(root), "rev-parse", "HEAD")
    if commit is None:
        return None, None
    return commit, _output("git", "-C", str(root), "status", "--porcelain") == ""


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:  # not Linux
        return platform.processor() or platform.machine()
    return platform.machine()


def _smi(query: str) -> str | None:
    answer = _output("nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader")
    return answer.splitlines()[0] if answer else None


def _output(*command: str) -> str | None:
    try:
        run = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return run.stdout.strip() if run.returncode == 0 else None
