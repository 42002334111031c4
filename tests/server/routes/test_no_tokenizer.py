"""A server without a tokenizer: token ids in and out, and no text."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from quire.engine.client.engine_client import EngineClient
from quire.engine.text.null_tokenizer import NullTokenizer
from quire.server.app import create_app
from quire.server.config import ServerConfig
from quire.server.served_model import ServedModelSpec
from tests.server.api import open_http
from tests.server.fake import FakeEngine, scripted
from tests.server.forked import FORKED

SIZE = 500
IDS = {"prompt": [1, SIZE - 1], "max_tokens": 3, "return_token_ids": True}


@asynccontextmanager
async def open_app() -> AsyncIterator[httpx.AsyncClient]:
    config = ServerConfig(skip_tokenizer_init=True, served_model_name=["model"])
    engine = FakeEngine(scripted([SIZE - 1, 7, 8, 9], 2), eos=[2])
    app = create_app(EngineClient(engine), ServedModelSpec(config, NullTokenizer(), SIZE, {}), launch_process=FORKED)
    async with open_http(app) as http:
        yield http


async def test_completion_takes_and_returns_token_ids() -> None:
    async with open_app() as http:
        choice = (await http.post("/v1/completions", json=IDS | {"logprobs": 1})).json()["choices"][0]
        assert (choice["text"], choice["token_ids"], choice["prompt_token_ids"]) == (
            "",
            [SIZE - 1, 7, 8],
            [1, SIZE - 1],
        )
        assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in (SIZE - 1, 7, 8)]
        streamed = await http.post("/v1/completions", json=IDS | {"stream": True, "ignore_eos": True})
        assert '"token_ids":[499' in streamed.text
        assert streamed.text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": "text"}, "prompt"),
        ("/v1/completions", {"prompt": [SIZE]}, "prompt"),
        ("/v1/completions", IDS | {"stop": ["a"]}, "stop"),
        ("/v1/completions", IDS | {"response_format": {"type": "json_object"}}, "structured_outputs"),
        ("/v1/completions", IDS | {"bad_words": ["a"]}, "prompt"),
        ("/v1/completions", IDS | {"dry_multiplier": 0.8}, "dry_sequence_breakers"),
        ("/v1/completions", IDS | {"logit_bias": {str(SIZE): 1}}, "logit_bias"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}, None),
        ("/v1/messages", {"model": "model", "max_tokens": 3, "messages": [{"role": "user", "content": "x"}]}, None),
        ("/v1/responses", {"input": "x"}, None),
        ("/tokenize", {"prompt": "text"}, "prompt"),
    ],
)
async def test_text_and_unknown_token_ids_are_rejected(path: str, body: dict[str, Any], param: str | None) -> None:
    async with open_app() as http:
        answer = await http.post(path, json=body)
        assert answer.status_code == 400, answer.text
        assert param is None or answer.json()["error"]["param"] == param, answer.text
