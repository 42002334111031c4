from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quire.kernels.attention_params import AttentionParams
from quire.kernels.backend import NO_ADAPTERS, Backend, Linear
from quire.kernels.latent_params import LatentNormRopeParams
from quire.kernels.mla.per_head_linear import as_worthwhile_expandable_or_none
from quire.kernels.probes.backend_probe import (
    BackendProbe,
    check_graph_replay,
    is_close,
    last_tokens_metadata,
    make_mixed_step,
)
from quire.kernels.reference import ReferenceBackend

_NUM_PAGES = 5
_EPS = 1e-6
_QUERY_SCALE = 2.0
"""Like _QUERY_SCALE of backend_probe.py, but for the larger scores of long latent keys."""


@dataclass(frozen=True, slots=True)
class MLAProbe(BackendProbe):
    heads: int
    dims: tuple[int, int, int, int]
    """Sizes of the latent, of a query's rotated part, of a query's other part, and of a value."""
    is_interleaved: bool = True

    def find_mismatch(self, backend: Backend) -> str | None:
        latent, rotated, plain, value = self.dims
        lengths, held = (2 * backend.block_size + 5, 3), self.dtype if self.kv_dtype is None else self.kv_dtype
        q = self._random_tensor(sum(lengths), self.heads * (plain + rotated)) * _QUERY_SCALE
        kv = self._random_tensor(sum(lengths), latent + rotated)
        weights = (
            self._random_tensor(self.heads, latent, plain) * plain**-0.5,
            self._random_tensor(self.heads, value, latent) * latent**-0.5,
        )
        expected = self._reference_output(q, kv, weights, lengths)
        absorb, expand = self._pack_per_head(backend, weights[0], rotated), self._pack_per_head(backend, weights[1], 0)
        cache = torch.zeros(
            backend.kv_cache_shape(_NUM_PAGES, 1, latent + rotated, held), dtype=held, device=self.device
        )
        prompts = replace(last_tokens_metadata(self.device, lengths, lengths, backend.block_size), is_full_prefill=True)
        own_q, own_kv = q.to(self.device, self.dtype), kv.to(self.device, self.dtype)
        rule, softmax = (
            self._norm_rope_params(self.device),
            AttentionParams((plain + rotated) ** -0.5, value_dim=latent),
        )
        stored = backend.rope_and_store_latent_kv(absorb(own_q, NO_ADAPTERS), own_kv, rule, cache, prompts)
        got = backend.paged_attention(stored, cache, cache, prompts, softmax)
        if not is_close(expand(got.flatten(1), NO_ADAPTERS), expected):
            return "differs from the reference for a prompt's latents"
        if (blocks := as_worthwhile_expandable_or_none(absorb, cache, prompts)) is not None:
            turned = backend.rope_and_store_latent_kv(
                own_q.view(len(q), self.heads, -1).clone(), own_kv, rule, cache, prompts
            )
            if not is_close(blocks.attend_expanded(turned, expand, cache, prompts, softmax), expected):
                return "differs from the reference where latents are expanded"
        rows, part = make_mixed_step(self.device, lengths, backend.block_size)
        got = backend.paged_attention(stored[rows.to(self.device)], cache, cache, part, softmax)
        if not is_close(expand(got.flatten(1), NO_ADAPTERS), expected[rows]):
            return "differs from the reference for the latents of a decode batched with a chunk of a prompt"
        last = torch.tensor(lengths).cumsum(0) - 1
        ones = last_tokens_metadata(self.device, (1, 1), lengths, backend.block_size)
        queries = stored[last.to(self.device)].clone()

        def attend_decodes() -> Tensor:
            return expand(backend.paged_attention(queries, cache, cache, ones, softmax).flatten(1), NO_ADAPTERS)

        if not is_close(attend_decodes(), expected[last]):
            return "differs from the reference for latents of a decode"
        return None if self.capture is None else check_graph_replay(self.capture, attend_decodes, expected[last])

    def _random_tensor(self, *shape: int) -> Tensor:
        generator = torch.Generator().manual_seed(sum(shape))
        return torch.randn(shape, generator=generator).to(self.dtype).float()

    def _pack_per_head(self, backend: Backend, weight: Tensor, passthrough_dim: int) -> Linear:
        return backend.pack_per_head_linear(list(weight.to(self.device, self.dtype)), passthrough_dim)

    def _norm_rope_params(self, device: torch.device) -> LatentNormRopeParams:
        latent, rotated, *_ = self.dims
        angles = torch.linspace(0.0, 9.0, 1024 * (rotated // 2)).view(1024, -1)
        table = torch.cat((angles.cos(), angles.sin()), dim=1)
        return LatentNormRopeParams(
            torch.linspace(0.5, 1.5, latent, device=device), _EPS, table.to(device), self.is_interleaved
        )

    def _reference_output(
        self, q: Tensor, kv: Tensor, weights: tuple[Tensor, Tensor], lengths: tuple[int, ...]
    ) -> Tensor:
        """Return float32. Only keys and queries are rounded to the model's dtype."""
        latent, rotated, plain, _ = self.dims
        judge = ReferenceBackend()
        cpu = torch.device("cpu")
        size = -(-max(lengths) // 3)  # three pages for the longest sequence
        held = self.dtype if self.kv_dtype is None else self.kv_dtype
        judge.block_size = size
        cache = torch.zeros(judge.kv_cache_shape(_NUM_PAGES, 1, latent + rotated, held), dtype=held)
        step = last_tokens_metadata(cpu, lengths, lengths, size)
        absorb, expand = (
            judge.pack_per_head_linear(list(weights[0]), rotated),
            judge.pack_per_head_linear(list(weights[1]), 0),
        )
        absorbed = absorb(q, NO_ADAPTERS).to(self.dtype)
        stored = judge.rope_and_store_latent_kv(
            absorbed, kv.to(self.dtype), self._norm_rope_params(cpu), cache, step
        ).float()
        softmax = AttentionParams((plain + rotated) ** -0.5, value_dim=latent)
        return expand(judge.paged_attention(stored, cache, cache, step, softmax).flatten(1), NO_ADAPTERS)
