"""`quire bench throughput`: all prompts at once, with the LLM class in this process; like vLLM's."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quire.engine.common.config import EngineConfig
from quire.engine.offline.llm import LLM
from quire.engine.offline.params import SamplingParams
from quire.server.cli.bench.bench_report import check_report_paths
from quire.server.cli.bench.datasets import read_dataset
from quire.server.cli.bench.workload import (
    WORKLOAD_FLAGS,
    check_shared_prefix_length,
    random_lengths,
    random_prompts_and_warmup,
)
from quire.server.cli.flags import add_flag_table, build_parser
from quire.server.cli.settings_flags import add_settings_flags, bounded_number, parse_settings

_DATASETS = ("random", "sharegpt", "custom")
_WARMUP_TOKENS = 4


def main(argv: Sequence[str]) -> int:
    parser = build_parser(
        "quire bench throughput",
        __doc__,
        {"name": {"nargs": "?", "metavar": "MODEL", "help": "model to load"}},
        usage="quire bench throughput [MODEL] [flags]",
        add_help=False,
        conflict_handler="resolve",  # the workload and the engine share the flag --seed
    )
    add_settings_flags(parser, EngineConfig, {EngineConfig: "engine"})
    hidden = {"help": argparse.SUPPRESS}
    add_flag_table(
        parser,
        WORKLOAD_FLAGS
        | {
            "--dataset-name": {"choices": _DATASETS, "help": "source of the prompts (random)"},
            "--dataset-path --dataset": {
                "type": Path,
                "metavar": "FILE",
                "help": "ShareGPT's JSON file, or a file of JSON lines",
            },
            "--sharegpt-output-len": {
                "type": bounded_number(int, 1),
                "dest": "dataset_output_len",
                "metavar": "N",
                **hidden,
            },
            "--random-range-ratio": {"type": bounded_number(float, 0, 1), "default": 0.0, "metavar": "R", **hidden},
            "--output-json": {"type": Path, "metavar": "FILE", "help": "write the results as JSON with vLLM's keys"},
            "--backend": {"choices": ("vllm", "vllm-chat"), **hidden},
            "--n": {"type": bounded_number(int, 1), "default": 1, "metavar": "N", **hidden},
            "--async-engine": {"action": "store_true", **hidden},
            "--disable-detokenize": {"action": "store_true", **hidden},
        },
    )
    args, config = parse_settings(parser, argv, EngineConfig, "name")
    args.chats = False
    if args.dataset_path is not None and args.dataset_name in (None, "random"):
        args.dataset_name = "sharegpt"
    if args.dataset_name in ("sharegpt", "custom") and args.dataset_path is None:
        parser.error(f"argument --dataset-name: {args.dataset_name} needs --dataset-path FILE")
    check_shared_prefix_length(parser, args)
    check_report_paths(args.output_json)
    llm = LLM(**config.model_dump())
    try:
        figures = measure_throughput(llm, args)
    finally:
        llm.close()
    print(
        f"Throughput: {figures['requests_per_second']:.2f} requests/s, {figures['tokens_per_second']:.2f} total "
        f"tokens/s, {figures['output_tokens'] / figures['elapsed_time']:.2f} output tokens/s"
    )
    print(f"Total num prompt tokens:  {figures['prompt_tokens']:.0f}")
    print(f"Total num output tokens:  {figures['output_tokens']:.0f}")
    if args.output_json is not None:
        args.output_json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    return 0


def measure_throughput(llm: LLM, args: argparse.Namespace) -> dict[str, float]:
    prompts: list[Any]
    if args.dataset_path is None:
        prompts, warming = random_prompts_and_warmup(args, min(args.vocab, llm.tokenizer.vocab_size))
        output_lengths = random_lengths(args, args.output_len, len(prompts))
    else:
        entries = read_dataset(args, lambda text: len(llm.tokenizer.encode(text)))
        prompts, output_lengths = [each["prompt"] for each in entries], [each["max_tokens"] for each in entries]
        warming = prompts[: args.warmup]
    if warming:
        llm.generate(warming, _fixed_length_params(_WARMUP_TOKENS, args), use_tqdm=False)
        llm.reset_prefix_cache()
    started = time.perf_counter()
    answers = llm.generate(prompts, [_fixed_length_params(length, args) for length in output_lengths], use_tqdm=False)
    seconds = time.perf_counter() - started
    prompt_tokens = sum(len(each.prompt_token_ids) for each in answers)
    generated = sum(len(output.token_ids) for each in answers for output in each.outputs)
    return {
        "elapsed_time": seconds,
        "num_requests": len(answers),
        "total_num_tokens": prompt_tokens + generated,
        "requests_per_second": len(answers) / seconds,
        "tokens_per_second": (prompt_tokens + generated) / seconds,
        "prompt_tokens": prompt_tokens,
        "output_tokens": generated,
    }


def _fixed_length_params(tokens: int, args: argparse.Namespace) -> SamplingParams:
    return SamplingParams(n=args.n, max_tokens=tokens, ignore_eos=True, temperature=args.temperature, seed=0)
