"""Youtu-LLM (Tencent, 2026): DeepSeek-V3's attention with an MLP in every layer."""

from __future__ import annotations

from quire.engine.families.base import DecoderFamily, GGUFFormat, default_true_reader, mla_mixers_reader
from quire.engine.families.deepseek_v2 import MLA_GGUF_MODULES, read_mla_gguf_fields

YOUTU = DecoderFamily(
    model_types=("youtu",),
    defaults={
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "tie_word_embeddings": True,
        "max_position_embeddings": 131_072,
    },
    missing_defaults={"q_lora_rank": 1536},
    mixers=mla_mixers_reader(is_interleaved=default_true_reader("rope_interleave")),
    gguf=GGUFFormat(
        architectures=("deepseek2",),
        matches=lambda metadata: not metadata.integer("expert_count"),
        layer_modules=MLA_GGUF_MODULES,
        has_latent_attention=True,
        read_fields=read_mla_gguf_fields,
    ),
)
