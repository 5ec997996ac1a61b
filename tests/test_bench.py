"""The benchmark: what it checks, how it times, what it writes."""

import copy
import importlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlgraph.bench import harness, report, results
from rlgraph.bench.provenance import provenance
from rlgraph.bench.variants import VARIANTS, Workload, disagreement
from rlgraph.cli.main import main

TESTS = Path(__file__).parent
FAKES = ["--modules", "bench_fakes", "--num-envs", "8", "--num-steps", "10", "--device", "cpu"]


def bench(tmp_path, *options, expect=0, name="result.json"):
    path = tmp_path / name
    assert main(["bench", *FAKES, "--out", str(path), *options]) == expect
    return results.read(path)


@pytest.fixture
def quick_workers(monkeypatch, quick_environment):
    """Processes of variants compile JAX's programs without polish."""
    for name, value in quick_environment.items():
        monkeypatch.setenv(name, value)


def by_name(content):
    return {row["variant"]: row for row in content["rows"]}


@pytest.fixture(scope="module")
def fakes(tmp_path_factory):
    """One run over all the fakes."""
    names = "fake-eager,fake-good,fake-wrong,fake-wrong-means,fake-frozen,fake-raises,fake-dies,fake-gpu,fake-peer"
    names += ",fake-training,fake-unchecked"
    options = ("--variants", names, "--columns", "env", "--repeats", "3", "--build-jobs", "2")
    return bench(tmp_path_factory.mktemp("bench"), *options, expect=1)


def test_a_good_variant_is_timed(fakes):
    row = by_name(fakes)["fake-good"]
    assert row["status"] == "ok"
    assert row["seconds"] == [0.06] * 3
    assert row["us_per_step"] == pytest.approx(6000)
    assert row["steps_per_second"] == pytest.approx(8 * 10 / 0.06)
    assert row["graph_launches"] == 1
    assert not row["wide_spread"]


@pytest.mark.parametrize(
    ("name", "status", "reason"),
    [
        ("fake-wrong", "wrong", "obs differs from fake-eager by"),
        ("fake-wrong-means", "wrong", "mean reward is"),
        ("fake-frozen", "wrong", "two runs drew the same random numbers"),
        ("fake-raises", "failed", "RuntimeError: this variant always fails"),
        ("fake-unchecked", "failed", "its reference fake-raises failed: RuntimeError: this variant always fails ("),
        ("fake-dies", "failed", "its process died with exit code 3"),
        ("fake-gpu", "skipped", "needs an NVIDIA GPU"),
        ("fake-peer", "skipped", "not installed: no_such_package"),
        ("fake-training", "skipped", "does not measure column env"),
    ],
)
def test_every_other_one_is_listed_with_the_reason(fakes, name, status, reason):
    row = by_name(fakes)[name]
    assert (row["status"], row["reason"][: len(reason)]) == (status, reason)
    assert row["status"] != "wrong" or row["seconds"] == []


def test_why_a_reference_failed_that_is_not_measured_itself_is_kept(tmp_path):
    options = ("--variants", "fake-unchecked", "--columns", "env", "--repeats", "1")
    row = by_name(bench(tmp_path, *options, expect=1))["fake-unchecked"]
    assert row["status"] == "failed"
    reason = r"its reference fake-raises failed: RuntimeError: this variant always fails \(.*bench_fakes\.py:\d+\)"
    assert re.fullmatch(reason, row["reason"])


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ({"failed": "out of device memory"}, "its reference torch-eager failed: out of device memory"),
        ({"skipped": "no such column"}, "its reference torch-eager was skipped: no such column"),
        ({}, "its reference torch-eager did not run"),
    ],
)
def test_what_cannot_be_checked_says_what_became_of_its_reference(answer, reason):
    assert harness._nothing_to_check_against("torch-eager", answer) == reason


def test_wrong_dynamics_are_caught(tmp_path):
    options = ("--variants", "heavy-cartpole", "--columns", "env", "--repeats", "1")
    row = by_name(bench(tmp_path, *options, expect=1))["heavy-cartpole"]
    assert row["status"] == "wrong"
    assert "obs differs from torch-eager" in row["reason"]


def test_variants_take_turns(tmp_path, monkeypatch):
    log = tmp_path / "log"
    monkeypatch.setenv("BENCH_FAKES_LOG", str(log))
    bench(tmp_path, "--variants", "fake-eager,fake-good", "--columns", "env", "--repeats", "4")
    runs = log.read_text().split()
    start = len(runs) - runs[::-1].index("fake-good") - 2 * (4 + 2) - 1  # two warm-up rounds, then four; 1 to count
    timed = runs[start - 1 : -2]
    assert timed == ["fake-eager", "fake-good"] * 6
    # Everything was prepared and checked (three runs each) before that.
    assert sorted(runs[: start - 1]) == ["fake-eager"] * 3 + ["fake-good"] * 3


def test_a_long_repeat_is_timed_by_fewer_of_its_steps(fakes, tmp_path):
    content = bench(tmp_path, "--variants", "fake-long", "--columns", "env", "--repeats", "2")
    row = by_name(content)["fake-long"]
    assert row["status"] == "ok"
    assert row["steps_timed"] == 8  # of ten: what fits in a second where all take 1.25
    assert row["seconds"] == [pytest.approx(1.0)] * 2  # scaled up to all ten steps of 0.1 s
    assert by_name(fakes)["fake-good"]["steps_timed"] == 10


def test_what_finds_no_memory_beside_the_others_is_timed_alone(tmp_path, monkeypatch):
    log = tmp_path / "log"
    monkeypatch.setenv("BENCH_FAKES_LOG", str(log))
    content = bench(tmp_path, "--variants", "fake-good,fake-hungry", "--columns", "env", "--repeats", "2")
    row = by_name(content)["fake-hungry"]
    assert row["status"] == "ok"
    assert row["seconds"] == [0.06] * 2
    assert row["reason"].startswith("timed alone")
    assert log.read_text().split()[-7:] == ["fake-hungry"] * 7  # after the others: three to prepare, four in turn, one
    assert "fake-hungry (alone)" in report.markdown(content)


@pytest.mark.parametrize(
    ("names", "columns"),
    [
        ("torch-eager,gymnasium,torch-graph", "policy,train"),
        ("jax-scan-no-graph,jax-jit", "env"),  # training op by op takes minutes here
    ],
)
def test_real_variants_agree_and_are_timed(tmp_path, names, columns, quick_workers):
    # Operation by operation, which is what the others are checked against, JAX compiles each operation: few steps.
    options = ("--num-steps", "2", "--num-epochs", "1", "--num-minibatches", "1", "--repeats", "2", "--build-jobs", "2")
    content = bench(tmp_path, "--variants", names, "--columns", columns, *options)
    for row in content["rows"]:
        if row["variant"] == "torch-graph":
            assert row["status"] == "skipped"
            continue
        assert row["status"] == "ok", row["reason"]
        assert row["median_s"] > 0
        assert row["import_s"] > 0
        assert row["first_call_s"] > 0


def test_the_example_in_the_docs_runs(tmp_path, monkeypatch):
    text = (TESTS.parent / "docs" / "benchmarks.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(example.split("@variant")[1].splitlines()) < 20  # a registration is short
    (tmp_path / "my_variants.py").write_text(example)
    monkeypatch.syspath_prepend(tmp_path)
    path = tmp_path / "r.json"
    words = ["bench", "--modules", "my_variants", "--variants", "make-vec", "--columns", "env", "--num-envs", "32"]
    assert main([*words, "--num-steps", "64", "--repeats", "2", "--device", "cpu", "--out", str(path)]) == 0
    assert by_name(results.read(path))["make-vec"]["status"] == "ok"


def test_the_file_is_checked_field_by_field(fakes):
    results.check(fakes, "good")
    for field in results.FILE:
        broken = {k: v for k, v in fakes.items() if k != field}
        with pytest.raises(ValueError, match=f"lacks '{field}'"):
            results.check(broken, "file")
    ok = next(i for i, row in enumerate(fakes["rows"]) if row["status"] == "ok")
    for field in (*results.ROW, *results.TIMED, *results.COUNTED):
        broken = copy.deepcopy(fakes)
        del broken["rows"][ok][field]
        with pytest.raises(ValueError, match=f"lacks '{field}'"):
            results.check(broken, "file")
    broken = copy.deepcopy(fakes)
    broken["rows"][ok]["median_s"] = "fast"
    with pytest.raises(ValueError, match="'median_s' is str, not float"):
        results.check(broken, "file")


def test_provenance_says_where_the_figures_come_from(fakes):
    where = fakes["provenance"]
    assert where["versions"]["torch"]
    assert where["device"]
    assert where["date"].endswith("+00:00")
    assert fakes["command"].startswith("rlgraph bench --modules bench_fakes")
    assert fakes["settings"]["repeats"] == 3


def test_a_place_on_the_machine_is_no_flag(monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "somewhere")
    monkeypatch.setenv("TORCHINDUCTOR_MAX_AUTOTUNE", "1")
    flags = provenance()["flags"]
    assert flags["TORCHINDUCTOR_MAX_AUTOTUNE"] == "1" and "TORCHINDUCTOR_CACHE_DIR" not in flags


def test_an_earlier_result_is_not_written_over(tmp_path, capsys):
    (tmp_path / "result.json").write_text("mine")
    assert main(["bench", *FAKES, "--out", str(tmp_path / "result.json")]) == 2
    assert "exists" in capsys.readouterr().err
    assert (tmp_path / "result.json").read_text() == "mine"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--variants", "torch-eagr"], "unknown variant 'torch-eagr'; did you mean 'torch-eager'?"),
        (["--variants", ","], "name at least one variant"),
        (["--columns", "polcy"], "unknown column 'polcy'; did you mean 'policy'?"),
        (["--num-envs", "4,x"], "num_envs must be whole numbers"),
        (["--num-envs", "0"], "num_envs must be numbers of at least 1"),
        (["--env", "CartPol-v1"], "did you mean 'CartPole-v1'?"),
        (["--agent", "pp"], "unknown agent 'pp'; did you mean 'ppo'?"),
        (["--repeats", "0"], "repeats must be at least 1"),
        (["--num-steps", "-1"], "num_steps must be at least 0"),
        (["--modules", "no_such_module"], "cannot import variants from 'no_such_module'"),
        (["--precision", "fp8"], "fp8"),
        (["--num-minibatches", "7"], "does not divide"),
        (["--varants", "x"], "did you mean --variants?"),
        (["report"], ""),
        (["report", "nothing.json"], "no result file 'nothing.json'"),
    ],
)
def test_wrong_options_get_one_line(tmp_path, monkeypatch, capsys, options, message):
    monkeypatch.chdir(tmp_path)
    assert main(["bench", *options]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_ctrl_c_keeps_what_was_measured(tmp_path):
    path, log = tmp_path / "r.json", tmp_path / "log"
    command = [sys.executable, "-m", "rlgraph", "bench", *FAKES, "--variants", "fake-eager,fake-slow"]
    environment = {**os.environ, "PYTHONPATH": str(TESTS), "BENCH_FAKES_LOG": str(log)}
    options = ["--columns", "env", "--repeats", "1000", "--out", str(path)]
    run = subprocess.Popen(
        [*command, *options], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path
    )
    deadline = time.monotonic() + 120
    # Each runs three times to be prepared, then twice in turn to warm up: in its eighth run two repeats are timed.
    while not log.is_file() or log.read_text().split().count("fake-slow") < 8:
        assert run.poll() is None, run.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    run.send_signal(signal.SIGINT)
    out, err = run.communicate(timeout=60)
    assert run.returncode == 130, err
    assert "Traceback" not in err
    assert "interrupted" in out
    content = results.read(path)
    assert content["interrupted"]
    for row in content["rows"]:
        assert row["status"] == "interrupted"
        assert len(row["seconds"]) >= 1


def timed(content, factor=1.0, spread=0.01):
    """The same file with one variant's times scaled."""
    changed = copy.deepcopy(content)
    for row in changed["rows"]:
        if row["seconds"]:
            scale = factor if row["variant"] == "fake-good" else 1.0
            row["median_s"] *= scale
            row["us_per_step"] *= scale
            row["min_s"], row["max_s"] = row["median_s"] * (1 - spread), row["median_s"] * (1 + spread)
    return changed


@pytest.mark.parametrize(
    ("factor", "spread", "verdict"),
    [(1.2, 0.01, "slower"), (0.8, 0.01, "faster"), (1.02, 0.01, ""), (1.2, 0.15, "")],
)
def test_comparing_two_files_marks_what_goes_beyond_the_noise(fakes, factor, spread, verdict):
    lines = report.compare(timed(fakes, 1.0, spread), timed(fakes, factor, spread)).splitlines()
    (line,) = [line for line in lines if "fake-good" in line]
    assert line.split("|")[-2].strip() == verdict
    (same,) = [line for line in lines if "fake-eager" in line]
    assert same.split("|")[-2].strip() == ""


def test_the_report_has_tables_a_comparison_and_plots(fakes, tmp_path, capsys):
    paths = []
    for name, content in (("old", timed(fakes)), ("new", timed(fakes, 1.5))):
        paths.append(tmp_path / f"{name}.json")
        results.write(paths[-1], content)
    assert main(["bench", "report", *map(str, paths), "--out", str(tmp_path / "plots")]) == 0
    text = capsys.readouterr().out
    assert "| fake-good |" in text
    assert "slower" in text
    assert "not installed: no_such_package" in text
    assert {p.name for p in (tmp_path / "plots").iterdir()} == {
        "throughput.svg",
        "throughput.png",
        "step-time.svg",
        "step-time.png",
    }
    drawn = (tmp_path / "plots" / "throughput.svg").read_text()
    assert drawn.count("<path") > 10
    assert main(["bench", "report", *map(str, paths), "--out", str(tmp_path / "again")]) == 0
    assert (tmp_path / "again" / "throughput.svg").read_text() == drawn


def row_of(variant, num_envs, us_per_step, status="ok"):
    seconds = [] if us_per_step is None else [us_per_step]
    row = {"variant": variant, "column": "env", "num_envs": num_envs, "status": status, "seconds": seconds}
    return row | ({"us_per_step": us_per_step} if seconds else {})


def drawn(*files):
    rows = report.drawn([{"rows": rows} for rows in files])
    return {(row["variant"], row["num_envs"]): row["us_per_step"] for row in rows}


@pytest.mark.parametrize("status", ["failed", "wrong", "skipped", "interrupted"])
def test_plots_draw_the_last_file_that_timed_a_cell(status):
    old, new = [row_of("a", 1, 10.0), row_of("b", 1, 20.0)], [row_of("a", 1, 11.0), row_of("b", 1, None, status)]
    assert drawn(old, new) == {("a", 1): 11.0, ("b", 1): 20.0}
    assert drawn(new, old) == {("a", 1): 10.0, ("b", 1): 20.0}


@pytest.mark.parametrize("status", ["failed", "interrupted"])
def test_plots_draw_a_cell_that_was_cut_only_where_no_other_file_has_it_whole(status):
    whole, cut = [row_of("a", 1, 10.0)], [row_of("a", 1, 99.0, status)]
    assert drawn(whole, cut) == drawn(cut, whole) == {("a", 1): 10.0}
    assert drawn(cut) == {("a", 1): 99.0}


def test_bars_show_the_size_that_most_variants_were_timed_at_however_many_files_have_it():
    """Two variants at 16; one at 4096, in three files."""
    from matplotlib import pyplot

    files = [[row_of("a", 16, 10.0), row_of("b", 16, 20.0)], *([row_of("a", 4096, 30.0)] for _ in range(3))]
    figure, axis = pyplot.subplots()
    report._draw_step_time(axis, report.drawn([{"rows": rows} for rows in files]), ["a", "b"])
    assert [bar.get_width() for bar in axis.patches] == [20.0, 10.0]
    pyplot.close(figure)


def test_ratios_are_to_the_backends_own_eager_mode():
    eager = {"variant": "torch-eager", "backend": "torch", "seconds": [1], "steps_per_second": 10.0}
    graph = {"variant": "torch-graph", "backend": "torch", "seconds": [1], "steps_per_second": 150.0}
    peer = {"variant": "gymnasium", "backend": "gymnasium", "seconds": [1], "steps_per_second": 5.0}
    assert report.ratio(graph, [eager, graph, peer]) == 15
    assert report.ratio(peer, [eager, graph, peer]) is None
    assert report.ratio(graph, [graph]) is None


def test_json_is_plain(fakes):
    assert json.loads(json.dumps(fakes)) == fakes


@pytest.mark.gpu
def test_on_a_gpu_graphs_are_counted_and_launches_measured(tmp_path):
    path = tmp_path / "r.json"
    names = "torch-eager,torch-graph,torch-compile+graph,jax-eager,jax-scan,jax-scan-no-graph"
    words = ["bench", "--variants", names, "--columns", "policy", "--num-envs", "256", "--num-steps", "32"]
    assert main([*words, "--repeats", "3", "--build-jobs", "5", "--out", str(path)]) == 0
    content = results.read(path)
    assert {row["status"] for row in content["rows"]} == {"ok"}
    launches = {name: row["graph_launches"] for name, row in by_name(content).items()}
    assert launches["torch-eager"] == launches["jax-scan-no-graph"] == 0
    assert launches["torch-graph"] == launches["torch-compile+graph"] > 0
    assert launches["jax-scan"] > 0
    overhead = content["launch_overhead"]
    assert 0 < overhead["replay_gpu_us_per_kernel"] < overhead["eager_us_per_kernel"] < 100
    assert [set(rule) for rule in overhead["rules"]] == [{"rule", "verdict", "here"}] * 4


def test_a_reference_that_a_later_cell_runs_is_there_for_an_earlier_one(tmp_path):
    """Two environments are checked on 64 (see CHECKED_ENVS), which is the second cell's size."""
    options = ("--variants", "fake-eager,fake-other-draws", "--columns", "env", "--repeats", "2", "--num-envs", "2,64")
    content = bench(tmp_path, *options)
    assert [(row["num_envs"], row["status"]) for row in content["rows"]] == [(2, "ok")] * 2 + [(64, "ok")] * 2


METRICS = {  # of a PPO iteration, about as they are at first
    "policy_loss": -0.005,
    "value_loss": 20.0,
    "entropy": 0.69,
    "approx_kl": 0.01,
    "clip_fraction": 0.1,
    "grad_norm": 0.5,
    "learning_rate": 2.5e-4,
    "updates": 16.0,
    "episode_return_sum": 5e5,
    "episode_length_sum": 5e5,
    "episodes": 22_000.0,
}


@pytest.mark.parametrize(
    ("name", "value"),
    [("policy_loss", 5.0), ("value_loss", 25.0), ("grad_norm", 0.6), ("updates", 0.0), ("episodes", 15_000.0)],
)
def test_a_wrong_update_is_seen_beside_large_sums(name, value):
    variant = harness.table()["torch-graph"]
    right = {"metrics": list(METRICS.values())}
    wrong = {"metrics": list((METRICS | {name: value}).values())}
    assert disagreement(variant, right, right) is None
    assert "metrics differs from torch-eager" in disagreement(variant, wrong, right)
    assert "metrics differs" in disagreement(variant, {"metrics": [float("nan")] * 11}, right)


@pytest.mark.parametrize(("agent", "env"), [("dqn", "CartPole-v1"), ("pqn", "Acrobot-v1"), ("sac", "Pendulum-v1")])
@pytest.mark.parametrize("num_envs", [1, 1024, 1_048_576])
def test_every_agent_can_be_measured_at_every_size(agent, env, num_envs):
    work = Workload("train", env, num_envs, 128, agent=agent)
    config = work.training_config("torch", "eager")
    assert (config.num_envs, config.num_steps) == (num_envs, 128)
    assert config.num_iterations == 10**6


@pytest.mark.parametrize("env", ["CartPole-v1", "Pendulum-v1"])
def test_random_actions_are_recorded_as_a_policys_are_where_values_come_in_parts(env, monkeypatch):
    importlib.import_module("rlgraph.bench.torch_variants")  # which registers them
    monkeypatch.setattr("rlgraph.rollout.torch.VALUE_ROWS", 40)
    prepared = VARIANTS["torch-eager"].prepare(Workload("env", env, 8, 13))
    prepared.seconds()
    assert prepared.outcome()["obs"].shape[1] == 8
