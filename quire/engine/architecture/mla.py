"""Multi-head latent attention (MLA: DeepSeek-V2, 2024) and sparse attention (DSA: DeepSeek-V3.2, 2025)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from quire.engine.architecture.kv_cache_spec import MLAAttentionSpec
from quire.engine.architecture.norm import NormSpec
from quire.engine.architecture.parameter_shapes import (
    LinearSizes,
    ParameterShapes,
    linear_shapes,
    linear_sizes,
    norm_shapes,
)
from quire.engine.architecture.sublayer import SublayerSpec, divisibility_error


@dataclass(frozen=True, slots=True)
class IndexerSpec:
    """A query attends to the `top_k` tokens that the indexer scores best."""

    num_heads: int
    """Index keys have one head."""
    head_dim: int
    """`MLALayerSpec.rope` rotates the first `qk_rope_head_dim` elements."""
    top_k: int
    is_interleaved: bool
    """RoPE pairs neighbors. If False, it pairs i and i + R/2 of R rotated elements."""
    key_norm: NormSpec

    def parameter_shapes(self, prefix: str, hidden_size: int, q_lora_rank: int) -> ParameterShapes:
        shapes = linear_shapes([f"{prefix}.wq_b"], self.num_heads * self.head_dim, q_lora_rank)
        shapes |= linear_shapes([f"{prefix}.wk"], self.head_dim, hidden_size)
        shapes |= linear_shapes([f"{prefix}.weights_proj"], self.num_heads, hidden_size)
        return shapes | norm_shapes({f"{prefix}.k_norm": self.head_dim}, self.key_norm)


@dataclass(frozen=True, slots=True)
class MLALayerSpec(SublayerSpec):
    num_heads: int
    kv_lora_rank: int
    qk_rope_head_dim: int
    """These elements of a head are rotated, unless `rope` is None."""
    qk_nope_head_dim: int
    v_head_dim: int
    q_lora_rank: int | None
    """None if queries have no latents."""
    scale: float
    rope: dict[str, Any] | None
    norm: NormSpec
    latent_eps: float
    is_interleaved: bool = True
    bias: bool = False
    """Applies to o_proj and the linears that make latents."""
    indexer: IndexerSpec | None = None
    """If None, a query attends to all earlier tokens. An indexer needs `q_lora_rank`."""

    @property
    def head_dim(self) -> int:
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def num_kv_heads(self) -> int:
        return 1

    @property
    def softcap(self) -> None:
        return None

    @property
    def kv_cache_spec(self) -> MLAAttentionSpec:
        """Includes index keys."""
        elements = self.head_dim + (0 if self.indexer is None else self.indexer.head_dim)
        return MLAAttentionSpec(elements, elements)

    @property
    def attention_width(self) -> int:
        return self.num_heads * (self.qk_rope_head_dim + self.qk_nope_head_dim + self.v_head_dim) // 2

    @property
    def kv_formula(self) -> str:
        index = "" if self.indexer is None else f" + {self.indexer.head_dim} index"
        return f"({self.kv_lora_rank} latent + {self.qk_rope_head_dim} rope{index})"

    def parameter_shapes(self, layer: str, hidden_size: int) -> ParameterShapes:
        prefix = f"{layer}.self_attn"
        query_size = self.num_heads * (self.qk_nope_head_dim + self.qk_rope_head_dim)
        value_size = self.num_heads * self.v_head_dim
        norms = {f"{prefix}.kv_a_layernorm": self.kv_lora_rank}
        if self.q_lora_rank is None:
            shapes = linear_shapes([f"{prefix}.q_proj"], query_size, hidden_size)
        else:
            shapes = linear_shapes([f"{prefix}.q_a_proj"], self.q_lora_rank, hidden_size, bias=self.bias)
            shapes |= linear_shapes([f"{prefix}.q_b_proj"], query_size, self.q_lora_rank)
            norms[f"{prefix}.q_a_layernorm"] = self.q_lora_rank
            if self.indexer is not None:
                shapes |= self.indexer.parameter_shapes(f"{prefix}.indexer", hidden_size, self.q_lora_rank)
        shapes |= linear_shapes([f"{prefix}.kv_a_proj_with_mqa"], self.head_dim, hidden_size, bias=self.bias)
        kv_size = self.num_heads * self.qk_nope_head_dim + value_size
        shapes |= linear_shapes([f"{prefix}.kv_b_proj"], kv_size, self.kv_lora_rank)
        shapes |= linear_shapes([f"{prefix}.o_proj"], hidden_size, value_size, bias=self.bias)
        shapes |= norm_shapes({f"{layer}.input_layernorm": hidden_size}, self.norm)
        return shapes | norm_shapes(norms, NormSpec(self.latent_eps))

    def adaptable_linears(self, layer: str, hidden_size: int) -> LinearSizes:
        """Excludes kv_b_proj, whose weight the layer converts, and the indexer's weights_proj."""
        linears = linear_sizes(self.parameter_shapes(layer, hidden_size))
        excluded = (f"{layer}.self_attn.kv_b_proj", f"{layer}.self_attn.indexer.weights_proj")
        return {name: sizes for name, sizes in linears.items() if name not in excluded}

    def tensor_parallel_error(self, ranks: int) -> str | None:
        return divisibility_error(self.num_heads, f"{self.num_heads} heads", ranks)

    @property
    def gpu_error(self) -> str | None:
        return None if self.indexer is None else "sparse attention is served only on CPUs so far"
