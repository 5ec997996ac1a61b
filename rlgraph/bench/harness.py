"""Drive the variants: prepare all, check all, then time them in turns."""

import dataclasses
import importlib
import importlib.util
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from rlgraph.bench.variants import VARIANTS, Variant, Workload, disagreement
from rlgraph.bench.worker import OUT_OF_MEMORY, Worker, close, first_ready
from rlgraph.errors import UsageError, shown, unknown

# Importing these fills the table of variants; a program adds its own by registering them in an importable module.
MODULES = ("rlgraph.bench.torch_variants", "rlgraph.bench.jax_variants", "rlgraph.bench.peers")
WARM_UP_REPEATS = 2  # after the checks: XLA records its command buffers in its first runs
CHECKED_ENVS = 64  # at least so many where means are compared: their standard error is over environments
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
        except Exception as error:  # whatever a user's module raises
            raise UsageError(f"cannot import variants from {shown(module)}: {error}") from error
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
    outcomes = _further_references(plan, on_gpu, show)
    for work in plan.cells():
        cell = _Cell(plan, work, plan.variants, on_gpu, outcomes, show)
        try:
            cell.measure()
            for name in cell.crowded_out():
                cell.measure_alone(name)
        finally:
            for row in cell.rows.values():
                keep(row)


def progress_total(plan: Plan) -> int:
    """Steps of progress that `run` will report."""
    return len(plan.cells()) * len(plan.variants) * (plan.repeats + WARM_UP_REPEATS + 1)


Job = tuple[Workload, str]
# What each variant computed on a workload, or why it did not: {"ok": outcome}, {"failed": ...} or {"skipped": reason}.
Outcomes = dict[Job, dict]


def checked_on(v: Variant, work: Workload) -> Workload:
    """The workload that a variant is checked on: in distribution, fewer than CHECKED_ENVS would say too little."""
    return work if v.same_draws else dataclasses.replace(work, num_envs=max(work.num_envs, CHECKED_ENVS))


def _further_references(plan: Plan, on_gpu: bool, show: Callable[[str, int], None]) -> Outcomes:
    """What references compute that the cells will not run by themselves, or there would be nothing to check against.

    All run before the first cell, each once: op by op JAX compiles for a minute on one core, and a machine has several.
    """
    needed, by_themselves = {}, set()  # the dict keeps the order
    for work in plan.cells():
        by_themselves |= {(work, name) for name in plan.variants}  # in this cell or an earlier one
        for v in (VARIANTS[name] for name in plan.variants):
            job = (checked_on(v, work), v.reference)
            if v.reference and _why_not(v, work, on_gpu) is None and job not in by_themselves:
                needed[job] = None
    waiting, outcomes = list(needed), {}
    for at_once in (plan.build_jobs, 1):  # those that the others left no memory for run once more, one by one
        crowded = []
        for job, worker, answer in _prepared(waiting, at_once, only_outcome=True):
            show(f"reference {job[1]}: {job[0].column}, {job[0].num_envs} environments", 0)
            close([worker])
            outcomes[job] = {"ok": answer["ok"]["outcome"]} if "ok" in answer else answer
            if answer.get("failed") == OUT_OF_MEMORY:
                crowded.append(job)
        waiting = crowded
    return outcomes


def _nothing_to_check_against(reference: str, answer: dict) -> str:
    """Why a variant cannot be checked, in one line. The answer is its reference's; empty where that was not tried."""
    if not answer:
        return f"its reference {reference} did not run"
    ((status, reason),) = answer.items()
    return f"its reference {reference} {'was skipped' if status == 'skipped' else status}: {reason}"


def _prepared(jobs: list[Job], at_once: int, only_outcome: bool = False) -> Iterator[tuple[Job, Worker, dict]]:
    """Prepare each (workload, variant) in a worker of its own, some at once. Yields (job, worker, answer)."""
    waiting, running = list(jobs), {}
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                work, name = waiting.pop(0)
                worker = Worker(VARIANTS[name].prepare.__module__, name)
                worker.send("prepare", work, checked_on(VARIANTS[name], work), only_outcome)
                running[worker] = (work, name)
            worker = first_ready(list(running))
            yield running.pop(worker), worker, worker.receive()
    finally:
        close(list(running))


class _Cell:
    """Some variants on one workload.

    Args:
        outcomes: what references compute, as far as it is known; this cell's own are added.
    """

    def __init__(self, plan: Plan, work: Workload, names: tuple[str, ...], on_gpu: bool, outcomes: Outcomes, show):
        self.plan, self.work, self.outcomes, self.show = plan, work, outcomes, show
        self.workers: dict[str, Worker] = {}
        self.rows = {name: self._row(VARIANTS[name], _why_not(VARIANTS[name], work, on_gpu)) for name in names}

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

    def measure(self) -> None:
        """Prepare all, check all, time them in turns, count their launches."""
        try:
            self._prepare([name for name, row in self.rows.items() if row["status"] != "skipped"])
            self._check()
            self._time()
            self._finish()
        finally:
            close(list(self.workers.values()))
            self.workers.clear()

    def crowded_out(self) -> list[str]:
        """Variants that found no memory while the others were there, or whose reference did; references first."""
        crowded = [name for name, row in self.rows.items() if row["reason"] == OUT_OF_MEMORY]
        return sorted(crowded, key=_comes_later) if len(self.rows) > 1 else []

    def measure_alone(self, name: str) -> None:
        """Measure one variant once more, with the device to itself."""
        cell = _Cell(self.plan, self.work, (name,), True, self.outcomes, lambda what, advance: self.show(what, 0))
        try:
            cell.measure()
        finally:
            self.rows[name] = cell.rows[name]
        if self.rows[name]["status"] == "ok":
            self.rows[name]["reason"] = "timed alone: no memory for it beside the others"

    def _prepare(self, names: list[str]) -> None:
        """Build, compile, capture and first-run everything, before anything is timed."""
        # References first: what they compute is needed, whoever else finds no memory.
        names = sorted(names, key=_comes_later)
        self.show(f"preparing {self._label()}", 0)
        for (_, name), worker, answer in _prepared([(self.work, name) for name in names], self.plan.build_jobs):
            self.workers[name] = worker
            job = (checked_on(VARIANTS[name], self.work), name)
            if "ok" in answer:
                self.outcomes[job] = {"ok": answer["ok"].pop("outcome")}
                self.rows[name].update(answer["ok"])
            else:
                if "ok" not in self.outcomes.get(job, {}):  # it may have run before, with more memory to itself
                    self.outcomes[job] = answer
                self._drop(name, *next(iter(answer.items())))
            self.show(f"preparing {self._label()}: {name} is ready", 1)

    def _drop(self, name: str, status: str, reason: str) -> None:
        self.rows[name].update(status=status, reason=reason)
        close([self.workers.pop(name)])

    def _check(self) -> None:
        """A variant that computes something else than its reference is reported as wrong, and not timed."""
        for name in list(self.workers):
            if not self.rows[name].pop("fresh"):
                self._drop(name, "wrong", "two runs drew the same random numbers")
            elif VARIANTS[name].reference:
                self._compare(VARIANTS[name])

    def _compare(self, v: Variant) -> None:
        """Drop a variant that disagrees with its reference, or has none to agree with."""
        on = checked_on(v, self.work)
        expected = self.outcomes.get((on, v.reference), {})
        if "ok" not in expected:
            crowded = self.rows.get(v.reference, {}).get("reason") == OUT_OF_MEMORY
            nothing = _nothing_to_check_against(v.reference, expected)
            self._drop(v.name, "failed", OUT_OF_MEMORY if crowded else nothing)
        elif reason := disagreement(v, self.outcomes[on, v.name]["ok"], expected["ok"]):
            self._drop(v.name, "wrong", reason)

    def _time(self) -> None:
        """One repeat of each variant after the other, so that drift hits all alike."""
        for repeat in range(self.plan.repeats + WARM_UP_REPEATS):
            for name in list(self.workers):
                answer = self.workers[name].ask("repeat")
                if "failed" in answer:
                    self._drop(name, "failed", answer["failed"])
                elif repeat >= WARM_UP_REPEATS:
                    self.rows[name]["seconds"].append(answer["ok"])
                    self.rows[name].update(summary(self.rows[name]))
                self.show(f"timing {self._label()}", 1)

    def _finish(self) -> None:
        for name in list(self.workers):
            self.show(f"counting launches, {self._label()}: {name}", 0)
            answer = self.workers[name].ask("finish")
            if "ok" in answer:
                self.rows[name].update(answer["ok"], status="ok")
            else:
                self._drop(name, "failed", answer["failed"])


def _comes_later(name: str) -> bool:
    return VARIANTS[name].reference is not None


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
