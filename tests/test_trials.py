"""The trials of scripts/, a few cases of each kind: fuzz.py, whose judgement is tested first, and kill.py."""

import argparse
import json
import random
from pathlib import Path

import fuzz
import fuzz_environments
import fuzz_oracle
import kill
import numpy as np
import pytest
from fork_server import Command, Server
from fuzz_oracle import EITHER, HARMLESS, NOTICED, REFUSED, Case, Outcome, problems
from safetensors.numpy import save_file

SMALL = "--total-steps 8 --num-envs 2 --num-steps 4 --eval-episodes 1 --hidden 8"
TRAIN = ("train", "ppo", "--env", "env.py", *SMALL.split())


@pytest.fixture(scope="module")
def server(compiled_programs):
    server = Server(compiled_programs)
    yield server
    server.close()


def run(server, tmp_path, kind, cases, seed=0, timeout=60.0):
    args = argparse.Namespace(kind=kind, cases=cases, seed=seed, only=None, jobs=2, timeout=timeout)
    return fuzz.run_all(args, tmp_path / "out", server)


# ---- what is judged wrong


def judged(tmp_path, verdict=EITHER, code=0, stdout="", stderr="", after=None, hung=False, **case) -> list[str]:
    outcome = Outcome(code, hung, stdout, stderr, {"a": "1"}, {"a": "1"} if after is None else after)
    return problems(Case("made up", ("train",), verdict, **case), outcome, tmp_path)


LINE = "rlgraph: no such thing\n"


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ({"verdict": HARMLESS}, []),
        ({"verdict": REFUSED, "code": 2, "stderr": LINE}, []),
        ({"verdict": NOTICED, "stderr": LINE}, []),
        ({"verdict": HARMLESS, "code": 130, "interrupt_after": 1.0}, []),
        ({"verdict": HARMLESS, "code": 1, "out": "closed"}, []),
        ({"verdict": REFUSED, "code": 2, "err": "closed"}, []),
        ({"hung": True, "code": -9}, ["hang"]),
        ({"verdict": REFUSED}, ["silent acceptance"]),
        ({"verdict": NOTICED}, ["silent acceptance"]),
        ({"verdict": HARMLESS, "code": 2, "stderr": LINE}, ["refused with code 2, but nothing is wrong"]),
        ({"code": 3, "stderr": LINE}, ["exit code 3"]),
        ({"code": -11, "stderr": LINE}, ["exit code -11"]),
        ({"code": 130, "stderr": LINE}, ["exit code 130"]),
        ({"code": 1, "stderr": "Traceback (most recent call last):\n  …\nKeyError\n"}, ["traceback"]),
        ({"code": 2, "stderr": LINE + "and more\n"}, ["words on stderr that are no line of rlgraph's"]),
        ({"stderr": "UserWarning: careful\n"}, ["words on stderr that are no line of rlgraph's"]),
        ({"code": 2, "stderr": "rlgraph: \x1b[31mred\n"}, ["control characters on stderr"]),
        ({"code": 2}, ["an error without a line"]),
        ({"stdout": "return nan ± nan (least nan, greatest nan)\n"}, ["a return that is not finite"]),
        ({"stdout": "return 1.00 ± 0.00\n"}, []),
        ({"code": 2, "stderr": LINE, "after": {"a": "1", "runs": "d"}}, ["refused, but changed runs"]),
        ({"code": 2, "stderr": LINE, "after": {"a": "2"}}, ["refused, but changed a"]),
        ({"code": 2, "stderr": LINE, "after": {}}, ["refused, but changed a"]),
        ({"after": {"a": "2"}}, []),
    ],
)
def test_what_is_wrong_is_found(tmp_path, what, said):
    assert judged(tmp_path, **what) == said


@pytest.mark.parametrize(("value", "said"), [(1.0, []), (np.nan, ["a policy that is not finite"])])
def test_a_policy_that_is_not_finite_is_found(tmp_path, value, said):
    save_file({"weight": np.array([0, value], np.float32)}, tmp_path / "policy.safetensors")
    assert judged(tmp_path, after={"a": "1", "policy.safetensors": "x"}) == said


def test_what_has_changed_in_a_folder_is_seen(tmp_path):
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to("nowhere")
    before = fuzz_oracle.contents(tmp_path)
    assert before.keys() == {"file", "link"}
    (tmp_path / "lock").write_text("")
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__" / "x.pyc").write_text("")
    assert fuzz_oracle.contents(tmp_path) == before
    (tmp_path / "file").write_text("y")
    (tmp_path / "runs").mkdir()
    after = fuzz_oracle.contents(tmp_path)
    assert after.keys() == {"file", "link", "runs"} and after["file"] != before["file"]


# What a user's file does as if rlgraph did it, and what is found.
PLANTED = [
    ("", []),
    ("import sys\nsys.stderr.write('Traceback (most recent call last):\\n')", ["traceback"]),
    ("import time\ntime.sleep(1000)", ["hang"]),
    ("import os\nos._exit(0)", ["silent acceptance"]),
    ("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)", ["exit code -9", "an error without a line"]),
]


def planted(number, draw, folder, bases):
    definition = fuzz_environments.Definition("torch", box=False)
    statement, said = PLANTED[number]
    definition.parts["imports"] += statement
    definition.write(folder)
    return Case("planted", TRAIN, REFUSED if said == ["silent acceptance"] else HARMLESS)


def test_what_was_planted_is_found_and_kept(server, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(fuzz.MAKERS, "environments", planted)
    tried = run(server, tmp_path, "environments", len(PLANTED), timeout=5.0)
    assert [t.problems for t in tried] == [said for _, said in PLANTED]
    assert fuzz.report("environments", tried) == 1
    assert "5 cases (4 harmless, 1 refused), 1 as they must be, 4 failed" in capsys.readouterr().out
    assert not tried[0].folder.exists()
    for t in tried[1:]:
        facts = json.loads((t.folder / "case.json").read_text())
        assert (facts["problems"], facts["argv"]) == (t.problems, list(TRAIN))
        assert (t.folder / "files" / "env.py").exists()


def test_a_case_depends_on_the_seed_and_its_number_alone(tmp_path):
    def made(seed, number):
        folder = tmp_path / f"{random.random()}"
        folder.mkdir()
        case = fuzz_environments.case(number, random.Random(f"{seed} {number}"), folder, None)
        return case.kind, case.argv, (folder / "env.py").read_bytes()

    assert made(0, 3) == made(0, 3)
    assert len({made(seed, number) for seed in range(3) for number in range(3)}) == 9


# ---- the trials: one case of each way to be wrong, and as many as docs/robustness.md says

KINDS = [("commands", 19, 300), ("environments", 22, 100), ("runs", 17, 100)]


def check(tried):
    assert {t.folder.name: (t.case.kind, t.problems, t.outcome.stderr) for t in tried if t.problems} == {}


@pytest.mark.parametrize(("kind", "cases"), [(kind, few) for kind, few, _ in KINDS])
def test_a_few_cases(server, tmp_path, kind, cases):
    check(run(server, tmp_path, kind, cases))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("kind", "cases"), [(kind, all_of_them) for kind, _, all_of_them in KINDS])
def test_all_cases(server, tmp_path, kind, cases):
    check(run(server, tmp_path, kind, cases))


@pytest.mark.parametrize(
    ("agent", "backend", "kills"),
    [
        ("ppo", "torch", 20),
        *(
            pytest.param(agent, backend, 8, marks=[pytest.mark.slow, pytest.mark.timeout(900)])
            for agent in ("dqn", "ppo", "pqn", "sac")
            for backend in ("torch", "jax")
        ),
    ],
)
def test_kills_at_random_moments_change_nothing(server, tmp_path, agent, backend, kills):
    done = kill.trial(server, agent, backend, kills, random.Random(0), tmp_path / "runs")
    assert done.kills.total() == kills and {*done.kills} == {*kill.MOMENTS}
    assert done.differences == []


def test_a_run_that_came_to_another_end_is_found(server, tmp_path):
    runs = kill.Runs(server, "ppo", "torch", tmp_path / "runs")
    for name in ("one", "same"):
        runs.undisturbed(name)
    one, same = tmp_path / "runs" / "one", tmp_path / "runs" / "same"
    assert kill.difference(one, same) is None
    path = one / "metrics.jsonl"
    whole = path.read_text()
    path.write_text(whole[: whole[:-1].rindex("\n") + 1])
    assert kill.difference(one, same) == "rows of metrics.jsonl"
    path.write_text(whole)
    arrays = kill.load_file(one / "policy.safetensors")
    name = next(iter(arrays))
    save_file(arrays | {name: np.nextafter(arrays[name], np.float32(9))}, one / "policy.safetensors")
    assert kill.difference(one, same) == f"{name} in the policy"


def test_a_command_hears_what_it_is_started_with(server, tmp_path):
    def said(*argv, **how):
        ended = server.run(Command(argv, str(tmp_path), str(tmp_path / "out"), str(tmp_path / "err"), **how), 60)
        return ended.code, (Path(tmp_path) / "out").read_text(), (Path(tmp_path) / "err").read_text()

    code, out, err = said("envs")
    assert (code, err) == (0, "") and "CartPole-v1" in out
    assert said("envs", imports=True) == (code, out, err)
    assert said("evns") == (2, "", "rlgraph: unknown command 'evns'; did you mean 'envs'?\n")
