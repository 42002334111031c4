"""Structural tags accept what XGrammar's documentation says, and a random model writes valid ones."""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any

import jsonschema
import pytest

from quire.engine.common.config import EngineConfig
from quire.engine.common.errors import InvalidRequest
from quire.engine.common.request_params import Grammar
from quire.engine.engine_core import EngineCore
from quire.engine.text.grammar_compiler import GrammarCompiler, make_grammar_vocabulary
from quire.engine.text.structured_outputs import constraint_grammar
from tests.engine.harness import request, run
from tests.texts import byte_level_tokenizer
from tests.tiers import slow
from tests.tiny_models import save_tiny_model

TOKENIZER = byte_level_tokenizer().tokenizer
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 6}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
}
JSON = {"type": "json_schema", "json_schema": CITY}
CALL = '{"city": "a<b", "days": 3}'


def tag(name: str, content: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"begin": f"<f={name}>", "content": content, "end": "</f>", **fields}


def digits() -> dict[str, Any]:
    return {"type": "regex", "pattern": "[0-9]+"}


def triggered(**fields: Any) -> dict[str, Any]:
    tags = [tag("x", JSON), tag("y", digits())]
    return {"type": "triggered_tags", "triggers": ["<f="], "tags": tags, **fields}


def separated(**fields: Any) -> dict[str, Any]:
    return {"type": "tags_with_separator", "separator": ", ", "tags": [tag("x", digits()), tag("y", JSON)], **fields}


def make_grammar(value: Any) -> Grammar:
    return constraint_grammar("structural_tag", value, close=True, tokenizer=TOKENIZER).grammar


@cache
def compiler() -> GrammarCompiler:
    return GrammarCompiler(make_grammar_vocabulary(TOKENIZER, 259, (258,)))


def accepts(value: Any, text: str) -> bool:
    matcher = compiler().new_matcher(make_grammar(value))
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


OLDER = {
    "type": "structural_tag",
    "structures": [
        {"begin": "<f=x>", "schema": CITY, "end": "</f>"},
        {"begin": "<f=y>", "schema": json.dumps({"type": "integer"}), "end": "</f>"},
        {"begin": "[z]", "schema": {}, "end": "[/z]"},
    ],
    "triggers": ["<f=", "["],
}
FORMATS: list[tuple[dict[str, Any], list[str], list[str]]] = [
    ({"type": "const_string", "value": 'a"b'}, ['a"b'], ["", "a"]),
    (JSON, [CALL], [f" {CALL}", '{"city": "a"}', '{"city": "a", "days": 3, "more": 1}']),
    ({"type": "json_schema", "json_schema": True}, ["[1, null]", CALL], ["[1"]),
    (digits(), ["0", "12"], ["", "a"]),
    ({"type": "regex", "pattern": "a/(b|c)"}, ["a/b"], ["a/"]),
    ({"type": "grammar", "grammar": 'root ::= "x" | "y" root'}, ["x", "yyx"], ["y"]),
    ({"type": "grammar", "grammar": 'start: "x" /[0-9]/', "syntax": "lark"}, ["x1"], ["x"]),
    ({"type": "any_text"}, ["", "an\ny é"], []),
    ({"type": "any_text", "excludes": ["bad", "no"]}, ["good", "ba", "nb"], ["so bad", "no", "ono."]),
    ({"type": "or", "elements": [digits(), {"type": "const_string", "value": "x"}]}, ["1", "x"], ["1x", ""]),
    ({"type": "sequence", "elements": [digits(), {"type": "any_text"}]}, ["1", "12 a"], ["a"]),
    ({"type": "optional", "content": digits()}, ["", "1"], ["x"]),
    ({"type": "plus", "content": {"type": "const_string", "value": "ab"}}, ["ab", "abab"], ["", "a"]),
    ({"type": "star", "content": {"type": "const_string", "value": "ab"}}, ["", "abab"], ["aba"]),
    ({"type": "repeat", "min": 1, "max": 2, "content": JSON}, [CALL, CALL * 2], ["", CALL * 3]),
    ({"type": "repeat", "min": 2, "max": -1, "content": JSON}, [CALL * 2, CALL * 4], [CALL]),
    ({"type": "tag", **tag("x", JSON)}, [f"<f=x>{CALL}</f>"], [CALL, f"<f=x>{CALL}", f"<f=x>{CALL}</f>."]),
    ({"type": "tag", **tag("x", {"type": "any_text"})}, ["<f=x></f>", "<f=x>a</b></f>"], ["<f=x>a", "<f=x></f></f>"]),
    (
        {"type": "tag", **tag("x", {"type": "any_text", "excludes": ["q"]}, end=["</f>", "|"])},
        ["<f=x>a</f>", "<f=x>a|"],
        ["<f=x>a|</f>", "<f=x>q|"],
    ),
    ({"type": "tag", **tag("x", digits(), end="")}, ["<f=x>12"], ["<f=x>"]),
    ({"type": "tag", **tag("x", {"type": "optional", "content": digits()})}, ["<f=x></f>", "<f=x>1</f>"], ["<f=x>1"]),
    (
        {"type": "tag", "begin": "<o>", "content": triggered(), "end": "</o>"},
        ["<o></o>", f"<o>a<f=x>{CALL}</f>b<f=y>1</f></o>"],
        ["<o>a<f=y>x</f></o>", "<o></o>.", "<o>"],
    ),
    (
        triggered(),
        ["", "a < b <f b", f"a<f=x>{CALL}</f>b<f=y>1</f>", "<f=y>1</f><f=y>2</f>"],
        ["<f=", "<f=z>1</f>", "<f=y>x</f>", f"<f=x>{CALL}", f"<f=y>1</f><f=x>{CALL[:-1]}</f>"],
    ),
    (triggered(at_least_one=True), ["<f=y>1</f>", "<f=y>1</f>a<f=y>2</f>b"], ["", "a<f=y>1</f>"]),
    (triggered(stop_after_first=True), ["", "a", "a<f=y>1</f>"], ["a<f=y>1</f>b", "<f=y>1</f><f=y>1</f>"]),
    (triggered(at_least_one=True, stop_after_first=True), ["<f=y>1</f>"], ["", "a", "<f=y>1</f>a"]),
    (triggered(excludes=["bad"]), ["a<f=y>1</f>b"], ["bad<f=y>1</f>", "<f=y>1</f>bad"]),
    (separated(), ["", "<f=x>1</f>", f"<f=x>1</f>, <f=y>{CALL}</f>"], ["a", "<f=x>1</f>, ", "<f=x>1</f><f=x>1</f>"]),
    (separated(at_least_one=True, separator=""), ["<f=x>1</f><f=x>2</f>"], [""]),
    (separated(stop_after_first=True), ["", "<f=x>1</f>"], ["<f=x>1</f>, <f=x>1</f>"]),
    (
        triggered(triggers=["<|bos|>go"], tags=[{"begin": "<|bos|>go!", "content": JSON, "end": "<|im_start|>"}]),
        ["a", f"a<|bos|>go!{CALL}<|im_start|>b"],
        ["<|bos|>", "<|bos|>go?", f"<|bos|>go!{CALL}b"],
    ),
    (
        {"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": "\n<|bos|>."},
        ["\n<|bos|>.", "a\nb\n<|bos|>."],
        ["a<|bos|>.", "a\n<|bos|>"],
    ),
]


@pytest.mark.parametrize(("format", "fits", "fits_not"), FORMATS, ids=lambda each: str(each)[:60])
def test_format_accepts_documented_texts(format: dict[str, Any], fits: list[str], fits_not: list[str]) -> None:
    value = {"type": "structural_tag", "format": format}
    assert [text for text in fits if not accepts(value, text)] == []
    assert [text for text in fits_not if accepts(value, text)] == []


def test_older_form_is_free_text_with_triggered_schemas() -> None:
    for text in ("", "a<f=y>4</f>", f"<f=x>{CALL}</f>b[z][1][/z]", "<f <f=y>-1</f>"):
        assert accepts(OLDER, text), text
        assert accepts(json.dumps(OLDER), text), text
    for text in ("<f=y>x</f>", "[a]", f"<f=x>{CALL}", "<f=y>1</f><f="):
        assert not accepts(OLDER, text), text


@pytest.mark.parametrize(
    ("value", "error"),
    [
        ("{", "structural_tag is not JSON"),
        ([], "must be an object"),
        ({}, "needs format, or structures and triggers"),
        ({"structures": [{"begin": "a"}], "triggers": ["a"]}, r"structures\[0\] must be an object with begin, schema"),
        ({"structures": [], "triggers": ["a"]}, "structures.tags must be a non-empty list"),
        ({"format": {"type": "token", "token": 5}}, r"format.type 'token' is not supported; supported: const_string"),
        ({"format": {"type": "qwen_xml_parameter", "json_schema": {}}}, "'qwen_xml_parameter' is not supported"),
        ({"format": {**JSON, "style": "qwen_xml"}}, "format.style 'qwen_xml' is not supported, only json"),
        ({"format": {**JSON, "any_order": True}}, "format.any_order is not supported in a format of type json_schema"),
        ({"format": {"type": "any_text", "max_tokens": 5}}, "format.max_tokens is not supported"),
        ({"format": {"type": "json_schema"}}, "format: a JSON schema must be an object"),
        ({"format": {"type": "const_string", "value": ""}}, "format.value must be a non-empty string"),
        ({"format": {"type": "repeat", "content": JSON, "min": 3, "max": 2}}, "format needs an integer min"),
        ({"format": triggered(triggers=["<g"])}, r"format.tags\[0\].begin must begin with exactly one of the triggers"),
        ({"format": triggered(triggers=["<f", ""])}, "format.triggers must not be empty or contain an empty string"),
        ({"format": triggered(triggers=["<f", "<f="])}, "one of the triggers, but begins with 2"),
        ({"format": triggered(at_least_one=1)}, "format.at_least_one must be true or false"),
        (
            {"format": triggered(triggers=["<|b"], tags=[{"begin": "<|bos|>", "content": JSON, "end": ""}])},
            r"the trigger '<\|b' ends inside the token '<\|bos\|>'",
        ),
        (
            {"format": {"type": "sequence", "elements": [{"type": "any_text"}, JSON]}},
            r"format.elements\[0\]: free text must be last, or in a tag with an end",
        ),
        ({"format": {"type": "tag", **tag("x", {"type": "any_text"}, end="")}}, "format.content: free text must be"),
        (
            {"format": {"type": "tag", "begin": {"type": "token", "token": 1}, "end": ""}},
            "format.begin must be a string",
        ),
        ({"format": {"type": "tag", **tag("x", {"type": "any_text"}, end=5)}}, "format.end must be a list of strings"),
        ({"format": {"type": "const_string", "value": "a<|im_end|>"}}, r"'<\|im_end\|>' ends an answer"),
        ({"format": {"type": "grammar", "grammar": "root ::= ("}}, "format: neither a Lark nor a GBNF grammar"),
    ],
)
def test_unsupported_format_is_refused_with_its_path(value: Any, error: str) -> None:
    with pytest.raises(InvalidRequest, match=error):
        make_grammar(value)


@pytest.mark.parametrize("depth", [40, 5000])
def test_deep_nesting_is_refused(depth: int) -> None:
    format: dict[str, Any] = digits()
    for _ in range(depth):
        format = {"type": "star", "content": format}
    with pytest.raises(InvalidRequest, match="nested more than 32 deep"):
        make_grammar({"format": format})


@pytest.mark.parametrize("make", [triggered, separated])
def test_grammar_of_nested_tags_grows_linearly(make: Any) -> None:
    lengths = []
    for depth in (10, 20, 30):
        format = digits()
        for level in range(depth):
            inner = [{"begin": f"<f={level}>", "content": format, "end": f"</{level}>"}]
            format = make(tags=inner, at_least_one=True)
        lengths.append(len(make_grammar({"format": format}).text))
    assert lengths[2] - lengths[1] < 1.5 * (lengths[1] - lengths[0])


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> EngineCore:
    path = save_tiny_model(
        tmp_path_factory.mktemp("model"), "qwen3", num_hidden_layers=1, max_position_embeddings=1024, eos_token_id=[258]
    )
    TOKENIZER.backend.save(str(path / "tokenizer.json"))
    return EngineCore(EngineConfig(model=str(path), num_kv_blocks=2000, threads=1))


@pytest.mark.parametrize("seeds", [2, *slow(8)])
def test_random_model_writes_valid_tags(seeds: int, engine: EngineCore) -> None:
    """The triggers are letters, which a random model writes."""
    names = "abcdefghijklmnopqrstuvwxyz"
    structures = [{"begin": f"{name}<f>", "schema": CITY, "end": "</f>"} for name in names]
    tags = [{"begin": each["begin"], "content": JSON, "end": each["end"]} for each in structures]
    values: dict[str, Any] = {
        "older": {"structures": structures, "triggers": list(names)},
        "newer": {"format": {"type": "triggered_tags", "triggers": list(names), "tags": tags, "at_least_one": True}},
        "several": {"format": {"type": "repeat", "min": 2, "max": 4, "content": {"type": "or", "elements": [
            {"type": "tag", **each} for each in tags
        ]}}},
    }  # fmt: skip
    requests = [
        request(f"{name} {seed}", [65, 66], seed=seed, temperature=1.0, max_tokens=600, grammar=make_grammar(value))
        for name, value in values.items()
        for seed in range(seeds)
    ]
    num_tags = 0
    for name, answer in run(engine, requests).items():
        text = TOKENIZER.decode(answer.ids)
        pieces = re.split(r"([a-z]<f>.*?</f>)", text, flags=re.DOTALL)
        free, tagged = pieces[::2], pieces[1::2]
        if answer.finish_reason == "length":
            free[-1] = free[-1].rpartition("<f>")[0][:-1] if "<f>" in free[-1] else re.sub("[a-z]<?f?$", "", free[-1])
        assert not re.search("[a-z]", "".join(free)), (name, text)
        if name.startswith("several"):
            assert len(tagged) >= 2
            assert "".join(free) == ""
        for each in tagged:
            jsonschema.validate(json.loads(each[4:-4]), CITY)
        num_tags += len(tagged)
    assert num_tags > 3 * seeds
