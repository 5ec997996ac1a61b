"""Graph.update: another function in a captured graph's place, in place where the nodes are the same."""

import sys

import pytest
import torch

from rlgraph.errors import CaptureError
from rlgraph.graph import bindings
from rlgraph.graph.capture import capture

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def scaled(x, factor, state):
    """A function with a number baked in: state += x * factor."""

    def step():
        state.add_(x * factor)
        return state * 1

    return step


@pytest.mark.parametrize("device", DEVICES)
def test_numbers_and_addresses_are_exchanged_in_place(device):
    x, y, state, other = (torch.full((3,), v, device=device) for v in (1.0, 10.0, 0.0, 0.0))
    graph = capture(scaled(x, 2.0, state), state=state)
    first = graph.replay()
    assert first.tolist() == [2, 2, 2]
    update = graph.update(scaled(x, 5.0, state))
    assert update.in_place and update.seconds >= 0
    assert update.reason == ("updated in place" if device == "cuda" else "no CUDA graph on cpu: nothing to update")
    assert state.tolist() == [2, 2, 2]  # updating leaves no trace
    assert graph.replay().tolist() == [7, 7, 7]
    assert first.tolist() == [2, 2, 2]  # the outputs of before are nobody's now
    assert graph.update(scaled(y, 5.0, other), state=other).in_place
    for i in range(1, 4):
        assert graph.replay().tolist() == [50 * i] * 3
    assert state.tolist() == [7, 7, 7]
    assert graph.replays == 5


@pytest.mark.parametrize("device", DEVICES)
def test_another_topology_is_instantiated_anew(device):
    x, state = torch.ones(3, device=device), torch.zeros(3, device=device)
    graph = capture(scaled(x, 2.0, state), state=state)

    def longer():
        state.add_(x).sub_(3 * x)
        return state.sum()

    for _ in range(2):
        update = graph.update(longer)
        if device == "cuda":
            assert not update.in_place
            assert "cudaGraphExecUpdate failed: " in update.reason and " nodes in place of " in update.reason
        state.zero_()
        assert [graph.replay().item() for _ in range(3)] == [-6, -12, -18]
        graph.update(scaled(x, 4.0, state))
        state.zero_()
        assert graph.replay().tolist() == [4, 4, 4]


@pytest.mark.parametrize("device", DEVICES)
def test_inputs_stay_inputs(device):
    given = torch.arange(3.0, device=device)
    graph = capture(lambda x: x * 2, given)
    graph.replay(given)
    graph.update(lambda x: x * 3)
    assert graph.replay().tolist() == [0, 3, 6]  # nothing given: the last inputs stand
    assert graph.replay(given + 1).tolist() == [3, 6, 9]
    with pytest.raises(ValueError, match="captured with 1 inputs, got 2"):
        graph.replay(given, given)


@pytest.mark.parametrize("device", DEVICES)
def test_random_numbers_after_an_update_are_those_of_direct_calls(device):
    """In place or not: that depends on the version of torch."""
    generators = [torch.Generator(device).manual_seed(3) for _ in range(2)]

    def drawing(generator, factor, times):
        return lambda: [torch.rand(4, generator=generator, device=device) * factor for _ in range(times)]

    direct, captured = generators
    graph = capture(drawing(captured, 1.0, 1), generators=[captured])
    for factor, times in ((1.0, 1), (2.0, 1), (3.0, 2), (4.0, 1), (5.0, 1)):
        graph.update(drawing(captured, factor, times))
        for _ in range(3):
            for a, b in zip(graph.replay(), drawing(direct, factor, times)(), strict=True):
                assert torch.equal(a, b), (factor, times)


@pytest.mark.parametrize("device", DEVICES)
def test_a_function_that_cannot_be_captured_leaves_the_graph_as_it_was(device):
    x, state = torch.ones(3, device=device), torch.zeros(3, device=device)
    graph = capture(scaled(x, 2.0, state), state=state)
    with pytest.raises(CaptureError, match="_local_scalar_dense"):
        graph.update(lambda: state.add_(float(x.sum())))
    assert graph.replay().tolist() == [2, 2, 2]
    assert graph.update(scaled(x, 3.0, state)).in_place
    assert graph.replay().tolist() == [5, 5, 5]


@pytest.mark.parametrize("device", DEVICES)
def test_after_reset_an_update_is_refused(device):
    x, state = torch.ones(3, device=device), torch.zeros(3, device=device)
    graph = capture(scaled(x, 2.0, state), state=state)
    graph.update(scaled(x, 3.0, state))
    graph.reset()
    with pytest.raises(RuntimeError, match="released by reset"):
        graph.update(scaled(x, 2.0, state))


def test_without_cuda_bindings_an_update_is_refused_in_words(monkeypatch):
    """The graph is instantiated anew then, which needs no cuda-bindings."""
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    assert "needs the package cuda-bindings" in bindings.update(0, 0, 0)


@pytest.mark.gpu
def test_a_hundred_updates_hold_no_more_memory_than_one():
    x, state = torch.ones(1 << 20, device="cuda"), torch.zeros(1 << 20, device="cuda")
    graph = capture(scaled(x, 1.0, state), state=state)
    held = []
    for i in range(100):
        assert graph.update(scaled(x, float(i), state)).in_place
        graph.replay()
        torch.cuda.synchronize()
        held.append(torch.cuda.memory_allocated())
    assert max(held[2:]) == held[2]
    assert state.tolist()[0] == sum(range(100))


@pytest.mark.gpu
def test_info_is_that_of_the_last_function():
    x, state = torch.ones(3, device="cuda"), torch.zeros(3, device="cuda")
    graph = capture(scaled(x, 1.0, state), state=state)

    def longer():
        return (state.add_(x) * 2 + 1).sin()

    for fn, kernels, name in (
        (longer, 4, "longer"),
        (scaled(x, 2.0, state), 3, "step"),
        (scaled(x, 3.0, state), 3, "step"),
    ):
        graph.update(fn)
        info = graph.info()
        assert (info.nodes, info.name) == ({"kernel": kernels}, name)
        assert info.memory_bytes > 0 and info.instantiate_seconds > 0
