"""Tests draft tokens that a grammar forces, with the embedded model's tokenizer."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from quire.engine.common.config import DEMO_MODEL
from quire.engine.common.errors import InvalidRequest
from quire.engine.common.request_params import Grammar, SamplingParams
from quire.engine.common.types import EngineCoreRequest
from quire.engine.core.drafter import KIND_FORCED, KIND_FORCED_TEXT, Draft, Drafter, NullDrafter, RequestsToDraft
from quire.engine.core.request import Request
from quire.engine.spec_decode.grammar_drafter import GrammarDrafter
from quire.engine.text.grammar_compiler import (
    MAX_FORCED_BYTES,
    GrammarCompiler,
    json_grammar,
    make_grammar_vocabulary,
    with_usual_whitespace,
)
from quire.engine.text.tokenizer import Tokenizer

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"keeper": {"enum": ["Anna"]}, "friend": {"enum": ["Tom", "Olaf"]}},
    "required": ["keeper", "friend"],
    "additionalProperties": False,
}


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_pretrained(Path(DEMO_MODEL))


@cache
def compiler() -> GrammarCompiler:
    return GrammarCompiler(make_grammar_vocabulary(tokenizer(), 4096, (2,)))


def sequence(grammar: Grammar | None, answer: str) -> Request:
    params = SamplingParams(max_tokens=100, grammar=grammar)
    ids = encoded(answer)
    return Request(
        EngineCoreRequest(id="a", prompt_ids=[5, 6], emitted_ids=ids, params=params, seed=0), 0, 100, drafting=True
    )


def encoded(text: str) -> list[int]:
    return tokenizer().backend.encode(text, add_special_tokens=False).ids


def guessed(drafter: Drafter, seq: Request, most: int = 100) -> str:
    return tokenizer().decode(drafter.propose([(seq, most)], 1)[0].token_ids)


class Fixed(Drafter):
    def __init__(self, text: str) -> None:
        self.tokens = encoded(text)
        self.learnt: list[tuple[int, int]] = []

    def propose(self, asked: RequestsToDraft, tokens: int) -> list[Draft]:
        return [Draft(self.tokens[:most], [3] * most) for _, most in asked]

    def record_acceptance(self, seq: Request, drafts: int, accepted: int) -> None:
        self.learnt.append((drafts, accepted))


@pytest.mark.parametrize("answer", ["", '{"keep', '{"keeper": "An', '{"keeper": "Anna"'])
def test_the_keys_and_what_has_one_value_are_guessed_in_the_usual_whitespace(answer: str) -> None:
    forced = guessed(GrammarDrafter(NullDrafter(), compiler), sequence(json_grammar(SCHEMA), answer))
    whole = '{"keeper": "Anna", "friend": "'
    assert answer + forced == whole


def test_as_many_are_guessed_as_are_useful_and_all_are_of_one_kind() -> None:
    drafter = GrammarDrafter(Fixed("zzz"), compiler)
    (guess,) = drafter.propose([(sequence(json_grammar(SCHEMA), ""), 3)], 1)
    assert (len(guess.token_ids), guess.kinds) == (3, [KIND_FORCED] * 3)


def test_a_long_run_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "the cat and a dog went home again, " * 40
    drafter, seq = GrammarDrafter(NullDrafter(), compiler), sequence(json_grammar({"enum": [text]}), "")
    calls = []
    for count in range(20):
        (guess,) = drafter.propose([(seq, 8)], 1)
        assert len(guess.token_ids) == 8
        matcher = drafter._states["a"].matcher
        assert matcher is not None
        calls.append(len(matcher.compute_ff_tokens()) + 8 * count)
        seq.token_ids += guess.token_ids
        assert len(drafter._states["a"].forced_run) == calls[0]
    assert len(set(calls)) == 1, "it is the same run"
    seq.token_ids += encoded("something else")
    assert drafter.propose([(seq, 8)], 1)[0].token_ids == [], "the grammar cannot follow it any more"


@pytest.mark.parametrize(
    "answer", ['{"keeper":"Anna",', '{"keeper":"Anna","fri', '{"keeper": "Anna","friend', '{"keeper":"An']
)
def test_an_answer_without_spaces_is_followed_too(answer: str) -> None:
    drafter, seq = GrammarDrafter(NullDrafter(), compiler), sequence(json_grammar(SCHEMA), answer)
    whole = '{"keeper":"Anna","friend":"'
    guess = guessed(drafter, seq)
    assert guess
    assert (answer + guess).replace(" ", "") == whole
    for token in encoded('{"keeper":"Anna","friend":"Tom"}'[len(answer.replace(" ", "")) :]):  # and token by token
        seq.token_ids.append(token)
        drafter.propose([(seq, 4)], 1)
        matcher = drafter._states["a"].matcher
        assert matcher is not None
        assert not matcher.is_error()
    assert matcher.is_stopped()


def test_an_answer_that_the_grammar_does_not_allow_is_followed_no_more() -> None:
    inner = Fixed("Tom")
    drafter, seq = GrammarDrafter(inner, compiler), sequence(json_grammar(SCHEMA), '{"keeper" : "Anna",')
    assert guessed(drafter, seq) == "Tom"
    seq.token_ids += encoded(' "friend":')
    assert guessed(drafter, seq) == "Tom"
    drafter.record_acceptance(seq, 2, 1)
    assert inner.learnt == [(2, 1)]


def test_text_that_is_longer_than_an_answer_may_be_held_to_is_not_guessed() -> None:
    drafter = GrammarDrafter(NullDrafter(), compiler)
    for size in (MAX_FORCED_BYTES, MAX_FORCED_BYTES + 1):
        guess = guessed(drafter, sequence(Grammar("regex", "x" * size), ""))
        assert bool(guess) is (size == MAX_FORCED_BYTES)
        drafter = GrammarDrafter(NullDrafter(), compiler)


def test_text_that_is_forced_is_guessed_though_its_token_might_go_on() -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "string"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
    drafter = GrammarDrafter(Fixed('{"a": "Anna", "b": 7'), compiler)
    (guess,) = drafter.propose([(sequence(json_grammar(schema), ""), 100)], 1)
    assert tokenizer().decode(guess.token_ids) == '{"a": "Anna", "b": 7'
    assert set(guess.kinds) == {KIND_FORCED, KIND_FORCED_TEXT, 3}
    (alone,) = GrammarDrafter(NullDrafter(), compiler).propose([(sequence(json_grammar(schema), ""), 100)], 1)
    assert tokenizer().decode(alone.token_ids) == '{"a": "'
    assert alone.kinds[-1] == KIND_FORCED_TEXT
    assert list(alone.kinds) == list(guess.kinds[: len(alone.token_ids)])


def test_the_others_guesses_are_kept_as_far_as_the_grammar_allows() -> None:
    seq = sequence(json_grammar(SCHEMA), '{"keeper": "Anna", "friend": "')
    assert guessed(GrammarDrafter(Fixed('Olaf"}'), compiler), seq) == 'Olaf"}'
    assert guessed(GrammarDrafter(Fixed("Peter"), compiler), seq) == ""
    begun = sequence(json_grammar(SCHEMA), "")
    assert guessed(GrammarDrafter(Fixed('{"keeper": "Anna", "friend": "Olaf"}'), compiler), begun).endswith('Olaf"}')
    assert "Olaf" not in guessed(GrammarDrafter(Fixed('{"keeper":"Anna","friend":"Olaf"}'), compiler), begun)


def test_who_guessed_learns_of_its_own_tokens_alone() -> None:
    inner = Fixed('Olaf", zzz')
    drafter, seq = GrammarDrafter(inner, compiler), sequence(json_grammar(SCHEMA), '{"keeper": "Anna", "friend": "')
    own = len(encoded("Olaf"))
    assert guessed(drafter, seq).startswith("Olaf")
    drafter.record_acceptance(seq, own + 2, own + 1)
    assert inner.learnt[0][0] >= own
    assert inner.learnt[0][1] <= inner.learnt[0][0] <= len(inner.tokens)
    begun = sequence(json_grammar(SCHEMA), "")
    drafter.forget_request(seq)
    guessed(drafter, begun)
    drafter.record_acceptance(begun, 5, 5)
    assert len(inner.learnt) == 1, "none of its tokens was tried"


def test_without_a_grammar_or_with_one_that_is_wrong_the_others_guesses_stay() -> None:
    assert guessed(GrammarDrafter(Fixed("Tom"), compiler), sequence(None, "")) == "Tom"
    wrong = Grammar("lark", "start: nowhere")
    with pytest.raises(InvalidRequest):
        compiler().new_matcher(wrong)
    assert guessed(GrammarDrafter(Fixed("Tom"), compiler), sequence(wrong, "")) == "Tom"


def test_the_usual_form_changes_nothing_but_whitespace_between_the_parts() -> None:
    schema = {"enum": ['"item_separator": ", ?"', ", ?"]}
    text = json_grammar(schema).text
    changed = with_usual_whitespace(json_grammar(schema)).text
    assert changed != text
    assert changed.count(", ?") == text.count(", ?") - 1
    assert with_usual_whitespace(Grammar("regex", "a, ?b")) == Grammar("regex", "a, ?b")
