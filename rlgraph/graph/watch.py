"""What a captured function reads from Python: a graph has it baked in, so a change must not pass in silence."""

import argparse
import collections
import contextlib
import functools
import itertools
import operator
import random
import types
from collections.abc import Callable

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

from rlgraph.graph.host_draws import HostDraws
from rlgraph.graph.user_code import function_of, is_library, is_library_function, reads_of

DEPTH = 16  # attributes of attributes of ...
MOST = 2000  # values watched
LOOKS = 20_000  # objects looked into, most of which need not be watched themselves
SMALL = 4096  # bytes of a numpy array whose elements are watched: 2 µs a look
SIMPLE = (bool, int, float, complex, str, bytes, type(None), range, slice, torch.device, torch.dtype, np.generic)
GONE = (LookupError, AttributeError, ValueError)  # how a container, an object and a variable say it
MODULE_PARTS = ("training", "_parameters", "_buffers", "_modules")


class Watched:
    """What `fn` reaches from Python, as it is when this is made: `change` says what has become of it.

    It looks at the arguments of `functools.partial`, the object of a bound method, closures, defaults, globals that the
    code names, and from there at attributes, lists, tuples and dicts; of `torch.nn.Module` at parameters, buffers,
    submodules and `training`; of optimisers at `param_groups`. An attribute counts if code that has run reads one of
    that name: what is only written there, or only used elsewhere, may change.

    Objects are told apart by identity; numbers, strings and tuples of them by value.

    What it does not do: it does not look into objects of Python, numpy and torch (see `user_code.LIBRARIES`), so
    not at an iterator's place; nor into an object that raises when it is looked at, or a dict or list whose class has a
    `__getitem__` of its own; not at the elements of a numpy array of more than SMALL bytes; not beyond DEPTH, MOST and
    LOOKS; not at keys added to a dict, which may be a cache; not at what only code in other threads reads, such as the
    backward of an autograd.Function on a GPU; and not at a tensor whose memory is exchanged by `tensor.data = ...`, but
    for the first parameter of a module, which tells `module.half()`.

    Args:
        fn: the function.
        device: where it runs; on a GPU tensors on the CPU are watched too, as one number of them is baked in.
        ran: the code that a call of `fn` runs, see `user_code.code_that_runs`; None: all attributes count.
    """

    def __init__(self, fn: Callable, device: torch.device | None = None, ran: set[types.CodeType] | None = None):
        walk = _Walk(fn, device, ran)
        unknown = [code for code in (ran or set()) - walk.methods if reads_of(code).own]
        if unknown:  # they have a `self`, but are the methods of nothing that is reached
            walk = _Walk(fn, device, ran, unknown)
        # Not what else the walk holds: results of the call before would live as long as this.
        self._items, self._item_names = walk.items, walk.item_names
        self._gets, self._get_names = walk.gets, walk.get_names
        self._generators = walk.generators

    def __len__(self):
        return len(self._items) + len(self._gets)

    def change(self) -> str | None:
        """What is no longer as it was, the first of it: "scale of Policy was 1.0 and is 0.5". None: nothing.

        This runs at every replay: about 2 µs for 50 values.
        """
        try:
            for container, key, value in self._items:
                if container[key] is not value:
                    return self._first_change()
            for get, owner, value in self._gets:
                now = get(owner)
                if now is not value and (type(now) is not int or now != value):
                    return self._first_change()
        except GONE:
            return self._first_change()
        return None

    def _first_change(self) -> str | None:
        for entries, names, get in (
            (self._items, self._item_names, operator.getitem),
            (self._gets, self._get_names, lambda get, owner: get(owner)),
        ):
            for i, (first, second, then) in enumerate(entries):
                try:
                    now = get(first, second)
                except GONE:
                    return f"{names[i]} was {_short(then)} and is gone"
                if not _same(then, now):
                    return _in_words(names[i], then, now)
                entries[i] = (first, second, now)  # an equal one: the next look is quick again
        return None

    def forgives(self, call: Callable) -> bool:
        """Whether what has changed are only results: attributes that every call writes before it reads them.

        To find out, `call` runs with something in their place that cannot be used. They are not watched any more.
        """
        changed = [i for i, entry in enumerate(self._items) if _is_replaced(*entry)]
        for i in changed:
            container, key, _ = self._items[i]
            container[key] = _UNUSABLE
        try:
            outputs = tree_leaves(call())
            held = [container[key] for container, key, _ in self._items]
        except Exception:  # among others, one is gone
            return False
        if any(value is _UNUSABLE for value in (*outputs, *held)):
            return False
        for i in reversed(changed):
            del self._items[i], self._item_names[i]
        return self.change() is None

    def host_draws(self) -> HostDraws:
        """The random generators of the host that are reached, as they stand."""
        return HostDraws(self._generators)


@contextlib.contextmanager
def putting_back_python(fn: Callable, device: torch.device, always: bool = False):
    """After an error, or always, the Python values that `fn` reads are what they were, and the host's generators."""
    walk = _Walk(fn, device)
    draws = HostDraws(walk.generators)
    done = False
    try:
        yield draws
        done = not always
    finally:
        if not done:
            walk.put_back()
            draws.put_back()


class _Walk:
    """What is reached from `fn`. Of the code `by_name`, what it reads of `self` counts for objects of any class."""

    def __init__(self, fn, device, ran=None, by_name=()):
        self._on_gpu = device is not None and device.type == "cuda"
        self._ran, self.methods = ran, set()  # code, and what of it belongs to a class that has been met
        self._names = {name for code in ran or () for name in reads_of(code).attributes}
        self._names |= {name for code in by_name for name in reads_of(code).own}
        # Names apart: a look at a tuple of four takes longer.
        self.items, self.item_names = [], []  # (container, key, value): container[key] is value
        self.gets, self.get_names = [], []  # (get, owner, value): get(owner) is value, or the same integer
        self.generators = []
        self._contents = []  # lists, sets, dicts and arrays, with what is in them
        self._puts = []  # (owner, attribute, value): it was that
        if self._on_gpu:
            self.generators.append(("torch's generator on the CPU", torch.default_generator))
        self._seen, self._submodules, self._owns = {}, set(), {}
        self.visit(fn, name_of(fn), 0)

    def put_back(self) -> None:
        """Make everything what it was, so that calls in between leave no trace; not what tensors hold."""
        for container, key, value in self.items:
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
            elif isinstance(container, np.ndarray):
                container[...] = content
            elif len(container) != len(content) or any(map(operator.is_not, container, content)):
                container.clear()  # a deque has no slices
                container.extend(content)

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
            (np.ndarray, self._array),
            (functools.partial, self._partial),
            (types.MethodType, self._method),
            (types.FunctionType, self._function),
            (dict, self._dict),
            ((list, collections.deque), self._list),
            (tuple, self._tuple),
            (set, self._set),
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
        if is_library(fn.__globals__.get("__name__", "")):
            self._wrapped(fn, name, depth)
            return
        if not self._runs(fn):
            return
        reads = reads_of(fn.__code__)
        for variable, cell in zip(fn.__code__.co_freevars, fn.__closure__ or ()):
            if variable in reads.closure and cell != types.CellType():
                self._by_getattr(cell, "cell_contents", f"variable {variable} of {fn.__name__}", depth, variable)
        for default in fn.__defaults__ or ():
            self.visit(default, f"a default of {fn.__name__}", depth)
        self.visit(fn.__kwdefaults__, f"a default of {fn.__name__}", depth)
        self._attributes(fn, fn.__dict__, name, depth)
        self._wrapped(fn, name, depth)
        for variable in sorted(reads.globals & fn.__globals__.keys()):
            value = fn.__globals__[variable]
            if isinstance(value, (type, types.ModuleType)) or is_library_function(value):  # nobody rebinds those
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

    def _by_getattr(self, owner, attribute, name, depth, inner=None):
        """Of what has no `__dict__` that could be written to."""
        value = getattr(owner, attribute)
        self._get(operator.attrgetter(attribute), owner, name)
        self._puts.append((owner, attribute, value))
        self.visit(value, inner or name, depth)

    def _get(self, get, owner, name):
        self.gets.append((get, owner, get(owner)))
        self.get_names.append(name)

    def _tensor(self, tensor, name, depth):
        counted = self._on_gpu and tensor.device.type == "cpu" and not tensor.is_inference()
        if counted:  # one number on the CPU becomes a kernel's argument
            self._get(operator.attrgetter("_version"), tensor, f"the number of writes to {name}, a CPU tensor,")

    def _array(self, array, name, depth):
        if array.nbytes <= SMALL:
            self._get(lambda array: hash(array.tobytes()), array, f"the hash of {name}'s elements")
            if array.flags.writeable:
                self._contents.append((array, array.copy()))

    def _dict(self, content, name, depth):
        self._contents.append((content, dict(content)))
        if type(content).__getitem__ is not dict.__getitem__:  # it may make its items anew each time
            return
        for key in list(itertools.islice(content, MOST)):
            self._item(content, key, f"{name}[{_short(key)}]", depth)

    def _list(self, content, name, depth):
        self._contents.append((content, list(content)))
        self._get(len, content, f"the length of {name}")
        if type(content).__getitem__ not in (list.__getitem__, collections.deque.__getitem__):
            return
        for i in range(min(len(content), MOST)):
            self._item(content, i, f"{name}[{i}]", depth)

    def _tuple(self, content, name, depth):
        for i, value in enumerate(content[:MOST]):
            self.visit(value, f"{name}[{i}]", depth)
        self._class(type(content), name, depth)

    def _set(self, content, name, depth):
        self._contents.append((content, set(content)))
        self._get(len, content, f"the length of {name}")

    def _generator(self, generator, name, depth):
        if not isinstance(generator, torch.Generator) or (self._on_gpu and generator.device.type == "cpu"):
            self.generators.append((name, generator))

    # ---- objects

    def _module(self, module, name, depth):
        parameter = next(module.parameters(), None)
        if id(module) not in self._submodules and type(parameter) is torch.nn.Parameter:
            self._get(torch.Tensor.data_ptr, parameter, f"the address of {name}'s first parameter")
        self._submodules.update(map(id, module.modules()))
        for kind in MODULE_PARTS[1:]:
            content = module.__dict__[kind]
            self._contents.append((content, dict(content)))
            for key in list(content):
                self._item(content, key, f"{name}.{key}", depth)
        if "training" in module.__dict__:  # torch.compile's has that of the module inside
            self._item(module.__dict__, "training", f"{name}.training", depth)
        self._object(module, name, depth)

    def _optimizer(self, optimizer, name, depth):
        self._contents.append((optimizer.state, dict(optimizer.state)))
        for i, group in enumerate(optimizer.param_groups):
            self._contents.append((group, dict(group)))
            for key in [key for key in group if key != "params"]:
                self._item(group, key, f"{name}.param_groups[{i}][{key!r}]", depth)

    def _object(self, value, name, depth):
        plain = isinstance(value, (torch.nn.Module, types.SimpleNamespace, argparse.Namespace))
        if is_library(type(value).__module__) and not plain:
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
            functions = [function_of(member) for base in klass.__mro__ for member in vars(base).values()]
            codes = {fn.__code__ for fn in functions if fn is not None and self._runs(fn)}
            self.methods |= codes
            self._owns[klass] = {name for code in codes for name in reads_of(code).own}
        return self._owns[klass]

    def _runs(self, fn):
        return self._ran is None or fn.__code__ in self._ran

    def _attributes(self, owner, attributes, name, depth):
        if not attributes:
            return
        frozen = getattr(getattr(type(owner), "__dataclass_params__", None), "frozen", False)
        self._contents.append((attributes, dict(attributes)))
        for key in [key for key in attributes if key not in MODULE_PARTS and self._counts(key, type(owner))]:
            if frozen:
                self.visit(attributes[key], f"{name}.{key}", depth)
            else:
                self._item(attributes, key, f"{name}.{key}", depth)

    def _class(self, klass, name, depth, instance=None):
        """What instances find in their class: methods that have run, and values."""
        for base in klass.__mro__:
            if is_library(base.__module__):
                continue
            for key, member in list(vars(base).items()):
                fn = function_of(member)
                if fn is not None:
                    self.visit(fn, f"{name}.{key}", depth)
                elif self._counts(key, klass) and not (key.startswith("__") and key.endswith("__")):
                    self._class_value(base, key, member, f"{name}.{key}", depth, instance)

    def _class_value(self, klass, key, member, name, depth, instance):
        if isinstance(member, types.MemberDescriptorType):  # of __slots__
            if instance is not None and hasattr(instance, key):
                self._by_getattr(instance, key, name, depth)
            return
        attributes = getattr(instance, "__dict__", None)
        if (attributes is not None and key in attributes) or hasattr(type(member), "__get__"):
            return
        self._by_getattr(klass, key, name, depth)
        if attributes is not None:
            self._get(functools.partial(operator.contains, attributes), key, f"whether there is a {name} of its own")

    def _python_module(self, module, name, depth):
        if is_library(module.__name__):
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
