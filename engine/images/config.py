"""Reads what a model's files say of images: its tower, its connector, and how an image is prepared for them. No torch.

The first families are Idefics3 (Laurençon et al., 2024) and SmolVLM (Marafioti et al., 2025): an image is resized and
cut into square tiles, the tower (SigLIP: Zhai et al., 2023) reads each by itself, and scale_factor x scale_factor
patches become the features of one token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypedDict

from msgspec import Meta

from quire.engine.errors import ModelError
from quire.engine.folder import checked
from quire.engine.gguf.files import ModelFiles

TILED = ("idefics3", "smolvlm")
"""The model_types whose images are read."""
_Width = Annotated[int, Meta(ge=1, le=2**20)]
_Side = Annotated[int, Meta(ge=1, le=2**14)]
"""In pixels."""
_Text = Annotated[str, Meta(max_length=256)]
_Colours = Annotated[list[Annotated[float, Meta(ge=-1e3, le=1e3)]], Meta(min_length=3, max_length=3)]
KEPT_BYTES = 256 << 20
"""Of images' features that an engine keeps. What was let go of is made again, to the same bits."""
_MOST_PATCHES = 128
"""By each side of a tile."""
_LANCZOS = 1
_MEAN = [0.5, 0.5, 0.5]


class VisionFields(TypedDict, total=False):
    """What is read of vision_config. Without a value transformers' default holds."""

    hidden_size: _Width | None
    intermediate_size: _Width | None
    num_hidden_layers: Annotated[int, Meta(ge=1, le=4096)] | None
    num_attention_heads: _Width | None
    num_channels: int | None
    image_size: _Side | None
    patch_size: Annotated[int, Meta(ge=1, le=1024)] | None
    hidden_act: _Text | None
    layer_norm_eps: Annotated[float, Meta(ge=0, le=1)] | None


class OuterFields(TypedDict, total=False):
    """What is read beside it."""

    scale_factor: Annotated[int, Meta(ge=1, le=64)] | None
    image_token_id: Annotated[int, Meta(ge=0, lt=2**31)] | None


class Longest(TypedDict, total=False):
    longest_edge: _Side | None


class PreparingFields(TypedDict, total=False):
    """What is read of preprocessor_config.json, or of image_processor in processor_config.json."""

    do_image_splitting: bool | None
    do_normalize: bool | None
    do_rescale: bool | None
    do_resize: bool | None
    image_mean: _Colours | None
    image_std: _Colours | None
    max_image_size: Longest | None
    resample: Annotated[int, Meta(ge=0, le=5)] | None
    rescale_factor: Annotated[float, Meta(gt=0, le=1)] | None
    size: Longest | None


@dataclass(frozen=True, slots=True)
class VisionConfig:
    """A tower, its connector, and what they read."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    image_size: int
    """The side that positions were trained for, in pixels."""
    patch_size: int
    activation: str
    eps: float
    scale_factor: int
    """A token stands for scale_factor x scale_factor patches."""
    image_token_id: int
    tile: int
    """The side of what the tower reads at once, in pixels."""
    longest_edge: int
    """An image's longer side is resized to it before it is cut into tiles."""
    splits: bool
    """Whether it is cut, or becomes one tile."""
    mean: tuple[float, ...]
    std: tuple[float, ...]
    rescale: float
    """What pixels are multiplied with before they are normalised."""
    resample: int
    """Pillow's number of a filter."""

    @property
    def tile_tokens(self) -> int:
        """Tokens that stand for a tile."""
        return (self.tile // self.patch_size // self.scale_factor) ** 2


def reads_images(raw: Mapping[str, Any]) -> bool:
    """Whether images are read for a config.json of this kind."""
    return str(raw.get("model_type")) in TILED


def read_vision(path: Path, raw: Mapping[str, Any] | None = None) -> VisionConfig | None:
    """What the model at `path` reads of images; None where it reads none. raw: its config.json, where that has another
    name. Raises ModelError, naming a wrong field."""
    files = ModelFiles(path)
    content, label = files.json("config.json") if raw is None else raw, files.label("config.json")
    if content is None or not reads_images(content):
        return None
    config, channels = _vision(content, _preparing(files), label)
    _check(config, channels, label)
    return config


def tower_numbers(raw: Mapping[str, Any], text_size: int) -> int:
    """Parameters of the tower and connector of a config.json, beside a text part whose hidden states have this size; 0
    where it has none that is read. Raises ModelError, naming a wrong field."""
    if not reads_images(raw):
        return 0
    config, _ = _vision(raw, {}, "config.json")
    hidden, inner = config.hidden_size, config.intermediate_size
    layer = 4 * (hidden + 1) * hidden + (hidden + 1) * inner + (inner + 1) * hidden + 4 * hidden
    ends = (3 * config.patch_size**2 + 1 + (config.image_size // config.patch_size) ** 2 + 2) * hidden
    return config.num_layers * layer + ends + config.scale_factor**2 * hidden * text_size


def _vision(content: Mapping[str, Any], preparing: PreparingFields, label: str) -> tuple[VisionConfig, int]:
    """What a config.json and the preparation say, and the number of colours. Raises ModelError."""
    given = content.get("vision_config") or {}
    if not isinstance(given, dict):
        raise ModelError(f"model: {label}: vision_config: expected object")
    tower = checked(given, VisionFields, f"{label}: vision_config")
    outer = checked(dict(content), OuterFields, label)
    size, tile = preparing.get("size") or {}, preparing.get("max_image_size") or {}
    std = preparing.get("image_std") or _MEAN
    config = VisionConfig(
        hidden_size=tower.get("hidden_size") or 1152,
        intermediate_size=tower.get("intermediate_size") or 3072,
        num_layers=tower.get("num_hidden_layers") or 12,
        num_heads=tower.get("num_attention_heads") or 16,
        image_size=tower.get("image_size") or 224,
        patch_size=tower.get("patch_size") or 32,
        activation=tower.get("hidden_act") or "gelu_pytorch_tanh",
        eps=1e-6 if (eps := tower.get("layer_norm_eps")) is None else eps,
        scale_factor=outer.get("scale_factor") or 2,
        image_token_id=128257 if (token := outer.get("image_token_id")) is None else token,
        tile=tile.get("longest_edge") or 364,
        longest_edge=size.get("longest_edge") or 4 * 364,
        splits=preparing.get("do_image_splitting") is not False,
        mean=tuple(preparing.get("image_mean") or _MEAN),
        std=tuple(std),
        rescale=preparing.get("rescale_factor") or 1 / 255,
        resample=_LANCZOS if (filter := preparing.get("resample")) is None else filter,
    )
    return config, tower.get("num_channels") or 3


def _preparing(files: ModelFiles) -> PreparingFields:
    name = "preprocessor_config.json"
    given = files.json(name)
    if given is None:
        name = "processor_config.json"
        given = (files.json(name) or {}).get("image_processor") or {}
        if not isinstance(given, dict):
            raise ModelError(f"model: {files.label(name)}: image_processor: expected object")
    fields = checked(given, PreparingFields, files.label(name))
    for switch in ("do_resize", "do_rescale", "do_normalize"):
        if fields.get(switch) is False:
            raise ModelError(f"model: {files.label(name)}: {switch}: false is not served")
    return fields


def _check(config: VisionConfig, channels: int, label: str) -> None:
    """Raise ModelError where fields that are right alone contradict each other."""

    def wrong(text: str) -> ModelError:
        return ModelError(f"model: {label}: vision_config: {text}")

    if channels != 3:
        raise wrong(f"num_channels: 3 are served, got {channels}")
    if config.hidden_size % config.num_heads:
        raise wrong(f"num_attention_heads: {config.num_heads} do not divide hidden_size, {config.hidden_size}")
    side = config.tile // config.patch_size
    if side > _MOST_PATCHES:
        raise wrong(f"patch_size: {side} patches by each side of a tile, at most {_MOST_PATCHES}")
    if config.tile % config.patch_size or side % config.scale_factor:
        tiles = f"tiles of {config.tile} pixels (max_image_size)"
        raise wrong(f"patch_size: {tiles} are not patches of {config.patch_size}, {config.scale_factor} by each side")
    if not all(config.std):
        raise ModelError("model: preprocessor_config.json: image_std: must not be 0")
