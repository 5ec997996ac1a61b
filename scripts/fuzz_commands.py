"""Command lines: every command of `rlgraph` with options, values, names and paths right and wrong."""

import os
import random
import typing
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from fuzz_oracle import EITHER, HARMLESS, REFUSED, Case, worst

from rlgraph.agents import AGENTS
from rlgraph.runs.train import config_class

# ---- a command line that is right, as small as can be

SMALL = {"total_steps": 64, "num_envs": 2, "num_steps": 4, "eval_episodes": 1, "hidden": 8}
REPLAY = {"learning_starts": 8, "replay_capacity": 64, "minibatch_size": 4, "num_updates": 1}
OPTIONS = {
    "ppo": SMALL,
    "pqn": SMALL,
    "dqn": {**SMALL, **REPLAY, "n_step": 2},
    "sac": {**SMALL, **REPLAY, "env": "Pendulum-v1"},
}


@dataclass
class Line:
    """A command line that is being made; its words may be mutated once each."""

    words: list[str]  # the command, and what it is about
    agent: str = ""  # that trains
    options: dict[str, list[str]] = field(default_factory=dict)  # of each name, the words that it adds
    verdicts: list[str] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)
    last: list[str] = field(default_factory=list)  # words at the end

    def mutated(self, kind: str, verdict: str) -> None:
        self.kinds.append(kind)
        self.verdicts.append(verdict)

    @property
    def argv(self) -> tuple[str, ...]:
        return (*self.words, *(word for words in self.options.values() for word in words), *self.last)


def training(draw: random.Random, agent: str, backend: str = "torch") -> Line:
    line = Line(["train", agent], agent)
    for name, value in {**OPTIONS[agent], "backend": backend}.items():
        line.options[name] = written(draw, name, str(value))
    return line


def written(draw: random.Random, name: str, value: str) -> list[str]:
    """An option in one of the ways in which it can be written."""
    option = "--" + (name if draw.random() < 0.2 else name.replace("_", "-"))
    return [f"{option}={value}"] if draw.random() < 0.4 else [option, value]


# ---- values

LONG = "9" * 5000
CONTROL = ["\x07", "\x1b[31mred\x1b[0m", "a\nb", "a\r\nb", "\x0b", "\x7f", "\u2028", "\x85"]
UNICODE = ["ä", "\u202e", "🤖", "ﬁ", "\udcff", "\u0131", "Ⅷ"]
NO_NUMBERS = ["", " ", "x", "nan", "NaN", "inf", "-inf", "Infinity", "1e400", "1,5", "1e", "--", "0x1g", "None", "True"]
NO_INTEGERS = [*NO_NUMBERS, "1.5", "2.0", "1e3", "-1", "0", str(-(10**25)), str(10**25), str(2**64), LONG]
NO_FLOATS = [*(text for text in NO_NUMBERS if text != "None"), "-1", "-1e-3", "-1e400", "9" * 400]
NO_TEXTS = ["", " ", "x", "1", "None", LONG, "TORCH ", "-", "../..", *CONTROL, *UNICODE]
NO_WIDTHS = ["", "x", "0", "-1", "1.5", "nan", "8,8", "[8]", str(10**25), LONG]
UNCLEAR = {  # right or wrong, as rlgraph likes
    int: ["1_0", " 2 ", "+2", "٢", "02"],
    float: ["1_0", " 0.5 ", "+0.5", "1e-400", "1e39", "1e300", str(10**25), "-0.0", "0", "1", "1e-45"],
}
HARMLESS_VALUES = {
    "seed": ["0", "1", "12345", str(2**32 - 1)],
    "eval_episodes": ["1", "2", "3"],
    "gamma": ["0", "1", "0.5", "1e-3", ".9"],
    "learning_rate": ["1e-5", "0.001", "1E-2"],
    "activation": ["tanh", "relu", "silu"],
    "precision": ["ieee", "tf32", "bf16"],
    "hidden": ["8", "1", "3"],
    "keep_checkpoints": ["1", "2", "100"],
    "checkpoint_seconds": ["0", "0.5", "60", "1e6"],
    "max_grad_norm": ["0.1", "10"],
    "device": ["cpu", "auto"],
    "mode": ["auto", "eager"],
    "run_dir": ["out", "deep/er/out", "./out/", "ü", "with space", "a\nb", "[bold]x"],
}
# Not refused for their size, or for their sign, or at 0 or None.
BOUNDLESS = {"keep_checkpoints", "checkpoint_seconds"}
MAY_BE_NEGATIVE = {"target_entropy", "entropy_coef", "value_coef"}
MAY_BE_ZERO = {"seed", "num_steps"}  # num_steps of `rlgraph bench`
UNLIKELY = {"run_dir", "out", "commit", "modules"}  # texts of which nearly all are right


def wrong_value(draw: random.Random, name: str, kind) -> tuple[str, str]:
    """A value for an option of this type, and its verdict."""
    if kind in UNCLEAR and draw.random() < 0.2:
        return draw.choice(UNCLEAR[kind]), EITHER
    args = typing.get_args(kind)
    if kind is int:
        value = draw.choice(NO_INTEGERS)
        return (
            value,
            EITHER if (name in BOUNDLESS and value.isdigit()) or (name in MAY_BE_ZERO and value == "0") else REFUSED,
        )
    if kind is float or float in args:
        value = draw.choice(NO_FLOATS)
        lax = (name in MAY_BE_NEGATIVE and value.startswith("-")) or (name in BOUNDLESS and "inf" in value.lower())
        lax = lax or (name in BOUNDLESS and value in ("1e400", "9" * 400))
        return value, EITHER if lax else REFUSED
    if int in args:
        return draw.choice(NO_WIDTHS), REFUSED
    return draw.choice(NO_TEXTS), EITHER if name in UNLIKELY else REFUSED


# ---- mutations of a training's options


def with_a_right_value(draw: random.Random, line: Line, types: dict) -> None:
    name = draw.choice([name for name in HARMLESS_VALUES if name in types])
    value = draw.choice(HARMLESS_VALUES[name])
    line.options[name] = written(draw, name, value)
    line.mutated(f"--{name} right", HARMLESS)


def with_a_wrong_value(draw: random.Random, line: Line, types: dict) -> None:
    names = [name for name, kind in types.items() if kind is not bool]
    name = draw.choice(names)
    value, verdict = wrong_value(draw, name, types[name])
    line.options[name] = written(draw, name, value)
    if line.options[name][-1] in ("--", ""):  # as a word of its own it may mean something else
        verdict = worst([EITHER, verdict])
    line.mutated(f"--{name} of a wrong value", verdict)


def with_a_switch(draw: random.Random, line: Line, types: dict) -> None:
    name = draw.choice([name for name, kind in types.items() if kind is bool]).replace("_", "-")
    words, verdict = draw.choice(
        [
            ([f"--{name}"], HARMLESS),
            ([f"--no-{name}"], HARMLESS),
            ([f"--{name}", "yes"], REFUSED),
            ([f"--{name}=1"], REFUSED),
            ([f"--no-{name}=True"], REFUSED),
            ([f"--no-no-{name}"], REFUSED),
        ]
    )
    line.options[name] = words
    line.mutated("a switch", verdict)


def with_a_misspelt_option(draw: random.Random, line: Line, types: dict) -> None:
    name = draw.choice([*types])
    place = draw.randrange(len(name))
    changed = draw.choice(
        [name[:place] + name[place + 1 :], name[:place] + "q" + name[place:], name.upper(), name + "s", "no-" + name]
    )
    right = changed in types or (changed.startswith("no-") and types[name] is bool)
    line.options[changed] = [f"--{changed.replace('_', '-')}", *([] if draw.random() < 0.3 else ["1"])]
    line.mutated("a misspelt option", EITHER if right else REFUSED)


def with_a_foreign_word(draw: random.Random, line: Line, types: dict) -> None:
    word = draw.choice(["x", "1", "-", "-x", "-1", "---", "--=", "--", "-h5", "=", *CONTROL, *UNICODE, LONG])
    line.last = [word]
    line.mutated("a foreign word", EITHER if word in ("--", "-", "-1") else REFUSED)


def with_a_missing_value(draw: random.Random, line: Line, types: dict) -> None:
    name = draw.choice([name for name, kind in types.items() if kind is not bool])
    line.options.pop(name, None)
    line.last = [f"--{name.replace('_', '-')}"]
    line.mutated("an option without its value", REFUSED)


def with_a_repeated_option(draw: random.Random, line: Line, types: dict) -> None:
    name = draw.choice(["seed", "gamma", "env", "eval_episodes"])
    values = {"seed": ["1", "2"], "gamma": ["0.5", "0.6"], "env": ["Acrobot-v1", "CartPole-v1"]}
    for value in values.get(name, ["1", "2"]):
        line.last += written(draw, name, value)
    line.mutated("an option given twice", EITHER)


def with_help(draw: random.Random, line: Line, types: dict) -> None:
    line.last = [draw.choice(["-h", "--help"])]
    line.mutated("--help", HARMLESS)


def with_a_foreign_agent(draw: random.Random, line: Line, types: dict) -> None:
    line.words[1] = draw.choice(["", "PPO ", "a2c", "ppo.py", "p\npo", "None", "__init__", LONG, *UNICODE])
    line.mutated("a foreign agent", REFUSED)


def with_a_foreign_environment(draw: random.Random, line: Line, types: dict) -> None:
    value = draw.choice(
        [
            "",
            "cartpole-v1 ",
            "CartPole-v9",
            "missing.py",
            "folder.py",
            "fifo.py",
            "loop.py",
            "/dev/null",
            ".",
            ".py",
            LONG,
            LONG + ".py",
            "a\nb.py",
            "\x1b.py",
            "folder",
            "text.txt",
            "null.py",
            *UNICODE,
        ]
    )
    line.options["env"] = written(draw, "env", value)
    line.mutated("a foreign environment", REFUSED)


def with_a_foreign_run_dir(draw: random.Random, line: Line, types: dict) -> None:
    value = draw.choice(
        [
            "full",
            "text.txt",
            "text.txt/x",
            "/dev/null",
            "/dev/null/x",
            "/proc/x",
            "fifo.py",
            "loop.py",
            "loop.py/x",
            "n" * 300,
            "n/" * 3000,
        ]
    )
    line.options["run_dir"] = written(draw, "run_dir", value)
    line.mutated("a foreign run_dir", REFUSED)


def with_a_choice_that_is_none(draw: random.Random, line: Line, types: dict) -> None:
    name, value = draw.choice(
        [
            ("backend", "TORCH"),
            ("backend", "numpy"),
            ("backend", "torch,jax"),
            ("device", "cuda"),
            ("device", "cuda:99"),
            ("device", "cuda:-1"),
            ("device", "cpu:1"),
            ("device", "cpu:x"),
            ("device", "tpu"),
            ("device", "cuda:" + LONG),
            ("mode", "jit"),
            ("mode", "Eager"),
            ("mode", "graph,eager"),
            ("activation", "gelu"),
            ("precision", "fp16"),
        ]
    )
    line.options[name] = written(draw, name, value)
    line.mutated(f"--{name} {value[:20]}", REFUSED)


def with_what_does_not_fit(draw: random.Random, line: Line, types: dict) -> None:
    """Right values, which exclude each other."""
    wrong = {
        "ppo": [{"num_minibatches": "3"}, {"num_minibatches": "16"}, {"num_minibatches": "8"}],
        "pqn": [{"num_minibatches": "3"}, {"env": "Pendulum-v1"}, {"num_minibatches": str(10**25)}],
        "dqn": [{"env": "Pendulum-v1"}, {"learning_starts": "65"}, {"n_step": "1000"}, {"replay_capacity": "1"}],
        "sac": [{"env": "CartPole-v1"}, {"learning_starts": "64"}, {"num_minibatches": "4"}],
    }
    for name, value in draw.choice(wrong[line.agent]).items():
        line.options[name] = written(draw, name, value)
    line.mutated("values that exclude each other", REFUSED)


TRAINING = [
    with_a_right_value,
    with_a_wrong_value,
    with_a_wrong_value,
    with_a_wrong_value,
    with_a_switch,
    with_a_misspelt_option,
    with_a_foreign_word,
    with_a_missing_value,
    with_a_repeated_option,
    with_help,
    with_a_foreign_agent,
    with_a_foreign_environment,
    with_a_foreign_run_dir,
    with_a_choice_that_is_none,
    with_what_does_not_fit,
]


def train(draw: random.Random) -> Line:
    agent = draw.choice([*AGENTS])
    line = training(draw, agent, backend="jax" if draw.random() < 0.08 else "torch")
    types = typing.get_type_hints(config_class(agent))
    for mutate in dict.fromkeys(draw.choice(TRAINING) for _ in range(draw.choice([1, 1, 1, 2, 3]))):
        mutate(draw, line, types)
    if "--help" in line.kinds and len(line.kinds) > 1:  # whichever is looked at first
        line.verdicts = [EITHER]
    return line


# ---- the other commands


def evaluate(draw: random.Random) -> Line:
    line = Line(["eval", "run"], options={"episodes": ["--episodes", "2"]})
    run = [("run/", HARMLESS), ("./run", HARMLESS), ("link", HARMLESS)]
    run += [
        (name, REFUSED) for name in ("", "missing", "folder.py", "text.txt", "/dev/null", "fifo.py", "loop.py", ".")
    ]
    run += [(name, REFUSED) for name in (LONG, *CONTROL, *UNICODE)]
    number = [(text, HARMLESS if text == "None" else REFUSED) for text in NO_INTEGERS]  # None: as after training
    options = {
        "run": run,
        "episodes": [("1", HARMLESS), ("3", HARMLESS), (str(2**20 + 1), REFUSED), *number],
        "seed": [("5", HARMLESS), (str(2**32 - 1), HARMLESS), (str(2**32), REFUSED)]
        + [(text, verdict) for text, verdict in number if text != "0"],
        "backend": [("torch", HARMLESS), ("jax", HARMLESS), *((text, REFUSED) for text in NO_TEXTS if text != "None")],
        "device": [("cpu", HARMLESS), ("cuda", REFUSED), *((text, REFUSED) for text in NO_TEXTS if text != "None")],
        "checkpoint": [
            ("last", HARMLESS),
            ("best", HARMLESS),
            ("64", HARMLESS),
            ("000064", EITHER),
            ("\uff16\uff14", EITHER),
        ]
        + [(text, REFUSED) for text in ("1", "-1", "first", "LAST", str(10**25), LONG, "../run", "x\ny", "²")],
        "foreign": [("x", REFUSED), ("--seeds=1", REFUSED), ("--episodes", REFUSED), ("-5", REFUSED)],
    }
    for name in draw.sample([*options], draw.choice([1, 1, 2])):
        value, verdict = draw.choice(options[name])
        if name == "run":
            line.words[1] = value
        elif name == "foreign":
            line.last = [value]
        else:
            line.options[name] = written(draw, name, value)
            if line.options[name][-1] in ("--", ""):
                verdict = worst([EITHER, verdict]) if verdict != REFUSED else EITHER
        line.mutated(f"eval, {name}", verdict)
    return line


def resume(draw: random.Random) -> Line:
    words, verdict = draw.choice(
        [
            (["--resume", "run"], HARMLESS),
            (["--resume=run/"], HARMLESS),
            (["--resume", "link"], HARMLESS),
            (["--resume"], REFUSED),
            (["--resume="], REFUSED),
            (["--resume", "run", "run"], REFUSED),
            (["--resume", "run", "--seed", "1"], REFUSED),
            (["ppo", "--resume", "run"], REFUSED),
            (["--resume", "run", "--resume", "run"], REFUSED),
            *(
                (["--resume", name], REFUSED)
                for name in ("missing", "text.txt", "fifo.py", "loop.py", ".", "full", LONG)
            ),
            *(
                (["--resume", name], REFUSED)
                for name in ("/dev/null", "", "a\nb", "\x1b[1m", "\udcff", "run/config.json")
            ),
        ]
    )
    return Line(["train", *words], verdicts=[verdict], kinds=["train --resume"])


def environments(draw: random.Random) -> Line:
    words = draw.choice([[], [], ["-h"], ["x"], ["--env"], [""], ["CartPole-v1"], ["\x07"], [LONG], ["--help", "x"]])
    verdict = EITHER if len(words) > 1 else REFUSED if words and words != ["-h"] else HARMLESS
    return Line(["envs", *words], verdicts=[verdict], kinds=["envs"])


def bench(draw: random.Random) -> Line:
    """Only what is refused: a benchmark takes its time."""
    kind = draw.choice(["options", "report", "solve"])
    if kind == "report":
        names = [
            "",
            "missing.json",
            "folder.py",
            "text.txt",
            "fifo.py",
            "/dev/null",
            "loop.py",
            "list.json",
            "deep.json",
        ]
        names = draw.sample([*names, "number.json", "rows.json", "run/config.json", LONG, "a\nb"], draw.choice([1, 2]))
        return Line(["bench", "report", *names], verdicts=[REFUSED], kinds=["bench report"])
    if kind == "solve":
        names = {
            "agent": ["", "a2c", LONG],
            "seeds": ["0", "-1", "x", str(10**25), ""],
            "check_every": ["0", "1.5", "nan"],
        }
        names |= {
            "target": ["nan", "inf", "1e400", "x"],
            "out": ["full", "text.txt"],
            "env": ["missing.py", "x", "fifo.py"],
        }
        names |= {
            "seed": [str(2**32 - 1), "-1", "x"],
            "backend": ["x"],
            "device": ["cuda", "x"],
            "num_envs": ["0", LONG],
        }
    else:
        names = {"env": ["missing.py", "x", "", "fifo.py"], "agent": ["x", ""], "variants": ["x", "torch-eager,x"]}
        names |= {
            "columns": ["x", "env,,x"],
            "num_envs": ["0", "x", "1,x", "-1", "", str(10**25), "nan"],
            "repeats": NO_INTEGERS,
        }
        names |= {
            "num_steps": ["-1", "x", "1.5", LONG],
            "hidden": NO_WIDTHS,
            "precision": ["x", "TF32"],
            "device": ["x", "tpu"],
        }
        names |= {
            "num_epochs": NO_INTEGERS,
            "num_minibatches": ["3", "x", "0"],
            "build_jobs": ["-1", "x"],
            "seed": ["-1", "x"],
        }
        names |= {"modules": ["missing", "a\nb", "."], "out": ["full", "text.txt", "text.txt/x"]}
    name = draw.choice([*names])
    value = draw.choice(names[name])
    line = Line(["bench", "solve"] if kind == "solve" else ["bench"])
    if name == "agent" and kind == "solve":
        line.words.append(value)
    else:
        line.options[name] = written(draw, name, value)
    if kind == "solve" and name != "target":
        line.options["total_steps"] = ["--total-steps", "4096"]
    line.mutated(f"bench, --{name}", REFUSED)
    return line


def graph(draw: random.Random) -> Line:
    """All of it is refused where there is no GPU, but for its help."""
    words = draw.choice(
        [["show"], ["show"], ["show", "--help"], [], ["draw"], ["-h"], ["show", "x"], ["show", "--out", "text.txt/x"]]
    )
    line = Line(["graph", *words])
    if words == ["show"]:
        name, value = draw.choice(
            [("agent", "x"), ("env", "fifo.py"), ("mode", "eager"), ("rollout", "1"), ("hidden", "0")]
        )
        line.options[name] = written(draw, name, value)
    helped = not words or words[-1] in ("-h", "--help")
    line.mutated("graph", (EITHER if not words else HARMLESS) if helped else REFUSED)
    return line


def no_command(draw: random.Random) -> Line:
    words, verdict = draw.choice(
        [
            ([], HARMLESS),
            (["--help"], HARMLESS),
            (["-h"], HARMLESS),
            ([""], REFUSED),
            (["Train"], REFUSED),
            (["--version"], EITHER),
        ]
        + [([word], REFUSED) for word in ("x", "--", "-", "tra in", LONG, *CONTROL, *UNICODE)]
        + [(["train", *words], verdict) for words, verdict in (([], REFUSED), (["-h"], HARMLESS), (["--env"], REFUSED))]
        + [
            (["eval", *words], verdict)
            for words, verdict in (([], REFUSED), (["-h"], HARMLESS), (["--seed", "1"], REFUSED))
        ]
    )
    return Line(words, verdicts=[verdict], kinds=["no command, or a foreign one"])


def interrupted(draw: random.Random) -> Line:
    """A training that is long enough for Ctrl-C."""
    line = training(draw, draw.choice([*AGENTS]), backend="jax" if draw.random() < 0.2 else "torch")
    line.options["total_steps"] = ["--total-steps", "40000"]
    line.mutated("Ctrl-C", HARMLESS)
    return line


COMMANDS: list[Callable] = [train] * 9 + [evaluate] * 3 + [bench] * 2
COMMANDS += [resume, environments, graph, no_command, interrupted]


# ---- cases


def stage(folder: Path, run: Path) -> None:
    """What the paths in a command line may lead to."""
    (folder / "run").symlink_to(run)
    (folder / "link").symlink_to("run")
    (folder / "folder.py").mkdir()
    (folder / "full").mkdir()
    (folder / "full" / "note.txt").write_text("somebody's")
    (folder / "folder").mkdir()
    (folder / "text.txt").write_text("somebody's")
    (folder / "null.py").symlink_to("/dev/null")
    (folder / "loop.py").symlink_to("loop.py")
    (folder / "list.json").write_text("[]")
    (folder / "number.json").write_text("1e400")
    (folder / "rows.json").write_text('{"version": 1, "rows": [3]}')
    (folder / "deep.json").write_text("[" * 100_000)
    os.mkfifo(folder / "fifo.py")


def case(i: int, draw: random.Random, folder: Path, bases) -> Case:
    make = COMMANDS[i % len(COMMANDS)]
    line, streams, after = make(draw), {}, None
    # Imports take seconds: only where they matter, and now and then.
    imports = draw.random() < (0.5 if make is interrupted else 0.02)
    if make is interrupted:
        after = draw.uniform(0.3, 3) if imports else draw.uniform(0, 1.5)
    elif draw.random() < 0.12:
        out = draw.choice(["closed", "broken", "/dev/full", ""])
        streams = {"out": out, "err": draw.choice(["closed", ""]) if out else "closed"}
        line.kinds.append(f"stdout {streams['out'] or 'open'}, stderr {streams['err'] or 'open'}")
    stage(folder, bases.run("ppo", "torch"))
    kind = " + ".join(line.kinds)
    return Case(kind, line.argv, worst(line.verdicts), **streams, interrupt_after=after, imports=imports)
