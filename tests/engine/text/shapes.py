"""Shapes of conversations that agents send, and chat templates in the style of the main model families."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]
HARD = '"é\n日 \\'
"""Characters that JSON escapes, placed inside texts."""
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Looks.",
            "parameters": {"type": "object", "properties": {"p": {"type": "string"}}, "required": ["p"]},
        },
    }
]
FIRST, SECOND, THIRD = "abcdefgh1", "abcdefgh2", "abcdefgh3"
OPENAI, ANTHROPIC = "call_YbT3kq0aZ9xxkJwq1sbbQ0ab", "toolu_01A09q90qw90lq917835lq9"


@dataclass(frozen=True)
class Talk:
    messages: list[Message]
    texts: tuple[str, ...]
    """Texts that the prompt must show."""
    tools: list[Any] | None = None


def user(text: Any, **more: Any) -> Message:
    return {"role": "user", "content": text, **more}


def system(text: str) -> Message:
    return {"role": "system", "content": text}


def developer(text: str) -> Message:
    return {"role": "developer", "content": [{"type": "text", "text": text}]}


def said(text: Any, **more: Any) -> Message:
    return {"role": "assistant", "content": text, **more}


def call(id: str | None, value: str, arguments: str | None = None) -> dict[str, Any]:
    written = json.dumps({"p": value}) if arguments is None else arguments
    made = {"type": "function", "function": {"name": "look", "arguments": written}}
    return made if id is None else {"id": id, **made}


def called(*calls: dict[str, Any], text: Any = None, **more: Any) -> Message:
    return said(text, tool_calls=list(calls), **more)


def result(id: str, text: Any) -> Message:
    return {"role": "tool", "tool_call_id": id, "content": text}


def refused(arguments: str) -> list[Message]:
    """A turn with a tool call of these arguments, and its result."""
    return [user("hi"), called(call(FIRST, "", arguments)), result(FIRST, "RESA"), user("go")]


def hard(text: str) -> str:
    return text + HARD + text


LEGACY_CALL = {"role": "assistant", "content": None, "function_call": {"name": "look", "arguments": '{"p": "VVA"}'}}
LEGACY_RESULT = {"role": "function", "name": "look", "content": "RESA"}
ONE = [called(call(FIRST, "VVA")), result(FIRST, "RESA")]
BOTH = called(call(FIRST, "VVA"), call(SECOND, "VVB"))

SHAPES: dict[str, Talk] = {
    "user": Talk([user("AAA")], ("AAA",)),
    "system": Talk([system("SYSA"), user("AAA"), said("BBB"), user("CCC")], ("SYSA", "AAA", "BBB", "CCC")),
    "developer_first": Talk([developer("DEVA"), user("hi")], ("DEVA",)),
    "developer_with_tools": Talk([developer("DEVA"), user("hi")], ("DEVA",), TOOLS),
    "developer_later": Talk([user("hi"), said("ok"), developer("DEVA"), user("go")], ("DEVA", "go")),
    "developer_behind_system": Talk([system("SYSA"), developer("DEVA"), user("hi")], ("SYSA", "DEVA")),
    "system_behind_developer": Talk([developer("DEVA"), system("SYSA"), user("hi")], ("DEVA", "SYSA")),
    "two_systems": Talk([system("SYSA"), system("SYSB"), user("hi")], ("SYSA", "SYSB")),
    "late_system": Talk(
        [system("SYSA"), user("hi"), said("ok"), system("SYSB"), user("go")], ("SYSA", "ok", "SYSB", "go")
    ),
    "last_system": Talk([system("SYSA"), user("hi"), system("SYSB")], ("SYSA", "SYSB")),
    "system_behind_result": Talk([user("hi"), *ONE, system("SYSB"), user("go")], ("VVA", "RESA", "SYSB"), TOOLS),
    "two_users": Talk([user("AAA"), user("BBB")], ("AAA", "BBB")),
    "two_assistants": Talk([user("AAA"), said("BBB"), said("CCC"), user("DDD")], ("AAA", "BBB", "CCC", "DDD")),
    "assistant_first": Talk([said("AAA"), user("BBB")], ("AAA", "BBB")),
    "only_system": Talk([system("SYSA")], ("SYSA",)),
    "only_assistant": Talk([said("AAA")], ("AAA",)),
    "no_calls": Talk([user("hi"), said("AAA", tool_calls=[]), user("go")], ("AAA", "go")),
    "function_role": Talk([user("hi"), LEGACY_CALL, LEGACY_RESULT, user("go")], ("VVA", "RESA", "go"), TOOLS),
    "one_call": Talk([user("hi"), *ONE], ("VVA", "RESA"), TOOLS),
    "system_and_call": Talk([system("SYSA"), user("hi"), *ONE], ("SYSA", "VVA", "RESA"), TOOLS),
    "user_behind_result": Talk([user("hi"), *ONE, user("NEXT")], ("VVA", "RESA", "NEXT"), TOOLS),
    "answer_behind_result": Talk([user("hi"), *ONE, said("ANS"), user("NEXT")], ("RESA", "ANS", "NEXT"), TOOLS),
    "text_beside_call": Talk(
        [user("hi"), called(call(FIRST, "VVA"), text="SAID"), result(FIRST, "RESA"), said("ANS"), user("go")],
        ("SAID", "VVA", "RESA", "ANS"),
        TOOLS,
    ),
    "two_calls": Talk(
        [user("hi"), BOTH, result(FIRST, "RESA"), result(SECOND, "RESB"), user("go")],
        ("VVA", "VVB", "RESA", "RESB", "go"),
        TOOLS,
    ),
    "results_in_other_order": Talk(
        [user("hi"), BOTH, result(SECOND, "RESB"), result(FIRST, "RESA")], ("VVA", "VVB", "RESA", "RESB"), TOOLS
    ),
    "foreign_ids": Talk(
        [
            user("hi"),
            called(call(OPENAI, "VVA"), call(ANTHROPIC, "VVB")),
            result(OPENAI, "RESA"),
            result(ANTHROPIC, "RESB"),
        ],
        ("VVA", "VVB", "RESA", "RESB"),
        TOOLS,
    ),
    "no_ids": Talk(
        [user("hi"), called(call(None, "VVA")), {"role": "tool", "content": "RESA"}], ("VVA", "RESA"), TOOLS
    ),
    "calls_without_results": Talk([user("hi"), BOTH, user("go")], ("VVA", "VVB", "go"), TOOLS),
    "one_result_missing": Talk([user("hi"), BOTH, result(FIRST, "RESA"), user("go")], ("VVA", "VVB", "RESA"), TOOLS),
    "call_at_the_end": Talk([user("hi"), called(call(FIRST, "VVA"))], ("VVA",), TOOLS),
    "result_without_call": Talk([user("hi"), said("ok"), result(FIRST, "RESA"), user("go")], ("RESA", "go"), TOOLS),
    "result_first": Talk([result(FIRST, "RESA"), user("go")], ("RESA", "go"), TOOLS),
    "tools_gone": Talk([user("hi"), *ONE, said("ANS"), user("go")], ("VVA", "RESA", "ANS", "go")),
    "refusal": Talk([user("hi"), said([{"type": "refusal", "refusal": "REFU"}]), user("go")], ("REFU", "go")),
    "arguments_cut_off": Talk(refused('{"p": "VVA'), ("VVA", "RESA", "go"), TOOLS),
    "arguments_list": Talk(refused('["VVA"]'), ("VVA", "RESA"), TOOLS),
    "arguments_string": Talk(refused('"VVA"'), ("VVA", "RESA"), TOOLS),
    "arguments_number": Talk(refused("77123"), ("77123", "RESA"), TOOLS),
    "arguments_null": Talk(refused("null"), ("RESA", "go"), TOOLS),
    "arguments_empty": Talk(refused(""), ("RESA", "go"), TOOLS),
    "all_at_once": Talk(
        [
            developer("DEVA"),
            user("hi"),
            called(call(OPENAI, "VVA"), call(ANTHROPIC, "", '{"p": "VVB'), text="SAID"),
            result(ANTHROPIC, "RESB"),
            result(OPENAI, "RESA"),
            user("NEXT"),
            developer("DEVB"),
            said("ANS"),
            user("go"),
        ],
        ("DEVA", "SAID", "VVA", "VVB", "RESA", "RESB", "NEXT", "DEVB", "ANS", "go"),
        TOOLS,
    ),
    "rounds": Talk(
        [
            system("SYSA"),
            user("hi"),
            *ONE,
            called(call(SECOND, "VVB"), text="SAID"),
            result(SECOND, "RESB"),
            said("ANS"),
            user("go"),
            called(call(THIRD, "VVC")),
            result(THIRD, "RESC"),
        ],
        ("SYSA", "VVA", "RESA", "SAID", "VVB", "RESB", "ANS", "go", "VVC", "RESC"),
        TOOLS,
    ),
    "content_null": Talk([user("hi"), said(None), user("go")], ("hi", "go")),
    "content_parts": Talk(
        [user([{"type": "text", "text": "AAA"}, {"type": "text", "text": "BBB"}]), said("ok"), user("go")],
        ("AAA", "BBB", "go"),
    ),
    "name": Talk([user("AAA", name="bob")], ("AAA",)),
    "reasoning": Talk(
        [user("hi"), called(call(FIRST, "VVA"), text="SAID", reasoning_content="RRR"), ONE[1], said("ANS"), user("go")],
        ("SAID", "VVA", "RESA", "ANS"),
        TOOLS,
    ),
    "hard_texts": Talk(
        [
            system(hard("SYSA")),
            user(hard("AAA")),
            called(call(OPENAI, hard("VVA")), text=hard("SAID")),
            result(OPENAI, hard("RESA")),
            said(hard("ANS")),
            user(hard("NEXT")),
        ],
        ("SYSA", "AAA", "SAID", "VVA", "RESA", "ANS", "NEXT"),
        TOOLS,
    ),
    "empty_result": Talk([user("hi"), ONE[0], result(FIRST, ""), user("go")], ("VVA", "go"), TOOLS),
}

_EACH_CALL = "{% for c in m.tool_calls or [] %}<call>{{ c.function | tojson }}</call>{% endfor %}"
_END = "{% if add_generation_prompt %}<assistant>{% endif %}"
_TOOLS = "{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}"
_LOOP = "{% for m in messages %}"
_ALTERNATES = (
    "{% set ns = namespace(n=0) %}{% for m in loop_messages %}"
    "{% if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}"
    "{% if (m.role == 'user') != (ns.n % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% set ns.n = ns.n + 1 %}{% endif %}{% endfor %}"
)
_HEAD = (
    "{% if messages[0].role == 'system' %}{% set head = messages[0].content %}{% set loop_messages = messages[1:] %}"
    "{% else %}{% set head = '' %}{% set loop_messages = messages %}{% endif %}"
)

TEMPLATES: dict[str, str] = {
    "any_role": _TOOLS + _LOOP + "<{{ m.role }}>{{ m.content }}" + _EACH_CALL + "</s>{% endfor %}" + _END,
    "drops_unknown_roles": (  # Qwen 3's
        _TOOLS + _LOOP + "{% if m.role == 'user' or m.role == 'system' %}<{{ m.role }}>{{ m.content }}</s>"
        "{% elif m.role == 'assistant' %}<assistant>{{ m.content | trim }}" + _EACH_CALL + "</s>"
        "{% elif m.role == 'tool' %}<user><result>{{ m.content }}</result></s>{% endif %}{% endfor %}" + _END
    ),
    "system_first_and_a_query": (  # Qwen 3.5's
        "{% if not (messages | selectattr('role', 'equalto', 'user') | list) %}{{ raise_exception('no query') }}"
        "{% endif %}" + _TOOLS + _LOOP + "{% if m.role == 'system' %}{% if not loop.first %}"
        "{{ raise_exception('System message must be at the beginning.') }}{% endif %}<system>{{ m.content }}</s>"
        "{% elif m.role == 'user' %}<user>{{ m.content | trim }}</s>"
        "{% elif m.role == 'assistant' %}<assistant>{{ m.content | trim }}{% for c in m.tool_calls or [] %}"
        "<function={{ c.function.name }}>{% for k, v in c.function.arguments | items %}<{{ k }}>"
        "{{ v if v is string else v | tojson }}</{{ k }}>{% endfor %}</function>{% endfor %}</s>"
        "{% elif m.role == 'tool' %}<result>{{ m.content }}</s>"
        "{% else %}{{ raise_exception('Unexpected message role.') }}{% endif %}{% endfor %}" + _END
    ),
    "one_call": (  # Llama 3's
        _TOOLS + _LOOP + "{% if m.role == 'tool' or m.role == 'ipython' %}<ipython>{{ m.content | tojson }}</s>"
        "{% elif 'tool_calls' in m %}{% if m.tool_calls | length != 1 %}"
        "{{ raise_exception('This model only supports single tool-calls at once!') }}{% endif %}"
        "{% set f = m.tool_calls[0].function %}<assistant>"
        '{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}</s>'
        "{% else %}<{{ m.role }}>{{ m.content | trim }}</s>{% endif %}{% endfor %}" + _END
    ),
    "alternating": (  # Mistral's
        _HEAD + _ALTERNATES + "{% if head %}[SYSTEM]{{ head }}[/SYSTEM]{% endif %}" + _TOOLS
        + "{% for m in loop_messages %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]"
        "{% elif m.role == 'assistant' and m.tool_calls %}[CALLS]{% for c in m.tool_calls %}"
        "{% if not c.id or c.id | length != 9 %}{{ raise_exception('Tool call IDs should have length 9!') }}{% endif %}"
        "{{ c | tojson }}{% endfor %}</s>"
        "{% elif m.role == 'assistant' %}{% if not m.content %}{{ raise_exception('empty') }}{% endif %}"
        "{{ m.content }}</s>"
        "{% elif m.role == 'tool' %}[RESULTS]{{ m.tool_call_id }}{{ m.content }}[/RESULTS]"
        "{% else %}{{ raise_exception('Only user, assistant and tool roles are supported') }}{% endif %}{% endfor %}"
    ),
    "no_system": (  # Gemma 2's
        "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
        + _LOOP + "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}"
        "{% endif %}<{{ 'model' if m.role == 'assistant' else m.role }}>{{ m.content | trim }}</s>{% endfor %}" + _END
    ),
    "harmony": (  # gpt-oss'
        "<|start|>system<|message|>You are a model.<|end|>"
        "{% if messages[0].role in ('developer', 'system') %}{% set head = messages[0].content %}"
        "{% set loop_messages = messages[1:] %}{% else %}{% set head = '' %}{% set loop_messages = messages %}"
        "{% endif %}{% if head or tools %}<|start|>developer<|message|>{{ head }}{% for t in tools or [] %}"
        "{{ '// ' + t.function.description + '\\ntype ' + t.function.name }}{% endfor %}<|end|>{% endif %}"
        "{% set last = namespace(name=none) %}{% for m in loop_messages %}{% if m.role == 'assistant' %}"
        "{% if 'tool_calls' in m %}{% set later = namespace(found=false) %}{% for f in loop_messages[loop.index:] %}"
        "{% if f.role == 'assistant' and 'tool_calls' not in f %}{% set later.found = true %}{% endif %}{% endfor %}"
        "{% set f = m.tool_calls[0].function %}{% if m.content and m.thinking %}{{ raise_exception('both') }}"
        "{% elif m.content and not later.found %}<|start|>assistant<|channel|>analysis<|message|>{{ m.content }}<|end|>"
        "{% elif m.thinking and not later.found %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}"
        "<|end|>{% endif %}<|start|>assistant to=functions.{{ f.name }}<|channel|>commentary json<|message|>"
        "{{ f.arguments | tojson }}<|call|>{% set last.name = f.name %}"
        "{% else %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>{% set last.name = none %}"
        "{% endif %}{% elif m.role == 'tool' %}{% if last.name is none %}{{ raise_exception('no call') }}{% endif %}"
        "<|start|>functions.{{ last.name }} to=assistant<|channel|>commentary<|message|>{{ m.content | tojson }}<|end|>"
        "{% elif m.role == 'user' %}<|start|>user<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
    ),
    "last_system_counts": (  # DeepSeek's
        "{% set ns = namespace(system='') %}" + _LOOP + "{% if m.role == 'system' %}{% set ns.system = m.content %}"
        "{% endif %}{% endfor %}{{ ns.system }}" + _LOOP + "{% if m.role == 'user' %}<user>{{ m.content }}"
        "{% elif m.role == 'assistant' %}{% if m.tool_calls %}{% for c in m.tool_calls %}<call>{{ c.function.name }}\n"
        "```json\n{{ c.function.arguments + '' }}\n```</call>{% endfor %}{% else %}"
        "<assistant>{{ m.content.split('</think>') | last }}</s>{% endif %}"
        "{% elif m.role == 'tool' %}<result>{{ m.content }}</result>{% endif %}{% endfor %}" + _END
    ),
    "system_at_the_last_user": (  # Mistral Nemo's
        _HEAD + _ALTERNATES + "{% for m in loop_messages %}{% if m.role == 'user' %}[INST]"
        "{% if loop.last and head %}{{ head + '\\n\\n' }}{% endif %}{{ m.content }}[/INST]"
        "{% elif m.tool_calls is defined and m.tool_calls is not none %}[CALLS]{{ m.tool_calls | tojson }}</s>"
        "{% elif m.role == 'assistant' %}{{ m.content }}</s>{% elif m.role == 'tool' %}[RESULTS]{{ m.content }}"
        "{% else %}{{ raise_exception('role') }}{% endif %}{% endfor %}"
    ),
    "tools_are_a_list": (  # works only for conversations with tools
        "{% for t in tools %}{{ t.function.name }}({{ t.function.parameters.properties.p.description }}){% endfor %}"
        + _LOOP + "<{{ m.role }}>{{ m.content }}" + _EACH_CALL + "</s>{% endfor %}" + _END
    ),
    "parts": (  # of vision models
        _LOOP + "<{{ m.role }}>{% for p in m.content %}{{ p.text }}{% endfor %}</s>{% endfor %}" + _END
    ),
}  # fmt: skip
"""Chat templates by their distinguishing property."""
