"""Actor and critic in torch. Weights are named as in networks_jax.py: a policy file loads in either.

B stands for any leading shape, A for the action size.
"""

import itertools
import math

import gymnasium
import numpy as np
import torch
from torch import nn

from rlgraph.checkpoint import check_same_layout

ACTIVATIONS = {"tanh": torch.tanh, "relu": torch.relu, "silu": nn.functional.silu}
LOG_STD_RANGE = (-5.0, 2.0)  # keeps the standard deviation finite and above zero, however long the run


class MLP(nn.Module):
    """Fully connected layers with orthogonal weights (gain sqrt 2, `out_gain` at the end) and zero biases."""

    def __init__(self, sizes: list[int], activation: str, out_gain: float, generator: torch.Generator):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(i, o) for i, o in itertools.pairwise(sizes))
        self.activation = ACTIVATIONS[activation]
        for layer in self.layers:
            gain = out_gain if layer is self.layers[-1] else math.sqrt(2)
            nn.init.orthogonal_(layer.weight, gain, generator=generator)
            nn.init.zeros_(layer.bias)

    def forward(self, x):
        for layer in self.layers[:-1]:
            x = self.activation(layer(x))
        return self.layers[-1](x)


class ActorCritic(nn.Module):
    """Separate actor and critic over normalised observations.

    Args:
        observation_space, action_space: of one environment; observations are flattened.
        hidden, activation: of both networks.
        generator: on the CPU, for the initial weights.
    """

    def __init__(
        self,
        observation_space: gymnasium.spaces.Box,
        action_space: gymnasium.spaces.Space,
        hidden: tuple[int, ...],
        activation: str,
        generator: torch.Generator,
    ):
        super().__init__()
        self.obs_ndim = len(observation_space.shape)
        inputs = math.prod(observation_space.shape)
        discrete = isinstance(action_space, gymnasium.spaces.Discrete)
        outputs = int(action_space.n) if discrete else math.prod(action_space.shape)
        self.actor = MLP([inputs, *hidden, outputs], activation, 0.01, generator)
        self.critic = MLP([inputs, *hidden, 1], activation, 1.0, generator)
        self.distribution = Categorical() if discrete else Gaussian(action_space.shape)
        self.register_buffer("obs_mean", torch.zeros(inputs))
        self.register_buffer("obs_var", torch.ones(inputs))

    def flat(self, obs):
        """[B, *observation shape] -> [B, inputs]"""
        return obs.flatten(start_dim=-self.obs_ndim) if self.obs_ndim else obs.unsqueeze(-1)

    def normalized(self, obs):
        """[B, *observation shape] -> [B, inputs] by the running mean and variance (0 and 1 if not kept)."""
        return (self.flat(obs) - self.obs_mean) / torch.sqrt(self.obs_var + 1e-8)

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


class Categorical(nn.Module):
    """Over n actions, by logits [B, n]."""

    def sample(self, logits, u_B):
        """Inverse CDF of one uniform in [0, 1) an action: no synchronisation, unlike torch.multinomial."""
        n = logits.shape[-1]
        prob = torch.softmax(logits, dim=-1)
        upto = torch.ones(n - 1, n, dtype=torch.bool, device=logits.device).tril()
        cdf = (prob.unsqueeze(-2) * upto).sum(-1)  # [B, n-1]
        return (u_B.unsqueeze(-1) >= cdf).sum(-1)

    def log_prob(self, logits, action_B):
        return torch.log_softmax(logits, dim=-1).gather(-1, action_B.unsqueeze(-1)).squeeze(-1)

    def entropy(self, logits):
        log_prob = torch.log_softmax(logits, dim=-1)
        return -(log_prob.exp() * log_prob).sum(-1)

    def mode(self, logits):
        return logits.argmax(-1)


class Gaussian(nn.Module):
    """Independent normals with mean [B, A] from the network and a standard deviation that is a parameter."""

    def __init__(self, action_shape: tuple[int, ...]):
        super().__init__()
        self.action_shape = action_shape
        self.log_std = nn.Parameter(torch.zeros(math.prod(action_shape)))

    def _log_std(self):
        return self.log_std.clamp(*LOG_STD_RANGE)

    @torch.no_grad()
    def bound_(self):
        """Put the parameter back into its range, in place: outside of it the clamp has no gradient to return by."""
        self.log_std.clamp_(*LOG_STD_RANGE)

    def _flat(self, action, mean):
        return action.reshape(mean.shape)

    def sample(self, mean, noise):
        action = mean + self._log_std().exp() * self._flat(noise, mean)
        return action.reshape(noise.shape)

    def log_prob(self, mean, action):
        log_std = self._log_std()
        z = (self._flat(action, mean) - mean) * torch.exp(-log_std)
        return (-0.5 * z**2 - log_std - 0.5 * math.log(2 * math.pi)).sum(-1)

    def entropy(self, mean):
        return (self._log_std() + 0.5 * math.log(2 * math.pi * math.e)).sum().expand(mean.shape[:-1])

    def mode(self, mean):
        return mean.unflatten(-1, self.action_shape) if self.action_shape else mean.squeeze(-1)


def to_arrays(module: nn.Module) -> dict[str, np.ndarray]:
    """Weights and statistics by name ("actor.layers.0.weight"), the layout of a policy file."""
    return {name: tensor.numpy(force=True).copy() for name, tensor in module.state_dict().items()}


def from_arrays(module: nn.Module, arrays: dict[str, np.ndarray]) -> None:
    """Load what `to_arrays` of either backend gave, in place: a captured function goes on with these.

    Raises:
        UsageError: a name or shape differs.
    """
    check_same_layout({name: tuple(t.shape) for name, t in module.state_dict().items()}, arrays)
    module.load_state_dict({name: torch.as_tensor(array) for name, array in arrays.items()})
