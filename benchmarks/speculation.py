"""Gain from speculative decoding: `python -m benchmarks.speculation [--model smollm2] [--config ngram]`.

Two servers, with and without draft tokens, answer the same requests in turns. Shows output tokens per second of both
and their ratio, for loads that repeat much, little and nothing, and the ratio by processor time, which other load
affects less. Answers must be equal.
"""

from __future__ import annotations

import asyncio
import random
import statistics
from typing import Any, NamedTuple

from benchmarks.common.options import options
from benchmarks.common.servers import post_all, processor_seconds, served
from tests.e2e.server import Server

TEXT = """Anna Berger has kept the lighthouse on the small island for eleven years. Every morning she climbs the
hundred and twelve steps to the lamp, cleans the glass with a soft cloth, and writes the weather into a large green
book. In winter the supply boat comes only once in two weeks, so she plans her meals with care: potatoes, dried beans,
flour, and a little salted fish. Her nearest neighbour is a fisherman called Olaf, who lives on the other side of the
bay and lights a lantern in his window at eight in the evening to say that all is well. Anna answers him by turning
the shutter of the lamp three times. One night in February the lantern stayed dark. She waited an hour, then she put
on her coat, pushed the rowing boat into the black water and rowed across the bay, although the wind was rising. She
found Olaf on the floor of his kitchen with a broken leg. He had fallen from a ladder while he was mending the roof.
Anna made a splint from two pieces of driftwood and a torn sheet, heated some soup, and stayed with him until the
doctor came with the supply boat four days later. Since then Olaf has called her the captain of the bay, and every
Sunday he brings her a fresh loaf of bread and the newspaper of the week before."""
SCHEMA = {
    "type": "object",
    "properties": {
        "keeper": {"type": "string", "maxLength": 40},
        "years": {"type": "integer"},
        "steps": {"type": "integer"},
        "neighbour": {"type": "string", "maxLength": 40},
        "foods": {"type": "array", "items": {"type": "string", "maxLength": 20}, "minItems": 4, "maxItems": 4},
        "accident": {"type": "string", "maxLength": 160},
        "what_anna_did": {"type": "string", "maxLength": 300},
    },
    "required": ["keeper", "years", "steps", "neighbour", "foods", "accident", "what_anna_did"],
    "additionalProperties": False,
}


def chat(content: str, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": 400} | more


def loads(seed: int) -> dict[str, dict[str, Any]]:
    """Returns one load per kind."""
    text = f"{TEXT} This was written on day {seed}."
    random_ids = random.Random(seed).choices(range(300, 4000), k=200)
    form = {"type": "json_schema", "json_schema": {"name": "story", "schema": SCHEMA}}
    return {
        "rewrite": chat(f"Repeat this text word for word, but call the woman Maria instead of Anna:\n\n{text}"),
        "json": chat(f"Extract the facts of this text as JSON.\n\n{text}", response_format=form),
        "story": {"prompt": "Once upon a time", "temperature": 0.8, "seed": seed, "max_tokens": 300},
        "random": {
            **{"prompt": random_ids, "temperature": 2.0, "seed": seed, "max_tokens": 200, "ignore_eos": True},
        },
    }


class Speed(NamedTuple):
    per_second: float
    per_processor_second: float
    answers: list[str]


async def speed(server: Server, requests: list[dict[str, Any]]) -> Speed:
    path = "/v1/chat/completions" if "messages" in requests[0] else "/v1/completions"
    used = processor_seconds(server.process.pid)
    seconds, answers = await post_all(server.url, path, requests, len(requests))
    used = processor_seconds(server.process.pid) - used
    total = sum(answer["usage"]["completion_tokens"] for answer in answers)
    choices = [answer["choices"][0] for answer in answers]
    texts = [choice["text"] if "text" in choice else choice["message"]["content"] for choice in choices]
    return Speed(total / seconds, total / max(used, 1e-9), texts)


def accepted(server: Server) -> tuple[float, float]:
    names = ("vllm:spec_decode_num_accepted_tokens_total", "vllm:spec_decode_num_draft_tokens_total")
    return server.metric(names[0]), server.metric(names[1])


async def compare(plain: Server, guessing: Server, kind: str, streams: int, rounds: int) -> str:
    pairs, before = [], accepted(guessing)
    for number in range(rounds + 1):
        requests = [loads(1000 * number + stream)[kind] for stream in range(streams)]
        both = [await speed(server, requests) for server in (plain, guessing)]
        assert both[0].answers == both[1].answers, f"{kind}: other answers"
        if number:  # the first round warms up
            pairs.append(both)
    right, tried = (after - earlier for after, earlier in zip(accepted(guessing), before, strict=True))
    ratio = statistics.median(with_.per_second / without.per_second for without, with_ in pairs)
    used = statistics.median(with_.per_processor_second / without.per_processor_second for without, with_ in pairs)
    slow, fast = (statistics.median(each.per_second for each in of) for of in zip(*pairs, strict=True))
    share = f"{right / tried:.0%} of {tried:.0f}" if tried else "none"
    return f"| {kind} | {streams} | {slow:.0f} | {fast:.0f} | {ratio:.2f} | {used:.2f} | {share} |"


async def main() -> None:
    args = options(
        __doc__,
        {
            "--model": "smollm2",
            "--config": {"default": "ngram", "help": "as --speculative-config takes it"},
            "--beside": {"default": "none", "help": "the same of the server that it is compared with"},
            "--streams": {"nargs": "+", "default": [1, 32]},
            "--rounds": 5,
            "--only": {"nargs": "+", "default": list(loads(0))},
        },
    )
    flags = args.model, "--speculative-config"
    with served(*flags, args.beside) as plain, served(*flags, args.config) as guessing:
        print("| load | streams | without, tok/s | with | ratio | by processor time | guesses that were right |")
        print("|---|---|---|---|---|---|---|")
        for streams in args.streams:
            for kind in args.only:
                print(await compare(plain, guessing, kind, streams, args.rounds), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
