"""`quire bench latency`: vLLM's measurement of this name: a batch of prompts at a time, from its first step to its last
token, by the LLM class in this process."""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Sequence
from pathlib import Path

from quire.engine.config import EngineConfig
from quire.engine.offline.llm import LLM
from quire.engine.offline.params import SamplingParams
from quire.server.cli.bench.report import check_report
from quire.server.cli.bench.saved import percentile_of
from quire.server.cli.bench.workload import FIRST_ID
from quire.server.cli.flags import add, command
from quire.server.cli.settings import add_flags, number, parse

_PERCENTS = (10, 25, 50, 75, 90, 99)


def main(argv: Sequence[str]) -> int:
    parser = command(
        "quire bench latency",
        __doc__,
        {"name": {"nargs": "?", "metavar": "MODEL", "help": "model to load"}},
        usage="quire bench latency [MODEL] [flags]",
        add_help=False,
        conflict_handler="resolve",
    )
    add_flags(parser, EngineConfig, {EngineConfig: "engine"})
    count = number(int, 1)
    unneeded = {"action": "store_true", "help": argparse.SUPPRESS}
    add(
        parser,
        {
            "--input-len": {"type": count, "default": 32, "metavar": "N", "help": "tokens of a prompt (32)"},
            "--output-len": {"type": count, "default": 128, "metavar": "N", "help": "tokens of an answer (128)"},
            "--batch-size": {"type": count, "default": 8, "metavar": "N", "help": "prompts at a time (8)"},
            "--n": {"type": count, "default": 1, "metavar": "N", "help": "answers to each (1)"},
            "--num-iters-warmup": {"type": number(int, 0), "default": 2, "metavar": "N", "help": "not measured (2)"},
            "--num-iters": {"type": count, "default": 10, "metavar": "N", "help": "batches (10)"},
            "--output-json": {"type": Path, "metavar": "FILE", "help": "write the latencies, by vLLM's keys"},
            "--disable-detokenize": unneeded,
        },
    )
    args, config = parse(parser, argv, EngineConfig, "name")
    check_report(args.output_json)
    llm = LLM(**config.model_dump())
    try:
        seconds = measure(llm, args)
    finally:
        llm.close()
    tell(seconds, args.output_json)
    return 0


def measure(llm: LLM, args: argparse.Namespace) -> list[float]:
    """Seconds of each batch."""
    rng = random.Random(0)
    vocab = max(FIRST_ID + 1, min(10_000, llm.tokenizer.vocab_size))
    prompts = [[rng.randrange(FIRST_ID, vocab) for _ in range(args.input_len)] for _ in range(args.batch_size)]
    params = SamplingParams(n=args.n, temperature=1.0, ignore_eos=True, max_tokens=args.output_len, seed=0)
    found = []
    for turn in range(args.num_iters_warmup + args.num_iters):
        llm.reset_prefix_cache()
        started = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        if turn >= args.num_iters_warmup:
            found.append(time.perf_counter() - started)
    return found


def tell(seconds: Sequence[float], path: Path | None) -> None:
    ordered = sorted(seconds)
    mean = sum(ordered) / len(ordered)
    print(f"Avg latency: {mean:.4f} seconds")
    percentiles = {str(percent): percentile_of(ordered, percent) for percent in _PERCENTS}
    for percent, value in percentiles.items():
        print(f"{percent}% percentile latency: {value:.4f} seconds")
    if path is not None:
        content = {"avg_latency": mean, "latencies": list(seconds), "percentiles": percentiles}
        path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
