"""`quire plan`: its figures against hand-computed ones and against the engine, and its output."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModel

from quire.engine.checkpoint.kv_cache_plan import (
    DRAFT_GRAPHS_BYTES,
    DRIVER_BYTES_PER_GRAPH,
    GIB,
    MAX_MIXED_GRAPHS,
    NCCL_BYTES_PER_GRAPH_CALL,
)
from quire.engine.checkpoint.model_resolver import read_model_config, read_raw_config
from quire.engine.checkpoint.sizes.model_sizes import read_model_sizes
from quire.engine.checkpoint.tensor_headers import read_checkpoint_size
from quire.engine.common.config import DEMO_MODEL, EngineConfig, SpeculativeConfig
from quire.engine.common.errors import ConfigError, ModelError
from quire.engine.engine_core import EngineCore
from quire.engine.families import find_decoder_family
from quire.engine.images.multimodal_prompt import RequestImage, make_multimodal_prompt_builder
from quire.engine.layers.rope import rope_table
from quire.engine.processes.gpus import CUDA_VARIABLE, VisibleGPUs
from quire.engine.text.tokenizer import Tokenizer
from quire.kernels.cpu.backend import CpuBackend
from quire.kernels.gpu.libraries.flash2 import Flash2Backend
from quire.kernels.gpu.libraries.flash3 import Flash3Backend
from quire.kernels.gpu.libraries.flash4 import Flash4Backend
from quire.kernels.gpu.libraries.torch_varlen import TorchVarlenBackend
from quire.kernels.reference import ReferenceBackend
from quire.server.cli import main as cli
from quire.server.cli.plan import cpu_rates
from quire.server.cli.plan.cpu_rates import machine_key
from quire.server.cli.plan.draft_plan import plan_draft
from quire.server.cli.plan.estimate import PlanRequest
from quire.server.cli.plan.estimate_builder import estimate_model, max_step_bytes, max_step_tokens
from quire.server.cli.plan.machine import (
    ENGINE_HOST_BYTES,
    Machine,
    divide_machine_by_parallelism,
    find_gpu,
    read_gpu_table,
)
from quire.server.cli.plan.model_plan import memory_advice, predict_kv_tokens
from quire.server.cli.plan.plan_report import unserved_reasons
from tests import tiny_models, tiny_vision
from tests.engine.ranks import thread_ranks
from tests.kernels.fake_flash import FakeFlashAttn
from tests.kernels.installed import install_flash
from tests.tiny_encoders import save_tiny_encoder
from tests.tree import ROOT

pytestmark = pytest.mark.usefixtures("kept_rates")

__all__ = ["thread_ranks"]
DEEPSEEK_CODER = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 16384,
    "vocab_size": 32256,
    "torch_dtype": "bfloat16",
}
LLAMA_70B = DEEPSEEK_CODER | {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}


def test_plan_of_this_machine_estimates_speed_from_measured_rates(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    measured = plan(capsys, "--max-model-len", "1k")["limits"]
    slower = plan(capsys, "--max-model-len", "1k", "--bandwidth", "1", "--tflops", "0.1")["limits"]
    assert measured["decode_tokens_per_second_alone"] == pytest.approx(20 * slower["decode_tokens_per_second_alone"])
    assert cli.main(["plan", "--max-model-len", "1k"]) == 0
    assert re.search(r"decode +about [\d,]+ tokens/s alone", capsys.readouterr().out)

    def fails(command: list[str], **options: object) -> None:
        (tmp_path / "asked").write_text(str(command))
        raise OSError("no such processor")

    monkeypatch.setattr(subprocess, "run", fails)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert plan(capsys, "--max-model-len", "1k")["limits"] is None, "what cannot be measured is not known"
    assert "quire.kernels.rates" in (tmp_path / "asked").read_text()


@pytest.mark.slow
def test_cpu_rates_are_measured_once_and_cached(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    rates = cpu_rates.read_or_measure_rates()
    assert rates is not None
    assert (1e8 < rates.bandwidth < 1e13, 1e8 < rates.flops < 1e16) == (True, True)
    monkeypatch.setattr(subprocess, "run", None)
    assert cpu_rates.read_or_measure_rates() == rates
    (tmp_path / "quire" / "rates.json").write_text('{"' + machine_key() + '": {}}')
    with pytest.raises(TypeError):
        cpu_rates.read_or_measure_rates()


def test_plan_accepts_serve_flags(capsys: pytest.CaptureFixture[str], coder: str) -> None:
    own = plan(capsys, coder, "--gpu", "h100", "--context", "4000", "--concurrency", "1")
    assert plan(capsys, coder, "--gpu", "h100", "--max_model_len", "4k", "--concurrency", "1") == own
    few = plan(capsys, coder, "--gpu", "h100", "--max-num-seqs", "7", "--max-model-len", "512", "--port", "1")
    assert (few["concurrency"], few["flags"][-2:]) == (7, ["--max-num-seqs", "7"])
    small = plan(capsys, coder, "--gpu", "h100", "--kv-cache-memory", "3", "--max-model-len", "512")
    assert small["kv"]["budget_bytes"] <= 3 * GIB
    assert plan(capsys, coder, "--gpu", "h100", "--quantization", "awq")["fits"]
    assert cli.main(["plan", coder, "--num-gpu-blocks-override", "9"]) == 1
    assert "num_kv_blocks: the plan computes how many fit" in capsys.readouterr().err


@pytest.fixture
def coder(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(DEEPSEEK_CODER))
    return str(tmp_path)


def plan(capsys: pytest.CaptureFixture[str], *args: str, status: int = 0) -> Any:
    assert cli.main(["plan", *args, "--json"]) == status
    return json.loads(capsys.readouterr().out)


def test_plan_of_deepseek_coder_equals_hand_computed_sizes(coder: str, capsys: pytest.CaptureFixture[str]) -> None:
    report = plan(capsys, coder, "--gpu", "H100", "--context", "16384", "--concurrency", "1")
    assert report["kv"]["block_size"] == 256, "flash-attn's"
    assert report["kv"]["page_bytes_per_layer"] == 4 * 2**20
    assert report["kv"]["bytes_per_token"] * 16384 == 8 * GIB
    assert report["parameters"] == 6_740_512_768, "what its authors' index file adds up to, at two bytes each"
    assert report["weight_bytes"] == 2 * report["parameters"]
    assert report["fits"]


def test_speed_limits_equal_roofline(coder: str, capsys: pytest.CaptureFixture[str]) -> None:
    args = (coder, "--memory", "80", "--bandwidth", "1000", "--tflops", "100", "--context", "1024")
    report = plan(capsys, *args)
    read = report["active_parameters"] * 2 + 1024 * 524288
    assert report["limits"]["decode_tokens_per_second_alone"] == pytest.approx(1e12 / read)
    head = 32256 * 4096
    work = 2 * (report["active_parameters"] - head) * 1024 + 2 * head + 2 * 32 * 4096 * 1024**2
    assert report["limits"]["prefill_seconds"] == pytest.approx(work / 100e12)
    assert plan(capsys, coder, "--memory", "80")["limits"] is None


def test_four_gpus_share_weights_and_kv_cache_of_70b_model() -> None:
    one = estimate_model(read_model_sizes(LLAMA_70B), find_gpu("h100"), PlanRequest())
    assert "nothing is left" in one.reasons[0]
    two = estimate_model(read_model_sizes(LLAMA_70B), replace(find_gpu("h100"), count=4), PlanRequest())
    assert two.fits
    assert two.kv_token_bytes == 2 * 8 * 128 * 80 * 2 // 4
    assert two.kv_budget_bytes > 30 * GIB


@pytest.mark.usefixtures("thread_ranks")
def test_decode_context_parallel_plan_has_context_of_all_ranks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tiny_models.save_tiny_model(tmp_path, "llama", num_key_value_heads=1, max_position_embeddings=65_536)
    arguments = (str(folder), "--kv-cache-memory", "0.001", "--max-num-seqs", "1", "--tp", "2", "--dtype", "float32")
    heads, tokens = plan(capsys, *arguments), plan(capsys, *arguments, "--decode-context-parallel-size", "2")
    assert 1.8 * heads["context"] < tokens["context"] <= 2 * heads["context"]
    flags = {"tensor_parallel_size": 2, "decode_context_parallel_size": 2, "kv_cache_memory": 0.001, "max_num_seqs": 1}
    engine = EngineCore(EngineConfig(model=str(folder), dtype="float32", **flags))
    assert engine.info.max_model_len == tokens["context"]
    card = (*arguments, "--gpu", "H100", "--dcp", "2")
    assert plan(capsys, *card)["kv"]["block_size"] == 32
    assert "has no ranks that divide" in plan(capsys, *card, "--attention-backend", "flash", status=1)["reasons"][0]


@pytest.mark.parametrize("preset", ["gpu-2x24gb", "gpu-2x80gb"])
def test_two_gpu_presets_plan_tensor_parallelism(preset: str, coder: str, capsys: pytest.CaptureFixture[str]) -> None:
    one = plan(capsys, coder, "--gpu", "H100", "--config", preset, "--tp", "1")
    two = plan(capsys, coder, "--gpu", "H100", "--config", preset)
    assert (one["machine"]["count"], two["machine"]["count"]) == (1, 2)
    assert two["flags"][two["flags"].index("--tensor-parallel-size") + 1] == "2"
    assert two["served"]


def test_plan_lists_kv_offload_tiers(coder: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A token takes 512 KiB in all 32 layers; a KV block of flash-attn's 256 tokens takes 128 MiB."""
    arguments = ("--kv-offload-memory", "2.2", "--kv-offload-dir", "/pages", "--kv-offload-disk", "64")
    report = plan(capsys, coder, "--gpu", "H100", *arguments)
    assert report["tiers"] == [
        {"name": "host", "bytes": int(2.2 * GIB), "tokens": 17 * 256},
        {"name": "disk", "bytes": 64 * GIB, "tokens": 512 * 256},
    ]
    assert report["flags"][-6:] == list(arguments)
    assert report["kv"] == plan(capsys, coder, "--gpu", "H100")["kv"], "they take nothing of the GPU's memory"
    assert cli.main(["plan", coder, "--gpu", "H100", *arguments]) == 0
    assert "2.2 GiB of pinned memory of the host = 4,352 tokens; 64 GiB of disk = 131,072" in capsys.readouterr().out
    assert "several ranks" in plan(capsys, coder, "--gpu", "H100", "--tp", "2", *arguments)["notes"][-1]
    assert cli.main(["plan", coder, "--gpu", "H100", *arguments[4:]]) != 0
    assert "--kv-offload-disk: is the limit of --kv-offload-dir DIR" in capsys.readouterr().err


def test_kv_offload_memory_reduces_kv_cache_of_cpu(coder: str) -> None:
    sizes = read_model_sizes(read_raw_config(coder)[0])
    machine = Machine("test", memory=18 * GIB, gpu=False, bf16=True)
    without, with_it = (
        estimate_model(sizes, machine, PlanRequest(EngineConfig(kv_offload_memory=each))) for each in (None, 1.0)
    )
    assert (
        with_it.kv_budget_bytes
        == machine.kv_budget_bytes(without.device_weight_bytes + GIB, 0, 1.0)
        < without.kv_budget_bytes
    )
    assert with_it.tier_plans[0].num_tokens == GIB // with_it.block_bytes * with_it.block_size


def test_plan_that_does_not_fit_reports_reason_and_alternatives(coder: str, capsys: pytest.CaptureFixture[str]) -> None:
    report = plan(capsys, coder, "--gpu", "rtx 4090", "--context", "16384", "--concurrency", "4", status=1)
    assert "4 x 16,384 tokens need 32.00 GiB" in report["reasons"][0]
    best = int(report["reasons"][0].split("; 4 x ")[1].split()[0].replace(",", ""))
    assert plan(capsys, coder, "--gpu", "rtx 4090", "--context", str(best), "--concurrency", "4")["fits"]
    more = str(best + report["kv"]["block_size"])
    assert not plan(capsys, coder, "--gpu", "rtx 4090", "--context", more, "--concurrency", "4", status=1)["fits"]
    assert find_gpu(report["fits_on"]["name"]).memory > find_gpu("rtx 4090").memory
    undivided = plan(capsys, coder, "--gpu", "h100", "--tp", "3", status=1)
    assert undivided["reasons"] == ["the model's 32 heads cannot be divided among 3 devices"]
    assert cli.main(["plan", coder, "--gpu", "rtx 3060"]) == 1
    text = capsys.readouterr().out
    lines = re.findall(r"= ([\d,]+) MiB - ([\d,]+) .* - ([\d,]+) .*: ([\d,]+) MiB too few", text)
    whole, cuda, weights, lacking = (int(each.replace(",", "")) for each in lines[0])
    assert cuda + weights - whole == lacking
    assert "fits with     --quantization int8\n" in text
    assert plan(capsys, coder, "--gpu", "rtx 3060", "--quantization", "int8")["fits"]
    assert plan(capsys, coder, "--memory", "6", "--tp", "2", status=1)["fits_on"]["count"] == 2
    report = plan(capsys, coder, "--gpu", "t4", "--dtype", "bfloat16", status=1)
    assert "float16" in report["reasons"][0]
    report = plan(capsys, coder, "--gpu", "h100", "--context", "99999", status=1)
    assert "16,384 positions" in report["reasons"][0]


def test_planned_flags_configure_planned_engine(coder: str, capsys: pytest.CaptureFixture[str]) -> None:
    report = plan(capsys, coder, "--gpu", "v100-32gb", "--concurrency", "300", "--gpu-memory-utilization", "0.97")
    flags = dict(zip(report["flags"][::2], report["flags"][1::2], strict=True))
    names = {name.removeprefix("--").replace("-", "_"): value for name, value in flags.items()}
    config = EngineConfig(model=coder, **names)
    assert (config.dtype, config.max_model_len, config.max_num_seqs) == ("float16", report["context"], 300)


@pytest.mark.parametrize(
    ("driver", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100-PCIe"),
        ("NVIDIA A100-SXM4-80GB", "A100-80GB"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX-6000-Ada"),
        ("Tesla T4", "T4"),
        ("NVIDIA A10", "A10"),
        ("nvidia a10g", "A10G"),
    ],
)
def test_find_gpu_matches_driver_name(driver: str, name: str) -> None:
    assert find_gpu(driver).name == name


def test_find_gpu_rejects_unknown_name_with_candidates() -> None:
    assert find_gpu("4090") == find_gpu("RTX-4090")
    with pytest.raises(ConfigError, match="A100-40GB or A100-80GB"):
        find_gpu("a100")
    with pytest.raises(ConfigError, match="RTX-4090"):
        find_gpu("voodoo 2")


def test_gpu_table_values_are_plausible() -> None:
    for card in read_gpu_table().values():
        assert 8 * GIB < card.memory < 300 * GIB
        assert card.bandwidth is not None
        assert card.flops is not None
        assert 20 < card.flops / card.bandwidth < 500, f"{card.name}: so many operations per byte has none"


SHAPES: dict[str, dict[str, Any]] = {
    "embedded": {"model": DEMO_MODEL},
    "135 M, tied": {"hidden_size": 576, "num_hidden_layers": 6, "num_attention_heads": 9, "num_key_value_heads": 3}
    | {"vocab_size": 49152, "intermediate_size": 1536, "tie_word_embeddings": True, "max_position_embeddings": 65536},
    "wide heads": {"hidden_size": 512, "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 8}
    | {"head_dim": 128, "vocab_size": 32000, "intermediate_size": 2048, "max_position_embeddings": 32768},
}


@pytest.mark.parametrize(
    ("card", "config", "packed"),
    [
        ("T4", {}, False),
        ("V100-32GB", {"quantize_embedding": True}, False),
        ("T4", {"attention_backend": "triton"}, True),
        ("L4", {"attention_backend": "sdpa"}, False),
        ("L4", {}, True),
    ],
)
def test_plan_counts_int4_only_where_weights_stay_packed(card: str, config: dict[str, Any], packed: bool) -> None:
    sizes = read_model_sizes(DEEPSEEK_CODER)
    plain = estimate_model(sizes, find_gpu(card), PlanRequest(EngineConfig(**config | {"quantize_embedding": None})))
    int4 = estimate_model(sizes, find_gpu(card), PlanRequest(EngineConfig(quantization="int4", **config)))
    assert (int4.device_weight_bytes < plain.device_weight_bytes / 2) == packed
    assert packed or int4.device_weight_bytes == plain.device_weight_bytes
    stored = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
    gptq = read_model_sizes(DEEPSEEK_CODER | {"quantization_config": stored})
    checkpoint = estimate_model(gptq, find_gpu(card), PlanRequest(EngineConfig(**config)))
    assert (checkpoint.device_weight_bytes < plain.device_weight_bytes / 2) == packed
    assert packed or checkpoint.device_weight_bytes == plain.device_weight_bytes


def test_gpu_plan_counts_int4_weight_bytes() -> None:
    """As in the plan of a CPU: 5 bits per weight of a linear, 8 per weight of the embedding and the head."""
    sizes = read_model_sizes(DEEPSEEK_CODER)
    estimate = estimate_model(sizes, find_gpu("h100"), PlanRequest(EngineConfig(quantization="int4")))
    linears = sizes.num_parameters - sizes.embedding_parameters
    assert estimate.device_weight_bytes == pytest.approx(linears * 5 / 8 + sizes.embedding_parameters, rel=1e-6)
    assert "--quantization" in estimate.flags


@pytest.mark.few(2)
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs Linux to tell its memory")
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"kv_cache_memory": 0.25},
        {"max_model_len": 640, "max_num_seqs": 4},
        {"quantization": "int4"},
        {"quantization": "fp8", "quantize_embedding": False},
        {"enable_lora": True, "max_loras": 4, "max_lora_rank": 64},
    ],
    ids=str,
)
@pytest.mark.parametrize("shape", SHAPES)
def test_planned_kv_tokens_equal_engine_kv_tokens(shape: str, options: dict[str, Any], tmp_path: Path) -> None:
    path = SHAPES[shape].get("model")
    if path is None:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"} | SHAPES[shape]))
        path = str(tmp_path)
    # A process of its own: memory that earlier tests' engines and threads free meanwhile would count as room.
    command = [sys.executable, "-m", "tests.server.cli.kv_tokens_of_engine", path, json.dumps(options)]
    output = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=300).stdout
    planned, allocated = json.loads(output.splitlines()[-1])
    assert planned == pytest.approx(allocated, rel=0.03)


@pytest.mark.few(2)
@pytest.mark.skipif(CpuBackend().missing_reason is not None, reason="several ranks need the compiled kernels")
@pytest.mark.usefixtures("thread_ranks")
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("drafts", [False, True])
def test_planned_kv_tokens_of_ranks_equal_engine(drafts: bool, ranks: int) -> None:
    """With as many key-value heads as ranks, and with fewer. The draft model is on the first rank only."""
    draft = {"method": "draft_model", "model": DEMO_MODEL, "num_speculative_tokens": 4}
    config = EngineConfig(
        speculative_config=SpeculativeConfig(**draft) if drafts else None,
        tensor_parallel_size=ranks,
        threads=torch.get_num_threads() * ranks,
        dtype="bfloat16",
        kv_cache_memory=0.05,
        max_num_seqs=16,
    )
    info = EngineCore(config).info
    planned = predict_kv_tokens(config, Machine("test", memory=4 * GIB, gpu=False))
    assert planned is not None
    assert abs(planned - info.num_blocks * info.block_size) <= info.block_size


@pytest.mark.skipif(CpuBackend().missing_reason is not None, reason="stages need the compiled kernels")
@pytest.mark.usefixtures("thread_ranks")
@pytest.mark.parametrize("stages", [2, 3])
def test_planned_kv_tokens_of_pipeline_stages_equal_engine(
    stages: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also with sliding-window layers: each stage has its part of a KV block."""
    config = EngineConfig(
        model=str(tiny_models.save_tiny_model(tmp_path, "gemma2", num_hidden_layers=12, max_position_embeddings=4096)),
        pipeline_parallel_size=stages,
        threads=torch.get_num_threads() * stages,
        dtype="bfloat16",
        kv_cache_memory=0.01,
        max_num_seqs=64,
    )
    info = EngineCore(config).info
    machine = Machine("test", memory=4 * GIB, gpu=False)
    planned = predict_kv_tokens(config, machine)
    assert planned is not None
    assert abs(planned - info.num_blocks * info.block_size) <= info.block_size
    sizes = read_model_sizes(read_raw_config(config.model)[0])
    estimate = estimate_model(
        sizes, divide_machine_by_parallelism(machine, 1, 1, stages), PlanRequest(EngineConfig(dtype="bfloat16"))
    )
    assert estimate.device_weight_bytes * stages == pytest.approx(info.weight_bytes, rel=0.03)
    assert estimate.flags[estimate.flags.index("--pipeline-parallel-size") + 1] == str(stages)
    assert cli.main(["plan", config.model, "--pipeline-parallel-size", str(stages)]) == 0
    assert f"stages of {', '.join(['6'] * 2 if stages == 2 else ['4'] * 3)} layers" in capsys.readouterr().out


def test_pipeline_of_two_stages_halves_speed_of_one_stream() -> None:
    """One stream is in one stage at a time; two streams use both."""
    sizes = read_model_sizes(read_raw_config(DEMO_MODEL)[0])
    machine = Machine("test", memory=4 * GIB, gpu=False, bandwidth=20e9, flops=1e11)
    one, two = (
        estimate_model(sizes, divide_machine_by_parallelism(machine, 1, 1, stages), PlanRequest()) for stages in (1, 2)
    )
    alone, together = two.max_decode_tokens_per_second(1, 100), two.max_decode_tokens_per_second(2, 100)
    assert alone == pytest.approx(one.max_decode_tokens_per_second(1, 100) / 2)
    assert together == pytest.approx(2 * alone)
    first, begun = one.min_prefill_seconds(100), two.min_prefill_seconds(100)
    assert begun == pytest.approx(2 * first)
    with pytest.raises(ConfigError, match=r"pipeline_parallel_size: .*tensor_parallel_size"):
        divide_machine_by_parallelism(machine, 2, 1, 2)
    assert (
        "cannot be divided among 99 stages"
        in estimate_model(sizes, divide_machine_by_parallelism(machine, 1, 1, 99), PlanRequest()).reasons[0]
    )


def test_replicas_copy_weights_and_divide_kv_cache_memory() -> None:
    """Each replica has a copy of the weights and its part of the KV cache memory, by the engine's own rule."""
    sizes, machine = read_model_sizes(read_raw_config(DEMO_MODEL)[0]), Machine("test", memory=GIB, gpu=False)
    plan_request = PlanRequest(EngineConfig(dtype="float32", max_num_seqs=4096))
    one, each = (
        estimate_model(sizes, machine, plan_request),
        estimate_model(sizes, divide_machine_by_parallelism(machine, 1, 2), plan_request),
    )
    assert each.device_weight_bytes == one.device_weight_bytes
    used = ENGINE_HOST_BYTES + one.device_weight_bytes
    assert one.kv_budget_bytes == (GIB - used) // 2
    assert each.kv_budget_bytes == (GIB - 2 * used) // 4
    assert each.flags[:2] == ("--data-parallel-size", "2")
    config = EngineConfig(data_parallel_size=2, dtype="float32", kv_cache_memory=0.1)
    lone = config.model_copy(update={"data_parallel_size": 1, "kv_cache_memory": 0.05})
    assert predict_kv_tokens(config, machine) == predict_kv_tokens(lone, machine)


def test_plan_gives_each_replica_its_own_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    sizes, card = read_model_sizes(read_raw_config(DEMO_MODEL)[0]), Machine("card", memory=4 * GIB, gpu=True)
    request = PlanRequest(EngineConfig(data_parallel_size=2, kv_cache_memory=1.0))
    one, each = (
        estimate_model(sizes, machine, request) for machine in (card, divide_machine_by_parallelism(card, 1, 2))
    )
    assert each.kv_budget_bytes == one.kv_budget_bytes == GIB, "of each GPU"
    told = plan(capsys, "--gpu", "h100", "--data-parallel-size", "2", "--tensor-parallel-size", "2")
    where = "replica 0 on GPUs 0 and 1, replica 1 on GPUs 2 and 3"
    assert f"these are the figures of each of 2 replicas: {where}" in told["notes"]
    assert (told["machine"]["count"], told["machine"]["replicas"]) == (2, 2)
    assert told["flags"][2:4] == ["--data-parallel-size", "2"]
    here = replace(card, visible_gpus=VisibleGPUs(CUDA_VARIABLE, ("4", "5", "6")))
    assert divide_machine_by_parallelism(here, 1, 3).replica_gpus == (("4",), ("5",), ("6",))
    with pytest.raises(ConfigError, match=r"data_parallel_size: 2 replicas of 2 GPUs each .* need 4 GPUs, and 3 are"):
        divide_machine_by_parallelism(here, 2, 2)


def test_ranks_on_two_nodes_share_memory_per_node(capsys: pytest.CaptureFixture[str]) -> None:
    """Two of four ranks on two machines share a memory, as two ranks of one machine do; each rank has a quarter of the
    model.
    """
    sizes, machine = read_model_sizes(read_raw_config(DEMO_MODEL)[0]), Machine("test", memory=GIB, gpu=False)
    plan_request = PlanRequest(EngineConfig(dtype="float32", max_num_seqs=4096))
    four, two = (
        estimate_model(sizes, divide_machine_by_parallelism(machine, 4, nodes=nodes), plan_request) for nodes in (1, 2)
    )
    assert two.device_weight_bytes == four.device_weight_bytes
    used = ENGINE_HOST_BYTES + two.device_weight_bytes
    assert two.kv_budget_bytes == (GIB - 2 * used) // 2 // 2
    assert four.kv_budget_bytes == (GIB - 4 * used) // 2 // 4
    assert cli.main(["plan", DEMO_MODEL, "--tensor-parallel-size", "4", "--nnodes", "2"]) == 0
    assert "--tensor-parallel-size 4 --nnodes 2 --master-addr" in capsys.readouterr().out
    for wrong in ({"ranks": 3}, {"ranks": 1, "stages": 2}, {"ranks": 2, "replicas": 2}):
        with pytest.raises(ConfigError, match=r"nnodes: .*tensor_parallel_size"):
            divide_machine_by_parallelism(machine, nodes=2, **wrong)


def test_moe_plan_supports_ranks_and_stages(tmp_path: Path) -> None:
    path = tiny_models.save_tiny_model(tmp_path, "mixtral")
    sizes = read_model_sizes(read_raw_config(str(path))[0])
    for parts in ((2,), (1, 1, 2)):
        assert not unserved_reasons(
            estimate_model(
                sizes, divide_machine_by_parallelism(Machine("test", 4 * GIB, gpu=False), *parts), PlanRequest()
            )
        )


def test_expert_parallel_plan_counts_whole_experts_per_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One rank has four of seven experts, half an expert more than half; the plan counts these four."""
    path = tiny_models.save_tiny_model(tmp_path, "mixtral", num_local_experts=7, intermediate_size=512)
    sizes, machine = (
        read_model_sizes(read_raw_config(str(path))[0]),
        divide_machine_by_parallelism(Machine("test", 4 * GIB, gpu=False), 2),
    )
    parts, whole = (
        estimate_model(sizes, machine, PlanRequest(EngineConfig(dtype="float32", enable_expert_parallel=each)))
        for each in (False, True)
    )
    more = sizes.expert_parameters * (4 / 7 - 1 / 2) * 4
    assert whole.device_weight_bytes - parts.device_weight_bytes == pytest.approx(more, rel=0.1)
    assert cli.main(["plan", str(path), "--tensor-parallel-size", "2", "--enable-expert-parallel"]) == 0
    printed = capsys.readouterr().out
    assert "3 or 4 of each layer's 7, whole, on each device" in printed
    assert "--tensor-parallel-size 2 --enable-expert-parallel" in printed
    assert cli.main(["plan", str(path), "--tensor-parallel-size", "8", "--enable-expert-parallel"]) == 1
    dense = tiny_models.save_tiny_model(tmp_path / "dense", "llama")
    assert cli.main(["plan", str(dense), "--tensor-parallel-size", "2", "--enable-expert-parallel"]) == 1
    assert "the model has no experts, to be whole on devices" in capsys.readouterr().out


def test_plan_of_experts_on_disk_counts_resident_bytes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Experts on disk need memory only for the resident ones; the engine keeps as many in memory as planned."""
    shape = {"num_local_experts": 16, "intermediate_size": 512, "hidden_size": 256}
    path = tiny_models.save_tiny_model(tmp_path, "mixtral", **shape)
    sizes, machine = read_model_sizes(read_raw_config(str(path))[0]), Machine("test", 4 * GIB, gpu=False)
    settings: list[dict[str, Any]] = [{}, {"weights_on_disk": "/disk"}]
    settings.append({**settings[1], "weights_in_memory": 0.004})
    memory, disk, some = (
        estimate_model(sizes, machine, PlanRequest(EngineConfig(dtype="float32", **each))) for each in settings
    )
    saved = memory.device_weight_bytes - disk.device_weight_bytes
    assert saved == disk.experts_plan.disk_bytes == sizes.expert_parameters * 4
    assert some.device_weight_bytes - disk.device_weight_bytes == some.experts_plan.memory_bytes == int(0.004 * GIB)
    assert some.experts_plan.token_read_bytes < disk.experts_plan.token_read_bytes == saved * 2 // 16
    args = ["plan", str(path), "--weights-on-disk", "/disk", "--weights-in-memory", "0.004", "--dtype", "float32"]
    assert cli.main(args) == 0
    printed = capsys.readouterr().out
    assert "in a file on disk, 4.096 MiB of it in memory too" in printed
    assert "--weights-on-disk /disk --weights-in-memory 0.004" in printed
    assert cli.main([*args, "--memory", "4"]) == 1
    assert "weights on a disk (--weights-on-disk) are for CPUs" in capsys.readouterr().out


def test_plan_of_streamed_layers_counts_memory_and_pace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Layers on disk, or in a GPU's host memory, need device memory for two layers only, and they set the pace."""
    path = tiny_models.save_tiny_model(tmp_path, "llama", num_hidden_layers=8, hidden_size=256, intermediate_size=1024)
    sizes = read_model_sizes(read_raw_config(str(path))[0])
    for gpu, moved in (
        (False, {"weights_on_disk": "/disk", "weights_in_memory": 0.02}),
        (True, {"cpu_offload_gb": 0.02}),
    ):
        machine = Machine("test", 4 * GIB, gpu=gpu)
        memory, some = (
            estimate_model(sizes, machine, PlanRequest(EngineConfig(dtype="float32", **each))) for each in ({}, moved)
        )
        plan, each = some.layers_plan, (sizes.num_parameters - sizes.embedding_parameters) * 4 // 8
        assert 0 < plan.num_streamed < plan.num_layers == 8
        assert plan.read_bytes == plan.num_streamed * each
        assert memory.device_weight_bytes - some.device_weight_bytes == plan.read_bytes - 2 * each
        on_device = each * (8 - plan.num_streamed + 2)
        assert (
            on_device <= 0.02 * GIB < on_device + each
            if not gpu
            else plan.read_bytes <= 0.02 * GIB < plan.read_bytes + each
        )
        assert plan.max_steps_per_second == pytest.approx((25e9 if gpu else 1e9) / plan.read_bytes)
    args = ["plan", str(path), "--weights-on-disk", "/disk", "--weights-in-memory", "0.02", "--dtype", "float32"]
    assert cli.main(args) == 0
    printed = capsys.readouterr().out
    assert " of 8 streamed: " in printed
    assert "steps a second for each GB/s that the disk reads" in printed
    assert "--weights-on-disk /disk --weights-in-memory 0.02" in printed
    args = ["plan", str(path), "--cpu-offload-gb", "0.02", "--dtype", "float32"]
    assert cli.main(args) == 1
    assert "layers in the host's memory (--cpu-offload-gb) are a GPU's" in capsys.readouterr().out
    assert cli.main([*args, "--memory", "4"]) == 0
    printed = capsys.readouterr().out
    assert "--cpu-offload-gb 0.02" in printed
    assert "in the host's memory" in printed
    assert cli.main([*args[:2], "--cpu-offload-gb", "0.001", "--dtype", "float32", "--memory", "4"]) == 1
    assert "2 layers have memory in any case" in capsys.readouterr().out


def test_plan_uses_requested_block_size(capsys: pytest.CaptureFixture[str]) -> None:
    for flags, page in (([], 256), (["--block-size", "16"], 16), (["--block-size", "128"], 128)):
        assert cli.main(["plan", "--gpu", "L4", "--dtype", "bfloat16", *flags]) == 0
        printed = capsys.readouterr().out
        assert f"a block of {page} tokens" in printed
        assert " ".join(flags) in printed
    assert cli.main(["plan", "--block-size", "32", "--dtype", "bfloat16"]) == 1
    assert "blocks have 16 tokens there, not 32 (--block-size)" in capsys.readouterr().out


def test_plan_with_draft_model_counts_weights_and_blocks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The draft model's weights, its part of every KV block, and its spare blocks, two per sequence."""
    draft = {"method": "draft_model", "model": DEMO_MODEL, "num_speculative_tokens": 4}
    options = {"dtype": "bfloat16", "kv_cache_memory": 0.05, "max_num_seqs": 16}
    config = EngineConfig(speculative_config=SpeculativeConfig(**draft), **options)
    machine = Machine("test", memory=4 * GIB, gpu=False)
    info = EngineCore(config).info
    assert predict_kv_tokens(config, machine) == info.num_blocks * info.block_size
    page = info.kv_bytes // info.num_blocks
    used = info.kv_bytes + 2 * 16 * page // 2
    assert 0.05 * GIB - page < used <= 0.05 * GIB
    plain, drafting = (
        estimate_model(read_model_sizes(read_raw_config(DEMO_MODEL)[0]), machine, PlanRequest(draft=each))
        for each in (None, plan_draft(config.speculative_config, {}, None))
    )
    assert drafting.device_weight_bytes - plain.device_weight_bytes == drafting.draft_bytes > 2**20
    args = ["plan", "--memory", "4", "--json", "--speculative-config", json.dumps(draft)]
    assert cli.main(args) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["draft_bytes"] == drafting.draft_bytes
    flags = report["flags"]
    assert json.loads(flags[flags.index("--speculative-config") + 1]) == draft
    with pytest.raises(SystemExit):
        cli.main(["plan", "--speculative-config", "medusa"])
    assert "need a model" in capsys.readouterr().err


def test_plan_prints_text_and_gpu_table_and_draws_svg(
    coder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "plan.svg"
    assert cli.main(["plan", coder, "--gpu", "h100", "--picture", str(picture)]) == 0
    text = capsys.readouterr().out
    for part in (
        "6.74 B parameters",
        "512 KiB a token",
        "a block of 256 tokens 128 MiB, 4 MiB per layer",
        "7 x 16,384",
        "quire serve",
    ):
        assert part in text
    root = ElementTree.fromstring(picture.read_text())
    assert root.tag.endswith("svg")
    words = " ".join(root.itertext())
    assert "weights 12.56 GiB" in words
    assert "16,384" in words
    assert cli.main(["plan", coder, "--memory", "8", "--picture", str(picture)]) == 1
    assert "does not fit" in " ".join(ElementTree.fromstring(picture.read_text()).itertext())
    capsys.readouterr()
    assert cli.main(["plan", coder, "--gpu", "all"]) == 0
    table = capsys.readouterr().out
    assert all(name in table for name in read_gpu_table())


def test_plan_imports_no_torch(coder: str) -> None:
    code = (
        "import sys; from quire.server.cli import main as cli; cli.main(['plan', sys.argv[1], '--gpu', 'h100']);"
        "print([name for name in ('torch', 'transformers', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code, coder], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(("count", "width", "height"), [(1, 200, 120), (3, 64, 64), (2, 30, 400)])
def test_planned_image_tokens_and_bytes_equal_processor(
    count: int, width: int, height: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_vision.save_tiny_vision(tmp_path, max_position_embeddings=2048)
    args = (str(tmp_path), "--images", f"{count}x{width}x{height}", "--dtype", "float32")
    planned = plan(capsys, *args)["images"]
    shown = [tiny_vision.picture(1, width, height)] * count
    processor = tiny_vision.processor(tmp_path)
    ids = processor(text=["<image>" * count], images=[shown], add_special_tokens=False)["input_ids"][0]
    tokens = ids.count(tiny_vision.MARK_ID)
    assert planned["tiles"] == tokens // tiny_vision.TILE_TOKENS
    assert planned["tokens"] == len(ids) - count * (planned["tiles"] > count), (
        "a byte's tokenizer has two for two breaks"
    )
    assert planned["feature_bytes"] == tokens * tiny_models.SHAPE["hidden_size"] * 4
    reader = make_multimodal_prompt_builder(tmp_path, Tokenizer.from_pretrained(tmp_path))
    assert reader is not None
    prompt = reader.make_multimodal_prompt(
        "<image>", [RequestImage("a", shown[0])], lambda text: ids[: len(ids) // count]
    )
    assert planned["pixel_bytes"] == count * sum(len(each.pixels) for each in prompt.images)
    assert planned["tower_bytes"] > 0
    assert plan(capsys, *args, "--gpu", "H100")["images"] == planned
    assert cli.main(["plan", *args]) == 0
    assert f"{planned['tokens']} tokens of a context of 2,048" in capsys.readouterr().out


def test_plan_rejects_images_for_text_model(coder: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", coder, "--images", "1x1024x1024"]) == 1
    assert "--images: this model does not accept images here" in capsys.readouterr().err
    for wrong in ("1024", "0x1x1", "1x99999x99999", "axb"):
        with pytest.raises(SystemExit):
            cli.main(["plan", coder, "--images", wrong])


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (["/no/such/config.json"], "config.json"),
        (["--gpu", "voodoo"], "voodoo"),
        (["--memory", "8", "--tflops", "3"], "--bandwidth"),
    ],
)
def test_plan_names_invalid_argument(args: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", *args]) == 1
    assert named in capsys.readouterr().err


def test_plan_applies_rope_context_only_to_longrope_models(
    coder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["plan", coder, "--gpu", "h100", "--rope-context", "4096"]) == 1
    assert "rope_context: the model's rotations depend on no context" in capsys.readouterr().err
    phi = DEEPSEEK_CODER | {
        "model_type": "phi3",
        "original_max_position_embeddings": 4096,
        "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 64, "long_factor": [2.0] * 64},
    }
    (tmp_path / "config.json").write_text(json.dumps(phi))
    own = plan(capsys, str(tmp_path), "--gpu", "h100")
    short = plan(capsys, str(tmp_path), "--gpu", "h100", "--rope-context", "4096")
    assert (own["context"], short["context"]) == (16384, 4096), "which serve does not exceed"
    assert short["flags"][short["flags"].index("--rope-context") + 1] == "4096"
    both = phi | {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}}
    (tmp_path / "config.json").write_text(json.dumps(both))
    assert plan(capsys, str(tmp_path), "--gpu", "h100", "--rope-context", "4096")["context"] == 4096


def test_closed_stdout_pipe_prints_no_error() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "quire", "plan", "--gpu", "all"]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.parametrize("head_dim", [64, 100, 128, 256, 264])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("card", ["H100", "V100-32GB"])
def test_planned_kv_block_size_equals_attention_backend(
    card: str, dtype: str, head_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first GPU backend that would serve such heads there, with flash-attn installed."""
    machine = find_gpu(card)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0) if machine.bf16 else (7, 0))
    install_flash(monkeypatch, FakeFlashAttn())
    backends = [Flash2Backend(), ReferenceBackend()]
    chosen = next(
        each
        for each in backends
        if each.unsupported_reason(torch.device("cuda"), getattr(torch, dtype), head_dim) is None
    )
    assert machine.kv_block_size(dtype, head_dim) == chosen.block_size
    for backend in (
        Flash3Backend(),
        Flash4Backend(),
        Flash2Backend(),
        TorchVarlenBackend(),
        ReferenceBackend(),
        CpuBackend(),
    ):
        assert machine.kv_block_size(dtype, head_dim, backend.name) == backend.block_size
    assert replace(machine, gpu=False).kv_block_size(dtype, head_dim) == CpuBackend.block_size


def test_planned_concurrency_counts_whole_kv_blocks() -> None:
    """A context of one token more than a block takes two blocks, of 256 tokens on a GPU and of 16 on a CPU."""
    for machine, size in ((find_gpu("h100"), 256), (Machine("cpu", memory=64 * GIB, gpu=False), 16)):
        estimate = estimate_model(
            read_model_sizes(DEEPSEEK_CODER), machine, PlanRequest(EngineConfig(max_model_len=size + 1))
        )
        pages = estimate.kv_budget_bytes // (estimate.kv_token_bytes * size)
        assert estimate.concurrency == min(pages // 2, EngineConfig().max_num_seqs)
        assert estimate.num_blocks == min(pages, 2 * EngineConfig().max_num_seqs)


@pytest.mark.parametrize(
    ("family", "args", "reason"),
    [
        ("bloom", ("--gpu", "h100"), "ALiBi of attention is served only on CPUs"),
        ("deepseek_v32", ("--gpu", "h100"), "sparse attention is served only on CPUs"),
        ("deepseek_v32", ("--kv-cache-dtype", "fp8"), "sparse attention reads keys and values of 16 or 32 bits"),
        ("deepseek_v32", (), None),
        ("deepseek_v3", ("--gpu", "h100"), None),
    ],
)
def test_plan_names_attention_that_start_refuses(
    family: str, args: tuple[str, ...], reason: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny_models.SHAPE | tiny_models.FAMILIES[family]))
    assert cli.main(["plan", str(tmp_path), *args]) == 0
    text = capsys.readouterr().out
    assert ("quire serve" in text) is (reason is None)
    assert reason is None or reason in text


@pytest.mark.parametrize(
    ("config", "args", "reason"),
    [
        ({"model_type": "gpt_neo"}, (), "does not serve gpt_neo"),
        ({"model_type": "paligemma", "text_config": {"model_type": "gemma"}}, (), "does not serve paligemma"),
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, (), None),
        ({"quantization_config": {"quant_method": "aqlm", "bits": 2}}, (), "quant_method: 'aqlm'"),
        ({"rope_scaling": {"type": "longrope", "factor": 4.0}}, (), "rope_type longrope"),
        ({}, ("--tp", "2"), None),
        ({}, ("--pp", "2"), "pipelines only on CPUs"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 4.0}}, (), None),
        ({"model_type": "gemma3", "text_config": {"model_type": "gemma3_text"}}, (), None),
    ],
    ids=str,
)
def test_plan_prints_serve_command_only_for_supported_models(
    config: dict[str, Any],
    args: tuple[str, ...],
    reason: str | None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(DEEPSEEK_CODER | config))
    report = plan(capsys, str(tmp_path), "--gpu", "h100", "--context", "2048", *args)
    assert report["served"] is (reason is None)
    assert bool(report["flags"]) is (reason is None)
    assert cli.main(["plan", str(tmp_path), "--gpu", "h100", *args]) == 0
    text = capsys.readouterr().out
    assert ("quire serve" in text) is (reason is None)
    assert reason is None or reason in text
    if not args:  # compare with the engine
        try:
            served = read_model_config(tmp_path)
            rope_table(served.rope, 8, 8) if served.model_type == "llama" else None
            engine_error = "no such family" if find_decoder_family(served.model_type) is None else None
        except ModelError as error:
            engine_error = error.message
        assert (engine_error is None) is (reason is None)


def test_plan_prints_model_directory_for_config_json_path(coder: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", f"{coder}/config.json", "--gpu", "h100"]) == 0
    assert f"quire serve {coder}\n" in capsys.readouterr().out + "\n"


def test_encoder_plan_counts_weights_and_no_kv_cache(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = save_tiny_encoder(tmp_path, "bert")
    sizes = read_model_sizes(json.loads((path / "config.json").read_text()))
    model = AutoModel.from_pretrained(path)
    unused = sum(parameter.numel() for name, parameter in model.named_parameters() if name.startswith("pooler"))
    assert sizes.num_parameters == pytest.approx(model.num_parameters() - unused, rel=0.005)
    assert sizes.kv_values_per_token == 0
    assert cli.main(["plan", str(path), "--memory", "1"]) == 0
    printed = capsys.readouterr().out
    assert "none: an encoder" in printed
    assert "up to 320 tokens" in printed
    assert predict_kv_tokens(EngineConfig(model=str(path)), find_gpu("T4")) is None
    assert cli.main(["plan", str(path), "--memory", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["fits"] is True


@pytest.mark.parametrize(("kv", "head"), [("auto", 64 * 2), ("int8", 64 + 2), ("fp8", 64), ("fp8_e4m3", 64)])
@pytest.mark.parametrize("card", ["H100", None])
def test_plan_counts_kv_cache_dtype_bytes(card: str | None, kv: str, head: int) -> None:
    """Two heads in each of six layers. flash-attn, whose blocks have 256 tokens, supports no 8-bit KV cache."""
    machine = Machine("cpu", memory=64 * GIB, gpu=False) if card is None else find_gpu(card)
    estimate = estimate_model(
        read_model_sizes(read_raw_config(DEMO_MODEL)[0]), machine, PlanRequest(EngineConfig(kv_cache_dtype=kv))
    )
    assert estimate.kv_token_bytes == 2 * 2 * 6 * head
    assert estimate.block_size == (256 if card is not None and kv == "auto" else 16)
    assert estimate.block_bytes == estimate.block_size * estimate.kv_token_bytes
    assert estimate.layer_block_bytes * 6 == estimate.block_bytes
    assert (("--kv-cache-dtype", kv) == estimate.flags[:2]) == (kv != "auto")


@pytest.mark.parametrize("args", [["--memory", "2"], ["--gpu", "h100"], [], ["--config", "laptop", "--gpu", "h100"]])
def test_printed_memory_figures_add_up(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", *args]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("memory ")]
    terms, _, result = line.partition(", ")[2].rpartition(" = ")
    figures = [int(each.replace(",", "")) for each in re.findall(r"([\d,]+) MiB", terms.split(" = ")[-1])]
    step = [int(each) for each in re.findall(r"- (\d+) MiB for the largest step", line)]
    assert all(each < 1000 for each in step), "what is left over is no step's"
    assert figures[0] - sum(figures[1:]) == int(result.split(" MiB")[0].replace(",", ""))


@pytest.mark.parametrize(
    ("card", "config", "beside"),
    [
        ("h100", {}, 1 / 4),
        ("h100", {"max_num_batched_tokens": 2048}, (256 + 1024) / 2048),
        ("h100", {"max_num_batched_tokens": 256, "max_num_seqs": 300}, 1.0),
        ("h100", {"max_model_len": 100, "max_num_batched_tokens": 1024}, (256 + 64) / 1024),
        ("h100", {"attention_backend": "sdpa"}, None),
        ("T4", {}, None),
        ("h100", {"enforce_eager": True}, 0),
    ],
)
def test_planned_step_bytes_include_cuda_graphs(card: str, config: dict[str, Any], beside: float | None) -> None:
    """beside: the memory that graphs share, as a fraction of the largest step's bytes. None: a quarter, and no graph
    has prompts.
    """
    sizes, machine, engine_config = read_model_sizes(DEEPSEEK_CODER), find_gpu(card), EngineConfig(**config)
    step = max_step_bytes(sizes, 2, max_step_tokens(machine, engine_config))
    more = 0 if not beside else MAX_MIXED_GRAPHS * DRIVER_BYTES_PER_GRAPH
    estimate = estimate_model(sizes, machine, PlanRequest(engine_config))
    assert estimate.step_bytes == pytest.approx(step * (1 + (1 / 4 if beside is None else beside)) + more, abs=1)
    for settings, calls in (({}, 2), ({"decode_context_parallel_size": 2}, 4)):
        together = engine_config.model_copy(update={"tensor_parallel_size": 2} | settings)
        of_two = estimate_model(sizes, divide_machine_by_parallelism(machine, 2), PlanRequest(together)).step_bytes
        nccl = MAX_MIXED_GRAPHS * (1 + calls * sizes.num_layers) * NCCL_BYTES_PER_GRAPH_CALL if beside else 0
        assert of_two == estimate.step_bytes + nccl
    speculative = engine_config.model_copy(update={"speculative_config": SpeculativeConfig(method="mtp")})
    assert (
        estimate_model(sizes, machine, PlanRequest(speculative)).step_bytes - estimate.step_bytes
        == (beside != 0) * DRAFT_GRAPHS_BYTES
    )


def test_plan_picture_rejects_png_and_unwritable_path(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "--memory", "1", "--picture", str(tmp_path / "x.png")]) == 1
    assert "draws an SVG" in capsys.readouterr().err
    assert cli.main(["plan", "--memory", "1", "--picture", str(tmp_path / "no" / "x.svg")]) == 1
    assert "cannot write" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_plan_reads_config_file_and_environment_like_serve(
    coder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(f'model = "{coder}"\nmax_model_len = 1024\nmax_num_seqs = 4\nkv_cache_memory = 2.0\nport = 9\n')
    report = plan(capsys, "--config", str(file), "--gpu", "h100")
    assert report == plan(capsys, coder, "--config", str(file), "--gpu", "h100")
    assert report["flags"][:2] == ["--max-model-len", "1024"]
    assert report["flags"][-4:] == ["--max-num-seqs", "4", "--kv-cache-memory", "2"]
    over = plan(capsys, "--config", str(file), "--gpu", "h100", "--context", "512", "--dtype", "float16")
    assert over["flags"][:4] == ["--max-model-len", "512", "--dtype", "float16"]
    monkeypatch.setenv("QUIRE_MAX_MODEL_LEN", "256")
    assert plan(capsys, "--config", str(file), "--gpu", "h100")["flags"][1] == "256", "as quire serve reads it"
    monkeypatch.delenv("QUIRE_MAX_MODEL_LEN")
    assert cli.main(["plan", "--config", str(file), "--gpu", "h100"]) == 0
    assert f"quire serve {coder} --config {file} --max-model-len 1024" in capsys.readouterr().out
    file.write_text("max_model_length = 1024\n")
    with pytest.raises(SystemExit, match="2"):  # like quire serve
        cli.main(["plan", "--config", str(file)])
    assert "max_model_length" in capsys.readouterr().err


@pytest.mark.parametrize(("flag", "meant"), [("--conf", "--config"), ("--contxt", "--context"), ("--zz", "see --help")])
def test_mistyped_plan_flag_is_answered_with_suggestion(
    flag: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["plan", flag, "laptop"])
    error = capsys.readouterr().err
    assert error.startswith("quire plan: cannot be understood:\n")
    assert meant in error
    assert error.count("\n") == 2


def test_gpt_oss_moe_is_planned_on_cpu_and_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(tiny_models.SHAPE | tiny_models.FAMILIES["gpt_oss"]))
    here, card = plan(capsys, str(path)), plan(capsys, str(path), "--gpu", "h100")
    assert (here["served"], card["served"]) == (True, True)
    path.write_text(path.read_text().replace('"vocab_size": 320', '"vocab_size": 32000000'))
    assert plan(capsys, str(path), "--memory", "1", status=1)["fits_on"] is None


@pytest.mark.parametrize("kind", ["Q8_0", "F16"])
def test_planned_gguf_embedding_bytes_equal_engine(kind: str, tmp_path: Path) -> None:
    """A quantized embedding stays as stored and is the tied head, too. The CPU kernels pack a copy of any other
    embedding.
    """
    gguf_models = pytest.importorskip("tests.gguf_models", reason="the package gguf is not installed")
    folder = tiny_models.save_tiny_model(tmp_path / "folder", "llama", tie_word_embeddings=True)
    file = gguf_models.write_gguf(folder, tmp_path / "model.gguf", lambda _: kind)
    sizes, stored = read_model_sizes(read_raw_config(str(file))[0]), read_checkpoint_size(file)
    assert stored is not None
    assert sizes.embedding_parameters == sizes.head_parameters, "tied"
    planned = estimate_model(
        sizes,
        Machine("test", GIB, gpu=False),
        PlanRequest(EngineConfig(dtype="float16", attention_backend="reference")),
        stored,
    )
    config = EngineConfig(model=str(file), dtype="float16", num_kv_blocks=64, attention_backend="reference")
    assert planned.weight_bytes == EngineCore(config).info.weight_bytes
    copied = planned.device_weight_bytes - planned.weight_bytes
    assert copied == (0 if kind == "Q8_0" else 2 * sizes.head_parameters)


def test_memory_advice_names_quantization_that_fits(tmp_path: Path) -> None:
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "vocab_size": 32000}
    config |= {"intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8}
    (tmp_path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 131072}))
    engine_config = EngineConfig(model=str(tmp_path), device="cpu", load_format="dummy", dtype="bfloat16")
    advice = memory_advice(engine_config, Machine("test", memory=10 * GIB, gpu=False))
    assert re.match(r"the weights take 1\d\.\d GiB and test has 10\.0 GiB for them: nothing is left", advice)
    assert f"; with --quantization int8 it fits. quire plan {tmp_path} has the arithmetic" in advice
    assert "int4 it fits" in memory_advice(engine_config, Machine("test", memory=6 * GIB, gpu=False))
    assert "it fits" not in memory_advice(engine_config, Machine("test", memory=2 * GIB, gpu=False))
    longer = engine_config.model_copy(update={"max_model_len": 131072})
    advice = memory_advice(longer, Machine("test", memory=20 * GIB, gpu=False))
    assert re.search(r"131,072 tokens need .* 1 x [\d,]+ tokens fit", advice)
    assert memory_advice(engine_config, Machine("test", memory=64 * GIB, gpu=False)) == ""


def test_memory_advice_is_empty_for_a_context_above_the_model_positions(tmp_path: Path) -> None:
    """More memory would not help: the engine's error names the positions."""
    (tmp_path / "config.json").write_text(json.dumps(tiny_models.SHAPE | tiny_models.FAMILIES["llama"]))
    config = EngineConfig(model=str(tmp_path), device="cpu", load_format="dummy", max_model_len=1_000_000)
    assert memory_advice(config, Machine("test", memory=64 * GIB, gpu=False)) == ""
    assert memory_advice(config.model_copy(update={"max_model_len": None}), Machine("test", memory=2**20, gpu=False))


def test_plan_calls_the_cache_a_limit_if_full_contexts_need_less(
    coder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["plan", coder, "--gpu", "h100", "--max-num-seqs", "1"]) == 0
    text = capsys.readouterr().out
    assert re.search(r"= [\d,]+ MiB for the KV cache at most$", text, re.MULTILINE)
    assert "full contexts (--max-num-seqs) use" in text
    assert cli.main(["plan", coder, "--gpu", "h100"]) == 0
    text = capsys.readouterr().out
    assert "at most" not in re.findall("^memory.*$", text, re.MULTILINE)[0]
    assert "full contexts (--max-num-seqs) use" not in text


@pytest.mark.parametrize(
    ("tflops", "expected"),
    [("1000", r"0\.\d\d? s or more"), ("1", r"\d\.\d minutes or more"), ("0.001", r"\d\d+ hours or more")],
)
def test_plan_rounds_prefill_times_to_readable_units(
    tflops: str, expected: str, coder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    cli.main(["plan", coder, "--gpu", "h100", "--context", "16384", "--bandwidth", "3350", "--tflops", tflops])
    assert re.search(f"16,384 take {expected}", capsys.readouterr().out)


@pytest.mark.parametrize("where", [(), ("--gpu", "L4"), ("--gpu", "L4", "--tp", "2")])
def test_kv_cache_larger_than_memory_does_not_fit(where: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "--kv-cache-memory", "100000", *where]) == 1
    assert "does not fit  a KV cache of 100000 GiB (--kv-cache-memory)" in capsys.readouterr().out


def test_table_of_all_gpus_has_units(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "--gpu", "all"]) == 0
    first, _, *rows, last = capsys.readouterr().out.splitlines()
    for word in ("KV cache,", "context, tokens", "tokens/s"):
        assert word in first
    assert len({len(row) for row in rows if "does not" not in row}) == 1
    assert "tokens/s" in last
