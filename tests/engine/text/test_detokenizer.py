"""Tests that streamed text equals decoded text, and that stop strings end it at the same place, and never show, however
the token ids are split.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from quire.engine.common.types import EngineCoreOutput
from quire.engine.text.detokenizer import REPLACEMENT_CHARACTER, IncrementalDetokenizer, WindowDecoder
from quire.engine.text.tokenizer import Tokenizer
from tests.texts import byte_level_tokenizer, real_tokenizers, sentence_piece_tokenizer

TOKENIZERS = [byte_level_tokenizer(), sentence_piece_tokenizer(), *real_tokenizers()]
NAMES = [tokenizer.name for tokenizer in TOKENIZERS]
each_tokenizer = pytest.mark.parametrize("tokenizer", [each.tokenizer for each in TOKENIZERS], ids=NAMES)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=40) | st.sampled_from(
    [
        "",
        " leading",
        "two  spaces\n\nand lines\t",
        "日本語 한국어 émigré",
        "👩‍👩‍👧‍👦 family 😀",
        "<s> special </s>",
        "\ufffd",
    ]
)
SPLITS = st.lists(st.integers(1, 4), max_size=60)


def stream(ids: Sequence[int], text: IncrementalDetokenizer, sizes: Sequence[int] = ()) -> str:
    """Push `ids` in groups of these sizes, then one by one; returns the concatenated text."""
    deltas, at = [], 0
    for size in [*sizes, *[1] * len(ids)]:
        delta = text.push_tokens(ids[at : at + size])
        deltas.append(delta.text)
        at += size
        if delta.stop_string is not None:
            return "".join(deltas)
    return "".join(deltas) + text.push_tokens([], final=True).text


@each_tokenizer
@given(text=texts, sizes=SPLITS, skip=st.booleans())
def test_deltas_concatenate_to_decoded_text(tokenizer: Tokenizer, text: str, sizes: list[int], skip: bool) -> None:
    ids = tokenizer.encode(text)
    expected = tokenizer.decode(ids, skip_special_tokens=skip)
    assert stream(ids, IncrementalDetokenizer(tokenizer, skip_special_tokens=skip), sizes) == expected


@each_tokenizer
@given(text=texts, cut=st.integers(0, 40))
def test_streamed_text_continues_decoded_prompt(tokenizer: Tokenizer, text: str, cut: int) -> None:
    ids = tokenizer.encode(text)
    prompt, rest = ids[:cut], ids[cut:]
    before = tokenizer.decode(prompt)
    if before.endswith(REPLACEMENT_CHARACTER):
        return  # the prompt ends in the middle of a character, so its text is not defined
    assert before + stream(rest, IncrementalDetokenizer(tokenizer, prompt_ids=prompt)) == tokenizer.decode(ids)


@each_tokenizer
@given(data=st.data())
def test_streamed_text_does_not_depend_on_chunk_sizes(tokenizer: Tokenizer, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=30))
    whole = IncrementalDetokenizer(tokenizer).push_tokens(ids, final=True).text
    assert stream(ids, IncrementalDetokenizer(tokenizer), data.draw(SPLITS)) == whole


def test_byte_level_text_of_any_ids_equals_decode() -> None:
    tokenizer = byte_level_tokenizer().tokenizer

    @given(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=30))
    def check(ids: list[int]) -> None:
        assert stream(ids, IncrementalDetokenizer(tokenizer)) == tokenizer.decode(ids)

    check()


@each_tokenizer
def test_character_is_streamed_with_last_token(tokenizer: Tokenizer) -> None:
    text = IncrementalDetokenizer(tokenizer)
    for token_id in tokenizer.encode("a😀b", add_special_tokens=False):
        assert REPLACEMENT_CHARACTER not in text.push_tokens([token_id]).text


@each_tokenizer
def test_incomplete_character_is_replaced_at_end(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("ab😀", add_special_tokens=False)[:-1]
    shown = stream(ids, IncrementalDetokenizer(tokenizer))
    assert shown == tokenizer.decode(ids)
    assert REPLACEMENT_CHARACTER in shown


@given(text=texts, sizes=SPLITS)
def test_window_decoder_equals_decode(text: str, sizes: list[int]) -> None:
    tokenizer = sentence_piece_tokenizer().tokenizer
    if REPLACEMENT_CHARACTER in text:
        return  # this decoder takes U+FFFD for an unfinished character
    ids = tokenizer.encode(text)
    window = WindowDecoder(tokenizer, (), tokenizer.special_token_ids)
    assert "".join(map(window.feed_token, ids)) + window.flush_text() == tokenizer.decode(ids)


words = st.text("ab😀c ", min_size=1, max_size=5)


@each_tokenizer
@given(
    text=st.text("ab😀c ", max_size=30),
    stop=st.lists(words, min_size=1, max_size=4),
    sizes=SPLITS,
    include=st.booleans(),
)
@example(text="ab c", stop=["ab c", "b"], sizes=[], include=False)
@example(text="aab", stop=["ab"], sizes=[], include=True)
def test_first_completed_stop_string_ends_text(
    tokenizer: Tokenizer, text: str, stop: list[str], sizes: list[int], include: bool
) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    decoded = tokenizer.decode(ids)
    stop_ranges = [(decoded.index(one) + len(one), decoded.index(one)) for one in stop if one in decoded]
    expected = decoded if not stop_ranges else decoded[: min(stop_ranges)[0 if include else 1]]
    assert stream(ids, IncrementalDetokenizer(tokenizer, stop=stop, include_stop=include), sizes) == expected


@given(text=st.text("abc", max_size=30), stop=st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=4))
def test_only_possible_stop_string_prefix_is_held_back(text: str, stop: list[str]) -> None:
    tokenizer = byte_level_tokenizer().tokenizer
    detokenizer, so_far = IncrementalDetokenizer(tokenizer, stop=stop), ""
    seen = ""
    for token_id in tokenizer.encode(text):
        delta = detokenizer.push_tokens([token_id])
        so_far += delta.text
        seen += tokenizer.decode([token_id])
        if delta.stop_string is not None:
            assert not any(one in so_far for one in stop)
            return
        hidden = seen[len(so_far) :]
        assert hidden == "" or any(one.startswith(hidden) for one in stop)


def test_delta_offsets_come_with_token_text() -> None:
    tokenizer = byte_level_tokenizer().tokenizer
    ids = tokenizer.encode("xé!stop", add_special_tokens=False)
    text = IncrementalDetokenizer(tokenizer, stop=["stop"])
    deltas = [text.push_tokens([token_id]) for token_id in ids]
    assert [(delta.text, delta.offsets) for delta in deltas[:4]] == [("x", (0,)), ("", ()), ("é", (1, 1)), ("!", (2,))]
    assert all(delta.text == "" and delta.offsets == () for delta in deltas[4:])
    assert deltas[-1].stop_string == "stop"


def test_num_used_ids_ends_with_stop_string() -> None:
    tokenizer = byte_level_tokenizer().tokenizer
    delta = IncrementalDetokenizer(tokenizer, stop=["bc"]).push_tokens(tokenizer.encode("abcdef"))
    assert (delta.text, delta.num_used_ids, delta.offsets) == ("a", 3, (0,))


def test_stop_strings_are_ignored_within_min_tokens() -> None:
    tokenizer = byte_level_tokenizer().tokenizer
    assert stream(tokenizer.encode("abab"), IncrementalDetokenizer(tokenizer, stop=["b"], min_tokens=2)) == "aba"


def test_stop_token_counts_but_adds_no_text() -> None:
    tokenizer = byte_level_tokenizer().tokenizer
    ids = tokenizer.encode("abc")
    output = EngineCoreOutput(id="1", new_ids=ids, finish_reason="stop", stop_reason=ids[-1])
    delta = IncrementalDetokenizer(tokenizer).push_output(output)
    assert (delta.text, delta.num_used_ids, delta.offsets) == ("ab", 3, (0, 1))
    assert IncrementalDetokenizer(tokenizer, include_stop=True).push_output(output).text == "abc"
    stopped = IncrementalDetokenizer(tokenizer, stop=["b"]).push_output(output)
    assert (stopped.text, stopped.num_used_ids, stopped.stop_string) == ("a", 2, "b")


@each_tokenizer
def test_shown_ids_appear_when_special_tokens_are_skipped(tokenizer: Tokenizer) -> None:
    first, second, *_ = sorted(tokenizer.special_token_ids)
    for skip, expected in ((True, [first]), (False, [first, second])):
        stream = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip, shown_ids=frozenset([first]))
        shown = stream.push_tokens([first, second], final=True).text
        assert shown == tokenizer.decode(expected, skip_special_tokens=False)


@pytest.mark.parametrize("scheme", ["byte_level", "sentence_piece", "window"])
@pytest.mark.parametrize("character", ["é", "€", "\U0001f600"])
@pytest.mark.parametrize("rest", ["", "z"])
def test_character_begun_in_prompt_is_completed(scheme: str, character: str, rest: str) -> None:
    """The prompt ends inside a character: the tokens that complete it yield the whole character and no U+FFFD (issue
    58).
    """
    tokenizer = (sentence_piece_tokenizer() if scheme == "sentence_piece" else byte_level_tokenizer()).tokenizer
    ids, before, behind = (
        tokenizer.encode(text, add_special_tokens=False) for text in (f"b{character}", "b", f"b{rest}")
    )
    tail = behind[len(before) :]
    for cut in range(1, len(character.encode())):
        prompt, answer = ids[:-cut], ids[-cut:]
        for ending, expected in (([*answer, *tail], character + rest), (tail, rest), ([], "")):
            if scheme == "window":
                window = WindowDecoder(tokenizer, prompt, frozenset())
                assert "".join(map(window.feed_token, ending)) + window.flush_text() == expected
            else:
                assert stream(ending, IncrementalDetokenizer(tokenizer, prompt_ids=prompt)) == expected
