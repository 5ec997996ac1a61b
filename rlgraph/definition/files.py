"""The files of a definition: its own, and those beside it that it imports."""

import ast
import functools
import importlib.util
import sys
import warnings
from pathlib import Path
from types import ModuleType

# Modules inside Python come before a program's folder too. A second rlgraph would not know the first one's classes.
NEVER_BESIDE = {*sys.builtin_module_names, "__future__", "rlgraph"}


def source_files(definition: ModuleType) -> tuple[Path, ...]:
    """The files that a definition is read from: its own first, then those beside it that it imports, sorted.

    They are found in its text, so that they do not depend on what has run. There are none where a definition came from
    no file, as at a prompt.
    """
    own = getattr(definition, "__file__", None)
    if own is None:
        return ()
    try:
        first, *others = texts(Path(own), getattr(definition, "__package__", None) or "")
    except OSError:  # gone by now: whoever reads its files says so
        return (Path(own),)
    return (first, *sorted(others))


def texts(own: Path, package: str = "") -> dict[Path, bytes]:
    """What a definition's files hold, by path, its own first.

    Args:
        own: its file.
        package: by which it was imported, if there is one: `package.helpers` lies beside it too.

    Raises:
        OSError: a file cannot be read.
    """
    folder, found, waiting = own.parent, {own: own.read_bytes()}, [own]
    while waiting:
        file = waiting.pop()
        inside = file.relative_to(folder).parts[:-1]  # the packages beside the definition that the file belongs to
        for level, name in imported_names(found[file]):
            absolute = _absolute(inside, level, name.removeprefix(f"{package}.") if package else name)
            if absolute is None or (level == 0 and not lies_beside(file, folder, absolute)):
                continue
            for place in places(folder, absolute):
                if place.is_file() and place not in found:
                    found[place] = place.read_bytes()
                    waiting.append(place)
    return found


def lies_beside(file: Path, folder: Path, name: str) -> bool:
    """Whether `name`, imported in a file of a definition, lies in the definition's folder.

    Names come from there first, as in a program that Python runs, but a file of no package does not import itself. A
    folder without `__init__.py` counts where nothing of its name is installed.
    """
    top = name.partition(".")[0]
    first = None if top in NEVER_BESIDE else next(iter(places(folder, top)), None)
    if first is None or first == file == folder / file.name:
        return False
    return first.is_file() or not _is_installed(top)


def places(folder: Path, name: str) -> list[Path]:
    """Where the parts of "a.b" lie, as far as they are in the folder: files, or a folder without `__init__.py`."""
    found = []
    for part in name.split("."):
        choices = (folder / part / "__init__.py", folder / f"{part}.py", folder / part)
        place = next((p for p in choices if p.is_file() or (p is choices[2] and p.is_dir())), None)
        if place is None:
            break
        found.append(place)
        folder = folder / part
    return found


@functools.lru_cache(maxsize=256)
def imported_names(text: bytes) -> tuple[tuple[int, str], ...]:
    """What a text imports, functions inside it too: (dots before the name, name), "a.b" also for `from a import b`."""
    try:
        with warnings.catch_warnings(action="ignore"):  # whoever compiles it warns
            tree = ast.parse(text)
    except Exception:  # whoever compiles it says what is wrong
        return ()
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [(0, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            within = [node.module] if node.module else []
            names += [(node.level, ".".join([*within, alias.name])) for alias in node.names]
    return tuple(dict.fromkeys(names))


def _absolute(inside: tuple[str, ...], level: int, name: str) -> str | None:
    """A name counted from the definition's folder; None where its dots lead out of there."""
    up = max(level - 1, 0)
    if up > len(inside):
        return None
    return ".".join([*inside[: len(inside) - up], name]) if level else name


def _is_installed(name: str) -> bool:
    try:
        spec = importlib.util.find_spec(name)
    except Exception:  # a module that has no spec, such as __main__
        return True
    return spec is not None and spec.origin is not None
