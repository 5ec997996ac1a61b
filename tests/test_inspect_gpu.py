"""What `Graph.info` reads from real CUDA graphs."""

import ctypes
from xml.etree import ElementTree

import pytest
import torch

from rlgraph.agents.ppo.config import PPOConfig
from rlgraph.agents.ppo.torch import PPO
from rlgraph.cli.main import main
from rlgraph.graph import bindings
from rlgraph.graph.capture import capture
from rlgraph.graph.inspect.info import describe
from rlgraph.graph.topology import flatten
from rlgraph.kernels.rollouts import FusedCollector
from rlgraph.registry import make
from rlgraph.rollout.torch import Collector

pytestmark = pytest.mark.gpu
B, T = 64, 8
MEASURED = ("memory_bytes", "state_bytes", "input_bytes", "output_bytes", "capture_seconds", "instantiate_seconds")


def rollout_graph(mode):
    """The graph of a CartPole rollout with PPO's policy."""
    env = make("CartPole-v1")
    policy = PPO.build_policy(PPOConfig(device="cuda", hidden=(64, 64)), env)
    generator = torch.Generator(policy.obs_mean.device).manual_seed(0)
    if mode == "fused":
        collector = FusedCollector(env, policy.for_kernels(), B, T, generator, "tf32")
        return capture(collector.collect, state=collector.state(), generators=[generator])
    return Collector(env, policy.act, policy.value, B, T, generator, mode).graph


@pytest.mark.parametrize("mode", ["graph-uncompiled", "graph", "fused"])
def test_a_cartpole_rollout_never_meets_the_host(mode):
    graph = rollout_graph(mode)
    info = graph.info()
    assert "host" not in info.nodes
    assert "device-to-host" not in info.copies
    assert sum(info.kernels.values()) == info.nodes["kernel"]
    assert sum(info.copies.values()) == info.nodes.get("memcpy", 0)
    assert info.critical_path <= sum(info.nodes.values())
    if mode != "fused":
        assert info.nodes["kernel"] >= T
    graph.replay()  # reading has not harmed it
    torch.cuda.synchronize()


def test_a_known_function():
    kept = torch.zeros(1000, device="cuda")

    def known(x):
        kept.copy_(torch.sin(x + 1))
        return kept * 2

    x = torch.zeros(1000, device="cuda")
    graph = capture(known, x, state=[kept, kept])
    info = graph.info()
    assert info.name == "known"
    assert info.nodes == {"kernel": 3, "memcpy": 1}
    assert info.copies == {"device-to-device": 1}
    assert (info.edges, info.critical_path) == (3, 4)
    assert sum(info.kernels.values()) == 3
    for operation in ("add", "sin", "mul"):
        assert [name for name in info.kernels if operation in name.lower()], (operation, info.kernels)
    assert (info.state_bytes, info.input_bytes, info.output_bytes) == (4000, 4000, 4000)
    assert info.memory_bytes >= 4000
    assert info.capture_seconds > 0 and info.instantiate_seconds > 0
    assert graph.replay(x + 1).tolist() == pytest.approx([1.8185949] * 1000)
    assert graph.info() == info  # also when it has run


def test_branches_on_two_streams_are_not_one_after_the_other():
    side = torch.cuda.Stream()

    def branches(x):
        x, here = x + 1, torch.cuda.current_stream()
        side.wait_stream(here)
        with torch.cuda.stream(side):
            other = torch.sin(x)
        one = torch.cos(x)
        here.wait_stream(side)
        return one + other

    info = capture(branches, torch.zeros(1000, device="cuda")).info()
    assert info.nodes == {"kernel": 4}
    assert (info.edges, info.critical_path) == (4, 3)
    assert len(ElementTree.fromstring(info.svg()).findall(".//{http://www.w3.org/2000/svg}g")) == 4


def test_a_copy_to_the_host_is_seen():
    host = torch.zeros(1000, pin_memory=True)

    def to_host(x):
        host.copy_(x + 1, non_blocking=True)

    info = capture(to_host, torch.zeros(1000, device="cuda"), watch=False).info()
    assert info.copies == {"device-to-host": 1}


def test_a_copy_from_the_host_is_seen():
    host = torch.zeros(1000, pin_memory=True)
    info = capture(lambda x: x.copy_(host, non_blocking=True), torch.zeros(1000, device="cuda")).info()
    assert info.copies == {"host-to-device": 1}


def test_child_graphs_are_looked_into_and_host_nodes_seen():
    runtime, _ = bindings.load()
    graph = capture(lambda x: torch.sin(x + 1), torch.zeros(1000, device="cuda"))
    inner = runtime.cudaGraph_t(init_value=graph.raw)
    outer = bindings.call(runtime, "cudaGraphCreate", 0)
    first = bindings.call(runtime, "cudaGraphAddChildGraphNode", outer, None, 0, inner)
    second = bindings.call(runtime, "cudaGraphAddChildGraphNode", outer, [first], 1, inner)
    nothing = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: None)
    host = runtime.cudaHostNodeParams()
    host.fn = runtime.cudaHostFn_t(init_value=ctypes.cast(nothing, ctypes.c_void_p).value)
    bindings.call(runtime, "cudaGraphAddHostNode", outer, [second], 1, host)
    try:
        info = describe(flatten(bindings.read(int(outer))), "outer", **dict.fromkeys(MEASURED, 0))
    finally:
        bindings.call(runtime, "cudaGraphDestroy", outer)
    assert info.nodes == {"kernel": 4, "child graph": 2, "host": 1}
    assert info.critical_path == 7
    assert sorted(info.kernels.values()) == [2, 2]


def test_graphs_that_share_a_pool_share_its_bytes():
    x = torch.ones(1 << 22, device="cuda")
    first = capture(lambda x: (x * 2).sum(), x)
    alone = first.info().memory_bytes
    assert alone >= x.nbytes
    second = capture(lambda x: (x * 3).sum(), x, pool=first.pool)
    assert second.pool == first.pool
    assert first.info().memory_bytes == second.info().memory_bytes == alone  # whose results in between take turns
    apart = capture(lambda x: (x * 4).sum(), x)
    assert apart.pool.handle != first.pool.handle
    assert apart.info().memory_bytes == alone == first.info().memory_bytes


@pytest.mark.parametrize("words", ["--rollout --mode graph-uncompiled", "--mode graph-uncompiled", "--mode fused"])
def test_graph_show(words, tmp_path, capsys):
    sizes = "--num-envs 64 --num-steps 8 --num-epochs 1 --num-minibatches 2"
    assert main(["graph", "show", *words.split(), *sizes.split(), f"--out={tmp_path / 'picture'}"]) == 0
    printed = capsys.readouterr().out
    part = "a rollout" if "--rollout" in words else "an iteration"
    assert f"CUDA graph of {part} of ppo on CartPole-v1, mode {words.split()[-1]}" in printed
    assert (tmp_path / "picture.dot").read_text().startswith("digraph")
    assert ElementTree.parse(tmp_path / "picture.svg").getroot().tag == "{http://www.w3.org/2000/svg}svg"
