"""Environment files: a small right one, of which one or two parts are made wrong, or otherwise right."""

import random
from collections.abc import Callable
from pathlib import Path

from fuzz_commands import training
from fuzz_oracle import EITHER, HARMLESS, REFUSED, Case

# ---- a definition that is right, in parts: a mass on a line, which a push moves

IMPORTS = """import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete
"""
PARTS = {
    "imports": IMPORTS,
    "ID": 'ID = "Line-v0"',
    "MAX_EPISODE_STEPS": "MAX_EPISODE_STEPS = 5",
    "REWARD_THRESHOLD": "REWARD_THRESHOLD = None",
    "RESET_DRAWS": "RESET_DRAWS = 1",
    "STEP_DRAWS": "STEP_DRAWS = 1",
    "State": "class State(NamedTuple):\n    x: Any\n    v: Any",
    "Params": "@dataclass(frozen=True)\nclass Params:\n    mass: float = 1.0\n    wind: float = 0.1",
    "observation_space": "def observation_space(p):\n    return Box(-np.inf, np.inf, shape=(2,), dtype=np.float32)",
    "action_space": "def action_space(p):\n    return Discrete(2)",
    "reset": "def reset(xp, u, p):\n    return State(2 * u[:, 0] - 1, xp.zeros_like(u[:, 0]))",
    "step": """def step(xp, s, action, u, p):
    push = PUSH
    v = 0.9 * s.v + (push + p.wind * (u[:, 0] - 0.5)) / p.mass
    x = s.x + 0.1 * v
    reward = 1 - abs(x)
    return State(x, v), reward, abs(x) > 2""",
    "observe": "def observe(xp, s, p):\n    return xp.stack([s.x, s.v], axis=-1)",
}
PUSHES = {
    "Discrete": "xp.where(action == 1, xp.ones_like(s.x), -xp.ones_like(s.x))",
    "Box": "xp.clip(action[:, 0], -1, 1)",
}
BOX = "def action_space(p):\n    return Box(-1, 1, shape=(1,), dtype=np.float32)"
FUNCTIONS = ("reset", "step", "observe")
SPACES = ("observation_space", "action_space")


class Definition:
    """A file that is being made.

    Args:
        backend: that will train on it.
        box: whether actions are of a Box.
    """

    def __init__(self, backend: str, box: bool):
        self.backend, self.box = backend, box
        self.parts = dict(PARTS, step=PARTS["step"].replace("PUSH", PUSHES["Box" if box else "Discrete"]))
        if box:
            self.parts["action_space"] = BOX
        self.data: bytes | None = None  # in place of the parts
        self.siblings: dict[str, str] = {}  # files beside it

    def replace(self, part: str, old: str, new: str) -> None:
        text = self.parts[part].replace(old, new)
        if text == self.parts[part]:
            raise ValueError(f"{part} has no {old!r}")
        self.parts[part] = text

    def first(self, part: str, statement: str) -> None:
        """Make a statement the first one of a function, or put it before another part."""
        if not self.parts[part].startswith("def "):
            self.parts[part] = f"{statement}\n{self.parts[part]}"
            return
        head, body = self.parts[part].split("\n", 1)
        inner = "\n".join("    " + line for line in statement.splitlines())
        self.parts[part] = f"{head}\n{inner}\n{body}"

    def write(self, folder: Path) -> None:
        text = "\n\n\n".join(self.parts.values()) + "\n"
        (folder / "env.py").write_bytes(text.encode() if self.data is None else self.data)
        for name, content in self.siblings.items():
            (folder / name).write_text(content)


# ---- mutations: each changes a definition, and says what it did and whether that must be refused

Made = tuple[str, str]
WRONG_CONSTANTS = {
    "MAX_EPISODE_STEPS": [
        "0",
        "-1",
        "-5",
        "2.5",
        "'100'",
        "[10]",
        "10**25",
        "float('nan')",
        "float('inf')",
        "1j",
        "{}",
        "b'5'",
        "()",
    ],
    "REWARD_THRESHOLD": ["'100'", "[1]", "{}", "(1,)", "1j", "object()", "10**400", "len", "np.zeros(3)", "b''"],
    "RESET_DRAWS": ["-1", "1.5", "'1'", "None", "10**25", "float('nan')", "[1]", "float('inf')", "np.ones(2)"],
    "STEP_DRAWS": ["-1", "1.5", "'1'", "None", "10**25", "float('nan')", "[1]", "(1,)", "-10**25"],
    "ID": ["None", "5", "[]", "b'x'", "('a',)", "float('nan')", "object()", "{}"],
}
OTHER_CONSTANTS = {  # right, and what may be
    "MAX_EPISODE_STEPS": [
        ("1", HARMLESS),
        ("np.int64(7)", EITHER),
        ("True", EITHER),
        ("2**31", EITHER),
        ("7.0", EITHER),
    ],
    "REWARD_THRESHOLD": [
        ("5", HARMLESS),
        ("-1.5", HARMLESS),
        ("float('nan')", EITHER),
        ("True", EITHER),
        ("np.float32(3)", EITHER),
    ],
    "RESET_DRAWS": [("3", HARMLESS), ("True", EITHER), ("np.int64(2)", EITHER), ("0", EITHER)],
    "STEP_DRAWS": [("3", HARMLESS), ("True", EITHER), ("np.int64(2)", EITHER)],
    "ID": [
        ("'Länge-v0'", HARMLESS),
        ("'a/b'", EITHER),
        ("''", EITHER),
        ("'a\\nb'", EITHER),
        ("'../x'", EITHER),
        ("'\\x1b[1m'", EITHER),
    ],
}


def wrong_constant(draw: random.Random, d: Definition) -> Made:
    name = draw.choice([*WRONG_CONSTANTS])
    value = draw.choice(WRONG_CONSTANTS[name])
    d.parts[name] = f"{name} = {value}"
    return f"{name} = {value}", REFUSED


def other_constant(draw: random.Random, d: Definition) -> Made:
    name = draw.choice([*OTHER_CONSTANTS])
    value, verdict = draw.choice(OTHER_CONSTANTS[name])
    d.parts[name] = f"{name} = {value}"
    return f"{name} = {value}", verdict


def missing_part(draw: random.Random, d: Definition) -> Made:
    name = draw.choice([name for name in d.parts if name != "imports"])
    del d.parts[name]
    return f"no {name}", REFUSED


FROZEN = "@dataclass(frozen=True)\nclass Params:\n    "
WIND = "\n    wind: float = 0.1"
WRONG_PARAMS = [
    f"{FROZEN}mass: float{WIND}",
    f"@dataclass\nclass Params:\n    mass: float = 1.0{WIND}",
    "class Params:\n    mass = 1.0\n    wind = 0.1",
    "Params = {'mass': 1.0, 'wind': 0.1}",
    "Params = None",
    f"{FROZEN}mass: Any = field(default_factory=lambda: [1.0]){WIND}",
    f"{FROZEN}mass: Any = field(default_factory=lambda: np.ones(1)){WIND}",
    f"{FROZEN}mass: Any = field(default_factory=lambda: 1 / 0){WIND}",
    f"{FROZEN}mass: float = 1.0{WIND}\n\n    def __post_init__(self):\n        RAISE",
    f"{FROZEN}mass: float = 1.0{WIND}\n\n    def __hash__(self):\n        RAISE",
    f"{FROZEN}mass: str = 'heavy'{WIND}",
]


def wrong_params(draw: random.Random, d: Definition) -> Made:
    text = draw.choice(WRONG_PARAMS)
    d.parts["Params"] = text.replace("RAISE", draw.choice(EXCEPTIONS))
    return "Params", REFUSED


WRONG_SPACES = {
    "observation_space": [
        "None",
        "5",
        "Discrete(4)",
        "Dict({})",
        "MultiDiscrete([2])",
        "Box(1, -1, shape=(2,), dtype=np.float32)",
        "Box(-1, 1, shape=(3,), dtype=np.float32)",
        "Box(0, 255, shape=(2,), dtype=np.uint8)",
        "Box",
        "'Box'",
        "Box(-1, 1, shape=(2,), dtype=np.float64)",
        "Box(-1, 1, shape=(), dtype=np.float32)",
    ],
    "action_space": [
        "None",
        "2",
        "Dict({})",
        "MultiDiscrete([2, 2])",
        "MultiBinary(2)",
        "Box(0, 3, shape=(1,), dtype=np.int32)",
        "Discrete(0)",
        "Discrete(-2)",
        "Discrete(2.5)",
        "Discrete('2')",
        "Box(1, -1, shape=(1,), dtype=np.float32)",
        "Box(-1, 1, shape=(1,), dtype=np.uint8)",
        "Discrete",
        "[Discrete(2)]",
        "Box(0, 1, shape=(1,), dtype=bool)",
    ],
}


def wrong_space(draw: random.Random, d: Definition) -> Made:
    name = draw.choice([*WRONG_SPACES])
    value = draw.choice(WRONG_SPACES[name])
    d.parts[name] = f"def {name}(p):\n    return {value}"
    return f"{name} {value}", REFUSED


def other_space(draw: random.Random, d: Definition) -> Made:
    if d.box:
        value, verdict = draw.choice(
            [
                ("Box(-1, 1, shape=(1,), dtype=np.float64)", EITHER),
                ("Box(-1, 1, shape=(3,), dtype=np.float32)", HARMLESS),
                ("Box(-np.inf, np.inf, shape=(1,), dtype=np.float32)", EITHER),
                ("Box(0, 0, shape=(1,), dtype=np.float32)", EITHER),
                ("Box(-0.001, 0.001, shape=(1,), dtype=np.float32)", HARMLESS),
                ("Box(np.nan, 1, shape=(1,))", EITHER),
            ]
        )
    else:
        value, verdict = draw.choice(
            [
                ("Discrete(1)", EITHER),
                ("Discrete(3, start=-1)", HARMLESS),
                ("Discrete(2, start=5)", HARMLESS),
                ("Discrete(50)", HARMLESS),
                ("Discrete(np.int64(2))", HARMLESS),
                ("Discrete(2, start=2**40)", EITHER),
            ]
        )
    d.parts["action_space"] = f"def action_space(p):\n    return {value}"
    return f"action_space {value}", verdict


EXCEPTIONS = [
    "raise ValueError('no')",
    "raise ValueError('one line\\nand another\\n')",
    "raise ValueError",
    "raise OSError(2, 'No such file or directory', 'data.csv')",
    "raise BrokenPipeError",
    "raise BrokenPipeError(32, 'Broken pipe')",
    "raise PermissionError(13, 'Permission denied', '/etc/x')",
    "raise FileNotFoundError('gone')",
    "open('/nowhere/at/all')",
    "raise SystemExit",
    "raise SystemExit(0)",
    "raise SystemExit(3)",
    "raise SystemExit('bye')",
    "import sys; sys.exit()",
    "exit(0)",
    "raise RecursionError('too deep')",
    "(lambda f: f(f))(lambda f: f(f))",
    "raise MemoryError",
    "raise StopIteration",
    "raise GeneratorExit",
    "raise AssertionError",
    "assert False, 'never'",
    "raise KeyError('x')",
    "1 / 0",
    "10.0 ** 1000",
    "undefined_name",
    "None.x",
    "raise UnicodeDecodeError('utf-8', b'\\xff', 0, 1, 'bad byte')",
    "raise RuntimeError('out of memory')",
    "raise NotImplementedError('CUDA out of memory')",
    "raise BaseException('base')",
    "raise ExceptionGroup('many', [ValueError('a'), OSError('b')])",
    "raise type('Mute', (Exception,), {'__str__': lambda self: 1 / 0, '__repr__': lambda self: 1 / 0})",
    "raise ImportError('no module')",
    "import a_module_that_is_not_there",
    "raise Warning('x')",
    "raise ValueError('\\x1b[31mred')",
    "raise ValueError('x' * 5000)",
    "import subprocess; subprocess.run(['false'], check=True)",
]


def exception(draw: random.Random, d: Definition) -> Made:
    """In any function or space, or while the file loads; always, or only where a check may not look."""
    where = draw.choice([*FUNCTIONS, *FUNCTIONS, *SPACES, "reset", "State", "ID"])
    statement = draw.choice(EXCEPTIONS)
    condition = ""
    if where in FUNCTIONS:
        arrays = {"reset": "u[:, 0]", "step": "s.x", "observe": "s.x"}[where]
        condition = draw.choice(["", "", 'if xp.__name__ != "numpy":', f"if len({arrays}) not in (3, 1):"])
    lines = "\n".join(f"    {line}" if condition else line for line in statement.split("; "))
    d.first(where, f"{condition}\n{lines}" if condition else lines)
    return f"{statement} in {where} {condition}", REFUSED


WRITES = {
    "reset": ["u[:, 0] = 0.5", "u *= 0.5", "u[0] = 0", "u[:] = u[:, :1]"],
    "step": [
        "s.x[:] = 0",
        "s.v[0] = 1",
        "u[:, 0] = 0.5",
        "u -= 0.5",
        "s.x.__iadd__(s.v)",
        "action[:] = 0",
        "np.copyto(s.x, s.v)",
    ],
    "observe": ["s.x[:] = 0", "s.v[s.v > 0] = 0", "s.x.__imul__(0.5)"],
}


def write_into_an_argument(draw: random.Random, d: Definition) -> Made:
    where = draw.choice(FUNCTIONS)
    statement = draw.choice(WRITES[where])
    d.first(where, statement)
    return f"{statement} in {where}", REFUSED


def write_through_a_view(draw: random.Random, d: Definition) -> Made:
    """The new state shares what it then writes into."""
    d.replace("step", "    return State(x, v)", "    x = s.x\n    x += 0.1 * v\n    return State(x, v)")
    return "x = s.x; x += … in step", REFUSED if d.backend == "torch" else EITHER  # of JAX's, += makes a new one


HIDDEN = [
    ("count = [0]", "count[0] += 1\nhidden = count[0] * 0.01"),
    ("count = 0", "global count\ncount += 1\nhidden = count % 2 * 0.5"),
    ("seen = []", "seen.append(1)\nhidden = len(seen)"),
    ("import itertools\ncounter = itertools.count()", "hidden = next(counter) * 0.1"),
    ("import random", "hidden = random.random()"),
    ("", "hidden = np.random.rand()"),
    ("", "hidden = np.random.default_rng().normal()"),
    ("import time", "hidden = time.perf_counter() % 1"),
    ("class Memory:\n    last = 0.0", "Memory.last += 0.25\nhidden = Memory.last"),
    ("import os", "hidden = int.from_bytes(os.urandom(2), 'big') / 65536"),
    ("", "hidden = reset.__dict__.setdefault('calls', []).append(0) or len(reset.calls)"),
]


def hidden_state(draw: random.Random, d: Definition) -> Made:
    """What a call gives depends on what was called before, or on chance."""
    where = draw.choice(FUNCTIONS)
    before, statement = draw.choice(HIDDEN)
    used = {
        "reset": ("2 * u[:, 0] - 1", "2 * u[:, 0] - 1 + hidden"),
        "step": ("1 - abs(x)", "1 - abs(x) + hidden"),
        "observe": ("s.v]", "s.v + hidden]"),
    }
    d.parts["ID"] += f"\n{before}"
    d.replace(where, *used[where])
    d.first(where, statement)
    return f"hidden state, {statement!r} in {where}", REFUSED


WRONG_RESULTS = {
    "reset": [
        ("return State(2 * u[:, 0] - 1, xp.zeros_like(u[:, 0]))", text)
        for text in (
            "return None",
            "return (u[:, 0], u[:, 0])",
            "return State(u[:, 0], None)",
            "return State(u[:, 0], 0.0)",
            "return State(u, u[0])",
            "return State(u[:, 0], xp.zeros_like(u[0, 0]))",
            "return State(u[:2, 0], u[:2, 0])",
            "return State(xp.ones(3), xp.zeros_like(u[:, 0]))",
            "return State([0.0] * len(u), u[:, 0])",
            "return State(xp.zeros_like(u[:, 0], dtype=xp.float64), u[:, 0])",
            "return State(xp.zeros_like(u[:, 0], dtype=xp.complex64), u[:, 0])",
            "yield State(u[:, 0], u[:, 0])",
            "return dict(x=u[:, 0], v=u[:, 0])",
            "return State",
        )
    ],
    "step": [
        ("return State(x, v), reward, abs(x) > 2", text)
        for text in (
            "return None",
            "return State(x, v), reward",
            "return State(x, v), reward, abs(x) > 2, {}",
            "return State(x, v), reward, abs(x) > 2, abs(x) > 3, {}",
            "return (x, v), reward, abs(x) > 2",
            "return State(x, v), reward[:, None], abs(x) > 2",
            "return State(x, v), 1.0, abs(x) > 2",
            "return State(x, v), reward, False",
            "return State(x, v), reward, xp.where(abs(x) > 2, xp.ones_like(x), xp.zeros_like(x))",
            "return State(x, v), abs(x) > 1, abs(x) > 2",
            "return State(x, v), reward.sum(), abs(x) > 2",
            "return State(x[:, None], v), reward, abs(x) > 2",
            "return State(x > 0, v), reward, abs(x) > 2",
            "return State(x, v, x), reward, abs(x) > 2",
            "return State(x), reward, abs(x) > 2",
            "return reward, State(x, v), abs(x) > 2",
            "yield State(x, v), reward, abs(x) > 2",
            "return State(x[:2], v[:2]), reward[:2], abs(x[:2]) > 2",
            "return State(x, v), xp.zeros_like(x, dtype=xp.float64), abs(x) > 2",
            "return State(x, v), xp.zeros_like(x, dtype=xp.int32), abs(x) > 2",
        )
    ],
    "observe": [
        ("return xp.stack([s.x, s.v], axis=-1)", text)
        for text in (
            "return None",
            "return xp.stack([s.x, s.v])",
            "return s.x",
            "return xp.stack([s.x], axis=-1)",
            "return [s.x, s.v]",
            "return xp.stack([s.x, s.v, s.x], axis=-1)",
            "return xp.stack([s.x, s.v], axis=-1)[:2]",
            "return xp.stack([s.x, s.v], axis=-1) > 0",
            "return xp.zeros((3, 2))",
            "return s",
        )
    ],
}


def wrong_result(draw: random.Random, d: Definition) -> Made:
    where = draw.choice(FUNCTIONS)
    old, new = draw.choice(WRONG_RESULTS[where])
    d.replace(where, old, new)
    return f"{new} in {where}", REFUSED


SIGNATURES = ["(xp)", "()", "(xp, s)", "(xp, a, b, c, d, e, f)", "(*, xp)", "(xp, s, action, u, p, more)"]


def wrong_function(draw: random.Random, d: Definition) -> Made:
    where = draw.choice([*FUNCTIONS, *SPACES])
    text = draw.choice(
        [f"def {where}{signature}:\n    return None" for signature in SIGNATURES]
        + [
            f"async {d.parts[where]}",
            f"{where} = None",
            f"{where} = 5",
            f"class {where}:\n    pass",
            f"{where} = '{where}'",
        ]
    )
    d.parts[where] = text
    return f"{text.splitlines()[0]}", REFUSED


# What numpy takes. A text of each for torch and JAX: whether it must be refused there.
XP = [
    (
        "observe",
        "s.v], axis=-1)",
        "s.v], axis=-1).max(axis=-1)[..., None] * xp.ones_like(s.x)[:, None]",
        REFUSED,
        REFUSED,
    ),
    ("step", "1 - abs(x)", "1 - xp.stack([x, v]).max(axis=0)", REFUSED, HARMLESS),
    ("step", "1 - abs(x)", "1 - xp.stack([x, v], axis=-1).min(axis=-1)", REFUSED, HARMLESS),
    ("step", "1 - abs(x)", "(1 - abs(x)).astype(xp.float32)", REFUSED, HARMLESS),
    ("step", "1 - abs(x)", "np.tanh(np.asarray(x))", EITHER, REFUSED),
    ("step", "1 - abs(x)", "np.float32(1) - abs(x)", EITHER, HARMLESS),
    ("step", "1 - abs(x)", "x * math.cos(x[0])", EITHER, REFUSED),
    ("step", "1 - abs(x)", "x * float(x[0])", EITHER, REFUSED),
    ("step", "1 - abs(x)", "x * x[0].item()", EITHER, REFUSED),
    ("step", "1 - abs(x)", "xp.asarray([float(a) for a in x], dtype=xp.float32)", EITHER, REFUSED),
    ("step", "1 - abs(x)", "xp.ones_like(x) if x.max() > 0 else x", EITHER, REFUSED),
    ("step", "1 - abs(x)", "x if x > 0 else -x", REFUSED, REFUSED),
    ("step", "1 - abs(x)", "max(x, v)", REFUSED, REFUSED),
    ("step", "1 - abs(x)", "x[x > 0].sum() * xp.ones_like(x)", EITHER, REFUSED),
    ("step", "1 - abs(x)", "x and v", REFUSED, REFUSED),
    ("step", "1 - abs(x)", "xp.zeros_like(x) if not any(x > 1) else x", EITHER, REFUSED),
    ("step", "1 - abs(x)", "xp.where(x > 0, 1.0, 0.0)", EITHER, EITHER),
    ("step", "1 - abs(x)", "np.where(x > 0, x, -x)", EITHER, REFUSED),
    ("step", "abs(x) > 2", "1 - (abs(x) < 2)", REFUSED, REFUSED),
    ("step", "abs(x) > 2", "(abs(x) > 2) or (x > 5)", REFUSED, REFUSED),
    ("reset", "xp.zeros_like(u[:, 0])", "xp.zeros(len(u), dtype=xp.float32)", HARMLESS, HARMLESS),
    ("reset", "xp.zeros_like(u[:, 0])", "np.zeros(len(u), dtype=np.float32)", EITHER, EITHER),
    ("reset", "xp.zeros_like(u[:, 0])", "u[:, 0].copy()", REFUSED, HARMLESS),
    ("reset", "xp.zeros_like(u[:, 0])", "u[:, 0].clone()", EITHER, REFUSED),
    ("reset", "xp.zeros_like(u[:, 0])", "xp.zeros_like(u[:, 0]).block_until_ready()", REFUSED, EITHER),
    ("observe", "xp.stack([s.x, s.v], axis=-1)", "xp.stack([s.x, s.v], dim=-1)", EITHER, REFUSED),
    ("observe", "s.v]", "s.v / 0]", REFUSED, REFUSED),
]


def not_of_every_backend(draw: random.Random, d: Definition) -> Made:
    where, old, new, in_torch, in_jax = draw.choice(XP)
    d.replace(where, old, new)
    return f"{new} in {where}, {d.backend}", in_torch if d.backend == "torch" else in_jax


# {} stands for an array.
NOT_FINITE = [
    "float('nan')",
    "float('inf')",
    "-float('inf')",
    "1e39",
    "{} * float('nan')",
    "xp.log(-1 - abs({}))",
    "1 / ({0} - {0})",
]


def not_finite(draw: random.Random, d: Definition) -> Made:
    value = draw.choice(NOT_FINITE)
    places = [("1 - abs(x)", "step", "v"), ("s.x + 0.1 * v", "step", "v")]
    places += [("2 * u[:, 0] - 1", "reset", "u[:, 0]"), ("s.v]", "observe", "s.v")]
    old, where, array = draw.choice(places)
    d.replace(where, old, f"xp.zeros_like({array}) + {value.format(array)}{']' if old.endswith(']') else ''}")
    return f"{value} in {where}", REFUSED


def rarely_not_finite(draw: random.Random, d: Definition) -> Made:
    """Nothing may end well with numbers that are not finite; whether they come, nobody knows."""
    bound = draw.choice(["u[:, 0] < 0.02", "x > 0.9", "u[:, 0] > 0.9", "v < -1.5"])
    value = draw.choice(["float('nan')", "float('inf')"])
    d.replace("step", "1 - abs(x)", f"xp.where({bound}, xp.zeros_like(x) + {value}, 1 - abs(x))")
    return f"a reward of {value} where {bound}", EITHER


def sibling(draw: random.Random, d: Definition) -> Made:
    """A file beside it, which it imports."""
    name = draw.choice(["helper", "env_helper", "my_constants", "sibling"])
    content, verdict = draw.choice(
        [
            ("WIND = 0.5\n", HARMLESS),
            ("import math\nWIND = math.pi\n", HARMLESS),
            ("WIND = \n", REFUSED),
            ("raise SystemExit(0)\n", REFUSED),
            ("raise OSError(2, 'gone', 'x')\n", REFUSED),
            ("OTHER = 1\n", REFUSED),
            (None, REFUSED),
        ]
    )
    d.parts["imports"] += f"\nfrom {name} import WIND\n"
    if content is not None:
        d.siblings[f"{name}.py"] = content
    return f"a sibling of {content!r}", verdict


def other_bytes(draw: random.Random, d: Definition) -> Made:
    """The file as a whole."""
    right = "\n\n\n".join(d.parts.values()) + "\n"
    place = draw.randrange(len(right))
    flipped = bytearray(right.encode())
    flipped[place] ^= 1 << draw.randrange(7)
    kind, d.data, verdict = draw.choice(
        [
            ("no UTF-8", b"# \xff\xfe\n" + right.encode(), REFUSED),
            ("no UTF-8 in a text", right.encode() + b"NAME = '\xe9'\n", REFUSED),
            ("Latin-1 that says so", b"# -*- coding: latin-1 -*-\n# \xe9\n" + right.encode(), HARMLESS),
            ("an unknown encoding", b"# -*- coding: none-such -*-\n" + right.encode(), REFUSED),
            ("a byte-order mark", b"\xef\xbb\xbf" + right.encode(), HARMLESS),
            ("UTF-16", right.encode("utf-16"), REFUSED),
            ("a NUL", right.encode() + b"\0", REFUSED),
            ("CRLF", right.replace("\n", "\r\n").encode(), HARMLESS),
            ("nothing", b"", REFUSED),
            ("binary", bytes(draw.randrange(256) for _ in range(200)), REFUSED),
            ("cut off", right.encode()[: draw.randrange(20, len(right) - 20)], EITHER),
            ("a flipped bit", bytes(flipped), EITHER),
            ("deep brackets", right.encode() + b"x = " + b"(" * 1000 + b")" * 1000, REFUSED),
            ("very deep brackets", right.encode() + b"x = " + b"[" * 100_000, REFUSED),
            ("a deep expression", right.encode() + b"x = " + b"-" * 100_000 + b"1", EITHER),
            ("a long number", right.encode() + b"x = " + b"9" * 10_000, REFUSED),
            ("a tab too many", right.encode() + b"if 1:\n\tx = 1\n        y = 2\n", REFUSED),
            ("a syntax error", right.encode() + b"def broken(:\n", REFUSED),
            ("a syntax warning", right.encode() + b"pattern = '\\d'\nflag = 1 is 1\n", EITHER),
            ("a relative import", b"from . import helper\n" + right.encode(), REFUSED),
            ("no Python", b"<html><body>404</body></html>\n", REFUSED),
            ("return outside", right.encode() + b"return 5\n", REFUSED),
            ("many lines after it", right.encode() + b"# \n" * 50_000, HARMLESS),
        ]
    )
    return f"file: {kind}", verdict


def harmless(draw: random.Random, d: Definition) -> Made:
    kind = draw.choice(
        ["comment", "more leaves", "vector leaf", "integer leaf", "long observation", "print", "global", "callables"]
    )
    if kind == "comment":
        d.parts["imports"] = '"""Ein Satz mit Umlauten: äöü."""\n' + d.parts["imports"]
    elif kind == "more leaves":
        d.replace("State", "v: Any", "v: Any\n    t: Any")
        d.replace("reset", "xp.zeros_like(u[:, 0]))", "xp.zeros_like(u[:, 0]), u[:, 0])")
        d.replace("step", "State(x, v)", "State(x, v, s.t)")
    elif kind == "vector leaf":
        d.replace("reset", "xp.zeros_like(u[:, 0])", "xp.zeros_like(u[:, 0:1])")
        d.replace("step", "    push", "    s = State(s.x, s.v[:, 0])\n    push")
        d.replace("step", "State(x, v)", "State(x, v[:, None])")
        d.replace("observe", "s.v]", "s.v[:, 0]]")
    elif kind == "integer leaf":
        d.replace("State", "v: Any", "v: Any\n    n: Any")
        d.replace("reset", "xp.zeros_like(u[:, 0]))", "xp.zeros_like(u[:, 0]), xp.zeros_like(u[:, 0], dtype=xp.int32))")
        d.replace("step", "State(x, v)", "State(x, v, s.n + 1)")
    elif kind == "long observation":
        d.replace("observation_space", "(2,)", "(1000,)")
        d.replace("observe", "[s.x, s.v]", "[s.x, s.v] * 500")
    elif kind == "print":
        d.first(draw.choice(FUNCTIONS), "print('called')")
    elif kind == "global":
        d.parts["ID"] += "\nGAIN = 0.1"
        d.replace("step", "0.1 * v", "GAIN * v")
    else:
        d.parts["observe"] = "observe = lambda xp, s, p: xp.stack([s.x, s.v], axis=-1)"
    return f"harmless: {kind}", HARMLESS


MUTATIONS: list[Callable] = [
    exception,
    wrong_constant,
    wrong_result,
    not_of_every_backend,
    hidden_state,
    other_bytes,
    write_into_an_argument,
    exception,
    wrong_space,
    sibling,
    not_finite,
    wrong_params,
    exception,
    other_constant,
    harmless,
    not_of_every_backend,
    wrong_function,
    rarely_not_finite,
    wrong_constant,
    missing_part,
    other_space,
    write_through_a_view,
]


# ---- cases


def case(i: int, draw: random.Random, folder: Path, bases) -> Case:
    backend = "jax" if draw.random() < 0.3 else "torch"
    agent = draw.choice(["ppo", "ppo", "dqn", "pqn", "sac"])
    definition = Definition(backend, box=agent == "sac" or (agent == "ppo" and draw.random() < 0.5))
    kind, verdict = MUTATIONS[i % len(MUTATIONS)](draw, definition)
    line = training(draw, agent, backend)
    line.options["env"] = ["--env", "env.py"]
    definition.write(folder)
    return Case(f"{kind} ({agent})", line.argv, verdict)
