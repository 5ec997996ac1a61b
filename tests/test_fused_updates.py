"""PPO's updates in kernels: the same gradients, steps and metrics as autograd's and torch's Adam, on the same rows.

Without a GPU, Triton runs the kernels in Python: small sizes. With one, the tests marked `gpu` run.
"""

import dataclasses
import math

import numpy as np
import pytest
import torch
from agent_tools import everything, iterate
from fused_tools import DEVICES, make_env, make_policy

from rlgraph.agents.ppo.config import PPOConfig
from rlgraph.agents.ppo.torch import PPO, Batch, ppo_loss
from rlgraph.kernels import gradients
from rlgraph.precision import torch_matmul_precision
from rlgraph.rollout.torch import Collector

pytest.importorskip("triton", reason="needs the package triton, which is for Linux only")
import triton
import triton.language as tl

from rlgraph.kernels import library
from rlgraph.kernels import ppo_updates as ppo_fused
from rlgraph.kernels.adam import NORM, SUMS
from rlgraph.kernels.ppo_updates import FusedUpdates
from rlgraph.kernels.shuffle import Shuffle

SMALL = PPOConfig(num_envs=6, num_steps=10, num_minibatches=2, num_epochs=1, hidden=(8,), mode="fused", device="cpu")


class Fixture:
    """A policy whose numbers all matter, a rollout of its own, and what its updates in kernels give."""

    def __init__(self, env, device="cpu", **changes):
        self.env = make_env(env, max_episode_steps=7)
        self.config = dataclasses.replace(SMALL, env=env, device=device, **changes)
        self.generator = torch.Generator(device).manual_seed(0)
        self.policy = make_policy(self.env, self.config.hidden, self.config.activation, device).requires_grad_(True)
        self.rollout = self._rollout()
        self.advantage_TB = 2 + 3 * self._randn()
        self.learning_rate = torch.tensor(0.01, device=device)
        self.iteration = torch.zeros((), dtype=torch.int64, device=device)

    def updates(self):
        given = (self.config, self.learning_rate, self.iteration, self.generator)
        return FusedUpdates(self.env, self.policy, *given)

    def batch(self, dtype=torch.float32):
        steps = self.rollout
        arrays = (steps.obs, steps.action, steps.log_prob_TB, steps.value_TB, self.advantage_TB)
        arrays = (x.flatten(0, 1) for x in arrays)
        return Batch(*(x.to(dtype) if x.is_floating_point() else x for x in arrays))

    def reference(self):
        """A policy with the same numbers."""
        policy = PPO.build_policy(self.config, self.env)
        policy.load_state_dict(self.policy.state_dict())
        return policy

    def _randn(self):
        shape = (self.config.num_steps, self.config.num_envs)
        return torch.randn(shape, generator=self.generator, device=self.generator.device)

    def _rollout(self):
        """Another policy's: ratios leave the clip range, values are off."""
        sizes = (self.config.num_envs, self.config.num_steps, self.generator)
        steps = Collector(self.env, self.policy.act, self.policy.value, *sizes).collect()[0]
        steps.log_prob_TB.add_(0.2 * self._randn())
        steps.value_TB.add_(self._randn())
        return steps


def gradient(policy, batch, rows_M, config):
    policy.zero_grad()
    loss, metrics = ppo_loss(policy, batch, rows_M, config)
    loss.backward()
    return torch.cat([p.grad.reshape(-1) for p in policy.parameters()]), metrics


def distance(a, b):
    return float((a.double() - b.double()).norm() / b.double().norm())


CASES = {
    "CartPole-v1": {"num_epochs": 2},
    "Acrobot-v1": {"hidden": (24, 40, 16), "activation": "silu", "entropy_coef": 0.01, "clip_value": 0.5},
    "Pendulum-v1": {"hidden": (16, 8), "activation": "relu", "entropy_coef": 0.01, "normalize_advantage": False},
    "MountainCar-v0": {"hidden": (20, 20), "num_envs": 7, "num_steps": 5, "num_minibatches": 5, "target_kl": 0.05},
    "MountainCarContinuous-v0": {"num_envs": 1, "num_steps": 40, "num_minibatches": 1, "num_epochs": 3},
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("env", CASES)
def test_updates_are_autograds_and_adams(env, device):
    """Every minibatch's gradient, norm and metrics; parameters and moments after all of them."""
    fixture = Fixture(env, device, precision="ieee", **CASES[env])
    config, reference, batch = fixture.config, fixture.reference(), fixture.batch()
    adam = torch.optim.Adam(reference.parameters(), lr=0.01, eps=1e-5)
    updates = fixture.updates()
    sums = updates.run(fixture.rollout, fixture.advantage_TB)
    expected, stopped = torch.zeros(7, device=device), False
    for total_C, rows_M in zip(updates.totals, updates.shuffle.order_UM.long(), strict=True):
        flat, metrics = gradient(reference, batch, rows_M, config)
        assert distance(total_C[SUMS:], flat) < 1e-5
        norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), config.max_grad_norm)
        assert float(total_C[NORM]) == pytest.approx(float(norm), rel=1e-5)
        stopped = stopped or (config.target_kl is not None and float(metrics[3]) > config.target_kl)
        if not stopped:
            adam.step()
            if env in ("Pendulum-v1", "MountainCarContinuous-v0"):
                reference.distribution.bound_()
        expected += torch.stack([*metrics, norm, torch.tensor(float(not stopped), device=device)])
    torch.testing.assert_close(sums, expected, rtol=1e-4, atol=1e-5)
    assert stopped == (config.target_kl is not None)
    mine = updates.adam.state()
    for parameter, other, state in zip(fixture.policy.parameters(), reference.parameters(), mine, strict=True):
        torch.testing.assert_close(parameter, other, rtol=1e-4, atol=1e-4)
        for name, moment in adam.state[other].items():
            assert float((state[name].cpu() - moment.cpu()).abs().max()) <= 1e-4 * float(moment.abs().max()) + 1e-8


@pytest.mark.parametrize("device", DEVICES)
def test_many_outputs_are_summed_by_a_product(device, monkeypatch):
    def total(few):
        monkeypatch.setattr(gradients, "FEW", few)
        ppo_fused._kernel.cache_clear()
        fixture = Fixture("Acrobot-v1", device, precision="ieee")
        updates = fixture.updates()
        updates.run(fixture.rollout, fixture.advantage_TB)
        return updates.totals[0, SUMS:]

    assert distance(total(few=0), total(few=3)) < 1e-6
    ppo_fused._kernel.cache_clear()


@pytest.mark.parametrize("log_std", [-6.0, 0.5, 2.5])
def test_a_deviation_beyond_its_bounds_is_held_and_comes_back(log_std):
    fixture = Fixture("Pendulum-v1", entropy_coef=0.01)
    with torch.no_grad():
        fixture.policy.distribution.log_std.fill_(log_std)
    updates = fixture.updates()
    updates.run(fixture.rollout, fixture.advantage_TB)
    assert (float(updates.totals[0, -1]) == 0) == (log_std != 0.5)  # its gradient
    assert -5 <= float(fixture.policy.distribution.log_std.detach()) <= 2


# ---- the order of rows


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("rows", "minibatches"), [(1, 1), (2, 1), (6, 3), (100, 4), (3000, 1)])
def test_every_epoch_has_every_row_once_and_its_moments(rows, minibatches, device):
    generator = torch.Generator(device).manual_seed(0)
    shuffle = Shuffle(rows, 3, minibatches, generator)
    x_N = 5 + torch.randn(rows, generator=generator, device=device)
    shuffle.draw(torch.zeros((), dtype=torch.int64, device=device), x_N)
    epochs = shuffle.order_UM.reshape(3, rows)
    assert all(sorted(epoch.tolist()) == list(range(rows)) for epoch in epochs)
    if rows >= 100:
        assert len({tuple(epoch.tolist()) for epoch in epochs}) == 3
    for order_M, moments in zip(shuffle.order_UM, shuffle.moments_U):
        if len(order_M) > 1:
            mean, deviation = _mean_and_deviation(moments, len(order_M))
            expected = x_N[order_M.long()].double()
            assert mean == pytest.approx(float(expected.mean()), rel=1e-5)
            assert deviation == pytest.approx(float(expected.std()), rel=1e-4)


@triton.jit
def _merge(moments_ptr, out_ptr, M, TILES: tl.constexpr, TILE: tl.constexpr):
    mean, deviation = library.mean_and_deviation(moments_ptr, M, TILES, TILE)
    tl.store(out_ptr, mean)
    tl.store(out_ptr + 1, deviation)


def _mean_and_deviation(moments, rows):
    out = torch.zeros(2, device=moments.device)
    _merge[(1,)](moments.contiguous(), out, rows, 16, 1024)
    return out.tolist()


@pytest.mark.parametrize("device", DEVICES)
def test_orders_look_random(device):
    """Uncorrelated with the row, with each other and with neighbours; other keys and times give others."""
    rows = 1000
    x_N, time = torch.zeros(rows, device=device), torch.zeros((), dtype=torch.int64, device=device)

    def drawn(seed, time):
        shuffle = Shuffle(rows, 2, 1, torch.Generator(device).manual_seed(seed))
        shuffle.draw(time, x_N)
        return [order.double().cpu().numpy() for order in shuffle.order_UM]

    orders = [*drawn(1, time), *drawn(2, time), *drawn(1, time + 1)]
    np.testing.assert_array_equal(drawn(1, time), orders[:2])  # a seed repeats it
    bound = 4.5 / math.sqrt(rows)
    for i, order in enumerate(orders):
        assert abs(np.corrcoef(order, np.arange(rows))[0, 1]) < bound
        assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < bound
        assert abs(np.mean(order[: rows // 2] % 2) - 0.5) < bound  # as many odd rows in one half as in the other
        assert sum(order == np.arange(rows)) < 10  # one is expected
        for other in orders[:i]:
            assert abs(np.corrcoef(order, other)[0, 1]) < bound


# ---- in PPO


def test_ppo_runs_them_and_keeps_the_layout_of_its_state():
    fused, eager = (PPO(dataclasses.replace(SMALL, mode=mode), make_env("CartPole-v1")) for mode in ("fused", "eager"))
    assert fused.updates is not None and eager.updates is None
    before = [x.copy() for x in everything(fused)]
    metrics = iterate(fused)
    assert all(math.isfinite(metrics[name]) for name in ("policy_loss", "value_loss", "entropy", "grad_norm"))
    assert metrics["updates"] == SMALL.num_updates
    assert any(not np.array_equal(a, b) for a, b in zip(before, everything(fused)))

    def layout(agent):
        return {name: x.shape for name, x in agent.state_arrays().items() if name.startswith(("policy", "optimizer"))}

    assert layout(fused) == layout(eager)
    steps = {name: float(x) for name, x in fused.state_arrays().items() if name.endswith("/step")}
    assert set(steps.values()) == {float(SMALL.num_updates)}


def test_networks_that_a_kernel_does_not_take_are_compiled():
    agent = PPO(dataclasses.replace(SMALL, hidden=(128, 128, 128)), make_env("CartPole-v1"))
    assert agent.updates is None
    assert "rollouts in one kernel, updates compiled" in agent.execution()
    reason = ppo_fused.why_not(agent.policy)
    assert reason == "the actor has 34816 weights before its last layer, and a kernel takes up to 18432"


@pytest.mark.gpu
def test_what_does_not_fit_into_a_processors_memory_is_compiled():
    config = dataclasses.replace(SMALL, device="cuda", hidden=(128, 128), precision="ieee")
    agent = PPO(config, make_env("CartPole-v1"))
    assert ppo_fused.why_not(agent.policy) is None
    assert agent.updates is None
    assert math.isfinite(iterate(agent)["policy_loss"])


# ---- precision, on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("env", ["CartPole-v1", "Pendulum-v1"])
@pytest.mark.parametrize(("precision", "bound"), [("ieee", 1e-5), ("tf32", 5e-3), ("bf16", 2e-2)])
def test_gradients_are_as_close_to_float64_as_torchs(env, precision, bound):
    """Of 32,768 rows. Bounds are relative norms of the whole gradient's error."""
    sizes = {"num_envs": 512, "num_steps": 128, "hidden": (64, 64)}
    fixture = Fixture(env, "cuda", precision=precision, **sizes)
    updates, exact, own = fixture.updates(), fixture.reference().double(), fixture.reference()
    updates.shuffle.draw(fixture.iteration, fixture.advantage_TB)
    updates._gradients(fixture.rollout, fixture.advantage_TB, 1)
    mine = updates.partial.double().sum(dim=0)[SUMS:] / updates.rows
    rows_M = updates.shuffle.order_UM[1].long()
    expected, _ = gradient(exact, fixture.batch(torch.float64), rows_M, fixture.config)
    with torch_matmul_precision(precision):
        torchs, _ = gradient(own, fixture.batch(), rows_M, fixture.config)
    error, torchs_error = distance(mine, expected), distance(torchs, expected)
    print(f"{env} {precision}: {error:.1e}, torch's {torchs_error:.1e}")
    assert error < bound
    assert error < max(2 * torchs_error, 1e-5)


@triton.jit
def _close_tanh(x_ptr, y_ptr, N, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < N, other=0.0)
    tl.store(y_ptr + at, library.close_tanh(x), mask=at < N)


@pytest.mark.gpu
def test_close_tanh():
    x = torch.cat([torch.linspace(-12, 12, 100_001), torch.tensor([0.0, 1e-20, -1e4, 1e4, math.inf, -math.inf])]).cuda()
    y = torch.empty_like(x)
    _close_tanh[(triton.cdiv(len(x), 1024),)](x, y, len(x), 1024)
    assert float((y.double() - x.double().tanh()).abs().max()) < 3e-7


@pytest.mark.gpu
def test_a_captured_iteration_shuffles_anew():
    agent = PPO(dataclasses.replace(SMALL, device="cuda", num_envs=64), make_env("CartPole-v1"))
    orders = []
    for _ in range(3):
        iterate(agent)
        orders.append(tuple(agent.updates.shuffle.order_UM[0].tolist()))
    assert agent.graph.captured and len(set(orders)) == 3


@triton.jit
def _rounded(x_ptr, y_ptr, N, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + at, library.rounded(tl.load(x_ptr + at, mask=at < N, other=0.0)), mask=at < N)


@pytest.mark.parametrize("device", DEVICES)
def test_rounded_to_tf32(device):
    """To a multiple of 2**-10 between 1 and 2, away from zero in the middle between two."""
    x = torch.tensor(
        [1.0, 1 + 2**-11, 1 + 2**-12, -(1 + 2**-11), -(1 + 2**-12), 1 + 3 * 2**-11, 0.0, 3.0], device=device
    )
    expected = torch.tensor([1.0, 1 + 2**-10, 1.0, -(1 + 2**-10), -1.0, 1 + 2**-9, 0.0, 3.0], device=device)
    y = torch.empty_like(x)
    _rounded[(1,)](x, y, len(x), 16)
    assert torch.equal(y, expected)
