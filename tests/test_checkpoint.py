"""Checkpoints: a run goes on bit for bit, however it was ended, and what cannot go on is said in one line."""

import dataclasses
import errno
import json
import os
import random
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from agent_tools import BACKENDS
from safetensors.numpy import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import rlgraph
from rlgraph.agents import AGENTS
from rlgraph.agents.dqn.config import DQNConfig
from rlgraph.agents.ppo import jax as ppo_jax
from rlgraph.agents.ppo import torch as ppo_torch
from rlgraph.agents.ppo.config import PPOConfig
from rlgraph.agents.pqn.config import PQNConfig
from rlgraph.agents.sac.config import SACConfig
from rlgraph.cli.main import main
from rlgraph.errors import UsageError
from rlgraph.runs import checkpoint, identity
from rlgraph.runs.checkpoint import BEGINNING, Checkpoints, newest, saved
from rlgraph.runs.folder import locked
from rlgraph.runs.metrics import MetricsLog
from rlgraph.runs.train import resume, train, trainer_class

pytestmark = pytest.mark.usefixtures("quick_compilation")
COMMON = {"num_envs": 4, "hidden": (8,), "device": "cpu", "eval_episodes": 2}
REPLAY = {"num_steps": 4, "num_updates": 2, "minibatch_size": 8, "replay_capacity": 112, "learning_starts": 16}
CONFIGS = {
    "dqn": DQNConfig(**COMMON, **REPLAY, total_steps=400, n_step=2, target_period=4, target_tau=0.5),
    "ppo": PPOConfig(
        **COMMON,
        num_steps=8,
        num_epochs=1,
        num_minibatches=2,
        total_steps=640,
        normalize_obs=True,
        normalize_reward=True,
        target_kl=0.02,
    ),
    "pqn": PQNConfig(**COMMON, num_steps=8, num_epochs=1, num_minibatches=2, total_steps=640),
    "sac": SACConfig(**COMMON, **REPLAY, env="Pendulum-v1", total_steps=400, noise_correlation=0.5, normalize_obs=True),
}
HALF = 5  # iterations, N


def trainer(agent, backend, **changes):
    config = dataclasses.replace(CONFIGS[agent], backend=backend, **changes)
    env = rlgraph.make(config.env, max_episode_steps=7)  # so that episodes are cut off, too
    return trainer_class(agent, backend)(config, env)


def iterate(trainer, times):
    return [trainer.iterate().get() for _ in range(times)]


def assert_same(left: dict, right: dict):
    assert left.keys() == right.keys()
    for name in left:
        np.testing.assert_array_equal(left[name], right[name], err_msg=name)


# ---- N + save + load + N is 2 N


def through_a_file(trainer, folder) -> dict[str, np.ndarray]:
    Checkpoints(folder, 1, {}).save(BEGINNING, trainer.state_arrays(), trainer.arrays())
    return newest(folder).state


def check_going_on(agent, backend, folder, **changes):
    whole = trainer(agent, backend, **changes)
    iterate(whole, HALF)
    arrays = through_a_file(whole, folder)
    metrics = iterate(whole, HALF)

    again = trainer(agent, backend, **changes)
    iterate(again, 2)  # of its own: nothing of them may be left
    again.load_state(arrays)
    assert_same(again.state_arrays(), arrays)
    assert iterate(again, HALF) == metrics
    assert_same(again.state_arrays(), whole.state_arrays())
    assert_same(again.arrays(), whole.arrays())


def test_every_agent_is_tested():
    assert CONFIGS.keys() == AGENTS.keys()


@pytest.mark.parametrize("mode", ["torch eager", "torch graph", "jax jit"])
@pytest.mark.parametrize("agent", AGENTS)
def test_a_loaded_run_goes_on_bit_for_bit(agent, mode, tmp_path):
    backend, mode = mode.split()
    check_going_on(agent, backend, tmp_path, mode=mode)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "mode", ["torch eager", "torch compile", "torch graph-uncompiled", "torch graph", "jax jit", "jax graph"]
)
@pytest.mark.parametrize("agent", AGENTS)
def test_a_loaded_run_goes_on_bit_for_bit_on_a_gpu(agent, mode, tmp_path):
    backend, mode = mode.split()
    check_going_on(agent, backend, tmp_path, mode=mode, device="cuda")


@pytest.mark.gpu
def test_a_loaded_run_of_fused_rollouts_goes_on_bit_for_bit_on_a_gpu(tmp_path):
    """PPO's alone are."""
    check_going_on("ppo", "torch", tmp_path, mode="fused", device="cuda")


def changed(name: str, array: np.ndarray) -> np.ndarray:
    """Another value that is as possible."""
    if name == "generator":
        return torch.Generator().manual_seed(123).get_state().numpy()
    if name == "replay/cursor":  # at the row of another rollout
        return array - REPLAY["num_steps"]
    if array.dtype == bool:
        return ~array
    if array.dtype.kind == "i":
        return np.maximum(array - 1, 0)
    return array + array.dtype.type(1)


# What the next iteration overwrites before anything reads it.
SET_ANEW = {"collector/carry/done_B", "learning_rate", "epsilon"}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("agent", AGENTS)
def test_every_array_of_a_checkpoint_matters(agent, backend):
    run = trainer(agent, backend)
    iterate(run, HALF)
    arrays = run.state_arrays()

    def future(arrays):
        run.load_state(arrays)
        return iterate(run, 3), run.state_arrays()

    metrics, after = future(arrays)
    without_effect = set()
    for name, array in arrays.items():
        other_metrics, other = future(arrays | {name: changed(name, array)})
        others = [n for n in after if n != name]
        if other_metrics == metrics and all(np.array_equal(other[n], after[n]) for n in others):
            without_effect.add(name)
    expected = SET_ANEW & arrays.keys()
    # Statistics have no gradient, and nothing over a root is nothing.
    expected |= {name for name in arrays if "/nu/" in name and name.endswith(("obs_mean", "obs_var"))}
    if agent == "sac":  # returns of one step stop at its end anyway
        expected |= {"replay/truncated"}
    assert without_effect == expected


@pytest.mark.parametrize("backend", BACKENDS)
def test_arrays_that_do_not_fit_are_named(backend):
    run = trainer("pqn", backend)
    before = run.state_arrays()
    name = "collector/obs"
    for arrays, message in [
        ({n: a for n, a in before.items() if n != name}, "'collector/obs' is missing in the checkpoint, float32[4, 4]"),
        (before | {name: before[name][:2]}, "'collector/obs' is float32[2, 4] in the checkpoint, float32[4, 4] in"),
        (before | {name: before[name] > 0}, "'collector/obs' is bool[4, 4] in the checkpoint, float32[4, 4] in this"),
        (before | {"more": before[name]}, "'more' is float32[4, 4] in the checkpoint, missing in this run"),
    ]:
        with pytest.raises(UsageError) as raised:
            run.load_state(arrays)
        assert str(raised.value).startswith(message)
        assert_same(run.state_arrays(), before)


def test_the_names_are_those_of_fields_and_weights():
    names = {backend: trainer("dqn", backend).state_arrays().keys() for backend in BACKENDS}
    both = {"collector/carry/state/theta", "collector/return_B", "replay/cursor", "updates"}
    assert both <= names["torch"] & names["jax"]
    assert {"policy/mlp.layers.0.weight", "optimizer/mlp.layers.1.bias/exp_avg_sq", "iteration"} <= names["torch"]
    assert {"policy/mlp/layers/0/weight", "optimizer/1/mu/mlp/layers/1/bias", "iteration/low"} <= names["jax"]


# ---- whole runs, tiny

TINY = PPOConfig(
    **COMMON, num_steps=16, num_epochs=1, num_minibatches=2, total_steps=64 * 8, checkpoint_seconds=0, mode="eager"
)
STEP = TINY.batch_size


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """A run that nothing interrupted; not to be changed."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    train("ppo", dataclasses.replace(TINY, run_dir=str(folder)))
    return folder


def press_ctrl_c(monkeypatch, iteration: int, agent=ppo_torch.PPO) -> None:
    iterate, count = agent.iterate, iter(range(1, 10**6))

    def pressing(self):
        if next(count) == iteration:
            signal.raise_signal(signal.SIGINT)
        return iterate(self)

    monkeypatch.setattr(agent, "iterate", pressing)


@pytest.fixture
def interrupted(tmp_path, monkeypatch) -> Path:
    """The same run, but ended in its fifth iteration."""
    folder = tmp_path / "run"
    with monkeypatch.context() as patch:
        press_ctrl_c(patch, 5)
        assert train("ppo", dataclasses.replace(TINY, run_dir=str(folder))).interrupted
    return folder


def rows(folder: Path) -> list[dict]:
    """Of metrics.jsonl, without the times, which no two runs share."""
    read = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: row[name] for name in row if name not in ("seconds", "steps_per_second")} for row in read]


def assert_same_run(folder: Path, expected: Path):
    assert rows(folder) == rows(expected)
    assert_same(load_file(folder / "policy.safetensors"), load_file(expected / "policy.safetensors"))
    assert_same(newest(folder).state, newest(expected).state)
    results = [json.loads((run / "result.json").read_text()) for run in (folder, expected)]
    same = ("steps", "eval_episodes", "eval_return_mean", "eval_return_std", "interrupted", "execution")
    assert [results[0][name] for name in same] == [results[1][name] for name in same]
    seconds = [json.loads(line)["seconds"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert seconds == sorted(seconds)
    assert results[0]["setup_seconds"] + results[0]["train_seconds"] == pytest.approx(seconds[-1])


def complaint(capsys, *argv) -> str:
    """The one line that a mistake prints."""
    code = main(list(map(str, argv)))
    out, err = capsys.readouterr()
    assert (code, out, err.count("\n"), err[:9]) == (2, "", 1, "rlgraph: "), (code, out, err)
    return err[9:-1]


def test_a_checkpoint_comes_after_every_iteration_or_only_at_the_end(finished, tmp_path):
    assert [*saved(finished)][-3:] == [6 * STEP, 7 * STEP, 8 * STEP]
    folder = tmp_path / "run"
    train("ppo", dataclasses.replace(TINY, run_dir=str(folder), checkpoint_seconds=1e6))
    assert [*saved(folder)] == [8 * STEP]
    assert_same_run(folder, finished)


@pytest.mark.parametrize("seconds", [0, 1e6])
def test_a_checkpoint_is_the_state_after_the_last_recorded_iteration(seconds, tmp_path, monkeypatch):
    config = dataclasses.replace(TINY, run_dir=str(tmp_path / "run"), checkpoint_seconds=seconds)
    press_ctrl_c(monkeypatch, 5)
    train("ppo", config)
    last = newest(tmp_path / "run")
    assert (last.header["iterations"], last.header["steps"]) == (5, 5 * STEP)
    assert rows(tmp_path / "run")[-1]["step"] == 5 * STEP
    whole = ppo_torch.PPO(config, rlgraph.make(config.env))
    iterate(whole, 5)
    assert_same(last.state, whole.state_arrays())
    assert_same(last.policy, whole.arrays())


def test_after_ctrl_c_it_goes_on_to_the_same_end(interrupted, finished, capsys):
    assert rows(interrupted) == rows(finished)[:5]
    assert main(["train", "--resume", str(interrupted)]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.splitlines()[-1] == f"saved in {interrupted}"
    assert_same_run(interrupted, finished)


def test_in_jax_too(tmp_path, monkeypatch):
    config = dataclasses.replace(TINY, backend="jax", mode="jit", total_steps=STEP * 4)
    train("ppo", dataclasses.replace(config, run_dir=str(tmp_path / "whole")))
    with monkeypatch.context() as patch:
        press_ctrl_c(patch, 2, ppo_jax.PPO)
        assert train("ppo", dataclasses.replace(config, run_dir=str(tmp_path / "run"))).interrupted
    resume(str(tmp_path / "run"))
    assert_same_run(tmp_path / "run", tmp_path / "whole")


def test_a_finished_run_is_shown_again(finished, capsys):
    before = {path: path.read_bytes() for path in finished.rglob("*") if path.is_file()}
    assert main(["train", "--resume", str(finished)]) == 0
    out, err = capsys.readouterr()
    assert err == f"rlgraph: run {str(finished)!r} is finished: there is nothing left to do\n"
    assert "ppo on CartPole-v1" in out and out.splitlines()[-1] == f"saved in {finished}"
    assert {path: path.read_bytes() for path in finished.rglob("*") if path.is_file()} == before


def test_a_damaged_result_is_named(interrupted, capsys):
    path = interrupted / "result.json"
    for content in ("", "{", "[]", "{}", '{"agents": "ppo"}'):
        path.write_text(content)
        line = complaint(capsys, "train", "--resume", interrupted)
        assert line.startswith(f"{str(path)!r} is damaged (")


def test_a_run_that_lacks_only_its_evaluation_is_evaluated(interrupted, finished, monkeypatch):
    def interrupting(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ppo_torch.PPO, "evaluate_policy", interrupting)
        assert resume(str(interrupted)).interrupted
    assert rows(interrupted) == rows(finished)
    resume(str(interrupted))
    assert_same_run(interrupted, finished)


def end_in_iteration(monkeypatch, iteration: int) -> None:
    """As a kill would, so that nothing is saved."""
    iterate, count = ppo_torch.PPO.iterate, iter(range(1, 10**6))

    def ending(self):
        if next(count) == iteration:
            raise KeyboardInterrupt
        return iterate(self)

    monkeypatch.setattr(ppo_torch.PPO, "iterate", ending)


@pytest.mark.parametrize("iteration", [1, 5])
def test_without_a_checkpoint_it_starts_from_the_beginning_and_says_so(
    iteration, tmp_path, finished, monkeypatch, capsys
):
    folder = tmp_path / "run"
    with monkeypatch.context() as patch:
        end_in_iteration(patch, iteration)
        with pytest.raises(KeyboardInterrupt):
            train("ppo", dataclasses.replace(TINY, run_dir=str(folder), checkpoint_seconds=1e6))
    assert not saved(folder)
    assert len(rows(folder)) == max(iteration - 2, 0)  # the last is still on its way
    resume(str(folder))
    assert capsys.readouterr().err == (
        f"rlgraph: run {str(folder)!r} has no checkpoint yet: it starts from the beginning\n"
    )
    assert_same_run(folder, finished)
    assert [path.name for path in (folder / "checkpoints").iterdir()] == [f"{8 * STEP:012d}.safetensors"]


def test_tensorboard_and_jsonl_hold_every_row_once(interrupted):
    with open(interrupted / "metrics.jsonl", "a") as file:  # after the last checkpoint, and torn
        file.write('{"step": 9999, "entropy": 1.0}\n{"step": 99')
    log = MetricsLog(interrupted, 5 * STEP)  # a process that gets no further than this
    log.write(6 * STEP, {"entropy": 99.0})
    log.close()
    torn = max(interrupted.glob("events.*"))
    torn.write_bytes(torn.read_bytes()[:-5])
    resume(str(interrupted))
    assert [row["step"] for row in rows(interrupted)] == [STEP * i for i in range(1, 9)]
    events = EventAccumulator(str(interrupted)).Reload()
    in_events = [(event.step, event.value) for event in events.Scalars("entropy")]
    assert in_events == [(row["step"], pytest.approx(row["entropy"], rel=1e-6)) for row in rows(interrupted)]


# ---- damage


def test_a_damaged_checkpoint_is_passed_over(interrupted, finished, capsys):
    (three, four, five) = list(saved(interrupted).values())[-3:]
    five.write_bytes(five.read_bytes()[:-1])
    four.write_bytes(b"")
    resume(str(interrupted))
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    for path, line in zip((five, four), lines):
        assert line.startswith(f"rlgraph: checkpoint {str(path)!r} is damaged (")
        assert line.endswith(f"): {str(three)!r} is used instead")
    assert_same_run(interrupted, finished)


def test_no_damage_goes_unnoticed(interrupted, capsys):
    paths = list(saved(interrupted).values())
    before, last = paths[-2:]
    whole = last.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    draw = random.Random(0)
    contents = [b"", b"garbage", b"\0" * len(whole), b"\xff" * len(whole), whole + b"\0", whole[::-1]]
    contents += [whole[:n] for n in (1, 7, 8, 9, header // 2, header - 1, header, header + 1, len(whole) - 1)]
    padding = len(whole[:header].rstrip(b" "))  # which JSON does not care about
    for place in [*range(8), *draw.sample(range(8, padding), 150), *draw.sample(range(header, len(whole)), 150)]:
        flipped = bytearray(whole)
        flipped[place] ^= 1 << draw.randrange(8)
        contents.append(bytes(flipped))
    for content in contents:
        last.write_bytes(content)
        assert newest(interrupted).path == before
        assert capsys.readouterr().err.count("\n") == 1
    last.write_bytes(whole)
    assert newest(interrupted).path == last
    assert capsys.readouterr().err == ""


def test_if_all_are_damaged_it_says_so(interrupted, capsys):
    paths = saved(interrupted)
    for path in paths.values():
        path.write_bytes(path.read_bytes()[:1000])
    line = complaint(capsys, "train", "--resume", interrupted)
    assert line.startswith(f"checkpoint {str(max(paths.values()))!r} is damaged (")
    assert line.endswith("), and there is none to use instead")


# ---- other configs, agents, environments, versions


def edit(path: Path, **changes) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_another_config_is_refused(interrupted, capsys):
    path = max(saved(interrupted).values())
    edit(interrupted / "config.json", gamma=0.9, hidden=[16])
    line = complaint(capsys, "train", "--resume", interrupted)
    assert line.startswith(f"gamma in config.json is 0.9, but 0.99 in checkpoint {str(path)!r}")
    edit(interrupted / "config.json", gamma=0.99)
    assert complaint(capsys, "train", "--resume", interrupted).startswith("hidden in config.json is [16], but [8] in")


def test_another_agent_version_or_layout_is_refused(interrupted, capsys, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(rlgraph, "__version__", "99")
        line = complaint(capsys, "train", "--resume", interrupted)
    assert line.startswith(f"the version of rlgraph is '99', but {rlgraph.__version__!r} in checkpoint ")
    with monkeypatch.context() as patch:
        patch.setattr(identity, "LAYOUT", 99)
        line = complaint(capsys, "train", "--resume", interrupted)
    assert line.startswith("the layout of checkpoints is 99, but 2 in checkpoint ")
    last = newest(interrupted)
    done = {name: last.header[name] for name in BEGINNING}
    Checkpoints(interrupted, 3, last.header | {"agent": "pqn"}).save(done, last.state, last.policy)
    line = complaint(capsys, "train", "--resume", interrupted)
    assert line.startswith("the agent is 'ppo', but 'pqn' in checkpoint ")


def test_another_environment_is_refused(tmp_path, monkeypatch, capsys):
    source = Path(rlgraph.make("CartPole-v1").definition.__file__).read_text()
    env, folder = tmp_path / "mine.py", tmp_path / "run"
    env.write_text(source)
    with monkeypatch.context() as patch:
        press_ctrl_c(patch, 2)
        train("ppo", dataclasses.replace(TINY, run_dir=str(folder), env=str(env)))
    env.write_text(source.replace("9.8", "9.9"))
    os.utime(env, (1, 1))  # however quick that was
    line = complaint(capsys, "train", "--resume", folder)
    assert line.startswith("the SHA-256 of the environment's source is ")
    env.write_text(source)
    assert not resume(str(folder)).interrupted


def test_options_beside_resume_are_refused(interrupted, capsys):
    for words in (["--resume"], ["ppo", "--resume", "x"], ["ppo", "--resume=x"], ["--resume", "x", "--seed", "3"]):
        line = complaint(capsys, "train", *words)
        assert line.startswith("`rlgraph train --resume RUN` takes a run folder and nothing else")
    assert complaint(capsys, "train", "--resume", interrupted.parent).endswith(
        "is not a run folder: it has no config.json"
    )
    assert main(["train", f"--resume={interrupted}"]) == 0


@pytest.mark.parametrize(("name", "value"), [("keep_checkpoints", 0), ("checkpoint_seconds", -1.0)])
@pytest.mark.parametrize("agent", AGENTS)
def test_settings_that_cannot_be(agent, name, value):
    with pytest.raises(UsageError, match=f"{name} must be at least"):
        dataclasses.replace(CONFIGS[agent], **{name: value})


# ---- which checkpoints are kept


def save_scores(folder: Path, keep: int, scores: list) -> list[int]:
    checkpoints = Checkpoints(folder, keep, {})
    for i, score in enumerate(scores):
        checkpoints.save(BEGINNING | {"steps": i, "score": score}, {}, {})
    return [*saved(folder)]


@pytest.mark.parametrize(
    ("keep", "scores", "kept"),
    [
        (2, [1, 2, 3, 4], [2, 3]),
        (2, [1, 9, 3, 4, 5], [1, 3, 4]),
        (1, [9, 1, 9, 1], [2, 3]),  # the later of equals
        (1, [None, 1, None], [1, 2]),
        (2, [None, None, None], [1, 2]),
        (1, [1, float("nan"), 0], [0, 2]),
        (3, [5], [0]),
    ],
)
def test_the_latest_and_the_best_are_kept(tmp_path, keep, scores, kept):
    assert save_scores(tmp_path, keep, scores) == kept


def test_a_damaged_one_that_was_passed_over_goes_with_the_next(tmp_path):
    save_scores(tmp_path, 3, [1, 2, 3])
    folder = tmp_path / "checkpoints"
    (folder / f"{99:012d}.safetensors").write_bytes(b"torn")
    (folder / f"{98:012d}.safetensors.part").write_bytes(b"torn")
    (folder / "mine.txt").write_text("mine")
    Checkpoints(tmp_path, 3, {}).save(BEGINNING | {"steps": 3}, {}, {})
    assert sorted(path.name for path in folder.iterdir()) == [
        *(f"{steps:012d}.safetensors" for steps in (1, 2, 3)),
        "mine.txt",
    ]


def test_the_score_is_the_mean_return_since_the_last_checkpoint(tmp_path):
    config = dataclasses.replace(TINY, run_dir=str(tmp_path / "run"), keep_checkpoints=99)
    train("ppo", config)
    paths = saved(tmp_path / "run")
    assert [*paths] == [row["step"] for row in rows(tmp_path / "run")]
    for row, path in zip(rows(tmp_path / "run"), paths.values(), strict=True):
        assert checkpoint._read(path).header["score"] == row["episode_return"]


def test_eval_plays_the_policy_of_a_checkpoint(interrupted, capsys):
    def answer(*options):
        assert main(["eval", str(interrupted), "--episodes", "20", "--device", "cpu", *options]) == 0
        return capsys.readouterr().out

    assert answer() == answer("--checkpoint", "last") == answer("--checkpoint", str(5 * STEP))
    paths = saved(interrupted)
    scores = {steps: checkpoint._score(path) for steps, path in paths.items()}
    best = max(scores, key=scores.get)
    assert answer("--checkpoint", "best") == answer("--checkpoint", str(best))
    line = complaint(capsys, "eval", interrupted, "--checkpoint", "7")
    assert line.endswith(f"has no checkpoint '7'; known: last, best, {', '.join(map(str, paths))}")
    (interrupted / "policy.safetensors").unlink()
    line = complaint(capsys, "eval", interrupted)
    assert "play its last checkpoint by --checkpoint last" in line
    assert f"`rlgraph train --resume {interrupted}`" in line
    assert answer("--checkpoint", "last")


# ---- a full disk, and two processes


@pytest.mark.parametrize("call", [1, 3, 5, 6, 7, 9])  # versions, metrics twice, a checkpoint and its folder, the next
def test_a_full_disk_ends_it_in_one_line_and_loses_nothing(call, interrupted, finished, monkeypatch, capsys):
    """From one call of fsync on, the disk has no room."""
    fsync, count = os.fsync, iter(range(1, 10**6))

    def full(descriptor):
        if next(count) >= call:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        assert main(["train", "--resume", str(interrupted)]) == 1
    out, err = capsys.readouterr()
    assert (out, err) == ("", f"rlgraph: cannot write or read {interrupted}: No space left on device\n")
    assert not list(interrupted.rglob("*.part"))
    assert max(saved(interrupted)) >= 5 * STEP
    resume(str(interrupted))
    assert_same_run(interrupted, finished)


def test_two_processes_cannot_train_one_run(interrupted, capsys):
    with locked(interrupted):
        line = complaint(capsys, "train", "--resume", interrupted)
    assert line == f"another process is training run {str(interrupted)!r}; wait for it or end it"
    assert not resume(str(interrupted)).interrupted


def test_what_was_killed_before_it_began_can_begin_there(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "lock").touch()
    (folder / "config.json.part").write_text("{")
    assert train("ppo", dataclasses.replace(TINY, run_dir=str(folder), total_steps=STEP)).steps == STEP
