"""What each prompt found in the prefix cache, compared with what it must have found."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.agent_loop.proxy import Exchange

BLOCK_TOKENS = 16
SHOWN = 60
"""Maximum number of characters of a changed text."""


@dataclass(frozen=True)
class TurnRow:
    turn: int
    is_turn: bool
    is_complete: bool = False
    prompt_tokens: int = 0
    cached_tokens: int = 0
    expected_tokens: int = 0
    """Full blocks that this prompt shares with earlier prompts and answers of the same engine process."""
    lost_tokens: int = 0
    """Full blocks that it shares with prompts and answers of earlier engine processes, beyond these."""
    reason: str = ""
    diagnosis: str = ""
    event: str = ""
    change: str = ""
    """Where the prompt departs from the closest earlier one: what was there, and what is."""
    attempts: int = 1
    """Requests without an answer, one after the other."""

    @property
    def explanation(self) -> str:
        if self.reason or not self.lost_tokens:
            return self.reason or ("new" if not self.cached_tokens else "hit")
        found = min(max(self.cached_tokens - self.expected_tokens, 0), self.lost_tokens)
        return f"another API process computed {self.lost_tokens:,}" + (f", {found:,} were in a tier" if found else "")

    def find_fault(self) -> str:
        """ "" if all blocks that must be there were found. A KV tier may have those of earlier processes too."""
        most = self.expected_tokens + self.lost_tokens
        if not self.is_complete or self.expected_tokens <= self.cached_tokens <= most:
            return ""
        return f"turn {self.turn}: {self.cached_tokens} tokens cached, expected {self.expected_tokens} to {most}"


def common_length(text: str, other: str) -> int:
    """Number of leading characters that both have."""
    low, high = 0, min(len(text), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if text[:middle] == other[:middle] else (low, middle - 1)
    return low


def full_blocks(num_tokens: int) -> int:
    return num_tokens // BLOCK_TOKENS * BLOCK_TOKENS


def make_rows(exchanges: Sequence[Exchange], log: Path) -> list[TurnRow]:
    """`log`: of scripting/sitecustomize.py, with every prompt that went to the engine."""
    prompts: dict[str, Any] = {}
    for line in log.read_text(encoding="utf-8").splitlines():
        prompts.setdefault((entry := json.loads(line))["id"].rpartition("-")[0], entry)
    known: list[tuple[int, str]] = []
    rows = []
    for exchange in exchanges:
        entry = prompts.get(exchange.answer_id)
        if entry is None or not exchange.is_complete:
            if rows and not rows[-1].is_complete and rows[-1].turn == exchange.turn and exchange.kill is None:
                rows[-1] = replace(rows[-1], attempts=rows[-1].attempts + 1)
            else:
                rows.append(TurnRow(exchange.turn, not exchange.is_side_request, event=event(exchange)))
            continue
        prompt = entry["prompt"]
        lengths = [(epoch, min(common_length(prompt, other), len(prompt) - 1)) for epoch, other in known]
        expected = max((full_blocks(length) for epoch, length in lengths if epoch == exchange.epoch), default=0)
        ever = max((full_blocks(length) for _, length in lengths), default=0)
        # An answer's last token, which ends it, is not in the cache; the text's last one is.
        known.append((exchange.epoch, prompt + entry["answer"]))
        if (
            exchange.kill is not None and exchange.kill.in_stream
        ):  # complete: the engine that replaced it computed it again
            known.append((exchange.epoch + 1, prompt + entry["answer"]))
        rows.append(explained_row(exchange, prompt, expected, ever - expected))
    return rows


def explained_row(exchange: Exchange, prompt: str, expected: int, lost: int) -> TurnRow:
    prefix = exchange.prefix
    nearest = prefix.get("nearest") or {}
    change = ""
    if "was" in nearest:
        where = f"{nearest['common_tokens']:,} ({nearest['within']})"
        change = f"at {where}: {nearest['was'][:SHOWN]!r} is now {nearest['now'][:SHOWN]!r}"
    return TurnRow(
        exchange.turn,
        not exchange.is_side_request,
        exchange.is_complete,
        len(prompt),
        prefix.get("cached_tokens", 0),
        expected,
        lost,
        ", ".join(f"{each['reason']} {each['tokens']:,}" for each in prefix.get("missed", ())),
        exchange.diagnosis,
        event(exchange),
        change,
    )


def event(exchange: Exchange) -> str:
    if exchange.kill is None:
        return ""
    return f"{exchange.kill.process} killed {'in the stream' if exchange.kill.in_stream else 'before'}"


HEADER = ("turn", "prompt", "cached", "expected", "hit or miss", "diagnostics", "event", "change")


def format_rows(rows: Sequence[TurnRow]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(HEADER) + " |", "|---" * len(HEADER) + "|"]
    for row in rows:
        turn = str(row.turn) if row.is_turn else "side"
        numbers = (row.prompt_tokens, row.cached_tokens, row.expected_tokens)
        what = row.event if row.is_complete else f"{row.event}; {row.attempts} requests without an answer"
        figures = (f"{number:,}" if row.is_complete else "" for number in numbers)
        why = row.explanation if row.is_complete else ""
        cells = (turn, *figures, why, row.diagnosis, what, row.change)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)
