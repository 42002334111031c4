"""Token ids to text while they come: characters cut across tokens wait for their rest, stop strings never leak.

O(new tokens) per step. Used by the server and the offline LLM alike.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Sequence

import msgspec

from quire.engine.text.tokenizer import Scheme, Tokenizer, fallback_byte
from quire.engine.types import RequestOutput

REPLACEMENT = "\ufffd"


class TextDelta(msgspec.Struct, frozen=True):
    """What pushing some ids added to a text."""

    text: str
    offsets: tuple[int, ...]
    """Where the tokens that leave with this text begin, in characters of the whole generated text: one per token.

    Tokens leave in order, each with the delta that holds its first character, or with the last one; those that begin
    behind a stop string never leave."""
    used: int
    """How many of the pushed ids belong to the answer: fewer than all only when a stop string was completed earlier."""
    stop_string: str | None = None
    """The stop string that ended the text: push no more."""


class TextStream:
    """Turns the ids of one answer into text deltas.

    For ids that encode valid text, the concatenated deltas equal `tokenizer.decode(prompt_ids + ids)` without the
    prompt's part; with no prompt ids, `tokenizer.decode(ids)`. An unfinished character is shown as U+FFFD at the end.

    Stop strings: the first one completed, reading character by character, ends the text before it (or behind it, with
    include_stop); of two completed by the same character the longer wins. Text that may be the beginning of a stop
    string is held back. The text of the first min_tokens tokens is not searched.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        prompt_ids: Sequence[int] = (),
        stop: Sequence[str] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        shown_ids: frozenset[int] = frozenset(),
        min_tokens: int = 0,
    ) -> None:
        """`shown_ids` are special tokens that are shown all the same."""
        self._decoder = make_decoder(tokenizer, prompt_ids, skip_special_tokens, shown_ids)
        self._stop = tuple(stop)
        self._include_stop = include_stop
        self._unsearched = min_tokens
        self._held = ""
        self._emitted = 0
        self._decoded = 0
        self._starts: deque[int] = deque()

    def push(self, ids: Sequence[int], final: bool = False) -> TextDelta:
        """Add ids; `final` flushes what was held back. Not to be called again after `final` or a stop string."""
        text = ""
        for used, token_id in enumerate(ids, 1):
            self._starts.append(self._decoded)
            piece = self._decoder.feed(token_id)
            self._decoded += len(piece)
            if not self._stop:
                text += piece
            elif self._unsearched > 0:
                self._unsearched -= 1
                text += piece
            elif piece:
                ready, stop_string = self._search(piece)
                text += ready
                if stop_string is not None:
                    return self._delta(text, used, stop_string=stop_string)
        if final:
            rest = self._decoder.flush()
            self._decoded += len(rest)
            ready, stop_string = self._search(rest) if self._stop else (rest, None)
            if stop_string is not None:
                return self._delta(text + ready, len(ids), stop_string=stop_string)
            text += ready + self._held
            self._held = ""
        return self._delta(text, len(ids), final=final)

    def push_output(self, output: RequestOutput) -> TextDelta:
        """Add an engine's output. The token that ended the answer (end of sequence, or one of stop_token_ids) counts as
        used but has no text and does not leave, unless include_stop."""
        ended = output.finish_reason is not None
        if output.finish_reason != "stop" or self._include_stop or not output.new_ids:
            return self.push(output.new_ids, final=ended)
        delta = self.push(output.new_ids[:-1], final=True)
        return delta if delta.stop_string is not None else msgspec.structs.replace(delta, used=delta.used + 1)

    def _delta(self, text: str, used: int, final: bool = False, stop_string: str | None = None) -> TextDelta:
        self._emitted += len(text)
        starts, offsets = self._starts, []
        while starts and (final or starts[0] < self._emitted):
            offsets.append(starts.popleft())
        return TextDelta(text, tuple(offsets), used, stop_string)

    def _search(self, piece: str) -> tuple[str, str | None]:
        """Text that may leave, and the stop string found, if any."""
        text = self._held + piece
        found: tuple[int, int, str] | None = None
        for stop in self._stop:
            start = text.find(stop)
            if start >= 0 and (found is None or (start + len(stop), start) < found[:2]):
                found = (start + len(stop), start, stop)
        if found is not None:
            end, start, stop = found
            return text[: end if self._include_stop else start], stop
        keep = max(_overlap(text, stop) for stop in self._stop)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], None


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of text that begins stop."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0


def make_decoder(
    tokenizer: Tokenizer, prompt_ids: Sequence[int], skip_special_tokens: bool, shown_ids: frozenset[int] = frozenset()
) -> Decoder:
    """A decoder of ids that follow prompt_ids."""
    skip = tokenizer.special_ids - shown_ids if skip_special_tokens else frozenset()
    if tokenizer.scheme is Scheme.BYTE_LEVEL:
        return ByteLevelDecoder(tokenizer, skip)
    if tokenizer.scheme is Scheme.SENTENCE_PIECE:
        at_start = all(token_id in skip for token_id in prompt_ids)
        return SentencePieceDecoder(tokenizer, skip, strip_space=at_start and tokenizer.strips_first_space)
    return WindowDecoder(tokenizer, prompt_ids, skip)


class ByteLevelDecoder:
    """Tokens are byte strings; their sum is UTF-8."""

    def __init__(self, tokenizer: Tokenizer, skip: frozenset[int]) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._skip = skip
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token_id: int) -> str:
        return "" if token_id in self._skip else self._utf8.decode(self._token_bytes(token_id))

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class SentencePieceDecoder:
    """Tokens are text, or single bytes that add up to characters.

    The tokenizers library shows a run of byte tokens that is not UTF-8 as one U+FFFD per byte. Here characters leave as
    soon as they are whole, so only what follows the first wrong byte of a run is shown so.
    """

    def __init__(self, tokenizer: Tokenizer, skip: frozenset[int], strip_space: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip
        self._strip_space = strip_space
        self._run = b""
        self._broken = False

    def feed(self, token_id: int) -> str:
        if token_id in self._skip:
            return ""
        token = self._tokenizer.token(token_id)
        if token is None:
            return ""
        if fallback_byte(token) is None:
            text = self.flush() + self._tokenizer.token_bytes(token_id).decode()
        else:
            text = self._feed_byte(self._tokenizer.token_bytes(token_id))
        if self._strip_space and text:
            self._strip_space = False
            return text.removeprefix(" ")
        return text

    def _feed_byte(self, byte: bytes) -> str:
        if self._broken:
            return REPLACEMENT
        self._run += byte
        try:
            text = self._run.decode()
        except UnicodeDecodeError as error:
            if error.reason == "unexpected end of data":
                return ""
            self._broken = True
            text = REPLACEMENT * len(self._run)
        self._run = b""
        return text

    def flush(self) -> str:
        rest = REPLACEMENT * len(self._run)
        self._run, self._broken = b"", False
        return rest


class WindowDecoder:
    """Any decoder of the library: text is what new ids add to the decoding of the last ones that showed text.

    Those end where a character ends, so the decoder never starts in the middle of one.
    """

    CONTEXT = 6
    LONGEST = 8
    """Ids that may wait for the rest of a character; what is longer is not one."""

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], skip: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._skip = skip
        self._ids = [token_id for token_id in prompt_ids[-self.CONTEXT :] if token_id not in skip]
        self._shown = len(self._ids)

    def feed(self, token_id: int) -> str:
        if token_id in self._skip:
            return ""
        self._ids.append(token_id)
        text = self._new_text()
        if text.endswith(REPLACEMENT) and len(self._ids) - self._shown < self.LONGEST:
            return ""
        if text:
            self._ids = self._ids[self._shown :]
            self._shown = len(self._ids)
        return text

    def flush(self) -> str:
        rest = self._new_text()
        self._shown = len(self._ids)
        return rest

    def _new_text(self) -> str:
        before = self._tokenizer.decode(self._ids[: self._shown], skip_special_tokens=False)
        return self._tokenizer.decode(self._ids, skip_special_tokens=False)[len(before) :]


Decoder = ByteLevelDecoder | SentencePieceDecoder | WindowDecoder
"""Adds up token ids to text: `feed` gives what one more id completes, `flush` what is left at the end."""
