"""Where the random generators of the host stand: a graph draws nothing from them."""

import contextlib
import functools
import pickle
import random
from collections.abc import Callable

import numpy as np
import torch

AGAIN = 2  # calls to tell whether it is the function that draws


class HostDraws:
    """Where the host's random generators stand: Python's and numpy's own, torch's on a CPU, and those given.

    What it does not do: a thread that draws from one of them again and again, in every call meanwhile, cannot be told
    from the function. Where both draw from one, putting it back gives the thread its numbers once more.
    """

    def __init__(self, generators=()):
        self._sources = [
            ("Python's random", random.getstate, random.setstate),
            ("np.random", functools.partial(np.random.get_state, legacy=False), np.random.set_state),
        ]
        for name, generator in generators:
            self._sources.append((name, *_state_of(generator)))
        self._states = [get() for _, get, _ in self._sources]
        self._known = list(map(_content, self._states))
        self._drawn = []  # indices of the sources that the function draws from

    def drawn_by(self, call: Callable) -> str | None:
        """The first that is not where it was and that each of a few calls moves again. Errors of calls pass."""
        self._drawn, before = list(range(len(self._sources))), self._known
        for i in range(1 + AGAIN):
            if i > 0:
                with contextlib.suppress(Exception):
                    call()
            now = [_content(get()) for _, get, _ in self._sources]
            self._drawn = [j for j in self._drawn if now[j] != before[j]]
            if not self._drawn:
                return None
            before = now
        return self._sources[self._drawn[0]][0]

    def put_back(self) -> None:
        """Of those that `drawn_by` has found."""
        for i in self._drawn:
            self._sources[i][2](self._states[i])


def _content(state) -> bytes:
    """Equal for equal states. A pickled tensor may hold the address of its memory."""
    return state.numpy().tobytes() if isinstance(state, torch.Tensor) else pickle.dumps(state)


def _state_of(generator):
    if isinstance(generator, random.Random):
        return generator.getstate, generator.setstate
    if isinstance(generator, torch.Generator):
        return generator.get_state, generator.set_state
    bits = generator.bit_generator if isinstance(generator, np.random.Generator) else generator._bit_generator
    return lambda: bits.state, lambda state: setattr(bits, "state", state)
