"""StarCoder and SantaCoder (Li et al., 2023): GPT-2 with multi-query attention."""

from __future__ import annotations

from typing import Any

from quire.engine.families.base import WeightNames, fill_intermediate_size, set_multi_query_kv_heads
from quire.engine.families.gpt2 import GPT2, GPT2_BUFFERS, GPT2_LAYER_MODULES, GPT2_MODEL_MODULES


def _fill_gpt_bigcode_fields(fields: dict[str, Any]) -> None:
    fill_intermediate_size(fields)
    set_multi_query_kv_heads(fields)


GPT_BIGCODE = GPT2.derive(
    "gpt_bigcode",
    defaults={
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-05,
        "hidden_act": "gelu_pytorch_tanh",
        "multi_query": True,
        "max_position_embeddings": 1024,
    },
    fill_derived_fields=_fill_gpt_bigcode_fields,
    weight_names=WeightNames(
        model_modules=GPT2_MODEL_MODULES,
        layer_modules=GPT2_LAYER_MODULES,
        is_fused_by_kv_head=True,
        unused_tensors=GPT2_BUFFERS,
    ),
)
