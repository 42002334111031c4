from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from math import prod

import numpy as np
import torch
from torch import Tensor

from quire.engine.architecture.encoder import EncoderSpec
from quire.engine.architecture.parameter_shapes import ParameterShapes
from quire.engine.common.types import Image
from quire.engine.encoders.encoder import Encoder
from quire.engine.encoders.encoder_chunks import run_all_chunks
from quire.engine.families.base.vision.vision_spec import PixelNormalization
from quire.engine.layers.linear import FusedLinear
from quire.engine.layers.norm import LayerNormWeights
from quire.engine.layers.parameters import LoadableParameter, ParameterTable, identity, make_loadable_parameter
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
    shapes: ParameterShapes = field(default_factory=dict)
    """See VisionSpec.parameter_shapes. `make_tower` sets them."""

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

    def make_unquantized_linear(self, name: str, *, separator: str = ".") -> FusedLinear:
        """The weight's name is `name`, `separator` and "weight"."""
        out, *inputs = self.shapes[f"{name}{separator}weight"]
        scheme = UnquantizedScheme(self.backend, self.dtype)
        return FusedLinear(scheme, prod(inputs), {name: out}, bias=f"{name}{separator}bias" in self.shapes)

    def make_norm(self, name: str) -> LayerNormWeights:
        (size,) = self.shapes[f"{name}.weight"]
        return LayerNormWeights(name, size, bias=f"{name}.bias" in self.shapes)

    def make_parameter(
        self, weights: dict[str, Tensor], name: str, transform: Callable[[Tensor], Tensor] = identity
    ) -> LoadableParameter:
        return make_loadable_parameter(weights, name, self.shapes[name], self.dtype, transform)


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
    """A convolution whose stride is its kernel's size, computed as a linear. If the kernel covers several video frames,
    they repeat the image.
    """

    def __init__(self, build_context: TowerBuildContext, name: str) -> None:
        self._name = name
        self._weight_shape = build_context.shapes[f"{name}.weight"]
        _, _, *frames, self._size, _ = self._weight_shape
        self._frames = frames[0] if frames else 0
        self._linear = build_context.make_unquantized_linear(name)
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
    def __init__(self, build_context: TowerBuildContext, patch_size: int, name: str) -> None:
        self._size, self._dtype = patch_size, build_context.dtype
        self._linear = build_context.make_unquantized_linear(name)
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


def lengths_of_equal_sequences(num_tokens: int, num_images: int) -> list[np.ndarray]:
    return [np.full(num_images, num_tokens)]


def axial_rope_table(rows: Tensor, columns: Tensor, by_row: Tensor, by_column: Tensor) -> Tensor:
    """Return [T, head_dim] like QKNormRopeParams.cos_sin. `rows` and `columns` are [T], frequencies [head_dim / 4]."""
    angles = torch.cat((rows[:, None].float() * by_row, columns[:, None].float() * by_column), dim=1)
    return torch.cat((angles.cos(), angles.sin()), dim=1)


def rope_frequencies(size: int, theta: float, device: torch.device) -> Tensor:
    """Return [size / 2] float32."""
    return 1.0 / theta ** (torch.arange(0, size, 2, dtype=torch.float32, device=device) / size)
