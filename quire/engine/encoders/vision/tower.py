"""What towers have in common: patches become a linear's inputs, and a tower's tensors a table."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np
import torch
from torch import Tensor

from quire.engine.encoders.encoder import Encoder, EncoderNames, EncoderSpec, activation_of
from quire.engine.encoders.pieces import finished
from quire.engine.images.vision import Colours, TowerShape
from quire.engine.layers.linear import JoinedLinear
from quire.engine.layers.parameters import ParameterTable
from quire.engine.layers.schemes import Scheme, Unquantized
from quire.engine.types import Image
from quire.kernels.backend import NO_ADAPTERS, Backend
from quire.kernels.gpu.transfer import upload

_CPU = torch.device("cpu")
Reading = Generator[float, None, list[Tensor]]


@dataclass(frozen=True, slots=True)
class TowerMaking:
    """What a tower and what follows are made with."""

    backend: Backend
    scheme: Scheme
    """Of the linears of the tower's layers; others are whole."""
    dtype: torch.dtype
    text_size: int
    """Of the hidden states that features take the place of."""
    progress: Callable[[], None]
    """Called after every layer."""
    device: torch.device = _CPU

    def encoder(self, spec: EncoderSpec) -> Encoder:
        """Of the tower's layers, which have no table of rotations."""
        return Encoder(
            spec,
            self.backend,
            self.scheme,
            dtype=self.dtype,
            device=self.device,
            max_model_len=1,
            progress=self.progress,
        )

    def linear(self, size: int, name: str, out: int, *, bias: bool = True) -> JoinedLinear:
        return JoinedLinear(Unquantized(self.backend, self.dtype), size, {name: out}, bias=bias)


class Tower(ABC):
    """Weights and the forward pass of what is read at once. Fill it by way of `parameters()` before use."""

    unused: tuple[str, ...] = ()
    """How the names of tensors begin that are not needed."""

    @abstractmethod
    def parameters(self) -> ParameterTable:
        """Every tensor that the tower and what follows take, by its name in the checkpoint, as image_tensor
        (engine/checkpoint/safetensors.py) says it."""

    @abstractmethod
    def reading(self, images: Sequence[Image]) -> Reading:
        """Read images of one height and width, in pieces (engine/encoders/pieces.py), which weigh what Vision.work
        says. Gives of each its features, [tokens, text_size], or wider as Features (engine/models/decoder.py) says it:
        the same bits whatever else is read beside it."""

    @torch.inference_mode()
    def features(self, images: Sequence[Image]) -> list[Tensor]:
        """The same at once."""
        return finished(self.reading(images))


class Patches:
    """A convolution whose stride is its size, as a linear. `frames`: of a video, for each patch; an image's are
    alike."""

    def __init__(self, making: TowerMaking, shape: TowerShape, name: str, *, bias: bool, frames: int = 0) -> None:
        self._size, self._frames, self._name = shape.patch_size, frames, name
        self._stored = (shape.hidden_size, 3, *([frames] if frames else []), shape.patch_size, shape.patch_size)
        self._linear = making.linear(prod(self._stored[1:]), name, shape.hidden_size, bias=bias)
        self._dtype = making.dtype

    def parameters(self) -> ParameterTable:
        table = self._linear.parameters()
        weight = table[f"{self._name}.weight"]
        flat = replace(weight, shape=self._stored, put=lambda tensor: weight.put(tensor.flatten(1)))
        return table | {f"{self._name}.weight": flat}

    def __call__(self, pixels: Tensor) -> Tensor:
        """[height, width, 3] to [rows * columns, hidden]."""
        size = self._size
        rows, columns = pixels.shape[0] // size, pixels.shape[1] // size
        cut = pixels.view(rows, size, columns, size, 3).permute(0, 2, 4, 1, 3)
        if self._frames:
            cut = cut[:, :, :, None].expand(-1, -1, -1, self._frames, -1, -1)
        return self._linear.packed(cut.reshape(rows * columns, -1).to(self._dtype).contiguous(), NO_ADAPTERS)


class ColourPatches:
    """Patches whose pixels' colours stand side by side, through a linear."""

    def __init__(self, making: TowerMaking, shape: TowerShape, name: str, *, bias: bool) -> None:
        self._size, self._dtype = shape.patch_size, making.dtype
        self._linear = making.linear(3 * shape.patch_size**2, name, shape.hidden_size, bias=bias)
        self.parameters = self._linear.parameters

    def __call__(self, pixels: Tensor) -> Tensor:
        """[height, width, 3] to [rows * columns, hidden]."""
        size = self._size
        rows, columns = pixels.shape[0] // size, pixels.shape[1] // size
        cut = pixels.view(rows, size, columns, size, 3).transpose(1, 2).reshape(rows * columns, -1)
        return self._linear.packed(cut.to(self._dtype).contiguous(), NO_ADAPTERS)


def normalised(image: Image, colours: Colours, device: torch.device = _CPU) -> Tensor:
    """Its pixels as the tower reads them, float32 [height, width, 3]."""
    pixels = np.frombuffer(bytearray(image.pixels), dtype=np.uint8).reshape(image.height, image.width, 3)
    there = upload([pixels, *(np.array(each, dtype=np.float32) for each in (colours.mean, colours.std))], device)
    return there[0].float().mul_(colours.rescale).sub_(there[1]).div_(there[2])


def encoder_spec(shape: TowerShape, names: EncoderNames) -> EncoderSpec:
    """Of what all towers are: norms before the parts of every layer, no positions of its own. Raises ModelError for an
    activation that is not computed."""
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
        activation=activation_of(shape.activation),
        pre_norm=True,
        first_norm=True,
    )


def apart(tokens: int, images: int) -> list[np.ndarray]:
    """The lengths of so many sequences of so many tokens each, in one group of layers."""
    return [np.full(images, tokens)]


def axial_turns(rows: Tensor, columns: Tensor, by_row: Tensor, by_column: Tensor) -> Tensor:
    """What patches at these places [T] are rotated by, [T, head_dim] as Rope.cos_sin has it: by frequencies
    [head_dim / 4] of the row, then by those of the column."""
    angles = torch.cat((rows[:, None].float() * by_row, columns[:, None].float() * by_column), dim=1)
    return torch.cat((angles.cos(), angles.sin()), dim=1)


def frequencies(size: int, theta: float, device: torch.device) -> Tensor:
    """Of a rotation of so many numbers, [size / 2] float32."""
    return 1.0 / theta ** (torch.arange(0, size, 2, dtype=torch.float32, device=device) / size)
