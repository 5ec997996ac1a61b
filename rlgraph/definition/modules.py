"""A definition's file as a module, with a package of its own around it.

For a program that Python runs, its folder comes first among the places to import from. A definition has the same, but
for itself alone: its imports of what lies beside it (`import helpers`) are compiled as imports from its package. So two
folders may each have a `helpers.py`, no other code sees either, and it makes no difference when an import runs.
"""

import ast
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import itertools
import sys
from pathlib import Path
from types import ModuleType

from rlgraph.definition.errors import described
from rlgraph.definition.files import lies_beside, places, texts
from rlgraph.errors import UsageError

PREFIX = "rlgraph_user_env_"  # of the packages' names

_numbers = itertools.count()


def load(path: Path) -> ModuleType:
    """The module of a definition's file: the same one as long as neither it nor what it imports beside it changes.

    Raises:
        UsageError: the file cannot be read, or it raises something, whatever that is.
    """
    path = path.resolve()
    try:
        found = texts(path)
    except OSError as error:
        raise UsageError(f"cannot read environment file {str(error.filename or path)!r}: {error.strerror}") from error
    return _load(path, tuple(found.items()))


@functools.cache  # one module a file, so that two environments made from it are equal and compile once
def _load(path: Path, found: tuple[tuple[Path, bytes], ...]) -> ModuleType:
    importer = _Importer(path, dict(found))
    sys.modules[importer.package] = importlib.util.module_from_spec(_folder_spec(importer.package))
    sys.meta_path.insert(0, importer)  # before Python's own, which would find what is inside packages
    try:
        return importlib.import_module(f"{importer.package}.{importer.own}")
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit too: a user's file does not end the program
        sys.meta_path.remove(importer)
        text = described(error, importer.texts).replace(f"{importer.package}.", "")
        raise UsageError(f"environment file {str(path)!r} fails to load: {text}") from error


class _Importer(importlib.abc.MetaPathFinder, importlib.abc.InspectLoader):
    """Finds and loads what is in one definition's package, from the text that was read at first.

    It keeps no bytecode, in which the package's name would stand.
    """

    def __init__(self, path: Path, found: dict[Path, bytes]):
        self.path, self.texts = path, found
        self.package = f"{PREFIX}{next(_numbers)}"
        self.own = path.stem.replace(".", "-")  # the dots of a file's name make no packages

    def find_spec(self, fullname, path=None, target=None):
        package, _, name = fullname.partition(".")
        place = self._place(name) if package == self.package else None
        if place is None:
            return None
        if place.is_dir():
            return _folder_spec(fullname)
        inside = [str(place.parent)] if place.name == "__init__.py" else None
        return importlib.util.spec_from_file_location(fullname, place, loader=self, submodule_search_locations=inside)

    def get_source(self, fullname):
        return importlib.util.decode_source(self._text(self._place(fullname.partition(".")[2])))

    def get_code(self, fullname):
        place = self._place(fullname.partition(".")[2])
        tree = _Beside(self.package, place, self.path.parent).visit(
            ast.parse(importlib.util.decode_source(self._text(place)), str(place))
        )
        return compile(ast.fix_missing_locations(tree), str(place), "exec", dont_inherit=True)

    def _place(self, name: str) -> Path | None:
        if name == self.own:
            return self.path
        found = places(self.path.parent, name)
        return found[-1] if len(found) == len(name.split(".")) else None

    def _text(self, place: Path) -> bytes:
        return self.texts[place] if place in self.texts else place.read_bytes()


def _folder_spec(name: str) -> importlib.machinery.ModuleSpec:
    spec = importlib.machinery.ModuleSpec(name, None, is_package=True)
    spec.submodule_search_locations = []
    return spec


class _Beside(ast.NodeTransformer):
    """Imports of what lies beside a definition become imports from its package."""

    def __init__(self, package: str, file: Path, folder: Path):
        self.package, self.file, self.folder = package, file, folder

    def visit_Import(self, node):
        return [ast.copy_location(made, node) for alias in node.names for made in self._imports(alias)]

    def visit_ImportFrom(self, node):
        if node.level == 0 and lies_beside(self.file, self.folder, node.module):
            node.module = f"{self.package}.{node.module}"
        return node

    def _imports(self, alias: ast.alias) -> list[ast.Import]:
        if not lies_beside(self.file, self.folder, alias.name):
            return [ast.Import([alias])]
        top, _, below = alias.name.partition(".")
        pairs = [(alias.name, alias.asname or top)]
        if below and not alias.asname:  # `import a.b` imports both, and names a
            pairs.append((top, top))
        return [ast.Import([ast.alias(f"{self.package}.{name}", asname)]) for name, asname in pairs]
