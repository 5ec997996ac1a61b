"""A CUDA graph as a plain list of its nodes and edges. Nothing here needs CUDA."""

from collections.abc import Sequence
from typing import NamedTuple


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
