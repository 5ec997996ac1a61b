"""What the agents in torch share: how an iteration runs, what a checkpoint of a run holds, how a policy is played."""

import contextlib
import functools
from collections.abc import Callable
from types import ModuleType

import numpy as np
import torch

from rlgraph.agents.networks.torch import from_arrays, to_arrays
from rlgraph.agents.parts import returns_torch
from rlgraph.config import TrainConfig
from rlgraph.devices import torch_device, torch_single_thread
from rlgraph.environment import Environment
from rlgraph.errors import UsageError
from rlgraph.graph.auto import check_that_it_runs, first_that_works
from rlgraph.graph.capture import Graph, capture
from rlgraph.graph.compile import compiled, graph_breaks_allowed
from rlgraph.graph.pool import GraphPool
from rlgraph.graph.readback import Readback, Readbacks
from rlgraph.kernels.rollouts import FusedEvaluation
from rlgraph.modes import MODES, compiles, in_turn, resolve
from rlgraph.precision import torch_matmul_precision
from rlgraph.rollout.torch import evaluate
from rlgraph.runs.state_torch import flat_state, restore


class Trainer:
    """A run on one device.

    An agent defines `_create(collector_mode)`, which allocates every tensor that outlives an iteration, `policy`,
    `iteration` and `generator` among them; `_iteration() -> METRICS' vector`, in which nothing reads a device value on
    the host; `_state()`, those tensors by name; and `build_policy(config, env)`.

    Args:
        config: the agent's.
        env: built by rlgraph.make.

    `iterate()` makes one launch and returns at once on a GPU: read its metrics after the next launch.

    Attributes:
        mode: the mode that runs.
        graph: of an iteration; None where the mode has none.
        stopped: with mode "auto" on a GPU, where an iteration cannot be captured: what stopped it, and what would help.
    """

    @torch.inference_mode(False)  # which enables gradients too, whatever the caller's mode
    def __init__(self, config: TrainConfig, env: Environment):
        self.config, self.env = config, env
        self.device = torch_device(config.device)
        self._num_iterations = torch.tensor(config.num_iterations, dtype=torch.float32, device=self.device)
        on_gpu = self.device.type == "cuda"
        modes = in_turn(config.mode, self._resolve(on_gpu), on_gpu)
        attempts = {mode: functools.partial(self._prepare, mode, fallback=mode != modes[0]) for mode in modes}
        self.mode, self.graph, self.stopped = first_that_works(attempts)
        self._run = self._iterations if self.graph is None else self.graph.replay
        self._readbacks = Readbacks()
        self._replays = self.graph is not None and self.graph.captured

    def _prepare(self, mode: str, fallback: bool) -> Graph | None:
        """Allocate everything anew, so that no earlier attempt leaves a trace, and capture where the mode does."""
        self.mode = mode
        self._compiles = compiles(mode, self.device.type == "cuda")
        fused = MODES["torch"][mode].fused
        with graph_breaks_allowed() if fallback else contextlib.nullcontext():
            self._create("fused" if fused else "compile" if self._compiles else "eager")
        tensors = {"state": self._state(), "generators": [self.generator]}
        with torch_matmul_precision(self.config.precision):
            if MODES["torch"][mode].graph:
                # Not watched: a look at its hundred values took 5 µs, more than a launch does, and they are rlgraph's
                # own, which nothing changes between iterations.
                return capture(self._iterations, **tensors, device=self.device, watch=False)
            if fallback and self._compiles:
                check_that_it_runs(self._iterations, **tensors)
        return None

    def iterate(self) -> Readback:
        """One launch: K = config.iterations_per_launch iterations, each T * B steps and their updates.

        Returns:
            METRICS of each, [K, n], on their way. Until they are read there is time for one more launch, not for two.
        """
        if self._replays:  # precision and threads are the captured kernels' own: the host has nothing to set
            return self._readbacks.start(self._run())
        precision = torch_matmul_precision(self.config.precision)
        with torch.inference_mode(False), precision, torch_single_thread(self.device):
            return self._readbacks.start(self._run())

    def _iterations(self) -> torch.Tensor:
        return torch.stack([self._iteration() for _ in range(self.config.iterations_per_launch)])

    def execution(self) -> str:
        """In words, in one line, how iterations run, and what keeps them from being a CUDA graph on a GPU."""
        if self.graph is None:
            how = "compiled, launched step by step" if self.mode == "compile" else "operation by operation"
            return how if self.stopped is None else f"{how}, as {self.stopped}"
        fused = f"{self._in_kernels()}, " if MODES["torch"][self.mode].fused else ""
        if not self.graph.captured:
            return f"{fused}no CUDA graph on {self.device.type}: operation by operation"
        return f"{fused}one CUDA graph {self.config.launch_in_words}, replayed {self.graph.replays} times"

    def _in_kernels(self) -> str:
        """In words, what mode `fused` does in kernels of its own."""
        return "rollouts in one kernel"

    def _resolve(self, on_gpu: bool) -> str:
        """The mode to run: on a GPU "auto" is `fused` where that applies.

        Raises:
            UsageError: no such mode, or `fused` is asked for and does not apply.
        """
        mode = resolve("torch", self.config.mode, on_gpu)
        if self.config.mode == "auto" and on_gpu:
            return "fused" if self.why_not_fused(self.config, self.env) is None else mode
        if MODES["torch"][mode].fused and (reason := self.why_not_fused(self.config, self.env)):
            raise UsageError(reason)
        return mode

    @classmethod
    def why_not_fused(cls, config: TrainConfig, env: Environment) -> str | None:
        """Why mode `fused` does not apply, in one line; None where it does."""
        return f"mode fused needs an actor-critic whose actor is an MLP, which {cls.__name__} has not; use mode graph"

    def _share_done(self) -> torch.Tensor:
        """Of the run's iterations, [] float32. Divided by a tensor of that type, it is one kernel."""
        return self.iteration / self._num_iterations

    def _in_mode(self, fn):
        """A loss, compiled where the mode compiles."""
        return compiled(fn) if self._compiles else fn

    @staticmethod
    def _returns_module(in_kernels: bool) -> ModuleType:
        """What sums along time: `returns_torch`, or the same functions in one kernel each, which import Triton."""
        if in_kernels:
            from rlgraph.kernels import returns

            return returns
        return returns_torch

    def _adam(self, parameters, learning_rate: torch.Tensor, eps: float) -> torch.optim.Adam:
        """Adam (Kingma & Ba, 2015) that a graph can hold: its moments and step counts exist, and are zero."""
        parameters = list(parameters)
        on_gpu = self.device.type == "cuda"
        optimizer = torch.optim.Adam(parameters, learning_rate, eps=eps, fused=True, capturable=on_gpu)
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()  # zero gradients move nothing
        for state in optimizer.state.values():
            for tensor in state.values():
                tensor.zero_()
        return optimizer

    # ---- checkpoints

    def state_arrays(self) -> dict[str, np.ndarray]:
        """Everything that determines the rest of the run, by name."""
        return flat_state(self._state(), self.generator)

    def load_state(self, arrays: dict[str, np.ndarray]) -> None:
        """Go on from what `state_arrays` gave, in place: so does a captured iteration.

        Raises:
            UsageError: the arrays are those of another run.
        """
        restore(self._state(), self.generator, arrays)

    # ---- the trained policy

    def arrays(self) -> dict[str, np.ndarray]:
        """The policy's weights and statistics by name, the same names as in JAX."""
        return to_arrays(self.policy)

    @classmethod
    def load_policy(cls, config: TrainConfig, env: Environment, arrays: dict[str, np.ndarray]) -> torch.nn.Module:
        """The policy whose `arrays` either backend wrote.

        Raises:
            UsageError: the arrays are those of another network.
        """
        policy = cls.build_policy(config, env)
        from_arrays(policy, arrays)
        return policy

    @staticmethod
    def evaluate_policy(policy: torch.nn.Module, env: Environment, num_episodes: int, seed: int) -> np.ndarray:
        """Undiscounted returns [num_episodes] of the greedy policy; on a GPU its actions come from a captured graph."""
        generator = torch.Generator(next(policy.parameters()).device).manual_seed(seed)
        # One size, that of the batch: at another a product may round otherwise, and with it an action may change.
        on_gpu = generator.device.type == "cuda"
        greedy = GraphPool(policy.greedy, sizes=(num_episodes,)) if on_gpu else policy.greedy
        return evaluate(env, greedy, num_episodes, generator).numpy(force=True)

    def evaluator(self, num_episodes: int, seed: int) -> tuple[Callable[[], np.ndarray], str]:
        """What plays the policy as it then is, greedily and from other starts at every call, and how, in words.

        Where iterations are CUDA graphs, and a kernel can hold policy and environment, it is one kernel, replayed.

        Returns:
            A function without arguments -> undiscounted returns [num_episodes] float32; and the words.
        """
        config, env = self.config, self.env
        generator = torch.Generator(self.device).manual_seed(seed)
        if self.graph is not None and self.graph.captured and self.why_not_fused(config, env) is None:
            fused = FusedEvaluation(env, self.policy.for_kernels(), num_episodes, generator, config.precision)
            # All that it reads is rlgraph's own.
            graph = capture(fused.play, state=fused.state(), device=self.device, watch=False)
            return lambda: graph.replay().numpy(force=True), "one kernel, replayed as a CUDA graph"

        def play() -> np.ndarray:
            with torch_matmul_precision(config.precision), torch_single_thread(self.device):
                return evaluate(env, self.policy.greedy, num_episodes, generator).numpy(force=True)

        return play, "operation by operation"
