"""Finds rlgraph in its clone: an editable install puts this beside the installed packages, and runs it at each start.

It comes before Python's own finder, which takes a folder called rlgraph in the working directory for a package. What
PYTHONPATH or a program puts on sys.path goes first all the same, if it is a package with an `__init__.py`.
"""

import os
import sys
from importlib.machinery import PathFinder
from importlib.util import spec_from_file_location

HERE = os.path.dirname(__file__)


class Finder:
    """Args:
    folders: of packages, by name.
    """

    def __init__(self, folders: dict[str, str]):
        self.folders = folders

    def find_spec(self, name, path=None, target=None):
        if name not in self.folders:
            return None
        parent = name.rpartition(".")[0]
        if parent and self.folders[parent] not in path:  # another rlgraph's, which went first
            return None
        folder = self.folders[name]
        own = spec_from_file_location(name, os.path.join(folder, "__init__.py"), submodule_search_locations=[folder])
        return own if parent else _put_before(name) or own


def _put_before(name: str):
    """The spec of a package in a folder of sys.path that comes before this one, and is not the working directory."""
    end = sys.path.index(HERE) if HERE in sys.path else len(sys.path)
    found = PathFinder.find_spec(name, [entry for entry in sys.path[:end] if not _is_working_directory(entry)])
    return found if found is not None and found.has_location else None  # a folder without __init__.py has none


def _is_working_directory(entry: str) -> bool:
    try:
        return os.path.samefile(entry or ".", ".")
    except OSError:
        return False  # there is none of that name


def install(folders: dict[str, str]) -> None:
    """Look for these packages before sys.path is searched."""
    sys.meta_path.insert(sys.meta_path.index(PathFinder), Finder(folders))
