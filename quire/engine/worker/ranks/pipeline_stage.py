from __future__ import annotations

import torch
from torch import Tensor

from quire.engine.models.decoder import Decoder
from quire.kernels.backend import AttentionMetadata
from quire.kernels.distributed import DistributedCollective


class PipelineStage(Decoder):
    """Stages after the first need `set_previous_stage_rank`."""

    _previous: tuple[DistributedCollective, int] | None = None

    def set_previous_stage_rank(self, group: DistributedCollective, previous_rank: int) -> None:
        self._previous = group, previous_rank

    def embed_or_receive_inputs(self, token_ids: Tensor, metadata: AttentionMetadata) -> tuple[Tensor, Tensor | None]:
        """Raises RankEnded if an earlier stage has ended."""
        if self._previous is None:
            return super().embed_or_receive_inputs(token_ids, metadata)
        group, before = self._previous
        x, residual = torch.empty((2, len(token_ids), self.spec.hidden_size), dtype=self.dtype)
        for each in (x, residual):
            group.receive_tensor(each, before)
        return x, residual
