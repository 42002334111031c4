"""Fields that config.json omits get the defaults of transformers' configuration class."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from quire.engine.checkpoint.family_spec import build_encoder_spec
from quire.engine.checkpoint.model_resolver import read_model_config
from quire.engine.common.config import EngineConfig
from quire.engine.engine_core import EngineCore
from quire.engine.families import decoder_model_types, encoder_model_types, find_encoder_family
from quire.engine.families.base.model_config import ModelConfig
from quire.engine.models import decoder_spec
from tests.engine.harness import request, run
from tests.tiny_models import save_tiny_model

_NEEDED = {
    *("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("n_embd", "n_layer", "n_head", "n_layers", "n_heads", "d_model", "dim", "hidden_dim", "ffn_dim"),
    *("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_experts_per_tok", "moe_k"),
    *("moe_topk", "moe_intermediate_size", "shared_expert_intermediate_size"),
}
"""Sizes that a config.json must have: without them it is rejected."""
_ALSO_NEEDED = {
    **{key: {"layer_types"} for key in ("granite_swa", "granitemoe_swa")},
    **{key: {"rope_parameters"} for key in ("qwen2_vl_text", "qwen2_5_vl_text")},
    "falcon_h1": {"mamba_n_heads", "mamba_d_head"},
}
_SECTIONS = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}
_OTHERWISE: dict[str, dict[str, Any]] = {
    **{key: {"rope_parameters": _SECTIONS} for key in ("qwen2_vl_text", "qwen2_5_vl_text")},
    "deepseek_v2": {"num_experts_per_tok": 6},
    "dots1": {"n_routed_experts": 8, "num_experts_per_tok": 2},
    "falcon_h1": {"mamba_n_heads": 64, "mamba_d_head": 16},
}
"""Replacements for class defaults that Quire does not serve."""
_NO_CLASS = {"kimi_k2", "new"}


def read_spec(folder: Path, raw: dict[str, Any]) -> tuple[Any, ...]:
    (folder / "config.json").write_text(json.dumps(raw))
    config = read_model_config(folder)
    if find_encoder_family(config.model_type) is not None:
        return replace(build_encoder_spec(config), classifier=None), config.max_position  # it is a function
    return decoder_spec(config), config.tie_embeddings, config.max_position


def drop_default_rope_fields(rope: dict[str, Any]) -> dict[str, Any]:
    """Drop fields that have no effect."""
    return {
        name: each for name, each in rope.items() if name != "type" and (name, each) != ("partial_rotary_factor", 1)
    }


@pytest.mark.few(12)
@pytest.mark.parametrize("kind", sorted({*decoder_model_types(), *encoder_model_types()} - _NO_CLASS))
def test_omitted_config_fields_default_to_transformers_values(kind: str, tmp_path: Path) -> None:
    CONFIG_MAPPING[kind](**_OTHERWISE.get(kind, {})).save_pretrained(tmp_path)
    full_config = {"model_type": kind, **json.loads((tmp_path / "config.json").read_text())}
    if rope := full_config.get("rope_parameters"):
        full_config["rope_parameters"] = drop_default_rope_fields(rope)
    needed = _NEEDED | _ALSO_NEEDED.get(kind, set())
    required_only = {name: value for name, value in full_config.items() if name in needed}
    assert len(required_only) < len(full_config)
    assert read_spec(tmp_path, required_only) == read_spec(tmp_path, full_config)


@pytest.mark.parametrize("family", ["gemma", "gemma2", "gemma3"])
def test_gemma_generates_without_tie_word_embeddings_field(family: str, tmp_path: Path) -> None:
    """Published Gemma configs omit tie_word_embeddings, and the files have no lm_head."""
    path = save_tiny_model(tmp_path, family)
    config = json.loads((path / "config.json").read_text())
    del config["tie_word_embeddings"]
    (path / "config.json").write_text(json.dumps(config))
    engine = EngineCore(EngineConfig(model=str(path), num_kv_blocks=16))
    assert engine.info.tasks == ("generate",)
    assert len(run(engine, [request("a", [5, 6, 7], max_tokens=3)])["a"].ids) == 3


def test_null_config_field_differs_from_omitted_field(tmp_path: Path) -> None:
    """For fields where transformers gives null a meaning."""

    def read(**fields: Any) -> ModelConfig:
        shape = {"vocab_size": 320, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 8}
        shape |= {"intermediate_size": 96, "model_type": "mistral"}
        (tmp_path / "config.json").write_text(json.dumps(shape | fields))
        return read_model_config(tmp_path)

    assert read(num_attention_heads=16).num_kv_heads == 8
    assert read(num_attention_heads=16, num_key_value_heads=None).num_kv_heads == 16
    assert read(model_type="youtu", num_key_value_heads=8).raw["q_lora_rank"] == 1536
    assert read(model_type="youtu", num_key_value_heads=8, q_lora_rank=None).raw["q_lora_rank"] is None
