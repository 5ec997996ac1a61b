"""Write the kernel that plays one greedy episode in each environment, from its start to its end.

Shape letters: B environments; a kernel's variables are blocks [BLOCK], one number an environment.
"""

from rlgraph.environment import DISABLED, Environment
from rlgraph.kernels.expressions import Names, Writing
from rlgraph.kernels.networks import Network, normalization
from rlgraph.kernels.rollout_writer import LOOP_NAMES, RolloutWriter, identifiers
from rlgraph.kernels.text import INDENT, Text
from rlgraph.kernels.trace import trace_reset


class EvaluationWriter(RolloutWriter):
    """Writes the kernel that plays.

    It uses no names beside those of the rollout's kernel: what can be collected can be evaluated.

    Args:
        env: the environment, with a time limit, which ends the loop.
        actor: its greatest logit is the action, the lowest of equal ones; or its mean.
    """

    def __init__(self, env: Environment, actor: Network):
        self.start = trace_reset(env)
        super().__init__(env, DISABLED, actor)  # what comes after the end of an episode is not counted

    def kernel(self) -> str:
        """`evaluation(*pointers, B, BLOCK)`: B environments in blocks of BLOCK."""
        pointers = self._pointers()
        before, act = [*self._first_draws(), *self._load_rest()], [*self._draw(), *self._act()]
        names = Names(identifiers([*pointers, *before, *act, *self.state, *LOOP_NAMES]))
        text = Text()
        text.add(0, ["@triton.jit", "def evaluation(", *(f"{INDENT}{pointer}," for pointer in pointers)])
        text.add(0, [INDENT + "B,", INDENT + "BLOCK: tl.constexpr,", "):"])
        text.add(1, [f'"""{self._title()}"""', *before, *self._first_state(names), *self._observed(names), ""])
        text.add(1, ["while tl.min(done.to(tl.int32), axis=0) == 0:"])
        text.add(2, ["step += 1", *act, "", *self._step(names)])
        text.add(1, ["tl.store(return_ptr + env, episode_return, mask=here)"])
        return text.joined()

    def _title(self) -> str:
        return f"One episode of {self.env.id} with its policy, greedily: a block of environments, until all have ended."

    def carried(self) -> list[str]:
        return []

    def _pointers(self) -> list[str]:
        return ["key_ptr", "counter_ptr", *self.actor.parameters(), "obs_mean_ptr", "obs_var_ptr", "return_ptr"]

    # ---- before the loop

    def _first_draws(self) -> list[str]:
        lines = [
            "env = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)",
            "here = env < B",
            "key, step = tl.load(key_ptr), tl.load(counter_ptr)",
        ]
        return [*lines, *self._uniforms(list(self._draws_of_start().values()))]

    def _draws_of_start(self) -> dict[str, str]:
        """The variable for each uniform of a reset, which come after those of a step, as in `Environment.step`."""
        before = self.env.definition.STEP_DRAWS
        return {f"u_{i}": f"u_{before + i}" for i in range(self.env.reset_draws)}

    def _load_rest(self) -> list[str]:
        load, _ = normalization(self.obs)
        return [
            "elapsed = tl.zeros([BLOCK], tl.int32)",
            "episode_return = tl.zeros([BLOCK], tl.float32)",
            "done = ~here",
            "",
            *self.actor.load(),
            *load,
        ]

    def _first_state(self, names: Names) -> list[str]:
        writing = Writing(self.start, self._draws_of_start(), names)
        lines = ["", *writing.lines(self.start.nodes())]
        return [*lines, *(f"{entry} = {writing.block(node)}" for entry, node in self.start.outputs.items())]

    # ---- the loop

    @property
    def _noise(self) -> list[str]:
        return []

    def _draws(self) -> list[str]:
        return [f"u_{i}" for i in range(self.env.definition.STEP_DRAWS)]

    def _categorical(self, logits: list[str]) -> list[str]:
        """As torch.argmax; logits less the first."""
        lines = ["top = tl.zeros([BLOCK], tl.float32)", "action = tl.zeros([BLOCK], tl.int32)"]
        for k, logit in enumerate(logits, 1):
            lines += [f"action = tl.where({logit} > top, {k}, action)", f"top = tl.maximum(top, {logit})"]
        return lines

    def _gaussian(self, means: list[str]) -> list[str]:
        return [f"{action} = {mean}" for action, mean in zip(self.action, means)]

    def _uses(self, output: str) -> bool:
        return output != "next_done" and not output.startswith("final_obs")

    def _record(self, results: dict[str, str]) -> list[str]:
        return [
            f"episode_return += tl.where(done, 0.0, {results['reward']})",
            f"done |= {results['terminated']} | {results['truncated']}",
        ]
