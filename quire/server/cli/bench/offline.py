"""`quire bench offline`: the LLM class in this process, all requests at once."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

from quire.engine.common.config import EngineConfig
from quire.engine.offline.llm import LLM
from quire.engine.offline.params import SamplingParams
from quire.server.cli.bench.bench_report import REPORT_FLAGS, check_report_paths, write_json
from quire.server.cli.bench.workload import WORKLOAD_FLAGS, check_shared_prefix_length, random_prompts_and_warmup
from quire.server.cli.flags import add_flag_table, build_parser
from quire.server.cli.settings_flags import add_settings_flags, parse_settings

WARMUP_TOKENS = 4


def main(argv: Sequence[str]) -> int:
    parser = build_parser(
        "quire bench offline",
        __doc__,
        {"name": {"nargs": "?", "metavar": "MODEL", "help": "model to load"}},
        usage="quire bench offline [MODEL] [flags]",
        add_help=False,
        conflict_handler="resolve",  # the workload and the engine share the flag --seed
    )
    add_settings_flags(parser, EngineConfig, {EngineConfig: "engine"})
    add_flag_table(parser, WORKLOAD_FLAGS | REPORT_FLAGS)
    args, config = parse_settings(parser, argv, EngineConfig, "name")
    check_shared_prefix_length(parser, args)
    check_report_paths(args.json)
    llm = LLM(**config.model_dump())
    try:
        figures = measure_throughput(llm, args)
    finally:
        llm.close()
    print(f"{args.label or llm.info.model}, {args.num_requests} requests, {args.input_len}/{args.output_len}")
    for name, value in figures.items():
        print(f"{name.replace('_per_second', '/s').replace('_', ' '):<17}{value:>12.2f}")
    if args.json:
        write_json(args.json, args, {"model": llm.info.model, **figures})
    return 0


def measure_throughput(llm: LLM, args: argparse.Namespace) -> dict[str, float]:
    prompts, warming = random_prompts_and_warmup(args, min(args.vocab, llm.tokenizer.vocab_size))
    if warming:
        llm.generate(warming, _fixed_length_params(WARMUP_TOKENS, args.temperature), use_tqdm=False)
    started = time.perf_counter()
    generations = llm.generate(prompts, _fixed_length_params(args.output_len, args.temperature), use_tqdm=False)
    seconds = time.perf_counter() - started
    inputs = sum(len(generation.prompt_token_ids) for generation in generations)
    outputs = sum(len(generation.outputs[0].token_ids) for generation in generations)
    return {
        "seconds": seconds,
        "output_tokens": outputs,
        "output_tokens_per_second": outputs / seconds,
        "total_tokens_per_second": (inputs + outputs) / seconds,
        "requests_per_second": len(generations) / seconds,
    }


def _fixed_length_params(tokens: int, temperature: float) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, min_tokens=tokens, ignore_eos=True, temperature=temperature, seed=0)
