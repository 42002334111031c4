"""Launches for compile_for_gpu.py of what stands in attention's place: latents; rules with matrices, and their
convolutions."""

from __future__ import annotations

from itertools import product

import torch
from torch import Tensor

from quire.kernels.attention.context_shard import ContextShard
from quire.kernels.attention_params import AttentionParams
from quire.kernels.backend import NO_ADAPTERS, AttentionMetadata
from quire.kernels.gpu import triton_short_conv
from quire.kernels.gpu.mla.expanded_attention import run_expanded_attention
from quire.kernels.gpu.recurrent.triton_recurrence import run_recurrence
from quire.kernels.gpu.triton_backend import TritonBackend
from quire.kernels.kv_quantization import QUANTIZED_KV_DTYPES, num_scale_elements
from quire.kernels.latent_params import LatentNormRopeParams
from quire.kernels.recurrent.delta_rule import DeltaRule
from quire.kernels.recurrent.recurrence import RecurrentStates, StateAndVerifiedCounts
from quire.kernels.recurrent.selective_scan import SelectiveScan
from quire.kernels.recurrent.short_conv import ConvStates, ShortConv
from quire.kernels.recurrent.state_space import StateSpace

QWEN = DeltaRule(torch.ones(32), torch.ones(32), torch.ones(128), 1e-6, 16, 128)
KIMI = DeltaRule(torch.ones(32), torch.ones(32 * 128), torch.ones(128), 1e-5, 32, 128, has_sigmoid_gate=True)
GRANITE = StateSpace(*torch.ones((3, 48)), torch.ones(48 * 64), 1e-6, 1, 128, 64)
NEMOTRON = StateSpace(*torch.ones((3, 64)), torch.ones(64 * 64), 1e-6, 8, 128, 64, norm_before_gate=True)
SMALL = DeltaRule(torch.ones(32), torch.ones(32), torch.ones(64), 1e-6, 16, 64)
FALCON_H1 = StateSpace(*torch.ones((3, 24)), None, 1e-6, 1, 256, 64)
JAMBA = SelectiveScan(torch.ones((128, 16, 64)), *torch.ones((2, 8192)), *torch.ones((2, 16)), 1e-6)
FALCON_MAMBA = SelectiveScan(torch.ones((128, 16, 64)), *torch.ones((2, 8192)), None, None, 1e-6)
RULES = {QWEN: 128, SMALL: 64, KIMI: 128, GRANITE: 64, NEMOTRON: 64, FALCON_H1: 64, JAMBA: 64, FALCON_MAMBA: 64}
"""And the numbers of a head's value."""


def step(rows: int, *, guesses: bool = False, longest: int = 1) -> AttentionMetadata:
    lens, where = torch.ones(rows + 1, dtype=torch.int32), torch.zeros(rows, dtype=torch.int64)
    numbers = (lens, lens[1:], lens, torch.zeros((rows, rows), dtype=torch.int32), where, where, longest, longest)
    known = StateAndVerifiedCounts(lens[1:], lens[1:]) if guesses else None
    return AttentionMetadata(*numbers, state_slots=where, state_and_verified_counts=known)


def recurrences(rows: int = 3) -> None:
    """Without guesses and with some, token by token and by pieces, at any alignment of what sequences have."""
    for rule, value in RULES.items():
        heads = rule.num_heads
        given, z, beside = (
            torch.empty((rows, size), dtype=torch.bfloat16)
            for size in (rule.input_dim, heads * value, rule.head_inputs_dim)
        )
        for most in (0, 8):
            states = RecurrentStates(
                torch.empty((2, heads, rule.key_dim, value)), torch.empty((2, most, rule.draft_inputs_dim)).bfloat16()
            )
            for guesses in (False, True):
                for longest in (1, 100):
                    now = step(rows, guesses=guesses, longest=longest)
                    run_recurrence(given, z, beside, rule, states, now, fixed=False, passed_chunk_trial=True)
    wide(rows)


def wide(rows: int) -> None:
    """Convolutions without gates, of Qwen3.5's channels."""
    x: Tensor = torch.empty((rows, 8192), dtype=torch.bfloat16)
    conv = ShortConv(torch.empty((4, 8192)), None, is_gated=False)
    columns = ConvStates(None, 1, torch.empty((3, 11, 8192)).bfloat16())
    triton_short_conv.short_conv(x, conv, columns, step(rows))


def latents(rows: int = 3) -> None:
    """DeepSeek-V2-Lite's heads, and those of V3: decodes, chunks, prompts; of so many sequences."""
    for heads in (16, 128):
        for fixed in (False, True):
            for contexts, queries in (([2000], 1), ([600] * (40 + rows), 1), ([600], 3), ([600] * 2, 300)):
                latent(heads, contexts, queries, torch.bfloat16, fixed=fixed)
    for held in QUANTIZED_KV_DTYPES:
        for contexts, queries in (([2000], 1), ([600] * 2, 300)):
            latent(16, contexts, queries, torch.bfloat16, held=held)
    for heads, fixed in product((16, 128), (False, True)):
        latent(heads, [600] * 140, 1, torch.bfloat16, fixed=fixed)  # so many that they are not split
    latent(16, [2000], 1, torch.float32)
    latent(16, [2000], 1, torch.bfloat16, page=256)
    expanded()
    expanded(20, 192, 256)
    expanded(dtype=torch.float32)


def latent(
    heads: int,
    contexts: list[int],
    queries: int,
    dtype: torch.dtype,
    *,
    fixed: bool = False,
    held: torch.dtype | None = None,
    page: int = 16,
    own: ContextShard | None = None,
) -> None:
    backend, seqs = TritonBackend(deterministic=fixed), len(contexts)
    tokens, held = seqs * queries, held or dtype
    metadata = AttentionMetadata(
        query_start=torch.arange(seqs + 1, dtype=torch.int32) * queries,
        context_lens=torch.tensor(contexts, dtype=torch.int32),
        key_start=torch.zeros(seqs + 1, dtype=torch.int32),
        block_table=torch.zeros((seqs, -(-max(contexts) // page)), dtype=torch.int32),
        positions=torch.zeros(tokens, dtype=torch.int64),
        slot_mapping=torch.zeros(tokens, dtype=torch.int64),
        max_query_len=queries,
        max_context_len=max(contexts),
    )
    cache = torch.empty((4, page, 1, 576 + num_scale_elements(held)), dtype=held)
    of_token = LatentNormRopeParams(torch.ones(512), 1e-6, torch.ones((9, 64)), is_interleaved=True)
    absorb = backend.pack_per_head_linear([torch.empty((512, 128), dtype=dtype)] * heads, 64)
    expand = backend.pack_per_head_linear([torch.empty((128, 512), dtype=dtype)] * heads, 0)
    q = absorb(torch.empty((tokens, heads * 192), dtype=dtype), NO_ADAPTERS)
    q = backend.rope_and_store_latent_kv(q, torch.empty((tokens, 576), dtype=dtype), of_token, cache, metadata)
    rule = AttentionParams(0.1, value_dim=512)
    if own is not None:
        backend.attend_context_shard(q, (cache, cache), metadata, rule, own)
        return
    expand(backend.paged_attention(q, cache, cache, metadata, rule).flatten(1), NO_ADAPTERS)


def expanded(heads: int = 16, plain: int = 128, values: int = 128, dtype: torch.dtype = torch.bfloat16) -> None:
    """DeepSeek-V2-Lite's, and by other sizes GLM-4.7-Flash's."""
    where = torch.arange(600)
    lens = torch.tensor([600], dtype=torch.int32)
    starts = torch.tensor([0, 600], dtype=torch.int32)
    step = AttentionMetadata(starts, lens, starts, lens[None], where, where, 600, 600, is_full_prefill=True)
    q, cache = torch.empty((600, heads, plain + 64), dtype=dtype), torch.empty((40, 16, 1, 576), dtype=dtype)
    halves = torch.empty((heads, 512, plain), dtype=dtype), torch.empty((heads, values, 512), dtype=dtype)
    run_expanded_attention(q, halves, cache, step, AttentionParams(0.1, value_dim=512))
