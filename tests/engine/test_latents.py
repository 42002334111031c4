"""MLA models: what KV blocks hold, the plan, and the same tokens with all features on."""

from __future__ import annotations

import json
import random
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from quire.engine.checkpoint.kv_cache_plan import GIB
from quire.engine.checkpoint.model_resolver import read_model_config
from quire.engine.common.config import EngineConfig
from quire.engine.common.errors import AdapterError, ConfigError
from quire.engine.core.drafter import NullDrafter
from quire.engine.engine_core import EngineCore
from quire.engine.lora.adapter_files import read_adapter_specs
from quire.engine.lora.target_modules import adaptable_modules
from quire.engine.models import decoder_spec
from quire.engine.spec_decode.draft_length import AdaptiveLengthDrafter
from quire.engine.worker.device_plan import check_device_supports_attention
from quire.server.cli.plan.machine import Machine
from quire.server.cli.plan.model_plan import predict_kv_tokens
from tests.adapters import save_adapter
from tests.engine.harness import Answer, request, run
from tests.engine.test_speculation import CHEAP, Garbage, Replaceable
from tests.engine.test_states import PARAMS, PROMPT, SHAPES, SMALL, asked, known, model
from tests.engine.tiers.fakes import always
from tests.engine.tiers.test_engine import CONVERSATIONS, HOST, TURNS, converse, disk
from tests.tiers import examples
from tests.tiny_models import save_tiny_model

FAMILIES = ["deepseek_v2", "deepseek_v2-lite", "deepseek_v2-dense", "deepseek_v3", "glm4_moe_lite", "youtu", "minicpm3"]
FAMILIES += ["deepseek_v32", "glm_moe_dsa", "kimi_linear"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("latents")


@cache
def engine(folder: Path, family: str, dtype: str, kv: str, shape: int | None) -> tuple[EngineCore, Replaceable]:
    """shape None: requests run alone, without prefix caching."""
    chosen, drafts = {"enable_prefix_caching": False} if shape is None else SHAPES[shape], Replaceable()
    config = EngineConfig(model=str(model(folder, family)), dtype=dtype, kv_cache_dtype=kv, **(SMALL | chosen))
    return EngineCore(config, make_drafter=lambda *_: drafts), drafts


@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(
    traffic=st.lists(st.tuples(PROMPT, PARAMS), min_size=1, max_size=7),
    shape=st.integers(0, len(SHAPES) - 1),
    family=st.sampled_from(["deepseek_v2-lite", "deepseek_v3", "deepseek_v32", "youtu", "kimi_linear"]),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    kv=st.sampled_from(["auto", "auto", "int8", "fp8"]),
    guesses=st.one_of(st.none(), st.integers(0, 99)),
)
def test_mla_logprobs_do_not_depend_on_batch_chunks_cache_or_drafts(
    folder: Path,
    traffic: list[tuple[tuple[int, int, int, int], dict[str, Any]]],
    shape: int,
    family: str,
    dtype: str,
    kv: str,
    guesses: int | None,
) -> None:
    kv = "auto" if family == "deepseek_v32" else kv
    requests, (alone, _) = asked(traffic), engine(folder, family, dtype, kv, None)
    expected: dict[str, object] = {}
    for each in requests:
        expected |= known(run(alone, [each]))
    made, drafts = engine(folder, family, dtype, kv, shape)
    drafts.drafter = (
        NullDrafter() if guesses is None else AdaptiveLengthDrafter(Garbage(random.Random(guesses)), 8, CHEAP)
    )
    for _ in range(2):
        assert known(run(made, requests)) == expected


@pytest.mark.few(2)
@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("family", FAMILIES)
def test_mla_logprobs_equal_float64_transformers(family: str, backend: str, folder: Path) -> None:
    path, prompt = model(folder, family), [3 + (at * at) % 300 for at in range(77)]
    judge = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, experts_implementation="eager")
    made = EngineCore(EngineConfig(model=str(path), dtype="float32", attention_backend=backend, num_kv_blocks=96))
    logprobs_of_prompt = prompt_logprobs_of(run(made, [request("a", prompt, max_tokens=1, prompt_logprobs=0)])["a"])
    with torch.inference_mode():
        logprobs = judge(torch.tensor([prompt])).logits[0].log_softmax(-1)
    expected = logprobs[:-1].gather(1, torch.tensor(prompt)[1:, None])[:, 0]
    assert logprobs_of_prompt == pytest.approx(expected.tolist(), abs=5e-5)


def prompt_logprobs_of(answer: Answer) -> list[float]:
    assert answer.prompt_logprobs is not None
    return [each.logprob for each in answer.prompt_logprobs if each is not None]


def test_kimi_k2_equals_deepseek_v3(folder: Path, tmp_path: Path) -> None:
    path, one_request = model(folder, "deepseek_v3"), request("a", [3, 40, 7, 99, 5], max_tokens=2, prompt_logprobs=0)
    copy = shutil.copytree(path, tmp_path / "kimi")
    content = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(content | {"model_type": "kimi_k2"}))
    expected, found = (
        run(EngineCore(EngineConfig(model=str(each), **SMALL)), [one_request])["a"] for each in (path, copy)
    )
    assert (found.ids, prompt_logprobs_of(found)) == (expected.ids, prompt_logprobs_of(expected))


def test_lora_on_kv_b_proj_is_rejected(folder: Path, tmp_path: Path) -> None:
    path = model(folder, "youtu")
    base = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    adapter = save_adapter(tmp_path / "a", base, 4, targets=("kv_b_proj",), seed=4)
    with pytest.raises(
        AdapterError, match=r"kv_b_proj.*adapters of the MLA up-projection \(kv_b_proj\) are not served"
    ):
        read_adapter_specs(adapter, adaptable_modules(read_model_config(path)), 8)


@pytest.mark.parametrize(("kv", "beside"), [("auto", 0), ("int8", 2), ("fp8", 0)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_kv_block_holds_latent_and_rope_key_per_token(dtype: str, kv: str, beside: int, folder: Path) -> None:
    config = EngineConfig(
        model=str(model(folder, "deepseek_v3")),
        dtype=dtype,
        kv_cache_dtype=kv,
        kv_cache_memory=300 * 2**10 / GIB,
        max_model_len=128,
        max_num_seqs=12,
    )
    made = EngineCore(config)
    width = {"float32": 4, "bfloat16": 2}[dtype] if kv == "auto" else 1
    page = 3 * 16 * (32 + 16 + beside) * width
    assert made.info.kv_bytes == made.info.num_blocks * page
    assert made.info.num_blocks == min(300 * 2**10 // page, 12 * 8)
    assert "32 latent + 16 rotated" in made.info.arithmetic
    assert predict_kv_tokens(config, Machine("here", 2**34, None, None)) == made.info.num_blocks * 16


@pytest.mark.parametrize(("family", "kv"), [("deepseek_v2", "auto"), ("deepseek_v2", "int8"), ("deepseek_v32", "auto")])
def test_latent_kv_blocks_load_from_tiers(family: str, kv: str, tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path / "model", family)
    options = {"model": str(path), "num_kv_blocks": 14, "max_model_len": 192, "kv_cache_dtype": kv}
    plain = EngineCore(EngineConfig(**options))
    expected = converse(plain)
    made = EngineCore(EngineConfig(**options, **HOST, **disk(tmp_path)), make_tiers=always)
    assert converse(made) == expected
    assert made.engine_stats.tiers[0].fetched_pages > 0
    made.shut_down()
    again = EngineCore(EngineConfig(**options, **disk(tmp_path)), make_tiers=always)
    assert converse(again) == expected
    assert again.engine_stats.prompt_tokens < CONVERSATIONS * TURNS * 40
    again.shut_down()


def test_mla_is_rejected_on_mps(folder: Path) -> None:
    config = read_model_config(model(folder, "deepseek_v2"))
    check_device_supports_attention(torch.device("cuda"), config, decoder_spec(config))
    with pytest.raises(ConfigError, match=r"latent attention .* only on CPUs and CUDA GPUs so far: --device cpu"):
        check_device_supports_attention(torch.device("mps"), config, decoder_spec(config))
