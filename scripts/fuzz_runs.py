"""Damaged run folders: a copy of a small run, with one or two files changed, to be evaluated or gone on with."""

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
from fuzz_environments import Definition
from fuzz_oracle import EITHER, HARMLESS, NOTICED, REFUSED, Case, worst
from safetensors import safe_open
from safetensors.numpy import save

from rlgraph.runs.arrays_file import _checksum

OPTIONS = {
    "ppo": ["ppo", "--num-minibatches", "2"],
    "dqn": ["dqn", "--learning-starts", "8", "--replay-capacity", "64", "--minibatch-size", "4", "--num-updates", "1"],
    "mine": ["ppo", "--env", "env.py", "--num-minibatches", "2"],  # on an environment's file
}
SHARED = ["--total-steps", "64", "--num-envs", "2", "--num-steps", "4", "--eval-episodes", "1", "--hidden", "8"]
LAST, STEP = 64, 8  # steps in all, and of an iteration


class Bases:
    """Whole runs, to be copied and not changed.

    Args:
        folder: where they are made.
        command: (argv, folder to run in) runs one `rlgraph` command.
    """

    def __init__(self, folder: Path, command: Callable[[list[str], Path], None]):
        self.folder, self.command = folder, command

    def make(self) -> None:
        for name, backend in (("ppo", "torch"), ("dqn", "jax")):
            self._train(name, backend, self.folder, f"{name}-{backend}")

    def _train(self, name: str, backend: str, folder: Path, run: str) -> None:
        words = ["--backend", backend, "--checkpoint-seconds", "0", "--device", "cpu", "--run-dir", run]
        self.command(["train", *OPTIONS[name], *SHARED, *words], folder)

    def run(self, name: str, backend: str) -> Path:
        return self.folder / f"{name}-{backend}"

    def copy(self, name: str, backend: str, folder: Path, unfinished: bool) -> Path:
        """A run as `run` in a folder; `unfinished`: as if it had been killed after its last but one iteration."""
        run = folder / "run"
        if name == "mine":  # its checkpoints know the path of the environment's file
            Definition("torch", box=False).write(folder)
            self._train(name, backend, folder, "run")
        else:
            shutil.copytree(self.run(name, backend), run)
        if unfinished:
            for path in ("result.json", "policy.safetensors", checkpoint(LAST)):
                (run / path).unlink()
        return run


def checkpoint(steps: int) -> str:
    return f"checkpoints/{steps:012d}.safetensors"


# ---- what is done with a run, and which files that is about

EVAL, EVAL_LAST, RESUME, SHOW = "eval", "eval --checkpoint last", "resume", "resume a finished one"
COMMANDS = {
    EVAL: ("eval", "run", "--episodes", "2", "--device", "cpu"),
    EVAL_LAST: ("eval", "run", "--episodes", "2", "--device", "cpu", "--checkpoint", "last"),
    RESUME: ("train", "--resume", "run"),
    SHOW: ("train", "--resume", "run"),
}
READ = {  # and cannot do without
    EVAL: {"config.json", "policy.safetensors"},
    EVAL_LAST: {"config.json", checkpoint(LAST)},
    RESUME: {"config.json", checkpoint(LAST - STEP)},
    SHOW: {"config.json", "result.json"},
}


class Run:
    """A copy of a run that is being damaged."""

    def __init__(self, folder: Path, use: str, draw: random.Random):
        self.folder, self.use, self.draw = folder, use, draw
        self.checks: list[Callable[[], str | None]] = [self._nothing_lost(name) for name in KEPT]

    @property
    def newest(self) -> str:
        return checkpoint(LAST - STEP if self.use == RESUME else LAST)

    def files(self) -> list[str]:
        paths = (path for path in self.folder.rglob("*") if path.is_file())
        return sorted(str(path.relative_to(self.folder)) for path in paths)

    def _nothing_lost(self, name: str) -> Callable[[], str | None]:
        was_there = os.path.lexists(self.folder / name)
        return lambda: f"{name} is gone" if was_there and not os.path.lexists(self.folder / name) else None

    def check(self) -> str | None:
        return next((found for check in self.checks if (found := check())), None)


KEPT = ("metrics.jsonl", "policy.safetensors", "result.json", "config.json")
Made = tuple[str, str]  # what was done, and the verdict


def of_file(run: Run, name: str) -> str:
    """The verdict on a file that is beyond use."""
    if name == run.newest and run.use in (EVAL_LAST, RESUME):
        return NOTICED  # an older one will do
    return REFUSED if name in READ[run.use] else EITHER


# ---- any file

NO_JSON = [b"", b"{", b"not json", b"\xff\xfe{}", b'{"agent": ', b"\0" * 100, b"<html>", b"'x'"]
OTHER_JSON = [
    b"[]",
    b"3",
    b"null",
    b"true",
    b'"text"',
    b"{}",
    b"[{}]",
    b"NaN",
    b"1e400",
    b'{"agent": 1}',
    b'{"": {}}',
    b"[1, 2",
]
OTHER_JSON += [
    b"[" * 100_000,
    b'{"a":' * 100_000,
    b"9" * 5000,
    b'{"agent": "ppo", "env": []}',
    b"-Infinity",
    b'"\\ud800"',
]


def content(run: Run) -> Made:
    """A file whose bytes are others."""
    name = run.draw.choice([*run.files(), *READ[run.use], *READ[run.use]])
    path = run.folder / name
    whole = path.read_bytes()
    kind = run.draw.choice(
        ["truncated", "empty", "garbage", "text", "zeros", "longer", "a flipped bit", "another file"]
    )
    place = run.draw.randrange(len(whole)) if whole else 0
    if kind == "another file":
        path.write_bytes(
            (run.folder / run.draw.choice([n for n in run.files() if n not in (name, "lock")])).read_bytes()
        )
    elif kind == "a flipped bit" and whole:
        flipped = bytearray(whole)
        flipped[place] ^= 1 << run.draw.randrange(8)
        path.write_bytes(bytes(flipped))
    else:
        garbage = bytes(run.draw.randrange(256) for _ in range(1000))
        contents = {
            "truncated": whole[:place],
            "garbage": garbage,
            "text": b"not what it was\n",
            "zeros": b"\0" * len(whole),
        }
        path.write_bytes(contents.get(kind, whole + b"\0" if kind == "longer" else b""))
    if kind in ("a flipped bit", "longer", "truncated"):  # of a text, perhaps without a meaning
        verdict = of_file(run, name) if name.endswith(".safetensors") and place >= 8 + header_bytes(whole) else EITHER
    else:
        verdict = EITHER if name == "checkpoints" else of_file(run, name)
    return f"{name}: {kind}", verdict


def header_bytes(whole: bytes) -> int:
    return int.from_bytes(whole[:8], "little")


def other_json(run: Run) -> Made:
    names = ["config.json", "config.json", "result.json", "versions.json", "metrics.jsonl"]
    name = run.draw.choice([name for name in names if (run.folder / name).exists()])
    text = run.draw.choice(NO_JSON + OTHER_JSON + OTHER_JSON)
    (run.folder / name).write_bytes(text)
    return f"{name}: {text[:40]!r}", of_file(run, name)


def other_thing(run: Run) -> Made:
    """Something else in place of a file, or of the folder of checkpoints."""
    name = run.draw.choice([*run.files(), *READ[run.use], *READ[run.use], "checkpoints", "metrics.jsonl"])
    path = run.folder / name
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    kind = run.draw.choice(["directory", "full directory", "FIFO", "loop", "null", "nothing", "dangling link"])
    if kind.endswith("directory"):
        path.mkdir()
        if kind == "full directory":
            (path / "x").write_text("x")
    elif kind == "FIFO":
        os.mkfifo(path)
    elif kind != "nothing":
        path.symlink_to({"loop": path.name, "null": "/dev/null", "dangling link": "nowhere"}[kind])
    run.checks = [check for check, kept in zip(run.checks, KEPT) if kept != name]
    if name == "checkpoints":
        unreadable = run.use in (EVAL_LAST, RESUME) and kind in ("FIFO", "loop", "null")
        return f"{name}: {kind}", REFUSED if unreadable or run.use == EVAL_LAST else EITHER
    if name == "metrics.jsonl" and run.use == RESUME and kind in ("directory", "full directory", "FIFO", "loop"):
        return f"{name}: {kind}", REFUSED
    if kind == "nothing" and name in (run.newest, "result.json"):
        return f"{name}: {kind}", HARMLESS
    return f"{name}: {kind}", of_file(run, name) if name != "result.json" else EITHER


# ---- config.json

WRONG_SETTINGS = {
    "hidden": [[16], "8", [8.5], [], [True], 8, [[8]], [10**25], None, [8, 8]],
    "env": ["Acrobot-v1", 5, None, [], "missing.py", "/dev/null", "", "a\nb.py", "x" * 5000, {}],
    "agent": ["pqn", "x", 5, None, [], "", {}],
    "gamma": ["0.99", None, True, float("inf"), float("nan"), -1, [0.99], 10**400],
    "seed": [1.5, "0", -1, 10**25, True, None, [0]],
    "num_envs": [True, "2", 0, 10**25, 2.0, None],
    "total_steps": [10**25, "64", -5, None, []],
    "anneal_lr": [1, "yes", None, 0.0],
    "backend": ["numpy", 5, None, ["torch"]],
    "run_dir": [5, None, ["x"]],
    "keep_checkpoints": ["3", 0, None, 1.5],
    "checkpoint_seconds": ["0", -1, None, float("nan")],
    "activation": ["gelu", 5, None, "silu"],
    "foreign": [1, None, "x"],
}
# Evaluation may do without these; to go on, or to be compared, they must be what they were.
CHANGED_SETTINGS = {"gamma": 0.5, "seed": 7, "mode": "eager", "eval_episodes": 3, "learning_rate": 1e-4, "num_envs": 4}
CHANGED_SETTINGS |= {
    "device": "auto",
    "total_steps": 128,
    "keep_checkpoints": 7,
    "anneal_lr": False,
    "run_dir": "elsewhere",
}


def edit(path: Path, **changes) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes, indent=2) + "\n")


def settings(run: Run) -> Made:
    path = run.folder / "config.json"
    kind = run.draw.choice(["wrong", "wrong", "changed", "missing", "twice"])
    if kind == "wrong":
        name = run.draw.choice([*WRONG_SETTINGS])
        value = run.draw.choice(WRONG_SETTINGS[name])
        edit(path, **{name: value})
        other = name in ("hidden", "env", "agent", "activation") and run.use == SHOW  # of a run that is not looked at
        return f"config.json: {name} = {str(value)[:40]}", EITHER if other else REFUSED
    if kind == "changed":
        name = run.draw.choice([*CHANGED_SETTINGS])
        edit(path, **{name: CHANGED_SETTINGS[name]})
        return f"config.json: {name} changed", REFUSED if run.use == RESUME else EITHER
    fields = json.loads(path.read_text())
    name = run.draw.choice([*fields])
    if kind == "missing":
        del fields[name]
        path.write_text(json.dumps(fields))
        return f"config.json: no {name}", REFUSED if name in ("env", "agent") else EITHER
    path.write_text(path.read_text().replace("{", '{"gamma": 0.5,', 1))
    return "config.json: gamma twice", EITHER


# ---- checkpoints and policies that are whole, and wrong

HEADER_VALUES = ["x", None, [], {}, -1, 1.5, float("nan"), 10**25, True, "[" * 50_000]
IDENTITY = ("layout", "rlgraph", "agent", "environment", "config")
PROGRESS = ("iterations", "steps", "seconds", "train_seconds", "timed_iterations")


def read(path: Path) -> tuple[dict[str, str], dict[str, np.ndarray]]:
    """The metadata and arrays of a safetensors file."""
    with safe_open(path, "numpy") as file:
        return file.metadata() or {}, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def write(path: Path, metadata: dict[str, str], arrays: dict[str, np.ndarray]) -> None:
    """With the checksum that belongs to the content, where there was one."""
    if "crc32" in metadata:
        metadata = {name: text for name, text in metadata.items() if name != "crc32"}
        metadata["crc32"] = str(_checksum(metadata, arrays))
    path.write_bytes(save(arrays, metadata or None))


def header(run: Run) -> Made:
    path = run.folder / run.newest
    metadata, arrays = read(path)
    name = run.draw.choice([*IDENTITY, *PROGRESS, *PROGRESS, "score"])
    value = run.draw.choice(HEADER_VALUES)
    if run.draw.random() < 0.2:
        del metadata[name]
        value = "missing"
    else:  # 50,000 brackets are no text, but what a text may hold
        metadata[name] = value if str(value).startswith("[[") else json.dumps(value)
    write(path, metadata, arrays)
    sound = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 10**20
    lax = name == "score" or (name in PROGRESS and (sound or run.use != RESUME))
    used = run.use in (EVAL_LAST, RESUME)
    return f"{run.newest}: {name} = {str(value)[:40]}", NOTICED if used and not lax else EITHER


def arrays_changed(run: Run, arrays: dict[str, np.ndarray], prefix: str) -> str:
    """Change one of the arrays that hold floats."""
    names = [n for n, a in arrays.items() if n.startswith(prefix) and a.dtype.kind == "f" and a.size and a.ndim]
    name = run.draw.choice(names)
    array = arrays.pop(name)
    kind = run.draw.choice(["NaN", "inf", "shape", "dtype", "removed", "renamed", "added", "integer"])
    if kind in ("NaN", "inf"):
        array = array.copy()
        array.flat[run.draw.randrange(array.size)] = float(kind)
    changed = {
        "shape": {name: np.concatenate([array, array])},
        "dtype": {name: array.astype(np.float64)},
        "integer": {name: np.zeros_like(array, dtype=np.int32)},
        "removed": {},
        "renamed": {name + "x": array},
        "added": {name: array, name + "x": array},
    }
    arrays |= changed.get(kind, {name: array})
    return f"{name} {kind}"


def checkpoint_arrays(run: Run) -> Made:
    path = run.folder / run.newest
    metadata, arrays = read(path)
    prefix = run.draw.choice(["state/", "policy/"])
    changed = arrays_changed(run, arrays, prefix)
    write(path, metadata, arrays)
    used = run.use == (RESUME if prefix == "state/" else EVAL_LAST)
    return f"{run.newest}: {changed}", NOTICED if used else EITHER


def policy_arrays(run: Run) -> Made:
    path = run.folder / "policy.safetensors"
    if not path.exists():
        return checkpoint_arrays(run)
    metadata, arrays = read(path)
    changed = arrays_changed(run, arrays, "")
    path.write_bytes(save(arrays, metadata or None))
    return f"policy.safetensors: {changed}", of_file(run, "policy.safetensors")


# ---- what belongs to nobody here

FOREIGN = [
    "notes.txt",
    ".DS_Store",
    "metrics (copy).jsonl",
    "config.json.bak",
    "events.out.tfevents.1700000000.host.1.0",
]
FOREIGN += [
    "events.out.tfevents.backup",
    "events.out.tfevents.",
    "events.out.tfevents.-5",
    "plots/loss.png",
    "config.json~",
]
FOREIGN += ["checkpoints/notes.txt", "checkpoints/.DS_Store", "checkpoints/best.safetensors", "policy.safetensors.old"]
FOREIGN += [f"checkpoints/{64:012d} (copy).safetensors", "checkpoints/1.safetensors", "events.out.tfevents.٣"]
FOREIGN += ["checkpoints/old/x.safetensors", "events.out.tfevents.000099.v2", "\udcff", "a\nb"]


def foreign_file(run: Run) -> Made:
    name = run.draw.choice(FOREIGN)
    path = run.folder / name
    path.parent.mkdir(exist_ok=True)
    data = bytes(run.draw.randrange(256) for _ in range(100))
    path.write_bytes(data)
    run.checks.append(lambda: None if path.is_file() and path.read_bytes() == data else f"{name} was changed")
    return f"a foreign file {name}", HARMLESS


def foreign_folder(run: Run) -> Made:
    name = run.draw.choice(["events.out.tfevents.000000.d", "events.out.tfevents.7", "plots", "checkpoints/old"])
    (run.folder / name).mkdir()
    if run.draw.random() < 0.3:
        os.mkfifo(run.folder / name / "pipe")
    return f"a foreign folder {name}", HARMLESS


# ---- metrics.jsonl

ROWS = [
    "[]",
    "3",
    "null",
    '"x"',
    "{}",
    '{"step": "x"}',
    '{"step": null}',
    '{"step": [1]}',
    '{"step": true}',
    "{",
    "\0\0",
    "é",
]
ROWS += [
    '{"step": 1e400}',
    '{"step": NaN}',
    '{"step": -1}',
    "[" * 50_000,
    '{"step": ' + "9" * 5000 + "}",
    "",
    '{"steps": 8}',
]


def metrics_row(run: Run) -> Made:
    """One row is damaged; a run that goes on keeps the others."""
    path = run.folder / "metrics.jsonl"
    rows = path.read_text().splitlines()
    place = run.draw.randrange(len(rows))
    damaged = json.loads(rows[place])["step"]
    rows[place] = (
        rows[place][: run.draw.randrange(len(rows[place]))] if run.draw.random() < 0.3 else run.draw.choice(ROWS)
    )
    path.write_text("\n".join(rows) + "\n")
    if run.use == RESUME:
        run.checks.append(lambda: _lost_rows(run.folder, damaged))
    return f"metrics.jsonl: row {place} {rows[place][:30]!r}", HARMLESS


def _lost_rows(folder: Path, damaged: int) -> str | None:
    if not (folder / "result.json").is_file():
        return None  # not gone on with
    found = set()
    for line in (folder / "metrics.jsonl").read_bytes().splitlines():
        try:
            found.add(json.loads(line)["step"])
        except (ValueError, TypeError, KeyError, RecursionError):
            continue
    lost = set(range(STEP, LAST + 1, STEP)) - {damaged} - found
    return f"rows of metrics.jsonl lost: {sorted(lost)}" if lost else None


def metrics_torn(run: Run) -> Made:
    path = run.folder / "metrics.jsonl"
    kind = run.draw.choice(["torn", "torn", "begun", "CRLF", "trailing blanks"])
    whole = path.read_bytes()
    torn = {
        "torn": whole[: -run.draw.randrange(1, 30)],
        "begun": whole + b'{"step": 9',
        "CRLF": whole.replace(b"\n", b"\r\n"),
    }
    path.write_bytes(torn.get(kind, whole + b"\n\n  \n"))
    return f"metrics.jsonl: {kind}", HARMLESS


# ---- the environment's file

PRINT_MARK = "import pathlib\npathlib.Path({!r}).write_text('')\n"


def environment(run: Run) -> Made:
    """Another one than the run was trained on must not be played, and not even be imported."""
    mark = run.folder.parent / "imported"
    run.checks.append(lambda: "ran the code of another file" if mark.exists() else None)
    run_code = PRINT_MARK.format(str(mark))
    path = run.folder.parent / "env.py"
    if run.draw.random() < 0.2 or not path.exists():
        (run.folder.parent / "evil.py").write_text(run_code)
        edit(run.folder / "config.json", env=str(run.folder.parent / "evil.py"))
        return "config.json: env is another file", EITHER if run.use == SHOW else REFUSED
    kind = run.draw.choice(
        ["comment", "dynamics", "code", "gone", "directory", "FIFO", "no UTF-8", "newer", "loop", "spaces"]
    )
    text = path.read_text()
    if kind in ("gone", "directory", "FIFO", "loop"):
        path.unlink()
        {"gone": str, "directory": os.mkdir, "FIFO": os.mkfifo, "loop": lambda p: p.symlink_to("env.py")}[kind](path)
    elif kind == "newer":
        os.utime(path, (1, 1))
    elif kind == "no UTF-8":
        path.write_bytes(text.encode() + b"# \xff\n")
    else:
        texts = {"comment": text + "# more\n", "dynamics": text.replace("0.9", "0.8"), "code": run_code + text}
        path.write_text(texts.get(kind, text + "\n"))
    return f"env.py: {kind}", HARMLESS if kind == "newer" else EITHER if run.use == SHOW else REFUSED


DAMAGES = [
    content,
    other_json,
    header,
    other_thing,
    settings,
    environment,
    policy_arrays,
    foreign_file,
    checkpoint_arrays,
    metrics_row,
    content,
    other_thing,
    settings,
    header,
    metrics_torn,
    other_json,
    foreign_folder,
]


# ---- cases


def case(i: int, draw: random.Random, folder: Path, bases: Bases) -> Case:
    damage, use = DAMAGES[i % len(DAMAGES)], draw.choice([EVAL, EVAL, EVAL_LAST, RESUME, RESUME, RESUME, SHOW])
    if damage in (metrics_row, metrics_torn, foreign_file) and draw.random() < 0.7:
        use = RESUME
    if damage is policy_arrays:
        use = EVAL
    if damage in (header, checkpoint_arrays):
        use = draw.choice([EVAL_LAST, RESUME])
    name, backend = ("dqn", "jax") if draw.random() < 0.25 else ("ppo", "torch")
    if damage is environment and draw.random() < 0.8:
        name, backend = "mine", "torch"
    damages = [damage]
    if damage in (settings, environment, other_json, metrics_row, metrics_torn) and draw.random() < 0.3:
        damages.insert(0, draw.choice([header, checkpoint_arrays, foreign_folder]))
    run = Run(bases.copy(name, backend, folder, unfinished=use == RESUME), use, draw)
    made = [damage(run) for damage in damages]
    kind = f"{use}, {' + '.join(kind for kind, _ in made)} ({name} {backend})"
    return Case(kind, COMMANDS[use], worst(v for _, v in made), after=run.check)
