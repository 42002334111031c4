"""`quire bench latency`: seconds of whole batches of prompts, with the LLM class in this process; like vLLM's."""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Sequence
from pathlib import Path

from quire.engine.common.config import EngineConfig
from quire.engine.offline.llm import LLM
from quire.engine.offline.params import SamplingParams
from quire.server.cli.bench.bench_report import check_report_paths
from quire.server.cli.bench.vllm_result import interpolated_percentile
from quire.server.cli.bench.workload import FIRST_TOKEN_ID
from quire.server.cli.flags import add_flag_table, build_parser
from quire.server.cli.settings_flags import add_settings_flags, bounded_number, parse_settings

_PERCENTILES = (10, 25, 50, 75, 90, 99)


def main(argv: Sequence[str]) -> int:
    parser = build_parser(
        "quire bench latency",
        __doc__,
        {"name": {"nargs": "?", "metavar": "MODEL", "help": "model to load"}},
        usage="quire bench latency [MODEL] [flags]",
        add_help=False,
        conflict_handler="resolve",
    )
    add_settings_flags(parser, EngineConfig, {EngineConfig: "engine"})
    count = bounded_number(int, 1)
    unneeded = {"action": "store_true", "help": argparse.SUPPRESS}
    add_flag_table(
        parser,
        {
            "--input-len": {"type": count, "default": 32, "metavar": "N", "help": "tokens per prompt (32)"},
            "--output-len": {"type": count, "default": 128, "metavar": "N", "help": "tokens per answer (128)"},
            "--batch-size": {"type": count, "default": 8, "metavar": "N", "help": "prompts per batch (8)"},
            "--n": {"type": count, "default": 1, "metavar": "N", "help": "answers per prompt (1)"},
            "--num-iters-warmup": {
                "type": bounded_number(int, 0),
                "default": 2,
                "metavar": "N",
                "help": "warm-up batches that are not measured (2)",
            },
            "--num-iters": {"type": count, "default": 10, "metavar": "N", "help": "batches to measure (10)"},
            "--output-json": {"type": Path, "metavar": "FILE", "help": "write the latencies as JSON with vLLM's keys"},
            "--disable-detokenize": unneeded,
        },
    )
    args, config = parse_settings(parser, argv, EngineConfig, "name")
    check_report_paths(args.output_json)
    llm = LLM(**config.model_dump())
    try:
        seconds = measure_latencies(llm, args)
    finally:
        llm.close()
    report_latencies(seconds, args.output_json)
    return 0


def measure_latencies(llm: LLM, args: argparse.Namespace) -> list[float]:
    rng = random.Random(0)
    vocab = max(FIRST_TOKEN_ID + 1, min(10_000, llm.tokenizer.vocab_size))
    prompts = [[rng.randrange(FIRST_TOKEN_ID, vocab) for _ in range(args.input_len)] for _ in range(args.batch_size)]
    params = SamplingParams(n=args.n, temperature=1.0, ignore_eos=True, max_tokens=args.output_len, seed=0)
    seconds = []
    for turn in range(args.num_iters_warmup + args.num_iters):
        llm.reset_prefix_cache()
        started = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        if turn >= args.num_iters_warmup:
            seconds.append(time.perf_counter() - started)
    return seconds


def report_latencies(seconds: Sequence[float], path: Path | None) -> None:
    ordered = sorted(seconds)
    mean = sum(ordered) / len(ordered)
    print(f"Avg latency: {mean:.4f} seconds")
    percentiles = {str(percent): interpolated_percentile(ordered, percent) for percent in _PERCENTILES}
    for percent, value in percentiles.items():
        print(f"{percent}% percentile latency: {value:.4f} seconds")
    if path is not None:
        content = {"avg_latency": mean, "latencies": list(seconds), "percentiles": percentiles}
        path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
