"""`rlgraph bench solve`: what it times, what it writes, what it answers to mistakes."""

import json

import jax
import numpy as np
import pytest

from rlgraph.agents.ppo.config import PPOConfig
from rlgraph.bench import results, solve
from rlgraph.cli.main import main
from rlgraph.registry import make
from rlgraph.runs.train import trainer_class

pytestmark = pytest.mark.usefixtures("quick_compilation")
SIZES = {"num_envs": 4, "num_steps": 8, "num_minibatches": 2, "hidden": (8,), "eval_episodes": 3}
TINY = ["--device=cpu", *(f"--{k.replace('_', '-')}={v[0] if k == 'hidden' else v}" for k, v in SIZES.items())]


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """`rlgraph bench solve`, tiny -> exit code, what it printed, and the file."""
    monkeypatch.chdir(tmp_path)

    def command(*words, out="result.json"):
        code = main(["bench", "solve", *words, *TINY, f"--out={out}"])
        content = json.loads((tmp_path / out).read_text())
        results.check_solve(content, out)
        return code, capsys.readouterr().out, content

    return command


@pytest.mark.parametrize("agent", ["ppo", "pqn"])
def test_each_seed_is_timed_until_its_policy_reaches_the_target(agent, run):
    words = [] if agent == "ppo" else [agent]  # ppo is what runs if none is named
    words += ["--env", "CartPole-v1", "--seeds=2", "--seed=3", "--target=5", "--check-every=2", "--total-steps=256"]
    code, printed, content = run(*words)
    assert code == 0 and not content["interrupted"]
    assert content["command"].startswith("rlgraph bench solve") and "result.json" not in content["command"]
    settings, rows = content["settings"], content["rows"]
    expected = {"agent": agent, "env": "CartPole-v1", "target": 5, "num_envs": 4, "seeds": 2, "check_every": 2}
    assert {name: settings[name] for name in expected} == expected
    assert content["provenance"]["versions"]["torch"]
    assert [row["seed"] for row in rows] == [3, 4]
    for row in rows:
        assert row["solved"] and row["mean_return"] >= 5
        assert row["evaluations"] == [[2 * 32, row["mean_return"]]] and row["steps"] == 2 * 32
        assert 0 < row["seconds"] < row["build_s"] + row["warm_up_s"] + 10
        assert (row["device"], row["mode"], row["evaluation"]) == ("cpu", "eager", "operation by operation")
    assert rows[0]["mean_return"] != rows[1]["mean_return"]
    seconds = [row["seconds"] for row in rows]
    figures = {"median_s": np.mean(seconds), "min_s": min(seconds), "max_s": max(seconds)}
    assert content["summary"] == {"seeds": 2, "solved": 2, **{k: pytest.approx(v) for k, v in figures.items()}}
    assert f"solved 2 of 2: median {np.mean(seconds):.3f} s" in printed
    assert "evaluation: operation by operation" in printed


def test_what_is_not_solved_after_all_steps_is_said(run):
    code, printed, content = run("--seeds=1", "--target=1000", "--total-steps=150", "--check-every=2")
    (row,) = content["rows"]
    assert code == 0 and not row["solved"]
    assert [steps for steps, _ in row["evaluations"]] == [64, 128, 160]  # five iterations, and the last one counts
    assert row["steps"] == 160
    assert content["summary"] == {"seeds": 1, "solved": 0, "median_s": None, "min_s": None, "max_s": None}
    assert "solved 0 of 1: median never" in printed


def test_evaluations_are_due_at_the_first_launch_after_so_many_iterations(run):
    words = ["--seeds=1", "--target=1000", "--total-steps=640", "--check-every=5", "--iterations-per-launch=2"]
    _, _, content = run(*words)
    assert [steps // 32 for steps, _ in content["rows"][0]["evaluations"]] == [6, 10, 16, 20]


def test_a_run_that_did_not_solve_it_took_for_ever():
    rows = [{"solved": solved, "seconds": seconds} for solved, seconds in ((True, 1.0), (False, 0.5), (True, 3.0))]
    assert solve.summary(rows) == {"seeds": 3, "solved": 2, "median_s": 3.0, "min_s": 1.0, "max_s": None}
    assert solve.summary(rows[1:]) == {"seeds": 2, "solved": 1, "median_s": None, "min_s": 3.0, "max_s": None}


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_the_warm_up_compiles_everything_and_leaves_no_trace(backend, caplog):
    """That a run's state determines the rest of it, test_checkpoint.py shows."""
    config = PPOConfig(**SIZES, backend=backend, device="cpu", total_steps=64, num_epochs=1)
    trainer = trainer_class("ppo", backend)(config, make("CartPole-v1", max_episode_steps=20))
    before = trainer.state_arrays()
    play, how = trainer.evaluator(3, seed=1)
    solve._warm_up(trainer, play)
    for name, array in trainer.state_arrays().items():
        np.testing.assert_array_equal(array, before[name], err_msg=name)
    with jax.log_compiles():
        evaluations = solve._train(trainer, play, 1000.0, 1, lambda *_: None)
    assert not [record for record in caplog.records if "ompil" in record.getMessage()]
    assert how == {"torch": "operation by operation", "jax": "one XLA program"}[backend]
    returns = [mean for _, mean in evaluations] + [play().mean() for _ in range(4)]
    assert len(set(returns)) > 2  # other starts every time


MISTAKES = {
    ("pppo",): "unknown agent 'pppo'; did you mean 'ppo'?",
    ("--env=CartPole-v7",): "unknown environment 'CartPole-v7'; did you mean 'CartPole-v1'?",
    ("--backend=torhc",): "unknown backend 'torhc'; did you mean 'torch'?",
    ("--mode=egaer",): "unknown torch mode 'egaer'; did you mean 'eager'?",
    ("--sedes=3",): "unknown option '--sedes=3'; did you mean --seeds?",
    ("--seeds=0",): "seeds must be at least 1, but is 0",
    ("--check-every=0",): "check_every must be at least 1, but is 0",
    ("--seed=4294967290",): "seed + seeds must be at most 2**32, but is 4294967300",
    ("--target=nan",): "target must be finite, but is nan",
    ("--run-dir=here",): "unknown option '--run-dir=here'",
    (
        "--env=Pendulum-v1",
    ): "environment 'Pendulum-v1' does not say what counts as solved: give a mean return as --target",
    ("pqn", "--env=MountainCarContinuous-v0"): "pqn needs a Discrete action space",
}


@pytest.mark.parametrize("words", MISTAKES, ids=" ".join)
def test_mistakes_are_one_line_and_leave_no_file(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["bench", "solve", *words, "--device=cpu", "--total-steps=64", "--out=result.json"]) == 2
    out, error = capsys.readouterr()
    assert error.startswith(f"rlgraph: {MISTAKES[words]}") and error.count("\n") == 1 and out == ""
    assert not list(tmp_path.iterdir())


def test_help_lists_what_counts(capsys):
    assert main(["bench", "solve", "--help"]) == 0
    out, error = capsys.readouterr()
    assert error == "" and out.startswith("usage: rlgraph bench solve ppo")
    assert all(option in out for option in ("--seeds INT", "--check-every INT", "--target", "--learning-rate"))
    assert "--run-dir" not in out and "--keep-checkpoints" not in out


def test_an_earlier_result_is_not_written_over(tmp_path, capsys):
    path = tmp_path / "result.json"
    path.write_text("earlier")
    assert main(["bench", "solve", "--device=cpu", f"--out={path}"]) == 2
    assert "exists; name another file with --out" in capsys.readouterr().err
    assert path.read_text() == "earlier"


def test_ctrl_c_keeps_the_seeds_that_are_done(run, monkeypatch):
    measure = solve.solve

    def interrupted(agent, config, *rest):
        if config.seed == 1:
            raise KeyboardInterrupt
        return measure(agent, config, *rest)

    monkeypatch.setattr(solve, "solve", interrupted)
    code, printed, content = run("--target=5", "--seeds=3")
    assert code == 130 and content["interrupted"]
    assert [row["seed"] for row in content["rows"]] == [0]
    assert (content["summary"]["seeds"], content["summary"]["solved"]) == (1, 1)
    assert "(interrupted)" in printed


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["fused", "graph"])
def test_cartpole_is_solved_with_evaluation_in_one_kernel(mode, tmp_path):
    path = tmp_path / "result.json"
    assert main(["bench", "solve", "--env", "CartPole-v1", f"--mode={mode}", "--seeds=2", f"--out={path}"]) == 0
    for row in json.loads(path.read_text())["rows"]:
        assert row["solved"] and row["mean_return"] >= 475
        assert (row["mode"], row["evaluation"]) == (mode, "one kernel, replayed as a CUDA graph")
        assert len({mean for _, mean in row["evaluations"]}) > 1
