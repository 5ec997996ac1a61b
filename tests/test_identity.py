"""What is played, or goes on, is what was trained: policies are checked as checkpoints are, before any import."""

import dataclasses
import json
import os
import shutil
import types
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from test_checkpoint import CONFIGS, TINY, assert_same, complaint, end_in_iteration, press_ctrl_c

import rlgraph
from rlgraph.agents import AGENTS
from rlgraph.cli.main import main
from rlgraph.registry import ENVIRONMENTS, register
from rlgraph.runs.arrays_file import read_arrays, write_arrays
from rlgraph.runs.checkpoint import Checkpoints, load_policy, newest, saved
from rlgraph.runs.train import evaluate_run, resume, train

pytestmark = pytest.mark.usefixtures("quick_compilation")
PLAY = [[], ["--checkpoint", "last"]]


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """Not to be changed."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    with pytest.MonkeyPatch.context() as patch:
        press_ctrl_c(patch, 3)
        train("ppo", dataclasses.replace(TINY, run_dir=str(folder)))
    return folder


@pytest.fixture
def run(trained, tmp_path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run"))


def edit(path: Path, **changes) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def rewrite(path: Path, change) -> None:
    """With the right checksum; `change(header, arrays)` gives nothing."""
    header, arrays = read_arrays(path)
    change(header, arrays)
    write_arrays(path, header, arrays)


# ---- the policy file


def test_a_policy_file_says_what_it_is_of(run):
    header, arrays = read_arrays(run / "policy.safetensors")
    last = newest(run)
    assert_same(arrays, last.policy)
    assert_same(load_file(run / "policy.safetensors"), last.policy)  # by the same names, without rlgraph
    times = ("seconds", "train_seconds", "score")
    assert {name: header[name] for name in header if name not in times} == {
        name: last.header[name] for name in header if name not in times
    }


@pytest.mark.parametrize("agent", AGENTS)
def test_every_agents_policy_is_of_float32_and_is_played(agent, tmp_path):
    train(agent, dataclasses.replace(CONFIGS[agent], mode="eager", run_dir=str(tmp_path / "run")))
    _, arrays = read_arrays(tmp_path / "run" / "policy.safetensors")
    assert {str(array.dtype) for array in arrays.values()} == {"float32"}
    assert np.isfinite(evaluate_run(str(tmp_path / "run"), episodes=2)).all()


def test_no_damage_of_a_policy_goes_unnoticed(run, capsys):
    path = run / "policy.safetensors"
    whole = path.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    padding = len(whole[:header].rstrip(b" "))  # which JSON does not care about
    draw = np.random.default_rng(0)
    for place in [*draw.integers(8, padding, 20), *draw.integers(header, len(whole), 20)]:
        flipped = bytearray(whole)
        flipped[place] ^= 1 << draw.integers(8)
        path.write_bytes(bytes(flipped))
        assert complaint(capsys, "eval", run).startswith(f"policy file {str(path)!r} is damaged: ")


def test_a_policy_without_a_checksum_is_refused(run, capsys):
    path = run / "policy.safetensors"
    save_file(load_file(path), path)
    assert "is damaged: it has no checksum, as those of earlier versions" in complaint(capsys, "eval", run)


NAME = "critic.layers.0.weight"
CHANGES = {
    "holds NaN or infinity in": [lambda x: np.where(x == x[0, 0], np.nan, x), lambda x: x * np.float32(np.inf)],
    "is float64 in": [lambda x: x.astype(np.float64)],
    "is float16 in": [lambda x: x.astype(np.float16)],
    "is int32 in": [lambda x: x.astype(np.int32)],
    "has shape [8, 3] in the policy file, [8, 4] in this network": [lambda x: x[:, :3]],
}


@pytest.mark.parametrize("backend", ["torch", "jax"])
@pytest.mark.parametrize("wrong", CHANGES)
def test_other_numbers_in_a_policy_are_refused_by_name(wrong, backend, run, capsys):
    path = run / "policy.safetensors"
    header, arrays = read_arrays(path)
    for change in CHANGES[wrong]:
        write_arrays(path, header, arrays | {NAME: change(arrays[NAME])})
        assert complaint(capsys, "eval", run, "--backend", backend).startswith(f"{NAME!r} {wrong}")


def test_a_checkpoint_of_a_policy_that_is_not_finite_is_refused(run, capsys):
    path = max(saved(run).values())
    rewrite(path, lambda header, arrays: arrays[f"policy/{NAME}"].fill(np.nan))
    for words in (["train", "--resume", run], ["eval", run, "--checkpoint", "last"]):
        line = complaint(capsys, *words)
        assert line.startswith(f"{NAME!r} holds NaN or infinity in checkpoint {str(path)!r}: ")
    assert main(["eval", str(run), "--episodes", "2"]) == 0  # the policy file is another one


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
def test_a_policy_that_is_not_finite_is_not_loaded_by_a_program_either(number, run):
    header, arrays = read_arrays(run / "policy.safetensors")
    arrays[NAME][0, 0] = number
    write_arrays(run / "policy.safetensors", header, arrays)
    with pytest.raises(rlgraph.UsageError, match=f"^{NAME!r} holds NaN or infinity in policy file"):
        load_policy(run / "policy.safetensors")


# ---- what is played is what was trained


@pytest.mark.parametrize("play", PLAY)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"activation": "relu"}, "activation in config.json is 'relu', but 'tanh' in "),
        ({"hidden": [8, 8]}, "hidden in config.json is [8, 8], but [8] in "),
        ({"gamma": 0.5}, "gamma in config.json is 0.5, but 0.99 in "),
        ({"env": "Acrobot-v1"}, "env in config.json is 'Acrobot-v1', but 'CartPole-v1' in "),
        ({"backend": "jax"}, "backend in config.json is 'jax', but 'torch' in "),
        ({"environment_sha256": {}}, "the SHA-256 of the environment's source, cartpole.py, is None, but '"),
    ],
    ids=str,
)
def test_eval_refuses_another_config_as_resume_does(changes, message, play, run, capsys):
    edit(run / "config.json", **changes)
    for words in (["eval", run, *play], ["train", "--resume", run]):
        assert complaint(capsys, *words).startswith(message)


@pytest.mark.parametrize("play", PLAY)
def test_eval_refuses_another_agent_version_or_layout(play, run, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        patch.setattr(rlgraph, "__version__", "99")
        assert complaint(capsys, "eval", run, *play).startswith("the version of rlgraph is '99', but ")
    with monkeypatch.context() as patch:
        patch.setattr("rlgraph.runs.identity.LAYOUT", 99)
        assert complaint(capsys, "eval", run, *play).startswith("the layout of checkpoints is 99, but 2 in ")
    for path in (run / "policy.safetensors", max(saved(run).values())):
        rewrite(path, lambda header, arrays: header.update(agent="pqn"))
    assert complaint(capsys, "eval", run, *play).startswith("the agent is 'ppo', but 'pqn' in ")


@pytest.mark.parametrize("play", PLAY)
def test_another_backend_and_device_still_play_it(play, run):
    checkpoint = play[1] if play else None
    returns = [evaluate_run(str(run), 20, backend=b, device="cpu", checkpoint=checkpoint) for b in ("torch", "jax")]
    assert all(((r >= 1) & (r <= 500)).all() for r in returns)


# ---- foreign code


def noting(mark: Path, source: str = "") -> str:
    """An environment file that leaves a mark when it is imported."""
    source = source or Path(rlgraph.make("CartPole-v1").definition.__file__).read_text()
    return f"{source}\nfrom pathlib import Path as _Path\n_Path({str(mark)!r}).touch()\n"


class OwnRun:
    """Of a user's environment file."""

    def __init__(self, place: Path, end):
        self.env, self.folder, self.mark = place / "mine.py", place / "run", place / "imported"
        self.env.write_text(noting(self.mark))
        with pytest.MonkeyPatch.context() as patch:
            end(patch)
            try:
                train("ppo", dataclasses.replace(TINY, run_dir=str(self.folder), env=str(self.env)))
            except KeyboardInterrupt:
                assert not saved(self.folder)
        self.mark.unlink()

    def refusals(self, capsys) -> set[str]:
        """What every way to use the run is answered, and that nothing of the environment was imported."""
        ways = [["train", "--resume", self.folder]]
        if saved(self.folder):
            ways += [["eval", self.folder, *play] for play in PLAY]
        lines = {complaint(capsys, *words) for words in ways}
        assert not self.mark.exists()
        return lines


@pytest.fixture(params=["with a checkpoint", "before its first"])
def own_run(request, tmp_path) -> OwnRun:
    before_its_first = request.param == "before its first"
    return OwnRun(tmp_path, lambda patch: (end_in_iteration if before_its_first else press_ctrl_c)(patch, 1))


def test_the_environments_files_are_recorded_from_the_start(own_run):
    config = json.loads((own_run.folder / "config.json").read_text())
    assert config["env"] == str(own_run.env)
    assert config["environment_sha256"].keys() == {"mine.py"}
    digest = config["environment_sha256"]["mine.py"]
    assert os.popen(f"sha256sum {own_run.env}").read().split()[0] == digest
    if saved(own_run.folder):
        assert newest(own_run.folder).header["environment"] == {"mine.py": digest}


def test_a_changed_environment_file_is_refused_before_it_is_imported(own_run, capsys):
    source, stat = own_run.env.read_text(), own_run.env.stat()
    for changed in (source.replace("9.8", "9.9"), source + "# a comment\n", "import nowhere\n", ""):
        own_run.env.write_text(changed)
        os.utime(own_run.env, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # however quick that was
        for line in own_run.refusals(capsys):
            assert line.startswith("the SHA-256 of the environment's source is '")
            assert f"in {str(own_run.env)!r}, but '" in line
            assert line.endswith("config.json': put it back, or start a new run")


@pytest.mark.parametrize("kind", ["nothing", "folder", "pipe"])
def test_an_environment_file_that_is_none_is_refused(kind, own_run, capsys):
    own_run.env.unlink()
    if kind == "folder":
        own_run.env.mkdir()
    if kind == "pipe":
        os.mkfifo(own_run.env)
    said = "no environment file " if kind == "nothing" else ""
    assert all(line.startswith(f"{said}{str(own_run.env)!r}") for line in own_run.refusals(capsys))


@pytest.mark.parametrize("name", ["other.py", "elsewhere/mine.py"])
def test_another_environment_file_in_the_config_is_refused_before_it_is_imported(name, own_run, tmp_path, capsys):
    other = tmp_path / name
    other.parent.mkdir(exist_ok=True)
    other.write_text(noting(own_run.mark) + "# another\n")
    edit(own_run.folder / "config.json", env=str(other))
    for line in own_run.refusals(capsys):
        expected = "env in config.json is " if saved(own_run.folder) else "the SHA-256 of the environment's source is '"
        assert line.startswith(expected)
        assert str(other) in line


def test_a_config_without_the_record_is_refused(own_run, capsys):
    path = own_run.folder / "config.json"
    config = json.loads(path.read_text())
    del config["environment_sha256"]
    path.write_text(json.dumps(config))
    assert all("it does not say agent, env and environment_sha256" in line for line in own_run.refusals(capsys))


def test_the_same_environment_file_goes_on_and_is_played(own_run, capsys):
    os.utime(own_run.env, (1, 1))  # its time does not matter, as after a copy
    assert not resume(str(own_run.folder)).interrupted
    assert main(["eval", str(own_run.folder), "--episodes", "2", "--backend", "jax"]) == 0


def test_a_file_beside_the_environment_is_part_of_it(tmp_path, monkeypatch, capsys):
    """As far as the registry knows of it."""
    helper = tmp_path / "helper.py"
    helper.write_text("GRAVITY = 9.8\n")
    monkeypatch.setattr("rlgraph.runs.identity.source_files", lambda definition: (Path(definition.__file__), helper))
    own_run = OwnRun(tmp_path, lambda patch: press_ctrl_c(patch, 1))
    assert newest(own_run.folder).header["environment"].keys() == {"mine.py", "helper.py"}
    helper.write_text("GRAVITY = 9.9\n")
    assert all(f"in {str(helper)!r}, but '" in line for line in own_run.refusals(capsys))


def test_a_shipped_environment_of_another_source_is_refused(run, monkeypatch, tmp_path, capsys):
    changed = tmp_path / "cartpole.py"
    changed.write_text(Path(rlgraph.make("CartPole-v1").definition.__file__).read_text() + "# newer\n")
    monkeypatch.setattr("rlgraph.runs.identity.source_files", lambda definition: (changed,))
    for words in (["train", "--resume", run], ["eval", run]):
        assert "the SHA-256 of the environment's source is '" in complaint(capsys, *words)


def test_an_environment_of_no_file_is_known_by_its_name(tmp_path, monkeypatch, capsys):
    shipped = rlgraph.make("CartPole-v1").definition
    mine = types.ModuleType("prompt")
    mine.__dict__.update({name: value for name, value in vars(shipped).items() if not name.startswith("__")})
    mine.ID = "Mine-v0"
    monkeypatch.setitem(ENVIRONMENTS, mine.ID, mine)
    register(mine)
    folder = tmp_path / "run"
    with monkeypatch.context() as patch:
        press_ctrl_c(patch, 1)
        train("ppo", dataclasses.replace(TINY, env=mine.ID, run_dir=str(folder)))
    assert newest(folder).header["environment"] == {"prompt": "no file"}
    assert not resume(str(folder)).interrupted
    mine.__name__ = "another"
    assert "source is 'no file' in 'another', but None in" in complaint(capsys, "eval", folder)


def test_a_checkpoint_and_a_policy_have_one_writer(run, tmp_path):
    """A header's score, in JSON, is a finite number or none."""
    last = newest(run)
    for score in (float("nan"), float("inf"), None):
        Checkpoints(tmp_path, 9, {}).save(last.header | {"score": score}, last.state, last.policy)
        assert newest(tmp_path).header["score"] is None
