"""A definition is tried before it is used: what is wrong is named with its line, and what is right passes."""

import re
from pathlib import Path

import numpy as np
import pytest
from environment_tools import definition_text, line_in

import rlgraph
from rlgraph.cli.main import main
from rlgraph.definition.errors import TRAPS
from rlgraph.definition.trial import check_on

ROOT = Path(__file__).parent.parent
TRAINING = [
    "--total-steps=64",
    "--num-envs=4",
    "--num-steps=8",
    "--num-minibatches=1",
    "--hidden=4",
    "--eval-episodes=2",
]
DIFFERS = "what step gives differs from call to call with the same arguments"
GLOBAL = "of its file differs from call to call"
OTHERS = "what step gives for one environment depends on the others"
UNIFORMS = "write instead: the uniforms passed in, or a leaf of `State`"


def file_of(tmp_path, *changes) -> Path:
    path = tmp_path / "cart.py"
    path.write_text(definition_text(*changes))
    return path


def refusal(path: Path, part: str, make=rlgraph.make) -> str:
    """The line that refuses a definition; it must name the line of its file that holds `part`."""
    with pytest.raises(rlgraph.UsageError) as error:
        make(str(path))
    text = str(error.value)
    assert "\n" not in text
    assert f"cart.py, line {line_in(path.read_text(), part)}: `" in text, text
    return text


def in_step(line: str, more: str = "") -> tuple[tuple[str, str], ...]:
    """A line in `step`, before what it returns; and more text at the end of the file."""
    return (("    pass\n", f"    {line}\n"), ("axis=-1)\n", f"axis=-1)\n{more}\n"))


NUMPY = [  # a line in `step`, what the file has besides, and what is said of it
    ("s.x[:] = 0", "", "assignment destination is read-only; write instead: `x = x \\+ v`"),
    ("y = s.x; y += 1", "", "output array is read-only"),
    ("u *= 2", "", "read-only"),
    ("x = x if x > 0 else -x", "", "write instead: `xp.where`; `a & b`"),
    ("global C; C += 1; x = x + C", "C = 0", DIFFERS),
    ("x = x + np.random.normal(size=x.shape).astype(np.float32)", "", f"{DIFFERS}.*{UNIFORMS}"),
    ("x = x + np.random.default_rng().random(dtype=np.float32)", "", DIFFERS),
    ("import random; x = x + random.random()", "", DIFFERS),
    ("import time; x = x + time.perf_counter() % 1", "", DIFFERS),
    ("np.random.seed(0); x = x + np.random.rand()", "", f"draws random numbers from a generator.*{UNIFORMS}"),
    ("global C; C += 1", "C = 0", f"the global 'C' {GLOBAL}"),
    ("SEEN.append(1)", "SEEN = []", f"the global 'SEEN' {GLOBAL}"),
    ("step.calls = getattr(step, 'calls', 0) + 1", "", f"the global 'step' {GLOBAL}"),
    ("next(CALLS)", "import itertools\nCALLS = itertools.count()", f"the global 'CALLS' {GLOBAL}"),
    ("x = x - xp.mean(x)", "", OTHERS),
    ("x = x + s.x[0]", "", OTHERS),
    ("x = x + s.x[::-1]", "", OTHERS),
    ("x = x + x.shape[0]", "", OTHERS),
    ("reward = xp.where(x > 0, 1.0, 0.0)", "", r"reward of step is float64\[3\].*Python numbers"),
    ("reward = np.sqrt(2.0) * x", "", r"reward of step is float64\[3\], must be float32\[3\]"),
    ("reward = xp.squeeze(x[:, None])", "", r"reward of step is float32\[\], must be float32\[1\]"),
    ("import sys; sys.exit(0)", "", "SystemExit: 0"),
    ("open('/nowhere/at/all')", "", "FileNotFoundError"),
    ("raise BrokenPipeError(32, 'Broken pipe')", "", "BrokenPipeError"),
    ("raise type('Own', (BaseException,), {})('two\\nlines')", "", "Own: two$"),
    ("x = s.x.to(xp.float32)", "", r"has no attribute 'to'; write instead: `xp.astype\(x, d\)`"),
]


@pytest.mark.parametrize(("line", "more", "message"), NUMPY, ids=[line for line, *_ in NUMPY])
def test_what_is_found_on_numpy(line, more, message, tmp_path):
    state, python = np.random.get_state(), __import__("random").getstate()  # noqa: NPY002
    path = file_of(tmp_path, *in_step(line, more))
    whole = OTHERS if message == OTHERS else ""
    text = refusal(path, "return State(x, s.n" if whole else line)
    assert re.search(message, text), text
    if "np.random.seed" in line:  # what is found out so leaves no trace
        assert np.array_equal(state[1], np.random.get_state()[1])  # noqa: NPY002
        assert python == __import__("random").getstate()


BACKENDS = [
    ("torch", "reward = xp.stack([x, x], axis=-1).max(axis=-1) + 1", r"write instead: `xp.max\(x, axis=-1\)`"),
    ("torch", "reward = xp.stack([x, x], axis=-1).max(axis=-1)", r"is a torch.return_types.max, .*`xp.max\(x, axis"),
    ("torch", "reward = reward.astype(np.float32)", r"write instead: `xp.astype\(x, d\)`"),
    ("torch", "reward = reward.copy()", "write instead: a function of `xp`"),
    ("torch", "reward = xp.astype(1 - (x > 0), xp.float32)", "write instead: `~mask`"),
    ("torch", "reward = np.where(x > 0, x, -x)", "reward of step is a numpy.ndarray, must be .*a function of `xp`"),
    ("jax", "reward = np.where(x > 0, x, -x)", "a function of `xp`, such as `xp.cos"),
    ("jax", "reward = x + x[x > 99].shape[0]", "write instead: `xp.where`"),
    ("jax", "reward = reward + 0; reward[:] = 1", r"write instead: `xp.stack\(\[xp.where\(i_B == k"),
    ("jax", "reward = -reward if (x > 99).any() else reward", "write instead: `xp.where`"),
]


@pytest.mark.parametrize(("backend", "line", "message"), BACKENDS, ids=[f"{b}: {line}" for b, line, _ in BACKENDS])
def test_what_is_found_on_the_backend_that_is_used(backend, line, message, tmp_path):
    path = file_of(tmp_path, *in_step(line))
    env = rlgraph.make(str(path))  # on numpy all is well
    text = refusal(path, line, lambda path: check_on(env, backend))
    assert re.search(message, text), text
    assert text == refusal(path, line, lambda path: rlgraph.make_vec(path, backend=backend, device="cpu"))


def test_integers_that_widen_in_torch(tmp_path):
    sum_of_ints = "s.n + xp.sum(xp.astype(x[:, None] > 9, xp.int32), axis=-1, dtype=xp.int64)"
    path = file_of(tmp_path, ("s.n + 1", sum_of_ints))
    text = refusal(path, sum_of_ints)
    assert "state leaf 'n' after step is int64[3], must be int32[3]" in text
    assert "write instead: `xp.sum(mask, axis=-1, dtype=xp.int32)`" in text


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_the_trial_comes_before_the_run_folder(backend, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    line = "reward = np.where(x > 0, x, -x)"
    file_of(tmp_path, *in_step(line))
    assert main(["train", "ppo", "--env", "cart.py", "--backend", backend, *TRAINING]) == 2
    assert "np.where(x > 0, x, -x)" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("raised", "message"),
    [
        ("raise SystemExit(0)", "SystemExit: 0"),
        ("raise BrokenPipeError(32, 'gone')", "BrokenPipeError: [Errno 32] gone"),
        ("raise OSError(28, 'full')", "OSError: [Errno 28] full"),
        ("raise KeyError('x')", "KeyError: 'x'"),
        ("raise type('Own', (BaseException,), {})()", "Own"),
    ],
)
def test_what_it_raises_in_a_run_ends_it_in_one_line(raised, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    path = file_of(tmp_path, *in_step(f"if x.shape[0] == 5: {raised}"))  # in the evaluation alone
    assert main(["train", "ppo", "--env", "cart.py", *TRAINING, "--eval-episodes", "5"]) == 2
    place = f"cart.py, line {line_in(path.read_text(), raised)}: `{raised}`"
    assert capsys.readouterr().err == f"rlgraph: environment 'Cart-v0' fails: {place}: {message}\n"
    envs = rlgraph.make_vec("cart.py", num_envs=5, device="cpu", seed=0)
    envs.reset()
    with pytest.raises(rlgraph.UsageError, match=re.escape(f"{place}: {message}")):
        envs.step(np.zeros(5, np.int64))


def test_a_trial_takes_no_more_memory_where_a_run_has_many_environments(tmp_path):
    env = rlgraph.make(str(file_of(tmp_path, *in_step("if x.shape[0] > 4096: raise KeyError('x')"))))
    for backend in ("torch", "jax"):
        check_on(env, backend, "cpu", num_envs=10**9)


def test_what_it_raises_does_not_steer_the_terminal(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    file_of(tmp_path, *in_step("raise KeyError('\\x1b[31mred') from ValueError('\\x07')"))
    assert main(["train", "ppo", "--env", "cart.py", *TRAINING]) == 2
    assert capsys.readouterr().err[:-1].isprintable()


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_it_is_tried_with_the_runs_own_number_of_environments(backend, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    file_of(tmp_path, *in_step("if x.shape[0] == 4: raise KeyError('x')"))
    words = ["train", "ppo", "--env", "cart.py", *TRAINING, "--num-envs", "4", "--backend", backend]
    assert main(words) == 2
    assert "step fails in" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_an_interrupt_in_a_definition_stays_one(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        rlgraph.make(str(file_of(tmp_path, *in_step("raise KeyboardInterrupt"))))


GRID = [  # int8 throughout
    ("Box(-np.inf, np.inf, (2,), np.float32)", "Box(0, 4, (2,), np.int8)"),
    ("return State(u[:, 0], xp.zeros_like(u[:, 0], dtype=xp.int32))", "x = xp.astype(u * 5, xp.int8)[:, 0]\n    "
     "return State(x, 0 * x)"),
    ("    x = s.x + p.speed * xp.astype(a - 1, s.x.dtype) + 0.01 * u[:, 0]\n",
     "    x = xp.clip(s.x + xp.astype(a - 1, xp.int8), 0, 4)\n"),
    ("reward = -abs(x)", "reward = xp.astype(x, xp.float32)"),
    ("xp.astype(s.n, s.x.dtype)", "s.n"),
]  # fmt: skip
BOOLS = [
    ("Box(-np.inf, np.inf, (2,), np.float32)", "Box(0, 1, (2,), bool)"),
    ("xp.stack([s.x, xp.astype(s.n, s.x.dtype)], axis=-1)", "xp.stack([s.x > 0, s.n > 2], axis=-1)"),
]
LEGAL = {
    "a grid of int8": GRID,
    "observations of bools": BOOLS,
    "bools as bytes": [
        (BOOLS[0][0], "Box(0, 1, (2,), np.uint8)"),
        (BOOLS[1][0], f"xp.astype({BOOLS[1][1]}, xp.uint8)"),
    ],
    "actions from 5 on": [("Discrete(3)", "Discrete(3, start=5)"), ("a - 1", "a - 6")],
    "a leaf of vectors": [
        ("u[:, 0], xp.zeros_like(u[:, 0], dtype=xp.int32)", "u[:, 0], xp.stack([u[:, 1]] * 7, axis=-1)"),
        ("s.n + 1", "xp.where(xp.stack([a == k for k in range(7)], axis=-1), x[:, None], s.n)"),
        ("xp.astype(s.n, s.x.dtype)", "xp.max(s.n, axis=-1)"),
    ],
    "an observation of one number": [("(2,), np.float32", "()"), ("axis=-1)\n", "axis=-1)[:, 0]\n")],
    "no draws": [("= 2, 1", "= 0, 0"), (" + 0.01 * u[:, 0]", "")],
    "actions without bounds": [("Discrete(3)", "Box(-np.inf, np.inf, (2, 1))"), ("a - 1", "a[:, 0, 0]")],
    "a table made at the first call": in_step("x = x + T.setdefault(p.count, 0.5)", "T = {}"),
    "what becomes NaN": [("reward = -abs(x)", "reward = xp.log(x * 0) * 0")],
    "a step that prints": in_step("print(end='')"),
}


@pytest.mark.parametrize("changes", LEGAL.values(), ids=LEGAL)
def test_what_keeps_the_contract_passes_everywhere(changes, tmp_path):
    env = rlgraph.make(str(file_of(tmp_path, *changes)))
    for backend in ("torch", "jax"):
        check_on(env, backend)


def test_what_to_write_instead_is_what_the_page_says():
    page = (ROOT / "docs" / "environments.md").read_text()
    cells = [row.replace("\\|", "|").rstrip(" |") for row in page.splitlines() if row.startswith("| ")]
    for _, advice in TRAPS:
        assert any(cell.endswith(f"| {advice}") for cell in cells), advice
