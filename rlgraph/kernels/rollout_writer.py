"""Write the kernel that takes T steps of an environment: its expressions, and around them what all environments share.

Shape letters: T steps, B environments; a kernel's variables are blocks [BLOCK], one number an environment.
"""

import re
from collections import Counter

import gymnasium

from rlgraph.environment import Environment
from rlgraph.kernels.expressions import BUILT_IN, Names, Writing, literal
from rlgraph.kernels.networks import Network, normalization
from rlgraph.kernels.nodes import BOOL, Program, TraceError, entries
from rlgraph.kernels.text import INDENT, Text
from rlgraph.kernels.trace import leaves, trace_observe, trace_step
from rlgraph.kernels.weights import LOG_STD_RANGE

TOTALS = ("ended_return", "ended_length", "ended")
TAKEN = "which is the name of something else in a kernel"
# Names of the loop, besides those that its lines show.
LOOP_NAMES = ("T", "B", "BLOCK", "env", "here", "row", "key", "step", "ends", "done", *TOTALS, *BUILT_IN)


class RolloutWriter:
    """Writes the kernel that takes T steps.

    Args:
        env: the environment.
        autoreset: as for `Environment.step`.
        actor: draws the actions. Without one, actions are `given`, read from memory as they are, or random: uniform
            integers, or standard normals times half the widest range.
    """

    def __init__(self, env: Environment, autoreset: str, actor: Network | None, given: bool = False):
        self.env, self.autoreset, self.actor, self.given = env, autoreset, actor, given
        self.program, self.observe = trace_step(env, autoreset), trace_observe(env)
        self.leaves = leaves(env)
        self.state = [entry for name, (shape, _) in self.leaves.items() for entry in entries(name, shape)]
        self.discrete = isinstance(env.action_space, gymnasium.spaces.Discrete)
        self.action = entries("action", env.action_space.shape)
        self.obs = entries("obs", env.observation_space.shape)
        self.records = not given  # what was seen before each action, and episode totals
        self._check_names()

    def kernel(self) -> str:
        """`rollout(*pointers, T, B, BLOCK)`: B environments in blocks of BLOCK."""
        pointers = self._pointers()
        before, act = self._before(), [*self._draw(), *self._act()]
        names = Names(identifiers([*pointers, *before, *act, *LOOP_NAMES]))
        observed = self._observed(names) if self.records else []
        text = Text()
        text.add(0, ["@triton.jit", "def rollout(", *(f"{INDENT}{pointer}," for pointer in pointers)])
        text.add(0, [INDENT + "T,", INDENT + "B,", INDENT + "BLOCK: tl.constexpr,", "):"])
        text.add(1, [f'"""{self._title()}"""', *before, *observed, "", "for _ in range(T):"])
        if self.records:
            text.add(2, self._store("obs", self.obs))
        text.add(2, [*act, *self._record_action(), "", *self._step(names), "step += 1", "row += B"])
        text.add(1, self._after())
        return text.joined()

    def _check_names(self) -> None:
        """A leaf is called as in the definition, which must not be as something else is."""
        state = {f"{leaf}_ptr" for leaf in self.leaves}
        pointers = [name for name, times in Counter(self._pointers()).items() if name not in state or times > 1]
        pointers = [name.removesuffix("_ptr") for name in pointers]
        own = identifiers([*pointers, *self._load_rest(), *self._draw(), *self._act(), *self.obs, *LOOP_NAMES])
        for name in (*self.leaves, *self.state):
            if name in own:
                raise TraceError(f"environment {self.env.id!r} cannot be fused: rename {name!r} of State, {TAKEN}")

    def _title(self) -> str:
        who = "given actions" if self.given else "random actions" if self.actor is None else "its policy"
        return f"T steps of {self.env.id} with {who}: a block of environments, from the first step to the last."

    def carried(self) -> list[str]:
        """Pointers to what a launch leaves to the next."""
        return [f"{name}_ptr" for name in (*self.leaves, "elapsed", "return" if self.records else "done")]

    def _pointers(self) -> list[str]:
        pointers = ["key_ptr", "counter_ptr", *self.carried()]
        pointers += ["totals_ptr"] if self.records else []
        if self.actor is not None:
            pointers += [*self.actor.parameters(), "obs_mean_ptr", "obs_var_ptr"]
            pointers += [] if self.discrete else ["log_std_ptr"]
        pointers += ["action_ptr"] + (["out_of_range_ptr"] if self.given and self.discrete else [])
        pointers += ["log_prob_ptr"] if self.records else []
        return [*pointers, *(f"{name}_ptr" for name in ("obs", "reward", "terminated", "truncated", "final_obs"))]

    # ---- before the loop

    def _before(self) -> list[str]:
        lines = [
            "env = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)",
            "here = env < B",
            "row = env.to(tl.int64)  # of step t: t * B + env",
            "key, step = tl.load(key_ptr), tl.load(counter_ptr)",
            "",
        ]
        return [*lines, *self._load_state(), *self._load_rest()]

    def _load_rest(self) -> list[str]:
        lines = ["elapsed = tl.load(elapsed_ptr + env, mask=here, other=0)"]
        if self.records:
            lines += ["episode_return = tl.load(return_ptr + env, mask=here, other=0.0)"]
            lines += [f"{total} = tl.zeros([BLOCK], tl.float32)" for total in TOTALS]
        else:
            lines += ["done = tl.load(done_ptr + env, mask=here, other=0).to(tl.int1)"]
        if self.actor is not None:
            load, _ = normalization(self.obs)
            lines += ["", *self.actor.load(), *load]
            if not self.discrete:
                lines += [self._load_log_std(k) for k in range(len(self.action))]
        return lines

    def _load_log_std(self, k: int) -> str:
        low, high = LOG_STD_RANGE
        return f"log_std_{k} = tl.minimum(tl.maximum(tl.load(log_std_ptr + {k}), {low}), {high})"

    def _load_state(self) -> list[str]:
        lines = []
        for name, (shape, dtype) in self.leaves.items():
            boolean = ".to(tl.int1)" if dtype == BOOL else ""
            for at, entry in self._places(name, shape):
                lines.append(f"{entry} = tl.load({name}_ptr + {at}, mask=here, other=0){boolean}")
        return lines

    def _places(self, name: str, shape: tuple[int, ...]) -> list[tuple[str, str]]:
        """Where a leaf's entries are, and the variables that hold them."""
        names = entries(name, shape)
        return [(f"env.to(tl.int64) * {len(names)} + {i}" if shape else "env", entry) for i, entry in enumerate(names)]

    def _observed(self, names: Names) -> list[str]:
        writing = Writing(self.observe, {name: name for name in self.state}, names)
        lines = writing.lines(self.observe.nodes())
        return ["", *lines, *(f"{entry} = {writing.block(self.observe.outputs[entry])}" for entry in self.obs)]

    # ---- random numbers: an action's, then the step's, then those of a reset

    @property
    def _noise(self) -> list[str]:
        """The draws that make an action: one uniform, or a pair for every two normals."""
        if self.given:
            return []
        return ["noise"] if self.discrete else [f"pair_{i}" for i in range(2 * -(-len(self.action) // 2))]

    def _draws(self) -> list[str]:
        return [*self._noise, *(f"u_{i}" for i in range(self.env.draws))]

    def _draw(self) -> list[str]:
        lines = self._uniforms(self._draws())
        if not self.discrete:
            for i in range(0, len(self._noise), 2):
                pair = f"{self._noise[i]}, {self._noise[i + 1]}"
                lines.append(f"normal_{i}, normal_{i + 1} = library.normals({pair})")
        return lines

    def _uniforms(self, draws: list[str]) -> list[str]:
        groups = enumerate(range(0, len(draws), 5))
        fives = [(group, [*draws[start : start + 5], *"____"][:5]) for group, start in groups]
        return [f"{', '.join(five)} = library.uniforms(key, env, step, {group})" for group, five in fives]

    # ---- the action

    def _act(self) -> list[str]:
        if self.given:
            return self._given_action()
        if self.actor is None:
            return self._random_action()
        outputs = [f"output_{k}" for k in self.actor.outputs]
        _, seen = normalization(self.obs)
        lines = [*seen, *self.actor.forward([f"seen_{d}" for d in range(len(self.obs))], outputs)]
        return lines + (self._categorical(outputs) if self.discrete else self._gaussian(outputs))

    def _categorical(self, logits: list[str]) -> list[str]:
        """Inverse CDF of one uniform, as Categorical.sample, and its log-probability; logits less the first."""
        lines = ["top = tl.zeros([BLOCK], tl.float32)", *(f"top = tl.maximum(top, {logit})" for logit in logits)]
        lines += ["weight_0 = tl.exp(-top)"]
        lines += [f"weight_{k} = tl.exp({logit} - top)" for k, logit in enumerate(logits, 1)]
        lines += ["total = " + " + ".join(f"weight_{k}" for k in range(len(logits) + 1))]
        lines += [
            f"{name} = tl.zeros([BLOCK], tl.{dtype})" for name, dtype in (("action", "int32"), ("upto", "float32"))
        ]
        for k in range(len(logits)):
            lines += [f"upto += weight_{k}", "action += (noise * total >= upto).to(tl.int32)"]
        lines += ["chosen = tl.zeros([BLOCK], tl.float32)"]
        lines += [f"chosen = tl.where(action == {k}, {logit}, chosen)" for k, logit in enumerate(logits, 1)]
        log = "tl.log" if self.actor.precision == "ieee" else "library.fast_log"
        return [*lines, f"log_prob = chosen - top - {log}(total)"]

    def _gaussian(self, means: list[str]) -> list[str]:
        lines = ["log_prob = tl.zeros([BLOCK], tl.float32)"]
        for k, (action, mean) in enumerate(zip(self.action, means)):
            lines += [
                f"{action} = {mean} + tl.exp(log_std_{k}) * normal_{k}",
                f"log_prob += -0.5 * normal_{k} * normal_{k} - log_std_{k} - 0.9189385332046727",
            ]
        return lines

    def _random_action(self) -> list[str]:
        space = self.env.action_space
        lines = ["log_prob = tl.zeros([BLOCK], tl.float32)"]
        if self.discrete:
            return [*lines, f"action = (noise * {int(space.n)}).to(tl.int32)"]
        half = literal(float((space.high - space.low).max()) / 2)
        return [*lines, *(f"{action} = normal_{k} * {half}" for k, action in enumerate(self.action))]

    def _given_action(self) -> list[str]:
        lines = [f"{action} = tl.load(action_ptr + {at}, mask=here, other=0)" for at, action in self._rows("action")]
        if not self.discrete:
            return lines
        low = int(self.env.action_space.start)
        high = low + int(self.env.action_space.n) - 1
        return [
            *lines,
            f"invalid = here & ((action < {low}) | (action > {high}))",
            "tl.store(out_of_range_ptr + env * 0, True, mask=invalid)",
            f"action = tl.minimum(tl.maximum(action, {low}), {high}).to(tl.int32)",
        ]

    def _environment_action(self) -> tuple[list[str], dict[str, str]]:
        """The policy's action as the environment takes it: clipped into a Box, or counted from a Discrete's `start`."""
        space = self.env.action_space
        if self.given:
            return [], {action: action for action in self.action}
        if self.discrete:
            start = int(space.start)
            return [], {"action": f"(action + {start})" if start else "action"}
        lines = []
        for action, low, high in zip(self.action, space.low.flat, space.high.flat):
            lines.append(
                f"taken_{action} = library.minimum(library.maximum({action}, {literal(low)}), {literal(high)})"
            )
        return lines, {action: f"taken_{action}" for action in self.action}

    def _record_action(self) -> list[str]:
        if not self.records:
            return []
        return [*self._store("action", self.action), "tl.store(log_prob_ptr + row, log_prob, mask=here)"]

    # ---- the step

    def _step(self, names: Names) -> list[str]:
        """Lines that step the environment, record what came of it, and hand it on."""
        to_env, taken = self._environment_action()
        inputs = {name: name for name in (*self.state, "elapsed", "done", *self._draws())}
        outputs = {name: node for name, node in self.program.outputs.items() if self._uses(name)}
        program = Program(self.program.inputs, outputs, {name: self.program.kept[name] for name in outputs})
        writing = Writing(program, inputs | taken, names)
        lines = [*to_env, *writing.lines(Program({}, program.kept).nodes())]
        results = {}
        for name, node in program.kept.items():
            results[name] = names.new(f"next_{name.removeprefix('next_')}")
            lines.append(f"{results[name]} = {writing.block(node)}")
        lines += self._reset(writing, results)
        return [*lines, "", *self._record(results), "", *self._carry_on(results)]

    def _uses(self, output: str) -> bool:
        """Whether the kernel has a use for an output of the step."""
        return output != "next_done" or not self.records  # else what has ended has been reset

    def _reset(self, writing: Writing, results: dict[str, str]) -> list[str]:
        """Lines that put what a reset gives in the place of what was kept, where an episode has ended.

        The branch is always taken, and gone from the machine code. It hides from Triton how the numbers that go from
        step to step come about: it compares every pair of them, expression by expression, for minutes.
        """
        program = writing.program
        changed = {name: node for name, node in program.outputs.items() if node is not program.kept[name]}
        lines = writing.lines([node for node in program.nodes() if not writing.has(node)])
        lines += [f"{results[name]} = {writing.block(node)}" for name, node in changed.items()]
        return ["if T > 0:", *(INDENT + line for line in lines)] if changed else []

    def _record(self, results: dict[str, str]) -> list[str]:
        lines = [] if self.records else self._store("obs", [results[entry] for entry in self.obs])
        for name in ("reward", "terminated", "truncated"):
            lines.append(f"tl.store({name}_ptr + row, {results[name]}, mask=here)")
        lines += self._store("final_obs", [results[f"final_{entry}"] for entry in self.obs])
        if self.records:
            lines += [
                f"ends = {results['terminated']} | {results['truncated']}",
                f"episode_return += {results['reward']}",
                "ended_return += tl.where(ends, episode_return, 0.0)",
                "ended_length += tl.where(ends, elapsed + 1, 0).to(tl.float32)",
                "ended += ends.to(tl.float32)",
                "episode_return = tl.where(ends, 0.0, episode_return)",
            ]
        return lines

    def _carry_on(self, results: dict[str, str]) -> list[str]:
        carried = {name: f"next_{name}" for name in (*self.state, "elapsed")}
        carried |= {entry: entry for entry in self.obs} if self.records else {"done": "next_done"}
        return [f"{name} = {results[output]}" for name, output in carried.items()]

    # ---- memory

    def _rows(self, name: str) -> list[tuple[str, str]]:
        """Where the entries of an observation or action of each environment are in step t, and their variables."""
        names = self.action if name == "action" else self.obs
        shape = (self.env.action_space if name == "action" else self.env.observation_space).shape
        return [(f"row * {len(names)} + {i}" if shape else "row", entry) for i, entry in enumerate(names)]

    def _store(self, name: str, values: list[str]) -> list[str]:
        """Lines that store an observation or action: entries side by side, four or two at once if that comes out."""
        rows, lines = self._rows(name), []
        width = next(width for width in (4, 2, 1) if len(values) % width == 0)
        for start in range(0, len(values), width):
            (at, _), some = rows[start], values[start : start + width]
            if width == 1:
                lines.append(f"tl.store({name}_ptr + {at}, {some[0]}, mask=here)")
            else:
                lines.append(f"library.store{width}({name}_ptr + {at}, {', '.join(some)}, here)")
        return lines

    def _after(self) -> list[str]:
        lines = []
        for name, (shape, _) in self.leaves.items():
            lines += [f"tl.store({name}_ptr + {at}, {entry}, mask=here)" for at, entry in self._places(name, shape)]
        lines.append("tl.store(elapsed_ptr + env, elapsed, mask=here)")
        if not self.records:
            return [*lines, "tl.store(done_ptr + env, done, mask=here)"]
        lines.append("tl.store(return_ptr + env, episode_return, mask=here)")
        totals = (f"tl.store(totals_ptr + {i} * B + env, {total}, mask=here)" for i, total in enumerate(TOTALS))
        return [*lines, *totals]


def identifiers(lines: list[str]) -> set[str]:
    """Every name in some lines."""
    return set(re.findall(r"[^\W\d]\w*", "\n".join(lines)))
