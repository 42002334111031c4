from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quire.engine.architecture.parameter_shapes import ParameterShapes, count_parameters
from quire.engine.common.errors import ModelError
from quire.engine.common.types import Image as Content
from quire.engine.families.base.rope_fields import rope_object
from quire.engine.families.base.vision.vision_config_fields import (
    ModelConfigFields,
    PreprocessorFields,
    SizeFields,
    VisionConfigFields,
)

if TYPE_CHECKING:
    from PIL import Image

TokenSpeller = Callable[[int], str]
MAX_PATCHES_PER_SIDE = 128
HALF_RGB = (0.5, 0.5, 0.5)
CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
"""Per channel, from CLIP's training images (Radford et al., 2021)."""


@dataclass(frozen=True, slots=True)
class TowerShape:
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    patch_size: int
    activation: str
    eps: float


@dataclass(frozen=True, slots=True)
class PixelNormalization:
    """A pixel becomes (pixel * rescale - mean) / std."""

    mean: tuple[float, ...]
    std: tuple[float, ...]
    rescale: float


class ImageLayout(ABC):
    @property
    @abstractmethod
    def token_run_lengths(self) -> tuple[tuple[int, ...], ...]:
        """Lengths of runs of adjacent tokens, per input of the tower."""

    @property
    def num_tokens(self) -> int:
        return sum(map(sum, self.token_run_lengths))

    @abstractmethod
    def placeholder_text(self, spell: TokenSpeller) -> str: ...

    @abstractmethod
    def iter_resized_images(self, image: Image.Image) -> Iterator[Content]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionSpec(ABC):
    tower_shape: TowerShape
    normalization: PixelNormalization
    resample_filter: int
    image_token_id: int

    @property
    def template_image_token_id(self) -> int:
        return self.image_token_id

    @property
    def is_dual_encoder(self) -> bool:
        """If True, images are never in prompts."""
        return False

    @property
    def is_bidirectional(self) -> bool:
        return False

    @property
    def max_bidirectional_tokens(self) -> int:
        return self.make_layout(1, 1).num_tokens

    @property
    def num_deepstack_layers(self) -> int:
        """The text model's first layers add extra image features."""
        return 0

    def mean_attended_patches(self, content: Content) -> float:
        """Averaged over layers."""
        return self.num_patches(content)

    def encoder_cost(self, content: Content) -> int:
        """The unit is tokens of a step's budget. A patch costs about one token, plus its attention, which took a third
        of the linears' time for 1,024 patches of width 768.
        """
        return math.ceil(
            self.num_patches(content) * (1 + self.mean_attended_patches(content) / (4 * self.tower_shape.hidden_size))
        )

    def num_patches(self, content: Content) -> int:
        return content.height * content.width // self.tower_shape.patch_size**2

    @property
    def uses_mrope(self) -> bool:
        return False

    def token_rows_and_columns(self, content: Content) -> tuple[int, int] | None:
        """None without mRoPE."""
        return None

    @abstractmethod
    def make_layout(
        self, width: int, height: int, *, low_detail: bool = False, has_other_images: bool = False
    ) -> ImageLayout:
        """Raises InvalidImage."""

    @property
    @abstractmethod
    def num_linear_parameters(self) -> int:
        """Number of parameters that --quantization quantizes."""

    @abstractmethod
    def parameter_shapes(self, text_size: int) -> ParameterShapes:
        """Keyed by the names that `vision_tensor_name` returns. `text_size` is the text model's hidden size. Raises
        ModelError for an unsupported activation.
        """

    def num_parameters(self, text_size: int) -> int:
        """`text_size`: the text model's hidden size."""
        return count_parameters(self.parameter_shapes(text_size))


def iter_squares_of_image(image: Image.Image, side: int) -> Iterator[Content]:
    """Yields squares by rows. The image must consist of whole squares."""
    for top in range(0, image.height, side):
        for left in range(0, image.width, side):
            yield Content.from_pixels(side, side, image.crop((left, top, left + side, top + side)).tobytes())


def choose_nearest_grid(grids: Iterable[tuple[int, int]], width: int, height: int, side: int) -> tuple[int, int]:
    """Return the (columns, rows) with the ratio nearest to the image's. Of equally near grids, the larger wins only if
    the image has more than half of the grid's pixels.
    """
    best, nearest = (1, 1), float("inf")
    for columns, rows in sorted(grids, key=math.prod):
        ratio_difference = abs(width / height - columns / rows)
        if ratio_difference < nearest or (
            ratio_difference == nearest and width * height > 0.5 * side * side * columns * rows
        ):
            best, nearest = (columns, rows), ratio_difference
    return best


class InvalidImage(Exception): ...


@dataclass(frozen=True, slots=True)
class VisionConfig:
    tower: VisionConfigFields
    model_fields: ModelConfigFields
    preprocessor: PreprocessorFields
    text_config: Mapping[str, Any]
    file_label: str
    parameters_only: bool = False
    """Only config.json was read."""

    def config_error(self, text: str) -> ModelError:
        return ModelError(f"model: {self.file_label}: {text}")

    def tower_shape(
        self, *, hidden: int, inner: int, layers: int, heads: int, patch: int, act: str, eps: float
    ) -> TowerShape:
        """Arguments are defaults for missing fields. Raises ModelError."""
        tower = self.tower
        channels = tower.get("num_channels") or tower.get("in_channels") or tower.get("in_chans") or 3
        config_eps, config_patch = tower.get("layer_norm_eps"), tower.get("patch_size") or patch
        if isinstance(config_patch, list) and config_patch[0] != config_patch[1]:
            raise self.config_error(f"vision_config: patch_size: squares are served, got {config_patch}")
        shape = TowerShape(
            hidden_size=tower.get("hidden_size") or hidden,
            intermediate_size=tower.get("intermediate_size") or inner,
            num_layers=tower.get("num_hidden_layers") or tower.get("depth") or layers,
            num_heads=tower.get("num_attention_heads") or tower.get("num_heads") or heads,
            patch_size=config_patch[0] if isinstance(config_patch, list) else config_patch,
            activation=tower.get("hidden_act") or act,
            eps=eps if config_eps is None else config_eps,
        )
        if channels != 3:
            raise self.config_error(f"vision_config: num_channels: 3 are served, got {channels}")
        self.check_heads(shape)
        return shape

    def check_heads(self, shape: TowerShape) -> None:
        if shape.hidden_size % shape.num_heads or shape.hidden_size // shape.num_heads % 2:
            sizes = f"{shape.num_heads} do not divide hidden_size, {shape.hidden_size}, into even parts"
            raise self.config_error(f"vision_config: num_attention_heads: {sizes}")

    def check_preprocessor_sizes(self, tower_sizes: Mapping[str, int]) -> None:
        """Raises ModelError if preprocessor_config.json contradicts these sizes."""
        for name, size in tower_sizes.items():
            if (preprocessor_size := self.preprocessor.get(name)) is not None and preprocessor_size != size:
                raise self.config_error(
                    f"vision_config: {name} is {size}, in preprocessor_config.json {preprocessor_size}"
                )

    def pixel_normalization(
        self, mean: tuple[float, ...] = HALF_RGB, std: tuple[float, ...] = HALF_RGB, *, use_file_values: bool = True
    ) -> PixelNormalization:
        """`mean` and `std` are defaults, or override the file if `use_file_values` is False. Raises ModelError."""
        preprocessor = self.preprocessor
        normalization = PixelNormalization(
            tuple((use_file_values and preprocessor.get("image_mean")) or mean),
            tuple((use_file_values and preprocessor.get("image_std")) or std),
            preprocessor.get("rescale_factor") or 1 / 255,
        )
        if not all(normalization.std):
            raise ModelError("model: preprocessor_config.json: image_std: must not be 0")
        return normalization

    def resample_filter(self, default: int) -> int:
        return default if (filter_number := self.preprocessor.get("resample")) is None else filter_number

    def image_token_id(self, default: int) -> int:
        token_ids = (self.model_fields.get("image_token_id"), self.model_fields.get("image_token_index"))
        return next((each for each in token_ids if each is not None), default)

    def token_id_from_field(self, name: str, default: int) -> int:
        """Only a missing field becomes `default`, not 0."""
        field_value: Any = self.model_fields.get(name)
        return default if field_value is None else int(field_value)

    def rope_theta(self, default: float) -> float:
        theta = rope_object(self.tower).get("rope_theta") or self.tower.get("rope_theta")
        return float(theta) if isinstance(theta, int | float) and theta >= 1 else default

    def image_size(self, default: int) -> int:
        size = self.tower.get("image_size") or default
        if isinstance(size, list):
            if size[0] != size[1]:
                raise self.config_error(f"vision_config: image_size: squares are served, got {size}")
            size = size[0]
        return size

    def preprocessor_size(self) -> SizeFields:
        size = self.preprocessor.get("size") or {}
        return {"height": size, "width": size, "shortest_edge": size} if isinstance(size, int) else size

    def check_patches(self, side: int, shape: TowerShape, unit: int = 1) -> None:
        """Raises ModelError."""
        if self.parameters_only:
            return
        patches = side // shape.patch_size
        if patches > MAX_PATCHES_PER_SIDE:
            raise self.config_error(
                f"vision_config: patch_size: {patches} patches by each side of a tile, at most {MAX_PATCHES_PER_SIDE}"
            )
        if side % shape.patch_size or patches % unit:
            tiles = f"tiles of {side} pixels"
            raise self.config_error(
                f"vision_config: patch_size: {tiles} are not patches of {shape.patch_size}, {unit} by each side"
            )
