"""PQN on both backends: network, loss, what one iteration does, that modes agree, and that it learns known values."""

import dataclasses
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from agent_tools import (
    BACKENDS,
    FASTEST,
    Watched,
    assert_close_after_one_iteration,
    assert_equal,
    assert_same_run,
    check_captured_equals_eager,
    check_graphs_are_the_default,
    check_minibatches,
    check_refused_in_one_line,
    check_seeds,
    check_words_of_modes,
    copy,
    differ,
    disturbed_run,
    everything,
    make,
    pairs_of_adam,
    run,
    share_weights,
    values,
)
from diagnostics import OBSERVATIONS, CutOff, Match, OneStep, Seen, TwoSteps
from gymnasium.spaces import Box, Discrete

import rlgraph
from rlgraph.agents.networks import jax as networks_jax
from rlgraph.agents.networks import torch as networks_torch
from rlgraph.agents.parts import returns_torch
from rlgraph.agents.pqn import jax as pqn_jax
from rlgraph.agents.pqn import torch as pqn_torch
from rlgraph.agents.pqn.config import METRICS, PQNConfig
from rlgraph.environment import build
from rlgraph.errors import UsageError

pytestmark = pytest.mark.usefixtures("quick_compilation")
MODULES = {"torch": pqn_torch, "jax": pqn_jax}
NETWORKS = {"torch": networks_torch, "jax": networks_jax}
SMALL = PQNConfig(
    num_envs=4,
    num_steps=16,
    learning_rate=1e-3,
    anneal_lr=False,
    num_epochs=2,
    num_minibatches=4,
    hidden=(8,),
    device="cpu",
)


def pqn(backend, env="CartPole-v1", **changes):
    """A small PQN run; `env` is a name, or an Environment."""
    return make("pqn", SMALL, backend, env, **changes)


# ---- configuration


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_envs": 0}, "num_envs must be at least 1, but is 0"),
        ({"num_epochs": 0}, "num_epochs must be at least 1, but is 0"),
        ({"num_minibatches": 7}, r"num_envs \* num_steps = 64 does not divide into num_minibatches = 7"),
        ({"gamma": 1.1}, r"gamma must lie in \[0, 1\], but is 1.1"),
        ({"q_lambda": -0.1}, r"q_lambda must lie in \[0, 1\], but is -0.1"),
        ({"epsilon_start": 2.0}, r"epsilon_start must lie in \[0, 1\], but is 2.0"),
        ({"epsilon_end": float("nan")}, r"epsilon_end must be finite, but is nan"),
        ({"exploration_fraction": 0.0}, "exploration_fraction must be positive, but is 0.0"),
        ({"exploration_fraction": 1.5}, r"exploration_fraction must lie in \[0, 1\], but is 1.5"),
        ({"learning_rate": 0.0}, "learning_rate must be positive, but is 0.0"),
        ({"learning_rate": float("inf")}, "learning_rate must be finite, but is inf"),
        ({"max_grad_norm": -1.0}, "max_grad_norm must be positive, but is -1.0"),
        ({"hidden": ()}, "hidden must name at least one layer"),
        ({"activation": "gelu"}, "activation must be one of tanh, relu, silu, but is 'gelu'"),
        ({"seed": -1}, "seed must be in"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(changes, message):
    check_refused_in_one_line(SMALL, changes, message)


def test_sizes_of_an_iteration():
    config = dataclasses.replace(SMALL, total_steps=65)
    assert (config.batch_size, config.num_iterations, config.num_updates) == (64, 2, 8)


@pytest.mark.parametrize("backend", BACKENDS)
def test_continuous_actions_are_refused(backend):
    message = "pqn needs a Discrete action space, Pendulum-v1 has Box; use sac or ppo"
    with pytest.raises(UsageError, match=message):
        pqn(backend, "Pendulum-v1")


# ---- the network: the same weights in either backend are the same policy

SPACES = {
    "vector": (Box(-9, 9, (4,)), Discrete(5)),
    "matrix": (Box(-9, 9, (2, 3)), Discrete(2, start=1)),
    "scalar": (Box(-9, 9, ()), Discrete(3)),
    "cartpole": (Box(-9, 9, (4,)), Discrete(2)),
}


def networks(spaces, activation="relu", seed=0):
    """A torch and a JAX network of the same weights, each of them large enough to matter."""
    generator = torch.Generator().manual_seed(seed)
    in_torch = networks_torch.LayerNormQNetwork(*SPACES[spaces], (16, 8), activation, generator)
    in_jax = networks_jax.LayerNormQNetwork(*SPACES[spaces], (16, 8), activation, jax.random.key(seed))
    return in_torch, share_weights(in_torch, in_jax, np.random.default_rng(seed))


def observations(spaces, lead, seed=1):
    shape = SPACES[spaces][0].shape
    return np.random.default_rng(seed).normal(scale=2, size=(*lead, *shape)).astype(np.float32)


def values_in_numpy(arrays, obs, activation):
    """[B, inputs] -> [B, actions] in float64: each hidden layer to mean 0 and variance 1, scaled and shifted."""
    act = {"relu": lambda x: np.maximum(x, 0), "tanh": np.tanh, "silu": lambda x: x / (1 + np.exp(-x))}[activation]
    x = obs.astype(np.float64)
    for i in range(2):
        x = x @ arrays[f"mlp.layers.{i}.weight"].T + arrays[f"mlp.layers.{i}.bias"]
        x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
        x = act(x * arrays[f"norms.{i}.weight"] + arrays[f"norms.{i}.bias"])
    return x @ arrays["mlp.layers.2.weight"].T + arrays["mlp.layers.2.bias"]


@pytest.mark.parametrize("activation", ["relu", "tanh", "silu"])
def test_values_are_those_of_a_network_with_layer_norm(activation):
    in_torch, in_jax = networks("vector", activation)
    obs = observations("vector", (50,))
    expected = values_in_numpy(networks_torch.to_arrays(in_torch), obs, activation)
    assert expected.std() > 0.1  # the comparison is not one of zeros
    for policy in (in_torch, in_jax):
        np.testing.assert_allclose(values(policy, obs), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("spaces", "lead"), [("vector", (20,)), ("matrix", (20,)), ("scalar", (20,)), ("matrix", (3, 5))]
)
def test_both_backends_are_the_same_policy(spaces, lead):
    in_torch, in_jax = networks(spaces)
    obs = observations(spaces, lead)
    expected = values(in_torch, obs)
    assert expected.shape == (*lead, int(SPACES[spaces][1].n))
    np.testing.assert_allclose(values(in_jax, obs), expected, rtol=1e-5, atol=1e-5)
    for greedy in (in_torch.greedy(torch.tensor(obs)), in_jax.greedy(jnp.asarray(obs))):
        np.testing.assert_array_equal(copy(greedy), expected.argmax(-1))


@pytest.mark.parametrize(("backend", "other"), [BACKENDS, BACKENDS[::-1]])
def test_a_policy_crosses_over_and_acts_alike(backend, other):
    """Through what a policy file holds, by the other backend's load_policy."""
    agent, obs = pqn(backend, seed=3, hidden=(16, 8)), observations("cartpole", (200,))
    weights = NETWORKS[backend].to_arrays(networks("cartpole")[backend == "jax"])
    assert sorted(weights) == sorted(agent.arrays())
    policy, loaded = (MODULES[b].PQN.load_policy(agent.config, agent.env, weights) for b in (backend, other))
    expected = values(policy, obs)
    np.testing.assert_allclose(values(loaded, obs), expected, rtol=1e-5, atol=1e-5)
    assert len(set(expected.argmax(-1).tolist())) == 2  # it takes both actions
    arrays = NETWORKS[other].to_arrays(loaded)
    assert_equal([arrays[name] for name in weights], list(weights.values()))


@pytest.mark.parametrize("backend", BACKENDS)
def test_weights_of_another_network_are_refused_by_name(backend):
    agent = pqn(backend)
    arrays = agent.arrays()
    without = {name: array for name, array in arrays.items() if name != "norms.0.bias"}
    transposed = {**arrays, "mlp.layers.0.weight": arrays["mlp.layers.0.weight"].T}
    with pytest.raises(UsageError, match=r"no 'norms.0.bias'"):
        MODULES[backend].PQN.load_policy(agent.config, agent.env, without)
    with pytest.raises(UsageError, match=r"'mlp.layers.0.weight' has shape \[4, 8\]"):
        MODULES[backend].PQN.load_policy(agent.config, agent.env, transposed)


# ---- exploration


def explore(backend, value_BA, u_B, epsilon):
    if backend == "torch":
        arrays = (torch.tensor(x) for x in (value_BA, u_B, np.float32(epsilon)))
        return networks_torch.epsilon_greedy(*arrays).numpy()
    return np.asarray(networks_jax.epsilon_greedy(*map(jnp.asarray, (value_BA, u_B, np.float32(epsilon)))))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("epsilon", [0.0, 0.3, 1.0])
def test_exploration_is_as_frequent_and_as_even_as_epsilon_says(backend, epsilon):
    n, actions, best = 100_000, 5, 3
    u = np.random.default_rng(0).random(n, dtype=np.float32)
    value = np.tile(np.eye(actions, dtype=np.float32)[best], (n, 1))
    share = np.bincount(explore(backend, value, u, epsilon), minlength=actions) / n
    expected = np.full(actions, epsilon / actions) + (1 - epsilon) * np.eye(actions)[best]
    assert (abs(share - expected) <= 4 * np.sqrt(expected * (1 - expected) / n)).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("epsilon", [0.0, 1e-30, 0.1, 0.7, 1.0])
@pytest.mark.parametrize("actions", [1, 3, 1000])
def test_exploration_stays_in_range_at_the_ends(backend, epsilon, actions):
    """The least uniform explores with the first action, the last below epsilon with the last, epsilon itself not."""
    epsilon = np.float32(epsilon)
    below_one = np.nextafter(np.float32(1), np.float32(0))
    u = np.array([0, max(0, np.nextafter(epsilon, np.float32(0))), min(epsilon, below_one), below_one], np.float32)
    greedy = actions // 2
    value = np.tile(np.eye(actions, dtype=np.float32)[greedy], (4, 1))
    expected = [0, actions - 1, greedy, greedy] if epsilon else [greedy] * 4
    if epsilon == 1:
        expected[2:] = [actions - 1] * 2
    assert explore(backend, value, u, epsilon).tolist() == expected


# ---- the loss: torch, JAX and a few lines of numpy


@pytest.mark.parametrize("spaces", ["vector", "matrix"])
def test_losses_metrics_and_gradients_agree(spaces):
    in_torch, in_jax = networks(spaces, "silu")
    rng = np.random.default_rng(4)
    obs, rows = observations(spaces, (40,)), rng.permutation(40)[:24]
    action = rng.integers(int(SPACES[spaces][1].n), size=40)
    target = rng.normal(scale=3, size=40).astype(np.float32)

    loss, metrics = pqn_torch.pqn_loss(
        in_torch, pqn_torch.Batch(*map(torch.tensor, (obs, action, target))), torch.tensor(rows)
    )
    loss.backward()
    assert not metrics.requires_grad
    batch = pqn_jax.Batch(*map(jnp.asarray, (obs, action, target)))
    (jax_loss, jax_metrics), gradient = jax.jit(jax.value_and_grad(pqn_jax.pqn_loss, has_aux=True))(
        in_jax, batch, jnp.asarray(rows)
    )
    np.testing.assert_allclose(jax_loss, loss.item(), rtol=1e-5)
    np.testing.assert_allclose(jax_metrics, metrics, rtol=1e-5)
    gradient = networks_jax.to_arrays(gradient)
    for name, parameter in in_torch.named_parameters():
        assert abs(gradient[name]).max() > 1e-6, name
        np.testing.assert_allclose(gradient[name], parameter.grad, rtol=1e-4, atol=1e-5, err_msg=name)

    q_value = values(in_torch, obs)[rows, action[rows]].astype(np.float64)
    expected = 0.5 * ((q_value - target[rows]) ** 2).mean()
    np.testing.assert_allclose(metrics, [expected, q_value.mean()], rtol=1e-5)


# ---- one iteration, watched from inside

WATCHED, SCHEDULED = 5, 4  # iterations, and how many of them the schedules know
EXPLORING = 0.5  # share of the schedule until epsilon has fallen


def acting(watched, i):
    """The policy that iteration i began with."""
    return pqn_torch.PQN.load_policy(watched.agent.config, watched.agent.env, watched.before[i])


@pytest.fixture(scope="module", params=BACKENDS)
def watched(request):
    schedules = {"anneal_lr": True, "epsilon_end": 0.0, "exploration_fraction": EXPLORING}
    options = {"seed": 1, "total_steps": SCHEDULED * 64, "max_grad_norm": 0.5, "mode": FASTEST[request.param]}
    env = rlgraph.make("CartPole-v1", max_episode_steps=15)
    return Watched("pqn", request.param, lambda: pqn(request.param, env, **options, **schedules), "_targets", WATCHED)


def test_minibatches_cover_every_row_exactly_once_an_epoch(watched):
    check_minibatches(watched)


def test_learning_rate_and_epsilon_fall_linearly_and_stay_there(watched):
    assert [m["learning_rate"] for m in watched.metrics] == pytest.approx([1e-3, 7.5e-4, 5e-4, 2.5e-4, 0])
    assert [m["epsilon"] for m in watched.metrics] == pytest.approx([1, 0.5, 0, 0, 0])


def test_actions_are_greedy_as_often_as_epsilon_says(watched):
    greedy = [(values(acting(watched, i), r.obs).argmax(-1) == r.action).mean() for i, r in enumerate(watched.rollouts)]
    assert 0.3 < greedy[0] < 0.7  # two actions: every other random one is the greedy one
    assert 0.6 < greedy[1] < 0.9
    assert greedy[2:] == [1, 1, 1]


def test_targets_are_lambda_returns_of_the_policy_that_acted(watched):
    """By a loop over the rollout, with values of final_obs and an end for termination alone."""
    gamma, q_lambda = SMALL.gamma, SMALL.q_lambda
    ended = np.zeros(2, int)
    for i, (rollout, batch) in enumerate(zip(watched.rollouts, watched.batches)):
        for name in ("obs", "action"):
            expected = getattr(rollout, name)
            np.testing.assert_array_equal(getattr(batch, name), expected.reshape(64, *expected.shape[2:]))
        next_value = values(acting(watched, i), rollout.final_obs).max(-1)
        target, after = np.zeros((16, 4)), next_value[-1]
        for t in reversed(range(16)):
            terminated, truncated = rollout.terminated_TB[t], rollout.truncated_TB[t]
            mixed = (1 - q_lambda) * next_value[t] + q_lambda * after
            future = np.where(terminated, 0, np.where(truncated, next_value[t], mixed))
            target[t] = after = rollout.reward_TB[t] + gamma * future
            ended += [terminated.sum(), truncated.sum()]
        np.testing.assert_allclose(batch.target, target.reshape(-1), rtol=1e-4, atol=1e-4)
    assert (ended > 0).all()  # episodes ended both ways


def test_every_update_is_adams_step_of_a_clipped_gradient(watched):
    """The rate that the metrics report is the one at work."""
    for before, after, steps, old_moments, moments in pairs_of_adam(watched, SCHEDULED):
        gradients = [(m - 0.9 * old) / 0.1 for old, m in zip(old_moments, moments)]
        assert np.sqrt(sum((g**2).sum() for g in gradients)) == pytest.approx(0.5, rel=1e-3)  # clipped
        for old, new, step in zip(before, after, steps):
            np.testing.assert_allclose(new - old, step, rtol=1e-2, atol=2e-7)
    assert all(m["grad_norm"] > 0.5 for m in watched.metrics)  # before the clipping


def test_metrics_are_what_the_buffers_and_the_first_minibatch_say(watched):
    running, length = np.zeros(4), np.zeros(4)
    for i, (rollout, metrics) in enumerate(zip(watched.rollouts, watched.metrics)):
        finished = []
        for reward, done in zip(rollout.reward_TB, rollout.terminated_TB | rollout.truncated_TB):
            running, length = running + reward, length + 1
            finished += list(zip(running[done], length[done]))
            running, length = np.where(done, 0, running), np.where(done, 0, length)
        assert metrics["episodes"] == len(finished) > 0
        assert metrics["episode_return_sum"] == pytest.approx(sum(r for r, _ in finished))
        assert metrics["episode_length_sum"] == sum(n for _, n in finished)
        if metrics["learning_rate"] == 0:  # nothing moved: the means are those of the policy that acted
            batch = watched.batches[i]
            q_value = np.take_along_axis(values(acting(watched, i), batch.obs), batch.action[:, None], -1)[:, 0]
            assert metrics["q_value"] == pytest.approx(q_value.mean(), rel=1e-4)
            assert metrics["loss"] == pytest.approx(0.5 * ((q_value - batch.target) ** 2).mean(), rel=1e-4)
    assert watched.metrics[-1]["learning_rate"] == 0


# ---- runs: reproducible, and the same in every mode

WHOLE = {"anneal_lr": True, "total_steps": 5 * 64, "learning_rate": 0.01, "exploration_fraction": 0.8}


def run_of(backend, iterations=4, env="CartPole-v1", **changes):
    return run(pqn(backend, env, **{**WHOLE, **changes}), iterations)


@pytest.mark.parametrize("backend", BACKENDS)
def test_same_seed_same_run_bit_for_bit_and_another_seed_another(backend):
    first, again, other = (run_of(backend, seed=s, mode=FASTEST[backend]) for s in (3, 3, 4))
    check_seeds(first, again, other)
    assert np.isfinite(first[0]).all()
    for name in ("loss", "q_value", "grad_norm"):
        assert first[0][0, METRICS.index(name)] != other[0][0, METRICS.index(name)], name


@pytest.mark.filterwarnings("ignore:no CUDA graph on cpu")
@pytest.mark.parametrize("mode", ["graph", "graph-uncompiled"])
def test_torch_graph_modes_on_a_cpu_equal_eager_bit_for_bit(mode):
    assert_same_run(run_of("torch", mode=mode), run_of("torch", mode="eager"))


def test_torch_compile_is_close_to_eager():
    assert shutil.which("g++") or shutil.which("clang++"), "torch.compile needs a C++ compiler on a CPU"
    assert_close_after_one_iteration(run_of("torch", 1, mode="compile"), run_of("torch", 1, mode="eager"))


@pytest.mark.parametrize("backend", BACKENDS)
def test_it_says_how_it_runs(backend):
    check_words_of_modes(lambda mode: pqn(backend, mode=mode), backend)


# ---- diagnostic environments, whose values are known


def learned(backend, definition, iterations, **changes):
    """The agent after training on a diagnostic environment."""
    options = {
        "num_envs": 32,
        "num_steps": 8,
        "num_minibatches": 2,
        "num_epochs": 4,
        "learning_rate": 0.01,
        "gamma": 0.9,
        "hidden": (16,),
        "total_steps": iterations * 32 * 8,
        "mode": FASTEST[backend],
    }
    agent = pqn(backend, build(definition), **{**options, "anneal_lr": True, **changes})
    for _ in range(iterations):
        agent.iterate()
    return agent


@pytest.mark.parametrize(
    ("definition", "backend"),
    # JAX's programs take seconds each to compile: the second of the two steps is its one step, Match what it sees.
    [*((d, "torch") for d in (OneStep, TwoSteps, Seen, CutOff)), *((d, "jax") for d in (TwoSteps, CutOff))],
)
def test_it_learns_known_values(backend, definition):
    agent = learned(backend, definition, 100 if definition is CutOff else 50)
    obs = OBSERVATIONS if definition is TwoSteps else OBSERVATIONS[:2]
    expected = np.tile(definition.value(obs)[:, None], (1, 2))  # whichever action
    np.testing.assert_allclose(values(agent.policy, obs), expected, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("backend", BACKENDS)
def test_it_finds_the_action(backend):
    agent = learned(backend, Match, 50)
    value = values(agent.policy, OBSERVATIONS[:2])
    np.testing.assert_allclose(value, [[1, 0, 0], [0, 0, 1]], atol=0.1)
    greedy = agent.policy.greedy(torch.tensor(OBSERVATIONS[:2]) if backend == "torch" else OBSERVATIONS[:2])
    assert copy(greedy).tolist() == [0, 2]  # counted from 0; -1 and 1 to the environment
    returns = MODULES[backend].PQN.evaluate_policy(agent.policy, agent.env, 10, seed=0)
    assert returns.tolist() == [1] * 10


# ---- on an NVIDIA GPU


def gpu_run(mode, iterations, disturb=False, **changes):
    """Metrics of each iteration, everything at the end, and the agent."""
    options = {"precision": "ieee", "num_envs": 64, "total_steps": 10 * 64 * 16}
    agent = pqn("torch", mode=mode, device="cuda", **{**WHOLE, **options, **changes})
    return disturbed_run(agent, iterations, *((4, 7) if disturb else ()))


@pytest.mark.gpu
@pytest.mark.parametrize("env", ["CartPole-v1", "Acrobot-v1"])
def test_a_captured_iteration_equals_eager_bit_for_bit(env):
    """Ten replays with a reset and a new seed between them: metrics, parameters, Adam, schedules, environments."""
    eager, graph = (gpu_run(mode, 10, disturb=True, env=env) for mode in ("eager", "graph-uncompiled"))
    check_captured_equals_eager(eager, graph)


@pytest.mark.gpu
def test_compiled_and_captured_is_close_to_eager():
    graph, eager = gpu_run("graph", 1), gpu_run("eager", 1)
    assert_close_after_one_iteration(graph[:2], eager[:2])
    assert [run[2]._returns.__name__ for run in (graph, eager)] == ["rlgraph.kernels.returns", returns_torch.__name__]


@pytest.mark.gpu
def test_graph_mode_same_seed_same_run():
    check_seeds(*(gpu_run("graph", 5, seed=s)[:2] for s in (0, 0, 1)))


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["graph-uncompiled", "graph"])
def test_the_schedules_move_in_replays(mode):
    options = {"total_steps": 4 * 64 * 16, "exploration_fraction": 0.5, "epsilon_end": 0.1}
    metrics, after, agent = gpu_run(mode, 4, **options)
    assert metrics[:, METRICS.index("learning_rate")] == pytest.approx([0.01, 0.0075, 0.005, 0.0025])
    assert metrics[:, METRICS.index("epsilon")] == pytest.approx([1, 0.55, 0.1, 0.1])
    before = agent.arrays()
    agent.iterate().get()  # beyond the schedule's end the rate is 0
    assert_equal(list(before.values()), list(agent.arrays().values()))
    assert differ(after, everything(agent))  # though it did play on


@pytest.mark.gpu
@pytest.mark.parametrize("backend", BACKENDS)
def test_on_a_gpu_graphs_are_the_default_and_it_says_so(backend):
    check_graphs_are_the_default(pqn(backend, device="auto", mode="auto", **WHOLE), backend)


@pytest.mark.gpu
def test_jax_graph_mode_same_seed_same_run():
    check_seeds(*(run_of("jax", 5, mode="graph", device="cuda", seed=s) for s in (0, 0, 1)))
