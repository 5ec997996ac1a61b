"""Kernels' mangled names, shortened for reading."""

import re
from collections.abc import Iterator

MOST_LETTERS = 60  # of a short name

# In a mangled name: literals, back references and numbered lambdas, whose digits are no lengths; then a length.
_TOKEN = re.compile(r"L[a-z]n?\d+E|S[0-9A-Z]*_|T\d*_|E\d+_|(\d+)")
# What wraps an operation in torch's kernels, and says nothing about it.
_WRAPPERS = re.compile(
    r"_GLOBAL__N_.*|at|native|cuda|detail|internal|templates|memory|binary_internal|[Aa]rray|tuple|gpu_kernel_impl.*|"
    r"Tensor(Iterator|ListMetadata).*|(Binary|AUnary|BUnary|Unary)Functor|ReduceOp|func_wrapper_t|CUDAGeneratorImpl|"
    r"(Trivial)?OffsetCalculator|(Load|Store)With(out)?Cast|opmath_.*kernel.*"
)


def short_name(name: str) -> str:
    """A kernel's name for reading: the function, and which operations it was made for, where that can be told.

    By rule of thumb and not by demangling: different kernels can have the same short name.
    """
    if name.startswith("_Z"):
        start, own = _own_name(name)
        parts = [part for part in dict.fromkeys(_identifiers(name, start)) if not _WRAPPERS.fullmatch(part)]
        name = next(filter(_fits, (_with_parts(own, parts, n) for n in (2, 1))), own)
    return name if _fits(name) else f"{name[: MOST_LETTERS - 11]}…{name[-10:]}"


def _fits(name: str) -> bool:
    return len(name) <= MOST_LETTERS


def _with_parts(own: str, parts: list[str], most: int) -> str:
    listed = ", ".join([*parts[:most], *(["…"] if parts[most:] else [])])
    return f"{own}<{listed}>" if listed else own


def _own_name(name: str) -> tuple[int, str]:
    """Where the function's own name ends in a mangled name, and that name without its namespaces."""
    own, position = name, re.match(r"_ZN?[KVr]*(?:St|S_)?", name).end()
    while length := re.match(r"\d+", name[position:]):
        start = position + length.end()
        position = start + int(length[0])
        own = name[start:position]
    return position, own


def _identifiers(name: str, position: int) -> Iterator[str]:
    """The identifiers in a mangled name behind a position."""
    while position < len(name):
        token = _TOKEN.match(name, position)
        position = token.end() if token else position + 1
        if token and token[1]:
            yield name[position : position + int(token[1])]
            position += int(token[1])
