"""A stage of a pipeline: some of a model's layers, which compute what the stage before sends."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.engine.models.decoder import Decoder
from quire.kernels.backend import AttentionMetadata
from quire.kernels.distributed import DistributedCollective


class Stage(Decoder):
    """Call `follow` before use, but for the first one."""

    _before: tuple[DistributedCollective, int] | None = None

    def follow(self, group: DistributedCollective, before: int) -> None:
        """`before`: the rank in the group whose layers come before."""
        self._before = group, before

    def begin(self, token_ids: Tensor, metadata: AttentionMetadata) -> tuple[Tensor, Tensor | None]:
        """Raises RankEnded where a stage before has."""
        if self._before is None:
            return super().begin(token_ids, metadata)
        group, before = self._before
        x, residual = torch.empty((2, len(token_ids), self.spec.hidden_size), dtype=self.dtype)
        for each in (x, residual):
            group.receive(each, before)
        return x, residual
