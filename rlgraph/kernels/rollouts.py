"""Rollouts in torch by one generated kernel: environments and policy stay on the chip for all T steps.

Shape letters: T steps, B environments, A action entries.
"""

import functools
import itertools

import array_api_compat.torch as xp
import gymnasium
import torch

from rlgraph.environment import SAME_STEP, Carry, Environment
from rlgraph.errors import UsageError
from rlgraph.kernels import build
from rlgraph.kernels.evaluation_writer import EvaluationWriter
from rlgraph.kernels.networks import Network, values_kernel
from rlgraph.kernels.rollout_writer import RolloutWriter
from rlgraph.kernels.weights import ACTIVATIONS, MOST_OUTPUTS, Layer, Policy
from rlgraph.rollout import EpisodeTotals, Rollout
from rlgraph.rollout.torch import copy_into, empty_rollout, owned, torch_type, uniform

WIDEST = 128  # hidden units: the weights between two layers must fit into the registers of a few warps
PROGRAMS_A_PROCESSOR = 16  # of the kernel that values observations
MOST_ROWS = max(block for block, _ in build.CONFIGS)


class FusedCollector:
    """Steps `num_envs` environments with an MLP policy, `num_steps` steps a launch.

    Args:
        env: the environment: each step an expression of one environment's own numbers.
        policy: its arrays are read at every launch, so updates in place take effect; None: random actions, uniform
            integers or normals of half the widest range.
        num_envs, num_steps: B and T.
        generator: on the device; starts and a key are drawn from it here and by `reset`, nothing by `collect`.
        precision: of the products between hidden layers, see rlgraph.precision; with "tf32" and "bf16" tanh is the
            hardware's.

    The random numbers are Philox's of that key, of the environment, and of the number of steps taken so far, which is
    on the device: every launch draws fresh ones, also in a graph that is launched without torch's doing, and torch has
    nothing to set before a replay. See `rlgraph.kernels.library.uniforms`.

    The interface is `rlgraph.rollout.torch.Collector`'s: `collect` only launches kernels, on the same addresses in
    every call, and its results are overwritten by the next.

    Raises:
        UsageError: the environment (a TraceError, which names the line) or the policy has no form inside a kernel; or
            there are more environments than a kernel counts.
    """

    def __init__(
        self,
        env: Environment,
        policy: Policy | None,
        num_envs: int,
        num_steps: int,
        generator: torch.Generator,
        precision: str,
    ):
        build.check_device(generator.device)
        build.check_number(num_envs)
        self.env, self.policy = env, policy
        self.num_envs, self.num_steps = num_envs, num_steps
        self.generator, self.device = generator, generator.device
        values = policy is not None and policy.critic is not None
        self.rollout = empty_rollout(env, num_steps, num_envs, self.device, values)
        form, precision = _form(env, policy), _precision(precision, self.device)
        self._rollout_kernel, self._values_kernel = _kernels(env, form, precision)
        self.carry = _owned_carry(env.reset(xp, uniform(generator, num_envs, env.reset_draws))[0])
        self.return_B = torch.zeros(num_envs, dtype=torch.float32, device=self.device)
        self.key = build.drawn_key(generator)
        self.counter = torch.zeros(1, dtype=torch.int64, device=self.device)
        self._totals = torch.zeros(3, num_envs, dtype=torch.float32, device=self.device)
        # Many programs fill the card, each with as many steps as it can have: it loads the weights once.
        programs = PROGRAMS_A_PROCESSOR * build.processors(self.device)
        self._steps_a_program = min(num_steps + 1, -(-(num_steps + 1) * num_envs // (16 * programs)))
        room = (num_steps + 1) * build.cdiv(num_envs, MOST_ROWS) * MOST_ROWS if values else 0
        self._ended = torch.empty(room, dtype=torch.int64, device=self.device)

    def state(self) -> dict:
        """The tensors that one `collect` leaves to the next, by name."""
        return {"carry": self.carry, "return_B": self.return_B, "key": self.key, "counter": self.counter}

    def reset(self) -> None:
        """Start new episodes everywhere under a new key, in place: safe for a captured `collect`.

        After `generator.manual_seed` what follows repeats itself.
        """
        copy_into(self.carry, self.env.reset(xp, uniform(self.generator, self.num_envs, self.env.reset_draws))[0])
        self.return_B.zero_()
        self.key.random_(generator=self.generator)
        self.counter.zero_()

    @torch.no_grad()
    def collect(self) -> tuple[Rollout, EpisodeTotals]:
        """Take T steps. Returns the buffers and the totals of the episodes that ended, [] each."""
        steps, B = self.rollout, self.num_envs
        arrays = [self.key, self.counter, *self.carry.state, self.carry.elapsed_B, self.return_B, self._totals]
        arrays += [*self._parameters("actor"), steps.action, steps.log_prob_TB, steps.obs, steps.reward_TB]
        arrays += [steps.terminated_TB, steps.truncated_TB, steps.final_obs]
        with build.on(self.device):
            self._rollout_kernel[lambda meta: (build.cdiv(B, meta["BLOCK"]),)](*arrays, self.num_steps, B)
            if steps.value_TB is not None:
                self._values()
        self.counter += self.num_steps
        return steps, EpisodeTotals(*self._totals.sum(dim=1).unbind())

    def _values(self) -> None:
        steps, T, B = self.rollout, self.num_steps, self.num_envs
        arrays = [steps.obs, steps.final_obs, steps.terminated_TB, steps.truncated_TB, *self._parameters("critic")]
        arrays += [steps.value_TB, steps.final_value_TB, self._ended]

        def grid(meta):
            return build.cdiv(B, meta["BLOCK"]), build.cdiv(T + 1, self._steps_a_program)

        self._values_kernel[grid](*arrays, T, B, self._steps_a_program)

    def _parameters(self, network: str) -> list[torch.Tensor]:
        if self.policy is None:
            return []
        arrays, log_std = _parameters(self.policy, network), self.policy.log_std
        return arrays if network == "critic" or log_std is None else [*arrays, log_std]


class FusedEvaluation:
    """Plays the greedy policy in `num_episodes` environments, one episode each, in one launch.

    Args:
        env: the environment, with a time limit: each step an expression of one environment's own numbers.
        policy: its arrays are read at every launch, so updates in place take effect. The action is the one of the
            greatest logit, the lowest of equal ones, or the mean.
        num_episodes: B.
        generator: on the device; a key is drawn from it here, and nothing by `play`.
        precision: as FusedCollector's; and random numbers as there.

    Raises:
        UsageError: there is no time limit; or the environment (a TraceError, which names the line) or the policy has no
            form inside a kernel. `why_not` says so beforehand.
    """

    def __init__(self, env: Environment, policy: Policy, num_episodes: int, generator: torch.Generator, precision: str):
        build.check_device(generator.device)
        if env.max_episode_steps is None:
            raise UsageError(
                f"environment {env.id!r} has no time limit, which evaluation needs: give it max_episode_steps"
            )
        self.env, self.policy, self.num_episodes = env, policy, num_episodes
        self.generator, self.device = generator, generator.device
        self._kernel = _evaluation_kernel(env, _form(env, policy), _precision(precision, self.device))
        self.returns_B = torch.zeros(num_episodes, dtype=torch.float32, device=self.device)
        self.key = build.drawn_key(generator)
        self.counter = torch.zeros(1, dtype=torch.int64, device=self.device)

    def state(self) -> dict:
        """The tensor that one `play` leaves to the next, by name."""
        return {"counter": self.counter}

    @torch.no_grad()
    def play(self) -> torch.Tensor:
        """Play from fresh starts to the ends. It only launches kernels, on the same addresses in every call.

        Returns:
            [num_episodes] float32, undiscounted returns; overwritten by the next call.
        """
        arrays = [self.key, self.counter, *_parameters(self.policy, "actor"), self.returns_B]
        with build.on(self.device):
            self._kernel[lambda meta: (build.cdiv(self.num_episodes, meta["BLOCK"]),)](*arrays, self.num_episodes)
        self.counter += 1 + self.env.max_episode_steps  # the start draws as a step does
        return self.returns_B


class FusedSteps:
    """Steps environments by actions that come from outside, K steps a launch.

    Args:
        env: the environment.
        carry: of all environments, on the device; updated in place.
        out_of_range: [] bool on the device, set where a Discrete action is not one; the nearest is taken.
        generator: on the device; `restart` draws a key from it, and `take` nothing.
        autoreset: as for `Environment.step`.

    Raises:
        UsageError: the environment has no form inside a kernel (a TraceError, which names the line), or there are more
            of it than a kernel counts.
    """

    def __init__(self, env: Environment, carry: Carry, out_of_range, generator: torch.Generator, autoreset: str):
        build.check_device(generator.device)
        build.check_number(len(carry.done_B))
        self.env, self.carry, self.out_of_range, self.generator = env, carry, out_of_range, generator
        self.device = generator.device
        self._discrete = isinstance(env.action_space, gymnasium.spaces.Discrete)
        self._kernel = _steps_kernel(env, autoreset)
        self.key = build.drawn_key(generator)
        self.counter = torch.zeros(1, dtype=torch.int64, device=self.device)

    def restart(self) -> None:
        """Draw numbers from the beginning, under another key; in place, so a captured `take` does."""
        self.key.random_(generator=self.generator)
        self.counter.zero_()

    @torch.no_grad()
    def take(self, actions: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Take K steps.

        Args:
            actions: [K, B] int64 (Discrete) or [K, B, *action shape] float32 (Box).

        Returns:
            obs and final_obs [K, B, *observation shape], reward, terminated and truncated [K, B], in the order of
            `Step`: new tensors.
        """
        K, B = actions.shape[:2]
        results = self._empty(K, B)
        arrays = [self.key, self.counter, *self.carry.state, self.carry.elapsed_B, self.carry.done_B]
        arrays += [actions.contiguous(), *([self.out_of_range] if self._discrete else []), *results]
        with build.on(self.device):
            self._kernel[lambda meta: (build.cdiv(B, meta["BLOCK"]),)](*arrays, K, B)
        self.counter += K
        return results

    def _empty(self, K: int, B: int) -> tuple[torch.Tensor, ...]:
        space = self.env.observation_space
        like = torch_type(space.dtype)
        obs, final_obs = (torch.empty((K, B, *space.shape), dtype=like, device=self.device) for _ in range(2))
        reward = torch.empty(K, B, dtype=torch.float32, device=self.device)
        terminated, truncated = (torch.empty(K, B, dtype=torch.bool, device=self.device) for _ in range(2))
        return obs, reward, terminated, truncated, final_obs


def why_not(env: Environment, policy: Policy | None, device: torch.device) -> str | None:
    """Why rollouts of this environment with this policy cannot be fused, in one line; None if they can."""
    try:
        build.check_device(device)
        RolloutWriter(env, SAME_STEP, _networks(env, _form(env, policy), "ieee")[0])
    except UsageError as error:
        return str(error)
    return None


def _form(env: Environment, policy: Policy | None) -> tuple | None:
    """What a kernel's text depends on: the sizes of actor and critic, and their activation."""
    if policy is None:
        return None
    if policy.activation not in ACTIVATIONS:
        raise UsageError(f"a kernel has no activation {policy.activation!r}; it has {', '.join(ACTIVATIONS)}")
    discrete = isinstance(env.action_space, gymnasium.spaces.Discrete)
    if discrete != (policy.log_std is None):
        raise UsageError("a kernel needs logits for a Discrete action space, and means with a log_std for a Box")
    actor, critic = (_sizes(layers) for layers in (policy.actor, policy.critic or ()))
    for width in (*actor[1:-1], *critic[1:-1]):
        if width > WIDEST:
            raise UsageError(f"a kernel holds hidden layers of up to {WIDEST} units, not {width}; use mode graph")
    if actor[-1] > MOST_OUTPUTS:
        raise UsageError(f"a kernel chooses among up to {MOST_OUTPUTS} actions, not {actor[-1]}; use mode graph")
    return actor, critic, policy.activation


def _sizes(layers: tuple[Layer, ...]) -> tuple[int, ...]:
    return (layers[0].weight.shape[1], *(layer.weight.shape[0] for layer in layers)) if layers else ()


def networks(env: Environment, policy: Policy, precision: str, device: torch.device) -> tuple[Network, Network | None]:
    """The forms that a policy's actor and critic (None without one) have in kernels.

    Raises:
        UsageError: the policy has no form inside a kernel.
    """
    return _networks(env, _form(env, policy), _precision(precision, device))


def _networks(env: Environment, form: tuple | None, precision: str) -> tuple[Network | None, Network | None]:
    if form is None:
        return None, None
    actor, critic, activation = form
    discrete = isinstance(env.action_space, gymnasium.spaces.Discrete)
    return (
        Network("actor", actor, activation, precision, relative=discrete),
        Network("critic", critic, activation, precision) if critic else None,
    )


@functools.cache
def _kernels(env: Environment, form: tuple | None, precision: str):
    """The rollout's and the values' kernels (None without a critic), compiled at their first launch."""
    actor, critic = _networks(env, form, precision)
    writer = RolloutWriter(env, SAME_STEP, actor)
    kernels = [writer.kernel()] + ([values_kernel(env, critic)] if critic else [])
    module = build.load(f"{env.id}: rollouts in one kernel.", kernels)
    rollout = build.tuned(module.rollout, writer.carried())
    return rollout, build.tuned(module.values, []) if critic else None


@functools.cache
def _steps_kernel(env: Environment, autoreset: str):
    writer = RolloutWriter(env, autoreset, None, given=True)
    module = build.load(f"{env.id}: steps by given actions in one kernel.", [writer.kernel()])
    return build.tuned(module.rollout, writer.carried())


@functools.cache
def _evaluation_kernel(env: Environment, form: tuple, precision: str):
    writer = EvaluationWriter(env, _networks(env, form, precision)[0])
    module = build.load(f"{env.id}: greedy episodes in one kernel.", [writer.kernel()])
    return build.tuned(module.evaluation, writer.carried())


def _parameters(policy: Policy, network: str) -> list[torch.Tensor]:
    """What a network's kernel reads: weights and biases, and what normalises observations."""
    return [*itertools.chain(*getattr(policy, network)), policy.obs_mean, policy.obs_var]


def _precision(asked: str, device: torch.device) -> str:
    """A CPU computes in float32 whatever the setting, see rlgraph.precision."""
    return asked if device.type == "cuda" else "ieee"


def _owned_carry(carry):
    return type(carry)(owned(carry.state), *map(owned, carry[1:]))
