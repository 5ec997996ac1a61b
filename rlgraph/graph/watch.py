"""What a captured function reads from Python: a graph has it baked in, so a change must not pass in silence."""

import argparse
import collections
import contextlib
import dis
import functools
import inspect
import itertools
import operator
import pickle
import random
import sys
import types
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

DEPTH = 16  # attributes of attributes of ...
MOST = 2000  # values watched
LOOKS = 20_000  # objects looked into, most of which need not be watched themselves
# Whose objects are not looked into, beside Python's own. Of torch's, modules and optimisers are.
LIBRARIES = {"torch", "functorch", "numpy", "triton", "cuda", "jax", "gymnasium", "array_api_compat"}
SIMPLE = (bool, int, float, complex, str, bytes, type(None), range, slice, torch.device, torch.dtype, np.generic)
BASE = torch.nn.Module.__module__
MODULE_PARTS = ("training", "_parameters", "_buffers", "_modules")
BY_NAME = {"getattr", "hasattr", "vars", "attrgetter", "__dict__"}  # attributes may be read by a string's name


class Watched:
    """What `fn` reaches from Python, as it is when this is made: `change` says what has become of it.

    It looks at the arguments of `functools.partial`, the object of a bound method, closures, defaults, globals that the
    code names, and from there at attributes, lists, tuples and dicts; of `torch.nn.Module` at parameters, buffers,
    submodules and `training`; of optimisers at `param_groups`. An attribute counts if code that has run reads one of
    that name: what is only written there, or only used elsewhere, may change.

    Objects are told apart by identity; numbers, strings and tuples of them by value.

    What it does not do: it does not look into objects of Python, numpy and torch (see LIBRARIES), so neither into a
    numpy array's elements nor an iterator's place; nor into an object that raises when it is looked at, or a dict or
    list whose class has a `__getitem__` of its own; not beyond DEPTH, MOST and LOOKS; not at keys added to a dict,
    which may be a cache; not at what only code in other threads reads, such as the backward of an autograd.Function on
    a GPU; and not at a tensor whose memory is exchanged by `tensor.data = ...`, but for the first parameter of a
    module, which tells `module.half()`.

    Args:
        fn: the function.
        device: where it runs; on a GPU tensors on the CPU are watched too, as one number of them is baked in.
        ran: the code that a call of `fn` runs, see `code_that_runs`; None: all attributes count.
    """

    def __init__(self, fn: Callable, device: torch.device | None = None, ran: set[types.CodeType] | None = None):
        walk = _Walk(device, ran)
        walk.visit(fn, name_of(fn), 0)
        unknown = [code for code in (ran or set()) - walk.methods if _reads(code).own]
        if unknown:  # they have a `self`, but are the methods of nothing that is reached
            walk = _Walk(device, ran, unknown)
            walk.visit(fn, name_of(fn), 0)
        self._items, self._item_names = walk.items, walk.item_names
        self._gets, self._get_names = walk.gets, walk.get_names
        self._numbers, self._number_names = walk.numbers, walk.number_names
        self._contents, self._puts = walk.contents, walk.puts
        self._generators = walk.generators

    def __len__(self):
        return len(self._items) + len(self._gets) + len(self._numbers)

    def change(self) -> str | None:
        """What is no longer as it was, the first of it: "scale of Policy was 1.0 and is 0.5". None: nothing."""
        return None if self._identical() else self._first_change()

    def _identical(self) -> bool:
        """This runs at every replay: about 2 µs for 50 values."""
        try:
            for container, key, value in self._items:
                if container[key] is not value:
                    return False
            for get, owner, value in self._gets:
                if get(owner) is not value:
                    return False
            for get, owner, value in self._numbers:
                if get(owner) != value:
                    return False
        except (LookupError, AttributeError, ValueError):  # it is gone
            return False
        return True

    def _first_change(self) -> str | None:
        for entries, names, get in (
            (self._items, self._item_names, operator.getitem),
            (self._gets, self._get_names, lambda get, owner: get(owner)),
            (self._numbers, self._number_names, lambda get, owner: get(owner)),
        ):
            for i, (first, second, then) in enumerate(entries):
                try:
                    now = get(first, second)
                except (LookupError, AttributeError, ValueError):
                    return f"{names[i]} was {_short(then)} and is gone"
                if not _same(then, now):
                    return _in_words(names[i], then, now)
                entries[i] = (first, second, now)  # an equal one: the next look is quick again
        return None

    def forgives(self, call: Callable) -> bool:
        """Whether what has changed are only results: attributes that every call writes before it reads them.

        To find out, `call` runs with something in their place that cannot be used. They are not watched any more.
        """
        changed = [i for i, (container, key, value) in enumerate(self._items) if _is_replaced(container, key, value)]
        for i in changed:
            container, key, _ = self._items[i]
            container[key] = _UNUSABLE
        try:
            outputs = tree_leaves(call())
        except Exception:
            return False
        held = [container[key] for container, key, _ in self._items]
        if any(value is _UNUSABLE for value in (*outputs, *held)):
            return False
        for i in reversed(changed):
            del self._items[i], self._item_names[i]
        return self.change() is None

    def put_back(self) -> None:
        """Make everything what it was, so that calls in between leave no trace; not what tensors hold."""
        for container, key, value in self._items:
            if type(container) is dict and container.get(key, _MISSING) is not value:  # globals, among others
                container[key] = value
        for owner, attribute, value in self._puts:
            if getattr(owner, attribute, _MISSING) is not value:
                setattr(owner, attribute, value)
        for container, content in self._contents:
            if isinstance(container, dict):
                for key in container.keys() - content.keys():
                    del container[key]
                container.update((key, value) for key, value in content.items() if container.get(key) is not value)
            elif isinstance(container, set):
                container &= content
                container |= content
            elif len(container) != len(content) or any(map(operator.is_not, container, content)):
                container.clear()  # a deque has no slices
                container.extend(content)

    def host_draws(self) -> "HostDraws":
        """The random generators of the host that are reached, as they stand."""
        return HostDraws(self._generators)


@contextlib.contextmanager
def code_that_runs():
    """Yields a set, filled with the user's code objects that run in this thread meanwhile, and torch's modules'."""
    found, before = set(), sys.getprofile()
    known = {}  # code by id: to hash code is slow

    def note(frame, event, _):
        if event != "call" or id(frame.f_code) in known:
            return
        known[id(frame.f_code)] = frame.f_code
        module = frame.f_globals.get("__name__")
        if not _is_library(module) or (module.startswith("torch.nn.modules.") and module != BASE):
            found.add(frame.f_code)

    sys.setprofile(note)
    try:
        yield found
    finally:
        sys.setprofile(None)
        if hasattr(before, "enable"):  # cProfile
            before.enable()
        elif before is not None:
            sys.setprofile(before)


class HostDraws:
    """Where the host's random generators stand: Python's and numpy's own, torch's on a CPU, and those given.

    Another thread that draws from the first ones meanwhile cannot be told from the function.
    """

    def __init__(self, generators=()):
        self._sources = [
            ("Python's random", random.getstate, random.setstate),
            ("np.random", functools.partial(np.random.get_state, legacy=False), np.random.set_state),
        ]
        for name, generator in generators:
            self._sources.append((name, *_state_of(generator)))
        self._states = [get() for _, get, _ in self._sources]
        self._known = [_content(state) for state in self._states]

    def drawn_from(self) -> str | None:
        """The first that is not where it was."""
        return next((name for name, _, _ in self._moved()), None)

    def put_back(self) -> None:
        for _, put, state in self._moved():
            put(state)

    def _moved(self):
        for (name, get, put), state, known in zip(self._sources, self._states, self._known):
            if _content(get()) != known:
                yield name, put, state


def _content(state) -> bytes:
    """Equal for equal states. A pickled tensor may hold the address of its memory."""
    return state.numpy().tobytes() if isinstance(state, torch.Tensor) else pickle.dumps(state)


def _state_of(generator):
    if isinstance(generator, random.Random):
        return generator.getstate, generator.setstate
    if isinstance(generator, torch.Generator):
        return generator.get_state, generator.set_state
    bits = generator.bit_generator if isinstance(generator, np.random.Generator) else generator._bit_generator
    return lambda: bits.state, lambda state: setattr(bits, "state", state)


class _Walk:
    """One pass. Of the code `by_name`, what it reads of `self` counts for objects of any class."""

    def __init__(self, device, ran, by_name=()):
        self._on_gpu = device is not None and device.type == "cuda"
        self._ran, self.methods = ran, set()  # code, and what of it belongs to a class that has been met
        self._names = {name for code in ran or () for name in _reads(code).attributes}
        self._names |= {name for code in by_name for name in _reads(code).own}
        self.items, self.item_names = [], []  # container[key] is value
        self.gets, self.get_names = [], []  # get(owner) is value
        self.numbers, self.number_names = [], []  # get(owner) == value
        self.contents = []  # lists, sets and dicts, with what is in them
        self.puts = []  # owner.attribute was value
        self.generators = []
        if self._on_gpu:
            self.generators.append(("torch's generator on the CPU", torch.default_generator))
        self._seen, self._submodules, self._owns = {}, set(), {}

    def visit(self, value, name, depth):
        """Look into a value; at what raises when it is looked at, only as far as that."""
        with contextlib.suppress(Exception):
            self._visit(value, name, depth)

    def _visit(self, value, name, depth):
        if id(value) in self._seen or isinstance(value, SIMPLE):
            return
        if depth > DEPTH or len(self.items) > MOST or len(self._seen) > LOOKS:
            return
        self._seen[id(value)] = value  # kept: an id may be used again
        for kinds, look in (
            (torch.Tensor, self._tensor),
            (functools.partial, self._partial),
            (types.MethodType, self._method),
            (types.FunctionType, self._function),
            (dict, self._dict),
            ((list, collections.deque), self._list),
            (tuple, self._tuple),
            ((set, frozenset), self._set),
            ((random.Random, np.random.Generator, np.random.RandomState, torch.Generator), self._generator),
            (torch.nn.Module, self._module),
            (torch.optim.Optimizer, self._optimizer),
            (type, self._class),
            (types.ModuleType, self._python_module),
        ):
            if isinstance(value, kinds):
                look(value, name, depth + 1)
                return
        self._object(value, name, depth + 1)

    # ---- functions

    def _partial(self, partial, name, depth):
        self.visit(partial.func, name, depth)
        self.visit(partial.args, f"arguments of {name}", depth)
        self.visit(partial.keywords, f"arguments of {name}", depth)

    def _method(self, method, name, depth):
        self.visit(method.__func__, name, depth)
        self.visit(method.__self__, name_of(method.__self__), depth)

    def _function(self, fn, name, depth):
        if _is_library(fn.__globals__.get("__name__", "")):
            self._wrapped(fn, name, depth)
            return
        if not self._runs(fn):
            return
        reads = _reads(fn.__code__)
        for variable, cell in zip(fn.__code__.co_freevars, fn.__closure__ or ()):
            if variable in reads.closure and cell != types.CellType():
                self._get(cell, "cell_contents", f"variable {variable} of {fn.__name__}", depth, variable)
        for default in fn.__defaults__ or ():
            self.visit(default, f"a default of {fn.__name__}", depth)
        self.visit(fn.__kwdefaults__, f"a default of {fn.__name__}", depth)
        self._attributes(fn, fn.__dict__, name, depth)
        self._wrapped(fn, name, depth)
        for variable in sorted(reads.globals & fn.__globals__.keys()):
            value = fn.__globals__[variable]
            if isinstance(value, (type, types.ModuleType)) or _is_library_function(value):  # nobody rebinds those
                self.visit(value, variable, depth)
            else:
                self._item(fn.__globals__, variable, f"global {variable}", depth, variable)

    def _wrapped(self, fn, name, depth):
        """A library's decorator around a function of the user's, like torch.no_grad or torch.compile."""
        inner = getattr(fn, "_torchdynamo_orig_callable", getattr(fn, "__wrapped__", None))
        if inner is not None:
            self.visit(inner, name, depth)

    # ---- values

    def _item(self, container, key, name, depth, inner=None):
        value = container[key]
        self.items.append((container, key, value))
        self.item_names.append(name)
        self.visit(value, inner or name, depth)

    def _get(self, owner, attribute, name, depth, inner=None):
        value = getattr(owner, attribute)
        self.gets.append((operator.attrgetter(attribute), owner, value))
        self.get_names.append(name)
        self.puts.append((owner, attribute, value))
        self.visit(value, inner or name, depth)

    def _number(self, get, owner, name):
        self.numbers.append((get, owner, get(owner)))
        self.number_names.append(name)

    def _tensor(self, tensor, name, depth):
        counted = self._on_gpu and tensor.device.type == "cpu" and not tensor.is_inference()
        if counted:  # one number on the CPU becomes a kernel's argument
            self._number(operator.attrgetter("_version"), tensor, f"the number of writes to {name}, a CPU tensor,")

    def _dict(self, content, name, depth):
        self.contents.append((content, dict(content)))
        if type(content).__getitem__ is not dict.__getitem__:  # it may make its items anew each time
            return
        for key in list(itertools.islice(content, MOST)):
            self._item(content, key, f"{name}[{_short(key)}]", depth)

    def _list(self, content, name, depth):
        self.contents.append((content, list(content)))
        self._number(len, content, f"the length of {name}")
        if type(content).__getitem__ not in (list.__getitem__, collections.deque.__getitem__):
            return
        for i in range(min(len(content), MOST)):
            self._item(content, i, f"{name}[{i}]", depth)

    def _tuple(self, content, name, depth):
        for i, value in enumerate(content[:MOST]):
            self.visit(value, f"{name}[{i}]", depth)
        self._class(type(content), name, depth)

    def _set(self, content, name, depth):
        if isinstance(content, set):
            self.contents.append((content, set(content)))
        self._number(len, content, f"the length of {name}")

    def _generator(self, generator, name, depth):
        if not isinstance(generator, torch.Generator) or (self._on_gpu and generator.device.type == "cpu"):
            self.generators.append((name, generator))

    # ---- objects

    def _module(self, module, name, depth):
        parameter = next(module.parameters(), None)
        if id(module) not in self._submodules and type(parameter) is torch.nn.Parameter:
            self._number(torch.Tensor.data_ptr, parameter, f"the address of {name}'s first parameter")
        self._submodules.update(map(id, module.modules()))
        for kind in MODULE_PARTS[1:]:
            content = module.__dict__[kind]
            self.contents.append((content, dict(content)))
            for key in list(content):
                self._item(content, key, f"{name}.{key}", depth)
        if "training" in module.__dict__:  # torch.compile's has that of the module inside
            self._item(module.__dict__, "training", f"{name}.training", depth)
        self._object(module, name, depth)

    def _optimizer(self, optimizer, name, depth):
        self.contents.append((optimizer.state, dict(optimizer.state)))
        for i, group in enumerate(optimizer.param_groups):
            self.contents.append((group, dict(group)))
            for key in [key for key in group if key != "params"]:
                self._item(group, key, f"{name}.param_groups[{i}][{key!r}]", depth)

    def _object(self, value, name, depth):
        plain = isinstance(value, (torch.nn.Module, types.SimpleNamespace, argparse.Namespace))
        if _is_library(type(value).__module__) and not plain:
            self._wrapped(value, name, depth)
            return
        attributes = getattr(value, "__dict__", None)
        if attributes is not None:
            self._attributes(value, attributes, name, depth)
        self._class(type(value), name, depth, value)

    def _counts(self, key, klass):
        """Whether code that has run reads an attribute of that name, in an object of that class."""
        return self._ran is None or key in self._names or key in self._own(klass)

    def _own(self, klass):
        """What the methods of a class that have run read of `self`."""
        if klass not in self._owns:
            functions = [_function_of(member) for base in klass.__mro__ for member in vars(base).values()]
            codes = {fn.__code__ for fn in functions if fn is not None and self._runs(fn)}
            self.methods |= codes
            self._owns[klass] = {name for code in codes for name in _reads(code).own}
        return self._owns[klass]

    def _runs(self, fn):
        return self._ran is None or fn.__code__ in self._ran

    def _attributes(self, owner, attributes, name, depth):
        if not attributes:
            return
        frozen = getattr(getattr(type(owner), "__dataclass_params__", None), "frozen", False)
        self.contents.append((attributes, dict(attributes)))
        for key in [key for key in attributes if key not in MODULE_PARTS and self._counts(key, type(owner))]:
            if frozen:
                self.visit(attributes[key], f"{name}.{key}", depth)
            else:
                self._item(attributes, key, f"{name}.{key}", depth)

    def _class(self, klass, name, depth, instance=None):
        """What instances find in their class: methods that have run, and values."""
        for base in klass.__mro__:
            if _is_library(base.__module__):
                continue
            for key, member in list(vars(base).items()):
                fn = _function_of(member)
                if fn is not None:
                    self.visit(fn, f"{name}.{key}", depth)
                elif self._counts(key, klass) and not (key.startswith("__") and key.endswith("__")):
                    self._class_value(base, key, member, f"{name}.{key}", depth, instance)

    def _class_value(self, klass, key, member, name, depth, instance):
        if isinstance(member, types.MemberDescriptorType):  # of __slots__
            if instance is not None and hasattr(instance, key):
                self._get(instance, key, name, depth)
            return
        attributes = getattr(instance, "__dict__", None)
        if (attributes is not None and key in attributes) or hasattr(type(member), "__get__"):
            return
        self._item(vars(klass), key, name, depth)
        self.puts.append((klass, key, member))
        if attributes is not None:
            self._number(functools.partial(operator.contains, attributes), key, f"whether there is a {name} of its own")

    def _python_module(self, module, name, depth):
        if _is_library(module.__name__):
            return
        for key, value in list(vars(module).items()):
            if self._ran is None or key not in self._names or key.startswith("__"):
                continue
            if isinstance(value, (type, types.ModuleType)):
                self.visit(value, key, depth)
            else:
                self._item(vars(module), key, f"{name}.{key}", depth)


class _Unusable:
    """What neither numbers, tensors nor conditions can be made of."""

    def __bool__(self):
        raise TypeError("this value is from an earlier call")

    __eq__ = __bool__
    __hash__ = None


_MISSING, _UNUSABLE = object(), _Unusable()


def name_of(value) -> str:
    if isinstance(value, functools.partial):
        return name_of(value.func)
    name = None
    with contextlib.suppress(Exception):  # of a __getattr__, which may also make one up
        name = value.__name__
    return name if isinstance(name, str) else type(value).__name__


def _function_of(member) -> types.FunctionType | None:
    """The function that a class's member runs, without the decorators around it; None: it is a value."""
    if isinstance(member, (staticmethod, classmethod)):
        member = member.__func__
    if isinstance(member, property):
        member = member.fget
    if isinstance(member, functools.cached_property):
        member = member.func
    if isinstance(member, (types.FunctionType, functools._lru_cache_wrapper)):
        member = inspect.unwrap(member)
    return member if isinstance(member, types.FunctionType) else None


def _is_library_function(value) -> bool:
    if isinstance(value, types.FunctionType):
        return _is_library(value.__globals__.get("__name__")) and not hasattr(value, "__wrapped__")
    return isinstance(value, types.BuiltinFunctionType)


def _is_library(module: str | None) -> bool:
    """Whether a module's objects are not the user's. Of rlgraph, that is what handles graphs."""
    root = (module or "").split(".")[0]
    return root in sys.stdlib_module_names or root in LIBRARIES or (module or "").startswith("rlgraph.graph.")


class _Reads(NamedTuple):
    """Names that code reads, with the functions inside it; not those that it only writes."""

    own: frozenset[str]  # attributes of `self`
    attributes: frozenset[str]  # of anything else
    globals: frozenset[str]
    closure: frozenset[str]


@functools.lru_cache(maxsize=4096)
def _reads(code: types.CodeType) -> _Reads:
    own, attributes, variables, closure = set(), set(), set(), set()
    before = None
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR"):
            loaded = before.argval if isinstance(before.argval, tuple) else (before.argval,)  # by one instruction
            of_self = before.opname.startswith("LOAD_FAST") and loaded[-1] == "self"
            (own if of_self else attributes).add(instruction.argval)
        elif instruction.opname.startswith(("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")):
            variables.add(instruction.argval)
        elif instruction.opname.startswith(("LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF")):
            closure.add(instruction.argval)
        before = instruction
    if BY_NAME & (own | attributes | variables):
        attributes |= {const for const in code.co_consts if isinstance(const, str) and const.isidentifier()}
    for inner in (_reads(const) for const in code.co_consts if isinstance(const, types.CodeType)):
        attributes |= inner.attributes | inner.own
        variables |= inner.globals
        closure |= inner.closure
    return _Reads(*map(frozenset, (own, attributes, variables, closure)))


def _is_replaced(container, key, value) -> bool:
    return type(container) is dict and not _same(value, container.get(key, _MISSING))


def _same(then, now) -> bool:
    if then is now:
        return True
    if type(then) is not type(now):
        return False
    if isinstance(then, SIMPLE):
        return bool(then == now)
    if isinstance(then, tuple):
        return len(then) == len(now) and all(map(_same, then, now))
    return isinstance(then, types.MethodType) and then == now


def _in_words(name, then, now) -> str:
    if isinstance(then, SIMPLE) or isinstance(now, SIMPLE) or type(then) is not type(now):
        return f"{name} was {_short(then)} and is {_short(now)}"
    kind = "tensor" if isinstance(now, torch.Tensor) else type(now).__name__
    return f"{name} is another {kind} than it was"


def _short(value) -> str:
    if isinstance(value, torch.Tensor):
        return "a tensor"
    text = repr(value) if isinstance(value, (*SIMPLE, tuple)) else f"a {type(value).__name__}"
    return text if len(text) <= 40 else text[:37] + "..."
