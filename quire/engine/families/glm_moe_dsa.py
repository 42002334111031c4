"""GLM-5 (Z.ai, 2026): DeepSeek-V3.2's layers, with an indexer whose RoPE is interleaved."""

from __future__ import annotations

from quire.engine.common.errors import ModelError
from quire.engine.families.base import ModelConfig, indexer_reader, mla_mixers_reader
from quire.engine.families.deepseek_v32 import DEEPSEEK_V32

_DEFAULT_SKIP_OFFSET = 2


def _check_indexer_types(config: ModelConfig) -> None:
    """Refuses layers that reuse the tokens which an earlier layer's indexer chose. The first of three fields that is
    set tells which do: `indexer_types` (a type per layer), `index_topk_pattern` (a letter per layer) or
    `index_topk_freq` (one layer in this many runs its indexer).
    """
    raw = config.raw
    if (types := raw.get("indexer_types")) is not None:
        name, has_reuse = "indexer_types", any(each != "full" for each in types)
    elif (pattern := raw.get("index_topk_pattern")) is not None:
        name, has_reuse = "index_topk_pattern", any(each not in ("F", "full") for each in pattern)
    else:
        offset = raw.get("index_skip_topk_offset")
        first = (_DEFAULT_SKIP_OFFSET if offset is None else offset) - 1
        name, period = "index_topk_freq", raw.get("index_topk_freq") or 1
        has_reuse = any(max(layer - first, 0) % period for layer in range(config.num_layers))
    if has_reuse:
        raise ModelError(f"model: config.json: {name}: layers that reuse another layer's indexer are not supported")


GLM_MOE_DSA = DEEPSEEK_V32.derive(
    "glm_moe_dsa",
    defaults={
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 202_752,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
        "first_k_dense_replace": 3,
        "index_n_heads": 32,
        "index_head_dim": 128,
        "index_topk": 2048,
    },
    missing_defaults={"q_lora_rank": 2048},
    check_config=_check_indexer_types,
    mixers=mla_mixers_reader(read_indexer=indexer_reader(is_interleaved=True)),
)
