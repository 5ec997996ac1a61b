"""Run a definition before it is used, and compare what it gives with the contract and with itself.

On numpy when an environment is made: that costs a few milliseconds, once for each definition and parameters. On the
backend that will be used before a run begins. Shape letter: B environments.
"""

import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import gymnasium
import numpy as np

from rlgraph.definition import suspects
from rlgraph.definition.arrays import JAX, Numpy, Torch, each, leaves
from rlgraph.definition.errors import advised, described, files_of
from rlgraph.devices import torch_device
from rlgraph.errors import UsageError

if TYPE_CHECKING:  # it imports this module
    from rlgraph.environment import Environment

ROWS = 3
MOST_ROWS = 2**12  # more would find nothing else, and take the memory that the run needs
STEPS = 3
CLOSE = 1e-3  # relative: numpy may add up in another order where there are more rows

Fault = tuple[str, Callable[[Any], bool]]  # what is wrong with a result, and whether a variable may have led to it


@functools.lru_cache(maxsize=256)
def check_on_numpy(env: "Environment") -> None:
    """Several steps on both sides of a reset, in three environments and in one.

    Raises:
        UsageError: something raised; wrong shapes or dtypes; a write into an argument; random numbers of its own;
            results that differ from call to call, or that depend on the other environments.
    """
    trial, before = _Trial(env, Numpy()), suspects.generators()
    with np.errstate(all="ignore"):
        trial.play(STEPS, ROWS)
        kept = suspects.memory(env.definition)  # a table that is made at the first call is there by now
        trial.repeat()
        trial.play_one_row()
        trial.compare_memory(kept)
        if suspects.generators() != before:
            trial.find_draws(before)


def check_on(env: "Environment", backend: str, device: Any = None, num_envs: int = ROWS) -> None:
    """Steps on the backend that will be used, for shapes, dtypes and devices. JAX traces them.

    Args:
        env: from `rlgraph.make`.
        backend: "torch" or "jax".
        device: see `rlgraph.devices`. JAX needs none to trace.
        num_envs: how many will be stepped side by side: as many are tried too, up to MOST_ROWS.

    Raises:
        UsageError: something raised, or wrong shapes or dtypes.
    """
    _check_on(env.without_limit, backend, None if backend == "jax" else torch_device(device), min(num_envs, MOST_ROWS))


@functools.lru_cache(maxsize=256)
def _check_on(env: "Environment", backend: str, device: Any, num_envs: int) -> None:
    if backend == "jax":
        for rows in dict.fromkeys((ROWS, num_envs)):
            _Trial(env, JAX()).play(1, rows)
        return
    import torch

    with torch.no_grad():
        for rows in dict.fromkeys((ROWS, 1, num_envs)):
            _Trial(env, Torch(device)).play(2, rows)


class _Trial:
    """Calls of a definition's functions on one backend, each with its arguments and a copy of what it gave."""

    def __init__(self, env: "Environment", backend: Numpy):
        self.env, self.backend = env, backend
        self.observation_space, self.action_space = env.observation_space, env.action_space  # made anew at each look
        self.calls: list[tuple[str, tuple, list]] = []
        self.kinds: dict[str, tuple] = {}  # of the state's leaves after a reset: dtype, and shape beyond the batch

    # ---- what is run

    def play(self, steps: int, rows: int) -> None:
        """Steps of `rows` environments. After each one begins anew, in turns, and with it those that have ended."""
        array, R, S = self.backend.array, self.env.reset_draws, self.env.definition.STEP_DRAWS
        rng = np.random.default_rng(0)
        state = self.call("reset", (array(_uniforms(rng, rows, R)),), rows)
        self.call("observe", (state,), rows)
        for t in range(steps):
            action, u_BS = array(self._actions(rng, rows)), array(_uniforms(rng, rows, S))
            state, _, terminated_B = self.call("step", (state, action, u_BS), rows)
            self.call("observe", (state,), rows)
            fresh = self.call("reset", (array(_uniforms(rng, rows, R)),), rows)
            state = self.backend.mixed(terminated_B, np.arange(rows) == t % rows, fresh, state)

    def repeat(self) -> None:
        """Every call again, the last one first: a result that differs came from elsewhere than from the arguments."""
        for name, args, given in reversed(self.calls):
            if not all(map(_same, leaves(self.run(name, *args)), given)):
                line = suspects.differing(functools.partial(self.run, name, *args), self.files)
                self.fail(f"what {name} gives differs from call to call with the same arguments", line)

    def play_one_row(self) -> None:
        """Every call again for one of its environments: a result that differs came from the others."""
        for i, (name, args, given) in enumerate(self.calls):
            row = (slice(0, 1), slice(ROWS - 1, ROWS))[i % 2]  # in turns, as x[0] is the first one's own
            alone = self.result(name, each(lambda x, row=row: x[row], args), 1)
            if not all(map(_close, leaves(alone), (x[row] for x in given))):
                line = suspects.making(functools.partial(self.run, name, *args), self.files)
                self.fail(f"what {name} gives for one environment depends on the others", line)

    def compare_memory(self, before: dict[str, str]) -> None:
        """What the definition keeps in globals must not change any more, though it may not show in the results yet."""
        now = suspects.memory(self.env.definition)
        changed = [name for name in now if now[name] != before.get(name)]
        if changed:
            calls = (functools.partial(self.run, name, *args) for name, args, _ in self.calls)
            lines = (suspects.changing(call, self.files, self.env.definition) for call in calls)
            line = next(filter(None, lines), "")
            self.fail(f"the global {changed[0]!r} of its file differs from call to call", line)

    def find_draws(self, states: tuple) -> None:
        """Name the line that draws from a generator of the whole program, which was in these states before."""
        lines = (
            suspects.drawing(functools.partial(self.run, name, *args), self.files, states)
            for name, args, _ in self.calls
        )
        line = next(filter(None, lines), "")
        suspects.put_back(states)
        self.fail("it draws random numbers from a generator of the whole program", line)

    def _actions(self, rng: np.random.Generator, rows: int) -> np.ndarray:
        space = self.action_space
        if isinstance(space, gymnasium.spaces.Discrete):
            return rng.integers(space.start, space.start + space.n, rows)
        low = np.where(np.isfinite(space.low), space.low, np.minimum(space.high, 0) - 1)
        high = np.where(np.isfinite(space.high), space.high, low + 2)
        return rng.uniform(low, high, (rows, *space.shape)).astype(np.float32)

    # ---- calls, and what they must give

    @functools.cached_property
    def files(self) -> set[str]:
        return files_of(self.env.definition)

    def call(self, name: str, args: tuple, rows: int) -> Any:
        result = self.result(name, args, rows)
        self.calls.append((name, args, [self.backend.copy(x) for x in leaves(result)]))
        return result

    def result(self, name: str, args: tuple, rows: int) -> Any:
        """What a function gives, if that is what the contract says."""
        result = self.run(name, *args)
        for fault, is_it in self._faults(name, result, rows):
            self.fail(fault, suspects.making(functools.partial(self.run, name, *args), self.files, is_it))
        return result

    def run(self, name: str, *args) -> Any:
        """What a function gives; what it raises comes out as one line, the cause attached."""
        try:
            return self.backend.run(getattr(self.env.definition, name), *args, self.env.params)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # SystemExit too
            text = described(error, self.files)
            raise UsageError(f"environment {self.env.id!r}: {name} fails {self.backend.where}: {text}") from error

    def fail(self, what: str, line: str) -> None:
        raise UsageError(advised(f"environment {self.env.id!r}: {what}{f' ({line})' if line else ''}"))

    def _faults(self, name: str, result: Any, rows: int) -> Iterator[Fault]:
        State = self.env.definition.State
        if name == "reset":
            yield from self._faults_of_start(result, rows)
        elif name == "observe":
            space, last = self.observation_space, self.calls[-1][0] if self.calls else "step"
            yield from self._unlike(f"observe after {last}", result, space.dtype, (rows, *space.shape))
        elif not isinstance(result, tuple) or len(result) != 3 or not isinstance(result[0], State):
            yield "step must return (State, reward, terminated)", _nothing
        else:
            after, reward_B, terminated_B = result
            for leaf, x in zip(after._fields, after):
                dtype, shape = self.kinds[leaf]
                yield from self._unlike(f"state leaf {leaf!r} after step", x, dtype, (rows, *shape))
            yield from self._unlike("reward of step", reward_B, np.float32, (rows,))
            yield from self._unlike("terminated of step", terminated_B, np.bool_, (rows,))

    def _faults_of_start(self, state: Any, rows: int) -> Iterator[Fault]:
        if not isinstance(state, self.env.definition.State):
            yield f"reset must return a State, a NamedTuple, not {self._described(state)}", _nothing
            return
        for name, leaf in zip(state._fields, state):
            kind = self.backend.kind(leaf)
            dtype, shape = kind or ("", ())
            if shape[:1] != (rows,) or dtype == "float64":
                wanted = f"must be an array [{rows}, ...] and not of float64"
                yield f"state leaf {name!r} is {self._described(leaf)}, {wanted}", self._like(leaf)
            elif self.kinds.setdefault(name, (dtype, shape[1:])) != (dtype, shape[1:]):
                yield from self._unlike(f"state leaf {name!r}", leaf, self.kinds[name][0], (rows, *self.kinds[name][1]))

    def _unlike(self, what: str, got: Any, dtype: Any, shape: tuple[int, ...]) -> Iterator[Fault]:
        dtype = self.backend.dtype(dtype)
        if self.backend.kind(got) != (dtype, shape):
            yield f"{what} is {self._described(got)}, must be {dtype}{list(shape)}", self._like(got)

    def _like(self, wrong: Any) -> Callable[[Any], bool]:
        """Whether a value may have led to a wrong one: it looks the same, or is of float64 as well."""
        words = self._described(wrong)
        if words.startswith("float64"):
            return lambda x: str(getattr(x, "dtype", "")).endswith("float64")
        return lambda x: self._described(x) == words

    def _described(self, x: Any) -> str:
        kind = self.backend.kind(x)
        if kind is not None:
            return f"{kind[0]}{list(kind[1])}"
        home = type(x).__module__
        return f"a {type(x).__qualname__}" if home == "builtins" else f"a {home}.{type(x).__qualname__}"


def _uniforms(rng: np.random.Generator, rows: int, columns: int) -> np.ndarray:
    return rng.random((rows, columns), dtype=np.float32)


def _nothing(value: Any) -> bool:
    return False


def _same(now: np.ndarray, before: np.ndarray) -> bool:
    return now.dtype == before.dtype and now.shape == before.shape and now.tobytes() == before.tobytes()


def _close(alone: np.ndarray, among: np.ndarray) -> bool:
    if alone.dtype.kind != "f":
        return np.array_equal(alone, among)
    scale = np.maximum(np.abs(among), 1)
    return bool(((np.abs(alone - among) <= CLOSE * scale) | (alone == among) | np.isnan(alone) & np.isnan(among)).all())
