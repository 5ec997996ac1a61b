"""rlgraph.graph.device.control: loops and branches that the device decides on, and PPO trained by one of them.

On a CPU the host decides; on a GPU each is one launch.
"""

import dataclasses
import sys
import time

import numpy as np
import pytest
import torch
from fused_tools import DEVICES as FUSED_DEVICES
from fused_tools import make_env, make_policy
from graph_tools import DEVICES, Counting, fake_api
from torch.utils._pytree import tree_leaves

from rlgraph.agents.ppo.config import PPOConfig
from rlgraph.agents.ppo.one_launch import UntilSolved
from rlgraph.agents.ppo.torch import PPO
from rlgraph.errors import CaptureError, GraphError, UsageError
from rlgraph.graph import bindings
from rlgraph.graph.capture import capture
from rlgraph.graph.device import nodes
from rlgraph.graph.device.control import Conditional, if_graph, while_graph
from rlgraph.kernels.rollouts import FusedCollector, FusedEvaluation

pytestmark = [
    pytest.mark.usefixtures("own_kernel_cache", "quick_interpreter"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton"),  # of numpy, where a kernel then drops the result
]
SMALL = PPOConfig(
    num_envs=4, num_steps=4, num_minibatches=1, num_epochs=1, hidden=(4,), mode="fused", total_steps=2 * 16
)


# ---- loops


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32])
@pytest.mark.parametrize("device", DEVICES)
def test_a_loop_goes_on_while_the_condition_holds_in_every_launch(device, dtype):
    c = Counting(device, 1, dtype)
    loop = while_graph(c.count, c.going_on, state=c.state)
    assert (c.number.item(), bool(c.going_on)) == (0, True)  # making it leaves no trace
    assert loop.captured == (device == "cuda")
    for limit in (5, 1, 12):
        c.again(limit)
        loop.replay()
        assert loop.iterations() == c.number.item() == limit
        assert c.total.item() == limit * (limit + 1) // 2
    assert loop.replays == 3


@pytest.mark.parametrize("device", DEVICES)
def test_the_condition_is_looked_at_before_the_first_iteration(device):
    c = Counting(device, 5)
    loop = while_graph(c.count, c.going_on, state=c.state)
    c.going_on.fill_(False)
    loop.replay()
    assert loop.iterations() == c.number.item() == 0


@pytest.mark.parametrize("device", DEVICES)
def test_a_loop_ends_after_the_most_iterations_and_can_go_on(device):
    c = Counting(device, 10)
    loop = while_graph(c.count, c.going_on, state=c.state, most=4)
    for done, iterations in ((4, 4), (8, 4), (10, 2), (10, 0)):
        loop.replay()
        assert (c.number.item(), loop.iterations()) == (done, iterations)


@pytest.mark.gpu
def test_a_thousand_iterations_are_one_launch_and_the_host_does_not_wait():
    c = Counting("cuda", 1000)
    loop = while_graph(c.count, c.going_on, state=c.state)
    for _ in range(3):
        c.again(1000)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            started = time.perf_counter()
            loop.replay()
            host = time.perf_counter() - started
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
        wall = time.perf_counter() - started
        assert loop.iterations() == 1000
        assert c.total.item() == 500_500
    assert host < wall / 2  # of the third launch: the first takes the graph to the device


# ---- branches, and one inside the other


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32])
@pytest.mark.parametrize("device", DEVICES)
def test_a_branch_is_taken_where_the_predicate_holds(device, dtype):
    c = Counting(device, 10)
    predicate = torch.ones((), dtype=dtype, device=device)
    branch = if_graph(predicate, c.count, state=[c.state, c.going_on])
    for value, number in ((1, 1), (0, 1), (1, 2), (1, 3)):
        predicate.fill_(value)
        branch.replay()
        assert (c.number.item(), branch.iterations()) == (number, value)


@pytest.mark.parametrize("device", DEVICES)
def test_a_branch_inside_a_loop_sees_what_came_before_it_in_the_iteration(device):
    """As an evaluation that only happens where an episode has ended."""
    c = Counting(device, 10)
    third = torch.zeros((), dtype=torch.bool, device=device)
    seen = torch.zeros(20, dtype=torch.int64, device=device)

    def look():
        third.copy_(c.number % 3 == 0)

    def note():
        seen.index_copy_(0, c.number.view(1), c.total.view(1))

    def double():
        seen.mul_(2)

    branch = if_graph(third, note, state=seen)
    loop = while_graph([c.count, look, branch, double], c.going_on, state=[c.state, third])
    for _ in range(3):
        seen.zero_()
        c.again(10)
        loop.replay()
        expected = {n: n * (n + 1) // 2 * 2 ** (11 - n) for n in (3, 6, 9)}
        assert seen.tolist() == [expected.get(n, 0) for n in range(20)]
    assert (loop.replays, branch.replays) == (3, 0)  # it was never replayed itself


@pytest.mark.parametrize("device", DEVICES)
def test_a_loop_inside_a_loop_begins_anew_in_every_iteration(device):
    """As epochs that stop early."""
    outer, inner = Counting(device, 4), Counting(device, 0)
    runs = torch.zeros((), dtype=torch.int64, device=device)

    def begin():
        inner.number.zero_()
        inner.limit.copy_(outer.number + 1)
        inner.going_on.fill_(True)

    def run():
        runs.add_(1)
        inner.count()

    epochs = while_graph(run, inner.going_on, state=[inner.state, runs])
    state = [outer.state, inner.state, inner.limit, inner.going_on]
    loop = while_graph([begin, epochs, outer.count], outer.going_on, state=state)
    loop.replay()
    assert (loop.iterations(), epochs.iterations(), runs.item()) == (4, 4, 1 + 2 + 3 + 4)


# ---- random numbers


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("own", [False, True])
def test_draws_from_a_generator_are_refused(device, own):
    c = Counting(device, 5)
    generator = torch.Generator(device) if own else None
    x = torch.zeros(3, device=device)

    def draw():
        x.add_(torch.rand(3, device=device, generator=generator))

    with pytest.raises(
        CaptureError, match=r"draw cannot be captured: rand.*do not advance.*rlgraph.kernels.*control.py:"
    ):
        while_graph([c.count, draw], c.going_on, state=[c.state, x])
    capture(c.count, state=[c.state, c.going_on]).replay()  # and the process goes on
    assert c.number.item() == 1


@pytest.mark.parametrize("device", FUSED_DEVICES)
def test_every_iteration_of_every_launch_has_fresh_numbers(device):
    env = make_env("CartPole-v1")
    policy = make_policy(env, device=device).for_kernels()
    collector = FusedCollector(env, policy, 16, 2, torch.Generator(device).manual_seed(0), "ieee")
    key = collector.key.item()
    iteration = torch.zeros(1, dtype=torch.int64, device=device)
    going_on = torch.ones((), dtype=torch.bool, device=device)
    log_probs = torch.zeros(4, 2, 16, device=device)
    start = [leaf.clone() for leaf in tree_leaves(collector.carry)]

    def collect():
        for leaf, first in zip(tree_leaves(collector.carry), start):  # the same states: only the numbers differ
            leaf.copy_(first)
        rollout, _ = collector.collect()
        log_probs.index_copy_(0, iteration, rollout.log_prob_TB[None])
        iteration.add_(1)

    loop = while_graph(collect, going_on, state=[collector.state(), iteration, log_probs], most=2)
    loop.replay()
    loop.replay()
    assert len(log_probs.unique(dim=0)) == iteration.item() == 4
    assert collector.key.item() == key


# ---- PPO


def trained(device, steps=3, **changes):
    config = dataclasses.replace(SMALL, device=device, **changes)
    return PPO(config, make_env("CartPole-v1", max_episode_steps=steps))


@pytest.mark.parametrize("device", FUSED_DEVICES)
def test_training_in_one_launch_is_so_many_iterations(device):
    trainer = trained(device)
    run = UntilSolved(trainer, target=4.0)  # more than an episode of three steps can have
    before = trainer.state_arrays()
    run.run()
    after = trainer.state_arrays()
    assert run.loop.iterations() == 2  # all steps that the config has
    assert run.mean_return.item() == pytest.approx(3.0)
    trainer.load_state(before)
    for _ in range(2):
        trainer._iteration()
    expected = trainer.state_arrays()
    assert sum(not np.array_equal(after[name], before[name]) for name in after) > 10
    for name in after:
        assert np.array_equal(after[name], expected[name]), name
    run.run()
    assert run.loop.iterations() == 0  # none are left
    trainer.load_state(before)
    trainer._iteration()
    run.run()
    assert run.loop.iterations() == 1  # the other one
    trainer.load_state(before)
    run.target.fill_(2.5)
    assert not run.solved()
    run.run()
    assert (run.loop.iterations(), run.solved()) == (1, True)


@pytest.mark.parametrize("device", FUSED_DEVICES)
def test_epochs_that_are_left_out_move_nothing(device):
    """The same bits as where they are computed and dropped."""
    from rlgraph.kernels.adam import TAKEN  # needs Triton

    trainer = trained(device, num_epochs=3, target_kl=3e-4, learning_rate=0.03, total_steps=16)
    run = UntilSolved(trainer, target=4.0)
    before = trainer.state_arrays()
    run.run()
    after, branches = trainer.state_arrays(), [epoch.iterations() for epoch in run.epochs]
    trainer.load_state(before)
    trainer._iteration()
    expected, taken = trainer.state_arrays(), trainer.updates.totals[:, TAKEN].tolist()
    assert branches == [taken[0], taken[0] * taken[1]]  # whether no update before an epoch has stopped
    assert branches[1] == 0
    for name in after:
        assert np.array_equal(after[name], expected[name]), name


@pytest.mark.parametrize("device", FUSED_DEVICES)
def test_greedy_episodes_decide_and_are_played_where_one_has_ended(device):
    # Episodes end in the second iteration, the third, but not the fourth.
    trainer = trained(device, steps=6, total_steps=2 * SMALL.total_steps)
    run = UntilSolved(trainer, target=6.0, eval_episodes=5)
    assert not run.solved()
    assert (run.evaluations.item(), run.greedy_return.isnan().item()) == (0, True)
    run.run()
    assert (run.loop.iterations(), run.evaluations.item(), run.greedy_return.item()) == (2, 1, 6.0)
    assert run.solved()
    run.target.fill_(7.0)
    run.run()
    assert (run.loop.iterations(), run.evaluations.item(), run.solved()) == (2, 1 + 1, False)


@pytest.mark.parametrize("device", FUSED_DEVICES)
def test_evaluations_in_a_loop_begin_elsewhere_every_time(device):
    env = make_env("Pendulum-v1", max_episode_steps=1)
    policy = make_policy(env, hidden=(4,), device=device).for_kernels()
    evaluation = FusedEvaluation(env, policy, 8, torch.Generator(device).manual_seed(0), "ieee")
    turn = torch.zeros(1, dtype=torch.int64, device=device)
    going_on = torch.ones((), dtype=torch.bool, device=device)
    returns = torch.zeros(3, 8, device=device)

    def play():
        returns.index_copy_(0, turn % 3, evaluation.play()[None])
        turn.add_(1)

    while_graph(play, going_on, state=[evaluation.state(), turn, returns], most=3).replay()
    assert len(returns.unique()) == returns.numel()


def test_training_in_one_launch_says_what_it_needs():
    with pytest.raises(UsageError, match="needs PPO in mode fused, with its updates in kernels"):
        UntilSolved(trained("cpu", mode="eager"), target=3.0)


# ---- errors


@pytest.mark.parametrize(
    ("condition", "kind"),
    [(torch.zeros(()), r"torch.float32\[\]"), (torch.zeros(2, dtype=torch.bool), r"torch.bool\[2\]")],
)
def test_a_condition_is_one_bool_or_int32(condition, kind):
    with pytest.raises(UsageError, match=f"a condition is one bool or int32 on the device, not {kind}"):
        while_graph(lambda: None, condition)
    with pytest.raises(UsageError, match="a condition is a tensor, one bool or int32 on the device, not a function"):
        if_graph(lambda: None, condition)


def test_what_makes_no_body_is_refused():
    c = Counting("cpu", 5)
    with pytest.raises(UsageError, match="on the device, not a bool"):
        if_graph(True, lambda: None)
    with pytest.raises(UsageError, match="at least one function"):
        while_graph([], c.going_on)
    with pytest.raises(UsageError, match="give the function itself"):
        while_graph(capture(c.count, state=[c.state, c.going_on]), c.going_on)
    with pytest.raises(UsageError, match="most must be at least 1, but is 0"):
        while_graph(c.count, c.going_on, most=0)
    with pytest.raises(CaptureError, match="_local_scalar_dense"):
        while_graph(lambda: float(c.total), c.going_on)


def test_without_cuda_bindings_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(GraphError, match=r'needs the package cuda-bindings, .*pip install "cuda-bindings==\d+\.\*"'):
        bindings.check_driver(*Conditional.NEEDS)


def test_a_call_that_fails_is_named_with_its_error():
    error = type("Error", (), {"name": "cudaErrorNotSupported", "__int__": lambda self: 801})()
    api = fake_api(cudaGraphCreate=(error, None), one=(0, 5), two=(0, 5, 6), none=(0,))
    assert (bindings.call(api, "one"), bindings.call(api, "two"), bindings.call(api, "none")) == (5, [5, 6], None)
    with pytest.raises(GraphError, match=r"^cudaGraphCreate failed: cudaErrorNotSupported$"):
        bindings.call(api, "cudaGraphCreate", 0)
    with pytest.raises(GraphError, match="cuda-bindings has no cudaGraphAddNode: install a newer version"):
        bindings.call(api, "cudaGraphAddNode")


def test_an_old_driver_is_refused_by_its_version(monkeypatch):
    runtime = fake_api(cudaDriverGetVersion=(0, 12020))
    monkeypatch.setattr(bindings, "load", lambda: (runtime, None))
    with pytest.raises(GraphError, match=r"a driver for CUDA 12\.4 or later, and this one is for CUDA 12\.2"):
        bindings.check_driver(*Conditional.NEEDS)


@pytest.mark.parametrize("source", [nodes.SET_CONDITION, nodes.LAUNCH], ids=["set_condition", "launch"])
def test_the_kernel_that_decides_compiles_for_every_architecture(source):
    pytest.importorskip("cuda.bindings.nvrtc", reason="needs cuda-bindings")
    for architecture in ("sm_75", "sm_90"):
        assert nodes.cubin(source, architecture).startswith(b"\x7fELF")
    with pytest.raises(GraphError, match=r"nvrtcCompileProgram failed: .* for sm_1: "):
        nodes.cubin(source, "sm_1")
