"""Vector environments in torch: one step is a function over fixed tensors, which a CUDA graph can replay."""

import contextlib
import functools
import warnings
from collections.abc import Callable

import array_api_compat.torch as xp
import numpy as np
import torch
from torch.utils._pytree import tree_leaves, tree_map

from rlgraph import modes
from rlgraph.devices import torch_device
from rlgraph.environment import select
from rlgraph.graph.auto import check_that_it_runs, first_that_works
from rlgraph.graph.capture import capture
from rlgraph.graph.compile import compiled, graph_breaks_allowed
from rlgraph.rollout.torch import uniform
from rlgraph.vector import base
from rlgraph.vector.arrays import copied, plain_tensor


class TorchVectorEnv(base.VectorEnv):
    """See `rlgraph.vector.base.VectorEnv`. `device` is a `torch.device`; no gradient flows through a step."""

    array_type = torch.Tensor

    @torch.inference_mode(False)  # what is made here is updated in place, whatever mode a step is called in
    def __init__(self, env, spec, num_envs, device, mode, seed, autoreset_mode, output):
        self.device = torch_device(device)
        self._on_gpu = self.device.type == "cuda"
        in_turn = modes.in_turn(mode, modes.resolve("torch", mode, self._on_gpu), self._on_gpu)
        self._generator = torch.Generator(self.device)
        self._graph = self._steps = None
        super().__init__(env, spec, num_envs, seed, autoreset_mode, output)
        carry, _ = env.reset(xp, torch.zeros(num_envs, env.reset_draws, dtype=torch.float32, device=self.device))
        # Contiguous copies: a definition may return views of one tensor, which cannot be updated one by one.
        self._carry = tree_map(lambda t: t.clone(memory_format=torch.contiguous_format), carry)
        self._out_of_range = torch.zeros((), dtype=torch.bool, device=self.device)
        attempts = {mode: functools.partial(self._prepare, mode, fallback=mode != in_turn[0]) for mode in in_turn}
        self.mode, self._run, self.stopped = first_that_works(attempts)
        if self.stopped is not None:
            warnings.warn(f"{env.id} runs in mode {self.mode}: {self.stopped}", stacklevel=3)

    def _prepare(self, mode: str, fallback: bool) -> Callable:
        """The step as the mode runs it: actions -> results, with carry and flag updated in place."""
        chosen = modes.MODES["torch"][mode]
        if chosen.fused:
            return self._prepare_fused()
        update, draws = self._update, self.env.draws
        if modes.compiles(mode, self._on_gpu):
            with graph_breaks_allowed() if fallback else contextlib.nullcontext():
                update = compiled(update)

        @torch.no_grad()
        def vector_step(actions):
            return update(actions, self._uniform(draws))

        example = self._to_device(self._some_actions())
        tensors = {"state": (self._carry, self._out_of_range), "generators": [self._generator]}
        if not chosen.graph:
            if fallback and chosen.compile:
                check_that_it_runs(vector_step, example, **tensors)
            return vector_step
        self._graph = capture(vector_step, example, **tensors, watch=False)  # all that it reads is rlgraph's own
        return self._graph.replay

    def _prepare_fused(self) -> Callable:
        """The same by one kernel, which also takes several steps in a launch."""
        from rlgraph.kernels.rollouts import FusedSteps

        autoreset = self.autoreset_mode.value
        self._steps = FusedSteps(self.env, self._carry, self._out_of_range, self._generator, autoreset)
        example = self._to_device(self._some_actions())
        state = (self._carry, self._out_of_range, self._steps.counter)

        def vector_step(actions):
            return tuple(result[0] for result in self._steps.take(actions[None]))

        self._graph = capture(vector_step, example, state=state, watch=False)
        return self._graph.replay

    def _some_actions(self) -> np.ndarray:
        return np.full((self.num_envs, *self.single_action_space.shape), self._low if self._discrete else 0.0)

    def _update(self, actions, u_BN):
        if self._discrete:
            valid = actions.clamp(self._low, self._high)
            self._out_of_range.logical_or_((valid != actions).any())
            actions = valid
        step = self.env.step(xp, self._carry, actions, u_BN, self.autoreset_mode.value)
        # Cloned first: a definition may hand on leaves of the old carry, which the copies overwrite.
        step = tree_map(torch.clone, step)
        for old, new in zip(tree_leaves(self._carry), tree_leaves(step.carry)):
            old.copy_(new)
        return tuple(step[1:])

    def _advance(self, actions):
        return self._run(actions)

    def _advance_several(self, actions):
        if self._steps is None:
            return super()._advance_several(actions)
        return self._steps.take(actions)

    def _stack(self, arrays):
        return torch.stack(arrays)

    @torch.no_grad()
    def _start(self, env, mask_B):
        carry, _ = env.reset(xp, self._uniform(env.reset_draws))
        if mask_B is not None:
            carry = select(xp, torch.from_numpy(copied(mask_B, np.bool_)).to(self.device), carry, self._carry)
        for old, new in zip(tree_leaves(self._carry), tree_leaves(carry)):
            old.copy_(new)
        return env.definition.observe(xp, carry.state, self.env.params)

    def _uniform(self, draws):
        return uniform(self._generator, self.num_envs, draws)

    def _seed(self, seed):
        self._generator.manual_seed(seed)
        if self._steps is not None:
            self._steps.restart()

    def _own_array(self, array):
        array = plain_tensor(array)
        return array if array.is_cuda and self._on_gpu else array.numpy(force=True)

    def _imported(self, array):
        return torch.from_dlpack(array) if hasattr(array, "__dlpack__") else torch.as_tensor(array, device=self.device)

    def _kind(self, array):
        if isinstance(array, np.ndarray):
            return super()._kind(array)
        if array.dtype.is_floating_point or array.dtype.is_complex:
            return "f" if array.dtype.is_floating_point else "c"
        return "b" if array.dtype == torch.bool else "i"

    def _to_device(self, actions):
        if isinstance(actions, np.ndarray):
            dtype = np.int64 if self._discrete else np.float32
            return torch.from_numpy(copied(actions, dtype)).to(self.device)
        return actions.to(self.device, torch.int64 if self._discrete else torch.float32)

    def _to_host(self, array):
        return array.to("cpu", copy=True).numpy()

    def _keepable(self, array):
        return array if self.mode == "eager" else array.clone()

    def _take_flag(self):
        flag = bool(self._out_of_range)
        self._out_of_range.zero_()
        return flag

    def _release(self):
        if self._graph is not None:
            self._graph.reset()
        self._carry = self._out_of_range = self._graph = self._steps = self._run = None
