"""`quire plan` on published config.json files gives the numbers of the authors' index files and of arithmetic by hand.
Two layers of each model also start with dummy weights.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from quire.engine.common.config import EngineConfig
from quire.engine.engine_core import EngineCore
from quire.server.cli import main as cli
from tests.engine.harness import request, run


@dataclass(frozen=True)
class Published:
    name: str
    parameters: int
    """Half of the index file's total bytes; tied weights count once."""
    keys: tuple[int, int, int]
    """Layers, KV heads and head_dim: a token takes 2 x their product x 2 bytes."""
    config: dict[str, Any]


def _decoder(
    kind: str, hidden: int, inner: int, layers: int, heads: int, kv_heads: int, vocab: int, context: int, **more: Any
) -> dict[str, Any]:
    fields = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers}
    fields |= {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "vocab_size": vocab}
    header = {"model_type": kind, "max_position_embeddings": context, "torch_dtype": "bfloat16", "hidden_act": "silu"}
    return header | fields | {"rms_norm_eps": 1e-5, "tie_word_embeddings": False} | more


CODER = {"rope_theta": 100000, "rope_scaling": {"type": "linear", "factor": 4.0}, "rms_norm_eps": 1e-6}
LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA31 = {"rope_theta": 500000.0, "rope_scaling": LLAMA3 | {"factor": 8.0, "original_max_position_embeddings": 8192}}
LLAMA32 = {"rope_theta": 500000.0, "rope_scaling": LLAMA3 | {"factor": 32.0, "original_max_position_embeddings": 8192}}
QWEN2 = {"rope_theta": 1000000.0, "rms_norm_eps": 1e-6, "use_sliding_window": False, "sliding_window": 32768}
QWEN3 = {"rope_theta": 1000000, "rms_norm_eps": 1e-6, "head_dim": 128, "attention_bias": False}
SPARSE = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True}
SPARSE |= {"decoder_sparse_step": 1, "mlp_only_layers": []}
TIED = {"tie_word_embeddings": True}
GEMMA2 = {"head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": 4096, "rms_norm_eps": 1e-6}
GEMMA2 |= {"hidden_activation": "gelu_pytorch_tanh", "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
PHI3 = {"sliding_window": 2047, "original_max_position_embeddings": 4096, "rope_scaling": None, "pad_token_id": 32000}
MISTRAL = (4096, 14336, 32, 32, 8)
MODELS = [
    Published(
        "deepseek-coder-1.3b",
        1_346_471_936,
        (24, 16, 128),
        _decoder("llama", 2048, 5504, 24, 16, 16, 32256, 16384, **CODER),
    ),
    Published(
        "deepseek-coder-6.7b",
        6_740_512_768,
        (32, 32, 128),
        _decoder("llama", 4096, 11008, 32, 32, 32, 32256, 16384, **CODER),
    ),
    Published(
        "deepseek-coder-33b",
        33_342_991_360,
        (62, 8, 128),
        _decoder("llama", 7168, 19200, 62, 56, 8, 32256, 16384, **CODER),
    ),
    Published("Llama-2-7b", 6_738_415_616, (32, 32, 128), _decoder("llama", 4096, 11008, 32, 32, 32, 32000, 4096)),
    Published("Llama-2-13b", 13_015_864_320, (40, 40, 128), _decoder("llama", 5120, 13824, 40, 40, 40, 32000, 4096)),
    Published("Llama-2-70b", 68_976_648_192, (80, 8, 128), _decoder("llama", 8192, 28672, 80, 64, 8, 32000, 4096)),
    Published("CodeLlama-7b", 6_738_546_688, (32, 32, 128), _decoder("llama", 4096, 11008, 32, 32, 32, 32016, 16384)),
    Published("Llama-3.1-8B", 8_030_261_248, (32, 8, 128), _decoder("llama", *MISTRAL, 128256, 131072, **LLAMA31)),
    Published(
        "Llama-3.1-70B",
        70_553_706_496,
        (80, 8, 128),
        _decoder("llama", 8192, 28672, 80, 64, 8, 128256, 131072, **LLAMA31),
    ),
    Published(
        "Llama-3.2-1B",
        1_235_814_400,
        (16, 8, 64),
        _decoder("llama", 2048, 8192, 16, 32, 8, 128256, 131072, head_dim=64, **LLAMA32 | TIED),
    ),
    Published(
        "Llama-3.2-3B",
        3_212_749_824,
        (28, 8, 128),
        _decoder("llama", 3072, 8192, 28, 24, 8, 128256, 131072, head_dim=128, **LLAMA32 | TIED),
    ),
    Published("TinyLlama-1.1B", 1_100_048_384, (22, 4, 64), _decoder("llama", 2048, 5632, 22, 32, 4, 32000, 2048)),
    Published("SmolLM2-135M", 134_515_008, (30, 3, 64), _decoder("llama", 576, 1536, 30, 9, 3, 49152, 8192, **TIED)),
    Published("Yi-6B", 6_061_035_520, (32, 4, 128), _decoder("llama", 4096, 11008, 32, 32, 4, 64000, 4096)),
    Published(
        "Mistral-7B-v0.1",
        7_241_732_096,
        (32, 8, 128),
        _decoder("mistral", *MISTRAL, 32000, 32768, sliding_window=4096),
    ),
    Published(
        "Mistral-7B-v0.3",
        7_248_023_552,
        (32, 8, 128),
        _decoder("mistral", *MISTRAL, 32768, 32768, sliding_window=None, rope_theta=1000000.0),
    ),
    Published(
        "Mixtral-8x7B-v0.1",
        46_702_792_704,
        (32, 8, 128),
        _decoder("mixtral", *MISTRAL, 32000, 32768, num_local_experts=8, num_experts_per_tok=2),
    ),
    Published(
        "Qwen2.5-0.5B",
        494_032_768,
        (24, 2, 64),
        _decoder("qwen2", 896, 4864, 24, 14, 2, 151936, 32768, **QWEN2 | TIED),
    ),
    Published(
        "Qwen2.5-7B", 7_615_616_512, (28, 4, 128), _decoder("qwen2", 3584, 18944, 28, 28, 4, 152064, 131072, **QWEN2)
    ),
    Published(
        "Qwen3-0.6B",
        596_049_920,
        (28, 8, 128),
        _decoder("qwen3", 1024, 3072, 28, 16, 8, 151936, 40960, **QWEN3 | TIED),
    ),
    Published(
        "Qwen3-8B", 8_190_735_360, (36, 8, 128), _decoder("qwen3", 4096, 12288, 36, 32, 8, 151936, 40960, **QWEN3)
    ),
    Published(
        "Qwen3-30B-A3B",
        30_532_122_624,
        (48, 4, 128),
        _decoder("qwen3_moe", 2048, 6144, 48, 32, 4, 151936, 40960, **QWEN3 | SPARSE),
    ),
    Published(
        "gemma-2-2b",
        2_614_341_888,
        (26, 4, 256),
        _decoder("gemma2", 2304, 9216, 26, 8, 4, 256000, 8192, **GEMMA2 | TIED),
    ),
    Published(
        "Phi-3-mini-4k", 3_821_079_552, (32, 32, 96), _decoder("phi3", 3072, 8192, 32, 32, 32, 32064, 4096, **PHI3)
    ),
]


@pytest.mark.usefixtures("kept_rates")
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_plan_of_published_model_equals_known_sizes(
    model: Published, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(model.config))
    assert (
        cli.main(["plan", str(tmp_path), "--memory", "400", "--context", "1024", "--concurrency", "4", "--json"]) == 0
    )
    plan = json.loads(capsys.readouterr().out)
    layers, heads, size = model.keys
    assert plan["parameters"] == model.parameters
    assert plan["weight_bytes"] == 2 * model.parameters
    assert plan["kv"]["bytes_per_token"] == 2 * layers * heads * size * 2
    assert plan["fits"]


STARTED = ("deepseek-coder-1.3b", "Llama-3.2-1B", "SmolLM2-135M", "Mistral-7B-v0.1", "Mixtral-8x7B-v0.1")
STARTED += ("Qwen2.5-0.5B", "Qwen2.5-7B", "Qwen3-0.6B", "Qwen3-30B-A3B", "gemma-2-2b", "Phi-3-mini-4k")
"""The others have the families, the heads and the kinds of RoPE of these, and multiples of their widths."""


@pytest.mark.slow
@pytest.mark.parametrize("model", [each for each in MODELS if each.name in STARTED], ids=lambda model: model.name)
def test_two_layers_of_published_model_generate_with_dummy_weights(model: Published, tmp_path: Path) -> None:
    """Two layers, 8 experts if the model is a MoE, and a small vocabulary; all other sizes are the model's own."""
    overrides = {"num_hidden_layers": 2, "vocab_size": 512, "pad_token_id": None}
    overrides |= {"num_experts": 8} if "num_experts" in model.config else {}
    (tmp_path / "config.json").write_text(json.dumps(model.config | overrides))
    options = {"max_model_len": 256, "num_kv_blocks": 64, "max_num_batched_tokens": 16}
    engine = EngineCore(EngineConfig(model=str(tmp_path), load_format="dummy", device="cpu", **options))
    prompts = [[3 + (7 * i + j * j) % 509 for j in range(length)] for i, length in enumerate((5, 40))]
    together = run(engine, [request(str(i), prompt, max_tokens=6) for i, prompt in enumerate(prompts)])
    engine.reset_prefix_cache()
    alone = run(engine, [request("1", prompts[1], max_tokens=6)])
    assert len(together["0"].ids) == len(together["1"].ids) == 6
    assert together["1"].ids == alone["1"].ids
