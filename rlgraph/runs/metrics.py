"""Metrics to disk, a row an iteration: JSON lines, and TensorBoard without a deep-learning framework."""

import json
import math
import os
import re
import time
from pathlib import Path
from types import NoneType

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from rlgraph.arguments import integer
from rlgraph.errors import UsageError
from rlgraph.files import is_there, parse_json, read, say, write_atomically
from rlgraph.runs.folder import METRICS

EVENTS = "events.out.tfevents."


class MetricsLog:
    """Writes `metrics.jsonl` and a TensorBoard event file into a folder, each row at once.

    Args:
        folder: a run's. Where it has rows already, new ones are appended to them.
        steps: environment steps that the run goes on from; what was written after them is dropped.
    """

    def __init__(self, folder: Path, steps: int = 0):
        path = folder / METRICS
        if steps or is_there(path):
            write_atomically(path, _rows_until(path, steps))
        self._jsonl = open(path, "a", encoding="utf-8")  # noqa: SIM115 - closed by close()
        names = (re.fullmatch(re.escape(EVENTS) + "([0-9]{6,9})", name) for name in os.listdir(folder))
        earlier = [int(name[1]) for name in names if name]  # a file of another writer's has another name
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
    """The rows up to a step. What is damaged, or missing, is named on stderr."""
    lines = read(path).split(b"\n") if is_there(path) else [b""]
    rows, last, damaged = [], 0, []
    for number, line in enumerate(lines, 1):
        try:
            step = _step_of(line)
        except ValueError as error:
            if number < len(lines):  # what follows the last end of a line is empty, or a crash tore it
                damaged.append(f"line {number}, {error}")
            continue
        if step <= steps:
            rows.append(line + b"\n")
            last = max(step, last)
    if damaged:
        say(f"rows of {str(path)!r} are damaged, {len(damaged)} in all, and left out: first {damaged[0]}")
    if last < steps:
        say(f"{str(path)!r} has no rows after step {last}, though the last checkpoint is of step {steps}")
    return b"".join(rows)


def _step_of(line: bytes) -> int:
    """The step of a row; ValueError if it is none."""
    row = parse_json(line)
    if not isinstance(row, dict):
        raise UsageError("it is no JSON object")
    if not all(type(value) in (int, float, NoneType) for value in row.values()):
        raise UsageError("it holds something else than numbers")
    return integer("step", row.get("step"), least=0)
