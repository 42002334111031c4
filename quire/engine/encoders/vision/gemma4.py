"""Gemma 4's tower (Google, 2026): a text model's layers with bidirectional attention, then average pooling."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.engine.common.types import Image
from quire.engine.encoders.encoder_chunks import chunk_cost, count_kv_blocks, make_chunks_with_metadata
from quire.engine.encoders.vision.tower import (
    ChannelLastPatchEmbedding,
    ChunkedEncoding,
    Tower,
    TowerBuildContext,
    lengths_of_equal_sequences,
    normalize_pixels,
)
from quire.engine.families.vision.gemma4 import (
    BIAS,
    PATCH_EMBEDDING,
    POSITIONS,
    PROJECTION,
    SCALE,
    STANDARDIZATION,
    Gemma4VisionSpec,
)
from quire.engine.layers.builders import build_sublayer
from quire.engine.layers.parameters import LoadableParameter, ParameterTable, make_loadable_parameter, merge_parameters
from quire.engine.layers.schemes.clipped import ClippedScheme
from quire.engine.layers.sublayer import BuildContext, ForwardContext
from quire.kernels.backend import NO_ADAPTERS

_ROTATED_WEIGHTS = ("self_attn.q_proj.linear.weight", "self_attn.k_proj.linear.weight")
_HEAD_NORM_WEIGHTS = ("self_attn.q_norm.weight", "self_attn.k_norm.weight")


class Gemma4Tower(Tower):
    unused_prefixes = ("audio_tower.", "embed_audio.")

    def __init__(self, vision: Gemma4VisionSpec, build_context: TowerBuildContext) -> None:
        shape = vision.tower_shape
        self._vision = vision
        self._build_context = build_context
        scheme = ClippedScheme(build_context.scheme, has_bounds=vision.has_clipped_linears)
        dtypes_and_sizes = (
            build_context.dtype,
            build_context.dtype,
            build_context.device,
            vision.max_tokens * vision.pooling_size,
        )
        layer_context = BuildContext(build_context.backend, scheme, shape.hidden_size, *dtypes_and_sizes, {})
        names = (vision.layer_name(index) for index in range(shape.num_layers))
        specs = vision.layer_specs
        self._layers = [[build_sublayer(each, layer_context, name) for each in specs] for name in names]
        self._patch_embedding = ChannelLastPatchEmbedding(build_context, shape.patch_size, PATCH_EMBEDDING)
        self._projection = build_context.make_unquantized_linear(PROJECTION)
        self._weights: dict[str, Tensor] = {}

    def parameters(self) -> ParameterTable:
        table = merge_parameters(self._patch_embedding, self._projection)
        for each in (sublayer for layer in self._layers for sublayer in layer):
            table |= {
                name: self._reorder_rope_dims_on_load(name, parameter) for name, parameter in each.parameters().items()
            }
        table[POSITIONS] = self._build_context.make_parameter(self._weights, POSITIONS)
        for name in STANDARDIZATION if self._vision.standardizes_tokens else ():
            shape = self._build_context.shapes[name]
            table[name] = make_loadable_parameter(self._weights, name, shape, torch.float32)
        return table

    def _reorder_rope_dims_on_load(self, name: str, parameter: LoadableParameter) -> LoadableParameter:
        """The checkpoint rotates a head's elements for columns and for rows in separate halves. RoPE here needs whole
        heads.
        """
        if not name.endswith((*_ROTATED_WEIGHTS, *_HEAD_NORM_WEIGHTS)):
            return parameter
        size = self._vision.head_dim
        order = torch.arange(size).view(2, 2, size // 4).transpose(0, 1).flatten()

        def load_reordered(tensor: Tensor) -> None:
            heads = tensor.view(-1, size, *tensor.shape[1:])
            parameter.weight_loader(heads[:, order.to(tensor.device)].reshape(tensor.shape))

        return replace(parameter, weight_loader=load_reordered)

    def encode_in_chunks(self, images: Sequence[Image]) -> ChunkedEncoding:
        embedded = [self._patch_embeddings_and_coordinates(each) for each in images]
        coordinates = embedded[0][1].repeat(len(images), 1)
        x = yield from self._run_layers(torch.cat([each for each, _ in embedded]), coordinates, len(images))
        rows, columns = (each // self._vision.tower_shape.patch_size for each in (images[0].height, images[0].width))
        return [self._pool_and_project(each, rows, columns) for each in x.chunk(len(images))]

    def _pool_and_project(self, x: Tensor, rows: int, columns: int) -> Tensor:
        """Convert [T, hidden] to [tokens, text_hidden_size]."""
        vision, backend = self._vision, self._build_context.backend
        grid = x.float().view(1, rows, columns, -1).permute(0, 3, 1, 2)
        means = F.avg_pool2d(grid, vision.pooling_size).flatten(2)[0].T.to(x.dtype).float()
        means = means * vision.tower_shape.hidden_size**0.5
        if vision.standardizes_tokens:
            means = (means - self._weights[BIAS]) * self._weights[SCALE]
        normed = backend.rms_norm(
            means.to(x.dtype).contiguous(), torch.ones(x.shape[1], device=x.device), vision.tower_shape.eps
        )
        return self._projection.packed_linear(normed, NO_ADAPTERS)

    def _patch_embeddings_and_coordinates(self, image: Image) -> tuple[Tensor, Tensor]:
        """Return row-major patches [T, hidden] and their (index, column, row) [T, 3] int64."""
        size = self._vision.tower_shape.patch_size
        rows, columns = image.height // size, image.width // size
        device = self._build_context.device
        pixels = 2 * (normalize_pixels(image, self._vision.normalization, device) - 0.5)
        patch_ids = torch.arange(rows * columns, device=device)
        table = self._weights[POSITIONS]
        x = self._patch_embedding(pixels) + (table[0, patch_ids % columns] + table[1, patch_ids // columns])
        return x, torch.stack((patch_ids, patch_ids % columns, patch_ids // columns), dim=1)

    def _run_layers(self, x: Tensor, coordinates: Tensor, num_images: int) -> Generator[float, None, Tensor]:
        """A chunk is a whole sublayer, because an image has few patches."""
        backend = self._build_context.backend
        vision = self._vision
        device = self._build_context.device
        (lengths,), size = lengths_of_equal_sequences(len(x) // num_images, num_images), backend.block_size
        ((_, metadata),) = make_chunks_with_metadata(lengths, size, device)
        shape = backend.kv_cache_shape(count_kv_blocks(lengths, size), vision.num_kv_heads, vision.head_dim, x.dtype)
        keys, values = (torch.empty(shape, dtype=x.dtype, device=device) for _ in range(2))
        step = ForwardContext(replace(metadata, mrope_positions=coordinates), (keys, values), None)
        residual: Tensor | None = None
        sublayer_cost = chunk_cost(len(x), len(x) // num_images, vision.tower_shape.hidden_size) / len(self._layers) / 2
        for layer in self._layers:
            for sublayer in layer:
                x, residual = sublayer.forward(backend, x, residual, step)
                yield sublayer_cost
            self._build_context.report_progress()
        assert residual is not None
        return x + residual
