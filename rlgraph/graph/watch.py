"""What a captured function reads from Python: a graph has it baked in, so a change must not pass in silence.

The rule, whole:

1. Watched is what the function's code names: its closure, globals, defaults, the arguments of a `functools.partial`,
   the object that it is bound to, and the attributes of objects found there; a module counts with its submodules,
   parameters, buffers and `training`, an optimiser with its groups, a list, tuple or dict with its first 64 items.
2. Functions and methods found there (`__call__` and `forward` unnamed) belong to that code; what belongs to Python
   or to LIBRARIES, such as torch, is not looked into, except torch's modules and optimisers.
3. Numbers, strings and the like are compared by type and value, everything else by identity.

What that does not see, such as items of an array or a file, `Graph.verify` finds: it compares a replay with a call.
"""

import functools
import operator
import sys
import types
from collections.abc import Callable

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

from rlgraph.graph.words import name_of, warn

LIBRARIES = {"torch", "functorch", "numpy", "triton", "cuda", "jax", "gymnasium", "array_api_compat"}
LIBRARIES |= {"warp", "mujoco", "mujoco_warp"}
SIMPLE = (bool, int, float, complex, str, bytes, type(None), range, slice, torch.device, torch.dtype, np.generic)
ITEMS = 64  # of a list, tuple or dict
MOST = 2000  # values
MISSING, WRITES = object(), torch.Tensor._version.__get__


class Watch:
    """What `fn` reads by the rule above, as it stands when this is made.

    On a GPU as `device` writes to tensors on the CPU count, too: their numbers are baked in.
    """

    def __init__(self, fn: Callable, device: torch.device | None = None):
        self._on_gpu = device is not None and device.type == "cuda"
        self._names, known = {"__call__", "forward"}, 0
        while known < len(self._names):  # each walk may find code that names more
            known, self._seen, self._entries, self._full = len(self._names), {}, [], None
            self._visit(fn, name_of(fn))
        del self._seen  # results of a call would live as long as this
        if self._full is not None:
            warn(f"{name_of(fn)} reads more than {MOST} Python values: a change of {self._full} will not be noticed")

    def change(self) -> str | None:
        """The first change in words, "Policy.scale was 1.0 and is 0.5"; None: there is none. About 0.06 µs a value."""
        try:
            for get, owner, key, then, _ in self._entries:
                now = get(owner, key)
                if now is not then and (type(now) is not int or type(then) is not int or now != then):
                    return self._first_change()
        except Exception:  # it is gone, and each kind of object says that in its own way
            return self._first_change()
        return None

    def _first_change(self) -> str | None:
        return next((words for _, words in self._changes()), None)

    def rebound(self, call: Callable) -> str | None:
        """What every call changes, and reads before it writes it, in words.

        What a call only keeps in an attribute is no such thing, and is not watched any more. To tell them apart,
        `call` runs with something unusable in the place of all that has changed.
        """
        changes = dict(self._changes())
        changed = [self._entries[i] for i in changes]
        replaced = [entry for entry in changed if entry[0] is operator.getitem and isinstance(entry[1], dict)]
        for _, owner, key, *_ in replaced:
            owner[key] = UNUSABLE
        try:
            held = [*(tree_leaves(call()) if changes else ()), *map(_now, self._entries)]
        except Exception:  # whatever it raises where it needs the value
            held = [UNUSABLE]
        if len(replaced) < len(changed) or any(each is UNUSABLE for each in held):
            self.put_back()
            return next(iter(changes.values()))
        self._entries = [entry for i, entry in enumerate(self._entries) if i not in changes]
        return None

    def put_back(self) -> None:
        """Make every watched value what it was."""
        for entry in self._entries:
            get, owner, key, then, _ = entry
            if owner is len:
                del key[then:]
            elif isinstance(owner, list) and key >= len(owner):
                owner.append(then)
            elif get is not operator.call and _now(entry) is not then:
                (setattr if get is getattr else operator.setitem)(owner, key, then)

    def _changes(self):
        """Index and words of each."""
        for i, entry in enumerate(self._entries):
            get, owner, key, then, name = entry
            now = _now(entry)
            if _same(then, now):
                self._entries[i] = (get, owner, key, now, name)  # an equal one: the next look is quick again
            elif now is MISSING:
                yield i, f"{name} was {_short(then)} and is gone"
            elif isinstance(then, SIMPLE) or isinstance(now, SIMPLE) or type(then) is not type(now):
                yield i, f"{name} was {_short(then)} and is {_short(now)}"
            else:
                kind = "tensor" if isinstance(now, torch.Tensor) else type(now).__name__
                yield i, f"{name} is another {kind} than it was"

    def _item(self, get, owner, key, name):
        entry = (get, owner, key, None, name)
        if len(self._entries) >= MOST:
            self._full = self._full or name
        elif (value := _now(entry)) is not MISSING:
            self._entries.append((get, owner, key, value, name))
            self._visit(value, name)

    def _visit(self, value, name):
        if isinstance(value, SIMPLE) or id(value) in self._seen:
            return
        self._seen[id(value)] = value  # kept: an id may be used again
        if isinstance(value, torch.Tensor):
            if self._on_gpu and value.device.type == "cpu" and not value.is_inference():
                self._item(operator.call, WRITES, value, f"the number of writes to {name}, a CPU tensor,")
        elif isinstance(value, functools.partial):
            for part in (value.func, *value.args, *value.keywords.values()):
                self._visit(part, name_of(part))
        elif isinstance(value, types.MethodType):
            self._visit(value.__self__, name_of(value.__self__))
            self._visit(value.__func__, name)
        elif type(value) in (list, tuple, dict):
            self._content(value, name)
        elif isinstance(value, torch.optim.Optimizer):
            for key in ("state", "param_groups"):  # load_state_dict exchanges both
                self._item(operator.getitem, vars(value), key, f"{name}.{key}")
            for i, group in enumerate(value.param_groups):
                self._content(group, f"{name}.param_groups[{i}]")
        else:
            self._object(value, name)

    def _content(self, value, name):
        if isinstance(value, list) and len(value) <= ITEMS:
            self._item(operator.call, len, value, f"the length of {name}")
        for key in list(value if isinstance(value, dict) else range(len(value)))[:ITEMS]:
            self._item(operator.getitem, value, key, f"{name}[{key!r}]")

    def _object(self, value, name):
        own = getattr(value, "__dict__", {}) if not isinstance(value, type) else {}
        if isinstance(value, types.FunctionType | functools._lru_cache_wrapper):
            self._visit(own.get("__wrapped__"), name)
            if isinstance(value, types.FunctionType) and not _is_library(value.__globals__.get("__name__")):
                self._function(value)
            return
        kind = value if isinstance(value, type) else type(value)
        of_torch = isinstance(value, torch.nn.Module) and _is_library(kind.__module__)
        if isinstance(value, types.ModuleType):
            if _is_library(value.__name__):
                return
        elif _is_library(kind.__module__) and not of_torch and kind is not types.SimpleNamespace:
            return
        if isinstance(value, torch.nn.Module):
            self._module(own, name)
        for key in list(own):
            plain = of_torch and not key.startswith("_") and isinstance(own[key], (*SIMPLE, tuple))
            if plain or (key in self._names and not key.startswith("__")):
                self._item(operator.getitem, own, key, f"{name}.{key}")
        self._class(value, kind, own, name)

    def _module(self, own, name):
        self._item(operator.getitem, own, "training", f"{name}.training")
        for part in ("_parameters", "_buffers", "_modules"):
            for key in list(own.get(part, ())):
                self._item(operator.getitem, own[part], key, f"{name}.{key}")
        if (first := next(iter(own.get("_parameters", {}).values()), None)) is not None:
            self._item(
                operator.call, torch.Tensor.data_ptr, first, f"the address of {name}'s first parameter"
            )  # module.half()

    def _class(self, value, kind, own, name):
        """The methods of an object's class, and the values that the object finds there."""
        members = [(key, member) for base in kind.__mro__ for key, member in vars(base).items() if key in self._names]
        for key, member in [] if _is_library(kind.__module__) else members:
            run = next((getattr(member, of) for of in ("__func__", "fget", "func") if hasattr(member, of)), member)
            is_value = isinstance(member, types.MemberDescriptorType) or not hasattr(type(member), "__get__")
            if isinstance(run, types.FunctionType | functools._lru_cache_wrapper):
                self._visit(run, f"{name}.{key}")
            elif is_value and key not in own and not key.startswith("__"):
                self._item(getattr, value, key, f"{name}.{key}")

    def _function(self, fn):
        names = _names_of(fn.__code__)
        self._names |= names
        for variable, cell in zip(fn.__code__.co_freevars, fn.__closure__ or ()):
            self._item(getattr, cell, "cell_contents", variable)
        for name in sorted(names & fn.__globals__.keys()):
            is_value = isinstance(fn.__globals__[name], SIMPLE)
            self._item(operator.getitem, fn.__globals__, name, f"global {name}" if is_value else name)
        for part in ("__defaults__", "__kwdefaults__"):
            self._item(getattr, fn, part, f"{fn.__name__}.{part}")


class _Unusable:
    """What neither numbers, tensors nor conditions can be made of."""

    def __bool__(self):
        raise TypeError("this value is from an earlier call")

    __eq__ = __bool__
    __hash__ = None


UNUSABLE = _Unusable()


def _is_library(module: str | None) -> bool:
    """Whether a module's objects are not the user's. Of rlgraph, that is what handles graphs."""
    root = (module or "").split(".")[0]
    return root in sys.stdlib_module_names or root in LIBRARIES or (module or "").startswith("rlgraph.graph.")


def _names_of(code) -> set[str]:
    inner = (_names_of(const) for const in code.co_consts if isinstance(const, types.CodeType))
    return set(code.co_names).union(*inner)


def _now(entry):
    get, owner, key, *_ = entry
    try:
        return get(owner, key)
    except Exception:  # a user's object may raise anything
        return MISSING


def _same(then, now) -> bool:
    if then is now:
        return True
    if type(then) is not type(now):
        return False
    if isinstance(then, (float, complex, np.inexact)):
        return repr(then) == repr(now)  # a NaN is the same, and another sign of a zero is not
    if isinstance(then, tuple):
        return len(then) == len(now) and all(map(_same, then, now))
    return isinstance(then, SIMPLE) and bool(then == now)


def _short(value) -> str:
    text = repr(value) if isinstance(value, (*SIMPLE, tuple)) else f"a {type(value).__name__}"
    return text if len(text) <= 40 else text[:37] + "..."
