"""SigLIP's tower (Zhai et al., 2023) over one square tile, and what makes tokens of its patches in Idefics3 and
SmolVLM: scale_factor x scale_factor patches side by side go through one linear (pixel shuffle: Laurençon et al.,
2024)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from quire.engine.encoders.encoder import Encoder, EncoderNames, EncoderSpec, activation_of
from quire.engine.encoders.runner import whole_prompts
from quire.engine.images.config import VisionConfig
from quire.engine.layers.linear import JoinedLinear
from quire.engine.layers.parameters import Parameter, ParameterTable
from quire.engine.layers.schemes import Scheme
from quire.engine.types import Image
from quire.kernels.backend import NO_ADAPTERS, Backend

_TOWER = "model.vision_model"
_PATCHES, _POSITIONS = f"{_TOWER}.embeddings.patch_embedding", f"{_TOWER}.embeddings.position_embedding.weight"
_CONNECTOR = "model.connector.modality_projection.proj"
NAMES = EncoderNames(
    words="",
    layer=f"{_TOWER}.encoder.layers.{{}}",
    qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    out="self_attn.out_proj",
    attention_norm="layer_norm1",
    up=("mlp.fc1",),
    down="mlp.fc2",
    mlp_norm="layer_norm2",
    final_norm=f"{_TOWER}.post_layernorm",
)


def tower_spec(config: VisionConfig) -> EncoderSpec:
    """Raises ModelError for an activation that is not computed."""
    return EncoderSpec(
        names=NAMES,
        vocab_size=0,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_heads=config.num_heads,
        head_dim=config.hidden_size // config.num_heads,
        eps=config.eps,
        ropes=(None,) * config.num_layers,
        windows=(None,) * config.num_layers,
        classifier=lambda hidden, labels: [],
        activation=activation_of(config.activation),
        pre_norm=True,
        first_norm=True,
    )


class Tower:
    """Weights and the forward pass of one tile. Fill it by way of `parameters()` before use."""

    def __init__(
        self,
        config: VisionConfig,
        text_size: int,
        backend: Backend,
        scheme: Scheme,
        *,
        dtype: torch.dtype,
        progress: Callable[[], None],
    ) -> None:
        """`text_size`: of the hidden states that its features take the place of. `progress` is called after every
        layer."""
        self.dtype, self.text_size = dtype, text_size
        self._config = config
        self._side = side = config.tile // config.patch_size
        device = torch.device("cpu")
        self._encoder = Encoder(
            tower_spec(config),
            backend,
            scheme,
            dtype=dtype,
            device=device,
            max_model_len=side * side,
            progress=progress,
        )
        inner = 3 * config.patch_size**2
        self._patches = JoinedLinear(scheme, inner, {_PATCHES: config.hidden_size}, bias=True)
        joined = config.hidden_size * config.scale_factor**2
        self._connector = JoinedLinear(scheme, joined, {_CONNECTOR: text_size}, bias=False)
        self._positions: Tensor | None = None
        self._metadata = whole_prompts(np.array([side * side]), backend.block_size, device)

    def parameters(self) -> ParameterTable:
        """Every tensor the tower and its connector take, by its name in the checkpoint."""
        config, table = self._config, self._encoder.parameters() | self._connector.parameters()
        for name, each in self._patches.parameters().items():
            table[name] = each if name.endswith("bias") else _as_linear(each, config.patch_size)
        rows = (config.image_size // config.patch_size) ** 2
        table[_POSITIONS] = Parameter((rows, config.hidden_size), self.dtype, self._put_positions)
        return table

    @torch.inference_mode()
    def features(self, tile: Image) -> Tensor:
        """[tokens, text_size]. The same bits whatever else is computed: a tile is a step of its own."""
        assert (tile.height, tile.width) == (self._config.tile,) * 2, "an image that was prepared for another tower"
        assert self._positions is not None, "weights are not loaded"
        x = self._patches.packed(self._cut(normalised(tile, self._config)).to(self.dtype), NO_ADAPTERS)
        hidden = self._encoder.encode(x + self._positions, self._metadata)
        return self._connector.packed(self._shuffled(hidden), NO_ADAPTERS)

    def _cut(self, pixels: Tensor) -> Tensor:
        """[height, width, 3] to patches by rows, [side * side, 3 * patch * patch], in the order of a convolution's
        weights."""
        size, side = self._config.patch_size, self._side
        return pixels.view(side, size, side, size, 3).permute(0, 2, 4, 1, 3).reshape(side * side, -1).contiguous()

    def _shuffled(self, hidden: Tensor) -> Tensor:
        """[side * side, hidden] to [tokens, scale * scale * hidden]."""
        scale, side = self._config.scale_factor, self._side
        squares = hidden.view(side // scale, scale, side // scale, scale, -1).transpose(1, 2)
        return squares.reshape((side // scale) ** 2, -1).contiguous()

    def _put_positions(self, table: Tensor) -> None:
        at = positions_of(self._side, self._config.image_size // self._config.patch_size)
        self._positions = F.embedding(at, table)


def normalised(image: Image, config: VisionConfig) -> Tensor:
    """Its pixels as the tower reads them, float32 [height, width, 3]."""
    pixels = torch.frombuffer(bytearray(image.pixels), dtype=torch.uint8).view(image.height, image.width, 3)
    mean, std = (torch.tensor(each, dtype=torch.float32) for each in (config.mean, config.std))
    return pixels.float().mul_(config.rescale).sub_(mean).div_(std)


def positions_of(side: int, trained: int) -> Tensor:
    """The rows of the table of trained x trained positions for side x side patches, [side * side] int64: those at the
    same fraction of a side. In float32 as transformers computes it, so that what rounding makes of a fraction is the
    same."""
    boundaries = torch.arange(1 / trained, 1.0, 1 / trained)
    fractions = torch.clamp(torch.arange(side, dtype=torch.float32) * (1.0 / torch.tensor(side)), max=1.0 - 1e-6)
    along = torch.bucketize(fractions, boundaries, right=True)
    return (along[:, None] * trained + along).flatten()


def _as_linear(parameter: Parameter, patch_size: int) -> Parameter:
    """A convolution's weights whose stride is its size, [out, 3, patch, patch], as a linear's."""
    shape = (parameter.shape[0], 3, patch_size, patch_size)
    return replace(parameter, shape=shape, put=lambda tensor: parameter.put(tensor.flatten(1)))
