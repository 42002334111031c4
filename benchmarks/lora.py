"""Cost of adapters: tokens per second of many streams without and with several adapters.

    python -m benchmarks.lora [--streams 32] [--adapters 8] [--rank 16] [--rounds 5] [--dtype bfloat16]

Random weights of smol-135m's shapes, random adapters of all linears: values do not affect speed. Both kinds of run take
turns in one engine; the best counts, so that other load affects both.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.common.engines import SMOL_135M, dummy, folder_of, request
from benchmarks.common.options import options
from quire.engine.checkpoint.model_resolver import read_model_config
from quire.engine.common.types import Adapter
from quire.engine.engine_core import EngineCore
from quire.engine.lora.adapter_store import AdapterStore
from quire.engine.lora.target_modules import adaptable_modules
from tests.adapters import save_adapter

TOKENS, PROMPT = 64, 16


def measure(engine: EngineCore, streams: int, adapters: list[Adapter | None], number: int) -> tuple[float, float]:
    """Decoded tokens per wall second and per processor second."""
    for index in range(streams):
        ids = [(7 * index + 13 * at + number) % 40_000 + 10 for at in range(PROMPT)]
        adapter = adapters[index % len(adapters)]
        engine.add_request(request(f"{number}-{index}", ids, TOKENS, adapter=adapter))
    tokens, began, busy = 0, 0.0, 0.0
    while engine.has_work:
        outputs = engine.step()
        if began:
            tokens += sum(len(output.new_ids) for output in outputs)
        elif sum(len(output.new_ids) for output in outputs) == 0 or engine.engine_stats.waiting:
            continue
        else:
            began, busy = time.perf_counter(), time.process_time()
    return tokens / (time.perf_counter() - began), tokens / (time.process_time() - busy)


def main() -> None:
    numbers = {"--streams": 32, "--adapters": 8, "--rank": 16, "--rounds": 5}
    args = options(__doc__, {**numbers, "--dtype": "bfloat16", "--quantization": {}})
    with tempfile.TemporaryDirectory() as temporary, folder_of(SMOL_135M) as model:
        root, modules = Path(temporary), adaptable_modules(read_model_config(model))
        with torch.device("meta"):  # for the adapters' shapes
            shapes = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model))
        (root / "spool").mkdir()
        spool = AdapterStore(root / "spool", modules, args.rank)
        made = [
            spool.add_adapter(f"a{index}", str(save_adapter(root / f"a{index}", shapes, args.rank, seed=index)))
            for index in range(args.adapters)
        ]
        engine = dummy(
            model,
            dtype=args.dtype,
            quantization=args.quantization,
            num_kv_blocks=args.streams * 8,
            enable_prefix_caching=False,
            enable_lora=True,
            max_loras=args.adapters,
            max_lora_rank=args.rank,
        )
        kinds: dict[str, list[Adapter | None]] = {"base": [None], "adapters": [*made], "one adapter": [made[0]]}
        best: dict[str, tuple[float, float]] = dict.fromkeys(kinds, (0.0, 0.0))
        for number in range(args.rounds * len(kinds)):
            kind = list(kinds)[number % len(kinds)]
            found = measure(engine, args.streams, kinds[kind], number)
            best[kind] = (max(best[kind][0], found[0]), max(best[kind][1], found[1]))
    for kind, (wall, cpu) in best.items():
        shares = f"{wall / best['base'][0]:.2f} of the base ({cpu / best['base'][1]:.2f} by processor time)"
        print(f"{kind:12} {wall:8.1f} tokens/s   {shares}")


if __name__ == "__main__":
    main()
