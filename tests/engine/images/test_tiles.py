"""Pixels and layouts of tiles against transformers' Pillow backends."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

from quire.engine.encoders.vision.tower import normalised
from quire.engine.errors import ModelError
from quire.engine.images.config import read_vision
from quire.engine.images.decode import opened, upright
from quire.engine.images.tiles import Tiled, layout_of
from tests.tiny_vision import PREPARING, picture

SIZES = [(640, 480), (30, 200), (40, 40), (81, 33), (3000, 200), (1, 900), (1000, 1)]


def vision(path: Path, **preparing: object) -> Tiled:
    (path / "config.json").write_text(json.dumps({"model_type": "smolvlm", "vision_config": {"patch_size": 2}}))
    (path / "preprocessor_config.json").write_text(json.dumps({**PREPARING, **preparing}))
    found = read_vision(path)
    assert isinstance(found, Tiled)
    return found


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", [SmolVLMImageProcessorPil, Idefics3ImageProcessorPil])
@pytest.mark.parametrize(("longest", "tile"), [(80, 40), (4 * 84, 84)])
@pytest.mark.parametrize("splits", [True, False])
def test_tiles_are_as_transformers_has_them(kind: type, longest: int, tile: int, splits: bool, tmp_path: Path) -> None:
    sizes = {"size": {"longest_edge": longest}, "max_image_size": {"longest_edge": tile}}
    ours = vision(tmp_path, **sizes, do_image_splitting=splits)
    theirs = kind(**{**PREPARING, **sizes, "do_image_splitting": splits}, return_row_col_info=True)
    for width, height in SIZES:
        image = picture(width, width, height)
        layout = layout_of(width, height, ours, splits=ours.splits)
        found = np.stack([normalised(each, ours.colours).numpy() for each in layout.contents(image)])
        wanted = theirs(images=[[image]], return_tensors="np", return_row_col_info=True)
        assert found.transpose(0, 3, 1, 2) == pytest.approx(wanted["pixel_values"][0], abs=1e-5)
        assert (layout.rows, layout.columns) == (wanted["rows"][0][0], wanted["cols"][0][0])


@pytest.mark.parametrize("mode", ["RGBA", "LA", "L", "P", "CMYK", "1"])
def test_every_mode_becomes_the_same_colours(mode: str, tmp_path: Path) -> None:
    image = picture(3, 60, 50)
    if mode in ("RGBA", "LA"):
        image.putalpha(picture(4, 60, 50).convert("L"))
    image = image.convert(mode)
    file = io.BytesIO()
    image.save(file, "JPEG" if mode == "CMYK" else "PNG")
    ours = vision(tmp_path)
    layout = layout_of(60, 50, ours, splits=True)
    tiles = layout.contents(upright(opened(file.getvalue(), "image"), "image"))
    found = np.stack([normalised(each, ours.colours).numpy() for each in tiles])
    theirs = Idefics3ImageProcessorPil(**PREPARING)
    wanted = theirs(images=[[Image.open(file)]], return_tensors="np")["pixel_values"][0]
    assert found.transpose(0, 3, 1, 2) == pytest.approx(wanted, abs=1e-5)


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
def test_a_broken_folder_says_what_is_wrong(preparing: dict[str, object], said: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=said):
        vision(tmp_path, **preparing)


def test_no_tile_is_lost_to_rounding(tmp_path: Path) -> None:
    """196 * (1 / 196) is less than 1: transformers' processor would make an image without width of it, and raise."""
    sizes = {"size": {"longest_edge": 196}, "max_image_size": {"longest_edge": 49}}
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "smolvlm", "vision_config": {"patch_size": 7}, "scale_factor": 7})
    )
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({**PREPARING, **sizes}))
    ours = read_vision(tmp_path)
    assert isinstance(ours, Tiled)
    layout = layout_of(1, 5000, ours, splits=True)
    assert (layout.cut, layout.rows, layout.columns) == ((49, 196), 4, 1)
    assert len(list(layout.contents(picture(1, 1, 5000)))) == len(layout.runs)
