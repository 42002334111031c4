from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import msgspec

from quire.engine.common.types import EngineCoreOutput, FinishReason, PrefixMissReport, TokenLogprob
from quire.engine.text.detokenizer import IncrementalDetokenizer, TextDelta
from quire.engine.text.tokenizer import Tokenizer
from quire.server.formats.message_parser import AssistantMessageParser, MessageDelta
from quire.server.formats.tools.tool_call_sink import ToolCallDelta
from quire.server.generation.line_limiter import LineLimiter
from quire.server.generation.message_stream import MessageDeltaStream
from quire.server.generation.resolved_request import GenerationRequest, Prompt, RepetitionRule


class AnswerToken(msgspec.Struct, frozen=True, gc=False):
    """`logprob` is None only for an echoed prompt's first token."""

    token_id: int
    logprob: TokenLogprob | None
    offset: int
    """Position in characters of the choice's text."""


class ChoiceDelta(msgspec.Struct, frozen=True):
    index: int
    text: str
    tokens: list[AnswerToken]
    """Tokens that begin in `text`, if log probabilities were requested."""
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    """The stop string, or the id from stop_token_ids, that ended the choice."""
    token_ids: Sequence[int] = ()
    """Ids since the last delta, including the one that ended the answer."""
    prompt_ids: Sequence[int] | None = None
    """Set only in a choice's first delta, as `prompt_logprobs`."""
    prompt_logprobs: Sequence[TokenLogprob | None] | None = None
    """Set only in a choice's first delta. The first token's entry is None."""
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()


class ChoiceState:
    def __init__(self, index: int, prompt: Prompt, request: GenerationRequest, tokenizer: Tokenizer) -> None:
        params = request.params
        self.index = index
        self.prompt = prompt
        self.completion_tokens = 0
        self.cached_tokens = 0
        self.prefix_report: PrefixMissReport | None = None
        self.logprob_sum = 0.0
        self.is_finished = False
        """The generation sets this field, `end_reason`, `first_token_time` and `last_token_time`."""
        self.end_reason = ""
        self.first_token_time: float | None = None
        """`time.monotonic()`, as `last_token_time`."""
        self.last_token_time = 0.0
        self._params = params
        self._echo = request.echo
        self._prompt_only = request.prompt_only
        self._text_stream = IncrementalDetokenizer(
            tokenizer,
            prompt_ids=prompt.ids,
            stop=params.stop if request.message_format is None else (),  # MessageDeltaStream applies them to messages
            include_stop=params.include_stop_str_in_output,
            skip_special_tokens=params.skip_special_tokens,
            shown_ids=frozenset()
            if request.message_format is None
            else request.message_format.marker_token_ids(tokenizer),
            min_tokens=params.min_tokens,
            offsets=any((params.logprobs is not None, request.message_format, request.line_rule)),
        )
        extras_requested = (
            params.logprobs is not None,
            request.prompt_logprobs is not None,
            request.message_format is not None,
        )
        self._is_text_only = not (any(extras_requested) or request.echo or request.return_token_ids)
        """True if all deltas except the last have only text."""
        self._message_stream: MessageDeltaStream | None = None
        if request.message_format is not None:
            self._message_stream = MessageDeltaStream(
                self._text_stream, AssistantMessageParser(request.message_format, f"{request.id}/{index}"), params
            )
        rule = request.repetition_rule
        self._repetition_detector = None if rule is None else RepetitionDetector(rule, params.min_tokens)
        self._line_limiter = None if request.line_rule is None else LineLimiter(request.line_rule)
        self._pending_logprobs: deque[TokenLogprob] = deque()
        self._echoed_text = (prompt.text or "") if request.echo else ""
        self._pending_ids: list[int] | None = [] if request.return_token_ids else None
        self._prompt_ids = prompt.ids if request.return_token_ids else None
        self._prompt_logprobs: Sequence[TokenLogprob | None] | None = None
        self._num_prompt_logprobs = request.prompt_logprobs

    def process_output(self, output: EngineCoreOutput) -> ChoiceDelta | None:
        output, repeats = self._cut_prompt_only_or_repetition(output)
        message: MessageDelta | None = None
        if self._message_stream is None:
            delta = self._text_stream.push_output(output)
        else:
            delta, message = self._message_stream.push_output(output)
        delta, reason, stop_reason = self._find_answer_end(output, delta, repeats=repeats)
        text = delta.text
        self._update_completion_and_cached_tokens(output, delta.num_used_ids)
        if self._is_text_only and reason is None:
            return ChoiceDelta(self.index, text, []) if output.new_ids or text else None
        tokens = self._collect_answer_tokens(output, delta)
        echoed, echoed_tokens = self._take_echo(output)
        tokens = echoed_tokens + tokens
        self._gather_ids_and_prompt_logprobs(output, delta.num_used_ids)
        if self._message_stream is not None and message is not None:
            text = message.content
            reason = self._message_stream.finish_reason(reason)
        # A token without text also makes a delta, because clients time tokens by chunks.
        is_silent = not output.new_ids or message is not None
        if is_silent and not (message or text or tokens or echoed) and reason is None:
            return None
        choice_delta = ChoiceDelta(self.index, echoed + text, tokens, reason, stop_reason)
        if message is not None and (message.reasoning or message.tool_calls):
            choice_delta = msgspec.structs.replace(
                choice_delta, reasoning=message.reasoning, tool_calls=message.tool_calls
            )
        if self._pending_ids is None and self._prompt_logprobs is None:
            return choice_delta
        return self._add_ids_and_prompt_logprobs(choice_delta)

    @property
    def reasoning_tokens(self) -> int:
        return 0 if self._message_stream is None else self._message_stream.reasoning_tokens

    def _cut_prompt_only_or_repetition(self, output: EngineCoreOutput) -> tuple[EngineCoreOutput, bool]:
        if self._prompt_only:
            ended: FinishReason | None = None if output.finish_reason is None else "length"
            output = msgspec.structs.replace(output, new_ids=[], logprobs=None, finish_reason=ended, stop_reason=None)
        if self._repetition_detector is None:
            return output, False
        return self._repetition_detector.cut_repetition(output)

    def _find_answer_end(
        self, output: EngineCoreOutput, delta: TextDelta, *, repeats: bool
    ) -> tuple[TextDelta, str | None, int | str | None]:
        if self._line_limiter is not None and (cut := self._line_limiter.cut_delta(delta)) is not None:
            return cut, "length", None
        if delta.stop_string is not None:
            return delta, "stop", delta.stop_string
        if repeats:
            return delta, "repetition", REPETITION_STOP_REASON
        return delta, output.finish_reason, output.stop_reason

    def _update_completion_and_cached_tokens(self, output: EngineCoreOutput, num_used_ids: int) -> None:
        self.completion_tokens += num_used_ids
        if output.cached_tokens > self.cached_tokens:
            self.cached_tokens = output.cached_tokens
        self.prefix_report = output.prefix or self.prefix_report

    def _collect_answer_tokens(self, output: EngineCoreOutput, delta: TextDelta) -> list[AnswerToken]:
        if output.logprobs is not None:
            self._pending_logprobs.extend(output.logprobs[: delta.num_used_ids])
            self.logprob_sum += sum(logprob.logprob for logprob in output.logprobs[: delta.num_used_ids])
        if not self._pending_logprobs:
            return []
        return [self._next_answer_token(offset) for offset in delta.offsets]

    def _take_echo(self, output: EngineCoreOutput) -> tuple[str, list[AnswerToken]]:
        if not self._echo:
            return "", []
        self._echo = False
        if self.prompt.offsets and output.prompt_logprobs is not None and self._params.logprobs is not None:
            return self._echoed_text, self._echoed_prompt_tokens(output.prompt_logprobs)
        return self._echoed_text, []

    def _gather_ids_and_prompt_logprobs(self, output: EngineCoreOutput, num_used_ids: int) -> None:
        if self._pending_ids is not None:
            self._pending_ids += output.new_ids[:num_used_ids]
        if self._num_prompt_logprobs is not None and output.prompt_logprobs is not None:
            self._prompt_logprobs = [
                limit_alternatives(logprob, self._num_prompt_logprobs) for logprob in output.prompt_logprobs
            ]

    def _add_ids_and_prompt_logprobs(self, delta: ChoiceDelta) -> ChoiceDelta:
        ids, self._pending_ids = self._pending_ids, None if self._pending_ids is None else []
        prompt_ids, self._prompt_ids = self._prompt_ids, None
        logprobs, self._prompt_logprobs = self._prompt_logprobs, None
        return msgspec.structs.replace(delta, token_ids=ids or (), prompt_ids=prompt_ids, prompt_logprobs=logprobs)

    def _next_answer_token(self, offset: int) -> AnswerToken:
        logprob = self._pending_logprobs.popleft()
        return AnswerToken(logprob.token_id, logprob, len(self._echoed_text) + offset)

    def _echoed_prompt_tokens(self, logprobs: Sequence[TokenLogprob | None]) -> list[AnswerToken]:
        cut = [limit_alternatives(logprob, self._params.logprobs or 0) for logprob in logprobs]
        return [
            AnswerToken(token_id, logprob, offset)
            for token_id, logprob, offset in zip(self.prompt.ids, cut, self.prompt.offsets, strict=True)
        ]


def limit_alternatives(logprob: TokenLogprob | None, top: int) -> TokenLogprob | None:
    """The engine may report more alternatives for another part of the request."""
    return None if logprob is None else msgspec.structs.replace(logprob, top=logprob.top[:top])


REPETITION_STOP_REASON = "repetition_detected"


class RepetitionDetector:
    def __init__(self, rule: RepetitionRule, min_tokens: int) -> None:
        """Repetitions within the first `min_tokens` tokens are ignored."""
        self._rule = rule
        self._min_tokens = min_tokens
        self._token_ids: list[int] = []

    def cut_repetition(self, output: EngineCoreOutput) -> tuple[EngineCoreOutput, bool]:
        """Cuts the output after the token that completes a repetition, and returns True if there is one. A token that
        ends the answer anyway is not checked, and keeps its own finish reason.
        """
        for used, token_id in enumerate(output.new_ids, 1):
            self._token_ids.append(token_id)
            if used == len(output.new_ids) and output.finish_reason is not None:
                break
            if len(self._token_ids) >= self._min_tokens and has_repetition(self._token_ids, self._rule):
                logprobs = None if output.logprobs is None else output.logprobs[:used]
                used_ids = output.new_ids[:used]
                return msgspec.structs.replace(
                    output, new_ids=used_ids, logprobs=logprobs, finish_reason="length"
                ), True
        return output, False


def has_repetition(ids: Sequence[int], rule: RepetitionRule) -> bool:
    """vLLM's check_sequence_repetition."""
    sizes = range(max(1, rule.min_pattern_size), rule.max_pattern_size + 1)
    return any(_has_period(ids, size, size * rule.min_count) for size in sizes if size * rule.min_count <= len(ids))


def _has_period(ids: Sequence[int], period: int, length: int) -> bool:
    return all(ids[-i] == ids[-i - period] for i in range(1, length - period + 1))
