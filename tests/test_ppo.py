"""PPO on both backends: networks, loss, what one iteration does, that modes agree, and that it learns known values."""

import dataclasses
import itertools
import math
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
    check_seeds,
    check_words_of_modes,
    copy,
    differ,
    disturbed_run,
    everything,
    iterate,
    make,
    pairs_of_adam,
    run,
    share_weights,
)
from diagnostics import OBSERVATIONS, Aim, CutOff, Match, OneStep, Seen, TwoSteps
from gymnasium.spaces import Box, Discrete

import rlgraph
from rlgraph.agents.networks import jax as networks_jax
from rlgraph.agents.networks import torch as networks_torch
from rlgraph.agents.ppo import jax as ppo_jax
from rlgraph.agents.ppo import torch as ppo_torch
from rlgraph.agents.ppo.config import METRICS, PPOConfig
from rlgraph.environment import build
from rlgraph.errors import UsageError
from rlgraph.precision import jax_matmul_precision, torch_matmul_precision

pytestmark = pytest.mark.usefixtures("quick_compilation")
MODULES = {"torch": ppo_torch, "jax": ppo_jax}
SMALL = PPOConfig(
    num_envs=4,
    num_steps=16,
    learning_rate=1e-3,
    anneal_lr=False,
    num_epochs=2,
    num_minibatches=4,
    clip_value=None,
    target_kl=None,
    normalize_obs=False,
    normalize_reward=False,
    hidden=(8,),
    device="cpu",
)


def ppo(backend, env="CartPole-v1", **changes):
    """A small PPO run; `env` is a name, or an Environment."""
    return make("ppo", SMALL, backend, env, **changes)


# ---- networks: the same weights in either backend are the same policy

SPACES = {
    "discrete": (Box(-9, 9, (4,)), Discrete(5)),
    "two": (Box(-9, 9, (3,)), Discrete(2, start=1)),
    "box": (Box(-9, 9, (3,)), Box(-1, 1, (1,))),
    "matrices": (Box(-9, 9, (2, 3)), Box(-1, 1, (2, 2))),
    "scalars": (Box(-9, 9, ()), Box(-1, 1, ())),
}


def networks(spaces, activation="tanh", seed=0):
    """A torch and a JAX policy of the same weights, with every weight and statistic made large enough to matter."""
    generator = torch.Generator().manual_seed(seed)
    in_torch = networks_torch.ActorCritic(*SPACES[spaces], (16, 8), activation, generator)
    in_jax = networks_jax.ActorCritic(*SPACES[spaces], (16, 8), activation, jax.random.key(seed))
    return in_torch, share_weights(in_torch, in_jax, np.random.default_rng(seed))


def inputs(spaces, lead, seed=1):
    """Observations, noise of a rollout, for any leading shape."""
    observation, action = SPACES[spaces]
    rng = np.random.default_rng(seed)
    obs = rng.normal(size=(*lead, *observation.shape)).astype(np.float32)
    if isinstance(action, Discrete):
        return obs, rng.random(lead, dtype=np.float32)
    return obs, rng.normal(size=(*lead, *action.shape)).astype(np.float32)


@pytest.mark.parametrize(
    ("spaces", "lead"), [*((spaces, (50,)) for spaces in SPACES), ("discrete", (3, 5)), ("matrices", (3, 5))]
)
def test_both_backends_are_the_same_policy(spaces, lead):
    in_torch, in_jax = networks(spaces)
    obs, noise = inputs(spaces, lead)

    def outputs(policy, obs, noise):
        parameters = policy.actor(policy.normalized(obs))
        action, log_prob = policy.act(obs, noise)
        entropy = policy.distribution.entropy(parameters)
        return parameters, policy.value(obs), action, log_prob, entropy, policy.greedy(obs)

    with torch.no_grad():
        expected = [x.numpy() for x in outputs(in_torch, torch.tensor(obs), torch.tensor(noise))]
    got = [np.asarray(x) for x in jax.jit(outputs)(in_jax, obs, noise)]
    for name, a, b in zip(("parameters", "value", "action", "log_prob", "entropy", "greedy"), expected, got):
        assert a.shape == b.shape, name
        np.testing.assert_allclose(b, a, rtol=1e-5, atol=1e-5, err_msg=name)
    parameters, value, action, log_prob, entropy, greedy = expected
    assert value.shape == log_prob.shape == entropy.shape == lead
    assert action.shape == greedy.shape == (*lead, *SPACES[spaces][1].shape)
    assert parameters.std() > 0.1  # the comparison is not one of zeros
    assert value.std() > 0.1
    if spaces == "discrete":
        assert set(action.flatten().tolist()) == set(range(5)) or lead == (3, 5)
        np.testing.assert_array_equal(greedy, parameters.argmax(-1))


@pytest.mark.parametrize("activation", ["tanh", "relu", "silu"])
def test_every_activation_is_the_same_in_both(activation):
    in_torch, in_jax = networks("discrete", activation)
    obs, _ = inputs("discrete", (20,))
    value = in_torch.value(torch.tensor(obs)).detach().numpy()
    np.testing.assert_allclose(in_jax.value(obs), value, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("spaces", SPACES)
def test_weights_cross_over_in_both_directions(spaces):
    in_torch, in_jax = networks(spaces)
    fresh_torch, fresh_jax = networks(spaces, seed=5)
    assert differ(networks_jax.to_arrays(fresh_jax).values(), networks_jax.to_arrays(in_jax).values())
    networks_torch.from_arrays(fresh_torch, networks_jax.to_arrays(in_jax))
    fresh_jax = networks_jax.from_arrays(fresh_jax, networks_torch.to_arrays(in_torch))
    arrays = [networks_torch.to_arrays(p) for p in (in_torch, fresh_torch)]
    arrays += [networks_jax.to_arrays(p) for p in (in_jax, fresh_jax)]
    for other in arrays[1:]:
        assert sorted(other) == sorted(arrays[0])
        assert_equal([arrays[0][name] for name in arrays[0]], [other[name] for name in arrays[0]])


@pytest.mark.parametrize("backend", BACKENDS)
def test_weights_of_another_network_are_refused_by_name(backend):
    module, policy = (networks_torch, networks_jax)[backend == "jax"], networks("discrete")[backend == "jax"]
    arrays = module.to_arrays(policy)
    with pytest.raises(UsageError, match=r"no 'actor.layers.1.bias'"):
        module.from_arrays(policy, {k: v for k, v in arrays.items() if k != "actor.layers.1.bias"})
    with pytest.raises(UsageError, match=r"'critic.layers.0.weight' has shape \[4, 16\]"):
        module.from_arrays(policy, {**arrays, "critic.layers.0.weight": arrays["critic.layers.0.weight"].T})
    with pytest.raises(UsageError, match=r"has 'extra', which this network lacks"):
        module.from_arrays(policy, {**arrays, "extra": np.zeros(1, np.float32)})


def distribution(backend, log_std=None):
    """(Categorical or, given log_std, Gaussian; array constructor) of a backend."""
    module, convert = (networks_torch, torch.tensor) if backend == "torch" else (networks_jax, jnp.asarray)
    if log_std is None:
        return module.Categorical(), convert
    log_std = np.asarray(log_std, np.float32)
    gaussian = module.Gaussian(log_std.shape)
    if backend == "torch":
        gaussian.log_std.data = torch.tensor(log_std.reshape(-1))
        return gaussian.requires_grad_(False), convert
    object.__setattr__(gaussian, "log_std", jnp.asarray(log_std.reshape(-1)))
    return gaussian, convert


@pytest.mark.parametrize("backend", BACKENDS)
def test_categorical_samples_as_often_as_probable(backend):
    categorical, convert = distribution(backend)
    prob, n = np.array([0.1, 0.0, 0.2, 0.3, 0.4], np.float32), 100_000
    u = np.random.default_rng(0).random(n, dtype=np.float32)
    with np.errstate(divide="ignore"):
        logits = np.broadcast_to(np.log(prob) + np.float32(3), (n, 5))
    count = np.bincount(np.asarray(categorical.sample(convert(logits.copy()), convert(u))), minlength=5)
    assert count[1] == 0
    assert (abs(count / n - prob) <= 4 * np.sqrt(prob * (1 - prob) / n)).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("n", [1, 2, 7, 300])
def test_categorical_stays_in_range_at_the_ends_of_the_unit_interval(backend, n):
    categorical, convert = distribution(backend)
    u = np.array([0, np.nextafter(np.float32(1), np.float32(0))], np.float32)
    action = np.asarray(categorical.sample(convert(np.zeros((2, n), np.float32)), convert(u)))
    assert action.tolist() == [0, n - 1]
    logits = np.full((2, n), -np.inf, np.float32)
    logits[:, -1] = 0  # the ends of the interval never give what is impossible
    assert np.asarray(categorical.sample(convert(logits), convert(u))).tolist() == [n - 1, n - 1]


@pytest.mark.parametrize("backend", BACKENDS)
def test_categorical_log_prob_and_entropy_are_the_closed_forms(backend):
    categorical, convert = distribution(backend)
    logits = np.random.default_rng(0).normal(scale=3, size=(6, 4)).astype(np.float32)
    logits[0] += 1000  # shifting all logits changes nothing, and must not overflow
    prob = np.exp(logits - logits.max(-1, keepdims=True).astype(np.float64))
    prob /= prob.sum(-1, keepdims=True)
    action = np.array([0, 1, 2, 3, 0, 1])
    got = np.asarray(categorical.log_prob(convert(logits), convert(action)))
    np.testing.assert_allclose(got, np.log(prob[np.arange(6), action]), rtol=1e-4, atol=1e-4)
    entropy = np.asarray(categorical.entropy(convert(logits)))
    np.testing.assert_allclose(entropy, -(prob * np.log(prob)).sum(-1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("backend", BACKENDS)
def test_gaussian_log_prob_entropy_and_samples_are_those_of_the_normal(backend):
    log_std = np.array([[-1.0, 0.0], [0.5, 1.5]])
    gaussian, convert = distribution(backend, log_std)
    rng, n = np.random.default_rng(0), 50_000
    mean = rng.normal(size=(n, 4)).astype(np.float32)
    noise = rng.normal(size=(n, 2, 2)).astype(np.float32)
    action = gaussian.sample(convert(mean), convert(noise))
    std, error = np.exp(log_std), np.asarray(action, np.float64) - mean.reshape(n, 2, 2)
    assert (abs(error.mean(axis=0)) < 4 * std / math.sqrt(n)).all()
    np.testing.assert_allclose(error.std(axis=0), std, rtol=4 / math.sqrt(2 * n))
    density = np.exp(-(error**2) / (2 * std**2)) / (std * math.sqrt(2 * math.pi))
    got = np.asarray(gaussian.log_prob(convert(mean), action))
    np.testing.assert_allclose(got, np.log(density).sum((1, 2)), rtol=1e-3, atol=1e-3)
    entropy = np.log(std * math.sqrt(2 * math.pi * math.e)).sum()
    np.testing.assert_allclose(np.asarray(gaussian.entropy(convert(mean))), entropy, rtol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("extreme", [-np.inf, -1e4, 1e4, np.inf])
def test_a_runaway_log_std_gives_finite_numbers(backend, extreme):
    gaussian, convert = distribution(backend, np.full(2, extreme))
    mean, noise = convert(np.zeros((3, 2), np.float32)), convert(np.full((3, 2), 2, np.float32))
    action = gaussian.sample(mean, noise)
    for result in (action, gaussian.log_prob(mean, action), gaussian.entropy(mean)):
        assert np.isfinite(np.asarray(result)).all()
    assert (np.asarray(action) > 0).all()


# ---- the loss: torch, JAX and a few lines of numpy

LOSSES = {
    "plain": {},
    "clip_value": {"clip_value": 0.3},
    "everything": {"clip_value": 0.5, "entropy_coef": 0.02, "value_coef": 0.7, "normalize_advantage": False},
}


def random_batch(spaces, in_torch, N=40):
    """A batch whose ratios lie on both sides of the clip range, and whose values lie on both sides of theirs."""
    obs, noise = inputs(spaces, (N,), seed=3)
    rng = np.random.default_rng(4)
    with torch.no_grad():
        action, log_prob = in_torch.act(torch.tensor(obs), torch.tensor(noise))
        value = in_torch.value(torch.tensor(obs)).numpy()
    log_prob = log_prob.numpy() + rng.normal(scale=0.3, size=N)
    value = value + rng.normal(scale=0.5, size=N)
    rest = (log_prob, value, rng.normal(loc=0.5, scale=2, size=N))
    return obs, action.numpy(), *(x.astype(np.float32) for x in rest)


def loss_in_numpy(new_log_prob, new_value, entropy, log_prob, value, advantage, config):
    """Schulman et al. (2017), eqs. 7 and 9, in float64."""
    target = value + advantage
    if config.normalize_advantage:
        advantage = (advantage - advantage.mean()) / (advantage.std(ddof=1) + 1e-8)
    ratio = np.exp(new_log_prob - log_prob)
    clipped = np.clip(ratio, 1 - config.clip_range, 1 + config.clip_range)
    policy_loss = -np.minimum(ratio * advantage, clipped * advantage).mean()
    error = (new_value - target) ** 2
    if config.clip_value is not None:
        near = value + np.clip(new_value - value, -config.clip_value, config.clip_value)
        error = np.maximum(error, (near - target) ** 2)
    value_loss = 0.5 * error.mean()
    loss = policy_loss + config.value_coef * value_loss - config.entropy_coef * entropy.mean()
    kl, outside = (ratio - 1 - np.log(ratio)).mean(), (abs(ratio - 1) > config.clip_range).mean()
    return loss, np.array([policy_loss, value_loss, entropy.mean(), kl, outside])


@pytest.mark.parametrize("changes", LOSSES.values(), ids=LOSSES)
@pytest.mark.parametrize("spaces", ["discrete", "matrices"])
def test_losses_metrics_and_gradients_agree(spaces, changes):
    config = dataclasses.replace(SMALL, **changes)
    in_torch, in_jax = networks(spaces)
    arrays = random_batch(spaces, in_torch)
    rows = np.random.default_rng(5).permutation(40)[:24]

    batch = ppo_torch.Batch(*map(torch.tensor, arrays))
    loss, metrics = ppo_torch.ppo_loss(in_torch, batch, torch.tensor(rows), config)
    loss.backward()
    assert not metrics.requires_grad
    jax_batch = ppo_jax.Batch(*map(jnp.asarray, arrays))
    (jax_loss, jax_metrics), gradient = jax.jit(
        jax.value_and_grad(lambda policy: ppo_jax.ppo_loss(policy, jax_batch, jnp.asarray(rows), config), has_aux=True)
    )(in_jax)
    np.testing.assert_allclose(jax_loss, loss.item(), rtol=1e-5)
    np.testing.assert_allclose(jax_metrics, metrics.numpy(), rtol=1e-5, atol=1e-6)
    gradient = networks_jax.to_arrays(gradient)
    for name, parameter in in_torch.named_parameters():
        assert abs(gradient[name]).max() > 1e-6, name
        np.testing.assert_allclose(gradient[name], parameter.grad.numpy(), rtol=1e-4, atol=1e-6, err_msg=name)
    assert not gradient["obs_mean"].any()  # statistics, which Adam must leave alone
    assert not gradient["obs_var"].any()

    obs, action, *rest = (torch.tensor(x[rows]) for x in arrays)
    with torch.no_grad():
        parameters = in_torch.actor(in_torch.normalized(obs))
        now = (
            in_torch.distribution.log_prob(parameters, action),
            in_torch.value(obs),
            in_torch.distribution.entropy(parameters),
        )
    expected_loss, expected = loss_in_numpy(*(x.numpy().astype(np.float64) for x in (*now, *rest)), config)
    assert loss.item() == pytest.approx(expected_loss, rel=1e-5)
    np.testing.assert_allclose(metrics.numpy(), expected, rtol=1e-4)
    assert 0.2 < metrics[4] < 0.8  # clipping is at work


# ---- one iteration, watched from inside

WATCHED, SCHEDULED = 5, 3  # iterations, and how many of them the learning rate's schedule knows


def watch(backend, **changes):
    env = rlgraph.make("CartPole-v1", max_episode_steps=13)
    return Watched("ppo", backend, lambda: ppo(backend, env, mode=FASTEST[backend], **changes), "_advantages", WATCHED)


@pytest.fixture(scope="module", params=BACKENDS)
def watched(request):
    options = {"normalize_obs": True, "normalize_reward": True, "anneal_lr": True, "total_steps": SCHEDULED * 64}
    return watch(request.param, **options)


def returns_so_far(rollouts, gamma):
    """Every running return [iterations * T, B] and the finished episodes, per iteration, by a loop over all steps."""
    running, total, length = (np.zeros(4) for _ in range(3))
    rows, finished = [], []
    for rollout in rollouts:
        finished.append([])
        for reward, done in zip(rollout.reward_TB, rollout.terminated_TB | rollout.truncated_TB):
            running, total, length = reward + gamma * running, total + reward, length + 1
            rows.append(running)
            finished[-1] += list(zip(total[done], length[done]))
            running, total, length = (np.where(done, 0, x) for x in (running, total, length))
    return np.array(rows), finished


def test_minibatches_cover_every_row_exactly_once_an_epoch(watched):
    check_minibatches(watched)


def test_learning_rate_falls_linearly_to_zero_and_stays_there(watched):
    rates = [m["learning_rate"] for m in watched.metrics]
    assert rates == pytest.approx([1e-3, 1e-3 * 2 / 3, 1e-3 / 3, 0, 0])


def test_every_update_is_adams_step_by_the_scheduled_learning_rate(watched):
    """The rate that the metrics report is the one at work."""
    for before, after, steps, _, moments in pairs_of_adam(watched, SCHEDULED):
        for old, new, step, m in zip(before, after, steps, moments):
            # Between iterations JAX's list holds new observation statistics as well; they have no moments.
            if m.any():
                np.testing.assert_allclose(new - old, step, rtol=1e-2, atol=2e-7)


def test_observation_statistics_are_those_of_all_that_was_collected(watched):
    for i in range(1, WATCHED):
        seen = np.concatenate([r.obs.reshape(-1, 4) for r in watched.rollouts[:i]])
        np.testing.assert_allclose(watched.before[i]["obs_mean"], seen.mean(0), rtol=1e-3, atol=1e-5)
        np.testing.assert_allclose(watched.before[i]["obs_var"], seen.var(0), rtol=1e-3, atol=1e-5)


def test_batches_hold_the_rollout_and_its_advantages(watched):
    """Rewards divided by the standard deviation of all running returns so far; truncation goes on from final_obs."""
    gamma, gae_lambda = SMALL.gamma, SMALL.gae_lambda
    ended = np.zeros(2, int)
    for i, (rollout, batch) in enumerate(zip(watched.rollouts, watched.batches)):
        for name, recorded in {
            "obs": "obs",
            "action": "action",
            "log_prob": "log_prob_TB",
            "value": "value_TB",
        }.items():
            expected = getattr(rollout, recorded)
            np.testing.assert_array_equal(getattr(batch, name), expected.reshape(64, *expected.shape[2:]))
        g, _ = returns_so_far(watched.rollouts[: i + 1], gamma)
        reward, advantage, after = rollout.reward_TB / g.std(), np.zeros((16, 4)), np.zeros(4)
        for t in reversed(range(16)):
            terminated, truncated = rollout.terminated_TB[t], rollout.truncated_TB[t]
            delta = reward[t] + gamma * np.where(terminated, 0, rollout.final_value_TB[t]) - rollout.value_TB[t]
            advantage[t] = after = delta + gamma * gae_lambda * np.where(terminated | truncated, 0, after)
            ended += [terminated.sum(), truncated.sum()]
        np.testing.assert_allclose(batch.advantage, advantage.reshape(-1), rtol=1e-3, atol=1e-4)
    assert (ended > 0).all()  # episodes ended both ways


def test_rollouts_are_scored_by_the_policy_that_acted(watched):
    env = watched.agent.env
    for before, rollout in zip(watched.before, watched.rollouts):
        policy = ppo_torch.PPO.load_policy(dataclasses.replace(watched.agent.config), env, before)
        obs, final_obs, action = (torch.tensor(x) for x in (rollout.obs, rollout.final_obs, rollout.action))
        with torch.no_grad():
            log_prob = policy.distribution.log_prob(policy.actor(policy.normalized(obs)), action.long())
            np.testing.assert_allclose(rollout.log_prob_TB, log_prob, rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(rollout.value_TB, policy.value(obs), rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(rollout.final_value_TB, policy.value(final_obs), rtol=1e-4, atol=1e-5)


def test_episode_statistics_are_what_the_buffers_say(watched):
    _, finished = returns_so_far(watched.rollouts, 1.0)
    for metrics, episodes in zip(watched.metrics, finished):
        assert metrics["episodes"] == len(episodes) > 0
        assert metrics["episode_return_sum"] == pytest.approx(sum(r for r, _ in episodes))
        assert metrics["episode_length_sum"] == sum(length for _, length in episodes)


def test_without_a_target_every_update_is_taken(watched):
    for metrics, updates in zip(watched.metrics, watched.updates):
        assert metrics["updates"] == len(updates) == 8
        assert all(differ(a, b) for a, b in itertools.pairwise(updates))


@pytest.mark.parametrize("backend", BACKENDS)
def test_target_kl_stops_the_updates_and_nothing_moves_after(backend):
    run = watch(backend, target_kl=1e-4, learning_rate=0.02)
    taken = [int(m["updates"]) for m in run.metrics]
    assert all(0 < k < 8 for k in taken)  # begun anew in every iteration, and stopped in each
    for k, updates in zip(taken, run.updates):
        for before, after in itertools.pairwise(updates[:k]):
            assert differ(before, after)
        for stopped in updates[k:]:
            assert_equal(updates[k - 1], stopped)  # parameters, Adam's moments and step counts
    assert run.updates[-1][-1][-1] == sum(taken)  # Adam counts what was taken


# ---- runs: reproducible, and the same in every mode

WHOLE = {
    "normalize_obs": True,
    "normalize_reward": True,
    "anneal_lr": True,
    "total_steps": 5 * 64,
    "clip_value": 0.5,
    "target_kl": 0.05,
    "learning_rate": 0.01,
}


def run_of(backend, iterations=4, env="CartPole-v1", **changes):
    return run(ppo(backend, env, **{**WHOLE, **changes}), iterations)


def beginning(backend, env, seed):
    """The weights, and the first observations, before the first iteration."""
    agent = ppo(backend, env, seed=seed)
    collector = agent.collector if backend == "torch" else agent.state.collector
    return list(agent.arrays().values()), copy(collector.obs)


@pytest.mark.parametrize(
    ("backend", "env"), [("torch", "CartPole-v1"), ("torch", "Pendulum-v1"), ("jax", "CartPole-v1")]
)
def test_same_seed_same_run_bit_for_bit_and_another_seed_another(backend, env):
    first, again, other = (run_of(backend, env=env, seed=s, mode=FASTEST[backend]) for s in (3, 3, 4))
    check_seeds(first, again, other)
    assert np.isfinite(first[0]).all()
    weights, starts = zip(*(beginning(backend, env, seed) for seed in (3, 3, 4)))
    assert_equal([*weights[0], starts[0]], [*weights[1], starts[1]])
    assert differ(weights[0], weights[2])
    assert (starts[0] != starts[2]).all()
    for name in ("policy_loss", "value_loss", "entropy", "grad_norm"):
        assert first[0][0, METRICS.index(name)] != other[0][0, METRICS.index(name)], name


@pytest.mark.filterwarnings("ignore:no CUDA graph on cpu")
@pytest.mark.parametrize("mode", ["graph", "graph-uncompiled"])
def test_torch_graph_modes_on_a_cpu_equal_eager_bit_for_bit(mode):
    assert_same_run(run_of("torch", mode=mode), run_of("torch", mode="eager"))


def test_torch_compile_is_close_to_eager():
    assert shutil.which("g++") or shutil.which("clang++"), "torch.compile needs a C++ compiler on a CPU"
    assert_close_after_one_iteration(run_of("torch", 1, mode="compile"), run_of("torch", 1, mode="eager"))


def test_updates_in_jax_share_a_turn_of_the_loop_on_a_gpu_where_minibatches_are_small():
    limit = ppo_jax.MOST_ROWS_UNROLLED
    assert [ppo_jax.updates_a_turn(rows, "gpu") for rows in (1, limit, limit + 1)] == [4, 4, 1]
    assert ppo_jax.updates_a_turn(1, "cpu") == 1


def test_updates_in_jax_that_share_a_turn_are_close_to_those_of_one_each(monkeypatch):
    plain, asked = run_of("jax", 1), []
    monkeypatch.setattr(ppo_jax, "updates_a_turn", lambda *what: asked.append(what) or 4)
    assert_close_after_one_iteration(run_of("jax", 1), plain)
    assert asked == [(16, "cpu")]


@pytest.mark.parametrize("backend", BACKENDS)
def test_it_says_how_it_runs(backend):
    check_words_of_modes(lambda mode: ppo(backend, mode=mode), backend)


# ---- diagnostic environments, whose values are known


def learned(backend, definition, iterations, **changes):
    """(agent, numpy function of a policy's method) after training on a diagnostic environment."""
    options = {
        "num_envs": 32,
        "num_steps": 8,
        "num_minibatches": 2,
        "learning_rate": 0.01,
        "gamma": 0.9,
        "hidden": (16,),
    }
    options |= {"anneal_lr": True, "total_steps": iterations * 32 * 8, "mode": FASTEST[backend], **changes}
    agent = ppo(backend, build(definition), **options)
    for _ in range(iterations):
        agent.iterate()

    def ask(method, obs):
        if backend == "jax":
            return np.asarray(getattr(agent.policy, method)(jnp.asarray(obs)))
        with torch.no_grad():
            return getattr(agent.policy, method)(torch.tensor(obs)).numpy()

    return agent, ask


@pytest.mark.parametrize(
    ("definition", "backend"),
    # The second of the two steps is JAX's one step: each of its programs takes seconds to compile.
    [*((d, "torch") for d in (OneStep, TwoSteps, Seen, CutOff)), *((d, "jax") for d in (TwoSteps, Seen, CutOff))],
)
def test_it_learns_known_values(backend, definition):
    iterations = {CutOff: 200, TwoSteps: 100}.get(definition, 60)
    _, ask = learned(backend, definition, iterations)
    obs = OBSERVATIONS if definition is TwoSteps else OBSERVATIONS[:2]
    np.testing.assert_allclose(ask("value", obs), definition.value(obs), rtol=0.05, atol=0.05)


@pytest.mark.parametrize("backend", BACKENDS)
def test_it_finds_the_discrete_action(backend):
    _, ask = learned(backend, Match, 40)
    assert ask("greedy", OBSERVATIONS[:2]).tolist() == [0, 2]  # counted from 0; -1 and 1 to the environment
    np.testing.assert_allclose(ask("value", OBSERVATIONS[:2]), 1, atol=0.15)


@pytest.mark.parametrize("backend", BACKENDS)
def test_it_finds_the_continuous_action(backend):
    agent, ask = learned(backend, Aim, 100, normalize_obs=True, normalize_reward=True)
    obs = OBSERVATIONS[:2, :, None]
    np.testing.assert_allclose(ask("greedy", obs), [[[-0.5, 0.5]], [[0.5, -0.5]]], atol=0.1)
    assert (agent.arrays()["distribution.log_std"] < -0.5).all()  # and grows sure of it
    returns = MODULES[backend].PPO.evaluate_policy(agent.policy, agent.env, 10, seed=0)
    assert returns.shape == (10,)
    assert (returns > -0.05).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("value", [-9.0, 9.0])
def test_a_standard_deviation_beyond_its_range_comes_back(backend, value):
    """Beyond the range the clamp has no gradient, so without help the parameter would stay there for good."""
    agent = ppo(backend, "Pendulum-v1")
    if backend == "torch":
        with torch.no_grad():
            agent.policy.distribution.log_std.fill_(value)
    else:
        arrays = {**agent.arrays(), "distribution.log_std": np.full(1, value, np.float32)}
        agent.state = agent.state._replace(policy=networks_jax.from_arrays(agent.policy, arrays))
    iterate(agent)
    low, high = networks_torch.LOG_STD_RANGE
    assert low <= agent.arrays()["distribution.log_std"].item() <= high


# ---- on an NVIDIA GPU


def gpu_run(mode, iterations, disturb=False, **changes):
    """Metrics of each iteration, everything at the end, and the agent."""
    options = {"precision": "ieee", "num_envs": 64, "total_steps": 10 * 64 * 16}
    agent = ppo("torch", mode=mode, device="cuda", **{**WHOLE, **options, **changes})
    return disturbed_run(agent, iterations, *((4, 7) if disturb else ()))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("env", "precision"),
    [("CartPole-v1", "ieee"), ("Pendulum-v1", "ieee"), ("CartPole-v1", "bf16"), ("Pendulum-v1", "bf16")],
)
def test_a_captured_iteration_equals_eager_bit_for_bit(env, precision):
    """Ten replays with a reset and a new seed between them: metrics, parameters, Adam, statistics, environments."""
    options = {"env": env, "target_kl": 0.01, "precision": precision}
    eager, graph = (gpu_run(mode, 10, disturb=True, **options) for mode in ("eager", "graph-uncompiled"))
    check_captured_equals_eager(eager, graph)


@pytest.mark.gpu
def test_compiled_and_captured_is_close_to_eager():
    assert_close_after_one_iteration(gpu_run("graph", 1)[:2], gpu_run("eager", 1)[:2])


@pytest.mark.gpu
def test_graph_mode_same_seed_same_run():
    check_seeds(*(gpu_run("graph", 5, seed=s)[:2] for s in (0, 0, 1)))


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["graph-uncompiled", "graph"])
def test_the_learning_rate_moves_in_replays(mode):
    options = {"anneal_lr": True, "target_kl": None, "total_steps": 3 * 64 * 16}
    metrics, after, agent = gpu_run(mode, 3, **options)
    assert metrics[:, METRICS.index("learning_rate")] == pytest.approx([0.01, 0.02 / 3, 0.01 / 3])
    before = agent.arrays()
    agent.iterate().get()  # beyond the schedule's end the rate is 0
    assert_equal(
        [v for k, v in before.items() if not k.startswith("obs_")],
        [v for k, v in agent.arrays().items() if not k.startswith("obs_")],
    )
    assert differ(after, everything(agent))  # though it did play on


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["graph-uncompiled", "graph"])
def test_target_kl_works_inside_the_graph(mode):
    metrics, _, agent = gpu_run(mode, 4, target_kl=1e-4, learning_rate=0.02, total_steps=100 * 64 * 16)
    taken = metrics[:, METRICS.index("updates")]
    assert ((taken > 0) & (taken < 8)).all()
    assert {int(s["step"]) for s in agent.optimizer.state.values()} == {int(taken.sum())}


@pytest.mark.gpu
@pytest.mark.parametrize("backend", BACKENDS)
def test_on_a_gpu_graphs_are_the_default_and_it_says_so(backend):
    mode = {"torch": "fused", "jax": "graph"}[backend]
    check_graphs_are_the_default(ppo(backend, device="auto", mode="auto", **WHOLE), backend, mode)


def in_precision(backend, precision, obs):
    """Values and gradient of a loss of random-looking weights, computed on the GPU."""
    agent = ppo(backend, device="cuda", precision=precision, hidden=(64, 64))
    if backend == "torch":
        with torch_matmul_precision(precision):
            value = agent.policy.value(torch.as_tensor(obs, device="cuda"))
        (value**2).mean().backward()
        weight = agent.policy.critic.layers[1].weight
        assert weight.dtype == weight.grad.dtype == torch.float32
        return value.float().numpy(force=True), weight.grad.numpy(force=True)

    def loss(policy):
        value = policy.value(obs)
        return (value**2).mean(), value

    with jax_matmul_precision(precision):
        gradient, value = jax.jit(jax.grad(loss, has_aux=True))(agent.policy)
    weight = gradient.critic.layers[1].weight
    assert weight.dtype == value.dtype == np.float32
    return np.asarray(value), np.asarray(weight)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_lower_precision_differs_by_its_rounding(backend):
    """And by no less: a setting without effect would show here too."""
    obs = np.random.default_rng(0).normal(size=(4096, 4)).astype(np.float32)
    exact, tf32, bf16 = (in_precision(backend, precision, obs) for precision in ("ieee", "tf32", "bf16"))
    for what in (0, 1):  # values, gradient
        errors = [np.linalg.norm(x[what] - exact[what]) / np.linalg.norm(exact[what]) for x in (tf32, bf16)]
        print(backend, ("values", "gradient")[what], errors)
        assert 1e-6 < errors[0] < 2e-3  # 10 bits of fraction
        assert 3e-4 < errors[1] < 2e-2  # 7 bits
        assert errors[1] > 2 * errors[0]


@pytest.mark.gpu
@pytest.mark.parametrize("backend", BACKENDS)
def test_an_iteration_in_bf16_is_close_to_one_in_ieee(backend):
    metrics, tiny = {}, {"num_steps": 2, "num_epochs": 1, "num_minibatches": 2, "hidden": (4,)}
    for precision in ("ieee", "bf16"):
        agent = ppo(backend, device="cuda", precision=precision, **tiny)
        metrics[precision] = iterate(agent)
    for name in ("value_loss", "entropy", "episodes"):
        assert metrics["bf16"][name] == pytest.approx(metrics["ieee"][name], rel=0.1), name
    assert metrics["bf16"] != metrics["ieee"]


@pytest.mark.gpu
def test_jax_graph_mode_same_seed_same_run():
    check_seeds(*(run_of("jax", 5, mode="graph", device="cuda", seed=s) for s in (0, 0, 1)))
