"""Random tool calls, rendered by a chat template with transformers, for tests of parsers and grammars."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tokenizers
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers
from transformers.utils.chat_template_utils import render_jinja_template

from quire.engine.text.conversation.chat_template import ChatRenderer
from quire.engine.text.tokenizer import Tokenizer
from quire.server.config import ServerConfig
from quire.server.formats.chat_formats import ChatFormats
from quire.server.formats.message_parser import AssistantMessageParser, RequestMessageFormat
from quire.server.formats.tools.tool_parser import Tool
from tests.texts import BYTES

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
USER = "What is the weather?"
PROPERTIES = {
    "city": {"type": "string"},
    "count": {"type": "integer"},
    "size": {"type": "number"},
    "on": {"type": "boolean"},
    "none": {"type": "null"},
    "list": {"type": "array"},
    "deep": {"type": "object"},
}
NAMES = ("get_weather", "clock", "ns.f-1", "x")
SHOWN = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "d",
            "parameters": {
                "type": "object",
                "properties": {key: {"type": "string", "description": "d"} for key in PROPERTIES},
                "required": ["city"],
            },
        },
    }
    for name in NAMES
]
"""The tools that templates are given: some templates cannot render the schemas of lists and objects."""
TOOLS = {
    name: Tool(name, {"type": "object", "properties": PROPERTIES, "additionalProperties": False}) for name in NAMES
}


@dataclass(frozen=True)
class Call:
    name: str
    arguments: Mapping[str, Any]


def words(*more: str) -> st.SearchStrategy[str]:
    """Texts with difficult characters, but without markup that a template itself would write."""
    hard = ["", " ", "é", "日本", "'", '"', "\\", "\n", "a, b=c", "{x}", "[1]", "<b>", "&amp;", "true", "7", "\t", "ok"]
    return st.lists(st.sampled_from([*hard, *more]), max_size=5).map("".join)


def values(text: st.SearchStrategy[str], *, null: bool = True) -> st.SearchStrategy[Any]:
    scalars = st.booleans() | st.integers(-(10**9), 10**9) | st.sampled_from([0.5, -2.25, 1e-7, 1e30]) | text
    return st.recursive(
        scalars | st.none() if null else scalars,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["k", "key_2"]), inner, max_size=2),
        max_leaves=6,
    )


def calls(
    text: st.SearchStrategy[str] | None = None, *, most: int = 3, null: bool = True
) -> st.SearchStrategy[list[Call]]:
    text = text if text is not None else words()
    inner = values(text, null=null)
    arguments = st.fixed_dictionaries(
        {},
        optional={
            "city": text,
            "count": st.integers(-(10**12), 10**12),
            "size": st.sampled_from([0.5, -2.25, 3.0, 1e30]),
            "on": st.booleans(),
            **({"none": st.none()} if null else {}),
            "list": st.lists(inner, max_size=3),
            "deep": st.dictionaries(st.sampled_from(["k", "key_2"]), inner, max_size=2),
        },
    )
    ordered = arguments.map(lambda found: {key: found[key] for key in PROPERTIES if key in found})
    one = st.builds(Call, st.sampled_from(NAMES), ordered)
    return st.lists(one, min_size=1, max_size=most)


def tokenizer_for(template: str) -> Tokenizer:
    """One token per byte, and the template's tags like <|…|> as special tokens."""
    backend = tokenizers.Tokenizer(models.BPE({character: i for i, character in enumerate(BYTES)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    marks = re.findall(r"<[|｜][^<>\s{}'\"]+[|｜]>|\[/?[A-Z_]+\]|</?(?:think|tool_call)>", template)
    backend.add_special_tokens(["</s>", *sorted(set(marks))])
    return Tokenizer(backend, special_tokens=SPECIAL, chat_templates={"default": template})


class Subject:
    """A template, the formats inferred from it, and transformers' rendering with it."""

    def __init__(self, template: str, *, by_quire: bool = False, head: str = "") -> None:
        """`by_quire`: render with Quire, because transformers refuses the template. `head`: the text at which the turn
        begins, if the prompt has more messages after the user's.
        """
        self.template, self.by_quire, self.head = template, by_quire, head
        self.tokenizer = tokenizer_for(template)
        self.formats = ChatFormats.from_config(ServerConfig(), self.tokenizer)
        shows = ChatRenderer({"default": template}, SPECIAL).capabilities
        self.named_ids = getattr(self.formats.tool_format, "named_ids", False)
        self.text_arguments = shows.text_arguments
        self.tools = SHOWN if shows.shows_tools else None
        self.prompt, self.bare = self.render([]), self._rendered([{"role": "user", "content": USER}], prompt=False)
        self.shows_end = self.formats.reasoning_format is None or self.formats.reasoning_format.end in self.render(
            [{"role": "assistant", "content": "x"}]
        ).removeprefix(self.bare)

    def render(self, turns: Sequence[Mapping[str, Any]]) -> str:
        """Render the conversation with transformers. Without assistant turns, add the generation prompt."""
        messages = [{"role": "user", "content": USER}, *turns]
        return self._rendered(messages, prompt=not turns)

    def _rendered(self, messages: list[Any], *, prompt: bool) -> str:
        if self.by_quire:
            return self.formats.renderer.render(messages, tools=self.tools, add_generation_prompt=prompt)
        # FireFunction's template takes tools as JSON in a variable of its own.
        functions = json.dumps([tool["function"] for tool in self.tools or ()], indent=4)
        variables: dict[str, Any] = {"functions": functions, "datetime": "2026-11-29", **SPECIAL}
        rendered, _ = render_jinja_template(
            [messages], self.tools, chat_template=self.template, add_generation_prompt=prompt, **variables
        )
        return str(rendered[0])

    def turn(self, made: Sequence[Call], content: str = "", thought: str | None = None) -> str:
        """Return what the model writes in a turn: the text after the prompt, or after the prefix that it shares with
        the prompt.
        """
        written = [
            {
                "id": f"functions.{call.name}:{index}" if self.named_ids else f"call{index:05}",
                "type": "function",
                "function": {"name": call.name, "arguments": self._arguments(call)},
            }
            for index, call in enumerate(made)
        ]
        thoughts = {} if thought is None else dict.fromkeys(("reasoning_content", "thinking", "reasoning"), thought)
        message = {"role": "assistant", "content": content, **thoughts, **({"tool_calls": written} if written else {})}
        whole = self.render([message])
        count = next(
            (place for place, (one, other) in enumerate(zip(self.prompt, whole, strict=False)) if one != other),
            min(len(self.prompt), len(whole)),
        )
        place = max(whole.rfind("<", 0, count), 0) if count < len(self.prompt) and _inside_tag(whole, count) else count
        if self.head:
            whole = whole.removesuffix(_shared_end(whole, self.bare))
            place = whole.rindex(self.head) + len(self.head)
        return self._thought(thought) + whole[place:]

    def _thought(self, thought: str | None) -> str:
        """Reasoning that the prompt opens and that a rendered turn does not show."""
        reasoning = self.formats.reasoning_format
        if reasoning is None or not reasoning.starts_in_thinking(self.prompt) or self.shows_end:
            return ""
        return f"{thought or 'hm'}\n{reasoning.end}\n\n"

    def _arguments(self, call: Call) -> Any:
        return json.dumps(call.arguments, ensure_ascii=False) if self.text_arguments else call.arguments

    def message_format(self) -> RequestMessageFormat:
        reasoning = self.formats.reasoning_format
        return RequestMessageFormat(
            reasoning_format=reasoning,
            starts_in_thinking=None if reasoning is None else reasoning.starts_in_thinking(self.prompt),
            tool_format=self.formats.tool_format,
            tools_by_name=TOOLS,
            content_delimiters=self.formats.content_delimiters,
        )


def _shared_end(one: str, other: str) -> str:
    count = next(n for n in range(len(other) + 1) if n == len(other) or not one.endswith(other[-n - 1 :]))
    return other[len(other) - count :]


def _inside_tag(text: str, place: int) -> bool:
    return text.rfind("<", 0, place) > text.rfind(">", 0, place)


@dataclass
class Read:
    content: str
    reasoning: str
    calls: list[Call]


def read(format: RequestMessageFormat, pieces: Sequence[str]) -> Read:
    """Assemble the message as a client does from deltas."""
    parser = AssistantMessageParser(format)
    names_and_arguments, content, reasoning = list[list[str]](), "", ""
    place = 0
    for index, piece in enumerate(pieces):
        delta = parser.parse_delta(piece, range(place, place + len(piece)), final=index == len(pieces) - 1)
        place += len(piece)
        content, reasoning = content + delta.content, reasoning + delta.reasoning
        for call in delta.tool_calls:
            if call.name is not None:
                names_and_arguments.append([call.name, ""])
            names_and_arguments[-1][1] += call.arguments
    return Read(content, reasoning, [Call(name, json.loads(arguments)) for name, arguments in names_and_arguments])
