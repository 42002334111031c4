"""Perplexity of a text for each quantization of a model, on this machine.

python -m benchmarks.perplexity MODEL TEXT [--tokens 8192] [--context 512] [--ways none int8 kv-int8 int4+kv-fp8]

The first way is the baseline. kv-int8 and kv-fp8 are KV cache types, others weight types. All tokens count except the
first of each --context tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.common.engines import request
from benchmarks.common.options import options
from quire.engine.checkpoint.model_resolver import resolve_model
from quire.engine.common.config import EngineConfig
from quire.engine.engine_core import EngineCore
from quire.engine.text.tokenizer import Tokenizer
from tests.engine.harness import run


def engine_of(model: Path, dtype: str, way: str, context: int) -> EngineCore:
    parts = [part for part in way.split("+") if part != "none"]
    kv = [part.removeprefix("kv-") for part in parts if part.startswith("kv-")]
    weights = [part for part in parts if not part.startswith("kv-")]
    settings: dict[str, Any] = {
        "quantization": weights[0] if weights else None,
        "kv_cache_dtype": kv[0] if kv else "auto",
    }
    sizes: dict[str, Any] = {"max_model_len": context + 1, "max_num_batched_tokens": context, "max_num_seqs": 1}
    return EngineCore(EngineConfig(model=str(model), dtype=dtype, skip_tokenizer_init=True, **settings, **sizes))


def log_probabilities(engine: EngineCore, rows: Sequence[list[int]]) -> Tensor:
    """Log probabilities of all tokens except each row's first, in float64."""
    answers = run(engine, [request(str(number), row, 1, prompt_logprobs=0) for number, row in enumerate(rows)])
    every = (each for number in range(len(rows)) for each in answers[str(number)].prompt_logprobs or ())
    return torch.tensor([each.logprob for each in every if each is not None], dtype=torch.float64)


def main() -> None:
    ways = {"nargs": "+", "default": ["none", "int8", "int4", "fp8", "kv-int8", "kv-fp8"]}
    given = {"model": str, "text": Path, "--tokens": 8192, "--context": 512, "--dtype": "auto", "--ways": ways}
    args = options(__doc__, given)
    model = resolve_model(args.model, None)
    ids = Tokenizer.from_pretrained(model).encode(args.text.read_text(encoding="utf-8")[: 8 * args.tokens])[
        : args.tokens
    ]
    rows = [ids[at : at + args.context] for at in range(0, len(ids) - args.context + 1, args.context)]
    base = None
    for way in args.ways:
        got = log_probabilities(engine_of(model, args.dtype, way, args.context), rows)
        base = got if base is None else base
        more = math.expm1((base - got).mean().item()) * 100
        change = (got - base).abs().mean().item()
        print(
            f"{way:12} perplexity {math.exp(-got.mean()):.4f} ({more:+.3f} %), "
            f"mean change of a log probability {change:.4f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
