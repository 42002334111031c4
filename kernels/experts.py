"""A mixture of experts in plain PyTorch: the judge of kernels/cpu/decoder/experts.cpp. And what keeps the weights of
experts on a disk, of which a step reads those that its tokens choose."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from quire.kernels.backend import NO_ADAPTERS
from quire.kernels.routing import Experts, route

if TYPE_CHECKING:
    from quire.kernels.backend import Backend


class ReferenceMixture:
    """Expert by expert: each multiplies the rows that chose it, and adds to their sums. So a row's sum has an order of
    its own, whatever the other rows chose."""

    def __init__(self, backend: Backend, experts: Experts) -> None:
        """`backend`: computes the gates."""
        self._backend = backend
        self._experts = experts

    def __call__(self, x: Tensor, routed: Tensor | None = None) -> Tensor:
        """routed: what the router reads; None: x."""
        experts, routed = self._experts, x if routed is None else routed
        scores = experts.router(routed.float() if experts.float_router else routed, NO_ADAPTERS)
        chosen, shares = route(scores, experts.routing, experts.correction)
        shares = shares if experts.factors is None else shares * experts.factors[chosen]
        total = torch.zeros(x.shape, dtype=shares.dtype, device=x.device)
        for expert in chosen.unique().tolist():
            if not 0 <= (place := expert - experts.first) < len(experts.down):
                continue
            rows, rank = (chosen == expert).nonzero(as_tuple=True)
            share = shares[rows, rank, None]
            read = (x[rows] * share).to(x.dtype) if experts.routing.inputs else x[rows]
            gated = between(self._backend, experts, experts.gate_up[place](read, NO_ADAPTERS))
            given = experts.down[place](gated, NO_ADAPTERS)
            total[rows] += given if experts.routing.inputs else given * share
        return total.to(x.dtype)


def between(backend: Backend, experts: Experts, gate_up: Tensor) -> Tensor:
    """What stands between an expert's two matrices, for what the first one gives."""
    if experts.activation is not None:
        return backend.activate(gate_up, experts.activation)
    if experts.gelu:
        return backend.gelu_mul(gate_up)
    return backend.silu_mul(gate_up) if experts.clamp is None else backend.clamped_mul(gate_up, experts.clamp)


class ExpertCounts(NamedTuple):
    """Since the weights were loaded; of this process."""

    read: int = 0
    """Experts that steps have read, each once a step,"""
    kept: int = 0
    """of them those that were kept in memory."""
    guessed: int = 0
    """Experts that were asked for before their layer's router had chosen,"""
    guessed_right: int = 0
    """of them those that it then chose."""
    disk_bytes: int = 0
    """What the process has read from disks; 0 where the system does not say."""


class ExpertsOnDisk(ABC):
    backend: Backend
    """Packs the experts' linears into a file, and mixes them."""

    @abstractmethod
    def settle(self) -> None:
        """All weights are there, and what mixes them is made. Raises ValueError where nothing could be put into the
        file, or what is to be kept in memory has no room for one expert."""

    @property
    @abstractmethod
    def said(self) -> str:
        """What is where, for people to read."""

    @property
    @abstractmethod
    def saved(self) -> int:
        """Bytes of memory that they would take besides if they were all there."""

    @abstractmethod
    def step(self) -> None:
        """A step begins: no expert is being read."""

    @abstractmethod
    def counts(self) -> ExpertCounts: ...
