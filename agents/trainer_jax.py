"""What the agents in JAX share. The same class, in the same order, as trainer_torch.py's."""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlgraph.agents.networks.jax import from_arrays, to_arrays
from rlgraph.config import TrainConfig
from rlgraph.devices import jax_device
from rlgraph.environment import Environment
from rlgraph.errors import UsageError
from rlgraph.modes import MODES, resolve
from rlgraph.precision import jax_32_bits, jax_matmul_precision
from rlgraph.rollout.jax import evaluate
from rlgraph.runs.state_jax import flat_state, numbers_of, restore
from rlgraph.xla import Readback, prepare

# Environment steps in one turn of XLA's host loop on a GPU; measured with PPO, see docs/results.md.
GPU_UNROLL = 16


class Trainer:
    """A run on one device.

    An agent defines `_create() -> state`, everything that outlives an iteration, the property `policy` of it among
    that; the pure `_iteration(state) -> (state, METRICS' vector)`; and `build_policy(config, env, key=None)`.

    Args:
        config: the agent's.
        env: built by rlgraph.make.

    `iterate()` makes one launch and returns at once on a GPU: read its metrics after the next launch.
    """

    fuses = False  # whether the agent has a mode that runs rollouts in one kernel

    def __init__(self, config: TrainConfig, env: Environment):
        self.config, self.env = config, env
        self.device = jax_device(config.device)
        on_gpu = self.device.platform == "gpu"
        self.mode = resolve("jax", config.mode, on_gpu)
        self.fused = MODES["jax"][self.mode].fused
        if self.fused and not self.fuses:
            raise UsageError(f"mode fused needs an MLP actor-critic: agent ppo, not {type(self).__name__.lower()}")
        self.unroll = GPU_UNROLL if on_gpu and MODES["jax"][self.mode].graph else 1
        with jax.default_device(self.device), jax_32_bits():
            state = self._create()
            # Donated buffers must be distinct and stay on the device.
            self.state: Any = jax.device_put(jax.tree.map(jnp.copy, state), self.device)
        self._launch = prepare(self._iterations, self.mode, donate_argnums=(0,), device=self.device)

    @property
    def state(self) -> Any:
        """Everything that outlives an iteration; the next launch takes its arrays away."""
        return self._state_of(self._numbers)

    @state.setter
    def state(self, state: Any) -> None:
        self._numbers, self._state_of = numbers_of(state)

    def iterate(self) -> Readback:
        """One launch: K = config.iterations_per_launch iterations, each T * B steps and their updates.

        Returns:
            METRICS of each, [K, n], on their way.
        """
        with jax_matmul_precision(self.config.precision), jax_32_bits():  # JAX compiles anew where they are others
            self._numbers, metrics_Kn = self._launch(self._numbers)
        return Readback(metrics_Kn)

    def _iterations(self, numbers: list[jax.Array]) -> tuple[list[jax.Array], jax.Array]:
        """K iterations in one loop, whose body XLA compiles once and runs on buffers that stay where they are."""
        state, metrics_Kn = jax.lax.scan(
            lambda state, _: self._iteration(state),
            self._state_of(numbers),
            length=self.config.iterations_per_launch,
        )
        return numbers_of(state)[0], metrics_Kn

    def execution(self) -> str:
        """In words, how iterations run."""
        chosen = MODES["jax"][self.mode]
        if not chosen.compile:
            return "operation by operation"
        program = f"one XLA program {self.config.launch_in_words}"
        if self.fused and self.device.platform != "gpu":
            return f"{program}, the rollout's kernel interpreted: slow, for tests"
        if self.device.platform != "gpu":
            return f"{program} (a CPU has no command buffers)"
        rollout = ", rollouts in one kernel" if self.fused else ""
        return f"{program}, command buffers {'on' if chosen.graph else 'off'}{rollout}"

    # ---- checkpoints

    def state_arrays(self) -> dict[str, np.ndarray]:
        """Everything that determines the rest of the run, by name."""
        return flat_state(self.state)

    def load_state(self, arrays: dict[str, np.ndarray]) -> None:
        """Go on from what `state_arrays` gave.

        Raises:
            UsageError: the arrays are those of another run.
        """
        self.state = restore(self.state, arrays)

    # ---- the trained policy

    def arrays(self) -> dict[str, np.ndarray]:
        """The policy's weights and statistics by name, the same names as in torch."""
        return to_arrays(self.policy)

    @classmethod
    def load_policy(cls, config: TrainConfig, env: Environment, arrays: dict[str, np.ndarray]) -> Any:
        """The policy whose `arrays` either backend wrote.

        Raises:
            UsageError: the arrays are those of another network.
        """
        with jax_32_bits():
            return from_arrays(cls.build_policy(config, env), arrays)

    @staticmethod
    def evaluate_policy(policy: Any, env: Environment, num_episodes: int, seed: int) -> np.ndarray:
        """Undiscounted returns [num_episodes] of the greedy policy."""

        def play(policy, key):
            return evaluate(env, policy.greedy, num_episodes, key)

        (device,) = jax.tree.leaves(policy)[0].devices()
        with jax.default_device(device), jax_32_bits():
            returns_B = prepare(play, "jit", device=device)(policy, jax.random.key(seed))
        return np.asarray(returns_B)

    def evaluator(self, num_episodes: int, seed: int) -> tuple[Callable[[], np.ndarray], str]:
        """What plays the policy as it then is, greedily and from other starts at every call, and how, in words.

        Returns:
            A function without arguments -> undiscounted returns [num_episodes] float32; and the words.
        """

        def first_episodes(policy, call):
            return evaluate(self.env, policy.greedy, num_episodes, jax.random.fold_in(jax.random.key(seed), call))

        calls, compiled = itertools.count(), prepare(first_episodes, "jit", device=self.device)

        def play() -> np.ndarray:
            with jax_matmul_precision(self.config.precision), jax.default_device(self.device), jax_32_bits():
                return np.asarray(compiled(self.policy, next(calls)))

        return play, "one XLA program"
