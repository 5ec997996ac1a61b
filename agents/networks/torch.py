"""Actor and critic in torch. Weights are named as in networks/jax.py: a policy file loads in either.

B stands for any leading shape, A for the action size.
"""

import itertools
import math

import gymnasium
import numpy as np
import torch
from torch import nn

from rlgraph.kernels.weights import LOG_STD_RANGE, Layer, Policy
from rlgraph.runs.checkpoint import check_same_layout

ACTIVATIONS = {"tanh": torch.tanh, "relu": torch.relu, "silu": nn.functional.silu}
LAYER_NORM_EPS = 1e-5


class MLP(nn.Module):
    """Fully connected layers with orthogonal weights (gain sqrt 2, `out_gain` at the end) and zero biases."""

    def __init__(self, sizes: list[int], activation: str, out_gain: float, generator: torch.Generator):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(i, o, dtype=torch.float32) for i, o in itertools.pairwise(sizes))
        self.activation = ACTIVATIONS[activation]
        for layer in self.layers:
            gain = out_gain if layer is self.layers[-1] else math.sqrt(2)
            nn.init.orthogonal_(layer.weight, gain, generator=generator)
            nn.init.zeros_(layer.bias)

    def forward(self, x):
        for layer in self.layers[:-1]:
            x = self.activation(layer(x))
        return self.layers[-1](x)


class Observer(nn.Module):
    """What networks over observations share: flattening, and normalising by a running mean and variance.

    Args:
        observation_space: of one environment.
    """

    def __init__(self, observation_space: gymnasium.spaces.Box):
        super().__init__()
        self.obs_ndim = len(observation_space.shape)
        inputs = math.prod(observation_space.shape)
        self.register_buffer("obs_mean", torch.zeros(inputs, dtype=torch.float32))
        self.register_buffer("obs_var", torch.ones(inputs, dtype=torch.float32))

    def flat(self, obs):
        """[B, *observation shape] -> [B, inputs]"""
        return _flat(obs, self.obs_ndim)

    def normalized(self, obs):
        """[B, *observation shape] -> [B, inputs] by the running mean and variance (0 and 1 if not kept)."""
        return (self.flat(obs) - self.obs_mean) / torch.sqrt(self.obs_var + 1e-8)


class ActorCritic(Observer):
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
        super().__init__(observation_space)
        inputs = math.prod(observation_space.shape)
        discrete = isinstance(action_space, gymnasium.spaces.Discrete)
        outputs = int(action_space.n) if discrete else math.prod(action_space.shape)
        self.activation = activation
        self.actor = MLP([inputs, *hidden, outputs], activation, 0.01, generator)
        self.critic = MLP([inputs, *hidden, 1], activation, 1.0, generator)
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
        """What a generated kernel reads: these very weights, so it sees their updates."""
        actor, critic = (
            tuple(Layer(layer.weight.detach(), layer.bias.detach()) for layer in network.layers)
            for network in (self.actor, self.critic)
        )
        log_std = self.distribution.log_std.detach() if isinstance(self.distribution, Gaussian) else None
        return Policy(actor, critic, self.activation, self.obs_mean, self.obs_var, log_std)


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
    """Independent normals with mean [B, A] from the network and a standard deviation that is a parameter.

    Both are in the unit of the actions, in which the deviation begins at 1: bounds of about -1 and 1 suit it best.
    """

    def __init__(self, action_shape: tuple[int, ...]):
        super().__init__()
        self.action_shape = action_shape
        self.log_std = nn.Parameter(torch.zeros(math.prod(action_shape), dtype=torch.float32))

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


class QNetwork(nn.Module):
    """Action values.

    Args:
        observation_space, action_space: of one environment; observations are flattened, actions counted from 0.
        hidden, activation: of the hidden layers.
        dueling: the outputs are a value and an advantage an action, which make up the action values (Wang et al.,
            2016).
        generator: on the CPU, for the initial weights.
    """

    def __init__(
        self,
        observation_space: gymnasium.spaces.Box,
        action_space: gymnasium.spaces.Discrete,
        hidden: tuple[int, ...],
        activation: str,
        dueling: bool,
        generator: torch.Generator,
    ):
        super().__init__()
        self.obs_ndim, self.dueling = len(observation_space.shape), dueling
        sizes = [math.prod(observation_space.shape), *hidden, int(action_space.n) + dueling]
        self.mlp = MLP(sizes, activation, 1.0, generator)

    def forward(self, obs):
        """[B, *observation shape] -> [B, actions]"""
        outputs = self.mlp(_flat(obs, self.obs_ndim))
        if not self.dueling:
            return outputs
        value, advantage = outputs[..., :1], outputs[..., 1:]
        return value + advantage - advantage.mean(-1, keepdim=True)  # eq. 9

    def greedy(self, obs):
        """The action of the greatest value."""
        return self(obs).argmax(-1)


class LayerNormQNetwork(nn.Module):
    """Action values, with layer normalisation (Ba et al., 2016) before each activation.

    Args:
        observation_space, action_space: of one environment; observations are flattened, actions counted from 0.
        hidden, activation: of the hidden layers.
        generator: on the CPU, for the initial weights.
    """

    def __init__(
        self,
        observation_space: gymnasium.spaces.Box,
        action_space: gymnasium.spaces.Discrete,
        hidden: tuple[int, ...],
        activation: str,
        generator: torch.Generator,
    ):
        super().__init__()
        self.obs_ndim = len(observation_space.shape)
        sizes = [math.prod(observation_space.shape), *hidden, int(action_space.n)]
        self.mlp = MLP(sizes, activation, 0.01, generator)
        norms = (nn.LayerNorm(width, eps=LAYER_NORM_EPS, dtype=torch.float32) for width in hidden)
        self.norms = nn.ModuleList(norms)

    def forward(self, obs):
        """[B, *observation shape] -> [B, actions]"""
        x = _flat(obs, self.obs_ndim)
        *layers, last = self.mlp.layers
        for layer, norm in zip(layers, self.norms):
            x = self.mlp.activation(norm(layer(x)))
        return last(x)

    def greedy(self, obs):
        """The action of the greatest value."""
        return self(obs).argmax(-1)


class SquashedActor(Observer):
    """A Gaussian over u, squashed by tanh and scaled into a bounded Box, its mean and deviation both of the network.

    Args: as ActorCritic's. Both bounds of every action must be finite.

    Attributes:
        log_volume: sum of log h over the half-widths h of the Box. A log-prob in units of the bounds is larger by it.
    """

    def __init__(
        self,
        observation_space: gymnasium.spaces.Box,
        action_space: gymnasium.spaces.Box,
        hidden: tuple[int, ...],
        activation: str,
        generator: torch.Generator,
    ):
        super().__init__(observation_space)
        self.action_shape = action_space.shape
        bounds = (action_space.low, action_space.high)
        low, high = (torch.tensor(bound, dtype=torch.float32).reshape(-1) for bound in bounds)
        # Not persistent: they belong to the environment, not to the weights.
        self.register_buffer("low", low, persistent=False)
        self.register_buffer("high", high, persistent=False)
        self.log_volume = torch.log(0.5 * (high - low)).sum().item()
        inputs = math.prod(observation_space.shape)
        self.actor = MLP([inputs, *hidden, 2 * len(low)], activation, 0.01, generator)

    def _parameters_of(self, obs):
        """Mean and log standard deviation of u, [B, A] each."""
        mean, unbounded = self.actor(self.normalized(obs)).chunk(2, dim=-1)
        low, high = LOG_STD_RANGE
        return mean, low + 0.5 * (high - low) * (1 + torch.tanh(unbounded))  # smooth, so it can come back

    def _scaled(self, squashed):
        """[B, A] in [-1, 1] -> [B, *action shape] in the Box."""
        action = self.low + 0.5 * (self.high - self.low) * (1 + squashed)
        return action.clamp(self.low, self.high).reshape(*action.shape[:-1], *self.action_shape)

    def act(self, obs, noise):
        """Sample: ([B, *observation shape], standard normals [B, *action shape]) -> (action, log-prob [B])."""
        mean, log_std = self._parameters_of(obs)
        noise = noise.reshape(mean.shape)
        u = mean + log_std.exp() * noise
        log_normal = -0.5 * noise**2 - log_std - 0.5 * math.log(2 * math.pi)
        log_slope = 2 * (math.log(2) - u - nn.functional.softplus(-2 * u))  # log(1 - tanh(u)^2), for any u
        log_scale = torch.log(0.5 * (self.high - self.low))
        return self._scaled(torch.tanh(u)), (log_normal - log_slope - log_scale).sum(-1)

    def uniform(self, noise):
        """An action uniform in the Box, from standard normals [B, *action shape] by their distribution function."""
        flat = noise.reshape(*noise.shape[: noise.ndim - len(self.action_shape)], -1)
        return self._scaled(2 * torch.special.ndtr(flat) - 1)

    def greedy(self, obs):
        """The squashed mean."""
        return self._scaled(torch.tanh(self._parameters_of(obs)[0]))

    def features(self, obs, action):
        """What critics see, [B, inputs + A]: normalised observations, and actions as they were before the scaling."""
        flat = action.reshape(*action.shape[: action.ndim - len(self.action_shape)], -1)
        squashed = 2 * (flat - self.low) / (self.high - self.low) - 1
        return torch.cat([self.normalized(obs), squashed], dim=-1)


class TwinCritic(nn.Module):
    """Two networks of the same task that start apart: [B, inputs] -> [2, B]."""

    def __init__(self, inputs: int, hidden: tuple[int, ...], activation: str, generator: torch.Generator):
        super().__init__()
        self.first = MLP([inputs, *hidden, 1], activation, 1.0, generator)
        self.second = MLP([inputs, *hidden, 1], activation, 1.0, generator)

    def forward(self, features):
        return torch.stack([self.first(features).squeeze(-1), self.second(features).squeeze(-1)])


def epsilon_greedy(value_BA, u_B, epsilon):
    """The action of the greatest value or, with probability `epsilon`, any: one uniform in [0, 1) decides both.

    Args:
        value_BA: action values.
        u_B: below `epsilon`, u / epsilon is a uniform again, and picks the action.
        epsilon: [] on the device.
    """
    n = value_BA.shape[-1]
    any_B = (u_B / epsilon * n).long().clamp(max=n - 1)  # an approximate division may give n
    return torch.where(u_B < epsilon, any_B, value_BA.argmax(-1))


def _flat(obs, obs_ndim: int):
    """[B, *observation shape] -> [B, inputs] float32, whatever the space's dtype."""
    return (obs.flatten(start_dim=-obs_ndim) if obs_ndim else obs.unsqueeze(-1)).float()


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
