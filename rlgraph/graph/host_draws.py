"""Where the random generators of the host stand: a graph draws nothing from them."""

import functools
import pickle
import random

import numpy as np
import torch


class HostDraws:
    """Where the host's random generators stand: Python's and numpy's own, torch's on a CPU, and those given.

    Another thread that draws from the first ones meanwhile cannot be told from the function.
    """

    def __init__(self, generators=()):
        self._sources = [
            ("Python's random", random.getstate, random.setstate),
            ("np.random", functools.partial(np.random.get_state, legacy=False), np.random.set_state),
        ]
        for name, generator in generators:
            self._sources.append((name, *_state_of(generator)))
        self._states = [get() for _, get, _ in self._sources]
        self._known = [_content(state) for state in self._states]

    def drawn_from(self) -> str | None:
        """The first that is not where it was."""
        return next((name for name, _, _ in self._moved()), None)

    def put_back(self) -> None:
        for _, put, state in self._moved():
            put(state)

    def _moved(self):
        for (name, get, put), state, known in zip(self._sources, self._states, self._known):
            if _content(get()) != known:
                yield name, put, state


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
