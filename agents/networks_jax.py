"""Actor and critic in JAX. Weights are named as in networks_torch.py: a policy file loads in either.

B stands for any leading shape, A for the action size.
"""

import math
from collections.abc import Callable

import equinox as eqx
import gymnasium
import jax
import jax.numpy as jnp
import numpy as np

from rlgraph.checkpoint import check_same_layout

ACTIVATIONS = {"tanh": jnp.tanh, "relu": jax.nn.relu, "silu": jax.nn.silu}
LOG_STD_RANGE = (-5.0, 2.0)  # keeps the standard deviation finite and above zero, however long the run


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


class ActorCritic(eqx.Module):
    """Separate actor and critic over normalised observations.

    Args:
        observation_space, action_space: of one environment; observations are flattened.
        hidden, activation: of both networks.
        key: for the initial weights.
    """

    actor: MLP
    critic: MLP
    distribution: eqx.Module
    obs_mean: jax.Array  # [inputs]
    obs_var: jax.Array  # [inputs]
    obs_ndim: int = eqx.field(static=True)

    def __init__(
        self,
        observation_space: gymnasium.spaces.Box,
        action_space: gymnasium.spaces.Space,
        hidden: tuple[int, ...],
        activation: str,
        key: jax.Array,
    ):
        self.obs_ndim = len(observation_space.shape)
        inputs = math.prod(observation_space.shape)
        discrete = isinstance(action_space, gymnasium.spaces.Discrete)
        outputs = int(action_space.n) if discrete else math.prod(action_space.shape)
        actor_key, critic_key = jax.random.split(key)
        self.actor = MLP([inputs, *hidden, outputs], activation, 0.01, actor_key)
        self.critic = MLP([inputs, *hidden, 1], activation, 1.0, critic_key)
        self.distribution = Categorical() if discrete else Gaussian(action_space.shape)
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


class Categorical(eqx.Module):
    """Over n actions, by logits [B, n]."""

    def sample(self, logits, u_B):
        """Inverse CDF of one uniform in [0, 1) an action, the same one for the same uniform as in networks_torch.py."""
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
        return jnp.argmax(logits, axis=-1)


class Gaussian(eqx.Module):
    """Independent normals with mean [B, A] from the network and a standard deviation that is a parameter."""

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
