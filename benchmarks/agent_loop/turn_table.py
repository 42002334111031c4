"""A table of how much of each prompt was cached, compared with what must have been cached."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.agent_loop.proxy import Exchange

BLOCK_TOKENS = 16
MAX_SHOWN_CHARACTERS = 60
"""Maximum number of characters of a changed text."""


@dataclass(frozen=True)
class TurnRow:
    turn: int
    is_turn: bool
    is_complete: bool = False
    prompt_tokens: int = 0
    cached_tokens: int = 0
    expected_tokens: int = 0
    """Tokens of full blocks that this prompt shares with earlier prompts and answers of the same engine process."""
    lost_tokens: int = 0
    """Further tokens of full blocks that it shares with prompts and answers of earlier engine processes."""
    reason: str = ""
    diagnosis: str = ""
    event: str = ""
    change: str = ""
    """Where the prompt first differs from the closest earlier one, with the old and the new text."""
    attempts: int = 1
    """Number of requests in a row without an answer."""

    @property
    def explanation(self) -> str:
        if self.reason or not self.lost_tokens:
            return self.reason or ("new" if not self.cached_tokens else "hit")
        num_loaded = min(max(self.cached_tokens - self.expected_tokens, 0), self.lost_tokens)
        suffix = f", {num_loaded:,} were in a tier" if num_loaded else ""
        return f"another API process computed {self.lost_tokens:,}{suffix}"

    def find_fault(self) -> str:
        """Empty if the expected blocks were cached. A KV tier may also have those of earlier processes."""
        limit = self.expected_tokens + self.lost_tokens
        if not self.is_complete or self.expected_tokens <= self.cached_tokens <= limit:
            return ""
        return f"turn {self.turn}: {self.cached_tokens} tokens cached, expected {self.expected_tokens} to {limit}"


def common_length(text: str, other: str) -> int:
    """Number of leading characters that both texts share."""
    low, high = 0, min(len(text), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if text[:middle] == other[:middle] else (low, middle - 1)
    return low


def make_rows(exchanges: Sequence[Exchange], log: Path) -> list[TurnRow]:
    """`log` is written by scripting/sitecustomize.py and has every prompt that went to the engine."""
    entries: dict[str, dict[str, str]] = {}
    for line in log.read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        entries.setdefault(entry["id"].rpartition("-")[0], entry)
    computed: list[tuple[int, str]] = []
    rows: list[TurnRow] = []
    for exchange in exchanges:
        answered = entries.get(exchange.answer_id)
        if answered is None or not exchange.is_complete:
            if rows and not rows[-1].is_complete and rows[-1].turn == exchange.turn and exchange.kill is None:
                rows[-1] = replace(rows[-1], attempts=rows[-1].attempts + 1)
            else:
                rows.append(TurnRow(exchange.turn, not exchange.is_side_request, event=describe_kill(exchange)))
            continue
        rows.append(make_row(exchange, answered["prompt"], computed))
        text = answered["prompt"] + answered["answer"]
        computed.append((exchange.epoch, text))
        if exchange.kill is not None and exchange.kill.in_stream:  # the new engine computed it again
            computed.append((exchange.epoch + 1, text))
    return rows


def count_shared_tokens(prompt: str, texts: Iterable[str]) -> int:
    """Tokens of full blocks that the prompt shares with one of the texts. Its last token is always computed."""
    lengths = (min(common_length(prompt, text), len(prompt) - 1) for text in texts)
    return max((length // BLOCK_TOKENS * BLOCK_TOKENS for length in lengths), default=0)


def make_row(exchange: Exchange, prompt: str, computed: Sequence[tuple[int, str]]) -> TurnRow:
    """`computed`: the epochs and texts of earlier prompts with their answers."""
    expected = count_shared_tokens(prompt, (text for epoch, text in computed if epoch == exchange.epoch))
    prefix = exchange.prefix
    nearest = prefix.get("nearest") or {}
    change = ""
    if "was" in nearest:
        where = f"{nearest['common_tokens']:,} ({nearest['within']})"
        old, new = (nearest[name][:MAX_SHOWN_CHARACTERS] for name in ("was", "now"))
        change = f"at {where}: {old!r} is now {new!r}"
    return TurnRow(
        exchange.turn,
        not exchange.is_side_request,
        exchange.is_complete,
        len(prompt),
        prefix.get("cached_tokens", 0),
        expected,
        count_shared_tokens(prompt, (text for _, text in computed)) - expected,
        ", ".join(f"{each['reason']} {each['tokens']:,}" for each in prefix.get("missed", ())),
        exchange.diagnosis,
        describe_kill(exchange),
        change,
    )


def describe_kill(exchange: Exchange) -> str:
    if exchange.kill is None:
        return ""
    return f"{exchange.kill.process} killed {'in the stream' if exchange.kill.in_stream else 'before'}"


HEADER = ("turn", "prompt", "cached", "expected", "hit or miss", "diagnostics", "event", "change")


def format_rows(rows: Sequence[TurnRow]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(HEADER) + " |", "|---" * len(HEADER) + "|"]
    for row in rows:
        turn = str(row.turn) if row.is_turn else "side"
        if row.is_complete:
            numbers = [f"{number:,}" for number in (row.prompt_tokens, row.cached_tokens, row.expected_tokens)]
            cells = [turn, *numbers, row.explanation, row.diagnosis, row.event, row.change]
        else:
            event = f"{row.event}; {row.attempts} requests without an answer"
            cells = [turn, "", "", "", "", row.diagnosis, event, row.change]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)
