"""What a caller passes from Python: paths and other libraries' numbers are taken, all else is refused in one line."""

import dataclasses
import functools
import json
import os
from pathlib import Path
from types import SimpleNamespace

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import rlgraph
from rlgraph import devices, modes
from rlgraph.agents.dqn.config import DQNConfig
from rlgraph.runs.train import default_config, evaluate_run, resume, train, trainer_class
from rlgraph.vector import base

BACKENDS = ("torch", "jax")
COUNTER = """
from dataclasses import dataclass
from typing import NamedTuple
import numpy as np
from gymnasium.spaces import Box, Discrete

ID, MAX_EPISODE_STEPS, REWARD_THRESHOLD, RESET_DRAWS, STEP_DRAWS = "Counter-v0", 5, None, 0, 0


@dataclass(frozen=True)
class Params:
    by: float = 1.0


class State(NamedTuple):
    count: object


def observation_space(p):
    return Box(-10, 10, (1,), np.float32)


def action_space(p):
    return Discrete(2)


def reset(xp, u, p):
    return State(xp.zeros_like(u[:, 0]))


def step(xp, state, action, u, p):
    count = state.count + p.by
    return State(count), count, count > 100


def observe(xp, state, p):
    return state.count[:, None]
"""


class Unspeakable:
    def __repr__(self):
        raise RuntimeError("no words")


class PathOfBytes(os.PathLike):
    def __fspath__(self):
        return b"counter.py"


class NoPath(os.PathLike):
    def __fspath__(self):
        raise RuntimeError("lost\nand not found")


EMPTY = {}
# Of every type that is met, and of the usual ones at their edges.
ODD = [
    None,
    True,
    3,
    3.5,
    float("nan"),
    10**25,
    -(10**25),
    1j,
    "",
    "x\ny",
    "x" * 500,
    "\0",
    b"x",
    [1],
    (),
    EMPTY,
]
ODD += [{"a": [1]}, set(), print, int, json, Path("x"), PathOfBytes(), NoPath(), Unspeakable(), np.str_("zz"), np.nan]
ODD += [np.array([1, 2]), np.zeros((40, 40)), torch.ones(3), torch.tensor(1.5), jnp.ones(3), SimpleNamespace(ID="X")]


def refused(call, values):
    """What each value is refused with: one line that one can read, of a UsageError."""
    lines = []
    for value in values:
        with pytest.raises(rlgraph.UsageError) as caught:
            call(value)
        line = str(caught.value)
        assert "\n" not in line, line
        assert len(line) < 300, line
        lines.append(line)
    return lines


def odd_but(*taken):
    return [value for value in ODD if not any(value is each for each in taken)]


def making(name, **others):
    return lambda value: rlgraph.make_vec(**{"id": "CartPole-v1", "device": "cpu", **others, name: value})


@pytest.fixture
def counter_file(tmp_path):
    path = tmp_path / "counter.py"
    path.write_text(COUNTER)
    return path


@pytest.mark.parametrize("name", ["id", "num_envs", "backend", "device", "mode", "seed", "autoreset_mode", "output"])
def test_make_vec_refuses_what_an_argument_cannot_be(name):
    taken = {"num_envs": [3], "device": [None], "seed": [None, 3]}.get(name, [])
    for line in refused(making(name), odd_but(*taken)):
        assert name.split("_mode")[0] in line or "environment" in line or "Params" in line


def test_numbers_of_other_arguments():
    for call in (making("max_episode_steps"), lambda value: rlgraph.make("CartPole-v1", value)):
        lines = refused(call, [*odd_but(None, 3), 0, -2, 2**31])
        assert all(line.startswith("max_episode_steps must be ") for line in lines)
    refused(rlgraph.make, ODD)
    assert all(line.startswith("definition must be a module") for line in refused(rlgraph.register, odd_but(json)))
    assert "lacks" in refused(rlgraph.register, [json])[0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_seeds_and_options_of_a_reset(backend):
    env = rlgraph.make_vec("CartPole-v1", 2, backend, device="cpu", output="numpy")
    first = env.reset(seed=3)[0]
    for seed in (np.int64(3), np.uint8(3), torch.tensor(3), torch.tensor([3]), jnp.array(3)):
        np.testing.assert_array_equal(env.reset(seed=seed)[0], first)
        assert type(env.np_random_seed) is int
    assert all("seed" in line for line in refused(lambda seed: env.reset(seed=seed), [*odd_but(None, 3), 2**32]))
    for line in refused(lambda options: env.reset(options=options), odd_but(None, EMPTY)):
        assert "options" in line or "environment parameter" in line
    refused(lambda key: env.reset(options={key: 1}), [1, None, 3.5, b"x", (), "x" * 500])


def test_names_of_devices():
    for find in (devices.torch_device, devices.jax_device):
        refused(find, odd_but(None))
        refused(
            find,
            ["CUDA", " cpu", "cpu ", "cuda:-1", "cuda:", "cpu:1", "cuda:99999999999999999999", "cuda:" + "9" * 5000],
        )
        refused(find, ["meta", torch.device("meta"), "mps", "tpu", 0, "0"])
        assert "finds" in refused(find, ["cuda:99999999999999999999"])[0]
    cpu = torch.device("cpu")
    for name in ("cpu", "cpu:0", cpu, jax.devices("cpu")[0], np.str_("cpu")):
        assert devices.torch_device(name) == cpu
        assert devices.jax_device(name) == jax.devices("cpu")[0]


def test_names_of_modes():
    for backend in BACKENDS:
        lines = refused(functools.partial(modes.resolve, backend, on_gpu=False), ODD)
        assert all(line.startswith(f"unknown {backend} mode ") for line in lines)
    assert all("backend" in line for line in refused(lambda backend: modes.resolve(backend, "auto", False), ODD))
    assert modes.resolve("torch", np.str_("graph"), False) == "graph"


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_path_is_an_environment_and_its_spec_makes_another_one(backend, counter_file):
    env = rlgraph.make_vec(
        counter_file, np.int64(2), backend, torch.device("cpu"), seed=np.int64(3), by=np.float32(2), output="numpy"
    )
    assert json.loads(env.spec.to_json())["kwargs"] == env.spec.kwargs
    again = gymnasium.make_vec(env.spec, num_envs=4)
    again.reset()
    assert again.step([0, 1, 0, 1])[1].tolist() == [2] * 4
    assert (again.env, again.num_envs) == (env.env, 4)
    assert rlgraph.make(counter_file).id == "Counter-v0"
    with pytest.raises(rlgraph.UsageError, match="no environment file"):
        rlgraph.make(counter_file.with_name("other.py"))


def test_a_parameter_of_an_arguments_name():
    assert (
        "unknown environment parameter 'definition'"
        in refused(lambda x: rlgraph.make("CartPole-v1", definition=x), [1])[0]
    )


def test_an_environment_file_that_cannot_be_looked_at(tmp_path):
    line = refused(rlgraph.make, [tmp_path / ("x" * 5000 + ".py")])[0]
    assert "no environment file" in line
    assert "File name too long" in line


# ---- too many environments


def test_more_environments_than_there_is_memory_for():
    for num_envs in (10**12, 2**63, 10**25, 10**5000):
        for backend in BACKENDS:
            line = refused(making("num_envs", backend=backend), [num_envs])[0]
            assert line.startswith("num_envs = ")
            assert line.endswith("GiB; choose fewer")


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("Unable to allocate 32.0 GiB"),
        RuntimeError(
            "DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes.\nException raised from"
        ),
        RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1 bytes."),
    ],
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_memory_that_runs_out_is_one_line(backend, error, monkeypatch):
    def batch_space(*args):
        raise error

    env = rlgraph.make_vec("CartPole-v1", 2, backend, device="cpu")
    monkeypatch.setattr(base, "batch_space", batch_space)
    line = refused(making("num_envs", backend=backend), [7])[0]
    assert line == "there is not enough memory for num_envs = 7: choose fewer"
    monkeypatch.setattr(env, "_start", batch_space)
    assert refused(lambda seed: env.reset(seed=seed), [3]) == [line.replace("7", "2")]


# ---- runs


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "one"
    train("ppo", config(run_dir=str(folder)))
    return folder


def config(**changes):
    small = {"num_envs": 2, "num_steps": 4, "num_minibatches": 1, "total_steps": 8, "eval_episodes": 1, "hidden": (4,)}
    return dataclasses.replace(default_config("ppo", "CartPole-v1"), device="cpu", **small, **changes)


def test_what_training_is_told(tmp_path):
    there = config(run_dir=str(tmp_path / "run"))
    for call in (
        lambda agent: train(agent, there),
        lambda agent: default_config(agent, "CartPole-v1"),
        lambda agent: trainer_class(agent, "torch"),
    ):
        assert all("unknown agent" in line for line in refused(call, ODD))
    wrong = [*odd_but(), dataclasses.asdict(there), DQNConfig(), type(there)]
    lines = refused(lambda config: train("ppo", config), wrong)
    assert all(line.startswith("config must be a PPOConfig, which ppo takes, but is ") for line in lines)
    lines = refused(lambda progress: train("ppo", there, progress), odd_but(None, print, int))
    assert all(line.startswith("progress must be a function") for line in lines)
    assert not any(tmp_path.iterdir()), "nothing was begun"


def test_what_an_evaluation_and_a_resume_are_told(run_dir):
    def evaluating(name):
        return lambda value: evaluate_run(run_dir, **{"episodes": 1, name: value})

    taken = {"episodes": [3], "seed": [3], "backend": [None], "device": [None], "checkpoint": [None, ""]}
    for name, values in taken.items():
        assert all(name in line for line in refused(evaluating(name), odd_but(*values)))
    odd = [value for value in odd_but() if not (isinstance(value, str) and len(value) > 99)]
    assert all("run" in line for call in (resume, evaluate_run) for line in refused(call, odd))
    refused(lambda progress: resume(run_dir, progress), odd_but(None, print, int))


def test_a_run_is_named_by_a_path(run_dir):
    want = evaluate_run(str(run_dir), 2, seed=3)
    numbers = {"episodes": np.int64(2), "seed": torch.tensor(3)}
    np.testing.assert_array_equal(evaluate_run(run_dir, **numbers, device=torch.device("cpu")), want)
    np.testing.assert_array_equal(evaluate_run(run_dir, **numbers, checkpoint=np.int64(8)), want)
    assert resume(run_dir).run_dir == str(run_dir)
