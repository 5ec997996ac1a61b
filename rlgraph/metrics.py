"""Metrics to disk, a row an iteration: JSON lines, and TensorBoard without a deep-learning framework."""

import json
import math
import os
import time
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter


class MetricsLog:
    """Writes `metrics.jsonl` and a TensorBoard event file into a folder, each row at once."""

    def __init__(self, folder: Path):
        self._jsonl = open(folder / "metrics.jsonl", "w", encoding="utf-8")  # noqa: SIM115 - closed by close()
        name = f"events.out.tfevents.{int(time.time())}.{os.getpid()}"
        self._events_file = open(folder / name, "wb")  # noqa: SIM115 - closed by close()
        self._events = RecordWriter(self._events_file)
        self._events.write(Event(wall_time=time.time(), file_version="brain.Event:2").SerializeToString())

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
        summary = Summary(value=[Summary.Value(tag=name, simple_value=v) for name, v in known.items()])
        self._events.write(Event(wall_time=time.time(), step=step, summary=summary).SerializeToString())
        self._events_file.flush()

    def close(self) -> None:
        try:
            self._jsonl.close()  # may fail: a row that the disk had no room for is tried once more
        finally:
            self._events_file.close()
