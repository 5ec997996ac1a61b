"""A graph's nodes in few boxes, and Graphviz's DOT of them; `svg.py` draws them without Graphviz.

Hundreds of nodes are mostly the same few, again and again: what repeats along a chain is drawn once, with its number.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from rlgraph.graph.inspect.names import short_name
from rlgraph.graph.topology import Node, Topology, in_order, successors

MOST_NESTED = 3  # repetitions inside repetitions
LONGEST_REPEATED = 1024  # nodes that are looked for as one repetition
COLORS = {"kernel": "#dbe9f6", "memcpy": "#fde9c9", "memset": "#ededed", "host": "#f6c1c1"}
OTHER_COLOR = "#e6dff3"
TIMES = "\N{MULTIPLICATION SIGN}"


class Box(NamedTuple):
    """A node; or `count` of them, the same, one after the other."""

    node: Node
    count: int

    @property
    def label(self) -> str:
        kind, name = self.node
        text = short_name(name) if kind == "kernel" else f"{kind} {name}".strip()
        return text if self.count == 1 else f"{text} {TIMES} {self.count}"


class Repeat(NamedTuple):
    """Several items, `count` times in turn."""

    items: tuple["Box | Repeat", ...]
    count: int


class Chain(NamedTuple):
    """Nodes that only follow each other."""

    items: list[Box | Repeat]
    after: list[int]  # the chains that wait for this one


# ---- folding


def chains(topology: Topology) -> list[Chain]:
    """The graph as chains: each node is in one, and only whole chains wait for each other."""
    after = successors(len(topology.nodes), topology.edges)
    before = successors(len(topology.nodes), [(end, start) for start, end in topology.edges])

    def inner(node: int) -> bool:
        """Whether a node does nothing but follow another one, which nothing else follows."""
        return len(before[node]) == 1 and len(after[before[node][0]]) == 1

    members = []
    for node in (node for node in in_order(after) if not inner(node)):
        chain = [node]
        while len(after[node]) == 1 and inner(after[node][0]):
            node = after[node][0]
            chain.append(node)
        members.append(chain)
    starts = {chain[0]: i for i, chain in enumerate(members)}
    return [
        Chain(fold([topology.nodes[node] for node in chain]), [starts[node] for node in after[chain[-1]]])
        for chain in members
    ]


def fold(nodes: Sequence[Node], depth: int = MOST_NESTED) -> list[Box | Repeat]:
    """A chain with its repetitions folded: at each node the one that covers most, the shortest of equal ones."""
    period, covered = _repetitions(nodes, LONGEST_REPEATED if depth else 1)
    items, i = [], 0
    while i < len(nodes):
        p, count = period[i], covered[i] // period[i]
        items.append(Box(nodes[i], count) if p == 1 else Repeat(tuple(fold(nodes[i : i + p], depth - 1)), count))
        i += covered[i]
    return items


def _repetitions(nodes: Sequence[Node], longest: int) -> tuple[list[int], list[int]]:
    """For each node the length of the repetition that begins there, and how many nodes all its turns cover."""
    numbers = {node: i for i, node in enumerate(dict.fromkeys(nodes))}
    codes, n = np.array([numbers[node] for node in nodes], dtype=np.int64), len(nodes)
    period, covered = np.ones(n, dtype=np.int64), np.ones(n, dtype=np.int64)
    for p in range(1, min(longest, n // 2) + 1):
        start = np.arange(n - p)
        # From each node, how many in a row equal the one p later: the distance to the next that does not.
        different = np.where(codes[p:] != codes[:-p], start, n - p)
        same = np.minimum.accumulate(different[::-1])[::-1] - start
        turns = same // p + 1
        better = (turns > 1) & (turns * p > covered[: n - p])
        covered[: n - p][better], period[: n - p][better] = (turns * p)[better], p
    return period.tolist(), covered.tolist()


def boxes(items: Sequence[Box | Repeat]) -> Iterator[Box]:
    for item in items:
        if isinstance(item, Repeat):
            yield from boxes(item.items)
        else:
            yield item


# ---- DOT


def dot(topology: Topology, name: str) -> str:
    """Graphviz's DOT: a box for each node, a frame around what repeats."""
    lines = [f"digraph {_quoted(name)} {{", '  node [shape=box, style=filled, fontname="sans-serif"];']
    folded, ends, number = chains(topology), [], 0
    for chain in folded:
        first = number
        text, number = _dot_items(chain.items, number, "  ")
        ends.append((first, number - 1))
        lines += [*text, *(f"  n{i} -> n{i + 1};" for i in range(first, number - 1))]
    for chain, (_, last) in zip(folded, ends):
        lines += [f"  n{last} -> n{ends[later][0]};" for later in chain.after]
    return "\n".join([*lines, "}", ""])


def _dot_items(items: Sequence[Box | Repeat], number: int, indent: str) -> tuple[list[str], int]:
    """Lines for some items, and the number of the next box."""
    lines = []
    for item in items:
        if isinstance(item, Repeat):
            inside, after = _dot_items(item.items, number, f"{indent}  ")
            # The first box and the nesting tell a frame from all others.
            frame = f"{indent}subgraph cluster_{number}_{len(indent)} {{"
            lines += [frame, f'{indent}  label="{TIMES} {item.count}";', *inside, f"{indent}}}"]
            number = after
        else:
            about = f"label={_quoted(item.label)}, tooltip={_quoted(item.node.name or item.node.kind)}"
            color = COLORS.get(item.node.kind, OTHER_COLOR)
            lines.append(f'{indent}n{number} [{about}, fillcolor="{color}"];')
            number += 1
    return lines, number


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
