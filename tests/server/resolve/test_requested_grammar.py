"""Structured outputs over HTTP: every field that requests them, and 400 before the engine sees an invalid one."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from quire.engine.common.errors import InvalidRequest
from quire.engine.common.request_params import Grammar, SamplingParams
from quire.engine.text.grammar_compiler import GrammarCompiler, json_grammar, make_grammar_vocabulary
from quire.engine.text.structured_outputs import constraint_grammar
from quire.engine.text.tokenizer import Tokenizer
from quire.server.access.rate_limits import RateLimits
from quire.server.access.tenants import Tenant
from quire.server.config import ServerConfig
from quire.server.formats.content_delimiters import ContentDelimiters
from quire.server.formats.grammar_composition import add_content_delimiters, add_thinking_grammar
from quire.server.formats.reasoning_parser import ReasoningFormat
from quire.server.served_model import ServedModelSpec
from quire.server.workers.grammar_checker import GrammarChecker
from quire.server.workers.pool import WorkerPool
from tests.server.api import Api, open_api
from tests.server.cli.processes import has_ended
from tests.server.fake import FakeEngine, scripted
from tests.server.forked import FORKED
from tests.texts import byte_level_tokenizer

ANYBODY = Tenant("", b"", RateLimits(None, None))
CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 9}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
OLDER_TAG = {
    "type": "structural_tag",
    "structures": [{"begin": "<f=x>", "schema": SCHEMA, "end": "</f>"}],
    "triggers": ["<f="],
}
TAG = {
    "type": "structural_tag",
    "format": {
        "type": "triggered_tags",
        "triggers": ["<f="],
        "tags": [{"begin": "<f=x>", "content": {"type": "json_schema", "json_schema": SCHEMA}, "end": "</f>"}],
    },
}
GOOD: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": {"type": "json_object"}}, '{"b": [1, null]}', "[1]"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}, '{"a": 1}', "{}"),
    ({"response_format": {"type": "json_object", "schema": SCHEMA}}, '{"a": 1}', "{}"),
    ({"response_format": {"type": "json_object", "value": SCHEMA}}, '{"a": 1}', "{}"),
    ({"structured_outputs": {"json": SCHEMA}}, '{"a":1}', '{"a":"1"}'),
    ({"structured_outputs": {"json": json.dumps(SCHEMA), "regex": None}}, '{"a": 1}', '{"a":  1}'),
    ({"structured_outputs": {"json_object": True}}, "{}", "1"),
    ({"structured_outputs": {"regex": r"\d+/é"}}, "12/é", "/é"),
    ({"structured_outputs": {"choice": ["yes", 'n"o']}}, 'n"o', "maybe"),
    ({"structured_outputs": {"grammar": 'start: "a" b\nb: "c"+'}}, "acc", "a"),
    ({"response_format": TAG}, 'so <f=x>{"a": 1}</f>', '<f=x>{"a": "1"}</f>'),
    ({"response_format": OLDER_TAG}, 'so <f=x>{"a": 1}</f>', "<f=y>"),
    ({"structured_outputs": {"structural_tag": json.dumps(TAG)}}, 'so <f=x>{"a": 1}</f>', '<f=x>{"a": "1"}</f>'),
    ({"structured_outputs": {"structural_tag": OLDER_TAG}}, 'so <f=x>{"a": 1}</f>', "<f=y>"),
    ({"guided_json": SCHEMA}, '{"a": 1}', "{}"),
    ({"guided_regex": "a|b"}, "a", "c"),
    ({"guided_choice": ["x", "y"]}, "y", "z"),
    ({"guided_grammar": 'start: "q"'}, "q", "p"),
]
BAD: list[tuple[dict[str, Any], str]] = [
    ({"response_format": {"type": "xml"}}, "response_format"),
    ({"response_format": {}}, "response_format"),
    ({"response_format": "json_object"}, "response_format"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "no"}}}}, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": False}}}, "response_format"),
    ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs"),
    ({"structured_outputs": {"regex": 3}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "\ud800"}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "whitespace_pattern": " "}}, "structured_outputs"),
    ({"structured_outputs": {"json_object": 1}}, "structured_outputs"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs"),
    ({"structured_outputs": {"choice": [1]}}, "structured_outputs"),
    ({"structured_outputs": {"choice": ["\ud800"]}}, "structured_outputs"),
    ({"structured_outputs": {"choice": ["x"] * 10_001}}, "structured_outputs"),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs"),
    ({"structured_outputs": {"json": {"not": {}}}}, "structured_outputs"),
    ({"structured_outputs": {"json": {"$ref": "#"}}}, "structured_outputs"),
    ({"structured_outputs": {"json": {"const": "x" * 300_000}}}, "structured_outputs"),
    ({"structured_outputs": {"grammar": "start: <|nothing|>"}}, "structured_outputs"),
    ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs"),
    ({"structured_outputs": {"structural_tag": 5}}, "structured_outputs"),
    ({"response_format": {"type": "structural_tag"}}, "response_format"),
    ({"response_format": {"type": "structural_tag", "format": {"type": "token"}}}, "response_format"),
    ({"response_format": TAG, "guided_regex": "a"}, "guided_regex"),
    ({"guided_json": 3}, "guided_json"),
    ({"guided_choice": "a"}, "guided_choice"),
    ({"guided_grammar": "start: start"}, "guided_grammar"),
]
CHAIN = {"$ref": "#/$defs/a0", "$defs": {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(4000)} | {"a4000": {}}}
"""Overflows the stack of the compiler."""
ENDLESS = {"type": "integer", "multipleOf": 99999999}


@pytest.fixture(scope="module")
async def api() -> AsyncIterator[Api]:
    async with open_api(FakeEngine(scripted(b"ok", 258), eos=[258])) as opened:
        yield opened


def matches(grammar: Grammar, text: str, tokenizer: Tokenizer | None = None) -> bool:
    """True if the grammar accepts the whole text."""
    tokenizer = tokenizer or byte_level_tokenizer().tokenizer
    matcher = GrammarCompiler(make_grammar_vocabulary(tokenizer, 320, (258,))).new_matcher(grammar)
    ids = tokenizer.encode(text, add_special_tokens=False)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.mark.parametrize(("asked", "fits", "fits_not"), GOOD, ids=lambda value: str(value)[:40])
async def test_structured_output_fields_become_engine_grammar(
    api: Api, asked: dict[str, Any], fits: str, fits_not: str
) -> None:
    answer = await api.http.post("/v1/chat/completions", json=CHAT | asked)
    assert answer.status_code == 200, answer.text
    assert "X-Ignored-Params" not in answer.headers
    grammar = api.engine.seen[-1].params.grammar
    assert grammar is not None
    assert matches(grammar, fits)
    assert not matches(grammar, fits_not)
    await api.post("/v1/completions", {"prompt": ["Hi", "Ho"], "n": 2, **asked})
    assert [request.params.grammar for request in api.engine.seen[-4:]] == [grammar] * 4


@pytest.mark.parametrize("asked", [{"response_format": {"type": "text"}}, {"response_format": None}, {}])
async def test_free_text_has_no_grammar(api: Api, asked: dict[str, Any]) -> None:
    await api.post("/v1/chat/completions", CHAT | asked)
    assert api.engine.seen[-1].params.grammar is None


@pytest.mark.parametrize(("asked", "param"), BAD, ids=lambda value: str(value)[:60])
async def test_invalid_grammar_returns_400_before_reaching_engine(api: Api, asked: dict[str, Any], param: str) -> None:
    before = len(api.engine.seen)
    for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", {"prompt": "Hi"})):
        content = json.dumps(body | asked | {"stream": path.endswith("chat/completions")})
        response = await api.http.post(path, content=content, headers={"content-type": "application/json"})
        assert response.status_code == 400, response.text
        assert response.json()["error"]["param"] == param
    assert len(api.engine.seen) == before


@pytest.mark.slow
@pytest.mark.parametrize("schema", [CHAIN, ENDLESS], ids=["crashes", "never ends"])
async def test_grammar_that_crashes_or_hangs_compiler_returns_400(api: Api, schema: dict[str, Any]) -> None:
    error = await api.post("/v1/chat/completions", CHAT | {"guided_json": schema}, status=400)
    assert error["error"]["param"] == "guided_json"
    await api.post("/v1/chat/completions", CHAT | {"guided_json": SCHEMA | {"title": str(len(schema))}})


async def test_grammar_workers_start_lazily_and_recover_after_cancelled_check() -> None:
    source = ServedModelSpec(ServerConfig(), byte_level_tokenizer().tokenizer, vocab_size=320, sampling_defaults={})
    workers = WorkerPool(source, launch_process=FORKED)
    checker = GrammarChecker(workers)
    assert workers.worker_pids == []
    task = asyncio.create_task(checker.check_grammars([("a", Grammar("json", json.dumps(ENDLESS)))], ANYBODY))
    async with asyncio.timeout(60):
        while not workers.worker_pids:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    (pid,) = workers.worker_pids
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    async with asyncio.timeout(20):
        while not has_ended(pid):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    good = json_grammar(SCHEMA)
    await checker.check_grammars([("a", good)], ANYBODY)
    with pytest.raises(InvalidRequest) as raised:
        await checker.check_grammars([("a", good), ("b", Grammar("regex", "("))], ANYBODY)
    assert raised.value.param == "b"
    await workers.close()


@pytest.mark.parametrize("marks", [("<think>", "</think>"), ("<|bos|>", "<|im_start|>")], ids=["text", "special"])
@pytest.mark.parametrize(
    "grammar", [json_grammar(SCHEMA), Grammar("regex", '\\{"a": 1\\}'), Grammar("lark", 'start: "{" x\nx: /"a": 1}/')]
)
def test_thinking_grammar_applies_after_reasoning(marks: tuple[str, str], grammar: Grammar) -> None:
    tokenizer = byte_level_tokenizer().tokenizer
    begin, end = marks
    format = ReasoningFormat("think", begin, end)
    answer = '{"a": 1}'
    assert add_thinking_grammar(grammar, format, False, tokenizer) == grammar
    inside = add_thinking_grammar(grammar, format, True, tokenizer)
    assert matches(inside, f"hm {{ < }} é\n{end}\n\n{answer}")
    assert matches(inside, f"{end}{answer}")
    assert not matches(inside, answer)
    assert not matches(inside, f"hm{end}hm{answer}")
    either = add_thinking_grammar(grammar, format, None, tokenizer)
    assert matches(either, answer)
    assert matches(either, f"{begin}hm{end}\n{answer}")
    assert not matches(either, f"hm{answer}")
    assert not matches(either, f"{begin}hm{answer}")


@pytest.mark.parametrize("marks", [("<think>", "</think>"), ("<|bos|>", "<|im_start|>")], ids=["text", "special"])
def test_structural_tag_applies_after_reasoning_and_between_delimiters(marks: tuple[str, str]) -> None:
    tokenizer = byte_level_tokenizer().tokenizer
    begin, end = marks
    tag = constraint_grammar("structural_tag", TAG, close=True, tokenizer=tokenizer).grammar
    framed = add_content_delimiters(tag, ContentDelimiters("<c>", (), (), ("</c>",), "</c>"), tokenizer)
    for grammar, before, after in ((tag, "", ""), (framed, "<c>", "</c>")):
        whole = add_thinking_grammar(grammar, ReasoningFormat("think", begin, end), True, tokenizer)
        assert matches(whole, f'hm <f=x> {end}\n\n{before}so <f=x>{{"a": 1}}</f>.{after}')
        assert not matches(whole, f"hm{end}\n\n{before}<f=x>5</f>{after}")


async def test_structural_tag_and_tools_are_refused_together(api: Api) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    error = (await api.post("/v1/chat/completions", CHAT | {"response_format": TAG, "tools": tools}, 400))["error"]
    assert error["param"] == "response_format"
    assert "cannot be combined with tools" in error["message"]
    await api.post("/v1/chat/completions", CHAT | {"response_format": TAG, "tools": tools, "tool_choice": "none"})


async def test_chat_grammar_applies_after_reasoning() -> None:
    template = "{{ messages[-1]['content'] }}{% if enable_thinking %}<think>\n{% endif %}{# </think> #}"
    async with open_api(FakeEngine(scripted(b"ok", 258), eos=[258]), chat_template=template) as api:
        body = CHAT | {"guided_json": SCHEMA}
        await api.post("/v1/chat/completions", body | {"chat_template_kwargs": {"enable_thinking": True}})
        grammar = api.engine.seen[-1].params.grammar
        assert grammar is not None
        assert matches(grammar, 'well</think>\n\n{"a": 1}')
        assert not matches(grammar, '{"a": 1}')


def test_sampling_params_with_grammar_survive_msgpack() -> None:
    params = SamplingParams(grammar=json_grammar(SCHEMA))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params


@pytest.mark.slow
def test_importing_app_does_not_import_llguidance() -> None:
    script = "import sys, quire.server.app; print('llguidance' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "False", done.stderr
