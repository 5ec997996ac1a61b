"""The command as a process: streams closed or full, Ctrl-C while it loads, warnings, refusals, memory that runs out."""

import json
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from safetensors.numpy import load_file

import rlgraph.agents.dqn.jax
import rlgraph.agents.ppo.torch
import rlgraph.bench.solve
import rlgraph.cli.graph_show
from rlgraph.cli.main import COMMANDS, main
from rlgraph.errors import CaptureError
from rlgraph.graph.capture import _say_once_that_nothing_is_captured

SIZES = {"num-envs": 4, "num-steps": 16, "num-minibatches": 2, "num-epochs": 1, "hidden": 8, "eval-episodes": 2}
TINY = ["--device=cpu", *(f"--{name}={value}" for name, value in SIZES.items()), "--total-steps=64"]
HEARS_CTRL_C = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)\n"


def shell(line: str, cwd: Path) -> subprocess.CompletedProcess:
    """A command line with its redirections; `rlgraph` is this one."""
    line = line.replace("rlgraph", f"{sys.executable} -m rlgraph", 1)
    return subprocess.run(line, shell=True, cwd=cwd, capture_output=True, text=True, check=False)


# ---- streams


@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        ("rlgraph envs >&-", 0, ""),
        ("rlgraph envs <&- >&- 2>&-", 0, ""),
        ("rlgraph env >&-", 2, "rlgraph: unknown command 'env'; did you mean 'envs'?\n"),
        ("rlgraph env 2>&-", 2, ""),
        ("rlgraph envs >/dev/full", 1, "rlgraph: cannot write or read stdout or a file: No space left on device\n"),
        ("rlgraph --help >/dev/full", 1, "rlgraph: cannot write or read stdout or a file: No space left on device\n"),
        ("rlgraph env 2>/dev/full", 2, ""),
    ],
)
def test_a_stream_that_takes_nothing(line, code, said, tmp_path):
    done = shell(line, tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (code, "", said)


def test_stderr_may_be_closed_where_all_is_well(tmp_path):
    done = shell("rlgraph envs 2>&-", tmp_path)
    assert done.returncode == 0 and "CartPole-v1" in done.stdout


def test_a_run_without_streams_is_whole(tmp_path):
    """Nothing that is printed goes into a file that has got the number of a closed stream."""
    done = shell(f"rlgraph train ppo {' '.join(TINY)} --run-dir run --mode graph <&- >&- 2>&-", tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    run = tmp_path / "run"
    assert {path.name for path in tmp_path.iterdir()} == {"run"}
    for name in ("config.json", "result.json", "versions.json"):
        assert json.loads((run / name).read_text())
    assert [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()] == [64]
    assert load_file(run / "policy.safetensors") and (run / "lock").read_bytes() == b""


def test_a_program_without_streams_may_call_it(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    assert main(["envs"]) == 0
    assert main(["env"]) == 2


def test_code_that_ends_the_program_is_no_success(monkeypatch, capsys):
    monkeypatch.setitem(COMMANDS, "envs", lambda argv: sys.exit(0))
    assert main(["envs"]) == 1
    assert capsys.readouterr().err == "rlgraph: an environment's or other imported code called sys.exit(0)\n"


# ---- Ctrl-C

PRESSED_AT_AN_IMPORT = (
    HEARS_CTRL_C
    + """
class Press:
    def find_spec(self, name, path=None, target=None):
        if name == MODULE:
            sys.meta_path.remove(self)
            PRESS()

sys.meta_path.insert(0, Press())
from rlgraph.cli.main import main
sys.argv[1:] = WORDS.split()
sys.exit(main())
"""
)
PRESS = "signal.raise_signal(signal.SIGINT)"
# Python prints what a destructor raises, and goes on.
PRESS_IN_A_DESTRUCTOR = "type('Falls', (), {'__del__': lambda self: signal.raise_signal(signal.SIGINT)})()"


# As numpy does with one that falls into its own loading.
PRESS_TAKEN_FOR_ANOTHER_ERROR = """
            try:
                signal.raise_signal(signal.SIGINT)
            except KeyboardInterrupt:
                raise ImportError("of something that is there")"""


@pytest.mark.parametrize(
    "press",
    [PRESS, PRESS_IN_A_DESTRUCTOR, PRESS_TAKEN_FOR_ANOTHER_ERROR],
    ids=["plain", "lost in a destructor", "taken for another error"],
)
@pytest.mark.parametrize(
    ("words", "module"),
    [
        ("envs", "numpy"),
        ("envs", "rich.table"),
        ("eval run", "gymnasium"),
        ("bench", "torch"),
        ("train ppo --backend jax", "jax"),
    ],
)
def test_ctrl_c_while_it_loads_is_one_line(words, module, press, tmp_path):
    script = PRESSED_AT_AN_IMPORT.replace("MODULE", repr(module)).replace("WORDS", repr(words))
    done = subprocess.run(
        [sys.executable, "-c", script.replace("PRESS()", press)], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 130, done.stderr
    assert done.stderr.removesuffix("; no policy was saved\n").rstrip("\n") == "rlgraph: interrupted"
    assert done.stdout == "" and not list(tmp_path.iterdir())


def test_importing_the_command_imports_no_library():
    libraries = "'numpy', 'gymnasium', 'rich', 'tyro', 'torch', 'jax'"
    script = f"import sys, rlgraph.cli.main\nprint(*{{{libraries}}} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", script], text=True).strip() == ""


# ---- warnings


def test_a_warning_is_one_line_for_the_command_and_a_warning_for_a_program(monkeypatch, capsys):
    def warn(argv):
        for message in ("one\n  line", "another"):
            warnings.warn(message, stacklevel=1)
        return 0

    monkeypatch.setitem(COMMANDS, "envs", warn)
    for _ in range(2):
        assert main(["envs"]) == 0
        assert capsys.readouterr().err == "rlgraph: one line\nrlgraph: another\n"
    with pytest.warns(UserWarning, match="another"), pytest.warns(UserWarning, match="one"):
        warn([])


def test_a_graph_mode_without_a_gpu_is_said_in_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    _say_once_that_nothing_is_captured.cache_clear()
    assert main(["train", "ppo", *TINY, "--mode", "graph"]) == 0
    said = "rlgraph: no CUDA graph on cpu: the function is run directly, with the same buffers\n"
    assert capsys.readouterr().err == said


# ---- refusals


@pytest.mark.parametrize(
    "words",
    [
        "ppo --mode grph",
        "ppo --device cuda:99",
        "ppo --run-dir a/b/c --mode grph",
        f"ppo --run-dir a/b/{'c' * 300}",
        "ppo --run-dir /proc/x",
        "ppo --env .",
        "ppo --env=",
        "sac --env CartPole-v1",
        "dqn --env Pendulum-v1",
        "pqn --env Pendulum-v1 --backend jax",
        "ppo --backend jax --hidden 1000000 1000000",
        "dqn --backend jax --num-updates 2147483647 --minibatch-size 2147483647",
        "ppo --seed 1 --seed x",
        "ppo --num-envs=4=4",
        "ppo --clip-value none",
        "ppo -- --seed 3",
        "ppo --no-no-anneal-lr",
        f"ppo --seed {'9' * 5000}",
        f"ppo --{'a' * 5000}",
        f"ppo --env {'é' * 5000}",
        "--resume=",
        "--resume runs",
    ],
    ids=lambda words: words[:40],
)
def test_a_refusal_is_one_short_line_and_leaves_nothing(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["train", *words.split()]) in (1, 2)
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("rlgraph: ") and err.count("\n") == 1 and len(err) < 600
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("made", ["", "runs", "mine", "mine/run"])
def test_a_refusal_leaves_the_folders_that_were_there(made, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / made).mkdir(parents=True, exist_ok=True)
    before = sorted(tmp_path.rglob("*"))
    for words in ([], ["--run-dir", "mine/run"], ["--run-dir", "mine/run/deep"]):
        assert main(["train", "ppo", "--mode", "grph", *words]) == 2
        assert sorted(tmp_path.rglob("*")) == before


# ---- memory


@pytest.mark.parametrize(
    ("words", "module", "message", "advice"),
    [
        (
            "ppo",
            rlgraph.agents.ppo.torch,
            "[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory: you tried 400 TB",
            "lower --num-envs, --num-steps, --hidden or --eval-episodes",
        ),
        (
            "dqn --backend jax --env CartPole-v1",
            rlgraph.agents.dqn.jax,
            "RESOURCE_EXHAUSTED: Out of memory allocating 400 bytes",
            "lower --num-envs, --num-steps, --replay-capacity, --minibatch-size, --hidden or --eval-episodes",
        ),
    ],
)
def test_out_of_memory_names_options_of_the_agent(words, module, message, advice, tmp_path, monkeypatch, capsys):
    def fail(config, env):
        raise RuntimeError(message)

    monkeypatch.setattr(module, words.split()[0].upper(), fail)
    monkeypatch.chdir(tmp_path)
    assert main(["train", *words.split()]) == 1
    assert capsys.readouterr().err == f"rlgraph: out of memory: {advice}\n"
    assert list(tmp_path.iterdir()) == []


def out_of_memory(*args):
    raise MemoryError


def test_out_of_memory_names_options_of_the_command(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    said = {}

    def command(*words):
        assert main([*words]) == 1
        err = capsys.readouterr().err
        assert err.startswith("rlgraph: out of memory: ")
        said[" ".join(words[:2])] = err.removeprefix("rlgraph: out of memory: ").rstrip("\n")

    monkeypatch.setattr(rlgraph.cli.graph_show, "_check_that_a_graph_is_captured", lambda options: None)
    monkeypatch.setattr(rlgraph.cli.graph_show, "_info", out_of_memory)
    monkeypatch.setattr(rlgraph.bench.solve, "_measure", out_of_memory)
    monkeypatch.setattr("rlgraph.bench.cli._measure", out_of_memory)
    command("graph", "show", "--agent", "sac", "--env", "Pendulum-v1")
    command("bench", "solve", "pqn")
    command("bench", "--device=cpu")
    assert said == {
        "graph show": "lower --num-envs, --num-steps, --replay-capacity, --minibatch-size or --hidden",
        "bench solve": "lower --num-envs, --num-steps, --hidden or --eval-episodes",
        "bench --device=cpu": "lower --num-envs, --num-steps or --hidden",
    }


def test_out_of_memory_in_a_run_that_goes_on_or_is_played(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["train", "ppo", *TINY, "--run-dir", "run"]) == 0
    capsys.readouterr()
    monkeypatch.setattr("rlgraph.cli.commands.resume", out_of_memory)
    monkeypatch.setattr("rlgraph.cli.commands.evaluate_run", out_of_memory)
    assert main(["train", "--resume", "run"]) == 1
    assert "free some, or train anew with smaller sizes than those in run/config.json" in capsys.readouterr().err
    assert main(["eval", "run"]) == 1
    assert capsys.readouterr().err == "rlgraph: out of memory: lower --episodes\n"


def test_an_environment_of_ones_own_may_take_the_memory(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("rlgraph.cli.commands.train", out_of_memory)
    assert main(["train", "ppo", "--env", "my_env.py"]) == 1
    assert capsys.readouterr().err.endswith("--hidden, --eval-episodes or what my_env.py allocates\n")


def test_advice_to_run_without_a_graph_is_for_who_can_choose_the_mode(monkeypatch, capsys):
    def no_graph(*args):
        raise CaptureError("no graph")

    monkeypatch.setattr("rlgraph.cli.commands.train", no_graph)
    monkeypatch.setattr("rlgraph.cli.commands.resume", no_graph)
    for words, advice in (("train ppo", "; --mode eager runs without a graph"), ("train --resume run", "")):
        assert main(words.split()) == 1
        assert capsys.readouterr().err == f"rlgraph: no graph{advice}\n"
