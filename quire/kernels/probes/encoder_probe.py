from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from quire.kernels.attention_params import AttentionParams
from quire.kernels.backend import AttentionMetadata, Backend
from quire.kernels.parameters.activation import Activation
from quire.kernels.probes.backend_probe import BackendProbe, is_close, last_tokens_metadata
from quire.kernels.qk_norm_rope import QKNormRopeParams
from quire.kernels.reference import ReferenceBackend

_NUM_PAGES = 5
_WINDOW = 7
_QUERY_SCALE = 2.0


class _ProbeInputs(NamedTuple):
    qkv: Tensor
    cos_sin: Tensor
    norm: Tensor
    weight: Tensor
    bias: Tensor


@dataclass(frozen=True, slots=True)
class EncoderProbe(BackendProbe):
    heads: int
    head_dim: int
    has_window: bool = False

    def find_mismatch(self, backend: Backend) -> str | None:
        lengths = (2 * backend.block_size + 5, 3)
        host_inputs = self._random_inputs(sum(lengths))
        kinds: list[tuple[str, int | None]] = [("patches", None)]
        for what, window in [*kinds, ("tokens that see each other", _WINDOW)][: 1 + self.has_window]:
            size, there = backend.block_size, _ProbeInputs(*(each.to(self.device) for each in host_inputs))
            outputs = self._run_ops(backend, there, lengths, window, size)
            expected = self._run_ops(ReferenceBackend(), host_inputs, lengths, window, size)
            if not all(is_close(each, wanted.float()) for each, wanted in zip(outputs, expected, strict=True)):
                return f"differs from the reference for {what}"
        return None

    def _random_inputs(self, tokens: int) -> _ProbeInputs:
        generator, width = torch.Generator().manual_seed(0), self.heads * self.head_dim
        qkv = torch.randn((tokens, 3 * width), generator=generator)
        qkv[:, :width] *= _QUERY_SCALE
        angles = torch.randn((tokens, self.head_dim // 2), generator=generator)
        turns = torch.cat((angles.cos(), angles.sin()), dim=1)
        norm, bias = torch.randn((2, width), generator=generator)
        weight = torch.randn((width, width), generator=generator) * width**-0.5
        return _ProbeInputs(qkv.to(self.dtype), turns, norm, weight.to(self.dtype), bias)

    def _run_ops(
        self, backend: Backend, inputs: _ProbeInputs, lengths: tuple[int, ...], window: int | None, size: int
    ) -> list[Tensor]:
        """`size` is the number of tokens per block."""
        device, dtype = inputs.qkv.device, inputs.qkv.dtype
        shape = (_NUM_PAGES, size, self.heads, self.head_dim)  # the layout of all GPU backends
        k_cache, v_cache = torch.zeros((2, *shape), dtype=dtype, device=device)
        step = last_tokens_metadata(device, lengths, lengths, size)
        every = torch.arange(sum(lengths), device=device)
        shapes = tuple(zip(lengths, lengths, strict=True))
        rope, softmax = (
            QKNormRopeParams(self.head_dim, inputs.cos_sin),
            AttentionParams(self.head_dim**-0.5, window, lookahead=None),
        )
        turned = replace(step, rope_position_override=every, query_key_lens=shapes)
        q = backend.rope_and_store_kv(inputs.qkv.clone(), rope, k_cache, v_cache, turned)
        attended = backend.paged_attention(q, k_cache, v_cache, turned, softmax).flatten(1).contiguous()
        last = backend.paged_attention(
            q[-1:].contiguous(), k_cache, v_cache, self._last_token_metadata(step, lengths), softmax
        )
        linear = backend.pack_linear(inputs.weight.clone(), None)
        normed = backend.layer_norm(attended, inputs.norm, inputs.bias, 1e-6)
        x = backend.apply_activation(linear(normed, step.linear_context), Activation("gelu_tanh"))
        return [attended, last, backend.rms_norm(x, inputs.norm, 1e-6)]

    def _last_token_metadata(self, step: AttentionMetadata, lengths: tuple[int, ...]) -> AttentionMetadata:
        size = lengths[-1]
        starts = torch.tensor([0, 1], dtype=torch.int32, device=step.positions.device)
        table, lens, positions, slots = (
            each[-1:] for each in (step.block_table, step.context_lens, step.positions, step.slot_mapping)
        )
        return AttentionMetadata(
            starts, lens, starts * size, table, positions, slots, 1, size, query_key_lens=((1, size),)
        )
