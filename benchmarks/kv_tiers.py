"""Round-robin conversations that exceed the KV cache: without tiers, with host memory, and from disk after a restart.
Then loading a prefix against computing it, by tier speed.

`python -m benchmarks.kv_tiers [--conversations 40] [--turns 20] [--held 5]`: SmolLM2-135M's shape, random weights.
Shows wall and processor time, and compares tokens.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path

from benchmarks.common.engines import SMOL_135M, at_once, dummy, folder_of, random_prompt, request
from benchmarks.common.options import options
from quire.engine.engine_core import EngineCore
from quire.engine.tiers.tier import BlockContent
from quire.engine.tiers.tiered_offloader import TieredKVOffloader
from tests.engine.tiers.fakes import Dictionary

SAID, ANSWERED = 28, 4
"""Tokens per turn."""
PREFIX = 1024


def main() -> None:
    args = options(
        __doc__,
        {
            "--conversations": 40,
            "--turns": 20,
            "--held": {"default": 5, "help": "conversations that the KV cache holds"},
            "--only": {"choices": ["conversations", "crossover"]},
        },
    )
    with folder_of(SMOL_135M) as model, tempfile.TemporaryDirectory() as folder:
        if args.only != "crossover":
            compare_conversations(model, Path(folder), args)
        if args.only != "conversations":
            compare_costs(model, Path(folder))


class Talk:
    """Turns come in order, with as many conversations at a time as the cache holds."""

    def __init__(self, conversations: int, held: int) -> None:
        self.histories: list[list[int]] = [[] for _ in range(conversations)]
        self._held = held
        self.answered = 0

    def go_on(self, made: EngineCore, turns: range) -> None:
        for turn in turns:
            for first in range(0, len(self.histories), self._held):
                self._take_turn(made, turn, range(first, min(first + self._held, len(self.histories))))

    def _take_turn(self, made: EngineCore, turn: int, members: range) -> None:
        for each in members:
            self.histories[each] += random_prompt(SAID, each * 1000 + turn)
        for name, one in at_once(
            made, [request(str(each), self.histories[each], ANSWERED) for each in members]
        ).items():
            self.histories[int(name)] += one.ids
            self.answered += len(one.ids)


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
        for number, settings in enumerate(engines):
            made = dummy(model, num_kv_blocks=blocks, **settings)
            began, worked = time.perf_counter(), time.process_time()
            last = args.turns if number == len(engines) - 1 else (number + 1) * share
            talk.go_on(made, range(number * share, last))
            seconds += time.perf_counter() - began
            processor += time.process_time() - worked
            computed += made.engine_stats.prompt_tokens
            made.shut_down()
        wanted = wanted or talk.histories
        same = "equal" if talk.histories == wanted else "DIFFERENT"
        print(
            f"{name:26}{computed:10}{seconds:9.1f}{processor:11.1f}{talk.answered / seconds:11.1f}  {same}", flush=True
        )


class Throttled(Dictionary):
    """Limited to `rate` bytes per second."""

    name = "throttled"

    def __init__(self, rate: float) -> None:
        super().__init__()
        self._rate = rate

    def fetch(self, digest: bytes) -> BlockContent | None:
        if (page := super().fetch(digest)) is not None:
            time.sleep(len(page) / self._rate)
        return page


def throttled(_: bytes) -> Throttled:
    return Throttled(float(os.environ["TIER_RATE"]))


def compare_costs(model: Path, folder: Path) -> None:
    """Also prints what the engine chooses after it has seen both."""
    print(f"\na prefix of {PREFIX} tokens\n{'tier':>12}{'fetched, s':>12}{'computed, s':>13}  chosen")
    rates = {f"{rate} MB/s": {"TIER_RATE": str(rate * 1e6)} for rate in (5, 10, 20, 40, 80, 160)}
    tiers: dict[str, dict[str, object]] = {
        "host": {"kv_offload_memory": 1.0},
        "disk": {"kv_offload_dir": str(folder / "crossover")},
    }
    for name in [*tiers, *rates]:
        os.environ.update(rates.get(name, {}))
        settings = tiers.get(name, {"kv_offload_tier": "benchmarks.kv_tiers:throttled"})
        made = dummy(model, num_kv_blocks=PREFIX // 16 + 8, **settings)
        asked = _Prefix(made)
        computed = min(asked.seconds(forget=True) for _ in range(3))
        fetched = asked.seconds()
        chosen = made.scheduler.kv_offloader
        assert isinstance(chosen, TieredKVOffloader)
        pays = chosen.load_costs.num_blocks_worth_loading(
            [tier.name for tier in made.engine_stats.tiers] * (PREFIX // 16)
        )
        print(f"{name:>12}{fetched:12.3f}{computed:13.3f}  {'fetch' if pays else 'compute'}", flush=True)
        made.shut_down()


class _Prefix:
    def __init__(self, made: EngineCore) -> None:
        self._made = made
        self._prompt = random_prompt(PREFIX + 1, 5)
        self._count = 0

    def seconds(self, *, forget: bool = False) -> float:
        """Seconds with an empty KV cache and, if `forget`, empty tiers."""
        self._made.scheduler.kv_cache_manager.block_pool.clear_hashes()
        if forget:
            self._made.scheduler.kv_offloader.clear_tiers()
        self._count += 1
        (one,) = at_once(self._made, [request(str(self._count), self._prompt, 1)]).values()
        time.sleep(1.0)  # lets pending stores to a tier finish
        return one.latency


if __name__ == "__main__":
    main()
