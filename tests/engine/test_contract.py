"""A request has the same tokens alone, batched, chunked, with prefix hits, preempted and replayed."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from quire.engine.common.config import EngineConfig
from quire.engine.common.errors import ConfigError
from quire.engine.common.request_params import PoolingParams, ThinkingBudget
from quire.engine.common.types import EngineCoreRequest
from quire.engine.engine_core import EngineCore
from quire.kernels.backend_selection import select_backend
from tests.engine.harness import request, run
from tests.tiers import slow
from tests.tiny_models import VOCAB, save_tiny_model

SETTINGS = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.2, "top_k": 20, "min_p": 0.02},
    {"temperature": 0.0, "repetition_penalty": 1.3, "frequency_penalty": 0.5},
    {"temperature": 1.0, "top_k": 50, "top_p": 0.8, "presence_penalty": 0.7, "min_tokens": 10},
    {"temperature": 1.5, "allowed_token_ids": tuple(range(3, 13)), "bad_words_ids": ((4,), (5, 6), (7, 8, 9))},
    {"temperature": 1.0, "thinking": ThinkingBudget(6, end_id=3, begin_id=None)},
    {"temperature": 1.0, "typical_p": 0.8, "top_n_sigma": 2.0, "xtc_probability": 0.5, "xtc_threshold": 0.001},
    {"temperature": 0.9, "dry_multiplier": 2.0, "dry_allowed_length": 1, "dry_sequence_breaker_ids": ((5,), (6, 7))},
)


def mixed_requests() -> list[EngineCoreRequest]:
    """24 requests: greedy and sampled, short and long, some with a common prefix."""
    generator = torch.Generator().manual_seed(5)
    common = torch.randint(3, VOCAB, (70,), generator=generator).tolist()
    requests = []
    for i in range(24):
        own = torch.randint(3, VOCAB, (1 + 7 * i % 90,), generator=generator).tolist()
        prompt = common[: 16 * (i % 4) + 5] + own if i % 2 else own
        requests.append(request(str(i), prompt, seed=1000 + i, max_tokens=20 + i % 13, **SETTINGS[i % len(SETTINGS)]))
    return requests


def tokens(engine: EngineCore, requests: Sequence[EngineCoreRequest]) -> dict[str, list[int]]:
    return {name: answer.ids for name, answer in run(engine, requests).items()}


GPU_BACKENDS = ("flash", "torch_varlen", "triton", "reference")


OTHERS = ("phi3-longrope", "ministral3", "granite", "olmo2", "hunyuan_v1_dense", "apertus", "cohere-norms", "falcon")
"""Families with parts that Qwen 3 lacks, other than ALiBi and learned positions."""


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("dtype", "backend", "device", "family"),
    [
        ("float32", "cpu", "cpu", "qwen3"),
        ("bfloat16", "cpu", "cpu", "qwen3"),
        ("bfloat16", "cpu", "cpu", "bloom"),
        ("bfloat16", "cpu", "cpu", "lfm2"),
        ("bfloat16", "cpu", "cpu", "qwen3_5"),
        ("bfloat16", "cpu", "cpu", "deepseek_v3"),
        ("bfloat16", "cpu", "cpu", "deepseek_v32"),
        ("bfloat16", "cpu", "cpu", "kimi_linear"),
        *slow(*(("bfloat16", "cpu", "cpu", family) for family in (*OTHERS, "gpt2", "mpt", "gpt_neox"))),
        pytest.param("bfloat16", "reference", "cpu", "qwen3", marks=pytest.mark.slow),
        *(pytest.param("bfloat16", name, "cuda", "qwen3", marks=pytest.mark.gpu) for name in GPU_BACKENDS),
    ],
)
def test_tokens_do_not_depend_on_batch_chunking_cache_or_replay(
    dtype: str, backend: str, device: str, family: str, tmp_path: Path
) -> None:
    layers = {} if family == "kimi_linear" else {"num_hidden_layers": 2}  # its config.json lists them
    path = save_tiny_model(tmp_path, family, **layers)

    def engine(**options: int) -> EngineCore:
        options = {"num_kv_blocks": 600} | options
        where = {"attention_backend": backend, "device": device, "deterministic": device == "cuda"}
        where["enforce_eager"] = backend == "reference"  # a CUDA graph cannot capture the reference
        return EngineCore(EngineConfig(model=str(path), dtype=dtype, **where, **options))

    if device == "cuda" and (reason := gpu_backend_error(backend)) is not None:
        pytest.skip(reason)
    requests = mixed_requests()
    warm = engine()
    alone = {each.id: tokens(warm, [each])[each.id] for each in requests}

    together = engine()
    assert tokens(together, requests) == alone, "all in one batch"
    hits = together.engine_stats.prefix_hits
    assert tokens(together, requests) == alone, "with a warm prefix cache"
    assert together.engine_stats.prefix_hits > hits + (500 if together.info.block_size == 16 else 0)

    assert tokens(engine(max_num_batched_tokens=5), requests) == alone, "prompts in chunks of 5 tokens"
    assert tokens(engine(max_num_batched_tokens=33, max_num_seqs=3), requests) == alone, "few at a time"

    if together.info.block_size == 16:  # none of these requests fills a large block
        small = engine(num_kv_blocks=13, max_model_len=200)
        assert tokens(small, requests) == alone, "preempted"
        assert small.engine_stats.preemptions > 2

    half = [
        EngineCoreRequest(
            id=r.id, prompt_ids=r.prompt_ids, params=r.params, seed=r.seed, emitted_ids=alone[r.id][: i % 19]
        )
        for i, r in enumerate(requests)
    ]
    rest = tokens(engine(), half)
    assert {r.id: r.emitted_ids + rest[r.id] for r in half} == alone, "resumed after a crash"


@pytest.mark.few(2)
@pytest.mark.parametrize("family", ["gemma2", "gemma3"])
@pytest.mark.parametrize(("dtype", "backend"), [("float32", "cpu"), ("bfloat16", "cpu"), ("bfloat16", "reference")])
def test_logprob_bits_do_not_depend_on_batch_or_chunking(family: str, dtype: str, backend: str, tmp_path: Path) -> None:
    """Families with sliding windows, softcaps and two RoPE tables."""
    path = save_tiny_model(tmp_path, family, vocab_size=VOCAB + 7)
    generator = torch.Generator().manual_seed(8)
    prompts = [torch.randint(3, VOCAB, (length,), generator=generator).tolist() for length in (90, 1, 37, 64)]
    requests = [request(str(i), p, max_tokens=9, logprobs=2, prompt_logprobs=2) for i, p in enumerate(prompts)]

    def answers_of(*together: EngineCoreRequest, **options: int) -> dict[str, object]:
        where = {"model": str(path), "dtype": dtype, "attention_backend": backend, "num_kv_blocks": 64}
        answers = run(EngineCore(EngineConfig(**where, enable_prefix_caching=False, **options)), together)
        return {name: (each.ids, each.logprobs, each.prompt_logprobs) for name, each in answers.items()}

    alone = {each.id: answers_of(each)[each.id] for each in requests}
    assert answers_of(*requests) == alone
    assert answers_of(*requests, max_num_batched_tokens=11) == alone


def gpu_backend_error(backend: str) -> str | None:
    try:
        select_backend(torch.device("cuda"), torch.bfloat16, 32, backend)
    except ValueError as error:
        return str(error)
    return None


def test_common_prefix_is_computed_once(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path, "llama", max_position_embeddings=1024)
    engine = EngineCore(EngineConfig(model=str(path), num_kv_blocks=2000))
    generator = torch.Generator().manual_seed(3)
    prefix = torch.randint(3, VOCAB, (800,), generator=generator).tolist()
    owns = [torch.randint(3, VOCAB, (10,), generator=generator).tolist() for _ in range(100)]
    answers = run(engine, [request(str(i), prefix + own, max_tokens=2) for i, own in enumerate(owns)])
    assert engine.engine_stats.prompt_tokens == 800 + 100 * 10
    assert engine.engine_stats.prefix_hits == 99 * 800
    assert sorted(answer.cached_tokens for answer in answers.values()) == [0] + [800] * 99


def test_cache_salt_and_disabled_prefix_cache_prevent_hits(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path, "llama")
    engine = EngineCore(EngineConfig(model=str(path), num_kv_blocks=100))
    prompt = list(range(3, 103))
    assert run(engine, [request("a", prompt, salt="x")])["a"].cached_tokens == 0
    assert run(engine, [request("b", prompt, salt="y")])["b"].cached_tokens == 0
    assert run(engine, [request("c", prompt, salt="x")])["c"].cached_tokens == 96
    without = EngineCore(EngineConfig(model=str(path), num_kv_blocks=100, enable_prefix_caching=False))
    assert [run(without, [request(name, prompt)])[name].cached_tokens for name in "ab"] == [0, 0]


def test_generation_engine_rejects_pooling_requests_only(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path, "llama")
    engine = EngineCore(EngineConfig(model=str(path), num_kv_blocks=100, max_num_batched_tokens=32, runner="generate"))
    tokens = request("tokens", range(3, 60), max_tokens=6)
    alone = run(engine, [tokens])["tokens"].ids
    engine.add_request(EngineCoreRequest(id="vector", prompt_ids=list(range(3, 90)), params=PoolingParams(), seed=0))
    engine.add_request(EngineCoreRequest(id="short", prompt_ids=[5], params=PoolingParams(), seed=0))
    engine.add_request(tokens)
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    assert [token for output in outputs for token in output.new_ids] == alone
    errors = {output.id: output.error or "" for output in outputs if output.finish_reason == "error"}
    assert errors.keys() == {"vector", "short"}
    assert all("serves generate, not embed" in error for error in errors.values())


@pytest.mark.parametrize(
    ("dtype", "backend", "promised"),
    [
        ("float32", "cpu", True),
        ("bfloat16", "cpu", True),
        ("float32", "reference", True),
        ("float16", "reference", False),
    ],
)
def test_deterministic_flag_follows_dtype_and_backend(dtype: str, backend: str, promised: bool, tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path, "llama")
    options = {"model": str(path), "dtype": dtype, "attention_backend": backend, "device": "cpu", "num_kv_blocks": 20}
    assert EngineCore(EngineConfig(**options)).info.deterministic is promised
    if promised:
        assert EngineCore(EngineConfig(**options, deterministic=True)).info.deterministic
    else:
        with pytest.raises(ConfigError, match="deterministic: PyTorch's float16 products"):
            EngineCore(EngineConfig(**options, deterministic=True))


def test_reference_backend_without_onednn_is_not_deterministic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On CPUs without AVX-512, F.linear multiplies bfloat16."""
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    path = save_tiny_model(tmp_path, "llama")
    for dtype in ("bfloat16", "float32"):
        config = EngineConfig(model=str(path), dtype=dtype, attention_backend="reference", num_kv_blocks=20)
        assert not EngineCore(config).info.deterministic
