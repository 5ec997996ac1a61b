"""Metrics to disk, a row an iteration: JSON lines, and TensorBoard without a deep-learning framework."""

import json
import math
import os
import time
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from rlgraph.checkpoint import write_atomically

EVENTS = "events.out.tfevents."


class MetricsLog:
    """Writes `metrics.jsonl` and a TensorBoard event file into a folder, each row at once.

    Args:
        folder: a run's. Where it has rows already, new ones are appended to them.
        steps: environment steps that the run goes on from; what was written after them is dropped.
    """

    def __init__(self, folder: Path, steps: int = 0):
        path = folder / "metrics.jsonl"
        if path.exists():
            write_atomically(path, _rows_until(path, steps))
        self._jsonl = open(path, "a", encoding="utf-8")  # noqa: SIM115 - closed by close()
        earlier = [int(path.name.removeprefix(EVENTS)) for path in folder.glob(EVENTS + "*")]
        # TensorBoard reads a folder's files in the order of their names.
        self._events_file = open(folder / f"{EVENTS}{max(earlier, default=-1) + 1:06d}", "xb")  # noqa: SIM115 - closed by close()
        self._events = RecordWriter(self._events_file)
        self._event(file_version="brain.Event:2")
        if earlier:  # TensorBoard drops what earlier files hold from this step on
            self._event(step=steps + 1, session_log=SessionLog(status=SessionLog.START))

    def write(self, step: int, values: dict[str, float]) -> None:
        """One row.

        Args:
            step: environment steps so far.
            values: by name; NaN (no episode ended) is written as null and left out of TensorBoard.

        Raises:
            OSError: the disk is full or gone.
        """
        known = {name: value for name, value in values.items() if math.isfinite(value)}
        row = {"step": step, **{name: known.get(name) for name in values}}
        self._jsonl.write(json.dumps(row) + "\n")
        self._jsonl.flush()
        self._event(
            step=step, summary=Summary(value=[Summary.Value(tag=name, simple_value=v) for name, v in known.items()])
        )

    def sync(self) -> None:
        """Return once all rows are on disk: a checkpoint must not be there without them."""
        os.fsync(self._jsonl.fileno())

    def close(self) -> None:
        try:
            self._jsonl.close()  # may fail: a row that the disk had no room for is tried once more
        finally:
            self._events_file.close()

    def _event(self, **content) -> None:
        self._events.write(Event(wall_time=time.time(), **content).SerializeToString())
        self._events_file.flush()


def _rows_until(path: Path, steps: int) -> bytes:
    """The rows up to a step; none from the first one on that a crash tore."""
    rows = []
    for line in path.read_bytes().splitlines(keepends=True):
        try:
            if json.loads(line)["step"] > steps or not line.endswith(b"\n"):
                break
        except ValueError:
            break
        rows.append(line)
    return b"".join(rows)
