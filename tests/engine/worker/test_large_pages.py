"""Tests prefixes that share the beginning of a large block: hash blocks of 16 tokens are found, and copied exactly."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from quire.engine.common.config import EngineConfig
from quire.engine.common.types import EngineCoreRequest
from quire.engine.engine_core import EngineCore
from quire.engine.worker import device_plan
from quire.kernels.reference import ReferenceBackend
from tests.engine.harness import Answer, request, run
from tests.tiny_models import VOCAB, save_tiny_model

PAGE = 64


@pytest.fixture
def large_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference backend with a block size of 64 tokens."""
    backend = ReferenceBackend()
    backend.block_size = PAGE
    monkeypatch.setattr(device_plan, "select_backend", lambda *_, **__: (backend, "large pages"))


def prompts() -> list[list[int]]:
    """Prompts in families that are equal up to some token."""
    generator = torch.Generator().manual_seed(11)
    stem = torch.randint(3, VOCAB, (200,), generator=generator).tolist()
    return [
        stem[:length] + torch.randint(3, VOCAB, (1 + 5 * index,), generator=generator).tolist()
        for index, length in enumerate([100, 100, 15, 16, 17, 63, 64, 65, 128, 150, 180, 200])
    ]


def answers(path: Path, requests: list[EngineCoreRequest], **options: object) -> tuple[dict[str, Answer], EngineCore]:
    engine = EngineCore(EngineConfig(model=str(path), max_num_batched_tokens=128, **options))
    assert engine.info.block_size == PAGE
    return {each.id: run(engine, [each])[each.id] for each in requests} | run(engine, repeat_requests(requests)), engine


def repeat_requests(requests: list[EngineCoreRequest]) -> list[EngineCoreRequest]:
    return [
        EngineCoreRequest(id=f"{r.id} again", prompt_ids=r.prompt_ids, params=r.params, seed=r.seed) for r in requests
    ]


@pytest.mark.few(1)
@pytest.mark.usefixtures("large_pages")
@pytest.mark.parametrize(("family", "blocks"), [("qwen3", 60), ("qwen3", 12), ("gpt_oss", 12), ("lfm2", 12)])
def test_forked_large_blocks_keep_tokens(family: str, blocks: int, tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path, family, num_hidden_layers=2)
    requests = [
        request(str(index), prompt, seed=index, max_tokens=8, temperature=index % 2)
        for index, prompt in enumerate(prompts())
    ]
    plain, _ = answers(path, requests, num_kv_blocks=60, enable_prefix_caching=False)
    forked, engine = answers(path, requests, num_kv_blocks=blocks, max_model_len=300)
    assert {name: answer.ids for name, answer in forked.items()} == {n: answer.ids for n, answer in plain.items()}
    assert engine.engine_stats.prefix_hits > 1000
    assert engine.info.page_groups == (2 if family == "gpt_oss" else 1)
    if blocks == 60:
        hits = [forked[str(index)].cached_tokens for index in range(len(requests))]
        # The second prompt shares 100 tokens with "0": a block and two hash blocks. Hits count in hash blocks of 16
        # tokens.
        assert hits == [0, 96, 0, 16, 16, 48, 64, 64, 96, 128, 144, 176]
