"""The backward pass of a network inside a kernel: sums over rows stay on the chip until the last one.

Everything is written for a tile of BLOCK rows at a time; see `rlgraph.kernels.networks` for the forward pass.
"""

from rlgraph.kernels.networks import Network
from rlgraph.kernels.text import INDENT
from rlgraph.kernels.weights import rounded_up

FEW = 3  # outputs whose last weights' gradients are sums of a tile each; more of them are one product


class Differentiated:
    """A network's passes, forward and backward, over a tile of rows; `start` comes before the loop, `store` after it.

    Args:
        network: with at least one hidden layer.

    The weights' gradients are sums over all rows that a program sees. The first layer takes `rows`, a matrix: the
    normalised observations, a column of ones for its bias, and zeros.
    """

    def __init__(self, network: Network):
        self.network, self.name, self.sizes, self.last = network, network.name, network.sizes, network.last
        self.few = len(network.outputs) <= FEW
        self.columns = rounded_up(self.sizes[0] + 1)

    def start(self) -> list[str]:
        """Lines that load the weights, what normalises observations, and set sums to zero."""
        n, D, units = self.name, self.sizes[0], self.network.units(1)
        lines = [
            f"column = tl.arange(0, {self.columns})",
            f"mean = tl.load(obs_mean_ptr + column, mask=column < {D}, other=0.0)",
            f"variance = tl.load(obs_var_ptr + column, mask=column < {D}, other=1.0)",
            "scale = 1.0 / tl.sqrt_rn(variance + 1e-8)",
            *self.network.load_bias(0),
            f"{n}_w0 = tl.load(",
            f"{INDENT}{n}_w0_ptr + {units}[None, :] * {D} + column[:, None],",
            f"{INDENT}mask=({units}[None, :] < {self.sizes[1]}) & (column[:, None] < {D}),",
            f"{INDENT}other=0.0,",
            ")",
            f"{n}_w0 += tl.where(column[:, None] == {D}, {n}_b0[None, :], 0.0)",
        ]
        lines += self.network.load_rest()
        if self.network.precision == "tf32":
            lines += [f"{n}_w{i} = {self.network.rounded(f'{n}_w{i}')}" for i in range(1, self.last)]
        return [*lines, *self._sums()]

    def _sums(self) -> list[str]:
        n, width = self.name, rounded_up(self.sizes[self.last])
        lines = [f"{n}_dw0 = tl.zeros([{rounded_up(self.sizes[1])}, {self.columns}], tl.float32)"]
        for i in range(1, self.last):
            shape = f"{rounded_up(self.sizes[i + 1])}, {rounded_up(self.sizes[i])}"
            lines += [f"{n}_dw{i} = tl.zeros([{shape}], tl.float32)"]
            lines += [f"{n}_db{i} = tl.zeros([BLOCK, {rounded_up(self.sizes[i + 1])}], tl.float32)"]
        if self.few:
            lines += [f"{self._dw(k)} = tl.zeros([BLOCK, {width}], tl.float32)" for k in self.network.outputs]
        else:
            lines += [f"{n}_output = tl.arange(0, {self._rows})"]
            lines += [f"{n}_dw{self.last} = tl.zeros([{self._rows}, {width}], tl.float32)"]
        return lines + [f"{self._db(k)} = tl.zeros([BLOCK], tl.float32)" for k in self.network.outputs]

    def gather(self, here: str) -> str:
        """The observations of `row` where `here`."""
        D = self.sizes[0]
        mask = f"{here}[:, None] & (column < {D})[None, :]"
        return f"tl.load(obs_ptr + row[:, None] * {D} + column[None, :], mask={mask}, other=0)"

    def forward(self, results: list[str]) -> list[str]:
        """Lines that compute the `outputs` [BLOCK] each, of the observations that are in `rows`."""
        D, h = self.sizes[0], self.network.h(1)
        return [
            "rows = rows.to(tl.float32)",
            f"rows = tl.where(column[None, :] == {D}, 1.0, (rows - mean[None, :]) * scale[None, :])",
            # As exact as where the policy acts: the ratio of probabilities begins near 1.
            f'{h} = tl.dot(rows, {self.name}_w0, input_precision="tf32x3")',
            *self.network.forward_rest(results, training=True),
        ]

    def backward(self, gradients: list[str]) -> list[str]:
        """Lines from the gradients [BLOCK] of the `outputs` to those of all weights.

        Rows that do not count must have gradients of zero.
        """
        net, n, last = self.network, self.name, self.last
        lines = [f"{self._db(k)} += {g}" for k, g in zip(net.outputs, gradients)]
        lines += self._last_weights(gradients)
        terms = [f"{g}[:, None] * {n}_w{last}_{k}[None, :]" for k, g in zip(net.outputs, gradients)]
        lines += [f"{n}_d = {terms[0]}", *(f"{n}_d += {term}" for term in terms[1:])]
        for i in range(last, 1, -1):
            lines += [f"{n}_d = {net.before_activation(i, f'{n}_d')}", f"{n}_db{i - 1} += {n}_d"]
            lines += self._rounded_gradient()
            lines += [f"{n}_dw{i - 1} += {net.product(f'tl.trans({n}_d)', net.rounded(net.h(i - 1)))}"]
            lines += [f"{n}_d = {net.product(f'{n}_d', f'tl.trans({n}_w{i - 1})')}"]
        lines += [f"{n}_d = {net.before_activation(1, f'{n}_d')}"]
        return [
            *lines,
            *self._rounded_gradient(),
            f"{n}_dw0 += {net.product(f'tl.trans({n}_d)', net.rounded('rows'))}",
        ]

    def _rounded_gradient(self) -> list[str]:
        d = f"{self.name}_d"
        return [f"{d} = {self.network.rounded(d)}"] if self.network.precision == "tf32" else []

    def store(self, at: int) -> list[str]:
        """Lines after the loop that write the gradients of each layer's weight and bias, one after the other.

        They go to `partial_ptr` from its entry `at` on.
        """
        n, net, (D, width, *_) = self.name, self.network, self.sizes
        units, row = net.units(1), f"{net.units(1)}[:, None]"
        here = f"({row} < {width})"
        lines = [
            f"tl.store(partial_ptr + {at} + {row} * {D} + column[None, :], {n}_dw0, "
            f"mask={here} & (column[None, :] < {D}))",
            f"tl.store(partial_ptr + {at + D * width} + {row} + 0 * column[None, :], {n}_dw0, "
            f"mask={here} & (column[None, :] == {D}))",
        ]
        at += (D + 1) * width
        for i in range(1, self.last):
            ins, outs, before, units = self.sizes[i], self.sizes[i + 1], f"{units}[None, :]", net.units(i + 1)
            row = f"{units}[:, None]"
            lines += [
                f"tl.store(partial_ptr + {at} + {row} * {ins} + {before}, {n}_dw{i}, "
                f"mask=({row} < {outs}) & ({before} < {ins}))",
                f"tl.store(partial_ptr + {at + ins * outs} + {units}, tl.sum({n}_db{i}, axis=0), "
                f"mask={units} < {outs})",
            ]
            at += (ins + 1) * outs
        return lines + self._store_last(at)

    # ---- the last layer: a few outputs

    def _dw(self, k: int) -> str:
        return f"{self.name}_dw{self.last}_{k}"

    def _db(self, k: int) -> str:
        return f"{self.name}_db{self.last}_{k}"

    @property
    def _rows(self) -> int:
        return rounded_up(self.sizes[-1])

    def _last_weights(self, gradients: list[str]) -> list[str]:
        n, h = self.name, self.network.h(self.last)
        if self.few:
            return [f"{self._dw(k)} += {g}[:, None] * {h}" for k, g in zip(self.network.outputs, gradients)]
        lines = [f"{n}_out = tl.zeros([BLOCK, {self._rows}], tl.float32)"]
        for k, g in zip(self.network.outputs, gradients):
            lines += [f"{n}_out += tl.where({n}_output[None, :] == {k}, {g}[:, None], 0.0)"]
        out = self.network.rounded(f"{n}_out")
        return [*lines, f"{n}_dw{self.last} += {self.network.product(f'tl.trans({out})', self.network.rounded(h))}"]

    def _store_last(self, at: int) -> list[str]:
        """Relative outputs' gradients sum to zero with that of the first one, which has none of its own."""
        n, units, width, outputs = self.name, self.network.units(self.last), self.sizes[self.last], self.sizes[-1]
        lines = []
        for k in self.network.outputs:
            if self.few:
                total = f"tl.sum({self._dw(k)}, axis=0)"
            else:
                total = f"tl.sum(tl.where({n}_output[:, None] == {k}, {n}_dw{self.last}, 0.0), axis=0)"
            lines += [f"{n}_dw_{k} = {total}", f"{n}_db_{k} = tl.sum({self._db(k)}, axis=0)"]
        if self.network.relative:
            for kind in ("w", "b"):
                lines += [f"{n}_d{kind}_0 = -({' + '.join(f'{n}_d{kind}_{k}' for k in self.network.outputs)})"]
        for k in range(outputs):
            lines += [f"tl.store(partial_ptr + {at + k * width} + {units}, {n}_dw_{k}, mask={units} < {width})"]
            lines += [f"tl.store(partial_ptr + {at + outputs * width + k}, {n}_db_{k})"]
        return lines
