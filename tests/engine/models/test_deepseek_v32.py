"""DeepSeek-V3.2 and GLM-5 are served with their published config.json and tensor names. What Quire lacks is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from quire.engine.architecture import IndexerSpec, MLALayerSpec
from quire.engine.checkpoint.family_spec import read_decoder_spec
from quire.engine.checkpoint.kv_cache_plan import GIB
from quire.engine.checkpoint.model_resolver import read_model_config
from quire.engine.checkpoint.sizes.model_sizes import read_model_sizes
from quire.engine.common.config import EngineConfig
from quire.engine.common.errors import ConfigError, ModelError
from quire.engine.engine_core import EngineCore
from quire.engine.models import decoder_spec
from quire.server.cli.plan.machine import Machine
from quire.server.cli.plan.model_plan import predict_kv_tokens
from tests.engine.harness import request, run
from tests.quantized_models import float8, quantize_checkpoint
from tests.tiny_models import save_tiny_model

PUBLISHED: dict[str, Any] = {
    "model_type": "deepseek_v32",
    "dtype": "bfloat16",
    "vocab_size": 129_280,
    "hidden_size": 7168,
    "intermediate_size": 18_432,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "num_hidden_layers": 61,
    "num_nextn_predict_layers": 1,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "n_group": 8,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 3,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "index_head_dim": 128,
    "index_n_heads": 64,
    "index_topk": 2048,
    "max_position_embeddings": 163_840,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
    },
    "tie_word_embeddings": False,
}
"""DeepSeek-V3.2's fields."""
GLM: dict[str, Any] = {"model_type": "glm_moe_dsa"}
INDEXER_SHAPES = {
    "wq_b.weight": (64 * 128, 1536),
    "wk.weight": (128, 7168),
    "k_norm.weight": (128,),
    "k_norm.bias": (128,),
    "weights_proj.weight": (64, 7168),
}


def read_attention_spec(config: dict[str, Any]) -> MLALayerSpec:
    spec = read_decoder_spec(config)
    assert spec is not None
    layers = spec.sublayers_of_kind(MLALayerSpec)
    assert layers == [layers[0]] * config["num_hidden_layers"]
    return layers[0]


def test_published_config_gives_indexer_and_its_tensors() -> None:
    attention = read_attention_spec(PUBLISHED)
    assert attention.indexer is not None
    assert (attention.indexer.num_heads, attention.indexer.head_dim, attention.indexer.top_k) == (64, 128, 2048)
    assert attention.is_interleaved
    assert not attention.indexer.is_interleaved
    prefix = "model.layers.0.self_attn.indexer."
    shapes = attention.parameter_shapes("model.layers.0", 7168)
    assert {
        name.removeprefix(prefix): shape for name, shape in shapes.items() if name.startswith(prefix)
    } == INDEXER_SHAPES
    with_indexers, without = (
        read_model_sizes(PUBLISHED | {"model_type": f"deepseek_{name}"}) for name in ("v32", "v3")
    )
    indexer_parameters = 61 * (64 * 128 * 1536 + 128 * 7168 + 2 * 128 + 64 * 7168)
    assert with_indexers.num_parameters == without.num_parameters + indexer_parameters


def test_glm_5_rotates_neighbors_in_its_indexer() -> None:
    indexer = read_attention_spec(PUBLISHED | GLM | {"index_topk_freq": 1}).indexer
    assert isinstance(indexer, IndexerSpec)
    assert indexer.is_interleaved


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"q_lora_rank": None}, "q_lora_rank: the indexer of sparse attention needs query latents"),
        ({"index_head_dim": 63}, r"index_head_dim: expected an even number from qk_rope_head_dim \(64\) on, got 63"),
        ({"index_head_dim": 32}, "index_head_dim: expected an even number"),
        ({"index_topk": 0}, "index_topk"),
        ({"index_n_heads": "x"}, "index_n_heads"),
        (
            {"model_type": "glm_moe_dsa", "indexer_types": ["full"] * 60 + ["shared"]},
            "indexer_types: layers that reuse",
        ),
        ({"model_type": "glm_moe_dsa", "index_topk_pattern": "FSSF"}, "index_topk_pattern: layers that reuse"),
        ({"model_type": "glm_moe_dsa", "index_topk_freq": 4}, "index_topk_freq: layers that reuse"),
    ],
)
def test_unserved_config_is_named_in_error(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED | fields))
    with pytest.raises(ModelError, match=message):
        decoder_spec(read_model_config(tmp_path))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kv_cache_dtype": "int8"}, "kv_cache_dtype: sparse attention reads keys and values of 16 or 32 bits"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype: sparse attention reads keys and values of 16 or 32 bits"),
        (
            {"tensor_parallel_size": 2, "decode_context_parallel_size": 2},
            "decode_context_parallel_size: sparse attention ranks all tokens",
        ),
    ],
)
def test_settings_that_sparse_attention_lacks_are_refused(
    settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = save_tiny_model(tmp_path / "model", "deepseek_v32")
    with pytest.raises(ConfigError, match=message):
        EngineCore(EngineConfig(model=str(path), num_kv_blocks=20, **settings))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_kv_block_holds_index_key_per_token(dtype: str, tmp_path: Path) -> None:
    config = EngineConfig(
        model=str(save_tiny_model(tmp_path / "model", "deepseek_v32")),
        dtype=dtype,
        kv_cache_memory=300 * 2**10 / GIB,
        max_model_len=128,
        max_num_seqs=12,
    )
    engine = EngineCore(config)
    block_bytes = 3 * 16 * (32 + 16 + 24) * {"float32": 4, "bfloat16": 2}[dtype]
    assert engine.info.kv_bytes == engine.info.num_blocks * block_bytes
    assert engine.info.num_blocks == min(300 * 2**10 // block_bytes, 12 * 8)
    assert "32 latent + 16 rotated + 24 index" in engine.info.arithmetic
    assert predict_kv_tokens(config, Machine("here", 2**34, gpu=False)) == engine.info.num_blocks * 16


def test_indexer_that_chooses_all_tokens_gives_bits_of_dense_attention(tmp_path: Path) -> None:
    """Without the indexer the same weights are those of a DeepSeek-V3."""
    sparse = save_tiny_model(tmp_path / "sparse", "deepseek_v32", index_topk=100)
    config, tensors = json.loads((sparse / "config.json").read_text()), load_file(sparse / "model.safetensors")
    dense = tmp_path / "dense"
    dense.mkdir()
    (dense / "config.json").write_text(json.dumps(config | {"model_type": "deepseek_v3", "layer_types": None}))
    save_file({name: each for name, each in tensors.items() if ".indexer." not in name}, dense / "model.safetensors")
    requests = [request("a", list(range(5, 80)), max_tokens=20, logprobs=0, prompt_logprobs=0)]
    answers = [
        run(EngineCore(EngineConfig(model=str(each), num_kv_blocks=40)), requests)["a"] for each in (sparse, dense)
    ]
    assert [each.ids for each in answers] == [answers[0].ids] * 2
    assert answers[0].logprobs == answers[1].logprobs
    assert answers[0].prompt_logprobs == answers[1].prompt_logprobs
    (sparse / "config.json").write_text(json.dumps(config | {"index_topk": 20}))
    fewer = run(EngineCore(EngineConfig(model=str(sparse), num_kv_blocks=40)), requests)["a"]
    assert fewer.prompt_logprobs is not None
    assert answers[0].prompt_logprobs is not None
    assert fewer.prompt_logprobs[:20] == answers[0].prompt_logprobs[:20]
    assert fewer.prompt_logprobs[21:] != answers[0].prompt_logprobs[21:]


def test_fp8_checkpoint_has_unquantized_weights_of_index_queries(tmp_path: Path) -> None:
    """The published config.json does not say that they are unquantized."""
    dense, config = save_tiny_model(tmp_path / "dense", "deepseek_v32"), {"quant_method": "fp8", "fmt": "e4m3"}
    unquantized = ("lm_head", "mlp.gate.", "indexer.weights_proj")
    pack = float8("block", "weight_scale_inv")
    packed = quantize_checkpoint(
        dense, tmp_path / "packed", pack, config | {"weight_block_size": [128, 128]}, unquantized
    )
    requests = [request("a", list(range(5, 80)), max_tokens=4, prompt_logprobs=0)]
    options = {"num_kv_blocks": 40, "dtype": "float32"}
    answers = [run(EngineCore(EngineConfig(model=str(each), **options)), requests)["a"] for each in (dense, packed)]
    numbers = [[each.logprob for each in answer.prompt_logprobs or () if each is not None] for answer in answers]
    assert len(numbers[0]) == 74
    assert numbers[1] == pytest.approx(numbers[0], abs=1e-4)
