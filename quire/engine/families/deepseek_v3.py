"""DeepSeek-V3 and R1 (DeepSeek-AI, 2024), and Kimi K2 (Moonshot AI, 2025): sigmoid routing with a correction bias."""

from __future__ import annotations

from quire.engine.families.base import GROUPED_MOE, GGUFFormat, optional_moe_reader
from quire.engine.families.deepseek_v2 import MLA_GGUF_MODULES, gguf_uses_sigmoid_gating, read_mla_moe_gguf_fields
from quire.engine.families.youtu import YOUTU

_COMMON_DEFAULTS = {
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "n_group": 8,
    "topk_group": 4,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "first_k_dense_replace": 3,
}
DEEPSEEK_V3 = YOUTU.derive(
    "deepseek_v3",
    field_names={"n_routed_experts": "num_local_experts", "num_mtp_layers": "num_nextn_predict_layers"},
    defaults={**_COMMON_DEFAULTS, "max_position_embeddings": 4096},
    experts=optional_moe_reader(GROUPED_MOE),
    gguf=GGUFFormat(
        architectures=("deepseek2",),
        matches=lambda metadata: bool(metadata.integer("expert_count")) and gguf_uses_sigmoid_gating(metadata),
        layer_modules=MLA_GGUF_MODULES,
        has_latent_attention=True,
        read_fields=read_mla_moe_gguf_fields,
    ),
)
KIMI_K2 = DEEPSEEK_V3.derive(
    "kimi_k2",
    defaults=_COMMON_DEFAULTS,
    missing_defaults={},
)
