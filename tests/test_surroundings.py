"""What surrounds a vector environment or a training: torch's modes and defaults, and `with` blocks."""

import contextlib
import dataclasses

import numpy as np
import pytest
import torch
from gymnasium.error import ClosedEnvironmentError
from safetensors.numpy import load_file

import rlgraph
from rlgraph.runs.train import default_config, train

pytestmark = pytest.mark.filterwarnings("ignore:no CUDA graph on cpu")
BACKENDS = ("torch", "jax")


def made(name="CartPole-v1", num_envs=3, backend="torch", **kwargs):
    return rlgraph.make_vec(name, num_envs, backend, device="cpu", **kwargs)


AROUND = {
    "inference mode": torch.inference_mode,
    "no gradients": torch.no_grad,
    "another device": lambda: torch.device("meta"),
}


@pytest.mark.parametrize("mode", ["eager", "graph-uncompiled"])
@pytest.mark.parametrize("around", AROUND)
def test_made_reset_and_stepped_inside_and_outside_of_torchs_modes(around, mode):
    env = made("Pendulum-v1", mode=mode, seed=1, max_episode_steps=3)
    want = [env.reset(seed=1)[0]] + [env.step(np.full((3, 1), t))[0] for t in range(6)]
    for places in ("made", "reset", "stepped"), ("made",), ("reset", "stepped"), ("stepped",):

        def inside(what, places=places):
            return AROUND[around]() if what in places else contextlib.nullcontext()

        with inside("made"):
            env = made("Pendulum-v1", mode=mode, max_episode_steps=3)
        env.reset()
        with inside("reset"):
            seen = [env.reset(seed=1)[0]]
        for t in range(6):
            with inside("stepped") if t % 2 else contextlib.nullcontext():
                seen.append(env.step(np.full((3, 1), t))[0])
        for a, b in zip(want, seen, strict=True):
            assert torch.equal(a, b), places


@pytest.mark.parametrize("mode", ["eager", "graph-uncompiled"])
def test_under_another_default_dtype(mode):
    torch.set_default_dtype(torch.float64)
    try:
        env = made("Pendulum-v1", mode=mode, seed=1)
        results = [env.reset()[0], *env.step([[0.0]] * 3)[:2]]
    finally:
        torch.set_default_dtype(torch.float32)
    assert {result.dtype for result in results} == {torch.float32}


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_with_block_closes_it_also_after_an_error(backend):
    with made(backend=backend) as env:
        env.reset()
    assert env.closed
    with pytest.raises(KeyError), made(backend=backend) as env:
        raise KeyError("of the caller's own")
    for use in (env.reset, lambda: env.step([0, 1, 0]), lambda: env.steps([[0, 1, 0]])):
        with pytest.raises(ClosedEnvironmentError):
            use()


@pytest.mark.parametrize("agent", ["ppo", "dqn", "sac"])
@pytest.mark.parametrize("around", [torch.inference_mode, torch.no_grad])
def test_a_training_inside_torchs_modes_is_the_same(agent, around, tmp_path):
    env = "Pendulum-v1" if agent == "sac" else "CartPole-v1"
    short = {"num_envs": 4, "num_steps": 8, "total_steps": 128, "eval_episodes": 2, "hidden": (8,)}
    if agent != "ppo":
        short["learning_starts"] = 32
    config = dataclasses.replace(default_config(agent, env), mode="eager", device="cpu", **short)
    policies, returns = [], []
    for name, place in (("plain", contextlib.nullcontext), ("around", around)):
        with place():
            result = train(agent, dataclasses.replace(config, run_dir=str(tmp_path / name)))
        returns.append(result.eval_return_mean)
        policies.append(load_file(tmp_path / name / "policy.safetensors"))
    assert returns[0] == returns[1]
    for name, array in policies[0].items():
        np.testing.assert_array_equal(array, policies[1][name])
