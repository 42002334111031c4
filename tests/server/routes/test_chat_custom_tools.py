"""Custom tools in /v1/chat/completions: calls whose input is text, against the OpenAI SDK's types."""

from __future__ import annotations

from typing import Any

import pytest
from openai.types.chat import ChatCompletion

from quire.engine.text.grammar_compiler import GrammarCompiler, make_grammar_vocabulary
from tests.server.api import VOCAB_SIZE
from tests.server.resolve.test_tool_requests import HELLO, PATH, TOOLS, TWO, prompt, speaker
from tests.texts import byte_level_tokenizer

INPUT = '*** a\n"éé😀\\'
PATCHED = (
    '<tool_call>\n{"name": "patch", "arguments": {"input": "*** a\\n\\"é\\u00e9\\ud83d\\ude00\\\\"}}\n</tool_call>'
)
OTHER_FORM = '<tool_call>\n{"name": "patch", "arguments": {"text": "x"}}\n</tool_call>'
PATCH: dict[str, Any] = {"type": "custom", "custom": {"name": "patch", "description": "Applies a patch."}}
BOTH = [*TOOLS, PATCH]
TEMPLATE = """\
{%- if tools %}{{ tools | tojson }}{% endif %}
{%- for m in messages %}[{{ m.role }}:{{ m.content or '' }}
{%- for call in m.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}]{% endfor %}"""


def constrained_tool(definition: str, syntax: str = "regex") -> dict[str, Any]:
    form = {"type": "grammar", "grammar": {"syntax": syntax, "definition": definition}}
    return {"type": "custom", "custom": {**PATCH["custom"], "format": form}}


def assemble_calls(events: list[Any]) -> list[Any]:
    """Return the calls of a stream's first choice."""
    calls: list[Any] = []
    for event in events:
        for delta in event["choices"][0]["delta"].get("tool_calls", []):
            if "id" in delta:
                assert delta["index"] == len(calls)
                calls.append({name: value for name, value in delta.items() if name != "index"})
                continue
            (kind,) = delta.keys() - {"index"}
            (field,) = delta[kind]
            calls[delta["index"]][kind][field] += delta[kind][field]
    return calls


def without_ids(calls: list[Any]) -> list[Any]:
    return [{name: value for name, value in call.items() if name != "id"} for call in calls]


@pytest.mark.parametrize(
    ("text", "inputs"),
    [
        (PATCHED, [INPUT]),
        (f"Let me see.\n{TWO}\n{PATCHED}", [INPUT]),
        (f"{PATCHED}\n{TWO}\n{PATCHED}", [INPUT, INPUT]),
        (f"{OTHER_FORM}\n{PATCHED}", ['{"text": "x"}', INPUT]),
        (OTHER_FORM, ['{"text": "x"}']),
        (PATCHED.replace("*** a", ""), [INPUT.replace("*** a", "")]),
        (PATCHED[: PATCHED.index("\\ud83d")], ['*** a\n"éé']),
    ],
)
async def test_custom_tool_calls_are_equal_whole_and_streamed(text: str, inputs: list[str]) -> None:
    async with speaker(text) as api:
        body = {"messages": HELLO, "tools": BOTH}
        whole = await api.post(PATH, body)
        events = await api.events(PATH, body)
    ChatCompletion.model_validate(whole)
    (choice,) = whole["choices"]
    assert choice["finish_reason"] == ("tool_calls" if text.endswith("</tool_call>") else "stop")
    calls = choice["message"]["tool_calls"]
    custom = [call for call in calls if call["type"] == "custom"]
    assert [call["custom"] for call in custom] == [{"name": "patch", "input": each} for each in inputs]
    assert all(call.keys() == {"id", "type", "custom"} for call in custom)
    assert len(calls) - len(custom) == 2 * text.count(TWO)
    assert without_ids(assemble_calls(events)) == without_ids(calls)
    assert events[-1]["choices"][0]["finish_reason"] == choice["finish_reason"]


async def test_custom_tool_input_streams_incrementally_for_each_choice() -> None:
    async with speaker(PATCHED) as api:
        events = await api.events(PATH, {"messages": HELLO, "tools": [PATCH], "n": 2})
    for index in range(2):
        choices = [choice for event in events for choice in event["choices"] if choice["index"] == index]
        deltas = [delta for choice in choices for delta in choice["delta"].get("tool_calls", [])]
        first, *rest = deltas
        opening = {"index": 0, "id": first["id"], "type": "custom", "custom": {"name": "patch", "input": ""}}
        assert first == opening
        assert len(rest) > 5
        assert all(delta.keys() == {"index", "custom"} and delta["custom"].keys() == {"input"} for delta in rest)
        assert "".join(delta["custom"]["input"] for delta in rest) == INPUT


async def test_openai_sdk_reads_custom_tool_call() -> None:
    named: Any = {"type": "custom", "custom": {"name": "patch"}}
    async with speaker(PATCHED) as api:
        answer = await api.openai.chat.completions.create(model="second", messages=HELLO, tools=BOTH, tool_choice=named)
    (call,) = answer.choices[0].message.tool_calls or []
    assert call.type == "custom"
    assert (call.custom.name, call.custom.input) == ("patch", INPUT)


async def test_tool_choice_selects_custom_tools() -> None:
    async with speaker(PATCHED) as api:
        for choice, names in (
            ("required", {"weather", "clock", "patch"}),
            ({"type": "custom", "custom": {"name": "patch"}}, {"patch"}),
            (
                {
                    "type": "allowed_tools",
                    "allowed_tools": {
                        "mode": "required",
                        "tools": [
                            {"type": "custom", "custom": {"name": "patch"}},
                            {"type": "function", "function": {"name": "clock"}},
                        ],
                    },
                },
                {"patch", "clock"},
            ),
        ):
            await api.post(PATH, {"messages": HELLO, "tools": BOTH, "tool_choice": choice})
            grammar = api.engine.seen[-1].params.grammar
            assert grammar is not None
            assert {name for name in ("weather", "clock", "patch") if name in grammar.text} == names
        answer = await api.post(PATH, {"messages": HELLO, "tools": BOTH, "tool_choice": "none"})
        assert "tool_calls" not in answer["choices"][0]["message"]


@pytest.mark.parametrize("choice", ["auto", "required"])
async def test_custom_tool_input_follows_format_grammar(choice: str) -> None:
    tokenizer = byte_level_tokenizer().tokenizer
    compiler = GrammarCompiler(make_grammar_vocabulary(tokenizer, VOCAB_SIZE, [258]))
    call = '<tool_call>\n{{"name": "patch", "arguments": {{"input": "{}"}}}}\n</tool_call>'
    async with speaker(call.format("42")) as api:
        for tool in (constrained_tool("[0-9]+"), constrained_tool("start: /[0-9]+/", "lark")):
            body = {"messages": HELLO, "tools": [tool, *TOOLS], "tool_choice": choice}
            answer = await api.post(PATH, body)
            assert answer["choices"][0]["message"]["tool_calls"][0]["custom"] == {"name": "patch", "input": "42"}
            grammar = api.engine.seen[-1].params.grammar
            assert grammar is not None
            for text, fits in (("42", True), ("4x", False)):
                matcher = compiler.new_matcher(grammar)
                taken = all(matcher.consume_token(token) for token in call.format(text).encode())
                assert (taken and matcher.is_accepting()) is fits
            assert "[0-9]+" in prompt(api), "the model reads the grammar"


async def test_earlier_custom_calls_and_results_reach_template() -> None:
    async with speaker(PATCHED, chat_template=TEMPLATE) as api:
        first = await api.post(PATH, {"messages": HELLO, "tools": BOTH})
        assistant = first["choices"][0]["message"]
        result = {"role": "tool", "tool_call_id": assistant["tool_calls"][0]["id"], "content": "done"}
        await api.post(PATH, {"messages": [*HELLO, assistant, result], "tools": BOTH})
        rendered_call = PATCHED.replace("\\u00e9\\ud83d\\ude00", "é😀")
        assert f"[assistant:{rendered_call}][tool:done]" in prompt(api)
        counted = await api.post("/tokenize", {"messages": [*HELLO, assistant, result], "tools": BOTH})
        assert counted["tokens"] == api.engine.seen[-1].prompt_ids
        await api.post(PATH, {"messages": [*HELLO, assistant, result]})
        assert f"[assistant:{rendered_call}]" in prompt(api), "also when the tool is gone"


async def test_chat_and_responses_render_custom_tool_equally() -> None:
    flat = {"type": "custom", **PATCH["custom"], "format": {"type": "grammar", "syntax": "regex", "definition": "a+"}}
    async with speaker("x") as api:
        await api.post(PATH, {"messages": HELLO, "tools": [constrained_tool("a+")]})
        await api.post("/v1/responses", {"input": "Hello", "tools": [flat]})
        chat, response = api.engine.seen
        assert chat.prompt_ids == response.prompt_ids
        assert chat.params.grammar == response.params.grammar


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"tools": [{"type": "custom"}]}, "tools[0].custom: Field required"),
        ({"tools": [{"type": "custom", "custom": {}}]}, "tools[0].custom.name: Field required"),
        ({"tools": [{"type": "custom", "custom": {"name": "a b"}}]}, "tools[0].custom.name"),
        (
            {"tools": [{"type": "custom", "custom": {"name": "a", "format": {"type": "bnf"}}}]},
            "tools[0].custom.format: Input tag 'bnf'",
        ),
        (
            {"tools": [{"type": "custom", "custom": {"name": "a", "format": {"type": "grammar", "syntax": "lark"}}}]},
            "tools[0].custom.format.grammar: Field required",
        ),
        (
            {"tools": [constrained_tool("a+", "ebnf")]},
            "tools[0].custom.format.grammar.syntax: Input should be 'lark' or 'regex'",
        ),
        (
            {"tools": [*TOOLS, constrained_tool('start: "(" start? ")"', "lark")]},
            "tools[2].custom.format: the grammar of patch",
        ),
        ({"tools": [PATCH, PATCH]}, "tools[1]"),
        ({"tools": [PATCH], "tool_choice": {"type": "custom", "custom": {"name": "x"}}}, "there is no tool named x"),
        ({"tools": [PATCH], "tool_choice": {"type": "custom"}}, "tool_choice.custom: Field required"),
        (
            {"tools": [PATCH], "tool_choice": {"type": "custom", "custom": {}}},
            "tool_choice.custom.name: Field required",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"type": "custom", "custom": {"name": "a"}}]}]},
            "messages[0].tool_calls[0].custom.input: Field required",
        ),
    ],
)
async def test_invalid_custom_tool_is_rejected_with_field_path(body: dict[str, Any], message: str) -> None:
    async with speaker("x") as api:
        answer = await api.post(PATH, {"messages": HELLO, **body}, 400)
    assert message in answer["error"]["message"]
    assert answer["error"]["param"] == message.partition("[")[0].partition(".")[0] or "there is no" in message
