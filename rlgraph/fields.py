"""The fields of configs and options: each as the plain Python value of the type that it declares, and within bounds.

Every complaint is a UsageError of one line that names the field.
"""

import dataclasses
import math
import types
import typing
from collections.abc import Iterable, Sequence
from typing import Any

from rlgraph.arguments import integer, real, text, truth
from rlgraph.errors import UsageError, shown, unknown

MOST = 2**31 - 1  # of anything that is counted, or numbered on the device: JAX's integers there have 32 bits
FLOAT32_LEAST, FLOAT32_MOST = 2.0**-126, (2 - 2.0**-23) * 2.0**127  # below the least, a device may compute with 0


def convert_fields(options: Any) -> None:
    """Convert every field of a frozen dataclass: the first thing that its `__post_init__` does.

    Raises:
        UsageError: a value that is none of its field's type.
    """
    kinds = typing.get_type_hints(type(options))
    for field in dataclasses.fields(options):
        value = converted(field.name, kinds[field.name], getattr(options, field.name))
        object.__setattr__(options, field.name, value)


def converted(name: str, kind: Any, value: Any) -> Any:
    """A value as a `kind`: int, float, bool, str, a Literal of texts, tuple[X, ...] or X | None.

    A float is one of float32, which devices compute in; numbers may come from any library.
    """
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        (kind,) = (argument for argument in arguments if argument is not types.NoneType)
        return None if value is None else converted(name, kind, value)
    if origin is tuple:
        return tuple(converted(f"{name}[{i}]", arguments[0], entry) for i, entry in enumerate(_entries(name, value)))
    if origin is typing.Literal:
        if text(name, value) not in arguments:
            raise unknown(f"value of {name}", str(value), arguments)
        return str(value)
    return {int: integer, float: _float32, bool: truth, str: text}[kind](name, value)


def _float32(name: str, value: Any) -> float:
    number = real(name, value)
    if number - number != 0:
        raise UsageError(f"{name} must be finite, but is {number}")
    if number != 0 and not FLOAT32_LEAST <= abs(number) <= FLOAT32_MOST:
        raise UsageError(f"{name} must be 0 or of a size from 1.2e-38 to 3.4e38, as float32 is, but is {number}")
    return number


def _entries(name: str, value: Any) -> list:
    """Those of a sequence, or of an array of any library."""
    is_text = isinstance(value, str | bytes | bytearray)
    if is_text or not (isinstance(value, Sequence) or getattr(value, "shape", ())):
        raise UsageError(f"{name} must be a sequence, such as (64, 64), but is {shown(value)}")
    return list(value)


def check_counts(options: Any, names: Iterable[str], least: int = 1, most: int = MOST) -> None:
    for name in names:
        value = getattr(options, name)
        if value < least:
            raise UsageError(f"{name} must be at least {least}, but is {shown(value)}")
        if value > most:
            raise UsageError(f"{name} must be at most {most}, but is {shown(value)}")


def check_product(options: Any, *names: str) -> None:
    """Of counts of what is numbered on the device together."""
    product = math.prod(getattr(options, name) for name in names)
    if product > MOST:
        raise UsageError(f"{' * '.join(names)} must be at most {MOST}, but is {product}")


def check_positive(options: Any, names: Iterable[str]) -> None:
    """None, where a field may be None, passes."""
    for name in names:
        value = getattr(options, name)
        if value is not None and not value > 0:
            raise UsageError(f"{name} must be positive, but is {value}")


def check_not_negative(options: Any, names: Iterable[str]) -> None:
    for name in names:
        if not getattr(options, name) >= 0:
            raise UsageError(f"{name} must be at least 0, but is {getattr(options, name)}")


def check_unit_interval(options: Any, names: Iterable[str]) -> None:
    for name in names:
        if not 0 <= getattr(options, name) <= 1:
            raise UsageError(f"{name} must lie in [0, 1], but is {getattr(options, name)}")
