from __future__ import annotations

from quire.server.formats.call_forms.argument_forms import JsonArguments
from quire.server.formats.call_forms.call_form import CallForm
from quire.server.formats.call_forms.lark_rules import LiteralSpelling
from quire.server.formats.call_forms.slots import ID_SLOT, NAME_SLOT
from quire.server.formats.call_forms.tagged_arguments import TaggedArguments
from quire.server.formats.tools.json_calls import DEFAULT_KEYS

OBJECT_HEAD = f'{{"name": "{NAME_SLOT}", "arguments": '

HERMES = CallForm(
    begin="",
    head=f"<tool_call>\n{OBJECT_HEAD}",
    arguments=JsonArguments(),
    tail="}\n</tool_call>",
    between="\n",
    end="",
    json_keys=DEFAULT_KEYS,
)
"""Used by Hermes 2 and 3, Qwen 2.5 and 3, Granite 4 and MiMo. Prompts also describe it to models whose template has no
tools.
"""

MISTRAL = CallForm(
    begin="[TOOL_CALLS][",
    head=OBJECT_HEAD,
    arguments=JsonArguments(),
    tail="}",
    between=", ",
    end="]",
    json_keys=DEFAULT_KEYS,
    short_ids=True,
    other_heads=(f"{NAME_SLOT}[CALL_ID]{ID_SLOT}[ARGS]", f"{NAME_SLOT}[ARGS]", NAME_SLOT),
)
"""Used by Mistral 7B v0.3, Nemo and Large 2."""
MISTRAL_NAMED = CallForm(
    begin="",
    head=f"[TOOL_CALLS]{NAME_SLOT}[ARGS]",
    arguments=JsonArguments(),
    tail="",
    between="",
    end="",
    short_ids=True,
    other_heads=(f"[TOOL_CALLS]{NAME_SLOT}[CALL_ID]{ID_SLOT}[ARGS]", f"[TOOL_CALLS]{NAME_SLOT}"),
)
"""Used by Mistral Small 3.2, Devstral and Ministral 3."""

CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN = "<｜tool▁call▁begin｜>"
CALL_END = "<｜tool▁call▁end｜>"
CALL_SEPARATOR = "<｜tool▁sep｜>"
FENCED_HEAD = f"{CALL_BEGIN}function{CALL_SEPARATOR}{NAME_SLOT}\n```json\n"
PLAIN_HEAD = f"{CALL_BEGIN}{NAME_SLOT}{CALL_SEPARATOR}"
DEEPSEEK = CallForm(
    begin=CALLS_BEGIN,
    head=FENCED_HEAD,
    arguments=JsonArguments(),
    tail=f"\n```{CALL_END}",
    between="\n",
    end=CALLS_END,
    other_heads=(PLAIN_HEAD,),
)
"""Used by DeepSeek V3 and R1, which write arguments in a code block."""
DEEPSEEK_31 = CallForm(
    begin=CALLS_BEGIN,
    head=PLAIN_HEAD,
    arguments=JsonArguments(),
    tail=CALL_END,
    between="",
    end=CALLS_END,
    other_heads=(FENCED_HEAD,),
)

GRANITE = CallForm(
    begin="<|tool_call|>[",
    head=OBJECT_HEAD,
    arguments=JsonArguments(),
    tail="}",
    between=", ",
    end="]",
    json_keys=DEFAULT_KEYS,
)
"""Used by Granite 3, whose template shows tools but no calls."""

HARMONY_ASSISTANT = "<|start|>assistant"
HARMONY_COMMENTARY = f"{HARMONY_ASSISTANT}<|channel|>commentary to=functions.{NAME_SLOT}"
HARMONY = CallForm(
    begin="",
    head=f"{HARMONY_ASSISTANT} to=functions.{NAME_SLOT}<|channel|>commentary json<|message|>",
    arguments=JsonArguments(),
    tail="",
    between="",
    end="",
    allows_many=False,
    prompt_head=HARMONY_ASSISTANT,
    turn_end="<|call|>",
    content_begin="<|channel|>final<|message|>",
    other_heads=(
        f"{HARMONY_COMMENTARY}<|constrain|>json<|message|>",
        f"{HARMONY_COMMENTARY}json<|message|>",
        f"{HARMONY_COMMENTARY}<|message|>",
        f"{HARMONY_ASSISTANT} to=functions.{NAME_SLOT}<|channel|>commentary<|constrain|>json<|message|>",
    ),
)
"""Used by gpt-oss (https://github.com/openai/harmony). Its template shows only one of the forms that it writes."""


def xml_call_form(outer: str) -> CallForm:
    """Models sometimes omit the tag `outer`."""
    return CallForm(
        begin="",
        head=f"<{outer}>\n<function={NAME_SLOT}>\n",
        arguments=TaggedArguments(
            before_key="<parameter=",
            infixes={"string": ">\n"},
            end="\n</parameter>\n",
            separator="",
            spelling=LiteralSpelling(),
        ),
        tail=f"</function>\n</{outer}>",
        between="\n",
        end="",
        unwrapped_heads=(f"<function={NAME_SLOT}>",),
    )


QWEN_XML, SEED_OSS = xml_call_form("tool_call"), xml_call_form("seed:tool_call")
