"""What ranks that divide the tokens of sequences compute, by one process: for trials and tests."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from quire.kernels.attention.own import Own
from quire.kernels.backend import AttentionMetadata
from quire.kernels.kv_codes import UNSCALED, KVScales
from quire.kernels.latents.latent import Latent
from quire.kernels.reference import Reference
from quire.kernels.rotation import Rope
from quire.kernels.softmax import Softmax


class InTurn(Reference):
    """Attention of so many ranks, one after another. A page has all ranks' tokens, which are those of one process in
    the same order, so a rank's cache is a view. Pages of codes, whose scales lie behind them all, have no such view."""

    name = "in turn"

    def __init__(self, backend: Reference, ranks: int) -> None:
        super().__init__(deterministic=backend.deterministic)
        self._backend, self._count = backend, ranks
        self.block_size = backend.block_size * ranks

    def store_kv(
        self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor, scales: KVScales = UNSCALED
    ) -> None:
        self._backend.store_kv(k, v, k_cache, v_cache, slots, scales)

    def rope_store(
        self, qkv: Tensor, rope: Rope, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata
    ) -> Tensor:
        return self._backend.rope_store(qkv, rope, k_cache, v_cache, metadata)

    def latent_store(self, q: Tensor, kv: Tensor, latent: Latent, cache: Tensor, metadata: AttentionMetadata) -> Tensor:
        return self._backend.latent_store(q, kv, latent, cache, metadata)

    def paged_attention(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata, softmax: Softmax
    ) -> Tensor:
        tile, alone = self._backend.block_size, replace(softmax, sinks=None)
        found = []
        for rank in range(self._count):
            own = Own(rank, self._count, tile)
            caches = k_cache[:, own.of_page.start : own.of_page.stop], v_cache[:, own.of_page.start : own.of_page.stop]
            found.append(self._backend.packed_sums(q, caches, metadata, alone, own))
        return self._backend.merged_sums(torch.stack(found), softmax.sinks, q.dtype)
