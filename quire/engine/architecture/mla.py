"""Multi-head latent attention (MLA: DeepSeek-V2, 2024)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from quire.engine.architecture.kv_cache_spec import PagedState
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
class MLALayerSpec(SublayerSpec):
    num_heads: int
    kv_lora_rank: int
    qk_rope_head_dim: int
    """Elements of keys and queries that are rotated, unless `rope` is None."""
    qk_nope_head_dim: int
    v_head_dim: int
    q_lora_rank: int | None
    """None: no query latents."""
    scale: float
    rope: dict[str, Any] | None
    norm: NormSpec
    latent_eps: float
    is_interleaved: bool = True
    bias: bool = False
    """o_proj and the linears that make latents have biases."""

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
    def kv_cache_spec(self) -> PagedState:
        return PagedState(self.head_dim, None, self.head_dim)

    @property
    def attention_width(self) -> int:
        return self.num_heads * (self.qk_rope_head_dim + self.qk_nope_head_dim + self.v_head_dim) // 2

    @property
    def kv_formula(self) -> str:
        return f"({self.kv_lora_rank} latent + {self.qk_rope_head_dim} rope)"

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
        shapes |= linear_shapes([f"{prefix}.kv_a_proj_with_mqa"], self.head_dim, hidden_size, bias=self.bias)
        kv_size = self.num_heads * self.qk_nope_head_dim + value_size
        shapes |= linear_shapes([f"{prefix}.kv_b_proj"], kv_size, self.kv_lora_rank)
        shapes |= linear_shapes([f"{prefix}.o_proj"], hidden_size, value_size, bias=self.bias)
        shapes |= norm_shapes({f"{layer}.input_layernorm": hidden_size}, self.norm)
        return shapes | norm_shapes(norms, NormSpec(self.latent_eps))

    def adaptable_linears(self, layer: str, hidden_size: int) -> LinearSizes:
        """Excludes kv_b_proj, whose weight the layer converts."""
        linears = linear_sizes(self.parameter_shapes(layer, hidden_size))
        del linears[f"{layer}.self_attn.kv_b_proj"]
        return linears

    def tensor_parallel_error(self, ranks: int) -> str | None:
        return divisibility_error(self.num_heads, f"{self.num_heads} heads", ranks)
