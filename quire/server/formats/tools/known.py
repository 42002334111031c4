"""Forms of calls that are known by name: chosen by flag, and where a template does not show its own."""

from __future__ import annotations

from quire.server.formats.forms.arguments import JsonArguments
from quire.server.formats.forms.form import CallForm
from quire.server.formats.forms.literal_rules import Words
from quire.server.formats.forms.slots import ID, NAME
from quire.server.formats.forms.tagged import TaggedArguments
from quire.server.formats.tools.json_calls import USUAL

OBJECT = f'{{"name": "{NAME}", "arguments": '
"""A call as a JSON object, up to its arguments."""

HERMES = CallForm(
    begin="",
    head=f"<tool_call>\n{OBJECT}",
    arguments=JsonArguments(),
    tail="}\n</tool_call>",
    between="\n",
    end="",
    keys=USUAL,
)
"""Hermes 2 and 3, Qwen 2.5 and 3, Granite 4, MiMo; and what is described to models whose template knows no tools."""

MISTRAL = CallForm(
    begin="[TOOL_CALLS][",
    head=OBJECT,
    arguments=JsonArguments(),
    tail="}",
    between=", ",
    end="]",
    keys=USUAL,
    short_ids=True,
    other_heads=(f"{NAME}[CALL_ID]{ID}[ARGS]", f"{NAME}[ARGS]", NAME),
)
"""Mistral 7B v0.3, Nemo, Large 2. The newer form is read too."""
MISTRAL_NAMED = CallForm(
    begin="",
    head=f"[TOOL_CALLS]{NAME}[ARGS]",
    arguments=JsonArguments(),
    tail="",
    between="",
    end="",
    short_ids=True,
    other_heads=(f"[TOOL_CALLS]{NAME}[CALL_ID]{ID}[ARGS]", f"[TOOL_CALLS]{NAME}"),
)
"""Mistral Small 3.2, Devstral, Ministral 3."""

CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, CALL_END, SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
FENCED = f"{CALL_BEGIN}function{SEPARATOR}{NAME}\n```json\n"
PLAIN = f"{CALL_BEGIN}{NAME}{SEPARATOR}"
DEEPSEEK = CallForm(
    begin=CALLS_BEGIN,
    head=FENCED,
    arguments=JsonArguments(),
    tail=f"\n```{CALL_END}",
    between="\n",
    end=CALLS_END,
    other_heads=(PLAIN,),
)
"""DeepSeek V3 and R1: the arguments are a code block."""
DEEPSEEK_31 = CallForm(
    begin=CALLS_BEGIN,
    head=PLAIN,
    arguments=JsonArguments(),
    tail=CALL_END,
    between="",
    end=CALLS_END,
    other_heads=(FENCED,),
)

GRANITE = CallForm(
    begin="<|tool_call|>[",
    head=OBJECT,
    arguments=JsonArguments(),
    tail="}",
    between=", ",
    end="]",
    keys=USUAL,
)
"""Granite 3, whose template shows the tools and no calls."""

ANSWER = "<|start|>assistant"
COMMENTARY = f"{ANSWER}<|channel|>commentary to=functions.{NAME}"
HARMONY = CallForm(
    begin="",
    head=f"{ANSWER} to=functions.{NAME}<|channel|>commentary json<|message|>",
    arguments=JsonArguments(),
    tail="",
    between="",
    end="",
    many=False,
    given=ANSWER,
    turn_end="<|call|>",
    content_begin="<|channel|>final<|message|>",
    other_heads=(
        f"{COMMENTARY}<|constrain|>json<|message|>",
        f"{COMMENTARY}json<|message|>",
        f"{COMMENTARY}<|message|>",
        f"{ANSWER} to=functions.{NAME}<|channel|>commentary<|constrain|>json<|message|>",
    ),
)
"""gpt-oss, https://github.com/openai/harmony: its template shows one of the ways in which it writes calls."""


def xml(outer: str) -> CallForm:
    """<function=name><parameter=key>value</parameter></function> within `outer`, which models forget."""
    return CallForm(
        begin="",
        head=f"<{outer}>\n<function={NAME}>\n",
        arguments=TaggedArguments(
            before_key="<parameter=", infixes={"string": ">\n"}, end="\n</parameter>\n", separator="", words=Words()
        ),
        tail=f"</function>\n</{outer}>",
        between="\n",
        end="",
        inner_heads=(f"<function={NAME}>",),
    )


QWEN_XML, SEED_OSS = xml("tool_call"), xml("seed:tool_call")
"""Qwen3-Coder, Qwen 3.5, Step 3.5, Nemotron 3; Seed OSS."""
