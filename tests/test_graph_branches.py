"""rlgraph.graph.device.branches: the same results as one after the other, and parallel nodes in a captured graph."""

import itertools
from typing import NamedTuple

import pytest
import torch

from rlgraph.errors import UsageError
from rlgraph.graph import bindings
from rlgraph.graph.capture import capture
from rlgraph.graph.device.branches import _candidates, _device, _OfThread, branches
from rlgraph.graph.recording import CAPTURED_ON, PRIORITY, STREAMS, streams_of

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
def test_results_are_those_of_the_functions_in_their_order(device):
    x = torch.arange(4.0, device=device)
    functions = [lambda k=k: {"k": k, "y": (x * k).sin().sum()} for k in range(12)]  # more than there are streams
    for _ in range(3):
        for k, result in enumerate(branches(*functions, device=device)):
            assert result["k"] == k
            assert torch.equal(result["y"], (x * k).sin().sum())
    assert branches(device=device) == []


@pytest.mark.parametrize("device", DEVICES)
def test_they_see_what_came_before_and_are_seen_by_what_comes_after(device):
    x, y = (torch.zeros(1 << 16, dtype=torch.float64, device=device) for _ in range(2))

    def step():
        x.add_(1)
        y.add_(2)
        a, b = branches(lambda: x.mul_(3).sum(), lambda: y.mul_(3).sum(), device=device)
        return a + b, (x + y).sum()

    graph = capture(step, state=[x, y])
    p = q = 0
    for _ in range(20):
        p, q = (p + 1) * 3, (q + 2) * 3
        total, again = graph.replay()
        assert total.item() == again.item() == (p + q) * (1 << 16)
        x.remainder_(1009)
        y.remainder_(1009)
        p, q = p % 1009, q % 1009


@pytest.mark.parametrize("device", DEVICES)
def test_branches_inside_branches(device):
    x = torch.ones(1000, device=device)

    def forked(k):
        return lambda: sum(branches(lambda: x * k, lambda: x * (k + 1), lambda: x * (k + 2), device=device))

    graph = capture(lambda: branches(forked(1), forked(10), device=device), device=device)
    a, b = graph.replay()
    assert (a.unique().tolist(), b.unique().tolist()) == ([6], [33])


@pytest.mark.parametrize("device", DEVICES)
def test_random_numbers_are_those_of_one_after_the_other(device):
    generators = [torch.Generator(device).manual_seed(0) for _ in range(2)]

    def draw(generator):
        return lambda: torch.rand(1000, generator=generator, device=device)

    forked, serial = generators
    graph = capture(
        lambda: branches(draw(forked), draw(forked), draw(forked), device=device), generators=[forked], device=device
    )
    for _ in range(3):
        expected = [draw(serial)() for _ in range(3)]
        for a, b in zip(graph.replay(), expected, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("device", DEVICES)
def test_an_error_in_a_branch_is_raised_and_the_next_call_works(device):
    def fail():
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        branches(lambda: torch.ones(1, device=device), fail, device=device)
    assert [t.item() for t in branches(*[lambda: torch.ones(1, device=device)] * 3, device=device)] == [1, 1, 1]


@pytest.mark.parametrize(("wrong", "kind"), [([torch.ones_like], "list"), (torch.ones(1), "Tensor")])
def test_what_is_no_function_is_refused_before_any_runs(wrong, kind):
    ran = []
    with pytest.raises(UsageError, match=f"branches.*type {kind}"):
        branches(lambda: ran.append(1), wrong)
    assert not ran


def test_streams_are_kept_for_the_device_that_cuda_means_at_the_time(monkeypatch):
    for current in (0, 1):
        monkeypatch.setattr(torch.cuda, "current_device", lambda current=current: current)
        assert _device("cuda") == torch.device("cuda", current)
    assert (_device("cuda:3"), _device("cpu")) == (torch.device("cuda:3"), torch.device("cpu"))


class Stream(NamedTuple):
    device: torch.device
    priority: int
    cuda_stream: int


def test_a_thread_has_the_same_streams_in_every_call_and_a_capture_others(monkeypatch):
    handed_out = itertools.cycle(range(STREAMS))  # as torch does it, in turns
    monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority: Stream(device, priority, next(handed_out)))
    monkeypatch.setattr("rlgraph.graph.device.branches._of_thread", _OfThread())
    for device in (torch.device("cuda:98"), torch.device("cuda:99")):
        first = list(_candidates(device, 0))
        next(handed_out)  # another thread's
        assert len(set(first)) == len(first) == STREAMS
        assert _candidates(device, 0) == first
        assert {stream.device for stream in first} == {device}
        captures, beside = streams_of(device)
        assert _candidates(device, PRIORITY) == beside
        assert not set(captures) & set(beside)
        assert (len(captures), len(beside)) == (CAPTURED_ON, STREAMS - CAPTURED_ON)


# ---- on a GPU


def successors(edges, start):
    """All nodes that are after one."""
    found, stack = set(), [start]
    while stack:
        for end in (b for a, b in edges if a == stack[-1] and b not in found):
            found.add(end)
            stack.append(end)
            break
        else:
            stack.pop()
    return found


@pytest.mark.gpu
def test_the_graph_has_parallel_nodes():
    x, y = torch.ones(1000, device="cuda"), torch.ones(1000, device="cuda")

    def step(run):
        z = x * y  # the node where they fork
        a, b = run(lambda: (z + 1).sin(), lambda: (z + 2).cos())
        return a + b

    forked = capture(lambda: step(branches))
    serial = capture(lambda: step(lambda *functions: [f() for f in functions]))
    assert torch.equal(forked.replay(), serial.replay())

    nodes, edges, _ = bindings.read(forked.raw)
    (root,) = set(range(len(nodes))) - {b for _, b in edges}
    roots = [b for a, b in edges if a == root]
    assert len(roots) == 2  # after the fork
    assert all(b not in successors(edges, a) for a in roots for b in roots)
    (end,) = set(range(len(nodes))) - {a for a, _ in edges}
    assert all(end in successors(edges, root) for root in roots)

    nodes, edges, _ = bindings.read(serial.raw)
    assert len(edges) == len(nodes) - 1 == 5  # a chain


@pytest.mark.gpu
def test_memory_of_a_branch_is_not_given_away_while_it_is_used():
    """Outside a capture: what a branch returns is freed at once, while the current stream is still at it."""
    size = 1 << 22
    x = torch.ones(size, device="cuda")
    totals = []
    for k in range(50):
        a, b = branches(lambda k=k: x * k, lambda k=k: x * (k + 1))
        for _ in range(5):
            a = a + b
        totals.append(a.sum())
        del a, b
        branches(lambda: torch.full((size,), -1.0, device="cuda"), lambda: torch.full((size,), -1.0, device="cuda"))
    assert [t.item() / size for t in totals] == [k + 5 * (k + 1) for k in range(50)]


@pytest.mark.gpu
def test_gradients_through_branches():
    """Actor and critic of one observation."""
    generator = torch.Generator().manual_seed(0)
    networks = [torch.nn.Linear(8, 8).cuda() for _ in range(2)]
    x = torch.randn(64, 8, generator=generator).cuda()
    parameters = [p for network in networks for p in network.parameters()]

    def loss(run):
        a, b = run(lambda: networks[0](x).tanh(), lambda: networks[1](x).tanh())
        return torch.autograd.grad((a * b).sum(), parameters)

    graph = capture(lambda: loss(branches))
    for _ in range(3):
        expected = loss(lambda *functions: [f() for f in functions])
        for a, b in zip(graph.replay(), expected, strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.gpu
def test_branches_are_on_the_streams_of_no_graph():
    """On one stream they would share cuBLAS's workspace with a graph that may replay at the same time."""
    x, seen = torch.ones(64, 64, device="cuda"), set()

    def product():
        seen.add(torch.cuda.current_stream().cuda_stream)
        return x @ x

    def forked():
        return branches(product, lambda: branches(product, product, product), product)

    graphs = [capture(make) for make in 4 * [lambda: x @ x, forked]]
    own = {graph.pool.stream.cuda_stream for graph in graphs}
    assert len(own) == len(graphs)
    assert len(seen) == 4 + 4  # each graph's own, on which its first branch runs, and four others
    assert len(seen & own) == 4
