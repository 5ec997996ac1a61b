"""What a function reaches from Python: the walk through it, and through the objects that it reads."""

import argparse
import collections
import contextlib
import functools
import itertools
import operator
import random
import types

import numpy as np
import torch

from rlgraph.graph.user_code import function_of, is_library, is_library_function, reads_of

DEPTH = 16  # attributes of attributes of ...
MOST = 2000  # values watched
LOOKS = 20_000  # objects looked into, most of which need not be watched themselves
FEW = 8  # elements of a list that are looked at one by one, which takes less for so few
LONG = 64  # items of a dict or list, beyond which they are looked into after everything else
LONGEST = 10_000  # elements of a list or set that are watched: 25 ns each
SMALL = 4096  # bytes of a numpy array whose elements are watched: 2 µs a look
SIMPLE = (bool, int, float, complex, str, bytes, type(None), range, slice, torch.device, torch.dtype, np.generic)
NOT_LOOKED_INTO = (torch.Tensor, type, types.ModuleType, types.BuiltinFunctionType)
MODULE_PARTS = ("training", "_parameters", "_buffers", "_modules")
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
MISSING = object()


class Walk:
    """What is reached from `fn`. Of the code `by_name`, what it reads of `self` counts for objects of any class.

    What may be long comes last, so that what is read by its name is not left out for it.
    """

    def __init__(self, fn, device, ran=None, by_name=()):
        self._on_gpu = device is not None and device.type == "cuda"
        self._ran, self.methods = ran, set()  # code, and what of it belongs to a class that has been met
        self._names = {name for code in ran or () for name in reads_of(code).attributes}
        self._names |= {name for code in by_name for name in reads_of(code).own}
        self._perhaps = {name for code in ran or () for name in reads_of(code).perhaps}
        # Names apart: a look at a tuple of four takes longer.
        self.items, self.item_names = [], []  # (container, key, value): container[key] is value
        self.gets, self.get_names = [], []  # (get, owner, value): get(owner) is value, or the same integer
        self.lacking, self.lacked, self.lack_names = [], [], []  # dicts, and a key that each does not have
        self.hooks = []  # dicts of modules' hooks that are empty
        self.generators = []
        self._contents = []  # lists, sets, dicts and arrays, with what is in them
        self._puts = []  # (owner, attribute, value): it was that
        if self._on_gpu:
            self.generators.append(("torch's generator on the CPU", torch.default_generator))
        self._seen, self._submodules, self._owns = {}, set(), {}
        self._members, self._noted = {}, set()  # classes' dicts; (id of a class or dict, key) that need not come twice
        self._elements_left, self._left_out, self._later = LONGEST, [], collections.deque()
        self.visit(fn, name_of(fn), 0)
        while self._later:
            look, *args = self._later.popleft()
            with contextlib.suppress(Exception):
                look(*args)

    def left_out(self) -> str | None:
        """The first thing that is not watched as there are too many."""
        return next((name for value, name in self._left_out if id(value) not in self._seen), None)

    def put_back(self) -> None:
        """Make everything what it was, so that calls in between leave no trace; not what tensors hold."""
        for container, key, value in self.items:
            if type(container) is dict and container.get(key, MISSING) is not value:  # globals, among others
                container[key] = value
        for owner, attribute, value in self._puts:
            if getattr(owner, attribute, MISSING) is not value:
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
            if not isinstance(value, NOT_LOOKED_INTO) and len(self._left_out) < MOST:
                self._left_out.append((value, name))
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
        for i, value in enumerate(partial.args):
            self.visit(value, f"argument {i} of {name}", depth)
        for key in partial.keywords:
            self._item(partial.keywords, key, f"argument {key} of {name}", depth, key)

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
        arguments = fn.__code__.co_varnames[: fn.__code__.co_argcount]
        for argument, default in zip(reversed(arguments), reversed(fn.__defaults__ or ())):
            self.visit(default, argument, depth)
        for argument in fn.__kwdefaults__ or ():
            self._item(fn.__kwdefaults__, argument, f"default {argument} of {fn.__name__}", depth, argument)
        for part in ("__code__", "__defaults__", "__kwdefaults__"):
            if getattr(fn, part):  # without defaults each call gives all arguments
                self._get(operator.attrgetter(part), fn, f"{name}.{part}")
        self._attributes(fn, fn.__dict__, name, depth)
        self._absent(fn.__dict__, (), name)
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

    def _lacks(self, container, key, name):
        if key not in container and self._is_new(container, key):
            self.lacking.append(container)
            self.lacked.append(key)
            self.lack_names.append(name)

    def _is_new(self, owner, key) -> bool:
        new = (id(owner), key) not in self._noted
        self._noted.add((id(owner), key))
        return new

    def _tensor(self, tensor, name, depth):
        counted = self._on_gpu and tensor.device.type == "cpu" and not tensor.is_inference()
        if counted:  # one number on the CPU becomes a kernel's argument
            self._get(operator.attrgetter("_version"), tensor, f"the number of writes to {name}, a CPU tensor,")

    def _array(self, array, name, depth):
        if array.nbytes <= SMALL:
            then = array.copy()
            self.gets.append((functools.partial(_if_other_elements, then, then.tobytes()), array, then))
            self.get_names.append(f"what is in {name}")
            if array.flags.writeable:
                self._contents.append((array, then))

    def _dict(self, content, name, depth):
        self._contents.append((content, dict(content)))
        if type(content).__getitem__ is not dict.__getitem__:  # it may make its items anew each time
            return
        if len(content) > LONG:
            self._later.append((self._dict_items, content, name, depth))
        else:
            self._dict_items(content, name, depth)

    def _dict_items(self, content, name, depth):
        for key in list(content):
            if len(self.items) > MOST:
                self._left_out.append((object(), f"{name}[{short(key)}]"))
                return
            self._item(content, key, f"{name}[{short(key)}]", depth)

    def _list(self, content, name, depth):
        self._contents.append((content, list(content)))
        self._get(len, content, f"the length of {name}")
        if type(content).__getitem__ not in (list.__getitem__, collections.deque.__getitem__):
            return
        if len(content) <= FEW:
            for i in range(len(content)):
                self._item(content, i, f"{name}[{i}]", depth)
            return
        self._elements(content, name)
        self._soon_or_later(content, name, depth)

    def _elements(self, content, name):
        """All elements by one look. There may be more of them at the end."""
        then = tuple(itertools.islice(content, self._elements_left))
        if len(then) < len(content):
            self._left_out.append((object(), f"{name}[{len(then)}]"))
        self._elements_left -= len(then)
        if then:
            self.gets.append((functools.partial(_if_others, then), content, then))
            self.get_names.append(name)

    def _soon_or_later(self, content, name, depth):
        if len(content) > LONG:
            self._later.append((self._visit_each, content, name, depth))
        else:
            self._visit_each(content, name, depth)

    def _visit_each(self, content, name, depth):
        for i, value in enumerate(list(content)):
            self.visit(value, f"{name}[{i}]", depth)

    def _tuple(self, content, name, depth):
        self._soon_or_later(content, name, depth)
        self._class(type(content), name, depth)

    def _set(self, content, name, depth):
        if isinstance(content, set):
            self._contents.append((content, set(content)))
            self._get(len, content, f"the length of {name}")
            if len(content) <= self._elements_left:
                self._elements_left -= len(content)
                then = frozenset(content)
                self.gets.append((functools.partial(_if_another_set, then), content, then))
                self.get_names.append(f"what is in {name}")
            else:
                self._left_out.append((object(), f"an element of {name}"))
        self._later.append((self._visit_each, content, name, depth))

    def _generator(self, generator, name, depth):
        if not isinstance(generator, torch.Generator) or (self._on_gpu and generator.device.type == "cpu"):
            self.generators.append((name, generator))

    # ---- objects

    def _module(self, module, name, depth):
        parameter = next(module.parameters(), None)
        if id(module) not in self._submodules and type(parameter) is torch.nn.Parameter:
            self._get(torch.Tensor.data_ptr, parameter, f"the address of {name}'s first parameter")
        self._submodules.update(map(id, module.modules()))
        if "training" in module.__dict__:  # torch.compile's has that of the module inside
            self._item(module.__dict__, "training", f"{name}.training", depth)
        self._object(module, name, depth)
        self._hooks(module, name, depth)
        for kind in MODULE_PARTS[1:]:
            content = module.__dict__[kind]
            self._contents.append((content, dict(content)))
            for key in list(content):
                self._item(content, key, f"{name}.{key}", depth)
        if module._modules or isinstance(module, (torch.nn.Sequential, torch.nn.ModuleList, torch.nn.ModuleDict)):
            self._get(len, module._modules, f"the number of modules in {name}")

    def _hooks(self, module, name, depth):
        """What `module(...)` runs beside: torch reads `forward` and hooks by their names. Of a module that has run."""
        own, forward = module.__dict__, function_of(getattr(type(module), "forward", None))
        if "forward" in own:
            self._item(own, "forward", f"{name}.forward", depth)
        elif forward is not None and self._runs(forward):
            self._lacks(own, "forward", f"{name}.forward")
        else:
            return
        for kind in HOOKS:
            self._hook_dict(own.get(kind), f"{name}.{kind}", depth)
            of_all = getattr(torch.nn.modules.module, f"_global{kind}", None)
            if self._is_new(of_all, kind):
                self._hook_dict(of_all, f"torch's _global{kind}", depth)

    def _hook_dict(self, content, name, depth):
        if content:
            self._get(len, content, f"the length of {name}")
            self.visit(content, name, depth)
        elif content is not None:
            self.hooks.append(content)

    def _optimizer(self, optimizer, name, depth):
        state = optimizer.state
        self._contents.append((state, dict(state)))
        self._seen[id(state)] = state  # it is no dict to be looked into
        for key in ("param_groups", "state"):
            self._item(vars(optimizer), key, f"{name}.{key}", depth)
        self._later.append((self._optimizer_state, state, f"{name}.state"))
        self._object(optimizer, name, depth)

    def _optimizer_state(self, state, name):
        """Tensors by identity alone, as steps write them. To look one up by its parameter would take long."""
        self._elements(state.values(), name)  # those of more parameters may come
        for i, kept in enumerate(state.values()):
            if len(self.items) > MOST:
                self._left_out.append((object(), f"{name}[{i}]"))
                return
            self._contents.append((kept, dict(kept)))
            for key, value in kept.items():
                self.items.append((kept, key, value))
                self.item_names.append(f"{name}[{i}][{key!r}]")

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
        if self._ran is None or key in self._names or key in self._own(klass):
            return True
        return "__match_args__" in self._names and key in getattr(klass, "__match_args__", ())

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
        own = getattr(instance, "__dict__", None)
        before = [] if own is None else [own]  # where a name is looked for first
        for base in klass.__mro__:
            if is_library(base.__module__):
                continue
            members = self._members.setdefault(base, vars(base))
            for key, member in list(members.items()):
                fn = function_of(member)
                if fn is not None:
                    self.visit(fn, f"{name}.{key}", depth)
                    if self._ran is not None and self._runs(fn):
                        self._member(klass, members, key, f"{name}.{key}", before)
                elif self._counts(key, klass) and not _is_special(key):
                    self._class_value(base, key, member, f"{name}.{key}", depth, instance, before)
            before.append(members)
        self._absent(own, klass.__mro__, name)

    def _member(self, klass, members, key, name, before):
        """A method that has run, and that was found by its name: not, as `capture(net.step)`, given."""
        member = members[key]
        of_torch = key == "forward" and issubclass(klass, torch.nn.Module)
        if not (of_torch or _is_special(key) or self._counts(key, klass)):
            return
        kept_in_the_object = isinstance(member, functools.cached_property)
        of_the_class = _is_special(key) or hasattr(type(member), "__set__")
        for place in before:
            if type(place) is types.MappingProxyType or not (of_the_class or kept_in_the_object):
                self._lacks(place, key, name)
        if self._is_new(members, key):
            self.items.append((members, key, member))
            self.item_names.append(name)

    def _class_value(self, klass, key, member, name, depth, instance, before):
        if isinstance(member, types.MemberDescriptorType):  # of __slots__
            if instance is not None and hasattr(instance, key):
                self._by_getattr(instance, key, name, depth)
            elif instance is not None:
                self._get(lambda owner: hasattr(owner, key), instance, f"whether there is a {name}")
            return
        if key in getattr(instance, "__dict__", ()) or hasattr(type(member), "__get__"):
            return
        for place in before:
            self._lacks(place, key, name)
        if self._is_new(klass, key):
            self._by_getattr(klass, key, name, depth)

    def _absent(self, own, classes, name):
        """Names that code has looked for in vain: in an object's own, `own`, and in its classes."""
        members = {base: self._members.setdefault(base, vars(base)) for base in classes}
        asked = [function_of(found["__getattr__"]) for found in members.values() if "__getattr__" in found]
        names = self._perhaps
        if self._ran is not None and any(fn is not None and self._runs(fn) for fn in asked):  # for what is not there
            names = self._names | self._own(classes[0])
        places = [] if own is None else [own, *(own[kind] for kind in MODULE_PARTS[1:] if kind in own)]
        of_the_user = [found for base, found in members.items() if not is_library(base.__module__)]
        for key in sorted(names):
            if not any(key in place for place in (*places, *members.values())):
                for place in (*places, *of_the_user):
                    self._lacks(place, key, f"{name}.{key}")

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


def name_of(value) -> str:
    if isinstance(value, functools.partial):
        return name_of(value.func)
    name = None
    with contextlib.suppress(Exception):  # of a __getattr__, which may also make one up
        name = value.__name__
    return name if isinstance(name, str) else type(value).__name__


def short(value) -> str:
    if isinstance(value, torch.Tensor):
        return "a tensor"
    text = repr(value) if isinstance(value, (*SIMPLE, tuple)) else f"a {type(value).__name__}"
    return text if len(text) <= 40 else text[:37] + "..."


def _is_special(key) -> bool:
    return key.startswith("__") and key.endswith("__")


def _if_others(then, content) -> tuple:
    """`then` itself, if these are the first elements of `content`; else those that are."""
    if len(content) >= len(then) and all(map(operator.is_, then, content)):
        return then
    return tuple(itertools.islice(content, len(then)))


def _if_other_elements(then, elements, array) -> np.ndarray:
    return then if array.tobytes() == elements else array.copy()


def _if_another_set(then, content) -> frozenset:
    return then if content == then else frozenset(content)
