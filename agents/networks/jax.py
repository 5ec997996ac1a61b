"""Actor and critic in JAX. Weights are named as in networks/torch.py: a policy file loads in either.

B stands for any leading shape, A for the action size.
"""

import math
from collections.abc import Callable

import equinox as eqx
import gymnasium
import jax
import jax.numpy as jnp
import numpy as np

from rlgraph.kernels.weights import LOG_STD_RANGE, Layer, Policy
from rlgraph.runs.checkpoint import check_same_layout

ACTIVATIONS = {"tanh": jnp.tanh, "relu": jax.nn.relu, "silu": jax.nn.silu}
LAYER_NORM_EPS = 1e-5


class Linear(eqx.Module):
    """y = x weight^T + bias, over any leading shape."""

    weight: jax.Array  # [out, in]
    bias: jax.Array  # [out]

    def __init__(self, inputs: int, outputs: int, gain: float, key: jax.Array):
        self.weight = jax.nn.initializers.orthogonal(gain)(key, (outputs, inputs), jnp.float32)
        self.bias = jnp.zeros(outputs, jnp.float32)

    def __call__(self, x):
        return x @ self.weight.T + self.bias


class MLP(eqx.Module):
    """Fully connected layers with orthogonal weights (gain sqrt 2, `out_gain` at the end) and zero biases."""

    layers: list[Linear]
    activation: Callable = eqx.field(static=True)

    def __init__(self, sizes: list[int], activation: str, out_gain: float, key: jax.Array):
        keys = jax.random.split(key, len(sizes) - 1)
        gains = [math.sqrt(2)] * (len(sizes) - 2) + [out_gain]
        self.layers = [Linear(i, o, g, k) for i, o, g, k in zip(sizes[:-1], sizes[1:], gains, keys)]
        self.activation = ACTIVATIONS[activation]

    def __call__(self, x):
        for layer in self.layers[:-1]:
            x = self.activation(layer(x))
        return self.layers[-1](x)


class Observer(eqx.Module):
    """What networks over observations share: flattening, and normalising by a running mean and variance.

    Args:
        observation_space: of one environment.
    """

    obs_mean: jax.Array  # [inputs]
    obs_var: jax.Array  # [inputs]
    obs_ndim: int = eqx.field(static=True)

    def __init__(self, observation_space: gymnasium.spaces.Box):
        self.obs_ndim = len(observation_space.shape)
        inputs = math.prod(observation_space.shape)
        self.obs_mean = jnp.zeros(inputs, jnp.float32)
        self.obs_var = jnp.ones(inputs, jnp.float32)

    def flat(self, obs):
        """[B, *observation shape] -> [B, inputs]"""
        return obs.reshape((*obs.shape[: obs.ndim - self.obs_ndim], -1))

    def normalized(self, obs):
        """[B, *observation shape] -> [B, inputs] by the running mean and variance (0 and 1 if not kept)."""
        # These are statistics, not parameters: without a gradient Adam leaves them alone.
        mean, var = jax.lax.stop_gradient((self.obs_mean, self.obs_var))
        return (self.flat(obs) - mean) / jnp.sqrt(var + 1e-8)


class ActorCritic(Observer):
    """Separate actor and critic over normalised observations.

    Args:
        observation_space, action_space: of one environment; observations are flattened.
        hidden, activation: of both networks.
        key: for the initial weights.
    """

    actor: MLP
    critic: MLP
    distribution: eqx.Module

    def __init__(
        self,
        observation_space: gymnasium.spaces.Box,
        action_space: gymnasium.spaces.Space,
        hidden: tuple[int, ...],
        activation: str,
        key: jax.Array,
    ):
        super().__init__(observation_space)
        inputs = math.prod(observation_space.shape)
        discrete = isinstance(action_space, gymnasium.spaces.Discrete)
        outputs = int(action_space.n) if discrete else math.prod(action_space.shape)
        actor_key, critic_key = jax.random.split(key)
        self.actor = MLP([inputs, *hidden, outputs], activation, 0.01, actor_key)
        self.critic = MLP([inputs, *hidden, 1], activation, 1.0, critic_key)
        self.distribution = Categorical() if discrete else Gaussian(action_space.shape)

    def act(self, obs, noise):
        """Sample: ([B, *observation shape], noise) -> (action, log-prob [B])."""
        parameters = self.actor(self.normalized(obs))
        action = self.distribution.sample(parameters, noise)
        return action, self.distribution.log_prob(parameters, action)

    def greedy(self, obs):
        """The most probable action."""
        return self.distribution.mode(self.actor(self.normalized(obs)))

    def value(self, obs):
        """[B, *observation shape] -> [B]"""
        return self.critic(self.normalized(obs)).squeeze(-1)

    def for_kernels(self) -> Policy:
        """The same policy, as kernels take it."""
        actor, critic = (tuple(Layer(x.weight, x.bias) for x in mlp.layers) for mlp in (self.actor, self.critic))
        activation = next(name for name, function in ACTIVATIONS.items() if function is self.actor.activation)
        log_std = self.distribution._log_std() if isinstance(self.distribution, Gaussian) else None
        return Policy(actor, critic, activation, self.obs_mean, self.obs_var, log_std)


class Categorical(eqx.Module):
    """Over n actions, by logits [B, n]."""

    def sample(self, logits, u_B):
        """Inverse CDF of one uniform in [0, 1) an action, the same one for the same uniform as in networks/torch.py."""
        n = logits.shape[-1]
        prob = jax.nn.softmax(logits, axis=-1)
        upto = jnp.tril(jnp.ones((n - 1, n), bool))
        cdf = jnp.sum(prob[..., None, :] * upto, axis=-1)  # [B, n-1]
        return jnp.sum(u_B[..., None] >= cdf, axis=-1, dtype=jnp.int32)

    def log_prob(self, logits, action_B):
        log_prob = jax.nn.log_softmax(logits, axis=-1)
        return jnp.take_along_axis(log_prob, action_B[..., None], axis=-1).squeeze(-1)

    def entropy(self, logits):
        log_prob = jax.nn.log_softmax(logits, axis=-1)
        return -jnp.sum(jnp.exp(log_prob) * log_prob, axis=-1)

    def mode(self, logits):
        return _argmax(logits)


class Gaussian(eqx.Module):
    """Independent normals with mean [B, A] from the network and a standard deviation that is a parameter.

    Both are in the unit of the actions, in which the deviation begins at 1: bounds of about -1 and 1 suit it best.
    """

    log_std: jax.Array  # [A]
    action_shape: tuple[int, ...] = eqx.field(static=True)

    def __init__(self, action_shape: tuple[int, ...]):
        self.action_shape = action_shape
        self.log_std = jnp.zeros(math.prod(action_shape), jnp.float32)

    def _log_std(self):
        return jnp.clip(self.log_std, *LOG_STD_RANGE)

    def bounded(self):
        """With the parameter put back into its range: outside of it the clip has no gradient to return by."""
        return eqx.tree_at(lambda d: d.log_std, self, self._log_std())

    def sample(self, mean, noise):
        action = mean + jnp.exp(self._log_std()) * noise.reshape(mean.shape)
        return action.reshape(noise.shape)

    def log_prob(self, mean, action):
        log_std = self._log_std()
        z = (action.reshape(mean.shape) - mean) * jnp.exp(-log_std)
        return jnp.sum(-0.5 * z**2 - log_std - 0.5 * math.log(2 * math.pi), axis=-1)

    def entropy(self, mean):
        entropy = jnp.sum(self._log_std() + 0.5 * math.log(2 * math.pi * math.e))
        return jnp.broadcast_to(entropy, mean.shape[:-1])

    def mode(self, mean):
        return mean.reshape((*mean.shape[:-1], *self.action_shape))


class LayerNorm(eqx.Module):
    """Mean 0 and variance 1 over the last axis, then scaled and shifted (Ba et al., 2016)."""

    weight: jax.Array  # [width]
    bias: jax.Array  # [width]

    def __init__(self, width: int):
        self.weight, self.bias = jnp.ones(width, jnp.float32), jnp.zeros(width, jnp.float32)

    def __call__(self, x):
        centred = x - x.mean(axis=-1, keepdims=True)
        var = (centred**2).mean(axis=-1, keepdims=True)
        return centred / jnp.sqrt(var + LAYER_NORM_EPS) * self.weight + self.bias


class QNetwork(eqx.Module):
    """Action values.

    Args:
        observation_space, action_space: of one environment; observations are flattened, actions counted from 0.
        hidden, activation: of the hidden layers.
        dueling: the outputs are a value and an advantage an action, which make up the action values (Wang et al.,
            2016).
        key: for the initial weights.
    """

    mlp: MLP
    obs_ndim: int = eqx.field(static=True)
    dueling: bool = eqx.field(static=True)

    def __init__(
        self,
        observation_space: gymnasium.spaces.Box,
        action_space: gymnasium.spaces.Discrete,
        hidden: tuple[int, ...],
        activation: str,
        dueling: bool,
        key: jax.Array,
    ):
        self.obs_ndim, self.dueling = len(observation_space.shape), dueling
        sizes = [math.prod(observation_space.shape), *hidden, int(action_space.n) + dueling]
        self.mlp = MLP(sizes, activation, 1.0, key)

    def __call__(self, obs):
        """[B, *observation shape] -> [B, actions]"""
        outputs = self.mlp(obs.reshape((*obs.shape[: obs.ndim - self.obs_ndim], -1)))
        if not self.dueling:
            return outputs
        value, advantage = outputs[..., :1], outputs[..., 1:]
        return value + advantage - advantage.mean(-1, keepdims=True)  # eq. 9

    def greedy(self, obs):
        """The action of the greatest value."""
        return _argmax(self(obs))


class LayerNormQNetwork(eqx.Module):
    """Action values, with layer normalisation (Ba et al., 2016) before each activation.

    Args:
        observation_space, action_space: of one environment; observations are flattened, actions counted from 0.
        hidden, activation: of the hidden layers.
        key: for the initial weights.
    """

    mlp: MLP
    norms: list[LayerNorm]
    obs_ndim: int = eqx.field(static=True)

    def __init__(
        self,
        observation_space: gymnasium.spaces.Box,
        action_space: gymnasium.spaces.Discrete,
        hidden: tuple[int, ...],
        activation: str,
        key: jax.Array,
    ):
        self.obs_ndim = len(observation_space.shape)
        sizes = [math.prod(observation_space.shape), *hidden, int(action_space.n)]
        self.mlp = MLP(sizes, activation, 0.01, key)
        self.norms = [LayerNorm(width) for width in hidden]

    def __call__(self, obs):
        """[B, *observation shape] -> [B, actions]"""
        x = obs.reshape((*obs.shape[: obs.ndim - self.obs_ndim], -1))
        *layers, last = self.mlp.layers
        for layer, norm in zip(layers, self.norms):
            x = self.mlp.activation(norm(layer(x)))
        return last(x)

    def greedy(self, obs):
        """The action of the greatest value."""
        return _argmax(self(obs))


class SquashedActor(Observer):
    """A Gaussian over u, squashed by tanh and scaled into a bounded Box, its mean and deviation both of the network.

    Args: as ActorCritic's. Both bounds of every action must be finite.
    """

    actor: MLP
    # Static, as numbers: they belong to the environment, not to the weights.
    low: tuple[float, ...] = eqx.field(static=True)
    high: tuple[float, ...] = eqx.field(static=True)
    action_shape: tuple[int, ...] = eqx.field(static=True)

    def __init__(
        self,
        observation_space: gymnasium.spaces.Box,
        action_space: gymnasium.spaces.Box,
        hidden: tuple[int, ...],
        activation: str,
        key: jax.Array,
    ):
        super().__init__(observation_space)
        self.action_shape = action_space.shape
        self.low, self.high = (tuple(bound.reshape(-1).tolist()) for bound in (action_space.low, action_space.high))
        inputs = math.prod(observation_space.shape)
        self.actor = MLP([inputs, *hidden, 2 * len(self.low)], activation, 0.01, key)

    def _bounds(self):
        """[A] each."""
        return np.array(self.low, np.float32), np.array(self.high, np.float32)

    @property
    def log_volume(self) -> float:
        """Sum of log h over the half-widths h of the Box. A log-prob in units of the bounds is larger by it."""
        low, high = self._bounds()
        return float(np.log(0.5 * (high - low)).sum())

    def _parameters_of(self, obs):
        """Mean and log standard deviation of u, [B, A] each."""
        mean, unbounded = jnp.split(self.actor(self.normalized(obs)), 2, axis=-1)
        low, high = LOG_STD_RANGE
        return mean, low + 0.5 * (high - low) * (1 + jnp.tanh(unbounded))  # smooth, so it can come back

    def _scaled(self, squashed):
        """[B, A] in [-1, 1] -> [B, *action shape] in the Box."""
        low, high = self._bounds()
        action = low + 0.5 * (high - low) * (1 + squashed)
        return jnp.clip(action, low, high).reshape((*action.shape[:-1], *self.action_shape))

    def act(self, obs, noise):
        """Sample: ([B, *observation shape], standard normals [B, *action shape]) -> (action, log-prob [B])."""
        mean, log_std = self._parameters_of(obs)
        noise = noise.reshape(mean.shape)
        u = mean + jnp.exp(log_std) * noise
        log_normal = -0.5 * noise**2 - log_std - 0.5 * math.log(2 * math.pi)
        log_slope = 2 * (math.log(2) - u - jax.nn.softplus(-2 * u))  # log(1 - tanh(u)^2), for any u
        low, high = self._bounds()
        log_scale = np.log(0.5 * (high - low))
        return self._scaled(jnp.tanh(u)), jnp.sum(log_normal - log_slope - log_scale, axis=-1)

    def uniform(self, noise):
        """An action uniform in the Box, from standard normals [B, *action shape] by their distribution function."""
        flat = noise.reshape((*noise.shape[: noise.ndim - len(self.action_shape)], -1))
        return self._scaled(2 * jax.scipy.special.ndtr(flat) - 1)

    def greedy(self, obs):
        """The squashed mean."""
        return self._scaled(jnp.tanh(self._parameters_of(obs)[0]))

    def features(self, obs, action):
        """What critics see, [B, inputs + A]: normalised observations, and actions as they were before the scaling."""
        flat = action.reshape((*action.shape[: action.ndim - len(self.action_shape)], -1))
        low, high = self._bounds()
        squashed = 2 * (flat - low) / (high - low) - 1
        return jnp.concatenate([self.normalized(obs), squashed], axis=-1)


class TwinCritic(eqx.Module):
    """Two networks of the same task that start apart: [B, inputs] -> [2, B]."""

    first: MLP
    second: MLP

    def __init__(self, inputs: int, hidden: tuple[int, ...], activation: str, key: jax.Array):
        first_key, second_key = jax.random.split(key)
        self.first = MLP([inputs, *hidden, 1], activation, 1.0, first_key)
        self.second = MLP([inputs, *hidden, 1], activation, 1.0, second_key)

    def __call__(self, features):
        return jnp.stack([self.first(features).squeeze(-1), self.second(features).squeeze(-1)])


def epsilon_greedy(value_BA, u_B, epsilon):
    """The action of the greatest value or, with probability `epsilon`, any: one uniform in [0, 1) decides both.

    Args:
        value_BA: action values.
        u_B: below `epsilon`, u / epsilon is a uniform again, and picks the action.
        epsilon: [] on the device.
    """
    n = value_BA.shape[-1]
    any_B = jnp.minimum((u_B / epsilon * n).astype(jnp.int32), n - 1)  # an approximate division may give n
    return jnp.where(u_B < epsilon, any_B, _argmax(value_BA))


def _argmax(x):
    """Of the last axis: int32, whatever JAX's default is."""
    return jnp.argmax(x, axis=-1).astype(jnp.int32)


def to_arrays(module: eqx.Module) -> dict[str, np.ndarray]:
    """Weights and statistics by name ("actor.layers.0.weight"), the layout of a policy file."""
    leaves, _ = jax.tree.flatten_with_path(module)
    return {_name(path): np.array(leaf) for path, leaf in leaves}


def from_arrays(module: eqx.Module, arrays: dict[str, np.ndarray]) -> eqx.Module:
    """`module` with what `to_arrays` of either backend gave, on the same device.

    Raises:
        UsageError: a name or shape differs.
    """
    check_same_layout({name: array.shape for name, array in to_arrays(module).items()}, arrays)
    return jax.tree.map_with_path(lambda path, leaf: jax.device_put(arrays[_name(path)], leaf.sharding), module)


def _name(path) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")
