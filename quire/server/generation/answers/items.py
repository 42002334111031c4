"""The output items of the Responses API, made from the parts of an answer."""

from __future__ import annotations

from typing import Any

from quire.engine.text.tokenizer import Tokenizer
from quire.server.generation.answers.custom_input import input_of
from quire.server.generation.answers.logprobs import chat_logprobs
from quire.server.generation.choice import TokenText
from quire.server.generation.fold import Part
from quire.server.generation.spec import GenerationSpec, ResponseFields
from quire.server.protocol.items import sealed

PREFIXES = {"message": "msg_", "reasoning": "rs_", "function_call": "fc_", "custom_tool_call": "ctc_"}


class OutputItems:
    """Makes the items of one answer."""

    def __init__(self, spec: GenerationSpec, fields: ResponseFields, tokenizer: Tokenizer) -> None:
        self._spec = spec
        self._fields = fields
        self._tokenizer = tokenizer

    def type(self, part: Part) -> str:
        if part.kind == "call":
            return "custom_tool_call" if part.name in self._spec.custom_tools else "function_call"
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
