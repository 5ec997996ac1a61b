"""What all tests share: GPU tests are skipped, with the reason, where there is no NVIDIA GPU."""

import os

import pytest

# Tests run side by side, and torch's threads would only wait for each other. Before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# By default JAX takes most of a GPU's memory at its first use, which would leave torch none in this process.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


def pytest_collection_modifyitems(items):
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items:
        return
    reason = _why_no_gpu()
    if reason:
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason=reason))


def _why_no_gpu() -> str | None:
    import torch  # here, so that a run without GPU tests does not load it

    if torch.version.cuda is None:
        return f"needs an NVIDIA GPU, and this torch ({torch.__version__}) is built without CUDA"
    if not torch.cuda.is_available():
        return f"needs an NVIDIA GPU, and torch {torch.__version__} finds none"
    return None
