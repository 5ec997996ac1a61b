"""DQN on both backends: networks, loss, what one iteration does, that modes agree, and that it learns known values."""

import dataclasses
import itertools
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from agent_tools import (
    BACKENDS,
    FASTEST,
    assert_close_after_one_iteration,
    assert_equal,
    assert_same_run,
    check_captured_equals_eager,
    check_graphs_are_the_default,
    check_refused_in_one_line,
    check_seeds,
    check_updated_in_place,
    check_words_of_modes,
    differ,
    disturbed_run,
    iterate,
    make,
    run,
    share_weights,
    stored,
    values,
)
from diagnostics import OBSERVATIONS, CutOff, Match, OneStep, Seen, TwoSteps
from gymnasium.spaces import Box, Discrete

import rlgraph
from rlgraph.agents.dqn import jax as dqn_jax
from rlgraph.agents.dqn import torch as dqn_torch
from rlgraph.agents.dqn.config import METRICS, DQNConfig
from rlgraph.agents.networks import jax as networks_jax
from rlgraph.agents.networks import torch as networks_torch
from rlgraph.agents.parts import replay_jax, replay_torch
from rlgraph.environment import build
from rlgraph.errors import UsageError

pytestmark = pytest.mark.usefixtures("quick_compilation")
MODULES = {"torch": dqn_torch, "jax": dqn_jax}
SMALL = DQNConfig(
    num_envs=8,
    num_steps=8,
    num_updates=2,
    minibatch_size=16,
    replay_capacity=256,
    learning_starts=64,
    learning_rate=1e-3,
    n_step=1,
    hidden=(8,),
    device="cpu",
)


def dqn(backend, env="CartPole-v1", **changes):
    """A small DQN run; `env` is a name, or an Environment."""
    return make("dqn", SMALL, backend, env, **changes)


def target_arrays(agent):
    if isinstance(agent, dqn_torch.DQN):
        return networks_torch.to_arrays(agent.target)
    return networks_jax.to_arrays(agent.state.target)


# ---- configuration


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_envs": 0}, "num_envs must be at least 1, but is 0"),
        ({"n_step": 0}, "n_step must be at least 1, but is 0"),
        ({"target_period": 0}, "target_period must be at least 1, but is 0"),
        ({"target_tau": 0.0}, "target_tau must be positive, but is 0.0"),
        ({"target_tau": 1.5}, r"target_tau must lie in \[0, 1\], but is 1.5"),
        ({"epsilon_end": -0.1}, r"epsilon_end must lie in \[0, 1\], but is -0.1"),
        ({"exploration_fraction": 0.0}, "exploration_fraction must be positive"),
        ({"gamma": float("nan")}, r"gamma must be finite, but is nan"),
        ({"learning_rate": float("inf")}, "learning_rate must be finite"),
        ({"hidden": ()}, "hidden must name at least one layer"),
        ({"activation": "gelu"}, "activation must be one of tanh, relu, silu"),
        ({"learning_starts": 300}, "for 304 stored steps before the first update, replay_capacity = 256 allows 256"),
        ({"n_step": 33}, "for 264 stored steps before the first update, replay_capacity = 256 allows 256"),
        ({"total_steps": 50, "learning_starts": 65}, "for 72 stored steps .*, total_steps = 50 allows 64"),
        ({"num_envs": 1, "num_steps": 1, "replay_capacity": 2**24}, "more than 8388608"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(changes, message):
    check_refused_in_one_line(SMALL, changes, message)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_box_of_actions_is_refused(backend):
    with pytest.raises(UsageError, match="dqn needs a Discrete action space, Pendulum-v1 has Box; use sac or ppo"):
        dqn(backend, "Pendulum-v1")


# ---- the network: the same weights in either backend are the same values

SPACES = {
    "vector": (Box(-9, 9, (4,)), Discrete(5)),
    "matrix": (Box(-9, 9, (2, 3)), Discrete(2, start=1)),
    "scalar": (Box(-9, 9, ()), Discrete(3)),
}


def networks(spaces="vector", dueling=False, activation="relu", seed=0):
    """A torch and a JAX network of the same weights, every one large enough to matter."""
    options = (*SPACES[spaces], (16, 8), activation, dueling)
    in_torch = networks_torch.QNetwork(*options, torch.Generator().manual_seed(seed))
    in_jax = networks_jax.QNetwork(*options, jax.random.key(seed))
    return in_torch, share_weights(in_torch, in_jax, np.random.default_rng(seed))


@pytest.mark.parametrize(
    ("spaces", "lead", "dueling"),
    [("vector", (20,), False), ("vector", (20,), True), ("matrix", (3, 5), True), ("scalar", (20,), False)],
)
def test_both_backends_are_the_same_network(spaces, lead, dueling):
    in_torch, in_jax = networks(spaces, dueling)
    observation, action = SPACES[spaces]
    obs = np.random.default_rng(1).normal(size=(*lead, *observation.shape)).astype(np.float32)
    value = values(in_torch, obs)
    assert value.shape == (*lead, action.n)
    assert value.std() > 0.1
    np.testing.assert_allclose(values(in_jax, obs), value, rtol=1e-5, atol=1e-5)
    for greedy in (in_torch.greedy(torch.tensor(obs)), in_jax.greedy(obs)):
        np.testing.assert_array_equal(greedy, value.argmax(-1))
    back = networks_jax.from_arrays(networks(spaces, dueling, seed=3)[1], networks_torch.to_arrays(in_torch))
    assert_equal(list(networks_jax.to_arrays(back).values()), list(networks_jax.to_arrays(in_jax).values()))


def test_the_dueling_heads_are_a_value_and_advantages_of_mean_zero():
    dueling, _ = networks(dueling=True)
    obs = np.random.default_rng(1).normal(size=(6, 4)).astype(np.float32)
    with torch.no_grad():
        outputs = dueling.mlp(torch.tensor(obs)).numpy()
    q = values(dueling, obs)
    np.testing.assert_allclose(q.mean(-1), outputs[:, 0], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(np.diff(q), np.diff(outputs[:, 1:]), rtol=1e-4, atol=1e-5)


# ---- the loss: torch, JAX and a few lines of numpy


@pytest.mark.parametrize("double", [False, True])
def test_losses_metrics_and_gradients_agree(double):
    config = dataclasses.replace(SMALL, double=double)
    (policy, jax_policy), (target, jax_target) = networks(seed=0), networks(seed=1)
    rng, M = np.random.default_rng(2), 40
    obs, next_obs = rng.normal(size=(2, M, 4)).astype(np.float32)
    action, reward = rng.integers(0, 5, M).astype(np.int32), rng.normal(size=M).astype(np.float32)
    discount = rng.choice([0, 0.9, 0.81], M).astype(np.float32)
    arrays = (obs, action, reward, next_obs, discount)

    batch = replay_torch.Transitions(*map(torch.tensor, arrays))._replace(action=torch.tensor(action).long())
    loss, metrics = dqn_torch.dqn_loss(policy, target, batch, config)
    loss.backward()
    assert not metrics.requires_grad
    assert all(p.grad is None for p in target.parameters())
    jax_batch = replay_jax.Transitions(*map(jnp.asarray, arrays))
    gradient = jax.jit(jax.value_and_grad(dqn_jax.dqn_loss, argnums=(0, 1), has_aux=True), static_argnums=3)
    (jax_loss, jax_metrics), (of_policy, of_target) = gradient(jax_policy, jax_target, jax_batch, config)
    np.testing.assert_allclose(jax_loss, loss.item(), rtol=1e-5)
    np.testing.assert_allclose(jax_metrics, metrics.numpy(), rtol=1e-5)
    of_policy = networks_jax.to_arrays(of_policy)
    for name, parameter in policy.named_parameters():
        assert abs(of_policy[name]).max() > 1e-6, name
        np.testing.assert_allclose(of_policy[name], parameter.grad.numpy(), rtol=1e-4, atol=1e-6, err_msg=name)
    assert not any(array.any() for array in networks_jax.to_arrays(of_target).values())

    rows = np.arange(M)
    of_next = values(target, next_obs)
    choice = values(policy, next_obs).argmax(-1) if double else of_next.argmax(-1)
    assert (choice != of_next.argmax(-1)).any() == double
    q = values(policy, obs)[rows, action]
    expected = 0.5 * ((q - (reward + discount * of_next[rows, choice])) ** 2).mean()
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    np.testing.assert_allclose(metrics.numpy(), [expected, q.mean()], rtol=1e-5)


# ---- iterations, one by one

ITERATIONS, SCHEDULED = 9, 6  # how many are watched, and how many of them the schedules know
FIRST = 3  # the first iteration after which 20 rows of 8 steps each are stored
TARGETS = {
    "by period": {"target_period": 3, "target_tau": 1.0},
    "Polyak": {"target_period": 1, "target_tau": 0.25},
    "both": {"target_period": 2, "target_tau": 0.25},
}


class Watched:
    """A run, with what it held after each iteration; entry 0 is from before the first."""

    def __init__(self, backend, **changes):
        env = rlgraph.make("CartPole-v1", max_episode_steps=20)
        self.agent = dqn(backend, env, mode=FASTEST[backend], **changes)
        self.policies, self.targets = [self.agent.arrays()], [target_arrays(self.agent)]
        self.metrics, self.replays = [None], [stored(self.agent)]
        for _ in range(ITERATIONS):
            self.metrics.append(iterate(self.agent))
            self.policies.append(self.agent.arrays())
            self.targets.append(target_arrays(self.agent))
            self.replays.append(stored(self.agent))

    def series(self, name):
        return [metrics[name] for metrics in self.metrics[1:]]


@pytest.fixture(scope="module", params=[("torch", "by period"), ("torch", "Polyak"), ("jax", "both")], ids=" ".join)
def watched(request):
    backend, target = request.param
    options = {"num_updates": 1, "learning_starts": 159, "n_step": 2, "total_steps": SCHEDULED * 64}
    return Watched(backend, exploration_fraction=0.5, **options, **TARGETS[target])


def test_learning_rate_and_epsilon_follow_their_schedules(watched):
    sixths = np.array([6, 5, 4, 3, 2, 1, 0, 0, 0]) / 6
    assert watched.series("learning_rate") == pytest.approx(1e-3 * sixths)
    assert watched.series("epsilon") == pytest.approx([1, 1 - 0.95 / 3, 1 - 1.9 / 3, *[0.05] * 6])


def test_nothing_is_learned_before_enough_is_stored_and_then_each_update_is_one(watched):
    assert watched.series("updates") == [0, 0] + [1] * 7
    for i, (before, after) in enumerate(itertools.pairwise(watched.policies), start=1):
        learning = FIRST <= i <= SCHEDULED  # later the learning rate is 0
        assert differ(before.values(), after.values()) == learning
        assert (watched.metrics[i]["loss"] > 0) == (watched.metrics[i]["grad_norm"] > 0) == (i >= FIRST)
    if isinstance(watched.agent, dqn_torch.DQN):
        counts = {int(state["step"]) for state in watched.agent.optimizer.state.values()}
        assert (counts, int(watched.agent.updates)) == ({7}, 7)
    else:
        assert watched.agent.state.optimizer[1].count == watched.agent.state.updates == 7


def test_the_first_update_is_adams_by_the_scheduled_learning_rate(watched):
    """Adam's first step is the learning rate in every weight whose gradient is not next to nothing."""
    before, after = watched.policies[FIRST - 1], watched.policies[FIRST]
    moved = np.concatenate([abs(after[name] - before[name]).reshape(-1) for name in after])
    assert moved.max() == pytest.approx(1e-3 * 4 / 6, rel=0.02)
    assert np.median(moved) > 1e-3 * 4 / 6 * 0.8


def test_the_target_network_follows_by_its_period_and_share(watched):
    config, updates, expected = watched.agent.config, 0, watched.targets[0]
    assert_equal(list(expected.values()), list(watched.policies[0].values()))
    for i in range(1, ITERATIONS + 1):
        updates += i >= FIRST
        if i >= FIRST and updates % config.target_period == 0:
            share, policy = config.target_tau, watched.policies[i]
            expected = {name: (1 - share) * expected[name] + share * policy[name] for name in expected}
        for name, array in watched.targets[i].items():
            exact = config.target_tau == 1  # a copy
            np.testing.assert_allclose(array, expected[name], rtol=0 if exact else 1e-5, atol=0 if exact else 1e-7)
    assert differ(watched.targets[0].values(), watched.targets[-1].values())


def test_the_replay_holds_the_last_steps_with_their_final_observations(watched):
    """Each row goes on from the one before; where an episode ended, final_obs is not what the next one starts from."""
    newest = [{name: buffer[-8:] for name, buffer in replay.items()} for replay in watched.replays[1:]]
    history = {name: np.concatenate([rows[name] for rows in newest]) for name in newest[0]}  # all 72 rows
    for i in range(1, ITERATIONS):
        before, after = watched.replays[i], watched.replays[i + 1]
        kept = min(8 * i, 24)
        for name in before:
            np.testing.assert_array_equal(after[name][:kept], before[name][-kept:])
    env, done = watched.agent.env, history["terminated"] | history["truncated"]
    obs, final_obs = history["obs"], history["final_obs"]
    state, reward, ended = env.definition.step(
        np, env.definition.State(*obs.reshape(-1, 4).T), history["action"].reshape(-1), np.zeros((576, 0)), env.params
    )
    np.testing.assert_allclose(final_obs.reshape(-1, 4), np.stack(state, axis=-1), rtol=1e-4, atol=1e-6)
    np.testing.assert_array_equal(history["reward"].reshape(-1), reward)
    np.testing.assert_array_equal(history["terminated"].reshape(-1), ended)
    np.testing.assert_array_equal(obs[1:][~done[:-1]], final_obs[:-1][~done[:-1]])
    assert (abs(obs[1:][done[:-1]]) <= 0.05).all()
    assert (abs(final_obs[done]).max(-1) > 0.05).all()
    assert history["terminated"].any()
    for b in range(8):
        ends = np.flatnonzero(done[:, b])
        np.testing.assert_array_equal(history["truncated"][ends, b], np.diff(ends, prepend=-1) == 20)
    assert history["truncated"].any()


def test_episode_statistics_are_what_the_replay_says(watched):
    ended = np.zeros(2)
    for i in range(1, ITERATIONS + 1):
        newest = {name: buffer[-8:] for name, buffer in watched.replays[i].items()}
        assert watched.metrics[i]["episodes"] == (newest["terminated"] | newest["truncated"]).sum()
        assert watched.metrics[i]["episode_return_sum"] == watched.metrics[i]["episode_length_sum"]
        ended += [watched.metrics[i]["episodes"], watched.metrics[i]["episode_length_sum"]]
    assert ended[0] > 0
    assert 8 < ended[1] / ended[0] <= 20


@pytest.mark.parametrize("backend", BACKENDS)
def test_it_explores_as_often_as_epsilon_says_and_is_greedy_otherwise(backend):
    """An iteration with epsilon 1, one with 1/2, two with 0, all before the first update."""
    steps = 64 * 32
    options = {"num_envs": 64, "replay_capacity": steps, "learning_starts": steps, "total_steps": steps}
    agent = dqn(backend, epsilon_end=0.0, exploration_fraction=0.5, **options)
    before = agent.arrays()
    for _ in range(4):
        iterate(agent)
    replay, n = stored(agent), 8 * 64
    policy = dqn_torch.DQN.load_policy(agent.config, agent.env, before)
    off = replay["action"] != values(policy, replay["obs"]).argmax(-1)
    # Half of the random actions happen to be the greedy one.
    for rows, share in ((slice(0, 8), 0.5), (slice(8, 16), 0.25)):
        assert abs(off[rows].mean() - share) < 4 * np.sqrt(share * (1 - share) / n)
    assert not off[16:].any()
    assert abs(replay["action"][:8].mean() - 0.5) < 4 * 0.5 / np.sqrt(n)


# ---- runs: reproducible, and the same in every mode

WHOLE = {"n_step": 3, "dueling": True, "total_steps": 5 * 64, "target_tau": 0.1, "target_period": 2, "epsilon_end": 0.1}


def run_of(backend, iterations=4, env="CartPole-v1", **changes):
    return run(dqn(backend, env, **{**WHOLE, **changes}), iterations)


@pytest.mark.parametrize("backend", BACKENDS)
def test_same_seed_same_run_bit_for_bit_and_another_seed_another(backend):
    first, again, other = (run_of(backend, seed=s, mode=FASTEST[backend]) for s in (3, 3, 4))
    assert_same_run(first, again)
    assert np.isfinite(first[0]).all()
    for name in ("loss", "q_value", "grad_norm"):
        assert first[0][1, METRICS.index(name)] != other[0][1, METRICS.index(name)], name


@pytest.mark.filterwarnings("ignore:no CUDA graph on cpu")
@pytest.mark.parametrize("mode", ["graph", "graph-uncompiled"])
def test_torch_graph_modes_on_a_cpu_equal_eager_bit_for_bit(mode):
    assert_same_run(run_of("torch", mode=mode), run_of("torch", mode="eager"))


def test_torchs_state_is_named_and_updated_in_place():
    check_updated_in_place(dqn("torch", **WHOLE), 2)


def assert_learned_alike(got, expected):
    assert expected[0][0, METRICS.index("updates")] > 0
    assert_close_after_one_iteration(got, expected)


def test_torch_compile_is_close_to_eager():
    assert shutil.which("g++") or shutil.which("clang++"), "torch.compile needs a C++ compiler on a CPU"
    assert_learned_alike(*(run_of("torch", 1, mode=mode) for mode in ("compile", "eager")))


@pytest.mark.parametrize("backend", BACKENDS)
def test_it_says_how_it_runs(backend):
    check_words_of_modes(lambda mode: dqn(backend, mode=mode), backend)


@pytest.mark.parametrize("dueling", [False, True])
def test_policies_cross_over_between_the_backends(dueling):
    obs = np.random.default_rng(0).normal(size=(20, 4)).astype(np.float32)
    for backend in BACKENDS:
        agent = dqn(backend, dueling=dueling)
        expected = values(agent, obs)
        for module in MODULES.values():
            loaded = module.DQN.load_policy(agent.config, agent.env, agent.arrays())
            np.testing.assert_allclose(values(loaded, obs), expected, rtol=1e-5, atol=1e-5)
        other = dataclasses.replace(agent.config, dueling=not dueling)
        with pytest.raises(UsageError, match=r"'mlp.layers.1.weight' has shape|'mlp.layers.1.bias' has shape"):
            MODULES[backend].DQN.load_policy(other, agent.env, agent.arrays())


# ---- diagnostic environments, whose values are known


def learned(backend, definition, iterations, **changes):
    options = {
        "num_envs": 16,
        "num_steps": 4,
        "num_updates": 4,
        "minibatch_size": 64,
        "replay_capacity": 4096,
        "learning_rate": 0.01,
        "gamma": 0.9,
        "target_tau": 0.1,
        "hidden": (16,),
        "epsilon_end": 1.0,
    }
    options |= {"total_steps": iterations * 64, "mode": FASTEST[backend], **changes}
    agent = dqn(backend, build(definition), **options)
    for _ in range(iterations):
        agent.iterate()
    return agent


@pytest.mark.parametrize(
    ("backend", "definition", "changes"),
    [
        ("torch", OneStep, {}),
        ("torch", TwoSteps, {}),
        ("torch", TwoSteps, {"n_step": 3}),
        ("torch", Seen, {"dueling": True}),
        ("torch", CutOff, {"double": False}),
        ("torch", CutOff, {"n_step": 2, "target_period": 5, "target_tau": 1.0}),
        ("jax", CutOff, {"n_step": 2, "target_period": 5, "target_tau": 1.0}),
    ],
)
def test_it_learns_known_values(backend, definition, changes):
    agent = learned(backend, definition, {CutOff: 150}.get(definition, 80), **changes)
    obs = OBSERVATIONS if definition is TwoSteps else OBSERVATIONS[:2]
    expected = definition.value(obs)[:, None].repeat(2, axis=1)  # whatever the action
    np.testing.assert_allclose(values(agent, obs), expected, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("backend", BACKENDS)
def test_it_values_each_action_and_finds_the_best(backend):
    """Actions counted from 0 by the agent are -1, 0 and 1 to the environment."""
    agent = learned(backend, Match, 80, dueling=True)
    np.testing.assert_allclose(values(agent, OBSERVATIONS[:2]), [[1, 0, 0], [0, 0, 1]], atol=0.1)
    returns = MODULES[backend].DQN.evaluate_policy(agent.policy, agent.env, 10, seed=0)
    np.testing.assert_array_equal(returns, np.ones(10))


# ---- on an NVIDIA GPU


def gpu_run(mode, iterations, reseed_at=None, **changes):
    """Metrics of each iteration, everything at the end, and the agent."""
    options = {
        "precision": "ieee",
        "num_envs": 64,
        "replay_capacity": 2048,
        "learning_starts": 1024,
        "minibatch_size": 64,
    }
    agent = dqn("torch", mode=mode, device="cuda", **{**WHOLE, **options, "total_steps": 10 * 512, **changes})
    return disturbed_run(agent, iterations, reseed_at=reseed_at)


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"n_step": 1, "dueling": False, "double": False}], ids=["all", "plain"])
def test_a_captured_iteration_equals_eager_bit_for_bit(options):
    """Ten replays, before and after learning starts and the ring wraps, with a new seed between them."""
    eager, graph = (gpu_run(mode, 10, reseed_at=7, **options) for mode in ("eager", "graph-uncompiled"))
    check_captured_equals_eager(eager, graph)
    assert graph[0][:, METRICS.index("updates")].tolist() == [0] + [2] * 9


@pytest.mark.gpu
def test_compiled_and_captured_is_close_to_eager():
    options = {"learning_starts": 1}
    assert_learned_alike(gpu_run("graph", 1, **options)[:2], gpu_run("eager", 1, **options)[:2])


@pytest.mark.gpu
def test_graph_mode_same_seed_same_run():
    check_seeds(*(gpu_run("graph", 5, seed=s)[:2] for s in (0, 0, 1)))


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["graph-uncompiled", "graph"])
def test_schedules_move_in_replays(mode):
    metrics, _, _ = gpu_run(mode, 4, total_steps=3 * 512, exploration_fraction=1.0)
    assert metrics[:, METRICS.index("learning_rate")] == pytest.approx([1e-3, 2e-3 / 3, 1e-3 / 3, 0])
    assert metrics[:, METRICS.index("epsilon")] == pytest.approx([1, 0.7, 0.4, 0.1])
    assert metrics[:, METRICS.index("updates")].tolist() == [0, 2, 2, 2]


@pytest.mark.gpu
@pytest.mark.parametrize("backend", BACKENDS)
def test_on_a_gpu_graphs_are_the_default_and_it_says_so(backend):
    check_graphs_are_the_default(dqn(backend, device="auto", mode="auto", **WHOLE), backend)


@pytest.mark.gpu
def test_jax_graph_mode_same_seed_same_run():
    check_seeds(*(run_of("jax", 5, mode="graph", device="cuda", seed=s) for s in (0, 0, 1)))
