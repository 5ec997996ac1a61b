"""rlgraph.graph.watch: what a capture has baked in, and a change of it after the capture, or from call to call."""

import contextlib
import functools
import gc
import itertools
import random
import re
import threading
import timeit
import types
import weakref
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from rlgraph.errors import CaptureError, GraphError
from rlgraph.graph.capture import capture
from rlgraph.graph.device.control import if_graph, while_graph
from rlgraph.graph.device.relaunch import launch_beside, relaunching
from rlgraph.graph.pool import GraphPool
from rlgraph.graph.uncapturable import HostDraws
from rlgraph.graph.watch import ITEMS, MOST, Watch

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SCALE = 1.0
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
    "Policy.floor was -1.0 and is -3.0": lambda p: setattr(p, "floor", -3.0),  # of its own
    "the length of Policy.history was 1 and is 2": lambda p: p.history.append(1),
    "Policy.history[0] was 1 and is 7": lambda p: p.history.__setitem__(0, 7),
    "Policy.options['clip'] was 5.0 and is 1.0": lambda p: p.options.update(clip=1.0),
    "Policy.options['clip'] was 5.0 and is gone": lambda p: p.options.clear(),
    "Policy.bounds is another ndarray than it was": lambda p: setattr(p, "bounds", p.bounds + 1),
    "Policy.net.2 is another Linear than it was": lambda p: p.net.__setitem__(2, torch.nn.Linear(4, 2)),
    "Policy.net.1.p was 0.0 and is 0.5": lambda p: setattr(p.net[1], "p", 0.5),
    "Policy.mean is another tensor than it was": lambda p: setattr(p, "mean", p.mean + 1),
    "the address of Policy.net.0's first parameter": lambda p: p.net.double(),
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

    def appends(self, x):
        self.seen.append(x)
        return x * len(self.seen)

    def pops(self, x):
        return x * self.coming.pop()


REBOUND = {
    "rebinds": "hidden is another tensor",
    "moves_on": "hidden is another",
    "counts": "count was 1 and is 2",
    "appends": "the length of Recurrent.seen was 1 and is 2",
    "pops": "the length of Recurrent.coming was 3 and is 2",
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
    assert (net.hidden is hidden, net.count, net.seen, net.coming) == (True, 0, [], [4.0, 3.0, 2.0, 1.0])  # put back


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
    ],
)
def test_draws_of_the_host_are_an_error(source, draw):
    def fn(x, draw=draw):
        return x if draw() < 0.5 else -x

    with pytest.raises(CaptureError, match=f"it draws from {source}, and every replay would use the same"):
        capture(fn, torch.ones(2))


def test_generators_that_stand_still_have_not_been_drawn_from():
    draws, state = HostDraws(on_gpu=True), torch.get_rng_state()
    assert draws.drawn_by(pytest.fail) is None
    first = torch.rand(1)
    assert draws.drawn_by(lambda: torch.rand(1)) == "torch's generator on the CPU"
    assert torch.equal(torch.rand(1), first)  # put back
    torch.set_rng_state(state)
    torch.rand(1)
    assert HostDraws(on_gpu=False).drawn_by(lambda: torch.rand(1)) is None


@pytest.mark.parametrize("fails", [False, True])
def test_draws_of_another_thread_are_its_own(fails):
    """It draws in the first calls, and never again; what it has drawn is not put back."""
    calls, before = itertools.count(), random.getstate()

    def fn(x):
        if next(calls) < (1 if fails else 2):  # nobody sees an iterator's place
            thread = threading.Thread(target=random.random)
            thread.start()
            thread.join()
        return x * float(x.sum()) if fails else x

    with pytest.raises(CaptureError, match="reading a tensor on the host") if fails else contextlib.nullcontext():
        capture(fn, torch.ones(2))
    assert random.getstate() != before
    random.setstate(before)


def test_draws_of_the_function_are_put_back_after_any_error():
    state = random.getstate()
    with pytest.raises(CaptureError, match="reading a tensor on the host"):
        capture(lambda x: x * random.random() * float(x.sum()), torch.ones(2))
    assert random.getstate() == state


def test_what_the_rule_does_not_see():
    """As the documentation says: items of arrays and beyond the first ones, and what is made anew."""
    capture(_numpy_branch, torch.ones(2)).replay()
    table, many = np.zeros(3), [0.0] * (ITEMS + 1)
    graph = capture(lambda x: x + float(table[0]) + sum(many), torch.ones(2))
    table[0] = many[ITEMS] = 1
    graph.replay()
    many[ITEMS - 1] = 1
    with pytest.raises(GraphError, match=r"many\[63\] was 0.0 and is 1"):
        graph.replay()


def test_on_a_gpu_a_number_in_a_cpu_tensor_is_baked_in():
    rate = torch.tensor(0.5)
    fn = lambda x: x * rate  # noqa: E731
    watch, elsewhere = Watch(fn, torch.device("cuda")), Watch(fn, torch.device("cpu"))
    assert watch.change() is None
    rate.fill_(0.25)
    assert "writes to rate, a CPU tensor," in watch.change()
    assert elsewhere.change() is None


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


def test_an_iteration_of_rlgraph_rebinds_nothing_that_it_reads():
    """Trainers do not watch theirs, for the time it takes; what they do passes all the same."""
    from rlgraph import make
    from rlgraph.agents.ppo.config import PPOConfig
    from rlgraph.agents.ppo.torch import PPO

    config = PPOConfig(num_envs=4, num_steps=4, num_minibatches=2, device="cpu", mode="eager", target_kl=0.1)
    trainer = PPO(config, make("CartPole-v1"))
    graph = capture(trainer._iteration, state=trainer._state(), generators=[trainer.generator])
    graph.replay()
    assert len(graph._watch._entries) > 50
    trainer.optimizer.param_groups[0]["eps"] = 1.0
    with pytest.raises(GraphError, match="eps"):
        graph.replay()


def test_it_costs_little():
    """3 microseconds for 50 values on a shared core; here only that it is not many times that."""
    values = [object() for _ in range(50)]
    watch = Watch(lambda: values)
    assert len(watch._entries) > 50
    assert min(timeit.repeat(watch.change, number=1000, repeat=5)) / 1000 < 20e-6


@dataclass
class Settings:
    scale: float = 1.0


@dataclass
class Slotted:
    __slots__ = ("scale",)


def _scaled_by(settings):
    return settings.scale


def _reaching_into_everything():
    """A function, and by what is changed which change of a value that it names, in the message's words."""
    settings, nested, slotted = Settings(), types.SimpleNamespace(inner=Settings()), Slotted()
    slotted.scale, optimizer = 1.0, torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    layers, limits, more = [Settings(), Settings()], {"low": {"clip": 1.0}}, (Settings(),)

    def scaled(x, by, *, more=more):
        x = x * by.scale * _scaled_by(settings) * nested.inner.scale * slotted.scale * more[0].scale
        return x * sum(layer.scale for layer in layers) * limits["low"]["clip"] * optimizer.param_groups[0]["lr"]

    given = Settings()
    fn = functools.partial(scaled, by=given)
    return fn, {
        "Settings.scale was 1.0 and is 2": lambda: setattr(given, "scale", 2),
        "settings.scale was 1.0 and is 2": lambda: setattr(settings, "scale", 2),
        "nested.inner.scale was 1.0 and is 2": lambda: setattr(nested.inner, "scale", 2),
        "slotted.scale was 1.0 and is 2": lambda: setattr(slotted, "scale", 2),
        "scaled.__kwdefaults__['more'][0].scale was 1.0 and is 2": lambda: setattr(
            scaled.__kwdefaults__["more"][0], "scale", 2
        ),
        "layers[1].scale was 1.0 and is 2": lambda: setattr(layers[1], "scale", 2),
        "the length of layers was 2 and is 3": lambda: layers.append(Settings()),
        "limits['low']['clip'] was 1.0 and is 2": lambda: limits["low"].update(clip=2),
        "optimizer.param_groups[0]['lr'] was 0.1 and is 0.2": lambda: optimizer.param_groups[0].update(lr=0.2),
        "global _scaled_by is another function": lambda: globals().update(_scaled_by=lambda settings: 1.0),
    }


@pytest.mark.parametrize("i", range(10))
def test_closures_partials_defaults_containers_slots_optimisers_and_functions_are_reached(i, monkeypatch):
    monkeypatch.setitem(globals(), "_scaled_by", _scaled_by)  # put back at the end
    fn, changes = _reaching_into_everything()
    assert len(changes) == 10
    graph = capture(fn, torch.ones(2))
    graph.replay()
    words = list(changes)[i]
    changes[words]()
    with pytest.raises(GraphError, match=re.escape(words.removeprefix("global "))):
        graph.replay()


def test_an_equal_number_is_no_change_and_another_type_is_one():
    settings = types.SimpleNamespace(big=10**6, nan=float("nan"), zero=0.0, on=True)
    fn = lambda: (settings.big, settings.nan, settings.zero, settings.on)  # noqa: E731
    watch = Watch(fn)
    settings.big, settings.nan = int("1000000"), float("nan")
    assert watch.change() is None
    for key, value in {"zero": -0.0, "on": 1, "big": 10.0**6}.items():
        before = getattr(settings, key)
        setattr(settings, key, value)
        assert watch.change().startswith(f"settings.{key} was")
        setattr(settings, key, before)
    assert watch.change() is None


def test_a_method_or_property_that_is_replaced_or_reads_something_is_watched():
    class Base:
        def factor(self):
            return self.scale

        @property
        def doubled(self):
            return 2 * self.more

    class Net(Base):
        def __init__(self):
            self.scale, self.more, self.unread = 1.0, 1.0, 0

        def __call__(self, x):
            return x * self.factor() * self.doubled

    for key in ("scale", "more"):
        net = Net()
        graph = capture(net, torch.ones(1))
        net.unread = 1
        graph.replay()
        setattr(net, key, 2.0)
        with pytest.raises(GraphError, match=f"Net.{key} was 1.0 and is 2.0"):
            graph.replay()


def test_beyond_the_most_values_a_warning_says_from_where_on():
    many = [[[0] * ITEMS for _ in range(ITEMS)] for _ in range(2)]
    with pytest.warns(UserWarning, match=rf"more than {MOST} Python values: a change of .*many\["):
        assert len(Watch(lambda: many)._entries) == MOST


class Refusing:
    def __getattr__(self, name):
        raise RuntimeError(name)


class Moody:
    kind = 1

    def __getattribute__(self, name):
        if name == "kind":
            raise RuntimeError("not now")
        return object.__getattribute__(self, name)


class Inventing:
    def __getattr__(self, name):
        return Inventing()


def test_objects_that_raise_or_make_things_up_stop_no_capture():
    odd = [Refusing(), Inventing(), types.SimpleNamespace(inner=Refusing()), Moody()]

    def fn(x):
        return x * len(odd) if x.dim() else odd[3].kind

    assert capture(fn, torch.ones(2)).replay().tolist() == [4, 4]


def test_what_a_flag_or_an_alias_keeps_is_no_mere_result():
    class Net:
        def __init__(self):
            self.on, self.now, self.before = False, torch.zeros(2), torch.ones(2)

        def toggles(self, x):
            self.on = not self.on
            return x if self.on else -x

        def shifts(self, x):
            self.before, self.now = self.now, x * 2
            return self.now + 1

    for method in ("toggles", "shifts"):
        with pytest.raises(CaptureError, match="from one call to the next Net"):
            capture(getattr(Net(), method), torch.ones(2))
