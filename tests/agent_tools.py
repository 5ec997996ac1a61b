"""What the tests of agents share: small runs in either backend, all that a run holds, and comparisons of runs."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import torch

import rlgraph
from rlgraph.agents import AGENTS
from rlgraph.agents.networks import jax as networks_jax
from rlgraph.agents.networks import torch as networks_torch
from rlgraph.agents.trainer_torch import Trainer as TorchTrainer
from rlgraph.errors import UsageError
from rlgraph.runs.train import metric_names, trainer_class

BACKENDS = ["torch", "jax"]
FASTEST = {"torch": "eager", "jax": "jit"}  # modes, on a CPU
METRICS = {entry.trainer: metric_names(name) for name, entry in AGENTS.items()}


def make(name, small, backend, env, **changes):
    """A run of the agent `name` by the config `small`, but for `changes`; `env` is a name, or an Environment."""
    config = dataclasses.replace(small, backend=backend, **changes)
    return trainer_class(name, backend)(config, rlgraph.make(env) if isinstance(env, str) else env)


def metrics_of(agent) -> tuple[str, ...]:
    return METRICS[type(agent).__name__]


def with_xlas_own_fusions(check: str, quick_environment: dict[str, str]) -> None:
    """Call `MODULE.FUNCTION(...)` of the tests in a process of its own, for what is so bit for bit with XLA as it is.

    conftest.py turns its fusions on a CPU off.
    """
    words = [sys.executable, "-c", f"import {check.split('.')[0]}; {check}"]
    environment = {**os.environ, **quick_environment, "XLA_FLAGS": ""}
    done = subprocess.run(words, cwd=Path(__file__).parent, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# ---- what a run does and holds, as numpy


def copy(x):
    return x.detach().numpy(force=True).copy() if isinstance(x, torch.Tensor) else np.array(x)


def iterate(agent):
    """One iteration's metrics by name."""
    (row,) = agent.iterate().get()
    return dict(zip(metrics_of(agent), row, strict=True))


def everything(agent):
    """All that one iteration leaves to the next, but for random states: a list of numpy arrays."""
    if isinstance(agent, TorchTrainer):
        return [copy(leaf) for leaf in torch.utils._pytree.tree_leaves(agent._state())]
    return [copy(leaf) for leaf in jax.tree.leaves(agent.state._replace(key=None))]


def run(agent, iterations):
    """Metrics [iterations, ...], and everything at the end."""
    metrics = [list(iterate(agent).values()) for _ in range(iterations)]
    return np.array(metrics), everything(agent)


def disturbed_run(agent, iterations, reset_at=None, reseed_at=None):
    """As `run`, of torch, with environments begun anew or another seed before an iteration; and the agent."""
    metrics = []
    for i in range(iterations):
        if i == reset_at:
            with torch.no_grad():
                agent.collector.reset()
        if i == reseed_at:
            agent.generator.manual_seed(123)
        metrics += agent.iterate().get()
    return np.array(metrics), everything(agent), agent


def stored(agent):
    """What the replay holds by name, rows from the oldest on, without what was not yet written."""
    state = agent.replay.state() if isinstance(agent, TorchTrainer) else agent.state.replay._asdict()
    state = {name: copy(x) for name, x in state.items()}
    cursor, fill = int(state.pop("cursor")), int(state.pop("fill"))
    return {name: np.roll(buffer, fill - cursor, axis=0)[:fill] for name, buffer in state.items()}


@jax.jit
def _call(policy, obs):
    return policy(obs)


def values(agent_or_policy, obs):
    """Action values of an agent, or of its network, as numpy."""
    policy = getattr(agent_or_policy, "policy", agent_or_policy)
    if isinstance(policy, torch.nn.Module):
        with torch.no_grad():
            return policy(torch.tensor(obs)).numpy()
    return np.asarray(_call(policy, obs))


# ---- networks


def share_weights(in_torch, in_jax, rng, most=0.6):
    """Give a torch network weights and statistics that are all large enough to matter. Returns JAX's with the same."""
    arrays = {
        name: array + rng.uniform(0.1, most, array.shape) * rng.choice([1, 1 if "var" in name else -1], array.shape)
        for name, array in networks_torch.to_arrays(in_torch).items()
    }
    arrays = {name: array.astype(np.float32) for name, array in arrays.items()}
    networks_torch.from_arrays(in_torch, arrays)
    return networks_jax.from_arrays(in_jax, arrays)


# ---- comparisons


def assert_equal(left, right):
    assert len(left) == len(right)
    for a, b in zip(left, right):
        np.testing.assert_array_equal(a, b)


def differ(left, right):
    return any(not np.array_equal(a, b) for a, b in zip(left, right))


def assert_same_run(left, right):
    """Bit for bit, metrics and everything at the end."""
    assert_equal([left[0], *left[1]], [right[0], *right[1]])


def assert_close_after_one_iteration(got, expected, atol=2e-4):
    """Fused kernels round otherwise, and Adam's first steps amplify it where a gradient is next to nothing."""
    np.testing.assert_allclose(got[0], expected[0], rtol=2e-3, atol=atol)
    for a, b in zip(got[1], expected[1], strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-3, atol=2e-3)


# ---- what every agent must do


def check_refused_in_one_line(small, changes, message):
    with pytest.raises(UsageError, match=message) as error:
        dataclasses.replace(small, **changes)
    assert "\n" not in str(error.value)


def check_words_of_modes(make_in_mode, backend):
    """In words, how it runs; `make_in_mode(mode)` is an agent."""
    words = {"eager": "operation by operation"}
    words |= {"torch": {"auto": "operation by operation"}, "jax": {"auto": "one XLA program", "jit": "XLA"}}[backend]
    for mode, expected in words.items():
        agent = make_in_mode(mode)
        assert expected in agent.execution()
        assert agent.mode == (FASTEST[backend] if mode == "auto" else mode)


def check_graphs_are_the_default(agent, backend, mode="graph"):
    """On a GPU."""
    iterate(agent)
    assert agent.mode == mode
    expected = {"torch": "one CUDA graph an iteration, replayed 1 times", "jax": "command buffers on"}
    assert expected[backend] in agent.execution()


def check_captured_equals_eager(eager, graph):
    """Of two runs of ten iterations, with the agents that did them."""
    assert graph[2].graph.captured
    assert "one CUDA graph an iteration, replayed 10 times" in graph[2].execution()
    assert_same_run(eager, graph)
    assert len({tuple(row) for row in graph[0]}) == 10


def check_seeds(first, again, other):
    """Runs of which the first two have one seed."""
    assert_same_run(first, again)
    assert differ(first[1], other[1])


def check_updated_in_place(agent, iterations):
    """Torch's state has a name for every tensor, and each stays where it is."""
    named, _ = torch.utils._pytree.tree_flatten_with_path(agent._state())
    assert all(isinstance(leaf, torch.Tensor) for _, leaf in named)
    before = {path: leaf.data_ptr() for path, leaf in named}
    for _ in range(iterations):
        iterate(agent)
    assert {path: x.data_ptr() for path, x in torch.utils._pytree.tree_flatten_with_path(agent._state())[0]} == before


# ---- iterations of minibatches, watched from inside


class Watched:
    """A run of PPO or PQN, with what passed between the parts of its iterations written down, an entry an iteration.

    Args:
        name: of the agent.
        make: gives the agent.
        batches: its method that makes a Batch of a rollout.
        iterations: how many are watched.
    """

    def __init__(self, name, backend, make, batches, iterations):
        self.rollouts, self.batches, self.rows, self.updates, self.metrics, self.before = [], [], [], [], [], []
        trainer = trainer_class(name, backend)
        with pytest.MonkeyPatch.context() as patch:
            {"torch": self._listen_to_torch, "jax": self._listen_to_jax}[backend](patch, trainer, batches)
            self.agent = make()
            for _ in range(iterations):
                self.before.append(self.agent.arrays())
                self.rows.append([])
                self.updates.append([])
                self.metrics.append(iterate(self.agent))
                jax.effects_barrier()

    def _listen_to_torch(self, patch, trainer, batches):
        update, make_batch = trainer._update, getattr(trainer, batches)

        def watched_update(agent, batch, rows_M, *rest):
            result = update(agent, batch, rows_M, *rest)
            parameters = list(agent.policy.parameters())
            adam = [agent.optimizer.state[p] for p in parameters]
            moments = ([a[name] for a in adam] for name in ("exp_avg", "exp_avg_sq"))
            self._note_update(rows_M, parameters, *moments, adam[0]["step"])
            return result

        def watched_batch(agent, rollout):
            batch = make_batch(agent, rollout)
            self._note_batch(rollout, batch)
            return batch

        patch.setattr(trainer, "_update", watched_update)
        patch.setattr(trainer, batches, watched_batch)

    def _listen_to_jax(self, patch, trainer, batches):
        """From inside the compiled iteration, through callbacks to the host, in their order."""
        update, make_batch = trainer._update, getattr(trainer, batches)
        kind = sys.modules[trainer.__module__].Batch

        def watched_update(agent, learner, batch, rows_M, learning_rate):
            learner, metrics = update(agent, learner, batch, rows_M, learning_rate)
            policy, (_, adam), *_ = learner
            state = (jax.tree.leaves(x) for x in (policy, adam.mu, adam.nu))
            jax.debug.callback(self._note_update, rows_M, *state, adam.count, ordered=True)
            return learner, metrics

        def watched_batch(agent, state_or_policy, rollout):
            result = make_batch(agent, state_or_policy, rollout)
            batch = result if isinstance(result, kind) else result[-1]
            jax.debug.callback(self._note_batch, rollout, batch, ordered=True)
            return result

        patch.setattr(trainer, "_update", watched_update)
        patch.setattr(trainer, batches, watched_batch)

    def _note_update(self, rows, parameters, first_moments, second_moments, count):
        self.rows[-1].append(copy(rows))
        self.updates[-1].append([*map(copy, [*parameters, *first_moments, *second_moments, count])])

    def _note_batch(self, rollout, batch):
        self.rollouts.append(type(rollout)(*(x if x is None else copy(x) for x in rollout)))
        self.batches.append(type(batch)(*map(copy, batch)))


def check_minibatches(watched):
    """Two epochs of four minibatches cover each of 64 rows once an epoch, in another order in every epoch."""
    orders = set()
    for rows in watched.rows:
        assert len(rows) == 2 * 4
        for epoch in (rows[:4], rows[4:]):
            assert [len(r) for r in epoch] == [16] * 4
            order = np.concatenate(epoch)
            assert sorted(order) == list(range(64))
            orders.add(tuple(order.tolist()))
    assert len(orders) == 2 * len(watched.rows)
    assert tuple(range(64)) not in orders


def pairs_of_adam(watched, schedule):
    """Kingma & Ba (2015), algorithm 1, from the moments; a learning rate of 0.001 falls over `schedule` iterations.

    Yields an update's parameters before and after it, what Adam says of the difference, and its first moments before
    and after, all as lists.
    """
    updates = [u for iteration in watched.updates for u in iteration]
    for i in range(1, len(updates)):
        before, (*after, count) = updates[i - 1], updates[i]
        n = len(after) // 3
        assert count == i + 1
        rate = 1e-3 * max(0, 1 - (i // 8) / schedule)
        steps = [
            -rate * m / (1 - 0.9**count) / (np.sqrt(v / (1 - 0.999**count)) + 1e-5)
            for m, v in zip(after[n : 2 * n], after[2 * n :])
        ]
        yield before[:n], after[:n], steps, before[n : 2 * n], after[n : 2 * n]
