from __future__ import annotations

import json
import random
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quire.engine.common.config import EngineConfig
from quire.engine.common.request_params import SamplingParams
from quire.engine.common.types import EngineCoreRequest
from quire.engine.engine_core import EngineCore

SMOL_135M: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "eos_token_id": 0,
    "bos_token_id": 0,
}


@dataclass
class Answered:
    """Times are `time.perf_counter()`."""

    arrived: float
    tokens: list[float] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    cached: int = 0
    """Number of cached tokens."""

    @property
    def latency(self) -> float:
        return self.tokens[-1] - self.arrived

    @property
    def first(self) -> float:
        """Seconds to the first token."""
        return self.tokens[0] - self.arrived

    @property
    def gaps(self) -> list[float]:
        return [after - before for before, after in zip(self.tokens, self.tokens[1:], strict=False)]


@contextmanager
def folder_of(config: Mapping[str, Any]) -> Iterator[Path]:
    """A model folder with only this config.json."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config))
        yield Path(folder)


def dummy(folder: Path, **options: Any) -> EngineCore:
    """`options`: EngineConfig settings."""
    settings = {"model": str(folder), "load_format": "dummy", "skip_tokenizer_init": True}
    return EngineCore(EngineConfig(**settings | options))  # type: ignore[arg-type]


def request(name: str, prompt: Sequence[int], tokens: int, *, seed: int = 0, **more: Any) -> EngineCoreRequest:
    """A greedy request that generates all `tokens`. `more`: fields of the request or of SamplingParams."""
    fields = {key: more.pop(key) for key in list(more) if key in EngineCoreRequest.__struct_fields__}
    chosen = SamplingParams(**({"temperature": 0.0, "max_tokens": tokens, "ignore_eos": True} | more))
    return EngineCoreRequest(id=name, prompt_ids=list(prompt), params=chosen, seed=seed, **fields)


def random_prompt(length: int, seed: object, ids: range = range(1, SMOL_135M["vocab_size"])) -> list[int]:
    return random.Random(str(seed)).choices(ids, k=length)


def answer(made: EngineCore, arrivals: Sequence[tuple[float, EngineCoreRequest]]) -> dict[str, Answered]:
    """Submit each request after its delay in seconds; return when all have ended."""
    began, coming = time.perf_counter(), sorted(arrivals, key=lambda arrival: arrival[0])
    found: dict[str, Answered] = {}
    while coming or made.has_work:
        now = time.perf_counter()
        while coming and coming[0][0] <= now - began:
            after, each = coming.pop(0)
            found[each.id] = Answered(began + after)
            made.add_request(each)
        if not made.has_work:
            time.sleep(max(0.0, coming[0][0] - (time.perf_counter() - began)))
            continue
        outputs, now = made.step(), time.perf_counter()
        for output in outputs:
            one = found[output.id]
            one.tokens += [now] * len(output.new_ids)
            one.ids += output.new_ids
            one.cached = max(one.cached, output.cached_tokens)
    return found


def at_once(made: EngineCore, requests: Sequence[EngineCoreRequest]) -> dict[str, Answered]:
    return answer(made, [(0.0, each) for each in requests])
