"""Vectors from an engine run by hand, and sentence-transformers' files for tiny models."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from quire.engine.common.request_params import PoolingParams
from quire.engine.common.types import EngineCoreRequest
from quire.engine.engine_core import EngineCore

Modules = list[tuple[str, str, dict[str, Any]]]


def vectors(
    engine: EngineCore,
    prompts: Sequence[list[int]],
    params: PoolingParams | Sequence[PoolingParams] | None = None,
    others: Sequence[EngineCoreRequest] = (),
) -> list[np.ndarray]:
    """The vector of each prompt, all submitted at once after `others`. Bits are kept: compare with `same`."""
    given = [params or PoolingParams()] * len(prompts) if not isinstance(params, Sequence) else params
    for request in others:
        engine.add_request(request)
    for index, prompt in enumerate(prompts):
        engine.add_request(EngineCoreRequest(id=f"v{index}", prompt_ids=prompt, params=given[index], seed=0))
    found: dict[str, bytes] = {}
    while engine.has_work:
        for output in engine.step():
            assert output.error is None, output.error
            if output.vector is not None:
                assert output.finish_reason == "stop"
                found[output.id] = output.vector
    engine.scheduler.kv_cache_manager.block_pool.check_invariants()
    return [np.frombuffer(found[f"v{index}"], dtype="<f4") for index in range(len(prompts))]


def same(some: Sequence[np.ndarray], others: Sequence[np.ndarray]) -> bool:
    return [each.tobytes() for each in some] == [each.tobytes() for each in others]


def write_modules(path: Path, *modules: tuple[str, str, dict[str, Any]]) -> None:
    """modules.json with a Transformer and these: folder, type, config.json."""
    listed = [("", "Transformer", {}), *modules]
    entries = [
        {"idx": index, "name": str(index), "path": folder, "type": f"sentence_transformers.models.{kind}"}
        for index, (folder, kind, _) in enumerate(listed)
    ]
    (path / "modules.json").write_text(json.dumps(entries))
    for folder, _, config in listed[1:]:
        (path / folder).mkdir(exist_ok=True)
        (path / folder / "config.json").write_text(json.dumps(config))


def pooling_module(size: int, mode: str) -> tuple[str, str, dict[str, Any]]:
    flags = {"cls": "pooling_mode_cls_token", "mean": "pooling_mode_mean_tokens", "last": "pooling_mode_lasttoken"}
    chosen = {flag: name == mode for name, flag in flags.items()}
    return "1_Pooling", "Pooling", {"word_embedding_dimension": size, **chosen}


NORMALIZE: tuple[str, str, dict[str, Any]] = ("2_Normalize", "Normalize", {})
