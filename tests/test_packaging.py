"""The wheel alone works; an editable install is found from any folder; one backend never imports the other."""

import base64
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import venv
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
def clone(tmp_path_factory) -> Path:
    """A copy, so that no stale build folder takes part and no new one is left in the checkout."""
    tree = tmp_path_factory.mktemp("projects") / "rlgraph"
    tree.mkdir()
    for name in ("pyproject.toml", "README.md", "MANIFEST.in"):
        shutil.copy(ROOT / name, tree)
    for name in (*SOURCES, "build_backend"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    return tree


@pytest.fixture(scope="module")
def built(clone, tmp_path_factory) -> Path:
    """A folder with the sdist, and the wheel that was built from it."""
    folder = tmp_path_factory.mktemp("built")
    run = run_python("-m", "build", "--no-isolation", "--outdir", str(folder), str(clone), cwd=folder)
    assert run.returncode == 0, run.stdout + run.stderr
    return folder


@pytest.fixture(scope="module")
def wheel(built) -> Path:
    (path,) = built.glob("rlgraph-*.whl")
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
        assert "rlgraph = rlgraph.cli.main:main" in archive.read(entry_points).decode()
    expected = {
        f"{target}/{path.relative_to(ROOT / source).as_posix()}"
        for source, target in SOURCES.items()
        for path in (ROOT / source).rglob("*.py")
    }
    assert {n for n in names if n.endswith(".py")} == expected


def test_the_sdist_holds_what_builds_it(built):
    (path,) = built.glob("rlgraph-*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    files = [*(ROOT / "build_backend").glob("*.py"), *(p for name in SOURCES for p in (ROOT / name).rglob("*.py"))]
    assert {path.relative_to(ROOT).as_posix() for path in files} <= names


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


# ---- an editable install


@pytest.fixture(scope="module")
def editable(clone, tmp_path_factory) -> Path:
    """The Python of an environment of its own, in which the clone is installed as README.md says."""
    environment = tmp_path_factory.mktemp("environment")
    venv.create(environment, symlinks=True)
    (site,) = environment.glob("lib/python*/site-packages")
    dependencies = [path for path in sys.path if path.endswith("site-packages")]  # nothing is downloaded
    (site / "dependencies.pth").write_text("\n".join(dependencies))
    python = environment / "bin" / "python"
    options = ("--no-build-isolation", "--no-deps", "--no-index", "--disable-pip-version-check")
    run = subprocess.run([python, "-m", "pip", "install", "-e", clone, *options], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    return python


PLACES = """
import rlgraph, rlgraph.agents.ppo.config, rlgraph.envs.cartpole, rlgraph.registry
print(rlgraph.make("CartPole-v1").id)
print(*(m.__file__ for m in (rlgraph, rlgraph.registry, rlgraph.agents.ppo.config, rlgraph.envs.cartpole)), sep="\\n")
"""
FILES = ("rlgraph/__init__.py", "rlgraph/registry.py", "agents/ppo/config.py", "envs/cartpole.py")


def places(python: Path, cwd: Path, *args: str, **variables: str) -> list[str]:
    """What PLACES prints: an environment, and which files were imported."""
    run = subprocess.run(
        [python, *(args or ("-c", PLACES))], cwd=cwd, env=os.environ | variables, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.split()


def test_an_editable_install_is_found_beside_the_clone_and_in_it(editable, clone, tmp_path):
    expected = ["CartPole-v1", *(str(clone / name) for name in FILES)]
    for folder in (clone.parent, clone, clone / "rlgraph", clone / "agents", tmp_path):
        assert places(editable, folder) == expected, folder
    script = clone.parent / "beside.py"
    script.write_text(PLACES)
    assert places(editable, tmp_path, str(script)) == expected
    assert "CartPole-v1" in places(editable, clone.parent, "-m", "rlgraph", "envs")
    assert "CartPole-v1" in subprocess.check_output(
        [editable.with_name("rlgraph"), "envs"], cwd=clone.parent, text=True
    )


@pytest.mark.parametrize("files", [[], ["notes.txt"], ["__init__.py"], ["rlgraph/__init__.py"]])
def test_an_editable_install_wins_over_a_folder_of_its_name_where_one_works(files, editable, clone, tmp_path):
    (tmp_path / "rlgraph").mkdir()
    for name in files:
        path = tmp_path / "rlgraph" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("raise RuntimeError('not this one')")
    expected = ["CartPole-v1", *(str(clone / name) for name in FILES)]
    assert places(editable, tmp_path) == expected


def test_a_package_on_pythonpath_goes_before_an_editable_install(editable, installed, clone):
    files = ("rlgraph/__init__.py", "rlgraph/registry.py", "rlgraph/agents/ppo/config.py", "rlgraph/envs/cartpole.py")
    expected = ["CartPole-v1", *(str(installed / name) for name in files)]
    assert places(editable, clone.parent, PYTHONPATH=str(installed)) == expected


def test_an_editable_install_follows_its_clone(editable, clone):
    for place in ("rlgraph", "agents"):
        (clone / place / "new.py").write_text("number = 7")
    script = "import rlgraph.new, rlgraph.agents.new\nprint(rlgraph.new.number, rlgraph.agents.new.number)"
    try:
        assert places(editable, clone.parent, "-c", script) == ["7", "7"]
    finally:
        for place in ("rlgraph", "agents"):
            (clone / place / "new.py").unlink()


def test_an_editable_install_leaves_as_it_came(editable):
    (site,) = editable.parent.parent.glob("lib/python*/site-packages")
    (info,) = site.glob("rlgraph-*.dist-info")
    rows = [line.split(",") for line in (info / "RECORD").read_text().splitlines()]
    for name, digest, size in rows:
        if digest and not name.startswith(".."):
            content = (site / name).read_bytes()
            found = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")
            assert (digest, int(size)) == (f"sha256={found}", len(content)), name
    run = subprocess.run([editable, "-m", "pip", "uninstall", "-y", "rlgraph"], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert {path.name for path in site.iterdir()} - {"__pycache__"} == {"dependencies.pth"}


# ---- one backend


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
