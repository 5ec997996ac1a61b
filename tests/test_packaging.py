"""The wheel, installed alone, works; and importing one backend never imports the other."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = {
    "rlgraph": "rlgraph",
    "envs": "rlgraph/envs",
    "agents": "rlgraph/agents",
}  # in the tree, in the wheel


def run_python(*args: str, cwd: Path) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, *args], cwd=cwd, capture_output=True, text=True, check=False)


def output_of(script: str, cwd: Path) -> str:
    """What a script prints in an isolated interpreter (-I: no PYTHONPATH, no current folder on sys.path)."""
    run = run_python("-I", "-c", script, cwd=cwd)
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built from a copy, so that no stale build folder takes part and no new one is left in the checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    tree = folder / "tree"
    tree.mkdir()
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, tree)
    for name in SOURCES:
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    run = run_python("-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(tree), cwd=folder)
    assert run.returncode == 0, run.stdout + run.stderr
    (path,) = folder.glob("rlgraph-*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    target = tmp_path_factory.mktemp("installed")
    pip = ("-m", "pip", "install", "--no-deps", "--no-index", "--no-compile", "--disable-pip-version-check")
    run = run_python(*pip, "--target", str(target), str(wheel), cwd=target)
    assert run.returncode == 0, run.stderr
    return target


def test_wheel_holds_every_module_in_its_place(wheel):
    """The packages are listed by hand in pyproject.toml: one forgotten would still work from the checkout."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (entry_points,) = (n for n in names if n.endswith("entry_points.txt"))
        assert "rlgraph = rlgraph.cli:main" in archive.read(entry_points).decode()
    expected = {
        f"{target}/{path.relative_to(ROOT / source).as_posix()}"
        for source, target in SOURCES.items()
        for path in (ROOT / source).rglob("*.py")
    }
    assert {n for n in names if n.endswith(".py")} == expected


def test_installed_wheel_runs(installed, tmp_path):
    """From another folder, and ahead of an editable install: what is imported must be the wheel's."""
    script = f"""
import sys
sys.path.insert(0, {str(installed)!r})
import numpy as np, rlgraph, rlgraph.agents, rlgraph.envs.cartpole, rlgraph.environment
for module in (rlgraph, rlgraph.agents, rlgraph.envs.cartpole, rlgraph.environment):
    assert module.__file__.startswith({str(installed) + os.sep!r}), module.__file__
for name in rlgraph.ENVIRONMENTS:
    env = rlgraph.make(name)
    u = np.full((2, env.draws), 0.3, dtype=np.float32)
    carry, obs = env.reset(np, u[:, : env.reset_draws])
    action = np.zeros((2, *env.action_space.shape), dtype=env.action_space.dtype)
    step = env.step(np, carry, action, u, "SameStep")
    assert step.obs.shape == obs.shape and (step.obs != obs).any()
assert sum(m.split(".")[0] in ("envs", "agents") for m in sys.modules) == 0
print(len(rlgraph.ENVIRONMENTS), "run")
"""
    assert output_of(script, tmp_path) == "5 run"


LOADED = """
import sys
print(*sorted({name.split(".")[0] for name in sys.modules} & {"torch", "jax", "jaxlib", "equinox", "optax"}))
"""


def test_importing_rlgraph_loads_neither_backend(tmp_path):
    script = "import rlgraph, rlgraph.agents\nrlgraph.make('CartPole-v1')\n" + LOADED
    assert output_of(script, tmp_path) == ""


@pytest.mark.parametrize(("backend", "other"), [("torch", {"jax", "jaxlib"}), ("jax", {"torch"})])
def test_one_backend_never_imports_the_other(backend, other, tmp_path):
    script = f"""
import rlgraph
envs = rlgraph.make_vec("CartPole-v1", num_envs=3, backend={backend!r})
obs, info = envs.reset(seed=1)
for _ in range(3):
    obs, reward, terminated, truncated, info = envs.step(envs.action_space.sample())
assert obs.shape == (3, 4)
envs.close()
"""
    loaded = set(output_of(script + LOADED, tmp_path).split())
    assert backend in loaded
    assert not loaded & other
