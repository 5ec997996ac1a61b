"""Graph.verify: a replay compared with a call finds what the watch cannot see."""

import itertools

import numpy as np
import pytest
import torch

from rlgraph.errors import GraphError
from rlgraph.graph.capture import capture
from rlgraph.graph.verify import difference, snapshot

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


class Walk:
    def __init__(self, device):
        self.generator = torch.Generator(device).manual_seed(0)
        self.position = torch.zeros(3, device=device)
        self.last = None  # a result, which each call rebinds

    def step(self, x):
        noise = torch.rand(3, generator=self.generator, device=x.device) + torch.rand(3, device=x.device)
        self.last = self.position.add_(noise + x).clone()
        return self.last, {"mean": self.last.mean(), "constant": 1}


@pytest.mark.parametrize("device", DEVICES)
def test_a_right_graph_is_verified_without_a_trace(device):
    walk, direct, x = Walk(device), Walk(device), torch.ones(3, device=device)
    graph = capture(walk.step, x, state=walk.position, generators=[walk.generator])
    torch.manual_seed(1)
    assert graph.verify() is None
    assert graph.replays == 0 and walk.position.tolist() == [0, 0, 0]
    outputs = graph.replay(x)
    kept = [t.clone() for t in (walk.position, outputs[0], outputs[1]["mean"])]
    random_states = walk.generator.get_state(), torch.get_rng_state()
    graph.verify()
    assert graph.replays == 1 and graph.outputs is outputs
    for now, then in zip((walk.position, outputs[0], outputs[1]["mean"]), kept):
        assert torch.equal(now, then)
    assert all(map(torch.equal, (walk.generator.get_state(), torch.get_rng_state()), random_states))
    second = graph.replay(2 * x)[0].clone()
    torch.manual_seed(1)  # of the default generator only
    for factor in (1, 2):
        expected = direct.step(factor * x)[0]
    assert torch.equal(second, expected)


@pytest.mark.parametrize("device", DEVICES)
def test_an_iterators_place_that_nobody_sees_is_found_and_the_output_is_named(device):
    steps = itertools.count()
    graph = capture(lambda x: (x, x * next(steps)), torch.ones(2, device=device))
    graph.replay()  # no change that is watched
    with pytest.raises(GraphError, match=r"gives other results than a call: output 1: 2 of 2 elements differ, by up"):
        graph.verify()


@pytest.mark.parametrize("device", DEVICES)
def test_state_and_generators_that_are_not_named_are_found(device):
    hidden, total = torch.zeros(2, device=device), torch.zeros(2, device=device)

    def accumulates():
        hidden.add_(1)
        total.add_(hidden)

    with pytest.raises(GraphError, match=r"state tensor 0: 2 of 2 elements differ, by up to 1; .* name in `state`"):
        capture(accumulates, state=total).verify()
    assert capture(accumulates, state=[total, hidden]).verify() is None
    if device == "cpu":  # on a GPU it cannot be captured at all
        stranger = torch.Generator().manual_seed(0)
        with pytest.raises(GraphError, match="output 0: 4 of 4 elements differ"):
            capture(lambda: torch.rand(4, generator=stranger)).verify()


@pytest.mark.gpu
def test_an_item_of_an_array_that_was_baked_in_is_found():
    table = np.zeros(3)
    graph = capture(lambda x: x + float(table[0]), torch.ones(2, device="cuda"))
    graph.verify()
    table[0] = 0.5
    graph.replay()  # the watch does not look into arrays
    with pytest.raises(GraphError, match=r"a replay of <lambda> .* output 0: 2 of 2 elements differ, by up to 0.5;"):
        graph.verify()


def test_a_change_that_is_watched_is_named_as_by_a_replay():
    scale = {"by": 1.0}
    graph = capture(lambda x: x * scale["by"], torch.ones(2))
    scale["by"] = 2.0
    with pytest.raises(GraphError, match=r"scale\['by'\] was 1.0 and is 2.0"):
        graph.verify()
    graph.reset()
    with pytest.raises(RuntimeError, match="released by reset"):
        graph.verify()


def test_after_an_error_of_the_call_nothing_is_left_either():
    fails, total = [], torch.zeros(1)

    def fn():
        total.add_(1)
        if next(calls) >= 4:
            raise ValueError("no more")
        return total * 1

    calls = itertools.count()
    graph = capture(fn, state=total)
    with pytest.raises(ValueError, match="no more"):
        while len(fails) < 9:
            graph.verify()
            fails.append(1)
    assert total.item() == 0 and graph.replays == 0


@pytest.mark.parametrize(
    ("one", "other", "words"),
    [
        ([1.0, torch.nan], [1.0, torch.nan], None),
        ([1.0, torch.nan], [1.0, 2.0], "output 0: 1 of 2 elements differ, by up to nan"),
        ([True, False], [True, True], "output 0: 1 of 2 elements differ"),
        ([1, 5], [1, 2], "output 0: 1 of 2 elements differ, by up to 3"),
        ([1, 2], [1, 2, 3], r"output 0: torch.int64[2] in place of torch.int64[3]"),
        ([1], [1.0], r"output 0: torch.int64[1] in place of torch.float32[1]"),
    ],
)
def test_differences_in_words(one, other, words):
    assert difference(*(snapshot({"output": torch.tensor(each)}) for each in (one, other))) == words


def test_differences_of_constants_and_of_their_number():
    assert difference(snapshot({"output": (1, "a")}), snapshot({"output": (1, "b")})) == "output 1: 'a' in place of 'b'"
    assert difference(snapshot({"output": 1}), snapshot({"output": (1, 2)})) == "1 outputs and tensors in place of 2"
