from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request

from quire.engine.client.engine_client import EngineClient
from quire.engine.client.output_stream import OutputSource
from quire.engine.common.errors import InvalidRequest
from quire.engine.common.types import EngineCoreRequest
from quire.server.access.authentication import owner_of
from quire.server.access.memory_lease import grow_request_lease, lease_of
from quire.server.config import ServerConfig
from quire.server.durability.answer_pins import (
    ComputeIdentity,
    ResumedCall,
    all_compute_fingerprints,
    pin_identity,
    resume_conflict,
)
from quire.server.durability.background import Background, RunningAnswer
from quire.server.durability.event_ids import EventIdWriter
from quire.server.durability.progress import CallProgress
from quire.server.durability.resumable_calls import (
    IDEMPOTENCY_HEADER,
    KEEP_ALIVE_HEADER,
    RESUMABLE_PATHS,
    RESUMED_SCOPE_KEY,
    ResumableCalls,
    parse_stream_grace_header,
    still_answering_error,
)
from quire.server.durability.resumable_outputs import ResumableOutputs, known_progress
from quire.server.generation.generation import Generation, RunningGeneration
from quire.server.generation.resolved_request import AnswerIdentity, GenerationRequest
from quire.server.generation.response_writers.answer_writer import AnswerWriter
from quire.server.protocol.request_bodies import IGNORED_PARAMS_HEADER, ignored_params_header

STREAM_ID = "X-Stream-Id"
"""Header with a resumable stream's id, for GET /v1/streams/{id}."""
COMPUTED_BY = "X-Computed-By"
"""Fingerprints of everything that has computed the stream, if there are several."""


class DurableRequest(ABC):
    """The pipeline's stations call these methods in this order."""

    def __init__(self, request: Request, stream_grace: float) -> None:
        """`stream_grace`: maximum seconds that a stream continues without its reader; 0 without a data directory."""
        self._request = request
        self._stream_grace = stream_grace

    @property
    def has_idempotency_key(self) -> bool:
        return IDEMPOTENCY_HEADER in self._request.headers

    @property
    def keeps_body(self) -> bool:
        return False

    @property
    def repeats_stored_response(self) -> bool:
        """True if the Idempotency-Key belongs to a stored background response."""
        return False

    @property
    def is_restart(self) -> bool:
        """True if the request resumes a journaled call."""
        return False

    @property
    def can_restart(self) -> bool:
        return False

    def keep_body(self, chunks: Sequence[bytes]) -> None:  # noqa: B027 - nothing, if it is not journaled
        """Raises the errors of MemoryLease.grow_lease."""

    @abstractmethod
    async def identify(self, resolved: GenerationRequest, fresh: AnswerIdentity) -> AnswerIdentity:
        """Returns `fresh`, or a resumed answer's journaled identity. Raises HTTPException and InvalidRequest."""

    def reader_grace_seconds(self, resolved: GenerationRequest) -> float:
        """Returns 0 without the header. Raises InvalidRequest if it is invalid or the stream cannot be resumed."""
        if (header_value := self._request.headers.get(KEEP_ALIVE_HEADER)) is None:
            return 0.0
        seconds = parse_stream_grace_header(header_value, self._stream_grace)
        if seconds and not (resolved.stream and resolved.answer_identity.resumable):
            raise InvalidRequest(f"{KEEP_ALIVE_HEADER}: only for a stream that can be resumed", param=KEEP_ALIVE_HEADER)
        return seconds

    def submit(
        self, client: EngineClient, resolved: GenerationRequest, requests: Sequence[EngineCoreRequest]
    ) -> OutputSource:
        """Raises EngineError if the engine has ended."""
        return client.submit(requests, resolved.answer_id)

    async def persist(self, resolved: GenerationRequest, running: RunningGeneration[Generation]) -> None:  # noqa: B027 - as above
        """Call this before the first event is sent. Closes `running` before it raises an error."""

    def number_events(self, writer: AnswerWriter, resolved: GenerationRequest) -> AnswerWriter:
        """The returned writer's events have ids from which a client can resume."""
        return writer

    def stream_headers(self, resolved: GenerationRequest) -> Mapping[str, str]:
        return {}

    def keep_streaming_without_reader(
        self,
        writer: AnswerWriter,
        running: RunningGeneration[Generation],
        events: AsyncGenerator[bytes],
        seconds: float,
    ) -> tuple[AsyncGenerator[bytes], Callable[[], None]]:
        """Returns events that continue for `seconds` after their reader has left. The caller must call the returned
        function when the reader leaves.
        """
        return events, running.close

    def mark_stored_unfinished(self, resolved: GenerationRequest) -> None:  # noqa: B027 - as above
        """Call this when the response has been stored before its end."""

    async def forget_stored_response(self, resolved: GenerationRequest) -> None:  # noqa: B027 - as above
        """Call this when the response has been stored with its end. Its Idempotency-Key stays known."""

    async def check_not_answering(self, resolved: GenerationRequest) -> None:  # noqa: B027 - as above
        """Raises HTTPException while another request computes the answer."""

    async def forget_failed_answer(self, resolved: GenerationRequest) -> None:  # noqa: B027 - as above
        """Frees the Idempotency-Key, so that the request can be repeated. Call this if the answer failed before any of
        it was sent.
        """

    def take_over_error(self) -> HTTPException | None:
        return still_answering_error() if self.has_idempotency_key else None


class NullDurableRequest(DurableRequest):
    def __init__(self, request: Request, stream_grace: float, *, strict: bool) -> None:
        """If `strict`, fields and headers without effect are rejected."""
        super().__init__(request, stream_grace)
        self._strict = strict

    async def identify(self, resolved: GenerationRequest, fresh: AnswerIdentity) -> AnswerIdentity:
        if not self.has_idempotency_key:
            return fresh
        ignored = ignored_params_header(["Idempotency-Key"], self._strict)
        return replace(fresh, ignored_headers=ignored[IGNORED_PARAMS_HEADER])


class JournaledRequest(DurableRequest):
    def __init__(
        self,
        request: Request,
        calls: ResumableCalls,
        background: Background,
        owner: str,
        compute: Callable[[], ComputeIdentity],
        stream_grace: float,
    ) -> None:
        super().__init__(request, stream_grace)
        self._calls = calls
        self._background = background
        self._owner = owner
        self._compute = compute
        self._body: bytes | None = None
        """None before the body is read, or if the request must not be journaled."""
        self._earlier_progress: CallProgress | None = None
        self._outputs: ResumableOutputs | None = None

    @property
    def resumed(self) -> ResumedCall | None:
        resumed: ResumedCall | None = self._request.scope.get(RESUMED_SCOPE_KEY)
        return resumed

    @property
    def keeps_body(self) -> bool:
        return True

    @property
    def repeats_stored_response(self) -> bool:
        return self.resumed is not None and not self.resumed.attempt

    @property
    def is_restart(self) -> bool:
        return self.resumed is not None and bool(self.resumed.attempt)

    def keep_body(self, chunks: Sequence[bytes]) -> None:
        grow_request_lease(self._request.scope, sum(map(len, chunks)))
        self._body = b"".join(chunks)

    async def identify(self, resolved: GenerationRequest, fresh: AnswerIdentity) -> AnswerIdentity:
        assert self._body is not None, "read first"
        fields = resolved.responses_fields
        if fields is not None and fields.continues_unstored_response:  # such an answer could never be computed again
            self._body = None
            return fresh
        if fields is not None and fields.conversation_id is not None:  # the conversation would change before a retry
            if self.has_idempotency_key:
                message = "Idempotency-Key: cannot be combined with a conversation, which each answer changes"
                raise InvalidRequest(message, param=IDEMPOTENCY_HEADER)
            self._body = None
            return fresh
        resumed = self.resumed
        if resumed is None:
            resumed = await self._calls.claim_key_or_resume(
                self._request, self._owner, self._body, stream=resolved.stream
            )
            self._request.scope[RESUMED_SCOPE_KEY] = resumed
        if resumed is not None and (reason := resume_conflict(resumed, resolved, self._compute())) is not None:
            if not resumed.call.pins.background:
                raise HTTPException(409, reason)
            resumed = replace(resumed, call=msgspec.structs.replace(resumed.call, progress=CallProgress()))
        self._earlier_progress = None if resumed is None else resumed.call.progress
        return pin_identity(
            resolved,
            fresh,
            resumed,
            has_key=self.has_idempotency_key or (resumed is not None and resumed.call.key is not None),
            is_journaled=self._compute().deterministic or self._calls.has_write_ahead_log,
        )

    def _is_journaled(self, resolved: GenerationRequest) -> bool:
        return self._body is not None and (resolved.answer_identity.resumable or self.has_idempotency_key)

    def submit(
        self, client: EngineClient, resolved: GenerationRequest, requests: Sequence[EngineCoreRequest]
    ) -> OutputSource:
        if not self._is_journaled(resolved):
            return super().submit(client, resolved, requests)
        needs_logprobs = resolved.logprobs or resolved.prompt_logprobs is not None
        progress = known_progress(self._earlier_progress, len(requests), needs_logprobs=needs_logprobs)
        self._outputs = ResumableOutputs(
            client, requests, resolved.answer_id, progress, splits_tokens=resolved.answer_identity.resumable
        )
        return self._outputs

    async def persist(self, resolved: GenerationRequest, running: RunningGeneration[Generation]) -> None:
        if not self._is_journaled(resolved):
            return
        assert self._body is not None
        body, self._body = self._body, None
        journal_call = self._calls.journal_call
        try:
            await journal_call(self._request, body, self._owner, resolved, self._compute(), running, self._outputs)
        except BaseException:
            running.close()
            raise

    def number_events(self, writer: AnswerWriter, resolved: GenerationRequest) -> AnswerWriter:
        resumed, outputs = self.resumed, self._outputs
        if not resolved.answer_identity.resumable or outputs is None:
            return writer
        seen = () if resumed is None else resumed.seen_events
        may_differ = len(self._computed_by) > 1 or not self._compute().deterministic
        return EventIdWriter(writer, resolved, seen, (lambda: outputs.is_replaying) if may_differ else None)

    @property
    def _computed_by(self) -> tuple[str, ...]:
        return () if self.resumed is None else all_compute_fingerprints(self.resumed, self._compute())

    def stream_headers(self, resolved: GenerationRequest) -> Mapping[str, str]:
        if not resolved.answer_identity.resumable:
            return {}
        headers = {STREAM_ID: resolved.id}
        if len(self._computed_by) > 1:
            headers[COMPUTED_BY] = ", ".join(self._computed_by)
        return headers

    async def forget_failed_answer(self, resolved: GenerationRequest) -> None:
        if self.has_idempotency_key:
            await self._calls.forget_call(self._owner, resolved.id)

    def keep_streaming_without_reader(
        self,
        writer: AnswerWriter,
        running: RunningGeneration[Generation],
        events: AsyncGenerator[bytes],
        seconds: float,
    ) -> tuple[AsyncGenerator[bytes], Callable[[], None]]:
        key = (self._owner, running.generation.request.id)
        lease = lease_of(self._request.scope).move_to_new_lease()

        async def release_lease() -> None:
            lease.release_lease()

        answer = RunningAnswer(writer, running.close, [])
        self._background.start_answer(key, answer, events, release_lease)
        on_reader_left = partial(self._background.schedule_close_after_reader_left, key, answer, seconds)
        return answer.follow_events(-1), on_reader_left

    @property
    def can_restart(self) -> bool:
        return True

    def mark_stored_unfinished(self, resolved: GenerationRequest) -> None:
        self._calls.mark_stored_unfinished(self._owner, resolved.id)

    async def forget_stored_response(self, resolved: GenerationRequest) -> None:
        await self._calls.forget_call(self._owner, resolved.id, with_key=False)

    async def check_not_answering(self, resolved: GenerationRequest) -> None:
        await self._calls.check_not_answering(self._owner, resolved.id)


def make_durable_request(
    request: Request,
    calls: ResumableCalls | None,
    background: Background,
    compute: Callable[[], ComputeIdentity],
    config: ServerConfig,
) -> DurableRequest:
    """`calls` is None without a data directory."""
    if calls is None or request.scope["path"] not in RESUMABLE_PATHS:
        return NullDurableRequest(request, 0.0 if calls is None else config.stream_grace, strict=config.strict)
    return JournaledRequest(request, calls, background, owner_of(request), compute, config.stream_grace)
