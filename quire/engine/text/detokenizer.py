"""Turns token ids into text while they arrive, and ends the text at stop strings.

A character whose bytes are spread over several tokens is given out when its last token has arrived. A step costs time
in proportion to its new tokens. The server and the offline `LLM` both use this module.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from encodings import utf_8

import msgspec

from quire.engine.text.tokenizer import Scheme, Tokenizer, fallback_byte
from quire.engine.types import EngineCoreOutput

REPLACEMENT = "\ufffd"


class TextDelta(msgspec.Struct, frozen=True, gc=False):
    """The text that a call of `TextStream.push` completed."""

    text: str
    offsets: tuple[int, ...]
    """One entry per token that is given out with this text: where it begins, in characters of the whole generated text.

    Tokens are given out in order, each with the delta that contains its first character, or else with the last delta.
    Tokens that begin after a stop string are never given out."""
    used: int
    """How many of the pushed ids belong to the answer: fewer than all only when a stop string was completed earlier."""
    stop_string: str | None = None
    """The stop string that ended the text. No more ids may be pushed then."""


class StopStrings:
    """The first stop string that is completed, reading character by character, ends the text before it, or after it
    with `include`. If one character completes two of them, the longer one counts. Text that may turn out to be the
    beginning of one is held back until that is decided."""

    def __init__(self, stop: Sequence[str], *, include: bool) -> None:
        self._stop = sorted(stop)
        self._longest = max(map(len, stop), default=0)
        self._include = include
        self.held_back = ""
        """Text that may be the beginning of a stop string."""

    def search(self, new_text: str) -> tuple[str, str | None]:
        """The text that can be given out, and the stop string that ended it, if any."""
        text = self.held_back + new_text
        found: tuple[int, int, str] | None = None
        for stop in self._stop:
            start = text.find(stop)
            if start >= 0 and (found is None or (start + len(stop), start) < found[:2]):
                found = (start + len(stop), start, stop)
        if found is not None:
            end, start, stop = found
            self.held_back = ""
            return text[: end if self._include else start], stop
        ready = self._begins_stop(text)
        self.held_back = text[ready:]
        return text[:ready], None

    def finish(self) -> str:
        """The text that was held back: no more will come."""
        rest, self.held_back = self.held_back, ""
        return rest

    def _begins_stop(self, text: str) -> int:
        """Where the longest suffix of `text` begins that is the beginning of a stop string; its length if none is."""
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            suffix = text[start:]
            at = bisect_left(self._stop, suffix)  # What begins with the suffix sorts right after it.
            if at < len(self._stop) and self._stop[at].startswith(suffix):
                return start
        return len(text)


class TextStream:
    """Turns the ids of one answer into text deltas.

    For ids that encode valid text, the concatenated deltas equal `tokenizer.decode(prompt_ids + ids)` without the
    prompt's part; without prompt ids they equal `tokenizer.decode(ids)`. A character that is unfinished when the answer
    ends is shown as U+FFFD.

    Stop strings end the text as StopStrings says. The text of the first `min_tokens` tokens is not searched.
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
        offsets: bool = True,
    ) -> None:
        """`shown_ids` are special tokens that are shown even with `skip_special_tokens`. offsets=False: they are not
        needed, and deltas have none."""
        self._decoder = make_decoder(tokenizer, prompt_ids, skip_special_tokens, shown_ids)
        self._stops = StopStrings(stop, include=include_stop) if stop else None
        self._include_stop = include_stop
        self._unsearched_tokens = min_tokens
        """Tokens still to come whose text is not searched for stop strings."""
        self._emitted = 0
        """Characters given out."""
        self._decoded = 0
        """Characters decoded: those given out and those held back."""
        self._starts: deque[int] | None = deque() if offsets else None
        """Where the tokens begin that have not been given out, in characters of the whole text."""

    def push(self, ids: Sequence[int], final: bool = False) -> TextDelta:
        """Add ids; `final` gives out what was held back. Do not call it again after `final` or after a stop string."""
        text = ""
        for used, token_id in enumerate(ids, 1):
            new_text = self._decoder.feed(token_id)
            if self._starts is not None:
                self._starts.append(self._decoded)
                self._decoded += len(new_text)
            if self._stops is None:
                text += new_text
            elif self._unsearched_tokens > 0:
                self._unsearched_tokens -= 1
                text += new_text
            elif new_text:
                ready, stop_string = self._stops.search(new_text)
                text += ready
                if stop_string is not None:
                    return self._delta(text, used, stop_string=stop_string)
        if final:
            rest = self._decoder.flush()
            self._decoded += len(rest)
            ready, stop_string = (rest, None) if self._stops is None else self._stops.search(rest)
            if stop_string is not None:
                return self._delta(text + ready, len(ids), stop_string=stop_string)
            text += ready if self._stops is None else ready + self._stops.finish()
        return self._delta(text, len(ids), final=final)

    def push_output(self, output: EngineCoreOutput) -> TextDelta:
        """Add an engine's output.

        The token that ended the answer (end of sequence, or one of stop_token_ids) counts as used, but it has no text
        and is not given out, unless `include_stop` is set.
        """
        if output.finish_reason is None:
            return self.push(output.new_ids)
        if output.finish_reason != "stop" or self._include_stop or not output.new_ids:
            return self.push(output.new_ids, final=True)
        delta = self.push(output.new_ids[:-1], final=True)
        return delta if delta.stop_string is not None else msgspec.structs.replace(delta, used=delta.used + 1)

    def _delta(self, text: str, used: int, final: bool = False, stop_string: str | None = None) -> TextDelta:
        if self._starts is None:
            return TextDelta(text, (), used, stop_string)
        self._emitted += len(text)
        starts, offsets = self._starts, []
        while starts and (final or starts[0] < self._emitted):
            offsets.append(starts.popleft())
        return TextDelta(text, tuple(offsets), used, stop_string)


def make_decoder(
    tokenizer: Tokenizer, prompt_ids: Sequence[int], skip_special_tokens: bool, shown_ids: frozenset[int] = frozenset()
) -> Decoder:
    """The decoder for the tokenizer's scheme, for ids that follow `prompt_ids`."""
    skip = tokenizer.special_ids - shown_ids if skip_special_tokens else frozenset()
    if tokenizer.scheme is Scheme.BYTE_LEVEL:
        return ByteLevelDecoder(tokenizer, skip, begun_character(tokenizer, prompt_ids))
    if tokenizer.scheme is Scheme.SENTENCE_PIECE:
        at_start = all(token_id in skip for token_id in prompt_ids)
        strip = at_start and tokenizer.strips_first_space
        return SentencePieceDecoder(tokenizer, skip, strip, begun_character(tokenizer, prompt_ids))
    return WindowDecoder(tokenizer, prompt_ids, skip)


def begun_character(tokenizer: Tokenizer, ids: Sequence[int]) -> bytes:
    """The bytes at the end of a prompt that begin a character whose other bytes the answer may bring."""
    sentence_piece, tail = tokenizer.scheme is Scheme.SENTENCE_PIECE, b""
    for token_id in reversed(ids[-_MOST_BEGUN:]):
        if sentence_piece and fallback_byte(tokenizer.token(token_id) or "") is None:
            break
        tail = tokenizer.token_bytes(token_id) + tail
    for size in range(min(_MOST_BEGUN, len(tail)), 0, -1):
        try:
            tail[-size:].decode()
        except UnicodeDecodeError as error:
            if error.start == 0 and error.reason == "unexpected end of data":
                return tail[-size:]
    return b""


def without_begun(tokenizer: Tokenizer, ids: Sequence[int], text: str) -> str:
    """A prompt's text that an answer goes on with, which brings the whole of a character that the prompt begins."""
    begun = begun_character(tokenizer, ids)
    for count in range(len(begun), 0, -1):
        if text.endswith(REPLACEMENT * count):
            return text[:-count]
    return text


_MOST_BEGUN = 3
"""Bytes of a character that lacks some."""


class ByteLevelDecoder:
    """For tokens that are byte strings: joined, they are UTF-8 text."""

    def __init__(self, tokenizer: Tokenizer, skip: frozenset[int], begun: bytes = b"") -> None:
        """begun: as begun_character has it. Where the answer does not complete it, it has no part in the answer."""
        self._token_bytes = tokenizer.token_bytes
        self._skip = skip
        self._utf8 = utf_8.IncrementalDecoder("replace")
        self._begun = begun

    def feed(self, token_id: int) -> str:
        if token_id in self._skip:
            return ""
        read = self._token_bytes(token_id)
        if self._begun and read:
            read = self._begun + read if _continues(self._begun, read) else read
            self._begun = b""
        # The codec takes several times as long, and has nothing to remember here.
        return read.decode() if read.isascii() and not self._utf8.buffer else self._utf8.decode(read)

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


def _continues(begun: bytes, read: bytes) -> bool:
    """True if the next byte may belong to the character."""
    try:
        (begun + read[:1]).decode()
    except UnicodeDecodeError as error:
        return error.reason == "unexpected end of data"
    return True


class SentencePieceDecoder:
    """For tokens that are text, or single bytes several of which make a character.

    The tokenizers library decodes a run of byte tokens that is not valid UTF-8 to one U+FFFD per byte. Here characters
    are given out as soon as they are complete, so only the part of a run from its first wrong byte on becomes U+FFFD.
    """

    def __init__(self, tokenizer: Tokenizer, skip: frozenset[int], strip_space: bool, begun: bytes = b"") -> None:
        """begun: as in ByteLevelDecoder."""
        self._tokenizer = tokenizer
        self._skip = skip
        self._strip_space = strip_space
        self._begun = begun
        self._run = b""
        """Bytes of a character whose other bytes have not arrived."""
        self._run_is_invalid = False
        """Whether the current run of byte tokens has had a byte that is not valid UTF-8."""

    def feed(self, token_id: int) -> str:
        if token_id in self._skip:
            return ""
        token = self._tokenizer.token(token_id)
        if token is None:
            return ""
        if self._begun:
            byte = self._tokenizer.token_bytes(token_id)
            self._run = self._begun if fallback_byte(token) is not None and _continues(self._begun, byte) else b""
            self._begun = b""
        if fallback_byte(token) is None:
            text = self.flush() + self._tokenizer.token_bytes(token_id).decode()
        else:
            text = self._feed_byte(self._tokenizer.token_bytes(token_id))
        if self._strip_space and text:
            self._strip_space = False
            return text.removeprefix(" ")
        return text

    def _feed_byte(self, byte: bytes) -> str:
        if self._run_is_invalid:
            return REPLACEMENT
        self._run += byte
        try:
            text = self._run.decode()
        except UnicodeDecodeError as error:
            if error.reason == "unexpected end of data":
                return ""
            self._run_is_invalid = True
            text = REPLACEMENT * len(self._run)
        self._run = b""
        return text

    def flush(self) -> str:
        rest = REPLACEMENT * len(self._run)
        self._run, self._run_is_invalid = b"", False
        return rest


class WindowDecoder:
    """For any other decoder of the tokenizers library, of which nothing is known.

    It decodes a window of the last ids twice, without and with the new ones; the difference is the new text. The window
    starts where a character starts, so no decoding begins in the middle of one.
    """

    CONTEXT = 6
    """Prompt ids that the first window contains, because a token's text can depend on the tokens before it."""
    MAX_PENDING = 8
    """Ids that may be held back for the rest of a character; no character takes more."""

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], skip: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._skip = skip
        self._ids = [token_id for token_id in prompt_ids[-self.CONTEXT :] if token_id not in skip]
        """The window."""
        self._shown = len(self._ids)
        """How many of them have been given out as text."""
        self._begun = self._take_back_begun()
        """What the prompt shows of a character that it only begins, which has no part in the answer."""

    def feed(self, token_id: int) -> str:
        if token_id in self._skip:
            return ""
        self._ids.append(token_id)
        text = self._new_text()
        if text.endswith(REPLACEMENT) and len(self._ids) - self._shown < self.MAX_PENDING:
            return ""
        if text:
            self._ids = self._ids[self._shown :]
            self._shown = len(self._ids)
        return self._without_begun(text)

    def flush(self) -> str:
        rest = self._new_text()
        self._shown = len(self._ids)
        return self._without_begun(rest)

    def _take_back_begun(self) -> str:
        shown = self._shown
        while self._shown > max(0, shown - _MOST_BEGUN) and self._decoded(self._shown).endswith(REPLACEMENT):
            self._shown -= 1
        return self._decoded(shown)[len(self._decoded(self._shown)) :]

    def _without_begun(self, text: str) -> str:
        begun = self._begun
        if text:
            self._begun = ""
        return text.removeprefix(begun)

    def _decoded(self, count: int) -> str:
        return self._tokenizer.decode(self._ids[:count], skip_special_tokens=False)

    def _new_text(self) -> str:
        before = self._tokenizer.decode(self._ids[: self._shown], skip_special_tokens=False)
        return self._tokenizer.decode(self._ids, skip_special_tokens=False)[len(before) :]


Decoder = ByteLevelDecoder | SentencePieceDecoder | WindowDecoder
"""Decodes ids one by one: `feed` returns the text that one more id completes, `flush` what is left at the end."""
