"""An SVG of a graph's nodes: columns of boxes, brackets beside what repeats, and arrows with corners."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple
from xml.sax.saxutils import escape, quoteattr

from rlgraph.graph.inspect.draw import COLORS, OTHER_COLOR, TIMES, Box, Chain, Repeat, boxes, chains
from rlgraph.graph.topology import Topology

# In px.
HIGH, NARROWEST, LETTER, PADDING = 22, 60, 6.2, 16  # a box: its height; its width by its label's letters
MARGIN, BRACKET, APART = 16, 52, 28  # at the edges; for a bracket; between columns
GAP, LANE = 16, 8  # between rows; for each line that goes sideways there
ASIDE = 8  # from a box's middle to where lines from and to other columns begin and end


class Places(NamedTuple):
    """Where everything is, in px."""

    tops: list[int]  # of each row
    lefts: list[int]  # of each column
    widths: list[int]  # of each column's boxes
    sideways: dict[tuple[int, int], int]  # y of what an arrow from one chain to another runs sideways

    def middle(self, column: int) -> int:
        return self.lefts[column] + self.widths[column] // 2


def svg(topology: Topology, name: str) -> str:
    """Each chain is a column of boxes, below those that it waits for."""
    folded = chains(topology)
    lengths = [sum(1 for _ in boxes(chain.items)) for chain in folded]
    rows, columns = _layout(folded, lengths)
    places = _places(folded, lengths, rows, columns)
    parts = []
    for i, chain in enumerate(folded):
        parts += _column(chain, rows[i], columns[i], places)
        last = rows[i] + lengths[i] - 1
        parts += [_between(i, last, later, rows[later], columns, places) for later in chain.after]
    depths = [_nesting(chain.items) for chain in folded]
    right = [places.lefts[c] + places.widths[c] + depth * BRACKET for c, depth in zip(columns, depths)]
    width = max([*right, int(len(name) * LETTER * 1.2) + MARGIN]) + MARGIN
    height = max((top + HIGH for top in places.tops), default=2 * MARGIN) + MARGIN
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


# ---- places


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


def _places(folded: list[Chain], lengths: list[int], rows: list[int], columns: list[int]) -> Places:
    count = max(columns, default=-1) + 1
    widths, depths = [NARROWEST] * count, [0] * count
    for chain, column in zip(folded, columns):
        longest = max(len(box.label) for box in boxes(chain.items))
        widths[column] = max(widths[column], int(longest * LETTER) + PADDING)
        depths[column] = max(depths[column], _nesting(chain.items))
    lefts, x = [], MARGIN
    for width, depth in zip(widths, depths):
        lefts.append(x)
        x += width + depth * BRACKET + APART

    lanes = _lanes(folded, rows, columns)
    tops, y = [], 2 * MARGIN
    for row in range(max((row + length for row, length in zip(rows, lengths)), default=0)):
        y += LANE * len(set(lanes.get(row, {}).values()))
        tops.append(y)
        y += HIGH + GAP
    sideways = {}
    for row, of_row in lanes.items():
        lowest = max(of_row.values())
        sideways |= {edge: tops[row] - GAP + 4 - LANE * (lowest - lane) for edge, lane in of_row.items()}
    return Places(tops, lefts, widths, sideways)


def _lanes(folded: list[Chain], rows: list[int], columns: list[int]) -> dict[int, dict[tuple[int, int], int]]:
    """By row, for each arrow that comes to it from another column, on which of the lines above the row it runs.

    Those from one chain share a line, and so do those to one chain that have no such company.
    """
    lanes, shared = {}, {}
    for i, chain in enumerate(folded):
        across = [later for later in chain.after if columns[later] != columns[i]]
        for later in across:
            line = ("from", i) if len(across) > 1 else ("to", later)
            taken = shared.setdefault(rows[later], {})
            lanes.setdefault(rows[later], {})[i, later] = taken.setdefault(line, len(taken))
    return lanes


def _nesting(items: Sequence[Box | Repeat]) -> int:
    """How deep repetitions are nested."""
    return max((1 + _nesting(item.items) for item in items if isinstance(item, Repeat)), default=0)


# ---- shapes


def _column(chain: Chain, row: int, column: int, places: Places) -> Iterator[str]:
    """A chain's boxes, the arrows in it, and its brackets."""
    x, width, middle = places.lefts[column], places.widths[column], places.middle(column)
    for i, box in enumerate(boxes(chain.items)):
        top = places.tops[row + i]
        if i:
            yield _arrow([(middle, places.tops[row + i - 1] + HIGH), (middle, top)])
        yield _box(box, x, top, width)
    yield from _brackets(chain.items, x + width, row, places.tops)[0]


def _between(chain: int, last: int, later: int, row: int, columns: list[int], places: Places) -> str:
    """From a chain's last row to another chain's first one.

    Down the own column, which is kept free so far, and over to the other one above its row.
    """
    start, end = places.middle(columns[chain]), places.middle(columns[later])
    bottom, top = places.tops[last] + HIGH, places.tops[row]
    if columns[chain] == columns[later]:
        return _arrow([(start, bottom), (end, top)])
    y = places.sideways[chain, later]
    return _arrow([(start + ASIDE, bottom), (start + ASIDE, y), (end - ASIDE, y), (end - ASIDE, top)])


def _box(box: Box, x: int, y: int, width: int) -> str:
    color = COLORS.get(box.node.kind, OTHER_COLOR)
    return (
        f'<g><title>{escape(box.node.name or box.node.kind)}</title><rect x="{x}" y="{y}" width="{width}" '
        f'height="{HIGH}" rx="3" fill={quoteattr(color)} stroke="#777"/>'
        f'<text x="{x + width // 2}" y="{y + 15}" text-anchor="middle">{escape(box.label)}</text></g>'
    )


def _arrow(points: list[tuple[int, int]]) -> str:
    path = " ".join(f"{x},{y}" for x, y in points)
    return f'<polyline points="{path}" fill="none" stroke="#555" marker-end="url(#arrow)"/>'


def _brackets(items: Sequence[Box | Repeat], right: int, row: int, tops: list[int]) -> tuple[list[str], int, int]:
    """Brackets at the right of some items; the row behind them, and how deep they are nested: the inner ones first."""
    parts, deepest = [], 0
    for item in items:
        if not isinstance(item, Repeat):
            row += 1
            continue
        inside, after, depth = _brackets(item.items, right, row, tops)
        x, top, bottom = right + 6 + depth * BRACKET, tops[row], tops[after - 1] + HIGH
        parts += [
            *inside,
            f'<path d="M{x - 4},{top} H{x} V{bottom} H{x - 4}" fill="none" stroke="#c0392b"/>',
            f'<text x="{x + 3}" y="{(top + bottom) // 2 + 4}" fill="#c0392b">{TIMES} {item.count}</text>',
        ]
        row, deepest = after, max(deepest, depth + 1)
    return parts, row, deepest
