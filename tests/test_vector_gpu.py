"""Vector environments on a GPU: the captured step against the eager one, and actions that nobody reads."""

import numpy as np
import pytest

import rlgraph

pytestmark = pytest.mark.gpu
FAST = {"torch": ["graph-uncompiled", "graph", "compile"], "jax": ["graph", "jit"]}


def run(name, backend, mode, autoreset_mode, steps):
    """Everything that `steps` steps return, as numpy, with resets between and a reseed after the capture."""
    env = rlgraph.make_vec(
        name,
        16,
        backend,
        device="cuda",
        mode=mode,
        seed=4,
        autoreset_mode=autoreset_mode,
        max_episode_steps=30,
    )
    rng = np.random.default_rng(0)
    kept = [env.reset()[0]]
    for t in range(steps):
        if t % 100 == 50:
            kept.append(env.reset()[0])
        if t % 100 == 80:
            kept.append(env.reset(seed=t)[0])
        if t % 100 == 90:
            kept.append(env.reset(options={"reset_mask": np.arange(16) % 3 == 0})[0])
        actions = rng.uniform(-2, 2, (16, 1)) if name == "Pendulum-v1" else rng.integers(2, size=16)
        *results, infos = env.step(actions)
        kept += [*results, *(infos[key] for key in ("final_obs", "_final_obs") if key in infos)]
    env.close()
    return [np.asarray(x.cpu() if backend == "torch" else x) for x in kept]


@pytest.mark.parametrize("autoreset_mode", ["NextStep", "SameStep"])
@pytest.mark.parametrize("name", ["CartPole-v1", "Pendulum-v1"])
def test_the_captured_step_equals_the_eager_one_to_the_last_bit(name, autoreset_mode):
    eager = run(name, "torch", "eager", autoreset_mode, 400)
    captured = run(name, "torch", "graph-uncompiled", autoreset_mode, 400)
    for a, b in zip(eager, captured, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("backend", FAST)
def test_every_mode_computes_the_same(backend):
    # Compiled kernels round differently and the difference grows, so: few steps.
    plain = run("Pendulum-v1", backend, "eager", "SameStep", 20)
    for mode in FAST[backend]:
        for a, b in zip(plain, run("Pendulum-v1", backend, mode, "SameStep", 20), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4)


def test_the_compiled_graph_equals_the_compiled_step_to_the_last_bit():
    runs = (run("CartPole-v1", "torch", mode, "SameStep", 200) for mode in ("compile", "graph"))
    for a, b in zip(*runs, strict=True):
        np.testing.assert_array_equal(a, b)


def own(backend, values):
    if backend == "torch":
        import torch

        return torch.tensor(values, device="cuda")
    import jax

    return jax.device_put(np.array(values), jax.devices("gpu")[0])


@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize("trigger", ["steps", "reset", "close", "numpy"])
def test_an_action_out_of_range_on_the_gpu_is_caught(backend, trigger):
    output = "numpy" if trigger == "numpy" else "tensor"
    env = rlgraph.make_vec("CartPole-v1", 2, backend, device="cuda", output=output)
    env.reset()
    good, bad = own(backend, [0, 1]), own(backend, [0, 2])
    env.step(good)
    if trigger == "numpy":
        with pytest.raises(ValueError, match="last 1 steps"):
            env.step(bad)
        return
    env.step(bad)
    with pytest.raises(ValueError, match=r"outside \[0, 1\].*one of the last"):
        if trigger == "steps":
            for _ in range(255):
                env.step(good)
        else:
            getattr(env, trigger)()
    with pytest.raises(ValueError, match=r"in \[0, 1\], got 0 to 2"):
        env = rlgraph.make_vec("CartPole-v1", 2, backend, device="cuda")
        env.reset()
        env.step([0, 2])  # on the host: at once


def test_a_step_does_not_wait_for_the_gpu():
    import torch

    env = rlgraph.make_vec("CartPole-v1", 64, device="cuda", autoreset_mode="SameStep")
    env.reset()
    actions = own("torch", [0, 1] * 32)
    env.step(actions)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(20):
            env.step(actions)
    finally:
        torch.cuda.set_sync_debug_mode("default")
