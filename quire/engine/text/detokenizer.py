"""Turns arriving token ids into text, in time proportional to the number of new tokens. A character is emitted with its
last token.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from encodings import utf_8

import msgspec

from quire.engine.common.types import EngineCoreOutput
from quire.engine.text.tokenizer import DecoderType, Tokenizer, fallback_byte

REPLACEMENT_CHARACTER = "\ufffd"


class TextDelta(msgspec.Struct, frozen=True, gc=False):
    text: str
    offsets: tuple[int, ...]
    """Start of each emitted token, in characters of the whole text. A token's offset comes with the delta that has its
    first character, or with the last delta. A token that begins after a stop string has none.
    """
    num_used_ids: int
    """All pushed ids, or fewer after a stop string."""
    stop_string: str | None = None


class StopStringMatcher:
    """Ends the text at the first completed stop string. If one character completes two, the longer one counts. Text
    that may begin a stop string is held back.
    """

    def __init__(self, stop: Sequence[str], *, include: bool) -> None:
        self._stop_strings = sorted(stop)
        self._max_stop_length = max(map(len, stop), default=0)
        self._include_stop = include
        self.held_back = ""

    def feed_text(self, new_text: str) -> tuple[str, str | None]:
        text = self.held_back + new_text
        earliest: tuple[int, int, str] | None = None
        for stop in self._stop_strings:
            start = text.find(stop)
            if start >= 0 and (earliest is None or (start + len(stop), start) < earliest[:2]):
                earliest = (start + len(stop), start, stop)
        if earliest is not None:
            end, start, stop = earliest
            self.held_back = ""
            return text[: end if self._include_stop else start], stop
        ready = self._stop_prefix_start(text)
        self.held_back = text[ready:]
        return text[:ready], None

    def take_held_back(self) -> str:
        rest, self.held_back = self.held_back, ""
        return rest

    def _stop_prefix_start(self, text: str) -> int:
        for start in range(max(0, len(text) - self._max_stop_length + 1), len(text)):
            suffix = text[start:]
            at = bisect_left(self._stop_strings, suffix)
            if at < len(self._stop_strings) and self._stop_strings[at].startswith(suffix):
                return start
        return len(text)


class IncrementalDetokenizer:
    """For valid text, the deltas join to `tokenizer.decode(ids)`. With prompt ids they join to the part of
    `tokenizer.decode(prompt_ids + ids)` after the prompt. A character unfinished at the end becomes U+FFFD. Stop
    strings are not searched in the first `min_tokens` tokens.
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
        """`shown_ids` are never skipped."""
        self._decoder = make_decoder(tokenizer, prompt_ids, skip_special_tokens, shown_ids)
        self._stop_matcher = StopStringMatcher(stop, include=include_stop) if stop else None
        self._include_stop = include_stop
        self._unsearched_tokens = min_tokens
        """Number of further tokens in which stop strings are not searched."""
        self._num_emitted = 0
        self._num_decoded = 0
        """Number of characters emitted or held back."""
        self._pending_starts: deque[int] | None = deque() if offsets else None
        """Start of each token that is not emitted yet, in characters of the whole text. None without offsets."""

    def push_tokens(self, ids: Sequence[int], final: bool = False) -> TextDelta:
        """If `final`, also emits text that was held back. Must not be called after `final` or a stop string."""
        text = ""
        for used, token_id in enumerate(ids, 1):
            new_text = self._decoder.feed_token(token_id)
            if self._pending_starts is not None:
                self._pending_starts.append(self._num_decoded)
                self._num_decoded += len(new_text)
            if self._stop_matcher is None:
                text += new_text
            elif self._unsearched_tokens > 0:
                self._unsearched_tokens -= 1
                text += new_text
            elif new_text:
                ready, stop_string = self._stop_matcher.feed_text(new_text)
                text += ready
                if stop_string is not None:
                    return self._make_delta(text, used, stop_string=stop_string)
        if final:
            rest = self._decoder.flush_text()
            self._num_decoded += len(rest)
            ready, stop_string = (rest, None) if self._stop_matcher is None else self._stop_matcher.feed_text(rest)
            if stop_string is not None:
                return self._make_delta(text + ready, len(ids), stop_string=stop_string)
            text += ready if self._stop_matcher is None else ready + self._stop_matcher.take_held_back()
        return self._make_delta(text, len(ids), final=final)

    def push_output(self, output: EngineCoreOutput) -> TextDelta:
        """The token that ended the answer (EOS or a stop token) counts as used, but is emitted only with
        `include_stop`.
        """
        if output.finish_reason is None:
            return self.push_tokens(output.new_ids)
        if output.finish_reason != "stop" or self._include_stop or not output.new_ids:
            return self.push_tokens(output.new_ids, final=True)
        delta = self.push_tokens(output.new_ids[:-1], final=True)
        return (
            delta
            if delta.stop_string is not None
            else msgspec.structs.replace(delta, num_used_ids=delta.num_used_ids + 1)
        )

    def _make_delta(self, text: str, used: int, final: bool = False, stop_string: str | None = None) -> TextDelta:
        if self._pending_starts is None:
            return TextDelta(text, (), used, stop_string)
        self._num_emitted += len(text)
        starts, offsets = self._pending_starts, []
        while starts and (final or starts[0] < self._num_emitted):
            offsets.append(starts.popleft())
        return TextDelta(text, tuple(offsets), used, stop_string)


def make_decoder(
    tokenizer: Tokenizer, prompt_ids: Sequence[int], skip_special_tokens: bool, shown_ids: frozenset[int] = frozenset()
) -> TokenDecoder:
    skip = tokenizer.special_token_ids - shown_ids if skip_special_tokens else frozenset()
    if tokenizer.decoder_type is DecoderType.BYTE_LEVEL:
        return ByteLevelDecoder(tokenizer, skip, partial_character(tokenizer, prompt_ids))
    if tokenizer.decoder_type is DecoderType.SENTENCE_PIECE:
        at_start = all(token_id in skip for token_id in prompt_ids)
        strip = at_start and tokenizer.strips_first_space
        return SentencePieceDecoder(tokenizer, skip, strip, partial_character(tokenizer, prompt_ids))
    return WindowDecoder(tokenizer, prompt_ids, skip)


def partial_character(tokenizer: Tokenizer, ids: Sequence[int]) -> bytes:
    """Returns the prompt's last bytes if they begin a character."""
    sentence_piece, tail = tokenizer.decoder_type is DecoderType.SENTENCE_PIECE, b""
    for token_id in reversed(ids[-_MAX_PARTIAL_BYTES:]):
        if sentence_piece and fallback_byte(tokenizer.id_to_token(token_id) or "") is None:
            break
        tail = tokenizer.token_bytes(token_id) + tail
    for size in range(min(_MAX_PARTIAL_BYTES, len(tail)), 0, -1):
        try:
            tail[-size:].decode()
        except UnicodeDecodeError as error:
            if error.start == 0 and error.reason == "unexpected end of data":
                return tail[-size:]
    return b""


def without_partial_character(tokenizer: Tokenizer, ids: Sequence[int], text: str) -> str:
    """Drops the U+FFFD of the prompt's last character if the answer may complete it."""
    partial = partial_character(tokenizer, ids)
    for count in range(len(partial), 0, -1):
        if text.endswith(REPLACEMENT_CHARACTER * count):
            return text[:-count]
    return text


_MAX_PARTIAL_BYTES = 3
"""A UTF-8 character has at most four bytes."""


class ByteLevelDecoder:
    def __init__(self, tokenizer: Tokenizer, skip: frozenset[int], partial: bytes = b"") -> None:
        """`partial`: the prompt's incomplete last character, which is dropped unless the answer completes it."""
        self._token_bytes = tokenizer.token_bytes
        self._skip_ids = skip
        self._utf8_decoder = utf_8.IncrementalDecoder("replace")
        self._partial = partial

    def feed_token(self, token_id: int) -> str:
        if token_id in self._skip_ids:
            return ""
        new_bytes = self._token_bytes(token_id)
        if self._partial and new_bytes:
            new_bytes = self._partial + new_bytes if _continues_character(self._partial, new_bytes) else new_bytes
            self._partial = b""
        # Python's codec is several times slower, so ASCII is decoded without it.
        return (
            new_bytes.decode()
            if new_bytes.isascii() and not self._utf8_decoder.buffer
            else self._utf8_decoder.decode(new_bytes)
        )

    def flush_text(self) -> str:
        return self._utf8_decoder.decode(b"", final=True)


def _continues_character(partial: bytes, new_bytes: bytes) -> bool:
    try:
        (partial + new_bytes[:1]).decode()
    except UnicodeDecodeError as error:
        return error.reason == "unexpected end of data"
    return True


class SentencePieceDecoder:
    """Decodes tokens that are text or single bytes of a character. The tokenizers library decodes each byte of an
    invalid run to U+FFFD. This class emits complete characters; only bytes from the first wrong one on become U+FFFD.
    """

    def __init__(self, tokenizer: Tokenizer, skip: frozenset[int], strip_space: bool, partial: bytes = b"") -> None:
        self._tokenizer = tokenizer
        self._skip_ids = skip
        self._strip_space = strip_space
        self._partial = partial
        self._byte_run = b""
        self._run_is_invalid = False

    def feed_token(self, token_id: int) -> str:
        if token_id in self._skip_ids:
            return ""
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return ""
        if self._partial:
            byte = self._tokenizer.token_bytes(token_id)
            self._byte_run = (
                self._partial if fallback_byte(token) is not None and _continues_character(self._partial, byte) else b""
            )
            self._partial = b""
        if fallback_byte(token) is None:
            text = self.flush_text() + self._tokenizer.token_bytes(token_id).decode()
        else:
            text = self._feed_byte(self._tokenizer.token_bytes(token_id))
        if self._strip_space and text:
            self._strip_space = False
            return text.removeprefix(" ")
        return text

    def _feed_byte(self, byte: bytes) -> str:
        if self._run_is_invalid:
            return REPLACEMENT_CHARACTER
        self._byte_run += byte
        try:
            text = self._byte_run.decode()
        except UnicodeDecodeError as error:
            if error.reason == "unexpected end of data":
                return ""
            self._run_is_invalid = True
            text = REPLACEMENT_CHARACTER * len(self._byte_run)
        self._byte_run = b""
        return text

    def flush_text(self) -> str:
        rest = REPLACEMENT_CHARACTER * len(self._byte_run)
        self._byte_run, self._run_is_invalid = b"", False
        return rest


class WindowDecoder:
    """Fallback for other decoders. It decodes a window, which starts at a character boundary, with and without the new
    ids, and emits the difference.
    """

    PROMPT_CONTEXT_TOKENS = 6
    """A token's text can depend on earlier tokens."""
    MAX_PENDING_TOKENS = 8
    """No character takes more tokens."""

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], skip: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._skip_ids = skip
        self._window_ids = [token_id for token_id in prompt_ids[-self.PROMPT_CONTEXT_TOKENS :] if token_id not in skip]
        self._num_shown = len(self._window_ids)
        self._partial = self._rewind_and_get_partial_text()
        """Text of the prompt's incomplete last character, which is not part of the answer."""

    def feed_token(self, token_id: int) -> str:
        if token_id in self._skip_ids:
            return ""
        self._window_ids.append(token_id)
        text = self._decode_new()
        if text.endswith(REPLACEMENT_CHARACTER) and len(self._window_ids) - self._num_shown < self.MAX_PENDING_TOKENS:
            return ""
        if text:
            self._window_ids = self._window_ids[self._num_shown :]
            self._num_shown = len(self._window_ids)
        return self._strip_prompt_partial_prefix(text)

    def flush_text(self) -> str:
        rest = self._decode_new()
        self._num_shown = len(self._window_ids)
        return self._strip_prompt_partial_prefix(rest)

    def _rewind_and_get_partial_text(self) -> str:
        shown = self._num_shown
        while self._num_shown > max(0, shown - _MAX_PARTIAL_BYTES) and self._decode_first_tokens(
            self._num_shown
        ).endswith(REPLACEMENT_CHARACTER):
            self._num_shown -= 1
        return self._decode_first_tokens(shown)[len(self._decode_first_tokens(self._num_shown)) :]

    def _strip_prompt_partial_prefix(self, text: str) -> str:
        partial = self._partial
        if text:
            self._partial = ""
        return text.removeprefix(partial)

    def _decode_first_tokens(self, count: int) -> str:
        return self._tokenizer.decode(self._window_ids[:count], skip_special_tokens=False)

    def _decode_new(self) -> str:
        before = self._tokenizer.decode(self._window_ids[: self._num_shown], skip_special_tokens=False)
        return self._tokenizer.decode(self._window_ids, skip_special_tokens=False)[len(before) :]


TokenDecoder = ByteLevelDecoder | SentencePieceDecoder | WindowDecoder
