"""Splits steps that run out of memory into parts, which are computed in order, with the same results."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from quire.engine.common.executor import PendingOutput
from quire.engine.common.request_params import SamplingParams
from quire.engine.common.scheduler_output import ModelRunnerOutput, ScheduledRequest, SchedulerOutput
from quire.engine.worker.device_memory import is_out_of_memory, release_cached_memory
from quire.engine.worker.input_batch import InputBatch
from quire.kernels.collective import Collective

log = logging.getLogger("quire.engine")

_STEPS_UNTIL_RETRY = 500
"""After this many split steps, a whole step is tried, because other programs may have freed memory."""


class StepSplitter:
    """Keeps the order of rows, because a row may read blocks that an earlier row writes in the same step."""

    def __init__(
        self,
        compute: Callable[[SchedulerOutput], PendingOutput],
        can_split: Callable[[ScheduledRequest], bool],
        steps_until_retry: int = _STEPS_UNTIL_RETRY,
    ) -> None:
        """`compute` may be called again for parts of a batch that ran out of memory."""
        self._compute = compute
        self._can_split = can_split
        self._steps_until_retry = steps_until_retry
        self._max_tokens: int | None = None
        """Steps of more tokens are split before they are computed. None: no limit."""
        self._num_split_steps = 0

    def launch(self, batch: SchedulerOutput) -> PendingOutput:
        """Raises the out-of-memory error if a part that cannot be split runs out of memory."""
        parts, outputs = [batch], list[PendingOutput]()
        while parts:
            part = parts.pop()
            smaller = split_batch(part, self._can_split) if self._exceeds_limit(part) else []
            if not smaller:
                try:
                    outputs.append(self._compute(part))
                    continue
                except Exception as error:
                    if not is_out_of_memory(error) or not (smaller := split_batch(part, self._can_split)):
                        raise
                    self._lower_limit(num_tokens(part), error)
                release_cached_memory()  # only now, because the error's traceback held the step's tensors
            parts += reversed(smaller)
        if len(outputs) == 1:
            return outputs[0]
        self._count_split_step()
        return _PendingParts(outputs)

    def _exceeds_limit(self, batch: SchedulerOutput) -> bool:
        return self._max_tokens is not None and num_tokens(batch) > self._max_tokens

    def _lower_limit(self, tokens: int, error: Exception) -> None:
        self._max_tokens, self._num_split_steps = max(tokens // 2, 1), 0
        log.warning(
            "a step of %d tokens ran out of memory, so steps are split into parts of at most %d tokens, which is "
            "slower; a lower --gpu-memory-utilization or --max-num-batched-tokens avoids it (%s)",
            tokens,
            self._max_tokens,
            (str(error).splitlines() or [""])[0],
        )

    def _count_split_step(self) -> None:
        self._num_split_steps += 1
        if self._num_split_steps >= self._steps_until_retry:
            self._max_tokens = None


def make_step_splitter(
    compute: Callable[[SchedulerOutput], PendingOutput], slots: InputBatch, group: Collective | None
) -> StepSplitter | None:
    """Returns None if a step cannot be repeated, because its first layers may have advanced recurrent states, or
    because other ranks (`group`) compute it too.
    """
    if any(slots.recurrent_states) or group is not None:
        return None

    def can_split(row: ScheduledRequest) -> bool:
        """False for pooling, and for images, whose tokens may attend to each other."""
        new_request = slots.get_slot_request(row.slot).new_request
        return not new_request.spans and isinstance(new_request.params, SamplingParams)

    return StepSplitter(compute, can_split)


@dataclass(frozen=True, slots=True)
class _PendingParts:
    outputs: Sequence[PendingOutput]

    def sample_tokens(self) -> None:
        for each in self.outputs:
            each.sample_tokens()

    def result(self) -> ModelRunnerOutput:
        return merge_outputs([each.result() for each in self.outputs])


def num_tokens(batch: SchedulerOutput) -> int:
    return sum(row.num_tokens for row in batch.scheduled_requests)


def split_batch(batch: SchedulerOutput, can_split: Callable[[ScheduledRequest], bool]) -> list[SchedulerOutput]:
    """If there is a single row that cannot be split, returns one part without the row's draft tokens, or nothing if it
    has none.
    """
    first: list[ScheduledRequest] = []
    rest = list(batch.scheduled_requests)
    num_left = num_tokens(batch) // 2
    while rest and rest[0].num_tokens <= num_left:
        first.append(rest.pop(0))
        num_left -= first[-1].num_tokens
    count = min(num_left, rest[0].num_tokens - 1 - len(rest[0].draft_token_ids)) if rest else 0
    if count > 0 and can_split(rest[0]):
        head, rest[0] = split_row(rest[0], count)
        first.append(head)
    elif not first and len(rest) > 1:
        first.append(rest.pop(0))
    if first and rest:
        return [_with_rows(batch, first), _with_rows(batch, rest)]
    if len(rest) == 1 and (num_drafts := len(rest[0].draft_token_ids)):
        # The output is the same as if no draft token was accepted.
        count = rest[0].num_tokens - num_drafts
        return [_with_rows(batch, [msgspec.structs.replace(rest[0], num_tokens=count, draft_token_ids=[])])]
    return []


def split_row(row: ScheduledRequest, count: int) -> tuple[ScheduledRequest, ScheduledRequest]:
    replace = msgspec.structs.replace
    return (
        replace(row, num_tokens=count, should_sample=False, draft_token_ids=[]),
        replace(row, start=row.start + count, num_tokens=row.num_tokens - count, new_block_ids=[]),
    )


def _with_rows(batch: SchedulerOutput, rows: list[ScheduledRequest]) -> SchedulerOutput:
    return msgspec.structs.replace(batch, scheduled_requests=rows)


def merge_outputs(parts: Sequence[ModelRunnerOutput]) -> ModelRunnerOutput:
    """Only the log probabilities of a prompt may come from several parts."""
    merged = ModelRunnerOutput({})
    for part in parts:
        for name in ("token_ids", "logprobs", "errors", "vectors"):
            getattr(merged, name).update(getattr(part, name))
        for request_id, logprobs in part.prompt_logprobs.items():
            merged.prompt_logprobs.setdefault(request_id, []).extend(logprobs)
    return msgspec.structs.replace(merged, used_cuda_graph=all(part.used_cuda_graph for part in parts))
