"""What the tests of loops and launches on the device share."""

import types

import pytest
import torch

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


class Counting:
    """Counts up to a limit, and adds what it counted."""

    def __init__(self, device, limit, dtype=torch.bool):
        self.number, self.total = (torch.zeros((), dtype=torch.int64, device=device) for _ in range(2))
        self.limit = torch.tensor(limit, device=device)
        self.going_on = torch.ones((), dtype=dtype, device=device)

    @property
    def state(self):
        return [self.number, self.total]

    def count(self):
        self.number += 1
        self.total += self.number
        self.going_on.copy_(self.number < self.limit)

    def again(self, limit):
        self.number.zero_()
        self.total.zero_()
        self.limit.fill_(limit)
        self.going_on.fill_(1)


def fake_api(**functions):
    return types.SimpleNamespace(**{name: lambda *args, r=result: r for name, result in functions.items()})
