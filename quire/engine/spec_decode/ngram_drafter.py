"""Drafts copied from earlier text that has the same last tokens. NgramDrafter searches the request itself (prompt
lookup, Saxena, 2023), SuffixDrafter also recent answers (suffix decoding, Oliaro et al., 2024).
"""

from __future__ import annotations

from abc import abstractmethod
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from quire.engine.core.drafter import Draft, Drafter, RequestsToDraft
from quire.engine.core.request import Request

NGRAM_LENGTHS = (1, 2, 4, 8)
MAX_CANDIDATES = 8
MAX_MATCH_LENGTH = 64
MAX_INDEXED_PER_STEP = 4096
"""Indexing this many tokens takes about 5 ms."""
MAX_SHARED_TOKENS = 100_000
"""Maximum tokens in each of the two indices of recent answers."""
MAX_SHARED_SALTS = 64


class MatchPosition(NamedTuple):
    text: Sequence[int]
    position: int


class NgramIndex:
    """Maps n-grams to the positions after them. A position is a number that counts the tokens of all indexed texts
    together.
    """

    def __init__(self, min_ngram: int) -> None:
        # Positions are numbers, because objects would take three times as long, mostly for garbage collection. N-grams
        # are stored as hashes; collisions are detected when texts at the positions are compared.
        lengths = sorted({min_ngram, *(length for length in NGRAM_LENGTHS if length > min_ngram)}, reverse=True)
        self._positions: dict[int, dict[int, int | list[int]]] = {length: {} for length in lengths}
        """Keyed by length of the n-gram, then by its hash."""
        self._texts: list[Sequence[int]] = []
        self._text_offsets: list[int] = []
        self._num_positions = 0

    def index_tokens(self, text: Sequence[int], begin: int, end: int) -> None:
        """Only the text that was indexed last may grow."""
        if not self._texts or self._texts[-1] is not text:
            self._texts.append(text)
            self._text_offsets.append(self._num_positions)
        first = self._text_offsets[-1]
        self._num_positions = max(self._num_positions, first + end)
        for length, positions in self._positions.items():
            for at in range(max(begin, length), end):
                key = hash(tuple(text[at - length : at]))
                stored = positions.setdefault(key, first + at)
                if isinstance(stored, list):
                    stored.append(first + at)
                elif stored != first + at:
                    positions[key] = [stored, first + at]

    def find_matches(self, text: Sequence[int]) -> list[MatchPosition]:
        """Positions after the longest known n-gram that ends `text`, at most MAX_CANDIDATES, the latest first."""
        for length, positions in self._positions.items():
            if (numbers := positions.get(hash(tuple(text[-length:])))) is not None:
                latest = numbers[: -MAX_CANDIDATES - 1 : -1] if isinstance(numbers, list) else [numbers]
                return [self._match_position_of_number(number) for number in latest]
        return []

    def _match_position_of_number(self, number: int) -> MatchPosition:
        text_index = bisect_right(self._text_offsets, number) - 1
        return MatchPosition(self._texts[text_index], number - self._text_offsets[text_index])


def _longest_match(ending: Sequence[int], matches: Sequence[MatchPosition]) -> tuple[MatchPosition | None, int]:
    best, longest = None, 0
    for match_position in matches:
        if (length := _match_length(ending, match_position)) > longest:
            best, longest = match_position, length
    return best, longest


def _match_length(text: Sequence[int], match_position: MatchPosition) -> int:
    max_length = min(len(text), match_position.position, MAX_MATCH_LENGTH)
    count = 0
    while count < max_length and text[-1 - count] == match_position.text[match_position.position - 1 - count]:
        count += 1
    return count


def copy_continuation(match_position: MatchPosition, max_tokens: int, drafted: Sequence[int] = ()) -> list[int]:
    """Starts over after the end of the text and of `drafted`, because the text may be repeating."""
    text, start = match_position
    token_ids = [*text[start : start + max_tokens], *drafted][:max_tokens]
    while token_ids and len(token_ids) < max_tokens:
        token_ids.append(token_ids[len(token_ids) - (len(text) + len(drafted) - start)])
    return token_ids


class LookupDrafter(Drafter):
    @abstractmethod
    def index_and_find_matches(self, request: Request, ending: Sequence[int]) -> list[MatchPosition]:
        """`ending`: last tokens of the request and of its draft."""

    def propose(self, draft_requests: RequestsToDraft, num_step_tokens: int) -> list[Draft]:
        return [self.continue_draft(request, [], max_drafts) for request, max_drafts in draft_requests]

    def continue_draft(self, request: Request, drafted: Sequence[int], max_tokens: int) -> Draft:
        ending = [*request.token_ids[-MAX_MATCH_LENGTH:], *drafted]
        best, length = _longest_match(ending, self.index_and_find_matches(request, ending))
        if best is None:
            return Draft([])
        token_ids = copy_continuation(best, max_tokens, drafted if best.text is request.token_ids else ())
        return Draft(token_ids, [length.bit_length()] * len(token_ids))


class NgramDrafter(LookupDrafter):
    def __init__(self, min_ngram: int) -> None:
        self._min_ngram = min_ngram
        self._indices: dict[str, tuple[NgramIndex, int]] = {}
        """(index, number of indexed tokens), keyed by request id."""

    def index_and_find_matches(self, request: Request, ending: Sequence[int]) -> list[MatchPosition]:
        index, num_indexed = self._indices.get(request.engine_request.id) or (NgramIndex(self._min_ngram), 0)
        end = min(len(request.token_ids), num_indexed + MAX_INDEXED_PER_STEP)
        index.index_tokens(request.token_ids, num_indexed, end)
        self._indices[request.engine_request.id] = index, end
        return index.find_matches(ending)

    def forget_request(self, request: Request) -> None:
        self._indices.pop(request.engine_request.id, None)


class SuffixDrafter(LookupDrafter):
    def __init__(self, min_ngram: int) -> None:
        self._min_ngram = min_ngram
        self._prompt_drafter = NgramDrafter(min_ngram)
        self._recent: OrderedDict[str, _RecentAnswers] = OrderedDict()
        """Keyed by cache salt, least recently used first."""

    def index_and_find_matches(self, request: Request, ending: Sequence[int]) -> list[MatchPosition]:
        recent = self._recent.get(request.engine_request.cache_salt)
        return self._prompt_drafter.index_and_find_matches(request, ending) + (
            [] if recent is None else recent.find_matches(ending)
        )

    def forget_request(self, request: Request) -> None:
        self._prompt_drafter.forget_request(request)
        if not request.num_output_tokens:  # a pooling request, or one aborted without an answer
            return
        salt = request.engine_request.cache_salt
        recent = self._recent.pop(salt, None) or _RecentAnswers(self._min_ngram)
        self._recent[salt] = recent
        recent.add_answer(tuple(request.token_ids[max(request.num_prompt_tokens - max(NGRAM_LENGTHS), 0) :]))
        if len(self._recent) > MAX_SHARED_SALTS:
            self._recent.popitem(last=False)


class _RecentAnswers:
    """When the newer index is full, it replaces the older."""

    def __init__(self, min_ngram: int) -> None:
        self._min_ngram = min_ngram
        self._newer = NgramIndex(min_ngram)
        self._older = NgramIndex(min_ngram)
        self._num_newer_tokens = 0

    def add_answer(self, answer: tuple[int, ...]) -> None:
        answer = answer[:MAX_SHARED_TOKENS]
        if self._num_newer_tokens + len(answer) > MAX_SHARED_TOKENS:
            self._older = self._newer
            self._newer = NgramIndex(self._min_ngram)
            self._num_newer_tokens = 0
        self._newer.index_tokens(answer, 0, len(answer))
        self._num_newer_tokens += len(answer)

    def find_matches(self, text: Sequence[int]) -> list[MatchPosition]:
        return [*self._newer.find_matches(text), *self._older.find_matches(text)]
