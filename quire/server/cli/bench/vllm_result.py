"""Results in the format of `vllm bench serve --save-result`."""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from quire.engine.common.errors import ConfigError
from quire.server.cli.bench.latency_stats import BenchAnswer, BenchFailure, BenchSummary, latency_samples

_VLLM_NAMES = {"ttft_ms": "ttft", "tpot_ms": "tpot", "itl_ms": "itl", "e2e_ms": "e2el"}


def goodput(answers: Sequence[BenchAnswer], goals: Sequence[tuple[str, float]], seconds: float) -> float:
    """A goal is vLLM's name of a latency and its limit in ms."""
    num_good = 0
    for answer in answers:
        samples = {_VLLM_NAMES[name]: values for name, values in latency_samples([answer]).items()}
        num_good += all(1000 * max(samples[name], default=0.0) <= most for name, most in goals)
    return num_good / seconds


def build_result(
    args: argparse.Namespace, model: str, results: Sequence[BenchAnswer | BenchFailure], summary: BenchSummary
) -> dict[str, Any]:
    answers = [each for each in results if isinstance(each, BenchAnswer)]
    content: dict[str, Any] = {
        "date": datetime.now().strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": args.backend or "openai",
        "backend": args.backend or "openai",
        "label": args.label or None,
        "model_id": model,
        "tokenizer_id": model,
        "num_prompts": args.num_requests,
        **dict(args.metadata or ()),
        "request_rate": "inf" if args.request_rate is None else args.request_rate,
        "burstiness": 1.0,
        "max_concurrency": args.concurrency,
        "duration": summary.seconds,
        "completed": summary.requests,
        "failed": summary.failed,
        "total_input_tokens": summary.prompt_tokens,
        "total_output_tokens": summary.output_tokens,
        "request_throughput": summary.requests_per_second,
        "request_goodput": None if args.goodput is None else goodput(answers, args.goodput, summary.seconds),
        "output_throughput": summary.output_tokens_per_second,
        "total_token_throughput": summary.total_tokens_per_second,
    }
    for name, samples in latency_samples(answers).items():
        content |= _latency_figures(_VLLM_NAMES[name], [1000 * each for each in samples], args.metric_percentiles)
    if args.save_detailed:
        content |= {
            "input_lens": [each.prompt_tokens for each in answers],
            "output_lens": [each.completion_tokens for each in answers],
            "ttfts": [each.chunk_times[0] for each in answers],
            "itls": [each.gaps for each in answers],
            "errors": [each.message for each in results if isinstance(each, BenchFailure)],
        }
    return content


def save_result(args: argparse.Namespace, content: Mapping[str, Any]) -> Path:
    """Raises ConfigError."""
    rate = content["request_rate"]
    at_once = "" if args.concurrency is None else f"-concurrency{args.concurrency}"
    base = str(content["model_id"]).rpartition("/")[2]
    name = (
        args.result_filename or f"{args.label or content['backend']}-{rate}qps{at_once}-{base}-{content['date']}.json"
    )
    path = (args.result_dir or Path()) / name
    text = json.dumps(content)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if args.append_result and path.exists():
            text = f"{path.read_text(encoding='utf-8').rstrip()}\n{text}"
        path.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None
    return path


def _latency_figures(name: str, values: Sequence[float], percentiles: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values)
    if not ordered:
        return {f"{kind}_{name}_ms": 0.0 for kind in ("mean", "median", "std")}
    figures = {
        f"mean_{name}_ms": statistics.fmean(ordered),
        f"median_{name}_ms": statistics.median(ordered),
        f"std_{name}_ms": statistics.pstdev(ordered),
    }
    return figures | {f"p{percent:g}_{name}_ms": interpolated_percentile(ordered, percent) for percent in percentiles}


def interpolated_percentile(ordered: Sequence[float], percent: float) -> float:
    """Interpolates like NumPy, which vLLM uses."""
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)
