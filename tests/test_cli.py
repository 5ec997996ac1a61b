"""The `rlgraph` command: what it writes and prints, what it answers to mistakes, and how Ctrl-C ends it."""

import dataclasses
import errno
import functools
import io
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import rlgraph.agents.ppo.torch
from rlgraph.agents.ppo.config import METRICS, PPOConfig
from rlgraph.cli.main import COMMANDS, main
from rlgraph.registry import ENVIRONMENTS
from rlgraph.runs.train import evaluate_run, evaluation_seed, run_config

pytestmark = pytest.mark.usefixtures("quick_compilation")
ROOT = Path(__file__).parent.parent
SIZES = {"num-envs": 4, "num-steps": 16, "num-minibatches": 2, "num-epochs": 1, "hidden": 8, "eval-episodes": 2}
TINY = ["--device=cpu", *(f"--{name}={value}" for name, value in SIZES.items())]
STEPS = 192  # three iterations
BACKENDS = ["torch", "jax"]

# A user's own environment: walk to the right.
MY_ENV = """
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from gymnasium.spaces import Box, Discrete

ID, MAX_EPISODE_STEPS, REWARD_THRESHOLD = "Walk-v0", 12, None
RESET_DRAWS, STEP_DRAWS = 1, 0

class State(NamedTuple):
    place: Any

@dataclass(frozen=True)
class Params:
    goal: float = 3.0

def observation_space(p):
    return Box(-np.inf, np.inf, (1,), np.float32)

def action_space(p):
    return Discrete(2)

def reset(xp, u, p):
    return State(u[:, 0])

def step(xp, s, action, u, p):
    place = s.place + xp.astype(2 * action - 1, s.place.dtype)
    return State(place), place, place >= p.goal

def observe(xp, s, p):
    return xp.stack([s.place], axis=-1)
"""

# Runs the command line, then notes in a file which backends it has loaded.
NOTING_MODULES = """
import sys
from rlgraph.cli.main import main
code = main(sys.argv[2:])
backends = {"torch", "jax", "jaxlib", "equinox", "optax"}
open(sys.argv[1], "w").write(" ".join(sorted({name.split(".")[0] for name in sys.modules} & backends)))
sys.exit(code)
"""


# As the installed command; but a shell that runs the tests in the background would have its children ignore Ctrl-C.
HEARING_CTRL_C = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from rlgraph.cli.main import main
sys.exit(main())
"""


def run(*command, cwd, **variables) -> subprocess.CompletedProcess:
    command, env = [sys.executable, *map(str, command)], os.environ | variables
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)


@dataclasses.dataclass
class Run:
    folder: Path
    stdout: str
    stderr: str
    loaded: set[str]


@pytest.fixture(scope="session")
def runs(tmp_path_factory, quick_environment) -> dict[str, Run]:
    """A finished run of each backend, trained in a process of its own."""
    finished = {}
    for backend in BACKENDS:
        place = tmp_path_factory.mktemp(backend)
        options = ["--backend", backend, "--total-steps", STEPS, "--run-dir", "run", *TINY]
        done = run("-c", NOTING_MODULES, "modules", "train", "ppo", *options, cwd=place, **quick_environment)
        assert done.returncode == 0, done.stderr
        loaded = set((place / "modules").read_text().split())
        finished[backend] = Run(place / "run", done.stdout, done.stderr, loaded)
    return finished


@pytest.fixture
def copied_run(runs, tmp_path) -> Path:
    """A run to damage."""
    return Path(shutil.copytree(runs["torch"].folder, tmp_path / "copy"))


@pytest.fixture
def train(tmp_path, monkeypatch):
    """`rlgraph train ppo`, tiny, in this process and in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def command(*options, steps=64) -> int:
        return main(["train", "ppo", *TINY, "--total-steps", str(steps), *map(str, options)])

    return command


def returns_in(text: str) -> float:
    found = re.match(r"return (-?[\d.]+) ± ", text)
    assert found, text
    return float(found[1])


def complaint(capsys, argv: list) -> str:
    """The one line that a mistake prints; that it is one, and exit code 2, is checked here."""
    code = main(list(map(str, argv)))
    out, err = capsys.readouterr()
    assert (code, out) == (2, ""), (code, out, err)
    assert re.fullmatch(r"rlgraph: [^\n]+\n", err), err
    return err.removeprefix("rlgraph: ").rstrip("\n")


# ------------------------------------------------------------------------------------------------- train


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_run_folder_holds_all_that_is_needed_later(runs, backend):
    folder = runs[backend].folder
    files = {path.name for path in folder.iterdir()}
    events = {name for name in files if name.startswith("events.out.tfevents.")}
    assert len(events) == 1
    written = {"config.json", "versions.json", "metrics.jsonl", "checkpoints", "policy.safetensors", "result.json"}
    assert files - events == written | {"lock"}

    config = json.loads((folder / "config.json").read_text())
    assert config.keys() == {"agent", "environment_sha256", *(field.name for field in dataclasses.fields(PPOConfig))}
    given = {"agent": "ppo", "env": "CartPole-v1", "backend": backend, "num_envs": 4, "hidden": [8], "seed": 0}
    assert {name: config[name] for name in given} == given

    versions = json.loads((folder / "versions.json").read_text())
    assert {"python", "rlgraph", "gymnasium", "numpy", backend, "device", "platform", "started"} <= versions.keys()
    assert not set(BACKENDS) - {backend} & versions.keys()

    result = json.loads((folder / "result.json").read_text())
    assert (result["steps"], result["interrupted"], result["eval_episodes"]) == (STEPS, False, 2)
    assert 1 <= result["eval_return_mean"] <= 500
    weights = load_file(folder / "policy.safetensors")
    assert all(np.isfinite(array).all() for array in weights.values())
    assert any(array.shape in ((8, 4), (4, 8)) for array in weights.values())  # the first layer


@pytest.mark.parametrize("backend", BACKENDS)
def test_metrics_are_the_same_in_jsonl_and_tensorboard(runs, backend):
    folder = runs[backend].folder
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [64, 128, 192]
    means = {"episode_return", "episode_length", "seconds", "steps_per_second"}
    expected = {"step", *means, *METRICS} - {"episode_return_sum", "episode_length_sum"}
    assert all(row.keys() == expected for row in rows)
    assert sum(row["episodes"] for row in rows) > 0
    assert rows[0]["steps_per_second"] is None  # one iteration has no speed yet
    assert all((row["episode_return"] is None) == (row["episodes"] == 0) for row in rows)

    events = EventAccumulator(str(folder)).Reload()
    assert set(events.Tags()["scalars"]) <= expected
    for name in expected - {"step"}:
        in_jsonl = [(row["step"], row[name]) for row in rows if row[name] is not None]
        in_events = [(event.step, event.value) for event in events.Scalars(name)]
        assert in_events == [(step, pytest.approx(value, rel=1e-6)) for step, value in in_jsonl], name


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_summary_says_how_it_ran_how_well_and_where_it_is(runs, backend):
    out = runs[backend].stdout
    assert "ppo on CartPole-v1" in out
    assert f"{backend}, mode {'eager' if backend == 'torch' else 'jit'}, cpu" in out
    assert f" {STEPS} " in out
    assert "over 2 episodes (not solved: the mark is 475)" in out
    assert out.splitlines()[-1] == "saved in run"
    assert runs[backend].stderr == ""


@pytest.mark.parametrize(("backend", "others"), [("torch", {"jax", "jaxlib", "equinox", "optax"}), ("jax", {"torch"})])
def test_training_with_one_backend_never_imports_the_other(runs, backend, others):
    assert backend in runs[backend].loaded
    assert not runs[backend].loaded & others


def test_each_run_without_a_name_gets_a_new_folder(train, capsys):
    for _ in range(2):
        assert train() == 0
    saved = re.findall(r"^saved in (.+)$", capsys.readouterr().out, re.MULTILINE)
    assert len(set(saved)) == 2
    assert all(re.fullmatch(r"runs/ppo-CartPole-v1-torch-seed0-\d{8}-\d{6}(-1)?", name) for name in saved)
    assert all((Path(name) / "policy.safetensors").is_file() for name in saved)


def test_options_that_an_environment_ships_with_are_used_and_can_be_replaced(train):
    assert train("--env", "Pendulum-v1", "--gamma", "0.5", "--run-dir", "a") == 0
    config = json.loads(Path("a/config.json").read_text())
    assert (config["gamma"], config["normalize_reward"]) == (0.5, True)


def test_the_script_is_the_same_command(tmp_path):
    done = run(ROOT / "scripts" / "train.py", "ppo", "--backend", "tourch", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "rlgraph: unknown backend 'tourch'; did you mean 'torch'?\n"
    done = run(ROOT / "scripts" / "train.py", "ppo", "--total-steps", 64, "--run-dir", "run", *TINY, cwd=tmp_path)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "saved in run"), done.stderr


def test_a_users_own_environment_is_found_again_from_any_folder(train, tmp_path, monkeypatch, capsys):
    (tmp_path / "my_env.py").write_text(MY_ENV)
    assert train("--env", "my_env.py") == 0
    out = capsys.readouterr().out
    assert "ppo on Walk-v0" in out
    assert "solved" not in out  # it names no mark
    folder = tmp_path / re.search(r"saved in (runs/ppo-my_env-.*)", out)[1]
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert main(["eval", str(folder), "--episodes", "4"]) == 0
    assert returns_in(capsys.readouterr().out) == pytest.approx(returns_in(out_of_eval(folder, capsys)))
    (tmp_path / "my_env.py").unlink()
    assert str(tmp_path / "my_env.py") in complaint(capsys, ["eval", folder])


def out_of_eval(folder, capsys) -> str:
    assert main(["eval", str(folder), "--episodes", "4"]) == 0
    return capsys.readouterr().out


# -------------------------------------------------------------------------------------------------- eval


@pytest.fixture(scope="session")
def returns(runs):
    """Returns [200] of a backend's run, played by either backend."""

    @functools.cache
    def play(trained: str, backend: str) -> np.ndarray:
        return evaluate_run(str(runs[trained].folder), 200, seed=1, backend=backend, device="cpu")

    return play


@pytest.mark.parametrize("backend", BACKENDS)
def test_eval_is_reproducible_for_a_seed(runs, returns, backend, capsys):
    folder, first = str(runs[backend].folder), returns(backend, backend)
    assert main(["eval", folder, "--episodes", "200", "--seed", "1", "--device", "cpu"]) == 0
    assert capsys.readouterr().out == (
        f"return {first.mean():.2f} ± {first.std():.2f} (least {first.min():.2f}, greatest {first.max():.2f}) "
        "over 200 greedy episodes from seed 1; after training: 2 from seed 1000003\n"
    )
    other = evaluate_run(folder, 200, seed=2, device="cpu")
    assert (other != first).any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_eval_gives_the_return_that_was_printed_after_training(runs, backend, capsys):
    folder = runs[backend].folder
    result = json.loads((folder / "result.json").read_text())
    printed = re.search(r"greedy return │ ([\d.]+ ± [\d.]+) over 2 episodes", runs[backend].stdout)[1]
    for words in ([], ["--seed", "1000003"], ["--episodes=2", "--seed=1000003", "--backend", backend]):
        assert main(["eval", str(folder), *words]) == 0
        out = capsys.readouterr().out
        assert out.startswith(f"return {printed} (least ")
        assert out.endswith(" over 2 greedy episodes from seed 1000003 as after training\n")
    returns = evaluate_run(str(folder), 2, evaluation_seed(run_config(str(folder))))
    assert (returns.mean(), returns.std()) == (result["eval_return_mean"], result["eval_return_std"])


@pytest.mark.parametrize("trained", BACKENDS)
def test_eval_is_close_across_backends(returns, trained):
    torch_returns, jax_returns = returns(trained, "torch"), returns(trained, "jax")
    error = np.hypot(torch_returns.std(), jax_returns.std()) / np.sqrt(200)
    assert abs(torch_returns.mean() - jax_returns.mean()) < 4 * error


# -------------------------------------------------------------------------------------------- envs, help


def test_envs_lists_every_environment_whole(capsys):
    assert main(["envs"]) == 0
    rows = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line.strip(" ─")}
    assert rows.keys() == {"environment", *ENVIRONMENTS}
    assert re.search(r"\[2\] +\[1\] in \[-1, 1\] +999 steps +90", rows["MountainCarContinuous-v0"])
    assert re.search(r"\[3\] +\[1\] in \[-2, 2\] +200 steps +not defined", rows["Pendulum-v1"])


@pytest.mark.parametrize("width", [30, 50, 80])
def test_envs_stays_readable_in_a_narrow_terminal(width, monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes the output for a terminal
    monkeypatch.setenv("COLUMNS", str(width))
    assert main(["envs"]) == 0
    lines = re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out).splitlines()
    assert max(map(len, lines)) <= width
    assert all(any(line.split()[:1] == [name] for line in lines) for name in ENVIRONMENTS)
    assert not any("…" in line for line in lines)
    assert ("environment" in lines[0]) == (width == 80)  # a table where it fits


def test_help_explains_every_option(capsys):
    assert main(["train", "ppo", "--help"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    words = " ".join(re.sub(r"[│╭╮╰╯─|]", " ", out).split())
    starts = [words.index(f" --{field.name.replace('_', '-')}") for field in dataclasses.fields(PPOConfig)]
    assert starts == sorted(starts)
    for start, end in zip(starts, [*starts[1:], len(words)]):
        text = words[start:end].split("(default")[0]
        assert len(re.sub(r"--\S+|[A-Z]{3,}|[\[\]{}.]", "", text).split()) >= 3, text


@pytest.mark.parametrize("argv", [[], ["--help"], ["-h"], ["train", "--help"], ["envs", "--help"], ["eval", "--help"]])
def test_help_is_no_mistake(argv, capsys):
    assert main(argv) == 0
    out, err = capsys.readouterr()
    assert out.startswith("usage: rlgraph")
    assert err == ""
    if not argv:
        assert all(f"rlgraph {command}" in out for command in COMMANDS)


# ---------------------------------------------------------------------------------------------- mistakes

MISTAKES = {
    "tran ppo": "unknown command 'tran'; did you mean 'train'?",
    "train": "name an agent after `rlgraph train`: dqn, ppo, pqn, sac",
    "train --env CartPole-v1": "name an agent after `rlgraph train`: dqn, ppo, pqn, sac",
    "train ppp": "unknown agent 'ppp'; did you mean 'ppo'?",
    "train ppo --env cartpole": "unknown environment 'cartpole'; did you mean 'CartPole-v1'?",
    "train ppo --env nowhere.py": "no environment file 'nowhere.py'",
    "train ppo --numenvs 3": "unknown option '--numenvs'; did you mean --num-envs?",
    "train ppo --num_env=3": "unknown option '--num_env=3'; did you mean --num-envs?",
    "train ppo --no-aneal-lr": "unknown option '--no-aneal-lr'; did you mean --no-anneal-lr?",
    "train ppo -qqq": "unknown option '-qqq'; see rlgraph train ppo --help",
    "train ppo CartPole-v1": "unexpected argument 'CartPole-v1'; see rlgraph train ppo --help",
    "train ppo --num-envs abc": "option --num-envs takes a whole number, not 'abc'",
    "train ppo --num-envs=1.5": "option --num-envs takes a whole number, not '1.5'",
    "train ppo --num_envs=": "option --num-envs takes a whole number, not ''",
    "train ppo --gamma x": "option --gamma takes a number, not 'x'",
    "train ppo --clip-value x": "option --clip-value takes a number or None, not 'x'",
    "train ppo --hidden 3 x": "option --hidden takes whole numbers, not '3 x'",
    "train ppo --anneal-lr=maybe": "option --anneal-lr takes no value, got 'maybe': write --anneal-lr or --no-",
    "train ppo --num-envs": "option --num-envs needs a value: a whole number",
    "train ppo --env --seed 3": "option --env needs a value: a text",
    "train ppo --num-envs -3": "num_envs must be at least 1, but is -3",
    "train ppo --seed -1": "seed must be in [0, 2**32), but is -1",
    "train ppo --gamma nan": "gamma must be finite, but is nan",
    "train ppo --num-minibatches 7": "num_envs * num_steps = 4096 does not divide into num_minibatches = 7",
    "train ppo --hidden": "hidden must name at least one layer",
    "train ppo --backend tourch": "unknown backend 'tourch'; did you mean 'torch'?",
    "train ppo --mode grph": "unknown torch mode 'grph'; did you mean 'graph'?",
    "train ppo --device cuad": "unknown device 'cuad'; did you mean 'cuda'?",
    "train ppo --device cuda:99": "device 'cuda:99' is not available: torch finds",
    "train ppo --device cuda:99 --backend jax": "device 'cuda:99' is not available: jax finds",
    "eval": "name a run folder after `rlgraph eval`",
    "eval --episodes 3": "rlgraph eval needs RUN; see rlgraph eval --help",
    "eval .": "'.' is not a run folder: it has no config.json",
    "eval nowhere": "'nowhere' is not a run folder: it has no config.json",
    "eval --episodes x nowhere": "option --episodes takes a whole number or None, not 'x'",
    "eval nowhere --episodes 0": "episodes must be at least 1 and at most 1048576, but is 0",
    "eval nowhere --episodes 1048577": "episodes must be at least 1 and at most 1048576, but is 1048577",
    "eval nowhere --seed 4294967296": "seed must be in [0, 2**32), but is 4294967296",
    "eval nowhere --backend=": "backend is empty: give it a value, or leave it out",
    "eval nowhere --sed 0": "unknown option '--sed'; did you mean --seed?",
    "envs all": "`rlgraph envs` takes no arguments, got 'all'",
}


@pytest.mark.parametrize("words", MISTAKES)
def test_a_mistake_is_answered_in_one_line_and_leaves_no_folder(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert complaint(capsys, words.split()).startswith(MISTAKES[words])
    assert not list(tmp_path.glob("runs/*"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="here --device cuda is no mistake")
def test_a_gpu_that_is_not_there_is_a_mistake(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert "torch finds none of kind 'cuda' here" in complaint(capsys, ["train", "ppo", "--device", "cuda"])


@pytest.mark.parametrize("width", [20, 400])
def test_complaints_do_not_depend_on_the_terminals_width(width, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(width))
    word = "a-word-that-is-longer-than-the-lines-of-a-narrow-terminal"
    assert complaint(capsys, ["train", "ppo", "--hidden", word]) == f"option --hidden takes whole numbers, not {word!r}"
    needs = "option --max-grad-norm needs a value: a number"
    assert complaint(capsys, ["train", "ppo", "--max-grad-norm"]) == needs


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hiden": [8]}, "unknown setting 'hiden'; did you mean 'hidden'?"),
        ({"env": 3}, "env must be a text, but is 3"),
        ({"backend": None}, "backend must be a text, but is None"),
        ({"hidden": "8"}, "hidden must be a sequence, such as .*, but is '8'"),
        ({"hidden": [8.5]}, r"hidden\[0\] must be an integer, but is 8.5"),
        ({"num_envs": "4"}, "num_envs must be an integer, but is '4'"),
        ({"num_envs": True}, "num_envs must be an integer, but is True"),
        ({"anneal_lr": 1}, "anneal_lr must be True or False, but is 1"),
        ({"gamma": None}, "gamma must be a number, but is None"),
        ({"learning_rate": float("nan")}, "NaN is no finite number"),
        ({"checkpoint_seconds": float("inf")}, "Infinity is no finite number"),
        ({"clip_value": 10**400}, "clip_value must be a number, but is 1000"),
        ({"num_envs": 0}, "num_envs must be at least 1"),
        ({"agent": "pp"}, "unknown agent 'pp'; did you mean 'ppo'?"),
    ],
)
def test_a_config_that_says_something_impossible(copied_run, changes, message, capsys):
    path = copied_run / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    line = complaint(capsys, ["eval", copied_run])
    assert line.startswith(f"{str(path)!r} is damaged: ")
    assert re.search(message.replace("?", r"\?"), line)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"{}", b"\xff\xfe", b"null", b'{"agent": "ppo"}'])
def test_a_damaged_config(copied_run, content, capsys):
    (copied_run / "config.json").write_bytes(content)
    assert "config.json' is damaged: " in complaint(capsys, ["eval", copied_run])


def test_a_config_without_a_setting_that_came_later_still_loads(copied_run, capsys):
    path = copied_run / "config.json"
    config = json.loads(path.read_text())
    del config["precision"]
    path.write_text(json.dumps(config))
    assert main(["eval", str(copied_run), "--episodes", "2"]) == 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_damaged_policy(copied_run, backend, capsys):
    path = copied_run / "policy.safetensors"
    whole = path.read_bytes()
    for content in (b"", whole[:-10], whole[:40], b"\0" * len(whole), b"\xff" * 64):
        path.write_bytes(content)
        line = complaint(capsys, ["eval", copied_run, "--backend", backend])
        assert line.startswith(f"policy file {str(path)!r} is damaged: ")
    path.unlink()
    assert complaint(capsys, ["eval", copied_run, "--backend", backend]).startswith(f"no policy at {str(path)!r}")


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_policy_of_another_network(copied_run, backend, capsys):
    path = copied_run / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"hidden": [16]}))
    line = complaint(capsys, ["eval", copied_run, "--backend", backend])
    assert line.startswith("hidden in config.json is [16], but [8] in policy file ")


def test_a_folder_with_something_in_it_is_left_as_it_is(copied_run, capsys):
    def contents():
        return {path: path.read_bytes() for path in copied_run.rglob("*") if path.is_file()}

    before = contents()
    line = complaint(capsys, ["train", "ppo", *TINY, "--run-dir", copied_run])
    assert line == f"run_dir {str(copied_run)!r} exists and is not empty; name another folder"
    assert contents() == before


def test_a_folder_that_cannot_be_made(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("mine")
    for name in ("file", "file/run", "file/a/run"):
        assert str(tmp_path / "file") in complaint(capsys, ["train", "ppo", *TINY, "--run-dir", tmp_path / name])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").write_text("mine")
    assert complaint(capsys, ["train", "ppo", *TINY]).startswith("cannot make a run folder 'runs/ppo-CartPole-v1-torch")
    assert (tmp_path / "file").read_text() == (tmp_path / "runs").read_text() == "mine"


def test_an_environment_file_that_cannot_be_used(tmp_path, monkeypatch, capsys):
    path = tmp_path / "my_env.py"
    command = ["train", "ppo", *TINY, "--env", path, "--run-dir", tmp_path / "run"]
    path.write_text("raise RuntimeError('two\\nlines')")
    assert "fails to load: my_env.py, line 1: `raise RuntimeError('two\\nlines')`: RuntimeError: two" in complaint(
        capsys, command
    )
    path.write_text("def step(:")
    assert "fails to load: my_env.py, line 1: `def step(:`: SyntaxError" in complaint(capsys, command)
    path.write_text("ID = 'Nothing-v0'")
    assert "my_env" in complaint(capsys, command) or "Nothing-v0" in complaint(capsys, command)
    path.write_text(MY_ENV.replace('"Walk-v0", 12', '"Walk-v0", None'))
    assert "environment 'Walk-v0' has no time limit" in complaint(capsys, command)
    assert not (tmp_path / "run").exists()


# ------------------------------------------------------------------------------------------- a full disk


@pytest.mark.parametrize("room", [100, 1500, 4000])  # for config.json, for metrics, for a checkpoint
def test_a_disk_without_room_is_said_in_one_line(train, room, capsys):
    """A limit on the size of files stands in for a full disk: the system refuses a write in the same way."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    options = ["--run-dir", "run", "--hidden", "64"]
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
        code = train(*options, steps=256)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    out, err = capsys.readouterr()
    assert (code, out) == (1, "")
    assert err == "rlgraph: cannot write or read run: File too large\n"
    assert {path.name for path in Path("run").glob("*")} & {"policy.safetensors", "result.json"} == set()
    assert not list(Path("run").rglob("*.part"))


def test_no_space_left_keeps_the_old_file(tmp_path, monkeypatch):
    from rlgraph.files import write_atomically

    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path = tmp_path / "policy"
    write_atomically(path, b"old")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


# ------------------------------------------------------------------------------------------------ Ctrl-C


class Process:
    """The command in a process that can be sent Ctrl-C."""

    def __init__(self, *options, cwd):
        command = [sys.executable, "-c", HEARING_CTRL_C, "train", "ppo"]
        self.process = subprocess.Popen(
            [*command, *TINY, *options],
            cwd=cwd,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def wait_for(self, condition) -> None:
        deadline = time.monotonic() + 120
        while not condition():
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def end(self) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=120)
        return self.process.returncode, out, err


def has_text(path: Path) -> bool:
    return path.is_file() and path.stat().st_size > 0


def check_saved(folder: Path, out: str, capsys) -> None:
    rows = (folder / "metrics.jsonl").read_text().splitlines()
    result = json.loads((folder / "result.json").read_text())
    assert result["interrupted"] is True
    assert result["steps"] == json.loads(rows[-1])["step"] == 64 * len(rows)
    assert (result["eval_episodes"], result["eval_return_mean"]) == (0, None)
    assert "(interrupted)" in out
    assert "not evaluated; run `rlgraph eval run`" in out
    assert main(["eval", str(folder), "--episodes", "2"]) == 0
    assert "over 2 greedy episodes" in capsys.readouterr().out


@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_saves_the_policy(tmp_path, times, capsys):
    """A double press is meant as one."""
    process = Process("--total-steps", "100000000", "--run-dir", "run", cwd=tmp_path)
    process.wait_for(lambda: has_text(tmp_path / "run" / "metrics.jsonl"))
    for _ in range(times):
        process.interrupt()
    code, out, err = process.end()
    assert (code, err) == (130, "")
    check_saved(tmp_path / "run", out, capsys)


def test_ctrl_c_while_setting_up_saves_nothing(tmp_path):
    (tmp_path / "slow.py").write_text("import pathlib, time\npathlib.Path('loading').touch()\ntime.sleep(300)\n")
    process = Process("--env", "slow.py", "--run-dir", "run", cwd=tmp_path)
    process.wait_for((tmp_path / "loading").exists)
    process.interrupt()
    process.interrupt()
    assert process.end() == (130, "", "rlgraph: interrupted; no policy was saved\n")
    assert not (tmp_path / "run").exists()


def test_ctrl_c_while_the_trainer_is_built_leaves_no_folder(train, monkeypatch, capsys):
    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(rlgraph.agents.ppo.torch, "PPO", interrupted)
    assert train("--run-dir", "run") == 130
    assert capsys.readouterr() == ("", "rlgraph: interrupted; no policy was saved\n")
    assert not Path("run").exists()


def test_ctrl_c_during_the_evaluation_keeps_the_policy(train, monkeypatch, capsys):
    def interrupted(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(rlgraph.agents.ppo.torch.PPO, "evaluate_policy", interrupted)
        assert train("--run-dir", "run") == 130
    out, err = capsys.readouterr()
    assert err == ""
    check_saved(Path("run"), out, capsys)


def press_ctrl_c_in_iteration(monkeypatch, presses: list[float]) -> None:
    """In the first iteration, at these times on a clock of its own."""
    iterate = rlgraph.agents.ppo.torch.PPO.iterate

    def pressed(self):
        with monkeypatch.context() as patch:
            for now in presses:
                patch.setattr(time, "monotonic", lambda now=now: now)
                signal.raise_signal(signal.SIGINT)
        return iterate(self)

    monkeypatch.setattr(rlgraph.agents.ppo.torch.PPO, "iterate", pressed)


def test_a_later_second_ctrl_c_ends_it_at_once(train, monkeypatch, capsys):
    press_ctrl_c_in_iteration(monkeypatch, [10.0, 11.5])
    assert train("--run-dir", "run") == 130
    assert capsys.readouterr() == ("", "rlgraph: interrupted; no policy was saved\n")
    assert not Path("run/policy.safetensors").exists()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_background_job_does_not_hear_ctrl_c(train, monkeypatch, capsys):
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        press_ctrl_c_in_iteration(monkeypatch, [10.0])
        assert train("--run-dir", "run") == 0
    finally:
        signal.signal(signal.SIGINT, before)


# ------------------------------------------------------------------------------------------------ output


def test_output_to_a_file_has_no_progress_bar_and_no_codes(runs):
    for finished in runs.values():
        assert not re.search(r"[\x1b\r]", finished.stdout)
        assert "setting up" not in finished.stdout


def test_a_long_path_is_printed_whole(train, tmp_path, capsys):
    folder = tmp_path / ("a-long-name-" * 10) / "[run]"
    assert train("--run-dir", folder) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"saved in {folder}"


@pytest.mark.parametrize("width", [40, 120])
def test_a_terminal_shows_progress_within_its_width(train, width, monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", str(width))
    assert train("--run-dir", "run", steps=192) == 0
    out = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", capsys.readouterr().out)
    lines = re.split(r"[\r\n]+", out)
    assert max(map(len, lines)) <= width
    assert any(line.startswith("training") and "192/192" in line for line in lines)
    assert "saved in run" in lines


def test_a_terminal_that_knows_only_ascii_gets_what_it_can_show(runs, monkeypatch):
    shown = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(shown, encoding="ascii"))
    assert main(["eval", str(runs["torch"].folder), "--episodes", "2"]) == 0
    assert re.fullmatch(r"return [\d.]+ \? [\d.]+ \(least .*\n", shown.getvalue().decode("ascii"))


def test_a_reader_that_leaves_early_is_no_failure_to_report(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-m", "rlgraph", "envs"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=tmp_path
    )
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait() == 1
