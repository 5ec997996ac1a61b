"""`rlgraph bench`, `rlgraph bench report` and `rlgraph bench solve`."""

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import torch
import tyro
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column, Table

from rlgraph.bench import harness, report, results, solve
from rlgraph.bench.overhead import measure_launch_overhead
from rlgraph.bench.provenance import clocks, provenance
from rlgraph.bench.variants import COLUMNS, Workload
from rlgraph.cli.options import advice_on_memory, parse, sizes_to_lower
from rlgraph.cli.terminal import terminal_console
from rlgraph.config import check_seed
from rlgraph.errors import UsageError, shown, unknown
from rlgraph.fields import check_counts, convert_fields
from rlgraph.registry import make


@dataclass(frozen=True)
class BenchOptions:
    env: str = "CartPole-v1"
    """Environment: a known name, or the path of a Python file that defines one."""
    agent: str = "ppo"
    """What trains in the train column: its shipped settings but for B, T, precision (PPO: as the options say)."""
    variants: str = "all"
    """Which variants, separated by commas; see docs/benchmarks.md for the table."""
    columns: str = ",".join(COLUMNS)
    """What to measure, separated by commas: env (environment only), policy (with inference), train (iterations)."""
    num_envs: str = "auto"
    """Numbers of environments B, separated by commas; auto: 4096 on a GPU, 64 without."""
    num_steps: int = 0
    """Steps a repeat T; 0: 128 on a GPU, 32 without."""
    hidden: tuple[int, ...] = (64, 64)
    """Widths of the hidden layers of actor and critic."""
    precision: Literal["ieee", "tf32", "bf16"] = "tf32"
    """Matrix products on a GPU."""
    num_epochs: int = 4
    """Passes of a training iteration over its steps."""
    num_minibatches: int = 4
    """Minibatches a pass."""
    repeats: int = 10
    """Timed repeats of each variant, in turns."""
    build_jobs: int = 0
    """Variants prepared at the same time; 0: half the CPU cores. One-off costs then share the other half."""
    device: str = "auto"
    """auto (a GPU if there is one), cpu, cuda."""
    seed: int = 0
    """Of all draws."""
    modules: str = ""
    """Importable modules that register further variants, separated by commas."""
    out: str = ""
    """Result file; by default benchmarks/results/DEVICE-DATE.json."""
    commit: str = ""
    """Commit to note where there is no git checkout to ask."""

    def __post_init__(self):
        convert_fields(self)
        check_seed(self.seed)
        check_counts(self, ("repeats", "num_epochs", "num_minibatches"))
        check_counts(self, ("num_steps", "build_jobs"), least=0)  # 0: the default


@dataclass(frozen=True)
class ReportOptions:
    files: Annotated[tuple[str, ...], tyro.conf.Positional]
    """Result files of `rlgraph bench`. Two are also compared, the first as the one before."""
    out: str = ""
    """Folder for the plots (SVG and PNG); none are drawn without it."""


def main(argv: list[str]) -> int:
    """Run `rlgraph bench ARGV`. Returns the exit code."""
    if argv[:1] == ["solve"]:
        return solve.main(argv[1:])
    if argv[:1] == ["report"]:
        options = parse(ReportOptions, argv[1:], "rlgraph bench report")
        if not options.files:
            raise UsageError("name result files after `rlgraph bench report`")
        print(report.report(list(options.files), options.out))
        return 0
    return _bench(parse(BenchOptions, argv, "rlgraph bench"), argv)


def _bench(options: BenchOptions, words: list[str]) -> int:
    """Run the benchmark. Returns 0, 1 if a variant failed or was wrong, 130 after Ctrl-C."""
    on_gpu = torch.cuda.is_available() and options.device != "cpu"
    plan = _plan(options, on_gpu)
    path = results.free_path(options.out, torch.cuda.get_device_name() if on_gpu else "cpu")
    content = {
        "version": results.VERSION,
        "command": " ".join(["rlgraph bench", *results.without_out(words)]),
        "interrupted": True,
        "columns": COLUMNS,
        "settings": {
            "repeats": plan.repeats,
            "build_jobs": plan.build_jobs,
            "precision": options.precision,
            "hidden": list(options.hidden),
            "num_epochs": options.num_epochs,
            "num_minibatches": options.num_minibatches,
            "agent": options.agent,
            "seed": options.seed,
        },
        "provenance": provenance(options.commit),
        "clocks": {"before": clocks() if on_gpu else None, "after": None},
        "launch_overhead": None,
        "rows": [],
    }
    results.write(path, content)  # now, so that a path that cannot be written costs no measurement
    console = terminal_console()
    with contextlib.suppress(KeyboardInterrupt), advice_on_memory(sizes_to_lower(BenchOptions, options.env)):
        _measure(plan, on_gpu, content, path, console)
        content["interrupted"] = False
    content["clocks"]["after"] = clocks() if on_gpu else None
    results.write(path, content)
    _print(content, console)
    console.print(f"saved in {path}" + (" (interrupted)" if content["interrupted"] else ""), soft_wrap=True)
    if content["interrupted"]:
        return 130
    return int(any(row["status"] in ("wrong", "failed") for row in content["rows"]))


def _measure(plan: harness.Plan, on_gpu: bool, content: dict, path: Path, console: Console) -> None:
    def keep(row: dict) -> None:
        content["rows"].append(row)
        results.write(path, content)

    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:.0f} %"),
        TimeElapsedColumn(),
        console=console,
    )
    with progress:
        task = progress.add_task("launch overhead" if on_gpu else "starting", total=harness.progress_total(plan))
        if on_gpu:
            content["launch_overhead"] = measure_launch_overhead(torch.device("cuda", torch.cuda.current_device()))

        def show(what: str, advance: int) -> None:
            progress.update(task, description=what, advance=advance)

        harness.run(plan, on_gpu, show, keep)


def _plan(options: BenchOptions, on_gpu: bool) -> harness.Plan:
    columns, known = _names(options.columns), harness.table(_names(options.modules))
    variants = tuple(known) if options.variants == "all" else _names(options.variants)
    harness.check_names("column", columns, COLUMNS)
    harness.check_names("variant", variants, known)
    sizes = (4096 if on_gpu else 64,) if options.num_envs == "auto" else _numbers(options.num_envs)
    if options.device not in ("auto", "cpu", "cuda"):
        raise unknown("device", options.device, ("auto", "cpu", "cuda"))
    make(options.env)  # a wrong name is found out before anything starts
    base = Workload(
        column="",
        env=str(Path(options.env).resolve()) if options.env.endswith(".py") else options.env,
        num_steps=options.num_steps or (128 if on_gpu else 32),
        hidden=options.hidden,
        precision=options.precision,
        num_epochs=options.num_epochs,
        num_minibatches=options.num_minibatches,
        device="cuda" if on_gpu else "cpu",
        seed=options.seed,
        agent=options.agent,
    )
    build_jobs = options.build_jobs or max(1, (os.cpu_count() or 2) // 2)
    plan = harness.Plan(columns, sizes, variants, options.repeats, build_jobs, base)
    for work in plan.cells():
        work.training_config("torch", "eager")  # so is a number that no variant could work with
    return plan


def _names(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))


def _numbers(text: str) -> tuple[int, ...]:
    try:
        numbers = tuple(int(part) for part in _names(text))
    except ValueError:
        raise UsageError(f"num_envs must be whole numbers separated by commas, but is {shown(text)}") from None
    if not numbers or min(numbers) < 1:
        raise UsageError(f"num_envs must be numbers of at least 1, but is {shown(text)}")
    return tuple(sorted(numbers))


def _print(content: dict, console: Console) -> None:
    for cell, rows in report.cells(content).items():
        table = Table(Column("variant", no_wrap=True), *report.HEADER[1:6], title=report.title(cell))
        for row in rows:
            if not report.elsewhere(row):
                table.add_row(*report.columns_of(row, rows)[:6])
        console.print(table)
    for line in report.overhead_lines(content["launch_overhead"]):
        console.print(line, markup=False, highlight=False)
