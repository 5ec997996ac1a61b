"""What a capture is given: tensors, in whatever they come, and what it returns; and that it leaves no trace of them."""

import types
import warnings
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from rlgraph.errors import CaptureError, UsageError
from rlgraph.graph import capture as capture_module
from rlgraph.graph.auto import auto
from rlgraph.graph.capture import capture
from rlgraph.graph.device.control import if_graph, while_graph
from rlgraph.graph.pool import GraphPool
from rlgraph.graph.state import device_of, tensors_of

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]

STATES = {
    "a module": lambda net: net,
    "modules in a list": lambda net: [net, torch.zeros(1)],
    "an iterator": lambda net: net.parameters(),
    "a list": lambda net: list(net.parameters()),
    "a dict": lambda net: net.state_dict(),
    "an iterator inside": lambda net: {"net": (net.parameters(), None)},
}


def training(device, optimizer=torch.optim.SGD, **options):
    torch.manual_seed(0)
    net = torch.nn.Linear(3, 2).to(device)
    optimizer = optimizer(net.parameters(), lr=0.1, **options)

    def step(x):
        loss = net(x).square().sum()
        optimizer.zero_grad(set_to_none=False)
        loss.backward()
        optimizer.step()
        return loss

    return net, optimizer, step


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("state", STATES)
def test_state_in_any_form_is_put_back(state, device):
    net, _, step = training(device)
    before = [p.detach().clone() for p in net.parameters()]
    graph = capture(step, torch.ones(4, 3, device=device), state=STATES[state](net))
    assert all(map(torch.equal, net.parameters(), before))
    graph.replay()
    assert not torch.equal(net.weight, before[0])


@pytest.mark.parametrize("device", DEVICES)
def test_what_an_optimiser_keeps_is_put_back(device):
    on_gpu = device == "cuda"
    adam, momentum = (torch.optim.Adam, {"capturable": True}), (torch.optim.SGD, {"momentum": 0.9})
    kind, options = adam if on_gpu else momentum  # on a CPU Adam reads its step on the host
    net, optimizer, step = training(device, kind, **options)
    x = torch.ones(4, 3, device=device)
    with pytest.raises(
        UsageError, match=rf"{kind.__name__}, that has taken no step: .*, so take that before the capture"
    ):
        capture(step, x, state=[net, optimizer])
    step(x)
    kept = [net.weight, *(t for state in optimizer.state.values() for t in state.values())]
    before = [t.detach().clone() for t in kept]
    graph = capture(step, x, state=[net, optimizer])
    assert all(map(torch.equal, kept, before))
    graph.replay()
    assert not any(map(torch.equal, kept, before))


def test_an_optimiser_that_keeps_nothing_needs_no_step():
    net, optimizer, _ = training("cpu")
    assert tensors_of([net, optimizer]) == [net.weight, net.bias]
    _, optimizer, _ = training("cpu", momentum=0.9)
    with pytest.raises(UsageError, match="SGD, that has taken no step"):
        tensors_of(optimizer)


@dataclass
class Out:
    a: torch.Tensor


@pytest.mark.parametrize("wrong", [types.SimpleNamespace(a=torch.ones(1)), np.ones(2), "abc", 1.0, Out(torch.ones(1))])
def test_what_holds_no_tensors_is_no_state(wrong):
    message = f"state holds a value of type {type(wrong).__name__}: give tensors, modules or optimisers"
    x, on = torch.ones(2), torch.ones((), dtype=torch.bool)
    for make in (
        lambda state: capture(torch.sin, x, state=state),
        lambda state: auto(torch.sin, x, state=state),
        lambda state: while_graph(lambda: x, on, state=state),
        lambda state: if_graph(on, lambda: x, state=[x, {"more": state}]),
    ):
        with pytest.raises(UsageError, match=message):
            make(wrong)


def test_what_is_no_function_is_refused():
    x, on = torch.ones(2), torch.ones((), dtype=torch.bool)
    graph = capture(torch.sin, x)
    for make in (lambda: capture(3, x), lambda: auto(3, x), lambda: while_graph([3], on), lambda: graph.update(3)):
        with pytest.raises(UsageError, match="a function of tensors, not a value of type int"):
            make()


@pytest.mark.parametrize("make", [capture, auto, lambda fn, **options: GraphPool(fn, **options)])
@pytest.mark.parametrize("wrong", [torch.Generator(), [torch.Generator(), 1], [np.random.default_rng(0)]])
def test_what_are_no_generators_of_torch_is_refused(make, wrong):
    with pytest.raises(UsageError, match=r"generators are torch\.Generators in a list or a tuple, not"):
        make(lambda: torch.ones(1), generators=wrong)


@pytest.mark.gpu
def test_a_tensor_on_the_gpu_decides_where_to_capture():
    """A first one on the CPU does not: what an optimiser counts its steps in may be there."""
    count, x = torch.zeros(()), torch.ones(2, device="cuda")
    assert device_of((), [count, x], None) == device_of((x,), count, None) == x.device
    assert capture(lambda: x + 1, state=[count, x]).captured


# ---- outputs


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("made", "kind"),
    [
        (lambda x: Out(x * 2), "Out"),
        (lambda x: {"k": [Out(x * 2)]}, "Out"),
        (lambda x: types.SimpleNamespace(a=x * 2), "SimpleNamespace"),
        (lambda x: (x * 2, np.ones(2)), "ndarray"),
        (lambda x: (x * 2, {1, 2}), "set"),
    ],
)
def test_an_output_that_a_replay_could_not_fill_is_an_error(made, kind, device):
    x = torch.ones(3, device=device)
    with pytest.raises(
        CaptureError, match=rf"lambda.* returns a value of type {kind}, which a replay could not fill: "
    ):
        capture(made, x)


@pytest.mark.parametrize("device", DEVICES)
def test_constants_beside_tensors_are_returned(device):
    graph = capture(lambda x: {"y": x * 2, "rest": (None, 1.5, "name")}, torch.ones(3, device=device))
    assert graph.replay()["rest"] == (None, 1.5, "name")


@pytest.mark.parametrize("device", DEVICES)
def test_what_a_part_of_a_loop_returns_is_dropped(device):
    x, on = torch.zeros(3, device=device), torch.ones((), dtype=torch.bool, device=device)
    if_graph(on, lambda: Out(x.add_(1)), state=x).replay()
    assert x.tolist() == [1, 1, 1]


# ---- where and how it is called


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("first", [True, False])
def test_calls_come_with_and_without_inference_mode(first, device):
    net = torch.nn.Linear(2, 2).to(device).requires_grad_(False)
    x = torch.ones(2, 2, device=device)
    with torch.inference_mode(first):
        graph, pool = capture(net, x), GraphPool(net, sizes=(2,))
        graph.replay(x), pool(x)
    for mode in (True, False):
        with torch.inference_mode(mode):
            given = 2 * torch.ones(2, 2, device=device)
            torch.testing.assert_close(graph.replay(given), net(given))
            torch.testing.assert_close(pool(given), net(given))


def test_the_warning_is_of_the_users_line():
    on = torch.zeros((), dtype=torch.bool)
    for make in (
        lambda: capture(torch.sin, torch.ones(2)),
        lambda: while_graph(lambda: None, on),
        lambda: GraphPool(torch.sin)(torch.ones(2)),
    ):
        capture_module._say_once_that_nothing_is_captured.cache_clear()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            make()
        assert [w.filename for w in caught if "no CUDA graph" in str(w.message)] == [__file__]


@pytest.mark.gpu
def test_ctrl_c_while_recording_is_one():
    x = torch.ones(2, device="cuda")

    def interrupted(at_once):
        if not at_once:
            x.add_(1)
        if torch.cuda.is_current_stream_capturing():
            raise KeyboardInterrupt
        x.add_(1)

    for at_once in (True, False):
        with pytest.raises(KeyboardInterrupt):
            capture(lambda at_once=at_once: interrupted(at_once), state=x)
        assert torch.equal(capture(lambda: x + 1).replay(), torch.full((2,), 2.0, device="cuda"))
