"""rlgraph.graph.auto: capture, else torch.compile, else operation by operation; the same results in each."""

import dataclasses
import logging
import random
import re
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from agent_tools import assert_same_run, run
from diagnostics import TwoSteps

import rlgraph
from rlgraph import modes
from rlgraph.agents import trainer_torch
from rlgraph.agents.ppo.config import PPOConfig
from rlgraph.agents.ppo.torch import PPO
from rlgraph.environment import build
from rlgraph.errors import CaptureError, UsageError
from rlgraph.graph import auto as module
from rlgraph.graph.auto import auto, first_that_works
from rlgraph.graph.compile import compiled, graph_breaks_allowed
from rlgraph.rollout import torch as rollout_torch
from rlgraph.vector import torch as vector_torch

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture
def ladder(monkeypatch):
    """On a CPU, too, a graph comes first; it runs directly. Gives what torch.compile is to do."""

    def set_up(device, compiling=None):
        if device == "cpu":
            monkeypatch.setattr(module, "_can_capture", lambda device: True)
            monkeypatch.setattr(module, "compiled", compiling or (lambda fn: fn))

    return set_up


def _no_compiler(fn):
    def fails(*inputs):
        raise RuntimeError("no C++ compiler found\nmuch more text")

    return fails


class Walk:
    """State in a tensor, random numbers, and a number that a capture bakes in."""

    def __init__(self, device):
        self.generator = torch.Generator(device).manual_seed(0)
        self.position = torch.zeros(3, device=device)
        self.factor = 1.0

    def step(self, x):
        noise = torch.rand(3, generator=self.generator, device=x.device)
        self.position.add_(noise * self.factor + x.sum())
        return self.position

    def auto(self, x, **options):
        return auto(self.step, x, state=self.position, generators=[self.generator], **options)


@pytest.mark.parametrize("device", DEVICES)
def test_a_graph_where_it_can_be_one_and_results_are_the_callers(device, ladder):
    ladder(device)
    walk, direct, x = Walk(device), Walk(device), torch.ones(2, device=device)
    run = walk.auto(x)
    assert (run.mode, run.reason, run.captures) == ("graph", None, 1)
    results = [run(x) for _ in range(3)]
    for result in results:
        assert torch.equal(result, direct.step(x))
    assert torch.equal(run(2 * x), direct.step(2 * x))


def _reads(x):
    return x * float(x.sum())


def _branches(x):
    if x.sum() > 0:
        return x + 1
    return x - 1


def _masks(x):
    return x[x > 0]


HOST = {_reads: "_local_scalar_dense", _branches: "_local_scalar_dense", _masks: "masked"}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("fn", HOST)
def test_what_needs_the_host_is_compiled_and_the_line_is_named(fn, device, ladder):
    ladder(device)
    x = torch.tensor([1.0, -2.0, 4.0], device=device)
    with pytest.warns(UserWarning, match=rf"{fn.__name__} runs in mode compile: .*{HOST[fn]}.*torch.where") as said:
        run = auto(fn, x)
    (line,) = [str(w.message) for w in said if "runs in mode" in str(w.message)]
    assert "test_graph_auto.py:" in line and "\n" not in line
    assert run.mode == "compile" and run.reason in line
    for given in (x, -x, x + 1):
        assert run(given).tolist() == fn(given).tolist()


@pytest.mark.parametrize("device", ["cpu"])
def test_where_nothing_compiles_it_runs_operation_by_operation(device, ladder):
    ladder(device, _no_compiler)
    with pytest.warns(UserWarning, match="mode eager: .*_local_scalar_dense.*; torch.compile failed: no C.. compiler"):
        run = auto(_branches, torch.ones(2))
    assert run.mode == "eager" and "\n" not in run.reason
    assert run(-torch.ones(2)).tolist() == [-2, -2]


class Counter:
    def __init__(self):
        self.count, self.hidden, self.seen = 0, None, []

    def rebinds(self, x):
        self.count += 1
        self.hidden = x if self.hidden is None else self.hidden + x
        self.seen.append(self.count)
        return self.hidden * self.count


def test_what_was_tried_leaves_no_trace(ladder):
    """The tries run the function, and Python attributes and random numbers must not show it."""
    ladder("cpu", _no_compiler)
    counter, x = Counter(), torch.ones(2)
    with pytest.warns(UserWarning, match="mode eager"):
        run = auto(counter.rebinds, x)
    assert (counter.count, counter.hidden, counter.seen) == (0, None, [])
    assert [run(x).tolist() for _ in range(3)] == [[1, 1], [4, 4], [9, 9]]

    def drawing(x):
        return x * random.random() + np.random.rand()  # noqa: NPY002

    for seed in (random.seed, np.random.seed):
        seed(0)
    expected = [drawing(x).tolist() for _ in range(2)]
    for seed in (random.seed, np.random.seed):
        seed(0)
    with pytest.warns(UserWarning, match="it draws from Python's random"):
        run = auto(drawing, x)
    assert [run(x).tolist() for _ in range(2)] == expected


def test_host_draws_are_not_compiled(ladder):
    """torch.compile would take them from torch's generator: other numbers than those of a seed."""
    ladder("cpu")
    with pytest.warns(UserWarning, match="draws others than those of np.random"):
        assert auto(lambda x: x * np.random.rand(), torch.ones(2)).mode == "eager"  # noqa: NPY002


@pytest.mark.parametrize("device", DEVICES)
def test_other_shapes_and_dtypes_have_graphs_of_their_own_up_to_a_bound(device, ladder):
    ladder(device)
    walk, direct = Walk(device), Walk(device)
    run = walk.auto(torch.ones(1, device=device), most=3)
    given = [torch.ones(n, device=device) for n in (1, 2, 1)] + [torch.ones(2, device=device, dtype=torch.float64)]
    for x in given:
        assert torch.equal(run(x), direct.step(x))
    assert run.captures == 3
    with pytest.warns(UserWarning, match="captured 3 times, the most allowed") as said:
        for x in [torch.ones(n, device=device) for n in (5, 6, 1, 5)]:
            assert torch.equal(run(x), direct.step(x))
    assert len([w for w in said if "most allowed" in str(w.message)]) == 1
    assert (run.captures, run.mode) == (3, "graph")


@pytest.mark.parametrize("device", DEVICES)
def test_a_changed_attribute_takes_effect(device, ladder):
    ladder(device)
    walk, direct, x = Walk(device), Walk(device), torch.ones(2, device=device)
    run = walk.auto(x, most=2)
    for factor in (1.0, 1.0, 0.5):
        walk.factor = direct.factor = factor
        assert torch.equal(run(x), direct.step(x))
    assert run.captures == 2
    walk.factor = direct.factor = 0.25
    with pytest.warns(UserWarning, match=r"2 times, the most allowed, and now Walk.factor was 0.5 and is 0.25"):
        assert torch.equal(run(x), direct.step(x))


def test_on_a_cpu_the_function_is_called_and_that_is_no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run = auto(_branches, torch.ones(2))
    assert (run.mode, run.reason) == ("eager", "no CUDA graph on cpu: operation by operation")
    assert run(torch.ones(2)).tolist() == [2, 2]


def test_the_callers_tensors_stay_what_they_are():
    def writes(x):
        return x.mul_(2), x

    given = torch.ones(2, requires_grad=True)
    first, second = auto(writes, given)(given)
    assert given.tolist() == [1, 1] and not first.requires_grad
    first.zero_()
    assert second.tolist() == [2, 2]


def test_wrong_arguments_are_refused():
    x = torch.ones(2)
    with pytest.raises(UsageError, match="most must be at least 1"):
        auto(_branches, x, most=0)
    with pytest.raises(UsageError, match="input 0 of _branches is of type float: an input is a tensor"):
        auto(_branches, 1.0)
    run = auto(_branches, x)
    with pytest.raises(UsageError, match=r"input 0 of _branches is on meta, but it runs on cpu: .*\.to\('cpu'\)"):
        run(x.to("meta"))


def test_errors_that_are_no_reason_to_fall_back():
    def fails(error):
        def attempt():
            raise error

        return attempt

    for error in (ValueError("its own"), CaptureError("CUDA out of memory")):
        with pytest.raises(type(error), match=str(error)):
            first_that_works({"graph": fails(error), "eager": lambda: 1})
    with pytest.raises(CaptureError, match="the last"):
        first_that_works({"eager": fails(CaptureError("the last"))})
    reasons = {"graph": fails(CaptureError("one")), "compile": fails(ValueError("two\nlines")), "eager": lambda: 1}
    assert first_that_works(reasons) == ("eager", 1, "one; torch.compile failed: two")


# ---- trainers and vector environments: on a CPU their mode "auto" is made to be that of a GPU


class Branching(TwoSteps):
    """Its step looks at a value, as plain Python code does."""

    @classmethod
    def step(cls, xp, s, action, u, p):
        if float(s.t.sum()) < 0:
            raise ValueError("time runs backwards")
        return super().step(xp, s, action, u, p)


def like_a_gpu(monkeypatch, compiling):
    graph_first = lambda asked, mode, on_gpu: ("graph", "compile", "eager") if asked == "auto" else (mode,)  # noqa: E731
    monkeypatch.setattr(modes, "in_turn", graph_first)
    monkeypatch.setattr(trainer_torch, "in_turn", graph_first)
    for user in (trainer_torch, rollout_torch, vector_torch):
        monkeypatch.setattr(user, "compiled", compiling)


CONFIG = PPOConfig(num_envs=4, num_steps=2, num_epochs=1, num_minibatches=2, hidden=(4,), total_steps=80, device="cpu")


@pytest.mark.parametrize(("compiling", "mode"), [(lambda fn: fn, "compile"), (_no_compiler, "eager")])
def test_a_trainer_falls_back_and_its_summary_says_why(monkeypatch, compiling, mode):
    config = dataclasses.replace(CONFIG, mode="eager", normalize_obs=True)
    expected = run(PPO(config, build(Branching)), 2)
    like_a_gpu(monkeypatch, compiling)
    trainer = PPO(dataclasses.replace(config, mode="auto"), build(Branching))
    assert (trainer.mode, trainer.graph) == (mode, None)
    how = trainer.execution()
    assert how.startswith({"compile": "compiled, launched step by step", "eager": "operation by operation"}[mode])
    assert "_local_scalar_dense" in how and "test_graph_auto.py:" in how and "torch.where" in how and "\n" not in how
    assert ("torch.compile failed: no C++ compiler found" in how) == (mode == "eager")
    assert_same_run(run(trainer, 2), expected)  # no trace of what was tried
    with pytest.raises(CaptureError, match="_local_scalar_dense"):
        PPO(dataclasses.replace(config, mode="graph"), build(Branching))


@pytest.mark.parametrize(("compiling", "mode"), [(lambda fn: fn, "compile"), (_no_compiler, "eager")])
def test_a_vector_environment_falls_back_and_warns(monkeypatch, compiling, mode, branching_file):
    def steps(envs):
        envs.reset(seed=3)
        return [envs.step(torch.tensor([0, 1, 0]))[0].clone() for _ in range(4)]

    expected = steps(rlgraph.make_vec(branching_file, 3, device="cpu", mode="eager"))
    like_a_gpu(monkeypatch, compiling)
    with pytest.warns(UserWarning, match=rf"runs in mode {mode}: .*_local_scalar_dense.*my_env.py:\d+"):
        envs = rlgraph.make_vec(branching_file, 3, device="cpu")
    assert envs.mode == mode
    for a, b in zip(steps(envs), expected, strict=True):
        assert torch.equal(a, b)
    with pytest.raises(CaptureError, match="_local_scalar_dense"):
        rlgraph.make_vec(branching_file, 3, device="cpu", mode="graph")


@pytest.fixture
def branching_file(tmp_path):
    """CartPole with a look at a value in its step."""
    text = (Path(rlgraph.__file__).parents[1] / "envs" / "cartpole.py").read_text()
    head = re.search(r"\ndef step\(.*\n", text).group()
    look = "    action_B = action_B if bool((action_B >= 0).all()) else -action_B\n"
    (tmp_path / "my_env.py").write_text(text.replace(head, head + look))
    return str(tmp_path / "my_env.py")


def test_dynamo_does_not_say_at_length_what_is_said_in_a_line():
    with graph_breaks_allowed():
        compiled(lambda x: x.item())
    said, log = [], logging.getLogger("torch._dynamo.variables.tensor")
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    log.addHandler(handler)
    try:
        log.warning("Graph break from `Tensor.item()`, consider setting:\n...")
        log.warning("another thing")
    finally:
        log.removeHandler(handler)
    assert said == ["another thing"]


def test_only_auto_on_a_gpu_falls_back():
    assert modes.in_turn("auto", "graph", on_gpu=True) == ("graph", "compile", "eager")
    assert modes.in_turn("auto", "fused", on_gpu=True) == ("fused", "graph", "compile", "eager")
    assert modes.in_turn("graph", "graph", on_gpu=True) == ("graph",)
    assert modes.in_turn("auto", "eager", on_gpu=False) == ("eager",)


@pytest.mark.gpu
def test_a_trainer_on_a_gpu_falls_back(branching_file):
    config = dataclasses.replace(CONFIG, device="cuda", num_envs=64)
    trainer = PPO(config, rlgraph.make(branching_file))
    assert trainer.mode in ("compile", "eager") and "_local_scalar_dense" in trainer.execution()
    assert all(np.isfinite(trainer.iterate().get()[0][:6]))
    with pytest.raises(CaptureError, match="_local_scalar_dense"):
        PPO(dataclasses.replace(config, mode="graph"), rlgraph.make(branching_file))
    with pytest.warns(UserWarning, match="_local_scalar_dense"):
        envs = rlgraph.make_vec(branching_file, 64, seed=0)
    envs.reset()
    assert envs.step(torch.zeros(64, dtype=torch.int64, device="cuda"))[0].isfinite().all()


@pytest.mark.gpu
def test_what_torch_compile_breaks_into_parts_is_right():
    def counted(x):
        for _ in range(3):
            if x.sum() > 10:
                return x * 2
            x = x + 1
        return x

    x = torch.ones(4, device="cuda")
    with pytest.warns(UserWarning, match="mode compile"):
        run = auto(counted, x)
    for value in (0, 1, 5, -100):
        assert torch.equal(run(x * value), counted(x * value))
