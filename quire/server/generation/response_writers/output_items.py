from __future__ import annotations

from typing import Any

from quire.engine.text.tokenizer import Tokenizer
from quire.server.generation.choice_state import AnswerToken
from quire.server.generation.output_parts import OutputPart
from quire.server.generation.resolved_request import GenerationRequest, ResponsesApiFields
from quire.server.generation.response_writers.custom_tool_input import decode_custom_input
from quire.server.generation.response_writers.logprob_fields import chat_logprobs
from quire.server.protocol.response_items import encode_reasoning

ID_PREFIXES = {"message": "msg_", "reasoning": "rs_", "function_call": "fc_", "custom_tool_call": "ctc_"}


class OutputItemBuilder:
    def __init__(self, request: GenerationRequest, fields: ResponsesApiFields, tokenizer: Tokenizer) -> None:
        self._request = request
        self._api_fields = fields
        self._tokenizer = tokenizer

    def item_type(self, part: OutputPart) -> str:
        if part.kind == "call":
            return "custom_tool_call" if part.function_name in self._request.custom_tool_names else "function_call"
        return "message" if part.kind == "text" else "reasoning"

    def item_id(self, part: OutputPart, index: int) -> str:
        return f"{ID_PREFIXES[self.item_type(part)]}{self._request.id.removeprefix(self._request.id_prefix)}{index:04x}"

    def empty_item(self, part: OutputPart, index: int) -> dict[str, Any]:
        item = self.output_item(OutputPart(part.kind, part.call_id, part.function_name), index, "in_progress")
        return item | {"content": []} if "content" in item else item

    def output_item(self, part: OutputPart, index: int, status: str) -> dict[str, Any]:
        kind = self.item_type(part)
        head = {"id": self.item_id(part, index), "type": kind, "status": status}
        if kind == "message":
            return {**head, "role": "assistant", "content": [self.content_part(part)]}
        if kind == "reasoning":
            encrypted_fields = (
                {"encrypted_content": encode_reasoning(part.text)} if self._api_fields.encrypts_reasoning else {}
            )
            return {**head, "summary": [], "content": [self.content_part(part)], **encrypted_fields}
        space, name = self._api_fields.namespaces.get(part.function_name, ("", part.function_name))
        call_fields = {**head, "call_id": part.call_id, "name": name, **({"namespace": space} if space else {})}
        if kind == "custom_tool_call":
            return {**call_fields, "input": decode_custom_input(part.text)}
        return {**call_fields, "arguments": part.text}

    def content_part(self, part: OutputPart) -> dict[str, Any]:
        if part.kind == "reasoning":
            return {"type": "reasoning_text", "text": part.text}
        return {
            "type": "output_text",
            "text": part.text,
            "annotations": [],
            "logprobs": self.part_logprobs(part.tokens),
        }

    def part_logprobs(self, tokens: list[AnswerToken]) -> list[Any]:
        content = chat_logprobs(tokens, self._tokenizer, as_token_ids=self._request.return_tokens_as_token_ids)[
            "content"
        ]
        assert isinstance(content, list)
        return content
