"""How a step, a rollout or an update is run: the modes of each backend, and which one is the default."""

from dataclasses import dataclass

from rlgraph.arguments import choice


@dataclass(frozen=True)
class Mode:
    compile: bool  # through torch.compile or XLA, against one operation after the other
    graph: bool  # replayed as a CUDA graph (torch) or through XLA's command buffers (jax)
    fused: bool = False  # rollouts, or a vector environment's steps, in one kernel


# What each mode means where there is an NVIDIA GPU. Without one, a torch graph mode runs its function directly
# (see rlgraph.graph.capture) and jax's `graph` is `jit`; `fused` interprets its kernel, for tests.
MODES = {
    "torch": {
        "eager": Mode(compile=False, graph=False),
        "compile": Mode(compile=True, graph=False),
        "graph-uncompiled": Mode(compile=False, graph=True),
        "graph": Mode(compile=True, graph=True),
        "fused": Mode(compile=True, graph=True, fused=True),
    },
    "jax": {
        "eager": Mode(compile=False, graph=False),
        "jit": Mode(compile=True, graph=False),
        "graph": Mode(compile=True, graph=True),
        "fused": Mode(compile=True, graph=True, fused=True),
    },
}


def resolve(backend: str, mode: str, on_gpu: bool) -> str:
    """The name of the mode to run: "auto" is `graph` on a GPU, else `eager` (torch) or `jit` (jax).

    On a CPU torch's eager mode is the default because compiling takes longer than most runs there. Whether `fused`
    applies depends on environment and policy (`rlgraph.kernels.rollouts.why_not`), so torch's trainers decide that.

    Raises:
        UsageError: there is no such backend, or it has no such mode.
    """
    known = MODES[choice("backend", backend, MODES)]
    mode = choice(f"{backend} mode", mode, ["auto", *known])
    if mode == "auto":
        return "graph" if on_gpu else {"torch": "eager", "jax": "jit"}[backend]
    return mode


def in_turn(asked: str, mode: str, on_gpu: bool) -> tuple[str, ...]:
    """Torch modes to try: the one that `resolve` gave for the one asked for, and what "auto" falls back to on a GPU.

    There an environment or a policy that needs the host in the middle cannot be captured.
    """
    if asked != "auto" or not on_gpu:
        return (mode,)
    return (mode, *(["graph"] if MODES["torch"][mode].fused else []), "compile", "eager")


def compiles(mode: str, on_gpu: bool) -> bool:
    """Whether a torch mode goes through torch.compile: a graph mode without a GPU runs the plain function."""
    chosen = MODES["torch"][mode]
    return chosen.compile and (on_gpu or not chosen.graph)
