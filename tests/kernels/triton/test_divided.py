"""Triton under decode context parallelism, rank after rank: against the float64 reference, and with fixed splits the
same bits for a row in every batch.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from quire.kernels.attention.context_shard import ContextShard
from quire.kernels.attention_params import AttentionParams
from quire.kernels.backend import AttentionMetadata
from quire.kernels.gpu import triton_launch_sizes
from quire.kernels.gpu.triton_backend import TritonBackend
from quire.kernels.kv_quantization import UNIT_KV_SCALES, KVScales
from quire.kernels.probes.serial_context_parallel import SerialContextParallel
from quire.kernels.reference import ReferenceBackend
from tests.kernels.ragged import attend, attended_on, empty_cache, error, random_part, to_device
from tests.kernels.triton.test_attention import DECODE, MIXED, TOLERANCE

reference = ReferenceBackend()


class Divided(SerialContextParallel):
    """Takes and returns CPU tensors, and stores as the reference does."""

    def __init__(self, ranks: int, device: torch.device, *, fixed: bool = False) -> None:
        super().__init__(TritonBackend(deterministic=fixed), ranks)
        self._device = device

    def store_kv(self, *given: Any) -> None:
        ReferenceBackend.store_kv(self, *given)

    def paged_attention(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata, softmax: AttentionParams
    ) -> Tensor:
        return attended_on(self._device, super().paged_attention, (q, k_cache, v_cache), metadata, softmax)


def check(
    backend: Divided, mix: list[tuple[int, int]], dtype: torch.dtype, *, dim: int = 64, heads: int = 4, **rules: Any
) -> None:
    generator = torch.Generator().manual_seed(20)
    parts = [random_part(context, count, heads, 1, dim, dtype, generator) for context, count in mix]
    expected = attend(reference, [part.to(torch.float64) for part in parts], **rules)
    for row, (mine, judge) in enumerate(zip(attend(backend, parts, **rules), expected, strict=True)):
        assert error(mine, judge) < TOLERANCE[dtype], f"sequence {row}"


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_context_parallel_attention_matches_reference(
    device: torch.device, dtype: torch.dtype, ranks: int, fixed: bool
) -> None:
    for mix in (DECODE, MIXED):
        check(Divided(ranks, device, fixed=fixed), mix, dtype)


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize(
    "rules",
    [
        {"window": 1},
        {"window": 40},
        {"window": 100, "softcap": 5.0},
        {"sinks": torch.tensor([-3.0, 0.5, 90.0, 0.0])},
    ],
    ids=str,
)
def test_context_parallel_windows_and_sinks_match_reference(
    device: torch.device, rules: dict[str, Any], fixed: bool
) -> None:
    for mix in (DECODE, MIXED):
        check(Divided(2, device, fixed=fixed), mix, torch.bfloat16, **rules)


def test_context_parallel_long_contexts_match_reference(device: torch.device) -> None:
    for fixed in (False, True):
        backend = Divided(2, device, fixed=fixed)
        check(backend, [(2100, 1), (3, 1)], torch.bfloat16)
        check(backend, [(1300, 3)], torch.bfloat16, dim=96)
        check(backend, [(2030, 1), (40, 1)], torch.bfloat16, window=1300)


@pytest.mark.parametrize("fixed", [False, True])
def test_context_parallel_mla_matches_reference(device: torch.device, fixed: bool) -> None:
    for mix in ([(530, 3), (1, 1), (16, 16), (40, 1)], DECODE, [(1100, 1), (5, 1)]):
        check(Divided(2, device, fixed=fixed), mix, torch.bfloat16, dim=48, heads=6, values=32)


@pytest.mark.parametrize("values", [None, 32])
@pytest.mark.parametrize("window", [None, 510])
def test_context_parallel_fixed_split_bits_do_not_depend_on_batch(
    device: torch.device,
    values: int | None,
    window: int | None,
    generator: torch.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if values is not None and window is not None:
        window = None  # MLA has no windows
    backend = Divided(2, device, fixed=True)
    part = random_part(1100, 18, 2, 1, 48, torch.bfloat16, generator)
    rules = {"window": window, "values": values}
    (whole,) = attend(backend, [part], **rules)
    other = random_part(20, 1, 2, 1, 48, torch.bfloat16, generator)
    for begin, end, beside in ((0, 1, 0), (0, 11, 0), (11, 13, 2), (17, 18, 9)):
        parts = [*[other] * beside, part.rows(begin, end)]
        assert torch.equal(attend(backend, parts, seed=end, **rules)[-1], whole[begin:end]), (begin, end, beside)
    monkeypatch.setattr(triton_launch_sizes, "num_multiprocessors", lambda device: 0)
    assert torch.equal(attend(backend, [other, part], **rules)[1], whole)


@pytest.mark.parametrize("kv_dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("queries", [1, 20])
def test_context_shards_with_quantized_kv_match_reference(
    device: torch.device, kv_dtype: torch.dtype, queries: int, generator: torch.Generator
) -> None:
    """Each rank has its own pages."""
    ranks, tile, dim, pages = 2, 16, 64, 5
    part = random_part(150, queries, 4, 2, dim, torch.bfloat16, generator)
    scales = UNIT_KV_SCALES if kv_dtype == torch.int8 else KVScales(0.03, 0.03)
    table, at = torch.tensor([[3, 1, 0, 4, 2]], dtype=torch.int32), torch.arange(150)
    positions = at[150 - queries :]
    step = AttentionMetadata(
        query_start=torch.tensor([0, queries], dtype=torch.int32),
        context_lens=torch.tensor([150], dtype=torch.int32),
        key_start=torch.tensor([0, 150], dtype=torch.int32),
        block_table=table,
        positions=positions,
        slot_mapping=positions,
        max_query_len=queries,
        max_context_len=150,
    )
    rule, outputs = AttentionParams(dim**-0.5, kv_scales=scales), []
    judge = ReferenceBackend()
    width = dim + (2 if kv_dtype == torch.int8 else 0)
    for backend, where in ((TritonBackend(), device), (judge, torch.device("cpu"))):
        parts = []
        for rank in range(ranks):
            shard = ContextShard(rank, ranks, tile, remote_slot=pages * tile)
            caches = [empty_cache((pages + 1, tile, 2, width), kv_dtype) for _ in range(2)]
            slots = shard.slot_mapping(table[0, at // (tile * ranks)].long(), at)
            judge.store_kv(part.k, part.v, *caches, slots, scales)
            there = tuple(each.to(where) for each in caches)
            parts.append(backend.attend_context_shard(part.q.to(where), there, to_device(step, where), rule, shard))
        outputs.append(backend.merge_shard_attention(torch.stack(parts), None, torch.bfloat16).cpu())
    assert error(*outputs) < TOLERANCE[torch.bfloat16]
