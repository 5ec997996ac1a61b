"""Arrays that a caller passes, of whatever library, as numpy's. None of those libraries is imported here."""

import numbers
import sys
from typing import Any

import numpy as np

ON_CUDA = (2, 13)  # DLPack's device types kDLCUDA and kDLCUDAManaged


def on_host(x: Any) -> np.ndarray:
    """A numpy array of an array, of numbers, or of lists of either; of floats that numpy lacks, float32.

    Raises:
        Exception: it cannot be read as one; whatever its library raises then.
    """
    return _with_numbers(_read(x))


def copied(array: np.ndarray, dtype: Any) -> np.ndarray:
    """A copy of another dtype, one row after the other; what is too large for it becomes infinite."""
    if array.dtype.kind != "f" or array.dtype.itemsize <= 4:  # nothing in it is too large: no state to set
        return np.array(array, dtype, order="C")
    with np.errstate(over="ignore"):
        return np.array(array, dtype, order="C")


def is_tensor(x: Any) -> bool:
    """Whether it is a tensor of torch: without torch imported nothing is."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.Tensor)


def is_on_cuda(x: Any) -> bool:
    """Whether an array of any library says that it is on an NVIDIA GPU."""
    try:
        return x.__dlpack_device__()[0] in ON_CUDA
    except Exception:  # a tensor of a kind without DLPack, or no array at all
        return not is_tensor(x) and hasattr(x, "__cuda_array_interface__")


def plain_tensor(tensor: Any) -> Any:
    """A tensor of torch without its gradient, and floats as float32: numpy has no bfloat16, DLPack no gradients.

    Raises:
        ValueError: its numbers are nowhere, or not one after the other.
    """
    if tensor.is_meta:
        raise ValueError("a meta tensor has no numbers")
    if tensor.is_nested or str(tensor.layout) != "torch.strided":
        raise ValueError("a nested or sparse tensor is no array: give it as to_padded_tensor() or to_dense() makes it")
    if tensor.is_quantized:
        raise ValueError("a quantized tensor holds codes for numbers: give it as dequantize() makes it")
    tensor = tensor.detach()
    return tensor.float() if tensor.is_floating_point() else tensor


def _read(x: Any) -> np.ndarray:
    if is_tensor(x):
        return plain_tensor(x).numpy(force=True)
    if isinstance(x, np.ma.MaskedArray) and np.ma.is_masked(x):
        raise ValueError("some of its entries are masked")
    if hasattr(x, "__dlpack__") and not hasattr(x, "__array__"):
        return np.from_dlpack(x, device="cpu")
    try:
        return np.asarray(x)
    except Exception:
        if not isinstance(x, (list, tuple)):
            raise
        return np.asarray([_read(each) for each in x])  # tensors of bfloat16, say, each by itself


def _with_numbers(array: np.ndarray) -> np.ndarray:
    """The same with numbers that numpy can compute with."""
    if array.dtype.kind == "V" and array.dtype.names is None and array.dtype.type is not np.void:
        return array.astype(np.int64 if "int" in array.dtype.name else np.float32)  # JAX's narrow types
    if array.dtype == object and all(isinstance(x, numbers.Real) and not isinstance(x, bool) for x in array.flat):
        integers = all(isinstance(x, numbers.Integral) for x in array.flat)
        try:
            return array.astype(np.int64 if integers else np.float64)
        except OverflowError:
            raise ValueError("a number among them does not fit in 64 bits") from None
    return array
