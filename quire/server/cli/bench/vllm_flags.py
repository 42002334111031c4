"""Flags of `vllm bench serve` that `quire bench serve` accepts."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from quire.server.cli.flags import FlagGroup
from quire.server.cli.settings_flags import bounded_number

CHAT_PATH, COMPLETIONS_PATH = "/v1/chat/completions", "/v1/completions"
_BACKENDS = ("vllm", "openai", "openai-chat", "openai-completions", "vllm-chat", "sglang", "sglang-oai", "lmdeploy")
_DATASETS = ("random", "sharegpt", "custom")
_IGNORED_FLAGS = {
    **dict.fromkeys(("--tokenizer", "--tokenizer-mode", "--ready-check-timeout-sec", "--num-gpus", "--best-of"), 1),
    **dict.fromkeys(("--trust-remote-code", "--disable-tqdm", "--disable-shuffle", "--no-oversample", "--insecure"), 0),
    **dict.fromkeys(("--no-stream", "--skip-chat-template", "--profile", "--random-batch-size", "--random-rerank"), 0),
    "--percentile-metrics": 1,
}
"""Values are the number of a flag's arguments."""
_BODY_FIELDS = ("top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty", "logprobs")


def _parse_rate(text: str) -> float:
    return float("inf") if text.lower() == "inf" else float(bounded_number(float, 1e-6)(text))


def _parse_json_object(text: str) -> dict[str, Any]:
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object, got {text!r}")
    return content


def _parse_name_value_pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"must be NAME=VALUE, got {text!r}")
    return name, value


def _parse_goodput_goal(text: str) -> tuple[str, float]:
    name, colon, value = text.partition(":")
    if name not in ("ttft", "tpot", "e2el") or not colon:
        raise argparse.ArgumentTypeError(f"must be ttft:MS, tpot:MS or e2el:MS, got {text!r}")
    return name, float(bounded_number(float, 0)(value))


def _parse_percentiles(text: str) -> list[float]:
    return [float(bounded_number(float, 0, 100)(part)) for part in text.split(",")]


RATE_FLAG = {
    "type": _parse_rate,
    "metavar": "NUMBER",
    "help": "requests a second, arriving at random (Poisson); inf: all at once",
}
VLLM_FLAGS = {
    "as vllm bench serve": FlagGroup(
        {
            "--backend --endpoint-type": {
                "choices": _BACKENDS,
                "help": "API to measure; names that end in -chat use chat completions",
            },
            "--endpoint": {
                "choices": (COMPLETIONS_PATH, CHAT_PATH),
                "help": "path to request, instead of the one that --backend implies",
            },
            "--base-url": {"metavar": "URL", "help": "same as --url"},
            "--host": {"metavar": "NAME", "help": "host of the server, with --port, instead of --url"},
            "--port": {"type": bounded_number(int, 1, 65535), "metavar": "N", "help": "port of --host"},
            "--served-model-name": {"metavar": "NAME", "help": "same as --model"},
            "--dataset-name": {"metavar": "{" + ",".join(_DATASETS) + "}", "help": "source of the prompts (random)"},
            "--dataset-path": {
                "type": Path,
                "metavar": "FILE",
                "help": "ShareGPT's JSON file, or a file of JSON lines with a prompt",
            },
            "--sharegpt-output-len --custom-output-len": {
                "type": bounded_number(int, 1),
                "dest": "dataset_output_len",
                "metavar": "N",
                "help": "tokens per answer; default: ShareGPT's own",
            },
            "--random-prefix-len": {
                "type": bounded_number(int, 0),
                "default": 0,
                "metavar": "N",
                "help": "tokens of a common prefix",
            },
            "--random-range-ratio": {
                "type": bounded_number(float, 0, 1),
                "default": 0.0,
                "metavar": "R",
                "help": "lengths vary from 1-R to 1+R times the requested ones (0)",
            },
            "--goodput": {
                "type": _parse_goodput_goal,
                "nargs": "+",
                "metavar": "NAME:MS",
                "help": "report requests per second that meet these limits",
            },
            "--metric-percentiles": {
                "type": _parse_percentiles,
                "default": [99.0],
                "metavar": "N,N",
                "help": "percentiles in the result",
            },
            "--extra-body": {"type": _parse_json_object, "metavar": "JSON", "help": "further fields for every request"},
            "--save-result": {"action": "store_true", "help": "write the results as vLLM's JSON"},
            "--save-detailed": {"action": "store_true", "help": "include the measurements of every request"},
            "--append-result": {"action": "store_true", "help": "append the results to the file as a line"},
            "--result-dir": {"type": Path, "metavar": "DIR", "help": "directory of the result file (the current one)"},
            "--result-filename": {
                "metavar": "FILE",
                "help": "name of the result file; default: from backend, rate, model and time",
            },
            "--metadata": {
                "type": _parse_name_value_pair,
                "nargs": "+",
                "metavar": "NAME=VALUE",
                "help": "further fields for the result",
            },
            **{
                f"--{name.replace('_', '-')}": {"type": float, "metavar": "NUMBER", "help": argparse.SUPPRESS}
                for name in _BODY_FIELDS
            },
            **{
                name: {"nargs": 1, "help": argparse.SUPPRESS}
                if count
                else {"action": "store_true", "help": argparse.SUPPRESS}
                for name, count in _IGNORED_FLAGS.items()
            },
        }
    )
}


def apply_vllm_flags(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    args.url = args.base_url or args.url
    if args.host is not None or args.port is not None:
        host = "127.0.0.1" if args.host in (None, "0.0.0.0") else args.host
        args.url = f"http://{host}:{args.port or 8000}"
    args.model = args.served_model_name or args.model
    args.chats = args.endpoint == CHAT_PATH or (args.endpoint is None and str(args.backend).endswith("chat"))
    if args.dataset_name not in (None, *_DATASETS):
        parser.error(
            f"argument --dataset-name: {args.dataset_name} would be downloaded or has images; the datasets "
            f"here are {', '.join(_DATASETS)}, and --prompts FILE.jsonl for any other"
        )
    if args.dataset_name in ("sharegpt", "custom") and args.dataset_path is None:
        parser.error(f"argument --dataset-name: {args.dataset_name} needs --dataset-path FILE")
    if args.dataset_path is not None and args.prompts is not None:
        parser.error("argument --prompts: not with --dataset-path")
    if args.request_rate == float("inf"):
        args.request_rate = None
        args.concurrency = args.concurrency or args.num_requests
    elif args.request_rate is None:
        args.concurrency = args.concurrency or 8
    args.shared_prefix = args.shared_prefix or args.random_prefix_len
    args.input_len += args.random_prefix_len
    args.body = {name: getattr(args, name) for name in _BODY_FIELDS if getattr(args, name) is not None}
    args.body |= {name: int(args.body[name]) for name in ("top_k", "logprobs") if name in args.body}
    args.body |= args.extra_body or {}
