"""What `rlgraph` must keep to whatever it is given, and one case of a fuzz against it."""

import hashlib
import os
import re
import signal
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

# What is to come of a case, in order: the worst of several counts. What is to be noticed may end well with a line.
VERDICTS = HARMLESS, EITHER, NOTICED, REFUSED = "harmless", "either", "noticed", "refused"
CODES = {HARMLESS: {0}, EITHER: {0, 1, 2}, NOTICED: {0, 1, 2}, REFUSED: {1, 2}}
NO_FINITE_RETURN = re.compile(r"^.*\breturn\b.*(?<![\w-])(nan|inf)\b.*$", re.MULTILINE)
CONTROLS = re.compile(r"[\x00-\x09\x0b-\x1f\x7f]")  # not the line's end


@dataclass(frozen=True)
class Case:
    """A command, whose folder is filled, and what is to come of it."""

    kind: str  # of what is wrong, in words
    argv: tuple[str, ...]
    verdict: str  # one of VERDICTS
    out: str = ""  # "closed" or "broken", or /dev/full; by default a file
    err: str = ""
    interrupt_after: float | None = None  # seconds until Ctrl-C
    imports: bool = False  # whether it begins with its imports
    after: Callable[[], str | None] = lambda: None  # looks at the folder and says what is wrong


@dataclass(frozen=True)
class Outcome:
    code: int
    hung: bool
    stdout: str
    stderr: str
    before: dict[str, str]  # `contents` of the folder
    after: dict[str, str]


def worst(verdicts) -> str:
    return max(verdicts, key=VERDICTS.index, default=HARMLESS)


def contents(folder: Path) -> dict[str, str]:
    """What stands in a folder, a text for each name that changes with the content.

    Locks and Python's compiled files may come at any time.
    """
    found = {}
    for root, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name != "__pycache__"]
        for name in [*folders, *files]:
            path = Path(root, name)
            if name != "lock":
                found[str(path.relative_to(folder))] = _content(path)
    return found


def _content(path: Path) -> str:
    mode = path.lstat().st_mode
    if stat.S_ISREG(mode):
        return hashlib.sha256(path.read_bytes()).hexdigest()
    return f"link to {os.readlink(path)}" if stat.S_ISLNK(mode) else stat.filemode(mode)


def problems(case: Case, outcome: Outcome, folder: Path) -> list[str]:
    """What is wrong with how a command ended; nothing, if rlgraph did what it must."""
    if outcome.hung:
        return ["hang"]
    found = [*_of_code(case, outcome), *_of_words(case, outcome)]
    if outcome.code == 0:
        found += _of_result(outcome, folder)
    if outcome.code == 2 and outcome.after != outcome.before:
        changed = [n for n in outcome.after | outcome.before if outcome.after.get(n) != outcome.before.get(n)]
        found.append(f"refused, but changed {', '.join(sorted(changed)[:4])}")
    wrong = case.after()
    return found + ([wrong] if wrong else [])


def _of_code(case: Case, outcome: Outcome) -> list[str]:
    allowed = set(CODES[case.verdict])
    if case.interrupt_after is not None:
        allowed |= {130, -signal.SIGINT} if case.imports else {130}  # Python itself has not come so far
    if case.out and case.verdict == HARMLESS:  # what it says cannot be written
        allowed.add(1)
    if case.verdict == NOTICED and outcome.code == 0 and not outcome.stderr:
        return ["silent acceptance"]
    if outcome.code in allowed:
        return []
    if outcome.code == 0:
        return ["silent acceptance"]
    if outcome.code in (1, 2):
        return [f"refused with code {outcome.code}, but nothing is wrong"]
    return [f"exit code {outcome.code}"]


def _of_words(case: Case, outcome: Outcome) -> list[str]:
    if "Traceback (most recent call last)" in outcome.stderr + outcome.stdout:
        return ["traceback"]
    lines = outcome.stderr.removesuffix("\n").split("\n") if outcome.stderr else []
    if any(not line.startswith("rlgraph: ") for line in lines):
        return ["words on stderr that are no line of rlgraph's"]
    if any(CONTROLS.search(line) for line in lines):
        return ["control characters on stderr"]
    says_why = lines or case.err or (case.out and outcome.code == 1)
    return [] if outcome.code in (0, 130, -signal.SIGINT) or says_why else ["an error without a line"]


def _of_result(outcome: Outcome, folder: Path) -> list[str]:
    """Something that is not finite must not end in success."""
    found = ["a return that is not finite"] if NO_FINITE_RETURN.search(outcome.stdout) else []
    new = [n for n in outcome.after if n.endswith("policy.safetensors") and outcome.after[n] != outcome.before.get(n)]
    for name in new:
        try:
            arrays = load_file(folder / name)
        except (SafetensorError, OSError) as error:
            found.append(f"a policy that cannot be read: {error}")
            continue
        if not all(np.isfinite(array).all() for array in arrays.values()):
            found.append("a policy that is not finite")
    return found
