"""One choice of an answer while it is generated: takes the engine's outputs and returns deltas."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import msgspec

from quire.engine.text.detokenizer import TextStream
from quire.engine.text.tokenizer import Tokenizer
from quire.engine.types import EngineCoreOutput, FinishReason, PrefixReport, TokenLogprob
from quire.server.formats.message import MessageDelta, MessageParser
from quire.server.formats.tools.sink import CallDelta
from quire.server.generation.message_stream import MessageStream
from quire.server.generation.spec import GenerationSpec, Prompt, RepetitionRule


class TokenText(msgspec.Struct, frozen=True, gc=False):
    """A token of an answer. Only the first token of an echoed prompt has no log probability."""

    token_id: int
    logprob: TokenLogprob | None
    offset: int
    """Where the token begins, in characters of the choice's text."""


class ChoiceDelta(msgspec.Struct, frozen=True):
    """What one step added to one choice."""

    index: int
    text: str
    tokens: list[TokenText]
    """The tokens that begin in this text, if log probabilities were asked for."""
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    """The stop string or the id of stop_token_ids that ended it."""
    token_ids: Sequence[int] = ()
    """The tokens generated since the last delta, with the one that ended the answer; if asked for."""
    prompt_ids: Sequence[int] | None = None
    """With a choice's first delta, if token ids were asked for."""
    prompt_logprobs: Sequence[TokenLogprob | None] | None = None
    """With a choice's first delta, if asked for: None for the first token."""
    reasoning: str = ""
    calls: tuple[CallDelta, ...] = ()


class Choice:
    """Takes the engine's outputs and returns deltas."""

    def __init__(self, index: int, prompt: Prompt, spec: GenerationSpec, tokenizer: Tokenizer) -> None:
        params = spec.params
        self.index = index
        self.prompt = prompt
        self.completion_tokens = 0
        self.cached_tokens = 0
        self.prefix: PrefixReport | None = None
        """What else of the prompt could have been cached; None where nothing is known."""
        self.logprob_sum = 0.0
        self.finished = False
        """Set by the generation, which also sets the reason and the two times below."""
        self.ended_by = ""
        self.first_at: float | None = None
        """When the first token came; this and last_at are times of time.monotonic()."""
        self.last_at = 0.0
        self._params = params
        self._echo = spec.echo
        self._echo_only = spec.echo_only
        self._text = TextStream(
            tokenizer,
            prompt_ids=prompt.ids,
            stop=params.stop if spec.message is None else (),  # of a message, MessageStream looks for them
            include_stop=params.include_stop_str_in_output,
            skip_special_tokens=params.skip_special_tokens,
            shown_ids=frozenset() if spec.message is None else spec.message.shown_ids(tokenizer),
            min_tokens=params.min_tokens,
            offsets=params.logprobs is not None or spec.message is not None,
        )
        asked = (params.logprobs is not None, spec.prompt_logprobs is not None, spec.message is not None)
        self._plain = not (any(asked) or spec.echo or spec.token_ids)
        """Whether a delta has a text and nothing else, but for the last."""
        self._message: MessageStream | None = None
        if spec.message is not None:
            self._message = MessageStream(self._text, MessageParser(spec.message, f"{spec.id}/{index}"), params)
        rule = spec.repetition
        self._repetition = None if rule is None else RepetitionDetector(rule, params.min_tokens)
        self._logprobs: deque[TokenLogprob] = deque()
        self._shown = (prompt.text or "") if spec.echo else ""
        """The prompt, where it is echoed."""
        self._ids: list[int] | None = [] if spec.token_ids else None
        self._prompt_ids = prompt.ids if spec.token_ids else None
        self._prompt_logprobs: Sequence[TokenLogprob | None] | None = None
        self._prompt_top = spec.prompt_logprobs

    def push(self, output: EngineCoreOutput) -> ChoiceDelta | None:
        """The delta of one output; None when it shows nothing yet."""
        if self._echo_only:
            ended: FinishReason | None = None if output.finish_reason is None else "length"
            output = msgspec.structs.replace(output, new_ids=[], logprobs=None, finish_reason=ended, stop_reason=None)
        output, repeats = (output, False) if self._repetition is None else self._repetition.cut(output)
        reason: str | None = output.finish_reason
        stop_reason: int | str | None = output.stop_reason
        message: MessageDelta | None = None
        if self._message is None:
            delta = self._text.push_output(output)
        else:
            delta, message = self._message.push_output(output)
        self.completion_tokens += delta.used
        if repeats:
            reason, stop_reason = "repetition", STOP_REASON
        if delta.stop_string is not None:
            reason, stop_reason = "stop", delta.stop_string
        if output.cached_tokens > self.cached_tokens:
            self.cached_tokens = output.cached_tokens
        self.prefix = output.prefix or self.prefix
        if self._plain and reason is None:
            return ChoiceDelta(self.index, delta.text, []) if output.new_ids or delta.text else None
        text, tokens = delta.text, []
        if output.logprobs is not None:
            self._logprobs.extend(output.logprobs[: delta.used])
            self.logprob_sum += sum(logprob.logprob for logprob in output.logprobs[: delta.used])
        if self._logprobs:
            tokens = [self._token(offset) for offset in delta.offsets]
        echoed = ""
        if self._echo:
            self._echo, echoed = False, self._shown
            if self.prompt.offsets and output.prompt_logprobs is not None and self._params.logprobs is not None:
                tokens = self._prompt_tokens(output.prompt_logprobs) + tokens
        if self._ids is not None:
            self._ids += output.new_ids[: delta.used]
        if self._prompt_top is not None and output.prompt_logprobs is not None:
            self._prompt_logprobs = [at_most(logprob, self._prompt_top) for logprob in output.prompt_logprobs]
        if self._message is not None and message is not None:
            text, reason = message.content, self._message.finish_reason(reason)
        # A token without text, such as a part of a character, makes a delta too: clients time tokens by chunks.
        silent = not output.new_ids or message is not None
        if silent and not (message or text or tokens or echoed) and reason is None:
            return None
        shown = ChoiceDelta(self.index, echoed + text, tokens, reason, stop_reason)
        if message is not None and (message.reasoning or message.calls):
            shown = msgspec.structs.replace(shown, reasoning=message.reasoning, calls=message.calls)
        return shown if self._ids is None and self._prompt_logprobs is None else self._with_extras(shown)

    @property
    def reasoning_tokens(self) -> int:
        return 0 if self._message is None else self._message.reasoning_tokens

    def _with_extras(self, delta: ChoiceDelta) -> ChoiceDelta:
        """The delta with the ids and prompt log probabilities gathered since the last one."""
        ids, self._ids = self._ids, None if self._ids is None else []
        prompt_ids, self._prompt_ids = self._prompt_ids, None
        logprobs, self._prompt_logprobs = self._prompt_logprobs, None
        return msgspec.structs.replace(delta, token_ids=ids or (), prompt_ids=prompt_ids, prompt_logprobs=logprobs)

    def _token(self, offset: int) -> TokenText:
        logprob = self._logprobs.popleft()
        return TokenText(logprob.token_id, logprob, len(self._shown) + offset)

    def _prompt_tokens(self, logprobs: Sequence[TokenLogprob | None]) -> list[TokenText]:
        cut = [at_most(logprob, self._params.logprobs or 0) for logprob in logprobs]
        return [
            TokenText(token_id, logprob, offset)
            for token_id, logprob, offset in zip(self.prompt.ids, cut, self.prompt.offsets, strict=True)
        ]


def at_most(logprob: TokenLogprob | None, top: int) -> TokenLogprob | None:
    """The log probability with `top` alternatives at most. The engine reports as many as the request needs anywhere."""
    return None if logprob is None else msgspec.structs.replace(logprob, top=logprob.top[:top])


STOP_REASON = "repetition_detected"


class RepetitionDetector:
    """Watches the tokens of one answer."""

    def __init__(self, rule: RepetitionRule, min_tokens: int) -> None:
        """Repetitions among the first min_tokens tokens do not end the answer."""
        self._rule = rule
        self._min_tokens = min_tokens
        self._ids: list[int] = []

    def cut(self, output: EngineCoreOutput) -> tuple[EngineCoreOutput, bool]:
        """The output up to the token that completes a repetition, and whether there is one.

        A token that ends the answer anyway is not looked at: it ends the answer for its own reason.
        """
        for used, token_id in enumerate(output.new_ids, 1):
            self._ids.append(token_id)
            if used == len(output.new_ids) and output.finish_reason is not None:
                break
            if len(self._ids) >= self._min_tokens and repeats(self._ids, self._rule):
                logprobs = None if output.logprobs is None else output.logprobs[:used]
                kept = output.new_ids[:used]
                return msgspec.structs.replace(output, new_ids=kept, logprobs=logprobs, finish_reason="length"), True
        return output, False


def repeats(ids: Sequence[int], rule: RepetitionRule) -> bool:
    """Whether the last tokens are min_count times the same pattern, by vLLM's check_sequence_repetition."""
    sizes = range(max(1, rule.min_pattern_size), rule.max_pattern_size + 1)
    return any(_has_period(ids, size, size * rule.min_count) for size in sizes if size * rule.min_count <= len(ids))


def _has_period(ids: Sequence[int], period: int, length: int) -> bool:
    """Whether each of the last `length` tokens equals the one `period` before it, where both are among them."""
    return all(ids[-i] == ids[-i - period] for i in range(1, length - period + 1))
