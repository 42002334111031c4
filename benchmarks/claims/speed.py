from __future__ import annotations

import json
import time
from collections.abc import Iterator

from benchmarks.claims.run import Row, engine, lengths
from benchmarks.common.engines import Answered, answer, at_once, random_prompt, request
from quire.engine.common.config import DEMO_MODEL, SpeculativeConfig
from quire.engine.common.request_params import Grammar
from quire.engine.common.types import EngineCoreRequest
from quire.engine.engine_core import EngineCore
from quire.engine.text.tokenizer import Tokenizer
from quire.server.cli.bench.latency_stats import percentile

_BATCH = 16


def batching() -> Iterator[Row]:
    """A static batch starts when the one before has ended."""
    load = lengths(64, 256, 384)
    requests = [request(str(each), random_prompt(*(load[each][0], each)), load[each][1]) for each in range(len(load))]
    with engine(max_num_seqs=_BATCH, max_model_len=1024, enable_prefix_caching=False) as made:
        figures = []
        for static in (False, True):
            began = time.perf_counter()
            found: dict[str, Answered] = {}
            for group in [requests[at : at + _BATCH] for at in range(0, len(load), _BATCH)] if static else [requests]:
                found |= at_once(made, group)
            seconds = time.perf_counter() - began
            late = percentile(sorted(each.tokens[-1] - began for each in found.values()), 50)
            figures.append((sum(tokens for _, tokens in load) / seconds, late))
    (rate, late), (static_rate, static_late) = figures
    yield Row(
        f"continuous batching, {_BATCH} at once",
        "up to 36.9 times the throughput of request-level scheduling at equal latency (Orca, Yu et al., 2022), 23 "
        "times with paging (Anyscale, 2023)",
        f"{rate:.0f} tokens/s ({rate / static_rate:.2f} times), half answered in {late:.1f} s",
        f"{static_rate:.0f} tokens/s, half answered in {static_late:.1f} s",
    )


def cache() -> Iterator[Row]:
    """One more token after a context, cached and recomputed."""
    said = "the time of a token grows with the context, not with its square"
    with engine(num_kv_blocks=600, enable_prefix_caching=False) as made:
        for length in (256, 1024, 4096):
            prompt = random_prompt(length, length)
            found = at_once(made, [request("cached", prompt, 9)])["cached"]
            cached = sorted(found.gaps)[len(found.gaps) // 2]
            whole = found.first
            yield Row(
                f"KV cache, a token behind {length:,}",
                said,
                f"{cached * 1e3:.1f} ms",
                f"{whole * 1e3:.0f} ms without ({whole / cached:.0f} times)",
            )


def chunks() -> Iterator[Row]:
    """A prompt of 3,000 tokens arrives during eight answers."""
    figures = {}
    for name, tokens in (("chunks of 128 tokens", 128), ("whole", 4096)):
        with engine(num_kv_blocks=800, max_num_batched_tokens=tokens, enable_prefix_caching=False) as made:
            arrivals = [(0.0, request(str(each), random_prompt(64, each), 60)) for each in range(8)]
            arrivals.append((0.5, request("long", random_prompt(3000, "long"), 1)))
            found = answer(made, arrivals)
            long = found.pop("long")
            gaps = sorted(gap for each in found.values() for gap in each.gaps)
            figures[name] = (percentile(gaps, 99), gaps[-1], long.latency)
    (p99, most, first), (whole_p99, whole_most, whole_first) = figures.values()
    yield Row(
        "chunked prefill, between the tokens of others",
        "the 99th percentile between tokens falls severalfold (Sarathi-Serve, Agrawal et al., 2024)",
        f"p99 {p99 * 1e3:.0f} ms, most {most * 1e3:.0f}; the prompt's first token {first:.2f} s",
        f"p99 {whole_p99 * 1e3:.0f} ms, most {whole_most * 1e3:.0f}; {whole_first:.2f} s",
    )


def guesses() -> Iterator[Row]:
    """Random weights soon repeat themselves, as an answer does that copies."""
    figures = []
    for method in ("ngram", "none"):
        with engine(num_kv_blocks=64, speculative_config=SpeculativeConfig(method=method)) as made:  # type: ignore[arg-type]
            seconds = _alone(made, request("copy", random_prompt(64, "copy"), 300))
            stats = made.engine_stats
            figures.append((seconds, 1 + sum(stats.accepted_drafts) / max(stats.drafts, 1)))
    (with_guesses, accepted), (without, _) = figures
    yield Row(
        "guesses from the context, one stream that repeats itself",
        "2 to 3 times the speed (prompt lookup decoding, Saxena, 2023)",
        f"{with_guesses:.2f} s ({without / with_guesses:.2f} times), {accepted:.1f} tokens a step with guesses",
        f"{without:.2f} s",
    )


def grammars() -> Iterator[Row]:
    """A JSON schema that allows long texts."""
    item = {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}}
    schema = json.dumps({"type": "array", "items": item | {"required": ["name", "age"]}, "minItems": 50})
    prompt = Tokenizer.from_pretrained(DEMO_MODEL).encode("Tell a tale of a fox as JSON.")
    with engine(model=DEMO_MODEL, speculative_config=SpeculativeConfig(method="none")) as made:
        figures = []
        for grammar in (Grammar("json", schema), None):
            _alone(made, request("warm up", prompt, 8, grammar=grammar))
            figures.append(_alone(made, request("tale", prompt, 128, grammar=grammar)) / 128)
    held, free = figures
    yield Row(
        "structured outputs, a token",
        "some 50 us of a mask (llguidance)",
        f"{held * 1e6:.0f} us",
        f"{free * 1e6:.0f} us without ({(held - free) * 1e6:+.0f})",
    )


def _alone(made: EngineCore, each: EngineCoreRequest) -> float:
    """Seconds from first to last token."""
    made.reset_prefix_cache()
    found = at_once(made, [each])[each.id]
    return found.tokens[-1] - found.tokens[0]
