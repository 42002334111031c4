"""KV cache plans: their sizes, the configurations that are rejected, and the memory measured for them."""

import json
import os
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from quire.engine.checkpoint.kv_cache_groups import KVBlockNeeds
from quire.engine.checkpoint.kv_cache_plan import (
    GIB,
    BlockBytes,
    StateSlotCounts,
    check_kv_memory,
    check_weights_fit_memory,
    make_kv_cache_plan,
    total_host_bytes,
)
from quire.engine.checkpoint.model_resolver import read_model_config
from quire.engine.checkpoint.tensor_headers import CheckpointSize
from quire.engine.common.config import EngineConfig
from quire.engine.common.errors import ConfigError
from quire.engine.engine_core import EngineCore
from quire.engine.worker.device_memory import StepReserve, explain_out_of_memory, kv_budget, measure_step_bytes
from quire.kernels.reference import ReferenceBackend
from tests.engine.harness import request, run
from tests.tiny_models import save_tiny_model

PAGE_NEEDS = KVBlockNeeds((None,), block_size=16, max_chunk_tokens=1)


def test_kv_plan_fits_blocks_and_context_to_memory(tmp_path: Path) -> None:
    model = read_model_config(save_tiny_model(tmp_path, "llama"))
    bytes_per_block, slot_counts = 2 * 16 * 2 * 16 * 2 * 3, StateSlotCounts(8, 0)
    plan = make_kv_cache_plan(
        model,
        PAGE_NEEDS,
        BlockBytes(bytes_per_block, ""),
        available_bytes=10 * bytes_per_block + 5,
        slot_counts=slot_counts,
    )
    assert (plan.num_blocks, plan.max_model_len, plan.kv_bytes) == (10, 160, 10 * bytes_per_block)
    large_plan = make_kv_cache_plan(
        model, PAGE_NEEDS, BlockBytes(bytes_per_block, ""), available_bytes=GIB, slot_counts=slot_counts
    )
    assert (large_plan.num_blocks, large_plan.max_model_len) == (8 * 32, 512), (
        "no more pages than max_num_seqs full contexts use"
    )


def test_context_that_does_not_fit_is_rejected_with_sizes(tmp_path: Path) -> None:
    model = read_model_config(save_tiny_model(tmp_path, "llama"))
    bytes_per_block = 2 * 16 * 2 * 16 * 4 * 3
    with pytest.raises(ConfigError) as error:
        make_kv_cache_plan(
            model,
            PAGE_NEEDS,
            BlockBytes(bytes_per_block, "a product"),
            available_bytes=3 * bytes_per_block,
            slot_counts=StateSlotCounts(1, 0),
            max_model_len=200,
        )
    assert error.value.param == "max_model_len"
    for number in (f"{13 * bytes_per_block:,}", f"{3 * bytes_per_block:,}", "48 tokens"):
        assert number in error.value.message
    with pytest.raises(ConfigError, match="512 positions"):
        make_kv_cache_plan(
            model,
            PAGE_NEEDS,
            BlockBytes(bytes_per_block, "a product"),
            available_bytes=GIB,
            slot_counts=StateSlotCounts(1, 0),
            max_model_len=513,
        )


def test_engine_allocates_planned_kv_bytes(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path, "llama")
    engine = EngineCore(EngineConfig(model=str(path), kv_cache_memory=1 / 1024, max_num_seqs=4))
    info = engine.info
    assert info.kv_bytes == info.num_blocks * 2 * 16 * 2 * 16 * 4 * 3
    assert (
        f"KV: 2 x 16 tokens x 2 heads x 16 x 4 B x 3 layers = {2 * 16 * 2 * 16 * 4 * 3 / 1024:,.0f} KiB per block"
        in info.arithmetic
    )
    assert GIB / 1024 * 0.9 < info.kv_bytes <= GIB / 1024
    assert sum(k.nbytes + v.nbytes for k, v in engine.executor._kv_cache) == info.kv_bytes
    with pytest.raises(ConfigError, match="the longest that fits is at most 16 tokens"):
        EngineCore(EngineConfig(model=str(path), num_kv_blocks=1, max_model_len=32))


def test_idle_warmup_clears_eighth_of_unused_kv_blocks(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path, "llama")
    engine = EngineCore(EngineConfig(model=str(path), num_kv_blocks=64, max_num_seqs=4))
    caches = [cache for layer in engine.executor._kv_cache for cache in layer]

    def cleared(used: int) -> list[bool]:
        """Run the warmup, and return for each block whether it is zero in every layer. The first `used` blocks must not
        be zeroed.
        """
        while engine.run_next_warmup():
            pass
        assert all(cache[page].any() for cache in caches for page in range(used))
        return [all(not cache[page].any() for cache in caches) for page in range(64)]

    for cache in caches:
        cache.fill_(7)
    assert cleared(0) == [True] * 8 + [False] * 56
    first = run(engine, [request("a", range(3, 50), max_tokens=17)])["a"].ids  # on blocks 0 to 3
    assert cleared(4) == [False] * 4 + [True] * 8 + [False] * 52
    assert run(engine, [request("b", range(3, 50), max_tokens=17)])["b"].ids == first, (
        "the same answer from cached pages"
    )
    for name in "cde":
        run(engine, [request(name, [ord(name)] * 290, max_tokens=2)])  # 18 blocks each and one shared block
    assert cleared(58)[58:] == [True] * 6, "fewer than an eighth are left"


def add_8_tib_tensor(file: Path) -> None:
    """Add a tensor of 8 TiB as a hole of a sparse file."""
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header, tensors = json.loads(content[8 : 8 + length]), content[8 + length :]
    end = len(tensors) + 2**43
    header["model.layers.0.more"] = {"dtype": "F32", "shape": [2**41], "data_offsets": [len(tensors), end]}
    header_json = json.dumps(header).encode()
    file.write_bytes(len(header_json).to_bytes(8, "little") + header_json + tensors)
    os.truncate(file, 8 + len(header_json) + end)


def test_weights_larger_than_memory_are_rejected_before_loading(tmp_path: Path) -> None:
    weights = CheckpointSize(num_floats=GIB, packed_bytes=0)
    for free, dtype, fits in ((4.1, "float32", True), (3.9, "float32", False), (1.6, "bfloat16", True)):
        with nullcontext() if fits else pytest.raises(ConfigError, match=r"take 4\.0 GiB or more, and 3\.9 GiB"):
            check_weights_fit_memory(weights, dtype, meminfo={"MemAvailable": int(free * GIB)}.get)
    check_weights_fit_memory(
        weights, "float32", meminfo=lambda key: None
    )  # if free memory is unknown, nothing is rejected
    path = save_tiny_model(tmp_path, "llama")
    add_8_tib_tensor(path / "model.safetensors")
    with pytest.raises(ConfigError, match="model: the weights take"):
        EngineCore(EngineConfig(model=str(path)))


CUDA = torch.device("cuda")


def fake_gpu_memory(monkeypatch: pytest.MonkeyPatch, free: float, total: float) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (int(free * GIB), int(total * GIB)))


def test_kv_budget_respects_gpu_memory_utilization(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_gpu_memory(monkeypatch, free=60, total=80)
    half = EngineConfig(gpu_memory_utilization=0.5)
    assert kv_budget(half, CUDA, 3 * GIB) == 17 * GIB  # half is 40 GiB: 20 are in use and a step takes 3
    assert kv_budget(EngineConfig(kv_cache_memory=2), CUDA, 3 * GIB) == 2 * GIB
    with pytest.raises(ConfigError) as error:
        kv_budget(half, CUDA, 21 * GIB)
    assert error.value.param == "gpu_memory_utilization"
    assert "use --quantization int4" in error.value.message
    with pytest.raises(ConfigError, match="--quantization saves no memory with this attention backend"):
        kv_budget(half, CUDA, 21 * GIB, keeps_weights_quantized=False)
    for part in ("0.5 of the GPU's 80.0 GiB", "hold 20.0", "takes 21.0", "--max-num-batched-tokens"):
        assert part in error.value.message


def test_out_of_memory_error_names_setting_to_change() -> None:
    raises_config_error = pytest.raises(
        ConfigError, match=r"max_num_batched_tokens: out of memory for a step\. Lower it"
    )
    with raises_config_error as error, explain_out_of_memory("a step", "max_num_batched_tokens", "Lower it"):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
    assert error.value.param == "max_num_batched_tokens"
    raises_config_error = pytest.raises(ConfigError, match="kv_cache_memory: out of memory for pages")
    with raises_config_error, explain_out_of_memory("pages", "kv_cache_memory", ""):
        torch.empty(2**61, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="something else"), explain_out_of_memory("pages", "kv_cache_memory", ""):
        raise RuntimeError("something else")


@pytest.mark.parametrize(("tokens", "context"), [(64, 512), (300, 128)])
def test_measure_step_bytes_runs_largest_possible_step(
    tokens: int, context: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The measured step has the most tokens and rows possible. A fake replaces the GPU's memory counters."""
    options = {"max_num_batched_tokens": tokens, "max_model_len": context, "max_num_seqs": 20}
    config = EngineConfig(model=str(save_tiny_model(tmp_path, "llama")), attention_backend="reference", **options)
    model = EngineCore(config).executor._model
    for name in ("synchronize", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda device: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 1000)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 5000)
    row_counts = []
    forward, logits = model.forward, model.compute_logits
    monkeypatch.setattr(model, "forward", lambda ids, *rest: row_counts.append(len(ids)) or forward(ids, *rest))
    monkeypatch.setattr(
        model, "compute_logits", lambda hidden, *rest: row_counts.append(len(hidden)) or logits(hidden, *rest)
    )
    assert measure_step_bytes(model, ReferenceBackend(), config) == StepReserve(4000, 1000)
    assert row_counts == [-(-tokens // context) * min(tokens, context), 20]


@pytest.mark.gpu
def test_kv_cache_leaves_gpu_memory_for_largest_step() -> None:
    engine = EngineCore(EngineConfig(gpu_memory_utilization=0.3, max_num_batched_tokens=8192, max_num_seqs=256))
    free, total = torch.cuda.mem_get_info()
    assert total - free < 0.35 * total
    assert engine.info.num_blocks > 0


def test_kv_cache_memory_over_host_memory_is_rejected() -> None:
    total = total_host_bytes()
    assert total is not None
    with pytest.raises(ConfigError, match=rf"100000 GiB are more than the {total / GIB:.1f} GiB of memory of this"):
        check_kv_memory(100_000, total, "this machine")
    check_kv_memory(total / GIB, total, "this machine")
    check_kv_memory(None, total, "this machine")
    check_kv_memory(100_000, None, "a machine that does not say")
