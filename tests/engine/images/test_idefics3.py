"""Idefics3's and SmolVLM's tile layouts and pixels against transformers' Pillow image processors."""

from __future__ import annotations

import io
import json
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from quire.engine.common.errors import ModelError
from quire.engine.encoders.vision.tower import normalize_pixels
from quire.engine.families.vision.idefics3 import Idefics3VisionSpec, make_tile_layout
from quire.engine.images.image_decoding import decode_upright, open_image
from quire.engine.images.vision_config import read_vision_spec
from tests.tiny_vision import PREPARING, picture

SIZES = [(640, 480), (30, 200), (40, 40), (81, 33), (3000, 200), (1, 900), (1000, 1)]


def vision(path: Path, **preparing: object) -> Idefics3VisionSpec:
    (path / "config.json").write_text(json.dumps({"model_type": "smolvlm", "vision_config": {"patch_size": 2}}))
    (path / "preprocessor_config.json").write_text(json.dumps({**PREPARING, **preparing}))
    spec = read_vision_spec(path)
    assert isinstance(spec, Idefics3VisionSpec)
    return spec


def processor_of_transformers(kind: str, **preparing: object) -> Any:
    module = import_module(f"transformers.models.{kind.lower()}.image_processing_pil_{kind.lower()}")
    return getattr(module, f"{kind}ImageProcessorPil")(**preparing)


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["SmolVLM", "Idefics3"])
@pytest.mark.parametrize(("longest", "tile"), [(80, 40), (4 * 84, 84)])
@pytest.mark.parametrize("splits", [True, False])
def test_idefics3_tiles_equal_transformers(kind: str, longest: int, tile: int, splits: bool, tmp_path: Path) -> None:
    sizes = {"size": {"longest_edge": longest}, "max_image_size": {"longest_edge": tile}}
    spec = vision(tmp_path, **sizes, do_image_splitting=splits)
    preparing = {**PREPARING, **sizes, "do_image_splitting": splits}
    processor = processor_of_transformers(kind, **preparing, return_row_col_info=True)
    for width, height in SIZES:
        image = picture(width, width, height)
        layout = make_tile_layout(width, height, spec, may_split=spec.splits_images)
        actual = np.stack(
            [normalize_pixels(each, spec.normalization).numpy() for each in layout.iter_resized_images(image)]
        )
        expected = processor(images=[[image]], return_tensors="np", return_row_col_info=True)
        np.testing.assert_allclose(actual.transpose(0, 3, 1, 2), expected["pixel_values"][0], atol=1e-5)
        assert (layout.rows, layout.columns) == (expected["rows"][0][0], expected["cols"][0][0])


@pytest.mark.parametrize("mode", ["RGBA", "LA", "L", "P", "CMYK", "1"])
def test_idefics3_pixels_of_image_mode_equal_transformers(mode: str, tmp_path: Path) -> None:
    image = picture(3, 60, 50)
    if mode in ("RGBA", "LA"):
        image.putalpha(picture(4, 60, 50).convert("L"))
    image = image.convert(mode)
    file = io.BytesIO()
    image.save(file, "JPEG" if mode == "CMYK" else "PNG")
    spec = vision(tmp_path)
    layout = make_tile_layout(60, 50, spec, may_split=True)
    tiles = layout.iter_resized_images(decode_upright(open_image(file.getvalue(), "image"), "image"))
    actual = np.stack([normalize_pixels(each, spec.normalization).numpy() for each in tiles])
    processor = processor_of_transformers("Idefics3", **PREPARING)
    expected = processor(images=[[Image.open(file)]], return_tensors="np")["pixel_values"][0]
    np.testing.assert_allclose(actual.transpose(0, 3, 1, 2), expected, atol=1e-5)


@pytest.mark.parametrize(
    ("preparing", "said"),
    [
        ({"do_normalize": False}, "do_normalize: false is not served"),
        ({"image_std": [0.5, 0, 0.5]}, "image_std: must not be 0"),
        ({"image_mean": [0.5]}, "image_mean"),
        ({"max_image_size": {"longest_edge": 41}}, "patch_size: tiles of 41 pixels"),
        ({"max_image_size": {"longest_edge": 10**9}}, "longest_edge"),
        ({"resample": "x"}, "resample"),
    ],
)
def test_invalid_idefics3_preprocessor_config_is_rejected(
    preparing: dict[str, object], said: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=said):
        vision(tmp_path, **preparing)


def test_idefics3_narrow_image_keeps_all_tiles(tmp_path: Path) -> None:
    """196 * (1 / 196) is less than 1: transformers' processor would make an image of width 0 of it, and raise."""
    sizes = {"size": {"longest_edge": 196}, "max_image_size": {"longest_edge": 49}}
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "smolvlm", "vision_config": {"patch_size": 7}, "scale_factor": 7})
    )
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({**PREPARING, **sizes}))
    spec = read_vision_spec(tmp_path)
    assert isinstance(spec, Idefics3VisionSpec)
    layout = make_tile_layout(1, 5000, spec, may_split=True)
    assert (layout.tiled_size, layout.rows, layout.columns) == ((49, 196), 4, 1)
    assert len(list(layout.iter_resized_images(picture(1, 1, 5000)))) == len(layout.token_run_lengths)
