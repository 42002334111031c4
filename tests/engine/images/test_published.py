"""Published config.json files of vision models, which omit transformers' defaults: their parameter counts and RoPE
axes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quire.engine.architecture.attention import AttentionLayerSpec
from quire.engine.checkpoint.model_resolver import read_model_config
from quire.engine.checkpoint.sizes.model_sizes import read_model_sizes
from quire.engine.images.vision_config import read_vision_spec
from quire.engine.models import decoder_spec

_QWEN_VISION = {"in_chans": 3, "patch_size": 14, "spatial_merge_size": 2, "spatial_patch_size": 14}
_MROPE = {"rope_theta": 1e6, "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}, "vocab_size": 151936}
_TIED = {"tie_word_embeddings": True}
CONFIGS: dict[str, dict[str, Any]] = {
    "gemma-3-4b-it": {
        "model_type": "gemma3",
        **{"boi_token_index": 255999, "eoi_token_index": 256000, "image_token_index": 262144},
        "mm_tokens_per_image": 256,
        "text_config": {
            **{"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34},
            **{"rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024},
        },
        "vision_config": {
            **{"model_type": "siglip_vision_model", "hidden_size": 1152, "intermediate_size": 4304},
            **{"num_attention_heads": 16, "num_hidden_layers": 27, "image_size": 896, "patch_size": 14},
            "vision_use_head": False,
        },
    },
    "Qwen2-VL-2B-Instruct": {
        **{"model_type": "qwen2_vl", "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28},
        **{"num_attention_heads": 12, "num_key_value_heads": 2, **_MROPE, **_TIED},
        "vision_config": {"depth": 32, "embed_dim": 1280, "mlp_ratio": 4, "num_heads": 16, "hidden_size": 1536}
        | _QWEN_VISION,
    },
    "Qwen2.5-VL-3B-Instruct": {
        **{"model_type": "qwen2_5_vl", "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36},
        **{"num_attention_heads": 16, "num_key_value_heads": 2, **_MROPE, **_TIED},
        "vision_config": {
            **{"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "out_hidden_size": 2048},
            **{"window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31], "hidden_act": "silu", **_QWEN_VISION},
        },
    },
    "Qwen3-VL-2B-Instruct": {
        "model_type": "qwen3_vl",
        "text_config": {
            **{"model_type": "qwen3_vl_text", "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28},
            **{"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "rope_theta": 5e6, **_TIED},
            "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
            "vocab_size": 151936,
        },
        "vision_config": {
            **{"depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "num_heads": 16, "out_hidden_size": 2048},
            **{"patch_size": 16, "num_position_embeddings": 2304, "deepstack_visual_indexes": [5, 11, 17]},
        },
    },
    "Mistral-Small-3.1-24B": {
        **{"model_type": "mistral3", "image_token_index": 10, "multimodal_projector_bias": False},
        "text_config": {
            **{"model_type": "mistral", "hidden_size": 5120, "intermediate_size": 32768, "num_hidden_layers": 40},
            **{"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 131072},
        },
        "vision_config": {
            **{"model_type": "pixtral", "hidden_size": 1024, "intermediate_size": 4096, "image_size": 1540},
            **{"num_attention_heads": 16, "num_hidden_layers": 24, "patch_size": 14, "hidden_act": "silu"},
        },
    },
    "llava-1.5-7b-hf": {
        "model_type": "llava",
        "text_config": {"model_type": "llama", "max_position_embeddings": 4096, "vocab_size": 32064},
        "vision_config": {
            **{"model_type": "clip_vision_model", "hidden_size": 1024, "intermediate_size": 4096, "image_size": 336},
            **{"num_attention_heads": 16, "num_hidden_layers": 24, "patch_size": 14, "projection_dim": 768},
        },
        "vision_feature_layer": -2,
    },
}
PARAMETERS = {
    "gemma-3-4b-it": 4_300_079_472,
    "Qwen2-VL-2B-Instruct": 2_208_985_600,
    "Qwen2.5-VL-3B-Instruct": 3_754_622_976,
    "Qwen3-VL-2B-Instruct": 2_127_532_032,
    "Mistral-Small-3.1-24B": 24_011_361_280,
    "llava-1.5-7b-hf": 7_063_427_072 - 12_596_224 - 2_048,  # the tower's last layer and last norm are not needed
}


@pytest.mark.parametrize("name", CONFIGS)
def test_num_parameters_equals_published_vision_checkpoint(name: str, tmp_path: Path) -> None:
    sizes = read_model_sizes(CONFIGS[name])
    assert sizes.unsupported_reasons == ()
    assert sizes.num_parameters + sizes.tower_parameters == PARAMETERS[name]
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[name]))
    assert read_model_config(tmp_path).num_layers == CONFIGS[name].get("text_config", CONFIGS[name]).get(
        "num_hidden_layers", 32
    )
    assert read_vision_spec(tmp_path) is not None


def test_mrope_axes_of_qwen_vl_follow_mrope_section(tmp_path: Path) -> None:
    def axes(name: str) -> tuple[int, ...] | None:
        (tmp_path / "config.json").write_text(json.dumps(CONFIGS[name]))
        return decoder_spec(read_model_config(tmp_path)).sublayers_of_kind(AttentionLayerSpec)[0].mrope_axes

    assert axes("Qwen2.5-VL-3B-Instruct") == (0,) * 16 + (1,) * 24 + (2,) * 24
    assert axes("Qwen3-VL-2B-Instruct") == (0, 1, 2) * 20 + (0,) * 4
