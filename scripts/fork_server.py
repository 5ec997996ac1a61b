"""`rlgraph` commands without their imports: a process that has imported everything runs each in a fork of its own.

A command takes a tenth of a second this way, and not five. `scripts/fuzz.py` and `scripts/kill.py` are made of it. All
runs on the CPU, and JAX compiles without polish.
"""

import contextlib
import dataclasses
import gc
import importlib
import io
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

# ---- what asks


@dataclass(frozen=True)
class Command:
    argv: tuple[str, ...]  # after `rlgraph`
    folder: str  # to run in
    out: str  # file for stdout; "closed" is `>&-`, "broken" a pipe that nobody reads
    err: str  # the same of stderr
    signal: int = 0  # sent `after` so many seconds; none by default
    after: float = 0.0
    imports: bool = False  # whether it begins with its imports, in an interpreter of its own


@dataclass(frozen=True)
class Ended:
    code: int  # minus the signal's number, if one ended it
    hung: bool
    seconds: float


class Server:
    """The process that forks, seen from here. Several threads may use it side by side.

    Args:
        cache: folder for XLA's compiled programs.
    """

    def __init__(self, cache: Path):
        quick = {
            "CUDA_VISIBLE_DEVICES": "",
            "JAX_PLATFORMS": "cpu",
            "JAX_COMPILATION_CACHE_DIR": str(cache),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
            "OMP_NUM_THREADS": "1",
        }
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # of its own end: each command has a file for what it says
            text=True,
            env=os.environ | quick,
        )
        if self._process.stdout.readline() != "ready\n":
            raise RuntimeError(f"the fork server does not start; `{sys.executable} {__file__}` says why")

    def start(self, command: Command) -> "Process":
        """Begin one command, whose `end` is to be called."""
        return Process(self, self._say(json.dumps(dataclasses.asdict(command))))

    def run(self, command: Command, timeout: float) -> "Ended":
        """Run one command to its end, or to `timeout` seconds, after which it and its children are killed."""
        began = time.perf_counter()
        process = self.start(command)
        if command.signal and not process.has_ended(command.after):
            os.kill(process.pid, command.signal)
        hung = not process.has_ended(timeout)
        if hung:
            process.kill()
        return Ended(process.end(), hung, time.perf_counter() - began)

    def _wait(self, pid: int) -> int:
        return self._say(f"wait {pid}")

    def _say(self, line: str) -> int:
        with self._lock:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
            return int(self._process.stdout.readline())

    def close(self) -> None:
        self._process.communicate(timeout=60)


class Process:
    """A command that was started."""

    def __init__(self, server: Server, pid: int):
        self.server, self.pid = server, pid
        self._descriptor = os.pidfd_open(pid)  # good until it is waited for
        self._poll = select.poll()
        self._poll.register(self._descriptor, select.POLLIN)

    def has_ended(self, within: float = 0.0) -> bool:
        """Whether it ends within so many seconds."""
        return bool(self._poll.poll(within * 1e3))

    def kill(self) -> None:
        """`kill -9`, it and its children, of which it leads the group; only itself, if it has not come so far."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        os.kill(self.pid, signal.SIGKILL)  # which does not hurt what has ended but was not waited for

    def end(self) -> int:
        """Wait for its end. Returns its exit code; minus the signal's number, if one ended it."""
        os.close(self._descriptor)
        return self.server._wait(self.pid)


# ---- what serves


def serve() -> None:
    """Each line is a Command as JSON, answered with its process, or "wait PID", answered with the exit code."""
    sys.path.pop(0)  # the folder of scripts: a command has none
    _import_everything()
    gc.collect()
    gc.freeze()  # or a child's first collection copies all that is there
    print("ready", flush=True)
    for line in sys.stdin:
        if line.startswith("wait "):
            print(os.waitstatus_to_exitcode(os.waitpid(int(line.split()[1]), 0)[1]), flush=True)
            continue
        pid = os.fork()
        if pid == 0:
            _become(json.loads(line))
        print(pid, flush=True)
    os._exit(0)


def _import_everything() -> None:
    """But no JAX backend is begun, and no thread started: neither survives a fork."""
    import rlgraph.bench.cli
    import rlgraph.cli.graph_show
    import rlgraph.cli.main
    from rlgraph.agents import AGENTS

    for agent in AGENTS.values():
        for module in (agent.config, agent.torch, agent.jax):
            importlib.import_module(module)
    from rlgraph.agents.ppo.config import PPOConfig
    from rlgraph.agents.ppo.torch import PPO

    PPO(PPOConfig(num_envs=1, device="cpu"), rlgraph.make("CartPole-v1"))  # torch imports the rest of itself


def _become(command: dict) -> None:
    """Be `rlgraph ARGV` from here on, to the exit code."""
    os.setsid()  # a group of its own, with the children that it will have
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(command["folder"])
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    if command["imports"]:
        _redirect(1, command["out"])
        _redirect(2, command["err"])
        program = Path(sys.executable).with_name("rlgraph")
        os.execv(program, [program, *command["argv"]])
    sys.stdout = sys.__stdout__ = _stream(1, command["out"], "strict")
    sys.stderr = sys.__stderr__ = _stream(2, command["err"], "backslashreplace")
    sys.argv = ["rlgraph", *command["argv"]]
    from rlgraph.cli.main import main

    try:
        code = main()
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    os._exit(120 if _cannot_be_flushed() else code)


def _redirect(descriptor: int, name: str) -> None:
    if name == "closed":
        os.close(descriptor)
        return
    if name == "broken":
        reading, writing = os.pipe()
        os.close(reading)
    else:
        writing = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(writing, descriptor)
    os.close(writing)


def _stream(descriptor: int, name: str, errors: str) -> io.TextIOWrapper | None:
    """What Python makes of stdout or stderr when it starts."""
    _redirect(descriptor, name)
    if name == "closed":
        return None
    binary = open(descriptor, "wb", closefd=False)  # noqa: SIM115 - to the end
    return io.TextIOWrapper(binary, encoding="utf-8", errors=errors, line_buffering=descriptor == 2)


def _cannot_be_flushed() -> bool:
    """What Python finds out at its end; it ends with code 120 then."""
    try:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
    except (OSError, ValueError) as error:
        print(f"Exception ignored while flushing: {error!r}", file=sys.stderr)
        return True
    return False


if __name__ == "__main__":
    serve()
