"""Drafts copied from texts that went on from the same tokens before: from the sequence's own (prompt lookup, Saxena,
2023), or also from what others were answered lately (suffix decoding, Oliaro et al., 2024). No model is needed.

A text is found by its last few tokens in an index that grows with each token; nothing is searched.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from quire.engine.core.drafter import Draft, Drafter, DraftRequests
from quire.engine.core.request import Request

GRAMS = (1, 2, 4, 8)
"""Lengths of the runs of tokens that are looked up, the longest first that is found."""
CANDIDATES = 8
"""How many of the last places after the same run are compared."""
LONGEST_MATCH = 64
INDEXED_AT_ONCE = 4096
"""Tokens of one text that are indexed in one step: some 5 ms."""
SHARED_TOKENS = 100_000
"""Of one cache salt's recent answers; up to twice as many are held."""
SHARED_SALTS = 64


class Place(NamedTuple):
    """Where a text went on after the tokens that were looked up."""

    text: Sequence[int]
    at: int
    """The first token that followed."""


class Index:
    """The places in some texts that follow each run of tokens, as numbers: the texts are numbered through."""

    def __init__(self, least: int) -> None:
        """`least`: length of the shortest run."""
        # Numbers take a third of the time that objects do, most of it the garbage collector's. Runs are known by their
        # hashes; what another run of the same hash brings is compared and found not to match.
        grams = sorted({least, *(gram for gram in GRAMS if gram > least)}, reverse=True)
        self._places: dict[int, dict[int, int | list[int]]] = {gram: {} for gram in grams}
        """By length of the run, by its hash."""
        self._texts: list[Sequence[int]] = []
        self._firsts: list[int] = []
        """Of each text, the number of its first place."""
        self._end = 0

    def add(self, text: Sequence[int], begin: int, end: int) -> None:
        """The places of `text` from `begin` to before `end`. A text may be added bit by bit while it is the last."""
        if not self._texts or self._texts[-1] is not text:
            self._texts.append(text)
            self._firsts.append(self._end)
        first = self._firsts[-1]
        self._end = max(self._end, first + end)
        for gram, places in self._places.items():
            for at in range(max(begin, gram), end):
                key = hash(tuple(text[at - gram : at]))
                known = places.setdefault(key, first + at)
                if isinstance(known, list):
                    known.append(first + at)
                elif known != first + at:
                    places[key] = [known, first + at]

    def find(self, text: Sequence[int]) -> list[Place]:
        """The last places that follow the longest run with which `text` ends, the latest first."""
        for gram, places in self._places.items():
            if (found := places.get(hash(tuple(text[-gram:])))) is not None:
                last = found[: -CANDIDATES - 1 : -1] if isinstance(found, list) else [found]
                return [self._place(number) for number in last]
        return []

    def _place(self, number: int) -> Place:
        which = bisect_right(self._firsts, number) - 1
        return Place(self._texts[which], number - self._firsts[which])


def best_guess(text: Sequence[int], places: Sequence[Place], most: int) -> Draft:
    """What follows the place before which most tokens are those at the end of `text`, the first of equally good ones.
    The longer the match, the likelier the guess."""
    best, longest = None, 0
    for place in places:
        if (length := _matching(text, place)) > longest:
            best, longest = place, length
    if best is None:
        return Draft([])
    found = following(best, most)
    return Draft(found, [longest.bit_length()] * len(found))


def _matching(text: Sequence[int], place: Place) -> int:
    most = min(len(text), place.at, LONGEST_MATCH)
    count = 0
    while count < most and text[-1 - count] == place.text[place.at - 1 - count]:
        count += 1
    return count


def following(place: Place, most: int) -> list[int]:
    """Up to so many tokens from a place on. A text that ends before goes on as from the place: it may be repeating
    itself."""
    text, at = place
    found = list(text[at : at + most])
    while found and len(found) < most:
        found.append(found[len(found) - (len(text) - at)])
    return found


class PromptLookup(Drafter):
    """Looks in the sequence's own tokens."""

    def __init__(self, least: int) -> None:
        self._least = least
        self._indices: dict[str, tuple[Index, int]] = {}
        """By request id, with the number of tokens whose places are indexed."""

    def propose(self, asked: DraftRequests, tokens: int) -> list[Draft]:
        return [best_guess(request.token_ids, self.places(request), most) for request, most in asked]

    def places(self, request: Request) -> list[Place]:
        """Where the sequence's tokens went on before."""
        index, done = self._indices.get(request.engine_request.id) or (Index(self._least), 0)
        end = min(len(request.token_ids), done + INDEXED_AT_ONCE)
        index.add(request.token_ids, done, end)
        self._indices[request.engine_request.id] = index, end
        return index.find(request.token_ids)

    def on_finished(self, request: Request) -> None:
        self._indices.pop(request.engine_request.id, None)


class SharedLookup(Drafter):
    """Looks in the sequence's own tokens and in recent answers to requests of the same cache salt."""

    def __init__(self, least: int) -> None:
        self._least = least
        self._own = PromptLookup(least)
        self._recent: OrderedDict[str, _Recent] = OrderedDict()
        """By salt; the one that was used last comes last."""

    def propose(self, asked: DraftRequests, tokens: int) -> list[Draft]:
        return [best_guess(request.token_ids, self._places(request), most) for request, most in asked]

    def _places(self, request: Request) -> list[Place]:
        recent = self._recent.get(request.engine_request.cache_salt)
        return self._own.places(request) + ([] if recent is None else recent.find(request.token_ids))

    def on_finished(self, request: Request) -> None:
        self._own.on_finished(request)
        if not request.num_output_tokens:  # a vector, or aborted before it had an answer
            return
        salt = request.engine_request.cache_salt
        recent = self._recent.pop(salt, None) or _Recent(self._least)
        self._recent[salt] = recent
        recent.add(tuple(request.token_ids[max(request.num_prompt_tokens - max(GRAMS), 0) :]))
        if len(self._recent) > SHARED_SALTS:
            self._recent.popitem(last=False)


class _Recent:
    """Answers, in two indices: when the newer one is full, it takes the place of the older one, which is dropped."""

    def __init__(self, least: int) -> None:
        self._least = least
        self._newer, self._older, self._held = Index(least), Index(least), 0

    def add(self, answer: tuple[int, ...]) -> None:
        answer = answer[:SHARED_TOKENS]
        if self._held + len(answer) > SHARED_TOKENS:
            self._newer, self._older, self._held = Index(self._least), self._newer, 0
        self._newer.add(answer, 0, len(answer))
        self._held += len(answer)

    def find(self, text: Sequence[int]) -> list[Place]:
        return [*self._newer.find(text), *self._older.find(text)]
