"""Which code is the user's, which of it runs, and which names it reads."""

import contextlib
import dis
import functools
import inspect
import sys
import types
import warnings
from typing import NamedTuple

import torch

# Whose objects are not looked into, beside Python's own. Of torch's, modules and optimisers are.
LIBRARIES = {"torch", "functorch", "numpy", "triton", "cuda", "jax", "gymnasium", "array_api_compat"}
BASE = torch.nn.Module.__module__
BY_NAME = {"getattr", "hasattr", "vars", "attrgetter", "__dict__"}  # attributes may be read by a string's name


def warn(message: str) -> None:
    """A warning at the line that called this package, from however deep in it."""
    frame, level = sys._getframe(), 1
    while frame is not None and frame.f_globals.get("__name__", "").startswith("rlgraph."):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)


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
        if not is_library(module) or (module.startswith("torch.nn.modules.") and module != BASE):
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


def function_of(member) -> types.FunctionType | None:
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


def is_library_function(value) -> bool:
    if isinstance(value, types.FunctionType):
        return is_library(value.__globals__.get("__name__")) and not hasattr(value, "__wrapped__")
    return isinstance(value, types.BuiltinFunctionType)


def is_library(module: str | None) -> bool:
    """Whether a module's objects are not the user's. Of rlgraph, that is what handles graphs."""
    root = (module or "").split(".")[0]
    return root in sys.stdlib_module_names or root in LIBRARIES or (module or "").startswith("rlgraph.graph.")


class Reads(NamedTuple):
    """Names that code reads, with the functions inside it; not those that it only writes."""

    own: frozenset[str]  # attributes of `self`
    attributes: frozenset[str]  # of anything else
    perhaps: frozenset[str]  # attributes that need not be there: getattr with a default, hasattr, a class in a match
    globals: frozenset[str]
    closure: frozenset[str]


@functools.lru_cache(maxsize=4096)
def reads_of(code: types.CodeType) -> Reads:
    own, attributes, perhaps, variables, closure = set(), set(), set(), set(), set()
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
        elif instruction.opname == "MATCH_CLASS":  # case Point(x=0): the names are the constant before it
            perhaps |= {*before.argval, *(["__match_args__"] if instruction.argval else [])}
        before = instruction
    if BY_NAME & (own | attributes | variables):
        perhaps |= {const for const in code.co_consts if isinstance(const, str) and const.isidentifier()}
    if "AttributeError" in variables:
        perhaps |= own | attributes
    attributes |= perhaps
    for inner in (reads_of(const) for const in code.co_consts if isinstance(const, types.CodeType)):
        attributes |= inner.attributes | inner.own
        perhaps |= inner.perhaps
        variables |= inner.globals
        closure |= inner.closure
    return Reads(*map(frozenset, (own, attributes, perhaps, variables, closure)))
