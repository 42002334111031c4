"""Towers of Qwen2-VL (Wang et al., 2024), Qwen2.5-VL (Bai et al., 2025) and Qwen3-VL (Qwen Team, 2025)."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from math import isqrt

import numpy as np
import torch
from torch import Tensor

from quire.engine.common.types import Image
from quire.engine.encoders.encoder_chunks import MAX_CHUNK_TOKENS
from quire.engine.encoders.vision.tower import (
    ChunkedEncoding,
    PatchEmbedding,
    Tower,
    TowerBuildContext,
    axial_rope_table,
    lengths_of_equal_sequences,
    normalize_pixels,
    rope_frequencies,
)
from quire.engine.families.vision.qwen_vl import MERGER, PATCH_EMBEDDING, POSITIONS, QwenVisionSpec
from quire.engine.layers.parameters import ParameterTable, merge_parameters
from quire.kernels.backend import NO_ADAPTERS
from quire.kernels.gpu.host_transfer import upload_arrays
from quire.kernels.parameters.activation import GELU


class QwenVLTower(Tower):
    def __init__(self, vision: QwenVisionSpec, build_context: TowerBuildContext) -> None:
        self._vision, self._build_context = vision, build_context
        self._encoder = build_context.make_encoder(vision.encoder_spec)
        self._patch_embedding = PatchEmbedding(build_context, PATCH_EMBEDDING)
        self._merger = PatchMerger(vision, build_context, MERGER, has_patch_norm=True)
        self._deepstack_mergers = [
            PatchMerger(vision, build_context, name, has_patch_norm=False) for name in vision.deepstack_merger_names
        ]
        self._weights: dict[str, Tensor] = {}

    def parameters(self) -> ParameterTable:
        table = merge_parameters(self._encoder, self._patch_embedding, self._merger, *self._deepstack_mergers)
        if self._vision.position_table_size:
            table[POSITIONS] = self._build_context.make_parameter(self._weights, POSITIONS)
        return table

    def encode_in_chunks(self, images: Sequence[Image]) -> ChunkedEncoding:
        vision = self._vision
        shape = self._vision.tower_shape
        count = len(images)
        device = self._build_context.device
        rows, columns = images[0].height // shape.patch_size, images[0].width // shape.patch_size
        ordered, lengths = self._patch_order_and_lengths(rows, columns, count)
        order, tokens = upload_arrays([ordered, self._row_major_token_order(ordered, columns)], device)
        x = torch.cat(
            [self._patch_embedding(normalize_pixels(each, vision.normalization, device))[order] for each in images]
        )
        if vision.position_table_size:
            x = x + self._interpolate_positions(rows, columns)[order].repeat(count, 1)
        axis_frequencies = rope_frequencies(shape.hidden_size // shape.num_heads // 2, 10000.0, device)
        cos_sin = axial_rope_table(order // columns, order % columns, axis_frequencies, axis_frequencies).repeat(
            count, 1
        )
        hidden, deepstack_states = yield from self._encoder.forward_in_chunks(
            x, lengths, cos_sin, vision.deepstack_layers
        )
        merged = []
        for merge, each in zip((self._merger, *self._deepstack_mergers), (hidden, *deepstack_states), strict=True):
            merged.append((yield from self._merge_in_chunks(merge, each)))
        return [each[tokens] for each in torch.cat(merged, dim=1).chunk(count)]

    def _merge_in_chunks(self, merge: PatchMerger, hidden: Tensor) -> Generator[float, None, Tensor]:
        parts, patches_per_token = [], self._vision.merge_size**2
        for part in hidden.split(MAX_CHUNK_TOKENS // patches_per_token * patches_per_token):
            parts.append(merge(part))
            yield len(part) / 2 / self._vision.tower_shape.num_layers
        return torch.cat(parts)

    def _patch_order_and_lengths(self, rows: int, columns: int, images: int) -> tuple[np.ndarray, list[np.ndarray]]:
        """Return the encoder's order of patches, [T] int64, in which patches of a token or window are adjacent. Also
        return lengths of sequences that attend within themselves, for metadata groups 0 (whole images) and 1 (windows).
        """
        merge = self._vision.merge_size
        places = np.arange(rows * columns).reshape(rows // merge, merge, columns // merge, merge).swapaxes(1, 2)
        lengths = lengths_of_equal_sequences(rows * columns, images)
        if not self._vision.window_side:
            return places.flatten(), lengths
        window = self._vision.window_side // self._vision.merged_patch_size
        bands = (places[top : top + window] for top in range(0, rows // merge, window))
        squares = [band[:, at : at + window].flatten() for band in bands for at in range(0, columns // merge, window)]
        return np.concatenate(squares), [*lengths, np.array([len(each) for each in squares] * images)]

    def _row_major_token_order(self, order: np.ndarray, columns: int) -> np.ndarray:
        """Convert the encoder's order of patches to [tokens] int64."""
        merge = self._vision.merge_size
        first = order[:: merge**2]
        token_order: np.ndarray = np.argsort(first // columns // merge * (columns // merge) + first % columns // merge)
        return token_order

    def _interpolate_positions(self, rows: int, columns: int) -> Tensor:
        """Return [rows * columns, hidden], interpolated bilinearly in float32 with aligned corners."""
        side = isqrt(self._vision.position_table_size)
        down, right = (
            torch.linspace(0, side - 1, count, device=self._build_context.device) for count in (rows, columns)
        )
        parts = []
        for at, is_next_row in ((down, 0), (down, 1)):
            for along, is_next_column in ((right, 0), (right, 1)):
                row, column = (
                    (each.int() + step).clamp(max=side - 1)
                    for each, step in ((at, is_next_row), (along, is_next_column))
                )
                share_row, share_column = at - at.int(), along - along.int()
                by_row = share_row if is_next_row else 1 - share_row
                weight = by_row[:, None] * (share_column if is_next_column else 1 - share_column)
                index = (row[:, None] * side + column).flatten()
                parts.append(self._weights[POSITIONS][index] * weight.flatten()[:, None])
        return sum(parts[1:], parts[0]).to(self._build_context.dtype)


class PatchMerger:
    """Two linears on merge x merge patches, after a norm of each patch (`has_patch_norm`) or of all these patches."""

    def __init__(
        self, vision: QwenVisionSpec, build_context: TowerBuildContext, name: str, *, has_patch_norm: bool
    ) -> None:
        self._size = vision.tower_shape.hidden_size * vision.merge_size**2
        self._build_context = build_context
        self._has_rms_norm = vision.has_llama_style_layers
        self._has_patch_norm = has_patch_norm
        norm, first, last = (f"{name}.{part}" for part in vision.merger_layer_names)
        self._norm = build_context.make_norm(norm)
        self._first = build_context.make_unquantized_linear(first)
        self._last = build_context.make_unquantized_linear(last)

    def parameters(self) -> ParameterTable:
        return merge_parameters(self._norm, self._first, self._last)

    def __call__(self, hidden: Tensor) -> Tensor:
        """Convert [patches, hidden] to [tokens, text_hidden_size]."""
        backend, norm = self._build_context.backend, self._norm
        x = hidden if self._has_patch_norm else hidden.view(-1, self._size)
        if self._has_rms_norm:
            x = backend.rms_norm(x, norm.weight, 1e-6)
        else:
            x = backend.layer_norm(x, norm.weight, norm.bias, 1e-6)
        wide = self._first.packed_linear(x.view(-1, self._size), NO_ADAPTERS)
        return self._last.packed_linear(backend.apply_activation(wide, GELU), NO_ADAPTERS)
