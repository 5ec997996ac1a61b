"""A definition's file and the files beside it: what is imported from where, seen anew, and refused."""

import os
import sys

import numpy as np
import pytest
from environment_tools import definition_text

import rlgraph
from rlgraph.registry import ENVIRONMENTS, source_files


def made(folder, *changes, name="cart.py", head=""):
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(head + definition_text(*changes))
    return rlgraph.make(str(folder / name))


def reward_of(env) -> float:
    """Of a step from x = 0."""
    carry, _ = env.reset(np, np.zeros((1, 2), np.float32))
    step = env.step(np, carry, np.array([1]), np.zeros((1, 3), np.float32), "SameStep")
    return float(step.reward_B[0])


REWARD = ("reward = -abs(x)", "reward = helpers.reward(x)")


def helper(value: float) -> str:
    return f"def reward(x):\n    return 0 * x + {value}\n"


@pytest.mark.parametrize("lazily", [False, True])
def test_two_folders_have_a_helper_of_one_name_each(lazily, tmp_path):
    envs = []
    for i, folder in enumerate((tmp_path / "a", tmp_path / "b")):
        folder.mkdir()
        (folder / "helpers.py").write_text(helper(i + 0.5))
        if lazily:
            envs.append(made(folder, (REWARD[0], f"import helpers; {REWARD[1]}")))
        else:
            envs.append(made(folder, REWARD, head="import helpers\n"))
    assert [reward_of(env) for env in envs] == [0.5, 1.5]
    assert "helpers" not in sys.modules


def test_a_change_of_either_file_is_seen_by_the_next_make(tmp_path):
    (tmp_path / "helpers.py").write_text(helper(1.5))
    first = made(tmp_path, REWARD, head="import helpers\n")
    assert rlgraph.make(str(tmp_path / "cart.py")) == first  # so that it compiles once
    stamp = os.stat(tmp_path / "helpers.py")
    (tmp_path / "helpers.py").write_text(helper(2.5))  # as long as before
    os.utime(tmp_path / "helpers.py", ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    second = rlgraph.make(str(tmp_path / "cart.py"))
    assert (reward_of(first), reward_of(second)) == (1.5, 2.5)
    third = made(tmp_path, ("x) > 3", "x) > 4"), REWARD, head="import helpers\n")
    assert len({first, second, third}) == 3


def test_packages_beside_it_and_what_they_import(tmp_path):
    files = {
        "tools/__init__.py": "from tools.inner import HALF\n",
        "tools/inner.py": "from . import deeper\nimport constants\nHALF = deeper.ONE / constants.TWO\n",
        "tools/deeper.py": "ONE = 1.0\n",
        "bare/part.py": "import tools.deeper as d\nTHREE = 3 * d.ONE\n",
        "constants.py": "TWO = 2.0\n",
        "unused.py": "raise RuntimeError('nothing imports it')\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    head = "import tools.inner, bare.part as part\nfrom constants import *\nfrom tools import HALF\n"
    value = "tools.inner.HALF + part.THREE * TWO + HALF"
    env = made(tmp_path, ("reward = -abs(x)", f"reward = 0 * x + {value}"), head=head)
    assert reward_of(env) == 7.0
    used = sorted(tmp_path / name for name in files if name != "unused.py")
    assert source_files(env.definition) == (tmp_path / "cart.py", *used)
    assert not list(tmp_path.rglob("__pycache__"))  # bytecode would hold the name of the environment's package


def test_source_files_of_what_ships_and_of_what_is_registered(tmp_path, monkeypatch):
    cartpole = rlgraph.make("CartPole-v1").definition
    assert [path.name for path in source_files(cartpole)] == ["cartpole.py"]
    monkeypatch.setattr("rlgraph.registry.ENVIRONMENTS", dict(ENVIRONMENTS))
    (tmp_path / "my_helpers.py").write_text(helper(4))
    text = definition_text((REWARD[0], "from my_helpers import reward as r; reward = r(x)"))
    (tmp_path / "my_registered_env.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    import my_registered_env

    rlgraph.register(my_registered_env)
    files = (tmp_path / "my_registered_env.py", tmp_path / "my_helpers.py")
    assert source_files(rlgraph.make("Cart-v0").definition) == files


def test_installed_names_stay_what_they_are(tmp_path):
    """A file called as a library is that library to nobody, not even to itself; one called as rlgraph neither."""
    (tmp_path / "time.py").write_text("raise RuntimeError('not for a module in C')\n")
    (tmp_path / "rlgraph.py").write_text("raise RuntimeError('a second one')\n")
    (tmp_path / "numpy").mkdir()
    head = "import time, rlgraph\nassert rlgraph.make\n"
    env = made(tmp_path, name="gymnasium.py", head=head)
    assert env.definition.np is np
    assert sys.modules["gymnasium"].__file__ != env.definition.__file__


@pytest.mark.parametrize("name", ["my-env.py", "my env.py", "2.5.py", "class.py"])
def test_any_name_of_a_file_will_do(name, tmp_path):
    (tmp_path / "helpers.py").write_text(helper(1.5))
    assert reward_of(made(tmp_path, REWARD, name=name, head="import helpers\n")) == 1.5


def test_a_link_is_the_file_that_it_leads_to(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "helpers.py").write_text(helper(1.5))
    env = made(tmp_path / "real", REWARD, head="import helpers\n")
    (tmp_path / "link.py").symlink_to(tmp_path / "real" / "cart.py")
    assert rlgraph.make(str(tmp_path / "link.py")) == env


LOADED = [  # a file, and what the line says
    (b"import sys\nsys.exit(0)\n", "cart.py, line 2: `sys.exit(0)`: SystemExit: 0"),
    (b"raise OSError(5, 'no disk')\n", "cart.py, line 1: `raise OSError(5, 'no disk')`: OSError: [Errno 5] no disk"),
    (b"raise BrokenPipeError\n", "BrokenPipeError"),
    (b"raise type('Own', (BaseException,), {})\n", "Own"),
    (b"def f():\n    f()\nf()\n", "RecursionError"),
    (b"def step(:\n", "cart.py, line 1: `def step(:`: SyntaxError"),
    (b"import helpers_that_are_missing\n", "ModuleNotFoundError: No module named 'helpers_that_are_missing'"),
    (b"import sub.missing\n", "ModuleNotFoundError: No module named 'sub.missing'"),
    (b"from broken import x\n", "broken.py, line 1: `1 / 0`: ZeroDivisionError: division by zero"),
    (b"# \xff\xfe\n", "SyntaxError: invalid or missing encoding"),
    (b"x = '\0'\n", "null bytes"),
    (b"", "lacks ID, RESET_DRAWS"),
]


@pytest.mark.parametrize(("content", "message"), LOADED, ids=[message for _, message in LOADED])
def test_a_file_that_cannot_be_loaded_is_refused_in_one_line(content, message, tmp_path):
    (tmp_path / "cart.py").write_bytes(content)
    (tmp_path / "broken.py").write_text("1 / 0\n")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "__init__.py").touch()
    with pytest.raises(rlgraph.UsageError) as error:
        rlgraph.make(str(tmp_path / "cart.py"))
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert "rlgraph_user_env" not in str(error.value)


def test_what_is_no_file_is_refused_at_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe.py")  # to open it would wait for ever
    os.mkdir("folder.py")
    os.symlink("loop.py", "loop.py")
    for name in ("pipe.py", "folder.py", "loop.py", "absent.py", "x" * 300 + ".py"):
        with pytest.raises(rlgraph.UsageError, match=r"^no environment file .*: give the path of a Python file"):
            rlgraph.make(name)
    for name in ("cart.PY", "./cart", "a/b"):
        with pytest.raises(rlgraph.UsageError, match=r"the name of an environment file must end in \.py$"):
            rlgraph.make(name)


def test_a_file_that_may_not_be_read(tmp_path, monkeypatch):
    made(tmp_path)

    def refused(self):
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr("pathlib.Path.read_bytes", refused)
    with pytest.raises(rlgraph.UsageError, match=r"^cannot read environment file '.*cart.py': Permission denied$"):
        rlgraph.make(str(tmp_path / "cart.py"))
