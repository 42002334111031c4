"""One call's way through the engine: prompts and parameters in, text deltas out, step by step.

Streamed and whole answers share it: a whole answer is `fold` of the deltas.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from engine.client import EngineClient
from engine.detokenizer import TextStream
from engine.errors import EngineError
from engine.seeds import choice_seed
from engine.tokenizer import Tokenizer
from engine.types import FinishReason, Request, RequestOutput, SamplingParams, TokenLogprob
from server.deadlines import Deadlines
from server.message import MessageDelta, MessageFormat, MessageParser
from server.metrics import Metrics
from server.prompts import Prompt
from server.repetition import STOP_REASON, RepetitionDetector, RepetitionRule
from server.tools.sink import CallDelta


@dataclass(frozen=True, slots=True)
class TokenText:
    """A token of an answer with its log probability; None for the first token of an echoed prompt."""

    token_id: int
    logprob: TokenLogprob | None
    offset: int
    """Where it begins, in characters of the choice's text."""


@dataclass(frozen=True, slots=True)
class ChoiceDelta:
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


@dataclass(slots=True)
class Answer:
    """A whole choice: the fold of its deltas."""

    index: int
    pieces: list[str] = field(default_factory=list)
    tokens: list[TokenText] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] = field(default_factory=list)
    prompt_ids: Sequence[int] | None = None
    prompt_logprobs: Sequence[TokenLogprob | None] | None = None
    reasoning_pieces: list[str] = field(default_factory=list)
    calls: list[CallDelta] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @property
    def reasoning(self) -> str:
        return "".join(self.reasoning_pieces)


@dataclass(frozen=True, slots=True)
class Usage:
    """Counts of one call, in tokens."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    reasoning_tokens: int | None = None
    """None where no reasoning is looked for."""

    def as_dict(self) -> dict[str, object]:
        counts: dict[str, object] = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }
        if self.reasoning_tokens is not None:
            counts["completion_tokens_details"] = {"reasoning_tokens": self.reasoning_tokens}
        return counts


@dataclass(frozen=True, slots=True)
class Job:
    """What to generate: n choices for each prompt. Choice i of prompt p has index p * n + i."""

    id: str
    prompts: Sequence[Prompt]
    params: SamplingParams
    echo: bool = False
    """Answers begin with their prompt."""
    echo_only: bool = False
    """Nothing follows it: the one token that the engine cannot do without is dropped."""
    return_token_ids: bool = False
    prompt_logprobs: int | None = None
    """So many beside each prompt token's own go with the first delta; None: none do."""
    keep: int | None = None
    """Whole answers have so many choices for each prompt, the most likely ones; None: all."""
    repetition: RepetitionRule | None = None
    length_penalty: float | None = None
    """Of beam search; None: the answers are sampled."""
    timeout: float | None = None
    """Seconds in which the answer must be complete."""
    queue_timeout: float | None = None
    """Seconds in which any choice must have a token."""
    cache_salt: str = ""
    priority: int = 0
    tenant: str = ""
    weight: float = 1.0
    message: MessageFormat | None = None
    """How to read reasoning and tool calls out of the answers; None: all of it is content."""


class Choice:
    """One choice in the making: the engine's outputs in, deltas out."""

    def __init__(self, index: int, prompt: Prompt, job: Job, tokenizer: Tokenizer) -> None:
        params = job.params
        self.index = index
        self.completion_tokens = 0
        self.cached_tokens = 0
        self.logprob_sum = 0.0
        self.finished = False
        self.first_at: float | None = None
        self.last_at = 0.0
        self._prompt = prompt
        self._tokenizer = tokenizer
        self._echo = job.echo
        self._echo_only = job.echo_only
        self._echo_logprobs = params.logprobs
        self._skip_special_tokens = params.skip_special_tokens
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
        self._repetition = None if job.repetition is None else RepetitionDetector(job.repetition, params.min_tokens)
        self._logprobs: deque[TokenLogprob] = deque()
        self._base = len(prompt.text) if job.echo else 0
        self._ids: list[int] | None = [] if job.return_token_ids else None
        self._prompt_ids = prompt.ids if job.return_token_ids else None
        self._prompt_logprobs: Sequence[TokenLogprob | None] | None = None
        self._prompt_top = job.prompt_logprobs

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
            if output.prompt_logprobs is not None and self._echo_logprobs is not None:
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
            shown = replace(shown, reasoning=message.reasoning, calls=message.calls)
        return self._with_extras(shown)

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
        return replace(delta, token_ids=ids or (), prompt_ids=prompt_ids, prompt_logprobs=logprobs)

    def _token(self, offset: int) -> TokenText:
        logprob = self._logprobs.popleft()
        return TokenText(logprob.token_id, logprob, self._base + offset)

    def _prompt_tokens(self, logprobs: Sequence[TokenLogprob | None]) -> list[TokenText]:
        stream = TextStream(self._tokenizer, skip_special_tokens=self._skip_special_tokens)
        offsets = stream.push(self._prompt.ids, final=True).offsets
        cut = [at_most(logprob, self._echo_logprobs or 0) for logprob in logprobs]
        return [
            TokenText(token_id, logprob, offset)
            for token_id, logprob, offset in zip(self._prompt.ids, cut, offsets, strict=True)
        ]


def at_most(logprob: TokenLogprob | None, top: int) -> TokenLogprob | None:
    """With no more than `top` of the most likely tokens beside it: the engine reports the most that anything needs."""
    return None if logprob is None else msgspec.structs.replace(logprob, top=logprob.top[:top])


class Generation:
    """A job that the engine works on. Iterate `deltas`; `close` ends it at any time."""

    def __init__(self, job: Job, client: EngineClient, tokenizer: Tokenizer, metrics: Metrics) -> None:
        """Submits the job. Raises EngineError when the engine is gone."""
        self._job = job
        self._metrics = metrics
        n = job.params.n
        single = msgspec.structs.replace(job.params, n=1)
        self._choices: dict[str, Choice] = {}
        requests = []
        for index in range(len(job.prompts) * n):
            prompt = job.prompts[index // n]
            request_id = f"{job.id}-{index}"
            self._choices[request_id] = Choice(index, prompt, job, tokenizer)
            requests.append(
                Request(
                    id=request_id,
                    prompt_ids=prompt.ids,
                    params=single,
                    seed=choice_seed(job.params.seed, index % n),
                    cache_salt=job.cache_salt,
                    priority=job.priority,
                    tenant=job.tenant,
                    weight=job.weight,
                )
            )
        self._cut_short = False
        self._started = time.monotonic()
        self._stream = client.submit(requests, job.id)
        self._deadlines = Deadlines(self._stream, timeout=job.timeout, queue_timeout=job.queue_timeout)

    @property
    def num_choices(self) -> int:
        return len(self._choices)

    @property
    def complete(self) -> bool:
        """Whether every choice came to its own end; false once closed before."""
        return not self._cut_short and all(choice.finished for choice in self._choices.values())

    @property
    def usage(self) -> Usage:
        """So far. A prompt counts once, however many choices continue it."""
        n = self._job.params.n
        firsts = [choice for choice in self._choices.values() if choice.index % n == 0]
        return Usage(
            prompt_tokens=sum(len(prompt.ids) for prompt in self._job.prompts),
            completion_tokens=sum(choice.completion_tokens for choice in self._choices.values()),
            cached_tokens=sum(choice.cached_tokens for choice in firsts),
            reasoning_tokens=self._reasoning_tokens,
        )

    @property
    def _reasoning_tokens(self) -> int | None:
        if self._job.message is None or self._job.message.reasoning is None:
            return None
        return sum(choice.reasoning_tokens for choice in self._choices.values())

    async def deltas(self) -> AsyncIterator[list[ChoiceDelta]]:
        """What each step added, at most one delta per choice; never an empty list. Ends when all choices have.

        Raises EngineError when the engine failed one of them, Timeout or QueueTimeout when it was late.
        """
        try:
            async for outputs in self._stream:
                now = time.monotonic()
                step = [delta for output in outputs if (delta := self._push(output, now)) is not None]
                if step:
                    yield step
        except EngineError:
            self._finish("error")
            raise
        finally:
            self.close()

    def _push(self, output: RequestOutput, now: float) -> ChoiceDelta | None:
        choice = self._choices[output.id]
        if choice.finished:  # closed while this output waited to be read
            return None
        if output.finish_reason == "error":
            self._end(choice, "error")
            raise EngineError(output.error or "the engine failed this request")
        delta = choice.push(output)
        if output.new_ids:
            if choice.first_at is None:
                choice.first_at = now
                self._deadlines.started()
                self._metrics.first_token(now - self._started)
            else:
                self._metrics.next_token(now - choice.last_at)
            choice.last_at = now
        if delta is not None and delta.finish_reason is not None:
            self._stream.abort(output.id, delta.finish_reason)  # does nothing when it was the engine that finished
            self._end(choice, delta.finish_reason)
        return delta

    def best(self, answers: Sequence[Answer]) -> list[Answer]:
        """The answers that the job keeps, for each prompt by mean log probability per token, indexed anew."""
        n = self._job.params.n
        keep = self._job.keep or n
        if keep == n:
            return list(answers)
        mean = {
            choice.index: choice.logprob_sum / max(1, choice.completion_tokens) for choice in self._choices.values()
        }
        kept: list[Answer] = []
        for first in range(0, len(answers), n):
            group = sorted(answers[first : first + n], key=lambda answer: -mean[answer.index])
            kept += group[:keep]
        return [replace(answer, index=index) for index, answer in enumerate(kept)]

    def _end(self, choice: Choice, reason: str) -> None:
        choice.finished = True
        self._metrics.finished(
            reason,
            seconds=time.monotonic() - self._started,
            decode_seconds=0.0 if choice.first_at is None else choice.last_at - choice.first_at,
            prompt_tokens=len(self._job.prompts[choice.index // self._job.params.n].ids),
            generation_tokens=choice.completion_tokens,
            params=self._job.params,
        )

    def close(self) -> None:
        """Abort what still runs; `deltas` ends. Does nothing the second time."""
        self._deadlines.cancel()
        self._stream.close()
        self._finish(self._deadlines.passed or "abort")

    def _finish(self, reason: str) -> None:
        """End what has not ended yet."""
        for choice in self._choices.values():
            if not choice.finished:
                self._cut_short = True
                self._end(choice, reason)


async def fold(steps: AsyncIterator[list[ChoiceDelta]]) -> list[Answer]:
    """The whole answers, by index."""
    answers: dict[int, Answer] = {}
    async for step in steps:
        for delta in step:
            answer = answers.setdefault(delta.index, Answer(delta.index))
            answer.pieces.append(delta.text)
            answer.tokens += delta.tokens
            answer.reasoning_pieces.append(delta.reasoning)
            answer.calls += delta.calls
            answer.finish_reason = delta.finish_reason
            answer.stop_reason = delta.stop_reason
            answer.token_ids += delta.token_ids
            answer.prompt_ids = answer.prompt_ids if delta.prompt_ids is None else delta.prompt_ids
            answer.prompt_logprobs = delta.prompt_logprobs or answer.prompt_logprobs
    return [answers[index] for index in sorted(answers)]
