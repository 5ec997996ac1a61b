"""Configs and options: values of any library become those of the declared types, and what cannot is named."""

import dataclasses
import json
import math
import typing
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from rlgraph.agents import AGENTS
from rlgraph.agents.dqn.config import DQNConfig
from rlgraph.agents.ppo.config import METRICS, PPOConfig
from rlgraph.agents.pqn.config import PQNConfig
from rlgraph.agents.sac.config import SACConfig
from rlgraph.bench.cli import BenchOptions, _plan
from rlgraph.bench.solve import options_class as solve_options
from rlgraph.cli.commands import EvalOptions
from rlgraph.cli.graph_show import options_class as show_options
from rlgraph.errors import UsageError
from rlgraph.registry import make
from rlgraph.runs.folder import read_config, write_config
from rlgraph.runs.train import config_class, train, trainer_class

CONFIGS = [PPOConfig, DQNConfig, PQNConfig, SACConfig]
OPTIONS = [*CONFIGS, solve_options(SACConfig), show_options(PPOConfig), BenchOptions, EvalOptions]
NEEDED = {EvalOptions: {"run": "run"}}


@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [
        ("learning_rate", 1, 1.0),
        ("learning_rate", np.float32(0.25), 0.25),
        ("learning_rate", torch.tensor(0.25, requires_grad=True), 0.25),
        ("learning_rate", np.array(2), 2.0),
        ("clip_value", np.float64(0.5), 0.5),
        ("clip_value", 3, 3.0),
        ("clip_value", None, None),
        ("checkpoint_seconds", np.int8(0), 0.0),
        ("seed", np.int64(3), 3),
        ("seed", np.uint32(2**32 - 1), 2**32 - 1),
        ("num_envs", torch.tensor(8), 8),
        ("total_steps", 2**62, 2**62),
        ("normalize_obs", np.bool_(True), True),
        ("anneal_lr", torch.tensor(False), False),
        ("run_dir", Path("a") / "b", "a/b"),
        ("env", Path("my_env.py"), "my_env.py"),
        ("activation", np.str_("relu"), "relu"),
        ("hidden", [8, np.int16(16)], (8, 16)),
        ("hidden", np.array([8, 16]), (8, 16)),
        ("hidden", torch.tensor([8, 16]), (8, 16)),
        ("hidden", range(8, 10), (8, 9)),
        ("device", torch.device("cuda", 1), "cuda:1"),
        ("device", torch.device("cpu"), "cpu"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_value_becomes_one_of_the_fields_type(name, given, expected):
    config = PPOConfig(**{name: given})
    assert config == PPOConfig(**{name: expected})
    found = getattr(config, name)
    assert (found, type(found)) == (expected, type(expected))
    assert all(type(width) is int for width in config.hidden)
    assert json.loads(json.dumps(dataclasses.asdict(config)))[name] == (list(found) if name == "hidden" else found)


def test_what_jax_has_becomes_plain_values():
    given = {"learning_rate": jnp.float32(0.25), "num_envs": jnp.int32(8), "hidden": jnp.array([8])}
    config = PPOConfig(**given, anneal_lr=jnp.bool_(False), device=jax.devices("cpu")[0])
    assert config == PPOConfig(learning_rate=0.25, num_envs=8, hidden=(8,), anneal_lr=False, device="cpu")
    assert [type(getattr(config, name)) for name in given] == [float, int, tuple]
    assert json.loads(json.dumps(dataclasses.asdict(config)))["hidden"] == [8]


@pytest.mark.parametrize(
    ("name", "given", "complaint"),
    [
        ("learning_rate", "1", "must be a number, but is '1'"),
        ("learning_rate", True, "must be a number, but is True"),
        ("learning_rate", None, "must be a number, but is None"),
        ("learning_rate", 1j, "must be a number"),
        ("learning_rate", torch.ones(2), "must be a number"),
        ("learning_rate", 10**400, "must be a number, but is 10"),
        ("learning_rate", 10**5000, "must be a number, but is a"),
        ("learning_rate", 1e39, "must be 0 or of a size from 1.2e-38 to 3.4e38, as float32 is, but is 1e.39"),
        ("learning_rate", 1e-46, "must be 0 or of a size from 1.2e-38"),
        ("gamma", -1e-39, "must be 0 or of a size from 1.2e-38"),
        ("clip_value", math.nan, "must be finite, but is nan"),
        ("checkpoint_seconds", math.nan, "must be finite, but is nan"),
        ("checkpoint_seconds", -1, "must be at least 0, but is -1.0"),
        ("seed", 1.0, "must be an integer, but is 1.0"),
        ("seed", np.float64(1), "must be an integer"),
        ("seed", 2**32, r"must be in \[0, 2\*\*32\), but is 4294967296"),
        ("num_envs", False, "must be an integer, but is False"),
        ("num_envs", "64", "must be an integer, but is '64'"),
        ("num_envs", 2**31, "must be at most 2147483647, but is 2147483648"),
        ("num_envs", 2**30, r"\* num_steps must be at most 2147483647, but is"),
        ("num_envs", 10**5000, "must be at most 2147483647, but is a"),
        ("total_steps", 2**62 + 1, "must be at most 4611686018427387904"),
        ("eval_episodes", 10**25, "must be at least 1 and at most 1048576"),
        ("normalize_obs", 1, "must be True or False, but is 1"),
        ("normalize_obs", "no", "must be True or False, but is 'no'"),
        ("normalize_obs", np.array([True, False]), "must be True or False"),
        ("env", 3, "must be a text, but is 3"),
        ("env", None, "must be a text, but is None"),
        ("run_dir", b"a", "must be a text, but is b'a'"),
        ("run_dir", "a\0b", r"must be without NUL and lone surrogates, but is 'a\\x00b'"),
        ("run_dir", "\ud800", "must be without NUL and lone surrogates"),
        ("activation", "gelu", "must be one of tanh, relu, silu, but is 'gelu'"),
        ("hidden", 64, "must be a sequence, such as .*, but is 64"),
        ("hidden", "64", "must be a sequence"),
        ("hidden", b"64", "must be a sequence"),
        ("hidden", [64, 8.0], r"\[1\] must be an integer, but is 8.0"),
        ("hidden", np.ones((2, 2), int), r"\[0\] must be an integer"),
        ("hidden", (10**25,), "must name at least one layer, each of width 1 to 1048576"),
        (
            "hidden",
            (8, 2**16, 2**16),
            r"must have at most 2147483647 weights between two layers, but has 65536 \* 65536",
        ),
        ("num_epochs", 2**20, r"\* num_envs \* num_steps must be at most 2147483647, but is 4294967296"),
        ("hidden", (), "must name at least one layer"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_what_is_none_of_the_fields_type_is_a_line_that_names_the_field(name, given, complaint):
    with pytest.raises(UsageError, match=rf"^{name} ?{complaint}") as raised:
        PPOConfig(**{name: given})
    assert len(str(raised.value).splitlines()) == 1 and len(str(raised.value)) < 200


def fields_of(kind: type) -> list:
    """(class, name of a field) of each number that the options have."""
    found = []
    for cls in OPTIONS:
        hints = typing.get_type_hints(cls)
        for field in dataclasses.fields(cls):
            hint = hints[field.name]
            if field.init and (hint is kind or kind in typing.get_args(hint)):
                found.append(pytest.param(cls, field.name, id=f"{cls.__name__}-{field.name}"))
    assert len(found) > 8
    return found


@pytest.mark.parametrize(("cls", "name"), fields_of(int))
@pytest.mark.parametrize("value", [10**25, -(10**25), True, 8.0, "8"])
def test_every_counter_refuses_what_it_cannot_count(cls, name, value):
    given = (value,) if name == "hidden" else value
    with pytest.raises(UsageError, match=rf"^{name}\b"):
        options = cls(**{name: given}, **NEEDED.get(cls, {}))
        if cls is BenchOptions:  # the rest is known once the machine is
            _plan(options, on_gpu=False)


@pytest.mark.parametrize(("cls", "name"), fields_of(float))
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e39, 1e-46, 10**400, "1", False])
def test_every_number_refuses_what_float32_cannot_hold(cls, name, value):
    with pytest.raises(UsageError, match=rf"^{name}\b"):
        cls(**{name: value})


def test_a_whole_learning_rate_falls_in_equal_steps():
    sizes = {"num_envs": 4, "num_steps": 8, "num_minibatches": 2, "num_epochs": 1, "hidden": [8], "device": "cpu"}
    config = PPOConfig(learning_rate=1, total_steps=4 * 32, **sizes)
    trainer = trainer_class("ppo", "torch")(config, make("CartPole-v1"))
    column = METRICS.index("learning_rate")
    assert [trainer.iterate().get()[0][column] for _ in range(4)] == [1, 0.75, 0.5, 0.25]


def test_a_run_of_numpy_values_is_the_run_of_the_same_plain_values(tmp_path):
    sizes = {"num_steps": 8, "num_minibatches": 2, "eval_episodes": 2, "total_steps": 64}
    foreign = PPOConfig(
        num_envs=np.int64(4),
        seed=np.int64(3),
        learning_rate=np.float32(0.5**10),
        normalize_obs=np.bool_(True),
        hidden=np.array([8]),
        run_dir=tmp_path / "foreign",
        device=torch.device("cpu"),
        **sizes,
    )
    plain = PPOConfig(
        num_envs=4,
        seed=3,
        learning_rate=0.5**10,
        normalize_obs=True,
        hidden=(8,),
        run_dir=str(tmp_path / "plain"),
        device="cpu",
        **sizes,
    )
    results = [train("ppo", config) for config in (foreign, plain)]
    assert results[0].eval_return_mean == results[1].eval_return_mean
    policies = [load_file(tmp_path / name / "policy.safetensors") for name in ("foreign", "plain")]
    assert policies[0].keys() == policies[1].keys()
    assert all(np.array_equal(policies[0][name], policies[1][name]) for name in policies[0])


@pytest.mark.parametrize("agent", AGENTS)
def test_a_config_read_from_its_file_is_the_same(agent, tmp_path):
    config = config_class(agent)(hidden=[8, 9], learning_rate=1, run_dir=Path("run"))
    write_config(tmp_path, agent, config, {})
    assert read_config(tmp_path, config_class) == (agent, config, {})
    path = tmp_path / "config.json"
    path.write_text(path.read_text().replace('"learning_rate": 1.0', '"learning_rate": 1'))  # as another program may
    assert read_config(tmp_path, config_class) == (agent, config, {})
    assert type(read_config(tmp_path, config_class)[1].learning_rate) is float
