"""Attention over pages by the compiled kernels, in one process and over ranks that divide the tokens."""

from __future__ import annotations

import ctypes

from torch import Tensor, get_num_threads

from quire.kernels.backend import AttentionMetadata
from quire.kernels.collective import RankEnded
from quire.kernels.cpu import native
from quire.kernels.cpu.ranks.collective import SharedCollective
from quire.kernels.softmax import Softmax

_ALL = 2**31 - 1


def attended(
    library: native.Native, q: Tensor, caches: tuple[Tensor, Tensor], metadata: AttentionMetadata, softmax: Softmax
) -> Tensor:
    """Operations.paged_attention."""
    q, pages = q.contiguous(), len(caches[0])
    out, heads = q.new_empty((*q.shape[:2], softmax.values or q.shape[2])), q.shape[1]
    where = _where(q, out, caches, metadata, softmax)
    sizes = (pages, len(metadata.block_table), heads, caches[0].shape[1], q.shape[2])
    ahead = _ALL if softmax.ahead is None else softmax.ahead
    rules = (*_rules(softmax), ahead, *native.bias_arguments(softmax.bias))
    if library.paged_attention[q.dtype](*where, *sizes, *rules, *_beside(softmax, heads)):
        raise _outside(pages)
    return out


def attended_over_ranks(
    library: native.Native,
    q: Tensor,
    caches: tuple[Tensor, Tensor],
    metadata: AttentionMetadata,
    softmax: Softmax,
    group: SharedCollective,
) -> Tensor:
    """Operations.divided_attention."""
    q, pages = q.contiguous(), len(caches[0])
    out, heads = q.new_empty((*q.shape[:2], softmax.values or q.shape[2])), q.shape[1]
    caches = native.in_pieces(caches[0]), native.in_pieces(caches[1])
    where = _where(q, out, caches, metadata, softmax)
    sizes = (pages, len(metadata.block_table), heads * group.count, caches[0].shape[1], q.shape[2])
    rules = (*_rules(softmax), *native.bias_arguments(softmax.bias))
    failed = library.ranks_attention[q.dtype](group.pointer, *where, *sizes, *rules, *_beside(softmax, heads))
    if failed == 1:
        raise RankEnded
    if failed:
        raise _outside(pages)
    return out


def _where(
    q: Tensor, out: Tensor, caches: tuple[Tensor, Tensor], metadata: AttentionMetadata, softmax: Softmax
) -> tuple[int | None, ...]:
    held, table = native.kv_format(caches[0], softmax.kv_scales), metadata.block_table
    pointers = [each.data_ptr() for each in (out, q, *caches)]
    lengths = [each.data_ptr() for each in (metadata.query_start, metadata.context_lens, table)]
    address = None if held is None else ctypes.addressof(held)
    return (*pointers, address, *lengths, table.shape[1], caches[0].stride(0), caches[1].stride(0))


def _rules(softmax: Softmax) -> tuple[float, int, float]:
    return softmax.scale, softmax.window or 0, softmax.softcap or 0.0


def _beside(softmax: Softmax, heads: int) -> tuple[int | None, int, int]:
    return native.sinks_address(softmax.sinks, heads), softmax.values or 0, get_num_threads()


def _outside(pages: int) -> IndexError:
    return IndexError(f"block table names a page outside the {pages} pages of the cache")
