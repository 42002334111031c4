"""Tests that the kernel variants compiled before the server is ready are those that steps launch, that another process
can compile them, and that they are then found. Triton's compiler needs no GPU; no kernel is launched.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.engine.common.config import EngineConfig, SpeculativeConfig
from quire.engine.engine_core import EngineCore
from quire.engine.models import decoder
from quire.engine.worker import batch_sampler, draft_head_runner, draft_model_runner, input_batch, model_runner, startup
from quire.engine.worker.draft_head_runner import DraftHeadRunner
from quire.engine.worker.draft_model_runner import DraftModelRunner
from quire.engine.worker.kernel_compilation.kernel_compiler import CompileResult, compile_variants
from quire.engine.worker.loading import kv_allocation
from quire.engine.worker.model_runner import ModelRunner
from quire.engine.worker.sampling import device_sampler, sampling_rules
from quire.engine.worker.sampling.device_sampler import sample_on_device
from quire.kernels.attention_params import AttentionParams
from quire.kernels.device.error_messages import describe_kernel_error
from quire.kernels.gpu.experts import grouped_matmul, grouped_trial
from quire.kernels.gpu.quantization import torch_matmul
from quire.kernels.probes.backend_probe import last_tokens_metadata
from tests.engine.harness import request, run
from tests.engine.test_heads import made_head
from tests.engine.test_speculation import always
from tests.engine.worker.test_never_waits import KINDS, Agreeing, QuietRanks, capture
from tests.tiny_models import save_tiny_model
from tests.tiny_mtp import save_tiny_mtp

pytest.importorskip("triton.backends.nvidia", reason="there is no Triton for this platform")

PICKED = 300


@pytest.fixture
def h100(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Make an H100 the compiler's target; yields the kernel cache folder."""
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    from quire.kernels.gpu import triton_backend
    from quire.kernels.gpu.kernel_variant import set_compile_target

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "kept"))
    monkeypatch.setattr(triton_backend.TritonBackend, "unsupported_reason", lambda *_: None)
    assert str(tmp_path) in knobs.cache.dir
    set_compile_target(GPUTarget("cuda", 90, 32))
    yield tmp_path / "kept"
    driver.set_active(None)  # the driver looks for the real GPU at its next use


def upload_aligned(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """Upload arrays as tensors aligned like those of an upload to a GPU."""
    return [torch.from_numpy(np.ascontiguousarray(array)).clone() for array in arrays]


class FakeNccl:
    """Stands for NCCL: the other rank holds the same tensors as this one."""

    def _allgather_base(self, out: Tensor, x: Tensor) -> FakeNccl:
        out.view(2, -1).copy_(x)
        return self

    def alltoall_base(self, out: Tensor, x: Tensor, *_: object) -> FakeNccl:
        out.copy_(x)
        return self

    def allreduce(self, tensors: list[Tensor], options: object = None) -> FakeNccl:
        return self

    broadcast = allreduce

    def wait(self) -> None:
        pass


class FirstOfTwoRanks(QuietRanks):
    """The first of two ranks, which use Quire's one-shot all-reduce kernel for tensors that it accepts."""

    def __init__(self, config: EngineConfig) -> None:
        from quire.kernels.gpu.ranks.one_shot_all_reduce import OneShotAllReduce, rank_memory_bytes

        super().__init__(config, 0, False)
        memory = [torch.zeros(rank_memory_bytes(2), dtype=torch.uint8) for _ in range(2)]
        near = OneShotAllReduce(0, memory, torch.zeros(2, dtype=torch.int32))
        self.group = Agreeing(FakeNccl, 0, 2, in_order=False, make_small_all_reduce=lambda: near)
        self.group.all_reduce(torch.zeros(1, dtype=torch.int64))  # the ranks meet when memory is measured

    def measure_total_kv_bytes(self, measure: Callable[[], int]) -> int:
        return measure()


def start(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    family: str,
    path: Path | None = None,
    make_drafter: Any = None,
    **options: Any,
) -> EngineCore:
    """An engine on CPU tensors whose Triton kernels are compiled for the H100, and whose decodes run as those in graphs
    do.

    `path`: where the model is, if it exists already.
    """
    monkeypatch.setattr(kv_allocation, "make_graph_capture", lambda *_: capture)
    for each in (batch_sampler, draft_head_runner, draft_model_runner):
        monkeypatch.setattr(each, "choose_sampler", lambda *_: sample_on_device)
    for each in (
        model_runner,
        batch_sampler,
        draft_head_runner,
        draft_model_runner,
        input_batch,
        device_sampler,
        sampling_rules,
    ):
        monkeypatch.setattr(each, "upload_arrays", upload_aligned)
    options = {
        "num_kv_blocks": 200,
        "max_model_len": 1024,
        "max_num_batched_tokens": 600,
        "dtype": "bfloat16",
    } | options
    if options.get("tensor_parallel_size") == 2:
        monkeypatch.setattr(startup, "start_ranks", lambda config, *_, **__: FirstOfTwoRanks(config))
    path = path or save_tiny_model(tmp_path, family, max_position_embeddings=1024)
    config = EngineConfig(model=str(path), attention_backend="triton", warmup_seconds=0, max_num_seqs=8, **options)
    return EngineCore(config, make_drafter=make_drafter)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("gpt_oss", {}),
        ("llama", {"quantization": "int4", "kv_cache_dtype": "fp8"}),
        ("llama", {"deterministic": True}),
        ("gemma2", {}),
        ("qwen3-moe", {"quantization": "int8"}),
        ("llama", {"quantization": "int8"}),
        ("llama", {"quantization": "fp8"}),
        ("lfm2", {}),
        ("llama", {"enable_lora": True}),
        ("qwen3_5", {}),
        ("falcon_h1", {}),
        ("jamba", {}),
        ("deepseek_v2-lite", {}),
        ("deepseek_v2-lite", {"deterministic": True}),
        ("gpt_oss", {"tensor_parallel_size": 2, "enable_expert_parallel": True}),
        ("llama", {"tensor_parallel_size": 2, "decode_context_parallel_size": 2}),
    ],
)
def test_steps_launch_only_precompiled_kernel_variants(
    h100: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, family: str, options: dict[str, Any]
) -> None:
    monkeypatch.setattr(torch_matmul, "trial_failure_reason", lambda *_: None)
    assert_only_precompiled_variants_launched(monkeypatch, lambda: start(monkeypatch, tmp_path, family, **options))


@pytest.mark.slow
def test_steps_with_grouped_experts_launch_only_precompiled_kernel_variants(
    h100: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(grouped_matmul, "is_supported", lambda *_: True)
    monkeypatch.setattr(grouped_trial, "find_min_rows", lambda *_: 400)
    rows, multiply = set[bool](), grouped_matmul.grouped_mm

    def grouped_mm(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
        assert not ends.any(), "no kernel has written them"
        rows.add(len(x) >= 400)
        return multiply(x, weights, ends)

    monkeypatch.setattr(grouped_matmul, "grouped_mm", grouped_mm)
    assert_only_precompiled_variants_launched(monkeypatch, lambda: start(monkeypatch, tmp_path, "qwen3-moe"))
    assert rows == {True}


@pytest.mark.parametrize(("capability", "family"), [(80, "qwen3_5"), (120, "qwen3_5"), (80, "falcon_h1")])
def test_steps_on_other_gpus_launch_only_precompiled_kernel_variants(
    h100: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capability: int, family: str
) -> None:
    """After the trial of chunks has passed."""
    from triton.backends.compiler import GPUTarget

    from quire.kernels.gpu import triton_launch_sizes
    from quire.kernels.gpu.kernel_variant import set_compile_target
    from quire.kernels.gpu.recurrent import triton_recurrence
    from quire.kernels.gpu.triton_backend import TritonBackend

    in_chunks, advance = list[int](), triton_recurrence.advance_chunked
    set_compile_target(GPUTarget("cuda", capability, 32))
    triton_launch_sizes._compile_target.cache_clear()
    monkeypatch.setattr(torch_matmul, "trial_failure_reason", lambda *_: None)
    monkeypatch.setattr(TritonBackend, "passed_chunk_trial", True)
    monkeypatch.setattr(triton_recurrence, "advance_chunked", lambda *args: in_chunks.append(1) or advance(*args))
    try:
        assert_only_precompiled_variants_launched(monkeypatch, lambda: start(monkeypatch, tmp_path, family))
    finally:
        triton_launch_sizes._compile_target.cache_clear()
    assert in_chunks


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "family", "options"),
    [
        ("eagle3", "llama", {}),
        ("draft_model", "llama", {}),
        ("medusa", "llama", {}),
        ("eagle", "llama", {}),
        ("mtp", "qwen3_5", {}),
        ("mtp", "glm4_moe", {}),
        ("mtp", "deepseek_v3", {}),
        ("draft_model", "llama", {"quantization": "int4", "kv_cache_dtype": "fp8"}),
    ],
)
def test_drafters_launch_only_precompiled_kernel_variants(
    h100: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, method: str, family: str, options: dict[str, Any]
) -> None:
    """Draft models with other widths, and draft heads: next to steps, and while they draft."""
    monkeypatch.setattr(torch_matmul, "trial_failure_reason", lambda *_: None)
    for each in (batch_sampler, decoder):  # memory that no kernel has written may hold NaN, which would end a request
        monkeypatch.setattr(each, "has_finite_logits", lambda hidden, _: torch.ones(len(hidden), dtype=torch.bool))
    model = None
    if method == "draft_model":
        shape = {"max_position_embeddings": 1024, "hidden_size": 96, "intermediate_size": 160}
        model = str(save_tiny_model(tmp_path / "small", family, **shape))
    elif method != "mtp":
        model = str(made_head(tmp_path / "head", method)[0])
    speculative = SpeculativeConfig(method=method, model=model, num_speculative_tokens=3)

    def started() -> EngineCore:
        path, shape = None, options | {"speculative_config": speculative}
        if method == "mtp":
            path, shape = save_tiny_mtp(tmp_path / "model", family), shape | {"max_model_len": 512}
        return start(monkeypatch, tmp_path / "model", family, path, always, **shape)

    assert_only_precompiled_variants_launched(monkeypatch, started, drafts=True)


def assert_only_precompiled_variants_launched(
    monkeypatch: pytest.MonkeyPatch, started: Callable[[], EngineCore], *, drafts: bool = False
) -> None:
    """Assert that steps launch only kernel variants compiled before the engine is ready, and that a drafter launches
    only the variants that it declares itself, whatever steps of the served model launch.
    """
    from triton.runtime.jit import JITFunction

    from quire.kernels.gpu.kernel_variant import KernelVariant, dry_run_for_variants

    variants: dict[str, list[KernelVariant]] = {"guesses": [], "every guess": []}

    def record_variants(whole: Callable[..., Any]) -> Callable[..., Any]:
        def launched(*args: Any) -> Any:
            results = list[Any]()
            variants["guesses"] += dry_run_for_variants(lambda: results.append(whole(*args)))
            return results[0]

        return launched

    for owner, names in (
        (DraftHeadRunner, ("update_states", "draft_tokens")),
        (DraftModelRunner, ("draft_first_tokens", "draft_next_tokens")),
    ):
        for name in names:
            monkeypatch.setattr(owner, name, record_variants(getattr(owner, name)))

    def run_steps() -> None:
        launch = JITFunction.run

        def picks(kernel: Any, *args: Any, **named: Any) -> Any:
            launch(kernel, *args, **named)
            if kernel.__name__ == "pick_tokens":
                args[0].fill_(PICKED)

        monkeypatch.setattr(JITFunction, "run", picks)
        engine = started()
        worker, longest = engine.executor, engine.info.max_model_len
        assert isinstance(worker, ModelRunner)
        variants["every step"] = worker.kernel_variants(600)
        if engine._device_drafter is not None:
            variants["every guess"] = dry_run_for_variants(partial(engine._device_drafter.launch_kernel_variants, 600))
        requests = [
            request(f"{name} {length}", [5 + at % 200 for at in range(length)], max_tokens=5, **kind)
            for name, kind in KINDS.items()
            for length in (3, 17, 90, 700)
            if length < longest
        ]
        variants["steps"] = dry_run_for_variants(lambda: unused(run(engine, requests)))
        assert (sum(engine.engine_stats.accepted_drafts) > 10) == drafts

    dry_run_for_variants(run_steps)
    for launched, compiled in (("steps", "every step"), ("guesses", "every guess")):
        others = {(kind.name, kind.specialization) for kind in variants[launched]} - {
            (kind.name, kind.specialization) for kind in variants[compiled]
        }
        same = [kind.specialization for kind in variants[compiled] if kind.name in {name for name, _ in others}]
        assert not others, f"{launched}, beside {same}"
    assert len(variants["steps"]) > 10
    assert bool(variants["guesses"]) == drafts


def unused(_: object) -> None:
    pass


@pytest.mark.parametrize("values", [None, 32])
def test_few_heads_need_no_further_kernel_variants(values: int | None, h100: Path) -> None:
    """Numbers of rows and splits are odd, as on a rank with three heads: all tensors begin at multiples of 16 bytes,
    which is part of a variant.
    """
    from quire.kernels.gpu.kernel_variant import dry_run_for_variants
    from quire.kernels.gpu.triton_backend import TritonBackend

    heads, cache, variants = 3, torch.zeros((2, 16, 1, 48), dtype=torch.bfloat16), set()

    def launch(tokens: int) -> None:
        metadata = last_tokens_metadata(torch.device("cpu"), (1, 1), (4096, 4096), 4096)
        tables, lens = torch.zeros((tokens, 256), dtype=torch.int32), torch.full((tokens,), 4096, dtype=torch.int32)
        ones = replace(metadata, block_table=tables, context_lens=lens)
        TritonBackend().attend_batch_part(
            torch.zeros((tokens, heads, 48)).bfloat16(), cache, cache, ones, AttentionParams(1.0, value_dim=values)
        )

    for tokens in range(1, 6):
        variants |= {(kind.name, kind.specialization) for kind in dry_run_for_variants(partial(launch, tokens))}
    assert sorted(name for name, _ in variants) == [f"attend{'_latent' if values else ''}_splits", "reduce_even_splits"]


@dataclass(frozen=True)
class FakeVariant:
    """Stands for a kernel variant of a kernel that no process knows."""

    folder: str

    @property
    def marker_path(self) -> Path:
        return Path(self.folder, "compiled")


def test_dead_compiler_processes_report_failure(tmp_path: Path) -> None:
    kinds = [FakeVariant(str(tmp_path))] * 5
    result = compile_variants(kinds, lambda: None, "quire.engine.worker.kernel_compilation.nobody")  # type: ignore[arg-type]
    assert (result.num_compiled, result.num_failed) == (0, 5)
    assert result.first_error.endswith("No module named quire.engine.worker.kernel_compilation.nobody")
    assert result.summary.startswith("0 of 5 kinds of kernels compiled, the others when steps first need them: ")


def test_kernel_error_description_omits_source() -> None:
    assert (
        describe_kernel_error(ValueError("at 3:4:\n    x = tl.load(y)\n        ^\ny is not defined"))
        == "ValueError: y is not defined"
    )


@pytest.mark.slow
def test_kernels_compiled_by_other_process_are_found_in_cache(h100: Path) -> None:
    from quire.kernels.gpu.kernel_variant import dry_run_for_variants
    from quire.kernels.gpu.triton_fused import _norm_kernel, silu_mul

    x: Tensor = torch.zeros((3, 64), dtype=torch.bfloat16)
    kinds = dry_run_for_variants(lambda: unused(silu_mul(x)))
    assert [kind.name for kind in kinds] == ["_gate_kernel"]
    assert _norm_kernel is not kinds[0].kernel
    broken = replace(kinds[0], specialization="{}")
    result = compile_variants([broken, *kinds, broken], lambda: None)
    assert (result.num_compiled, result.num_failed) == (1, 2)
    assert result.first_error.startswith("_gate_kernel: ")
    assert kinds[0].marker_path.exists()
    assert compile_variants(kinds, lambda: None) == CompileResult(), "it is there"
    cache_files = sorted(h100.rglob("*"))
    assert any(each.suffix == ".cubin" for each in cache_files)
    kinds[0].compile_variant()
    assert sorted(h100.rglob("*")) == cache_files, "nothing was compiled anew"


@pytest.mark.slow
def test_image_kernel_variants_cover_common_models(h100: Path) -> None:
    from quire.engine.worker.kernel_compilation.fill import model_kernel_variants, read_common_models

    names_by_model = [{kind.name for kind in model_kernel_variants(model, 256)} for model in read_common_models()]
    attention = {"attend", "attend_splits", "reduce_even_splits", "_norm_rope_store_kernel", "_norm_kernel"}
    assert all(names >= attention | {"pick_tokens", "ban_words"} for names in names_by_model)
    assert ["multiply_experts" in names for names in names_by_model] == [False, False, True]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gfx942", "gfx1100"])
def test_attention_kernels_compile_for_amd_within_shared_memory(
    name: str, h100: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from quire.engine.worker.kernel_compilation.fill import model_kernel_variants, parse_gpu_target, read_common_models
    from quire.kernels.gpu.kernel_variant import set_compile_target

    set_compile_target(parse_gpu_target(name))
    monkeypatch.setattr(torch.version, "hip", "of a PyTorch for it")
    kinds = [
        kind for kind in model_kernel_variants(read_common_models()[0], 16) if kind.name in ("attend", "attend_splits")
    ]
    assert len(kinds) == 8
    for kind in kinds:
        kind.compile_variant()
    metadata = [json.loads(each.read_text()) for each in h100.rglob("attend*.json") if not each.name.startswith("__")]
    assert {each["target"]["arch"] for each in metadata} == {name}
    assert max(each["shared"] for each in metadata) <= 65_536


def test_parse_gpu_target_accepts_nvidia_and_amd_names() -> None:
    from quire.engine.worker.kernel_compilation.fill import parse_gpu_target

    targets = [(each.backend, each.arch, each.warp_size) for each in map(parse_gpu_target, ("90", "gfx942", "gfx1100"))]
    assert targets == [("cuda", 90, 32), ("hip", "gfx942", 64), ("hip", "gfx1100", 32)]
