"""Write a traced program's nodes as Triton expressions."""

import collections
import keyword

import numpy as np

from rlgraph.kernels.nodes import BOOL, FLOAT, INT, Node, Program

# Text and binding strength (Python's order) of each operation; functions bind strongest.
INFIX = {
    "mul": ("*", 7), "div": ("/", 7), "add": ("+", 6), "sub": ("-", 6), "and": ("&", 5), "xor": ("^", 4),
    "or": ("|", 3), "lt": ("<", 2), "le": ("<=", 2), "gt": (">", 2), "ge": (">=", 2), "eq": ("==", 2), "ne": ("!=", 2),
}  # fmt: skip
PREFIX, ATOM = 8, 10
FUNCTIONS = {name: f"tl.{name}" for name in ("abs", "floor", "ceil", "exp", "log", "where")}
FUNCTIONS |= {name: f"library.{name}" for name in ("minimum", "maximum", "tanh", "sin", "cos")} | {"sqrt": "tl.sqrt_rn"}
TYPES = {BOOL: "tl.int1", FLOAT: "tl.float32"} | {
    np.dtype(name): f"tl.{name}" for name in ("int8", "int16", "int32", "int64", "uint8")
}
STEPS = ("floor", "ceil", "cast", "lt", "le", "gt", "ge", "eq", "ne")  # whose result jumps where its argument moves
BUILT_IN = ("range", "float")  # Python's, in a kernel's text
LONGEST_LINE = 88  # of an expression; longer ones get a variable in between


class Names:
    """Names in use; a taken one gets a number."""

    def __init__(self, taken: set[str]):
        self.taken = taken | {*keyword.kwlist, *BUILT_IN}

    def new(self, wanted: str) -> str:
        name, i = wanted, 2
        while name in self.taken:
            name, i = f"{wanted}_{i}", i + 1
        self.taken.add(name)
        return name


class Writing:
    """Writes a program's nodes as assignments, some at a time, arguments before their users.

    Args:
        program: see `rlgraph.kernels.nodes.Program`.
        inputs: the kernel's variable for each input that the program uses.
        names: no line assigns to one of these.
    """

    def __init__(self, program: Program, inputs: dict[str, str], names: Names):
        self.program, self.inputs, self.names = program, inputs, names
        self._uses = collections.Counter(arg for node in program.nodes() for arg in node.args)
        # A quotient one unit off may fall on the other side of a bound, or of a whole number.
        self._rounded = {arg for node in program.nodes() if node.op in STEPS for arg in node.args}
        self._outputs = {*program.outputs.values(), *program.kept.values()}
        self._written: dict[Node, tuple[str, int]] = {}

    def lines(self, nodes: list[Node]) -> list[str]:
        """Assignments that compute some nodes; what is used once and has no name becomes part of its user's."""
        lines = []
        for node in nodes:
            args = [self._written[arg] for arg in node.args]
            text, strength = _expression(node, args, self.inputs, exact=node in self._rounded)
            alone = node.name or node in self._outputs or self._uses[node] > 1 or len(text) > LONGEST_LINE
            if node.op not in ("input", "const") and alone:
                name = self.names.new(node.name or "v")
                lines.append(f"{name} = {text}")
                text, strength = name, ATOM
            self._written[node] = text, strength
        return lines

    def has(self, node: Node) -> bool:
        """Whether the node is written."""
        return node in self._written

    def block(self, node: Node) -> str:
        """A written node as a block [BLOCK]."""
        text = self._written[node][0]
        return _full(text, node.dtype) if node.is_const else text


def _expression(node: Node, args: list[tuple[str, int]], inputs: dict[str, str], exact: bool) -> tuple[str, int]:
    """A node's text and how strongly it binds; an `exact` quotient is rounded as IEEE has it."""
    if node.op == "input":
        return inputs[node.value], ATOM
    if node.is_const:
        return _literal(node)
    if node.op == "cast":
        return f"{_within(args[0], ATOM)}.to({TYPES[node.dtype]})", ATOM
    if node.op == "div" and exact:
        return f"tl.div_rn({args[0][0]}, {args[1][0]})", ATOM
    if node.op in INFIX:
        symbol, strength = INFIX[node.op]
        # Comparisons do not chain, and sums of floats must stay in order: the right side binds tighter.
        left = _within(args[0], strength + (node.op in ("lt", "le", "gt", "ge", "eq", "ne")))
        return f"{left} {symbol} {_within(args[1], strength + 1)}", strength
    if node.op in ("neg", "not"):
        return f"{'-' if node.op == 'neg' else '~'}{_within(args[0], PREFIX)}", PREFIX
    if node.op in ("mod", "floordiv") and node.args[0].is_const:
        args = [(_full(args[0][0], node.dtype), ATOM), args[1]]  # the library's take blocks
    called = ", ".join(text for text, _ in args)
    if node.op in ("mod", "floordiv"):
        return _floor_division(node, called), ATOM
    return f"{FUNCTIONS[node.op]}({called}){_as_declared(node)}", ATOM


def _as_declared(node: Node) -> str:
    """A cast where Triton, which takes a literal for float32 or int32, would give something else."""
    constants = [arg.is_const for arg in node.args[-2:]]
    wide = node.dtype in (FLOAT, INT) and not all(constants)
    if node.op not in ("where", "minimum", "maximum") or not any(constants) or wide:
        return ""
    return f".to({TYPES[node.dtype]})"


def _full(text: str, dtype: np.dtype) -> str:
    return f"tl.full([BLOCK], {text}, {TYPES[dtype]})"


def _floor_division(node: Node, called: str) -> str:
    name = "floor_mod" if node.op == "mod" else "floor_div"
    return f"library.{name}{'' if node.dtype == FLOAT else '_int'}({called})"


def _within(part: tuple[str, int], strength: int) -> str:
    text, own = part
    return text if own >= strength else f"({text})"


def _literal(node: Node) -> tuple[str, int]:
    if node.dtype == FLOAT:
        if not np.isfinite(node.value):
            return f'float("{node.value}")', ATOM
        value = np.float32(node.value)
        if 0 < abs(value) < np.finfo(np.float32).tiny:  # Triton would take it for a float64
            return f"tl.full([BLOCK], {value}, tl.float32)", ATOM
        text = str(value) if abs(value) < 3.4e38 else repr(float(value))  # the shortest text may round up, to infinity
    else:
        text = repr(node.value)
    return text, PREFIX if text.startswith("-") else ATOM


def literal(value: float) -> str:
    """A float32 constant."""
    return _literal(Node("const", (), FLOAT, float(value)))[0]
