"""What a CUDA graph holds, from a plain list of its nodes and edges: counts, names, the critical path.

Nothing here needs CUDA: `rlgraph.graph.device.bindings` reads the list, `rlgraph.graph.inspect.draw` draws it.
"""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

MOST_LETTERS = 60  # of a short name


class Node(NamedTuple):
    kind: str  # "kernel", "memcpy", "memset", "host", "child graph", "conditional", "empty", ...
    name: str = ""  # a kernel's full name, a copy's direction ("device-to-host")


class Contents(NamedTuple):
    """A graph as it was built: a child graph is a node, and has contents of its own."""

    nodes: Sequence[Node]
    edges: Sequence[tuple[int, int]]  # (before, after), indices of nodes
    children: dict[int, "Contents"]  # by index of the child graph's node


class Topology(NamedTuple):
    """All nodes of a graph and of the graphs inside it, in one list."""

    nodes: tuple[Node, ...]
    edges: tuple[tuple[int, int], ...]  # (before, after), indices of nodes


@dataclass(frozen=True)
class GraphInfo:
    """What a captured graph holds. `Graph.info()` gives it; `str` of it is a table.

    What happens inside a child graph is counted with the rest: its first nodes come after its own node, and what comes
    after a child graph comes after its last nodes. The body of a conditional node is not looked into.
    """

    name: str  # of the captured function
    nodes: dict[str, int]  # how many of each kind, most first
    kernels: dict[str, int]  # launches by full (mangled) name, most first
    copies: dict[str, int]  # memcpy nodes by direction, such as "device-to-host"
    edges: int
    critical_path: int  # nodes on the longest path: as many must run one after the other
    memory_bytes: int  # reserved on the device for the graph's pool, and for others that share it
    state_bytes: int  # of the tensors named as `state`
    input_bytes: int
    output_bytes: int
    capture_seconds: float
    instantiate_seconds: float
    topology: Topology = field(repr=False)

    def dot(self) -> str:
        """The picture as Graphviz's DOT. Repetitions in a chain of nodes are drawn once, with their number."""
        from rlgraph.graph.inspect import draw

        return draw.dot(self.topology, self.name)

    def svg(self) -> str:
        """The picture as SVG, drawn without Graphviz. Repetitions in a chain of nodes are drawn once."""
        from rlgraph.graph.inspect import svg

        return svg.svg(self.topology, self.name)

    def __str__(self) -> str:
        sizes = (f"{what} {_bytes(n)}" for what, n in (("inputs", self.input_bytes), ("outputs", self.output_bytes)))
        times = self.capture_seconds * 1e3, self.instantiate_seconds * 1e3
        rows = {
            "nodes": f"{sum(self.nodes.values()):,}: {_listed(self.nodes)}",
            "copies": _listed(self.copies),
            "edges": f"{self.edges:,}",
            "critical path": f"{self.critical_path:,} nodes",
            "memory": f"{_bytes(self.memory_bytes)} in its pool",
            "tensors": ", ".join([f"state {_bytes(self.state_bytes)}", *sizes]),
            "time": "{:.1f} ms to capture, {:.1f} ms to instantiate".format(*times),
            "kernels": f"{self.nodes.get('kernel', 0):,} launches of {len(self.kernels):,}",
        }
        lines = [f"CUDA graph of {self.name}", *(f"  {title:<13}  {text}" for title, text in rows.items())]
        short = Counter()
        for name, count in self.kernels.items():
            short[short_name(name)] += count
        return "\n".join([*lines, *(f"  {count:>13,}  {name}" for name, count in short.most_common())])


def describe(topology: Topology, name: str, **measured: float) -> GraphInfo:
    """A GraphInfo: what follows from the nodes and edges, and what was `measured` besides (its other fields)."""
    nodes = topology.nodes
    return GraphInfo(
        name=name,
        nodes=_counted(node.kind for node in nodes),
        kernels=_counted(node.name for node in nodes if node.kind == "kernel"),
        copies=_counted(node.name for node in nodes if node.kind == "memcpy"),
        edges=len(topology.edges),
        critical_path=critical_path(topology),
        topology=topology,
        **measured,
    )


def flatten(contents: Contents) -> Topology:
    """One list of nodes, with each child graph's behind the child graph's own node."""
    nodes, edges = list(contents.nodes), list(contents.edges)
    for index, child in contents.children.items():
        inside = flatten(child)
        if not inside.nodes:
            continue
        first = len(nodes)
        nodes += inside.nodes
        left, entered = ({edge[side] for edge in inside.edges} for side in (0, 1))
        roots, leaves = ([first + i for i in range(len(inside.nodes)) if i not in s] for s in (entered, left))
        after = [end for start, end in edges if start == index]
        edges = [edge for edge in edges if edge[0] != index]
        edges += [(index, root) for root in roots]
        edges += [(first + start, first + end) for start, end in inside.edges]
        edges += [(leaf, end) for leaf in leaves for end in after]
    return Topology(tuple(nodes), tuple(edges))


def critical_path(topology: Topology) -> int:
    """Nodes on the longest path; 0 of no nodes."""
    after = successors(len(topology.nodes), topology.edges)
    longest = [1] * len(topology.nodes)
    for node in in_order(after):
        for later in after[node]:
            longest[later] = max(longest[later], longest[node] + 1)
    return max(longest, default=0)


def successors(count: int, edges: Sequence[tuple[int, int]]) -> list[list[int]]:
    """For each of `count` nodes, those that come right after it."""
    after = [[] for _ in range(count)]
    for start, end in edges:
        after[start].append(end)
    return after


def in_order(after: list[list[int]]) -> list[int]:
    """All nodes, each behind those that it waits for (Kahn, 1962).

    Raises:
        ValueError: they wait for each other in a circle.
    """
    waiting = [0] * len(after)
    for later in after:
        for node in later:
            waiting[node] += 1
    order = [node for node, count in enumerate(waiting) if count == 0]
    for node in order:  # which grows meanwhile
        for later in after[node]:
            waiting[later] -= 1
            if waiting[later] == 0:
                order.append(later)
    if len(order) < len(after):
        raise ValueError(f"{len(after) - len(order)} of {len(after)} nodes wait for each other in a circle")
    return order


# ---- names

# In a mangled name: literals, back references and numbered lambdas, whose digits are no lengths; then a length.
_TOKEN = re.compile(r"L[a-z]n?\d+E|S[0-9A-Z]*_|T\d*_|E\d+_|(\d+)")
# What wraps an operation in torch's kernels, and says nothing about it.
_WRAPPERS = re.compile(
    r"_GLOBAL__N_.*|at|native|cuda|detail|internal|templates|memory|binary_internal|[Aa]rray|tuple|gpu_kernel_impl.*|"
    r"Tensor(Iterator|ListMetadata).*|(Binary|AUnary|BUnary|Unary)Functor|ReduceOp|func_wrapper_t|CUDAGeneratorImpl|"
    r"(Trivial)?OffsetCalculator|(Load|Store)With(out)?Cast|opmath_.*kernel.*"
)


def short_name(name: str) -> str:
    """A kernel's name for reading: the function, and which operations it was made for, where that can be told.

    By rule of thumb and not by demangling: different kernels can have the same short name.
    """
    if name.startswith("_Z"):
        start, own = _own_name(name)
        parts = [part for part in dict.fromkeys(_identifiers(name, start)) if not _WRAPPERS.fullmatch(part)]
        name = next(filter(_fits, (_with_parts(own, parts, n) for n in (2, 1))), own)
    return name if _fits(name) else f"{name[: MOST_LETTERS - 11]}…{name[-10:]}"


def _fits(name: str) -> bool:
    return len(name) <= MOST_LETTERS


def _with_parts(own: str, parts: list[str], most: int) -> str:
    listed = ", ".join([*parts[:most], *(["…"] if parts[most:] else [])])
    return f"{own}<{listed}>" if listed else own


def _own_name(name: str) -> tuple[int, str]:
    """Where the function's own name ends in a mangled name, and that name without its namespaces."""
    own, position = name, re.match(r"_ZN?[KVr]*(?:St|S_)?", name).end()
    while length := re.match(r"\d+", name[position:]):
        start = position + length.end()
        position = start + int(length[0])
        own = name[start:position]
    return position, own


def _identifiers(name: str, position: int) -> Iterator[str]:
    """The identifiers in a mangled name behind a position."""
    while position < len(name):
        token = _TOKEN.match(name, position)
        position = token.end() if token else position + 1
        if token and token[1]:
            yield name[position : position + int(token[1])]
            position += int(token[1])


def _counted(words: Iterator[str]) -> dict[str, int]:
    return dict(Counter(words).most_common())


def _listed(counts: dict[str, int]) -> str:
    return ", ".join(f"{count:,} {what}" for what, count in counts.items()) or "none"


def _bytes(number: float) -> str:
    """In the greatest unit that leaves at least one of it."""
    for unit in ("B", "KiB", "MiB"):
        if number < 1024:
            return f"{number:.0f} B" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    return f"{number:.1f} GiB"
