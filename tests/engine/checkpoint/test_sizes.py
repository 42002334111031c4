"""Sizes computed from config.json equal those of the models that transformers builds from it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from quire.engine.checkpoint.model_resolver import read_model_config, read_raw_config
from quire.engine.checkpoint.sizes.model_sizes import read_model_sizes
from quire.engine.checkpoint.tensor_headers import CheckpointSize, read_checkpoint_size
from quire.engine.common.errors import ModelError
from quire.engine.families import decoder_model_types, find_decoder_family
from tests import tiny_encoders, tiny_models

OTHERS = ("axk1",)
MROPE = {"rope_type": "default", "rope_theta": 1_000_000.0, "mrope_section": [16, 24, 24]}
UNSAID: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"num_experts_per_tok": 6},
    "dots1": {"n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6},
    "falcon_h1": {"mamba_d_ssm": 8192},  # the default gives heads of size 8, which no model has
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128, "num_experts": 4, "moe_topk": 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 16},
    "qwen2_5_vl_text": {"rope_parameters": MROPE},
    "qwen2_vl_text": {"rope_parameters": MROPE},
    "nemotron": {"num_key_value_heads": 48},
}
"""Fields that transformers needs but has no usable default for."""


NOT_COUNTED: dict[str, Callable[[Any], int]] = {
    "apertus": lambda config: config.num_hidden_layers,  # xIELU's beta, a buffer in transformers
    "opt": lambda config: -2 * config.hidden_size,  # two positions that no token uses
}
"""Differences between read_model_sizes and the number of transformers' parameters."""


def config_content(kind: str, **fields: Any) -> dict[str, Any]:
    """A config.json as transformers writes it."""
    content: dict[str, Any] = json.loads(AutoConfig.for_model(kind, **fields).to_json_string(use_diff=False))
    return content


def count_parameters(model: torch.nn.Module) -> int:
    """Shared parameters count once. Router correction biases and layer scalars are buffers, and count too."""
    buffers = [buffer for name, buffer in model.named_buffers() if name.endswith(("bias", "layer_scalar"))]
    corrections = [buffer for buffer in buffers if buffer.is_floating_point()]
    return sum({id(each): each.numel() for each in (*model.parameters(), *corrections)}.values())


@pytest.mark.few(9)
@pytest.mark.parametrize(
    "kind", [*(each for each in decoder_model_types() if each in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES), *OTHERS]
)
def test_num_parameters_equals_transformers_model(kind: str) -> None:
    config = AutoConfig.for_model(kind, **UNSAID.get(kind, {}))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    sizes = read_model_sizes(config_content(kind, **UNSAID.get(kind, {})))
    expected = count_parameters(model) + NOT_COUNTED.get(kind, lambda config: 0)(config)
    assert sizes.num_parameters == pytest.approx(expected, rel=0.001 if find_decoder_family(kind) is None else 0)


@pytest.mark.few(6)
@pytest.mark.parametrize("family", tiny_models.FAMILIES)
def test_checkpoint_headers_give_num_parameters(family: str, tmp_path: Path) -> None:
    path = tiny_models.save_tiny_model(tmp_path, family, dtype=torch.bfloat16)
    raw, folder = read_raw_config(str(path))
    assert folder is not None
    layers, hidden = (int(raw.get(name) or 0) for name in ("num_hidden_layers", "hidden_size"))
    uncounted_floats = {"apertus": layers, "opt": 2 * hidden}  # an eps of each layer; two positions that no token uses
    assert read_checkpoint_size(folder) == CheckpointSize(
        read_model_sizes(raw).num_parameters + uncounted_floats.get(family, 0), 0
    )


def test_mixtral_active_parameters_count_only_routed_experts() -> None:
    sizes = read_model_sizes(config_content("mixtral"))
    assert sizes.active_parameters == pytest.approx(12.9e9, rel=0.02), "the number that Mixtral's authors give"
    assert sizes.active_parameters < sizes.parameters_read(4) < sizes.parameters_read(64) <= sizes.num_parameters


def test_nemotron_h_latent_experts_count_with_projections() -> None:
    """Nemotron 3 Super: its name says 120B parameters, 12B active."""
    sizes = {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128}
    spaces = {"mamba_num_heads": 128, "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 8, "conv_kernel": 4}
    experts = {"n_routed_experts": 512, "num_experts_per_tok": 22, "moe_intermediate_size": 2688}
    experts |= {"moe_latent_size": 1024, "moe_shared_expert_intermediate_size": 5376, "n_shared_experts": 1}
    model_sizes = read_model_sizes(
        {"model_type": "nemotron_h", "vocab_size": 131072, **sizes, **spaces, **experts}
        | {"hybrid_override_pattern": "MEMEMEMEME*" * 8, "tie_word_embeddings": False}
    )
    assert model_sizes.num_parameters == pytest.approx(120.67e9, rel=1e-4)
    assert model_sizes.active_parameters == pytest.approx(12.2e9, rel=0.01)


def test_sparse_mla_caches_latent_and_index_key_per_token() -> None:
    sizes = read_model_sizes(config_content("deepseek_v32"))
    assert (sizes.kv_values_per_token, sizes.num_kv_heads) == ((512 + 64 + 128) * 61, 1)


def test_mla_in_transformers_class_caches_expanded_keys_and_values() -> None:
    config = config_content("deepseek_v3")
    sizes = read_model_sizes({**config, "model_type": "axk1"})
    assert (sizes.kv_values_per_token, sizes.num_kv_heads) == (2 * 128 * (128 + 64) * 61, 128)
    native_sizes = read_model_sizes(config)
    assert (native_sizes.kv_values_per_token, native_sizes.num_kv_heads) == ((512 + 64) * 61, 1)


def test_num_parameters_of_vision_model_counts_text_part_only() -> None:
    text = config_content("qwen3")
    sizes = read_model_sizes({"model_type": "some_vl", "text_config": text})
    assert sizes.num_parameters == read_model_sizes(text).num_parameters
    assert any("text part" in note for note in sizes.notes)


def test_awq_weight_ratio_follows_bits() -> None:
    llama = config_content("llama")
    plain = read_model_sizes(llama)
    packed = read_model_sizes(llama | {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128}})
    assert packed.num_parameters == plain.num_parameters
    assert 0.25 < packed.weight_ratio < 0.32
    assert plain.weight_ratio == 1.0


def test_mxfp4_quantizes_experts_only() -> None:
    """gpt-oss-20b, whose config names no dtype: its index file says 13,761,264,768 bytes."""
    config = config_content("gpt_oss", num_hidden_layers=24, num_local_experts=32)
    config |= {"quantization_config": {"quant_method": "mxfp4"}, "dtype": None}
    sizes = read_model_sizes(config)
    assert (sizes.dtype, sizes.unsupported_reasons) == ("bfloat16", ())
    assert 2 * sizes.num_parameters * sizes.weight_ratio == pytest.approx(13_761_264_768, rel=0.002)
    experts = sizes.expert_parameters * 4.25 / 8
    unquantized_bytes = 2 * (
        sizes.num_parameters - sizes.embedding_parameters + sizes.head_parameters - sizes.expert_parameters
    )
    assert sizes.weight_fraction_read(1) * 13_761_264_768 == pytest.approx(
        unquantized_bytes + experts * 4 / 32, rel=0.002
    )
    assert read_model_sizes(config | {"quantization_config": None}).weight_fraction_read(1) == pytest.approx(
        3.61 / 20.91, rel=0.002
    )


@pytest.mark.parametrize(
    ("raw", "named"),
    [({}, "hidden_size"), ({"is_encoder_decoder": True}, "encoder"), ({"hidden_size": 8}, "num_hidden_layers")],
)
def test_config_that_is_no_decoder_is_rejected_with_reason(raw: dict[str, object], named: str) -> None:
    with pytest.raises(ModelError, match=named):
        read_model_sizes(raw)


@pytest.mark.parametrize(
    "outer", [{"quantization_config": {"quant_method": "quanto"}}, {"model_type": "vision-text-dual-encoder"}]
)
def test_rejected_encoder_is_not_sized_as_decoder(outer: dict[str, Any]) -> None:
    """Also if another reason keeps it from being served, or if the model has other parts."""
    text = {**tiny_encoders.SHAPE, "model_type": "bert", "hidden_act": "mish"}
    raw = text | outer if "model_type" not in outer else outer | {"text_config": text}
    with pytest.raises(ModelError, match="hidden_act 'mish' is not supported"):
        read_model_sizes(raw)
    assert read_model_sizes({**text, "is_decoder": True}).kv_values_per_token


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"model_type": "qwen9_vl", "text_config": {"model_type": "qwen9", "num_attention_heads": 4}}, "qwen9_vl"),
        ({"model_type": "gemma3", "text_config": {"model_type": "gemma9_text"}}, "gemma3"),
        ({"model_type": "whisper", "is_encoder_decoder": True, "d_model": 64}, "whisper"),
        ({"model_type": "rwkv", "hidden_size": 64, "vocab_size": 320, "num_hidden_layers": 2}, "rwkv"),
    ],
)
def test_unsupported_family_is_named_in_error(config: dict[str, Any], says: str, tmp_path: Path) -> None:
    """The error names the family, not the first field that it calls by another name."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    inner = config.get("text_config", {}).get("model_type")
    part = f", whose text part is {inner}" if inner else ""
    with pytest.raises(ModelError, match=f"model_type: Quire does not serve {says} models{part}: "):
        read_model_config(tmp_path)
    if not inner:
        with pytest.raises(ModelError, match=f"Quire does not serve {says} models: "):
            read_model_sizes(config)


@pytest.mark.parametrize(
    "field", ["sliding_window", "num_key_value_heads", "num_attention_heads", "intermediate_size", "num_experts"]
)
@pytest.mark.parametrize("value", [[1, 2], -5, float("nan"), "x"])
def test_read_model_sizes_error_names_invalid_gemma4_field(field: str, value: Any) -> None:
    """Gemma 4's layers are counted one by one."""
    raw = {**tiny_models.SHAPE, **tiny_models.FAMILIES["gemma4-moe"], field: value}
    with pytest.raises(ModelError, match=field):
        read_model_sizes(raw)


@pytest.mark.parametrize("method", [{"quant_method": "gptq", "bits": 4, "group_size": 128}, {"quant_method": "fp8"}])
def test_quantized_encoder_is_unsupported(method: dict[str, Any]) -> None:
    encoder = config_content("bert") | {"quantization_config": method}
    assert read_model_sizes(encoder).unsupported_reasons == ("Quire does not serve quantized weights of an encoder",)
    assert read_model_sizes(config_content("bert")).unsupported_reasons == ()
    decoder = config_content("llama") | {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 128}}
    assert read_model_sizes(decoder).unsupported_reasons == ()
