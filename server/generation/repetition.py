"""Ends an answer that repeats itself: vLLM's repetition_detection."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from quire.engine.types import RequestOutput
from quire.server.generation.spec import RepetitionRule

STOP_REASON = "repetition_detected"


class RepetitionDetector:
    """Watches the tokens of one answer."""

    def __init__(self, rule: RepetitionRule, min_tokens: int) -> None:
        """Repetitions among the first min_tokens tokens do not end the answer."""
        self._rule = rule
        self._min_tokens = min_tokens
        self._ids: list[int] = []

    def cut(self, output: RequestOutput) -> tuple[RequestOutput, bool]:
        """The output up to the token that completes a repetition, and whether there is one.

        A token that ends the answer anyway is not looked at: it ends the answer for its own reason.
        """
        for used, token_id in enumerate(output.new_ids, 1):
            self._ids.append(token_id)
            if used == len(output.new_ids) and output.finish_reason is not None:
                break
            if len(self._ids) >= self._min_tokens and repeats(self._ids, self._rule):
                logprobs = None if output.logprobs is None else output.logprobs[:used]
                kept = output.new_ids[:used]
                return msgspec.structs.replace(output, new_ids=kept, logprobs=logprobs, finish_reason="length"), True
        return output, False


def repeats(ids: Sequence[int], rule: RepetitionRule) -> bool:
    """Whether the last tokens are min_count times the same pattern, by vLLM's check_sequence_repetition."""
    sizes = range(max(1, rule.min_pattern_size), rule.max_pattern_size + 1)
    return any(_has_period(ids, size, size * rule.min_count) for size in sizes if size * rule.min_count <= len(ids))


def _has_period(ids: Sequence[int], period: int, length: int) -> bool:
    """Whether each of the last `length` tokens equals the one `period` before it, where both are among them."""
    return all(ids[-i] == ids[-i - period] for i in range(1, length - period + 1))
