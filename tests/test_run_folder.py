"""Run folders with something wrong in them: nothing that exists is lost, and what is wrong is said in one line."""

import dataclasses
import json
import os
import shutil
import socket
import zlib
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_checkpoint import STEP, TINY, assert_same_run, complaint, end_in_iteration, press_ctrl_c, rows

from rlgraph.cli.main import main
from rlgraph.files import say
from rlgraph.runs.checkpoint import newest, saved
from rlgraph.runs.metrics import MetricsLog
from rlgraph.runs.train import resume, train

FILES = ["config.json", "versions.json", "metrics.jsonl", "policy.safetensors", "result.json", "lock"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Path]:
    """One run, whole, and interrupted in its fifth of eight iterations. Not to be changed."""
    folder = tmp_path_factory.mktemp("runs")
    train("ppo", dataclasses.replace(TINY, run_dir=str(folder / "finished")))
    with pytest.MonkeyPatch.context() as patch:
        press_ctrl_c(patch, 5)
        train("ppo", dataclasses.replace(TINY, run_dir=str(folder / "interrupted")))
    return {path.name: path for path in folder.iterdir()}


@pytest.fixture
def finished(runs) -> Path:
    return runs["finished"]


@pytest.fixture
def run(runs, tmp_path) -> Path:
    """The interrupted one, to damage."""
    return Path(shutil.copytree(runs["interrupted"], tmp_path / "run"))


@pytest.fixture
def killed(run) -> Path:
    """The same, but ended by a kill, which leaves no policy and no result."""
    (run / "policy.safetensors").unlink()
    (run / "result.json").unlink()
    return run


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def edit(path: Path, **changes) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


# ---- checkpoints that cannot be read, or are not there


def put_in_place(path: Path, kind: str) -> None:
    """Something else than the file or folder that it was."""
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    if kind == "file":
        path.write_text("mine")
    elif kind == "folder":
        path.mkdir()
    elif kind == "pipe":  # which who opens it waits for
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as end, pytest.MonkeyPatch.context() as patch:
            patch.chdir(path.parent)  # a socket's path must be short
            end.bind(path.name)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "link to nothing":
        path.symlink_to("nowhere")
    elif kind == "link to itself":
        path.symlink_to(path.name)


@pytest.mark.parametrize("kind", ["nothing", "folder", "file", "pipe", "link to nothing", "link to itself"])
@pytest.mark.parametrize("ended", ["run", "killed"])
def test_without_its_checkpoints_a_run_is_refused_and_left_as_it_is(ended, kind, request, capsys):
    folder = request.getfixturevalue(ended)
    put_in_place(folder / "checkpoints", kind)
    before = contents(folder)
    line = complaint(capsys, "train", "--resume", folder)
    if kind in ("nothing", "folder"):
        left = "metrics.jsonl" if ended == "killed" else "policy.safetensors"
        expected = f"run {str(folder)!r} has no checkpoint, though it has {left}: put its folder checkpoints back, "
    else:
        expected = f"cannot read {str(folder / 'checkpoints')!r}: "
    assert line.startswith(expected)
    assert contents(folder) == before


@pytest.mark.parametrize("call", ["listdir", "open", "stat"])
def test_what_may_not_be_read_is_not_taken_for_missing(call, run, monkeypatch, capsys):
    """As where the permission lacks; a superuser, as whom the tests may run, has it always."""
    real, last = open if call == "open" else getattr(os, call), max(saved(run).values())
    denied = run / "checkpoints" if call == "listdir" else last

    def denying(path, *args, **kwargs):
        if not isinstance(path, int) and Path(path) == denied:
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, *args, **kwargs)

    before = contents(run)
    with monkeypatch.context() as patch:
        if call == "open":
            patch.setattr("builtins.open", denying)
        else:
            patch.setattr(os, call, denying)
        for words in (["train", "--resume", run], ["eval", run, "--checkpoint", "last"]):
            assert complaint(capsys, *words) == f"cannot read {str(denied)!r}: Permission denied"
    assert contents(run) == before


def test_a_run_that_a_kill_ends_twice_before_its_first_checkpoint_begins_again(tmp_path, finished, monkeypatch):
    folder = tmp_path / "run"
    config = dataclasses.replace(TINY, run_dir=str(folder), checkpoint_seconds=1e6)
    for go_on in (lambda: train("ppo", config), lambda: resume(str(folder))):
        with monkeypatch.context() as patch:
            end_in_iteration(patch, 4)
            with pytest.raises(KeyboardInterrupt):
                go_on()
        assert len(rows(folder)) == 2
    resume(str(folder))
    assert_same_run(folder, finished)


def test_a_run_without_rows_has_nothing_to_lose(killed, finished, capsys):
    """As one that was killed after it had written its config."""
    shutil.rmtree(killed / "checkpoints")
    (killed / "metrics.jsonl").unlink()
    resume(str(killed))
    assert capsys.readouterr().err.endswith("has no checkpoint yet: it starts from the beginning\n")
    assert_same_run(killed, finished)


def test_policy_and_result_stay_until_there_are_new_ones(run, finished, monkeypatch, capsys):
    before = {name: (run / name).read_bytes() for name in ("policy.safetensors", "result.json")}
    with monkeypatch.context() as patch:
        end_in_iteration(patch, 3)  # a kill, in the eighth of all
        with pytest.raises(KeyboardInterrupt):
            resume(str(run))
    assert max(saved(run)) == 7 * STEP
    assert {name: (run / name).read_bytes() for name in before} == before
    assert main(["eval", str(run), "--episodes", "2"]) == 0
    assert capsys.readouterr().err == (
        f"rlgraph: policy file {str(run / 'policy.safetensors')!r} is of step {5 * STEP}; "
        f"--checkpoint last plays that of step {7 * STEP}\n"
    )
    resume(str(run))
    assert_same_run(run, finished)
    assert main(["eval", str(run), "--episodes", "2"]) == 0
    assert capsys.readouterr().err == ""


# ---- something else in the place of a file, or in a file


@pytest.mark.parametrize("kind", ["folder", "pipe", "socket", "device", "link to nothing", "link to itself"])
@pytest.mark.parametrize("name", FILES)
def test_what_is_no_file_is_refused(name, kind, run, capsys):
    put_in_place(run / name, kind)
    for words in (["train", "--resume", run], ["eval", run]):
        assert f"{str(run / name)!r}" in complaint(capsys, *words)


# A file's content -> what is wrong with it.
WRONG = {
    b"": "Expecting value",
    b"[]": "it holds no JSON object",
    b"3": "it holds no JSON object",
    b'"text"': "it holds no JSON object",
    b"null": "it holds no JSON object",
    b'{"seed": NaN}': "NaN is no finite number",
    b'{"seed": -Infinity}': "-Infinity is no finite number",
    b'{"seed": 1e999}': "1e999 is no finite number",
    b'{"seed": 1, "seed": 1}': "it says something twice",
    b"\xef\xbb\xbf{}": "Unexpected UTF-8 BOM",
    b'{"\xff": 1}': "can't decode byte 0xff",
    b"[" * 10**5: "it is nested too deeply",
    b'{"a":' * 10**5 + b"1" + b"}" * 10**5: "it is nested too deeply",
    b"1" * 5000: "Exceeds the limit",
    b" " * 2**21 + b"{}": "it is too large",
}


@pytest.mark.parametrize("name", ["config.json", "result.json"])
def test_json_of_another_kind_is_named(name, run, capsys):
    for content, wrong in WRONG.items():
        (run / name).write_bytes(content)
        line = complaint(capsys, "train", "--resume", run)
        assert line.startswith(f"{str(run / name)!r} is damaged")
        assert wrong in line, (content[:40], line)


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({"steps": "512"}, "steps must be an integer, but is '512'"),
        ({"steps": True}, "steps must be an integer, but is True"),
        ({"eval_episodes": 2.5}, "eval_episodes must be an integer, but is 2.5"),
        ({"interrupted": 0}, "interrupted must be True or False, but is 0"),
        ({"eval_return_mean": [1]}, "eval_return_mean must be a number, but is [1]"),
        ({"eval_return_std": 10**400}, "eval_return_std must be a number, but is 1000"),
        ({"train_seconds": False}, "train_seconds must be a number, but is False"),
        ({"reward_threshold": "475"}, "reward_threshold must be a number, but is '475'"),
        ({"env": None}, "env must be a text, but is None"),
        ({"more": 1}, "it does not hold agent, env, backend, "),
        ({"steps": 320}, "it says 320 steps of ppo, config.json 512 of ppo"),
        ({"agent": "dqn"}, "it says 512 steps of dqn, config.json 512 of ppo"),
    ],
)
def test_a_result_with_a_field_of_another_kind_is_named(changes, wrong, finished, tmp_path, capsys):
    folder = Path(shutil.copytree(finished, tmp_path / "run"))
    edit(folder / "result.json", **changes)
    line = complaint(capsys, "train", "--resume", folder)
    assert line.startswith(f"{str(folder / 'result.json')!r} is damaged ({wrong}")
    assert line.endswith("): delete it, and the run can go on")


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({"agent": 3}, "agent must be a text, but is 3"),
        ({"agent": ["ppo"]}, "agent must be a text, but is ['ppo']"),
        ({"agent": "ppO"}, "unknown agent 'ppO'; did you mean 'ppo'?"),
        ({"environment_sha256": "1d8b"}, "environment_sha256 must be hashes by file, but is '1d8b'"),
        ({"environment_sha256": {"x.py": 3}}, "environment_sha256 must be hashes by file, but is {'x.py': 3}"),
        ({"env": ["CartPole-v1"]}, "env "),
        ({"total_steps": {}}, "total_steps "),
    ],
)
def test_a_config_with_a_field_of_another_kind_is_named(changes, wrong, run, capsys):
    edit(run / "config.json", **changes)
    for words in (["train", "--resume", run], ["eval", run]):
        assert complaint(capsys, *words).startswith(f"{str(run / 'config.json')!r} is damaged: {wrong}")


@pytest.mark.parametrize(
    ("env", "wrong"),
    [
        ("Cartpole-v1", "unknown environment 'Cartpole-v1'; did you mean 'CartPole-v1'?"),
        ("/dev/zero", "no environment '/dev/zero': the name of an environment file must end in .py"),
        ("/nowhere/my_env.py", "no environment file '/nowhere/my_env.py'"),
        ("x" * 5000 + ".py", "cannot read 'xxxx"),
    ],
    ids=["name", "device", "file", "long"],
)
def test_a_config_of_an_environment_that_there_is_not(env, wrong, killed, capsys):
    edit(killed / "config.json", env=env)
    assert complaint(capsys, "train", "--resume", killed).startswith("env in config.json is ")
    shutil.rmtree(killed / "checkpoints")
    (killed / "metrics.jsonl").unlink()
    assert complaint(capsys, "train", "--resume", killed).startswith(wrong)


# ---- metrics


BAD_ROWS = [
    b"",
    b"null",
    b"[64]",
    b"{}",
    b'{"step": "64"}',
    b'{"step": true}',
    b'{"step": 64.5}',
    b'{"step": -64}',
    b'{"step": 64, "step": 128}',
    b'{"step": 64, "entropy": NaN}',
    b'{"step": 64, "entropy": "high"}',
    b'{"step": 64, "entropy": [1]}',
    b'{"step": 64, "entropy": false}',
    b'{"step": 64, "\xff": 1}',
    b"[" * 10**5,
    b"\0" * 100,
]


@pytest.mark.parametrize("bad", BAD_ROWS, ids=range(len(BAD_ROWS)))
def test_a_damaged_row_does_not_drop_the_later_ones(bad, run, finished, capsys):
    path = run / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:2], bad + b"\n", *lines[2:]]))
    MetricsLog(run, 5 * STEP).close()
    err = capsys.readouterr().err
    assert err.startswith(f"rlgraph: rows of {str(path)!r} are damaged, 1 in all, and left out: first line 3, ")
    assert err.count("\n") == 1
    assert path.read_bytes() == b"".join(lines)


def test_a_run_with_damaged_rows_goes_on(run, finished, capsys):
    path = run / "metrics.jsonl"
    first, *others = path.read_bytes().splitlines(keepends=True)
    later = b'{"step": 384, "entropy": 0}\n{"step": 99'  # after the last checkpoint: a kill left them
    path.write_bytes(b"".join([first, *(row + b"\n" for row in BAD_ROWS), *others, later]))
    resume(str(run))
    err = capsys.readouterr().err
    assert err.startswith(f"rlgraph: rows of {str(path)!r} are damaged, {len(BAD_ROWS)} in all, and left out: first ")
    assert err.count("\n") == 1
    assert_same_run(run, finished)


def test_rows_that_are_gone_are_said_to_be(run, finished, capsys):
    path = run / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([lines[0], b"{\n", lines[2], lines[3][:-20] + b"\n", lines[4][:-20]]))
    resume(str(run))
    damaged, gone = capsys.readouterr().err.splitlines()
    assert damaged.startswith(f"rlgraph: rows of {str(path)!r} are damaged, 2 in all, and left out: first line 2, ")
    end = f"though the last checkpoint is of step {5 * STEP}"
    assert gone == f"rlgraph: {str(path)!r} has no rows after step {3 * STEP}, {end}"
    expected = rows(finished)
    assert rows(run) == [expected[0], expected[2], *expected[5:]]


def test_metrics_that_were_not_copied_are_said_to_be(run, finished, capsys):
    (run / "metrics.jsonl").unlink()
    resume(str(run))
    assert "metrics.jsonl' has no rows after step 0, though" in capsys.readouterr().err
    assert rows(run) == rows(finished)[5:]


def test_a_last_row_that_lost_only_its_end_of_line_is_kept(run, finished, capsys):
    path = run / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-1])
    resume(str(run))
    assert capsys.readouterr().err == ""
    assert_same_run(run, finished)


# ---- what is not ours


OTHERS = [
    "events.out.tfevents.1699000000.host.12.0",
    "events.out.tfevents.",
    "events.out.tfevents." + "9" * 200,
    "events.out.tfevents.000000.bak",
    "events.out.tfevents.\u0661\u0661\u0661\u0661\u0661\u0661",
    "config.json~",
    "metrics.jsonl.bak",
    "metrics (copy).jsonl",
    "checkpoints/000000000064.safetensors.bak",
    "checkpoints/000000000320 (copy).safetensors",
    "checkpoints/0000000000320.safetensors",
    "checkpoints/" + "9" * 240 + ".safetensors",
    "checkpoints/\u0661\u0661\u0661\u0661\u0661\u0661\u0661\u0661\u0661\u0661\u0661\u0661.safetensors",
    "checkpoints/notes.txt",
]


def test_what_others_put_into_the_folder_is_left_there(run, finished, capsys):
    for name in OTHERS:
        (run / name).write_bytes(b"mine")
    for kind in ("folder", "pipe"):
        put_in_place(run / "checkpoints" / kind, kind)
        put_in_place(run / "checkpoints" / f"{kind}.safetensors", kind)
        put_in_place(run / "checkpoints" / f"{kind}.part", kind)
        put_in_place(run / f"events.out.tfevents.{kind}", kind)
    resume(str(run))
    assert main(["eval", str(run), "--episodes", "2", "--checkpoint", "best"]) == 0
    assert capsys.readouterr().err == ""
    assert all((run / name).read_bytes() == b"mine" for name in OTHERS)
    assert_same_run(run, finished)
    assert (run / "events.out.tfevents.000001").is_file()


def test_a_pipe_among_the_checkpoints_does_not_end_a_training(tmp_path, finished):
    """Nor is it taken for an old one, and deleted."""
    iterations = []

    def put_pipe(*args):
        iterations.append(args)
        if len(iterations) == 3:
            os.mkfifo(tmp_path / "run" / "checkpoints" / "000000000100.safetensors")

    train("ppo", dataclasses.replace(TINY, run_dir=str(tmp_path / "run")), put_pipe)
    assert rows(tmp_path / "run") == rows(finished)
    assert (tmp_path / "run" / "checkpoints" / "000000000100.safetensors").is_fifo()


# ---- forged checkpoints


def forge(path: Path, **header: str | None) -> None:
    """Another header, in the words of JSON, with the right checksum."""
    with safe_open(path, "numpy") as file:
        metadata = file.metadata()
        arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    metadata = {name: text for name, text in (metadata | header).items() if text is not None and name != "crc32"}
    crc = zlib.crc32(json.dumps(metadata, sort_keys=True).encode())
    for name, array in sorted(arrays.items()):
        crc = zlib.crc32(np.ascontiguousarray(array), zlib.crc32(f"{name} {array.dtype} {array.shape}".encode(), crc))
    path.write_bytes(save(arrays, metadata | {"crc32": str(crc)}))


def test_a_forged_header_keeps_the_forgers_checksum(run, capsys):
    path = max(saved(run).values())
    forge(path, score="-1.5")
    assert newest(run).header["score"] == -1.5
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "header",
    [
        {"steps": '"320"'},
        {"steps": "320.0"},
        {"steps": "256"},  # not that of its name
        {"steps": None},
        {"steps": "1" * 5000},
        {"iterations": "-5"},
        {"iterations": "true"},
        {"iterations": "[5]"},
        {"seconds": "-1.0"},
        {"seconds": '"long"'},
        {"train_seconds": "1e999"},
        {"timed_iterations": "null"},
        {"score": '"best"'},
        {"score": "NaN"},
        {"score": "1" + "0" * 400},
        {"score": "[" * 10**5},
        {"config": "{"},
        {"config": '{"seed": 0, "seed": 1}'},
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_header_of_another_kind_is_damage(header, run, capsys):
    before, last = list(saved(run).values())[-2:]
    forge(last, **header)
    assert newest(run).path == before
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"rlgraph: checkpoint {str(last)!r} is damaged (")
    assert line.endswith(f"): {str(before)!r} is used instead")


@pytest.mark.parametrize(
    ("header", "wrong"),
    [
        ({"iterations": "4"}, "says 4 iterations, 320 steps and 4 timed iterations, which no run of its config "),
        ({"timed_iterations": "6"}, "says 5 iterations, 320 steps and 6 timed iterations, which no run"),
        ({"train_seconds": "0.0"}, "says 5 iterations, 320 steps and 4 timed iterations, which no run"),
        ({"config": "[]"}, "env in config.json is 'CartPole-v1', but None in checkpoint "),
        ({"config": "3"}, "env in config.json is 'CartPole-v1', but None in checkpoint "),
        ({"environment": '"1d8b"'}, "the SHA-256 of the environment's source, cartpole.py, is "),
        ({"agent": "[]"}, "the agent is 'ppo', but [] in checkpoint "),
        ({"layout": '"2"'}, "the layout of checkpoints is 2, but '2' in checkpoint "),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_header_of_another_run_is_an_error(header, wrong, run, capsys):
    forge(max(saved(run).values()), **header)
    assert wrong in complaint(capsys, "train", "--resume", run)


def test_a_checkpoint_beyond_the_end_of_its_run_is_an_error(run, capsys):
    path = run / "checkpoints" / f"{99 * STEP:012d}.safetensors"
    shutil.copy(max(saved(run).values()), path)
    forge(path, steps=str(99 * STEP), iterations="99")
    assert "says 99 iterations, 6336 steps and 4 timed" in complaint(capsys, "train", "--resume", run)


@pytest.mark.parametrize("dtype", ["BF16", "F8_E4M3", "F8_E5M2"])
def test_a_dtype_that_numpy_lacks_is_damage(dtype, run, capsys):
    path = max(saved(run).values())
    header = json.dumps({"state/x": {"dtype": dtype, "shape": [0], "data_offsets": [0, 0]}}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    assert newest(run).path != path
    assert capsys.readouterr().err.startswith(f"rlgraph: checkpoint {str(path)!r} is damaged (")


def test_tensorboard_reads_a_resumed_run_beside_another_writers_file(run):
    shutil.copy(run / "events.out.tfevents.000000", run / "events.out.tfevents.000000.bak")
    resume(str(run))
    (run / "events.out.tfevents.000000.bak").unlink()
    steps = [event.step for event in EventAccumulator(str(run)).Reload().Scalars("entropy")]
    assert steps == [STEP * i for i in range(1, 9)]


def test_what_is_said_beside_a_run_does_not_end_it(monkeypatch):
    class Gone:
        def write(self, text):
            raise BrokenPipeError(32, "no reader")

    monkeypatch.setattr("sys.stderr", Gone())
    say("metrics are damaged")
