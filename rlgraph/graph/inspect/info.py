"""What a CUDA graph holds, from a plain list of its nodes and edges: counts, sizes and a table of them."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from rlgraph.graph.inspect.draw import dot
from rlgraph.graph.inspect.names import short_name
from rlgraph.graph.inspect.svg import svg
from rlgraph.graph.topology import Topology, critical_path


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
        return dot(self.topology, self.name)

    def svg(self) -> str:
        """The picture as SVG, drawn without Graphviz. Repetitions in a chain of nodes are drawn once."""
        return svg(self.topology, self.name)

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
