"""Embeddings of images: the whole server on a tiny Qwen3-VL, against transformers' vector of the last token."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.server.config import ServerConfig
from tests.server.api import Api
from tests.server.images.serving import serving
from tests.server.images.test_requests import data_url, file_of
from tests.tiny_vision import picture
from tests.vision_families import save_family, vector

FAMILY = "qwen3_vl"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_family(tmp_path_factory.mktemp("vision"), FAMILY)


@pytest.fixture(scope="module")
async def api(path: Path) -> AsyncIterator[Api]:
    async with serving(ServerConfig(model=str(path), runner="pooling", dtype="float32", num_kv_blocks=96)) as api:
        yield api


def talk(*parts: Any) -> list[dict[str, Any]]:
    """One turn of the user: pictures by their seeds, and texts."""
    content = [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image_url", "image_url": {"url": data_url(file_of(picture(part, 70, 50)))}}
        for part in parts
    ]
    return [{"role": "user", "content": content}]


async def asked(api: Api, messages: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    answer = await api.http.post("/v1/embeddings", json={"messages": messages, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.few(1)
@pytest.mark.parametrize("parts", [("See ", 1, " and ", 2), (3,), ("Text alone.",)], ids=str)
async def test_embedding_equals_transformers(api: Api, path: Path, parts: tuple[Any, ...]) -> None:
    content = [{"type": "text", "text": each} if isinstance(each, str) else {"type": "image"} for each in parts]
    images = [picture(each, 70, 50) for each in parts if isinstance(each, int)]
    expected = vector(path, FAMILY, [{"role": "user", "content": content}], images)
    response = await asked(api, talk(*parts))
    (only,) = response["data"]
    assert torch.tensor(only["embedding"]).double() == pytest.approx(expected, abs=1e-5)
    again = await asked(api, talk(*parts))  # its KV blocks are cached
    assert again["data"] == response["data"]
    assert response["usage"]["prompt_tokens"] > (12 if images else 0)
    short = await asked(api, talk(*parts), dimensions=8)
    assert len(short["data"][0]["embedding"]) == 8


async def test_invalid_image_is_rejected_with_field_path(api: Api) -> None:
    messages = talk("a")
    messages[0]["content"].append({"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}})
    answer = await api.http.post("/v1/embeddings", json={"messages": messages})
    assert answer.status_code == 400
    assert "messages[0].content[1].image_url.url: is not" in answer.json()["error"]["message"]
    answer = await api.http.post("/v1/embeddings", json={"input": [{"image": "x"}]})
    assert answer.status_code == 400
    assert "send them in `messages`" in answer.json()["error"]["message"]


async def test_embeddings_read_messages_when_input_is_null(api: Api) -> None:
    assert (await asked(api, talk("a"), input=None))["data"] == (await asked(api, talk("a")))["data"]
    answer = await api.http.post("/v1/embeddings", json={"messages": []})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages")
