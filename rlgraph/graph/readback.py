"""Small tensors on their way to the host while the GPU goes on."""

import torch

IN_FLIGHT = 2  # one launch under way, and the one before it being read


class Readbacks:
    """Copies of one tensor after the other to the host, each started at once and read later.

    The tensors have one shape, dtype and device. Two pinned buffers and their events are taken in turns, so a copy
    allocates nothing. A copy that nobody has read is dropped when its buffer's turn comes again.
    """

    def __init__(self):
        self._slots = []
        self._started = 0

    def start(self, tensor: torch.Tensor) -> "Readback":
        """Start a copy. Work launched later on the current stream may overwrite the tensor: the copy comes before."""
        if len(self._slots) < IN_FLIGHT:
            self._slots.append(_Slot(tensor))
        slot = self._slots[self._started % IN_FLIGHT]
        self._started += 1
        slot.take(tensor, self._started)
        return Readback(slot, self._started)


class Readback:
    """One copy, from `Readbacks.start`."""

    def __init__(self, slot: "_Slot", turn: int):
        self._slot, self._turn = slot, turn

    def get(self) -> list:
        """The values as Python numbers, nested as the tensor's shape; waits for this copy alone.

        Raises:
            RuntimeError: the buffer has been taken for a later copy.
        """
        if self._slot.turn != self._turn:
            raise RuntimeError(f"these metrics are overwritten: read them before {IN_FLIGHT} more launches")
        return self._slot.read()


class _Slot:
    """A buffer on the host and, for a GPU, the event that says when it is filled."""

    def __init__(self, like: torch.Tensor):
        self._device = like.device
        with torch.inference_mode(False):  # else a copy outside that mode could not be written to it
            self._host = torch.empty(like.shape, dtype=like.dtype, pin_memory=like.is_cuda)
        # torch.Event and torch.accelerator: torch.cuda.current_stream makes an object in Python, for 4 µs.
        self._copied = torch.Event(like.device.type) if like.is_cuda else None
        self.turn = 0

    def take(self, tensor: torch.Tensor, turn: int) -> None:
        self.turn = turn
        self._host.copy_(tensor, non_blocking=True)
        if self._copied is not None:
            self._copied.record(torch.accelerator.current_stream(self._device.index))

    def read(self) -> list:
        if self._copied is not None:
            self._copied.synchronize()
        return self._host.tolist()
