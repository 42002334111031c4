"""A GGUF file gives the tokens and logprobs of a safetensors checkpoint that holds the same numbers, most of them
bitwise.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quire.engine.checkpoint.model_resolver import read_model_config, resolve_model
from quire.engine.common.config import EngineConfig
from quire.engine.common.errors import ConfigError
from quire.engine.engine_core import EngineCore
from quire.engine.families.base.layer_types import layer_windows
from quire.engine.models import decoder_spec
from tests.engine.harness import Answer, request, run
from tests.gguf_deltas import write_delta_gguf
from tests.gguf_models import write_gguf
from tests.gguf_spaces import write_space_gguf
from tests.tiny_models import MSCALE, VOCAB, YARN, save_tiny_model

PROMPTS = [[3 + (7 * i + j * j) % (VOCAB - 3) for j in range(length)] for i, length in enumerate((1, 17, 40))]
FAMILIES = {
    "llama": {},
    "llama-tied-biased": {},
    "llama3-rope": {},
    "llama-linear-rope": {},
    "qwen2": {},
    "qwen3": {},
    "mixtral": {},
    "qwen3-moe": {"mlp_only_layers": [], "norm_topk_prob": True},
    "gpt_oss": {"swiglu_limit": 7.0},
    "qwen2-yarn": {"rope_parameters": YARN | {"truncate": True}},
    "smollm3": {"no_rope_layer_interval": 4, "num_hidden_layers": 5},
    "gemma": {},
    "gemma2": {"query_pre_attn_scalar": 32},
    "gemma3": {"num_hidden_layers": 7, "layer_types": None, "query_pre_attn_scalar": 32},
    "gemma3-linear-rope": {"num_hidden_layers": 7, "sliding_window_pattern": 6, "query_pre_attn_scalar": 32},
    "phi3": {},
    "phi3-longrope": {},
    "granite": {},
    "olmo2": {},
    "glm4": {},
    "exaone4": {},
    "exaone4-full": {},
    "seed_oss": {},
    "hunyuan_v1_dense": {},
    "ernie4_5": {},
    "arcee": {},
    "cohere": {},
    "cohere2": {"num_hidden_layers": 4, "layer_types": [*["sliding_attention"] * 3, "full_attention"]},
    "nemotron": {},
    "starcoder2": {},
    "stablelm": {},
    "stablelm-parallel": {},
    "gpt_neox": {},
    "gpt_neox-serial": {},
    "lfm2": {},
    "lfm2-biased": {"conv_bias": False},
    "qwen2-moe": {"decoder_sparse_step": 1, "norm_topk_prob": False},
    "olmoe": {},
    "glm4_moe": {},
    "dots1": {"sliding_window": None},
    "deepseek_v2": {"rope_parameters": MSCALE | {"mscale": 0.9}},
    "deepseek_v2-lite": {"attention_bias": False},
    "deepseek_v3": {"rope_parameters": MSCALE | {"mscale": 0.9}},
    "glm4_moe_lite": {},
    "youtu": {"rope_interleave": True, "attention_bias": False},
    "ernie4_5_moe": {"moe_layer_end_index": -1, "moe_layer_start_index": 1},
    "granitemoe": {},
    "granitemoeshared": {},
    "hunyuan_v1_moe": {},
    "minimax_m2": {},
    "phimoe": {"router_jitter_noise": 0.01},
    "lfm2_moe": {},
    "gpt2": {"scale_attn_by_inverse_layer_idx": False},
}
"""Config overrides by family, for fields that GGUF cannot store: llama.cpp knows their values from the real models."""


ROUNDED = ("llama3-rope", "phi3-longrope", "granite", "hunyuan_v1_dense")
ROUNDED += ("granitemoe", "granitemoeshared", "hunyuan_v1_moe")
"""GGUF stores the RoPE frequencies and multipliers of these families in 32 bits."""


def answers(path: Path, **settings: Any) -> dict[str, Answer]:
    settings = {
        "model": str(path),
        "attention_backend": "reference",
        "num_kv_blocks": 64,
        "dtype": "float32",
    } | settings
    config = EngineConfig(**settings)
    requests = [
        request(str(i), prompt, max_tokens=6, logprobs=2, prompt_logprobs=1) for i, prompt in enumerate(PROMPTS)
    ]
    return run(EngineCore(config), requests)


def assert_same_answers(file: Path, folder: Path, *, tolerance: float = 0.0) -> None:
    """Equal tokens, and logprobs that differ by at most `tolerance`."""
    expected, actual = answers(folder), answers(file)
    for key, answer in expected.items():
        assert actual[key].ids == answer.ids
        logprobs = [each.logprob for each in answer.logprobs]
        assert [each.logprob for each in actual[key].logprobs] == pytest.approx(logprobs, abs=tolerance, rel=0)


@pytest.mark.few(2)
@pytest.mark.parametrize("family", FAMILIES)
def test_gguf_logprobs_equal_safetensors_for_each_family(family: str, tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "folder", family.removesuffix("-yarn"), **FAMILIES[family])
    file = write_gguf(folder, tmp_path / "model.gguf")
    assert_same_answers(file, folder, tolerance=1e-4 if family in ROUNDED else 0.0)


TYPES = [
    *(("Q4_0", "Q8_0"), ("Q4_1", "Q5_1"), ("Q5_0", "F16"), ("Q4_K", "Q6_K"), ("Q5_K", "IQ4_XS")),
    *(("Q2_K", "Q3_K"), ("IQ4_NL", "BF16"), ("MXFP4", "F32"), ("IQ2_XXS", "IQ3_S"), ("IQ2_XS", "IQ3_XXS")),
    *(("IQ2_S", "Q4_K"), ("IQ1_S", "IQ1_M"), ("TQ1_0", "TQ2_0"), ("NVFP4", "Q6_K")),
]
LINEARS = ("llama-tied-biased", "qwen2", "lfm2")
"""Families whose fused linears, biases or heads differ from Llama's; types of blocks do not depend on that."""


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("family", "kinds"),
    [
        *(("llama", kinds) for kinds in TYPES),
        *((family, kinds) for family in LINEARS for kinds in (("Q4_0", "Q8_0"), ("NVFP4", "Q6_K"))),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_ggml_type_logprobs_equal_dequantized_weights(kinds: tuple[str, str], family: str, tmp_path: Path) -> None:
    """Both types occur in every fused linear, in the embedding and in the head."""
    folder = save_tiny_model(tmp_path / "folder", family, hidden_size=256, intermediate_size=768, num_hidden_layers=2)
    mixed = ("attn_v", "ffn_up", "output.")
    file = write_gguf(folder, tmp_path / "m.gguf", lambda name: kinds[any(part in name for part in mixed)])
    assert_same_answers(file, folder)


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["F32", "Q4_0"])
@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5-grouped", "qwen3_5-moe", "qwen3-next"])
def test_gguf_delta_net_with_interleaved_value_heads_equals_safetensors(family: str, kind: str, tmp_path: Path) -> None:
    """Two or more value heads per key head; quantized columns are gathered when they are read."""
    values = {} if family == "qwen3_5-grouped" else {"linear_num_value_heads": 8}
    widths = {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64, "mlp_only_layers": []}
    widths = widths if family in ("qwen3_5-moe", "qwen3-next") else {}
    folder = save_tiny_model(tmp_path / "folder", family, hidden_size=128, **values, **widths)
    file = write_delta_gguf(folder, tmp_path / "model.gguf", lambda _: kind)
    assert_same_answers(file, folder, tolerance=5e-6)


_NEMOTRON_DENSE = {"layer_types": ["linear_attention", "mlp", "full_attention", "linear_attention"]}
SPACES: dict[str, dict[str, Any]] = {
    "mamba2": {},
    "mamba2-tied": {},
    "mamba": {},
    "mamba-tied": {},
    "falcon_mamba": {"mixer_rms_eps": 1e-6},
    "jamba": {},
    "jamba-dense": {"mamba_proj_bias": False},
    "granite-hybrid": {},
    "granite-hybrid-dense": {},
    "falcon_h1": {"projectors_bias": False},
    "falcon_h1-normed-behind": {"mamba_d_ssm": 192, "mamba_n_heads": 12},  # as 1.5B's: no multiple of hidden_size
    "nemotron_h": {"layer_types": ["linear_attention", "moe", "full_attention", "linear_attention"]},
    "nemotron_h-dense": _NEMOTRON_DENSE,
    "nemotron_h-latent": {"moe_latent_size": 64, "mlp_bias": False},
}
"""Config overrides by family, as in FAMILIES."""


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("family", "kind"),
    [(family, kind) for family in SPACES for kind in ("F32", "Q4_0") if kind == "F32" or "falcon_h1" not in family],
)
def test_gguf_mamba_families_equal_safetensors(family: str, kind: str, tmp_path: Path) -> None:
    """GGUF stores decay rates, not their logarithms. Falcon-H1 is not quantized: its multipliers are in its weights."""
    wide = {"hidden_size": 128, "moe_intermediate_size": 64, "shared_intermediate_size": 96}
    wide |= {"moe_shared_expert_intermediate_size": 32, "time_step_rank": 32, "mamba_dt_rank": 32}
    wide |= {"expand": 1, "mamba_expand": 1}
    folder = save_tiny_model(
        tmp_path / "folder", family.replace("nemotron_h-dense", "nemotron_h"), **wide, **SPACES[family]
    )
    file = write_space_gguf(folder, tmp_path / "model.gguf", lambda _: kind)
    assert_same_answers(file, folder, tolerance=1e-4)


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", ["F32", "Q4_0"])
@pytest.mark.parametrize("joined", [True, False])
def test_gguf_mla_kv_expansion_may_be_one_tensor_or_two(joined: bool, kind: str, tmp_path: Path) -> None:
    """Older and newer files differ here. Quantized weights are expanded when they are loaded."""
    shape = {"kv_lora_rank": 64, "q_lora_rank": 64, "qk_nope_head_dim": 32, "v_head_dim": 32, "hidden_size": 128}
    experts = {"moe_intermediate_size": 64, "rope_parameters": MSCALE | {"mscale": 0.9}}
    folder = save_tiny_model(tmp_path / "folder", "deepseek_v3", **shape, **experts)
    file = write_gguf(folder, tmp_path / "model.gguf", lambda _: kind, joined=joined)
    assert_same_answers(file, folder)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "kinds", [("Q4_K", "Q8_0"), ("MXFP4", "Q8_0"), ("Q5_0", "BF16"), ("Q6_K", "F16")], ids="-".join
)
@pytest.mark.parametrize("family", ["mixtral", "qwen3-moe", "gpt_oss"])
def test_ggml_expert_type_logprobs_equal_dequantized_weights(
    kinds: tuple[str, str], family: str, tmp_path: Path
) -> None:
    shape = {"hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 256, "num_hidden_layers": 2}
    overrides = FAMILIES[family] if family != "mixtral" else {"num_local_experts": 3}
    folder = save_tiny_model(tmp_path / "folder", family, **(shape | overrides))
    file = write_gguf(folder, tmp_path / "m.gguf", lambda name: kinds["_exps" not in name])
    assert_same_answers(file, folder)


@pytest.mark.few(1)
@pytest.mark.parametrize("settings", [{"quantization": "int8"}, {"quantization": "int4"}, {"quantize_embedding": True}])
def test_float_gguf_is_quantized_at_load_like_safetensors(settings: dict[str, Any], tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "folder", "llama", hidden_size=256, intermediate_size=512)
    expected, actual = answers(folder, **settings), answers(write_gguf(folder, tmp_path / "m.gguf"), **settings)
    plain = answers(folder)
    for key, answer in expected.items():
        assert [each.logprob for each in actual[key].logprobs] == [each.logprob for each in answer.logprobs]
        assert [each.logprob for each in plain[key].logprobs] != [each.logprob for each in answer.logprobs]


@pytest.mark.parametrize("setting", [{"quantization": "int8"}, {"quantize_embedding": True}])
def test_quantized_gguf_cannot_be_quantized_at_load(setting: dict[str, Any], tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "folder", "llama", hidden_size=256, intermediate_size=512, num_hidden_layers=1)
    file = write_gguf(folder, tmp_path / "m.gguf", lambda name: "Q8_0")
    with pytest.raises(ConfigError, match=next(iter(setting))):
        answers(file, **setting)


def test_gguf_expert_tensor_with_wrong_expert_count_is_rejected(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "folder", "mixtral", num_hidden_layers=1)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_local_experts": 3}))
    with pytest.raises(ConfigError, match=r"ffn_\w+_exps.weight has the shape .* not of 3 experts"):
        answers(write_gguf(folder, tmp_path / "m.gguf"))


def test_gguf_expert_tensor_of_missing_layer_is_named_in_error(tmp_path: Path) -> None:
    """A tensor of a few bytes would otherwise give a name for each expert, and a file may have many such tensors."""
    folder = save_tiny_model(tmp_path / "folder", "mixtral", num_hidden_layers=2)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    with pytest.raises(ConfigError, match=r"that the model lacks: blk\.1\.ffn_\w+_exps.weight"):
        answers(write_gguf(folder, tmp_path / "m.gguf"))


def test_gguf_mixtral_without_window_field_has_full_attention(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "folder", "mixtral", num_hidden_layers=2)
    config = read_model_config(write_gguf(folder, tmp_path / "m.gguf"))
    windows = tuple(each.window for each in decoder_spec(config).kv_cache_specs)
    assert windows == layer_windows(config.raw, 2) == (None, None)


def test_folder_resolves_to_gguf_only_without_safetensors(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "folder", "llama")
    (tmp_path / "other").mkdir()
    file = write_gguf(folder, tmp_path / "other" / "a.gguf")
    (tmp_path / "other" / "mmproj-a.gguf").write_bytes(b"GGUF")
    assert resolve_model(str(file.parent)) == file
    file.rename(folder / "a.gguf")
    assert resolve_model(str(folder)) == folder
