"""Attention of a mixed batch in two calls. Decodes and prefills suit different kernels. A single grid, sized for the
longest prompt, would be mostly empty.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from quire.kernels.attention_params import AttentionParams
from quire.kernels.backend import NO_ADAPTERS, AttentionMetadata, LinearContext
from quire.kernels.gpu.images.bidirectional_attention import attend_bidirectional, can_attend_bidirectional
from quire.kernels.gpu.torch_backend import TorchBackend
from quire.kernels.recurrent.recurrence import RecurrenceMetadata, StateAndVerifiedCounts


@dataclass(frozen=True, slots=True)
class PrefillDecodeSplit:
    """query_start and key_start are those of the prompts, counted from 0."""

    num_decodes: int
    """Number of leading sequences with one query: at least one, but not all sequences."""
    query_start: np.ndarray  # [prompts + 1] int32
    key_start: np.ndarray  # [prompts + 1] int32
    max_context_lens: tuple[int, int]
    is_full_prefill: bool

    @classmethod
    def from_lengths(cls, counts: np.ndarray, contexts: np.ndarray, key_start: np.ndarray) -> PrefillDecodeSplit | None:
        """counts and contexts [S] int64 are the queries and keys per sequence; key_start is [S + 1]."""
        ones = counts == 1
        decodes = len(counts) if ones.all() else int(ones.argmin())
        if not 0 < decodes < len(counts):
            return None
        query_start = np.zeros(len(counts) - decodes + 1, dtype=np.int32)
        query_start[1:] = counts[decodes:].cumsum()
        longest = int(contexts[:decodes].max()), int(contexts[decodes:].max())
        whole = bool((counts[decodes:] == contexts[decodes:]).all())
        return cls(decodes, query_start, key_start[decodes:] - key_start[decodes], longest, whole)

    def metadata_with_parts(
        self, metadata: AttentionMetadata, query_start: Tensor, key_start: Tensor, block_size: int
    ) -> AttentionMetadata:
        """The parts hold only what attention needs. query_start, key_start: this split's arrays on the device."""
        first, behind = slice(self.num_decodes), slice(self.num_decodes, None)
        pages = [-(-longest // block_size) for longest in self.max_context_lens]
        decodes = AttentionMetadata(
            query_start=metadata.query_start[: self.num_decodes + 1],
            context_lens=metadata.context_lens[first],
            key_start=metadata.key_start[: self.num_decodes + 1],
            block_table=metadata.block_table[first, : pages[0]],
            positions=metadata.positions[first],
            slot_mapping=metadata.slot_mapping[first],
            max_query_len=1,
            max_context_len=self.max_context_lens[0],
        )
        prompts = AttentionMetadata(
            query_start=query_start,
            context_lens=metadata.context_lens[behind],
            key_start=key_start,
            block_table=metadata.block_table[behind, : pages[1]],
            positions=metadata.positions[behind],
            slot_mapping=metadata.slot_mapping[behind],
            max_query_len=metadata.max_query_len,
            max_context_len=self.max_context_lens[1],
            is_full_prefill=self.is_full_prefill,
        )
        others = tuple(
            self.metadata_with_parts(each, query_start, key_start, block_size) for each in metadata.other_groups
        )
        return replace(metadata, decode_prefill_parts=(decodes, prompts), other_groups=others)


class PagedAttentionBackend(TorchBackend):
    """Pages are [token, KV head, head_dim]. Subclasses compute only attention without a lookahead."""

    def paged_attention(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata, softmax: AttentionParams
    ) -> Tensor:
        if softmax.lookahead == 0:
            return attend_by_parts(
                lambda rows, part: self.attend_batch_part(rows, k_cache, v_cache, part, softmax), q, metadata
            )
        if self.deterministic or not can_attend_bidirectional(k_cache, softmax):
            return super().paged_attention(q, k_cache, v_cache, metadata, softmax)
        return attend_bidirectional(q, k_cache, v_cache, metadata, softmax)

    @abstractmethod
    def attend_batch_part(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata, softmax: AttentionParams
    ) -> Tensor:
        """Like `paged_attention`, for metadata without decode_prefill_parts."""


def join_metadata(
    decodes: AttentionMetadata, prompts: AttentionMetadata, linear: LinearContext = NO_ADAPTERS
) -> AttentionMetadata:
    """`linear` is for all tokens. CUDA graphs can record this call."""
    first = len(decodes.context_lens)
    keys = decodes.key_start
    turns = None
    if decodes.rope_position_override is not None and prompts.rope_position_override is not None:
        turns = torch.cat((decodes.rope_position_override, prompts.rope_position_override))
    slots = None
    if decodes.state_slots is not None and prompts.state_slots is not None:
        slots = torch.cat((decodes.state_slots, prompts.state_slots))
    return AttentionMetadata(
        query_start=torch.cat((decodes.query_start, prompts.query_start[1:] + first)),
        context_lens=torch.cat((decodes.context_lens, prompts.context_lens)),
        key_start=torch.cat((keys, prompts.key_start[1:] + keys[-1:])),
        block_table=torch.cat((decodes.block_table, prompts.block_table)),
        positions=torch.cat((decodes.positions, prompts.positions)),
        slot_mapping=torch.cat((decodes.slot_mapping, prompts.slot_mapping)),
        max_query_len=prompts.max_query_len,
        max_context_len=max(decodes.max_context_len, prompts.max_context_len),
        linear_context=linear,
        other_groups=tuple(
            join_metadata(*pair, linear) for pair in zip(decodes.other_groups, prompts.other_groups, strict=True)
        ),
        state_slots=slots,
        rope_position_override=turns,
        recurrence_metadata=_join_recurrence_metadata(decodes.recurrence_metadata, prompts.recurrence_metadata),
        decode_prefill_parts=(decodes, prompts),
    )


def _join_recurrence_metadata(
    decodes: RecurrenceMetadata | None, prompts: RecurrenceMetadata | None
) -> RecurrenceMetadata | None:
    if (
        decodes is None
        or prompts is None
        or decodes.state_and_verified_counts is None
        or prompts.state_and_verified_counts is None
    ):
        return None
    lens = [
        torch.cat(pair)
        for pair in (
            (decodes.context_lens, prompts.context_lens),
            (decodes.state_and_verified_counts.num_state_tokens, prompts.state_and_verified_counts.num_state_tokens),
            (
                decodes.state_and_verified_counts.num_verified_tokens,
                prompts.state_and_verified_counts.num_verified_tokens,
            ),
        )
    ]
    starts = torch.cat((decodes.query_start, prompts.query_start[1:] + len(decodes.context_lens)))
    return RecurrenceMetadata(starts, lens[0], StateAndVerifiedCounts(*lens[1:]))


def attend_by_parts(
    attend: Callable[[Tensor, AttentionMetadata], Tensor], q: Tensor, metadata: AttentionMetadata
) -> Tensor:
    """q is [T, H, D]."""
    if not metadata.decode_prefill_parts:
        return attend(q, metadata)
    rows = q.split([len(part.positions) for part in metadata.decode_prefill_parts])
    return torch.cat([attend(each, part) for each, part in zip(rows, metadata.decode_prefill_parts, strict=True)])
