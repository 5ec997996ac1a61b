"""What a captured graph holds: read by cuda-bindings (fakes here, the real ones on a GPU), counted, folded, drawn."""

import collections
import enum
import itertools
import re
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import numpy as np
import pytest
import torch

from rlgraph.cli import graph_show as show
from rlgraph.cli.main import main
from rlgraph.errors import GraphError
from rlgraph.graph import bindings
from rlgraph.graph.capture import Graph, capture
from rlgraph.graph.inspect.draw import MOST_NESTED, TIMES, Repeat, boxes, chains, dot, fold
from rlgraph.graph.inspect.info import describe
from rlgraph.graph.inspect.names import short_name
from rlgraph.graph.inspect.svg import svg
from rlgraph.graph.topology import Contents, Node, Topology, critical_path, flatten, in_order
from rlgraph.runs.train import config_class

SVG = "{http://www.w3.org/2000/svg}"
MEASURED = {"memory_bytes": 2 << 20, "state_bytes": 100, "input_bytes": 1536, "output_bytes": 0}
MEASURED |= {"capture_seconds": 0.12, "instantiate_seconds": 0.003}


def kernels(names):
    return tuple(Node("kernel", name) for name in names)


def graph_of(names, *edges):
    """A topology: each letter a kernel of that name; edges as "0-1" between places."""
    return Topology(kernels(names), tuple(tuple(map(int, edge.split("-"))) for edge in edges))


def chain_of(names):
    return Topology(kernels(names), tuple(itertools.pairwise(range(len(names)))))


def random_graph(rng, n, edges):
    """Edges go from lower to higher numbers, and the numbers are then mixed."""
    place = rng.permutation(n).tolist()
    pairs = {tuple(sorted(rng.choice(n, 2, replace=False).tolist())) for _ in range(edges)}
    return Topology(kernels(rng.choice(list("abc"), n)), tuple((place[a], place[b]) for a, b in sorted(pairs)))


DIAMOND = graph_of("abcd", "0-1", "0-2", "1-3", "2-3")


# ---- counting


@pytest.mark.parametrize(
    ("topology", "longest"),
    [
        (graph_of(""), 0),
        (graph_of("a"), 1),
        (graph_of("aaa"), 1),
        (chain_of("abcde"), 5),
        (DIAMOND, 3),
        (graph_of("abcdef", "0-2", "1-2", "2-3", "4-5"), 3),  # several roots and parts
        (graph_of("abcde", "4-3", "3-2", "2-1", "4-1", "1-0"), 5),  # in no order, with a shorter way beside
    ],
)
def test_critical_path(topology, longest):
    assert critical_path(topology) == longest


def test_nodes_in_a_circle_are_refused():
    with pytest.raises(ValueError, match="2 of 3 nodes wait for each other in a circle"):
        in_order([[1], [2], [1]])


def test_a_child_graph_takes_the_place_of_its_node():
    child = Contents(kernels("xyz"), [(0, 2), (1, 2)], {})  # two roots, one leaf
    nodes = [Node("kernel", "a"), Node("child graph"), Node("kernel", "b")]
    topology = flatten(Contents(nodes, [(0, 1), (1, 2)], {1: child}))
    assert topology.nodes == (*nodes, *kernels("xyz"))
    assert set(topology.edges) == {(0, 1), (1, 3), (1, 4), (3, 5), (4, 5), (5, 2)}
    assert critical_path(topology) == 5


def test_child_graphs_inside_child_graphs_and_empty_ones():
    inner = Contents([Node("kernel", "x")], [], {})
    outer = Contents([Node("child graph"), Node("child graph")], [(0, 1)], {0: inner, 1: Contents([], [], {})})
    topology = flatten(Contents([Node("child graph"), Node("kernel", "b")], [(0, 1)], {0: outer}))
    assert collections.Counter(node.kind for node in topology.nodes) == {"child graph": 3, "kernel": 2}
    assert critical_path(topology) == 5  # the child graph, the one in it, x, the empty one, b
    assert len(topology.edges) == 4


def test_info_counts_nodes_kernels_and_copies():
    nodes = (*kernels("aba"), Node("memcpy", "device-to-host"), Node("memset"), Node("memcpy", "device-to-device"))
    info = describe(Topology(nodes, ((0, 1), (1, 2))), "walk", **MEASURED)
    assert info.nodes == {"kernel": 3, "memcpy": 2, "memset": 1}
    assert info.kernels == {"a": 2, "b": 1}
    assert info.copies == {"device-to-host": 1, "device-to-device": 1}
    assert (info.edges, info.critical_path, info.memory_bytes) == (2, 3, 2 << 20)
    text = str(info)
    for row in (
        "CUDA graph of walk",
        "nodes          6: 3 kernel, 2 memcpy, 1 memset",
        "copies         1 device-to-host, 1 device-to-device",
        "critical path  3 nodes",
        "memory         2.0 MiB in its pool",
        "tensors        state 100 B, inputs 1.5 KiB, outputs 0 B",
        "time           120.0 ms to capture, 3.0 ms to instantiate",
        "kernels        3 launches of 2",
        "            2  a",
    ):
        assert row in text
    assert "copies         none" in str(describe(DIAMOND, "walk", **MEASURED))


ELEMENTWISE = "_ZN2at6native29vectorized_elementwise_kernelI"
NAMES = {
    f"{ELEMENTWISE}Li4ENS0_11FillFunctorIfEESt5arrayIPcLm1EEEEviT0_T1_": "vectorized_elementwise_kernel<FillFunctor>",
    f"{ELEMENTWISE}Li4EZZZNS0_15sin_kernel_cudaERNS_18TensorIteratorBaseEENKUlvE0_clEvENKUlvE0_clEvEUlfE_St5arrayIPcLm2"
    "EEEEviT0_T1_": "vectorized_elementwise_kernel<sin_kernel_cuda>",
    f"{ELEMENTWISE}Li4ENS0_13BinaryFunctorIfffNS0_15binary_internal10MulFunctorIfEEEESt5arrayIPcLm3EEEEviT0_T1_": (
        "vectorized_elementwise_kernel<MulFunctor>"
    ),
    "_ZN2at6native13reduce_kernelILi512ELi1ENS0_8ReduceOpIfNS0_14func_wrapper_tIfZNS0_11sum_functorIfffEclERNS_14Tensor"
    "IteratorEEUlffE_EEjfLi4ELi4EEEEEvT1_": "reduce_kernel<sum_functor>",
    "_Z6kernelPf": "kernel",
    "_ZN12_GLOBAL__N_13fooEv": "foo",
    "triton_poi_fused_add_mul_sin_0": "triton_poi_fused_add_mul_sin_0",
    "triton_" + 60 * "x" + "_end_of_it": "triton_" + 42 * "x" + "…_end_of_it",
    "_Z": "_Z",
    "_Z9short": "short",  # a length that leads beyond the end
    "": "",
}


@pytest.mark.parametrize(("full", "short"), NAMES.items(), ids=range(len(NAMES)))
def test_short_names(full, short):
    assert short_name(full) == short


# ---- folding


def spelled(items):
    """Folded items as text: "a(bc2)3d" is a, then three times: b and two of c, then d."""
    parts = []
    for item in items:
        one = f"({spelled(item.items)})" if isinstance(item, Repeat) else item.node.name
        parts.append(one if item.count == 1 else f"{one}{item.count}")
    return "".join(parts)


def unfolded(items):
    for item in items:
        for _ in range(item.count):
            yield from unfolded(item.items) if isinstance(item, Repeat) else [item.node]


@pytest.mark.parametrize(
    ("nodes", "folded"),
    [
        ("", ""),
        ("a", "a"),
        ("abc", "abc"),
        ("aaaab", "a4b"),
        ("xababab", "x(ab)3"),
        ("aabaabaab", "(a2b)3"),  # the repetition that covers more, not the one that begins first
        ("abababa", "(ab)3a"),
        ("pabbabbabbq", "p(ab2)3q"),
        (("p" + "abc" * 3) * 2 + "z", "(p(abc)3)2z"),
    ],
)
def test_what_repeats_is_folded(nodes, folded):
    assert spelled(fold(kernels(nodes))) == folded


def test_what_is_folded_is_all_there():
    rng = np.random.default_rng(0)
    for _ in range(100):
        nodes = kernels(rng.choice(list("abc"), rng.integers(1, 40)))
        assert tuple(unfolded(fold(nodes))) == nodes


def test_repetitions_are_nested_no_deeper_than_is_readable():
    nodes = "a"
    for letter in "bcdefgh":
        nodes = 2 * (nodes + letter)

    def depth(items):
        return max((1 + depth(item.items) for item in items if isinstance(item, Repeat)), default=0)

    assert depth(fold(kernels(nodes))) == MOST_NESTED
    assert "".join(node.name for node in unfolded(fold(kernels(nodes)))) == nodes


def test_only_what_follows_one_after_the_other_is_folded():
    parts = chains(graph_of("aabbcc", "0-1", "1-2", "1-3", "2-4", "3-4", "4-5"))
    assert [spelled(part.items) for part in parts] == ["a2", "b", "b", "c2"]
    assert [part.after for part in parts] == [[1, 2], [3], [3], []]


def test_every_node_is_in_one_chain_and_chains_come_in_order():
    rng = np.random.default_rng(1)
    for _ in range(50):
        topology = random_graph(rng, 30, rng.integers(0, 60))
        parts = chains(topology)
        drawn = sorted(node for part in parts for node in unfolded(part.items))
        assert drawn == sorted(topology.nodes)
        assert all(later > i for i, part in enumerate(parts) for later in part.after)


# ---- pictures


def test_dot():
    text = dot(chain_of('x"xabababy'), 'a "name"')
    assert text.startswith('digraph "a \\"name\\"" {') and text.endswith("}\n")
    assert text.count("{") == text.count("}") == 2
    labels = re.findall(r'n(\d+) \[label="((?:[^"\\]|\\.)*)"', text)
    assert labels == [(str(i), name) for i, name in enumerate(["x", '\\"', "x", "a", "b", "y"])]
    frame = re.search(r'subgraph cluster_\w+ \{\n    label=". 3";\n    n3 .*\n    n4 .*\n  \}', text)
    assert frame
    assert re.findall(r"n\d+ -> n\d+", text) == [f"n{i} -> n{i + 1}" for i in range(5)]


def test_dot_names_every_frame_differently():
    text = dot(chain_of(("abc" * 3 + "bc" * 2 + "p") * 2), "nested")
    frames = re.findall(r"cluster_\w+", text)
    assert len(frames) == len(set(frames)) == 3


def test_dot_has_the_edges_between_chains():
    text = dot(DIAMOND, "diamond")
    name = dict(re.findall(r'(n\d+) \[label="(\w)"', text))
    assert {name[a] + name[b] for a, b in re.findall(r"(n\d+) -> (n\d+)", text)} == {"ab", "ac", "bd", "cd"}


def drawn(topology):
    """An SVG's boxes, as (left, top, right, bottom) -> label, and its arrows, as [(x, y), ...] each."""
    root = ElementTree.fromstring(svg(topology, "a <name> & more"))
    assert root.findtext(f"{SVG}title") == "a <name> & more"
    drawn_boxes, width, height = {}, float(root.get("width")), float(root.get("height"))
    for group in root.iter(f"{SVG}g"):
        box = group.find(f"{SVG}rect")
        x, y, w, h = (int(box.get(name)) for name in ("x", "y", "width", "height"))
        assert x + w < width and y + h < height
        drawn_boxes[x, y, x + w, y + h] = group.findtext(f"{SVG}text")
    lines = [line.get("points").split() for line in root.iter(f"{SVG}polyline")]
    assert len(drawn_boxes) == len(list(root.iter(f"{SVG}g")))
    return root, drawn_boxes, [[tuple(map(int, point.split(","))) for point in line] for line in lines]


def test_svg_of_a_chain():
    root, places, arrows = drawn(chain_of("a" * 128 + "bcbcbc"))
    assert list(places.values()) == [f"a {TIMES} 128", "b", "c"]
    assert len({left for left, *_ in places}) == 1 and len(arrows) == 2
    assert [text.text for text in root.iter(f"{SVG}text") if text.get("fill")] == [f"{TIMES} 3"]


def test_svg_escapes_names():
    topology = Topology((Node("kernel", 'f<int>& "x"'), Node("host")), ((0, 1),))
    root, places, _ = drawn(topology)
    assert list(places.values()) == ['f<int>& "x"', "host"]
    assert [group.findtext(f"{SVG}title") for group in root.iter(f"{SVG}g")] == ['f<int>& "x"', "host"]


def test_svg_of_nothing():
    _, places, arrows = drawn(graph_of(""))
    assert not places and not arrows


def test_svg_has_every_box_below_those_it_waits_for_and_no_arrow_through_another():
    rng = np.random.default_rng(2)
    for _ in range(50):
        topology = random_graph(rng, 20, rng.integers(0, 30))
        _, places, arrows = drawn(topology)
        parts = chains(topology)
        items = [sum(1 for _ in boxes(part.items)) for part in parts]
        assert len(places) == sum(items)
        assert len(arrows) == sum(items) - len(items) + sum(len(part.after) for part in parts)
        for line in arrows:
            (start, above), (end, below) = line[0], line[-1]
            assert any(left < start < right and bottom == above for left, _, right, bottom in places)
            assert any(left < end < right and top == below for left, top, right, _ in places)
            assert below > above
            for (x1, y1), (x2, y2) in itertools.pairwise(line):
                assert x1 == x2 or y1 == y2
                for left, top, right, bottom in places:
                    through = min(x1, x2) < right and max(x1, x2) > left and min(y1, y2) < bottom and max(y1, y2) > top
                    assert not through


def test_svg_lines_on_top_of_each_other_begin_or_end_together():
    rng = np.random.default_rng(3)
    for _ in range(50):
        _, _, arrows = drawn(random_graph(rng, 20, rng.integers(0, 30)))
        across = [line for line in arrows if len(line) == 4]
        for a, b in itertools.combinations(across, 2):
            (a1, a2), (b1, b2) = (sorted((line[1][0], line[2][0])) for line in (a, b))
            if a[1][1] == b[1][1] and a1 < b2 and b1 < a2:
                assert a[0] == b[0] or a[-1] == b[-1]


def test_thousands_of_nodes_are_quick():
    rng = np.random.default_rng(3)
    step = [f"kernel{i}" for i in rng.integers(0, 20, 39)]
    names = 125 * [*step, "last"]
    for topology in (
        chain_of(names),
        chain_of([f"kernel{i}" for i in rng.integers(0, 40, 5000)]),
        random_graph(rng, 5000, 8000),
    ):
        started = time.perf_counter()
        info = describe(topology, "large", **MEASURED)
        assert len(info.svg()) > 1000 and len(info.dot()) > 1000
        assert time.perf_counter() - started < 5
    repeated = chains(chain_of(names))[0].items
    assert len(repeated) == 1 and repeated[0].count == 125


# ---- reading, with cuda-bindings' modules faked


class Handle(int):
    """As cuda-bindings' handles: made from an address, which int() gives."""

    def __new__(cls, init_value=0):
        return super().__new__(cls, init_value)


def named(name, *members):
    return enum.IntEnum(name, {member: i for i, member in enumerate(members)})


Error = named("cudaError_t", "cudaSuccess", "cudaErrorInvalidValue")
KINDS = [f"cudaGraphNodeType{kind}" for kind in ("Kernel", "Memcpy", "Memset", "Host", "Graph", "Empty", "New")]
Kind = named("cudaGraphNodeType", *KINDS)
MEMORY = [f"cudaMemoryType{kind}" for kind in ("Unregistered", "Host", "Device", "Managed")]
COPIES = [f"cudaMemcpy{kind}" for kind in ("HostToHost", "HostToDevice", "DeviceToHost", "DeviceToDevice", "Default")]
Memory, Copy = named("cudaMemoryType", *MEMORY), named("cudaMemcpyKind", *COPIES)


class Runtime:
    """Graph 1 holds nodes 10 to 16; node 14 is child graph 2, with kernel 20. Node 12's copy names no direction."""

    cudaGraph_t, cudaMemoryType, cudaMemcpyKind = Handle, Memory, Copy

    def __init__(self):
        self.nodes = {1: [10, 11, 12, 13, 14, 15, 16], 2: [20]}
        self.edges = {1: [(10, 11), (11, 12), (10, 13), (13, 14)], 2: []}
        self.kinds = {10: 0, 11: 1, 12: 1, 13: 0, 14: 4, 15: 3, 16: 6, 20: 0}
        self.memory = {100: Memory.cudaMemoryTypeDevice, 200: Memory.cudaMemoryTypeUnregistered}

    def cudaGraphGetNodes(self, graph, numNodes):  # noqa: N802
        found = [Handle(node) for node in self.nodes[int(graph)]]
        return Error(0), found if numNodes else [], len(found)

    def cudaGraphGetEdges(self, graph, numEdges):  # noqa: N802
        found = self.edges[int(graph)] if numEdges else []
        starts, ends = ([Handle(edge[side]) for edge in found] for side in (0, 1))
        return Error(0), starts, ends, [None for _ in found], len(self.edges[int(graph)])

    def cudaGraphNodeGetType(self, node):  # noqa: N802
        return Error(0), Kind(self.kinds[int(node)])

    def cudaGraphChildGraphNodeGetGraph(self, node):  # noqa: N802
        assert int(node) == 14
        return Error(0), Handle(2)

    def cudaGraphMemcpyNodeGetParams(self, node):  # noqa: N802
        kind = Copy.cudaMemcpyHostToDevice if int(node) == 11 else Copy.cudaMemcpyDefault
        ends = SimpleNamespace(ptr=100), SimpleNamespace(ptr=200)
        return Error(0), SimpleNamespace(kind=int(kind), srcArray=0, dstArray=0, srcPtr=ends[0], dstPtr=ends[1])

    def cudaPointerGetAttributes(self, address):  # noqa: N802
        return Error(0), SimpleNamespace(type=self.memory[address])


class Driver:
    CUgraphNode = Handle

    def cuGraphKernelNodeGetParams(self, node):  # noqa: N802
        return Error(0), SimpleNamespace(func=0 if int(node) == 13 else int(node), kern=77)

    def cuFuncGetName(self, function):  # noqa: N802
        return Error(0), b"function%d" % function

    def cuKernelGetName(self, kernel):  # noqa: N802
        return Error(0), b"kernel%d" % kernel


@pytest.fixture
def fakes(monkeypatch):
    runtime, driver = Runtime(), Driver()
    monkeypatch.setitem(sys.modules, "cuda", SimpleNamespace(bindings=None))
    monkeypatch.setitem(sys.modules, "cuda.bindings", SimpleNamespace(runtime=runtime, driver=driver))
    return runtime, driver


def test_a_graph_is_read(fakes):
    contents = bindings.read(1)
    assert contents.nodes == [
        Node("kernel", "function10"),
        Node("memcpy", "host-to-device"),
        Node("memcpy", "device-to-host"),  # by its addresses
        Node("kernel", "kernel77"),  # by the kernel, as it has no function
        Node("child graph"),
        Node("host"),
        Node("New"),  # a kind that this code does not know
    ]
    assert contents.edges == [(0, 1), (1, 2), (0, 3), (3, 4)]
    assert contents.children == {4: Contents([Node("kernel", "function20")], [], {})}


def test_edges_are_read_by_the_call_that_tolerates_data_where_there_are_two(fakes):
    runtime, _ = fakes

    def lossy(graph, count):
        return Error(1), None, None, None

    runtime.cudaGraphGetEdges_v2, runtime.cudaGraphGetEdges = runtime.cudaGraphGetEdges, lossy
    assert len(bindings.read(1).edges) == 4


def test_a_call_that_fails_is_named_with_its_error(fakes):
    _, driver = fakes
    driver.cuFuncGetName = lambda function: (Error.cudaErrorInvalidValue, None)
    with pytest.raises(GraphError, match=r"^cuFuncGetName failed: cudaErrorInvalidValue$"):
        bindings.read(1)


def test_a_call_that_is_not_there_is_named(fakes, monkeypatch):
    _, driver = fakes

    def missing(function):
        raise RuntimeError('Function "cuFuncGetName" not found')

    driver.cuFuncGetName = missing
    with pytest.raises(GraphError, match=r"cuFuncGetName failed: .* not found; install a newer NVIDIA driver"):
        bindings.read(1)
    monkeypatch.delattr(Driver, "cuGraphKernelNodeGetParams")
    with pytest.raises(GraphError, match="cuda-bindings has no cuGraphKernelNodeGetParams: install a newer version"):
        bindings.read(1)


def test_without_cuda_bindings_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(GraphError, match=r'cuda-bindings, .*: pip install "cuda-bindings==1\d\.\*"$'):
        bindings.read(1)


# ---- a graph's own


def test_info_gives_both_pictures_of_its_nodes():
    topology = graph_of("aab", "0-1", "1-2")
    info = describe(topology, "fn", **MEASURED)
    assert info.dot() == dot(topology, "fn") and info.svg() == svg(topology, "fn")


def test_without_cuda_there_is_nothing_to_inspect():
    graph = capture(lambda x: x + 1, torch.zeros(3))
    with pytest.raises(GraphError, match="holds no CUDA graph: on cpu it is run directly"):
        graph.info()
    graph.reset()
    with pytest.raises(RuntimeError, match="released by reset"):
        graph.info()


PAGE = (Path(__file__).parents[1] / "docs" / "graphs.md").read_text()
(EXAMPLE,) = re.findall(r"```python\n(.*?)```", PAGE[PAGE.index("## Inspection") :].split("\n## ")[0], re.DOTALL)


def test_the_documented_example_needs_a_gpu(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(GraphError, match="move holds no CUDA graph: on cpu"):
        exec(EXAMPLE.replace('"cuda"', '"cpu"'), {})


@pytest.mark.gpu
def test_the_documented_example(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(EXAMPLE, names := {})
    info = names["info"]
    assert info.name == "move" and info.nodes["kernel"] == 3
    assert info.state_bytes == 2 * 4096 * 4 and info.output_bytes == 4
    assert ElementTree.parse(tmp_path / "move.svg").getroot().tag == f"{SVG}svg"


# ---- the command


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "a CUDA graph needs an NVIDIA GPU"),
        ("--agent dqn --rollout --num-envs 8", "a CUDA graph needs an NVIDIA GPU"),
        ("--mode eager", "mode eager captures no CUDA graph; use one of graph-uncompiled, graph, fused"),
        ("--mode grap", "unknown torch mode 'grap'; did you mean 'graph'?"),
        ("--backend jax", "reads torch's CUDA graphs, not what backend 'jax' launches"),
        ("--out nowhere/graph", "no folder 'nowhere' for the picture"),
        ("--out nowhere/", "no folder 'nowhere' for the picture"),
        ("--run-dir x", "unknown option '--run-dir'"),
        ("--agent pp", "unknown agent 'pp'; did you mean 'ppo'?"),
        ("--env CartPole", "unknown environment 'CartPole'; did you mean 'CartPole-v1'?"),
    ],
)
def test_wrong_usage_is_one_line(words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["graph", "show", *words.split()]) == 2
    said = capsys.readouterr()
    assert message in said.err and said.err.count("\n") == 1 and not said.out
    assert not list(tmp_path.iterdir())


def test_help_and_other_commands(capsys):
    assert main(["graph"]) == 0 and "rlgraph graph show [--env ID] [--agent NAME]" in capsys.readouterr().out
    assert main(["graph", "shwo"]) == 2 and "did you mean 'show'?" in capsys.readouterr().err


@pytest.fixture
def as_on_a_gpu(tmp_path, monkeypatch):
    """The command as on a GPU, with a diamond for what it captures; the options that it was called with."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    called = []

    def info(agent, options):
        called.append((agent, options))
        return describe(DIAMOND, "diamond", **MEASURED)

    monkeypatch.setattr(show, "_info", info)
    return called


@pytest.mark.parametrize(
    ("words", "agent", "files"),
    [
        ("", "ppo", "graph-CartPole-v1-ppo"),
        ("--env Acrobot-v1 --rollout", "ppo", "graph-Acrobot-v1-ppo-rollout"),
        ("--agent sac --env Pendulum-v1 --out p", "sac", "p"),
        ("--out p.svg", "ppo", "p"),
        ("--out p.1", "ppo", "p.1"),
        ("--out .", "ppo", "graph-CartPole-v1-ppo"),
    ],
)
def test_it_prints_and_writes_both_pictures(words, agent, files, as_on_a_gpu, tmp_path, capsys):
    assert main(["graph", "show", *words.split()]) == 0
    out = capsys.readouterr().out
    assert str(describe(DIAMOND, "diamond", **MEASURED)) in out
    assert f"drawn in {files}.dot and {files}.svg" in out
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"{files}.dot", f"{files}.svg"]
    assert (tmp_path / f"{files}.dot").read_text() == dot(DIAMOND, "diamond")
    assert ElementTree.parse(tmp_path / f"{files}.svg").getroot().tag == f"{SVG}svg"
    assert [name for name, _ in as_on_a_gpu] == [agent]


@pytest.mark.parametrize(
    ("rollout", "launches", "function", "name"),
    [
        (True, 2, "collect", "a rollout of dqn on CartPole-v1, mode graph-uncompiled"),
        (False, 1, "_iterations", "an iteration of dqn on CartPole-v1, mode graph-uncompiled"),
        (False, 2, "_iterations", "2 iterations of dqn on CartPole-v1, mode graph-uncompiled"),
    ],
)
def test_what_is_shown_is_the_iteration_or_the_rollout_in_it(rollout, launches, function, name, monkeypatch):
    captured = []  # run directly, without a GPU
    monkeypatch.setattr(Graph, "info", lambda graph: captured.append(graph) or describe(DIAMOND, "", **MEASURED))
    sizes = {"num_envs": 4, "num_steps": 4, "mode": "graph-uncompiled", "device": "cpu"}
    options = show.options_class(config_class("dqn"))(**sizes, rollout=rollout, iterations_per_launch=launches)
    assert show._info("dqn", options).name == name
    (graph,) = captured
    assert graph._name == function
    graph.replay()


def test_a_folder_in_the_place_of_a_file_is_found_before_the_capture(as_on_a_gpu, tmp_path, capsys):
    (tmp_path / "p.svg").mkdir()
    assert main(["graph", "show", "--out", "p"]) == 2
    assert capsys.readouterr().err == "rlgraph: cannot write 'p.svg': give another --out\n"
    assert not as_on_a_gpu and [path.name for path in tmp_path.iterdir()] == ["p.svg"]


def test_what_an_inspection_cannot_do_is_one_line(as_on_a_gpu, monkeypatch, capsys):
    def info(agent, options):
        raise GraphError("cudaGraphGetNodes failed: cudaErrorInvalidValue")

    monkeypatch.setattr(show, "_info", info)
    assert main(["graph", "show"]) == 1
    assert capsys.readouterr().err == "rlgraph: cudaGraphGetNodes failed: cudaErrorInvalidValue\n"


# ---- the rooms


def test_no_room_of_the_graphs_reaches_into_one_that_it_stands_apart_from():
    """The core needs no control flow by the device; pictures need nothing but the plain list of nodes."""
    folder = Path(bindings.__file__).parent
    imported = {path: re.findall(r"from (rlgraph\.graph\S*) import", path.read_text()) for path in folder.rglob("*.py")}
    for path, modules in imported.items():
        if path.parent == folder:
            assert not [module for module in modules if ".device" in module], path
        if path.parent.name == "inspect":
            allowed = ("rlgraph.graph.inspect.", "rlgraph.graph.topology")
            assert all(module.startswith(allowed) for module in modules), path
    assert len(imported) > 15
