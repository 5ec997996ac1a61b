"""The iterations of a run: launched, K at once, ahead of their metrics, logged, and saved in checkpoints."""

import contextlib
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

from rlgraph.config import TrainConfig
from rlgraph.errors import NonFiniteError
from rlgraph.runs.checkpoint import Checkpoints, saved
from rlgraph.runs.finite import ADVICE, bad_array, bad_metric
from rlgraph.runs.metrics import MetricsLog


class Clock:
    """Times of a run, over all the processes that it takes.

    Args:
        before: what `state` gave at the last checkpoint.
    """

    def __init__(self, before: dict[str, float]):
        self.before = before
        self.started = self.last = time.perf_counter()
        self.first = None  # when the first launch of this process was done
        self.timed = 0  # iterations of this process after it

    def tick(self, iterations: int) -> None:
        """A launch of so many iterations is done."""
        self.last = time.perf_counter()
        if self.first is None:
            self.first = self.last
        else:
            self.timed += iterations

    def state(self) -> dict[str, float]:
        return {
            "seconds": self.before["seconds"] + self.last - self.started,
            "train_seconds": self.before["train_seconds"] + self.last - (self.first or self.last),
            "timed_iterations": self.before["timed_iterations"] + self.timed,
        }


class Loop:
    """The iterations of one run, from its last checkpoint or from the beginning.

    Args:
        config: the run's.
        names: METRICS of the agent.
        checkpoints, log, clock: where states, metrics and times go.
        iterations: done so far.
        progress: called with (steps so far, steps in all, metrics) after every iteration; or None.
    """

    def __init__(
        self,
        config: TrainConfig,
        names: tuple[str, ...],
        checkpoints: Checkpoints,
        log: MetricsLog,
        clock: Clock,
        iterations: int,
        progress: Callable[[int, int, dict], Any] | None,
    ):
        self.config, self.names, self.progress = config, names, progress
        self.checkpoints, self.log, self.clock = checkpoints, log, clock
        self.iterations, self.saved_at = iterations, time.perf_counter()
        self.return_sum = self.episodes = 0.0  # since the last checkpoint

    @property
    def steps(self) -> int:
        return self.iterations * self.config.batch_size

    def run(self, trainer, interrupt: list) -> None:
        """Launch i + 1 before reading what launch i came to, so that the GPU never waits for the host."""
        ahead = None  # launched, and not recorded yet
        while self.iterations < self.config.num_iterations:
            launched = trainer.iterate()
            if ahead is not None:
                self.record(ahead)
            ahead = launched
            stop = bool(interrupt)
            last = self.iterations + self.config.iterations_per_launch == self.config.num_iterations
            due = stop or last or time.perf_counter() - self.saved_at >= self.config.checkpoint_seconds
            # The first is read at once, too: where launches run synchronously, the second would be done before the
            # clock of `steps_per_second` starts. A checkpoint holds the state after the last iteration recorded.
            if due or self.clock.first is None:
                self.record(ahead)
                ahead = None
            if due:
                self._save(trainer)
            if stop:
                break

    def record(self, pending) -> None:
        """Log what a launch, of which `iterate` gave `pending`, came to, one iteration after the other.

        Raises:
            NonFiniteError: a metric is NaN or infinite.
        """
        rows = pending.get()
        self.clock.tick(len(rows))
        for row in rows:
            self._record_iteration(dict(zip(self.names, row, strict=True)))

    def _record_iteration(self, raw: dict[str, float]) -> None:
        self.iterations += 1
        bad = bad_metric(raw)
        return_sum, length_sum = raw.pop("episode_return_sum"), raw.pop("episode_length_sum")
        episodes = raw["episodes"]
        self.return_sum += return_sum
        self.episodes += episodes
        metrics = {
            "episode_return": return_sum / episodes if episodes else float("nan"),
            "episode_length": length_sum / episodes if episodes else float("nan"),
            **raw,
            "seconds": self.clock.state()["seconds"],
            "steps_per_second": self.steps_per_second(),
        }
        self.log.write(self.steps, metrics)
        if bad:
            raise self._not_finite(f"{bad} in")
        if self.progress:
            self.progress(self.steps, self.config.num_iterations * self.config.batch_size, metrics)

    def _save(self, trainer) -> None:
        done = {
            "iterations": self.iterations,
            "steps": self.steps,
            **self.clock.state(),
            "score": self.return_sum / self.episodes if self.episodes else None,
        }
        state, policy = trainer.state_arrays(), trainer.arrays()
        if bad := bad_array(state):  # of the last iteration's updates: no metric has seen what they led to
            raise self._not_finite(f"{bad} after")
        self.log.sync()
        self.checkpoints.save(done, state, policy)
        self.return_sum = self.episodes = 0.0
        self.saved_at = time.perf_counter()

    def _not_finite(self, found: str) -> NonFiniteError:
        kept = [*saved(self.checkpoints.run).values()]
        last = f"{str(kept[-1])!r} is the last state from before" if kept else "no checkpoint was due before"
        return NonFiniteError(
            f"{found} iteration {self.iterations} ({self.steps} steps), so the training stops: {ADVICE}; {last}"
        )

    def steps_per_second(self) -> float:
        """Over the iterations after each process's first launch, which compiles; NaN before there are any."""
        times = self.clock.state()
        if not times["timed_iterations"]:
            return float("nan")
        return times["timed_iterations"] * self.config.batch_size / times["train_seconds"]


@contextlib.contextmanager
def deferred_interrupt():
    """Note when Ctrl-C was pressed in a list, so that it cannot fall between an update and its result.

    One that comes a second or more after the first is raised: a double press is meant as one, and must not cost the
    policy. Outside the main thread, where Python delivers no signals, and where the shell has Ctrl-C ignored, as for a
    background job, the list stays empty.
    """
    pressed = []
    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        yield pressed
        return

    def handle(signum, frame):
        pressed.append(time.monotonic())
        if pressed[-1] - pressed[0] >= 1:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)
