"""--weights-on-disk for experts: the bits of experts in memory, in every weight format, on ranks and stages, with the
most used ones kept in memory; statistics and rejected settings.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.engine.checkpoint.model_resolver import read_raw_config
from quire.engine.checkpoint.sizes.model_sizes import read_model_sizes
from quire.engine.checkpoint.tensor_headers import ROUTED_EXPERT_PATTERN, read_checkpoint_size
from quire.engine.common.config import EngineConfig
from quire.engine.common.errors import ConfigError
from quire.engine.engine_core import EngineCore, free_engine_memory
from quire.engine.worker.loading.weight_offload import MEMORY_FILESYSTEMS, filesystem_type
from quire.kernels.cpu.backend import CpuBackend
from quire.kernels.cpu.decoder import mapped_experts
from tests.engine.harness import request, run
from tests.engine.models.test_moe_fields import prompts, told
from tests.engine.ranks import thread_ranks
from tests.engine.test_ranks import QUANTIZED, one_thread
from tests.gguf_models import write_gguf
from tests.quantized_models import quantize_checkpoint, stack_mxfp4
from tests.tiers import slow
from tests.tiny_models import save_tiny_model

__all__ = ["one_thread", "thread_ranks"]
MISSING = CpuBackend().missing_reason
pytestmark = [
    pytest.mark.skipif(MISSING is not None or not hasattr(os, "posix_fallocate"), reason=str(MISSING)),
    pytest.mark.usefixtures("thread_ranks", "one_thread"),
]
MIB = 2**20
WIDE = {"hidden_size": 128, "intermediate_size": 128, "moe_intermediate_size": 128, "mlp_only_layers": []}


@pytest.fixture
def tmp_path(tmp_path: Path) -> Iterator[Path]:
    """A folder on a disk: the default one may be in memory."""
    if filesystem_type(tmp_path) not in MEMORY_FILESYSTEMS:
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir="/var/tmp", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def engine(path: Path, **settings: Any) -> EngineCore:
    return EngineCore(EngineConfig(**{"model": str(path), "threads": 2, "max_num_batched_tokens": 64} | settings))


def answers(some: EngineCore) -> dict[str, Any]:
    requests = [request(str(i), prompt, max_tokens=12, logprobs=0) for i, prompt in enumerate(prompts()[2:6])]
    return {name: told(each) for name, each in run(some, requests).items()}


def written(way: str, tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    """A model with experts in this format, and settings."""
    if way == "mxfp4":
        return stack_mxfp4(save_tiny_model(tmp_path / "model", "gpt_oss"), tmp_path / "few"), {"dtype": "bfloat16"}
    path = save_tiny_model(tmp_path / "model", "qwen3-moe", **WIDE)
    if way in QUANTIZED:
        leave = ("lm_head", "mlp.gate.")
        return quantize_checkpoint(path, tmp_path / "few", *QUANTIZED[way], leave=leave), {"dtype": "bfloat16"}
    if way.startswith("Q"):
        return write_gguf(path, tmp_path / "model.gguf", lambda _: way), {"dtype": "bfloat16"}
    return path, {"dtype": way} if way.startswith(("float3", "bf")) else {"quantization": way, "dtype": "bfloat16"}


WAYS = ["bfloat16", "float32", "int8", "int4", "fp8", "mxfp4", "gptq", "float8", "Q4_0"]


@pytest.mark.few(1)
@pytest.mark.parametrize("way", WAYS)
def test_experts_on_disk_give_same_bits_as_in_memory(way: str, tmp_path: Path) -> None:
    """With no expert in memory, with some, which change with use, and with all; stepwise and with recorded layers."""
    path, settings = written(way, tmp_path)
    if settings["dtype"] == "float32" and not CpuBackend().prefers_native_linear(torch.float32):
        pytest.skip("oneDNN multiplies here")
    expected = answers(engine(path, **settings))
    on_disk = settings | {"weights_on_disk": str(tmp_path / "disk")}
    plain = engine(path, **on_disk)
    assert answers(plain) == expected
    assert plain.engine_stats.experts_read > plain.engine_stats.experts_kept == 0
    assert plain.engine_stats.experts_guessed_right <= plain.engine_stats.experts_guessed
    assert (
        plain.engine_stats.experts_guessed_right or way == "mxfp4"
    )  # three of five experts are routed to, mostly with few rows
    store = plain.executor.model.offload
    assert isinstance(store, mapped_experts.MappedDiskExperts)
    some = engine(path, **on_disk, weights_in_memory=5 * store._slot_bytes / 2**30)
    some.executor.model.offload.rebalance_interval = 2
    first = {*some.executor.model.offload._slot_of}
    assert answers(some) == expected
    assert answers(some) == expected  # with cached prefixes
    assert len(first) == 5
    assert first != {*some.executor.model.offload._slot_of}
    assert 0 < some.engine_stats.experts_kept < some.engine_stats.experts_read
    every = engine(path, **on_disk, weights_in_memory=1.0)
    assert answers(every) == expected
    assert every.engine_stats.experts_kept == every.engine_stats.experts_read
    assert not list((tmp_path / "disk").iterdir())  # the file has no name


def test_most_used_experts_are_kept_in_memory(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path / "model", "mixtral", num_local_experts=8, num_experts_per_tok=2)
    stores = []
    for memory in (None, 3):
        memory_gib = None if memory is None else memory * stores[0]._slot_bytes / 2**30
        made = engine(path, dtype="bfloat16", weights_on_disk=str(tmp_path), weights_in_memory=memory_gib)
        stores.append(made.executor.model.offload)
    store, total = stores[1], len(stores[1]._experts)
    store.rebalance_interval = 1
    assert {*store._slot_of} == {0, 8, 16}  # the first expert of each of the first three layers
    used = {7, 11, total - 1}
    store._tables.uses[[*used]] = 9
    store.prepare_for_step()
    assert {*store._slot_of} == {*store._tables.pinned.nonzero().flatten().tolist()} == used
    store._tables.uses[[1, 2, 3]] = 5  # not enough more than half of 9
    store.prepare_for_step()
    assert {*store._slot_of} == used


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "settings",
    [
        {"tensor_parallel_size": 2},
        {"tensor_parallel_size": 2, "enable_expert_parallel": True},
        {"pipeline_parallel_size": 2},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
        {"num_kv_blocks": 12, "max_model_len": 128},
    ],
    ids=str,
)
@pytest.mark.parametrize("family", ["deepseek_v3", "gpt_oss", *slow("nemotron_h-latent")])
def test_experts_on_disk_work_with_ranks_stages_drafts_and_preemption(
    family: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    path = save_tiny_model(tmp_path / "model", family, dtype=torch.bfloat16)
    expected = answers(engine(path, **settings))
    made = engine(path, **settings, weights_on_disk=str(tmp_path / "disk"), weights_in_memory=0.0002)
    assert answers(made) == expected
    assert made.engine_stats.experts_read > 0
    assert any("in a file on disk" in note for note in made.info.notes)


@pytest.mark.parametrize(
    ("family", "settings", "wrong"),
    [
        ("mixtral", {"attention_backend": "reference"}, "weights_on_disk: backend 'reference' reads no weights"),
        ("mixtral", {"weights_in_memory": 1e-7}, "weights_on_disk: an expert takes .* bytes, more than"),
        ("mixtral", {"weights_on_disk": None, "weights_in_memory": 1.0}, "weights_in_memory: is how many GiB"),
        ("mixtral", {"weights_on_disk": "/proc/x"}, "weights_on_disk: /proc/x: "),
    ],
)
def test_experts_on_disk_reject_unsupported_settings(
    family: str, settings: dict[str, Any], wrong: str, tmp_path: Path
) -> None:
    path = save_tiny_model(tmp_path, family)
    with pytest.raises(ConfigError, match=wrong):
        engine(path, **{"weights_on_disk": str(tmp_path), "dtype": "bfloat16"} | settings)


def test_full_disk_and_tmpfs_raise_config_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save_tiny_model(tmp_path, "mixtral")

    def full(*_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(ConfigError, match="has no room for the weights: no space left"):
            engine(path, dtype="bfloat16", weights_on_disk=str(tmp_path))
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm") as memory,
        pytest.raises(ConfigError, match=r"weights_on_disk: .* is on an in-memory file system \(tmpfs\)"),
    ):
        engine(path, dtype="bfloat16", weights_on_disk=memory)


def test_resident_size_excludes_routed_experts(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path / "model", "mixtral")
    every, rest = (read_checkpoint_size(path, excluded_pattern=without) for without in (None, ROUTED_EXPERT_PATTERN))
    sizes = read_model_sizes(read_raw_config(str(path))[0])
    assert every is not None
    assert rest is not None
    assert every.num_floats - rest.num_floats == sizes.expert_parameters
    packed = write_gguf(path, tmp_path / "model.gguf", lambda _: "F32")
    assert read_checkpoint_size(packed, excluded_pattern=ROUTED_EXPERT_PATTERN).num_floats == rest.num_floats


def test_freed_engine_closes_weight_files(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path / "model", "mixtral")

    def files() -> int:
        links = [os.readlink(each) for each in Path("/proc/self/fd").iterdir() if each.is_symlink()]
        return sum(str(tmp_path / "disk") in link for link in links)

    made = engine(path, dtype="bfloat16", weights_on_disk=str(tmp_path / "disk"))
    answers(made)
    assert files() > 0
    del made
    free_engine_memory()
    assert files() == 0
