"""Pictures of a graph's nodes: Graphviz's DOT, and an SVG that needs no Graphviz.

Hundreds of nodes are mostly the same few, again and again: what repeats along a chain is drawn once, with its number.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple
from xml.sax.saxutils import escape, quoteattr

import numpy as np

from rlgraph.graph.inspect import Node, Topology, in_order, short_name, successors

MOST_NESTED = 3  # repetitions inside repetitions
LONGEST_REPEATED = 1024  # nodes that are looked for as one repetition
COLORS = {"kernel": "#dbe9f6", "memcpy": "#fde9c9", "memset": "#ededed", "host": "#f6c1c1"}
OTHER_COLOR = "#e6dff3"
TIMES = "\N{MULTIPLICATION SIGN}"
BOX, ROW, BRACKET, MARGIN = (400, 22), 38, 52, 16  # px: a box; from row to row; room for a bracket; at the edges


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


def _boxes(items: Sequence[Box | Repeat]) -> Iterator[Box]:
    for item in items:
        if isinstance(item, Repeat):
            yield from _boxes(item.items)
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


# ---- SVG


def svg(topology: Topology, name: str) -> str:
    """An SVG: each chain a column of boxes, below those that it waits for; brackets beside what repeats."""
    folded = chains(topology)
    lengths = [sum(1 for _ in _boxes(chain.items)) for chain in folded]
    rows, columns = _layout(folded, lengths)
    parts = []
    for chain, length, row, column in zip(folded, lengths, rows, columns):
        x = MARGIN + column * (BOX[0] + MOST_NESTED * BRACKET)
        middle, bottom = x + BOX[0] // 2, _top(row + length - 1) + BOX[1]
        parts += [_svg_box(box, x, _top(row + i)) for i, box in enumerate(_boxes(chain.items))]
        parts += [
            _svg_arrow([(middle, _top(row + i) + BOX[1]), (middle, _top(row + i + 1))]) for i in range(length - 1)
        ]
        parts += _svg_brackets(chain.items, x + BOX[0], row)[0]
        for later in chain.after:
            # Down the own column, which is kept free so far, and over to the other one between two rows.
            elbow = middle, max(bottom, _top(rows[later] - 1) + BOX[1])
            target = MARGIN + columns[later] * (BOX[0] + MOST_NESTED * BRACKET) + BOX[0] // 2
            parts.append(_svg_arrow([(middle, bottom), elbow, (target, _top(rows[later]))]))
    width = 2 * MARGIN + (max(columns, default=0) + 1) * (BOX[0] + MOST_NESTED * BRACKET)
    height = _top(max((row + length for row, length in zip(rows, lengths)), default=0)) + MARGIN
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="11">',
        f"<title>{escape(name)}</title>",
        '<defs><marker id="arrow" markerWidth="7" markerHeight="6" refX="7" refY="3" orient="auto">'
        '<path d="M0,0 L7,3 L0,6 z" fill="#555"/></marker></defs>',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="{MARGIN}" y="{MARGIN + 8}" font-weight="bold">{escape(name)}</text>',
    ]
    return "\n".join([*head, *parts, "</svg>", ""])


def _layout(folded: list[Chain], lengths: list[int]) -> tuple[list[int], list[int]]:
    """The first row of each chain, by the longest path to it, and its column."""
    rows = [0] * len(folded)
    for i, chain in enumerate(folded):  # each behind those that it waits for
        for later in chain.after:
            rows[later] = max(rows[later], rows[i] + lengths[i])
    columns, free = [0] * len(folded), []  # from which row on a column is free
    wished = {}
    for i in sorted(range(len(folded)), key=rows.__getitem__):
        fitting = [column for column, row in enumerate(free) if row <= rows[i]]
        column = wished.get(i) if wished.get(i) in fitting else next(iter(fitting), len(free))
        if column == len(free):
            free.append(0)
        columns[i] = column
        free[column] = max([rows[i] + lengths[i], *(rows[later] for later in folded[i].after)])
        for later in folded[i].after:  # below the leftmost of those that it waits for
            wished[later] = min(column, wished.get(later, column))
    return rows, columns


def _top(row: int) -> int:
    return 2 * MARGIN + row * ROW


def _svg_box(box: Box, x: int, y: int) -> str:
    color = COLORS.get(box.node.kind, OTHER_COLOR)
    return (
        f'<g><title>{escape(box.node.name or box.node.kind)}</title><rect x="{x}" y="{y}" width="{BOX[0]}" '
        f'height="{BOX[1]}" rx="3" fill={quoteattr(color)} stroke="#777"/>'
        f'<text x="{x + BOX[0] // 2}" y="{y + 15}" text-anchor="middle">{escape(box.label)}</text></g>'
    )


def _svg_arrow(points: list[tuple[int, int]]) -> str:
    path = " ".join(f"{x},{y}" for x, y in points)
    return f'<polyline points="{path}" fill="none" stroke="#555" marker-end="url(#arrow)"/>'


def _svg_brackets(items: Sequence[Box | Repeat], right: int, row: int) -> tuple[list[str], int, int]:
    """Brackets at the right of some items; the row behind them, and how deep they are nested: the inner ones first."""
    parts, deepest = [], 0
    for item in items:
        if not isinstance(item, Repeat):
            row += 1
            continue
        inside, after, depth = _svg_brackets(item.items, right, row)
        x, top, bottom = right + 6 + depth * BRACKET, _top(row), _top(after - 1) + BOX[1]
        parts += [
            *inside,
            f'<path d="M{x - 4},{top} H{x} V{bottom} H{x - 4}" fill="none" stroke="#c0392b"/>',
            f'<text x="{x + 3}" y="{(top + bottom) // 2 + 4}" fill="#c0392b">{TIMES} {item.count}</text>',
        ]
        row, deepest = after, max(deepest, depth + 1)
    return parts, row, deepest
