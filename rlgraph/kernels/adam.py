"""Gradient norm, clipping and Adam for all parameters in two launches."""

from collections.abc import Iterable

import torch
import triton
import triton.language as tl

from rlgraph.kernels.build import cdiv, interpreted

SUMS = 8  # numbers before the gradients in a row: sums of the loss's own
NORM, TAKEN = 5, 6  # of them, these two are filled in here
BETAS = (0.9, 0.999)
BLOCK = 2048 if interpreted() else 64  # parameters a program; an interpreter takes as long for a few as for many


@triton.jit
def _add_up(
    partial_ptr,
    total_ptr,
    squares_ptr,
    step_ptr,
    stopped_ptr,
    PROGRAMS,
    COLUMNS,
    scale,
    limited,
    limit,
    SUMS: tl.constexpr,
    TAKEN: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Adds up what the programs of a gradient kernel left, and decides whether a step follows."""
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = column < COLUMNS
    tile = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in range(0, PROGRAMS, ROWS):
        row = start + tl.arange(0, ROWS)
        within = here[None, :] & (row < PROGRAMS)[:, None]
        tile += tl.load(partial_ptr + row[:, None] * COLUMNS + column[None, :], mask=within, other=0.0)
    total = tl.sum(tile, axis=0) * scale
    gradient = tl.where(column < SUMS, 0.0, total)
    tl.store(squares_ptr + tl.program_id(0), tl.sum(gradient * gradient, axis=0))
    if tl.program_id(0) == 0:
        over = tl.sum(tl.where(column == limited, total, 0.0), axis=0) > limit
        stopped = tl.maximum(tl.load(stopped_ptr), over.to(tl.float32))
        tl.store(stopped_ptr, stopped)
        tl.store(step_ptr, tl.load(step_ptr) + 1.0 - stopped)
        total = tl.where(column == TAKEN, 1.0 - stopped, total)
    tl.store(total_ptr + column, total, mask=here)


@triton.jit
def _adam(
    parameter_ptr,
    exp_avg_ptr,
    exp_avg_sq_ptr,
    total_ptr,
    squares_ptr,
    step_ptr,
    stopped_ptr,
    rate_ptr,
    SIZE,
    parts,
    max_norm,
    eps,
    first_bounded,
    low,
    high,
    SUMS: tl.constexpr,
    NORM: tl.constexpr,
    BETA1: tl.constexpr,
    BETA2: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Adam (Kingma & Ba, 2015) of gradients scaled down to a norm, unless stopped."""
    part = tl.arange(0, PARTS)
    norm = tl.sqrt_rn(tl.sum(tl.load(squares_ptr + part, mask=part < parts, other=0.0), axis=0))
    step = tl.load(step_ptr).to(tl.float64)
    correction1 = (1.0 - tl.exp(step * tl.log(tl.full([], BETA1, tl.float64)))).to(tl.float32)
    correction2 = (1.0 - tl.exp(step * tl.log(tl.full([], BETA2, tl.float64)))).to(tl.float32)

    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = at < SIZE
    gradient = tl.load(total_ptr + SUMS + at, mask=here, other=0.0) * tl.minimum(max_norm / (norm + 1e-6), 1.0)
    exp_avg = tl.load(exp_avg_ptr + at, mask=here, other=0.0)
    exp_avg += (gradient - exp_avg) * (1.0 - BETA1)
    exp_avg_sq = tl.load(exp_avg_sq_ptr + at, mask=here, other=0.0) * BETA2 + gradient * gradient * (1.0 - BETA2)
    denominator = tl.sqrt_rn(exp_avg_sq) / tl.sqrt_rn(correction2) + eps
    parameter = tl.load(parameter_ptr + at, mask=here, other=0.0)
    parameter -= tl.load(rate_ptr) / correction1 * exp_avg / denominator
    parameter = tl.where(at < first_bounded, parameter, tl.minimum(tl.maximum(parameter, low), high))

    moves = here & (tl.load(stopped_ptr + at * 0) == 0.0)
    tl.store(exp_avg_ptr + at, exp_avg, mask=moves)
    tl.store(exp_avg_sq_ptr + at, exp_avg_sq, mask=moves)
    tl.store(parameter_ptr + at, parameter, mask=moves)
    if tl.program_id(0) == 0:
        tl.store(total_ptr + NORM, norm)


class FlatAdam:
    """Adam over parameters that lie one after the other in one tensor, as a kernel writes their gradients.

    Args:
        parameters: of a module, on one device; they become views of `flat`, whoever holds them sees the steps.
        learning_rate: [] float32 on the device, read at every step.
        max_norm: gradients of a larger norm, of all parameters together, are scaled down to it.
        eps: of Adam.
        bounded: how many numbers at the end of `flat` are put back into (low, high) after each step.

    Attributes:
        flat, exp_avg, exp_avg_sq: [size] float32.
        step: [] float32, steps taken.
    """

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        learning_rate: torch.Tensor,
        max_norm: float,
        eps: float,
        bounded: int = 0,
        bounds: tuple[float, float] = (0.0, 0.0),
    ):
        self.parameters = list(parameters)
        self.flat = torch.cat([p.detach().reshape(-1) for p in self.parameters])
        for parameter, view in zip(self.parameters, self._views(self.flat)):
            parameter.data = view
        self.exp_avg, self.exp_avg_sq = torch.zeros_like(self.flat), torch.zeros_like(self.flat)
        self.step = torch.zeros((), dtype=torch.float32, device=self.flat.device)
        self.learning_rate, self.max_norm, self.eps = learning_rate, max_norm, eps
        self.first_bounded, self.bounds = self.flat.numel() - bounded, bounds
        self._squares = torch.zeros(cdiv(self.columns, BLOCK), dtype=torch.float32, device=self.flat.device)

    @property
    def columns(self) -> int:
        """Numbers in a row of gradients: SUMS, and one for each parameter."""
        return SUMS + self.flat.numel()

    def state(self) -> list[dict[str, torch.Tensor]]:
        """For each parameter what torch.optim.Adam keeps of it; all have the one step count."""
        moments = zip(self._views(self.exp_avg), self._views(self.exp_avg_sq))
        return [{"step": self.step, "exp_avg": m, "exp_avg_sq": v} for m, v in moments]

    def take(self, partial_PC: torch.Tensor, total_C: torch.Tensor, rows: int, stopped, limited: int, limit: float):
        """One step, unless `stopped` is set, or becomes set because a sum is over its limit.

        Args:
            partial_PC: [programs, columns] float32, sums over rows.
            total_C: [columns] float32, filled: means over all rows; of the first SUMS entries TAKEN is 1 if the step
                was taken, and NORM the gradient's norm.
            rows: what the sums are divided by.
            stopped: [] float32 on the device, 0 or 1.
            limited, limit: which of the first SUMS entries may not exceed what.
        """
        P, C = partial_PC.shape
        grid = (cdiv(C, BLOCK),)
        _add_up[grid](
            partial_PC, total_C, self._squares, self.step, stopped, P, C, 1.0 / rows, limited, limit,
            SUMS, TAKEN, 32, BLOCK,
        )  # fmt: skip
        _adam[(cdiv(self.flat.numel(), BLOCK),)](
            self.flat, self.exp_avg, self.exp_avg_sq, total_C, self._squares, self.step, stopped, self.learning_rate,
            self.flat.numel(), grid[0], self.max_norm, self.eps, self.first_bounded, *self.bounds,
            SUMS, NORM, *BETAS, triton.next_power_of_2(grid[0]), BLOCK,
        )  # fmt: skip

    def _views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        parts = flat.split([p.numel() for p in self.parameters])
        return [part.view(p.shape) for part, p in zip(parts, self.parameters)]
