"""The output items of the Responses API, made from the parts of an answer; and a reader that extracts a custom tool's
input from the arguments of a call, {"input": "…"}, while they arrive."""

from __future__ import annotations

import re
from typing import Any

from quire.engine.text.tokenizer import Tokenizer
from quire.server.generation.answers.logprobs import chat_logprobs
from quire.server.generation.choice import TokenText
from quire.server.generation.fold import Part
from quire.server.generation.spec import GenerationSpec, ResponseFields
from quire.server.protocol.items import CUSTOM_INPUT, sealed

_OPENING = re.compile(rf'\s*\{{\s*"{CUSTOM_INPUT}"\s*:\s*"')
_PLAIN = re.compile(r'[^"\\]+')
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|([^u]))", re.DOTALL)
_BEGUN_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?$")
_SHORT = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f"}
PREFIXES = {"message": "msg_", "reasoning": "rs_", "function_call": "fc_", "custom_tool_call": "ctc_"}


class OutputItems:
    """Makes the items of one answer."""

    def __init__(self, spec: GenerationSpec, fields: ResponseFields, tokenizer: Tokenizer) -> None:
        self._spec = spec
        self._fields = fields
        self._tokenizer = tokenizer

    def type(self, part: Part) -> str:
        if part.kind == "call":
            return "custom_tool_call" if part.name in self._fields.custom else "function_call"
        return "message" if part.kind == "text" else "reasoning"

    def id(self, part: Part, index: int) -> str:
        return f"{PREFIXES[self.type(part)]}{self._spec.id.removeprefix(self._spec.id_prefix)}{index:04x}"

    def begun(self, part: Part, index: int) -> dict[str, Any]:
        """An item without content so far."""
        item = self.item(Part(part.kind, part.id, part.name), index, "in_progress")
        return item | {"content": []} if "content" in item else item

    def item(self, part: Part, index: int, status: str) -> dict[str, Any]:
        kind = self.type(part)
        head = {"id": self.id(part, index), "type": kind, "status": status}
        if kind == "message":
            return {**head, "role": "assistant", "content": [self.content(part)]}
        if kind == "reasoning":
            seal = {"encrypted_content": sealed(part.text)} if self._fields.sealed else {}
            return {**head, "summary": [], "content": [self.content(part)], **seal}
        space, name = self._fields.namespaces.get(part.name, ("", part.name))
        called = {**head, "call_id": part.id, "name": name, **({"namespace": space} if space else {})}
        if kind == "custom_tool_call":
            return {**called, "input": input_of(part.text)}
        return {**called, "arguments": part.text}

    def content(self, part: Part) -> dict[str, Any]:
        """The one content part of a message or of reasoning."""
        if part.kind == "reasoning":
            return {"type": "reasoning_text", "text": part.text}
        return {"type": "output_text", "text": part.text, "annotations": [], "logprobs": self.logprobs(part.tokens)}

    def logprobs(self, tokens: list[TokenText]) -> list[Any]:
        told = chat_logprobs(tokens, self._tokenizer, as_token_ids=self._spec.tokens_as_token_ids)["content"]
        assert isinstance(told, list)
        return told


class CustomInput:
    """Takes the arguments piece by piece and returns the pieces of the input. Arguments of any other form are
    themselves the input."""

    def __init__(self) -> None:
        self._rest = ""
        """What was not read yet."""
        self._inside = self._ended = False
        self._high = ""
        """The first half of a surrogate pair."""

    def push(self, piece: str, final: bool = False) -> str:
        self._rest += piece
        if not self._inside:
            opening = _OPENING.match(self._rest)
            if opening is None:
                if not final:
                    return ""
                raw, self._rest = self._rest, ""
                return raw
            self._inside, self._rest = True, self._rest[opening.end() :]
        found, at, text = [], 0, self._rest
        while at < len(text) and not self._ended:
            if text[at] == '"':
                self._ended = True
            elif plain := _PLAIN.match(text, at):
                found.append(plain[0])
                at = plain.end()
            elif escape := _ESCAPE.match(text, at):
                found.append(self._unit(int(escape[1], 16)) if escape[1] else _SHORT.get(escape[2], escape[2]))
                at = escape.end()
            elif _BEGUN_ESCAPE.match(text, at):
                break
            else:  # a backslash that begins nothing
                found.append(text[at])
                at += 1
        self._rest = text[at:]
        return "".join(found)

    def _unit(self, code: int) -> str:
        """A code unit of UTF-16; the first half of a pair waits for the second."""
        if 0xD800 <= code < 0xDC00:
            self._high = chr(code)
            return ""
        if 0xDC00 <= code < 0xE000:
            pair, self._high = self._high + chr(code), ""
            return pair.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        return chr(code)


def input_of(arguments: str) -> str:
    """The input that a call's arguments have."""
    return CustomInput().push(arguments, final=True)
