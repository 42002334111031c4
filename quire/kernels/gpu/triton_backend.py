from __future__ import annotations

import torch
import triton
from torch import Tensor

from quire.kernels.attention.context_shard import ContextShard
from quire.kernels.attention_params import AttentionParams
from quire.kernels.backend import AttentionMetadata, Backend, CachePair
from quire.kernels.gpu import triton_fused, triton_short_conv
from quire.kernels.gpu.linears.linear_backend import TritonLinearBackend
from quire.kernels.gpu.mla import absorbed_attention as latents
from quire.kernels.gpu.mla.triton_latent_store import rope_and_store_latent_kv
from quire.kernels.gpu.prefill_decode_split import attend_by_parts
from quire.kernels.gpu.ranks.context_parallel import merge_rank_outputs
from quire.kernels.gpu.recurrent import triton_recurrence
from quire.kernels.gpu.triton_paged_attention import paged_attention
from quire.kernels.kv_quantization import QUANTIZED_KV_DTYPES, UNIT_KV_SCALES, KVScales
from quire.kernels.latent_params import LatentNormRopeParams
from quire.kernels.qk_norm_rope import QKNormRopeParams
from quire.kernels.recurrent.recurrence import Recurrence, RecurrentStates
from quire.kernels.recurrent.short_conv import ConvStates, ShortConv

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class TritonBackend(TritonLinearBackend):
    """Paged attention for any block size on any GPU that Triton supports. Pages are [page, token, KV head, head_dim].

    The host never waits. Grids follow from shapes and the metadata's two maxima, so a decode in a CUDA graph stays
    correct as contexts grow. There is no autotuning.
    """

    name = "triton"
    block_size = 16
    cuda_graph_support = "steps"

    def description(self) -> str:
        return f"Triton {triton.__version__}"

    def unsupported_reason(
        self, device: torch.device, dtype: torch.dtype, head_dim: int, softcap: bool = False
    ) -> str | None:
        if device.type != "cuda":
            return f"runs on a GPU, not on {device.type}"
        if dtype not in _DTYPES:
            return f"takes float32, bfloat16 and float16, not {dtype}"
        return None if head_dim <= 256 else f"takes a head_dim up to 256, not {head_dim}"

    def attend_batch_part(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata, softmax: AttentionParams
    ) -> Tensor:
        return self._attend_part_on_shard(q, (k_cache, v_cache), metadata, softmax, None)

    def attend_context_shard(
        self, q: Tensor, caches: CachePair, metadata: AttentionMetadata, softmax: AttentionParams, shard: ContextShard
    ) -> Tensor:
        assert softmax.lookahead == 0, "no served decoder uses it"
        return attend_by_parts(
            lambda rows, part: self._attend_part_on_shard(rows, caches, part, softmax, shard), q, metadata
        )

    def merge_shard_attention(self, parts: Tensor, sinks: Tensor | None, dtype: torch.dtype) -> Tensor:
        return merge_rank_outputs(parts, sinks, dtype)

    def _attend_part_on_shard(
        self,
        q: Tensor,
        caches: CachePair,
        metadata: AttentionMetadata,
        softmax: AttentionParams,
        shard: ContextShard | None,
    ) -> Tensor:
        """The metadata must have no decode_prefill_parts."""
        if softmax.value_dim is not None:
            return latents.attend_absorbed(q, caches[0], metadata, softmax, fixed=self.deterministic, shard=shard)
        return paged_attention(q, *caches, metadata, softmax, fixed=self.deterministic, shard=shard)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return triton_fused.rms_norm(x, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return triton_fused.add_rms_norm(x, residual, weight, eps)

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        return triton_fused.layer_norm(x, weight, bias, eps)

    def add_layer_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        return triton_fused.add_layer_norm(x, residual, weight, bias, eps)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return triton_fused.silu_mul(gate_up)

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        return triton_fused.gelu_mul(gate_up)

    def store_kv(
        self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor, scales: KVScales = UNIT_KV_SCALES
    ) -> None:
        if k_cache.dtype in QUANTIZED_KV_DTYPES:  # slow, but models call rope_and_store_kv instead
            super().store_kv(k, v, k_cache, v_cache, slots, scales)
        else:
            triton_fused.store_kv(k, v, k_cache, v_cache, slots)

    def rope_and_store_kv(
        self, qkv: Tensor, rope: QKNormRopeParams, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata
    ) -> Tensor:
        if not rope.has_fused_kernel:  # true of only a few families
            return super().rope_and_store_kv(qkv, rope, k_cache, v_cache, metadata)
        return triton_fused.rope_and_store_kv(qkv, rope, k_cache, v_cache, metadata)

    def rope_and_store_latent_kv(
        self, q: Tensor, kv: Tensor, latent: LatentNormRopeParams, cache: Tensor, metadata: AttentionMetadata
    ) -> Tensor:
        return rope_and_store_latent_kv(q, kv, latent, cache, metadata)

    def chunked_recurrence_backend(self) -> Backend | None:
        return None if self.deterministic else self

    def short_conv(self, bcx: Tensor, conv: ShortConv, columns: ConvStates, metadata: AttentionMetadata) -> Tensor:
        return triton_short_conv.short_conv(bcx, conv, columns, metadata)

    def run_recurrence(
        self,
        inputs: Tensor,
        z: Tensor,
        head_inputs: Tensor,
        rule: Recurrence,
        states: RecurrentStates,
        metadata: AttentionMetadata,
    ) -> Tensor:
        return triton_recurrence.run_recurrence(
            inputs,
            z,
            head_inputs,
            rule,
            states,
            metadata,
            fixed=self.deterministic,
            passed_chunk_trial=self.passed_chunk_trial,
        )
