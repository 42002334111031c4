from __future__ import annotations

from collections.abc import Iterator, Sequence

from quire.engine.text.tokenizer import Tokenizer

_LEAD_CHARACTER = "\u263a"
"""Encoded before a text and then removed, because some tokenizers change a first space."""


def encode_with_literal_texts(
    tokenizer: Tokenizer, text: str, moved: Sequence[str], *, add_special_tokens: bool
) -> list[int]:
    """Special tokens such as `<|im_end|>` in `moved` texts are encoded as characters. Raises InvalidRequest."""
    cuts = sorted(set(_find_cuts_inside_special_tokens(tokenizer, text, moved)))
    if not cuts:
        return tokenizer.encode(text, add_special_tokens=add_special_tokens)
    ids = tokenizer.encode(text[: cuts[0]], add_special_tokens=add_special_tokens)
    lead = _LEAD_CHARACTER if tokenizer.strips_first_space else ""
    lead_ids = tokenizer.encode(lead, add_special_tokens=False)
    for start, end in zip(cuts, [*cuts[1:], len(text)], strict=True):
        ids += tokenizer.encode(lead + text[start:end], add_special_tokens=False)[len(lead_ids) :]
    return ids


def _find_cuts_inside_special_tokens(tokenizer: Tokenizer, text: str, moved_texts: Sequence[str]) -> Iterator[int]:
    """A special token that is cut is encoded as characters."""
    pattern = tokenizer.added_token_pattern
    for each in set(moved_texts) if pattern is not None else ():
        assert pattern is not None
        inside = [match.start() + 1 for match in pattern.finditer(each)]
        text_start = text.find(each) if inside else -1
        while text_start >= 0:
            yield from (text_start + cut for cut in inside)
            text_start = text.find(each, text_start + len(each))
