"""Decode context parallelism in plain PyTorch, rank after rank: against the float64 reference, and the same bits for a
row in every batch.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from quire.kernels.attention.context_shard import ContextShard
from quire.kernels.probes.serial_context_parallel import SerialContextParallel
from quire.kernels.reference import ReferenceBackend
from tests.kernels.ragged import attend, error, random_part

reference = ReferenceBackend()
MIX = [(1, 1), (5, 5), (47, 1), (33, 33), (300, 20)]


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_context_shards_partition_tokens_and_slots(ranks: int) -> None:
    page, pages = 4 * ranks, torch.tensor([7, 2, 5])
    at, stored = torch.arange(3 * page), set()
    for rank in range(ranks):
        shard = ContextShard(rank, ranks, 4, remote_slot=99)
        positions = [position for position in at.tolist() if position // 4 % ranks == rank]
        assert shard.global_positions(torch.arange(len(positions))).tolist() == positions
        assert [shard.num_local_tokens_before(end) for end in range(3 * page + 1)] == [
            sum(each < end for each in positions) for end in range(3 * page + 1)
        ]
        assert all(shard.num_local_tokens_before(end) <= shard.max_tokens_per_rank(end) for end in range(3 * page))
        slots = shard.slot_mapping(pages[at // page], at)
        assert (slots[[each not in positions for each in at.tolist()]] == 99).all()
        local_slots = slots[positions].tolist()
        assert local_slots == [int(pages[each // page]) * 4 + each % 4 for each in positions]
        assert [each % page in shard.token_range_in_page for each in at.tolist()] == [
            each in positions for each in at.tolist()
        ]
        stored |= {(rank, each) for each in local_slots}
    assert len(stored) == 3 * page


@pytest.mark.parametrize("ranks", [2, 5])
@pytest.mark.parametrize(
    "rules",
    [{}, {"window": 1}, {"window": 40}, {"softcap": 3.0}, {"sinks": torch.tensor([-3.0, 0.5, 9.0, 0.0])}],
    ids=str,
)
def test_context_parallel_attention_matches_single_process(
    ranks: int, rules: dict[str, Any], generator: torch.Generator
) -> None:
    parts = [random_part(c, q, 4, 2, 16, torch.float64, generator) for c, q in MIX]
    expected = attend(reference, parts, **rules)
    for out, expected_output in zip(
        attend(SerialContextParallel(reference, ranks), parts, **rules), expected, strict=True
    ):
        assert error(out, expected_output) < 1e-13


def test_context_parallel_bias_uses_global_distances(generator: torch.Generator) -> None:
    """ALiBi must use distances in the sequence, not among a rank's keys."""
    bias = torch.randn((4, 2 * 300 + 15), generator=generator)
    parts = [random_part(c, q, 4, 2, 16, torch.float64, generator) for c, q in MIX]
    expected = attend(reference, parts, bias=bias)
    for out, expected_output in zip(
        attend(SerialContextParallel(reference, 2), parts, bias=bias), expected, strict=True
    ):
        assert error(out, expected_output) < 1e-13


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_context_parallel_attention_bits_do_not_depend_on_batch(dtype: torch.dtype, generator: torch.Generator) -> None:
    backend = SerialContextParallel(reference, 2)
    part, other = (random_part(300, count, 4, 2, 16, dtype, generator) for count in (40, 3))
    (whole,) = attend(backend, [part])
    for begin, end in ((0, 1), (5, 31), (39, 40)):
        chunk = attend(backend, [other, part.rows(begin, end), other], seed=end)[1]
        assert torch.equal(chunk, whole[begin:end])
