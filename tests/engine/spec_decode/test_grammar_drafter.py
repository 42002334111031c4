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
    ids = encode(answer)
    return Request(
        EngineCoreRequest(id="a", prompt_ids=[5, 6], emitted_ids=ids, params=params, seed=0), 0, 100, drafting=True
    )


def encode(text: str) -> list[int]:
    return tokenizer().backend.encode(text, add_special_tokens=False).ids


def draft_text(drafter: Drafter, seq: Request, most: int = 100) -> str:
    return tokenizer().decode(drafter.propose([(seq, most)], 1)[0].token_ids)


class FixedTextDrafter(Drafter):
    def __init__(self, text: str) -> None:
        self.tokens = encode(text)
        self.learnt: list[tuple[int, int]] = []

    def propose(self, asked: RequestsToDraft, tokens: int) -> list[Draft]:
        return [Draft(self.tokens[:most], [3] * most) for _, most in asked]

    def record_acceptance(self, seq: Request, drafts: int, accepted: int) -> None:
        self.learnt.append((drafts, accepted))


@pytest.mark.parametrize("answer", ["", '{"keep', '{"keeper": "An', '{"keeper": "Anna"'])
def test_forced_keys_and_values_are_drafted_with_usual_whitespace(answer: str) -> None:
    forced = draft_text(GrammarDrafter(NullDrafter(), compiler), sequence(json_grammar(SCHEMA), answer))
    whole = '{"keeper": "Anna", "friend": "'
    assert answer + forced == whole


def test_forced_draft_is_cut_to_useful_length() -> None:
    drafter = GrammarDrafter(FixedTextDrafter("zzz"), compiler)
    (guess,) = drafter.propose([(sequence(json_grammar(SCHEMA), ""), 3)], 1)
    assert (len(guess.token_ids), guess.kinds) == (3, [KIND_FORCED] * 3)


def test_long_forced_run_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
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
    seq.token_ids += encode("something else")
    assert drafter.propose([(seq, 8)], 1)[0].token_ids == [], "the grammar cannot follow it any more"


@pytest.mark.parametrize(
    "answer", ['{"keeper":"Anna",', '{"keeper":"Anna","fri', '{"keeper": "Anna","friend', '{"keeper":"An']
)
def test_grammar_drafter_follows_compact_json(answer: str) -> None:
    drafter, seq = GrammarDrafter(NullDrafter(), compiler), sequence(json_grammar(SCHEMA), answer)
    whole = '{"keeper":"Anna","friend":"'
    guess = draft_text(drafter, seq)
    assert guess
    assert (answer + guess).replace(" ", "") == whole
    for token in encode('{"keeper":"Anna","friend":"Tom"}'[len(answer.replace(" ", "")) :]):  # and token by token
        seq.token_ids.append(token)
        drafter.propose([(seq, 4)], 1)
        matcher = drafter._states["a"].matcher
        assert matcher is not None
        assert not matcher.is_error()
    assert matcher.is_stopped()


def test_inner_drafter_takes_over_after_grammar_violation() -> None:
    inner = FixedTextDrafter("Tom")
    drafter, seq = GrammarDrafter(inner, compiler), sequence(json_grammar(SCHEMA), '{"keeper" : "Anna",')
    assert draft_text(drafter, seq) == "Tom"
    seq.token_ids += encode(' "friend":')
    assert draft_text(drafter, seq) == "Tom"
    drafter.record_acceptance(seq, 2, 1)
    assert inner.learnt == [(2, 1)]


def test_forced_text_over_limit_is_not_drafted() -> None:
    drafter = GrammarDrafter(NullDrafter(), compiler)
    for size in (MAX_FORCED_BYTES, MAX_FORCED_BYTES + 1):
        guess = draft_text(drafter, sequence(Grammar("regex", "x" * size), ""))
        assert bool(guess) is (size == MAX_FORCED_BYTES)
        drafter = GrammarDrafter(NullDrafter(), compiler)


def test_forced_text_is_drafted_when_token_could_be_longer() -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "string"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
    drafter = GrammarDrafter(FixedTextDrafter('{"a": "Anna", "b": 7'), compiler)
    (guess,) = drafter.propose([(sequence(json_grammar(schema), ""), 100)], 1)
    assert tokenizer().decode(guess.token_ids) == '{"a": "Anna", "b": 7'
    assert set(guess.kinds) == {KIND_FORCED, KIND_FORCED_TEXT, 3}
    (alone,) = GrammarDrafter(NullDrafter(), compiler).propose([(sequence(json_grammar(schema), ""), 100)], 1)
    assert tokenizer().decode(alone.token_ids) == '{"a": "'
    assert alone.kinds[-1] == KIND_FORCED_TEXT
    assert list(alone.kinds) == list(guess.kinds[: len(alone.token_ids)])


def test_inner_draft_is_cut_where_grammar_rejects() -> None:
    seq = sequence(json_grammar(SCHEMA), '{"keeper": "Anna", "friend": "')
    assert draft_text(GrammarDrafter(FixedTextDrafter('Olaf"}'), compiler), seq) == 'Olaf"}'
    assert draft_text(GrammarDrafter(FixedTextDrafter("Peter"), compiler), seq) == ""
    begun = sequence(json_grammar(SCHEMA), "")
    assert draft_text(
        GrammarDrafter(FixedTextDrafter('{"keeper": "Anna", "friend": "Olaf"}'), compiler), begun
    ).endswith('Olaf"}')
    assert "Olaf" not in draft_text(
        GrammarDrafter(FixedTextDrafter('{"keeper":"Anna","friend":"Olaf"}'), compiler), begun
    )


def test_inner_drafter_records_acceptance_of_own_tokens_only() -> None:
    inner = FixedTextDrafter('Olaf", zzz')
    drafter, seq = GrammarDrafter(inner, compiler), sequence(json_grammar(SCHEMA), '{"keeper": "Anna", "friend": "')
    own = len(encode("Olaf"))
    assert draft_text(drafter, seq).startswith("Olaf")
    drafter.record_acceptance(seq, own + 2, own + 1)
    assert inner.learnt[0][0] >= own
    assert inner.learnt[0][1] <= inner.learnt[0][0] <= len(inner.tokens)
    begun = sequence(json_grammar(SCHEMA), "")
    drafter.forget_request(seq)
    draft_text(drafter, begun)
    drafter.record_acceptance(begun, 5, 5)
    assert len(inner.learnt) == 1, "none of its tokens was tried"


def test_inner_draft_is_kept_without_valid_grammar() -> None:
    assert draft_text(GrammarDrafter(FixedTextDrafter("Tom"), compiler), sequence(None, "")) == "Tom"
    wrong = Grammar("lark", "start: nowhere")
    with pytest.raises(InvalidRequest):
        compiler().new_matcher(wrong)
    assert draft_text(GrammarDrafter(FixedTextDrafter("Tom"), compiler), sequence(wrong, "")) == "Tom"


def test_with_usual_whitespace_changes_separators_only() -> None:
    schema = {"enum": ['"item_separator": ", ?"', ", ?"]}
    text = json_grammar(schema).text
    changed = with_usual_whitespace(json_grammar(schema)).text
    assert changed != text
    assert changed.count(", ?") == text.count(", ?") - 1
    assert with_usual_whitespace(Grammar("regex", "a, ?b")) == Grammar("regex", "a, ?b")
