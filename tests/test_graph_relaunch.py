"""Graphs that the device launches. On a CPU the host decides, and runs one after the other."""

import time
import types

import pytest
import torch
from fused_tools import make_env, make_policy
from graph_tools import DEVICES, Counting, fake_api

from rlgraph.errors import CaptureError, GraphError, UsageError
from rlgraph.graph import bindings
from rlgraph.graph.capture import capture
from rlgraph.graph.device import nodes
from rlgraph.graph.device.control import if_graph, while_graph
from rlgraph.graph.device.relaunch import Relaunching, launch_beside, relaunching

# ---- a graph that launches itself again


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32])
@pytest.mark.parametrize("device", DEVICES)
def test_it_goes_on_while_the_condition_holds_in_every_launch(device, dtype):
    c = Counting(device, 1, dtype)
    loop = relaunching(c.count, c.going_on, state=c.state)
    assert (c.number.item(), bool(c.going_on)) == (0, True)  # making it leaves no trace
    assert loop.captured == (device == "cuda")
    for limit in (5, 1, 12):
        c.again(limit)
        loop.replay()
        assert c.number.item() == limit  # on the same stream, before anything waits: it sees the last iteration
        assert loop.iterations() == limit
        assert c.total.item() == limit * (limit + 1) // 2
    assert loop.replays == 3


@pytest.mark.parametrize("device", DEVICES)
def test_the_condition_is_looked_at_first_and_most_bounds_a_launch(device):
    c = Counting(device, 10)
    loop = relaunching(c.count, c.going_on, state=c.state, most=4)
    for done, iterations in ((4, 4), (8, 4), (10, 2), (10, 0)):
        loop.replay()
        assert (c.number.item(), loop.iterations()) == (done, iterations)


@pytest.mark.parametrize("device", DEVICES)
def test_a_body_of_several_functions_runs_them_in_order(device):
    c = Counting(device, 3)
    seen = torch.zeros(5, dtype=torch.int64, device=device)

    def note():
        seen.index_copy_(0, c.number.view(1), c.total.view(1))

    relaunching([c.count, note], c.going_on, state=[c.state, seen]).replay()
    assert seen.tolist() == [0, 1, 3, 6, 0]


@pytest.mark.gpu
def test_a_thousand_iterations_are_one_launch_and_the_host_does_not_wait():
    c = Counting("cuda", 1000)
    loop = relaunching(c.count, c.going_on, state=c.state)
    for _ in range(3):
        c.again(1000)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            started = time.perf_counter()
            loop.replay()
            host = time.perf_counter() - started
            ended = torch.cuda.Event()
            ended.record()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        ended.synchronize()  # an event after the launch comes after the last iteration
        wall = time.perf_counter() - started
        assert (c.total.item(), loop.iterations()) == (500_500, 1000)
    assert host < wall / 2  # of the third launch: the first takes the graph to the device


@pytest.mark.gpu
def test_launches_that_are_not_waited_for_come_one_after_the_other():
    c = Counting("cuda", 300)
    loop = relaunching(c.count, c.going_on, state=c.state, most=100)
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    for stream in streams:
        with torch.cuda.stream(stream):
            loop.replay()
    torch.cuda.synchronize()
    assert (c.number.item(), c.total.item()) == (300, 300 * 301 // 2)


@pytest.mark.gpu
def test_copies_fills_and_matrix_products_are_launched_too():
    c = Counting("cuda", 50)
    x, y, z = torch.zeros(64, 64, device="cuda"), torch.ones(64, 64, device="cuda"), torch.ones(64, 64, device="cuda")
    product = torch.zeros(64, 64, device="cuda")

    def work():
        y.copy_(x)
        z.zero_()
        torch.mm(y, y + 1, out=product)
        x.add_(1)
        c.count()

    loop = relaunching(work, c.going_on, state=[c.state, x, y, z, product])
    for _ in range(2):
        x.zero_()
        c.again(50)
        loop.replay()
        assert loop.iterations() == 50
        assert (x[0, 0].item(), y[0, 0].item(), product[0, 0].item()) == (50, 49, 64 * 49 * 50)


@pytest.mark.gpu
@pytest.mark.usefixtures("own_kernel_cache")
def test_a_rollout_that_launches_itself_again_has_fresh_numbers():
    from rlgraph.kernels.rollouts import FusedCollector

    env = make_env("CartPole-v1")
    policy = make_policy(env, device="cuda").for_kernels()
    made = [FusedCollector(env, policy, 16, 8, torch.Generator("cuda").manual_seed(0), "ieee") for _ in range(2)]
    collectors = {"replayed": made[0], "relaunched": made[1]}
    log_probs = {name: torch.zeros(6, 8, 16, device="cuda") for name in collectors}
    going_on = torch.ones((), dtype=torch.bool, device="cuda")

    def rolling(name):
        collector, iteration = collectors[name], torch.zeros(1, dtype=torch.int64, device="cuda")

        def collect():
            rollout, _ = collector.collect()
            log_probs[name].index_copy_(0, iteration, rollout.log_prob_TB[None])
            iteration.add_(1)

        return collect, [collector.state(), iteration, log_probs[name]]

    collect, state = rolling("relaunched")
    loop = relaunching(collect, going_on, state=state, most=3)
    loop.replay()
    loop.replay()
    collect, state = rolling("replayed")
    graph = capture(collect, state=state)
    for _ in range(6):
        graph.replay()
    assert loop.iterations() == 3
    assert len(log_probs["relaunched"].unique(dim=0)) == 6
    assert log_probs["relaunched"].equal(log_probs["replayed"])


# ---- a graph that is started beside another


class Evaluating:
    """A training that counts, and an evaluation every third time, of what was copied for it."""

    def __init__(self, device):
        self.trained, self.copied, self.evaluated, self.runs = (
            torch.zeros((), dtype=torch.int64, device=device) for _ in range(4)
        )
        self.due = torch.zeros((), dtype=torch.bool, device=device)
        self.state = [self.trained, self.copied, self.evaluated, self.runs]

    def look(self):
        self.due.copy_(self.trained % 3 == 0)
        self.copied.copy_(self.trained)

    def evaluate(self):
        self.evaluated.copy_(self.copied)
        self.runs.add_(1)

    def train(self):
        self.trained.add_(1)


@pytest.mark.parametrize("device", DEVICES)
def test_what_is_beside_runs_where_the_predicate_holds_and_the_body_always(device):
    e = Evaluating(device)
    step = launch_beside(e.due, e.evaluate, e.train, first=e.look, state=e.state)
    assert e.trained.item() == e.runs.item() == 0
    launched = []
    for n in range(7):
        step.replay()
        assert e.runs.item() == n // 3 + 1  # on the same stream: it has waited for the evaluation too
        launched.append(step.iterations())
    assert launched == [1, 0, 0, 1, 0, 0, 1]
    assert (e.trained.item(), e.evaluated.item()) == (7, 6)


@pytest.mark.parametrize("device", DEVICES)
def test_without_a_first_function_the_predicate_is_the_callers(device):
    e = Evaluating(device)
    step = launch_beside(e.due, [e.evaluate, e.evaluate], e.train, state=e.state)
    for due, runs in ((True, 2), (False, 2), (True, 4)):
        e.due.fill_(due)
        step.replay()
        assert (e.runs.item(), step.iterations()) == (runs, due)
    assert e.trained.item() == 3


@pytest.mark.gpu
def test_it_is_launched_again_and_again_without_waiting():
    e = Evaluating("cuda")
    step = launch_beside(e.due, e.evaluate, e.train, first=e.look, state=e.state)
    for _ in range(1000):
        step.replay()
    torch.cuda.synchronize()
    assert (e.trained.item(), e.runs.item(), e.evaluated.item()) == (1000, 334, 999)
    assert step.iterations() == 1


@pytest.mark.gpu
def test_both_run_at_the_same_time():
    wait = 4_000_000  # cycles: some milliseconds
    yes, never = torch.ones((), dtype=torch.bool, device="cuda"), torch.zeros((), dtype=torch.bool, device="cuda")

    def work():
        torch.cuda._sleep(wait)

    def milliseconds(predicate):
        step = launch_beside(predicate, work, work)
        times = []
        for _ in range(4):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            step.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
        return min(times)

    assert milliseconds(yes) < 1.5 * milliseconds(never)


# ---- errors


def test_what_makes_no_body_is_refused():
    c = Counting("cpu", 5)
    branch = if_graph(c.going_on, c.count, state=c.state)
    with pytest.raises(UsageError, match="while_graph or if_graph makes no part of what relaunching makes: give func"):
        relaunching([c.count, branch], c.going_on)
    again = relaunching(c.count, c.going_on, state=c.state)
    with pytest.raises(UsageError, match="relaunching makes no part of what while_graph or if_graph makes"):
        while_graph(again, c.going_on)
    with pytest.raises(UsageError, match="makes no part of what launch_beside makes"):
        launch_beside(c.going_on, c.count, again)
    with pytest.raises(UsageError, match="give the function itself"):
        relaunching(capture(c.count, state=[c.state, c.going_on]), c.going_on)
    with pytest.raises(UsageError, match="most must be at least 1, but is 0"):
        relaunching(c.count, c.going_on, most=0)
    with pytest.raises(CaptureError, match=r"rand.*do not advance"):
        relaunching(lambda: torch.rand(3), c.going_on)


def test_an_old_driver_is_refused_by_its_version(monkeypatch):
    monkeypatch.setattr(bindings, "load", lambda: (fake_api(cudaDriverGetVersion=(0, 11080)), None))
    with pytest.raises(
        GraphError, match=r"^a launch from the device needs a driver for CUDA 12\.0 or later, .* 11\.8:"
    ):
        bindings.check_driver(*Relaunching.NEEDS)


def test_a_launch_that_the_device_refuses_is_an_error(monkeypatch):
    name = types.SimpleNamespace(name="cudaErrorInvalidValue")
    monkeypatch.setattr(nodes, "load", lambda: (types.SimpleNamespace(cudaError_t={1: name}.__getitem__), None))
    c = Counting("cpu", 5)
    loop = relaunching(c.count, c.going_on, state=c.state)
    loop._error.fill_(1)
    with pytest.raises(GraphError, match=r"^cudaGraphLaunch failed on the device: cudaErrorInvalidValue$"):
        loop.iterations()


def test_what_no_kernel_can_launch_is_named(monkeypatch):
    runtime = pytest.importorskip("cuda.bindings.runtime", reason="needs cuda-bindings")
    params = runtime.cudaGraphInstantiateParams()
    monkeypatch.setattr(nodes, "node_of", lambda *args: bindings.Node("memcpy", "host-to-device"))
    fake = types.SimpleNamespace(
        result_out=runtime.cudaGraphInstantiateResult.cudaGraphInstantiateNodeOperationNotSupported, errNode_out=5
    )
    assert nodes._refusal(fake).startswith("it holds what is not allowed, at a node of kind memcpy host-to-device; ")
    assert nodes._refusal(params).startswith("Success; ")


@pytest.mark.gpu
def test_a_conditional_node_is_refused_by_cuda():
    """By hand: `relaunching` refuses it before."""
    predicate, count = (
        torch.ones((), dtype=torch.bool, device="cuda"),
        torch.zeros((), dtype=torch.int64, device="cuda"),
    )
    graph = nodes.Handmade()
    nodes.add_conditional(graph.graph, None, predicate, count, 1, loop=False)
    with pytest.raises(
        GraphError, match=r"^cudaGraphInstantiateWithParams failed: \w+: .*; a graph that kernels launch"
    ):
        graph.instantiate_for_kernels()
