"""What a caller passes, as the plain Python value that it stands for, or a UsageError of one line that names it.

A number may come from any library: numpy's, a tensor of one element. A bool is no number, a float is no integer, and a
text is neither.
"""

import math
import numbers
import operator
import os
from collections.abc import Iterable
from typing import Any

from rlgraph.errors import UsageError, shown, unknown


def integer(name: str, value: Any, least: int | None = None, most: int | None = None) -> int:
    """A Python int.

    Args:
        name: of the argument, for the error.
        value: what was passed.
        least, most: what it must not be below, or above; None for no bound.

    Raises:
        UsageError: `value` is no integer, or out of bounds.
    """
    try:
        number = None if _is_bool(value) else operator.index(value)
    except Exception:  # whatever a foreign object raises, it is no integer
        number = None
    if number is None or (least is not None and number < least) or (most is not None and number > most):
        raise UsageError(f"{name} must be {_in_words('an integer', least, most)}, but is {shown(value)}")
    return number


def real(name: str, value: Any) -> float:
    """A Python float of any real number, infinity and NaN among them.

    Raises:
        UsageError: `value` is no number, or too large for a float.
    """
    try:
        # numpy's texts have an __array__, and every text that holds digits has a float().
        arrays = hasattr(value, "__array__") and not isinstance(value, str)
        is_number = isinstance(value, numbers.Real) or arrays
        plain = value.item() if arrays else value  # without torch's warning about a gradient
        number = float(plain) if is_number and not _is_bool(value) else None
    except Exception:  # OverflowError, or whatever a foreign object raises
        number = None
    if number is None:
        raise UsageError(f"{name} must be a number, but is {shown(value)}")
    return number


def truth(name: str, value: Any) -> bool:
    """A Python bool of Python's or another library's, of no number.

    Raises:
        UsageError: `value` is no bool.
    """
    if not _is_bool(value):
        raise UsageError(f"{name} must be True or False, but is {shown(value)}")
    return bool(value)


def text(name: str, value: Any) -> str:
    """A text as it is, and a path as text.

    Raises:
        UsageError: `value` is neither, or holds what the system takes in no path: a NUL, or half a surrogate pair.
    """
    try:
        found = os.fspath(value) if isinstance(value, (str, os.PathLike)) else None
    except Exception:  # whatever a foreign object raises, it is no path
        found = None
    if isinstance(found, str) and ("\0" in found or not _is_encodable(found)):
        raise UsageError(f"{name} must be without NUL and lone surrogates, but is {shown(value)}")
    if not isinstance(found, str):
        raise UsageError(f"{name} must be a text, but is {shown(value)}")
    return str(found)


def choice(kind: str, value: Any, known: Iterable[str]) -> str:
    """One of the texts that are `known`.

    Raises:
        UsageError: `value` is none of them; the message names the nearest.
    """
    known = list(known)
    if isinstance(value, str) and value in known:
        return str(value)
    raise unknown(kind, value if isinstance(value, str) else shown(value), known)


def _is_encodable(text: str) -> bool:
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        return False
    return True


def _is_bool(value: Any) -> bool:
    """One truth value: Python's, or an array of one element of dtype bool."""
    if isinstance(value, bool):
        return True
    return str(getattr(value, "dtype", "")).removeprefix("torch.") == "bool" and math.prod(value.shape) == 1


def _in_words(kind: str, least: int | None, most: int | None) -> str:
    if least is not None and most is not None:
        return f"{kind} of at least {least} and at most {most}"
    if least is not None or most is not None:
        return f"{kind} of at {'most' if least is None else 'least'} {most if least is None else least}"
    return kind
