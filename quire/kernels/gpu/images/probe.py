"""Tries on a GPU what towers of images are made of, before one is loaded there: norms, rotations by a table of their
own, attention among all patches, and attention of a prompt's tokens that see each other."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from quire.kernels.activation import Activation
from quire.kernels.backend import AttentionMetadata, Backend
from quire.kernels.probe import BackendProbe, last_tokens, same
from quire.kernels.reference import Reference
from quire.kernels.rotation import Rope
from quire.kernels.softmax import Softmax

_PAGES, _WINDOW, _PEAKED = 5, 7, 2.0


class _Given(NamedTuple):
    qkv: Tensor
    turns: Tensor
    norm: Tensor
    weight: Tensor
    bias: Tensor


@dataclass(frozen=True, slots=True)
class PatchesProbe(BackendProbe):
    heads: int
    head_dim: int
    windowed: bool = False
    """Tokens that see each other are tried within a window too."""

    def wrong(self, backend: Backend) -> str | None:
        lengths = (2 * backend.block_size + 5, 3)
        given = self._given(sum(lengths))
        kinds: list[tuple[str, int | None]] = [("patches", None)]
        for what, window in [*kinds, ("tokens that see each other", _WINDOW)][: 1 + self.windowed]:
            size, there = backend.block_size, _Given(*(each.to(self.device) for each in given))
            found = self._computed(backend, there, lengths, window, size)
            expected = self._computed(Reference(), given, lengths, window, size)
            if not all(same(each, wanted.float()) for each, wanted in zip(found, expected, strict=True)):
                return f"computes something else than the reference for {what}"
        return None

    def _given(self, tokens: int) -> _Given:
        """On the host, of this type."""
        made, width = torch.Generator().manual_seed(0), self.heads * self.head_dim
        qkv = torch.randn((tokens, 3 * width), generator=made)
        qkv[:, :width] *= _PEAKED
        angles = torch.randn((tokens, self.head_dim // 2), generator=made)
        turns = torch.cat((angles.cos(), angles.sin()), dim=1)
        norm, bias = torch.randn((2, width), generator=made)
        weight = torch.randn((width, width), generator=made) * width**-0.5
        return _Given(qkv.to(self.dtype), turns, norm, weight.to(self.dtype), bias)

    def _computed(
        self, backend: Backend, given: _Given, lengths: tuple[int, ...], window: int | None, size: int
    ) -> list[Tensor]:
        """What attention gives for all tokens and for the last one, and what a norm, a linear and others make of it.
        size: tokens of a page."""
        device, dtype = given.qkv.device, given.qkv.dtype
        shape = (_PAGES, size, self.heads, self.head_dim)  # as all backends on GPUs have it
        k_cache, v_cache = torch.zeros((2, *shape), dtype=dtype, device=device)
        step = last_tokens(device, lengths, lengths, size)
        every = torch.arange(sum(lengths), device=device)
        shapes = tuple(zip(lengths, lengths, strict=True))
        rope, softmax = Rope(self.head_dim, given.turns), Softmax(self.head_dim**-0.5, window, ahead=None)
        turned = replace(step, turns=every, shapes=shapes)
        q = backend.rope_store(given.qkv.clone(), rope, k_cache, v_cache, turned)
        attended = backend.paged_attention(q, k_cache, v_cache, turned, softmax).flatten(1).contiguous()
        last = backend.paged_attention(q[-1:].contiguous(), k_cache, v_cache, self._last(step, lengths), softmax)
        linear = backend.pack_linear(given.weight.clone(), None)
        normed = backend.layer_norm(attended, given.norm, given.bias, 1e-6)
        x = backend.activate(linear(normed, step.linear), Activation("gelu_tanh"))
        return [attended, last, backend.rms_norm(x, given.norm, 1e-6)]

    def _last(self, step: AttentionMetadata, lengths: tuple[int, ...]) -> AttentionMetadata:
        """The last token alone."""
        size = lengths[-1]
        starts = torch.tensor([0, 1], dtype=torch.int32, device=step.positions.device)
        table, lens, positions, slots = (
            each[-1:] for each in (step.block_table, step.context_lens, step.positions, step.slots)
        )
        return AttentionMetadata(starts, lens, starts * size, table, positions, slots, 1, size, shapes=((1, size),))
