"""Advantages and returns in one kernel each, against plain loops over time in float64.

Without a GPU, Triton runs the kernels in Python: small sizes. With one, the tests marked `gpu` run.
"""

import numpy as np
import pytest
import torch
from fused_tools import DEVICES
from returns_tools import gae_by_loop, lambda_returns_by_loop, returns_by_loop

import rlgraph
from rlgraph.agents.parts import returns_torch
from rlgraph.agents.ppo.config import PPOConfig
from rlgraph.agents.ppo.torch import PPO

pytest.importorskip("triton", reason="needs the package triton, which is for Linux only")
from rlgraph.kernels import returns

pytestmark = pytest.mark.usefixtures("quick_interpreter")
on_devices = pytest.mark.parametrize("device", DEVICES)

SHAPES = [(1, 1), (1, 40), (2, 5), (7, 40), (128, 1), (300, 2)]  # one block and several, and one chunk and several
BY_LOOP = {"gae": gae_by_loop, "discounted_returns": returns_by_loop, "lambda_returns": lambda_returns_by_loop}


def inputs(T, B, seed=0):
    """Of each function. An episode ends in a fifth of the steps by each cause; in some by both."""
    rng = np.random.default_rng(seed)
    reward, value, final_value, start = (rng.normal(size=shape).astype(np.float32) for shape in [(T, B)] * 3 + [B])
    terminated, truncated = rng.random((2, T, B)) < 0.2
    return {
        "gae": (reward, value, final_value, terminated, truncated),
        "discounted_returns": (reward, terminated | truncated, start),
        "lambda_returns": (reward, final_value, terminated, truncated),
    }


def run(name, arrays, *discounts, device, module=returns):
    """A tuple of numpy arrays."""
    tensors = (torch.tensor(array, device=device) for array in arrays)
    result = getattr(module, name)(*tensors, *discounts)
    return tuple(x.numpy(force=True) for x in (result if isinstance(result, tuple) else (result,)))


def discounts_of(name, gamma, mix):
    return (gamma,) if name == "discounted_returns" else (gamma, mix)


def check_equal_to_the_loop(arrays, gamma, mix, device):
    for name, by_loop in BY_LOOP.items():
        discounts = discounts_of(name, gamma, mix)
        got, expected = run(name, arrays[name], *discounts, device=device), by_loop(*arrays[name], *discounts)
        for a, b in zip(got, expected if isinstance(expected, tuple) else (expected,), strict=True):
            assert a.shape == b.shape and a.dtype == np.float32
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * np.abs(b).max(), err_msg=name)


@on_devices
@pytest.mark.parametrize(("T", "B"), SHAPES)
def test_they_are_the_loop(T, B, device):
    check_equal_to_the_loop(inputs(T, B), 0.99, 0.95, device)


@on_devices
@pytest.mark.parametrize(("gamma", "mix"), [(1.0, 1.0), (1, 0), (0.0, 0.9)])
def test_they_are_the_loop_at_the_ends_of_the_discounts(gamma, mix, device):
    check_equal_to_the_loop(inputs(7, 5), gamma, mix, device)


@on_devices
@pytest.mark.parametrize("T", [5, 140])
def test_an_episode_without_an_end_is_summed_over_all_chunks(T, device):
    arrays = {name: [np.zeros_like(x) if x.dtype == bool else x for x in parts] for name, parts in inputs(T, 2).items()}
    check_equal_to_the_loop(arrays, 1.0, 1.0, device)


@on_devices
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_what_is_no_number_stays_in_its_environment(device):
    B = 20  # two blocks
    disturbed = inputs(6, B)
    for parts in disturbed.values():
        for x in parts:
            if x.dtype != bool:
                x[..., 3], x[..., 17] = np.nan, np.inf
    others = np.setdiff1d(np.arange(B), [3, 17])
    for name, parts in inputs(6, B).items():
        discounts = discounts_of(name, 0.9, 0.8)
        clean, got = (run(name, arrays, *discounts, device=device) for arrays in (parts, disturbed[name]))
        for a, b in zip(got, clean, strict=True):
            np.testing.assert_array_equal(a[..., others], b[..., others], err_msg=name)
            assert np.isnan(a[..., 3]).any()


@on_devices
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_infinity_and_nan_stay_in_their_episode(device):
    T, B, rng = 140, 16, np.random.default_rng(1)  # two chunks
    for name, parts in inputs(T, B).items():
        disturbed = [x.copy() for x in parts]
        for x in disturbed:
            if x.shape == (T, B) and x.dtype != bool:
                x[rng.integers(T, size=B), np.arange(B)] = rng.choice([np.inf, -np.inf, np.nan], B)
        discounts = discounts_of(name, 0.9, 0.8)
        got, expected = run(name, disturbed, *discounts, device=device), BY_LOOP[name](*disturbed, *discounts)
        assert 0 < np.isfinite(got[0]).sum() < T * B
        for a, b in zip(got, expected if isinstance(expected, tuple) else (expected,), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-4, err_msg=name)


@on_devices
def test_what_a_terminated_episode_led_to_counts_for_nothing_even_if_it_is_no_number(device):
    for name, position in (("gae", 2), ("lambda_returns", 1)):
        parts = list(inputs(6, 5)[name])
        terminated, expected = parts[-2], run(name, parts, 0.9, 0.8, device=device)
        assert terminated.any() and not terminated.all()
        for bad in (np.nan, np.inf):
            parts[position] = np.where(terminated, np.float32(bad), parts[position])
            np.testing.assert_array_equal(run(name, parts, 0.9, 0.8, device=device), expected)


@on_devices
def test_any_strides_will_do(device):
    """A transposed view reads as its copy, and the results are new tensors with strides of their own."""
    for name, parts in inputs(6, 5).items():
        tensors = [torch.tensor(x, device=device) for x in parts]
        transposed = [x.t().contiguous().t() if x.ndim == 2 else x.repeat_interleave(2)[::2] for x in tensors]
        got, expected = (getattr(returns, name)(*xs, *discounts_of(name, 0.9, 0.8)) for xs in (transposed, tensors))
        for a, b in zip(*(x if isinstance(x, tuple) else (x,) for x in (got, expected)), strict=True):
            assert a.is_contiguous() and torch.equal(a, b)


@on_devices
@pytest.mark.usefixtures("own_kernel_cache")
@pytest.mark.filterwarnings("ignore:no CUDA graph on cpu")
def test_ppo_takes_them_in_mode_fused(device):
    sizes = {"num_envs": 5, "num_steps": 6, "num_minibatches": 1, "hidden": (4,)}
    fused, eager = (
        PPO(PPOConfig(mode=mode, device=device, normalize_reward=True, **sizes), rlgraph.make("CartPole-v1"))
        for mode in ("fused", "eager")
    )
    assert fused._returns is returns and eager._returns is returns_torch
    reward, value, final_value, terminated, truncated = (torch.tensor(x, device=device) for x in inputs(6, 5)["gae"])
    rollout = fused.collector.rollout._replace(
        reward_TB=reward,
        value_TB=value,
        final_value_TB=final_value,
        terminated_TB=terminated,
        truncated_TB=truncated,
    )
    for _ in range(2):  # the second goes on with the first one's returns
        got, expected = (agent._advantages(rollout).advantage for agent in (fused, eager))
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    assert fused.reward_return_B.any()
    torch.testing.assert_close(fused.reward_return_B, eager.reward_return_B, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize(("T", "B"), [(128, 4096), (1000, 4096), (33, 65_537)])
def test_large_arrays_give_what_the_plain_version_gives(T, B):
    for name, parts in inputs(T, B).items():
        discounts = discounts_of(name, 0.99, 0.95)
        got, expected = (run(name, parts, *discounts, device="cuda", module=m) for m in (returns, returns_torch))
        for a, b in zip(got, expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-4, err_msg=name)
