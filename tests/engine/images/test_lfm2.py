"""LFM2-VL against transformers, whose processor for it needs torchvision. Its code for sizes, tiles and tokens runs
here with PyTorch's interpolation of bytes, which torchvision calls too.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForImageTextToText

from quire.engine.families.vision.lfm2_vl import Lfm2VisionSpec
from quire.engine.images.vision_config import read_vision_spec
from tests.engine.harness import run
from tests.engine.images.test_families import about, bits, engine
from tests.tiny_vision import picture
from tests.vision_families import FAMILIES, Family, save_family

SETTINGS: dict[str, Any] = {
    **{"downsample_factor": 2, "min_tiles": 2, "max_tiles": 6, "use_thumbnail": True, "min_image_tokens": 4},
    **{"max_image_tokens": 16, "encoder_patch_size": 4, "tile_size": 24, "max_pixels_tolerance": 2.0},
}
TILES = tuple(f"<|img_row_{row}_col_{column}|>" for row in range(1, 7) for column in range(1, 7))
FAMILY = Family(
    config="Lfm2VlConfig",
    processor="",
    image_processor="",
    text={
        **{"model_type": "lfm2", "vocab_size": 320, "hidden_size": 64, "intermediate_size": 160},
        **{"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "eos_token_id": 258},
        **{"max_position_embeddings": 2048, "layer_types": ["conv", "full_attention", "conv"]},
    },
    vision={
        "model_type": "siglip2_vision_model",
        **{"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 3},
        **{"num_patches": 25, "patch_size": 4, "vision_use_head": False},
    },
    preparing={**SETTINGS, "resample": 2, "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]},
    image="<image>",
    written="<image>",
    outer={"projector_hidden_size": 80, "downsample_factor": 2},
    tokens={"image_token": "<image>"},
    others=("<|image_start|>", "<|image_end|>", "<|img_thumbnail|>", *TILES),
)
SIZES = [(40, 30), (16, 16), (70, 50), (30, 200), (160, 40), (90, 90), (9, 300)]


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setitem(FAMILIES, "lfm2_vl", FAMILY)
    return save_family(tmp_path, "lfm2_vl")


@pytest.fixture
def theirs(monkeypatch: pytest.MonkeyPatch) -> Any:
    backends: Any = import_module("transformers.image_processing_backends")
    for name in ("", ".transforms", ".transforms.v2", ".transforms.v2.functional"):
        monkeypatch.setitem(sys.modules, f"torchvision{name}", ModuleType(f"torchvision{name}"))
    v2: Any = sys.modules["torchvision.transforms.v2"]
    v2.functional = sys.modules["torchvision.transforms.v2.functional"]

    def resize(self: Any, image: Tensor, size: Any, **_: Any) -> Tensor:
        return F.interpolate(image, (size.height, size.width), mode="bilinear", antialias=True)

    monkeypatch.setattr(backends.TorchvisionBackend, "resize", resize)
    return import_module("transformers.models.lfm2_vl.image_processing_lfm2_vl").Lfm2VlImageProcessor


def prepare_with_transformers(theirs: Any, seed: int, size: tuple[int, int]) -> tuple[list[Tensor], int, int]:
    """The tiles of a picture, uint8 [3, height, width], and their rows and columns."""
    image = torch.from_numpy(np.array(picture(seed, *size))).permute(2, 0, 1)[None]
    processor = object.__new__(theirs)
    (parts,), (rows,), (columns,), _ = theirs.resize_and_split(processor, image, **SETTINGS, resample=None)
    return list(parts), rows, columns


def test_lfm2_vl_tiles_and_pixels_equal_transformers(path: Path, theirs: Any) -> None:
    vision = read_vision_spec(path)
    assert isinstance(vision, Lfm2VisionSpec)
    for number, size in enumerate(SIZES):
        parts, rows, columns = prepare_with_transformers(theirs, number, size)
        layout = vision.make_layout(*size)
        assert (layout.rows, layout.columns) == (rows, columns)
        tiles = list(layout.iter_resized_images(picture(number, *size)))
        assert [(each.height, each.width) for each in tiles] == [tuple(each.shape[1:]) for each in parts]
        assert [sum(each) for each in layout.token_run_lengths] == [
            each.shape[1] * each.shape[2] // 64 for each in parts
        ]
        for tile, part in zip(tiles, parts, strict=True):
            pixels = np.frombuffer(tile.pixels, dtype=np.uint8).reshape(tile.height, tile.width, 3)
            difference = np.abs(pixels.astype(int) - part.permute(1, 2, 0).numpy().astype(int))
            assert difference.max() <= 1


def test_lfm2_vl_answer_equals_transformers(path: Path, theirs: Any) -> None:
    """transformers gets the pixels that Quire prepares, so that a rounding difference in resizing does not matter."""
    request = about(path, "lfm2_vl", "a", 1, 2)
    answer = run(engine(path, dtype="float32"), [request])["a"]
    most = max(each.height * each.width for each in request.images) // 16
    pixels, shapes = [], []
    for each in request.images:
        rows, columns = each.height // 4, each.width // 4
        image = torch.frombuffer(bytearray(each.pixels), dtype=torch.uint8).view(rows, 4, columns, 4, 3)
        patches = image.transpose(1, 2).reshape(rows * columns, 48).double() / 255 * 2 - 1
        pixels.append(F.pad(patches, (0, 0, 0, most - len(patches))))
        shapes.append([rows, columns])
    masks = torch.tensor([[1] * (rows * columns) + [0] * (most - rows * columns) for rows, columns in shapes])
    model: Any = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float64)
    with torch.inference_mode():
        logits = model(
            input_ids=torch.tensor([[*request.prompt_ids, *answer.ids]]),
            pixel_values=torch.stack(pixels),
            spatial_shapes=torch.tensor(shapes),
            pixel_attention_mask=masks,
        ).logits[0]
    expected = logits.log_softmax(-1)[len(request.prompt_ids) - 1 : -1]
    assert expected.argmax(-1).tolist() == answer.ids
    actual = [each.logprob for each in answer.logprobs]
    assert actual == pytest.approx(expected.max(-1).values.tolist(), abs=1e-4)


def test_lfm2_vl_logprobs_do_not_depend_on_batching(path: Path) -> None:
    requests = [about(path, "lfm2_vl", "a", 1), about(path, "lfm2_vl", "b", 2, 3)]
    expected = {each.id: run(engine(path, enable_prefix_caching=False), [each])[each.id] for each in requests}
    for options in ({}, {"max_num_batched_tokens": 24}):
        served = engine(path, **options)
        for _ in range(2):
            assert bits(run(served, requests)) == bits(expected)
