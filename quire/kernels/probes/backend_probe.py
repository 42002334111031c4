"""Tries a backend on the device before it is chosen. Only a run shows whether it was built for another GPU, PyTorch or
driver.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from itertools import accumulate

import torch
from torch import Tensor

from quire.kernels.attention_params import AttentionParams
from quire.kernels.backend import AttentionMetadata, Backend
from quire.kernels.device.error_messages import describe_kernel_error
from quire.kernels.kv_quantization import QUANTIZED_KV_DTYPES, num_scale_elements
from quire.kernels.qk_norm_rope import QKNormRopeParams
from quire.kernels.reference import ReferenceBackend

GraphCapture = Callable[[Callable[[], Tensor]], tuple[Callable[[], None], Tensor]]
"""Returns a function that replays the graph, and the tensor with its result."""

_WINDOW = 7
_SHORT_PROMPT, _SHORT_PROMPT_ROWS = 20, 128
"""Tokens of the short prompt, and the maximum of its query rows (tokens times query heads) per KV head. Such rows fit
one tile, for which flash-attn 4 has another kernel.
"""
_NUM_PAGES = 5
_QUERY_SCALE = 4.0
"""Factor of queries, which gives few keys most of the weight. A scale that is a few percent off then changes means by
more than rounding does.
"""
_ABSOLUTE_TOLERANCE, _RELATIVE_TOLERANCE = 0.03, 0.02
"""Tolerances for means of normally distributed values. They are above the rounding of 16-bit types and 8-bit pages, and
below the error of a wrong scale, a missing key or another sequence's page.
"""


def find_first_failure(trials: Iterable[Callable[[Backend], str | None]], backend: Backend) -> str | None:
    return next((reason for each in trials if (reason := each(backend)) is not None), None)


@dataclass(frozen=True, slots=True)
class BackendProbe(ABC):
    device: torch.device
    dtype: torch.dtype
    capture: GraphCapture | None = field(default=None, kw_only=True)
    kv_dtype: torch.dtype | None = field(default=None, kw_only=True)
    """None: the model's dtype."""

    @torch.inference_mode()
    def __call__(self, backend: Backend) -> str | None:
        """Return why the backend cannot compute here, in one sentence."""
        try:
            return self.find_mismatch(backend)
        except Exception as error:  # libraries raise exceptions of any class
            return describe_kernel_error(error)

    @abstractmethod
    def find_mismatch(self, backend: Backend) -> str | None:
        """Any exception counts as a mismatch."""


@dataclass(frozen=True, slots=True)
class PagedAttentionProbe(BackendProbe):
    heads: int
    kv_heads: int
    head_dim: int
    softcap: float | None = None
    has_windows: bool = False
    """A library may be built without windows."""
    has_sinks: bool = False
    only_prefill_graph: bool = False
    """Try only a graph with a prefill chunk of known maximum length."""
    has_chunked_windows: bool = False

    def find_mismatch(self, backend: Backend) -> str | None:
        windows = (None, _WINDOW) if self.has_windows else (None,)
        sinks = torch.linspace(-2.0, 2.0, self.heads, device=self.device) if self.has_sinks else None
        scale, capped = self.head_dim**-0.5, self.softcap
        rules = [
            AttentionParams(scale, window, capped, sinks=sinks, has_chunked_window=self.has_chunked_windows)
            for window in windows
        ]
        return next(
            (reason for each in rules if (reason := self._find_mismatch_with_params(backend, each)) is not None), None
        )

    def _find_mismatch_with_params(self, backend: Backend, softmax: AttentionParams) -> str | None:
        lengths = (2 * backend.block_size + 5, 3)
        k_cache, v_cache = self._allocate_kv(backend)
        prompts = last_tokens_metadata(self.device, lengths, lengths, backend.block_size)
        qkv = self._random_qkv(sum(lengths), (self.heads + 2 * self.kv_heads) * self.head_dim)
        expected = self._reference_output(qkv, lengths, softmax)
        wide = qkv[:, : 2 * self.head_dim].contiguous()
        backend.silu_mul(backend.rms_norm(wide, torch.ones(wide.shape[1], device=self.device), 1e-6))
        q = backend.rope_and_store_kv(qkv.clone(), QKNormRopeParams(self.head_dim, None), k_cache, v_cache, prompts)
        if self.only_prefill_graph and self.capture is not None:
            return self._check_prefill_graph(self.capture, backend, (q, k_cache, v_cache), softmax, expected)
        for whole in (True, False):
            got = backend.paged_attention(q, k_cache, v_cache, replace(prompts, is_full_prefill=whole), softmax)
            if not is_close(got, expected):
                return "differs from the reference for a prompt"
        if (reason := self._find_short_prompt_mismatch(backend, softmax)) is not None:
            return reason
        rows, part = make_mixed_step(self.device, lengths, backend.block_size)
        got = backend.paged_attention(q[rows.to(self.device)].clone(), k_cache, v_cache, part, softmax)
        if not is_close(got, expected[rows]):
            return "differs from the reference for a decode batched with a chunk of a prompt"
        last = torch.tensor(lengths, device=self.device).cumsum(0) - 1
        ones = last_tokens_metadata(self.device, (1, 1), lengths, backend.block_size)
        q, expected = q[last].clone(), expected[last.cpu()]

        def attend_decodes() -> Tensor:
            return backend.paged_attention(q, k_cache, v_cache, ones, softmax)

        if not is_close(attend_decodes(), expected):
            return "differs from the reference for a decode"
        return None if self.capture is None else check_graph_replay(self.capture, attend_decodes, expected)

    def _find_short_prompt_mismatch(self, backend: Backend, softmax: AttentionParams) -> str | None:
        lengths = (max(1, min(_SHORT_PROMPT, _SHORT_PROMPT_ROWS * self.kv_heads // self.heads)), 3)
        k_cache, v_cache = self._allocate_kv(backend)
        prompts = last_tokens_metadata(self.device, lengths, lengths, backend.block_size)
        qkv = self._random_qkv(sum(lengths), (self.heads + 2 * self.kv_heads) * self.head_dim)
        expected = self._reference_output(qkv, lengths, softmax)
        q = backend.rope_and_store_kv(qkv.clone(), QKNormRopeParams(self.head_dim, None), k_cache, v_cache, prompts)
        for whole in (True, False):
            got = backend.paged_attention(q, k_cache, v_cache, replace(prompts, is_full_prefill=whole), softmax)
            if not is_close(got, expected):
                return f"differs from the reference for a prompt of {lengths[0]} tokens"
        return None

    def _check_prefill_graph(
        self,
        capture: GraphCapture,
        backend: Backend,
        stored: tuple[Tensor, ...],
        softmax: AttentionParams,
        expected: Tensor,
    ) -> str | None:
        """Capture with other metadata than is replayed, to reveal what a library reads from it on the host."""
        q, k_cache, v_cache = stored
        lengths = (2 * backend.block_size + 5, 3)
        rows, wanted = make_mixed_step(self.device, lengths, backend.block_size)
        _, captured = make_mixed_step(self.device, lengths, backend.block_size, swapped=True)
        most = captured.block_table.shape[1] * backend.block_size
        captured = replace(captured, max_query_len=2 * wanted.max_query_len, max_context_len=most)
        queries = torch.zeros_like(q[: len(rows)])

        def attend_captured() -> Tensor:
            return backend.paged_attention(queries, k_cache, v_cache, captured, softmax)

        def fill_metadata() -> None:
            queries.copy_(q[rows.to(self.device)])
            for name in ("query_start", "context_lens", "key_start", "block_table", "positions", "slot_mapping"):
                getattr(captured, name).copy_(getattr(wanted, name))

        return check_graph_replay(
            capture, attend_captured, expected[rows], before=fill_metadata, what="parts of prompts"
        )

    def _allocate_kv(self, backend: Backend) -> Tensor:
        dtype = self.dtype if self.kv_dtype is None else self.kv_dtype
        shape = backend.kv_cache_shape(_NUM_PAGES, self.kv_heads, self.head_dim, dtype)
        return torch.zeros((2, *shape), dtype=dtype, device=self.device)

    def _random_qkv(self, tokens: int, width: int) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        numbers = torch.randn((tokens, width), generator=generator)
        numbers[:, : self.heads * self.head_dim] *= _QUERY_SCALE
        return numbers.to(self.device, self.dtype)

    def _reference_output(self, qkv: Tensor, lengths: tuple[int, ...], softmax: AttentionParams) -> Tensor:
        """Return the reference's result [T, H, D] float32 on the CPU."""
        judge = ReferenceBackend()
        if softmax.sinks is not None:
            softmax = replace(softmax, sinks=softmax.sinks.cpu())
        blocks = -(-max(lengths) // 3)  # three pages for the longest sequence
        held = torch.float32 if self.kv_dtype not in QUANTIZED_KV_DTYPES else self.kv_dtype
        head = self.head_dim + num_scale_elements(held)
        k_cache, v_cache = torch.zeros((2, _NUM_PAGES, blocks, self.kv_heads, head), dtype=held)
        metadata = last_tokens_metadata(torch.device("cpu"), lengths, lengths, blocks)
        q = judge.rope_and_store_kv(
            qkv.cpu().float(), QKNormRopeParams(self.head_dim, None), k_cache, v_cache, metadata
        )
        return judge.paged_attention(q, k_cache, v_cache, metadata, softmax)


def check_graph_replay(
    capture: GraphCapture,
    step: Callable[[], Tensor],
    expected: Tensor,
    *,
    before: Callable[[], None] = lambda: None,
    what: str = "decodes",
) -> str | None:
    try:
        replay, result = capture(step)
        before()
        replay()
        right = is_close(result, expected)
    except Exception as error:
        return f"a CUDA graph cannot hold its {what}; --enforce-eager does without ({describe_kernel_error(error)})"
    return None if right else "differs from the reference in a CUDA graph; --enforce-eager does without"


def is_close(got: Tensor, expected: Tensor) -> bool:
    """NaN is never close."""
    return bool(
        ((got.cpu().float() - expected).abs() < _ABSOLUTE_TOLERANCE + _RELATIVE_TOLERANCE * expected.abs()).all()
    )


def make_mixed_step(
    device: torch.device, lengths: tuple[int, ...], block_size: int, *, swapped: bool = False
) -> tuple[Tensor, AttentionMetadata]:
    """Return indices and metadata of a step with the last chunk of the first prompt and one token of the second. If
    `swapped`, the step has one token of the first prompt and a chunk of the second, and as many tokens in total.
    """
    counts = (block_size + 2, 1)
    if swapped:
        counts, lengths = (1, block_size + 2), (1, block_size + 2)
    rows = [torch.arange(end - count, end) for count, end in zip(counts, accumulate(lengths), strict=True)]
    return torch.cat(rows), last_tokens_metadata(device, counts, lengths, block_size)


def last_tokens_metadata(
    device: torch.device, counts: tuple[int, ...], lengths: tuple[int, ...], block_size: int
) -> AttentionMetadata:
    """The step has the last counts[i] of the lengths[i] tokens of sequence i."""
    pages = ((3, 1, 4), (2, 2, 2))
    positions = [list(range(end - count, end)) for count, end in zip(counts, lengths, strict=True)]
    slots = [
        table[at // block_size] * block_size + at % block_size
        for table, each in zip(pages, positions, strict=True)
        for at in each
    ]

    def to_device(values: list[int], dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    return AttentionMetadata(
        query_start=to_device([0, counts[0], sum(counts)]),
        context_lens=to_device(list(lengths)),
        key_start=to_device([0, lengths[0], sum(lengths)]),
        block_table=torch.tensor(pages, dtype=torch.int32, device=device),
        positions=to_device([at for each in positions for at in each], torch.int64),
        slot_mapping=to_device(slots, torch.int64),
        max_query_len=max(counts),
        max_context_len=max(lengths),
    )
