"""torch's optimisers in a captured function: what a CPU takes, and which option an error names."""

import functools

import pytest
import torch

from rlgraph.errors import CaptureError, GraphError
from rlgraph.graph.capture import capture
from rlgraph.graph.device.control import while_graph

pytestmark = pytest.mark.filterwarnings("ignore:no CUDA graph on cpu", "ignore:Detected call of `lr_scheduler.step")


class Training:
    """A step of an optimiser, and its parameters before it."""

    def __init__(self, make, device="cpu"):
        generator = torch.Generator().manual_seed(0)
        self.weight = torch.nn.Parameter(torch.rand(3, 2, generator=generator).to(device))
        self.x = torch.linspace(-1, 1, 12, device=device).reshape(4, 3)
        self.optimizer = make([self.weight])
        self.state = [self.weight, self.optimizer]

    def step(self):
        def loss():
            self.optimizer.zero_grad(set_to_none=False)
            value = (self.x @ self.weight).square().sum()
            value.backward()
            return value

        if isinstance(self.optimizer, torch.optim.LBFGS):
            return self.optimizer.step(loss)
        value = loss()
        self.optimizer.step()
        return value

    def captured(self):
        """After a first step, which makes what the optimiser keeps."""
        self.step()
        return capture(self.step, state=self.state)


def rate(device="cpu"):
    return torch.tensor(0.01, device=device)


def assert_as_direct(make, device="cpu", between=lambda training: None):
    replayed, direct = Training(make, device), Training(make, device)
    graph = replayed.captured()
    direct.step()
    for _ in range(5):
        for training, run in ((replayed, graph.replay), (direct, direct.step)):
            between(training)
            run()
        torch.testing.assert_close(replayed.weight, direct.weight, rtol=0, atol=0)
    assert graph.captured == (device == "cuda")


@pytest.mark.parametrize(
    "name", ["Adam", "AdamW", "NAdam", "RAdam", "Adamax", "ASGD", "RMSprop", "Adadelta", "Rprop", "SGD", "Adagrad"]
)
@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"foreach": False}])
def test_on_a_cpu_an_optimiser_steps_as_directly(name, options):
    if name == "Adagrad":
        options = {"fused": True}
    assert_as_direct(functools.partial(getattr(torch.optim, name), lr=0.01, **options))


@pytest.mark.parametrize("options", [{}, {"fused": True}, {"amsgrad": True}])
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_a_learning_rate_in_a_tensor_may_change(kind, options):
    def lower(training):
        training.optimizer.param_groups[0]["lr"].mul_(0.5)

    assert_as_direct(lambda parameters: kind(parameters, lr=rate(), **options), between=lower)


@pytest.mark.parametrize("options", [{}, {"fused": True}])
def test_a_schedule_changes_a_rate_in_a_tensor_and_not_a_number(options):
    def scheduled(training):
        if not hasattr(training, "schedule"):
            training.schedule = torch.optim.lr_scheduler.ExponentialLR(training.optimizer, 0.5)
        training.schedule.step()

    assert_as_direct(lambda parameters: torch.optim.Adam(parameters, lr=rate(), **options), between=scheduled)
    number = Training(functools.partial(torch.optim.Adam, lr=0.01, **options))
    graph = number.captured()
    torch.optim.lr_scheduler.ExponentialLR(number.optimizer, 0.5).step()
    with pytest.raises(GraphError, match=r"'lr'.* was 0\.01 and is 0\.005, .*keep it in a tensor"):
        graph.replay()


@pytest.mark.parametrize(
    ("kind", "options", "advice"),
    [
        (torch.optim.SGD, {"lr": rate()}, "make it with fused=True"),
        (torch.optim.SGD, {"lr": rate(), "momentum": 0.9, "foreach": True}, "make it with fused=True"),
        (torch.optim.Adagrad, {}, "make it with fused=True"),
        (torch.optim.LBFGS, {}, "no option keeps it from that; use another one, such as Adam"),
        (torch.optim.Adafactor, {}, "no option keeps it from that; use another one, such as Adam"),
    ],
)
def test_what_a_gpu_would_refuse_is_refused_on_a_cpu_and_the_option_named(kind, options, advice):
    with pytest.raises(CaptureError) as caught:
        Training(functools.partial(kind, **options)).captured()
    message = str(caught.value)
    assert f"{kind.__name__} reads its numbers on the host" in message
    assert advice in message
    assert "test_graph_optimizers.py:" in message
    assert "\n" not in message
    if "fused" in advice:
        assert_as_direct(functools.partial(kind, **options | {"fused": True, "foreach": False}))


def test_what_the_user_reads_is_refused_beside_an_optimiser():
    """In a step of his own, and in a closure that an optimiser calls."""
    training = Training(torch.optim.Adam)

    class Own(torch.optim.Adam):
        def step(self):
            super().step()
            return self.param_groups[0]["params"][0].sum().item()

    def reading():
        return training.step().item()

    with pytest.raises(CaptureError, match="_local_scalar_dense: reading a tensor on the host"):
        capture(lambda: training.optimizer.step(reading), state=training.weight)
    with pytest.raises(CaptureError, match="_local_scalar_dense: reading a tensor on the host"):
        Training(Own).captured()


def test_an_optimiser_in_a_loop_on_a_cpu():
    replayed, direct = Training(torch.optim.Adam), Training(torch.optim.Adam)
    going_on, left = torch.ones((), dtype=torch.bool), torch.tensor(3)

    def body():
        replayed.step()
        left.sub_(1)
        going_on.copy_(left > 0)

    replayed.step()
    while_graph(body, going_on, state=[replayed.state, left]).replay()
    for _ in range(4):
        direct.step()
    assert torch.equal(replayed.weight, direct.weight)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["Adam", "AdamW", "NAdam", "RAdam", "Adamax", "ASGD", "RMSprop", "Adadelta", "Rprop"])
def test_on_a_gpu_an_optimiser_needs_capturable_and_the_error_says_so(name):
    kind = getattr(torch.optim, name)
    with pytest.raises(CaptureError, match=rf"make (it|{name}) with capturable=True") as caught:
        Training(functools.partial(kind, lr=0.01), "cuda").captured()
    assert "\n" not in str(caught.value)
    assert_as_direct(functools.partial(kind, lr=0.01, capturable=True), "cuda")


@pytest.mark.gpu
def test_on_a_gpu_a_learning_rate_in_a_tensor():
    with pytest.raises(CaptureError, match=r"make (it|Adam) with capturable=True"):
        Training(lambda parameters: torch.optim.Adam(parameters, lr=rate("cuda")), "cuda").captured()
    with pytest.raises(CaptureError, match=r"make (it|SGD) with fused=True"):
        Training(lambda parameters: torch.optim.SGD(parameters, lr=rate("cuda")), "cuda").captured()
    for make in (
        lambda parameters: torch.optim.Adam(parameters, lr=rate("cuda"), capturable=True),
        lambda parameters: torch.optim.Adam(parameters, lr=rate("cuda"), fused=True, capturable=True),
        lambda parameters: torch.optim.SGD(parameters, lr=rate("cuda"), fused=True),
    ):
        assert_as_direct(make, "cuda", between=lambda training: training.optimizer.param_groups[0]["lr"].mul_(0.5))
