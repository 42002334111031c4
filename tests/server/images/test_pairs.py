"""CLIP and SigLIP: embeddings of texts and images from the whole server, against transformers in float64."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import httpx
import pytest
import tokenizers
import torch
import transformers
from openai import AsyncOpenAI
from tokenizers import decoders, models, pre_tokenizers, processors
from torch import Tensor

from quire.engine.checkpoint.model_resolver import read_raw_config
from quire.engine.checkpoint.sizes.model_sizes import read_model_sizes
from quire.server.config import ServerConfig
from tests.server.images.serving import serving
from tests.server.images.test_vectors import talk
from tests.texts import BYTES
from tests.tiny_vision import picture

END, PAD = 256, 257
TEXT = {
    **{"vocab_size": 258, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3},
    **{"num_attention_heads": 4, "max_position_embeddings": 40},
}
VISION = {
    **{"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 3},
    **{"image_size": 24, "patch_size": 4},
}
PREPARING: dict[str, dict[str, Any]] = {
    "clip": {"size": {"shortest_edge": 24}, "crop_size": {"height": 24, "width": 24}, "resample": 3},
    "siglip": {"size": {"height": 24, "width": 24}, "resample": 3},
}


def save_pair(path: Path, kind: str) -> Path:
    torch.manual_seed(5)
    model: Any
    if kind == "clip":
        text = {**TEXT, "eos_token_id": END}
        model = transformers.CLIPModel(
            transformers.CLIPConfig(text_config=text, vision_config=VISION, projection_dim=32)
        )
    else:
        text = {**TEXT, "projection_size": 48}
        model = transformers.SiglipModel(transformers.SiglipConfig(text_config=text, vision_config=VISION))
    for name, each in model.named_parameters():
        if each.ndim > 1:
            torch.nn.init.normal_(each, std=0.5 if "embedding" in name else 1.5 * each[0].numel() ** -0.5)
        elif each.ndim:
            torch.nn.init.normal_(each, mean=0.0 if "bias" in name else 1.0, std=0.2)
    model.save_pretrained(path)
    (path / "preprocessor_config.json").write_text(json.dumps(PREPARING[kind]))
    backend = tokenizers.Tokenizer(models.BPE({character: i for i, character in enumerate(BYTES)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<end>", "<pad>"])
    backend.post_processor = processors.TemplateProcessing(single="$A <end>", special_tokens=[("<end>", END)])
    backend.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>", "pad_token": "<pad>"}))
    return path


@dataclass
class Served:
    http: httpx.AsyncClient
    openai: AsyncOpenAI
    kind: str
    path: Path

    async def vector(self, **body: Any) -> Tensor:
        answer = await self.http.post("/v1/embeddings", json=body)
        assert answer.status_code == 200, answer.text
        return torch.tensor(answer.json()["data"][0]["embedding"])

    def theirs(self, text: str | None = None, seed: int = 0) -> Tensor:
        """Return transformers' embedding of a text, or of a picture."""
        clip = self.kind == "clip"
        model: Any = transformers.AutoModel.from_pretrained(self.path, dtype=torch.float64)
        with torch.inference_mode():
            if text is not None:
                ids = [*text.encode(), END]
                ids += [] if clip else [PAD] * (40 - len(ids))
                output = model.get_text_features(input_ids=torch.tensor([ids]))
            else:
                processors = import_module(f"transformers.models.{self.kind}.image_processing_pil_{self.kind}")
                processor_class = processors.CLIPImageProcessorPil if clip else processors.SiglipImageProcessorPil
                pixels = processor_class(**PREPARING[self.kind])(images=[picture(seed, 70, 50)], return_tensors="pt")
                output = model.get_image_features(pixel_values=pixels["pixel_values"].double())
        return torch.nn.functional.normalize(output.pooler_output[0], dim=0)


@pytest.fixture(scope="module", params=["clip", "siglip"])
async def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    path = save_pair(tmp_path_factory.mktemp("pair"), request.param)
    async with serving(ServerConfig(model=str(path), dtype="float32", max_num_batched_tokens=64)) as api:
        yield Served(api.http, api.openai, request.param, path)


@pytest.mark.slow
async def test_text_and_image_embeddings_equal_float64_transformers(served: Served) -> None:
    for text in ("a", "A cat on a mat."):
        expected = served.theirs(text)
        assert (await served.vector(input=text)).double() == pytest.approx(expected, abs=1e-5)
        assert (await served.vector(messages=talk(text))).double() == pytest.approx(expected, abs=1e-5)
    for seed in (1, 2):
        expected = served.theirs(seed=seed)
        assert (await served.vector(messages=talk(seed))).double() == pytest.approx(expected, abs=1e-5)


async def test_embeddings_are_bitwise_equal_alone_and_in_batch(served: Served) -> None:
    """Images, which take several steps here, run together with texts and with each other."""
    bodies: list[dict[str, Any]] = [{"messages": talk(seed)} for seed in (1, 2, 3, 1)]
    bodies += [{"input": text} for text in ("a", "longer than that")]
    alone = [await served.vector(**each) for each in bodies]
    together = await asyncio.gather(*(served.vector(**each) for each in bodies))
    for actual, expected in zip(together, alone, strict=True):
        assert torch.equal(actual, expected)


async def test_embeddings_reject_more_than_one_text_or_image(served: Served) -> None:
    for messages in (talk("See", 1), talk(1, 2), [*talk("a"), *talk("b")]):
        answer = await served.http.post("/v1/embeddings", json={"messages": messages})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages")
        assert "one text or one image" in answer.json()["error"]["message"]
    answer = await served.http.post("/v1/embeddings", json={"input": "long " * 20})
    assert answer.status_code == 400
    (card,) = (await served.http.get("/v1/models")).json()["data"]
    assert "image" in card["architecture"]["input_modalities"]


async def test_model_sizes_count_text_and_vision_parameters(served: Served) -> None:
    sizes = read_model_sizes(read_raw_config(str(served.path))[0])
    model: Any = transformers.AutoModel.from_pretrained(served.path)
    vision = sum(each.numel() for name, each in model.named_parameters() if name.startswith(("vision", "visual")))
    assert sizes.tower_parameters == vision
    text = sum(each.numel() for name, each in model.named_parameters() if not name.startswith(("vision", "visual")))
    assert sizes.num_parameters == pytest.approx(text, rel=0.05)  # without what follows the pooling
