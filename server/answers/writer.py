"""What the writers of both endpoints share: who the answer is from, and how its chunks end."""

from __future__ import annotations

from typing import ClassVar

from engine.tokenizer import Tokenizer
from server.answers.head import DONE, END, Head, encode_json
from server.generate import Usage


class AnswerWriter:
    """Writes deltas as server-sent events, and whole answers as one body. Constant parts are encoded once."""

    CHUNK: ClassVar[str]
    """The `object` of a chunk."""
    UNFINISHED: ClassVar[bytes]
    """What closes a choice that has neither log probabilities nor an end."""

    def __init__(
        self,
        head: Head,
        tokenizer: Tokenizer,
        *,
        logprobs: bool,
        include_usage: bool,
        tokens_as_token_ids: bool = False,
    ) -> None:
        self._head = head
        self._tokenizer = tokenizer
        self._with_logprobs = logprobs
        self._tokens_as_token_ids = tokens_as_token_ids
        self._include_usage = include_usage
        self._opening = head.opening(self.CHUNK)
        self._end_chunks(b'}],"usage":null}' + END if include_usage else b"}]}" + END)

    def tell_usage(self, usage: Usage) -> None:
        """What the chunks from now on say of usage."""
        self._end_chunks(b'}],"usage":%b}%b' % (encode_json(usage.as_dict()), END))

    def _end_chunks(self, close: bytes) -> None:
        self._close = close
        self._running = self.UNFINISHED + close

    def last(self, usage: Usage) -> bytes:
        """What comes after the last step."""
        if not self._include_usage:
            return DONE
        return self._opening + b'[],"usage":' + encode_json(usage.as_dict()) + b"}" + END + DONE
