"""Perplexity of a text under a model, for each way of quantizing it, as Quire computes it on this machine.

python -m benchmarks.perplexity MODEL TEXT [--tokens 8192] [--context 512] [--ways none int8 kv-int8 int4+kv-fp8]

The first way is what the others are compared with. kv-int8 and kv-fp8 are types of the KV cache, the others of the
weights. What is counted is each token but the first of every piece of --context tokens.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch

from benchmarks.common.options import options
from quire.engine.checkpoint.files import read_model_config, resolve_model
from quire.engine.config import EngineConfig
from quire.engine.models.decoder import Decoder
from quire.engine.text.tokenizer import Tokenizer
from quire.engine.worker.device import choose
from quire.engine.worker.loading.model import load_model
from quire.engine.worker.memory import allocate_pages, layers_of, prompts


def config_of(model: str, dtype: str, way: str) -> EngineConfig:
    parts = [part for part in way.split("+") if part != "none"]
    kv = [part.removeprefix("kv-") for part in parts if part.startswith("kv-")]
    weights = [part for part in parts if not part.startswith("kv-")]
    settings = {"quantization": weights[0] if weights else None, "kv_cache_dtype": kv[0] if kv else "auto"}
    return EngineConfig(model=model, dtype=dtype, **settings)


def load(config: EngineConfig, context: int) -> tuple[Decoder, int]:
    """The model, and the tokens of a page."""
    path = resolve_model(config.model, None)
    model_config = read_model_config(path)
    config = config.model_copy(update={"max_model_len": context})
    chosen = choose(config, model_config)
    with torch.inference_mode():
        model = load_model(config, path, model_config, chosen, lambda: None).model
    return model, chosen.backend.block_size


@torch.inference_mode()
def log_probabilities(model: Decoder, tokens: torch.Tensor, block_size: int = 16) -> torch.Tensor:
    """Of each token but the first of every row of tokens [rows, context], in float64."""
    found = []
    for row in tokens:
        metadata = prompts(1, len(row), block_size, model.device, model.groups.count)
        pages = layers_of(model, allocate_pages(model, metadata.block_table.numel() * model.groups.count))
        hidden = model.forward(row.to(model.device), metadata, pages, torch.arange(len(row), device=model.device))
        logits = model.logits(hidden)[:-1].double()
        found.append(logits.log_softmax(-1).gather(1, row[1:, None].to(model.device)).squeeze(1).cpu())
    return torch.cat(found)


def measured(config: EngineConfig, tokens: torch.Tensor) -> torch.Tensor:
    model, block_size = load(config, tokens.shape[1])
    return log_probabilities(model, tokens, block_size)


def main() -> None:
    ways = {"nargs": "+", "default": ["none", "int8", "int4", "fp8", "kv-int8", "kv-fp8"]}
    given = {"model": str, "text": Path, "--tokens": 8192, "--context": 512, "--dtype": "auto", "--ways": ways}
    args = options(__doc__, given)
    ids = Tokenizer.load(resolve_model(args.model, None)).encode(
        args.text.read_text(encoding="utf-8")[: 8 * args.tokens]
    )
    tokens = torch.tensor(ids)[: args.tokens // args.context * args.context].view(-1, args.context)
    base = None
    for way in args.ways:
        got = measured(config_of(args.model, args.dtype, way), tokens)
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
