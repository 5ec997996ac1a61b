"""Whole PPO iterations on both backends against numpy: loss, gradient, Adam, statistics, and values known by hand."""

import functools
import math
import types
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete

import rlgraph
from rlgraph.agents.networks import jax as networks_jax
from rlgraph.agents.networks import torch as networks_torch
from rlgraph.agents.ppo import jax as ppo_jax
from rlgraph.agents.ppo import torch as ppo_torch
from rlgraph.agents.ppo.config import METRICS, PPOConfig
from rlgraph.environment import Environment, build
from rlgraph.rollout import Rollout

pytestmark = pytest.mark.usefixtures("quick_compilation")
BACKENDS = ["torch", "jax"]
MODULES = {"torch": ppo_torch, "jax": ppo_jax}
NETWORKS = {"torch": networks_torch, "jax": networks_jax}
ARRAY = {"torch": torch.as_tensor, "jax": jnp.asarray}
FLOAT32 = {"rtol": 1e-5, "atol": 1e-5}


def flat_box(*shape):
    return Box(-1.0, 1.0, shape, np.float32)


# ---- networks

FRESH_JAX_NETWORKS = {}


def network(backend, spaces, seed=0, hidden=(8, 8), activation="tanh"):
    if backend == "torch":
        return networks_torch.ActorCritic(*spaces, hidden, activation, torch.Generator().manual_seed(seed))
    known = FRESH_JAX_NETWORKS  # making one takes XLA a second, and it never changes
    recipe = repr((spaces, seed, hidden, activation))
    if recipe not in known:
        known[recipe] = networks_jax.ActorCritic(*spaces, hidden, activation, jax.random.key(seed))
    return known[recipe]


def random_arrays(spaces, seed=0, hidden=(8, 8)):
    """Weights, statistics and standard deviations that are all different from a fresh network's."""
    rng = np.random.default_rng(seed)
    arrays = networks_torch.to_arrays(network("torch", spaces, hidden=hidden))
    arrays = {name: rng.normal(0, 0.5, a.shape).astype(np.float32) for name, a in arrays.items()}
    arrays["obs_var"] = rng.uniform(0.5, 2, arrays["obs_var"].shape).astype(np.float32)
    return arrays


def loaded(backend, spaces, arrays, **kwargs):
    policy = network(backend, spaces, **kwargs)
    if backend == "jax":
        return networks_jax.from_arrays(policy, arrays)
    networks_torch.from_arrays(policy, arrays)
    return policy


def noise_for(action_space, rows, seed=1):
    rng = np.random.default_rng(seed)
    if isinstance(action_space, Discrete):
        return rng.random(rows, dtype=np.float32)
    return rng.normal(size=(*rows, *action_space.shape)).astype(np.float32)


def numpy_outputs(spaces, arrays, obs, noise):
    """The same from the weights alone, in float64: the closed forms."""
    observation_space, action_space = spaces
    rows = obs.shape[: obs.ndim - len(observation_space.shape)]
    w = {name: a.astype(float) for name, a in arrays.items()}
    x = (obs.reshape(*rows, -1) - w["obs_mean"]) / np.sqrt(w["obs_var"] + 1e-8)

    def mlp(name):
        y = x
        for i in range(3):
            y = y @ w[f"{name}.layers.{i}.weight"].T + w[f"{name}.layers.{i}.bias"]
            y = np.tanh(y) if i < 2 else y
        return y

    out, value = mlp("actor"), mlp("critic")[..., 0]
    if isinstance(action_space, Discrete):
        log_p = out - np.log(np.exp(out).sum(-1, keepdims=True))
        # The action in whose slice of [0, 1) the uniform falls.
        action = (noise[..., None] >= np.exp(log_p).cumsum(-1)[..., :-1]).sum(-1)
        log_prob = np.take_along_axis(log_p, action[..., None], -1)[..., 0]
        entropy, greedy = -(np.exp(log_p) * log_p).sum(-1), out.argmax(-1)
    else:
        std, z = np.exp(w["distribution.log_std"].clip(-5, 2)), noise.reshape(out.shape)
        action, greedy = ((out + s * z).reshape(noise.shape) for s in (std, 0.0))
        log_prob = (-0.5 * z**2 - np.log(std) - 0.5 * math.log(2 * math.pi)).sum(-1)
        entropy = np.full(rows, (np.log(std) + 0.5 * math.log(2 * math.pi * math.e)).sum())
    names = ("parameters", "value", "action", "log_prob", "entropy", "greedy")
    return dict(zip(names, (out, value, action, log_prob, entropy, greedy)))


# ---- the loss


def random_batch(spaces, arrays, N=64, seed=3):
    """Steps of a policy near to `arrays`, so that some ratios are clipped; as numpy arrays, in Batch's order."""
    rng = np.random.default_rng(seed)
    obs = rng.normal(size=(N, *spaces[0].shape)).astype(np.float32)
    then = numpy_outputs(spaces, arrays, obs, noise_for(spaces[1], (N,), seed))
    log_prob = then["log_prob"] + rng.normal(0, 0.3, N)
    value = then["value"] + rng.normal(0, 0.3, N)
    action = then["action"] if isinstance(spaces[1], Discrete) else then["action"].astype(np.float32)
    return obs, action, *(x.astype(np.float32) for x in (log_prob, value, rng.normal(1, 2, N)))


@functools.cache
def jax_value_and_grad(config):
    return jax.jit(jax.value_and_grad(functools.partial(ppo_jax.ppo_loss, config=config), has_aux=True))


def loss_and_gradient(backend, policy, batch, rows, config):
    """ppo_loss, its metrics, and its gradient by parameter name."""
    module = MODULES[backend]
    batch = module.Batch(*map(ARRAY[backend], batch))
    if backend == "torch":
        policy.zero_grad()
        loss, metrics = module.ppo_loss(policy, batch, torch.as_tensor(rows), config)
        loss.backward()
        assert not metrics.requires_grad
        gradient = {name: p.grad.numpy() for name, p in policy.named_parameters()}
        return loss.item(), metrics.numpy(), gradient
    (loss, metrics), gradient = jax_value_and_grad(config)(policy, batch, jnp.asarray(rows))
    gradient = networks_jax.to_arrays(gradient)
    statistics = [gradient.pop(name) for name in ("obs_mean", "obs_var")]
    assert all((g == 0).all() for g in statistics)  # or Adam would move them
    return float(loss), np.asarray(metrics), gradient


def numpy_loss(spaces, arrays, batch, rows, config):
    obs, action, old_log_prob, old_value, advantage = (x[rows] for x in batch)
    target = old_value.astype(float) + advantage
    now = numpy_outputs(spaces, arrays, obs, noise_for(spaces[1], (len(rows),)))
    out = now["parameters"]
    if isinstance(spaces[1], Discrete):
        log_p = out - np.log(np.exp(out).sum(-1, keepdims=True))
        log_prob = log_p[np.arange(len(rows)), action]
    else:
        log_std = arrays["distribution.log_std"].astype(float)
        z = (action.reshape(out.shape) - out) / np.exp(log_std)
        log_prob = (-0.5 * z**2 - log_std - 0.5 * np.log(2 * np.pi)).sum(-1)
    if config.normalize_advantage:
        advantage = (advantage - advantage.mean()) / advantage.std(ddof=1)
    ratio = np.exp(log_prob - old_log_prob)
    low, high = 1 - config.clip_range, 1 + config.clip_range
    policy_loss = -np.minimum(ratio * advantage, np.clip(ratio, low, high) * advantage).mean()
    error = (now["value"] - target) ** 2
    if config.clip_value is not None:
        near = np.clip(now["value"], old_value - config.clip_value, old_value + config.clip_value)
        error = np.maximum(error, (near - target) ** 2)
    value_loss, entropy = error.mean() / 2, now["entropy"].mean()
    kl, outside = (ratio - 1 - np.log(ratio)).mean(), ((ratio < low) | (ratio > high)).mean()
    loss = policy_loss + config.value_coef * value_loss - config.entropy_coef * entropy
    return loss, [policy_loss, value_loss, entropy, kl, outside]


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_gradient_is_the_slope_of_the_numpy_loss(backend):
    """Central differences of the numpy reference in every parameter's largest gradient entry."""
    spaces, config = (flat_box(3), flat_box(1)), PPOConfig(clip_value=0.1, entropy_coef=0.05)
    arrays, rows = random_arrays(spaces), np.arange(64)
    batch = random_batch(spaces, arrays)
    _, _, gradient = loss_and_gradient(backend, loaded(backend, spaces, arrays), batch, rows, config)
    for name, g in gradient.items():
        i = np.unravel_index(abs(g).argmax(), g.shape)
        losses = []
        for step in (1e-5, -1e-5):
            moved = arrays | {name: arrays[name].astype(float)}
            moved[name][i] += step
            losses.append(numpy_loss(spaces, moved, batch, rows, config)[0])
        assert g[i] == pytest.approx((losses[0] - losses[1]) / 2e-5, rel=1e-2, abs=1e-4), name


# ---- a whole iteration

SMALL = {"num_envs": 8, "num_steps": 16, "hidden": (8, 8), "num_minibatches": 2, "precision": "ieee", "device": "cpu"}
ENVS = {"discrete": "CartPole-v1", "continuous": "Pendulum-v1"}


@functools.cache
def short_env(id):
    """Episodes end in every rollout: cut off after 13 steps, and CartPole's also by falling."""
    return rlgraph.make(id, max_episode_steps=13)


def ppo(backend, env, **options):
    return MODULES[backend].PPO(PPOConfig(backend=backend, **{**SMALL, **options}), env)


def iterate(agent, times=1):
    """Metrics of each iteration by name."""
    return [dict(zip(METRICS, row, strict=True)) for _ in range(times) for row in agent.iterate().get()]


def adam_steps(agent):
    """How many steps Adam has taken, by its own count."""
    if isinstance(agent, ppo_torch.PPO):
        return {int(state["step"]) for state in agent.optimizer.state.values()}
    return {int(agent.state.optimizer[1].count)}


def recording(backend, agent, monkeypatch):
    """A list that takes up every rollout that the agent collects from now on, as numpy arrays."""
    rollouts = []

    def record(rollout):
        rollouts.append(Rollout(*(np.asarray(x).copy() for x in rollout)))

    if backend == "torch":
        collect = agent.collector.collect

        def recorded_collect():
            rollout, totals = collect()
            record(rollout)
            return rollout, totals

        agent.collector.collect = recorded_collect
    else:
        collect = ppo_jax.collect

        def recorded_collect(*args):
            collector, rollout, totals = collect(*args)
            jax.debug.callback(record, rollout)
            return collector, rollout, totals

        monkeypatch.setattr(ppo_jax, "collect", recorded_collect)
    return rollouts


def recorded_iterate(agent):
    (metrics,) = iterate(agent)
    jax.effects_barrier()  # JAX's callback may come later than its metrics
    return metrics


class Reference:
    """PPO's bookkeeping and Adam in numpy, fed with the rollouts that an agent collected."""

    def __init__(self, config):
        self.config = config
        self.running_B, self.returns_B = np.zeros(config.num_envs), np.zeros(config.num_envs)
        self.lengths_B = np.zeros(config.num_envs, int)
        self.obs, self.discounted = [], []
        self.first, self.second, self.steps = {}, {}, 0

    def follow(self, rollout):
        """Returns what the metrics must say of the rollout's episodes: sum of returns, of lengths, and how many."""
        ended = []
        for obs, reward_B, *flags in zip(rollout.obs, *rollout[4:7]):
            self.obs.extend(obs.reshape(len(obs), -1))
            self.running_B = reward_B + self.config.gamma * self.running_B
            self.discounted.extend(self.running_B[:, None].copy())
            self.returns_B, self.lengths_B = self.returns_B + reward_B, self.lengths_B + 1
            done_B = flags[0] | flags[1]
            ended += zip(self.returns_B[done_B], self.lengths_B[done_B])
            self.running_B, self.returns_B, self.lengths_B = (
                np.where(done_B, 0, x) for x in (self.running_B, self.returns_B, self.lengths_B)
            )
        return sum(r for r, _ in ended), sum(length for _, length in ended), len(ended)

    def batch(self, rollout):
        """All steps as a Batch of numpy arrays, with advantages by a loop from the last step."""
        config, reward_TB = self.config, rollout.reward_TB.astype(float)
        if config.normalize_reward:
            reward_TB = reward_TB / np.sqrt(moments_with_prior(self.discounted)[1] + 1e-8)
        advantage_TB, later_B = np.zeros(reward_TB.shape), 0.0
        for t in reversed(range(len(reward_TB))):
            terminated_B, done_B = rollout.terminated_TB[t], rollout.terminated_TB[t] | rollout.truncated_TB[t]
            future_B = np.where(terminated_B, 0, config.gamma * rollout.final_value_TB[t])
            later_B = np.where(done_B, 0, config.gamma * config.gae_lambda * later_B)
            advantage_TB[t] = later_B = reward_TB[t] + future_B - rollout.value_TB[t] + later_B
        steps = (rollout.obs, rollout.action, rollout.log_prob_TB, rollout.value_TB, advantage_TB.astype(np.float32))
        return [x.reshape(-1, *x.shape[2:]) for x in steps]

    def adam(self, arrays, gradient, learning_rate):
        """Parameters by name after one step, the gradient clipped to the config's norm (Kingma & Ba, 2015)."""
        norm = math.sqrt(sum((g.astype(float) ** 2).sum() for g in gradient.values()))
        scale, after = min(1.0, self.config.max_grad_norm / norm), {}
        self.steps += 1
        for name, g in gradient.items():
            self.first[name] = 0.9 * self.first.get(name, 0) + 0.1 * scale * g
            self.second[name] = 0.999 * self.second.get(name, 0) + 0.001 * (scale * g) ** 2
            m, v = self.first[name] / (1 - 0.9**self.steps), self.second[name] / (1 - 0.999**self.steps)
            after[name] = arrays[name] - learning_rate * m / (np.sqrt(v) + 1e-5)
        return after, norm


def moments_with_prior(rows):
    """Mean and variance of the rows together with what the statistics start from: 0 and 1, of weight 1e-4."""
    x_ND, total = np.array(rows, dtype=float), len(rows) + 1e-4
    mean_D = x_ND.sum(axis=0) / total
    return mean_D, (1e-4 * (1 + mean_D**2) + ((x_ND - mean_D) ** 2).sum(axis=0)) / total


@pytest.mark.parametrize("kind, normalize", [("discrete", True), ("continuous", False)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_iterations_do_what_numpy_does_with_the_same_rollouts(backend, kind, normalize, monkeypatch):
    """One full-batch update an iteration: every metric, parameter and statistic follows from what was collected."""
    env = short_env(ENVS[kind])
    config = {"num_epochs": 1, "num_minibatches": 1, "total_steps": 4 * 128, "entropy_coef": 0.01, "max_grad_norm": 0.1}
    agent = ppo(backend, env, **config, normalize_obs=normalize, normalize_reward=normalize)
    rollouts, reference = recording(backend, agent, monkeypatch), Reference(agent.config)
    spaces = env.observation_space, env.action_space
    for i in range(4):
        before = agent.arrays()
        metrics = recorded_iterate(agent)
        rollout, episodes = rollouts[-1], reference.follow(rollouts[-1])
        assert episodes[2] > 0
        names = ("episode_return_sum", "episode_length_sum", "episodes")
        np.testing.assert_allclose([metrics[name] for name in names], episodes, rtol=1e-5)

        noise = noise_for(env.action_space, (16, 8))
        for seen, value in (("obs", "value_TB"), ("final_obs", "final_value_TB")):  # by the statistics of before
            expected = numpy_outputs(spaces, before, getattr(rollout, seen), noise)["value"]
            np.testing.assert_allclose(getattr(rollout, value), expected, rtol=1e-3, atol=1e-4)

        batch, learning_rate = reference.batch(rollout), agent.config.learning_rate * (1 - i / 4)
        assert metrics["learning_rate"] == pytest.approx(learning_rate)
        _, losses = numpy_loss(spaces, before, batch, np.arange(128), agent.config)
        np.testing.assert_allclose([metrics[name] for name in METRICS[:5]], losses, rtol=1e-3, atol=1e-4)
        policy = loaded(backend, spaces, before)
        _, _, gradient = loss_and_gradient(backend, policy, batch, np.arange(128), agent.config)
        expected, norm = reference.adam(before, gradient, learning_rate)
        assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-3)
        after = agent.arrays()
        for name, array in expected.items():
            np.testing.assert_allclose(after[name], array, atol=0.02 * learning_rate, rtol=1e-5, err_msg=name)
        mean, var = moments_with_prior(reference.obs) if normalize else (0, 1)
        np.testing.assert_allclose(after["obs_mean"], mean, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(after["obs_var"], var, rtol=1e-4, atol=1e-5)
    assert len(rollouts) == 4


KL = {"num_minibatches": 1, "learning_rate": 1e-2, "total_steps": 10 * 128}


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_tiny_target_kl_leaves_one_update_an_iteration(backend):
    """The second full-batch update sees the first one's divergence: from there on nothing moves, nor does Adam."""
    env = short_env("Pendulum-v1")
    stopped, once = ppo(backend, env, target_kl=1e-6, num_epochs=5, **KL), ppo(backend, env, num_epochs=1, **KL)
    metrics = iterate(stopped)[0], iterate(once)[0]
    assert [m["updates"] for m in metrics] == [1, 1]
    assert adam_steps(stopped) == adam_steps(once) == {1}
    for name, array in once.arrays().items():
        np.testing.assert_allclose(stopped.arrays()[name], array, rtol=1e-5, atol=1e-6, err_msg=name)
    assert metrics[0]["approx_kl"] > 1e-6
    assert iterate(stopped)[0]["updates"] == 1  # the next iteration starts afresh
    assert adam_steps(stopped) == {2}


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_seed_decides_weights_and_environments_alike(backend):
    """Each by itself: runs that differ in their weights only would look different, too."""
    first, again, other = (ppo(backend, short_env("Pendulum-v1"), seed=seed) for seed in (5, 5, 6))
    weights = [agent.arrays()["actor.layers.0.weight"] for agent in (first, again, other)]
    collectors = [agent.collector if backend == "torch" else agent.state.collector for agent in (first, again, other)]
    starts = [np.asarray(collector.obs) for collector in collectors]
    for a, b, c in (weights, starts):
        np.testing.assert_array_equal(a, b)
        assert not np.isclose(a, c).all(axis=-1).any()


# ---- environments whose answer is known


class State(NamedTuple):
    sign: Any  # [B] float32, -1 or 1 at random, kept for the episode
    time: Any  # [B] float32, steps so far


@dataclass(frozen=True)
class NoParams:
    pass


def diagnostic(reward, action_space=None, ends_after=math.inf, limit=100, clock=True) -> Environment:
    """An environment that shows its sign, and its clock if `clock`; `reward(xp, state, action)` is [B] float32."""

    def reset(xp, u_BR, params):
        one = xp.ones_like(u_BR[:, 0])
        return State(xp.where(u_BR[:, 0] < 0.5, -one, one), 0 * one)

    def step(xp, s, action, u_BS, params):
        return State(s.sign, s.time + 1), reward(xp, s, action), s.time + 1 >= ends_after

    definition = types.ModuleType("diagnostic")
    definition.ID, definition.MAX_EPISODE_STEPS, definition.REWARD_THRESHOLD = "Diagnostic-v0", limit, None
    definition.RESET_DRAWS, definition.STEP_DRAWS = 1, 0
    definition.Params, definition.State, definition.reset, definition.step = NoParams, State, reset, step
    definition.observation_space = lambda params: flat_box(1 + clock)
    definition.action_space = lambda params: action_space or Discrete(2)
    definition.observe = lambda xp, s, params: xp.stack([s.sign, s.time] if clock else [s.sign], axis=-1)
    return build(definition)


# Name: environment, options, and the value of observations (sign, time).
VALUES = {
    # Sums to sign / (1 - gamma) though episodes are cut off: the value goes on from the final observation, not from
    # the next episode's first one, whose sign is another every second time.
    "cut off": (diagnostic(lambda xp, s, a: s.sign, limit=3, clock=False), {"gamma": 0.75}, {(-1,): -4, (1,): 4}),
    "normalised reward": (
        diagnostic(lambda xp, s, a: 10 * s.sign, ends_after=1),
        {"normalize_reward": True, "normalize_obs": True},
        {(-1, 0): -1, (1, 0): 1},
    ),
}


def trained(backend, env, iterations, **options):
    options = {"num_envs": 32, "num_steps": 8, "hidden": (16, 16), "learning_rate": 1e-2, **options}
    agent = ppo(backend, env, total_steps=iterations * 256, **options)
    for _ in range(iterations):
        agent.iterate()
    return agent


@pytest.mark.parametrize("case", VALUES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_critic_learns_the_known_value(backend, case):
    env, options, values = VALUES[case]
    agent = trained(backend, env, 50, **options)
    with torch.no_grad():
        got = np.asarray(agent.policy.value(ARRAY[backend](np.array(list(values), np.float32))))
    np.testing.assert_allclose(got, list(values.values()), rtol=0.05, atol=0.05)
