"""Tests that launching a step on a GPU mixes no host and device tensors and never makes the host wait.

No number is right here; tests/engine/core/test_step_runner.py and tests/kernels test those.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from quire.engine.architecture.decoder import EMBED_TOKENS, LM_HEAD
from quire.engine.checkpoint.model_resolver import read_model_config
from quire.engine.common.config import EngineConfig, SpeculativeConfig
from quire.engine.common.request_params import Grammar, ThinkingBudget
from quire.engine.common.types import Adapter, EngineCoreRequest
from quire.engine.core.drafter import Draft, Drafter, RequestsToDraft
from quire.engine.engine_core import EngineCore
from quire.engine.layers.adapters import LoRALayerWeights
from quire.engine.layers.parameters import ParameterTable
from quire.engine.lora.target_modules import adaptable_modules
from quire.engine.spec_decode.draft_length import AdaptiveLengthDrafter
from quire.engine.worker import device_memory, device_plan, startup
from quire.engine.worker.draft_head_runner import DraftHeadRunner
from quire.engine.worker.draft_model_runner import DraftModelRunner
from quire.engine.worker.images import tower_loader
from quire.engine.worker.loading import kv_allocation
from quire.engine.worker.loading import model_loader as loading_model
from quire.engine.worker.loading.drafts import draft_head_loader as draft_head
from quire.engine.worker.loading.drafts import draft_model_loader as draft_model
from quire.engine.worker.model_runner import ModelRunner
from quire.engine.worker.pending_step import UnsampledStep
from quire.engine.worker.ranks.spmd import SpmdRanks, SpmdRunner
from quire.engine.worker.startup_steps import decoder_startup
from quire.engine.worker.trials import backend_trials
from quire.kernels.distributed import DistributedCollective
from quire.kernels.gpu import host_transfer
from quire.kernels.gpu.experts import grouped_matmul, grouped_moe, grouped_trial
from quire.kernels.gpu.libraries import flash3, flash4, torch_varlen
from quire.kernels.gpu.libraries.flash_backend import FlashPagedBackend
from quire.kernels.gpu.quantization import activation_rounding, quantized_linear, torch_matmul, weight_trial
from tests.engine.harness import request, run
from tests.engine.images.test_families import about
from tests.engine.test_heads import made_head
from tests.engine.test_speculation import CHEAP, Garbage, Replaceable, always
from tests.engine.worker.fake_cuda import DEVICE, PICKED, FakeGpu, Waiting
from tests.kernels.installed import install_flash, install_flash3, install_flash4, install_varlen
from tests.tiny_models import VOCAB, save_tiny_model
from tests.vision_families import FAMILIES, save_family

pytest.importorskip("triton", reason="there is no Triton for this platform")

KINDS: dict[str, dict[str, object]] = {
    "greedy": {"temperature": 0.0},
    "drawn": {"temperature": 0.8},
    "filtered": {"temperature": 0.8, "top_k": 5, "top_p": 0.9, "min_p": 0.1},
    "penalties": {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": 0.2},
    "rare filters": {"temperature": 0.8, "top_k": 9, "typical_p": 0.9, "top_n_sigma": 1.0, "xtc_probability": 1.0},
    "dry": {"dry_multiplier": 0.8, "dry_sequence_breaker_ids": ((3,), (4, 5))},
    "biased": {"temperature": 1.0, "logit_bias": {5: 2.0, 7: -100.0}, "min_tokens": 4, "stop_token_ids": (3, 4)},
    "allowed": {"allowed_token_ids": (0, 5, 6, 7)},
    "bans": {"temperature": 1.0, "bad_words_ids": ((11, 12), (30,), (5, 6, 7))},
    "thinking": {"thinking": ThinkingBudget(4, end_id=3, begin_id=None)},
    "thinking from": {"thinking": ThinkingBudget(4, end_id=3, begin_id=6)},
    "logprobs": {"logprobs": 3},
    "only its own logprob": {"logprobs": 0},
    "listed": {"logprob_token_ids": (7, 3, 200, 11)},
    "prompt logprobs": {"prompt_logprobs": 2},
    "all": {
        "temperature": 1.0, "top_p": 0.5, "repetition_penalty": 1.1, "logit_bias": {5: 1.0}, "logprobs": 1,
        "bad_words_ids": ((5, 6),), "min_tokens": 2, "prompt_logprobs": 0,
    },
}  # fmt: skip
"""Sampling parameters by the feature they use."""


IMAGE_MODELS = [
    *product(("qwen2_5_vl", "qwen3_vl", "gemma3"), ("triton", "flash"), (False, True)),
    *((name, "triton", True) for name in FAMILIES if name not in ("qwen2_5_vl", "qwen3_vl", "gemma3")),
]
"""Backends and chunks do not depend on the tower: few families are tested with all of both."""


class ShapeOnlyAttention:
    """Stands for flash-attn's functions and PyTorch's: results of the right shape, arguments on the GPU."""

    __version__ = "2.8.3"

    def flash_attn_varlen_func(self, q: Tensor, k: Tensor, v: Tensor, **others: Any) -> Tensor:
        assert all(each.is_cuda for each in (q, k, v, *others.values()) if isinstance(each, Tensor))
        return torch.empty_like(q)

    flash_attn_with_kvcache = flash_attn_varlen_func

    def cute(self, q: Tensor, k: Tensor, v: Tensor, **others: Any) -> tuple[Tensor, None]:
        return self.flash_attn_varlen_func(q, k, v, **others), None

    def varlen_attn(
        self, q: Tensor, k: Tensor, v: Tensor, *others: Any, block_table: Tensor | None = None, **named: Any
    ) -> Tensor:
        named |= dict(enumerate_names(others))
        return self.flash_attn_varlen_func(q, k, v, block_table=block_table, **named)


def enumerate_names(values: tuple[Any, ...]) -> list[tuple[str, Any]]:
    return [(f"argument_{index}", value) for index, value in enumerate(values)]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> FakeGpu:
    import transformers.modeling_utils  # noqa: F401 - it looks for flash-attn, and must not find the stand-ins

    fake_gpu = FakeGpu(monkeypatch, tmp_path_factory.mktemp("guard"))
    library = ShapeOnlyAttention()
    install_flash(monkeypatch, library)
    install_flash3(monkeypatch, library)
    install_flash4(monkeypatch, library.cute)
    install_varlen(monkeypatch, library.varlen_attn)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    monkeypatch.setattr(FlashPagedBackend, "unsupported_reason", lambda *_: None)
    for each in (flash3.Flash3Backend, flash4.Flash4Backend, torch_varlen.TorchVarlenBackend):
        monkeypatch.setattr(each, "unsupported_reason", lambda *_: None)
    for each in (startup, device_plan):
        monkeypatch.setattr(each, "choose_device", lambda config: DEVICE)
    for each in (device_plan, backend_trials):
        monkeypatch.setattr(each, "choose_trials", lambda *_: [])
    for each in (weight_trial, activation_rounding):
        monkeypatch.setattr(each, "trial_failure_reason", lambda *_: None)
    monkeypatch.setattr(device_memory, "measure_step_bytes", lambda *_: device_memory.StepReserve(0))
    monkeypatch.setattr(decoder_startup, "measure_step_costs", lambda *_: [(1, 1.0), (64, 2.0)])
    monkeypatch.setattr(device_memory, "kv_budget", lambda *_, **__: 2**30)
    monkeypatch.setattr(loading_model, "fill_weights", lambda checkpoint, *_: empty_weights(checkpoint.parameter_table))
    monkeypatch.setattr(startup, "prepare_kernel_cache", lambda: None)
    return fake_gpu


def empty_weights(table: ParameterTable) -> int:
    for parameter in table.values():
        parameter.weight_loader(
            parameter.slice_tensor(torch.empty(parameter.shape, dtype=parameter.dtype, device=DEVICE))
        )
    return 0


def capture(function: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
    """Records nothing, but rejects what a graph cannot hold."""
    Waiting.capturing = True
    try:
        return lambda: None, function()
    finally:
        Waiting.capturing = False


def start(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, make_drafter: Any = None, *, graphs: bool, **options: Any
) -> EngineCore:
    """An engine whose steps are launched on the fake GPU; the sampled token is always PICKED."""
    monkeypatch.setattr(kv_allocation, "make_graph_capture", lambda *_: capture if graphs else None)
    options = {"max_model_len": 512, "max_num_seqs": 8, "max_num_batched_tokens": 64, "dtype": "bfloat16"} | options
    with gpu.allows_waits():
        config = EngineConfig(num_kv_blocks=400, warmup_seconds=0, **options)
        engine = EngineCore(config, make_drafter=make_drafter, steps_ahead=1)

    def never_waits(method: Callable[..., Any]) -> Callable[..., Any]:
        def launched(*arguments: Any) -> Any:
            with gpu.never_waits():
                return method(*arguments)

        return launched

    monkeypatch.setattr(ModelRunner, "launch", never_waits(ModelRunner.launch))
    monkeypatch.setattr(UnsampledStep, "sample_tokens", never_waits(UnsampledStep.sample_tokens))
    return engine


def make_requests(kinds: dict[str, dict[str, object]]) -> list[EngineCoreRequest]:
    """Each kind of request, once with 3 and once with 90 prompt tokens."""
    rng = random.Random(7)
    return [
        request(f"{name} {count}", [rng.randrange(3, 300) for _ in range(count)], max_tokens=6, **kind)
        for (name, kind), count in product(kinds.items(), (3, 90))
    ]


@pytest.mark.slow
def test_each_sampling_kind_alone_never_waits(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = start(gpu, monkeypatch, graphs=False, attention_backend="triton")
    for each in make_requests(KINDS):
        assert run(engine, [each])[each.id].finish_reason == "length", each.id


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["triton", "flash", "flash3", "flash4", "torch_varlen"])
def test_mixed_sampling_kinds_never_wait(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    engine = start(gpu, monkeypatch, graphs=True, attention_backend=backend)
    answers = run(engine, make_requests(KINDS))
    assert {answer.finish_reason for answer in answers.values()} == {"length"}
    assert set(gpu.launched) >= {"pick_tokens", "_norm_rope_store_kernel", "add_at", "ban_words", "count_tokens"}
    assert engine.engine_stats.captured_prompt_steps > 10


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["triton", "flash"])
def test_grammar_requests_never_wait(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    engine = start(gpu, monkeypatch, graphs=True, attention_backend=backend)
    grammar = {"grammar": Grammar("regex", "(.|\\n)*")}
    kinds = {f"grammar {index}": kind | grammar for index, kind in enumerate(KINDS.values())}
    for name, answer in run(engine, [*make_requests(KINDS), *make_requests(kinds)]).items():
        assert answer.finish_reason == "length", name
    assert engine.engine_stats.draft_tokens == 0, "nobody asked for guesses"


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["triton", "flash"])
def test_draft_tokens_never_wait(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    class Two(Drafter):
        def propose(self, asked: RequestsToDraft, tokens: int) -> list[Draft]:
            return [Draft([PICKED, PICKED, 9][: min(len(seq.token_ids) % 4, most)]) for seq, most in asked]

    engine = start(gpu, monkeypatch, lambda *_: Two(), graphs=True, attention_backend=backend)
    answers = run(engine, make_requests(KINDS))
    assert {answer.finish_reason for answer in answers.values()} == {"length"}
    assert sum(engine.engine_stats.accepted_drafts) > 20
    assert engine.engine_stats.captured_prompt_steps > 10


@pytest.mark.slow
@pytest.mark.parametrize("method", ["eagle3", "eagle", "medusa"])
@pytest.mark.parametrize("graphs", [False, True])
def test_draft_heads_wait_only_for_drafts(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, method: str, graphs: bool
) -> None:
    """The heads follow each step and draft; the host waits only for the drafts."""
    path = save_tiny_model(tmp_path / "model", "llama")
    head, tensors = made_head(tmp_path / "head", method)
    tensors.pop("d2t", None)
    monkeypatch.setattr(draft_head, "read_head_tensors", lambda path: tensors)
    monkeypatch.setattr(draft_head, "load_weights", lambda table, *_, **__: empty_weights(table))
    speculative = SpeculativeConfig(method=method, model=str(head), num_speculative_tokens=3)
    options = {"model": str(path), "speculative_config": speculative, "attention_backend": "triton"}
    engine = start(gpu, monkeypatch, always, graphs=graphs, **options)
    draft, calls = DraftHeadRunner.draft_tokens, list[int]()

    def drafted(heads: DraftHeadRunner, rows: Any) -> Any:
        with gpu.waits_once():
            found = draft(heads, rows)
        if any(found):
            calls.append(len(rows))
        return found

    monkeypatch.setattr(DraftHeadRunner, "draft_tokens", drafted)
    answers = run(engine, make_requests(KINDS))
    assert {answer.finish_reason for answer in answers.values()} == {"length"}
    assert sum(engine.engine_stats.accepted_drafts) > 20, "all picks are the same"
    assert (engine.engine_stats.captured_prompt_steps > 10) == graphs
    assert len(calls) > 10
    assert (engine._device_drafter.graphs is not None) == graphs
    if graphs:
        runner = engine.executor
        every = (
            engine._device_drafter.graphs.graph_set,
            runner.decode_graphs.graph_set,
            runner.mixed_batch_graphs.graph_set,
        )
        behind = runner.decode_graphs.draft_head_graphs, runner.mixed_batch_graphs.draft_head_graphs
        assert all(each.graphs for each in every)
        assert all(bool(each.graphs) == (method != "medusa") for each in behind)
        assert not any(each.eager_reasons for each in (*every, *behind))


@pytest.mark.slow
@pytest.mark.parametrize("graphs", [False, True])
def test_draft_model_waits_only_for_drafts(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, graphs: bool
) -> None:
    """The drafter catches up and drafts token by token; the host waits only for the drafts."""
    monkeypatch.setattr(DraftModelRunner, "measure_draft_costs", lambda *_: [(1, 0.001), (64, 0.002)])
    monkeypatch.setattr(draft_model, "load_weights", lambda table, *_, **__: empty_weights(table))
    served, small = (save_tiny_model(tmp_path / str(n), "llama", num_hidden_layers=n) for n in (2, 1))
    speculative = SpeculativeConfig(method="draft_model", model=str(small), num_speculative_tokens=3)
    options = {"model": str(served), "speculative_config": speculative, "attention_backend": "triton"}
    engine = start(gpu, monkeypatch, graphs=graphs, **options)
    calls = []

    def unwaited(name: str) -> Callable[[DraftModelRunner, Any], Any]:
        whole = getattr(DraftModelRunner, name)

        def guessed(runner: DraftModelRunner, asked: Any) -> Any:
            calls.append(name)
            with gpu.waits_once():
                return whole(runner, asked)

        return guessed

    for name in ("draft_first_tokens", "draft_next_tokens"):
        monkeypatch.setattr(DraftModelRunner, name, unwaited(name))
    answers = run(
        engine, make_requests({name: KINDS[name] for name in ("greedy", "drawn", "penalties", "biased", "all")})
    )
    assert {answer.finish_reason for answer in answers.values()} == {"length"}
    assert sum(engine.engine_stats.accepted_drafts) > 10, "all picks are the same"
    assert set(calls) == {"draft_first_tokens", "draft_next_tokens"}


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma2", "qwen3", "mistral-window", "lfm2"])
def test_model_families_never_wait(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, family: str) -> None:
    """Models with head norms, sliding windows and softcaps."""
    path = save_tiny_model(tmp_path, family)
    engine = start(gpu, monkeypatch, graphs=False, attention_backend="triton", model=str(path))
    kinds = {name: KINDS[name] for name in ("greedy", "prompt logprobs", "all")}
    assert VOCAB > 300
    assert {answer.finish_reason for answer in run(engine, make_requests(kinds)).values()} == {"length"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "backend", "kernels"),
    [
        ("qwen3_5", "triton", {"advance_delta", "advance_chunks", "norm_and_gate", "_conv_kernel"}),
        (
            "deepseek_v2-dense",
            "triton",
            {"rope_and_store_latents", "attend_latents", "multiply_per_head", "attend_expanded"},
        ),
        ("qwen3_5", "torch_varlen", {"advance_delta"}),
        ("falcon_h1", "triton", {"advance_space"}),
        ("jamba", "triton", {"advance_scan"}),
    ],
)
def test_recurrent_and_mla_models_never_wait(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, family: str, backend: str, kernels: set[str]
) -> None:
    """In graphs, in prefills, and with draft tokens."""
    monkeypatch.setattr(grouped_moe, "data_ptr_lists", lambda tensors: [[0] * len(each) for each in tensors])
    path = save_tiny_model(tmp_path, family)
    drafter, options = Replaceable(), {"attention_backend": backend, "model": str(path), "state_memory": 0.1}
    engine = start(gpu, monkeypatch, lambda *_: drafter, graphs=True, **options)
    with gpu.allows_waits():
        engine.executor.warm_prompts()
    kinds = {name: KINDS[name] for name in ("greedy", "prompt logprobs", "all")}
    assert {answer.finish_reason for answer in run(engine, make_requests(kinds)).values()} == {"length"}
    drafter.drafter = AdaptiveLengthDrafter(Garbage(random.Random(3)), 8, CHEAP)
    assert {answer.finish_reason for answer in run(engine, make_requests(kinds)).values()} == {"length"}
    assert engine.engine_stats.draft_tokens > 0
    assert engine.engine_stats.captured_prompt_steps > 3
    expected = kernels | ({"store_draft_inputs"} if any(name.startswith("advance") for name in kernels) else set())
    assert set(gpu.launched) >= expected


@pytest.mark.slow
@pytest.mark.parametrize(("family", "backend"), [("gpt_oss", "triton"), ("qwen3-moe", "flash")])
def test_moe_models_never_wait(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, family: str, backend: str
) -> None:
    """Tokens are routed, sorted and multiplied without the host reading a value, in graphs too once the addresses of
    the weights are known.
    """
    monkeypatch.setattr(grouped_moe, "data_ptr_lists", lambda tensors: [[0] * len(each) for each in tensors])
    path = save_tiny_model(tmp_path, family)
    engine = start(gpu, monkeypatch, graphs=True, attention_backend=backend, model=str(path))
    with gpu.allows_waits():
        engine.executor.warm_prompts()
    kinds = {name: KINDS[name] for name in ("greedy", "all")}
    for _ in range(2):
        assert {answer.finish_reason for answer in run(engine, make_requests(kinds)).values()} == {"length"}
    assert set(gpu.launched) >= {"sort_rows", "multiply_experts", "combine_expert_outputs"}
    assert engine.engine_stats.captured_prompt_steps > 0


@pytest.mark.slow
@pytest.mark.parametrize(("name", "backend", "parts"), IMAGE_MODELS)
def test_image_models_never_wait(
    gpu: FakeGpu,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    name: str,
    backend: str,
    parts: bool,
    request: pytest.FixtureRequest,
) -> None:
    """Images are encoded whole or in chunks, together with text, and followed by graphs."""
    if name.startswith("gemma4"):
        reason = "layers/schemes/clipped.py reads numbers when it packs weights, which fake tensors have not"
        request.applymarker(pytest.mark.xfail(reason=reason))
    monkeypatch.setattr(grouped_moe, "data_ptr_lists", lambda tensors: [[0] * len(each) for each in tensors])
    monkeypatch.setattr(tower_loader, "find_tower_backend_error", lambda *_: None)
    monkeypatch.setattr(tower_loader, "image_weight_stream", lambda *_: iter([("", torch.empty(0))]))
    monkeypatch.setattr(tower_loader, "load_weights", lambda table, *_, **__: empty_weights(table))
    monkeypatch.setattr(functional, "scaled_dot_product_attention", lambda q, k, v, **_: torch.empty_like(q))
    path = save_family(tmp_path, name)
    requests = [about(path, name, str(count), *range(count), max_tokens=6) for count in range(3)]
    longest = max(24, *(span.count for each in requests for span in each.spans))
    options = {"attention_backend": backend, "model": str(path), "max_num_batched_tokens": longest if parts else 512}
    engine = start(gpu, monkeypatch, graphs=True, state_memory=0.1, **options)
    assert not engine.info.no_images
    with gpu.allows_waits():
        engine.executor.warm_prompts()
    assert {answer.finish_reason for answer in run(engine, requests).values()} == {"length"}


@pytest.mark.slow
def test_expert_parallel_rank_never_waits(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Some experts are whole on this rank: tokens are sorted, multiplied and summed without the host reading a value,
    in graphs too.
    """
    monkeypatch.setattr(grouped_moe, "data_ptr_lists", lambda tensors: [[0] * len(each) for each in tensors])
    monkeypatch.setattr(startup, "start_ranks", lambda config, *_, **__: QuietRanks(config, 1, False))
    path = save_tiny_model(tmp_path, "gpt_oss")
    options = {"attention_backend": "triton", "tensor_parallel_size": 2, "enable_expert_parallel": True}
    engine = start(gpu, monkeypatch, graphs=True, model=str(path), **options)
    kinds = {name: KINDS[name] for name in ("greedy", "all")}
    assert {answer.finish_reason for answer in run(engine, make_requests(kinds)).values()} == {"length"}
    assert set(gpu.launched) >= {"sort_rows", "multiply_experts", "combine_expert_outputs"}


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(("backend", "deterministic"), [("triton", False), ("flash", False), ("triton", True)])
def test_grouped_products_of_experts_never_wait(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, backend: str, deterministic: bool, ranks: int
) -> None:
    """The places where groups end stay on the device, in graphs too, on a rank with some of the experts too. Weights
    lie in one tensor per layer from loading on.
    """
    monkeypatch.setattr(grouped_moe, "data_ptr_lists", lambda tensors: [[0] * len(each) for each in tensors])
    monkeypatch.setattr(startup, "start_ranks", lambda config, *_, **__: QuietRanks(config, 1, False))
    monkeypatch.setattr(grouped_trial, "find_min_rows", lambda *_: 20)
    calls, multiply = set[tuple[bool, bool]](), grouped_matmul.grouped_mm

    def grouped_mm(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
        assert rows.is_cuda
        assert weights.is_cuda
        assert ends.is_cuda
        assert ends.dtype == torch.int32
        calls.add((len(rows) >= 20, Waiting.capturing))
        return multiply(rows, weights, ends)

    monkeypatch.setattr(grouped_matmul, "grouped_mm", grouped_mm)
    options = {"attention_backend": backend, "model": str(save_tiny_model(tmp_path, "qwen3-moe"))}
    if ranks > 1:
        options |= {"tensor_parallel_size": ranks, "enable_expert_parallel": True}
    engine = start(gpu, monkeypatch, graphs=True, deterministic=deterministic, **options)
    with gpu.allows_waits():
        engine.executor.warm_prompts()
    kinds = {name: KINDS[name] for name in ("greedy", "all")}
    assert {answer.finish_reason for answer in run(engine, make_requests(kinds)).values()} == {"length"}
    assert calls == (set() if deterministic else {(True, False), (True, True)})
    assert ("gather_rows" in gpu.launched) == (not deterministic)
    assert "multiply_experts" in gpu.launched, "decodes have few rows"
    assert engine.engine_stats.captured_prompt_steps > 0


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "deepseek_v2-dense"])
def test_decode_context_parallel_rank_never_waits(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, family: str
) -> None:
    """Partial attention is computed, exchanged and merged, in prefills and in graphs."""
    monkeypatch.setattr(grouped_moe, "data_ptr_lists", lambda tensors: [[0] * len(each) for each in tensors])
    monkeypatch.setattr(startup, "start_ranks", lambda config, *_, **__: QuietRanks(config, 1, False))
    path = save_tiny_model(tmp_path, family)
    options = {"attention_backend": "triton", "tensor_parallel_size": 2, "decode_context_parallel_size": 2}
    engine = start(gpu, monkeypatch, graphs=True, model=str(path), **options)
    assert engine.info.block_size == 32
    with gpu.allows_waits():
        engine.executor.warm_prompts()
    kinds = {name: KINDS[name] for name in ("greedy", "prompt logprobs", "all")}
    assert {answer.finish_reason for answer in run(engine, make_requests(kinds)).values()} == {"length"}
    assert "merge_ranks" in gpu.launched
    assert engine.engine_stats.captured_prompt_steps > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "backend", "graphs"),
    [("llama", "triton", True), ("gpt_oss", "triton", True), ("qwen3", "flash", False)],
)
def test_offloaded_layers_never_wait(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, family: str, backend: str, graphs: bool
) -> None:
    """Layers are copied while others compute, inside captures too."""
    monkeypatch.setattr(grouped_moe, "data_ptr_lists", lambda tensors: [[0] * len(each) for each in tensors])
    path = save_tiny_model(tmp_path, family, num_hidden_layers=4)
    offloaded = {"cpu_offload_gb": 1.0, "model": str(path), "attention_backend": backend}
    engine = start(gpu, monkeypatch, graphs=graphs, **offloaded)
    streamed = engine.executor.model.offload  # type: ignore[attr-defined]
    assert streamed.streamed_layers == [0, 1, 2, 3]
    monkeypatch.setattr(Waiting, "lasting", [*streamed._host_buffers.values()])
    kinds = {name: KINDS[name] for name in ("greedy", "all")}
    for _ in range(2):
        assert {answer.finish_reason for answer in run(engine, make_requests(kinds)).values()} == {"length"}
    assert (engine.engine_stats.captured_prompt_steps > 0) == graphs


class FakeNccl:
    """Stands for NCCL: tensors must be on the GPU, with sizes that match."""

    def _allgather_base(self, out: Tensor, x: Tensor) -> FakeNccl:
        assert out.is_cuda
        assert x.is_cuda
        assert out.is_contiguous()
        assert out.numel() == 2 * x.numel() > 0
        return self

    def alltoall_base(self, out: Tensor, x: Tensor, taken: list[int], given: list[int]) -> FakeNccl:
        assert out.is_cuda
        assert x.is_cuda
        assert out.is_contiguous()
        assert x.is_contiguous()
        assert out.numel() == x.numel() > 0
        return self

    def allreduce(self, tensors: list[Tensor]) -> FakeNccl:
        assert all(each.is_cuda and each.is_contiguous() for each in tensors)
        return self

    def broadcast(self, tensors: list[Tensor], options: object) -> FakeNccl:
        assert all(each.is_cuda and each.dtype == torch.int64 for each in tensors)
        return self

    def wait(self) -> None:
        pass


class Agreeing(DistributedCollective):
    """Ranks whose captures all succeed. To ask them, the host waits, as it does for the capture itself."""

    def all_ranks_succeeded(self, succeeded: bool, device: torch.device) -> bool:
        return succeeded


class QuietRanks(SpmdRanks):
    """Of two ranks, only this one exists."""

    note, failure = "2 ranks", ""

    def __init__(self, config: EngineConfig, rank: int, sums_in_order: bool) -> None:
        self._config, self._device, self.count = config, torch.device("cuda"), 2
        self.group = Agreeing(FakeNccl, rank, 2, in_order=sums_in_order)
        self.sent: list[object] = []
        self._processes = []

    def send_to_followers(self, message: object) -> None:
        self.sent.append(message)

    def rank_failures_as_engine_errors(self) -> contextlib.nullcontext[None]:
        return contextlib.nullcontext()

    def call_followers(self, *_: Any, **__: Any) -> Any:
        return lambda seconds: []

    def read_loaded_parts(self) -> list[Any]:
        return []

    def measure_total_kv_bytes(self, measure: Callable[[], int]) -> int:
        return 2 * measure()

    def stop_ranks(self) -> None:
        pass


@pytest.mark.slow
@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize(("rank", "in_order"), [(0, True), (0, False), (1, True)])
def test_tensor_parallel_rank_never_waits(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, rank: int, in_order: bool, graphs: bool
) -> None:
    """`rank` 0 samples; rank 1 uses the tokens of the first rank."""
    monkeypatch.setattr(startup, "start_ranks", lambda config, *_, **__: QuietRanks(config, rank, in_order))
    options = {"attention_backend": "triton", "enable_lora": True, "tensor_parallel_size": 2}
    engine = start(gpu, monkeypatch, graphs=graphs, **options)
    assert isinstance(engine.executor, SpmdRunner)
    grammar = {"grammar": {"grammar": Grammar("regex", "(.|\\n)*")}}
    answers = run(engine, make_requests(KINDS | grammar))
    assert {answer.finish_reason for answer in answers.values()} == {"length"}
    assert ("pick_tokens" in gpu.launched) == (rank == 0)
    assert (engine.engine_stats.captured_prompt_steps > 10) == graphs


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("quantization", "native", "passes", "kernels"),
    [
        (
            "int8",
            True,
            False,
            {
                "norm_rounded",
                "gate_rounded",
                "multiply_block_scaled_codes",
                "look_up_embedding_rows",
                "multiply_weight_only",
            },
        ),
        ("fp8", True, True, {"norm_rounded", "gate_rounded_per_row", "round_per_row", "multiply_weight_only"}),
        ("int8", True, True, {"norm_rounded", "gate_rounded_per_row", "scale_sums", "look_up_embedding_rows"}),
        ("fp8", True, False, {"norm_rounded", "gate_rounded", "round_per_block", "multiply_block_scaled_codes"}),
        ("fp8", False, True, {"multiply_weight_only"}),
    ],
)
@pytest.mark.parametrize("backend", ["triton", "flash"])
def test_quantized_models_never_wait(
    gpu: FakeGpu,
    monkeypatch: pytest.MonkeyPatch,
    backend: str,
    quantization: str,
    native: bool,
    passes: bool,
    kernels: set[str],
) -> None:
    """native: the GPU multiplies 8-bit floats. passes: PyTorch's matmul has passed its trial."""
    monkeypatch.setattr(quantized_linear, "can_multiply_float8", lambda codes: native)
    monkeypatch.setattr(torch_matmul, "trial_failure_reason", lambda *_: None if passes else "for a test")
    engine = start(gpu, monkeypatch, graphs=True, attention_backend=backend, quantization=quantization)
    assert "held in" not in engine.info.quantization
    run(engine, make_requests({"all": KINDS["all"]}))
    assert set(gpu.launched) >= kernels


def test_pinned_memory_in_use_is_not_reused(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Using one buffer for two uploads, or writing to it during an upload, is rejected: its copy may not have begun."""
    allocate, buffers = torch.empty, list[Tensor]()

    def once(*shape: Any, pin_memory: bool = False, **named: Any) -> Tensor:
        if not pin_memory or not buffers:
            buffers.append(allocate(*shape, pin_memory=pin_memory, **named))
        return buffers[0]

    numbers = [np.arange(4)]
    with gpu.never_waits():
        for _ in range(2):
            host_transfer.upload_arrays(numbers, DEVICE)
    monkeypatch.setattr(torch, "empty", once)
    for again in (lambda: host_transfer.upload_arrays(numbers, DEVICE), lambda: buffers[0].zero_()):
        with gpu.never_waits():
            buffers.clear()
            host_transfer.upload_arrays(numbers, DEVICE)
            with pytest.raises(AssertionError, match="is under way"):
                again()


def test_block_copies_never_wait(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts with a common beginning share the beginning of a large block."""
    engine = start(gpu, monkeypatch, graphs=True, attention_backend="flash", max_num_batched_tokens=512)
    prompt = list(range(3, 103))
    run(engine, [request("first", prompt, max_tokens=2)])
    assert run(engine, [request("second", [*prompt, 7], max_tokens=2)])["second"].cached_tokens == 96


class FakeAdapterLoader:
    """An adapter loader whose adapters are all loaded at once."""

    def __init__(self) -> None:
        self.slots: list[tuple[int, None]] = []

    def load_adapter(self, slot: int, adapter: Adapter) -> None:
        self.slots.append((slot, None))

    def install_finished_loads(self) -> list[tuple[int, None]]:
        finished, self.slots = self.slots, []
        return finished

    def wait_for_any_load(self, seconds: float) -> None:
        pass


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["triton", "flash"])
@pytest.mark.parametrize("graphs", [False, True])
def test_lora_adapters_never_wait(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, backend: str, graphs: bool
) -> None:
    """Adapters are put into slots, and serve prefills and decodes; batches without one launch none of their kernels."""
    path = save_tiny_model(tmp_path, "llama")
    lora = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8, "model": str(path)}
    monkeypatch.setattr(decoder_startup, "make_adapter_loader", lambda *_: FakeAdapterLoader())
    engine = start(gpu, monkeypatch, graphs=graphs, attention_backend=backend, **lora)
    model = engine.executor.model  # type: ignore[attr-defined]
    modules = adaptable_modules(read_model_config(path))
    with gpu.never_waits():
        parts = {
            name: LoRALayerWeights(torch.empty((5, inner), device="cpu"), torch.empty((outs, 5), device="cpu"))
            for name, (inner, outs) in modules.items()
            if name != EMBED_TOKENS and "up_proj" not in name
        }
        model.adapters.put_adapter(1, model.adapters.pack_adapter(parts))
        model.adapters.put_adapter(2, model.adapters.pack_adapter({LM_HEAD: parts[LM_HEAD]}))
    kinds = {name: KINDS[name] for name in ("greedy", "prompt logprobs", "all")}
    run(engine, make_requests(kinds))
    assert "_shrink_kernel" not in gpu.launched
    mixed = [
        msgspec.structs.replace(each, adapter=[None, Adapter("a", "aa", "/a"), Adapter("b", "bb", "/b")][index % 3])
        for index, each in enumerate(make_requests(kinds))
    ]
    assert {answer.finish_reason for answer in run(engine, mixed).values()} == {"length"}
    assert gpu.launched.count("_shrink_kernel") == gpu.launched.count("_expand_kernel") > 0
    assert (engine.engine_stats.captured_prompt_steps > 0) == graphs


def test_warmup_never_waits(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = start(gpu, monkeypatch, graphs=True, attention_backend="flash")
    with gpu.never_waits():
        engine.executor.warm_sampler()
        engine.executor.warm_prompts()
        while engine.executor.warm_up_next():
            pass


def test_fake_gpu_detects_waits(gpu: FakeGpu) -> None:
    with gpu.allows_waits():
        host, table, there = torch.zeros(3, dtype=torch.int64), torch.zeros(3), torch.zeros(3, 4, device=DEVICE)
        pinned = torch.zeros(3)
    waiting: list[Callable[[], object]] = [
        lambda: there.sum().item(),
        lambda: there.tolist(),
        lambda: there.cpu(),
        lambda: there.to("cpu", non_blocking=True),
        lambda: bool(there[0, 0] > 0),
        lambda: there[there > 0],
        lambda: there[host],
        lambda: there[[0, 2]],
        lambda: there + table[:, None],
        lambda: host.to(DEVICE),
        lambda: host.to(DEVICE, non_blocking=True),
        lambda: torch.tensor([1, 2], device=DEVICE),
        lambda: there.__setitem__((0, slice(None, 3)), table),
        lambda: there.repeat_interleave(there[0].long(), 1),
        lambda: torch.empty(3).copy_(there[:, 0]),
    ]
    for function in waiting:
        with pytest.raises((AssertionError, RuntimeError)), gpu.never_waits():  # FakeTensorMode raises the latter
            function()
    with gpu.never_waits():
        pinned = torch.empty(3, pin_memory=True)
        pinned.to(DEVICE, non_blocking=True)
        torch.empty(3, 4, pin_memory=True).copy_(there, non_blocking=True)
        there[0] = 1.0
        there[there.new_zeros(2, dtype=torch.int64)] += 1
