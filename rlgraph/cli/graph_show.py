"""`rlgraph graph show`: what the CUDA graph of an agent's iteration, or of its rollout, holds."""

import dataclasses
import os
from dataclasses import dataclass, field
from pathlib import Path

import torch
import tyro

from rlgraph.cli.options import advice_on_memory, parse, sizes_to_lower, values
from rlgraph.cli.terminal import terminal_console
from rlgraph.config import TrainConfig
from rlgraph.definition.errors import errors_of
from rlgraph.definition.trial import check_on
from rlgraph.errors import UsageError, unknown
from rlgraph.graph.capture import capture
from rlgraph.graph.inspect.info import GraphInfo
from rlgraph.modes import MODES, resolve
from rlgraph.precision import torch_matmul_precision
from rlgraph.registry import make
from rlgraph.runs.train import config_class, default_config, trainer_class

PROGRAM = "rlgraph graph show"
ENDINGS = ".dot", ".svg"
USAGE = f"""usage: {PROGRAM} [--env ID] [--agent NAME] [options]

Capture an iteration of an agent, print what its CUDA graph holds, and draw it: a DOT and an SVG
file. It needs an NVIDIA GPU. `{PROGRAM} --help` explains the options."""


def options_class(base: type[TrainConfig]) -> type:
    """The options: those of an agent's training, and what is shown of it."""

    @dataclass(frozen=True)
    class ShowOptions(base):
        agent: str = "ppo"
        """Whose iteration: ppo, dqn, pqn or sac. The other options are those of its training."""
        mode: str = "auto"
        """How the iteration is captured: graph-uncompiled, graph or fused; auto: fused where it applies, else graph."""
        rollout: bool = False
        """Only the rollout in place of the whole iteration."""
        out: str = ""
        """Where the picture goes: OUT.dot and OUT.svg; in a folder, or by default here, graph-ENV-AGENT. Files of these
        names are overwritten."""
        backend: str = "torch"
        """torch: XLA's command buffers cannot be read."""
        # No options: nothing is trained.
        eval_episodes: tyro.conf.Suppress[int] = field(default=base.eval_episodes, init=False)
        run_dir: tyro.conf.Suppress[str] = field(default=base.run_dir, init=False)
        checkpoint_seconds: tyro.conf.Suppress[float] = field(default=base.checkpoint_seconds, init=False)
        keep_checkpoints: tyro.conf.Suppress[int] = field(default=base.keep_checkpoints, init=False)

    return ShowOptions


def main(argv: list[str]) -> int:
    """Run `rlgraph graph ARGV`. Returns 0."""
    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE)
        return 0
    if argv[0] != "show":
        raise unknown("graph command", argv[0], ["show"])
    words = argv[1:]  # of which two are read ahead, because the other options and their defaults depend on them
    agent, env = (values(words, f"--{name}") or [usual] for name, usual in (("agent", "ppo"), ("env", "CartPole-v1")))
    agent, env = agent[0], env[0]
    default, options = default_config(agent, env), options_class(config_class(agent))
    names = {f.name for f in dataclasses.fields(options) if f.init}
    chosen = {name: value for name, value in dataclasses.asdict(default).items() if name in names}
    options = parse(options, words, PROGRAM, options(**chosen, agent=agent))
    path = _path(agent, options)
    _check_that_a_graph_is_captured(options)
    with advice_on_memory(sizes_to_lower(type(options), options.env)):
        info = _info(agent, options)
    terminal_console().print(str(info), markup=False, highlight=False, soft_wrap=True)
    for ending, text in zip(ENDINGS, (info.dot(), info.svg())):
        Path(f"{path}{ending}").write_text(text, encoding="utf-8")
    print(f"drawn in {path}.dot and {path}.svg")
    return 0


def _path(agent: str, options) -> str:
    """Where the files go, without their ending; that they can be there is found out before the capture."""
    part = "-rollout" if options.rollout else ""
    usual = f"graph-{make(options.env).id.replace('/', '-')}-{agent}{part}"
    path = Path(options.out.strip() or usual)
    if path.is_dir() or options.out.endswith("/"):
        path = path / usual
    elif path.suffix in ENDINGS:
        path = path.with_suffix("")
    if not path.parent.is_dir():
        raise UsageError(f"no folder {str(path.parent)!r} for the picture: make it, or give another --out")
    for file in (f"{path}{ending}" for ending in ENDINGS):
        if Path(file).is_dir() or not os.access(file if Path(file).exists() else path.parent, os.W_OK):
            raise UsageError(f"cannot write {file!r}: give another --out")
    return str(path)


def _check_that_a_graph_is_captured(options) -> None:
    if options.backend != "torch":
        raise UsageError(f"{PROGRAM} reads torch's CUDA graphs, not what backend {options.backend!r} launches")
    if not MODES["torch"][resolve("torch", options.mode, on_gpu=True)].graph:
        captured = ", ".join(name for name, mode in MODES["torch"].items() if mode.graph)
        raise UsageError(f"mode {options.mode} captures no CUDA graph; use one of {captured}")
    if options.device == "cpu" or not torch.cuda.is_available():
        raise UsageError("a CUDA graph needs an NVIDIA GPU, " + _what_is_there(options.device))


def _what_is_there(device: str) -> str:
    if torch.version.cuda is None:
        return f"and this torch ({torch.__version__}) is built without CUDA"
    return f"and torch {torch.__version__} finds none" if not torch.cuda.is_available() else f"not --device {device}"


def _info(agent: str, options) -> GraphInfo:
    """Of the graph of an iteration, or of the rollout in it."""
    base = config_class(agent)
    config = base(**{name: getattr(options, name) for name in base.__dataclass_fields__})
    env = make(config.env)
    check_on(env, "torch", config.device)
    with errors_of(env):
        trainer = trainer_class(agent, "torch")(config, env)
    graph, K = trainer.graph, config.iterations_per_launch
    if graph is None:  # mode auto has fallen back
        raise UsageError(f"{agent} on {trainer.env.id} is no CUDA graph: it runs {trainer.execution()}")
    part = "an iteration" if K == 1 else f"{K} iterations"
    if options.rollout:
        part = "a rollout"
        collector = trainer.collector  # it only launches kernels, or the iteration could not have been captured
        with torch_matmul_precision(config.precision):
            graph = capture(
                collector.collect, state=collector.state(), generators=[trainer.generator], device=trainer.device
            )
    return dataclasses.replace(graph.info(), name=f"{part} of {agent} on {trainer.env.id}, mode {trainer.mode}")
