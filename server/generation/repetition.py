"""Ends an answer that goes in circles: vLLM's repetition_detection."""

from __future__ import annotations

import msgspec

from quire.engine.types import RequestOutput
from quire.server.protocol.common import RepetitionDetection

STOP_REASON = "repetition_detected"


class RepetitionDetector:
    """One answer's tokens so far."""

    def __init__(self, rule: RepetitionDetection, min_tokens: int) -> None:
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
