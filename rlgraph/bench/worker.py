"""One variant in a process of its own: its import, compilation, memory and crashes are its own too."""

import copy
import importlib
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import time
import traceback
from pathlib import Path

import numpy as np

from rlgraph.bench.variants import VARIANTS, Prepared, Skipped, Workload
from rlgraph.errors import is_out_of_memory

LEAST_SECONDS = 0.05  # a repeat that takes less is run several times back to back, and divided
MOST_CALLS = 1000
LONG_SECONDS = 1.0  # a repeat that takes more is timed by as many of its steps as fit in, where it can be divided
OUT_OF_MEMORY = "out of device memory"


class Worker:
    """The near end: starts the process, sends one command at a time, and waits for its answer.

    Args:
        module: whose import registers the variant.
        name: of the variant.
    """

    def __init__(self, module: str, name: str):
        context = multiprocessing.get_context("spawn")  # a forked process cannot use CUDA
        self.pipe, far = context.Pipe()
        self.process = context.Process(target=_serve, args=(far, module, name), daemon=True)
        self.process.start()
        far.close()

    def send(self, command: str, *args) -> None:
        self.pipe.send((command, args))

    def receive(self) -> dict:
        """The answer: {"ok": ...}, {"skipped": reason} or {"failed": reason}."""
        try:
            return self.pipe.recv()
        except (EOFError, ConnectionResetError):
            self.process.join()
            return {"failed": f"its process died with exit code {self.process.exitcode}"}

    def ask(self, command: str, *args) -> dict:
        if not self.process.is_alive():
            return {"failed": f"its process died with exit code {self.process.exitcode}"}
        self.send(command, *args)
        return self.receive()


def close(workers: list[Worker]) -> None:
    """End some workers: by themselves if they can, so that they clear up, within a few seconds."""
    for worker in workers:
        worker.pipe.close()
    deadline = time.monotonic() + 3
    for worker in workers:
        worker.process.join(max(0.0, deadline - time.monotonic()))
        if worker.process.is_alive():
            worker.process.terminate()
            worker.process.join()


def first_ready(workers: list[Worker]) -> Worker:
    """The first of some workers to have an answer, or to have died."""
    ready = multiprocessing.connection.wait([worker.pipe for worker in workers])
    return next(worker for worker in workers if worker.pipe in ready)


def _serve(pipe, module: str, name: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    # Variants share the card: none may take all of it. The profiler counts launches only where they are left on.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # XLA's own words on running out of memory fill a screen
    os.environ["XLA_FLAGS"] = (
        os.environ.get("XLA_FLAGS", "") + " --xla_enable_command_buffers_during_profiling=true"
    ).strip()
    holder = _Holder(name)
    try:
        started = time.perf_counter()
        importlib.import_module(module)
        holder.import_seconds = time.perf_counter() - started
    except Exception as error:
        holder.import_error = _in_a_line(error)
    while True:
        try:
            command, args = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            answer = {"ok": getattr(holder, command)(*args)}
        except Skipped as reason:
            answer = {"skipped": str(reason)}
        except Exception as error:
            answer = {"failed": _in_a_line(error)}
        try:
            pipe.send(answer)
        except OSError:  # the near end is gone
            return


class _Holder:
    """The far end: what each command does."""

    def __init__(self, name: str):
        self.name, self.import_seconds, self.import_error = name, 0.0, None
        self.prepared: Prepared | None = None
        self.calls = 1  # repeats back to back
        self.num_steps = self.steps = 0  # of a repeat, and those of them that are timed

    def prepare(self, work: Workload, checked_on: Workload, only_outcome: bool = False) -> dict:
        """Build, compile, capture, and run. Returns one-off costs and what the first run on `checked_on` computed.

        With `only_outcome` (a reference that is not timed itself) one run is all.
        """
        if self.import_error:
            raise RuntimeError(self.import_error)
        started = time.perf_counter()
        self.prepared = VARIANTS[self.name].prepare(work)
        built = time.perf_counter()
        self.prepared.seconds()
        first_call = time.perf_counter() - built
        outcome = copy.deepcopy(self.prepared.outcome())  # it may be a view of what the next run overwrites
        if only_outcome:
            return {"outcome": outcome}
        once = self.prepared.seconds()
        again = self.prepared.outcome()
        self._choose_length(work, once)
        return {
            "import_s": self.import_seconds,
            "build_s": built - started - self.prepared.capture_seconds,
            "capture_s": self.prepared.capture_seconds,
            "first_call_s": first_call,
            "outcome": outcome if checked_on == work else _first_outcome(self.name, checked_on),
            "fresh": _differ(outcome, again),
        }

    def _choose_length(self, work: Workload, once: float) -> None:
        self.num_steps = self.steps = work.num_steps
        if once > LONG_SECONDS and self.prepared.step_seconds:
            self.steps = max(1, int(work.num_steps * LONG_SECONDS / once))
            self.prepared.step_seconds(self.steps)  # compiles, where this length is a new shape
        elif once <= LONG_SECONDS:
            once = self.prepared.seconds()  # the run before may still have been warming up
            self.calls = max(1, min(MOST_CALLS, round(LEAST_SECONDS / max(once, 1e-9))))

    def repeat(self) -> float:
        """Seconds of one repeat."""
        if self.steps < self.num_steps:
            return self.prepared.step_seconds(self.steps) * self.num_steps / self.steps
        return self.prepared.seconds(self.calls) / self.calls

    def finish(self) -> dict:
        """Count the graph launches of one more repeat, and read the memory's high mark."""
        return {
            "graph_launches": self.prepared.launches(),
            "peak_memory_bytes": _peak_memory(),
            "calls": self.calls,
            "steps_timed": self.steps,
        }


def _first_outcome(name: str, work: Workload) -> dict:
    prepared = VARIANTS[name].prepare(work)
    prepared.seconds()
    return copy.deepcopy(prepared.outcome())


def _differ(first: dict, second: dict) -> bool:
    """Whether two runs drew different numbers: a frozen generator repeats itself."""
    compared = [name for name in ("obs", "metrics") if name in first]
    return not compared or any(not np.array_equal(first[name], second[name]) for name in compared)


def _peak_memory() -> int | None:
    """Bytes of device memory that this process has held at most, by torch's and by JAX's own count."""
    peaks = []
    torch, jax = sys.modules.get("torch"), sys.modules.get("jax")
    if torch is not None and torch.cuda.is_initialized():
        peaks.append(torch.cuda.max_memory_allocated())
    if jax is not None:
        peaks += [s["peak_bytes_in_use"] for d in jax.local_devices() if (s := d.memory_stats())]
    return max(peaks) if peaks else None


def _in_a_line(error: BaseException) -> str:
    """Kind, first line and place of an error."""
    if is_out_of_memory(error):
        return OUT_OF_MEMORY
    message = (str(error).strip().splitlines() or [""])[0][:300]
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {message} ({'/'.join(Path(frame.filename).parts[-3:])}:{frame.lineno})"
