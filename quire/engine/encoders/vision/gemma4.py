"""Gemma 4's tower (Google, 2026) over an image of any shape. Its layers are those of the text part, whose patches see
each other; the means of squares of patches become tokens."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.engine.encoders.pieces import pages_of, parts_of, weight
from quire.engine.encoders.vision.tower import ColourPatches, Reading, Tower, TowerMaking, apart, normalised
from quire.engine.images.gemma4 import Gemma4
from quire.engine.layers.attention import AttentionSpec
from quire.engine.layers.mlp import MlpSpec
from quire.engine.layers.norm import NormSpec
from quire.engine.layers.parameters import Parameter, ParameterTable, held, parameters_of
from quire.engine.layers.part import BuildContext, Step
from quire.engine.layers.schemes.clipped import Clippable
from quire.engine.types import Image
from quire.kernels.backend import NO_ADAPTERS

_TOWER, _EMBEDDER = "vision_tower", "embed_vision"
_TURNED = ("self_attn.q_proj.linear.weight", "self_attn.k_proj.linear.weight")
_NORMED = ("self_attn.q_norm.weight", "self_attn.k_norm.weight")


class Gemma4Tower(Tower):
    unused = ("audio_tower.", "embed_audio.")

    def __init__(self, vision: Gemma4, making: TowerMaking) -> None:
        shape, self._vision, self._making = vision.shape, vision, making
        norm, quarter = NormSpec(shape.eps), vision.head_dim // 4
        attention = AttentionSpec(
            *(shape.num_heads, vision.kv_heads, vision.head_dim),
            scale=1.0,
            rope={"rope_type": "axial", "rope_theta": vision.theta},
            norm=norm,
            qk_norm="heads",
            output_norm=True,
            v_norm=True,
            axes=(1,) * quarter + (2,) * quarter,
            ahead=None,
        )
        mlp = MlpSpec(shape.intermediate_size, norm, activation="gelu_tanh", output_norm=True)
        scheme = Clippable(making.scheme, clipped=vision.clipped)
        kinds = (making.dtype, making.dtype, making.device, vision.most_tokens * vision.pool)
        parts = BuildContext(making.backend, scheme, shape.hidden_size, *kinds, {})
        names = (f"{_TOWER}.encoder.layers.{index}" for index in range(shape.num_layers))
        self._layers = [(attention.part(parts, name), mlp.part(parts, name)) for name in names]
        hidden = shape.hidden_size
        self._patches = ColourPatches(making, shape, f"{_TOWER}.patch_embedder.input_proj", bias=False)
        self._project = making.linear(hidden, f"{_EMBEDDER}.embedding_projection", making.text_size, bias=False)
        self._weights: dict[str, Tensor] = {}

    def parameters(self) -> ParameterTable:
        vision, hidden = self._vision, self._vision.shape.hidden_size
        table = parameters_of(self._patches, self._project)
        for each in (part for layer in self._layers for part in layer):
            table |= {name: self._turned(name, given) for name, given in each.parameters().items()}
        positions = (2, vision.table, hidden)
        name = f"{_TOWER}.patch_embedder.position_embedding_table"
        table[name] = held(self._weights, "positions", positions, self._making.dtype)
        for name in ("std_bias", "std_scale") if vision.standardized else ():
            table[f"{_TOWER}.{name}"] = held(self._weights, name, (hidden,), torch.float32)
        return table

    def _turned(self, name: str, given: Parameter) -> Parameter:
        """Stored heads have two halves, of columns and of rows, each of which is turned by itself: numbers are put
        where turns of the whole head find them."""
        if not name.endswith((*_TURNED, *_NORMED)):
            return given
        size = self._vision.head_dim
        order = torch.arange(size).view(2, 2, size // 4).transpose(0, 1).flatten()

        def put(tensor: Tensor) -> None:
            heads = tensor.view(-1, size, *tensor.shape[1:])
            given.put(heads[:, order.to(tensor.device)].reshape(tensor.shape))

        return replace(given, put=put)

    def reading(self, images: Sequence[Image]) -> Reading:
        embedded = [self._embedded(each) for each in images]
        places = embedded[0][1].repeat(len(images), 1)
        x = yield from self._through_layers(torch.cat([each for each, _ in embedded]), places, len(images))
        rows, columns = (each // self._vision.shape.patch_size for each in (images[0].height, images[0].width))
        return [self._pooled(each, rows, columns) for each in x.chunk(len(images))]

    def _pooled(self, x: Tensor, rows: int, columns: int) -> Tensor:
        """An image's patches [T, hidden] to tokens."""
        vision, backend = self._vision, self._making.backend
        grid = x.float().view(1, rows, columns, -1).permute(0, 3, 1, 2)
        means = F.avg_pool2d(grid, vision.pool).flatten(2)[0].T.to(x.dtype).float()
        means = means * vision.shape.hidden_size**0.5
        if vision.standardized:
            means = (means - self._weights["std_bias"]) * self._weights["std_scale"]
        normed = backend.rms_norm(
            means.to(x.dtype).contiguous(), torch.ones(x.shape[1], device=x.device), vision.shape.eps
        )
        return self._project.packed(normed, NO_ADAPTERS)

    def _embedded(self, image: Image) -> tuple[Tensor, Tensor]:
        """The patches [T, hidden] by rows, and where they are, [T, 3] int64, as AttentionMetadata.axes has it, columns
        in the second place."""
        size = self._vision.shape.patch_size
        rows, columns = image.height // size, image.width // size
        device = self._making.device
        pixels = 2 * (normalised(image, self._vision.colours, device) - 0.5)
        place = torch.arange(rows * columns, device=device)
        table = self._weights["positions"]
        x = self._patches(pixels) + (table[0, place % columns] + table[1, place // columns])
        return x, torch.stack((place, place % columns, place // columns), dim=1)

    def _through_layers(self, x: Tensor, places: Tensor, images: int) -> Generator[float, None, Tensor]:
        """What goes out of the layers, whose parts are pieces: few tokens stand for an image."""
        backend, vision, device = self._making.backend, self._vision, self._making.device
        (lengths,), size = apart(len(x) // images, images), backend.block_size
        ((_, metadata),) = parts_of(lengths, size, device)
        shape = backend.kv_cache_shape(pages_of(lengths, size), vision.kv_heads, vision.head_dim, x.dtype)
        keys, values = (torch.empty(shape, dtype=x.dtype, device=device) for _ in range(2))
        step = Step(replace(metadata, axes=places), (keys, values), None)
        residual: Tensor | None = None
        each = weight(len(x), len(x) // images, vision.shape.hidden_size) / len(self._layers) / 2
        for layer in self._layers:
            for part in layer:
                x, residual = part.forward(backend, x, residual, step)
                yield each
            self._making.progress()
        assert residual is not None
        return x + residual
