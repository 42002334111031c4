"""Tries attention over latents on the device, as kernels/probe.py tries that of keys and values."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quire.kernels.backend import NO_ADAPTERS, Backend, Linear
from quire.kernels.latents.blocks import expandable
from quire.kernels.latents.latent import Latent
from quire.kernels.probe import BackendProbe, beside_a_part, last_tokens, replayed, same
from quire.kernels.reference import Reference
from quire.kernels.softmax import Softmax

_PAGES = 5
_EPS = 1e-6
_PEAKED = 2.0
"""As kernels/probe.py has it; keys of latents are long, so scores are."""


@dataclass(frozen=True, slots=True)
class LatentProbe(BackendProbe):
    """Two sequences, one of them several pages long: as prompts, absorbed and, where the backend does so, expanded; as
    decodes; and as a decode beside a prompt's last part."""

    heads: int
    sizes: tuple[int, int, int, int]
    """Numbers of a latent, of what is rotated, of a query's other part, of a value."""
    neighbours: bool = True

    def wrong(self, backend: Backend) -> str | None:
        latent, rotated, plain, value = self.sizes
        lengths, held = (2 * backend.block_size + 5, 3), self.dtype if self.kv_dtype is None else self.kv_dtype
        q = self._random(sum(lengths), self.heads * (plain + rotated)) * _PEAKED
        kv = self._random(sum(lengths), latent + rotated)
        weights = (
            self._random(self.heads, latent, plain) * plain**-0.5,
            self._random(self.heads, value, latent) * latent**-0.5,
        )
        expected = self._expected(q, kv, weights, lengths)
        absorb, expand = self._packed(backend, weights[0], rotated), self._packed(backend, weights[1], 0)
        cache = torch.zeros(backend.kv_cache_shape(_PAGES, 1, latent + rotated, held), dtype=held, device=self.device)
        prompts = replace(last_tokens(self.device, lengths, lengths, backend.block_size), whole=True)
        own_q, own_kv = q.to(self.device, self.dtype), kv.to(self.device, self.dtype)
        rule, softmax = self._latent(self.device), Softmax((plain + rotated) ** -0.5, values=latent)
        stored = backend.latent_store(absorb(own_q, NO_ADAPTERS), own_kv, rule, cache, prompts)
        got = backend.paged_attention(stored, cache, cache, prompts, softmax)
        if not same(expand(got.flatten(1), NO_ADAPTERS), expected):
            return "computes something else than the reference for a prompt's latents"
        if (blocks := expandable(absorb, cache, prompts)) is not None:
            turned = backend.latent_store(own_q.view(len(q), self.heads, -1).clone(), own_kv, rule, cache, prompts)
            if not same(blocks.attend(turned, expand, cache, prompts, softmax), expected):
                return "computes something else than the reference where latents are expanded"
        rows, part = beside_a_part(self.device, lengths, backend.block_size)
        got = backend.paged_attention(stored[rows.to(self.device)], cache, cache, part, softmax)
        if not same(expand(got.flatten(1), NO_ADAPTERS), expected[rows]):
            return "computes something else than the reference for latents of a decode beside a part of a prompt"
        last = torch.tensor(lengths).cumsum(0) - 1
        ones = last_tokens(self.device, (1, 1), lengths, backend.block_size)
        queries = stored[last.to(self.device)].clone()

        def decode() -> Tensor:
            return expand(backend.paged_attention(queries, cache, cache, ones, softmax).flatten(1), NO_ADAPTERS)

        if not same(decode(), expected[last]):
            return "computes something else than the reference for latents of a decode"
        return None if self.capture is None else replayed(self.capture, decode, expected[last])

    def _random(self, *shape: int) -> Tensor:
        """As the model's type has it, in float32 on the CPU."""
        generator = torch.Generator().manual_seed(sum(shape))
        return torch.randn(shape, generator=generator).to(self.dtype).float()

    def _packed(self, backend: Backend, weight: Tensor, passed: int) -> Linear:
        return backend.pack_blocks(list(weight.to(self.device, self.dtype)), passed)

    def _latent(self, device: torch.device) -> Latent:
        latent, rotated, *_ = self.sizes
        angles = torch.linspace(0.0, 9.0, 1024 * (rotated // 2)).view(1024, -1)
        table = torch.cat((angles.cos(), angles.sin()), dim=1)
        return Latent(torch.linspace(0.5, 1.5, latent, device=device), _EPS, table.to(device), self.neighbours)

    def _expected(self, q: Tensor, kv: Tensor, weights: tuple[Tensor, Tensor], lengths: tuple[int, ...]) -> Tensor:
        """[T, H * value] float32 on the CPU, by the reference; what is stored, and queries, in the model's type."""
        latent, rotated, plain, _ = self.sizes
        judge, cpu, size = Reference(), torch.device("cpu"), -(-max(lengths) // 3)  # three pages hold the longest
        held = self.dtype if self.kv_dtype is None else self.kv_dtype
        judge.block_size = size
        cache = torch.zeros(judge.kv_cache_shape(_PAGES, 1, latent + rotated, held), dtype=held)
        step = last_tokens(cpu, lengths, lengths, size)
        absorb, expand = judge.pack_blocks(list(weights[0]), rotated), judge.pack_blocks(list(weights[1]), 0)
        absorbed = absorb(q, NO_ADAPTERS).to(self.dtype)
        stored = judge.latent_store(absorbed, kv.to(self.dtype), self._latent(cpu), cache, step).float()
        softmax = Softmax((plain + rotated) ** -0.5, values=latent)
        return expand(judge.paged_attention(stored, cache, cache, step, softmax).flatten(1), NO_ADAPTERS)
