"""MTP layers of checkpoints draft what the published rule computes, and change no token."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.train_head import story_requests, train_head
from quire.engine.checkpoint.kv_cache_plan import GIB
from quire.engine.common.config import DEMO_MODEL, EngineConfig, SpeculativeConfig
from quire.engine.common.errors import ConfigError
from quire.engine.common.request_params import SamplingParams
from quire.engine.common.types import EngineCoreRequest
from quire.engine.core.drafter import Drafter
from quire.engine.engine_core import EngineCore
from quire.engine.tiers.tiered_offloader import TieredKVOffloader
from quire.engine.worker.startup_steps.started_worker import StartedWorker
from quire.server.cli import main as cli
from quire.server.cli.plan.draft_plan import plan_draft
from quire.server.cli.plan.machine import Machine
from quire.server.cli.plan.model_plan import predict_kv_tokens
from tests.engine.harness import run
from tests.engine.test_heads import GREEDY, Recorded, traffic
from tests.engine.test_speculation import KINDS, always, known
from tests.engine.tiers.fakes import always as of_tiers
from tests.engine.tiers.test_engine import HOST, converse, disk
from tests.gguf_deltas import write_delta_gguf
from tests.gguf_models import write_gguf
from tests.quantized_models import compressed_config, float8, int8, quantize_checkpoint
from tests.tiers import pair_in_rotation
from tests.tiny_models import save_tiny_model
from tests.tiny_mtp import MtpReference, save_tiny_mtp

FAMILIES = ["deepseek_v3", "glm4_moe", "qwen3-next", "glm4_moe_lite", "qwen3_5-moe", "qwen3_5", "nemotron_h"]
FAMILIES += ["nemotron_h-latent", "deepseek_v32"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mtp")


@cache
def model(folder: Path, family: str) -> Path:
    return save_tiny_mtp(folder / family, family)


def started(
    path: Path,
    method: str | None = "mtp",
    tokens: int = 4,
    make_drafter: Callable[[StartedWorker, EngineConfig], Drafter | None] | None = None,
    make_tiers: Callable[..., TieredKVOffloader] = TieredKVOffloader,
    **options: Any,
) -> EngineCore:
    speculative_config = None if method is None else SpeculativeConfig(method=method, num_speculative_tokens=tokens)
    options = {"num_kv_blocks": 200, "max_model_len": 200, "dtype": "float32"} | options
    config = EngineConfig(model=str(path), speculative_config=speculative_config, threads=1, **options)
    return EngineCore(config, make_drafter=make_drafter, make_tiers=make_tiers)


@pytest.mark.few(2)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("budget", [2048, 21])
def test_mtp_drafts_equal_reference_computation(family: str, budget: int, folder: Path) -> None:
    """Drafts that are all rejected, and drafts that are all accepted: a request that allows one token only."""
    path = model(folder, family)
    recorded, options = Recorded(), {"enable_prefix_caching": False, "max_num_batched_tokens": budget}
    engine = started(path, make_drafter=recorded.make, **options)
    one = SamplingParams(allowed_token_ids=(40,), max_tokens=24)
    run(engine, [EngineCoreRequest(id="one", prompt_ids=[7, 9, 11], params=one, seed=0), *traffic(GREEDY * 3)])
    assert sum(engine.engine_stats.accepted_drafts) >= 6
    reference, compared = MtpReference(path), 0
    for (tokens, guesses), state in list(zip(recorded.guesses, recorded.states, strict=True))[::5]:
        expected_state, expected_guesses = reference.guesses(tokens, len(guesses) or 1)
        torch.testing.assert_close(state.double(), expected_state, rtol=1e-3, atol=1e-3)
        if tokens[:3] != [7, 9, 11]:
            assert guesses == expected_guesses[: len(guesses)], tokens
            compared += len(guesses)
    assert compared > 15


SHAPES: list[dict[str, Any]] = [
    {"snapshot_tokens": 64},
    {"max_num_batched_tokens": 21, "max_num_seqs": 4, "snapshot_tokens": 16},
    {"num_kv_blocks": 13, "snapshot_tokens": 16},
]


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("family", "dtype"),
    pair_in_rotation(
        ["qwen3_5", "deepseek_v3", "qwen3-next", "glm4_moe", "nemotron_h", "nemotron_h-latent"], ["bfloat16", "float32"]
    ),
)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_mtp_drafts_do_not_change_tokens(family: str, shape: dict[str, int], dtype: str, folder: Path) -> None:
    """Chunked, with prefix hits, after preemptions, and with states restored after rejected drafts."""
    path, options = model(folder, family), shape | {"dtype": dtype}
    few = {"allowed_token_ids": (40, 41), "prompt_logprobs": 1}
    requests = traffic([*KINDS, *KINDS, few, few])
    expected: dict[str, object] = {}
    alone = started(path, None, enable_prefix_caching=False, dtype=dtype)
    for each in requests:
        expected |= known(run(alone, [each]))
    engine = started(path, make_drafter=always, **options)
    for _ in range(2):  # in the second round prompts are cached
        assert known(run(engine, requests)) == expected
    assert engine.engine_stats.draft_tokens > 50
    assert 0 < sum(engine.engine_stats.accepted_drafts) < engine.engine_stats.draft_tokens
    assert engine.engine_stats.preemptions > 0 or "num_kv_blocks" not in shape


@pytest.mark.few(1)
@pytest.mark.parametrize("family", ["qwen3_5", "deepseek_v3"])
def test_replayed_request_resumes_same_tokens_with_mtp(family: str, folder: Path) -> None:
    """After a crash a new engine gets the request with the tokens that its caller has."""
    path = model(folder, family)
    requests = traffic([{"temperature": 0.9}, {"temperature": 0.0}, {"allowed_token_ids": (40, 41)}])
    whole = run(started(path, None), requests)
    for cut in (1, 8):
        new_engine = started(path, make_drafter=always)
        rest = run(
            new_engine, [msgspec.structs.replace(each, emitted_ids=whole[each.id].ids[:cut]) for each in requests]
        )
        assert {name: each.ids for name, each in rest.items()} == {n: each.ids[cut:] for n, each in whole.items()}
        assert new_engine.engine_stats.draft_tokens > 0


@pytest.mark.slow
def test_mtp_conversation_from_tiers_equals_fresh_computation(folder: Path, tmp_path: Path) -> None:
    """The layer's KV returns with the blocks, recurrent states with their snapshots."""
    path = model(folder, "qwen3_5")
    options = {"max_model_len": 192, "snapshot_tokens": 16, "max_num_seqs": 3, "state_memory": 5e-4}
    expected = converse(started(path, None, enable_prefix_caching=False, **(options | {"state_memory": None})))
    tiers = {"make_tiers": of_tiers, **HOST, **disk(tmp_path)}
    engine = started(path, make_drafter=always, num_kv_blocks=14, **options, **tiers)
    assert converse(engine) == expected
    assert engine.engine_stats.tiers[0].fetched_pages > 0
    assert engine.engine_stats.draft_tokens > 0
    engine.shut_down()


@pytest.mark.few(1)
@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_5", "glm4_moe", "glm4_moe_lite"])
def test_mtp_layer_is_ignored_unless_configured(family: str, folder: Path, tmp_path: Path) -> None:
    bare, requests = save_tiny_model(tmp_path / "bare", family), traffic(KINDS)
    expected, answers = (known(run(started(path, None), requests)) for path in (bare, model(folder, family)))
    assert answers == expected


def recorded_guesses(path: Path, **options: Any) -> list[tuple[list[int], list[int]]]:
    recorded = Recorded()
    engine = started(path, make_drafter=recorded.make, **options)
    params = SamplingParams(temperature=0.0, max_tokens=6)
    run(engine, [EngineCoreRequest(id="a", prompt_ids=list(range(5, 26)), params=params, seed=0)])
    return recorded.guesses


@pytest.mark.slow
@pytest.mark.parametrize("left", ["none", "some", "all"])
@pytest.mark.parametrize("family", ["qwen3_5", "deepseek_v3"])
def test_mtp_drafts_are_equal_for_quantized_checkpoints(family: str, left: str, tmp_path: Path) -> None:
    """The whole MTP layer, none of it, or all but its joining linear is quantized, whatever config.json says of it."""
    path = save_tiny_mtp(tmp_path / "model", family)
    mtp = {"some": ("mtp.fc", "eh_proj"), "all": ("mtp.", "model.layers.3."), "none": ()}[left]
    whole = ("lm_head", "mlp.gate.", "norm", "conv1d", "shared_head", *mtp)
    if family == "deepseek_v3":  # as it was published
        pack = float8("block", "weight_scale_inv", (32, 32))
        config = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [32, 32]}
    else:
        pack, config = int8("channel"), compressed_config("int-quantized", 8, 0, strategy="channel")
    packed = quantize_checkpoint(path, tmp_path / "packed", pack, config, whole)
    options = {"attention_backend": "reference"}
    assert recorded_guesses(packed, **options) == recorded_guesses(path, **options)


@pytest.mark.slow
def test_mtp_weights_are_quantized_with_model(folder: Path) -> None:
    path, requests, options = model(folder, "qwen3_5"), traffic(KINDS), {"quantization": "int8", "dtype": "bfloat16"}
    expected = known(run(started(path, None, **options), requests))
    engine = started(path, make_drafter=always, **options)
    assert known(run(engine, requests)) == expected
    assert engine.engine_stats.draft_tokens > 20
    loaded = started(path, dtype="bfloat16")
    assert engine.info.weight_bytes < 0.8 * loaded.info.weight_bytes


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
@pytest.mark.parametrize("family", ["qwen3_5", "glm4_moe", "qwen3_5-moe"])
def test_mtp_drafts_are_equal_from_gguf(family: str, kind: str, tmp_path: Path) -> None:
    """The file is as llama.cpp's converter writes it."""
    path = save_tiny_mtp(tmp_path / "model", family, moe_intermediate_size=64)
    write = write_gguf if family == "glm4_moe" else write_delta_gguf
    file = write(path, tmp_path / "model.gguf", lambda _: kind)
    options = {"attention_backend": "reference"}
    guesses = recorded_guesses(file, **options)
    assert sum(len(tokens) for _, tokens in guesses) > 5
    assert guesses == recorded_guesses(path, **options)
    assert started(file, None, **options).info.weight_bytes < started(file, **options).info.weight_bytes


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "family", ["qwen3_5", "glm4_moe", "deepseek_v3", "qwen3-next", "nemotron_h", "nemotron_h-latent"]
)
def test_plan_counts_mtp_weights_and_kv_blocks(family: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its weights, its part of every KV block, and its spare blocks."""
    path = model(folder, family)
    options: dict[str, Any] = {"dtype": "bfloat16", "kv_cache_memory": 0.002, "max_num_seqs": 4, "max_model_len": 128}
    options |= {"state_memory": 0.001} if family.startswith(("qwen", "nemotron")) else {}
    configs = [
        EngineConfig(model=str(path), speculative_config=each, **options)
        for each in (
            {"method": "none"},
            {"method": "mtp", "num_speculative_tokens": 4, "lookup": "ngram", "num_lookup_tokens": 5},
        )
    ]
    plain, info = (EngineCore(config).info for config in configs)
    machine = Machine("test", memory=4 * GIB, gpu=False)
    assert predict_kv_tokens(configs[1], machine) == info.num_blocks * info.block_size
    assert "x 1 layers" in info.arithmetic
    args = ["plan", str(path), "--memory", "4", "--json", "--dtype", "bfloat16"]
    assert cli.main([*args, "--speculative-config", "qwen3_next_mtp"]) == 0
    drafts = json.loads(capsys.readouterr().out)["draft_bytes"]
    assert drafts == pytest.approx(info.weight_bytes - plain.weight_bytes, rel=0.01)
    raw = json.loads((path / "config.json").read_text())
    unread = plan_draft(SpeculativeConfig(method="mtp"), raw, None)  # from config.json alone
    assert unread is not None
    assert unread.draft_weight_bytes(2) == drafts


def test_mtp_rejects_unsupported_settings_and_models(folder: Path, tmp_path: Path) -> None:
    for name in ("mtp", "deepseek_mtp", "qwen3_next_mtp", "glm4_moe_mtp"):
        assert SpeculativeConfig(method=name).method == "mtp"
    with pytest.raises(ValueError, match=r"mtp uses the MTP layer of the served model, not x"):
        EngineConfig(model="y", speculative_config=SpeculativeConfig(method="mtp", model="x"))
    bare = save_tiny_model(tmp_path / "bare", "llama")
    with pytest.raises(ConfigError, match=r"speculative_config: mtp: .* bare has no MTP layer"):
        started(bare)
    with pytest.raises(ConfigError, match=r"'mtp' needs all layers in one process"):
        started(model(folder, "qwen3_5"), pipeline_parallel_size=2)
    with pytest.raises(ConfigError, match=r"speculative_config: .* computed by transformers' class"):
        started(model(folder, "qwen3_5"), model_impl="transformers")
    path = model(folder, "qwen3_5")
    broken = shutil.copytree(path, tmp_path / "broken")
    tensors = {n: each for n, each in load_file(path / "model.safetensors").items() if "mtp.fc" not in n}
    save_file(tensors, broken / "model.safetensors")
    with pytest.raises(ConfigError, match=r"speculative_config: mtp: .*lack model\.layers\.0\.eh_proj"):
        started(broken)
    assert started(path, load_format="dummy").info.weight_bytes > started(path, None).info.weight_bytes


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_trained_mtp_layer_has_one_eighth_acceptance(tmp_path: Path) -> None:
    """The model is made deeper, so that drafts pay; the layer is trained on some stories and drafts others."""
    path = train_head(tmp_path / "model", "mtp", stories=48, rounds=5, layers=24)
    options: dict[str, Any] = {"max_model_len": 512, "dtype": "bfloat16"}
    requests = story_requests(4, seed=7, tokens=120)
    expected = known(run(started(Path(DEMO_MODEL), None, **options), requests))
    engine = started(path, make_drafter=always, **options)
    assert known(run(engine, requests)) == expected
    assert engine.engine_stats.draft_tokens > 200
    assert sum(engine.engine_stats.accepted_drafts) > engine.engine_stats.draft_tokens / 8
