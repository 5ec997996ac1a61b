"""Give `rlgraph` generated input of three kinds, right and wrong, and see whether it always does what it must.

    python scripts/fuzz.py commands --cases 300        # command lines
    python scripts/fuzz.py environments --cases 100    # environment files
    python scripts/fuzz.py runs --cases 100            # damaged run folders

No traceback, no hang, no silent acceptance: what it must do is in fuzz_oracle.py. A case depends on the seed and on its
number alone; `--only 17` runs one again. The folders of those that fail are kept.
"""

import argparse
import concurrent.futures
import json
import random
import shlex
import shutil
import signal
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import fuzz_commands
import fuzz_environments
import fuzz_runs
from fork_server import Command, Server
from fuzz_oracle import Case, Outcome, contents, problems
from rich.progress import track

from rlgraph.bench.results import count

MAKERS = {"commands": fuzz_commands.case, "environments": fuzz_environments.case, "runs": fuzz_runs.case}


@dataclass(frozen=True)
class Tried:
    number: int
    case: Case
    outcome: Outcome
    problems: list[str]
    folder: Path  # where it ran; gone if nothing is wrong


def attempt(server: Server, case: Case, folder: Path, timeout: float) -> Outcome:
    """Run a case in the folder's `files`."""
    files = folder / "files"
    before = contents(files)
    out, err = (chosen or str(folder / name) for chosen, name in ((case.out, "stdout"), (case.err, "stderr")))
    interrupt = {} if case.interrupt_after is None else {"signal": signal.SIGINT, "after": case.interrupt_after}
    command = Command(case.argv, str(files), out, err, imports=case.imports, **interrupt)
    ended = server.run(command, timeout)
    said = [
        path.read_text(errors="replace") if (path := folder / name).exists() else "" for name in ("stdout", "stderr")
    ]
    return Outcome(ended.code, ended.hung, *said, before, contents(files))


def keep(tried: Tried) -> None:
    """Write beside a failed case's files what was run and what is wrong."""
    case, outcome = tried.case, tried.outcome
    streams = "".join(f" {n}>{'&-' if s == 'closed' else s}" for n, s in ((1, case.out), (2, case.err)) if s)
    facts = {
        "problems": tried.problems,
        "kind": case.kind,
        "verdict": case.verdict,
        "argv": case.argv,
        "command": f"cd {tried.folder / 'files'} && rlgraph {shlex.join(case.argv)}{streams}",
        "interrupt_after": case.interrupt_after,
        "code": outcome.code,
        "stderr": outcome.stderr,
    }
    (tried.folder / "case.json").write_text(json.dumps(facts, indent=2) + "\n")


def run_all(args: argparse.Namespace, out: Path, server: Server) -> list[Tried]:
    """Make the cases that the options ask for, and run them in folders of `out`."""

    def command(argv: list[str], folder: Path) -> None:
        said = str(folder / "stderr")
        ended = server.run(Command(tuple(argv), str(folder), "/dev/null", said), 300)
        if ended.code:
            raise SystemExit(f"fuzz: `rlgraph {shlex.join(argv)}` fails: {Path(said).read_text().strip()}")

    def one(number: int) -> Tried:
        folder = out / f"{args.kind}-{args.seed}-{number:03d}"
        (folder / "files").mkdir(parents=True)
        case = MAKERS[args.kind](number, random.Random(f"{args.kind} {args.seed} {number}"), folder / "files", bases)
        outcome = attempt(server, case, folder, args.timeout)
        tried = Tried(number, case, outcome, problems(case, outcome, folder / "files"), folder)
        if tried.problems:
            keep(tried)
        else:
            shutil.rmtree(folder)
        return tried

    (out / "bases").mkdir(parents=True)
    bases = fuzz_runs.Bases(out / "bases", command)
    bases.make()
    numbers = range(args.cases) if args.only is None else [args.only]
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        tried = list(track(pool.map(one, numbers), total=len(numbers), description=args.kind))
    shutil.rmtree(out / "bases")
    return tried


def report(kind: str, tried: list[Tried]) -> int:
    """Returns the exit code: 1 if a case failed."""
    failed = [t for t in tried if t.problems]
    for t in failed:
        print(f"{t.folder.name}: {'; '.join(t.problems)}: {t.case.kind!a:.100}\n  see {t.folder}/case.json")
    for problem, number in Counter(p.split(":")[0] for t in failed for p in t.problems).most_common():
        print(f"{number:4d} {problem}")
    verdicts = Counter(t.case.verdict for t in tried)
    of = ", ".join(f"{number} {verdict}" for verdict, number in sorted(verdicts.items()))
    print(f"{kind}: {len(tried)} cases ({of}), {len(tried) - len(failed)} as they must be, {len(failed)} failed")
    return int(bool(failed))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("kind", choices=MAKERS)
    parser.add_argument("--cases", type=count, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="this case alone")
    parser.add_argument("--jobs", type=count, default=2, help="cases side by side")
    parser.add_argument("--timeout", type=float, default=60, help="seconds, after which a case hangs")
    parser.add_argument("--out", help="folder for the cases that fail; it must be new or empty")
    args = parser.parse_args()
    out = Path(args.out).resolve() if args.out else Path(tempfile.mkdtemp(prefix="rlgraph-fuzz-"))
    if out.exists() and any(out.iterdir()):
        parser.error(f"{str(out)!r} is not empty: name another folder")
    with tempfile.TemporaryDirectory() as cache:
        server = Server(Path(cache))
        tried = run_all(args, out, server)
        server.close()
    if not any(out.iterdir()):
        out.rmdir()
    return report(args.kind, tried)


if __name__ == "__main__":
    sys.exit(main())
