"""The `rlgraph` command: exit codes, streams and Ctrl-C. What each command does is imported when it is asked for."""

import _thread
import io
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Sequence

from rlgraph.agents import AGENTS
from rlgraph.errors import (
    INTERRUPTED,
    CaptureError,
    GraphError,
    HelpPrinted,
    NonFiniteError,
    OutOfMemoryError,
    UsageError,
    is_out_of_memory,
    unknown,
)
from rlgraph.files import say

USAGE = """usage: rlgraph COMMAND ...

  rlgraph train AGENT [--env ID] [options]   train an agent ({agents}) and save the run
  rlgraph train --resume RUN                 go on with a run that was killed or interrupted
  rlgraph eval RUN [options]                 play a saved run's policy greedily
  rlgraph envs                               list the environments
  rlgraph bench [options]                    time every way of stepping on this machine
  rlgraph bench solve [AGENT] [options]      time training until the environment is solved
  rlgraph bench report FILE... [options]     tables, plots and comparisons of such timings
  rlgraph graph show [options]               what an iteration's CUDA graph holds, in words and as a picture

Each command explains its options with --help."""


def main(argv: list[str] | None = None) -> int:
    """Run the command line, of this process if `argv` is None.

    Returns:
        The exit code: 0, 2 for wrong usage, 1 for a failed run or for output that cannot be written, 130 after Ctrl-C.
        A stream that the caller has closed is taken for /dev/null: the code is that of the work.
    """
    _open_closed_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # not every terminal can show a frame or ±
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *where: say(str(message))
        code = _run_program() if argv is None else _run(argv)
    lost = [_thrown_away(stream) for stream in (sys.stdout, sys.stderr)]
    return code or int(any(lost))


def _run_program() -> int:
    """Run the command line of this process, which Ctrl-C ends whatever becomes of it."""
    pressed = []

    def interrupt(signum, frame):
        pressed.append(signum)
        raise KeyboardInterrupt

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not where the shell has Ctrl-C ignored
        signal.signal(signal.SIGINT, interrupt)
    sys.unraisablehook = _interrupt_again
    return _run(sys.argv[1:], pressed, end=_end_at_once)


def _end_at_once(code: int) -> None:
    """Without Python's own clearing up, which fails where Ctrl-C left torch or JAX loaded by half."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # another one has nothing to interrupt
    for stream in (sys.stdout, sys.stderr):
        _thrown_away(stream)
    os._exit(code)


def _run(words: list[str], pressed: Sequence[int] = (), end: Callable[[int], None] = lambda code: None) -> int:
    """Run a command; whatever ends it is said in a line. Returns the exit code.

    Args:
        words: of the command line.
        pressed: signals of Ctrl-C: a library that is interrupted while it loads may raise anything.
        end: called with the exit code after Ctrl-C, while all that was loaded is still there.
    """
    try:
        code = _dispatch(words)
        sys.stdout.flush()  # here, where a failure to write is still caught
    except BaseException as error:
        interrupt = error if isinstance(error, KeyboardInterrupt) or not pressed else KeyboardInterrupt()
        code = _code_of(interrupt)
        if isinstance(interrupt, KeyboardInterrupt):
            end(code)
    return code


def _code_of(error: BaseException) -> int:
    """Say in a line what ended a command, and give the exit code. What no user can have caused is raised again."""
    match error:
        case UsageError():
            return _complain(str(error), 2)
        case CaptureError() | GraphError() | NonFiniteError() | OutOfMemoryError():
            return _complain(str(error), 1)
        case BrokenPipeError():  # the reader, such as `| head`, has what it wanted
            return 1
        case OSError():
            where = error.filename or "stdout or a file"
            return _complain(f"cannot write or read {where}: {error.strerror or error}", 1)
        case SystemExit(code=1):  # how rich ends where the reader has left
            return 1
        case SystemExit():  # none of rlgraph's own
            return _complain(f"an environment's or other imported code called sys.exit({error.code!r})", 1)
        case KeyboardInterrupt():
            return _complain(str(error) or "interrupted", INTERRUPTED)
    if is_out_of_memory(error):
        return _complain("out of memory", 1)
    raise error


def _complain(message: str, code: int) -> int:
    say(message)
    return code


def _interrupt_again(lost) -> None:
    """Ctrl-C that falls into a destructor, or into what JAX does at a garbage collection, is lost there: repeat it."""
    if issubclass(lost.exc_type, KeyboardInterrupt):
        threading.Timer(0.01, _thread.interrupt_main).start()
    else:
        sys.__unraisablehook__(lost)


def _open_closed_streams() -> None:
    """Put /dev/null where stdin, stdout or stderr is closed.

    Else the next file that is opened, a checkpoint perhaps, gets its number, and what is printed goes into the file.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest number that is free: this one
    sys.stdout = sys.stdout or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - open as long as the process
    sys.stderr = sys.stderr or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115


def _thrown_away(stream) -> bool:
    """Write what is left for a stream. Whether that cannot be done: it goes then, or Python would fail over it."""
    try:
        stream.flush()
    except OSError:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)
        return True
    return False


def _dispatch(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        return _print_usage()
    if argv[0] not in COMMANDS:
        raise unknown("command", argv[0], COMMANDS)
    try:
        return COMMANDS[argv[0]](argv[1:])
    except HelpPrinted:
        return 0


def _print_usage() -> int:
    print(USAGE.format(agents=", ".join(AGENTS)))
    return 0


def _train(argv: list[str]) -> int:
    if argv and argv[0] in ("-h", "--help"):
        return _print_usage()
    from rlgraph.cli.commands import train_command

    return train_command(argv)


def _eval(argv: list[str]) -> int:
    from rlgraph.cli.commands import eval_command

    return eval_command(argv)


def _envs(argv: list[str]) -> int:
    from rlgraph.cli.commands import envs_command

    return envs_command(argv)


def _bench(argv: list[str]) -> int:
    from rlgraph.bench import cli  # loads torch, jax and the plots' table

    return cli.main(argv)


def _graph(argv: list[str]) -> int:
    from rlgraph.cli import graph_show  # loads torch

    return graph_show.main(argv)


COMMANDS = {"train": _train, "eval": _eval, "envs": _envs, "bench": _bench, "graph": _graph}
