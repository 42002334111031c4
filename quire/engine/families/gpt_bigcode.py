"""StarCoder and SantaCoder (Li et al., 2023): GPT-2 with one key and value for all heads."""

from __future__ import annotations

from typing import Any

from quire.engine.families.base import WeightNames, complete_mlp_width, complete_multi_query
from quire.engine.families.gpt2 import GPT2, GPT2_BUFFERS, GPT2_LAYER_MODULES, GPT2_MODEL_MODULES


def _complete(fields: dict[str, Any]) -> None:
    complete_mlp_width(fields)
    complete_multi_query(fields)


GPT_BIGCODE = GPT2.derive(
    "gpt_bigcode",
    defaults={
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-05,
        "hidden_act": "gelu_pytorch_tanh",
        "multi_query": True,
        "max_position_embeddings": 1024,
    },
    complete=_complete,
    weight_names=WeightNames(
        model_modules=GPT2_MODEL_MODULES,
        layer_modules=GPT2_LAYER_MODULES,
        fused_by_group=True,
        unused=GPT2_BUFFERS,
    ),
)
