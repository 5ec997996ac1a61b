"""The backward pass of a network inside a kernel: sums over rows stay on the chip until the last one.

Everything is written for a tile of BLOCK rows at a time; see `rlgraph.fused.networks` for the forward pass.
"""

from rlgraph.fused.networks import Network
from rlgraph.fused.policy import rounded_up

FEW = 3  # outputs whose last weights' gradients are sums of a tile each; more of them are one product


class Backward:
    """Writes what follows a network's forward pass, once the gradients of its `outputs` are known.

    Args:
        network: with at least one hidden layer.
        inputs: the kernel's variables [BLOCK] that its forward pass took.

    The weights' gradients are sums over all rows that a program sees. Those of a hidden layer's weights and of the
    first one's are products on the matrix units; the first one's inputs get a column of ones, which makes its bias.
    """

    def __init__(self, network: Network, inputs: list[str]):
        self.network, self.inputs = network, inputs
        self.name, self.sizes = network.name, network.sizes
        self.last = len(network.sizes) - 2
        self.few = len(network.outputs) <= FEW
        self.columns = rounded_up(len(inputs) + 1)

    def start(self) -> list[str]:
        """Lines before the loop over tiles: sums are zero."""
        n, width = self.name, rounded_up(self.sizes[self.last])
        lines = [f"{n}_column = tl.arange(0, {self.columns})"]
        lines += [f"{n}_dw0 = tl.zeros([{rounded_up(self.sizes[1])}, {self.columns}], tl.float32)"]
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

    def lines(self, gradients: list[str]) -> list[str]:
        """Lines of the loop: from the gradients [BLOCK] of the `outputs` to those of all weights.

        Rows that do not count must have gradients of zero.
        """
        net, n, last = self.network, self.name, self.last
        lines = [f"{self._db(k)} += {g}" for k, g in zip(net.outputs, gradients)]
        lines += self._last_weights(gradients)
        terms = [f"{g}[:, None] * {n}_w{last}_{k}[None, :]" for k, g in zip(net.outputs, gradients)]
        lines += [f"{n}_d = {terms[0]}", *(f"{n}_d += {term}" for term in terms[1:])]
        for i in range(last, 1, -1):
            lines += [f"{n}_d = {net.before_activation(i, f'{n}_d')}", f"{n}_db{i - 1} += {n}_d"]
            lines += [f"{n}_dw{i - 1} += {net.product(f'tl.trans({n}_d)', net.h(i - 1))}"]
            lines += [f"{n}_d = {net.product(f'{n}_d', f'tl.trans({n}_w{i - 1})')}"]
        lines += [f"{n}_d = {net.before_activation(1, f'{n}_d')}", *self._inputs_in_columns()]
        return [*lines, f"{n}_dw0 += {net.product(f'tl.trans({n}_d)', f'{n}_in')}"]

    def store(self, pointer: str) -> list[str]:
        """Lines after the loop that write the gradients of each layer's weight and bias, one after the other."""
        n, net, at = self.name, self.network, 0
        D, units, column = self.sizes[0], net.units(1), f"{n}_column[None, :]"
        rows = f"({units}[:, None] < {self.sizes[1]})"
        width = self.sizes[1]
        lines = [f"tl.store({pointer} + {units}[:, None] * {D} + {column}, {n}_dw0, mask={rows} & ({column} < {D}))"]
        at = D * width
        place = f"{pointer} + {at} + {units}[:, None] + {column} * 0"
        lines += [f"tl.store({place}, {n}_dw0, mask={rows} & ({column} == {D}))"]
        at += width
        for i in range(1, self.last):
            ins, outs = self.sizes[i], self.sizes[i + 1]
            rows, columns = f"{net.units(i + 1)}[:, None]", f"{net.units(i)}[None, :]"
            mask = f"({rows} < {outs}) & ({columns} < {ins})"
            lines += [f"tl.store({pointer} + {at} + {rows} * {ins} + {columns}, {n}_dw{i}, mask={mask})"]
            at += ins * outs
            units = net.units(i + 1)
            lines += [f"tl.store({pointer} + {at} + {units}, tl.sum({n}_db{i}, axis=0), mask={units} < {outs})"]
            at += outs
        return lines + self._store_last(pointer, at)

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
        return [*lines, f"{n}_dw{self.last} += {self.network.product(f'tl.trans({n}_out)', h)}"]

    def _inputs_in_columns(self) -> list[str]:
        n, D = self.name, len(self.inputs)
        lines = [f"{n}_in = tl.where({n}_column[None, :] == {D}, 1.0, tl.zeros([BLOCK, {self.columns}], tl.float32))"]
        return lines + [
            f"{n}_in += tl.where({n}_column[None, :] == {d}, {x}[:, None], 0.0)" for d, x in enumerate(self.inputs)
        ]

    def _store_last(self, pointer: str, at: int) -> list[str]:
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
            lines += [f"tl.store({pointer} + {at + k * width} + {units}, {n}_dw_{k}, mask={units} < {width})"]
            lines += [f"tl.store({pointer} + {at + outputs * width + k}, {n}_db_{k})"]
        return lines
