"""A tower's features are bitwise equal alone, in a batch of one shape, and in chunks of any size."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.engine.checkpoint.model_resolver import read_raw_config
from quire.engine.checkpoint.sizes.model_sizes import read_model_sizes
from quire.engine.common.config import EngineConfig
from quire.engine.common.types import Image
from quire.engine.encoders.vision.tower import Tower
from quire.engine.engine_core import EngineCore
from quire.engine.images.multimodal_prompt import RequestImage, make_multimodal_prompt_builder
from quire.engine.images.vision_config import read_vision_spec
from quire.engine.text.tokenizer import Tokenizer
from tests.tiny_vision import picture
from tests.vision_families import FAMILIES, save_family


def tower_and_images(path: Path, **options: Any) -> tuple[Tower, list[Image]]:
    """The engine's tower, and three images of one shape."""
    reader = make_multimodal_prompt_builder(path, Tokenizer.from_pretrained(path))
    assert reader is not None
    images = [reader.make_tiles_of_image(RequestImage("", picture(seed, 70, 50)))[0] for seed in (1, 2, 3)]
    served = EngineCore(EngineConfig(model=str(path), num_kv_blocks=8, dtype="bfloat16", max_model_len=64, **options))
    tower = served.executor._encoder_cache._tower  # type: ignore[attr-defined]
    assert isinstance(tower, Tower)
    return tower, images


@pytest.mark.few(3)
@pytest.mark.parametrize("name", FAMILIES)
def test_tower_features_do_not_depend_on_batch_or_chunks(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tower, images = tower_and_images(save_family(tmp_path, name))
    alone = [tower.encode_images([each])[0] for each in images]
    for module in ("encoder", "vision.qwen_vl"):
        monkeypatch.setattr(f"quire.engine.encoders.{module}.MAX_CHUNK_TOKENS", 12)
    for actual, expected in zip(tower.encode_images(images), alone, strict=True):
        assert torch.equal(actual, expected)


@pytest.mark.few(2)
@pytest.mark.parametrize("name", FAMILIES)
def test_tower_chunk_costs_sum_to_encoder_cost(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tower, images = tower_and_images(save_family(tmp_path, name))
    monkeypatch.setattr("quire.engine.encoders.encoder.MAX_CHUNK_TOKENS", 12)
    pieces = list(tower.encode_in_chunks(images[:1]))
    assert sum(pieces) == pytest.approx(images[0].encoder_cost, rel=0.1)
    assert max(pieces) < images[0].encoder_cost / 2


def test_int8_tower_features_are_close_and_bytes_equal_plan(tmp_path: Path) -> None:
    """Only the linears of the tower's layers are quantized."""
    path = save_family(tmp_path, "qwen3_vl")
    plain, images = tower_and_images(path)
    int8_tower, _ = tower_and_images(path, quantization="int8")
    (expected,), (actual,) = plain.encode_images(images[:1]), int8_tower.encode_images(images[:1])
    assert 0 < (actual - expected).float().norm() < 0.1 * expected.float().norm()
    options: dict[str, Any] = {"num_kv_blocks": 8, "dtype": "bfloat16", "max_model_len": 64, "quantization": "int8"}
    vision = read_vision_spec(path)
    assert vision is not None
    weight_bytes = EngineCore(EngineConfig(model=str(path), **options)).info.weight_bytes
    numbers = sum(math.prod(each.shape) for each in int8_tower.parameters().values())
    sizes = read_model_sizes(read_raw_config(str(path))[0])
    assert sizes.tower_bytes(2, "int8") == 2 * numbers - vision.num_linear_parameters
    assert sizes.tower_bytes(2, None) == 2 * numbers
    assert weight_bytes < 2 * sizes.num_parameters + sizes.tower_bytes(2, "int8")
