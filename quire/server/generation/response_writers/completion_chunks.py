from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar

import msgspec

from quire.engine.text.tokenizer import Tokenizer
from quire.server.encoding import DONE_EVENT, EVENT_END, EVENT_PREFIX, encode_json, encode_with_raw_fields
from quire.server.formats.tools.tool_call_sink import ToolCallDelta
from quire.server.generation.choice_state import AnswerToken, ChoiceDelta
from quire.server.generation.generation import Usage
from quire.server.generation.output_parts import CollectedChoice, OutputPart
from quire.server.generation.resolved_request import GenerationRequest
from quire.server.generation.response_writers.answer_writer import AnswerWriter
from quire.server.generation.response_writers.custom_tool_input import CustomInputDecoder, decode_custom_input
from quire.server.generation.response_writers.logprob_fields import chat_logprobs, completion_logprobs, prompt_logprobs


class ChunkWriter(AnswerWriter):
    OBJECT_TYPE: ClassVar[str]
    BEFORE_TEXT: ClassVar[bytes]
    """Start of a choice with null token ids; %d is its index."""
    TEXT_KEY: ClassVar[bytes]
    """Not written if the choice's delta has no text."""
    AFTER_TEXT: ClassVar[bytes]
    UNFINISHED_FIELDS: ClassVar[bytes]
    """Follows AFTER_TEXT in deltas without log probabilities and finish reason."""

    def __init__(self, request: GenerationRequest, tokenizer: Tokenizer, fingerprint: str) -> None:
        super().__init__(request, tokenizer, fingerprint)
        self._chunk_head = self._event_head()
        self._choice_heads: dict[int, bytes] = {}
        self._set_chunk_end(b'}],"usage":null}' + EVENT_END if request.include_usage else b"}]}" + EVENT_END)

    def _common_fields(self, kind: str) -> dict[str, object]:
        request = self._request
        about = {"id": request.answer_id, "object": kind, "created": request.created, "model": request.model}
        return {**about, "system_fingerprint": self._fingerprint}

    def _event_head(self, **extra_fields: object) -> bytes:
        return (
            EVENT_PREFIX + encode_json({**self._common_fields(self.OBJECT_TYPE), **extra_fields})[:-1] + b',"choices":'
        )

    def set_usage(self, usage: Usage) -> None:
        self._set_chunk_end(b'}],"usage":%b}%b' % (encode_json(usage.to_openai_usage()), EVENT_END))

    def _set_chunk_end(self, close: bytes) -> None:
        self._chunk_end = close
        self._unfinished_chunk_end = self.AFTER_TEXT + self.UNFINISHED_FIELDS + close

    def step_events(self, deltas: Sequence[ChoiceDelta]) -> bytes:
        return self.choice_events(deltas[0]) if len(deltas) == 1 else b"".join(map(self.choice_events, deltas))

    def text_event_template(self, index: int) -> bytes | None:
        if self._request.return_token_ids or self._request.continuous_usage:
            return None
        before, after = self._choice_head(index) + self.TEXT_KEY, self._unfinished_chunk_end
        return before.replace(b"%", b"%%") + b"%b" + after.replace(b"%", b"%%")

    def last_events(self, usage: Usage) -> bytes:
        if not self._request.include_usage and self.receipt is None:
            return DONE_EVENT
        counts = self._usage_and_metrics_fields(usage) if self._request.include_usage else {}
        encoded_counts = {name: encode_json(each) for name, each in counts.items()}
        fields = b"".join(
            [b',"%b":%b' % (name.encode(), value) for name, value in (encoded_counts | self.receipt_field).items()]
        )
        return self._chunk_head + self._add_weights_version(b"[]" + fields + b"}" + EVENT_END) + DONE_EVENT

    @abstractmethod
    def choice_events(self, delta: ChoiceDelta) -> bytes: ...

    @abstractmethod
    def logprobs_field(self, tokens: Sequence[AnswerToken]) -> dict[str, object]: ...

    def _choice_head(self, index: int) -> bytes:
        opening = self._choice_heads.get(index)
        if opening is None:
            opening = self._choice_heads[index] = self._chunk_head + self.BEFORE_TEXT % index
        return opening

    def _finish_choice_event(self, event: bytes, delta: ChoiceDelta) -> bytes:
        """`event` contains the choice up to its text."""
        if delta.finish_reason is None and not delta.tokens:
            return event + self._unfinished_chunk_end
        close = self._chunk_end if delta.finish_reason is None else self._add_weights_version(self._chunk_end)
        return b'%b%b,"logprobs":%b,"finish_reason":%b,"stop_reason":%b%b' % (
            event,
            self.AFTER_TEXT,
            encode_json(self.logprobs_field(delta.tokens) if delta.tokens else None),
            encode_json(delta.finish_reason),
            encode_json(delta.stop_reason),
            close,
        )

    def _add_weights_version(self, event: bytes) -> bytes:
        return b'%b,"weights_version":%b}%b' % (
            event.removesuffix(b"}" + EVENT_END),
            encode_json(self.weights_version),
            EVENT_END,
        )

    def _collected_choice_fields(
        self, answer: CollectedChoice, content_fields: Mapping[str, object]
    ) -> dict[str, object]:
        return {
            "index": answer.index,
            **content_fields,
            "logprobs": self.logprobs_field(answer.tokens) if self._request.logprobs else None,
            "finish_reason": answer.finish_reason,
            "stop_reason": answer.stop_reason,
            "token_ids": answer.token_ids if self._request.return_token_ids else None,
        }

    def _response_fields(self, kind: str) -> dict[str, object]:
        return {**self._common_fields(kind), "weights_version": self.weights_version}

    def _usage_and_metrics_fields(self, usage: Usage) -> dict[str, object]:
        counts: dict[str, object] = {"usage": usage.to_openai_usage()}
        return counts if usage.metrics is None else counts | {"metrics": usage.metrics}

    def _prompt_fields(self, answer: CollectedChoice) -> dict[str, object]:
        """These fields are null unless requested, because vLLM's clients always read them."""
        logprobs = answer.prompt_logprobs
        return {
            "prompt_token_ids": answer.prompt_ids,
            "prompt_logprobs": None if logprobs is None else prompt_logprobs(logprobs, self._tokenizer),
        }


class CompletionWriter(ChunkWriter):
    OBJECT_TYPE = "text_completion"
    BEFORE_TEXT = b'[{"index":%d,"prompt_token_ids":null,"token_ids":null,"text":'
    TEXT_KEY = b""
    AFTER_TEXT = b""
    UNFINISHED_FIELDS = b',"logprobs":null,"finish_reason":null,"stop_reason":null'

    def choice_events(self, delta: ChoiceDelta) -> bytes:
        opening = self._choice_head(delta.index)
        if self._request.return_token_ids:
            about = self._chunk_head, delta.index, encode_json(delta.prompt_ids), encode_json(delta.token_ids)
            opening = b'%b[{"index":%d,"prompt_token_ids":%b,"token_ids":%b,"text":' % about
        return self._finish_choice_event(opening + encode_json(delta.text), delta)

    def response_body(self, answers: Sequence[CollectedChoice], usage: Usage) -> bytes:
        choices = [
            self._collected_choice_fields(answer, {"text": answer.text}) | self._prompt_fields(answer)
            for answer in answers
        ]
        body = {**self._response_fields(self.OBJECT_TYPE), "choices": choices, **self._usage_and_metrics_fields(usage)}
        return encode_with_raw_fields(body, **self.receipt_field)

    def logprobs_field(self, tokens: Sequence[AnswerToken]) -> dict[str, object]:
        return completion_logprobs(tokens, self._tokenizer, as_token_ids=self._request.return_tokens_as_token_ids)


class ChatWriter(ChunkWriter):
    OBJECT_TYPE = "chat.completion.chunk"
    BEFORE_TEXT = b'[{"index":%d,"token_ids":null,"delta":{'
    TEXT_KEY = b'"content":'
    AFTER_TEXT = b"}"
    UNFINISHED_FIELDS = b',"logprobs":null,"finish_reason":null'

    def __init__(self, request: GenerationRequest, tokenizer: Tokenizer, fingerprint: str) -> None:
        super().__init__(request, tokenizer, fingerprint)
        self._custom_inputs: dict[int, tuple[int, CustomInputDecoder]] = {}
        """For each choice, index and input decoder of its open custom tool call."""

    def first_events(self) -> bytes:
        ids = self._request.prompts[0].ids if self._request.return_token_ids else None
        opening = self._event_head(prompt_token_ids=ids)
        delta = b'[{"index":%d,"token_ids":null,"delta":{"role":"assistant","content":""'
        return b"".join(
            [opening + delta % index + self._unfinished_chunk_end for index in range(self._request.num_choices)]
        )

    def choice_events(self, delta: ChoiceDelta) -> bytes:
        """Reasoning, content and each call are separate events, because some clients read only one per event."""
        calls = self._tool_call_deltas(delta) if delta.tool_calls or self._custom_inputs else []
        if delta.reasoning or delta.tool_calls or calls:
            rest = msgspec.structs.replace(delta, text="") if delta.tool_calls or calls else delta
            more = rest.text or rest.tokens or rest.finish_reason or rest.token_ids
            return self._reasoning_and_call_events(delta, calls) + (self._content_event(rest) if more else b"")
        return self._content_event(delta)

    def _tool_call_deltas(self, delta: ChoiceDelta) -> list[dict[str, object]]:
        deltas = []
        for call in delta.tool_calls:
            if call.name is not None:
                deltas += self._flush_custom_input(delta.index)
                if call.name in self._request.custom_tool_names:
                    self._custom_inputs[delta.index] = call.index, CustomInputDecoder()
            _, reader = self._custom_inputs.get(delta.index, (0, None))
            if reader is None:
                deltas.append(_function_call_delta(call))
            else:
                piece = reader.decode_arguments(call.arguments)
                if piece or call.name is not None:
                    deltas.append(_custom_call_delta(call, piece))
        if delta.finish_reason is not None:
            deltas += self._flush_custom_input(delta.index)
        return deltas

    def _flush_custom_input(self, choice: int) -> list[dict[str, object]]:
        index, reader = self._custom_inputs.pop(choice, (0, None))
        rest = "" if reader is None else reader.decode_arguments("", final=True)
        return [_custom_call_delta(ToolCallDelta(index), rest)] if rest else []

    def _reasoning_and_call_events(self, delta: ChoiceDelta, calls: Sequence[dict[str, object]]) -> bytes:
        parts = []
        if delta.reasoning:
            parts.append(b'"reasoning":%b,"reasoning_content":%b' % ((encode_json(delta.reasoning),) * 2))
        if (delta.tool_calls or calls) and delta.text:
            parts.append(self.TEXT_KEY + encode_json(delta.text))
        parts += [b'"tool_calls":' + encode_json([call]) for call in calls]
        opening = self._choice_head(delta.index)
        return b"".join([opening + part + self._unfinished_chunk_end for part in parts])

    def _content_event(self, delta: ChoiceDelta) -> bytes:
        opening = self._choice_head(delta.index)
        if self._request.return_token_ids:
            ids = encode_json(delta.token_ids)
            opening = b'%b[{"index":%d,"token_ids":%b,"delta":{' % (self._chunk_head, delta.index, ids)
        return self._finish_choice_event(
            opening + self.TEXT_KEY + encode_json(delta.text) if delta.text else opening, delta
        )

    def response_body(self, answers: Sequence[CollectedChoice], usage: Usage) -> bytes:
        choices = [
            self._collected_choice_fields(answer, {"message": self._message_fields(answer)}) for answer in answers
        ]
        fields = self._response_fields("chat.completion")
        body = {
            **fields,
            "choices": choices,
            **self._usage_and_metrics_fields(usage),
            **self._prompt_fields(answers[0]),
        }
        return encode_with_raw_fields(body, **self.receipt_field)

    def logprobs_field(self, tokens: Sequence[AnswerToken]) -> dict[str, object]:
        return chat_logprobs(tokens, self._tokenizer, as_token_ids=self._request.return_tokens_as_token_ids)

    def _message_fields(self, answer: CollectedChoice) -> dict[str, object]:
        calls = [self._tool_call_object(part) for part in answer.parts.parts if part.kind == "call"]
        message: dict[str, object] = {"role": "assistant", "content": answer.text, "refusal": None}
        if answer.reasoning:
            message |= {"reasoning": answer.reasoning, "reasoning_content": answer.reasoning}
        if calls:
            message |= {"content": answer.text or None, "tool_calls": calls}
        return message

    def _tool_call_object(self, part: OutputPart) -> dict[str, object]:
        if part.function_name in self._request.custom_tool_names:
            return {
                "id": part.call_id,
                "type": "custom",
                "custom": {"name": part.function_name, "input": decode_custom_input(part.text)},
            }
        return {
            "id": part.call_id,
            "type": "function",
            "function": {"name": part.function_name, "arguments": part.text},
        }


def _function_call_delta(call: ToolCallDelta) -> dict[str, object]:
    if call.name is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": call.index, "id": call.id, "type": "function", "function": function}


def _custom_call_delta(call: ToolCallDelta, piece: str) -> dict[str, object]:
    if call.name is None:
        return {"index": call.index, "custom": {"input": piece}}
    return {"index": call.index, "id": call.id, "type": "custom", "custom": {"name": call.name, "input": piece}}
