from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from quire.engine.common.errors import ModelError


class GGUFHeader(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def metadata(self) -> Mapping[str, Any]: ...
    @property
    def tensors(self) -> Mapping[str, Any]: ...
    def get_string(self, key: str) -> str | None: ...
    def get_integer(self, key: str) -> int | None: ...
    def get_float(self, key: str) -> float | None: ...
    def get_bool(self, key: str) -> bool | None: ...
    def get_integers(self, key: str) -> list[int]: ...


@dataclass(frozen=True, slots=True)
class GGUFMetadata:
    """Keys lack the architecture prefix: "expert_count" reads "qwen3moe.expert_count". Raises ModelError for a wrong
    type.
    """

    header: GGUFHeader
    architecture: str

    def integer(self, key: str) -> int | None:
        return self.header.get_integer(f"{self.architecture}.{key}")

    def float(self, key: str) -> float | None:
        return self.header.get_float(f"{self.architecture}.{key}")

    def flag(self, key: str) -> bool | None:
        return self.header.get_bool(f"{self.architecture}.{key}")

    def integers(self, key: str) -> list[int]:
        """Raises ModelError unless the value is a list."""
        if not self.is_list(key):
            raise self.field_error(key, "expected a number for each layer")
        return self.header.get_integers(f"{self.architecture}.{key}")

    def is_list(self, key: str) -> bool:
        return isinstance(self.header.metadata.get(f"{self.architecture}.{key}"), list)

    def has_tensor(self, name: str) -> bool:
        return name in self.header.tensors

    def any_layer_has_tensor(self, tensor: str) -> bool:
        return any(each.startswith("blk.") and each.endswith(f".{tensor}") for each in self.header.tensors)

    def field_error(self, key: str, problem: str) -> ModelError:
        return ModelError(f"model: {self.header.name}: {self.architecture}.{key}: {problem}")


LAYER_MODULES: Mapping[str, str] = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""Maps Llama's GGUF names to checkpoint names. In such mappings, * is the expert's index."""
POST_NORM_MODULES: Mapping[str, str] = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


def expert_modules(
    parent_module: str = "mlp",
    *,
    router: str = "gate",
    gate: str = "gate_proj",
    up: str = "up_proj",
    down: str = "down_proj",
) -> Mapping[str, str]:
    return {
        "ffn_gate_inp": f"{parent_module}.{router}",
        "ffn_gate_exps": f"{parent_module}.experts.*.{gate}",
        "ffn_up_exps": f"{parent_module}.experts.*.{up}",
        "ffn_down_exps": f"{parent_module}.experts.*.{down}",
    }


def shared_expert_modules(parent_module: str = "mlp.shared_experts") -> Mapping[str, str]:
    return {f"ffn_{name}_shexp": f"{parent_module}.{name}_proj" for name in ("gate", "up", "down")}


MIXTRAL_EXPERT_MODULES = expert_modules("block_sparse_moe", gate="w1", up="w3", down="w2")


@dataclass(frozen=True, slots=True, kw_only=True)
class GGUFFormat:
    architectures: tuple[str, ...]
    matches: Callable[[GGUFMetadata], bool] | None = None
    """Tells families apart that share an architecture name. Raises ModelError."""
    layer_modules: Mapping[str, str] = field(default_factory=lambda: LAYER_MODULES)
    layer_tensors: Mapping[str, str] = field(default_factory=dict)
    model_modules: Mapping[str, str] = field(default_factory=dict)
    has_optional_experts: bool = False
    """True if some of the files have experts and others do not."""
    has_latent_attention: bool = False
    """`read_fields` then reads the head sizes."""
    has_optional_window: bool = False
    permutes_queries_and_keys: bool = False
    """Rows of query and key projections are stored for interleaved RoPE."""
    tiles_value_heads: bool = False
    """Value heads of delta nets are sorted by their index within a key head, then by key head."""
    read_fields: Callable[[GGUFMetadata, Mapping[str, Any]], Mapping[str, Any]] | None = None


def read_moe_fields(
    metadata: GGUFMetadata, fields: Mapping[str, Any] | None = None, *, is_mlp_sized: bool = False
) -> dict[str, Any]:
    """If `is_mlp_sized`, intermediate_size is an expert's width."""
    groups, inner = metadata.integer("expert_group_count") or None, metadata.integer("expert_feed_forward_length")
    width = {"moe_intermediate_size": inner}
    if is_mlp_sized:
        width = {"intermediate_size": inner} if inner else {}
    return {
        "n_shared_experts": metadata.integer("expert_shared_count") or 0,
        "norm_topk_prob": bool(metadata.flag("expert_weights_norm")),
        "routed_scaling_factor": metadata.float("expert_weights_scale") or None,
        "n_group": groups,
        "topk_group": metadata.integer("expert_group_used_count") or groups,
        "first_k_dense_replace": metadata.integer("leading_dense_block_count") or 0,
        "num_nextn_predict_layers": metadata.integer("nextn_predict_layers"),
        "use_qk_norm": False,
        "lm_head_bias": metadata.has_tensor("output.bias"),
        **width,
    }


def read_mlp_sized_moe_fields(metadata: GGUFMetadata, fields: Mapping[str, Any]) -> dict[str, Any]:
    return read_moe_fields(metadata, is_mlp_sized=True)


def read_hybrid_layer_types(metadata: GGUFMetadata, other_type: str = "linear_attention") -> list[str]:
    """Layers without key-value heads get `other_type`."""
    return ["full_attention" if each else other_type for each in metadata.integers("attention.head_count_kv")]
