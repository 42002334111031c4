from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Protocol

import msgspec

from quire.engine.client.engine_client import EngineClient
from quire.engine.client.output_stream import Versions, WrappedOutputs, add_tokens
from quire.engine.common.types import EngineCoreOutput, EngineCoreRequest
from quire.server.durability.progress import CallProgress, ChoiceFinish


class TokenJournal(Protocol):
    """Records tokens before they are sent. A call's choices have consecutive numbers."""

    def log_tokens(
        self, number: int, choice: int, position: int, token_ids: Sequence[int], finish: ChoiceFinish | None
    ) -> None:
        """`number` belongs to the call's first choice. `position` is the number of earlier tokens of the choice."""

    def log_step(self, rows: Sequence[int]) -> None:
        """`rows` has three numbers per token: choice number, position and token id."""


class ResumableOutputs(WrappedOutputs):
    """Yields an earlier attempt's tokens first. `progress` grows with each computed token, even if nobody reads it."""

    def __init__(
        self,
        client: EngineClient,
        requests: Sequence[EngineCoreRequest],
        answer_id: str,
        progress: CallProgress,
        *,
        splits_tokens: bool,
    ) -> None:
        """If `splits_tokens`, yields tokens one by one, so that events are reproducible. Raises EngineError if the
        engine is gone.
        """
        self.progress = progress
        self._splits_tokens = splits_tokens
        self._is_resumed = any(cached >= 0 for cached in progress.cached) or progress.num_tokens > 0
        self._client = client
        self._index_by_id = {request.id: index for index, request in enumerate(requests)}
        self._known_counts = [len(ids) for ids in progress.ids]
        self._pending = deque([output] for request in requests for output in self._outputs_of_progress(request.id))
        self._is_replaying = False
        self._num_replayed = len(self._pending)
        self._all_cached_counts_known = False
        is_open = [end is None for end in progress.ends]
        open_requests = [
            msgspec.structs.replace(request, emitted_ids=[*progress.ids[index]])
            for index, request in enumerate(requests)
            if is_open[index]
        ]
        growing_ids = [ids for ids, is_choice_open in zip(progress.ids, is_open, strict=True) if is_choice_open]
        self._needs_engine = bool(open_requests)
        self._stream = client.submit(open_requests, answer_id, growing_ids)
        self._stream.ended = self._record_choice_end
        self._journal: TokenJournal | None = None
        self._first_journal_number = 0
        super().__init__(self._stream)

    def _outputs_of_progress(self, request_id: str) -> list[EngineCoreOutput]:
        index = self._index_by_id[request_id]
        cached, end = self.progress.cached[index], self.progress.ends[index]
        outputs = [EngineCoreOutput(request_id, [id], cached_tokens=cached) for id in self.progress.ids[index]]
        if end is not None:
            has_last_token = bool(outputs) and end.came_with_token
            last = outputs.pop() if has_last_token else EngineCoreOutput(request_id, [], cached_tokens=cached)
            outputs.append(msgspec.structs.replace(last, finish_reason=end.finish_reason, stop_reason=end.stop_reason))
        return outputs

    @property
    def is_replaying(self) -> bool:
        return self._is_replaying

    @property
    def needs_engine(self) -> bool:
        return self._needs_engine

    def record_versions(self) -> dict[str, Versions]:
        """Counts the tokens of earlier attempts as computed by the current weights."""
        versions = super().record_versions()
        for request_id, index in self._index_by_id.items():
            add_tokens(versions.setdefault(request_id, []), self.weights_version, self._known_counts[index])
        return versions

    async def __anext__(self) -> list[EngineCoreOutput]:
        self._is_replaying = self._num_replayed > 0
        if self._is_replaying:
            self._num_replayed -= 1
        while not self._pending:
            self._pending.extend(self._split_outputs(await super().__anext__()))
        return self._pending.popleft()

    def take_outputs(self, outputs: list[EngineCoreOutput]) -> None:
        for some in self._split_outputs(outputs):
            super().take_outputs(some)

    def _split_outputs(self, outputs: list[EngineCoreOutput]) -> Iterator[list[EngineCoreOutput]]:
        if not self._splits_tokens or (self._all_cached_counts_known and len(outputs) == 1 == len(outputs[0].new_ids)):
            yield outputs
            return
        for output in outputs:
            cached = self._record_first_cached_tokens(output)
            if output.cached_tokens != cached:
                output = msgspec.structs.replace(output, cached_tokens=cached)
            for single in (output,) if len(output.new_ids) < 2 else _split_into_single_tokens(output):
                yield [single]

    def _record_first_cached_tokens(self, output: EngineCoreOutput) -> int:
        cached_counts, index = self.progress.cached, self._index_by_id[output.id]
        if cached_counts[index] < 0:
            cached_counts[index] = output.cached_tokens
            self._all_cached_counts_known = not self._is_resumed and min(cached_counts) >= 0
        return cached_counts[index]

    def attach_journal(self, journal: TokenJournal, first_number: int, known_counts: Sequence[int]) -> None:
        """Journals the tokens of each choice that follow its first `known_counts` tokens."""
        self._journal, self._first_journal_number = journal, first_number
        for (id, index), count in zip(self._index_by_id.items(), known_counts, strict=True):
            ids, end = self.progress.ids[index], self.progress.ends[index]
            if len(ids) > count or end is not None:
                journal.log_tokens(first_number, index, count, ids[count:], end)
            self._client.keep(id, first_number + index, journal.log_step)

    def _record_choice_end(self, output: EngineCoreOutput, with_tokens: bool) -> None:
        index, end = self._index_by_id[output.id], None
        if output.finish_reason == "stop" or output.finish_reason == "length":
            self.progress.ends[index] = end = ChoiceFinish(output.finish_reason, output.stop_reason, with_tokens)
        if self._journal is not None:
            position = len(self.progress.ids[index]) - len(output.new_ids)
            self._journal.log_tokens(self._first_journal_number, index, position, output.new_ids, end)

    def close(self) -> None:
        super().close()
        for output in self._stream.unread:  # a later attempt must report the same cached count
            self._record_first_cached_tokens(output)
        self._stream.ended = None  # frees memory without garbage collection


def known_progress(earlier: CallProgress | None, num_choices: int, *, needs_logprobs: bool) -> CallProgress:
    """With `needs_logprobs` the result has no tokens, because the journal has no log probabilities."""
    if earlier is None or not earlier.ids:
        return CallProgress([[] for _ in range(num_choices)], [-1] * num_choices, [None] * num_choices)
    if needs_logprobs:
        return CallProgress([[] for _ in range(num_choices)], list(earlier.cached), [None] * num_choices)
    if not earlier.ends:  # older journals have no ends; recomputing the last token brings the end
        return CallProgress([ids[:-1] for ids in earlier.ids], list(earlier.cached), [None] * num_choices)
    return earlier.copy()


def _split_into_single_tokens(output: EngineCoreOutput) -> list[EngineCoreOutput]:
    logprobs = output.logprobs
    singles = [
        EngineCoreOutput(output.id, [id], None if logprobs is None else [logprobs[at]])
        for at, id in enumerate(output.new_ids[:-1])
    ]
    first = msgspec.structs.replace(
        singles[0],
        prompt_logprobs=output.prompt_logprobs,
        cached_tokens=output.cached_tokens,
        prefix=output.prefix,
    )
    last = msgspec.structs.replace(
        output, new_ids=output.new_ids[-1:], logprobs=logprobs and logprobs[-1:], prompt_logprobs=None
    )
    return [first, *singles[1:], last]
