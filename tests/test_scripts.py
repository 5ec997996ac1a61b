"""The scripts that train many seeds and draw their learning curves; what they start and read is made up here."""

import argparse
import importlib.util
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from rlgraph.bench.results import count, errors_in_a_line

SCRIPTS = Path(__file__).parents[1] / "scripts"
COMMAND = "python scripts/seeds.py ppo --env CartPole-v1 --backend torch --seeds 3 --jobs 1"
# Of three seeds; the second ends no episode in the third iteration, the third none in the first.
SEEDS = [[10, 20, 30, 40], [11, 25, None, 50], [None, 30, 60, 60]]


def script(name):
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# ---- seeds.py


def write_run(command, rows):
    """What `rlgraph train` leaves; the seed raises all its figures."""
    seed = int(command[command.index("--seed") + 1])
    folder = Path(command[command.index("--run-dir") + 1])
    folder.mkdir(parents=True)
    result = {"eval_return_mean": 100.0 + seed, "steps": 8 * rows, "train_seconds": 1.0, "setup_seconds": 2.0}
    (folder / "result.json").write_text(json.dumps(result))
    (folder / "versions.json").write_text(json.dumps({"torch": "1"}))
    returns = [None if i % 2 else seed + i / 7 for i in range(rows)]
    lines = [json.dumps({"step": 8 * (i + 1), "loss": None, "episode_return": x}) for i, x in enumerate(returns)]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return SimpleNamespace(returncode=0)


@pytest.mark.parametrize(("rows", "every"), [(3, 1), (130, 1), (131, 2), (400, 4)])
def test_every_seeds_curve_is_written_thinned_where_it_is_long(tmp_path, monkeypatch, rows, every):
    seeds, out = script("seeds"), tmp_path / "out.json"
    monkeypatch.setattr(seeds, "subprocess", SimpleNamespace(run=lambda command, **_: write_run(command, rows)))
    words = ["seeds.py", "ppo", "--env", "CartPole-v1", "--seeds", "2", "--out", str(out), "--", "--device", "cpu"]
    monkeypatch.setattr(sys, "argv", words)
    seeds.main()
    content = json.loads(out.read_text())
    kept = range((rows - 1) % every, rows, every)  # the last is one of them
    assert content["curve"] == {
        "step": [8 * (i + 1) for i in kept],
        "episode_return_per_seed": [[None if i % 2 else round(seed + i / 7, 1) for i in kept] for seed in range(2)],
    }
    assert content["command"].endswith("--backend torch --seeds 2 --jobs 1 -- --device cpu")
    assert (content["eval_return_per_seed"], content["eval_return_min"]) == ([100.0, 101.0], 100.0)
    assert content["versions"] == {"torch": "1"}
    assert len(out.read_text().splitlines()) < 30  # a curve is a line


# ---- train_in_one_launch.py


def test_every_seed_trained_in_one_launch_is_written_with_medians(tmp_path, monkeypatch, capsys):
    one_launch, out = script("train_in_one_launch"), tmp_path / "out.json"

    def train(config, env, target, eval_episodes):
        assert (config.mode, config.num_envs, target, eval_episodes) == ("fused", 8, 475, 100)
        names = ("iterations", "steps", "evaluations", "training_return", "deciding_return", "greedy_return", "build_s")
        figures = dict.fromkeys(names, 7 * config.seed) | {"training_return": float("nan")}
        return {"seed": config.seed, "solved": True, "seconds": 0.5, "host_us": 40.0, "one_launch": True, **figures}

    monkeypatch.setattr(one_launch, "train", train)
    words = ["--seed", "1", "--seeds", "3", "--num-envs", "8", "--commit", "abc", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["train_in_one_launch.py", *words])
    one_launch.main()
    content = json.loads(out.read_text())
    assert [row["seed"] for row in content["rows"]] == [1, 2, 3]
    assert (content["median"]["iterations"], content["median"]["host_us"], content["target"]) == (14, 40, 475)
    assert content["rows"][0]["training_return"] is None
    assert content["command"] == "python scripts/train_in_one_launch.py --seed 1 --seeds 3 --num-envs 8 --commit abc"
    assert len([line for line in capsys.readouterr().out.splitlines() if " yes " in line]) == 3

    monkeypatch.setattr(sys, "argv", ["train_in_one_launch.py", "--env", "Pendulum-v1"])
    with pytest.raises(SystemExit, match="2"), errors_in_a_line():
        one_launch.main()
    assert "error: environment 'Pendulum-v1' does not say what counts as solved" in capsys.readouterr().err


def test_a_seed_is_written_before_the_next_one(tmp_path, monkeypatch):
    one_launch, out = script("train_in_one_launch"), tmp_path / "out.json"

    def train(config, env, target, eval_episodes):
        if config.seed == 1:
            raise KeyboardInterrupt
        names = ("solved", "seconds", "host_us", "iterations", "evaluations", "deciding_return", "greedy_return")
        return {"seed": config.seed, "one_launch": True, **dict.fromkeys(names, 7)}

    monkeypatch.setattr(one_launch, "train", train)
    monkeypatch.setattr(sys, "argv", ["train_in_one_launch.py", "--seeds", "2", "--out", str(out)])
    with pytest.raises(KeyboardInterrupt):
        one_launch.main()
    assert [row["seed"] for row in json.loads(out.read_text())["rows"]] == [0]


@pytest.mark.parametrize("name", ["graph_parts", "train_in_one_launch", "host_time", "kernel_times", "seeds"])
@pytest.mark.parametrize(("out", "said"), [("missing/out.json", "no folder"), ("", "is a folder")])
def test_a_file_that_cannot_be_written_is_found_out_before_measuring(tmp_path, monkeypatch, capsys, name, out, said):
    words = ["ppo", "--env", "CartPole-v1"] if name == "seeds" else []
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *words, "--out", str(tmp_path / out)])
    with pytest.raises(SystemExit, match="2"):
        script(name).main()
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("text", ["0", "-1", "x", "1.5"])
def test_a_count_that_makes_no_sense_is_an_error(text):
    with pytest.raises(argparse.ArgumentTypeError, match="no whole number"):
        count(text)


# ---- plot_learning.py


def write_curves(path, returns, step=(8, 16, 24, 32), command=COMMAND):
    curve = {"step": list(step), "episode_return_per_seed": returns}
    path.write_text(json.dumps({"command": command, "curve": curve}))
    return str(path)


def plot(monkeypatch, *words):
    plot_learning = script("plot_learning")
    monkeypatch.setattr(sys, "argv", ["plot_learning.py", *words])
    plot_learning.main()


@pytest.fixture
def figure():
    """The one that was drawn."""
    from matplotlib import pyplot

    yield pyplot.gcf
    pyplot.close("all")


def test_a_line_is_the_median_and_the_band_the_range_of_seeds(tmp_path, monkeypatch, figure, capsys):
    """From the point on where every seed has ended an episode; where one ends none, its last return goes on."""
    eager = write_curves(tmp_path / "eager.json", SEEDS)
    fused = write_curves(tmp_path / "fused.json", [[30] * 3], step=(16, 24, 40))
    other = COMMAND.replace("CartPole", "Pendulum")
    pendulum = write_curves(tmp_path / "pendulum.json", [[None, None, -1, -2]], command=other)
    words = ("CartPole-v1", f"eager={eager}", f"fused={fused}", "Pendulum-v1", f"eager={pendulum}")
    out = tmp_path / "learning.svg"
    plot(monkeypatch, "--out", str(out), *words)

    left, right = figure().axes
    assert (left.get_title(), right.get_title()) == ("CartPole-v1", "Pendulum-v1")
    assert [text.get_text() for text in left.get_legend().get_texts()] == ["eager, 3 seeds", "fused, 1 seeds"]
    np.testing.assert_array_equal(left.lines[0].get_xydata(), [[16, 25], [24, 30], [32, 50]])
    band = left.collections[0].get_paths()[0].vertices
    for step, least, greatest in ((16, 20, 30), (24, 25, 60), (32, 40, 60)):
        at = band[band[:, 0] == step, 1]
        assert (at.min(), at.max()) == (least, greatest)
    np.testing.assert_array_equal(right.lines[0].get_xydata(), [[24, -1], [32, -2]])
    # At 16, 30 lies within 20 to 30, but 25 is not 30; at 24, all agree; the other points are not of both.
    assert capsys.readouterr().out.splitlines() == [
        "CartPole-v1: median of eager within the range of fused at 1 of 2 points (50%); "
        "median of fused within the range of eager at 2 of 2 points (100%)",
        "Pendulum-v1: one mode, nothing to compare",
    ]

    first = out.read_bytes()
    plot(monkeypatch, "--out", str(out), *words)
    assert out.read_bytes() == first


@pytest.mark.parametrize(
    ("content", "words", "said"),
    [
        (None, "CartPole-v1 eager=FILE", "cannot read 'FILE': No such file or directory"),
        ("{", "CartPole-v1 eager=FILE", "'FILE' holds no learning curves"),
        ("[]", "CartPole-v1 eager=FILE", "'FILE' holds no learning curves"),
        ({"command": COMMAND}, "CartPole-v1 eager=FILE", "'FILE' holds no learning curves"),
        ([[1, 2], [1]], "CartPole-v1 eager=FILE", "'FILE' holds no learning curves"),
        ([[1, 2]], "CartPole-v1 eager=FILE", "'FILE' is damaged: 4 steps, but returns of shape (1, 2)"),
        ([[None] * 4], "CartPole-v1 eager=FILE", "in 'FILE' some seed has ended no episode"),
        (SEEDS, "Pendulum-v1 eager=FILE", "'FILE' is not of Pendulum-v1"),
        (SEEDS, "eager=FILE", "name an environment before 'eager=FILE'"),
        (SEEDS, "CartPole-v1 Pendulum-v1 eager=FILE", "'CartPole-v1' has no curve"),
        (SEEDS, "CartPole-v1 eager=FILE --out FILE.doc", "cannot write 'FILE.doc'"),
    ],
)
def test_mistakes_are_told_in_a_line(tmp_path, monkeypatch, content, words, said):
    file = tmp_path / "curves.json"
    if isinstance(content, list):
        write_curves(file, content)
    elif content is not None:
        file.write_text(content if isinstance(content, str) else json.dumps(content))
    words = words.replace("FILE", str(file)).split()
    with pytest.raises(SystemExit) as error:
        plot(monkeypatch, "--out", str(tmp_path / "x.svg"), *words)
    assert str(error.value).startswith(f"plot_learning: {said.replace('FILE', str(file))}")
    assert "\n" not in str(error.value)
