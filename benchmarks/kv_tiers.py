"""Conversations in turn, more of them than the KV cache holds: without tiers, with the host tier, and from disk over a
restart; and what it costs to fetch a prefix or to compute it, by the tier's speed.

`python -m benchmarks.kv_tiers [--conversations 40] [--turns 20] [--held 5]`: a model of SmolLM2-135M's shape, random
weights. Times are those of the clock and of the processor; the tokens are compared.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
import time
from pathlib import Path

from quire.engine.config import EngineConfig
from quire.engine.loop import Engine
from quire.engine.tiers.tiers import Tiers
from quire.engine.types import Request, SamplingParams

SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "eos_token_id": 0,
    "bos_token_id": 0,
}
SAID, ANSWERED = 28, 4
"""Tokens of a turn."""
PREFIX = 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--conversations", type=int, default=40)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--held", type=int, default=5, help="conversations that the KV cache holds")
    parser.add_argument("--only", choices=["conversations", "crossover"])
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        model.mkdir()
        (model / "config.json").write_text(json.dumps(SHAPE))
        if args.only != "crossover":
            compare_conversations(model, Path(folder), args)
        if args.only != "conversations":
            compare_costs(model, Path(folder))


def engine(model: Path, blocks: int, **options: object) -> Engine:
    config = EngineConfig(model=str(model), load_format="dummy", skip_tokenizer_init=True, num_kv_blocks=blocks)
    return Engine(config.model_copy(update=options))


class Talk:
    """Conversations that take their turns in order, as many at a time as the cache holds."""

    def __init__(self, conversations: int, held: int) -> None:
        self.histories: list[list[int]] = [[] for _ in range(conversations)]
        self._held = held
        self.answered = 0

    def go_on(self, made: Engine, turns: range) -> None:
        for turn in turns:
            for first in range(0, len(self.histories), self._held):
                self._take_turn(made, turn, range(first, min(first + self._held, len(self.histories))))

    def _take_turn(self, made: Engine, turn: int, members: range) -> None:
        for each in members:
            chance = random.Random(each * 1000 + turn)
            self.histories[each] += [chance.randrange(1, SHAPE["vocab_size"]) for _ in range(SAID)]
            params = SamplingParams(temperature=0.0, max_tokens=ANSWERED, ignore_eos=True)
            made.add(Request(id=str(each), prompt_ids=list(self.histories[each]), params=params, seed=0))
        while made.busy:
            for output in made.step():
                self.histories[int(output.id)] += output.new_ids
                self.answered += len(output.new_ids)


def compare_conversations(model: Path, folder: Path, args: argparse.Namespace) -> None:
    blocks = args.held * -(-args.turns * (SAID + ANSWERED) // 16) + args.held
    disk = {"kv_offload_dir": str(folder / "pages")}
    kinds: dict[str, list[dict[str, object]]] = {
        "no tier": [{}],
        "host": [{"kv_offload_memory": 4.0}],
        "disk, a restart half-way": [disk, disk],
    }
    print(f"{args.conversations} conversations, {args.turns} turns, {SAID} + {ANSWERED} tokens, {blocks} pages")
    print(f"{'':26}{'computed':>10}{'seconds':>9}{'processor':>11}{'answers/s':>11}  tokens")
    wanted = None
    for name, engines in kinds.items():
        talk, computed, seconds, processor = Talk(args.conversations, args.held), 0, 0.0, 0.0
        share = args.turns // len(engines)
        for number, options in enumerate(engines):
            made = engine(model, blocks, **options)
            began, worked = time.perf_counter(), time.process_time()
            last = args.turns if number == len(engines) - 1 else (number + 1) * share
            talk.go_on(made, range(number * share, last))
            seconds += time.perf_counter() - began
            processor += time.process_time() - worked
            computed += made.stats.prompt_tokens
            made.close()
        wanted = wanted or talk.histories
        same = "equal" if talk.histories == wanted else "DIFFERENT"
        print(
            f"{name:26}{computed:10}{seconds:9.1f}{processor:11.1f}{talk.answered / seconds:11.1f}  {same}", flush=True
        )


class Throttled:
    """A tier in memory that gives so many bytes a second."""

    name = "throttled"

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._pages: dict[bytes, bytes] = {}

    def lookup(self, digest: bytes) -> bool:
        return digest in self._pages

    def fetch(self, digest: bytes) -> bytes | None:
        if (page := self._pages.get(digest)) is not None:
            time.sleep(len(page) / self._rate)
        return page

    def put(self, digest: bytes, page: bytes | memoryview) -> None:
        self._pages[digest] = bytes(page)

    def drop(self, digest: bytes | None) -> None:
        if digest is None:
            self._pages.clear()
        else:
            self._pages.pop(digest, None)


def throttled(_: bytes) -> Throttled:
    return Throttled(float(os.environ["TIER_RATE"]))


def compare_costs(model: Path, folder: Path) -> None:
    """A prefix that was there before, of a preempted sequence as of any other: fetched from tiers of several speeds or
    computed, and what the engine chooses when it has seen both."""
    print(f"\na prefix of {PREFIX} tokens\n{'tier':>12}{'fetched, s':>12}{'computed, s':>13}  chosen")
    rates = {f"{rate} MB/s": {"TIER_RATE": str(rate * 1e6)} for rate in (5, 10, 20, 40, 80, 160)}
    tiers: dict[str, dict[str, object]] = {
        "host": {"kv_offload_memory": 1.0},
        "disk": {"kv_offload_dir": str(folder / "crossover")},
    }
    for name in [*tiers, *rates]:
        os.environ.update(rates.get(name, {}))
        options = tiers.get(name, {"kv_offload_tier": "benchmarks.kv_tiers:throttled"})
        made = engine(model, PREFIX // 16 + 8, **options)
        asked = _Prefix(made)
        computed = min(asked.seconds(forget=True) for _ in range(3))
        fetched = asked.seconds()
        chosen = made.scheduler.tiers
        assert isinstance(chosen, Tiers)
        pays = chosen.costs.worthwhile([tier.name for tier in made.stats.tiers] * (PREFIX // 16))
        print(f"{name:>12}{fetched:12.3f}{computed:13.3f}  {'fetch' if pays else 'compute'}", flush=True)
        made.close()


class _Prefix:
    """Asks for one token after a prefix, again and again."""

    def __init__(self, made: Engine) -> None:
        self._made = made
        self._prompt = [random.Random(5).randrange(1, SHAPE["vocab_size"]) for _ in range(PREFIX + 1)]
        self._count = 0

    def seconds(self, *, forget: bool = False) -> float:
        """With an empty KV cache; `forget`: and with empty tiers."""
        self._made.scheduler.pool.forget()
        if forget:
            self._made.scheduler.tiers.reset()
        self._count += 1
        params = SamplingParams(temperature=0.0, max_tokens=1)
        self._made.add(Request(id=str(self._count), prompt_ids=self._prompt, params=params, seed=0))
        began = time.perf_counter()
        while self._made.busy:
            self._made.step()
        seconds = time.perf_counter() - began
        time.sleep(1.0)  # what is on its way to a tier arrives
        return seconds


if __name__ == "__main__":
    main()
