"""The examples in README and docs/graphs.md run as they stand, and no link in the documentation leads nowhere."""

import re
from pathlib import Path

import pytest
import torch
from fused_tools import DEVICES as FUSED_DEVICES

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
VECTOR, CAPTURE = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


def test_the_vector_environment_example():
    names = {}
    exec(VECTOR, names)
    assert names["obs"].shape == (4096, 4)
    assert names["reward"].shape == (4096,)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_capture_example(device):
    names = {}
    exec(CAPTURE.replace('"cuda"', f'"{device}"'), names)
    assert names["graph"].replays == 1000
    assert names["graph"].captured == (device == "cuda")
    # The sum of 1000 standard normals in each of 4096 walks.
    assert names["position"].std().item() == pytest.approx(1000**0.5, rel=0.05)


def graphs_example(section, device, which=0, **changed):
    """The names that an example in a section of docs/graphs.md leaves; `changed`: words in it, and what they become."""
    page = (ROOT / "docs" / "graphs.md").read_text()
    (text,) = re.findall(rf"\n## {section}\n(.*?)(?=\n## )", page, re.DOTALL)
    example = re.findall(r"```python\n(.*?)```", text, re.DOTALL)[which]
    devices = {} if device is None else {'"cuda"': f'"{device}"'}  # None: it names none
    for word, other in {**devices, **changed}.items():
        assert word in example
        example = example.replace(word, other)
    names = {"__name__": "example"}  # or classes are of the module builtins
    exec(example, names)
    return names


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_buckets_example(device):
    names = graphs_example("Buckets", device)
    replays = {size: graph.replays for (size, _), graph in names["pool"].graphs.items()}
    assert replays == {32: 2, 4: 2}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_update_example(device):
    names = graphs_example("Update", device)
    assert names["update"].in_place
    speeds = 1 - 0.02 * 9.8, 1 - 0.02 * (9.8 + 1.6)
    assert names["mean"].item() == pytest.approx(0.02 * sum(speeds))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_loop_example(device):
    names = graphs_example("Loops and branches on the device", device)
    assert names["root"].square().tolist() == pytest.approx(names["x"].tolist(), rel=1e-5)
    iterations = names["loop"].iterations()
    assert 5 <= iterations <= 12
    assert names["curve"].isfinite().sum() == iterations // 2


@pytest.mark.gpu
def test_the_example_of_training_in_one_launch():
    names = graphs_example("Loops and branches on the device", None, which=1)
    assert names["run"].solved() and names["run"].greedy_return >= 475


@pytest.mark.usefixtures("own_kernel_cache", "quick_interpreter")
@pytest.mark.parametrize("device", FUSED_DEVICES)
def test_the_relaunching_example(device):
    small = {"None, 64, 16": "None, 16, 8", "1000": "5"} if device == "cpu" else {}
    names = graphs_example("Launches from the device", device, **small)
    T, enough = (8, 5) if device == "cpu" else (16, 1000)
    assert enough <= names["episodes"].item() < 2 * enough + 16
    assert names["collector"].counter.item() == names["loop"].iterations() * T >= 2 * T


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_example_of_a_launch_beside(device):
    names = graphs_example("Launches from the device", device, which=1)
    assert names["score"].item() == pytest.approx(-3 * 0.9**30, rel=1e-4)
    assert names["weight"].item() == pytest.approx(3 - 3 * 0.9**31, rel=1e-4)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_branches_example(device):
    names = graphs_example("Parallel branches", device)
    assert names["probabilities"].shape == (64, 2) and names["values"].shape == (64,)
    assert names["values"].tolist() == pytest.approx(names["critic"](names["obs"]).squeeze(-1).tolist(), abs=1e-5)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.filterwarnings("ignore:bounded runs in mode")
def test_the_example_of_when_not_to_capture(device, capsys):
    names = graphs_example("When not to capture", device)
    x = names["x"]
    assert names["run"].mode == ("eager" if device == "cpu" else "compile")
    torch.testing.assert_close(names["y"], (20 * x).clamp(-10, 10).exp())
    assert "Policy.temperature was 1.0 and is 0.5" in capsys.readouterr().out
    for temperature, name in ((0.5, "cooler"), (0.25, "coolest")):
        torch.testing.assert_close(names[name], (x / temperature).softmax(-1))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_example_of_verify(device, capsys):
    graphs_example("Verify", device)
    assert "output 0: 3 of 3 elements differ, by up to 1;" in capsys.readouterr().out


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        assert target.startswith("http") or (page.parent / target).exists(), target
