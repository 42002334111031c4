from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

WARM = 0.02
"""Share of the time with a rising learning rate."""


class Descent:
    """AdamW."""

    def __init__(self, parameters: Iterable[Tensor], *, decay: float = 0.01) -> None:
        self._parameters = list(parameters)
        self._optimizer = torch.optim.AdamW(self._parameters, betas=(0.9, 0.95), weight_decay=decay)
        self.losses: list[float] = []

    def step(self, loss: Tensor, rate: float) -> None:
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._parameters, 1.0)
        self._optimizer.param_groups[0]["lr"] = rate
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.losses.append(loss.item())

    def mean(self, last: int) -> float:
        return sum(self.losses[-last:]) / last


def train(parameters: Iterable[Tensor], loss: Callable[[], Tensor], tokens: int, minutes: float, rate: float) -> None:
    """`loss` returns that of a new batch of `tokens` tokens. `rate`: the peak learning rate."""
    descent, began = Descent(parameters), time.monotonic()
    while (progress := (time.monotonic() - began) / 60 / minutes) < 1:
        descent.step(loss(), rate * min(progress / WARM + 0.01, 1 - progress))
        if (steps := len(descent.losses)) % 50 == 0:
            print(f"{progress:.0%}: {steps * tokens} tokens, loss {descent.mean(50):.3f}", flush=True)
