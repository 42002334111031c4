"""Kimi Linear as published: config.json, names of tensors, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.engine.architecture import KimiDeltaAttentionSpec, MLALayerSpec, MoELayerSpec
from quire.engine.checkpoint.family_spec import read_decoder_spec
from quire.engine.checkpoint.model_resolver import read_model_config
from quire.engine.checkpoint.sizes.model_sizes import read_model_sizes
from quire.engine.common.config import EngineConfig
from quire.engine.common.errors import ConfigError, ModelError
from quire.engine.engine_core import EngineCore
from quire.engine.models import decoder_spec
from quire.engine.worker.device_plan import check_device_supports_attention
from tests.engine.harness import request, run
from tests.tiny_models import save_tiny_model

ATTENTION = [4, 8, 12, 16, 20, 24, 27]
PUBLISHED: dict[str, Any] = {
    "model_type": "kimi_linear",
    "dtype": "bfloat16",
    "vocab_size": 163_840,
    "hidden_size": 2304,
    "head_dim": 72,
    "intermediate_size": 9216,
    "num_hidden_layers": 27,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "mla_use_nope": True,
    "linear_attn_config": {
        "full_attn_layers": ATTENTION,
        "kda_layers": [layer for layer in range(1, 28) if layer not in ATTENTION],
        "head_dim": 128,
        "num_heads": 32,
        "short_conv_kernel_size": 4,
    },
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "num_experts": 256,
    "num_experts_per_token": 8,
    "num_shared_experts": 1,
    "moe_intermediate_size": 1024,
    "moe_router_activation_func": "sigmoid",
    "moe_renormalize": True,
    "num_expert_group": 1,
    "topk_group": 1,
    "use_grouped_topk": True,
    "routed_scaling_factor": 2.446,
    "model_max_length": 1_048_576,
    "num_nextn_predict_layers": 0,
}
"""Kimi-Linear-48B-A3B-Instruct's fields."""
SHAPES_OF_DELTA = {
    **dict.fromkeys(("q_proj.weight", "k_proj.weight", "v_proj.weight"), (4096, 2304)),
    **dict.fromkeys(("q_conv1d.weight", "k_conv1d.weight", "v_conv1d.weight"), (4096, 1, 4)),
    **dict.fromkeys(("f_a_proj.weight", "g_a_proj.weight"), (128, 2304)),
    **dict.fromkeys(("f_b_proj.weight", "g_b_proj.weight"), (4096, 128)),
    "b_proj.weight": (32, 2304),
    "A_log": (1, 1, 32, 1),
    "dt_bias": (4096,),
    "o_norm.weight": (128,),
    "o_proj.weight": (2304, 4096),
}
SHAPES_OF_LATENTS = {
    "q_proj.weight": (32 * 192, 2304),
    "kv_a_proj_with_mqa.weight": (576, 2304),
    "kv_a_layernorm.weight": (512,),
    "kv_b_proj.weight": (32 * 256, 512),
    "o_proj.weight": (2304, 4096),
}


def test_published_config_gives_layers_and_tensors_of_checkpoint() -> None:
    spec = read_decoder_spec(PUBLISHED)
    assert spec is not None
    kinds = [type(mixer) for mixer, _ in spec.layers]
    assert [at for at, kind in enumerate(kinds, 1) if kind is MLALayerSpec] == ATTENTION
    assert set(kinds) == {MLALayerSpec, KimiDeltaAttentionSpec}
    assert [isinstance(inner, MoELayerSpec) for _, inner in spec.layers] == [False] + [True] * 26
    for at, expected in ((0, SHAPES_OF_DELTA), (3, SHAPES_OF_LATENTS)):
        (mixer, inner), prefix = spec.layers[at], f"model.layers.{at}"
        shapes = mixer.parameter_shapes(prefix, 2304)
        assert shapes.pop(f"{prefix}.input_layernorm.weight") == (2304,)
        assert shapes == {f"{prefix}.self_attn.{name}": shape for name, shape in expected.items()}
        tensors = inner.parameter_shapes(prefix, 2304)
        experts = f"{prefix}.block_sparse_moe"
        names = ["experts.255.w1", "experts.0.w2", "experts.0.w3", "gate", "shared_experts.gate_proj"]
        found = {f"{experts}.{name}.weight" for name in names} | {f"{experts}.gate.e_score_correction_bias"}
        assert tensors.keys() >= (found if at else {f"{prefix}.mlp.{name}_proj.weight" for name in ("gate", "down")})
    attention = spec.layers[3][0]
    assert isinstance(attention, MLALayerSpec)
    assert (attention.rope, attention.scale) == (None, 192**-0.5)


def test_published_config_has_announced_number_of_parameters() -> None:
    sizes = read_model_sizes(PUBLISHED)
    assert sizes.num_parameters == pytest.approx(49.1e9, rel=0.01)


def test_transformers_names_of_dense_layers_equal_published_names(tmp_path: Path) -> None:
    """transformers saves the dense layers' MLPs as block_sparse_moe."""
    saved = save_tiny_model(tmp_path / "saved", "kimi_linear")
    published = tmp_path / "published"
    published.mkdir()
    (published / "config.json").write_bytes((saved / "config.json").read_bytes())
    tensors, dense = load_file(saved / "model.safetensors"), "model.layers.0.block_sparse_moe."
    assert any(name.startswith(dense) for name in tensors)
    renamed = {name.replace(dense, "model.layers.0.mlp."): tensor for name, tensor in tensors.items()}
    save_file(renamed, published / "model.safetensors")
    asked = [request("a", list(range(5, 50)), max_tokens=8, logprobs=0)]
    answers = [run(EngineCore(EngineConfig(model=str(each), num_kv_blocks=40)), asked) for each in (saved, published)]
    assert (answers[0]["a"].ids, answers[0]["a"].logprobs) == (answers[1]["a"].ids, answers[1]["a"].logprobs)


LINEAR: dict[str, Any] = PUBLISHED["linear_attn_config"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"linear_attn_config": LINEAR | {"kda_layers": [1, 2]}},
            "linear_attn_config: kda_layers and full_attn_layers",
        ),
        ({"linear_attn_config": LINEAR | {"full_attn_layers": None}}, "must name each of the 27 layers once"),
        ({"linear_attn_config": LINEAR | {"head_dim": 24}}, "linear_head_dim: expected a multiple of 16, got 24"),
        ({"linear_attn_config": LINEAR | {"head_dim": "x"}}, r"linear_attn_config\.head_dim: expected int"),
        ({"linear_attn_config": LINEAR | {"gate_lower_bound": -5.0}}, "linear_attn_config: gate_lower_bound"),
        ({"linear_attn_config": LINEAR | {"use_full_rank_gate": True}}, "linear_attn_config: use_full_rank_gate"),
        ({"linear_attn_config": 3}, "linear_attn_config"),
        ({"mla_use_nope": False}, "mla_use_nope"),
        ({"mla_use_output_gate": True}, "mla_use_output_gate is not supported"),
        ({"attn_res_block_size": 12}, "attn_res_block_size is not supported"),
        ({"moe_layer_freq": 2}, "moe_layer_freq"),
        ({"moe_router_activation_func": "softmax"}, "moe_router_activation_func: 'softmax'"),
        ({"num_experts_per_token": 300}, "num_experts_per_token"),
    ],
)
def test_unserved_config_is_named_in_error(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED | fields))
    with pytest.raises(ModelError, match=message):
        decoder_spec(read_model_config(tmp_path))


def test_kimi_linear_is_rejected_on_mps(tmp_path: Path) -> None:
    config = read_model_config(save_tiny_model(tmp_path, "kimi_linear"))
    check_device_supports_attention(torch.device("cuda"), config, decoder_spec(config))
    with pytest.raises(ConfigError, match="only on CPUs and CUDA GPUs so far"):
        check_device_supports_attention(torch.device("mps"), config, decoder_spec(config))
