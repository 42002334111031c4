"""A tool format made of data: the texts around calls, names and arguments, as a chat template shows them."""

from __future__ import annotations

import string
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b

from quire.server.formats.forms.form_grammar import FormGrammar
from quire.server.formats.forms.form_reader import FormReader
from quire.server.formats.forms.form_texts import MARK, FormTexts, first_words, letters
from quire.server.formats.forms.slots import ID, INDEX, NAME, TAG
from quire.server.formats.tools.format import Token, Tool, ToolFormat, Tools
from quire.server.formats.tools.sink import Sink
from quire.server.formats.tools.source import Source, Steps

ID_CHARACTERS = string.ascii_letters + string.digits


@dataclass(frozen=True)
class CallForm(FormTexts, ToolFormat):
    """The format whose calls have these texts around them."""

    @cached_property
    def markers(self) -> tuple[str, ...]:  # type: ignore[override]
        """The texts that calls begin with, wherever they stand."""
        found = [first_words(self.opening), *map(first_words, self.other_heads), *map(first_words, self.inner_heads)]
        if self.begin.strip() and TAG.search(self.fixed):
            found.append(first_words(self.fixed))
        found = [
            one
            for one in found
            if one and (MARK.search(one) or (letters(one) > 2 and one[0] not in '{"') or self.given)
        ]
        return tuple(dict.fromkeys(found))

    @cached_property
    def inner_markers(self) -> tuple[str, ...]:  # type: ignore[override]
        return tuple(map(first_words, self.inner_heads))

    @property
    def literals(self) -> tuple[str, ...]:
        around = (self.begin, self.head, self.tail, self.between, self.end)
        return (*around, self.content_begin, self.content_end, *self.arguments.literals)

    @cached_property
    def example(self) -> str:  # type: ignore[override]
        whole = self.begin + self.head + self.arguments.example + self.tail + self.end
        return whole.replace(ID, "<id>").replace(NAME, "<function-name>").replace(INDEX, str(self.first_index))

    def new_id(self, name: str) -> str:
        if self.short_ids:
            digest = blake2b(name.encode(), digest_size=9).digest()
            return "".join(ID_CHARACTERS[byte % len(ID_CHARACTERS)] for byte in digest)
        return super().new_id(name)

    def parse(self, source: Source, sink: Sink, tools: Tools, *, in_blocks: bool = False) -> Steps[None]:
        if self.given or not self.strong:
            source.mark("")
            if not (yield from self.read_calls(source, sink, tools, "")):
                sink.content(source.taken)
        if self.markers or in_blocks:
            yield from super().parse(source, sink, tools, in_blocks=in_blocks)
        else:
            yield from _pass_rest(source, sink)

    def read_calls(self, source: Source, sink: Sink, tools: Tools, marker: str) -> Steps[bool]:
        return FormReader(self, source, sink, tools).read_calls(marker)

    def grammar(self, tools: Sequence[Tool], many: bool, token: Token, *, must: bool = True) -> str:
        return FormGrammar(self, self.markers, token).written(tools, many, must=must)


def _pass_rest(source: Source, sink: Sink) -> Steps[None]:
    while not source.closed:
        sink.content(source.take(len(source.text)))
        yield
    sink.content(source.take(len(source.text)))
