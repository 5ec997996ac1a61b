"""Networks inside a kernel, and the kernel that values a rollout's observations."""

from dataclasses import dataclass

from rlgraph.environment import Environment
from rlgraph.kernels.nodes import entries
from rlgraph.kernels.text import INDENT, Text
from rlgraph.kernels.weights import rounded_up


@dataclass(frozen=True)
class Network:
    """An MLP's form: `sizes` (inputs, hidden widths, outputs), `activation`, `precision` of its products.

    `relative`: outputs are differences from the first one, which is left out; logits need no more.
    """

    name: str
    sizes: tuple[int, ...]
    activation: str
    precision: str
    relative: bool = False

    @property
    def outputs(self) -> range:
        """The outputs that are computed."""
        return range(int(self.relative), self.sizes[-1])

    @property
    def last(self) -> int:
        """The last layer's number; the first one's is 0."""
        return len(self.sizes) - 2

    def parameters(self) -> list[str]:
        """Names of its pointers, a weight and a bias for each layer."""
        return [f"{self.name}_{kind}{i}_ptr" for i in range(len(self.sizes) - 1) for kind in ("w", "b")]

    def load(self) -> list[str]:
        """Lines before the loop: weights into registers, the hidden layers padded with zeros, which pass as zeros."""
        if self.last == 0:
            return self.load_rest()
        return [*self.load_bias(0), *self._load_first(), *self.load_rest()]

    def load_rest(self) -> list[str]:
        """Those of `load` for all layers but the first, unless it is the only one."""
        lines = []
        for i in range(1, self.last):
            lines += [*self.load_bias(i), *self._load_matrix(i)]
        return lines + self._load_last(self.last)

    def load_bias(self, i: int) -> list[str]:
        """Lines that load a hidden layer's bias, and count its units."""
        return self._load_vector(f"b{i}", self.units(i + 1), self.sizes[i + 1], "", new=True)

    def _load_vector(self, name: str, units: str, size: int, at: str, new: bool = False) -> list[str]:
        lines = [f"{units} = tl.arange(0, {rounded_up(size)})"] if new else []
        pointer = f"{self.name}_{name.split('_')[0]}_ptr"
        return [*lines, f"{self.name}_{name} = tl.load({pointer} + {at}{units}, mask={units} < {size}, other=0.0)"]

    def _load_first(self) -> list[str]:
        """The first layer's weights by input: its product is a sum of a few outer ones."""
        n, m, units = self.sizes[0], self.sizes[1], self.units(1)
        pointer = f"{self.name}_w0_ptr"
        return [
            f"{self.name}_w0_{d} = tl.load({pointer} + {units} * {n} + {d}, mask={units} < {m}, other=0.0)"
            for d in range(n)
        ]

    def _load_matrix(self, i: int) -> list[str]:
        n, m, ins, outs = self.sizes[i], self.sizes[i + 1], self.units(i), self.units(i + 1)
        return [
            f"{self.name}_w{i} = tl.load(",
            f"{INDENT}{self.name}_w{i}_ptr + {outs}[None, :] * {n} + {ins}[:, None],",
            f"{INDENT}mask=({outs}[None, :] < {m}) & ({ins}[:, None] < {n}),",
            f"{INDENT}other=0.0,",
            ")" + (".to(tl.bfloat16)" if self.precision == "bf16" else ""),
        ]

    def _load_last(self, i: int) -> list[str]:
        """The last layer's weights by output: each output is a sum along a row."""
        n, w, b = self.sizes[i], f"{self.name}_w{i}", f"{self.name}_b{i}"
        lines = []
        for k in range(self.sizes[-1]):
            lines.append(f"{b}_{k} = tl.load({b}_ptr + {k})")
            if i == 0:
                lines += [f"{w}_{k}_{d} = tl.load({w}_ptr + {k * n + d})" for d in range(n)]
            else:
                lines += self._load_vector(f"w{i}_{k}", self.units(i), n, f"{k * n} + ")
        if self.relative:
            for k in self.outputs:
                names = [f"{w}_{{}}_{d}" for d in range(n)] if i == 0 else [f"{w}_{{}}"]
                lines += [f"{name.format(k)} -= {name.format(0)}" for name in [*names, f"{b}_{{}}"]]
        return lines

    def forward(self, inputs: list[str], results: list[str]) -> list[str]:
        """Lines that compute the `outputs` [BLOCK] each, into `results`, from normalised observations [BLOCK] each."""
        w = f"{self.name}_w"
        if self.last == 0:
            sums = (" + ".join(f"{x} * {w}0_{k}_{d}" for d, x in enumerate(inputs)) for k in self.outputs)
            return [f"{result} = {s} + {self.name}_b0_{k}" for k, result, s in zip(self.outputs, results, sums)]
        h = self.h(1)
        lines = [f"{h} = {self.name}_b0[None, :] + {inputs[0]}[:, None] * {w}0_0[None, :]"]
        lines += [f"{h} += {x}[:, None] * {w}0_{d}[None, :]" for d, x in enumerate(inputs[1:], 1)]
        return lines + self.forward_rest(results)

    def forward_rest(self, results: list[str], training: bool = False) -> list[str]:
        """Those of `forward` after the first layer's product, which is in `h(1)`.

        For `training` they leave what layer i gives in `h(i)`, [BLOCK, units], and all that `before_activation` needs.
        """
        last, w, h = self.last, f"{self.name}_w", self.h(1)
        lines = []
        if rounded_up(self.sizes[1]) > self.sizes[1]:  # an infinite observation times a weight of padding is NaN
            lines += [f"{h} = tl.where({self.units(1)}[None, :] < {self.sizes[1]}, {h}, 0.0)"]
        for i in range(1, last):
            lines += self._activated(i, training)
            h = self.rounded(self.h(i)) if training else self.h(i)
            lines += [f"{self.h(i + 1)} = {self.product(h, f'{w}{i}')} + {self.name}_b{i}[None, :]"]
        lines += self._activated(last, training)
        return lines + [
            f"{result} = tl.sum({self.h(last)} * {w}{last}_{k}[None, :], axis=1) + {self.name}_b{last}_{k}"
            for k, result in zip(self.outputs, results)
        ]

    def h(self, layer: int) -> str:
        """The variable that holds what hidden layer 1, 2, … gives."""
        return f"{self.name}_h{layer}"

    def before_activation(self, layer: int, gradient: str) -> str:
        """From the gradient of what a layer gives to that of what its activation took."""
        h = self.h(layer)
        if self.activation == "tanh":
            return f"{gradient} * (1.0 - {h} * {h})"
        if self.activation == "relu":
            return f"tl.where({h} > 0, {gradient}, 0.0)"
        return f"{gradient} * {self._slope(layer)}"

    def units(self, layer: int) -> str:
        """The variable that counts a layer's units."""
        return f"{self.name}_units{layer}"

    def product(self, a: str, b: str) -> str:
        """The matrix product of two variables."""
        if self.precision == "bf16":
            return f"tl.dot({a}.to(tl.bfloat16), {b}.to(tl.bfloat16))"
        # Three TF32 products keep float32's precision, and the matrix units; "ieee" would leave them.
        product = "tf32x3" if self.precision == "ieee" else "tf32"
        return f'tl.dot({a}, {b}, input_precision="{product}")'

    def rounded(self, operand: str) -> str:
        """A product's operand, rounded to TF32. The matrix units drop the last bits, which makes every product smaller:
        over a minibatch's rows such errors add up."""
        return f"library.rounded({operand})" if self.precision == "tf32" else operand

    def _activated(self, layer: int, training: bool) -> list[str]:
        h = self.h(layer)
        activate = f"{h} = library.{self._activation(training)}({h})"
        if training and self.activation == "silu":  # the others' derivatives follow from what they give
            return [f"{self._slope(layer)} = library.silu_slope({h})", activate]
        return [activate]

    def _activation(self, training: bool) -> str:
        if self.activation != "tanh" or self.precision == "ieee":
            return self.activation
        # Gradients are sums over a minibatch's rows, in which an error that has a sign stays: here a closer one.
        return "close_tanh" if training and self.precision == "tf32" else "fast_tanh"

    def _slope(self, layer: int) -> str:
        return f"{self.name}_slope{layer}"


def normalization(obs: list[str]) -> tuple[list[str], list[str]]:
    """Lines that load what normalises observations, and, of the loop, those that give `seen_0`, … of their entries."""
    load = []
    for d in range(len(obs)):
        load += [
            f"mean_{d} = tl.load(obs_mean_ptr + {d})",
            f"scale_{d} = 1.0 / tl.sqrt_rn(tl.load(obs_var_ptr + {d}) + 1e-8)",
        ]
    return load, [f"seen_{d} = ({entry}.to(tl.float32) - mean_{d}) * scale_{d}" for d, entry in enumerate(obs)]


def values_kernel(env: Environment, critic: Network) -> str:
    """`values(*pointers, T, B, STEPS, BLOCK)` values what every step began with, and what it led to.

    A program has a block of environments and STEPS of the steps 0 to T; step T begins with what T - 1 led to.
    """
    obs = entries("obs", env.observation_space.shape)
    load_scales, seen = normalization(obs)
    forward = [*seen, *critic.forward([f"seen_{d}" for d in range(len(obs))], ["value"])]
    pointers = ["obs_ptr", "final_obs_ptr", "terminated_ptr", "truncated_ptr", *critic.parameters(), "obs_mean_ptr"]
    pointers = [*pointers, "obs_var_ptr", "value_ptr", "final_value_ptr", "ended_ptr"]
    text = Text()
    text.add(0, ["@triton.jit", "def values(", *(f"{INDENT}{pointer}," for pointer in pointers)])
    text.add(0, [f"{INDENT}{argument}," for argument in ("T", "B", "STEPS", "BLOCK: tl.constexpr")] + ["):"])
    text.add(
        1,
        [
            '"""Values of a block of environments at some steps; `ended_ptr` is room for a row number each."""',
            "env = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)",
            "here = env < B",
            *critic.load(),
            *load_scales,
            "first = tl.program_id(1) * STEPS",
            "steps = tl.minimum(STEPS, T + 1 - first)",
            "row = first.to(tl.int64) * B + env  # of step t: t * B + env",
            "ended_ptr += first.to(tl.int64) * B + tl.program_id(0).to(tl.int64) * BLOCK * steps",
            "count = 0",
            "for t in range(first, first + steps):",
        ],
    )
    text.add(2, _values_of_a_step(obs, forward))
    text.add(1, ["tl.debug_barrier()  # the list is written", "for start in range(0, count, BLOCK):"])
    text.add(2, _values_of_the_list(obs, forward))
    return text.joined()


def _values_of_a_step(obs: list[str], forward: list[str]) -> list[str]:
    """Lines that value step t, and list rows where an episode ended with the step before."""
    return [
        "# What step t begins with is what step t - 1 led to, but where an episode ended.",
        "now = tl.zeros([BLOCK], tl.int32) + t",
        "at, after = here & (now < T), here & (now > 0)",
        *_load_obs("obs_ptr", "row", "at", obs),
        "if t == T:",
        *(INDENT + line for line in _load_obs("final_obs_ptr", "(row - B)", "here", obs)),
        *forward,
        "tl.store(value_ptr + row, value, mask=at)",
        "terminated = tl.load(terminated_ptr + row - B, mask=after, other=0).to(tl.int1)",
        "ended = terminated | tl.load(truncated_ptr + row - B, mask=after, other=0).to(tl.int1)",
        "tl.store(final_value_ptr + row - B, value, mask=after & ~ended)",
        "# Rows where one ended are listed, and valued together.",
        "place = count + tl.cumsum(ended.to(tl.int32), axis=0) - 1",
        "tl.store(ended_ptr + place, row - B, mask=ended)",
        "count += tl.sum(ended.to(tl.int32), axis=0)",
        "row += B",
    ]


def _values_of_the_list(obs: list[str], forward: list[str]) -> list[str]:
    return [
        "place = start + tl.arange(0, BLOCK)",
        "listed = place < count",
        "row = tl.load(ended_ptr + place, mask=listed, other=0)",
        *_load_obs("final_obs_ptr", "row", "listed", obs),
        *forward,
        "tl.store(final_value_ptr + row, value, mask=listed)",
    ]


def _load_obs(pointer: str, row: str, mask: str, obs: list[str]) -> list[str]:
    n = len(obs)
    return [f"{x} = tl.load({pointer} + {row} * {n} + {d}, mask={mask}, other=0)" for d, x in enumerate(obs)]
