"""Call forms inferred from a template parse the calls that transformers renders with it, and their grammars accept
them.
"""

from __future__ import annotations

import os
import random
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quire.engine.common.request_params import Grammar
from quire.engine.text.conversation.chat_template import ChatRenderer
from quire.engine.text.grammar_compiler import GrammarCompiler, make_grammar_vocabulary
from quire.server.formats.call_forms.argument_forms import JsonArguments
from quire.server.formats.call_forms.call_form import CallForm
from quire.server.formats.grammar_composition import lark_literal_with_special_tokens
from quire.server.formats.template_inference.call_inference import infer_call_form
from quire.server.formats.template_inference.template_prober import TemplateInferenceError
from quire.server.formats.tools.tool_parser import ToolParser
from quire.server.protocol.chat import ChatRequest
from quire.server.resolve.tool_use import resolve_request_tools
from tests.server.formats.proof import SPECIAL, TOOLS, Call, Subject, calls, read, words
from tests.server.formats.templates import OWN
from tests.server.formats.test_tools_grammar import TOOLS as STRICT_TOOLS
from tests.server.formats.test_tools_grammar import check_arguments, walk
from tests.texts import CHATML, SHARED, shared
from tests.tiers import examples

PATHS = {path.stem: path for path in sorted((SHARED / "templates").glob("*.jinja"))}
NONE_SHOWN = {
    "LFM2-8B-A1B": "pythonic",
    "LFM2.5-Instruct": "pythonic",
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B": "deepseek_v3",
    "google-gemma-2-2b-it": "hermes",
    "ibm-granite-granite-3.3-2B-Instruct": "granite",
    "llama-cpp-rwkv-world": "hermes",
    "microsoft-Phi-3.5-mini-instruct": "hermes",
}
"""Templates that render no assistant's calls, and the named format that each of them uses."""
BY_TEXT = {"meta-llama-Llama-3.1-8B-Instruct", "meta-llama-Llama-3.2-3B-Instruct", "harmony"}
"""Templates that render a single call, although their models write several, or write them in more ways."""
SHOWING = sorted((PATHS.keys() - NONE_SHOWN.keys()) | OWN.keys())
PLAIN = st.sampled_from(["", "a", "b c", "é"])
NO_QUOTES = words().map(lambda text: text.replace("'", "").replace("\\", ""))
TEXTS = {
    "LFM2.5-8B-A1B": NO_QUOTES,  # quotes in strings are not escaped
    "Reka-Edge": words().map(lambda text: text.encode("ascii", "ignore").decode()),  # a grammar allows é, not \u00e9
    "MiniMax-M3": PLAIN.filter(bool),  # texts, numbers and empty lists look alike
    "escaped_attributes": words().map(lambda text: text.replace("&amp;", "")),
}
NO_NULL = {"MiniMax-M3"}
"""Templates that omit arguments that are null."""
FREE_LISTS = {"MiniMax-M3", "escaped_attributes"}
"""Templates whose lists and objects are unconstrained in a grammar."""
SETS = int(os.environ.get("TEST_TOOL_SETS", "25"))
"""Sets of calls per template when every split is tried: 200 take about 20 minutes."""
slowly = settings(deadline=None, suppress_health_check=list(HealthCheck), max_examples=examples(12))


@cache
def subject(name: str) -> Subject:
    if name in OWN:
        return Subject(OWN[name])
    shared("templates")
    head = "<|CHATBOT_TOKEN|>" if name.startswith("CohereForAI") else ""
    return Subject(PATHS[name].read_text(encoding="utf-8"), by_quire=name == "Kimi-K2-Instruct", head=head)


def made(name: str, form: CallForm) -> Any:
    strategy = calls(TEXTS.get(name), most=3 if form.allows_many else 1, null=name not in NO_NULL)
    return strategy.filter(lambda made: all(map(has_no_empty_values, made))) if name in NO_NULL else strategy


def has_no_empty_values(call: Any) -> bool:
    """True if nothing inside an argument is empty."""

    def full(value: Any, depth: int = 0) -> bool:
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
        return inner is None or ((len(inner) > 0 or not depth) and all(full(one, depth + 1) for one in inner))

    return all(full(value) for value in call.arguments.values())


def form_of(name: str) -> CallForm:
    form = subject(name).formats.tool_format
    assert isinstance(form, CallForm) or name in BY_TEXT, subject(name).formats.tools_source
    return form if isinstance(form, CallForm) else infer_call_form(subject(name).formats.renderer)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", SHOWING)
@slowly
@given(data=st.data())
def test_inferred_form_parses_transformers_rendered_calls_at_any_split(name: str, data: st.DataObject) -> None:
    assert_parses_rendered_calls(name, data, cuts=5)


@pytest.mark.slow
@pytest.mark.parametrize("name", SHOWING)
@settings(slowly, max_examples=SETS)
@given(data=st.data())
def test_inferred_form_parses_more_rendered_calls_at_every_split(name: str, data: st.DataObject) -> None:
    assert_parses_rendered_calls(name, data, cuts=None)


def assert_parses_rendered_calls(name: str, data: st.DataObject, cuts: int | None) -> None:
    one = subject(name)
    expected = data.draw(made(name, form_of(name)))
    text = one.turn(expected)
    format = one.message_format()
    whole = read(format, [text])
    assert (whole.content.strip(), whole.calls) == ("", expected), text
    places = range(len(text) + 1) if cuts is None else data.draw(st.lists(st.integers(0, len(text)), max_size=cuts))
    for place in places:
        assert read(format, [text[:place], text[place:]]) == whole, (text, place)
    assert read(format, list(text)) == whole, text


@pytest.mark.few(4)
@pytest.mark.parametrize("name", SHOWING)
@slowly
@given(data=st.data())
def test_grammar_accepts_rendered_calls_and_only_parsable_mutations(name: str, data: st.DataObject) -> None:
    one, form = subject(name), form_of(name)
    expected = data.draw(made(name, form))
    text = one.turn(expected)
    format = one.message_format()
    reasoning = one.formats.reasoning_format
    marks = () if reasoning is None else (reasoning.begin, reasoning.end)
    if (
        reasoning is not None
        and (format.starts_in_thinking or text.lstrip().startswith(marks))
        and reasoning.end in text
    ):
        text = text.partition(reasoning.end)[2].lstrip()
    text = text.rstrip().removesuffix("</s>").rstrip()
    assert fits(name, text, must=True), text
    assert fits(name, text, must=False), text
    rng = data.draw(st.randoms(use_true_random=False))
    for mutant in (mutated(text, rng), text.replace(expected[0].name, "stranger"), text[: rng.randrange(len(text))]):
        if name not in FREE_LISTS and fits(name, mutant, must=True):
            message = read(replace(format, starts_in_thinking=False), [mutant])
            assert message.calls, mutant
            assert {call.name for call in message.calls} <= TOOLS.keys(), mutant
            assert not message.content.strip(), mutant


def mutated(text: str, rng: random.Random) -> str:
    place = rng.randrange(len(text))
    return rng.choice([text[:place] + text[place + 1 :], text[:place] + rng.choice('x"}]<,') + text[place:]])


@cache
def compiler(name: str) -> GrammarCompiler:
    tokenizer = subject(name).tokenizer
    return GrammarCompiler(make_grammar_vocabulary(tokenizer, tokenizer.vocab_size, tokenizer.eos_token_ids))


@cache
def grammar(name: str, must: bool) -> Grammar:
    one = subject(name)
    token = partial(lark_literal_with_special_tokens, tokenizer=one.tokenizer)
    compiled = Grammar("lark", form_of(name).build_calls_grammar(list(TOOLS.values()), True, token, must=must))
    compiler(name).check_grammar(compiled)
    return compiled


def fits(name: str, text: str, *, must: bool) -> bool:
    matcher = compiler(name).new_matcher(grammar(name, must))
    ids = subject(name).tokenizer.encode(text, add_special_tokens=False)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.mark.few(8)
@pytest.mark.parametrize("name", SHOWING)
def test_grammar_samples_parse_as_complete_calls_that_fit_schemas(name: str) -> None:
    one, form = subject(name), form_of(name)
    json_arguments = isinstance(form.arguments, JsonArguments) and not form.arguments.is_json_string
    tools = STRICT_TOOLS if json_arguments else STRICT_TOOLS[1:2] if name in FREE_LISTS else STRICT_TOOLS[:2]
    strict = [{**tool, "function": {**tool["function"], "strict": True}} for tool in tools]
    body = {"messages": [{"role": "user"}], "tools": strict}
    use = resolve_request_tools(ChatRequest.model_validate({**body, "tool_choice": "required"}), form)
    required = use.build_tool_grammar(one.tokenizer)
    auto = resolve_request_tools(ChatRequest.model_validate(body), form).build_tool_grammar(one.tokenizer)
    assert required is not None
    assert auto is not None
    for seed in range(4):
        text = walk(compiler(name), one.tokenizer, required, seed)
        matcher = compiler(name).new_matcher(auto)
        ids = one.tokenizer.encode(text, add_special_tokens=False)
        assert matcher.try_consume_tokens(ids) == len(ids), text
        assert matcher.is_accepting(), text
        parser = ToolParser(form, use.tools_by_name)
        _, deltas = parser.extract_tool_calls(text, final=True)
        names = [delta.name for delta in deltas if delta.name]
        assert parser.all_complete, text
        for index, called in enumerate(names):
            arguments = "".join(delta.arguments for delta in deltas if delta.index == index)
            check_arguments(called, arguments, not json_arguments)
        assert set(names) <= use.tools_by_name.keys()
        assert names


@pytest.mark.parametrize("name", sorted(NONE_SHOWN))
def test_template_without_rendered_calls_falls_back_to_named_format(name: str) -> None:
    shared("templates")
    text = PATHS[name].read_text(encoding="utf-8")
    with pytest.raises(TemplateInferenceError):
        infer_call_form(ChatRenderer({"default": text}, SPECIAL))
    assert subject(name).formats.tools_source.startswith(NONE_SHOWN[name])


def test_parser_separates_reasoning_content_and_calls() -> None:
    for name in ("thinking", "openai_list", "fenced"):
        one = subject(name)
        expected = _some_calls()
        text = one.turn(expected, content="Let me see.", thought="hm" if name == "thinking" else None)
        for pieces in ([text], list(text)):
            message = read(one.message_format(), pieces)
            assert (message.content.strip(), message.calls) == ("Let me see.", expected), text
            assert message.reasoning == ("hm" if name == "thinking" else "")


def _some_calls() -> list[Call]:
    return [Call("clock", {}), Call("get_weather", {"city": "Rome"})]


def test_infer_call_form_raises_when_template_shows_no_calls() -> None:
    with pytest.raises(TemplateInferenceError, match="does not render calls"):
        infer_call_form(ChatRenderer({"default": CHATML}, SPECIAL))


def test_infer_call_form_raises_when_template_hides_arguments() -> None:
    hiding = OWN["sorted"].replace("f.arguments | tojson(sort_keys=true)", "f.arguments | length")
    with pytest.raises(TemplateInferenceError, match="arguments"):
        infer_call_form(ChatRenderer({"default": hiding}, SPECIAL))
