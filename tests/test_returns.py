"""Advantages, discounted returns and running moments, on both backends, against plain loops over time."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from returns_tools import gae_by_loop, lambda_returns_by_loop, returns_by_loop

from rlgraph.agents.parts import moments_jax, moments_torch, returns_jax, returns_torch

BACKENDS = ["torch", "jax"]
LENGTHS = range(1, 10)  # powers of two and others
GAMMA, LAMBDA = 0.9, 0.8


def run(backend, name, *arrays, **numbers):
    """A function of returns_torch or returns_jax on numpy arrays, result in numpy."""
    if backend == "torch":
        result = getattr(returns_torch, name)(*map(torch.tensor, arrays), **numbers)
    else:  # compiled, as in training; operation by operation would compile each of them for each shape
        result = jax.jit(functools.partial(getattr(returns_jax, name), **numbers))(*arrays)
    return [np.asarray(part) for part in result] if isinstance(result, tuple) else np.asarray(result)


def every_way_to_end(T):
    """terminated and truncated [T, 4^T]: in each row neither, one, the other or both, in every combination."""
    kinds = np.array(list(itertools.product(range(4), repeat=T)), dtype=np.int8).T
    return (kinds & 1).astype(bool), (kinds & 2).astype(bool)


def numbers(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def lambda_returns_by_definition(reward, final_value, terminated, truncated):
    """The mixture of n-step returns with weights (1 - lambda) lambda^(n-1), the longest one with all that is left."""
    T, mixture = len(reward), np.zeros(reward.shape)
    for t in range(T):
        rewards, going_on = np.zeros(reward.shape[1]), np.ones(reward.shape[1], bool)
        for n, k in enumerate(range(t, T), start=1):
            rewards += GAMMA ** (n - 1) * reward[k]
            n_step = rewards + GAMMA**n * np.where(terminated[k], 0, final_value[k])
            longest = terminated[k] | truncated[k] | (k == T - 1)
            mixture[t] += going_on * np.where(longest, 1, 1 - LAMBDA) * LAMBDA ** (n - 1) * n_step
            going_on &= ~longest
    return mixture


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("T", LENGTHS)
def test_linear_scan_is_the_recurrence(backend, T):
    c, x = numbers(0, T, 7), numbers(1, T, 7)
    expected, y = np.zeros((T, 7)), np.zeros(7)
    for t in reversed(range(T)):
        expected[t] = y = x[t] + c[t] * y
    np.testing.assert_allclose(run(backend, "linear_scan", c, x), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("T", LENGTHS)
def test_gae_equals_the_loop_wherever_and_however_episodes_end(backend, T):
    terminated, truncated = every_way_to_end(T)
    reward, value, final_value = (numbers(seed, *terminated.shape) for seed in range(3))
    got = run(backend, "gae", reward, value, final_value, terminated, truncated, gamma=GAMMA, gae_lambda=LAMBDA)
    expected = gae_by_loop(reward, value, final_value, terminated, truncated, GAMMA, LAMBDA)
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_gae_by_hand(backend):
    """Three steps, small numbers, worked out on paper: gamma = 0.5, lambda = 0.5."""
    reward, value, final_value = (np.full((3, 4), x, np.float32) for x in (1, 2, 4))
    terminated, truncated = np.zeros((2, 3, 4), bool)
    terminated[1, 1] = truncated[1, 2] = terminated[1, 3] = truncated[1, 3] = True
    got = run(backend, "gae", reward, value, final_value, terminated, truncated, gamma=0.5, gae_lambda=0.5)
    # delta is 1 + 0.5 * 4 - 2 = 1, but 1 - 2 = -1 where the episode terminated; each earlier step adds a quarter.
    assert got[:, 0].tolist() == [1.3125, 1.25, 1]  # goes on beyond the rollout
    assert got[:, 1].tolist() == [0.75, -1, 1]  # terminated in the middle
    assert got[:, 2].tolist() == [1.25, 1, 1]  # truncated in the middle
    assert got[:, 3].tolist() == [0.75, -1, 1]  # both: it terminated


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("T", LENGTHS)
def test_lambda_returns_equal_the_loop_wherever_and_however_episodes_end(backend, T):
    terminated, truncated = every_way_to_end(T)
    reward, final_value = (numbers(seed, *terminated.shape) for seed in range(2))
    got = run(backend, "lambda_returns", reward, final_value, terminated, truncated, gamma=GAMMA, q_lambda=LAMBDA)
    expected = lambda_returns_by_definition(reward, final_value, terminated, truncated)
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_lambda_returns_by_hand(backend):
    """Three steps, small numbers, worked out on paper: gamma = 0.5, lambda = 0.5."""
    reward, final_value = (np.full((3, 4), x, np.float32) for x in (1, 4))
    terminated, truncated = np.zeros((2, 3, 4), bool)
    terminated[1, 1] = truncated[1, 2] = terminated[1, 3] = truncated[1, 3] = True
    got = run(backend, "lambda_returns", reward, final_value, terminated, truncated, gamma=0.5, q_lambda=0.5)
    # 1 + 0.5 * 4 = 3 where nothing follows, 1 where the episode terminated, else 1 + 0.5 (2 + G / 2).
    assert got[:, 0].tolist() == [2.6875, 2.75, 3]  # goes on beyond the rollout
    assert got[:, 1].tolist() == [2.25, 1, 3]  # terminated in the middle
    assert got[:, 2].tolist() == [2.75, 3, 3]  # truncated in the middle
    assert got[:, 3].tolist() == [2.25, 1, 3]  # both: it terminated


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("T", [1, 2, 7])
def test_lambda_returns_between_one_step_and_the_whole_episode(backend, T):
    """lambda = 0 is the one-step target of Q-learning, lambda = 1 the discounted sum up to the end."""
    terminated, truncated = every_way_to_end(T)
    reward, final_value = (numbers(seed, *terminated.shape) for seed in range(2))
    after = np.where(terminated, 0, GAMMA * final_value)
    arrays = (reward, final_value, terminated, truncated)
    got = run(backend, "lambda_returns", *arrays, gamma=GAMMA, q_lambda=0.0)
    np.testing.assert_allclose(got, reward + after, rtol=1e-5, atol=1e-6)
    ends = terminated | truncated
    ends[-1] = True
    backwards, _ = returns_by_loop(
        (reward + after * ends)[::-1], np.roll(ends[::-1], -1, axis=0), np.zeros(4**T), GAMMA
    )
    got = run(backend, "lambda_returns", *arrays, gamma=GAMMA, q_lambda=1.0)
    np.testing.assert_allclose(got, backwards[::-1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["terminated", "truncated"])
@pytest.mark.parametrize("T", [1, 2, 7])
def test_nothing_leaks_into_the_episode_before_or_after(backend, kind, T):
    """Huge numbers beyond the end, in column `end` after row `end`, change nothing before it, to the last bit."""
    flags = {"terminated": np.zeros((T, T), bool), "truncated": np.zeros((T, T), bool)}
    flags[kind] = np.eye(T, dtype=bool)
    reward, value, final_value = (numbers(seed, T, T) for seed in range(3))
    after = np.arange(T)[:, None] > np.arange(T)
    huge = [np.where(after, np.float32(1e9), x) for x in (reward, value, final_value)]
    ends, parameters = (flags["terminated"], flags["truncated"]), {"gamma": GAMMA, "gae_lambda": LAMBDA}
    got, disturbed = (run(backend, "gae", *xs, *ends, **parameters) for xs in ([reward, value, final_value], huge))
    np.testing.assert_array_equal(got[~after], disturbed[~after])
    parameters = {"gamma": GAMMA, "q_lambda": LAMBDA}
    pairs = ((reward, final_value), huge[::2])
    got, disturbed = (run(backend, "lambda_returns", *xs, *ends, **parameters) for xs in pairs)
    np.testing.assert_array_equal(got[~after], disturbed[~after])

    huge_before = np.where(after, reward, np.float32(1e9))  # returns run forwards
    start = numbers(3, T)
    got, disturbed = (
        run(backend, "discounted_returns", r, flags[kind], start, gamma=GAMMA)[0] for r in (reward, huge_before)
    )
    np.testing.assert_array_equal(got[after], disturbed[after])


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_a_terminated_episode_led_to_counts_for_nothing_even_if_it_is_no_number(backend):
    terminated, truncated = every_way_to_end(3)
    reward, value, final_value = (numbers(seed, *terminated.shape) for seed in range(3))
    broken = np.where(terminated, np.array([np.nan, np.inf, -np.inf], np.float32)[:, None], final_value)
    gae_of, lambda_returns_of = (
        lambda final: run(backend, "gae", reward, value, final, terminated, truncated, gamma=1.0, gae_lambda=1.0),
        lambda final: run(backend, "lambda_returns", reward, final, terminated, truncated, gamma=1.0, q_lambda=0.5),
    )
    np.testing.assert_array_equal(gae_of(broken), gae_of(final_value))
    np.testing.assert_array_equal(lambda_returns_of(broken), lambda_returns_of(final_value))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("T", LENGTHS)
def test_discounted_returns_equal_the_loop_and_carry_over(backend, T):
    """Ends in every combination of rows; two rollouts, one after the other, are one long rollout."""
    done = np.array(list(itertools.product([False, True], repeat=T))).T
    reward, start = numbers(0, *done.shape), numbers(1, done.shape[1])
    expected, carried = returns_by_loop(reward, done, start, GAMMA)
    g, carry = run(backend, "discounted_returns", reward, done, start, gamma=GAMMA)
    np.testing.assert_allclose(g, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(carry, carried, rtol=1e-4, atol=1e-5)
    assert (carry[done[-1]] == 0).all()
    for cut in {T // 2} - {0}:
        first, carry = run(backend, "discounted_returns", reward[:cut], done[:cut], start, gamma=GAMMA)
        second, carry = run(backend, "discounted_returns", reward[cut:], done[cut:], carry, gamma=GAMMA)
        np.testing.assert_allclose(np.concatenate([first, second]), g, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(carry, carried, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_infinity_and_nan_stay_in_their_episode(backend):
    """One in each array at every step, wherever and however episodes end: it reaches what it reaches in a loop."""
    T, (terminated, truncated) = 4, every_way_to_end(4)
    columns, cases = terminated.shape[1], list(itertools.product(range(3), range(T), [np.inf, -np.inf, np.nan]))
    terminated, truncated = (np.tile(x, len(cases)) for x in (terminated, truncated))
    arrays = [numbers(seed, *terminated.shape) for seed in range(3)]
    for i, (which, t, bad) in enumerate(cases):
        arrays[which][t, i * columns : (i + 1) * columns] = bad
    reward, value, final_value = arrays
    ends, done, start = (terminated, truncated), terminated | truncated, numbers(3, terminated.shape[1])
    got = run(backend, "gae", reward, value, final_value, *ends, gamma=GAMMA, gae_lambda=LAMBDA)
    np.testing.assert_allclose(got, gae_by_loop(reward, value, final_value, *ends, GAMMA, LAMBDA), rtol=1e-4, atol=1e-5)
    got = run(backend, "lambda_returns", reward, final_value, *ends, gamma=GAMMA, q_lambda=LAMBDA)
    expected = lambda_returns_by_loop(reward, final_value, *ends, GAMMA, LAMBDA)
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)
    got = run(backend, "discounted_returns", reward, done, start, gamma=GAMMA)
    for a, b in zip(got, returns_by_loop(reward, done, start, GAMMA)):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_discount_or_lambda_of_zero_or_one_lets_nothing_through_that_it_leaves_out(backend):
    nothing, bad = np.zeros((3, 2), bool), np.array([[1, np.nan], [np.inf, 2], [-np.inf, 3]], np.float32)
    value = np.zeros((3, 2), np.float32)
    got = run(backend, "gae", bad, value, value, nothing, nothing, gamma=0.9, gae_lambda=0.0)
    np.testing.assert_array_equal(got, bad)
    g, carried = run(backend, "discounted_returns", bad, nothing, np.ones(2, np.float32), gamma=0.0)
    np.testing.assert_array_equal(g, bad)
    np.testing.assert_array_equal(carried, bad[-1])
    final_value = np.array([[np.inf] * 2, [np.nan] * 2, [1, 1]], np.float32)
    got = run(backend, "lambda_returns", value, final_value, nothing, nothing, gamma=1.0, q_lambda=1.0)
    np.testing.assert_array_equal(got, np.ones((3, 2)))


def merge_all(backend, batches, count=1e-4):
    """Mean and variance [D], and count, after merging the batches one by one."""
    D = batches[0].shape[1]
    if backend == "torch":
        mean, var, count = torch.zeros(D), torch.ones(D), torch.tensor(count)
        for batch in batches:
            moments_torch.merge_moments(mean, var, count, torch.tensor(batch))
        return mean.numpy(), var.numpy(), count.item()
    moments = moments_jax.Moments(jnp.zeros(D), jnp.ones(D), jnp.float32(count))
    for batch in batches:
        moments = moments_jax.merge_moments(moments, jnp.asarray(batch))
    return np.asarray(moments.mean_D), np.asarray(moments.var_D), float(moments.count)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("sizes", [[100], [1, 1, 1, 1], [64] * 20, [1, 500, 3, 40]])
def test_merged_moments_are_those_of_all_rows(backend, sizes):
    """Columns of very different size and spread; the mean drifts from batch to batch."""
    scale, offset = np.array([1, 1e-3, 1e3], np.float32), np.array([0, 5, -300], np.float32)
    batches = [offset + scale * (numbers(i, n, 3) + np.float32(i)) for i, n in enumerate(sizes)]
    mean, var, count = merge_all(backend, batches, count=1e-8)
    rows = np.concatenate(batches).astype(np.float64)
    assert count == pytest.approx(len(rows))
    np.testing.assert_allclose(mean, rows.mean(axis=0), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(var, rows.var(axis=0), rtol=2e-3, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_moments_of_one_constant_stay_finite(backend):
    mean, var, _ = merge_all(backend, [np.full((50, 1), 7, np.float32)] * 3)
    assert mean[0] == pytest.approx(7, rel=1e-4)
    assert 0 <= var[0] < 1e-3
