"""A long conversation with recurrent models, drafts, prefix caching and engine kills: each turn's tokens equal those of
a server that computes every turn afresh, and only new tokens are computed.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest

from quire.engine.common.config import DEMO_MODEL
from tests.e2e.server import Server
from tests.tiny_models import save_tiny_model

pytestmark = pytest.mark.slow

TURNS, KILLS = 40, (13, 27)
EVERY = 48
"""Tokens between two state snapshots."""
FLAGS = ("--threads", "1", "--max-model-len", "2048", "--snapshot-tokens", str(EVERY), "--dtype", "bfloat16")
VOCAB = 4096


def save_model_with_demo_tokenizer(folder: Path, family: str) -> Path:
    """Save a tiny model of the family with the embedded model's tokenizer."""
    path = save_tiny_model(folder / "model", family, vocab_size=VOCAB, max_position_embeddings=2048)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(DEMO_MODEL) / name, path)
    return path


async def turn(client: httpx.AsyncClient, prompt: list[int], on_chunk: Any = None) -> tuple[list[int], int]:
    """Return the answer's token ids and the number of prompt tokens that were computed."""
    body = {"model": "m", "prompt": prompt, "max_tokens": 18, "seed": len(prompt), "stream": True}
    body |= {"temperature": 0.7 if len(prompt) % 2 else 0.0}
    body |= {"ignore_eos": True, "return_token_ids": True, "stream_options": {"include_usage": True}}
    ids, computed = list[int](), 0
    async with client.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            for choice in chunk["choices"]:
                ids += choice["token_ids"]
            if len(ids) > 4 and on_chunk is not None:
                on_chunk()
                on_chunk = None
            if usage := chunk.get("usage"):
                computed = usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"]
    return ids, computed


@pytest.mark.parametrize("family", ["qwen3_5", "falcon_h1", "zamba2", "nemotron_h-latent", "jamba", "lfm2", "lfm3"])
async def test_40_turns_equal_uncached_server_with_drafts_and_engine_kills(family: str, tmp_path: Path) -> None:
    model = ("--model", str(save_model_with_demo_tokenizer(tmp_path, family)), "--served-model-name", "m", *FLAGS)
    fresh = Server(tmp_path / "fresh", *model, "--no-enable-prefix-caching")
    server = Server(tmp_path / "log", *model, "--speculative-config", "ngram")

    def kill() -> None:
        engine = server.engine_pid()
        assert engine, "0 would be this process and all that it started"
        os.kill(engine, signal.SIGKILL)

    rng = random.Random(5)
    history, context_length, drafts = [rng.randrange(3, VOCAB) for _ in range(70)], 0, 0.0
    async with (
        httpx.AsyncClient(base_url=server.url, timeout=240) as client,
        httpx.AsyncClient(base_url=fresh.url, timeout=240) as other,
    ):
        for number in range(TURNS):
            text = [rng.randrange(3, VOCAB) for _ in range(3)]
            prompt = history + text * 3  # so that n-grams repeat and drafts are made
            actual, computed = await turn(client, prompt, kill if number in KILLS else None)
            expected, uncached_computed = await turn(other, prompt)
            assert actual == expected, f"turn {number}"
            assert len(actual) == 18
            assert uncached_computed == len(prompt)
            if number not in KILLS and number:
                new = len(prompt) - context_length
                # An engine that had finished its answer before the kill computes nothing again, and its cache is empty.
                had_ended = number - 1 in KILLS and computed == len(prompt)
                assert computed <= new + EVERY or had_ended, f"turn {number}: {computed} tokens, {new} are new"
            history, context_length = prompt + actual, len(prompt) + len(actual)
            drafts = max(drafts, server.metric("vllm:spec_decode_num_draft_tokens_total"))
        await asyncio.to_thread(server.wait)
    assert server.metric("quire:engine_deaths_total") == len(KILLS)
    assert drafts > 0
    assert [each.stop() for each in (fresh, server)] == [0, 0]
