"""rlgraph.graph.walk: what a function reaches, where a change after the capture is noticed, and what is too much."""

import argparse
import functools
import re
import types
import warnings
import weakref
from dataclasses import dataclass

import pytest
import torch

from rlgraph.errors import GraphError
from rlgraph.graph.auto import auto
from rlgraph.graph.capture import capture
from rlgraph.graph.pool import GraphPool
from rlgraph.graph.walk import LOOKS, MOST, Walk
from rlgraph.graph.watch import Watched

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


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


# ---- objects that are odd, and that are many


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
