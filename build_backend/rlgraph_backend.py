"""How rlgraph is built: by setuptools; for an editable install, with an import hook of its own.

That of setuptools comes after Python's own finders, which take any folder called rlgraph in the working directory for
a package: beside a clone of this repository, `import rlgraph` would give the clone's folder, and nothing in it.
"""

import base64
import hashlib
import tempfile
import tomllib
import zipfile
from pathlib import Path

from setuptools.build_meta import (
    build_sdist,
    build_wheel,
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    get_requires_for_build_wheel,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

ROOT = Path(__file__).resolve().parent.parent
HOOK = "rlgraph_editable"
WHEEL = "Wheel-Version: 1.0\nGenerator: rlgraph_backend\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


def build_editable(wheel_directory, config_settings=None, metadata_directory=None) -> str:
    """Write a wheel that holds the metadata, the hook, and a .pth file that starts it; return its name (PEP 660)."""
    with tempfile.TemporaryDirectory() as folder:
        info = Path(folder, prepare_metadata_for_build_editable(folder, config_settings))
        files = {f"{info.name}/{path.name}": path.read_bytes() for path in info.iterdir() if path.is_file()}
    files[f"{info.name}/WHEEL"] = WHEEL.encode()
    files[f"{HOOK}.py"] = Path(__file__).with_name(f"{HOOK}.py").read_bytes()
    files[f"{HOOK}.pth"] = f"import {HOOK}; {HOOK}.install({_folders()!a})\n".encode()
    record = f"{info.name}/RECORD"
    rows = [f"{name},sha256={_digest(content)},{len(content)}" for name, content in files.items()]
    files[record] = "\n".join([*rows, f"{record},,", ""]).encode()

    wheel = f"{info.name.removesuffix('.dist-info')}-py3-none-any.whl"
    with zipfile.ZipFile(Path(wheel_directory, wheel), "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return wheel


def _folders() -> dict[str, str]:
    """Of the packages that are not where their names say, and of the one that they are in."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    return {name: str(ROOT / folder) for name, folder in project["tool"]["setuptools"]["package-dir"].items()}


def _digest(content: bytes) -> str:
    """As a wheel's RECORD has it."""
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")
