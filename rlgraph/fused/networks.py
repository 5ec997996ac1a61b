"""Networks inside a kernel, and the kernel that values a rollout's observations."""

import itertools
from dataclasses import dataclass

from rlgraph.environment import Environment
from rlgraph.fused.text import INDENT, Kernel, Text
from rlgraph.fused.trace import entries


def rounded_up(width: int) -> int:
    """The width that a kernel gives to a layer: a power of two that the matrix units take."""
    return max(16, 1 << (width - 1).bit_length())


@dataclass(frozen=True)
class Network:
    """An MLP's form: `sizes` (inputs, hidden widths, outputs), `activation`, `precision` of its products."""

    name: str
    sizes: tuple[int, ...]
    activation: str
    precision: str

    def parameters(self) -> list[str]:
        """Names of its pointers, a weight and a bias for each layer."""
        return [f"{self.name}_{kind}{i}_ptr" for i in range(len(self.sizes) - 1) for kind in ("w", "b")]

    def load(self) -> list[str]:
        """Lines before the loop: weights into registers, the hidden layers padded with zeros, which pass as zeros."""
        lines = []
        for i, (n, m) in enumerate(itertools.pairwise(self.sizes)):
            w, b = f"{self.name}_w{i}", f"{self.name}_b{i}"
            last, units = i == len(self.sizes) - 2, self._units(i)
            if not last:
                lines += [f"{self._units(i + 1)} = tl.arange(0, {rounded_up(m)})"]
            if last:
                lines += [f"{b}_{k} = tl.load({b}_ptr + {k})" for k in range(m)]
            else:
                lines += [f"{b} = tl.load({b}_ptr + {self._units(i + 1)}, mask={self._units(i + 1)} < {m}, other=0.0)"]
            if i == 0 and last:
                lines += [f"{w}_{k}_{d} = tl.load({w}_ptr + {k * n + d})" for k in range(m) for d in range(n)]
            elif i == 0:
                out = self._units(1)
                lines += [
                    f"{w}_{d} = tl.load({w}_ptr + {out} * {n} + {d}, mask={out} < {m}, other=0.0)" for d in range(n)
                ]
            elif last:
                lines += [
                    f"{w}_{k} = tl.load({w}_ptr + {k * n} + {units}, mask={units} < {n}, other=0.0)" for k in range(m)
                ]
            else:
                out = self._units(i + 1)
                lines += [
                    f"{w} = tl.load(",
                    f"    {w}_ptr + {out}[None, :] * {n} + {units}[:, None],",
                    f"    mask=({out}[None, :] < {m}) & ({units}[:, None] < {n}),",
                    "    other=0.0,",
                    ")" + (".to(tl.bfloat16)" if self.precision == "bf16" else ""),
                ]
        return lines

    def forward(self, inputs: list[str], results: list[str]) -> list[str]:
        """Lines that compute the outputs [BLOCK] each, into `results`, from normalised observations [BLOCK] each."""
        layers = len(self.sizes) - 1
        if layers == 1:
            return [
                f"{result} = "
                + " + ".join(f"{x} * {self.name}_w0_{k}_{d}" for d, x in enumerate(inputs))
                + f" + {self.name}_b0_{k}"
                for k, result in enumerate(results)
            ]
        h = f"{self.name}_h"
        lines = [f"{h} = {self.name}_b0[None, :] + {inputs[0]}[:, None] * {self.name}_w0_0[None, :]"]
        lines += [f"{h} += {x}[:, None] * {self.name}_w0_{d}[None, :]" for d, x in enumerate(inputs[1:], 1)]
        for i in range(1, layers - 1):
            lines += [f"{h} = {self._activated(h)}", f"{h} = {self._product(h, i)} + {self.name}_b{i}[None, :]"]
        lines += [f"{h} = {self._activated(h)}"]
        last = layers - 1
        return lines + [
            f"{result} = tl.sum({h} * {self.name}_w{last}_{k}[None, :], axis=1) + {self.name}_b{last}_{k}"
            for k, result in enumerate(results)
        ]

    def _units(self, layer: int) -> str:
        return f"{self.name}_units{layer}"

    def _activated(self, h: str) -> str:
        exact = self.precision == "ieee" or self.activation != "tanh"
        return f"library.{self.activation if exact else 'fast_tanh'}({h})"

    def _product(self, h: str, i: int) -> str:
        if self.precision == "bf16":
            return f"tl.dot({h}.to(tl.bfloat16), {self.name}_w{i})"
        # Three TF32 products keep float32's precision, and the matrix units; "ieee" would leave them.
        product = "tf32x3" if self.precision == "ieee" else "tf32"
        return f'tl.dot({h}, {self.name}_w{i}, input_precision="{product}")'


def normalization(size: int) -> tuple[list[str], list[str]]:
    """Lines that load what normalises observations, and, of the loop, those that give `seen_0`, … of `obs_0`, …."""
    load = []
    for d in range(size):
        load += [
            f"mean_{d} = tl.load(obs_mean_ptr + {d})",
            f"scale_{d} = 1.0 / tl.sqrt_rn(tl.load(obs_var_ptr + {d}) + 1e-8)",
        ]
    return load, [f"seen_{d} = (obs_{d}.to(tl.float32) - mean_{d}) * scale_{d}" for d in range(size)]


def values_kernel(env: Environment, critic: Network) -> Kernel:
    """The kernel that values what every step began with, and what it led to."""
    obs = entries("obs", env.observation_space.shape)
    n = len(obs)
    load_scales, seen = normalization(n)
    forward = [*seen, *critic.forward([f"seen_{d}" for d in range(n)], ["value"])]
    results = ("value_ptr", "final_value_ptr", "ended_ptr")
    pointers = ["obs_ptr", "final_obs_ptr", "terminated_ptr", "truncated_ptr", *critic.parameters(), "obs_mean_ptr"]
    pointers = [*pointers, "obs_var_ptr", *results]
    text = Text()
    text.add(0, ["@triton.jit", "def values(", *(f"{INDENT}{pointer}," for pointer in pointers)])
    text.add(0, [f"{INDENT}{argument}," for argument in ("T", "B", "STEPS", "BLOCK: tl.constexpr")] + ["):"])
    text.add(
        1,
        [
            '"""Values of a block of environments at some of the steps; `ended_ptr` is room for a row number a step."""',
            "env = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)",
            "here = env < B",
            *critic.load(),
            *load_scales,
            "first = tl.program_id(1) * STEPS",
            "steps = tl.minimum(STEPS, T + 1 - first)",
            "row = first.to(tl.int64) * B + env  # of step t: t * B + env",
            "ended_ptr += first.to(tl.int64) * B + tl.program_id(0) * BLOCK * steps",
            "count = 0",
            "for t in range(first, first + steps):",
        ],
    )
    text.add(
        2,
        [
            "# What step t begins with is what step t - 1 led to, but where an episode ended.",
            "at, after = here & (t < T), here & (t > 0)",
            *(f"obs_{d} = tl.load(obs_ptr + row * {n} + {d}, mask=at, other=0)" for d in range(n)),
            "if t == T:",
            *(f"    obs_{d} = tl.load(final_obs_ptr + (row - B) * {n} + {d}, mask=here, other=0)" for d in range(n)),
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
        ],
    )
    text.add(
        1,
        [
            "tl.debug_barrier()  # the list is written",
            "for start in range(0, count, BLOCK):",
            "    place = start + tl.arange(0, BLOCK)",
            "    listed = place < count",
            "    row = tl.load(ended_ptr + place, mask=listed, other=0)",
            *(f"    obs_{d} = tl.load(final_obs_ptr + row * {n} + {d}, mask=listed, other=0)" for d in range(n)),
            *(INDENT + line for line in forward),
            "    tl.store(final_value_ptr + row, value, mask=listed)",
        ],
    )
    return Kernel("values", "\n".join(text.lines) + "\n", tuple(pointers))
