"""Any value in any field of config.json is read, or rejected with an error that names the field."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from transformers import CONFIG_MAPPING

from quire.engine.architecture.attention import AttentionLayerSpec
from quire.engine.architecture.kv_cache_spec import KVElementSizes
from quire.engine.checkpoint.config_reader import explain_unsupported_model, normalize_config_fields
from quire.engine.checkpoint.model_resolver import read_generation_defaults, read_model_config, read_raw_config
from quire.engine.checkpoint.sizes.model_sizes import read_model_sizes
from quire.engine.common.errors import ModelError
from quire.engine.families.base.schema.config_schema import (
    FamilyConfigFields,
    PlanConfigFields,
    RopeFields,
    RopesByLayerType,
)
from quire.engine.layers.rope import rope_table
from quire.engine.models import decoder_spec
from tests import tiny_models
from tests.tiers import slow

VALUES: list[Any] = [None, True, 0, 1, -1, 3, 10**9, 10**30, 0.5, 1e300, math.nan, math.inf, "", "x", "1" * 10_000]
VALUES += [[], [1], ["full_attention"], [None], [[]], {}, {"a": 1}, {"rope_type": "linear"}, {"full_attention": {}}]


def values_by_field(fields: type, share: int) -> list[tuple[str, Any]]:
    """One in `share` of all pairs of a field and a value; with 7 each field has some values, each value some fields."""
    return list(itertools.product(get_type_hints(fields), VALUES))[::share]


def read_all(path: Path) -> None:
    """Read of config.json what a start reads before it loads weights."""
    spec = decoder_spec(read_model_config(path))
    for each in spec.sublayers_of_kind(AttentionLayerSpec):
        if each.rope is not None:
            assert rope_table(each.rope, each.head_dim, 8).isfinite().all()
        assert math.isfinite(each.scale)
        assert each.window is None or each.window > 0
    assert len(spec.layer_cache_specs) == spec.num_layers


def read_sizes(path: Path) -> None:
    sizes = read_model_sizes(read_raw_config(str(path))[0])
    assert sum(each.bytes_per_token(KVElementSizes(2, 2)) for each in sizes.cache_specs) > 0


def error_of(read: Callable[[Path], None], path: Path) -> str:
    """The error's one line; empty if the config is accepted."""
    try:
        read(path)
    except ModelError as error:
        return str(error)
    return ""


READERS = (
    "llama",
    "mistral-window",
    "qwen2-window",
    "smollm3",
    "gemma2",
    "gemma3",
    "gemma3-with-images",
    "gpt_oss",
    "qwen3-moe",
    "llama4",
    "phi3-longrope",
    "ministral3",
    "granite_swa",
    "olmo3",
    "lfm2",
    "qwen3_5",
    "granite-hybrid",
    "falcon_h1",
    "mamba2",
    "falcon_mamba",
    "jamba",
    "nemotron_h",
    "zamba2",
    "deepseek_v3",
    "glm_moe_dsa",
    "minicpm3",
    "hunyuan_v1_dense",
    "cohere-norms",
    "gptj",
    "gpt2",
    "opt",
    "falcon-newer",
    "bloom",
    "mpt",
)
"""Families that read fields that no other family has."""


@pytest.mark.parametrize(("family", "share"), [("llama", 7), *slow(*((family, 1) for family in READERS))])
def test_any_value_of_config_field_is_read_or_rejected(family: str, share: int, tmp_path: Path) -> None:
    config = tiny_models.SHAPE | tiny_models.FAMILIES[family]
    if "text_config" in config:
        config["text_config"] = config["text_config"] | {"model_type": "gemma3_text"}
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    read_all(tmp_path)
    chosen = values_by_field(FamilyConfigFields, share)
    refused = 0
    for field, value in chosen:
        inner = {field: value}
        changed = config | inner
        if "text_config" in config:
            changed = config | {"text_config": config["text_config"] | inner}
        file.write_text(json.dumps(changed))
        refused += bool(error_of(read_all, tmp_path))
    assert refused > len(chosen) / 8


ROPES = {
    "alpha": ("hunyuan_v1_dense",),
    "llama_4_scaling_beta": ("ministral3",),
    **dict.fromkeys(("long_factor", "partial_rotary_factor", "short_factor"), ("phi3-longrope",)),
}
"""Families by the RoPE fields that only they have."""


@pytest.mark.few(12)
@pytest.mark.parametrize("field", [*get_type_hints(RopeFields), *get_type_hints(RopesByLayerType)])
def test_any_value_of_rope_field_is_read_or_rejected(field: str, tmp_path: Path) -> None:
    for family in ROPES.get(field, ("llama3-rope", "gemma3-linear-rope", "gpt_oss")):
        config = tiny_models.SHAPE | tiny_models.FAMILIES[family]
        for value in VALUES:
            ropes = config["rope_parameters"]
            nested = {name: each | {field: value} for name, each in ropes.items() if isinstance(each, dict)}
            changed = {"rope_parameters": nested or ropes | {field: value}}
            (tmp_path / "config.json").write_text(json.dumps(config | changed))
            assert "\n" not in error_of(read_all, tmp_path)


@pytest.mark.parametrize(
    ("family", "field", "value"),
    [
        *(
            (family, "n_routed_experts", value)
            for family in ("deepseek_v3", "glm4_moe")
            for value in ("x", None, 10**9)
        ),
        *(("gpt2", "n_embd", value) for value in ("x", None, -3)),
        ("gpt2", "n_layer", 10**9),
        ("opt", "ffn_dim", "x"),
        ("gpt_neox", "rotary_emb_base", "x"),
        ("ernie4_5_moe", "moe_k", 99),
        ("mixtral", "num_local_experts", "x"),
    ],
)
def test_config_error_names_field_as_written_in_file(family: str, field: str, value: Any, tmp_path: Path) -> None:
    """The error does not use Quire's own name of the field."""
    tiny_models.save_tiny_model(tmp_path, family)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, field: value}))
    errors = [each for each in (error_of(read_all, tmp_path), error_of(read_sizes, tmp_path)) if each]
    assert errors
    for each in errors:
        assert f"{field}" in each
        assert field == "num_local_experts" or "num_local_experts" not in each
        assert "hidden_size" not in each


PLANNED = ("llama", "mixtral", "deepseek_v3", "gpt2", "falcon", "qwen2", "exaone4", "lfm2")


@pytest.mark.parametrize(("kind", "share"), [("llama", 7), ("lfm2", 7), *slow(*((kind, 1) for kind in PLANNED))])
def test_plan_reads_or_rejects_any_value_of_config_field(kind: str, share: int, tmp_path: Path) -> None:
    config = tiny_models.SHAPE | {"model_type": kind, "num_local_experts": 4, "num_experts_per_tok": 2}
    if kind == "deepseek_v3":
        config |= {"kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
    for field, value in values_by_field(PlanConfigFields, share):
        (tmp_path / "config.json").write_text(json.dumps(config | {field: value}))
        assert "\n" not in error_of(read_sizes, tmp_path)


def test_unsupported_reasons_include_text_config_fields(tmp_path: Path) -> None:
    """`quire pull`, `show` and `serve --models cache` read config.json as `quire plan` does."""
    text = tiny_models.SHAPE | {"model_type": "llama", "quantization_config": {"quant_method": "quanto"}}
    rope = {"rope_scaling": {"rope_type": "new", "factor": 2.0}}
    for outer in ({}, {"quantization_config": "x"}):
        raw = {"model_type": "llava", "text_config": text | rope} | outer
        (tmp_path / "config.json").write_text(json.dumps(raw))
        reasons = explain_unsupported_model(read_raw_config(str(tmp_path))[0])
        assert [each for word in ("quanto", "rope_type new") for each in reasons if word in each] == reasons


@pytest.mark.slow
def test_model_sizes_are_read_from_transformers_default_configs(tmp_path: Path) -> None:
    """For all of transformers' families: sizes readable from the configuration are readable from its file."""
    planned = 0
    for kind in CONFIG_MAPPING:
        try:
            text = CONFIG_MAPPING[kind]().to_json_string()
            expected = read_model_sizes(json.loads(text))
        except Exception:  # the configuration has no defaults, or the model is no decoder
            continue
        (tmp_path / "config.json").write_text(text)
        assert read_model_sizes(read_raw_config(str(tmp_path))[0]) == expected, kind
        planned += 1
    assert planned > 100


class ComparedInt(int):
    """An int that counts how often it is compared for equality."""

    comparisons = 0

    def __eq__(self, other: object) -> bool:
        type(self).comparisons += 1
        return int(self) == other

    __hash__ = int.__hash__


@pytest.mark.parametrize(("model_type", "field"), [("lfm2", "full_attn_idxs"), ("bamba", "attn_layer_indices")])
def test_layer_index_lists_are_normalized_in_linear_time(model_type: str, field: str) -> None:
    """Millions of entries delayed a start by minutes (the review of issue 61)."""
    ComparedInt.comparisons = 0
    entries = [ComparedInt(1000 + each) for each in range(1000)] + [ComparedInt(2)]
    fields = normalize_config_fields({"model_type": model_type, "num_hidden_layers": 500, field: entries})
    assert [layer for layer, kind in enumerate(fields["layer_types"]) if kind == "full_attention"] == [2]
    assert ComparedInt.comparisons < 2 * len(entries)


def test_eos_token_ids_outside_vocabulary_are_ignored(tmp_path: Path) -> None:
    """Some files have -1 or an id of another vocabulary; transformers never generates these ids either."""
    vocab = tiny_models.SHAPE["vocab_size"]
    changed = {"model_type": "llama", "eos_token_id": [2, -1, vocab, vocab - 1]}
    (tmp_path / "config.json").write_text(json.dumps(tiny_models.SHAPE | changed))
    assert read_model_config(tmp_path).eos_token_ids == (2, vocab - 1)


def test_null_config_field_equals_omitted_field(tmp_path: Path) -> None:
    config = tiny_models.SHAPE | {"model_type": "llama"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    without_nulls = read_model_config(tmp_path)
    nulls = dict.fromkeys(get_type_hints(FamilyConfigFields))
    (tmp_path / "config.json").write_text(json.dumps(nulls | config))
    (tmp_path / "generation_config.json").write_text('{"temperature": null, "do_sample": null, "top_k": 5}')
    with_nulls = read_model_config(tmp_path)
    for name in ("num_kv_heads", "head_dim", "max_position", "norm_eps", "rope", "dtype", "eos_token_ids"):
        assert getattr(with_nulls, name) == getattr(without_nulls, name)
    assert read_generation_defaults(tmp_path) == {"top_k": 5}
