"""--enable-expert-parallel: the tokens of a single process, independence of the batch, which experts a rank loads,
quantization groups that tensor parallelism could not divide, and rejected settings.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from quire.engine.checkpoint.model_resolver import read_model_config
from quire.engine.common.config import EngineConfig
from quire.engine.common.errors import ConfigError
from quire.engine.engine_core import EngineCore
from quire.engine.layers.shard import ModelShard
from quire.engine.worker.device_plan import choose_device_plan
from quire.engine.worker.loading.model.loaded_model import ModelPart
from quire.engine.worker.loading.model_loader import load_model
from quire.kernels.cpu.backend import CpuBackend
from quire.kernels.reference import ReferenceBackend
from tests.engine.harness import request, run
from tests.engine.models.test_moe_fields import row
from tests.engine.models.test_sparse import theirs
from tests.engine.ranks import thread_ranks
from tests.engine.test_ranks import BASE, QUANTIZED, SMALL, asked, assert_same, one_thread, prompts
from tests.gguf_models import write_gguf
from tests.quantized_models import quantize_checkpoint, stack_mxfp4
from tests.tiny_models import save_tiny_model

__all__ = ["one_thread", "thread_ranks"]
MISSING = CpuBackend().missing_reason
pytestmark = [
    pytest.mark.skipif(MISSING is not None, reason=str(MISSING)),
    pytest.mark.usefixtures("thread_ranks", "one_thread"),
]
FAMILIES = ["deepseek_v3", "gpt_oss", "qwen2-moe", "nemotron_h", "mixtral", "phimoe", "glm4_moe", "granitemoeshared"]
FAMILIES += [
    "ernie4_5_moe",
    "qwen3-next",
    "deepseek_v2-lite",
    "hunyuan_v1_moe",
    "llama4",
    "nemotron_h-latent",
    "kimi_linear",
]
"""With shared experts (gated too) and dense first layers, biases and odd numbers of experts, and none of these."""


def engine(path: Path, ranks: int, **settings: Any) -> EngineCore:
    whole = {"enable_expert_parallel": True, "tensor_parallel_size": ranks}
    return EngineCore(EngineConfig(model=str(path), **BASE | whole | settings))


@pytest.mark.few(2)
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_expert_parallel_tokens_equal_single_process(family: str, ranks: int, tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path, family)
    expected = run(engine(path, 1, **SMALL), asked())
    divided = engine(path, ranks, **SMALL)
    answers = run(divided, asked())
    assert_same(answers, expected)
    assert divided.engine_stats.preemptions > 0
    for each in asked():  # alone, with the same number of ranks
        divided.reset_prefix_cache()
        (alone,) = run(divided, [each]).values()
        assert (alone.ids, alone.logprobs) == (answers[each.id].ids, answers[each.id].logprobs)


@pytest.mark.few(1)
@pytest.mark.parametrize("family", FAMILIES)
def test_expert_parallel_logprobs_equal_float64_transformers(family: str, tmp_path: Path) -> None:
    path, prompt = save_tiny_model(tmp_path, family), prompts()[4]
    judge = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, experts_implementation="eager")
    made = run(engine(path, 2), [request("a", prompt, max_tokens=1, prompt_logprobs=0)])
    assert row(made["a"]) == pytest.approx(theirs(judge, prompt), abs=5e-5)


FEW_BITS = ["mxfp4", "gptq", "float8", "Q4_0", "int8", "int4", "fp8"]
UNEVEN = {"moe_intermediate_size": 96, "intermediate_size": 128, "hidden_size": 128, "mlp_only_layers": []}
"""Half an expert has 48 inputs; quantization groups have 32."""


@pytest.mark.few(2)
@pytest.mark.parametrize("way", FEW_BITS)
def test_expert_parallel_quantized_weights_equal_single_process(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without integer products, as in tests/engine/test_ranks.py. Dividing an expert would cut quantization groups;
    whole experts keep them.
    """
    monkeypatch.setattr(CpuBackend, "pack_quantized", ReferenceBackend.pack_quantized)
    monkeypatch.setattr(CpuBackend, "pack_quantized_embedding", ReferenceBackend.pack_quantized_embedding)
    if way == "mxfp4":
        path, settings = stack_mxfp4(save_tiny_model(tmp_path / "model", "gpt_oss"), tmp_path / "few"), {}
    else:
        path, settings = save_tiny_model(tmp_path / "model", "qwen3-moe", **UNEVEN), {}
    if way in QUANTIZED:
        path = quantize_checkpoint(path, tmp_path / "few", *QUANTIZED[way], leave=("lm_head", "mlp.gate."))
    elif way.startswith("Q"):
        path = write_gguf(path, tmp_path / "model.gguf", lambda _: way)
    elif way != "mxfp4":
        settings = {"quantization": way}
    requests = asked()[:3]
    assert_same(run(engine(path, 2, **settings), requests), run(engine(path, 1, **settings), requests))
    if way == "mxfp4":  # as gpt-oss with 4 and 8 ranks: 2,880 / 4 = 720 is no multiple of 32
        with pytest.raises(ConfigError, match=r"cannot be divided: .*--enable-expert-parallel, which gives each rank"):
            engine(path, 4, enable_expert_parallel=False)
    if way == "gptq":
        with pytest.raises(ConfigError, match="cannot be divided: its weights share scales"):
            engine(path, 2, enable_expert_parallel=False)


def test_each_rank_loads_only_local_experts(tmp_path: Path) -> None:
    """Of five experts the ranks have two and three. The width, which two ranks could not divide, does not matter."""
    path = save_tiny_model(tmp_path, "gpt_oss", num_hidden_layers=1, intermediate_size=33)
    config = EngineConfig(model=str(path), enable_expert_parallel=True, tensor_parallel_size=2, **BASE)
    model = read_model_config(path)
    chosen = choose_device_plan(config, model)
    assert chosen.spec.tensor_parallel_error(2) is None
    whole = load_model(config, path, model, chosen, lambda: None)
    parts = [
        load_model(config, path, model, chosen, lambda: None, part=ModelPart(ModelShard(rank, 2))) for rank in range(2)
    ]
    assert [part.expected_weights.parameter_table.keys() for part in parts] == [
        whole.expected_weights.parameter_table.keys()
    ] * 2
    local_expert_counts = [
        [len(each._down) for layer in part.model._layers for each in layer if hasattr(each, "_local_experts")]
        for part in parts
    ]
    assert local_expert_counts == [[2], [3]]
    assert max(part.read_bytes for part in parts) < 0.75 * whole.read_bytes


@pytest.mark.parametrize(
    ("family", "settings", "wrong"),
    [
        ("llama", {"tensor_parallel_size": 2}, "enable_expert_parallel: the model has no experts"),
        (
            "mixtral",
            {"tensor_parallel_size": 1, "data_parallel_size": 2},
            "enable_expert_parallel: experts are divided",
        ),
        ("gpt_oss", {"tensor_parallel_size": 8}, "tensor_parallel_size: the model's 4 heads cannot be divided"),
        ("mixtral", {"tensor_parallel_size": 1, "pipeline_parallel_size": 2}, "enable_expert_parallel: experts are"),
    ],
)
def test_expert_parallel_rejects_unsupported_settings(
    family: str, settings: dict[str, Any], wrong: str, tmp_path: Path
) -> None:
    path = save_tiny_model(tmp_path, family)
    with pytest.raises(ConfigError, match=wrong):
        engine(path, 2, **settings)


def test_more_ranks_than_experts_are_rejected(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path, "mixtral", num_local_experts=3, num_experts_per_tok=2)
    with pytest.raises(ConfigError, match="4 ranks cannot have some of a layer's 3 experts each"):
        engine(path, 4)
