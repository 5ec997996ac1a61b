"""The replay ring on both backends: what it holds, what it draws, and its n-step returns against a plain loop."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from rlgraph.agents.parts import replay_jax, replay_torch
from rlgraph.agents.parts.replay import num_rows
from rlgraph.errors import UsageError
from rlgraph.graph.capture import capture
from rlgraph.rollout import Rollout

BACKENDS = ["torch", "jax"]
GAMMA = 0.9


class Ring:
    """One interface to both backends' rings, numpy in and out."""

    def __init__(self, backend, rollout, capacity, device="cpu"):
        self.backend, self.device = backend, device
        if backend == "torch":
            self.ring = replay_torch.Replay(self._converted(rollout), capacity)
            self.generator = torch.Generator(device).manual_seed(0)
        else:
            self.ring = replay_jax.create(jax.eval_shape(lambda: self._converted(rollout)), capacity)
            self.keys = map(jax.random.key, itertools.count())

    def _converted(self, rollout):
        def convert(x):
            if x is None:
                return None
            return torch.tensor(x, device=self.device) if self.backend == "torch" else jnp.asarray(x)

        return Rollout(*map(convert, rollout))

    def add(self, rollout):
        if self.backend == "torch":
            self.ring.add(self._converted(rollout))
        else:
            self.ring = jax.jit(replay_jax.add, donate_argnums=0)(self.ring, self._converted(rollout))

    def sample(self, batch_size, num_steps=1):
        if self.backend == "torch":
            return self._numpy(self.ring.sample(batch_size, self.generator, num_steps, GAMMA))
        sample = jax.jit(replay_jax.sample, static_argnums=(1, 3, 4))
        return self._numpy(sample(self.ring, batch_size, next(self.keys), num_steps, GAMMA))

    def transitions(self, rows, envs, num_steps):
        if self.backend == "torch":
            return self._numpy(self.ring.transitions(torch.tensor(rows), torch.tensor(envs), num_steps, GAMMA))
        got = jax.jit(replay_jax.transitions, static_argnums=(3, 4))(self.ring, rows, envs, num_steps, GAMMA)
        return self._numpy(got)

    def _numpy(self, batch):
        as_numpy = (lambda x: x.numpy(force=True)) if self.backend == "torch" else np.asarray
        return type(batch)(*map(as_numpy, batch))


def rollout_of(first_step, T=4, B=3, ends=0.3, action_shape=(), seed=0):
    """T steps that say when and where they were taken: obs is (time, environment), final_obs (time + 0.5, environment).

    An end of either kind, or of both at once, with probability `ends` in each step.
    """
    rng = np.random.default_rng((seed, first_step))
    time, env = np.meshgrid(first_step + np.arange(T), np.arange(B), indexing="ij")
    obs = np.stack([time, env], axis=-1).astype(np.float32)
    end = rng.choice(4, (T, B), p=[1 - ends, ends / 3, ends / 3, ends / 3])
    if action_shape:
        action = rng.normal(size=(T, B, *action_shape)).astype(np.float32)
    else:
        action = rng.integers(0, 5, (T, B)).astype(np.int32)
    reward = rng.normal(size=(T, B)).astype(np.float32)
    nothing = np.zeros((T, B), np.float32)
    return Rollout(obs, action, nothing, None, reward, end % 2 == 1, end >= 2, obs + np.float32([0.5, 0]), None)


def joined(rollouts):
    """The rollouts one after the other, as one."""
    return Rollout(*(None if xs[0] is None else np.concatenate(xs) for xs in zip(*rollouts)))


def by_loop(steps, t, b, num_steps):
    """The n-step transition from time t in environment b."""
    reward, k = 0.0, 0
    while True:
        reward += GAMMA**k * steps.reward_TB[t + k, b]
        terminated, truncated = steps.terminated_TB[t + k, b], steps.truncated_TB[t + k, b]
        k += 1
        if terminated or truncated or k == num_steps:
            discount = 0.0 if terminated else GAMMA**k
            return steps.obs[t, b], steps.action[t, b], reward, steps.final_obs[t + k - 1, b], discount


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("num_steps", [1, 2, 5])
def test_transitions_are_those_of_a_loop_from_every_step_of_a_ring_that_has_wrapped(backend, num_steps):
    rollouts = [rollout_of(4 * i) for i in range(5)]
    ring = Ring(backend, rollouts[0], capacity=36)  # 12 rows, so that 8 of the 20 are written over
    for rollout in rollouts:
        ring.add(rollout)
    steps = joined(rollouts)
    ts, bs = (x.reshape(-1) for x in np.meshgrid(np.arange(8, 20 - num_steps + 1), np.arange(3), indexing="ij"))
    got = ring.transitions((ts % 12).astype(np.int32), bs.astype(np.int32), num_steps)
    expected = zip(*(by_loop(steps, t, b, num_steps) for t, b in zip(ts, bs)))
    for name, a, b in zip(got._fields, got, expected):
        np.testing.assert_allclose(a, np.array(b), rtol=1e-5, atol=1e-6, err_msg=name)
    assert got.reward.dtype == got.discount.dtype == np.float32


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_position_and_kind_of_end_within_a_window(backend):
    """All 4^3 ways in which three steps can end, one an environment."""
    ends = np.array(list(itertools.product(range(4), repeat=3))).T
    rollout = rollout_of(0, T=3, B=64)._replace(terminated_TB=ends % 2 == 1, truncated_TB=ends >= 2)
    ring = Ring(backend, rollout, capacity=3 * 64)
    ring.add(rollout)
    got = ring.transitions(np.zeros(64, np.int32), np.arange(64, dtype=np.int32), 3)
    expected = zip(*(by_loop(rollout, 0, b, 3) for b in range(64)))
    for name, a, b in zip(got._fields, got, expected):
        np.testing.assert_allclose(a, np.array(b), rtol=1e-5, atol=1e-6, err_msg=name)
    assert sorted({round(float(d), 3) for d in got.discount}) == [0, 0.729, 0.81, 0.9]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_infinity_and_nan_stay_in_their_episode(backend, bad):
    """Rewards after the end that a window holds, and values of what follows a termination."""
    ends = np.array(list(itertools.product(range(4), repeat=3))).T
    rollout = rollout_of(0, T=3, B=64)._replace(terminated_TB=ends % 2 == 1, truncated_TB=ends >= 2)
    for row in range(3):
        reward = rollout.reward_TB.copy()
        reward[row] = bad
        ring = Ring(backend, rollout, capacity=3 * 64)
        ring.add(rollout._replace(reward_TB=reward))
        got = ring.transitions(np.zeros(64, np.int32), np.arange(64, dtype=np.int32), 3)
        expected = [by_loop(rollout._replace(reward_TB=reward), 0, b, 3)[2] for b in range(64)]
        np.testing.assert_allclose(got.reward, expected, rtol=1e-5, atol=1e-6)
        assert np.isfinite(got.reward).sum() == (0, 48, 60)[row]
    module, array = (replay_torch, torch.tensor) if backend == "torch" else (replay_jax, jnp.asarray)
    value = module.discounted(array([0.0, 0.0, 0.9, 0.9]), array([bad, 1.0, bad, 1.0]))
    np.testing.assert_allclose(np.asarray(value), [0, 0, bad, 0.9], rtol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("added", [1, 2, 3, 4, 7])
def test_draws_are_uniform_over_the_steps_whose_window_is_stored(backend, added):
    """Never a step that was written over or is yet to come, nor one whose window would run past the newest row."""
    rollouts, num_steps, M = [rollout_of(4 * i, ends=0.0) for i in range(added)], 3, 20_000
    ring = Ring(backend, rollouts[0], capacity=30)  # rounded up to 12 rows of 3
    for rollout in rollouts:
        ring.add(rollout)
    got = ring.sample(M, num_steps)
    newest, oldest = 4 * added - 1, max(0, 4 * added - 12)
    times = np.arange(oldest, newest - num_steps + 2)
    seen, counts = np.unique(got.obs, axis=0, return_counts=True)
    assert sorted(map(tuple, seen)) == [(t, b) for t in times for b in range(3)]
    probability = 1 / len(seen)
    assert (abs(counts / M - probability) < 5 * np.sqrt(probability / M)).all()
    np.testing.assert_array_equal(got.next_obs - got.obs, np.broadcast_to([num_steps - 0.5, 0], (M, 2)))
    steps = joined(rollouts)
    t, b = got.obs.astype(int).T
    np.testing.assert_array_equal(got.action, steps.action[t, b])
    assert differ(got.obs, ring.sample(M, num_steps).obs)


def differ(a, b):
    return not np.array_equal(a, b)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_ring_is_whole_rollouts_and_keeps_the_actions_dtype(backend):
    discrete, box = rollout_of(0), rollout_of(0, action_shape=(2, 1))
    for rollout, capacity, S in ((discrete, 1, 4), (discrete, 12, 4), (discrete, 13, 8), (box, 30, 12)):
        ring = Ring(backend, rollout, capacity)
        assert tuple(ring.ring.reward.shape) == (S, 3)
        assert tuple(ring.ring.action.shape) == (S, *rollout.action.shape[1:])
        for i in range(4):
            ring.add(rollout_of(4 * i, action_shape=rollout.action.shape[2:]))
            assert (int(ring.ring.cursor), int(ring.ring.fill)) == (4 * (i + 1) % S, min(4 * (i + 1), S))
        assert ring.sample(5).action.dtype == rollout.action.dtype
    assert num_rows(2**23, 1, 1) == 2**23
    with pytest.raises(UsageError, match="has 8388609 rows, more than 8388608"):
        num_rows(2**23 + 1, 1, 1)


def test_torchs_state_names_every_tensor_and_nothing_is_reallocated():
    rollout = Ring("torch", rollout_of(0), 1)._converted(rollout_of(0))
    ring = replay_torch.Replay(rollout, 24)
    before = {name: tensor.data_ptr() for name, tensor in ring.state().items()}
    ring.add(rollout)
    assert {name: tensor.data_ptr() for name, tensor in ring.state().items()} == before
    tensors = {name for name, value in vars(ring).items() if isinstance(value, torch.Tensor)}
    assert set(before) == tensors


@pytest.mark.parametrize("backend", BACKENDS)
def test_with_fewer_rows_than_a_window_a_draw_is_still_of_finite_numbers(backend):
    ring = Ring(backend, rollout_of(0), 24)
    for _ in range(2):
        batch = ring.sample(7, num_steps=6)
        assert batch.obs.shape == (7, 2)
        assert all(np.isfinite(x).all() for x in batch)
        ring.add(rollout_of(0))


@pytest.mark.gpu
def test_captured_adding_and_drawing_equals_eager():
    def run(captured):
        ring = Ring("torch", rollout_of(0), 24, "cuda")
        rollout = ring._converted(rollout_of(0))

        def turn():
            rollout.obs.add_(1)
            ring.ring.add(rollout)
            return ring.ring.sample(50, ring.generator, 3, GAMMA)

        state = [rollout.obs, ring.ring.state()]
        step = capture(turn, state=state, generators=[ring.generator]).replay if captured else turn
        return [ring._numpy(step()) for _ in range(5)]

    for a, b in zip(run(False), run(True)):
        for x, y in zip(a, b):
            np.testing.assert_array_equal(x, y)
