"""PPO trained until it is good enough by one launch of a CUDA graph, with no host in the loop."""

import torch

from rlgraph.agents.ppo.torch import PPO
from rlgraph.devices import torch_single_thread
from rlgraph.errors import UsageError
from rlgraph.graph.device.control import if_graph, while_graph
from rlgraph.kernels.rollouts import FusedEvaluation
from rlgraph.precision import torch_matmul_precision

REMEMBERED = 0.8  # of the episodes so far, an iteration later: the mean return is over about five iterations


class UntilSolved:
    """Training iterations, repeated by the device until a mean return reaches a target or the steps are used up.

    Args:
        trainer: in mode `fused`, with its updates in kernels.
        target: the mean return that is enough.
        eval_episodes: 0: that of the episodes that ended lately in training, where actions are drawn. Otherwise that of
            so many greedy ones, which the device plays after each iteration in which an episode has ended.

    With config.target_kl an epoch is left out where an earlier one has stopped the updates: the policy has the same
    bits as in `trainer.iterate()`, which computes those epochs and drops what comes of them.

    It ends at config.num_iterations of the trainer, those before it counted. There are no checkpoints, none of PPO's
    metrics, and no Ctrl-C until it is done.

    Attributes:
        target: [] float32 on the device; another value counts from the next `run` on.
        loop: the graph; its `iterations()` says how many there were.
        mean_return: [] float32 on the device, of training, NaN until an episode has ended.
        greedy_return: [] float32 on the device, of the last evaluation, NaN until there was one.
        evaluations: [] int64 on the device, evaluations of all runs.
        epochs: the branch of each epoch that can be left out: those after the first, with config.target_kl.

    Raises:
        UsageError: the trainer is another one: it draws from torch's generators, which do not advance inside a graph;
            there are episodes to evaluate, and the environment has no time limit; or their number makes no sense.
        GraphError, CaptureError: as `while_graph`.
    """

    def __init__(self, trainer: PPO, target: float, eval_episodes: int = 0):
        if getattr(trainer, "updates", None) is None:
            raise UsageError("training in one launch needs PPO in mode fused, with its updates in kernels")
        if eval_episodes < 0:
            raise UsageError(f"eval_episodes must be at least 0, but is {eval_episodes}")
        self.trainer, device = trainer, trainer.device
        config, policy = trainer.config, trainer.policy.for_kernels()
        self._evaluation = None
        if eval_episodes:
            self._evaluation = FusedEvaluation(trainer.env, policy, eval_episodes, trainer.generator, config.precision)
        numbers = {"dtype": torch.float32, "device": device}
        self.target = torch.tensor(float(target), **numbers)
        self.mean_return, self.greedy_return = (torch.full((), torch.nan, **numbers) for _ in range(2))
        self.evaluations = torch.zeros((), dtype=torch.int64, device=device)
        self._sums = torch.zeros(2, **numbers)  # of returns and of episodes
        self._advantage = torch.zeros(config.batch_size, **numbers)  # what one part of the graph leaves to others
        self._going_on, self._updating, self._ended, self._solved = (
            torch.zeros((), dtype=torch.bool, device=device) for _ in range(4)
        )
        with torch_matmul_precision(config.precision):
            self.loop = self._captured()
        self.loop.replay()  # does nothing, but takes the graph to the device

    def run(self) -> None:
        """Train: one launch, which is not waited for. Where no iterations are left it does nothing."""
        torch.lt(self.trainer.iteration, self.trainer.config.num_iterations, out=self._going_on)
        with torch_matmul_precision(self.trainer.config.precision), torch_single_thread(self.trainer.device):
            self.loop.replay()

    def solved(self) -> bool:
        """Whether the last iteration reached the target. Waits for the current stream, on which it was launched."""
        return bool(self._solved)

    # ---- the graph

    def _captured(self):
        config = self.trainer.config
        # A launch of a kernel is baked in with the rows it reads, so each epoch has a branch of its own.
        self._certain = config.num_epochs if config.target_kl is None else 1
        state = [self.trainer._state(), self._sums, self.mean_return, self._ended]
        state += [self.greedy_return, self.evaluations, self._going_on, self._solved]
        state += [] if self._evaluation is None else [self._evaluation.state()]
        watch = False  # as a trainer's own iterations
        body = [self._begin]
        self.epochs = []
        for epoch in range(self._certain, config.num_epochs):
            self.epochs.append(if_graph(self._updating, lambda e=epoch: self._epoch(e), state=state, watch=watch))
        body += [*self.epochs, self._end]
        if self._evaluation is not None:
            body.append(if_graph(self._ended, self._evaluate, state=state, watch=watch))
        return while_graph(body, self._going_on, state=state, most=config.num_iterations, watch=watch)

    def _begin(self) -> None:
        _, episodes, batch = self.trainer._before_updates()
        self._sums.mul_(REMEMBERED).add_(torch.stack([episodes.return_sum, episodes.count]))
        self.mean_return.copy_(self._sums[0] / self._sums[1])
        self._ended.copy_(episodes.count > 0)
        self._advantage.copy_(batch.advantage)
        self.trainer.updates.begin(self._advantage)
        for epoch in range(self._certain):
            self._epoch(epoch)

    def _epoch(self, epoch: int) -> None:
        updates = self.trainer.updates
        updates.epoch(epoch, self.trainer.collector.rollout, self._advantage)
        torch.eq(updates.stopped, 0, out=self._updating)

    def _end(self) -> None:
        self.trainer._after_updates(self.trainer.collector.rollout)
        if self._evaluation is None:
            torch.ge(self.mean_return, self.target, out=self._solved)  # not where it is NaN
        else:
            self._solved.zero_()  # until there is an evaluation
        self._go_on()

    def _evaluate(self) -> None:
        self.greedy_return.copy_(self._evaluation.play().mean())
        self.evaluations += 1
        torch.ge(self.greedy_return, self.target, out=self._solved)
        self._go_on()

    def _go_on(self) -> None:
        self._going_on.copy_(~self._solved & (self.trainer.iteration < self.trainer.config.num_iterations))
