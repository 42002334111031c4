"""Key selection and sparse attention equal direct float64 sums, and have the same bits in every batch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.attention_params import AttentionParams
from quire.kernels.backend import AttentionMetadata, Backend
from quire.kernels.cpu.backend import CpuBackend
from quire.kernels.latent_params import KeySelectionParams
from quire.kernels.reference import ReferenceBackend
from tests.kernels.ragged import Part, attend, empty_cache, error, page, random_part

DTYPES = (torch.float32, torch.bfloat16)
TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 2e-2}
MIX = [(700, 3), (1, 1), (16, 16), (300, 45), (257, 1), (40, 40)]
"""Context lengths, and how many of their last tokens are queries."""


class Index:
    """Index queries [N, heads, D], keys [N, D] and weights [N, heads] of all tokens of a sequence."""

    def __init__(self, tokens: int, heads: int, dim: int, dtype: torch.dtype, generator: torch.Generator) -> None:
        draws = (torch.randn(shape, generator=generator) for shape in ((tokens, heads, dim), (tokens, dim)))
        self.q, self.k = (each.to(dtype) for each in draws)
        self.weights = torch.randn((tokens, heads), generator=generator).to(dtype)


def make_params(
    dim: int, rotated: int, top_k: int, generator: torch.Generator, *, is_interleaved: bool
) -> KeySelectionParams:
    angles = torch.rand((1000, rotated // 2), generator=generator) * 6
    weight, bias = torch.rand(dim, generator=generator) + 0.5, torch.randn(dim, generator=generator)
    return KeySelectionParams(weight, bias, 1e-6, torch.cat((angles.cos(), angles.sin()), 1), is_interleaved, top_k)


def select_keys(
    backend: Backend, parts: list[tuple[Index, int]], params: KeySelectionParams, seed: int = 0
) -> tuple[list[Tensor], Tensor, AttentionMetadata]:
    """`parts`: index tensors, and how many of their last tokens are queries. Earlier tokens' keys are stored in another
    step. Returns the selected positions of each part, the cache and the metadata.
    """
    dim, dtype = parts[0][0].k.shape[1], parts[0][0].k.dtype
    sizes = [Part(index.q[-count:], index.k[:, None], index.k[:, None]) for index, count in parts]
    _, _, metadata = page(backend, sizes, seed=seed)
    cache = empty_cache(backend.kv_cache_shape(int(metadata.block_table.max()) + 1, 1, dim, dtype), dtype)
    for s, (index, count) in enumerate(parts):
        if old := len(index.k) - count:
            earlier = _metadata_of_earlier_tokens(metadata, s, old, backend.block_size)
            backend.select_keys(
                index.q[:old].flatten(1).clone(), index.k[:old], index.weights[:old], params, cache, earlier
            )
    q = torch.cat([index.q[-count:].flatten(1) for index, count in parts])
    k, weights = (torch.cat([getattr(index, name)[-count:] for index, count in parts]) for name in ("k", "weights"))
    selected = backend.select_keys(q, k, weights, params, cache, metadata)
    return list(selected.split([count for _, count in parts])), cache, metadata


def _metadata_of_earlier_tokens(metadata: AttentionMetadata, s: int, tokens: int, size: int) -> AttentionMetadata:
    table, at = metadata.block_table[s : s + 1], torch.arange(tokens)
    whole, key_start = torch.tensor([tokens], dtype=torch.int32), torch.tensor([0, tokens], dtype=torch.int32)
    slots = table[0, at // size].long() * size + at % size
    return AttentionMetadata(key_start, whole, key_start, table, at, slots, tokens, tokens)


def exact_scores(index: Index, params: KeySelectionParams, count: int) -> Tensor:
    """[count, N] of the last tokens, in float64."""

    def rotate(x: Tensor) -> Tensor:
        turned, rest = x.split((params.cos_sin.shape[1], x.shape[-1] - params.cos_sin.shape[1]), -1)
        first, second = (turned[..., ::2], turned[..., 1::2]) if params.is_interleaved else turned.chunk(2, -1)
        cos, sin = params.cos_sin[: len(x)].double().view(len(x), *[1] * (x.ndim - 2), -1).chunk(2, -1)
        pairs = torch.complex(first, second) * torch.complex(cos, sin)
        return torch.cat((pairs.real, pairs.imag, rest), -1)

    k = F.layer_norm(
        index.k.double(), index.k.shape[1:], params.norm_weight.double(), params.norm_bias.double(), params.eps
    )
    products = torch.einsum("qhd,kd->qhk", rotate(index.q.double())[-count:], rotate(k)).relu()
    return torch.einsum("qhk,qh->qk", products, index.weights[-count:].double())


@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize(("heads", "dim", "rotated", "top_k"), [(64, 128, 64, 33), (5, 24, 16, 300), (17, 30, 30, 7)])
def test_selected_keys_have_highest_scores(
    cpu: CpuBackend, heads: int, dim: int, rotated: int, top_k: int, is_interleaved: bool, generator: torch.Generator
) -> None:
    params = make_params(dim, rotated, top_k, generator, is_interleaved=is_interleaved)
    all_parts = [(Index(context, heads, dim, torch.float32, generator), count) for context, count in MIX]
    for backend, parts in ((cpu, all_parts), (ReferenceBackend(), all_parts[1:3])):
        scores = [exact_scores(index, params, count) for index, count in parts]
        outputs, _, _ = select_keys(backend, parts, params)
        for (index, count), rows, exact in zip(parts, outputs, scores, strict=True):
            for row, row_scores, position in zip(rows, exact, range(len(index.k) - count, len(index.k)), strict=True):
                num_keys = min(position + 1, top_k)
                chosen = row[:num_keys].long()
                assert (row[num_keys:] == -1).all()
                assert (chosen.diff() > 0).all()
                assert 0 <= chosen[0] <= chosen[-1] <= position
                best_scores = row_scores[: position + 1].sort(descending=True).values[:num_keys]
                selected_scores = row_scores[chosen].sort(descending=True).values
                assert error(selected_scores, best_scores) < 1e-5, backend.name


@pytest.mark.parametrize("dtype", DTYPES)
def test_earliest_of_keys_with_equal_scores_are_selected(
    cpu: CpuBackend, dtype: torch.dtype, generator: torch.Generator
) -> None:
    params = make_params(16, 8, 40, generator, is_interleaved=False)
    index = Index(300, 3, 16, dtype, generator)
    index.weights[:] = 0
    for backend in (cpu, ReferenceBackend()):
        outputs, _, _ = select_keys(backend, [(index, 20)], params)
        assert torch.equal(outputs[0], torch.arange(40, dtype=torch.int32).expand(20, -1))


def test_nan_scores_give_lists_that_attention_accepts(cpu: CpuBackend, generator: torch.Generator) -> None:
    params = make_params(16, 8, 40, generator, is_interleaved=False)
    for name in ("k", "q", "weights"):
        index = Index(100, 3, 16, torch.float32, generator)
        getattr(index, name)[10:] = torch.nan
        for backend in (cpu, ReferenceBackend()):
            (rows,), _, _ = select_keys(backend, [(index, 1)], params)
            assert (rows[0].diff() > 0).all()
            assert 0 <= rows[0, 0] <= rows[0, -1] < 100


@pytest.mark.few(2)
@pytest.mark.usefixtures("keep_threads")
@pytest.mark.parametrize("heads", [1, 7, 64])
@pytest.mark.parametrize("dtype", DTYPES)
def test_selected_keys_do_not_depend_on_batch_chunks_or_threads(
    cpu: CpuBackend, dtype: torch.dtype, heads: int, generator: torch.Generator
) -> None:
    params = make_params(32, 16, 50, generator, is_interleaved=False)
    all_parts = [(Index(context, heads, 32, dtype, generator), count) for context, count in MIX]
    for backend, parts in ((cpu, all_parts), (ReferenceBackend(), all_parts[-1:] + all_parts[1:3])):
        alone = [select_keys(backend, [part], params)[0][0] for part in parts]
        for threads in (1, 2):
            torch.set_num_threads(threads)
            assert all(map(torch.equal, select_keys(backend, parts, params, seed=3)[0], alone))
            for (index, count), rows in zip(parts, alone, strict=True):
                assert torch.equal(select_keys(backend, [(index, 1)], params)[0][0], rows[count - 1 :])


def sparse(
    backend: Backend, parts: list[Part], selected: list[Tensor], values: int, seed: int = 0
) -> tuple[Tensor, ...]:
    cache, _, metadata = page(backend, parts, seed=seed)
    q = torch.cat([part.q for part in parts])
    params = AttentionParams(0.1, value_dim=values)
    out = backend.sparse_attention(q, cache, torch.cat(selected), metadata, params)
    return out.split([len(part.q) for part in parts])


def random_selection(part: Part, top_k: int, generator: torch.Generator) -> Tensor:
    """[queries, top_k]."""
    rows = []
    for position in range(len(part.k) - len(part.q), len(part.k)):
        chosen = torch.randperm(position + 1, generator=generator)[:top_k].sort().values
        rows.append(F.pad(chosen, (0, top_k - len(chosen)), value=-1))
    return torch.stack(rows).to(torch.int32)


@pytest.mark.parametrize(("sizes", "heads"), [((512, 64), 16), ((30, 6), 5), ((48, 2), 60)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_sparse_attention_sees_selected_keys_only(
    cpu: CpuBackend, dtype: torch.dtype, sizes: tuple[int, int], heads: int, generator: torch.Generator
) -> None:
    parts = [random_part(context, count, heads, 1, sum(sizes), dtype, generator) for context, count in MIX]
    selected = [random_selection(part, 270, generator) for part in parts]
    for backend in (cpu, ReferenceBackend()):
        for part, rows, out in zip(parts, selected, sparse(backend, parts, selected, sizes[0]), strict=True):
            q, keys = part.q.double(), part.k.double()[:, 0]
            mask = torch.ones(len(q), len(keys) + 1, dtype=torch.bool)
            mask.scatter_(1, rows.long() % (len(keys) + 1), False)
            scores = (torch.einsum("qhd,kd->qhk", q, keys) * 0.1).masked_fill(mask[:, None, :-1], -torch.inf)
            expected = torch.einsum("qhk,kd->qhd", scores.softmax(-1), keys[:, : sizes[0]])
            assert error(out, expected) < TOLERANCE[dtype], backend.name


@pytest.mark.parametrize("dtype", DTYPES)
def test_sparse_attention_of_all_keys_has_bits_of_dense_attention(
    cpu: CpuBackend, dtype: torch.dtype, generator: torch.Generator
) -> None:
    parts = [random_part(context, count, 6, 1, 40, dtype, generator) for context, count in MIX]
    selected = [random_selection(part, 700, generator) for part in parts]
    for backend in (cpu, ReferenceBackend()):
        dense = attend(backend, parts, scale=0.1, values=32)
        assert all(map(torch.equal, sparse(backend, parts, selected, 32), dense)), backend.name


@pytest.mark.few(2)
@pytest.mark.usefixtures("keep_threads")
@pytest.mark.parametrize("heads", [1, 16, 70])
@pytest.mark.parametrize("dtype", DTYPES)
def test_sparse_attention_bits_do_not_depend_on_batch_chunks_or_threads(
    cpu: CpuBackend, dtype: torch.dtype, heads: int, generator: torch.Generator
) -> None:
    parts = [random_part(context, count, heads, 1, 80, dtype, generator) for context, count in MIX]
    selected = [random_selection(part, 100, generator) for part in parts]
    alone = [sparse(cpu, [part], [rows], 64)[0] for part, rows in zip(parts, selected, strict=True)]
    for threads in (1, 2):
        torch.set_num_threads(threads)
        assert all(map(torch.equal, sparse(cpu, parts, selected, 64, seed=3), alone))
        for part, rows, whole in zip(parts, selected, alone, strict=True):
            middle = len(part.q) // 2
            for begin, end in ((0, middle), (middle, len(part.q))):
                if begin < end:
                    chunk = sparse(cpu, [part.rows(begin, end)], [rows[begin:end]], 64)[0]
                    assert torch.equal(chunk, whole[begin:end])


@pytest.mark.parametrize("invalid", [[0, 1, 50], [0, 2, 1], [-1, 0, 1], [3, 3, 4]])
def test_sparse_attention_rejects_keys_that_a_query_does_not_see(
    cpu: CpuBackend, invalid: list[int], generator: torch.Generator
) -> None:
    part = random_part(50, 1, 2, 1, 16, torch.float32, generator)
    with pytest.raises(IndexError, match="keys that a query does not see"):
        sparse(cpu, [part], [torch.tensor([invalid], dtype=torch.int32)], 8)


def test_select_keys_rejects_slots_outside_cache(cpu: CpuBackend, generator: torch.Generator) -> None:
    params, index = make_params(16, 8, 4, generator, is_interleaved=False), Index(30, 3, 16, torch.float32, generator)
    _, cache, metadata = select_keys(cpu, [(index, 30)], params)
    arguments = (index.q.flatten(1), index.k, index.weights, params, cache)
    slots, table = metadata.slot_mapping + 10_000, metadata.block_table + 99
    for invalid in (replace(metadata, slot_mapping=slots), replace(metadata, block_table=table)):
        with pytest.raises(IndexError, match="outside the"):
            cpu.select_keys(*arguments, invalid)
