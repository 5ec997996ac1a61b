"""Tables, plots and comparisons from result files."""

from pathlib import Path

from rlgraph.bench.results import read
from rlgraph.bench.variants import COLUMNS
from rlgraph.errors import UsageError

EAGER = {"torch": "torch-eager", "jax": "jax-eager"}  # what a backend's ratios are to


def cells(content: dict) -> dict[tuple, list[dict]]:
    """Rows by (column, env, num_envs, num_steps), in the order of the file."""
    grouped: dict[tuple, list[dict]] = {}
    for row in content["rows"]:
        grouped.setdefault((row["column"], row["env"], row["num_envs"], row["num_steps"]), []).append(row)
    return grouped


def elsewhere(row: dict) -> bool:
    """Whether a row only says that its variant belongs to other columns."""
    return row["status"] == "skipped" and str(row["reason"]).startswith("does not measure")


def ratio(row: dict, rows: list[dict]) -> float | None:
    """How many times the throughput of its backend's eager mode in the same cell; None where that was not timed."""
    eager = [r for r in rows if r["variant"] == EAGER.get(row["backend"]) and r["seconds"]]
    return row["steps_per_second"] / eager[0]["steps_per_second"] if eager and row["seconds"] else None


def columns_of(row: dict, rows: list[dict]) -> list[str]:
    """A row as text: variant, µs a step, M steps/s, x eager, min-max, graphs, one-off seconds, memory."""
    if not row["seconds"]:
        return [row["variant"], f"{row['status']}: {row['reason']}" if row["reason"] else row["status"]] + [""] * 6
    times_eager, launches = ratio(row, rows), row.get("graph_launches")
    memory = row.get("peak_memory_bytes")
    one_off = " + ".join(f"{row[k]:.1f}" for k in ("import_s", "build_s", "capture_s", "first_call_s"))
    note = row["status"] if row["status"] != "ok" else "alone" if row["reason"] else ""
    return [
        row["variant"] + (f" ({note})" if note else ""),
        _digits(row["us_per_step"]),
        _digits(row["steps_per_second"] / 1e6),
        "" if times_eager is None else _digits(times_eager),
        f"{row['min_s'] * 1e3:.2f} to {row['max_s'] * 1e3:.2f}" + (" (!)" if row["wide_spread"] else ""),
        "" if launches is None else str(launches),
        one_off,
        "" if memory is None else f"{memory / 2**20:,.0f}",
    ]


HEADER = [
    "variant",
    "µs a step",
    "M steps/s",
    "x eager",
    "ms a repeat, min to max",
    "graph launches",
    "import + build + capture + first call, s",
    "peak MiB",
]


def title(cell: tuple) -> str:
    column, env, num_envs, num_steps = cell
    return f"{COLUMNS.get(column, column)}; {env}, B = {num_envs:,}, T = {num_steps}"


def markdown(content: dict) -> str:
    """The whole file as Markdown: one table a cell, with the command and where it was measured."""
    where, lines = content["provenance"], []
    versions = ", ".join(f"{k} {v}" for k, v in where["versions"].items() if v)
    tree = {True: "clean tree", False: "changed tree", None: "no git checkout"}[where["clean_tree"]]
    commit = (where["commit"] or "unknown")[:12]
    driver = f", driver {where['driver']}" if where["driver"] else ""
    lines += [
        f"`{content['command']}`",
        "",
        f"{where['device']}{driver}; {versions}; commit {commit} ({tree}); {where['date']}.",
        f"Median of {content['settings']['repeats']} interleaved repeats; (!) marks a spread over 10 %.",
    ]
    if content["interrupted"]:
        lines += ["", "**Interrupted: rows marked so have fewer repeats.**"]
    for cell, rows in cells(content).items():
        lines += ["", f"**{title(cell)}**", "", _line(HEADER), _line(["---"] + ["---:"] * (len(HEADER) - 1))]
        lines += [_line(columns_of(row, rows)) for row in rows if not elsewhere(row)]
    lines += overhead_lines(content["launch_overhead"])
    return "\n".join(lines) + "\n"


def overhead_lines(overhead: dict | None) -> list[str]:
    """Launch overhead and the rule of thumb, as Markdown."""
    if overhead is None:
        return []
    rows = [["", "µs a kernel, host", "µs a kernel, GPU", "µs a launch, host"], ["---"] + ["---:"] * 3]
    for kind in ("eager", "replay"):
        names = ("cpu_us_per_kernel", "gpu_us_per_kernel", "cpu_us_per_launch")
        rows.append([kind, *(f"{overhead[f'{kind}_{name}']:.3f}" for name in names)])
    lines = [
        "",
        "**Launch overhead** of one-element kernels, fitted over chains of 1 to 1000",
        "",
        *map(_line, rows),
        "",
    ]
    return lines + [f"- {rule['rule']}: {rule['verdict']} ({rule['here']})" for rule in overhead["rules"]]


def compare(old: dict, new: dict) -> str:
    """Cells that both files timed: change of the median, marked where it goes beyond the noise of both.

    The noise of a figure is its own spread, half of (max - min) / median; a change counts when it exceeds the sum of
    the two and 3 %.
    """
    changed = {
        name for name in old["settings"].keys() & new["settings"] if old["settings"][name] != new["settings"][name]
    }
    before = {(cell, row["variant"]): row for cell, rows in cells(old).items() for row in rows if row["seconds"]}
    lines = [_line(["column", "B", "variant", "before, µs", "after, µs", "change", ""]), _line(["---"] * 7)]
    for cell, rows in cells(new).items():
        for row in rows:
            was = before.get((cell, row["variant"]))
            if was is None or not row["seconds"]:
                continue
            change = row["median_s"] / was["median_s"] - 1
            noise = max(0.03, _noise(row) + _noise(was))
            verdict = "slower" if change > noise else "faster" if change < -noise else ""
            cost = [_digits(was["us_per_step"]), _digits(row["us_per_step"]), f"{change:+.1%}"]
            lines.append(_line([cell[0], f"{cell[2]:,}", row["variant"], *cost, verdict]))
    if len(lines) == 2:
        return "The two files have no timed cell in common.\n"
    if changed:
        lines += ["", f"The two differ in their settings: {', '.join(changed)}."]
    return "\n".join(lines) + "\n"


def drawn(contents: list[dict]) -> list[dict]:
    """The timed rows, one of each variant, column and B.

    Of several the last is taken, but none that was cut or failed on the way where another was timed to its end.
    """
    chosen: dict[tuple, dict] = {}
    for row in (row for content in contents for row in content["rows"] if row["seconds"]):
        key = (row["variant"], row["column"], row["num_envs"])
        if row["status"] == "ok" or key not in chosen or chosen[key]["status"] != "ok":
            chosen[key] = row
    return list(chosen.values())


def pyplot_to_files():
    """matplotlib.pyplot, drawing without a screen.

    Raises:
        UsageError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError:
        raise UsageError("plots need matplotlib: pip install -e '.[plot]' -c constraints.txt") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.rcParams["svg.hashsalt"] = "rlgraph"  # names inside an SVG: the same at every drawing
    return pyplot


def save(figure, path: Path | str) -> None:
    """Write a picture, named by its ending. The same figure makes the same SVG: it holds no date."""
    figure.savefig(path, dpi=130, metadata={"Date": None} if str(path).endswith(".svg") else None)


def dress(axis, x: str, y: str) -> None:
    """What every plot of lines has: names of the axes, a faint grid, a legend."""
    axis.set_xlabel(x)
    axis.set_ylabel(y)
    axis.grid(True, which="major", alpha=0.3)
    axis.legend(fontsize=8)


def plot(contents: list[dict], folder: Path) -> list[Path]:
    """Throughput against B (log-log, one line a variant) and µs a step as bars, as SVG and PNG. Returns the paths.

    Where several files have the same cell, see `drawn`.

    Raises:
        UsageError: matplotlib is not installed, nothing was timed, or the files are of different agents.
    """
    pyplot = pyplot_to_files()
    if len({content["settings"].get("agent", "ppo") for content in contents}) > 1:
        raise UsageError("these files are of different agents, which would make one line of two: draw them apart")
    timed = drawn(contents)
    if not timed:
        raise UsageError("nothing was timed in these files, so there is nothing to plot")
    folder.mkdir(parents=True, exist_ok=True)
    written, variants = [], list(dict.fromkeys(r["variant"] for r in timed))
    for name, draw in (("throughput", _draw_throughput), ("step-time", _draw_step_time)):
        columns = [c for c in COLUMNS if any(r["column"] == c for r in timed)]
        figure, axes = pyplot.subplots(1, len(columns), figsize=(6.2 * len(columns), 5), squeeze=False)
        for axis, column in zip(axes[0], columns, strict=True):
            draw(axis, [r for r in timed if r["column"] == column], variants)
            axis.set_title(COLUMNS[column], fontsize=10)
        figure.suptitle(f"{timed[0]['env']}, T = {timed[0]['num_steps']}, {contents[0]['provenance']['device']}")
        figure.tight_layout()
        for suffix in ("svg", "png"):
            written.append(folder / f"{name}.{suffix}")
            save(figure, written[-1])
        pyplot.close(figure)
    return written


def _draw_throughput(axis, rows: list[dict], variants: list[str]) -> None:
    for i, variant in enumerate(variants):  # a variant looks the same in every column
        mine = sorted({r["num_envs"]: r["steps_per_second"] for r in rows if r["variant"] == variant}.items())
        if mine:
            look = {"color": f"C{i % 10}", "marker": "osD^vPX*"[i % 8], "linestyle": ("-", "--")[i // 10 % 2]}
            axis.loglog(*zip(*mine, strict=True), label=variant, linewidth=1.3, markersize=5, **look)
    dress(axis, "environments B", "environment steps a second")


def _draw_step_time(axis, rows: list[dict], variants: list[str]) -> None:
    # The size that most variants were timed at; of those, the largest.
    sizes = [r["num_envs"] for r in rows]  # of `drawn`: each variant once at each size
    size = max(set(sizes), key=lambda B: (sizes.count(B), B))
    bars = sorted({r["variant"]: r["us_per_step"] for r in rows if r["num_envs"] == size}.items(), key=lambda x: -x[1])
    names, values = zip(*bars, strict=True)
    axis.barh(names, values, color=["#35588f" if n.startswith(("torch", "jax")) else "#999999" for n in names])
    axis.set_xscale("log")
    axis.set_xlabel(f"µs a step of B = {size:,} environments (log scale)")
    for i, value in enumerate(values):
        axis.text(value, i, f" {_digits(value)}", va="center", fontsize=8)
    axis.margins(x=0.15)


def report(files: list[str], out: str) -> str:
    """Markdown for every file, a comparison of the first two, and plots of all in `out`."""
    contents = [read(Path(file)) for file in files]
    parts = [f"## {file}\n\n{markdown(content)}" for file, content in zip(files, contents, strict=True)]
    if len(contents) == 2:
        parts.append(f"## {files[1]} against {files[0]}\n\n{compare(*contents)}")
    if out:
        parts.append("\n".join(f"![]({path})" for path in plot(contents, Path(out)) if path.suffix == ".svg"))
    return "\n".join(parts)


def _noise(row: dict) -> float:
    return (row["max_s"] - row["min_s"]) / row["median_s"] / 2


def _digits(x: float) -> str:
    """Three significant digits, never in exponent form."""
    return f"{x:,.0f}" if x >= 100 else f"{x:.3g}"


def _line(parts: list[str]) -> str:
    return "| " + " | ".join(part.replace("|", "\\|") for part in parts) + " |"
