"""Answers of /v1/completions and /v1/chat/completions."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar

import msgspec

from quire.engine.text.tokenizer import Tokenizer
from quire.server.encoding import DATA, DONE, END, encode_json, encode_object
from quire.server.formats.tools.sink import CallDelta
from quire.server.generation.answers.custom_input import CustomInput, input_of
from quire.server.generation.answers.logprobs import chat_logprobs, completion_logprobs, prompt_logprobs
from quire.server.generation.answers.writer import AnswerWriter
from quire.server.generation.choice import ChoiceDelta, TokenText
from quire.server.generation.fold import Answer, Part
from quire.server.generation.generation import Usage
from quire.server.generation.spec import GenerationSpec


class ChunkWriter(AnswerWriter):
    """Writes chunks of OpenAI's completions. Constant parts are encoded once."""

    CHUNK: ClassVar[str]
    """The `object` of a chunk."""
    BEFORE_TEXT: ClassVar[bytes]
    """Opens the part of a choice that has the text; %d is the choice's index, and token ids are null."""
    TEXT: ClassVar[bytes]
    """Names the text, which follows, where a choice may have none."""
    AFTER_TEXT: ClassVar[bytes]
    """Closes the part of a choice that has the text."""
    UNFINISHED: ClassVar[bytes]
    """Follows that part in a choice that has neither log probabilities nor an end."""

    def __init__(self, spec: GenerationSpec, tokenizer: Tokenizer, fingerprint: str) -> None:
        super().__init__(spec, tokenizer, fingerprint)
        self._opening = self._event()
        self._openings: dict[int, bytes] = {}
        """By choice: the begin of its chunks, up to the text."""
        self._end_chunks(b'}],"usage":null}' + END if spec.include_usage else b"}]}" + END)

    def _identity(self, kind: str) -> dict[str, object]:
        """The fields that all chunks of an answer, or the whole answer, begin with."""
        spec = self._spec
        about = {"id": spec.answer_id, "object": kind, "created": spec.created, "model": spec.model}
        return {**about, "system_fingerprint": self._fingerprint}

    def _event(self, **more: object) -> bytes:
        """An event up to the value of `choices`, which the caller adds; `more`: fields before it."""
        return DATA + encode_json({**self._identity(self.CHUNK), **more})[:-1] + b',"choices":'

    def tell_usage(self, usage: Usage) -> None:
        """Chunks give this usage from now on."""
        self._end_chunks(b'}],"usage":%b}%b' % (encode_json(usage.as_dict()), END))

    def _end_chunks(self, close: bytes) -> None:
        self._close = close
        self._running = self.AFTER_TEXT + self.UNFINISHED + close

    def step(self, deltas: Sequence[ChoiceDelta]) -> bytes:
        return self.events(deltas[0]) if len(deltas) == 1 else b"".join(map(self.events, deltas))

    def text_form(self, index: int) -> bytes | None:
        if self._spec.token_ids or self._spec.continuous_usage:
            return None
        before, after = self._opening_of(index) + self.TEXT, self._running
        return before.replace(b"%", b"%%") + b"%b" + after.replace(b"%", b"%%")

    def last(self, usage: Usage) -> bytes:
        if not self._spec.include_usage and self.receipt is None:
            return DONE
        counts = self._counts(usage) if self._spec.include_usage else {}
        told = {name: encode_json(each) for name, each in counts.items()}
        fields = b"".join([b',"%b":%b' % (name.encode(), value) for name, value in (told | self.receipted).items()])
        return self._opening + self._with_version(b"[]" + fields + b"}" + END) + DONE

    @abstractmethod
    def events(self, delta: ChoiceDelta) -> bytes:
        """The events of one choice in a step."""

    @abstractmethod
    def logprobs(self, tokens: Sequence[TokenText]) -> dict[str, object]: ...

    def _opening_of(self, index: int) -> bytes:
        """The begin of a choice's chunk without token ids, up to the text."""
        opening = self._openings.get(index)
        if opening is None:
            opening = self._openings[index] = self._opening + self.BEFORE_TEXT % index
        return opening

    def _closed(self, event: bytes, delta: ChoiceDelta) -> bytes:
        """The whole of an event that is written up to its text."""
        if delta.finish_reason is None and not delta.tokens:
            return event + self._running
        close = self._close if delta.finish_reason is None else self._with_version(self._close)
        return b'%b%b,"logprobs":%b,"finish_reason":%b,"stop_reason":%b%b' % (
            event,
            self.AFTER_TEXT,
            encode_json(self.logprobs(delta.tokens) if delta.tokens else None),
            encode_json(delta.finish_reason),
            encode_json(delta.stop_reason),
            close,
        )

    def _with_version(self, event: bytes) -> bytes:
        """The end of an event, with the field weights_version at the end of its object."""
        return b'%b,"weights_version":%b}%b' % (event.removesuffix(b"}" + END), encode_json(self.weights_version), END)

    def _choice(self, answer: Answer, shown: Mapping[str, object]) -> dict[str, object]:
        """A whole choice with the fields `shown`."""
        return {
            "index": answer.index,
            **shown,
            "logprobs": self.logprobs(answer.tokens) if self._spec.logprobs else None,
            "finish_reason": answer.finish_reason,
            "stop_reason": answer.stop_reason,
            "token_ids": answer.token_ids if self._spec.token_ids else None,
        }

    def _fields(self, kind: str) -> dict[str, object]:
        """Those of a whole answer that are not about its choices."""
        return {**self._identity(kind), "weights_version": self.weights_version}

    def _counts(self, usage: Usage) -> dict[str, object]:
        """Those about what a whole answer took."""
        counts: dict[str, object] = {"usage": usage.as_dict()}
        return counts if usage.metrics is None else counts | {"metrics": usage.metrics}

    def _prompt(self, answer: Answer) -> dict[str, object]:
        """The fields about the prompt; null where they were not asked for, because vLLM's clients read them anyway."""
        logprobs = answer.prompt_logprobs
        return {
            "prompt_token_ids": answer.prompt_ids,
            "prompt_logprobs": None if logprobs is None else prompt_logprobs(logprobs, self._tokenizer),
        }


class CompletionWriter(ChunkWriter):
    CHUNK = "text_completion"
    BEFORE_TEXT = b'[{"index":%d,"prompt_token_ids":null,"token_ids":null,"text":'
    TEXT = b""
    AFTER_TEXT = b""
    UNFINISHED = b',"logprobs":null,"finish_reason":null,"stop_reason":null'

    def events(self, delta: ChoiceDelta) -> bytes:
        opening = self._opening_of(delta.index)
        if self._spec.token_ids:
            about = self._opening, delta.index, encode_json(delta.prompt_ids), encode_json(delta.token_ids)
            opening = b'%b[{"index":%d,"prompt_token_ids":%b,"token_ids":%b,"text":' % about
        return self._closed(opening + encode_json(delta.text), delta)

    def whole(self, answers: Sequence[Answer], usage: Usage) -> bytes:
        choices = [self._choice(answer, {"text": answer.text}) | self._prompt(answer) for answer in answers]
        whole = {**self._fields(self.CHUNK), "choices": choices, **self._counts(usage)}
        return encode_object(whole, **self.receipted)

    def logprobs(self, tokens: Sequence[TokenText]) -> dict[str, object]:
        return completion_logprobs(tokens, self._tokenizer, as_token_ids=self._spec.tokens_as_token_ids)


class ChatWriter(ChunkWriter):
    CHUNK = "chat.completion.chunk"
    BEFORE_TEXT = b'[{"index":%d,"token_ids":null,"delta":{'
    TEXT = b'"content":'
    AFTER_TEXT = b"}"
    UNFINISHED = b',"logprobs":null,"finish_reason":null'

    def __init__(self, spec: GenerationSpec, tokenizer: Tokenizer, fingerprint: str) -> None:
        super().__init__(spec, tokenizer, fingerprint)
        self._inputs: dict[int, tuple[int, CustomInput]] = {}
        """By choice: the custom tool's call that it has open, by its index, and the reader of its input."""

    def first(self) -> bytes:
        """The role of each choice, and the prompt's token ids, before the first step."""
        ids = self._spec.prompts[0].ids if self._spec.token_ids else None
        opening = self._event(prompt_token_ids=ids)
        delta = b'[{"index":%d,"token_ids":null,"delta":{"role":"assistant","content":""'
        return b"".join([opening + delta % index + self._running for index in range(self._spec.num_choices)])

    def events(self, delta: ChoiceDelta) -> bytes:
        """Reasoning, content and each call are events of their own: some clients read only one of them in an event."""
        calls = self._calls(delta) if delta.calls or self._inputs else []
        if delta.reasoning or delta.calls or calls:
            rest = msgspec.structs.replace(delta, text="") if delta.calls or calls else delta
            more = rest.text or rest.tokens or rest.finish_reason or rest.token_ids
            return self._extra_events(delta, calls) + (self._content_event(rest) if more else b"")
        return self._content_event(delta)

    def _calls(self, delta: ChoiceDelta) -> list[dict[str, object]]:
        """The deltas of calls that a delta shows."""
        found = []
        for call in delta.calls:
            if call.name is not None:
                found += self._end_input(delta.index)
                if call.name in self._spec.custom_tools:
                    self._inputs[delta.index] = call.index, CustomInput()
            _, reader = self._inputs.get(delta.index, (0, None))
            if reader is None:
                found.append(_call_delta(call))
            else:
                piece = reader.push(call.arguments)
                if piece or call.name is not None:
                    found.append(_custom_delta(call, piece))
        if delta.finish_reason is not None:
            found += self._end_input(delta.index)
        return found

    def _end_input(self, choice: int) -> list[dict[str, object]]:
        """What is left of the input of a choice's open call, if it is a custom tool's. The call is over."""
        index, reader = self._inputs.pop(choice, (0, None))
        rest = "" if reader is None else reader.push("", final=True)
        return [_custom_delta(CallDelta(index), rest)] if rest else []

    def _extra_events(self, delta: ChoiceDelta, calls: Sequence[dict[str, object]]) -> bytes:
        parts = []
        if delta.reasoning:
            parts.append(b'"reasoning":%b,"reasoning_content":%b' % ((encode_json(delta.reasoning),) * 2))
        if (delta.calls or calls) and delta.text:
            parts.append(self.TEXT + encode_json(delta.text))
        parts += [b'"tool_calls":' + encode_json([call]) for call in calls]
        opening = self._opening_of(delta.index)
        return b"".join([opening + part + self._running for part in parts])

    def _content_event(self, delta: ChoiceDelta) -> bytes:
        opening = self._opening_of(delta.index)
        if self._spec.token_ids:
            ids = encode_json(delta.token_ids)
            opening = b'%b[{"index":%d,"token_ids":%b,"delta":{' % (self._opening, delta.index, ids)
        return self._closed(opening + self.TEXT + encode_json(delta.text) if delta.text else opening, delta)

    def whole(self, answers: Sequence[Answer], usage: Usage) -> bytes:
        choices = [self._choice(answer, {"message": self._message(answer)}) for answer in answers]
        fields = self._fields("chat.completion")
        whole = {**fields, "choices": choices, **self._counts(usage), **self._prompt(answers[0])}
        return encode_object(whole, **self.receipted)

    def logprobs(self, tokens: Sequence[TokenText]) -> dict[str, object]:
        return chat_logprobs(tokens, self._tokenizer, as_token_ids=self._spec.tokens_as_token_ids)

    def _message(self, answer: Answer) -> dict[str, object]:
        calls = [self._call(part) for part in answer.parts.all if part.kind == "call"]
        message: dict[str, object] = {"role": "assistant", "content": answer.text, "refusal": None}
        if answer.reasoning:
            message |= {"reasoning": answer.reasoning, "reasoning_content": answer.reasoning}
        if calls:
            message |= {"content": answer.text or None, "tool_calls": calls}
        return message

    def _call(self, part: Part) -> dict[str, object]:
        if part.name in self._spec.custom_tools:
            return {"id": part.id, "type": "custom", "custom": {"name": part.name, "input": input_of(part.text)}}
        return {"id": part.id, "type": "function", "function": {"name": part.name, "arguments": part.text}}


def _call_delta(call: CallDelta) -> dict[str, object]:
    """A delta of a call; the first one gives its id and name."""
    if call.name is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": call.index, "id": call.id, "type": "function", "function": function}


def _custom_delta(call: CallDelta, piece: str) -> dict[str, object]:
    """The same of a custom tool's call, with a piece of its input."""
    if call.name is None:
        return {"index": call.index, "custom": {"input": piece}}
    return {"index": call.index, "id": call.id, "type": "custom", "custom": {"name": call.name, "input": piece}}
