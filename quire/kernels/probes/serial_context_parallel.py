from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from quire.kernels.attention.context_shard import ContextShard
from quire.kernels.attention_params import AttentionParams
from quire.kernels.backend import AttentionMetadata
from quire.kernels.kv_quantization import UNIT_KV_SCALES, KVScales
from quire.kernels.latent_params import LatentNormRopeParams
from quire.kernels.qk_norm_rope import QKNormRopeParams
from quire.kernels.reference import ReferenceBackend


class SerialContextParallel(ReferenceBackend):
    """Computes all ranks in one process, for trials and tests. A page holds all ranks' tokens in the order that one
    process would use, so each rank's cache is a view. Quantized pages are unsupported, because their scales follow all
    codes.
    """

    name = "in turn"

    def __init__(self, backend: ReferenceBackend, ranks: int) -> None:
        super().__init__(deterministic=backend.deterministic)
        self._backend, self._world_size = backend, ranks
        self.block_size = backend.block_size * ranks

    def store_kv(
        self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor, scales: KVScales = UNIT_KV_SCALES
    ) -> None:
        self._backend.store_kv(k, v, k_cache, v_cache, slots, scales)

    def rope_and_store_kv(
        self, qkv: Tensor, rope: QKNormRopeParams, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata
    ) -> Tensor:
        return self._backend.rope_and_store_kv(qkv, rope, k_cache, v_cache, metadata)

    def rope_and_store_latent_kv(
        self, q: Tensor, kv: Tensor, latent: LatentNormRopeParams, cache: Tensor, metadata: AttentionMetadata
    ) -> Tensor:
        return self._backend.rope_and_store_latent_kv(q, kv, latent, cache, metadata)

    def paged_attention(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata, softmax: AttentionParams
    ) -> Tensor:
        tile, without_sinks = self._backend.block_size, replace(softmax, sinks=None)
        rank_outputs = []
        for rank in range(self._world_size):
            shard = ContextShard(rank, self._world_size, tile)
            caches = (
                k_cache[:, shard.token_range_in_page.start : shard.token_range_in_page.stop],
                v_cache[:, shard.token_range_in_page.start : shard.token_range_in_page.stop],
            )
            rank_outputs.append(self._backend.attend_context_shard(q, caches, metadata, without_sinks, shard))
        return self._backend.merge_shard_attention(torch.stack(rank_outputs), softmax.sinks, q.dtype)
