from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

log = logging.getLogger("quire.hub")
Answer = Callable[[bytes], Awaitable[bytes | None]]
"""Returns the answer's body; None if there is no answer."""


class Answering:
    def __init__(self) -> None:
        self._answers: dict[str, Answer] = {}

    def add(self, topic: str, answer: Answer) -> None:
        assert topic not in self._answers, f"{topic} has two handlers"
        self._answers[topic] = answer

    def find(self, topic: str) -> Answer | None:
        return self._answers.get(topic)

    async def answer(self, topic: str, body: bytes) -> bytes | None:
        """A handler's failure is only logged, because it must not end other work."""
        try:
            return None if (handler := self.find(topic)) is None else await handler(body)
        except Exception:
            log.exception("the call %r from another process failed", topic)
            return None
