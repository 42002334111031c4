from __future__ import annotations

import string
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b

from quire.server.formats.call_forms.call_form_grammar import CallFormGrammarWriter
from quire.server.formats.call_forms.call_form_reader import CallFormReader
from quire.server.formats.call_forms.call_form_texts import DISTINCT_MARK, CallFormTexts, marker_prefix, num_letters
from quire.server.formats.call_forms.slots import ID_SLOT, INDEX_SLOT, NAME_SLOT, TAG
from quire.server.formats.tools.text_source import ParserSteps, TextSource
from quire.server.formats.tools.tool_call_sink import ToolCallSink
from quire.server.formats.tools.tool_parser import LiteralEncoder, Tool, ToolFormat, ToolsByName

ID_CHARACTERS = string.ascii_letters + string.digits


@dataclass(frozen=True)
class CallForm(CallFormTexts, ToolFormat):
    @cached_property
    def markers(self) -> tuple[str, ...]:  # type: ignore[override]
        marker_texts = [
            marker_prefix(self.opening),
            *map(marker_prefix, self.other_heads),
            *map(marker_prefix, self.unwrapped_heads),
        ]
        if self.begin.strip() and TAG.search(self.fixed_head):
            marker_texts.append(marker_prefix(self.fixed_head))
        marker_texts = [
            one
            for one in marker_texts
            if one and (DISTINCT_MARK.search(one) or (num_letters(one) > 2 and one[0] not in '{"') or self.prompt_head)
        ]
        return tuple(dict.fromkeys(marker_texts))

    @cached_property
    def unwrapped_markers(self) -> tuple[str, ...]:  # type: ignore[override]
        return tuple(map(marker_prefix, self.unwrapped_heads))

    @property
    def literals(self) -> tuple[str, ...]:
        around = (self.begin, self.head, self.tail, self.between, self.end)
        return (*around, self.content_begin, self.content_end, *self.arguments.literals)

    @cached_property
    def example(self) -> str:  # type: ignore[override]
        whole = self.begin + self.head + self.arguments.example + self.tail + self.end
        return (
            whole.replace(ID_SLOT, "<id>")
            .replace(NAME_SLOT, "<function-name>")
            .replace(INDEX_SLOT, str(self.first_index))
        )

    def derive_call_id(self, name: str) -> str:
        if self.short_ids:
            digest = blake2b(name.encode(), digest_size=9).digest()
            return "".join(ID_CHARACTERS[byte % len(ID_CHARACTERS)] for byte in digest)
        return super().derive_call_id(name)

    def parse_answer(
        self, source: TextSource, sink: ToolCallSink, tools: ToolsByName, *, in_blocks: bool = False
    ) -> ParserSteps[None]:
        if self.prompt_head or not self.has_distinct_marker:
            source.reset_taken("")
            if not (yield from self.read_calls(source, sink, tools, "")):
                sink.add_content(source.taken_text)
        if self.markers or in_blocks:
            yield from super().parse_answer(source, sink, tools, in_blocks=in_blocks)
        else:
            yield from _stream_remaining_content(source, sink)

    def read_calls(self, source: TextSource, sink: ToolCallSink, tools: ToolsByName, marker: str) -> ParserSteps[bool]:
        return CallFormReader(self, source, sink, tools).read_form_calls(marker)

    def build_calls_grammar(
        self, tools: Sequence[Tool], many: bool, token: LiteralEncoder, *, must: bool = True
    ) -> str:
        return CallFormGrammarWriter(self, self.markers, token).write_grammar(tools, many, must_call=must)


def _stream_remaining_content(source: TextSource, sink: ToolCallSink) -> ParserSteps[None]:
    while not source.is_closed:
        sink.add_content(source.take_text(len(source.text)))
        yield
    sink.add_content(source.take_text(len(source.text)))
