"""Named arrays and a header in one file: safetensors, whose metadata has the header as JSON, and a CRC-32 of it all."""

import contextlib
import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from rlgraph.files import DamagedError, cannot_read, is_there, parse_json, write_atomically

CHECKSUM = "crc32"


def write_arrays(path: Path, header: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
    """Write a file, or leave what is there as it is.

    Raises:
        OSError: the disk is full or gone.
    """
    # safetensors takes for granted that rows lie after each other.
    dense = {name: np.asarray(array, order="C") for name, array in arrays.items()}
    metadata = {name: json.dumps(value) for name, value in header.items()}
    metadata[CHECKSUM] = str(_checksum(metadata, dense))
    write_atomically(path, save(dense, metadata))


def read_arrays(path: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Header and arrays.

    Raises:
        DamagedError: the file is not as it was written.
        FileNotFoundError: it is not there.
        UsageError: it is there, but cannot be read.
    """
    with _opened(path) as file:
        metadata = file.metadata() or {}
        arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no dict
        if CHECKSUM not in metadata:
            raise DamagedError("it has no checksum, as those of earlier versions of rlgraph")
        # safetensors itself does not notice a changed byte in the middle of a tensor.
        if metadata.pop(CHECKSUM) != str(_checksum(metadata, arrays)):
            raise DamagedError("its checksum is not that of its content")
        return _parsed(metadata), arrays


def read_header(path: Path) -> dict[str, Any]:
    """The header alone, which is quick, but a change in it is not noticed. Raises what `read_arrays` does."""
    with _opened(path) as file:
        metadata = file.metadata() or {}
        metadata.pop(CHECKSUM, None)
        return _parsed(metadata)


def _parsed(metadata: dict[str, str]) -> dict[str, Any]:
    return {name: parse_json(text) for name, text in metadata.items()}


@contextlib.contextmanager
def _opened(path: Path):
    is_there(path)
    try:
        with open(path, "rb"), safe_open(path, "numpy") as file:  # of the two, open says why it cannot
            yield file
    except FileNotFoundError:
        raise
    except OSError as error:
        raise cannot_read(path, error) from error
    except (SafetensorError, ValueError, TypeError, AttributeError) as error:  # the last two: a dtype that numpy lacks
        raise DamagedError(str(error) or type(error).__name__) from error


def _checksum(metadata: dict[str, str], arrays: dict[str, np.ndarray]) -> int:
    """CRC-32 of the header and of every array with its name, dtype and shape."""
    crc = zlib.crc32(json.dumps(metadata, sort_keys=True).encode())
    for name, array in sorted(arrays.items()):
        crc = zlib.crc32(f"{name} {array.dtype} {array.shape}".encode(), crc)
        crc = zlib.crc32(array, crc)
    return crc
