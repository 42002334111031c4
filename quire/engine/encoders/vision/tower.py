from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np
import torch
from torch import Tensor

from quire.engine.architecture.encoder import EncoderSpec, EncoderWeightNames, parse_encoder_activation
from quire.engine.common.types import Image
from quire.engine.encoders.encoder import Encoder
from quire.engine.encoders.encoder_chunks import run_all_chunks
from quire.engine.families.base.vision.vision_spec import PixelNormalization, TowerShape
from quire.engine.layers.linear import FusedLinear
from quire.engine.layers.parameters import ParameterTable
from quire.engine.layers.schemes import QuantizationScheme, UnquantizedScheme
from quire.kernels.backend import NO_ADAPTERS, Backend
from quire.kernels.gpu.host_transfer import upload_arrays

_CPU = torch.device("cpu")
ChunkedEncoding = Generator[float, None, list[Tensor]]


@dataclass(frozen=True, slots=True)
class TowerBuildContext:
    backend: Backend
    scheme: QuantizationScheme
    """Linears outside layers, such as patch embeddings, are unquantized."""
    dtype: torch.dtype
    text_hidden_size: int
    report_progress: Callable[[], None]
    device: torch.device = _CPU

    def make_encoder(self, spec: EncoderSpec) -> Encoder:
        return Encoder(
            spec,
            self.backend,
            self.scheme,
            dtype=self.dtype,
            device=self.device,
            max_model_len=1,
            report_progress=self.report_progress,
        )

    def make_unquantized_linear(self, size: int, name: str, out: int, *, bias: bool = True) -> FusedLinear:
        return FusedLinear(UnquantizedScheme(self.backend, self.dtype), size, {name: out}, bias=bias)


class Tower(ABC):
    """Load weights through `parameters()` before use."""

    unused_prefixes: tuple[str, ...] = ()

    @abstractmethod
    def parameters(self) -> ParameterTable:
        """Keyed by the names that `vision_tensor_name` returns."""

    @abstractmethod
    def encode_in_chunks(self, images: Sequence[Image]) -> ChunkedEncoding:
        """Yields costs that sum to VisionSpec.encoder_cost. Returns [tokens, text_hidden_size] per image, or wider (see
        MediaEmbeddings). All images must have the same size. Batching does not change bits.
        """

    @torch.inference_mode()
    def encode_images(self, images: Sequence[Image]) -> list[Tensor]:
        return run_all_chunks(self.encode_in_chunks(images))


class PatchEmbedding:
    """A convolution whose stride is its kernel's size, computed as a linear. If `frames` is not 0, the kernel covers
    this many video frames, which repeat the image.
    """

    def __init__(
        self, build_context: TowerBuildContext, shape: TowerShape, name: str, *, bias: bool, frames: int = 0
    ) -> None:
        self._size = shape.patch_size
        self._frames = frames
        self._name = name
        self._weight_shape = (shape.hidden_size, 3, *([frames] if frames else []), shape.patch_size, shape.patch_size)
        self._linear = build_context.make_unquantized_linear(
            prod(self._weight_shape[1:]), name, shape.hidden_size, bias=bias
        )
        self._dtype = build_context.dtype

    def parameters(self) -> ParameterTable:
        table = self._linear.parameters()
        weight = table[f"{self._name}.weight"]
        flat = replace(
            weight, shape=self._weight_shape, weight_loader=lambda tensor: weight.weight_loader(tensor.flatten(1))
        )
        return table | {f"{self._name}.weight": flat}

    def __call__(self, pixels: Tensor) -> Tensor:
        """Convert [height, width, 3] to [rows * columns, hidden]."""
        size = self._size
        rows, columns = pixels.shape[0] // size, pixels.shape[1] // size
        patches = pixels.view(rows, size, columns, size, 3).permute(0, 2, 4, 1, 3)
        if self._frames:
            patches = patches[:, :, :, None].expand(-1, -1, -1, self._frames, -1, -1)
        return self._linear.packed_linear(patches.reshape(rows * columns, -1).to(self._dtype).contiguous(), NO_ADAPTERS)


class ChannelLastPatchEmbedding:
    def __init__(self, build_context: TowerBuildContext, shape: TowerShape, name: str, *, bias: bool) -> None:
        self._size, self._dtype = shape.patch_size, build_context.dtype
        self._linear = build_context.make_unquantized_linear(
            3 * shape.patch_size**2, name, shape.hidden_size, bias=bias
        )
        self.parameters = self._linear.parameters

    def __call__(self, pixels: Tensor) -> Tensor:
        """Convert [height, width, 3] to [rows * columns, hidden]."""
        size = self._size
        rows, columns = pixels.shape[0] // size, pixels.shape[1] // size
        patches = pixels.view(rows, size, columns, size, 3).transpose(1, 2).reshape(rows * columns, -1)
        return self._linear.packed_linear(patches.to(self._dtype).contiguous(), NO_ADAPTERS)


def normalize_pixels(image: Image, normalization: PixelNormalization, device: torch.device = _CPU) -> Tensor:
    """Return float32 [height, width, 3]."""
    pixels = np.frombuffer(bytearray(image.pixels), dtype=np.uint8).reshape(image.height, image.width, 3)
    uploaded = upload_arrays(
        [pixels, *(np.array(each, dtype=np.float32) for each in (normalization.mean, normalization.std))], device
    )
    return uploaded[0].float().mul_(normalization.rescale).sub_(uploaded[1]).div_(uploaded[2])


def tower_encoder_spec(shape: TowerShape, names: EncoderWeightNames) -> EncoderSpec:
    """A pre-norm encoder without positions."""
    return EncoderSpec(
        names=names,
        vocab_size=0,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_heads=shape.num_heads,
        head_dim=shape.hidden_size // shape.num_heads,
        eps=shape.eps,
        ropes=(None,) * shape.num_layers,
        windows=(None,) * shape.num_layers,
        classifier=lambda hidden, labels: [],
        activation=parse_encoder_activation(shape.activation),
        pre_norm=True,
        has_first_layer_norm=True,
    )


def lengths_of_equal_sequences(num_tokens: int, num_images: int) -> list[np.ndarray]:
    return [np.full(num_images, num_tokens)]


def axial_rope_table(rows: Tensor, columns: Tensor, by_row: Tensor, by_column: Tensor) -> Tensor:
    """Return [T, head_dim] like QKNormRopeParams.cos_sin. Frequencies are [head_dim / 4]."""
    angles = torch.cat((rows[:, None].float() * by_row, columns[:, None].float() * by_column), dim=1)
    return torch.cat((angles.cos(), angles.sin()), dim=1)


def rope_frequencies(size: int, theta: float, device: torch.device) -> Tensor:
    return 1.0 / theta ** (torch.arange(0, size, 2, dtype=torch.float32, device=device) / size)
