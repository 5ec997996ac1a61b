"""The calls of a function before it is captured: they warm it up, and find what a graph cannot hold."""

import contextlib
import traceback
from collections.abc import Callable, Sequence

import torch
from torch.utils._pytree import tree_leaves

from rlgraph.errors import CaptureError, first_line
from rlgraph.graph.state import leaving_no_trace
from rlgraph.graph.uncapturable import (
    HostDraws,
    Uncapturable,
    missing_option,
    optimizer_in,
    synchronising_is_an_error_in_this_thread,
)
from rlgraph.graph.watch import SIMPLE, Watch
from rlgraph.graph.words import line_of, name_of


class Trial:
    """A function tried. Each call begins where a replay will, and leaves no trace in tensors and generators.

    Args:
        fn, inputs, state, generators, device: as `Graph` has them.
        part: of another graph: it cannot draw from torch's generators, and what it returns is dropped.
        watches: whether the Python values that `fn` reads are watched.

    Attributes:
        watch: those values, after the first call; None: they are not watched.
        drawn: by how much a call advances torch's generators.
    """

    def __init__(
        self,
        fn: Callable,
        inputs: Sequence[torch.Tensor],
        state: Sequence[torch.Tensor],
        generators: Sequence[torch.Generator],
        device: torch.device,
        part: bool,
        watches: bool,
    ):
        self._fn, self._name, self._inputs, self._state = fn, name_of(fn), inputs, state
        self._generators, self._device, self._part, self._watches = generators, device, part, watches
        self._captures = device.type == "cuda"
        self._draws = HostDraws(on_gpu=self._captures)
        self.watch, self.drawn = None, []

    @contextlib.contextmanager
    def putting_back_after_an_error(self):
        """What `fn` reads from Python and draws on the host is as before, if what is done meanwhile fails."""
        before = Watch(self._fn) if self._watches else None
        try:
            yield
        except BaseException as error:
            if before is not None:
                if isinstance(error, Exception):  # not Ctrl-C, after which nothing more is called
                    self._draws.drawn_by(self._call)
                before.put_back()
            raise

    def warm_up(self, times: int) -> None:
        """Call it on the current stream, which is the one to be captured on; at least twice."""
        try:
            for i in range(max(2, times)):
                # The first call may compile, and autotuning synchronises. From the second on, a synchronising call
                # is an error here, before it can break a capture.
                strictly = synchronising_is_an_error_in_this_thread() if i else contextlib.nullcontext()
                with self._leaving_no_trace(), strictly:
                    before = self._offsets()
                    self._fn(*self._inputs)
                    self.drawn = [after - start for start, after in zip(before, self._offsets())]
                if self._watches and i == 0:
                    self.watch = Watch(self._fn, self._device)  # not before: what a first call makes is no change
            if self._watches:
                self._check_what_is_read()
        except CaptureError:
            raise
        except Exception as error:
            self._diagnose()
            raise self.error(error) from error
        if self._part:
            self._diagnose()

    def warm_up_directly(self) -> None:
        """Where nothing is captured: find what could not be, all the same."""
        self._diagnose()
        if self._watches:
            self.watch = Watch(self._fn, self._device)
            self._call()
            self._check_what_is_read()

    def check_outputs(self, outputs) -> None:
        """Raises CaptureError for what a replay could not fill."""
        for leaf in () if self._part else tree_leaves(outputs):
            if not isinstance(leaf, (torch.Tensor, *SIMPLE)):
                raise CaptureError(
                    f"{self._name} returns a value of type {type(leaf).__name__}, which a replay could not fill: "
                    "return tensors, in any nesting of tuples, lists and dicts"
                )

    def rebound_error(self, change: str) -> CaptureError:
        return CaptureError(
            f"{self._name} cannot be captured: from one call to the next {change}, and every replay would see the "
            "first; keep a number in a tensor, and write a tensor in place with copy_; a result is for returning, or "
            "for an attribute that is written before it is read"
        )

    def error(self, error: Exception) -> CaptureError:
        """What an error of the function means, with its line and the cure."""
        advice = (
            "constants must be made before the capture, generators named in `generators`, and no value read on the host"
        )
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        optimizer = optimizer_in(reversed(frames))
        if optimizer is not None and (option := missing_option(optimizer)) is not None:
            advice = f"make {type(optimizer).__name__} with {option}=True"
        return CaptureError(f"{self._name} cannot be captured: {first_line(error)} at {line_of(error)}; {advice}")

    def _leaving_no_trace(self):
        """Around each call: they all begin where a replay will, and a counter runs over no buffer's end."""
        return leaving_no_trace((self._state, self._inputs), self._generators)

    def _check_what_is_read(self):
        if (source := self._draws.drawn_by(self._call)) is not None:
            raise CaptureError(
                f"{self._name} cannot be captured: it draws from {source}, and every replay would use the same; "
                "draw from a torch.Generator on the device that is named in `generators`"
            )
        if (change := self.watch.rebound(self._uncompiled)) is not None:
            raise self.rebound_error(change)

    def _call(self):
        with self._leaving_no_trace():
            self._fn(*self._inputs)

    def _uncompiled(self):
        """Call `fn` with what is compiled run uncompiled. Returns its outputs."""
        with self._leaving_no_trace(), torch.compiler.set_stance("force_eager"):
            return self._fn(*self._inputs)

    def _offsets(self) -> list[int]:
        """Where torch's generators stand: the device's own, and those named."""
        own = torch.cuda.default_generators[torch.cuda.current_device()]
        return [generator.get_offset() for generator in (own, *self._generators)]

    def _diagnose(self):
        """Run `fn` once, watching its operations, and raise for the first that a graph cannot hold.

        Inside compiled code there would be no operations to watch.
        """
        with Uncapturable(self._name, may_draw=not self._part, captures=self._captures):
            outputs = self._uncompiled()
        self.check_outputs(outputs)
