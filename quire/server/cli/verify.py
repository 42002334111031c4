"""`quire verify`: checks on this machine that a model's tokens do not depend on what else is running."""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from typing import Any

import uvloop
from rich.table import Table

from quire.engine.checkpoint.model_resolver import read_model_config
from quire.engine.checkpoint.overrides import resolve_model_with_overrides
from quire.engine.client.engine_client import EngineClient
from quire.engine.client.engine_core_client import EngineCoreClient
from quire.engine.client.process_client import ProcessClient
from quire.engine.common.config import EngineConfig
from quire.engine.common.errors import ConfigError, EngineError
from quire.engine.common.request_params import SamplingParams
from quire.engine.common.types import EngineCoreRequest, EngineInfo
from quire.server.cli.bench.bench_report import print_without_trailing_blanks
from quire.server.cli.flags import build_parser
from quire.server.cli.models.pull import pull_configured_model_if_missing
from quire.server.cli.settings_flags import add_settings_flags, parse_settings

TokensByRequest = dict[str, list[int]]
MakeLink = Callable[[EngineConfig], EngineCoreClient]
SAMPLING_PARAMS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.2, "top_k": 20, "min_p": 0.02},
    {"temperature": 0.0, "repetition_penalty": 1.3, "frequency_penalty": 0.5},
    {"temperature": 1.0, "top_k": 50, "top_p": 0.8, "presence_penalty": 0.7},
    {"temperature": 1.0, "typical_p": 0.9, "xtc_probability": 0.5, "xtc_threshold": 0.01, "dry_multiplier": 0.8},
)
MAX_PROMPT_TOKENS, MAX_OUTPUT_TOKENS = 120, 32
CHUNK_TOKENS = 7
KILL_AFTER_OUTPUTS = 8


@dataclass(frozen=True, slots=True)
class CheckResult:
    name: str
    what: str
    requests: int
    tokens: int
    differing: int
    exercised: bool

    @property
    def has_passed(self) -> bool:
        return self.exercised and self.differing == 0


def main(argv: Sequence[str], started: float) -> int:
    """Return 0 if all tokens were the same, else 1."""
    parser = build_parser(
        "quire verify",
        __doc__,
        {
            "name": {
                "nargs": "?",
                "metavar": "MODEL",
                "help": "local directory or hub id; default: the embedded model",
            },
            "--requests": {
                "type": int,
                "default": 24,
                "metavar": "N",
                "help": "number of requests to compare (default: 24)",
            },
            "--json": {"action": "store_true", "help": "print JSON"},
        },
        usage="quire verify [MODEL] [flags]",
        add_help=False,
    )
    add_settings_flags(parser, EngineConfig, {EngineConfig: "engine"})
    args, config = parse_settings(parser, argv, EngineConfig, "name")
    if args.requests < 2:
        raise ConfigError("--requests must be at least 2: a single request shares no batch")
    if config.data_parallel_size > 1:
        raise ConfigError("data_parallel_size: verify runs one engine; replicas compute the same")
    pull_configured_model_if_missing(config)
    info, checks = uvloop.run(Verification(config, args.requests, ProcessClient).run_checks())
    passed = all(check.has_passed for check in checks)
    if args.json:
        report = {"mode": determinism_label(info), "passed": passed, "checks": [asdict(check) for check in checks]}
        print(json.dumps(report, indent=2))
    else:
        print_check_results(info, checks)
    return 0 if passed else 1


def determinism_label(info: EngineInfo) -> str:
    """Every answer's system_fingerprint ends in this label."""
    return "deterministic" if info.deterministic else "batch-dependent"


def print_check_results(info: EngineInfo, checks: Sequence[CheckResult]) -> None:
    print(f"{info.model}: {info.dtype} on {info.device}, {info.backend}; promises to be {determinism_label(info)}")
    table = Table(box=None, pad_edge=False)
    for name in ("compared with alone", "what happened"):
        table.add_column(name)
    for name in ("requests", "tokens", "differing", ""):
        table.add_column(name, justify="right")
    for check in checks:
        verdict = "same" if check.has_passed else "DIFFERENT" if check.differing else "not exercised"
        counts = (check.requests, check.tokens, check.differing)
        table.add_row(check.name, check.what, *map(str, counts), verdict)
    print_without_trailing_blanks(table)


class Verification:
    """Repeats requests under conditions that must not change any token."""

    def __init__(self, config: EngineConfig, num_requests: int, make_link: MakeLink) -> None:
        self._config = config
        self._num_requests = num_requests
        self._make_link = make_link
        self._requests: list[EngineCoreRequest] = []
        self._expected_tokens: TokensByRequest = {}

    async def run_checks(self) -> tuple[EngineInfo, list[CheckResult]]:
        """Raises ConfigError or EngineError."""
        model = read_model_config(resolve_model_with_overrides(self._config), self._config.model_impl)
        longest = min(MAX_PROMPT_TOKENS + MAX_OUTPUT_TOKENS + 1024, model.max_position)
        async with self._open_engine(enable_prefix_caching=False, max_model_len=longest) as (client, info):
            self._requests = build_test_requests(self._num_requests, model.vocab_size, info.block_size, longest)
            for request in self._requests:
                self._expected_tokens |= await generate_tokens(client, [request])
            checks = [
                self._compare_tokens("batched", "all at once", True, await generate_tokens(client, self._requests))
            ]
        checks += await self._check_prefix_hits_and_restart(longest)
        checks.append(await self._check_chunked_prefill(longest))
        checks.append(await self._check_preemption(info.block_size, longest))
        return info, checks

    @asynccontextmanager
    async def _open_engine(self, **options: Any) -> AsyncIterator[tuple[EngineClient, EngineInfo]]:
        settings = {"num_kv_blocks": None, "kv_cache_memory": self._config.kv_cache_memory} | options
        client = EngineClient(self._make_link(self._config.model_copy(update=settings)))
        try:
            yield client, await client.engine_core.start()
        finally:
            await client.engine_core.stop()

    async def _check_prefix_hits_and_restart(self, longest: int) -> list[CheckResult]:
        async with self._open_engine(enable_prefix_caching=True, max_model_len=longest) as (client, _):
            await generate_tokens(client, self._requests)
            before = client.engine_core.stats.prefix_hits
            tokens = await generate_tokens(client, self._requests)
            hits = client.engine_core.stats.prefix_hits - before
            checks = [self._compare_tokens("prefix-hit", f"prompt tokens cached: {hits:,}", hits > 0, tokens)]
            tokens = await generate_tokens(client, self._requests, kill=True)
            what = f"engine deaths: {client.engine_core.deaths}, requests replayed: {client.engine_core.replays}"
            return [*checks, self._compare_tokens("respawned", what, client.engine_core.replays > 0, tokens)]

    async def _check_chunked_prefill(self, longest: int) -> CheckResult:
        sizes = {"max_num_batched_tokens": CHUNK_TOKENS, "max_num_seqs": CHUNK_TOKENS}
        async with self._open_engine(enable_prefix_caching=False, max_model_len=longest, **sizes) as (client, _):
            tokens = await generate_tokens(client, self._requests)
            what = f"at most {CHUNK_TOKENS} tokens a step, {client.engine_core.stats.steps:,} steps"
            return self._compare_tokens("chunked", what, True, tokens)

    async def _check_preemption(self, block_size: int, longest: int) -> CheckResult:
        needed = max(len(each.prompt_ids) + MAX_OUTPUT_TOKENS for each in self._requests)
        blocks = max(-(-needed // block_size) + 1, 3)
        async with self._open_engine(num_kv_blocks=blocks, max_model_len=min(longest, blocks * block_size)) as (
            client,
            _,
        ):
            tokens = await generate_tokens(client, self._requests)
            count = client.engine_core.stats.preemptions
            return self._compare_tokens(
                "preempted", f"blocks in all: {blocks}, preemptions: {count}", count > 0, tokens
            )

    def _compare_tokens(self, name: str, what: str, exercised: bool, tokens: TokensByRequest) -> CheckResult:
        differing = sum(tokens[request.id] != self._expected_tokens[request.id] for request in self._requests)
        total = sum(map(len, tokens.values()))
        return CheckResult(name, what, len(tokens), total, differing, exercised)


def build_test_requests(count: int, vocab_size: int, block_size: int, longest: int) -> list[EngineCoreRequest]:
    """The requests' common prefixes end near block boundaries."""
    rng = random.Random(5)
    common = [rng.randrange(vocab_size) for _ in range(max(MAX_PROMPT_TOKENS, 2 * block_size))]
    requests = []
    for index in range(count):
        own = [rng.randrange(vocab_size) for _ in range(1 + 7 * index % 60)]
        shared = common[: (0, 37, block_size - 8, block_size + 5)[index % 4]]
        prompt = (shared + own)[: longest - MAX_OUTPUT_TOKENS]
        params = SamplingParams(
            max_tokens=MAX_OUTPUT_TOKENS - index % 13, ignore_eos=True, **SAMPLING_PARAMS[index % len(SAMPLING_PARAMS)]
        )
        requests.append(EngineCoreRequest(id=str(index), prompt_ids=prompt, params=params, seed=1000 + index))
    return requests


async def generate_tokens(
    client: EngineClient, requests: Sequence[EngineCoreRequest], *, kill: bool = False
) -> TokensByRequest:
    """If `kill`, kills the engine process once during generation. Raises EngineError."""
    tokens: TokensByRequest = {request.id: [] for request in requests}
    outputs = 0
    async for step in client.submit(requests):
        for output in step:
            if output.error is not None:
                raise EngineError(output.error)
            tokens[output.id] += output.new_ids
            outputs += 1
        if kill and outputs >= KILL_AFTER_OUTPUTS and client.engine_core.pid is not None:
            os.kill(client.engine_core.pid, signal.SIGKILL)
            kill = False
    return tokens
