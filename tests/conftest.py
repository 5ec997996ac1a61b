"""What all tests share: what JAX compiles quickly, and why GPU tests are skipped where there is no NVIDIA GPU."""

import contextlib
import dataclasses
import glob
import importlib.metadata
import os
import signal

import pytest

# Tests run side by side, and torch's threads would only wait for each other. Before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# By default JAX takes most of a GPU's memory at its first use, which would leave torch none in this process.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

# A shell starts its background jobs with Ctrl-C ignored, and Python leaves it so, here and in what tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _has_cuda() -> bool:
    if not glob.glob("/dev/nvidia[0-9]*") and not os.path.exists("/dev/dxg"):  # as most machines: without torch
        return False
    import torch

    return torch.cuda.is_available()


if not _has_cuda():
    # Mode fused: Triton decides when it is imported whether it compiles kernels or runs them in Python.
    os.environ.setdefault("TRITON_INTERPRET", "1")
    # XLA's compilations, most of what the tests of JAX take, in two thirds of the time. Only where the flag is known:
    # XLA ends a process that names another.
    if importlib.metadata.version("jaxlib").startswith("0.10."):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_use_fusion_emitters=false".strip()


@pytest.fixture(scope="session")
def compiled_programs(tmp_path_factory):
    return tmp_path_factory.mktemp("xla")


@contextlib.contextmanager
def _compiling(folder: str, quick: bool):
    import jax  # here, so that tests without it do not load it
    from jax.experimental.compilation_cache import compilation_cache

    def use(folder, min_seconds, quick):
        jax.config.update("jax_compilation_cache_dir", folder)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", min_seconds)
        jax.config.update("jax_disable_most_optimizations", quick)
        # Whether there is a cache, JAX decides once, at a process's first compilation: in another module, perhaps.
        compilation_cache.reset_cache()

    use(folder, 0, quick and jax.default_backend() == "cpu")
    yield
    use(None, 1, False)


# A module asks for one of the two by `pytestmark = pytest.mark.usefixtures("quick_compilation")`.


@pytest.fixture(scope="module")
def compilation_once(compiled_programs):
    """What is the same XLA program, as runs of one configuration are, whatever their seed, is compiled once."""
    with _compiling(str(compiled_programs), quick=False):
        yield


@pytest.fixture(scope="module")
def quick_compilation(compiled_programs):
    """The same, and without polish."""
    with _compiling(str(compiled_programs), quick=True):
        yield


@pytest.fixture(scope="session")
def quick_environment(compiled_programs) -> dict[str, str]:
    """Environment variables that do the same for another process."""
    return {
        "JAX_COMPILATION_CACHE_DIR": str(compiled_programs),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    }


@pytest.fixture(scope="module")
def own_kernel_cache(tmp_path_factory):
    """Sources of generated kernels go to a folder of the tests' own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def quick_interpreter():
    """Half the time: the interpreter prepares its language anew for every call of a device function, and looks for
    overflows, which Philox means to happen."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        yield
        return
    from triton.runtime import interpreter

    prepare, prepared = interpreter._patch_lang, set()

    def call(function, *args, **kwargs):
        if function.fn not in prepared:
            prepared.add(function.fn)
            prepare(function.fn)
        return function.rewrite()(*args, **kwargs)

    builder = interpreter.interpreter_builder
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.InterpretedFunction, "__call__", call)
        patch.setattr(builder, "options", dataclasses.replace(builder.options, sanitize_overflow=False))
        yield


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
