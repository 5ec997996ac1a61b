"""PPO's update in kernels: gather, forward, loss, backward and the sums of gradients in one, Adam in two more.

The loss is `ppo_loss` of ppo/torch.py, written out with its derivatives. Shape letters: T steps, B environments,
N = T * B, M minibatch rows, P programs, C columns of a row of gradients (see rlgraph.kernels.adam).
"""

import functools
import math

import torch

from rlgraph.agents.networks.torch import ActorCritic, Gaussian
from rlgraph.agents.ppo.config import PPOConfig
from rlgraph.environment import Environment
from rlgraph.kernels import build
from rlgraph.kernels.adam import NORM, SUMS, TAKEN, FlatAdam
from rlgraph.kernels.gradients import Differentiated
from rlgraph.kernels.networks import Network
from rlgraph.kernels.nodes import entries
from rlgraph.kernels.rollouts import networks
from rlgraph.kernels.shuffle import TILE, Shuffle
from rlgraph.kernels.text import INDENT, Text
from rlgraph.kernels.weights import LOG_STD_RANGE, rounded_up
from rlgraph.rollout import Rollout

# Sums over rows, before the gradients in a row: ppo_loss's metrics. Those of rlgraph.kernels.adam follow.
POLICY_LOSS, VALUE_LOSS, ENTROPY, APPROX_KL, CLIP_FRACTION = range(5)
assert (CLIP_FRACTION, NORM, TAKEN) == (4, 5, 6)
# Rows a tile, and warps: of eight shapes the fastest, see docs/performance.md. Each processor of the device has one
# program of the actor's and one of the critic's.
BLOCK, WARPS = 32, 4
MOST_WEIGHTS = 128 * 128 + 16 * 128  # of a network's hidden layers: they and their gradients stay on the chip


class FusedUpdates:
    """All updates of an iteration.

    Args:
        env: whose steps are learnt from.
        policy: its parameters become views of one tensor: a kernel given them before would not see the steps.
        config: see PPOConfig.
        learning_rate: [] float32 on the device.
        iteration: [] int64 on the device, another in every call of `run`.
        generator: on the device; a key is drawn from it here, and nothing by `run`.

    Attributes:
        stopped: [] float32, 1 once a minibatch of this iteration has gone beyond config.target_kl, else 0.
    """

    def __init__(
        self,
        env: Environment,
        policy: ActorCritic,
        config: PPOConfig,
        learning_rate: torch.Tensor,
        iteration: torch.Tensor,
        generator: torch.Generator,
    ):
        device = generator.device
        self.config, self.policy, self.iteration = config, policy, iteration
        bounded = policy.distribution.log_std.numel() if isinstance(policy.distribution, Gaussian) else 0
        self.adam = FlatAdam(policy.parameters(), learning_rate, config.max_grad_norm, 1e-5, bounded, LOG_STD_RANGE)
        self.shuffle = Shuffle(config.batch_size, config.num_epochs, config.num_minibatches, generator)
        self.rows = self.shuffle.size
        self.block = 512 if build.interpreted() else BLOCK  # an interpreter takes as long for a few rows as for many
        programs = min(build.cdiv(self.rows, self.block), build.processors(device))
        shapes = (programs, self.adam.columns), (config.num_updates, self.adam.columns), ()
        numbers = (torch.zeros(shape, dtype=torch.float32, device=device) for shape in shapes)
        self.partial, self.totals, self.stopped = numbers
        actor, critic = networks(env, policy.for_kernels(), config.precision, device)
        self._kernel = _kernel(env, actor, critic, config.normalize_advantage)

    def run(self, rollout: Rollout, advantage_TB: torch.Tensor) -> torch.Tensor:
        """All epochs over one rollout.

        Returns:
            [7]: sums over the updates of ppo_loss's metrics, of the gradient norm, and of 1 for each step taken.
        """
        self.begin(advantage_TB)
        for epoch in range(self.config.num_epochs):
            self.epoch(epoch, rollout, advantage_TB)
        return self.totals[:, : TAKEN + 1].sum(dim=0)

    def begin(self, advantage_TB: torch.Tensor) -> None:
        """What comes before the first epoch: an order of the steps for each."""
        self.stopped.zero_()
        with build.on(advantage_TB.device):
            self.shuffle.draw(self.iteration, advantage_TB)

    def epoch(self, epoch: int, rollout: Rollout, advantage_TB: torch.Tensor) -> None:
        """One pass over the steps. Once `stopped` is set it moves nothing, and can as well be left out."""
        minibatches = self.config.num_minibatches
        limit = math.inf if self.config.target_kl is None else self.config.target_kl
        with build.on(advantage_TB.device):
            for update in range(epoch * minibatches, (epoch + 1) * minibatches):
                self._gradients(rollout, advantage_TB, update)
                self.adam.take(self.partial, self.totals[update], self.rows, self.stopped, APPROX_KL, limit)

    def fits(self, rollout: Rollout) -> bool:
        """Whether the device has the memory that a program of the gradients' kernel shares. Compiles the kernel."""
        if build.interpreted():
            return True
        arguments, shape = self._arguments(rollout, rollout.reward_TB, 0)
        with build.on(self.partial.device):
            kernel = self._kernel.warmup(*arguments, grid=(1,), **shape)
        properties = torch.cuda.get_device_properties(self.partial.device)
        return kernel.metadata.shared <= properties.shared_memory_per_block_optin

    def _gradients(self, rollout: Rollout, advantage_TB: torch.Tensor, update: int) -> None:
        """Fill `partial` with sums over the rows of one minibatch."""
        arguments, shape = self._arguments(rollout, advantage_TB, update)
        self._kernel[(len(self.partial), 2)](*arguments, **shape)  # actor and critic

    def _arguments(self, rollout: Rollout, advantage_TB: torch.Tensor, update: int) -> tuple[list, dict]:
        config, policy, shuffle = self.config, self.policy.for_kernels(), self.shuffle
        arrays = [shuffle.order_UM[update], shuffle.moments_U[update], rollout.obs, rollout.action, rollout.log_prob_TB]
        arrays += [rollout.value_TB, advantage_TB, *(x for layer in (*policy.actor, *policy.critic) for x in layer)]
        arrays += [policy.obs_mean, policy.obs_var, *([] if policy.log_std is None else [policy.log_std])]
        clip_value = math.inf if config.clip_value is None else config.clip_value
        numbers = [float(x) for x in (config.clip_range, config.entropy_coef, config.value_coef, clip_value)]
        tiles = rounded_up(shuffle.moments_U.shape[1])
        constants = [self.adam.columns, tiles, TILE, self.block]
        return [*arrays, self.partial, self.rows, *numbers, *constants], {"num_warps": WARPS, "num_stages": 1}


def why_not(policy: ActorCritic) -> str | None:
    """Why the updates of a policy have no form here, in one line; None if they have. See also `FusedUpdates.fits`."""
    if not isinstance(policy.distribution, Gaussian) and policy.actor.layers[-1].weight.shape[0] < 2:
        return "there is nothing to learn about a single action"
    for name, network in (("actor", policy.actor), ("critic", policy.critic)):
        widths = [layer.weight.shape for layer in network.layers[:-1]]
        weights = sum(rounded_up(ins + 1) * rounded_up(outs) for outs, ins in widths[:1])
        weights += sum(rounded_up(ins) * rounded_up(outs) for outs, ins in widths[1:])
        if weights > MOST_WEIGHTS:
            return f"the {name} has {weights} weights before its last layer, and a kernel takes up to {MOST_WEIGHTS}"
    return None


@functools.cache
def _kernel(env: Environment, actor: Network, critic: Network, normalize: bool):
    """The kernel that sums gradients, compiled at its first launch."""
    module = build.load(
        f"{env.id}: PPO gradients in one kernel.", [GradientWriter(env, actor, critic, normalize).text()]
    )
    return module.gradients


class GradientWriter:
    """Writes the kernel that sums the gradients of `ppo_loss` over the rows of a minibatch.

    Programs are in two rows: one for the actor, one for the critic, which share nothing but the observations. Each
    goes through every P-th tile of the minibatch, and writes its sums when it is through.
    """

    def __init__(self, env: Environment, actor: Network, critic: Network, normalize: bool):
        self.env, self.actor, self.critic, self.normalize = env, actor, critic, normalize
        self.discrete = actor.relative
        self.actions = [] if self.discrete else entries("action", env.action_space.shape)
        self.outputs = [f"output_{k}" for k in actor.outputs]

    def text(self) -> str:
        """`gradients(*pointers, M, …, BLOCK)`, and a function for each network that it calls."""
        shared = ["order_ptr", "moments_ptr", "obs_ptr", "advantage_ptr", "obs_mean_ptr", "obs_var_ptr", "partial_ptr"]
        log_std = [] if self.discrete else ["log_std_ptr"]
        numbers = ["M", "COLUMNS", "TILES: tl.constexpr", "TILE: tl.constexpr", "BLOCK: tl.constexpr"]
        actor = [
            *shared,
            "action_ptr",
            "log_prob_ptr",
            *self.actor.parameters(),
            *log_std,
            "clip_range",
            "entropy_coef",
        ]
        critic = [*shared, "value_ptr", *self.critic.parameters(), "value_coef", "clip_value"]
        text = Text()
        self._function(text, "actor_gradients", [*actor, *numbers], self._actor())
        self._function(text, "critic_gradients", [*critic, *numbers], self._critic())
        pointers = ["order_ptr", "moments_ptr", "obs_ptr", "action_ptr", "log_prob_ptr", "value_ptr", "advantage_ptr"]
        pointers += [*self.actor.parameters(), *self.critic.parameters(), "obs_mean_ptr", "obs_var_ptr", *log_std]
        settings = ["clip_range", "entropy_coef", "value_coef", "clip_value"]
        called = [name.split(":")[0] for name in numbers]
        body = [f'"""{self.env.id}: sums over the rows of a minibatch, a row of numbers from each program."""']
        body += ["if tl.program_id(1) == 0:", f"{INDENT}actor_gradients({', '.join([*actor, *called])})"]
        body += ["else:", f"{INDENT}critic_gradients({', '.join([*critic, *called])})"]
        arguments = [*pointers, "partial_ptr", "M", *settings, *numbers[1:]]
        self._function(text, "gradients", arguments, body)
        return text.joined().rstrip("\n") + "\n"

    @staticmethod
    def _function(text: Text, name: str, arguments: list[str], body: list[str]) -> None:
        text.add(0, ["@triton.jit", f"def {name}(", *(f"{INDENT}{argument}," for argument in arguments), "):"])
        text.add(1, body)
        text.add(0, ["", ""])

    # ---- what both networks do around their loss

    def _through_the_rows(self, network: Network, first: int, gathered: dict, before, loss, after) -> list[str]:
        """Lines of a function: `before` the loop, `loss` from outputs to their gradients, `after` it.

        What is `gathered` by row is asked for one tile ahead, and which rows those are two tiles ahead: memory answers
        while the tile before is computed.
        """
        passes = Differentiated(network)
        outputs, gradients = self._names(network)
        gathered = {"rows": passes.gather("soon"), "advantage": self._gather("advantage"), **gathered}
        next_rows = "row = tl.load(order_ptr + at + stride, mask=at + stride < M, other=0).to(tl.int64)"
        ask = [f"next_{name} = {load}" for name, load in gathered.items()]
        in_loop = [
            "here = soon",
            *(f"{name} = next_{name}" for name in gathered),
            "at += stride",
            "soon = at < M",
            *ask,
            next_rows,
            *passes.forward(outputs),
            *loss,
            *passes.backward(gradients),
        ]
        return [
            f'"""Sums over every P-th tile of a minibatch, for the {network.name}."""',
            *before,
            *passes.start(),
            "partial_ptr += tl.program_id(0).to(tl.int64) * COLUMNS",
            "stride = tl.num_programs(0) * BLOCK",
            "at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)",
            "soon = at < M",
            "row = tl.load(order_ptr + at, mask=soon, other=0).to(tl.int64)",
            *ask,
            next_rows,
            "for _ in range(tl.program_id(0) * BLOCK, M, stride):",
            *(INDENT + line for line in in_loop),
            *passes.store(first),
            *after,
        ]

    @staticmethod
    def _names(network: Network) -> tuple[list[str], list[str]]:
        return [f"output_{k}" for k in network.outputs], [f"d_output_{k}" for k in network.outputs]

    @staticmethod
    def _gather(array: str, entries: int = 1, entry: int = 0) -> str:
        place = f"row * {entries} + {entry}" if entries > 1 else "row"
        return f"tl.load({array}_ptr + {place}, mask=soon, other=0)"

    @staticmethod
    def _sums(*columns: tuple[int, str]) -> tuple[list[str], list[str]]:
        """Lines that set the loss's own sums to zero, and that store them."""
        start = [f"{name} = tl.zeros([BLOCK], tl.float32)" for _, name in columns]
        return start, [f"tl.store(partial_ptr + {column}, tl.sum({name}, axis=0))" for column, name in columns]

    # ---- the actor's loss, eq. 7, and the entropy bonus

    def _actor(self) -> list[str]:
        start, store = self._sums(
            (POLICY_LOSS, "policy_loss"),
            (ENTROPY, "entropy"),
            (APPROX_KL, "approx_kl"),
            (CLIP_FRACTION, "clip_fraction"),
        )
        before = [*start, *self._moments()]
        if not self.discrete:
            before += self._load_log_std()
            at = SUMS + _parameters(self.actor) + _parameters(self.critic)
            store += [
                f"tl.store(partial_ptr + {at + k}, tl.sum(d_log_std_{k}, axis=0))" for k in range(len(self.actions))
            ]
        log_prob = self._log_prob_of_logits() if self.discrete else self._log_prob_of_means()
        loss = [*log_prob, *self._surrogate(), *(self._d_logits() if self.discrete else self._d_means())]
        gathered = {"old_log_prob": self._gather("log_prob")}
        if self.discrete:
            gathered["action"] = self._gather("action") + ".to(tl.int32)"
        gathered |= {name: self._gather("action", len(self.actions), k) for k, name in enumerate(self.actions)}
        return self._through_the_rows(self.actor, SUMS, gathered, before, loss, store)

    def _moments(self) -> list[str]:
        if not self.normalize:
            return ["center, spread = 0.0, 1.0"]
        return [
            "center, deviation = library.mean_and_deviation(moments_ptr, M, TILES, TILE)",
            "spread = 1.0 / (deviation + 1e-8)",
        ]

    def _surrogate(self) -> list[str]:
        """From log_prob to the derivative of the clipped surrogate by it, in `d_log_prob`."""
        return [
            "log_ratio = log_prob - old_log_prob",
            "ratio = tl.exp(log_ratio)",
            "advantage = (advantage - center) * spread",
            "clipped = tl.minimum(tl.maximum(ratio, 1.0 - clip_range), 1.0 + clip_range)",
            "surrogate = tl.minimum(ratio * advantage, clipped * advantage)",
            "policy_loss -= tl.where(here, surrogate, 0.0)",
            "approx_kl += tl.where(here, ratio - 1.0 - log_ratio, 0.0)",
            "clip_fraction += tl.where(here & (tl.abs(ratio - 1.0) > clip_range), 1.0, 0.0)",
            "moving = here & (ratio * advantage <= clipped * advantage)",
            "d_log_prob = tl.where(moving, -ratio * advantage, 0.0)",
        ]

    def _log_prob_of_logits(self) -> list[str]:
        """Logits are differences from the first one."""
        logits = self.outputs
        lines = ["top = tl.zeros([BLOCK], tl.float32)", *(f"top = tl.maximum(top, {logit})" for logit in logits)]
        lines += ["total = tl.exp(-top)", *(f"total += tl.exp({logit} - top)" for logit in logits)]
        lines += ["log_total = top + tl.log(total)", "log_p_0 = -log_total"]
        lines += [f"log_p_{k} = {logit} - log_total" for k, logit in enumerate(logits, 1)]
        actions = range(len(logits) + 1)
        lines += ["log_prob = log_p_0"]
        lines += [f"log_prob = tl.where(action == {k}, log_p_{k}, log_prob)" for k in actions[1:]]
        lines += ["entropy_of_row = -(" + " + ".join(f"tl.exp(log_p_{k}) * log_p_{k}" for k in actions) + ")"]
        return [*lines, "entropy += tl.where(here, entropy_of_row, 0.0)"]

    def _d_logits(self) -> list[str]:
        lines = ["d_entropy = tl.where(here, entropy_coef, 0.0)"]
        for k in self.actor.outputs:
            lines += [
                f"p_{k} = tl.exp(log_p_{k})",
                f"d_output_{k} = d_log_prob * (tl.where(action == {k}, 1.0, 0.0) - p_{k})",
                f"d_output_{k} += d_entropy * p_{k} * (log_p_{k} + entropy_of_row)",
            ]
        return lines

    def _load_log_std(self) -> list[str]:
        """Beyond its bounds a deviation is held, and has no gradient."""
        low, high = LOG_STD_RANGE
        lines = ["entropy_of_row = 0.0"]
        for k in range(len(self.actions)):
            lines += [
                f"log_std_{k} = tl.load(log_std_ptr + {k})",
                f"free_{k} = (log_std_{k} >= {low}) & (log_std_{k} <= {high})",
                f"log_std_{k} = tl.minimum(tl.maximum(log_std_{k}, {low}), {high})",
                f"entropy_of_row += log_std_{k} + {0.5 * math.log(2 * math.pi * math.e)}",
                f"d_log_std_{k} = tl.zeros([BLOCK], tl.float32)",
            ]
        return lines

    def _log_prob_of_means(self) -> list[str]:
        lines = ["log_prob = tl.zeros([BLOCK], tl.float32)"]
        for k, (action, mean) in enumerate(zip(self.actions, self.outputs)):
            lines += [
                f"z_{k} = ({action} - {mean}) * tl.exp(-log_std_{k})",
                f"log_prob += -0.5 * z_{k} * z_{k} - log_std_{k} - {0.5 * math.log(2 * math.pi)}",
            ]
        return [*lines, "entropy += tl.where(here, entropy_of_row, 0.0)"]

    def _d_means(self) -> list[str]:
        lines = ["d_entropy = tl.where(here, entropy_coef, 0.0)"]
        for k in range(len(self.actions)):
            lines += [
                f"d_output_{k} = d_log_prob * z_{k} * tl.exp(-log_std_{k})",
                f"d_log_std_{k} += tl.where(free_{k}, d_log_prob * (z_{k} * z_{k} - 1.0) - d_entropy, 0.0)",
            ]
        return lines

    # ---- the critic's

    def _critic(self) -> list[str]:
        start, store = self._sums((VALUE_LOSS, "value_loss"))
        loss = [
            "target = old_value + advantage",
            "change = output_0 - old_value",
            "error = output_0 - target",
            "near_error = old_value + tl.minimum(tl.maximum(change, -clip_value), clip_value) - target",
            "moving = (tl.abs(change) <= clip_value) | (error * error > near_error * near_error)",
            "worse = tl.where(moving, error, near_error)",
            "value_loss += tl.where(here, 0.5 * worse * worse, 0.0)",
            "d_output_0 = tl.where(here & moving, value_coef * error, 0.0)",
        ]
        gathered = {"old_value": self._gather("value")}
        return self._through_the_rows(self.critic, SUMS + _parameters(self.actor), gathered, start, loss, store)


def _parameters(network: Network) -> int:
    return sum((i + 1) * o for i, o in zip(network.sizes, network.sizes[1:]))
