"""Gemma's config.json as transformers 5 saves it, as published, and with omitted fields gives the same spec."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from quire.engine.architecture.attention import AttentionLayerSpec
from quire.engine.architecture.decoder import DecoderSpec
from quire.engine.checkpoint.model_resolver import read_model_config
from quire.engine.checkpoint.sizes.model_sizes import read_model_sizes
from quire.engine.common.config import EngineConfig
from quire.engine.common.errors import ModelError
from quire.engine.engine_core import EngineCore
from quire.engine.models import decoder_spec
from tests.tiny_models import save_tiny_model


def spec_of(path: Path, raw: dict[str, Any]) -> DecoderSpec:
    (path / "config.json").write_text(json.dumps(raw))
    return decoder_spec(read_model_config(path))


@pytest.mark.parametrize("scaling", [None, {"rope_type": "linear", "factor": 8.0}])
def test_gemma3_config_of_transformers_4_gives_same_spec(scaling: dict[str, Any] | None, tmp_path: Path) -> None:
    """gemma-3-1b-it's keys: two thetas, a scaling for one of them, and no layer_types."""
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 13, "num_attention_heads": 4}
    shape |= {"num_key_value_heads": 1, "head_dim": 16, "vocab_size": 99, "sliding_window": 20}
    old = {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": scaling, "sliding_window_pattern": 6}
    saved = AutoConfig.for_model("gemma3_text", **shape, rope_scaling=scaling).to_dict()
    assert "rope_theta" not in saved
    assert spec_of(tmp_path, {"model_type": "gemma3_text"} | shape | old) == spec_of(tmp_path, saved)
    spec = spec_of(tmp_path, saved)
    attention = spec.sublayers_of_kind(AttentionLayerSpec)
    assert [each.window for each in attention] == ([20] * 5 + [None]) * 2 + [20]
    assert [each.rope["rope_theta"] for each in attention if each.rope] == ([1e4] * 5 + [1e6]) * 2 + [1e4]
    kinds = [each.rope["rope_type"] for each in attention if each.rope]
    assert kinds == (["default"] * 5 + ["linear" if scaling else "default"]) * 2 + ["default"]


def test_gemma2_config_without_layer_types_alternates_windows(tmp_path: Path) -> None:
    saved = json.loads(AutoConfig.for_model("gemma2").to_json_string(use_diff=False))
    raw = {key: value for key, value in saved.items() if key not in ("layer_types", "tie_word_embeddings")}
    spec = spec_of(tmp_path, raw)
    assert spec == spec_of(tmp_path, saved)
    first, *others = spec.sublayers_of_kind(AttentionLayerSpec)
    assert [each.window for each in (first, *others)] == [4096, None] * 13
    assert read_model_sizes(raw).num_sliding_layers == read_model_sizes(saved).num_sliding_layers == 13
    assert (first.scale, first.softcap, spec.logit_softcap, spec.tie_embeddings) == (1 / 16, 50.0, 30.0, True)


def test_gemma3_vision_config_with_omitted_fields_gives_text_spec(tmp_path: Path) -> None:
    """gemma-3-4b-it's config omits transformers' defaults, and its decoder is its text_config."""
    text = {"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34}
    text |= {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024}
    spec = spec_of(
        tmp_path, {"model_type": "gemma3", "text_config": text, "eos_token_id": [1, 106], "torch_dtype": "bfloat16"}
    )
    whole = AutoConfig.for_model("gemma3_text", **{key: value for key, value in text.items() if key != "model_type"})
    assert spec == spec_of(tmp_path, whole.to_dict())
    first = spec.sublayers_of_kind(AttentionLayerSpec)[0]
    assert (first.num_heads, first.num_kv_heads, first.head_dim, spec.vocab_size) == (8, 4, 256, 262208)


def test_unsupported_gemma3_activation_or_bidirectional_is_rejected(tmp_path: Path) -> None:
    saved = AutoConfig.for_model("gemma3_text").to_dict()
    with pytest.raises(ModelError, match="hidden_act 'relu'"):
        spec_of(tmp_path, saved | {"hidden_activation": "relu"})
    with pytest.raises(ModelError, match="use_bidirectional_attention"):
        spec_of(tmp_path, saved | {"use_bidirectional_attention": True})


def test_gemma_embedding_scale_is_rounded_as_in_transformers(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path, "gemma3", dtype=torch.bfloat16, hidden_size=96)
    embedding = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).model.embed_tokens
    engine = EngineCore(EngineConfig(model=str(path), num_kv_blocks=8))
    assert engine.executor._model._embedding.scale == embedding.embed_scale.to(torch.bfloat16).item() == 9.8125
