"""What a captured function reads from Python: a graph has it baked in, so a change must not pass in silence."""

import contextlib
import operator
import types
from collections.abc import Callable

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

from rlgraph.graph.host_draws import HostDraws
from rlgraph.graph.user_code import reads_of, warn
from rlgraph.graph.walk import MISSING, SIMPLE, Walk, name_of, short

GONE = (LookupError, AttributeError, ValueError)  # how a container, an object and a variable say it


class Watched:
    """What `fn` reaches from Python, as it is when this is made: `change` says what has become of it.

    It looks at the arguments of `functools.partial`, the object of a bound method, closures, defaults, globals that the
    code names, and from there at attributes, lists, tuples and dicts; of `torch.nn.Module` at parameters, buffers,
    submodules, `training` and hooks; of optimisers at `param_groups` and `state`. An attribute counts if code that has
    run reads one of that name: what is only written there, or only used elsewhere, may change.

    Objects are told apart by identity; numbers, strings and tuples of them by type and value. What code looks for in
    vain, by `getattr` with a default, `hasattr`, `AttributeError` or a class in a `match`, may not come to be there;
    nor a method or class value that was read, in the object or a nearer class, nor a hook of a module that ran.

    What it does not do: it does not look into objects of Python, numpy and torch (see `user_code.LIBRARIES`), so not at
    an iterator's place, the items of a bytearray or an `array.array`, `os.environ`, nor at torch's own settings, such
    as the default dtype or autocast; nor into an object that raises when it is looked at, or a dict or list whose class
    has a `__getitem__` of its own; not at the elements of a numpy array of more than SMALL bytes; not beyond DEPTH,
    MOST, LOOKS and LONGEST, and a warning names the first thing beyond; not at keys added to a dict, which may be
    a cache; not at attributes whose name is in no code that ran, as it is put together; not at an exchanged `__class__`
    or `__dict__`, a replaced class, module or function of a library, a global that hides a builtin, or hooks of tensors
    and optimisers; not at what only code in other threads reads, such as the backward of an autograd.Function on a GPU;
    and not at a tensor whose memory is exchanged by `tensor.data = ...`, but for the first parameter of a module, which
    tells `module.half()`.

    Args:
        fn: the function.
        device: where it runs; on a GPU tensors on the CPU are watched too, as one number of them is baked in.
        ran: the code that a call of `fn` runs, see `user_code.code_that_runs`; None: all attributes count.
    """

    def __init__(self, fn: Callable, device: torch.device | None = None, ran: set[types.CodeType] | None = None):
        walk = Walk(fn, device, ran)
        unknown = [code for code in (ran or set()) - walk.methods if reads_of(code).own]
        if unknown:  # they have a `self`, but are the methods of nothing that is reached
            walk = Walk(fn, device, ran, unknown)
        # Not what else the walk holds: results of the call before would live as long as this.
        self._items, self._item_names = walk.items, walk.item_names
        self._gets, self._get_names = walk.gets, walk.get_names
        self._lacking, self._lacked, self._lack_names = walk.lacking, walk.lacked, walk.lack_names
        self._hooks = walk.hooks
        self._generators = walk.generators
        if (name := walk.left_out()) is not None:
            warn(
                f"{name_of(fn)} reads more Python values than are watched: a change of {name}, and of what comes after "
                "it, will not be noticed; keep what changes in tensors"
            )

    def __len__(self):
        return len(self._items) + len(self._gets) + len(self._lacked) + len(self._hooks)

    def change(self) -> str | None:
        """What is no longer as it was, the first of it: "scale of Policy was 1.0 and is 0.5". None: nothing.

        This runs at every replay: about 2 µs for 50 values, and less for elements of lists.
        """
        try:
            for container, key, value in self._items:
                if container[key] is not value:
                    return self._first_change()
            for get, owner, value in self._gets:
                now = get(owner)
                if now is not value and (type(now) is not int or type(value) is not int or now != value):
                    return self._first_change()
            if any(map(operator.contains, self._lacking, self._lacked)) or any(self._hooks):
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
                    return f"{names[i]} was {short(then)} and is gone"
                if not _same(then, now):
                    return _in_words(names[i], then, now)
                entries[i] = (first, second, now)  # an equal one: the next look is quick again
        for container, key, name in zip(self._lacking, self._lacked, self._lack_names):
            if key in container:
                return f"there was no {name} of its own and there is one"
        return "there was no hook of a module and there is one" if any(self._hooks) else None

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
        except Exception:  # whatever it raises where it needs the value: then that is no mere result
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
def putting_back_python(fn: Callable, device: torch.device, call: Callable, always: bool = False):
    """After an error, or always, the Python values that `fn` reads are what they were, and what it draws from.

    `call` calls `fn` and leaves no trace in tensors: to find out whether it is `fn` that has moved a generator.
    """
    walk = Walk(fn, device)
    draws = HostDraws(walk.generators)
    done = False
    try:
        yield draws
        done = not always
    except Exception:  # not Ctrl-C, after which nothing more is called
        draws.drawn_by(lambda: (walk.put_back(), call()))  # from where the first one began
        raise
    finally:
        if not done:
            walk.put_back()
            draws.put_back()


class _Unusable:
    """What neither numbers, tensors nor conditions can be made of."""

    def __bool__(self):
        raise TypeError("this value is from an earlier call")

    __eq__ = __bool__
    __hash__ = None


_UNUSABLE = _Unusable()


def _is_replaced(container, key, value) -> bool:
    return type(container) is dict and not _same(value, container.get(key, MISSING))


def _same(then, now) -> bool:
    if then is now:
        return True
    if type(then) is not type(now):
        return False
    if isinstance(then, (float, complex, np.inexact)):
        return repr(then) == repr(now)  # a NaN is the same, and another sign of a zero is not
    if isinstance(then, (*SIMPLE, frozenset)):
        return bool(then == now)
    if isinstance(then, tuple):
        return len(then) == len(now) and all(map(_same, then, now))
    return isinstance(then, types.MethodType) and then == now


def _in_words(name, then, now) -> str:
    if isinstance(then, SIMPLE) or isinstance(now, SIMPLE) or type(then) is not type(now):
        return f"{name} was {short(then)} and is {short(now)}"
    if type(then) is tuple and len(then) == len(now):
        i = next(i for i in range(len(then)) if not _same(then[i], now[i]))
        return _in_words(f"{name}[{i}]", then[i], now[i])
    kind = "tensor" if isinstance(now, torch.Tensor) else type(now).__name__
    return f"{name} is another {kind} than it was"
