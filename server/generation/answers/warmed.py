"""The answer of POST /v1/sessions/{id}/warm."""

from __future__ import annotations

import time
from collections.abc import Sequence

from quire.engine.text.tokenizer import Tokenizer
from quire.server.encoding import encode_json
from quire.server.generation.answers.writer import WholeWriter
from quire.server.generation.fold import Answer
from quire.server.generation.generation import Usage
from quire.server.generation.spec import GenerationSpec


class WarmedWriter(WholeWriter):
    """Tells how much of the conversation was cached, and how much was computed."""

    def __init__(self, session: str, spec: GenerationSpec, tokenizer: Tokenizer, fingerprint: str) -> None:
        super().__init__(spec, tokenizer, fingerprint)
        self._session, self._began = session, time.monotonic()

    def whole(self, answers: Sequence[Answer], usage: Usage) -> bytes:
        told = {
            "object": "session.warmed",
            "id": self._session,
            "model": self._spec.model,
            "tokens": usage.prompt_tokens,
            "cached_tokens": usage.cached_tokens,
            "computed_tokens": usage.prompt_tokens - usage.cached_tokens,
            "seconds": round(time.monotonic() - self._began, 6),
            "weights_version": self.weights_version,
        }
        return encode_json(told)
