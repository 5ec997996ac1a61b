"""Drive the variants: prepare all, check all, then time them in turns."""

import dataclasses
import importlib
import importlib.util
import statistics
from collections.abc import Callable
from dataclasses import dataclass

from rlgraph.bench.variants import VARIANTS, Variant, Workload, disagreement
from rlgraph.bench.worker import Worker
from rlgraph.errors import UsageError, unknown

# Importing these fills the table of variants; a program adds its own by registering them in an importable module.
MODULES = ("rlgraph.bench.torch_variants", "rlgraph.bench.jax_variants", "rlgraph.bench.peers")
WARM_UP_REPEATS = 2  # after the checks: XLA records its command buffers in its first runs
WIDE_SPREAD = 0.10  # (max - min) / median above which a figure is marked


@dataclass(frozen=True)
class Plan:
    """What is measured: every chosen variant on every column and every number of environments."""

    columns: tuple[str, ...]
    num_envs: tuple[int, ...]
    variants: tuple[str, ...]
    repeats: int
    build_jobs: int
    base: Workload

    def cells(self) -> list[Workload]:
        return [
            dataclasses.replace(self.base, column=column, num_envs=B) for B in self.num_envs for column in self.columns
        ]


def table(further_modules: tuple[str, ...] = ()) -> dict[str, Variant]:
    """All registered variants, by name.

    Raises:
        UsageError: a further module cannot be imported.
    """
    for module in MODULES:
        importlib.import_module(module)
    for module in further_modules:
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise UsageError(f"cannot import variants from {module!r}: {error}") from error
    return VARIANTS


def check_names(kind: str, names: tuple[str, ...], known: dict) -> None:
    """Raise a UsageError for a name that does not exist."""
    if not names:
        raise UsageError(f"name at least one {kind}: {', '.join(known)}")
    for name in names:
        if name not in known:
            raise unknown(kind, name, known)


def run(plan: Plan, on_gpu: bool, show: Callable[[str, int], None], keep: Callable[[dict], None]) -> None:
    """Measure the plan, cell by cell.

    Args:
        plan: see Plan.
        on_gpu: whether there is an NVIDIA GPU; variants that need one are listed as skipped otherwise.
        show: called with what is being done, and how many steps of progress that completes.
        keep: called with each cell's rows as soon as they are there, also after Ctrl-C in the middle of a cell.
    """
    for work in plan.cells():
        cell = _Cell(plan, work, on_gpu, show)
        try:
            cell.prepare()
            cell.check()
            cell.time()
            cell.finish()
        finally:
            cell.close()
            for row in cell.rows.values():
                keep(row)


def progress_total(plan: Plan) -> int:
    """Steps of progress that `run` will report."""
    return len(plan.cells()) * len(plan.variants) * (plan.repeats + WARM_UP_REPEATS + 1)


class _Cell:
    """All variants on one workload."""

    def __init__(self, plan: Plan, work: Workload, on_gpu: bool, show: Callable[[str, int], None]):
        self.plan, self.work, self.show = plan, work, show
        self.variants = {name: VARIANTS[name] for name in plan.variants}
        self.references = {
            v.reference for v in self.variants.values() if v.reference and v.reference not in self.variants
        }
        self.workers: dict[str, Worker] = {}
        self.outcomes: dict[str, dict] = {}
        self.rows = {name: self._row(v, _why_not(v, work, on_gpu)) for name, v in self.variants.items()}

    def _row(self, v: Variant, reason: str | None) -> dict:
        status = {"status": "skipped", "reason": reason} if reason else {"status": "interrupted", "reason": None}
        return {
            "variant": v.name,
            "backend": v.backend,
            "column": self.work.column,
            "env": self.work.env,
            "num_envs": self.work.num_envs,
            "num_steps": self.work.num_steps,
            **status,
            "seconds": [],
        }

    def _label(self) -> str:
        return f"{self.work.column}, {self.work.num_envs} environments"

    def prepare(self) -> None:
        """Build, compile, capture and first-run everything, before anything is timed."""
        wanted = [name for name, row in self.rows.items() if row["status"] != "skipped"]
        # A reference that was not asked for still runs once, or there would be nothing to check against.
        needed = {VARIANTS[name].reference for name in wanted} & self.references
        waiting, running = [*sorted(needed), *wanted], []
        while waiting or running:
            while waiting and len(running) < self.plan.build_jobs:
                name = waiting.pop(0)
                self.workers[name] = Worker(VARIANTS[name].prepare.__module__, name)
                self.workers[name].send("prepare", self.work, name not in self.rows)
                running.append(name)
            name = running.pop(0)
            self.show(f"preparing {self._label()}: {name}", 0)
            self._prepared(name, self.workers[name].receive())

    def _prepared(self, name: str, answer: dict) -> None:
        if "ok" in answer:
            self.outcomes[name] = answer["ok"].pop("outcome")
            if name in self.rows:
                self.rows[name].update(answer["ok"])
        elif name in self.rows:
            status, reason = next(iter(answer.items()))
            self.rows[name].update(status=status, reason=reason)
        if "ok" not in answer or name not in self.rows:
            self.workers.pop(name).close()
        self.show(f"preparing {self._label()}", 1 if name in self.rows else 0)

    def check(self) -> None:
        """A variant that computes something else than its reference is reported as wrong, and not timed."""
        for name in list(self.workers):
            v, row = self.variants[name], self.rows[name]
            reason = None
            if not row.pop("fresh"):
                reason = "two runs drew the same random numbers"
            elif v.reference and v.reference not in self.outcomes:
                reason = f"{v.reference} did not run, so there is nothing to check it against"
            elif v.reference:
                reason = disagreement(v, self.outcomes[name], self.outcomes[v.reference])
            if reason:
                row.update(status="wrong", reason=reason)
                self.workers.pop(name).close()

    def time(self) -> None:
        """One repeat of each variant after the other, so that drift hits all alike."""
        for repeat in range(self.plan.repeats + WARM_UP_REPEATS):
            for name in list(self.workers):
                answer = self.workers[name].ask("repeat")
                if "ok" in answer and repeat >= WARM_UP_REPEATS:
                    self.rows[name]["seconds"].append(answer["ok"])
                    self.rows[name].update(summary(self.rows[name]))
                elif "failed" in answer:
                    self.rows[name].update(status="failed", reason=answer["failed"])
                    self.workers.pop(name).close()
                self.show(f"timing {self._label()}", 1)

    def finish(self) -> None:
        for name, worker in self.workers.items():
            self.show(f"counting launches, {self._label()}: {name}", 0)
            answer = worker.ask("finish")
            if "ok" in answer:
                self.rows[name].update(answer["ok"], status="ok")
            else:
                self.rows[name].update(status="failed", reason=next(iter(answer.values())))

    def close(self) -> None:
        for worker in self.workers.values():
            worker.close()


def summary(row: dict) -> dict:
    """Median, spread and rates of a row's `seconds`."""
    seconds = row["seconds"]
    median = statistics.median(seconds)
    return {
        "median_s": median,
        "min_s": min(seconds),
        "max_s": max(seconds),
        "us_per_step": median / row["num_steps"] * 1e6,
        "steps_per_second": row["num_envs"] * row["num_steps"] / median,
        "wide_spread": (max(seconds) - min(seconds)) / median > WIDE_SPREAD,
    }


def _why_not(v: Variant, work: Workload, on_gpu: bool) -> str | None:
    if work.column not in v.columns:
        return f"does not measure column {work.column}"
    if v.gpu_only and not on_gpu:
        return "needs an NVIDIA GPU"
    for package in v.requires:
        if importlib.util.find_spec(package) is None:
            return f"not installed: {package}"
    return None
