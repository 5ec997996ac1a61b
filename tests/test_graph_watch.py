"""rlgraph.graph.watch: what a capture has baked in, and a change of it after the capture, or from call to call."""

import contextlib
import gc
import itertools
import random
import sys
import threading
import timeit
import types
import weakref

import numpy as np
import pytest
import torch

from rlgraph.errors import CaptureError, GraphError
from rlgraph.graph.capture import capture
from rlgraph.graph.device.control import if_graph, while_graph
from rlgraph.graph.device.relaunch import launch_beside, relaunching
from rlgraph.graph.host_draws import HostDraws
from rlgraph.graph.pool import GraphPool
from rlgraph.graph.user_code import code_that_runs
from rlgraph.graph.walk import SMALL
from rlgraph.graph.watch import Watched

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SCALE, RNG = 1.0, np.random.default_rng(0)
SETTINGS = types.SimpleNamespace(offset=0.0)


class Policy(torch.nn.Module):
    floor = -1.0

    def __init__(self, device):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Dropout(0.0), torch.nn.Linear(4, 2)).to(device)
        self.register_buffer("mean", torch.zeros(3, device=device))
        self.temperature, self.history, self.options = 1.0, [1], {"clip": 5.0}
        self.bounds = np.array([5.0, 6.0])
        self.calls, self.result, self.loss = 0, None, None

    def forward(self, x):
        logits = self.net(x - self.mean) / self.temperature * SCALE + SETTINGS.offset + len(self.history)
        self.result = logits  # only written
        self.loss = logits.sum()  # written before it is read
        return logits.clamp(self.floor, min(self.options["clip"], self.bounds[0])) + self.loss

    def act(self, x):  # what a user's loop does beside: not part of what is captured
        self.calls += 1
        return self(x)


class OfRows(Policy):
    def forward(self, x):
        return self.net(x - self.mean) / self.temperature


def _set_global(value):
    global SCALE
    SCALE = value


CHANGES = {
    "Policy.temperature was 1.0 and is 0.5": lambda p: setattr(p, "temperature", 0.5),
    "Policy.training was True and is False": lambda p: p.eval(),
    "global SCALE was 1.0 and is 2.0": lambda p: _set_global(2.0),
    "SETTINGS.offset was 0.0 and is 1": lambda p: setattr(SETTINGS, "offset", 1),
    "Policy.floor was -1.0 and is -2.0": lambda p: setattr(Policy, "floor", -2.0),
    "there was no Policy.floor of its own and there is one": lambda p: setattr(p, "floor", -2.0),
    "the length of Policy.history was 1 and is 2": lambda p: p.history.append(1),
    "Policy.history[0] was 1 and is 7": lambda p: p.history.__setitem__(0, 7),
    "Policy.options['clip'] was 5.0 and is 1.0": lambda p: p.options.update(clip=1.0),
    "Policy.options['clip'] was 5.0 and is gone": lambda p: p.options.clear(),
    "what is in Policy.bounds is another ndarray than it was": lambda p: p.bounds.__setitem__(0, 4.0),
    "Policy.bounds is another ndarray than it was": lambda p: setattr(p, "bounds", p.bounds + 1),
    "Policy.net.2 is another Linear than it was": lambda p: p.net.__setitem__(2, torch.nn.Linear(4, 2)),
    "Policy.net.1.p was 0.0 and is 0.5": lambda p: setattr(p.net[1], "p", 0.5),
    "Policy.mean is another tensor than it was": lambda p: setattr(p, "mean", p.mean + 1),
    "the address of Policy's first parameter": lambda p: p.net.double(),
    "Policy.net.0.weight is another": lambda p: setattr(p.net[0], "weight", torch.nn.Parameter(p.net[0].weight + 1)),
}


@pytest.fixture
def as_before():
    yield
    _set_global(1.0)
    SETTINGS.offset, Policy.floor = 0.0, -1.0


@pytest.mark.parametrize("message", CHANGES)
def test_a_change_after_the_capture_is_an_error_in_one_line(message, as_before):
    policy, x = Policy("cpu"), torch.ones(3)
    graph = capture(policy, x)
    policy.act(x)
    graph.replay(x)  # `calls`, `result` and `loss` have changed, and make no difference
    CHANGES[message](policy)
    with pytest.raises(GraphError) as error:
        graph.replay(x)
    assert message in str(error.value) and "graph.update(fn)" in str(error.value) and "\n" not in str(error.value)
    assert graph.replays == 1


@pytest.mark.parametrize("device", DEVICES)
def test_an_update_takes_the_change_and_so_does_putting_it_back(device):
    policy, x = Policy(device), torch.ones(3, device=device)
    graph = capture(policy, x)
    before = graph.replay().clone()
    policy.temperature = 0.5
    with pytest.raises(GraphError, match=r"Policy.temperature was 1.0 and is 0.5, but Policy was captured with"):
        graph.replay()
    policy.temperature = 0.5 + 0.5  # another object, the same number
    assert torch.equal(graph.replay(), before)
    policy.temperature = 0.25
    graph.update(policy)
    torch.testing.assert_close(graph.replay(), policy(x))
    assert not torch.equal(graph.replay(), before)


class Recurrent:
    def __init__(self, device):
        self.weight, self.hidden = torch.full((2,), 0.5, device=device), torch.zeros(2, device=device)
        self.count, self.seen, self.coming = 0, [], [4.0, 3.0, 2.0, 1.0]
        self.counter = np.zeros(1)

    def rebinds(self, x):
        self.hidden = torch.tanh(x + self.weight * self.hidden)
        return self.hidden

    def moves_on(self, x):
        self.hidden, last = x * 2, self.hidden
        return last

    def in_place(self, x):
        self.hidden.copy_(torch.tanh(x + self.weight * self.hidden))
        return self.hidden * 1

    def counts(self, x):
        self.count += 1
        return x * self.count

    def counts_in_an_array(self, x):
        self.counter += 1
        return x * float(self.counter[0])

    def appends(self, x):
        self.seen.append(x)
        return x * len(self.seen)

    def pops(self, x):
        return x * self.coming.pop()


REBOUND = {
    "rebinds": "hidden is another tensor",
    "moves_on": "hidden is another",
    "counts": "count was 1 and is 2",
    "counts_in_an_array": "what is in Recurrent.counter is another ndarray",
    "appends": "the length of Recurrent.seen was 1 and is 2",
    "pops": "coming[2] was 2.0 and is gone",
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("method", REBOUND)
def test_what_every_call_rebinds_and_reads_is_an_error_at_the_capture(method, device):
    net, x = Recurrent(device), torch.ones(2, device=device)
    hidden = net.hidden
    with pytest.raises(CaptureError, match=rf"{method} cannot be captured: from one call to the next .*copy_") as error:
        capture(getattr(net, method), x)
    if device == "cpu":
        assert REBOUND[method] in str(error.value)
    assert (net.hidden is hidden, net.count, net.counter, net.seen, len(net.coming)) == (True, 0, 0, [], 4)  # put back


@pytest.mark.parametrize("device", DEVICES)
def test_in_place_is_right(device):
    net, direct, x = Recurrent(device), Recurrent(device), torch.ones(2, device=device)
    graph = capture(net.in_place, x, state=net.hidden)
    for _ in range(3):
        assert torch.equal(graph.replay(), direct.in_place(x))


@pytest.mark.parametrize("device", DEVICES)
def test_a_graph_keeps_no_result_of_warming_up(device):
    """On a GPU it would take memory as long as the graph lives, with all that autograd has saved for it."""
    policy, results = Policy(device), weakref.WeakSet()

    def step(x):
        logits = policy(x)
        results.add(policy.result)
        return logits

    gc.disable()  # nor is there a cycle that holds one
    try:
        graph = capture(step, torch.ones(3, device=device))
    finally:
        gc.enable()
    assert set(results) == {policy.result}  # the last call's
    graph.replay()


def test_what_the_first_call_makes_is_no_error():
    class Lazy:
        def __init__(self):
            self.cache, self.buffer = {}, None

        def __call__(self, x):
            if self.buffer is None:
                self.buffer = torch.zeros_like(x)
            self.cache.setdefault("twice", 2 * self.buffer)
            return x + self.cache["twice"]

    capture(Lazy(), torch.ones(2)).replay()


@pytest.mark.parametrize("device", DEVICES)
def test_a_change_under_a_pool(device):
    policy, x = OfRows(device), torch.ones(2, 3, device=device)
    pool = GraphPool(policy, sizes=(4,))
    before = pool(x)
    policy.temperature = 0.5
    with pytest.raises(GraphError, match=r"OfRows.temperature was 1.0 and is 0.5.*reset\(\) of a GraphPool"):
        pool(x)
    pool.reset()
    assert not torch.equal(pool(x), before)


def test_a_cache_may_grow():
    masks = {}

    def masked(x):
        if len(x) not in masks:
            masks[len(x)] = torch.ones(len(x))
        return x * masks[len(x)]

    graph = capture(masked, torch.ones(2))
    capture(masked, torch.ones(3))
    graph.replay()


def _numpy_branch(x):
    return x if np.random.default_rng().random() < 0.5 else -x  # a generator made anew: nothing is left of it


@pytest.mark.parametrize(
    ("source", "draw"),
    [
        ("Python's random", random.random),
        ("np.random", lambda: np.random.rand()),  # noqa: NPY002
        ("RNG", lambda: RNG.random()),
    ],
)
def test_draws_of_the_host_are_an_error(source, draw):
    def fn(x, draw=draw):
        return x if draw() < 0.5 else -x

    with pytest.raises(CaptureError, match=f"it draws from {source}, and every replay would use the same"):
        capture(fn, torch.ones(2))


def test_generators_that_stand_still_have_not_been_drawn_from():
    generator = torch.Generator()
    draws = HostDraws([("the generator", generator)])
    held = [generator.get_state() for _ in range(3)]  # elsewhere in memory, the same
    assert draws.drawn_by(pytest.fail) is None and len(held) == 3
    first = torch.rand(1, generator=generator)
    assert draws.drawn_by(lambda: torch.rand(1, generator=generator)) == "the generator"
    draws.put_back()
    assert torch.equal(torch.rand(1, generator=generator), first)


@pytest.mark.parametrize("fails", [False, True])
def test_draws_of_another_thread_are_its_own(fails):
    """It draws in the first calls, and never again; what it has drawn is not put back."""
    calls, before = itertools.count(), random.getstate()

    def fn(x):
        if next(calls) < (1 if fails else 3):  # nobody sees an iterator's place
            thread = threading.Thread(target=random.random)
            thread.start()
            thread.join()
        return x * float(x.sum()) if fails else x

    with pytest.raises(CaptureError, match="reading a tensor on the host") if fails else contextlib.nullcontext():
        capture(fn, torch.ones(2))
    assert random.getstate() != before
    random.setstate(before)


def test_draws_of_a_first_call_alone_are_put_back_after_an_error():
    held, state = {}, random.getstate()

    def fn(x):
        if not held:
            held["number"] = random.random()
        return x * held["number"] * float(x.sum())

    with pytest.raises(CaptureError, match="reading a tensor on the host"):
        capture(fn, torch.ones(2))
    assert random.getstate() == state and not held


def test_draws_of_the_function_are_put_back_after_any_error():
    state = random.getstate()
    with pytest.raises(CaptureError, match="reading a tensor on the host"):
        capture(lambda x: x * random.random() * float(x.sum()), torch.ones(2))
    assert random.getstate() == state


def test_what_cannot_be_seen():
    """As the documentation says."""
    capture(_numpy_branch, torch.ones(2)).replay()
    table = np.zeros(SMALL)  # of 8 bytes each
    graph = capture(lambda x: x + float(table[0]), torch.ones(2))
    table[0] = 1
    graph.replay()


def test_on_a_gpu_a_number_in_a_cpu_tensor_is_baked_in():
    rate = torch.tensor(0.5)
    with code_that_runs() as ran:
        (fn := lambda x: x * rate)(torch.ones(2))
    watched = Watched(fn, torch.device("cuda"), ran)
    assert watched.change() is None
    rate.fill_(0.25)
    assert "writes to rate, a CPU tensor," in watched.change()
    watched = Watched(fn, torch.device("cpu"), ran)
    rate.fill_(0.5)
    assert watched.change() is None


def test_unwatched_nothing_is_noticed():
    policy = Policy("cpu")
    graph = capture(policy, torch.ones(3), watch=False)
    policy.temperature = 0.5
    graph.replay()


MADE = {
    "a loop": lambda body, on, watch: while_graph(body, on, state=on, most=1, watch=watch),
    "a branch": lambda body, on, watch: if_graph(on, body, watch=watch),
    "a launch from the device": lambda body, on, watch: relaunching(body, on, most=1, watch=watch),
    "a launch beside": lambda body, on, watch: launch_beside(on, body, lambda: on.fill_(True), watch=watch),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("made", MADE)
def test_a_change_under_what_the_device_decides(made, device):
    policy, x, on = Policy(device), torch.ones(3, device=device), torch.ones((), dtype=torch.bool, device=device)
    total = torch.zeros((), device=device)
    with torch.no_grad():
        watched, unwatched = (MADE[made](lambda: total.add_(policy(x).sum()), on, watch) for watch in (True, False))
        watched.replay()
        policy.temperature = 0.5
        with pytest.raises(GraphError, match=r"policy.temperature was 1.0 and is 0.5.*make the loop or branch anew"):
            watched.replay()
        unwatched.replay()


def test_a_profiler_goes_on_after_a_capture_and_other_threads_are_left_alone():
    calls = []
    before = sys.getprofile()
    try:
        sys.setprofile(profiler := lambda *event: calls.append(event))
        with code_that_runs() as ran:
            thread = threading.Thread(target=lambda: _set_global(1.0))
            thread.start()
            thread.join()
        assert sys.getprofile() is profiler
    finally:
        sys.setprofile(before)
    assert _set_global.__code__ not in ran


def test_an_iteration_of_rlgraph_rebinds_nothing_that_it_reads():
    """Trainers do not watch theirs, for the time it takes; what they do passes all the same."""
    from rlgraph import make
    from rlgraph.agents.ppo.config import PPOConfig
    from rlgraph.agents.ppo.torch import PPO

    config = PPOConfig(num_envs=4, num_steps=4, num_minibatches=2, device="cpu", mode="eager", target_kl=0.1)
    trainer = PPO(config, make("CartPole-v1"))
    graph = capture(trainer._iteration, state=trainer._state(), generators=[trainer.generator])
    graph.replay()
    assert len(graph._watched) > 50
    trainer.optimizer.param_groups[0]["eps"] = 1.0
    with pytest.raises(GraphError, match="eps"):
        graph.replay()


def test_it_costs_little():
    """2 microseconds for 50 values on an idle machine; here only that it is not many times that."""
    holder = types.SimpleNamespace(**{f"a{i}": object() for i in range(50)})
    watched = Watched(lambda: [holder.a0])  # all attributes count, as nothing has run
    assert len(watched) >= 50
    assert min(timeit.repeat(watched.change, number=1000, repeat=5)) / 1000 < 20e-6
