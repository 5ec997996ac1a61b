"""PPO trained until it is good enough by one launch of a CUDA graph, with no host in the loop."""

import torch

from rlgraph.agents.ppo import METRICS
from rlgraph.agents.ppo_torch import PPO
from rlgraph.devices import torch_single_thread
from rlgraph.errors import UsageError
from rlgraph.graph.control import while_graph
from rlgraph.precision import torch_matmul_precision

REMEMBERED = 0.8  # of the episodes so far, an iteration later: the mean return is over about five iterations
RETURN_SUM, EPISODES = METRICS.index("episode_return_sum"), METRICS.index("episodes")


class UntilSolved:
    """Training iterations, repeated by the device until the mean return reaches a target or the steps are used up.

    Args:
        trainer: in mode `fused`, with its updates in kernels. Its random numbers are drawn under the keys drawn here
            from now on, and told apart by what the device counts.
        target: mean return of the episodes that ended lately, as they were played in training (not greedily).

    The most iterations are config.num_iterations. There are no checkpoints, no metrics but the last, and no Ctrl-C
    until it is done.

    Attributes:
        target: [] float32 on the device; another value counts from the next `run` on.
        loop: the graph; its `iterations()` says how many there were.
        mean_return: [] float32 on the device, NaN until an episode has ended.

    Raises:
        UsageError: the trainer draws from torch's generators, which do not advance inside a graph.
        GraphError, CaptureError: as `while_graph`.
    """

    def __init__(self, trainer: PPO, target: float):
        if getattr(trainer, "updates", None) is None:
            raise UsageError("training in one launch needs PPO in mode fused, with its updates in kernels")
        for part in (trainer.collector, trainer.updates.shuffle):
            part.hold_key()
        self.trainer, device = trainer, trainer.device
        self.target = torch.tensor(float(target), device=device)
        self._going_on = torch.zeros((), dtype=torch.bool, device=device)
        self._sums = torch.zeros(2, device=device)  # of returns and of episodes
        self.mean_return = torch.full((), torch.nan, device=device)
        state = [trainer._state(), self._sums, self.mean_return]
        with torch_matmul_precision(trainer.config.precision):
            most = trainer.config.num_iterations
            # Not watched, like a trainer's own iterations.
            self.loop = while_graph(self._iteration, self._going_on, state=state, most=most, watch=False)
        self.loop.replay()  # does nothing, but takes the graph to the device

    def run(self) -> None:
        """Train: one launch, which is not waited for."""
        self._going_on.fill_(True)
        with torch_matmul_precision(self.trainer.config.precision), torch_single_thread(self.trainer.device):
            self.loop.replay()

    def _iteration(self) -> None:
        metrics = self.trainer._iteration()
        self._sums.mul_(REMEMBERED).add_(torch.stack([metrics[RETURN_SUM], metrics[EPISODES]]))
        self.mean_return.copy_(self._sums[0] / self._sums[1])
        self._going_on.copy_(~(self.mean_return >= self.target))  # NaN goes on
