"""Ends an answer that goes in circles: vLLM's repetition_detection, whose rule is check_sequence_repetition."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from engine.types import RequestOutput

STOP_REASON = "repetition_detected"


@dataclass(frozen=True, slots=True)
class RepetitionRule:
    """The last tokens are min_count times the same pattern, whose length lies within the bounds."""

    min_pattern_size: int
    max_pattern_size: int
    min_count: int

    def fits(self, ids: Sequence[int]) -> bool:
        sizes = range(max(1, self.min_pattern_size), self.max_pattern_size + 1)
        return any(self._repeats(ids, size) for size in sizes if size * self.min_count <= len(ids))

    def _repeats(self, ids: Sequence[int], size: int) -> bool:
        """Whether the last size * min_count tokens have the period `size`."""
        return all(ids[-i] == ids[-i - size] for i in range(1, size * (self.min_count - 1) + 1))


class RepetitionDetector:
    """One answer's tokens so far."""

    def __init__(self, rule: RepetitionRule, min_tokens: int) -> None:
        self._rule = rule
        self._min_tokens = min_tokens
        self._ids: list[int] = []

    def cut(self, output: RequestOutput) -> tuple[RequestOutput, bool]:
        """The output up to the token that completes a repetition, and whether there is one.

        A token that ends the answer anyway does so for its own reason.
        """
        for used, token_id in enumerate(output.new_ids, 1):
            self._ids.append(token_id)
            if used == len(output.new_ids) and output.finish_reason is not None:
                break
            if len(self._ids) >= self._min_tokens and self._rule.fits(self._ids):
                logprobs = None if output.logprobs is None else output.logprobs[:used]
                kept = output.new_ids[:used]
                return msgspec.structs.replace(output, new_ids=kept, logprobs=logprobs, finish_reason="length"), True
        return output, False
