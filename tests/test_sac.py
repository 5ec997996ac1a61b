"""SAC on both backends: networks, losses, what an iteration does, that modes agree, and that it learns known values."""

import dataclasses
import itertools
import math
import shutil

import diagnostics
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
    check_words_of_modes,
    copy,
    differ,
    disturbed_run,
    everything,
    iterate,
    make,
    run,
    share_weights,
    stored,
    with_xlas_own_fusions,
)
from gymnasium.spaces import Box

import rlgraph
from rlgraph.agents.networks import jax as networks_jax
from rlgraph.agents.networks import torch as networks_torch
from rlgraph.agents.parts import replay_jax, replay_torch
from rlgraph.agents.sac import jax as sac_jax
from rlgraph.agents.sac import torch as sac_torch
from rlgraph.agents.sac.config import METRICS, SACConfig
from rlgraph.environment import build
from rlgraph.errors import UsageError

pytestmark = pytest.mark.usefixtures("quick_compilation")
MODULES = {"torch": sac_torch, "jax": sac_jax}
SMALL = SACConfig(
    env="Pendulum-v1",
    num_envs=4,
    num_steps=8,
    num_updates=2,
    minibatch_size=16,
    replay_capacity=128,
    learning_starts=64,
    learning_rate=1e-3,
    anneal_lr=False,
    hidden=(8,),
    device="cpu",
)


def sac(backend, env="Pendulum-v1", **changes):
    """A small SAC run; `env` is a name, or an Environment."""
    return make("sac", SMALL, backend, env, **changes)


def weights(agent):
    """Policy, critics, target critics and temperature: numpy arrays by name."""
    if isinstance(agent, sac_torch.SAC):
        modules = (agent.policy, agent.critics, agent.target_critics)
        arrays, log_temperature = map(networks_torch.to_arrays, modules), agent.log_temperature
    else:
        learner = agent.state.learner
        modules = (learner.policy, learner.critics, agent.state.target_critics)
        arrays, log_temperature = map(networks_jax.to_arrays, modules), learner.log_temperature
    named = zip(("policy", "critics", "target"), arrays)
    named = {f"{module}.{name}": value for module, values in named for name, value in values.items()}
    return {**named, "log_temperature": copy(log_temperature)}


# ---- configuration


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_envs": 0}, "num_envs must be at least 1, but is 0"),
        ({"num_updates": 0}, "num_updates must be at least 1, but is 0"),
        ({"minibatch_size": -1}, "minibatch_size must be at least 1, but is -1"),
        ({"replay_capacity": 0}, "replay_capacity must be at least 1, but is 0"),
        ({"learning_starts": 0}, "learning_starts must be at least 1, but is 0"),
        ({"target_tau": 0.0}, "target_tau must be positive, but is 0.0"),
        ({"target_tau": 1.5}, r"target_tau must lie in \[0, 1\], but is 1.5"),
        ({"noise_correlation": -0.1}, r"noise_correlation must lie in \[0, 1\], but is -0.1"),
        ({"gamma": math.nan}, r"gamma must be finite, but is nan"),
        ({"learning_rate": math.inf}, "learning_rate must be finite"),
        ({"hidden": ()}, "hidden must name at least one layer"),
        ({"precision": "half"}, "precision must be one of ieee, tf32"),
        ({"total_steps": 64}, "learning_starts = 64 leaves nothing of total_steps = 64 for learning"),
        ({"num_envs": 1, "num_steps": 1, "replay_capacity": 2**24}, "more than 8388608"),
        ({"seed": -1}, "seed must be in"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(changes, message):
    check_refused_in_one_line(SMALL, changes, message)


@pytest.mark.parametrize("backend", BACKENDS)
def test_actions_that_tanh_cannot_give_are_refused(backend):
    with pytest.raises(UsageError, match="sac needs a Box action space, CartPole-v1 has Discrete; use dqn, pqn or ppo"):
        sac(backend, "CartPole-v1")
    for low, high in ((-np.inf, 1), (-1, np.inf), (2, 2)):

        class Odd(Aim):
            @staticmethod
            def action_space(p, low=low, high=high):
                return Box(np.array([[-1, low]], np.float32), np.array([[1, high]], np.float32))

        with pytest.raises(UsageError, match="finite bounds, low < high, Diagnostic-v0 has others; use ppo"):
            sac(backend, build(Odd))


# ---- networks: the same weights in either backend are the same policy

UNEVEN = Box(np.array([-3, 0], np.float32), np.array([0.5, 100], np.float32))
SPACES = {
    "uneven": (Box(-9, 9, (3,)), UNEVEN),
    "matrices": (Box(-9, 9, (2, 3)), Box(-1, 1, (2, 2))),
    "scalars": (Box(-9, 9, ()), Box(-1, 1, ())),
}


def networks(spaces, seed=0):
    """Torch and JAX pairs (actor, critics) of the same weights, all of them large enough to matter."""
    observation, action = SPACES[spaces]
    inputs, options = math.prod(observation.shape) + math.prod(action.shape), ((16, 8), "relu")
    generator, key = torch.Generator().manual_seed(seed), jax.random.key(seed)
    in_torch = (
        networks_torch.SquashedActor(observation, action, *options, generator),
        networks_torch.TwinCritic(inputs, *options, generator),
    )
    in_jax = (
        networks_jax.SquashedActor(observation, action, *options, key),
        networks_jax.TwinCritic(inputs, *options, key),
    )
    rng = np.random.default_rng(seed)
    return in_torch, tuple(share_weights(*pair, rng, most=0.4) for pair in zip(in_torch, in_jax))


def inputs(spaces, lead, seed=1):
    """Observations and noise, for any leading shape."""
    observation, action = SPACES[spaces]
    rng = np.random.default_rng(seed)
    return tuple(rng.normal(size=(*lead, *s.shape)).astype(np.float32) for s in (observation, action))


def outputs(networks, obs, noise):
    actor, critics = networks
    action, log_prob = actor.act(obs, noise)
    return action, log_prob, actor.greedy(obs), actor.uniform(noise), critics(actor.features(obs, action))


@pytest.mark.parametrize(("spaces", "lead"), [*((spaces, (50,)) for spaces in SPACES), ("matrices", (3, 5))])
def test_both_backends_are_the_same_policy(spaces, lead):
    in_torch, in_jax = networks(spaces)
    obs, noise = inputs(spaces, lead)
    with torch.no_grad():
        expected = [x.numpy() for x in outputs(in_torch, torch.tensor(obs), torch.tensor(noise))]
    got = [np.asarray(x) for x in jax.jit(outputs)(in_jax, obs, noise)]
    space = SPACES[spaces][1]
    for name, a, b in zip(("action", "log_prob", "greedy", "uniform", "values"), expected, got):
        assert a.shape == b.shape, name
        assert a.std() > 0.03, name
        np.testing.assert_allclose(b, a, rtol=1e-4, atol=1e-5 * max(1, space.high.max()), err_msg=name)
    action, log_prob, greedy, uniform, values = expected
    assert action.shape == greedy.shape == uniform.shape == (*lead, *space.shape)
    assert (log_prob.shape, values.shape) == (lead, (2, *lead))
    assert differ(values[:1], values[1:])  # two critics, not one twice


@pytest.mark.parametrize("spaces", SPACES)
def test_weights_cross_over_in_both_directions(spaces):
    for i in range(2):
        in_torch, in_jax = (pair[i] for pair in networks(spaces))
        fresh_torch, fresh_jax = (pair[i] for pair in networks(spaces, seed=5))
        networks_torch.from_arrays(fresh_torch, networks_jax.to_arrays(in_jax))
        fresh_jax = networks_jax.from_arrays(fresh_jax, networks_torch.to_arrays(in_torch))
        expected = networks_torch.to_arrays(in_torch)
        for other in (networks_torch.to_arrays(fresh_torch), networks_jax.to_arrays(fresh_jax)):
            assert sorted(other) == sorted(expected)
            assert_equal([expected[name] for name in expected], [other[name] for name in expected])
        assert not any("low" in name or "high" in name for name in expected)  # bounds are the environment's


# ---- the squashed Gaussian: its density, and its bounds


def fixed_actor(backend, space, mean, log_std):
    """A policy of constant mean and deviation of u, whatever it observes."""
    options = (Box(-1, 1, (1,)), space, (4,), "relu")
    low, high = networks_torch.LOG_STD_RANGE
    unbounded = np.arctanh(2 * (np.asarray(log_std) - low) / (high - low) - 1)
    if backend == "torch":
        module, actor = networks_torch, networks_torch.SquashedActor(*options, torch.Generator())
    else:
        module, actor = networks_jax, networks_jax.SquashedActor(*options, jax.random.key(0))
    arrays = module.to_arrays(actor)
    arrays["actor.layers.1.weight"] = np.zeros_like(arrays["actor.layers.1.weight"])
    arrays["actor.layers.1.bias"] = np.concatenate([mean, unbounded]).astype(np.float32)
    if backend == "jax":
        return networks_jax.from_arrays(actor, arrays)
    networks_torch.from_arrays(actor, arrays)
    return actor


def ask(method, *arrays):
    """What a method of a torch or JAX network gives, numpy to numpy."""
    if isinstance(method.__self__, torch.nn.Module):
        with torch.no_grad():
            results = method(*map(torch.tensor, arrays))
    else:
        results = jax.jit(lambda *arrays: method(*arrays))(*arrays)
    return jax.tree.map(np.asarray, results)


def played(backend, mean, log_std, noise):
    """Actions [N, 2] and log-probs [N] in UNEVEN."""
    actor = fixed_actor(backend, UNEVEN, mean, log_std)
    action, log_prob = ask(actor.act, np.zeros((len(noise), 1), np.float32), noise.astype(np.float32))
    return action.astype(np.float64), log_prob.astype(np.float64)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("log_std", [(-1.0, 0.0), (0.7, -2.0)])
def test_the_density_integrates_to_one_over_the_box(backend, log_std):
    """By the trapezoid rule over a grid of actions: a wrong Jacobian of tanh or of the scale gives another number."""
    n = 801
    z = np.linspace(-6, 6, n)
    noise = np.stack(np.meshgrid(z, z, indexing="ij"), axis=-1).reshape(-1, 2)
    action, log_prob = played(backend, (0.3, -0.5), log_std, noise)
    grid, density = action.reshape(n, n, 2), np.exp(log_prob).reshape(n, n)
    total = np.trapezoid(np.trapezoid(density, grid[0, :, 1], axis=1), grid[:, 0, 0])
    assert total == pytest.approx(1, abs=2e-3)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_log_prob_is_the_change_of_variables(backend):
    mean, log_std = np.array([0.2, -0.4]), np.array([-0.5, 0.3])
    noise = np.random.default_rng(0).normal(size=(200, 2))
    action, log_prob = played(backend, mean, log_std, noise)
    low, high = UNEVEN.low.astype(np.float64), UNEVEN.high.astype(np.float64)
    u, std = mean + np.exp(log_std) * noise, np.exp(log_std)
    np.testing.assert_allclose(action, low + (high - low) * (np.tanh(u) + 1) / 2, rtol=1e-4, atol=1e-4)
    normal = np.exp(-((u - mean) ** 2) / (2 * std**2)) / (std * math.sqrt(2 * math.pi))
    slope = (high - low) / 2 * (1 - np.tanh(u) ** 2)  # da/du
    np.testing.assert_allclose(log_prob, np.log(normal / slope).sum(-1), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("u", [-1000.0, -50.0, -12.0, 12.0, 50.0, 1000.0])
def test_far_out_where_tanh_is_flat_it_stays_exact(backend, u):
    """There 1 - tanh(u)^2 is 0 in float32. Its logarithm is 2 log 2 - 2|u|, up to e^(-2|u|)."""
    action, log_prob = played(backend, (u, u), (0.0, 0.0), np.zeros((1, 2)))
    expected = 2 * (-0.5 * math.log(2 * math.pi) - 2 * math.log(2) + 2 * abs(u)) - math.log(1.75 * 50)
    assert log_prob[0] == pytest.approx(expected, rel=1e-5)
    assert action[0] == pytest.approx(UNEVEN.high if u > 0 else UNEVEN.low, abs=1e-4)


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_stay_finite_far_out(backend):
    (actor, critics), (jax_actor, jax_critics) = networks("uneven")
    obs, noise = inputs("uneven", (20,))
    obs = obs * 1e4
    if backend == "torch":
        loss, _ = sac_torch.actor_loss(actor, critics, torch.tensor(0.1), torch.tensor(obs), torch.tensor(noise))
        loss.backward()
        gradient = [p.grad.numpy() for p in actor.parameters()]
    else:
        gradient, _ = jax.jit(jax.grad(sac_jax.actor_loss, has_aux=True))(jax_actor, jax_critics, 0.1, obs, noise)
        gradient = list(networks_jax.to_arrays(gradient).values())
    assert all(np.isfinite(g).all() for g in gradient)
    assert any(g.any() for g in gradient)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("extreme", [-1e6, 1e6])
def test_a_runaway_log_std_gives_finite_numbers(backend, extreme):
    actor = fixed_actor(backend, UNEVEN, (0.0, 0.0), (0.0, 0.0))
    module = networks_torch if backend == "torch" else networks_jax
    arrays = module.to_arrays(actor)
    arrays["actor.layers.1.bias"][2:] = extreme
    actor = module.from_arrays(actor, arrays) or actor
    action, log_prob = ask(actor.act, np.zeros((1, 1), np.float32), np.ones((1, 2), np.float32))
    std = math.exp(networks_torch.LOG_STD_RANGE[extreme > 0])
    assert action[0, 1] == pytest.approx(50 * (1 + math.tanh(std)), rel=1e-5)
    assert np.isfinite(log_prob).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_actions_never_leave_the_box_and_reach_its_ends(backend):
    actor = fixed_actor(backend, UNEVEN, (0.0, 0.0), (1.9, 1.9))
    noise = np.random.default_rng(0).normal(size=(10_000, 2)).astype(np.float32) * 3
    obs = np.zeros((10_000, 1), np.float32)
    for action in (ask(actor.act, obs, noise)[0], ask(actor.uniform, noise)):
        assert (action >= UNEVEN.low).all()
        assert (action <= UNEVEN.high).all()
        np.testing.assert_allclose(action.min(0), UNEVEN.low, atol=1e-2)
        np.testing.assert_allclose(action.max(0), UNEVEN.high, atol=1e-2)


@pytest.mark.parametrize("backend", BACKENDS)
def test_random_actions_are_uniform_in_the_box(backend):
    actor = fixed_actor(backend, UNEVEN, (0.0, 0.0), (0.0, 0.0))
    n = 20_000
    noise = np.random.default_rng(0).normal(size=(n, 2)).astype(np.float32)
    share = (ask(actor.uniform, noise) - UNEVEN.low) / (UNEVEN.high - UNEVEN.low)
    for d in range(2):
        count = np.histogram(share[:, d], bins=10, range=(0, 1))[0]
        assert (abs(count / n - 0.1) < 4 * math.sqrt(0.1 * 0.9 / n)).all()


# ---- the losses: torch, JAX and a few lines of numpy

TEMPERATURE = 0.3


def random_batch(spaces, M=100):
    """Arrays of Transitions, and noise [2, M, ...] for next and present actions."""
    observation, action = SPACES[spaces]
    rng = np.random.default_rng(3)
    obs, next_obs = rng.normal(size=(2, M, *observation.shape))
    actions = rng.uniform(action.low, action.high, size=(M, *action.shape))
    discount = np.where(rng.random(M) < 0.3, 0, 0.97)  # some terminated
    arrays = (obs, actions, rng.normal(size=M), next_obs, discount, rng.normal(size=(2, M, *action.shape)))
    *batch, noise = (x.astype(np.float32) for x in arrays)
    return batch, noise


@pytest.mark.parametrize("spaces", ["uneven", "matrices"])
def test_losses_and_gradients_agree(spaces):
    (actor, critics), (jax_actor, jax_critics) = networks(spaces, seed=64)
    (_, target), (_, jax_target) = networks(spaces, seed=65)
    arrays, noise = random_batch(spaces)
    batch, in_torch = replay_torch.Transitions(*map(torch.tensor, arrays)), torch.tensor(noise)
    q_loss, q_value = sac_torch.critic_loss(critics, target, actor, torch.tensor(TEMPERATURE), batch, in_torch[0])
    q_loss.backward()
    assert all(p.grad is None for p in (*actor.parameters(), *target.parameters()))
    critics_gradient = {name: p.grad.numpy().copy() for name, p in critics.named_parameters()}
    pi_loss, log_prob = sac_torch.actor_loss(actor, critics, torch.tensor(TEMPERATURE), batch.obs, in_torch[1])
    pi_loss.backward(inputs=list(actor.parameters()))
    assert not q_value.requires_grad
    assert not log_prob.requires_grad

    jax_batch = replay_jax.Transitions(*arrays)
    (loss, value), gradient = jax.jit(jax.value_and_grad(sac_jax.critic_loss, has_aux=True))(
        jax_critics, jax_target, jax_actor, TEMPERATURE, jax_batch, noise[0]
    )
    np.testing.assert_allclose([loss, value], [q_loss.item(), q_value.item()], rtol=1e-4)
    for name, array in networks_jax.to_arrays(gradient).items():
        assert abs(array).max() > 1e-6, name
        np.testing.assert_allclose(array, critics_gradient[name], rtol=1e-3, atol=1e-4, err_msg=name)
    (loss, value), gradient = jax.jit(jax.value_and_grad(sac_jax.actor_loss, has_aux=True))(
        jax_actor, jax_critics, TEMPERATURE, jax_batch.obs, noise[1]
    )
    np.testing.assert_allclose([loss, value], [pi_loss.item(), log_prob.item()], rtol=1e-4)
    gradient = networks_jax.to_arrays(gradient)
    for name, parameter in actor.named_parameters():
        assert abs(gradient[name]).max() > 1e-6, name
        np.testing.assert_allclose(gradient[name], parameter.grad.numpy(), rtol=1e-3, atol=1e-4, err_msg=name)
    assert not gradient["obs_mean"].any()  # statistics, which Adam must leave alone
    assert not gradient["obs_var"].any()

    _, _, reward, _, discount = arrays
    with torch.no_grad():
        _, next_log_prob, _, _, next_q = (x.numpy() for x in outputs((actor, target), batch.next_obs, in_torch[0]))
        q = critics(actor.features(batch.obs, batch.action)).numpy()
        _, now_log_prob, _, _, now_q = (x.numpy() for x in outputs((actor, critics), batch.obs, in_torch[1]))
    in_units_of_the_bounds = np.log((actor.high - actor.low).numpy() / 2).sum()
    next_log_prob, now_log_prob = next_log_prob + in_units_of_the_bounds, now_log_prob + in_units_of_the_bounds
    y = reward + discount * (np.minimum(*next_q) - TEMPERATURE * next_log_prob)
    assert q_loss.item() == pytest.approx(0.5 * ((q[0] - y) ** 2).mean() + 0.5 * ((q[1] - y) ** 2).mean(), rel=1e-5)
    assert q_value.item() == pytest.approx(q.mean(), rel=1e-4)
    assert pi_loss.item() == pytest.approx((TEMPERATURE * now_log_prob - np.minimum(*now_q)).mean(), rel=1e-5)
    for pair in (next_q, now_q):
        assert 0.1 < (pair[0] < pair[1]).mean() < 0.9  # each critic is the smaller one somewhere


@pytest.mark.parametrize("module", MODULES.values())
def test_the_temperature_falls_while_the_entropy_is_above_its_target(module):
    for log_prob, sign in ((-3.0, 1), (3.0, -1)):  # entropy 3, then -3, against a target of -1
        log_temperature = torch.tensor(-0.5, requires_grad=True)
        if module is sac_torch:
            module.temperature_loss(log_temperature, torch.tensor(log_prob), -1).backward()
            gradient = log_temperature.grad.item()
        else:
            gradient = float(jax.grad(module.temperature_loss)(-0.5, log_prob, -1))
        assert gradient == pytest.approx(-math.exp(-0.5) * (log_prob - 1))
        assert np.sign(gradient) == sign


def test_one_update_is_the_same_in_both_backends_and_each_gradient_is_of_its_own_loss():
    env = build(Aim)
    options = {"learning_starts": 1, "target_tau": 0.3, "learning_rate": 0.01}
    in_torch, in_jax = (sac(backend, env, **options) for backend in BACKENDS)
    state = in_jax.state
    networks_torch.from_arrays(in_torch.policy, networks_jax.to_arrays(state.learner.policy))
    for critics in (in_torch.critics, in_torch.target_critics):
        networks_torch.from_arrays(critics, networks_jax.to_arrays(state.learner.critics))
    before = weights(in_torch)
    rng = np.random.default_rng(0)
    shapes = ((16, 2, 1), (16, 1, 2), (16,), (16, 2, 1), (16,), (2, 16, 1, 2))
    *arrays, noise = (rng.uniform(-1, 1, shape).astype(np.float32) for shape in shapes)

    batch, in_torch.optimizer.found_inf = replay_torch.Transitions(*map(torch.tensor, arrays)), torch.zeros(())
    of_torch = in_torch._update(batch, torch.tensor(noise)).numpy()
    gradient = {name: p.grad.numpy().copy() for name, p in in_torch.critics.named_parameters()}
    learned = (state.learner, state.target_critics, state.optimizer)
    learned, of_jax = jax.jit(in_jax._update)(learned, replay_jax.Transitions(*arrays), noise, jnp.float32(0.01))
    np.testing.assert_allclose(of_jax, of_torch, rtol=1e-4, atol=1e-5)
    learner, target_critics, optimizer = learned
    in_jax.state = state._replace(learner=learner, target_critics=target_critics, optimizer=optimizer)
    after, other = weights(in_torch), weights(in_jax)
    for name in after:
        np.testing.assert_allclose(other[name], after[name], rtol=1e-3, atol=1e-4, err_msg=name)
    for name in after:
        if name.startswith("target"):
            critic = name.replace("target", "critics")
            expected = 0.7 * before[name] + 0.3 * after[critic]
            np.testing.assert_allclose(after[name], expected, rtol=1e-5, atol=1e-6)
    for name, moment in networks_jax.to_arrays(optimizer.mu.critics).items():
        np.testing.assert_allclose(moment, 0.1 * gradient[name], rtol=1e-3, atol=1e-5)


# ---- one iteration after the other, watched

WATCHED, SCHEDULED, RANDOM = 6, 5, 2  # iterations, those that the learning rate's schedule knows, those at random


class Watched:
    """A run, with what it held before each of its iterations, and after the last."""

    def __init__(self, backend):
        env = rlgraph.make("Pendulum-v1", max_episode_steps=13)
        options = {"replay_capacity": 8 * 4 * WATCHED, "normalize_obs": True, "noise_correlation": 0.5}
        options |= {"anneal_lr": True, "total_steps": SCHEDULED * 32}
        self.backend, self.agent = backend, sac(backend, env, mode=FASTEST[backend], **options)
        self.weights, self.noise, self.starts, self.metrics = [], [], [], []
        for _ in range(WATCHED):
            self._note()
            self.metrics.append(iterate(self.agent))
        self._note()
        self.stored = stored(self.agent)

    def _note(self):
        state = self.agent if isinstance(self.agent, sac_torch.SAC) else self.agent.state
        self.weights.append(weights(self.agent))
        self.noise.append(copy(state.noise))
        self.starts.append(copy(state.collector.obs))

    def rows(self, i):
        """What iteration i stored, by name."""
        return {name: buffer[8 * i : 8 * (i + 1)] for name, buffer in self.stored.items()}


@pytest.fixture(scope="module", params=BACKENDS)
def watched(request):
    return Watched(request.param)


def test_nothing_is_learned_while_it_acts_at_random(watched):
    moved = [
        {name for name in before if not np.array_equal(before[name], after[name]) and ".obs_" not in name}
        for before, after in itertools.pairwise(watched.weights)
    ]
    assert moved[:RANDOM] == [set()] * RANDOM
    everything_else = {name for name in watched.weights[0] if ".obs_" not in name}
    assert moved[RANDOM:SCHEDULED] == [everything_else] * (SCHEDULED - RANDOM)
    assert [m["updates"] for m in watched.metrics] == [0] * RANDOM + [2] * (WATCHED - RANDOM)
    taken = 2 * (WATCHED - RANDOM)
    if isinstance(watched.agent, sac_torch.SAC):
        assert {int(s["step"]) for s in watched.agent.optimizer.state.values()} == {taken}
    else:
        assert int(watched.agent.state.optimizer.count) == taken


def test_the_target_critics_start_as_the_critics_and_follow_them(watched):
    for i, arrays in enumerate(watched.weights):
        same = [np.array_equal(arrays[n], arrays[n.replace("target", "critics")]) for n in arrays if "target" in n]
        assert all(same) if i <= RANDOM else not any(same)


def test_learning_rate_falls_linearly_to_zero_and_stays_there(watched):
    rates = [m["learning_rate"] for m in watched.metrics]
    assert rates == pytest.approx([1e-3 * max(0, 1 - i / SCHEDULED) for i in range(WATCHED)])
    before, after = watched.weights[-2:]  # at a rate of zero the update moves the targets alone
    still = [name for name in before if not name.startswith("target") and ".obs_" not in name]
    assert_equal([before[name] for name in still], [after[name] for name in still])


def test_actions_are_random_at_first_and_then_the_policys(watched):
    """And those stored are those that the environment was given: they lie in its bounds."""
    env, config = watched.agent.env, watched.agent.config
    for i in range(WATCHED):
        arrays = {name.removeprefix("policy."): a for name, a in watched.weights[i].items() if "policy" in name}
        policy = sac_torch.SAC.load_policy(dataclasses.replace(config, backend="torch"), env, arrays)
        rows, noise = watched.rows(i), torch.tensor(watched.noise[i + 1])
        for t in range(8):
            with torch.no_grad():
                chosen = policy.uniform(noise) if i < RANDOM else policy.act(torch.tensor(rows["obs"][t]), noise)[0]
            np.testing.assert_allclose(rows["action"][t], chosen, rtol=1e-4, atol=1e-5)
    assert abs(watched.stored["action"]).max() <= 2
    assert watched.stored["action"][8 * RANDOM :].std() > 0.05


def test_stored_steps_are_those_of_the_environment_and_never_a_reset(watched, quick_environment):
    if watched.backend == "jax":
        with_xlas_own_fusions("test_sac.check_stored_steps(test_sac.Watched('jax'))", quick_environment)
    else:
        check_stored_steps(watched)


def check_stored_steps(watched):
    env, rows = watched.agent.env, watched.stored
    length = 8 * WATCHED
    assert rows["reward"].shape == (length, 4)
    np.testing.assert_array_equal(rows["obs"][::8], np.stack(watched.starts[:-1]))
    ends = np.arange(1, length + 1) % 13 == 0
    np.testing.assert_array_equal(rows["truncated"], np.broadcast_to(ends[:, None], (length, 4)))
    assert not rows["terminated"].any()
    for t in range(length):
        cos, sin, speed = rows["obs"][t].T
        state = env.definition.State(np.arctan2(sin, cos), speed)
        after, reward, _ = env.definition.step(np, state, rows["action"][t], None, env.params)
        np.testing.assert_allclose(rows["reward"][t], reward, rtol=1e-4, atol=1e-4)
        led_to = env.definition.observe(np, after, env.params)
        np.testing.assert_allclose(rows["final_obs"][t], led_to, rtol=1e-3, atol=1e-4)
        if t + 1 < length:
            assert np.array_equal(rows["final_obs"][t], rows["obs"][t + 1]) != ends[t]


def test_observation_statistics_are_those_of_all_that_was_collected(watched):
    for i in range(1, WATCHED + 1):
        seen = watched.stored["obs"][: 8 * i].reshape(-1, 3)
        np.testing.assert_allclose(watched.weights[i]["policy.obs_mean"], seen.mean(0), rtol=1e-3, atol=1e-4)
        np.testing.assert_allclose(watched.weights[i]["policy.obs_var"], seen.var(0), rtol=1e-3, atol=1e-4)


def test_episode_statistics_are_what_the_buffers_say(watched):
    reward, total, finished = watched.stored["reward"], np.zeros(4), [[] for _ in range(WATCHED)]
    for t in range(8 * WATCHED):
        total = total + reward[t]
        if (t + 1) % 13 == 0:
            finished[t // 8] += total.tolist()
            total = np.zeros(4)
    for metrics, returns in zip(watched.metrics, finished):
        assert metrics["episodes"] == len(returns)
        assert metrics["episode_length_sum"] == 13 * len(returns)
        assert metrics["episode_return_sum"] == pytest.approx(sum(returns), rel=1e-4)
    assert sum(map(len, finished)) == 12


@pytest.mark.parametrize("backend", BACKENDS)
def test_held_noise_is_standard_normal_and_correlates_from_iteration_to_iteration(backend):
    agent = sac(backend, num_envs=500, num_steps=1, noise_correlation=0.8, learning_starts=5000, total_steps=10_000)
    if backend == "torch":
        noise = [copy(agent.noise)]
        for _ in range(20):
            agent._move_noise()
            noise.append(copy(agent.noise))
    else:
        noise = [agent.state.noise]
        for key in jax.random.split(jax.random.key(1), 20):
            noise.append(agent._moved_noise(noise[-1], key))
    noise = np.array(noise)[..., 0]
    assert abs(noise.std(axis=1) - 1).max() < 4 / math.sqrt(2 * 500)
    correlation = (noise[1:] * noise[:-1]).mean()
    assert correlation == pytest.approx(0.8, abs=0.05)


# ---- runs: reproducible, and the same in every mode

WHOLE = {
    "anneal_lr": True,
    "total_steps": 160,
    "learning_starts": 32,
    "normalize_obs": True,
    "noise_correlation": 0.5,
    "replay_capacity": 64,  # so that it wraps
    "learning_rate": 0.01,
}
FRESH = {**WHOLE, "noise_correlation": 0.0}


def run_of(backend, iterations=4, env="Pendulum-v1", **changes):
    return run(sac(backend, env, **{**WHOLE, **changes}), iterations)


@pytest.mark.parametrize("backend", BACKENDS)
def test_same_seed_same_run_bit_for_bit_and_another_seed_another(backend):
    first, again, other = (run_of(backend, seed=s, mode=FASTEST[backend], **FRESH) for s in (3, 3, 4))
    assert_same_run(first, again)
    assert np.isfinite(first[0]).all()
    for name in ("critic_loss", "actor_loss", "q_value", "entropy"):
        assert first[0][0, METRICS.index(name)] != other[0][0, METRICS.index(name)], name


@pytest.mark.parametrize("backend", BACKENDS)
def test_without_correlation_the_noise_is_new_at_every_step(backend):
    agent = sac(backend, mode=FASTEST[backend], **FRESH)
    iterate(agent)
    action = stored(agent)["action"]
    assert len(np.unique(action)) == action.size == 32  # at random, so no function of the observation


@pytest.mark.filterwarnings("ignore:no CUDA graph on cpu")
@pytest.mark.parametrize("mode", ["graph", "graph-uncompiled"])
def test_torch_graph_modes_on_a_cpu_equal_eager_bit_for_bit(mode):
    assert_same_run(run_of("torch", mode=mode), run_of("torch", mode="eager"))


def test_torchs_state_is_named_complete_and_updated_in_place():
    agent = sac("torch", **WHOLE)
    named, _ = torch.utils._pytree.tree_flatten_with_path(agent._state())
    assert all(isinstance(leaf, torch.Tensor) for _, leaf in named)
    before, values = {path: leaf.data_ptr() for path, leaf in named}, everything(agent)
    random_state = agent.generator.get_state()
    first = [iterate(agent) for _ in range(3)], everything(agent)
    assert {path: x.data_ptr() for path, x in torch.utils._pytree.tree_flatten_with_path(agent._state())[0]} == before
    with torch.no_grad():
        for (_, leaf), value in zip(named, values):
            leaf.copy_(torch.as_tensor(value))
    agent.generator.set_state(random_state)
    again = [iterate(agent) for _ in range(3)], everything(agent)  # what the state misses would make it differ
    assert first[0] == again[0]
    assert_equal(first[1], again[1])


TINY = {"num_steps": 2, "num_updates": 1, "hidden": (4,), "learning_starts": 8, "learning_rate": 1e-3}
TINY |= {"noise_correlation": 0.0, "normalize_obs": False}


def test_torch_compile_is_close_to_eager():
    assert shutil.which("g++") or shutil.which("clang++"), "torch.compile needs a C++ compiler on a CPU"
    compiled, eager = (run_of("torch", 2, mode=mode, **TINY) for mode in ("compile", "eager"))
    assert eager[0][:, METRICS.index("updates")].tolist() == [0, 1]
    assert_close_after_one_iteration(compiled, eager, atol=1e-3)


@pytest.mark.parametrize("backend", BACKENDS)
def test_it_says_how_it_runs(backend):
    check_words_of_modes(lambda mode: sac(backend, mode=mode), backend)


# ---- diagnostic environments, whose values are known


class Continuous:
    """With one action in [-1, 1], that changes nothing: every action is worth the same."""

    @staticmethod
    def action_space(p):
        return Box(-1, 1, (1,))


class OneStep(Continuous, diagnostics.OneStep):
    pass


class TwoSteps(Continuous, diagnostics.TwoSteps):
    pass


class Seen(Continuous, diagnostics.Seen):
    pass


class CutOff(Continuous, diagnostics.CutOff):
    pass


class Aim(diagnostics.Aim):
    """Its actions have unlike bounds, and are best at x / 2 and 2 - x."""

    @staticmethod
    def action_space(p):
        return Box(np.array([[-1, 0]], np.float32), np.array([[2, 4]], np.float32))

    @staticmethod
    def reward(xp, s, action):
        return -((action[:, 0, 0] - s.x / 2) ** 2) - (action[:, 0, 1] - 2 + s.x) ** 2


def learned(backend, definition, iterations, **changes):
    """An agent after training on a diagnostic environment."""
    options = {
        "num_envs": 32,
        "num_steps": 4,
        "num_updates": 4,
        "minibatch_size": 64,
        "replay_capacity": 10_000,
        "learning_starts": 128,
        "learning_rate": 0.01,
        "gamma": 0.9,
        "target_tau": 0.1,
        "hidden": (16,),
    }
    options |= {"anneal_lr": True, "total_steps": iterations * 32 * 4, "mode": FASTEST[backend], **changes}
    agent = sac(backend, build(definition), **options)
    for _ in range(iterations):
        agent.iterate()
    return agent


def action_values(agent, obs, action):
    """[2, M]"""
    if isinstance(agent, sac_torch.SAC):
        with torch.no_grad():
            return agent.critics(agent.policy.features(torch.tensor(obs), torch.tensor(action))).numpy()
    return np.asarray(agent.state.learner.critics(agent.policy.features(obs, action)))


@pytest.mark.parametrize(
    ("definition", "backend"),
    # Each of JAX's programs takes seconds to compile: the one that needs bootstrapping and truncation to be right.
    [*((d, "torch") for d in (OneStep, TwoSteps, Seen, CutOff)), (CutOff, "jax")],
)
def test_it_learns_known_values(backend, definition):
    """Whatever the action. Entropy, log 2 at most, counts by the temperature, which falls as it gains nothing."""
    agent = learned(backend, definition, {CutOff: 200}.get(definition, 100))
    obs = diagnostics.OBSERVATIONS if definition is TwoSteps else diagnostics.OBSERVATIONS[:2]
    temperature, steps = math.exp(weights(agent)["log_temperature"]), {TwoSteps: 1, CutOff: 9}.get(definition, 0)
    assert temperature < 0.3
    bonus = steps * 0.9 * temperature * math.log(2)  # at most, and only what comes after the action
    for a in (-0.7, 0.0, 0.7):
        value = action_values(agent, obs, np.full((len(obs), 1), a, np.float32))
        expected = definition.value(obs)
        assert (value > expected - 0.05 * abs(expected) - 0.05).all()
        assert (value < expected + 0.05 * abs(expected) + 0.05 + bonus).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_it_finds_the_continuous_action(backend):
    agent = learned(backend, Aim, 200, normalize_obs=True)
    obs = diagnostics.OBSERVATIONS[:2, :, None]
    np.testing.assert_allclose(ask(agent.policy.greedy, obs), [[[-0.5, 3]], [[0.5, 1]]], atol=0.15)
    returns = MODULES[backend].SAC.evaluate_policy(agent.policy, agent.env, 10, seed=0)
    assert returns.shape == (10,)
    assert (returns > -0.1).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_policy_file_of_either_backend_plays_the_same_in_both(backend):
    arrays, env = sac(backend).arrays(), rlgraph.make("Pendulum-v1")
    obs = np.random.default_rng(0).normal(size=(20, 3)).astype(np.float32)
    in_torch, in_jax = (ask(module.SAC.load_policy(SMALL, env, arrays).greedy, obs) for module in (sac_torch, sac_jax))
    assert in_torch.std() > 1e-3
    np.testing.assert_allclose(in_jax, in_torch, rtol=1e-5, atol=1e-6)
    with pytest.raises(UsageError, match=r"no 'actor.layers.1.bias'"):
        del arrays["actor.layers.1.bias"]
        MODULES[backend].SAC.load_policy(SMALL, env, arrays)


# ---- on an NVIDIA GPU


def gpu_run(mode, iterations, disturb=False, **changes):
    """Metrics of each iteration, everything at the end, and the agent."""
    options = {"precision": "ieee", "num_envs": 64, "total_steps": 10 * 64 * 8, "learning_starts": 1024}
    options |= {"replay_capacity": 5 * 512, "minibatch_size": 128}
    agent = sac("torch", mode=mode, device="cuda", **{**WHOLE, **options, **changes})
    return disturbed_run(agent, iterations, *((4, 7) if disturb else ()))


@pytest.mark.gpu
@pytest.mark.parametrize("correlation", [0.0, 0.5])
def test_a_captured_iteration_equals_eager_bit_for_bit(correlation):
    """Ten replays, of random actions and of learning, with a reset and a new seed between them."""
    options = {"noise_correlation": correlation}
    eager, graph = (gpu_run(mode, 10, disturb=True, **options) for mode in ("eager", "graph-uncompiled"))
    check_captured_equals_eager(eager, graph)
    assert graph[0][:, METRICS.index("updates")].tolist() == [0, 0] + [2] * 8


@pytest.mark.gpu
def test_compiled_and_captured_is_close_to_eager():
    options = {"learning_rate": 1e-3}
    assert_close_after_one_iteration(gpu_run("graph", 3, **options)[:2], gpu_run("eager", 3, **options)[:2], atol=1e-3)


@pytest.mark.gpu
def test_graph_mode_same_seed_same_run():
    check_seeds(*(gpu_run("graph", 5, seed=s)[:2] for s in (0, 0, 1)))


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["graph-uncompiled", "graph"])
def test_the_learning_rate_moves_in_replays(mode):
    metrics, _, _ = gpu_run(mode, 4, total_steps=4 * 64 * 8)
    assert metrics[:, METRICS.index("learning_rate")] == pytest.approx([0.01, 0.0075, 0.005, 0.0025])


@pytest.mark.gpu
@pytest.mark.parametrize("backend", BACKENDS)
def test_on_a_gpu_graphs_are_the_default_and_it_says_so(backend):
    check_graphs_are_the_default(sac(backend, device="auto", mode="auto", **WHOLE), backend)
