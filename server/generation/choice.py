"""One choice of an answer in the making: the engine's outputs in, deltas out; and the job that it is part of."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from quire.engine.text.detokenizer import TextStream
from quire.engine.text.tokenizer import Tokenizer
from quire.engine.types import FinishReason, Request, RequestOutput, SamplingParams, TokenLogprob
from quire.server.generation.message import MessageDelta, MessageFormat, MessageParser
from quire.server.generation.prompts import Prompt
from quire.server.generation.repetition import STOP_REASON, RepetitionDetector
from quire.server.generation.tools.sink import CallDelta
from quire.server.observe.metrics import Metrics
from quire.server.protocol.common import GenerationBody


@dataclass(frozen=True, slots=True)
class Job:
    """What to generate: n choices for each prompt. Choice i of prompt p has index p * n + i."""

    id: str
    body: GenerationBody
    """As it came; what has been decided since stands below."""
    prompts: Sequence[Prompt]
    params: SamplingParams
    echo: bool = False
    """Answers begin with their prompt."""
    echo_only: bool = False
    """Nothing follows it: the one token that the engine cannot do without is dropped."""
    keep: int | None = None
    """Whole answers have so many choices for each prompt, the most likely ones; None: all."""
    message: MessageFormat | None = None
    """How to read reasoning and tool calls out of the answers; None: all of it is content."""
    cache_salt: str = ""
    tenant: str = ""
    weight: float = 1.0

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.params.n

    def request(self, id: str, prompt_ids: list[int], params: SamplingParams, seed: int) -> Request:
        """For one sequence."""
        return Request(
            id=id,
            prompt_ids=prompt_ids,
            params=params,
            seed=seed,
            cache_salt=self.cache_salt,
            priority=self.body.priority,
            tenant=self.tenant,
            weight=self.weight,
        )


class TokenText(msgspec.Struct, frozen=True):
    """A token of an answer with its log probability; None for the first token of an echoed prompt."""

    token_id: int
    logprob: TokenLogprob | None
    offset: int
    """Where it begins, in characters of the choice's text."""


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
    """What was generated since the last delta, the token that ended the answer included; if asked for."""
    prompt_ids: Sequence[int] | None = None
    """With a choice's first delta, if token ids were asked for."""
    prompt_logprobs: Sequence[TokenLogprob | None] | None = None
    """With a choice's first delta, if asked for: None for the first token."""
    reasoning: str = ""
    calls: tuple[CallDelta, ...] = ()


class Choice:
    """Push the engine's outputs, get the deltas."""

    def __init__(self, index: int, prompt: Prompt, job: Job, tokenizer: Tokenizer, ended: list[int]) -> None:
        """`ended`: the lengths of the prompt's choices that have ended, one list for all of them."""
        params, body = job.params, job.body
        self._ended = ended
        self.index = index
        self.completion_tokens = 0
        self.cached_tokens = 0
        self.logprob_sum = 0.0
        self.finished = False
        self.first_at: float | None = None
        self.last_at = 0.0
        self._began = time.monotonic()
        self._params = params
        self._prompt = prompt
        self._tokenizer = tokenizer
        self._echo = job.echo
        self._echo_only = job.echo_only
        self._text = TextStream(
            tokenizer,
            prompt_ids=prompt.ids,
            stop=params.stop,
            include_stop=params.include_stop_str_in_output,
            skip_special_tokens=params.skip_special_tokens,
            shown_ids=frozenset() if job.message is None else job.message.shown_ids(tokenizer),
            min_tokens=params.min_tokens,
        )
        self._message = None if job.message is None else MessageParser(job.message)
        rule = body.repetition_detection
        self._repetition = None if rule is None else RepetitionDetector(rule, params.min_tokens)
        self._logprobs: deque[TokenLogprob] = deque()
        self._base = len(prompt.text) if job.echo else 0
        self._ids: list[int] | None = [] if body.return_token_ids else None
        self._prompt_ids = prompt.ids if body.return_token_ids else None
        self._prompt_logprobs: Sequence[TokenLogprob | None] | None = None
        self._prompt_top = body.prompt_logprobs

    def push(self, output: RequestOutput) -> ChoiceDelta | None:
        """The delta of one output; None when it shows nothing yet."""
        if self._echo_only:
            ended: FinishReason | None = None if output.finish_reason is None else "length"
            output = msgspec.structs.replace(output, new_ids=[], logprobs=None, finish_reason=ended, stop_reason=None)
        output, repeats = (output, False) if self._repetition is None else self._repetition.cut(output)
        reason: str | None = output.finish_reason
        stop_reason: int | str | None = output.stop_reason
        delta = self._text.push_output(output)
        self.completion_tokens += delta.used
        if repeats:
            reason, stop_reason = "repetition", STOP_REASON
        if delta.stop_string is not None:
            reason, stop_reason = "stop", delta.stop_string
        self.cached_tokens = max(self.cached_tokens, output.cached_tokens)
        text, tokens = delta.text, []
        if output.logprobs is not None:
            self._logprobs.extend(output.logprobs[: delta.used])
            self.logprob_sum += sum(logprob.logprob for logprob in output.logprobs[: delta.used])
        if self._logprobs:
            tokens = [self._token(offset) for offset in delta.offsets]
        if self._echo:
            self._echo = False
            text = self._prompt.text + text
            if output.prompt_logprobs is not None and self._params.logprobs is not None:
                tokens = self._prompt_tokens(output.prompt_logprobs) + tokens
        if self._ids is not None:
            self._ids += output.new_ids[: delta.used]
        if self._prompt_top is not None and output.prompt_logprobs is not None:
            self._prompt_logprobs = [at_most(logprob, self._prompt_top) for logprob in output.prompt_logprobs]
        message = MessageDelta(text)
        if self._message is not None:
            message = self._message.push(text, delta.offsets, final=reason is not None)
            reason = self._message.finish_reason(reason)
        # A token without text, such as a part of a character, is told of all the same: clients time tokens by chunks.
        silent = not output.new_ids or self._message is not None
        if silent and not message and not tokens and reason is None:
            return None
        shown = ChoiceDelta(self.index, message.content, tokens, reason, stop_reason)
        if message.reasoning or message.calls:
            shown = msgspec.structs.replace(shown, reasoning=message.reasoning, calls=message.calls)
        return self._with_extras(shown)

    def end(self, reason: str, metrics: Metrics) -> None:
        self.finished = True
        self._ended.append(self.completion_tokens)
        metrics.finished(
            reason,
            seconds=time.monotonic() - self._began,
            decode_seconds=0.0 if self.first_at is None else self.last_at - self.first_at,
            prompt_tokens=len(self._prompt.ids),
            ended=self._ended,
            params=self._params,
        )

    @property
    def reasoning_tokens(self) -> int:
        return 0 if self._message is None else self._message.reasoning_tokens

    def _with_extras(self, delta: ChoiceDelta) -> ChoiceDelta:
        """The delta with what has gathered since the last one."""
        if self._ids is None and self._prompt_logprobs is None:
            return delta
        ids, self._ids = self._ids, None if self._ids is None else []
        prompt_ids, self._prompt_ids = self._prompt_ids, None
        logprobs, self._prompt_logprobs = self._prompt_logprobs, None
        return msgspec.structs.replace(delta, token_ids=ids or (), prompt_ids=prompt_ids, prompt_logprobs=logprobs)

    def _token(self, offset: int) -> TokenText:
        logprob = self._logprobs.popleft()
        return TokenText(logprob.token_id, logprob, self._base + offset)

    def _prompt_tokens(self, logprobs: Sequence[TokenLogprob | None]) -> list[TokenText]:
        stream = TextStream(self._tokenizer, skip_special_tokens=self._params.skip_special_tokens)
        offsets = stream.push(self._prompt.ids, final=True).offsets
        cut = [at_most(logprob, self._params.logprobs or 0) for logprob in logprobs]
        return [
            TokenText(token_id, logprob, offset)
            for token_id, logprob, offset in zip(self._prompt.ids, cut, offsets, strict=True)
        ]


def at_most(logprob: TokenLogprob | None, top: int) -> TokenLogprob | None:
    """With no more than `top` of the most likely tokens beside it: the engine reports the most that anything needs."""
    return None if logprob is None else msgspec.structs.replace(logprob, top=logprob.top[:top])
