"""K iterations a launch are K iterations, row by row and in what they leave; their metrics' way to the host.

In JAX: test_modes_of_agents.py.
"""

import dataclasses
import json

import pytest
import torch
from agent_tools import check_refused_in_one_line
from test_checkpoint import CONFIGS, STEP, TINY, assert_same, assert_same_run, press_ctrl_c, rows, trainer

from rlgraph.agents import AGENTS
from rlgraph.graph.readback import Readbacks
from rlgraph.runs.checkpoint import saved
from rlgraph.runs.train import resume, train


def check_launches_are_iterations(agent, backend, K, **changes):
    """A launch of K, and one that goes on from it, against iterations one by one. Returns the trainer of launches."""
    config = CONFIGS[agent]
    total_steps = config.batch_size * (config.num_iterations // K * K)  # the schedules end at the same iteration
    one, chained = (
        trainer(agent, backend, total_steps=total_steps, iterations_per_launch=k, **changes) for k in (1, K)
    )
    for _ in range(2):
        expected = [one.iterate().get()[0] for _ in range(K)]
        assert chained.iterate().get() == expected
    assert len({tuple(row) for row in expected}) == K
    assert_same(chained.state_arrays(), one.state_arrays())
    return chained


@pytest.mark.parametrize("mode", ["eager", "graph"])
@pytest.mark.parametrize("agent", AGENTS)
def test_iterations_of_a_launch_in_torch(agent, mode):
    check_launches_are_iterations(agent, "torch", 3, mode=mode)


# ---- whole runs


def test_a_run_of_launches_is_the_run_of_its_iterations(tmp_path, monkeypatch):
    """Interrupted before its second launch, and resumed."""
    config = dataclasses.replace(TINY, total_steps=6 * STEP)
    train("ppo", dataclasses.replace(config, run_dir=str(tmp_path / "whole")))
    with monkeypatch.context() as patch:
        press_ctrl_c(patch, 2)
        assert train(
            "ppo", dataclasses.replace(config, iterations_per_launch=2, run_dir=str(tmp_path / "run"))
        ).interrupted
    assert rows(tmp_path / "run") == rows(tmp_path / "whole")[:4]
    result = resume(str(tmp_path / "run"))
    assert_same_run(tmp_path / "run", tmp_path / "whole")
    assert [*saved(tmp_path / "run")] == [2 * STEP, 4 * STEP, 6 * STEP]
    # Two processes, and of each the first launch is not timed.
    assert result.steps_per_second == pytest.approx(2 * STEP / result.train_seconds)


def test_an_uneven_number_of_steps_is_rounded_up_to_launches(tmp_path):
    config = dataclasses.replace(TINY, total_steps=3 * STEP + 1, iterations_per_launch=3, run_dir=str(tmp_path / "a"))
    shown = []
    assert train("ppo", config, lambda steps, total, metrics: shown.append((steps, total))).steps == 6 * STEP
    assert shown == [(i * STEP, 6 * STEP) for i in range(1, 7)]
    train("ppo", dataclasses.replace(TINY, total_steps=6 * STEP, run_dir=str(tmp_path / "b")))
    assert_same_run(tmp_path / "a", tmp_path / "b")  # schedules end with the last iteration
    seconds = [json.loads(line)["seconds"] for line in (tmp_path / "a" / "metrics.jsonl").read_text().splitlines()]
    assert seconds[0] == seconds[2] < seconds[3] == seconds[5]


@pytest.mark.parametrize("agent", AGENTS)
def test_a_launch_has_at_least_one_iteration(agent):
    for K in (0, -2):
        check_refused_in_one_line(
            CONFIGS[agent], {"iterations_per_launch": K}, f"^iterations_per_launch must be at least 1, but is {K}$"
        )


# ---- metrics on their way


def check_two_in_flight(device):
    readbacks, tensor = Readbacks(), torch.zeros(2, device=device)

    def start(value):
        pending = readbacks.start(tensor.fill_(value))
        tensor.fill_(-1)  # what comes later does not change what was copied
        return pending

    first, second = start(1), start(2)
    assert first.get() == [1, 1]
    third = start(3)
    assert (second.get(), third.get(), third.get()) == ([2, 2], [3, 3], [3, 3])
    start(4), start(5)
    with pytest.raises(RuntimeError, match="these metrics are overwritten: read them before 2 more launches"):
        third.get()


def test_metrics_are_read_before_their_buffer_is_used_again():
    check_two_in_flight("cpu")


# ---- on a GPU


@pytest.mark.gpu
def test_metrics_go_to_pinned_memory():
    check_two_in_flight("cuda")
    readbacks = Readbacks()
    buffers = {readbacks.start(torch.ones(2, device="cuda"))._slot._host.data_ptr() for _ in range(6)}
    assert len(buffers) == 2
    assert all(slot._host.is_pinned() for slot in readbacks._slots)


@pytest.mark.gpu
@pytest.mark.parametrize("agent", AGENTS)
def test_one_replay_a_launch(agent):
    run = check_launches_are_iterations(agent, "torch", 4, mode="graph-uncompiled", device="cuda")
    assert run.graph.captured and run.graph.replays == 2
    assert run.execution() == "one CUDA graph for 4 iterations, replayed 2 times"


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["graph", "fused"])
def test_iterations_of_a_launch_in_the_fast_modes(mode):
    check_launches_are_iterations("ppo", "torch", 4, mode=mode, device="cuda")


@pytest.mark.gpu
def test_a_launch_neither_waits_for_the_device_nor_asks_for_its_memory():
    run = trainer("ppo", "torch", mode="graph", device="cuda")
    for _ in range(2):
        run.iterate().get()
    allocated = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        pending = [run.iterate() for _ in range(2)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == allocated
    assert all(len(metrics.get()) == 1 for metrics in pending)
