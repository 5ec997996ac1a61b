"""rlgraph.graph.watch: what a capture has baked in, and a change of it after the capture, or from call to call."""

import argparse
import contextlib
import functools
import gc
import itertools
import random
import re
import sys
import threading
import timeit
import types
import warnings
import weakref
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from rlgraph.errors import CaptureError, GraphError
from rlgraph.graph.auto import auto
from rlgraph.graph.capture import capture
from rlgraph.graph.control import if_graph, while_graph
from rlgraph.graph.host_draws import HostDraws
from rlgraph.graph.pool import GraphPool
from rlgraph.graph.relaunch import launch_beside, relaunching
from rlgraph.graph.user_code import code_that_runs
from rlgraph.graph.walk import LOOKS, MOST, SMALL, Walk
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
    "the hash of Policy.bounds's elements was": lambda p: p.bounds.__setitem__(0, 4.0),
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


@dataclass
class Settings:
    gain: float = 1.0


@dataclass(frozen=True)
class Fixed:
    settings: Settings


class Slotted:
    __slots__ = ("unit",)


def _reaching_into_everything():
    count, sizes, fixed, slotted = 0, [Settings()], Fixed(Settings()), Slotted()
    slotted.unit = 1.0
    args = argparse.Namespace(gain=1.0, unused=1)

    def scaled(x, by, *, more=sizes):
        product = x * by["factor"] * args.gain * fixed.settings.gain * slotted.unit * getattr(more[0], "gain")  # noqa: B009
        return product + count

    def count_on():
        nonlocal count
        count += 1

    by = {"factor": 1.0}
    changes = {
        "variable count of scaled was 0 and is 1": count_on,
        "by['factor'] was 1.0 and is 2.0": lambda: by.update(factor=2.0),
        "args.gain was 1.0 and is 2.0": lambda: setattr(args, "gain", 2.0),
        "fixed.settings.gain was 1.0 and is 2.0": lambda: setattr(fixed.settings, "gain", 2.0),
        "slotted.unit was 1.0 and is 2.0": lambda: setattr(slotted, "unit", 2.0),
        "more[0].gain was 1.0 and is 3.0": lambda: setattr(sizes[0], "gain", 3.0),
    }
    return functools.partial(scaled, by=by), changes, lambda: setattr(args, "unused", 2)


@pytest.mark.parametrize("i", range(6))
def test_partials_closures_defaults_dataclasses_and_slots_are_reached(i):
    fn, changes, harmless = _reaching_into_everything()
    graph = capture(fn, torch.ones(2))
    harmless()
    graph.replay()
    message, change = list(changes.items())[i]
    change()
    with pytest.raises(GraphError) as error:
        graph.replay()
    assert message in str(error.value)


def test_a_function_of_self_that_is_no_method():
    holder = types.SimpleNamespace(gain=1.0)

    def scaled(self, x):
        return x * self.gain

    graph = capture(functools.partial(scaled, holder), torch.ones(2))
    holder.gain = 2.0
    with pytest.raises(GraphError, match=r"gain was 1.0 and is 2.0"):
        graph.replay()


@pytest.mark.parametrize("device", DEVICES)
def test_a_learning_rate_of_an_optimiser(device):
    weight = torch.ones(2, device=device, requires_grad=True)
    weight.grad = torch.ones_like(weight)
    optimizer = torch.optim.SGD([weight], lr=0.5)
    graph = capture(lambda: optimizer.step(), state=weight)
    graph.replay()
    assert weight.tolist() == [0.5, 0.5]
    optimizer.param_groups[0]["lr"] = 0.25
    with pytest.raises(GraphError, match=r"optimizer.param_groups\[0\]\['lr'\] was 0.5 and is 0.25"):
        graph.replay()


OPTIMIZER_CHANGES = {
    "optimizer.param_groups is another list": lambda o, w: o.load_state_dict(o.state_dict()),
    "the length of optimizer.param_groups was 1 and is 2": lambda o, w: o.add_param_group({"params": [w]}),
    "optimizer.param_groups[0]['params'][0] is another": lambda o, w: o.param_groups[0]["params"].__setitem__(0, w),
    "optimizer.param_groups[0] is another dict": lambda o, w: o.param_groups.__setitem__(0, dict(o.param_groups[0])),
    "optimizer.state is another": lambda o, w: setattr(o, "state", o.state.copy()),
    "optimizer.state[0] is another dict": lambda o, w: o.state.update({p: dict(kept) for p, kept in o.state.items()}),
    "optimizer.state[0]['exp_avg'] is another": lambda o, w: next(iter(o.state.values())).update(exp_avg=w),
    "optimizer.state": lambda o, w: o.state.clear(),
}


@pytest.mark.parametrize("message", OPTIMIZER_CHANGES)
def test_an_optimisers_groups_and_state(message):
    weight, another = (torch.ones(2, requires_grad=True) for _ in range(2))
    weight.grad = torch.ones_like(weight)
    optimizer = torch.optim.Adam([weight], lr=0.5, fused=True)
    graph = capture(lambda: optimizer.step(), state=weight)  # whose first call makes the state
    assert graph.change() is None
    optimizer.state[another] = {}  # later, another parameter's
    graph.replay()
    del optimizer.state[another]
    OPTIMIZER_CHANGES[message](optimizer, another)
    assert graph.change().startswith(message)


class Point:
    __match_args__ = ("y",)

    def __init__(self):
        self.x, self.y = 1, 2


class Options:
    """Finds what it does not have elsewhere."""

    def __init__(self):
        self.held = {"gain": 1.0}

    def __getattr__(self, name):
        return self.held[name]


class Base:
    kind = 1.0

    def from_base(self, x):
        return x * self.kind


class Looking(Base):
    __slots__ = ("empty",)  # beside the `__dict__` of Base

    def __init__(self):
        self.point, self.options, self.net = Point(), Options(), torch.nn.Linear(2, 2)
        self.active, self.number, self.table = {1, 2}, 1.0, list(range(5000))

    def helper(self, x):
        return x

    @property
    def doubled(self):
        return 2.0

    def __call__(self, x):
        match self.point:
            case Point(x=1):
                x = x + 1
        match self.point:
            case Point(2):
                x = x + 1
        if hasattr(self, "empty"):
            x = -x
        try:
            x = x + self.late
        except AttributeError:
            x = x + 1
        x = self.from_base(self.helper(x)) * getattr(self, "scale", 1.0) * self.doubled * self.options.gain
        return self.net(x) * (2 in self.active) * self.number + len(self.table)


LOOKED_FOR = {
    "point.x was 1 and is 2": lambda o: setattr(o.point, "x", 2),
    "point.y was 2 and is 3": lambda o: setattr(o.point, "y", 3),
    "there was no Looking.scale": lambda o: setattr(o, "scale", 3.0),
    "there was no Looking.scale of": lambda o: setattr(Looking, "scale", 3.0),
    "there was no Looking.late": lambda o: setattr(o, "late", 3.0),
    "whether there is a Looking.empty was False and is True": lambda o: setattr(o, "empty", 1),
    "there was no Looking.options.gain": lambda o: setattr(o.options, "gain", 3.0),
    "there was no Looking.helper": lambda o: setattr(o, "helper", lambda x: 0 * x),
    "Looking.helper is another function": lambda o: setattr(Looking, "helper", lambda self, x: 0 * x),
    "Looking.__call__ is another function": lambda o: setattr(Looking, "__call__", lambda self, x: 0 * x),
    "Looking.doubled is another property": lambda o: setattr(Looking, "doubled", property(lambda self: 3.0)),
    "Looking.from_base is another function": lambda o: setattr(Base, "from_base", lambda self, x: 0 * x),
    "there was no Looking.from_base": lambda o: setattr(Looking, "from_base", lambda self, x: 0 * x),
    "there was no Looking.kind": lambda o: setattr(Looking, "kind", 2.0),
    "there was no Looking.net.forward": lambda o: setattr(o.net, "forward", lambda x: 0 * x),
    "there was no hook": lambda o: o.net.register_forward_hook(lambda module, inputs, output: 0 * output),
    "there was no hook of": lambda o: o.net.register_forward_pre_hook(lambda module, inputs: 0 * inputs[0]),
    "there was no hook of a module": lambda o: o.net.register_full_backward_hook(lambda module, given, got: None),
    "what is in Looking.active": lambda o: (o.active.discard(2), o.active.add(3)),
    "Looking.number was 1.0 and is 1": lambda o: setattr(o, "number", 1),
    "Looking.number was 1.0 and is True": lambda o: setattr(o, "number", True),
    "Looking.table[4000] was 4000 and is 1": lambda o: o.table.__setitem__(4000, 1),
}


@pytest.mark.parametrize("message", LOOKED_FOR)
def test_what_is_looked_for_and_what_runs(message):
    kept = {kind: dict(vars(kind)) for kind in (Looking, Base)}
    looking = Looking()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of 5000 elements all are watched
        warnings.filterwarnings("ignore", message="no CUDA graph")
        graph = capture(looking, torch.ones(2))
    looking.unread, looking.point.unread, Looking.unread = 1, 2, 3
    looking.number, looking.active = 0.5 + 0.5, looking.active  # the same number
    assert graph.change() is None
    try:
        LOOKED_FOR[message](looking)
        assert graph.change().startswith(message) or f".{message}" in graph.change()
    finally:
        for kind, members in kept.items():
            for key in vars(kind).keys() - members.keys():
                delattr(kind, key)
            for key, member in members.items():
                if vars(kind)[key] is not member:
                    setattr(kind, key, member)


def _scaled(x, by=1.0, *, more=1.0):
    return x * by * more


CHANGES_OF_A_FUNCTION = {
    "__code__": (lambda x, by=1.0, *, more=1.0: x).__code__,
    "__defaults__": (2.0,),
    "__kwdefaults__": {"more": 2.0},
}


@pytest.mark.parametrize("part", CHANGES_OF_A_FUNCTION)
def test_a_functions_own_parts(part):
    before, graph = getattr(_scaled, part), capture(_scaled, torch.ones(2))
    try:
        setattr(_scaled, part, CHANGES_OF_A_FUNCTION[part])
        assert f"_scaled.{part}" in graph.change()
    finally:
        setattr(_scaled, part, before)


def test_what_a_default_holds():
    held = types.SimpleNamespace(gain=1.0)
    graph = capture(lambda x, settings=held: x * settings.gain, torch.ones(2))
    held.gain = 2.0
    assert graph.change() == "settings.gain was 1.0 and is 2.0"


@pytest.mark.parametrize("layers", [0, 1])
def test_a_layer_that_is_added(layers):
    net = torch.nn.Sequential(*[torch.nn.ReLU() for _ in range(layers)])
    graph = capture(net, torch.ones(2))
    net.append(torch.nn.ReLU())
    assert graph.change() == f"the number of modules in Sequential was {layers} and is {layers + 1}"


def test_a_hook_that_ran_is_watched_and_a_global_one_is_seen():
    net, scales = torch.nn.Linear(2, 2), [2.0]
    handle = net.register_forward_hook(lambda module, inputs, output: output * scales[0])
    graph = capture(net, torch.ones(2))
    scales[0] = 3.0
    assert "scales[0] was 2.0 and is 3.0" in graph.change()
    graph.update(net)
    of_all = torch.nn.modules.module.register_module_forward_hook(lambda module, inputs, output: 0 * output)
    assert graph.change() == "there was no hook of a module and there is one"
    of_all.remove()
    assert graph.change() is None
    handle.remove()
    assert "_forward_hooks" in graph.change()


def test_what_is_another_object_but_the_same():
    held = types.SimpleNamespace(kinds=frozenset({1, 2}), limit=float("nan"), zero=0.0, pair=(1.0, float("nan")))
    graph = capture(lambda x: x * held.limit * held.zero * len(held.kinds) * held.pair[1], torch.ones(2))
    held.kinds, held.limit, held.pair = frozenset([2, 1]), float("nan"), (1.0, float("nan"))
    assert graph.change() is None
    held.zero = -0.0  # 1 / zero is another
    assert graph.change() == "held.zero was 0.0 and is -0.0"


def test_a_variable_that_becomes_an_integer():
    gain = 1.0

    def change():
        nonlocal gain
        gain = 1

    graph = capture(lambda x: x * gain, torch.ones(2, dtype=torch.int64))
    change()
    assert "variable gain of <lambda> was 1.0 and is 1" in graph.change()


@pytest.mark.parametrize("first", [lambda: dict.fromkeys(range(3000)), lambda: [[] for _ in range(12_000)]])
def test_long_containers_leave_room_and_what_is_left_out_is_said(first):
    held = types.SimpleNamespace(table=first(), settings=Settings())
    left_out = r"reads more Python values than are watched: a change of held.table\[\d+\]"
    with pytest.warns(UserWarning, match=left_out) as warned:
        graph = capture(lambda x: x * len(held.table) * held.settings.gain, torch.ones(2))
    assert {warning.filename for warning in warned} == {__file__}
    held.settings.gain = 2.0
    assert "held.settings.gain was 1.0 and is 2.0" in graph.change()


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
    "counts_in_an_array": "the hash of Recurrent.counter's elements",
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


class Items(dict):
    def __getitem__(self, key):
        return types.SimpleNamespace(value=super().__getitem__(key))


class Raising(dict):
    def __getitem__(self, key):
        raise RuntimeError(key)


class Unreadable(list):
    def __len__(self):
        raise RuntimeError


class Inventing:
    def __getattr__(self, name):
        return 5


class Refusing:
    def __getattr__(self, name):
        raise RuntimeError(name)


class Odd:
    """What may not be looked at is held beside what is watched all the same."""

    def __init__(self):
        self.scale, self.parts = 2.0, [Items(a=1), Raising(a=1), Unreadable("a"), Inventing(), Refusing()]
        self.parts.append(weakref.proxy(types.FunctionType(Odd.__call__.__code__, {})))  # of what is gone

    def __call__(self, x):
        return self.scale * self.parts[0]["a"].value * x


class OddCallable(Inventing):
    def __call__(self, x):
        return 2 * x


class RefusingCallable(Refusing):
    __call__ = OddCallable.__call__


def test_objects_that_raise_or_make_things_up_stop_no_capture():
    x, odd = torch.ones(3), Odd()
    graph = capture(odd, x)
    torch.testing.assert_close(graph.replay(x), 2 * x)
    odd.scale = 3.0
    with pytest.raises(GraphError, match=re.escape("Odd.scale was 2.0 and is 3.0")):
        graph.replay(x)
    for kind in (OddCallable, RefusingCallable):
        for run in (capture(kind(), x).replay, auto(kind(), x), GraphPool(kind())):
            torch.testing.assert_close(run(x), 2 * x)


@pytest.mark.parametrize("held", [dict.fromkeys(range(50_000)), [(object(),) for _ in range(50_000)]])
def test_of_many_objects_only_the_first_are_watched(held):
    def fn(x):
        return x + len(held)

    watched = Watched(fn)
    assert len(watched) <= 2 * MOST
    assert watched.change() is None


def test_many_objects_in_tuples_are_not_all_looked_into(monkeypatch):
    looked, held = [], tuple((object(),) for _ in range(50_000))
    held = tuple(held[i : i + 1000] for i in range(0, 50_000, 1000))
    monkeypatch.setattr(Walk, "_tuple", lambda self, *args, look=Walk._tuple: (looked.append(0), look(self, *args)))
    Watched(lambda x: x + len(held))
    assert 1000 < len(looked) < LOOKS


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
    from rlgraph.agents.ppo import PPOConfig
    from rlgraph.agents.ppo_torch import PPO

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
