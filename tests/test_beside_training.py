"""Two processes and one run: who reads beside a training meets whole files, and a lock ends with who holds it."""

import dataclasses
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from test_checkpoint import STEP, TINY, complaint, press_ctrl_c

from rlgraph.errors import UsageError
from rlgraph.runs.checkpoint import BEGINNING, Checkpoints, choose, load_policy, newest, saved
from rlgraph.runs.folder import locked
from rlgraph.runs.train import evaluate_run, resume, train

READS = 200

# Saves checkpoints and replaces a policy file, as fast as it can, each array full of the number of its steps.
WRITER = """
import itertools, sys
from pathlib import Path
import numpy as np
from rlgraph.runs.checkpoint import BEGINNING, Checkpoints, save_policy
run = Path(sys.argv[1])
checkpoints = Checkpoints(run, 1, {})
for steps in itertools.count(1):
    done = BEGINNING | {"steps": steps, "score": float(steps)}
    arrays = {"x": np.full(5000, steps, np.float32)}
    checkpoints.save(done, arrays, arrays)
    save_policy(run / "policy.safetensors", done, arrays)
    if steps == 1:
        print("ready", flush=True)
"""


@pytest.fixture
def writer(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    yield process
    assert process.poll() is None  # it was writing all the time
    process.kill()
    process.wait()


def test_a_reader_meets_whole_files_only(writer, tmp_path, capsys):
    before = 0
    for _ in range(READS):
        for found in (choose(tmp_path, "last"), choose(tmp_path, "best"), load_policy(tmp_path / "policy.safetensors")):
            assert (found.policy["x"] == found.header["steps"]).all()
        assert found.header["steps"] >= before
        before = found.header["steps"]
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("which", ["last", "best"])
def test_a_checkpoint_that_is_gone_before_it_is_read_is_not_damage(which, tmp_path, monkeypatch, capsys):
    """The next is there when it is looked for again; one that was asked for by its steps is not."""
    checkpoints = Checkpoints(tmp_path, 1, {})
    policy = {"x": np.zeros(3, np.float32)}
    checkpoints.save(BEGINNING | {"steps": 1}, {}, policy)
    listdir, left = os.listdir, [2, 3, 4]

    def listing_before_it_changes(path):
        names = listdir(path)
        if left:
            steps = left.pop(0)
            with monkeypatch.context() as patch:
                patch.setattr(os, "listdir", listdir)
                checkpoints.save(BEGINNING | {"steps": steps}, {}, policy)
        return names

    with monkeypatch.context() as patch:
        patch.setattr(os, "listdir", listing_before_it_changes)
        assert choose(tmp_path, which).header["steps"] == 4
        assert newest(tmp_path).header["steps"] == 4
        left.append(5)
        with pytest.raises(UsageError, match="has no checkpoint '4'; known: last, best, 5"):
            choose(tmp_path, "4")
    assert capsys.readouterr().err == ""


def test_a_training_is_evaluated_while_it_goes_on(tmp_path, capsys):
    folder, returns = tmp_path / "run", []

    def play(steps, total, metrics):
        if saved(folder):
            for which in ("last", "best"):
                returns.append(evaluate_run(str(folder), 2, checkpoint=which))

    train("ppo", dataclasses.replace(TINY, run_dir=str(folder), keep_checkpoints=1), play)
    assert len(returns) == 2 * 7
    assert capsys.readouterr().err == ""


# ---- the lock

# Holds the lock of a run; with a child, which outlives it.
HOLDER = """
import multiprocessing, os, subprocess, sys, time
from pathlib import Path
from rlgraph.runs.folder import locked
with locked(Path(sys.argv[1])):
    if sys.argv[2] == "fork":
        child = os.fork()
        if child == 0:
            os.close(1)
            time.sleep(60)
    elif sys.argv[2] == "multiprocessing":
        process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
        process.start()
        child = process.pid
    else:
        child = subprocess.Popen(["sleep", "60"], close_fds=False).pid
    print(child, flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("how", ["fork", "multiprocessing", "subprocess"])
def test_a_child_does_not_keep_the_lock_of_a_parent_that_is_killed(how, tmp_path):
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path), how], stdout=subprocess.PIPE, text=True)
    child = int(holder.stdout.readline())
    try:
        with pytest.raises(UsageError, match="another process is training run"), locked(tmp_path):
            pass
        holder.kill()
        holder.wait()
        os.kill(child, 0)  # it is still there
        with locked(tmp_path):
            pass
    finally:
        os.kill(child, signal.SIGKILL)


# A child that leaves the context of the lock, while its parent holds it.
CHILD = """
import os, sys
from pathlib import Path
from rlgraph.errors import UsageError
from rlgraph.runs.folder import locked

def is_taken():
    try:
        with locked(Path(sys.argv[1])):
            return False
    except UsageError:
        return True

with locked(Path(sys.argv[1])):
    child = os.fork()
    if child == 0:
        assert is_taken()
        mine = [os.open(os.devnull, os.O_RDONLY) for _ in range(8)]  # one has the number that the lock had
    else:
        assert os.waitpid(child, 0)[1] == 0
        assert is_taken()
        print("the parent's")
if child == 0:
    for descriptor in mine:
        os.fstat(descriptor)
    assert is_taken()
    os._exit(0)
assert not is_taken()
print("nobody's")
"""


def test_a_child_that_ends_leaves_the_lock_to_its_parent(tmp_path):
    """And closes nothing else in its place."""
    done = subprocess.run([sys.executable, "-c", CHILD, str(tmp_path)], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("the parent's\nnobody's\n", "")


def test_one_process_cannot_take_a_lock_twice(tmp_path):
    for _ in range(2):
        with locked(tmp_path):
            with pytest.raises(UsageError, match="another process is training run"), locked(tmp_path):
                pass
            with pytest.raises(UsageError, match="another process is training run"), locked(tmp_path):
                pass


def test_a_run_whose_process_left_a_child_goes_on_at_once(tmp_path, capsys):
    """A training that was killed, with a worker of the user's."""
    folder = tmp_path / "run"
    with pytest.MonkeyPatch.context() as patch:
        press_ctrl_c(patch, 3)
        train("ppo", dataclasses.replace(TINY, run_dir=str(folder)))
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(folder), "fork"], stdout=subprocess.PIPE, text=True)
    child = int(holder.stdout.readline())
    try:
        assert complaint(capsys, "train", "--resume", folder).startswith("another process is training run")
        holder.kill()
        holder.wait()
        assert resume(str(folder)).steps == 8 * STEP
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_lock_that_is_no_file_keeps_nobody_waiting(tmp_path):
    os.mkfifo(tmp_path / "lock")
    started = time.perf_counter()
    with pytest.raises(UsageError, match="lock' is no plain file"), locked(tmp_path):
        pass
    assert time.perf_counter() - started < 5
