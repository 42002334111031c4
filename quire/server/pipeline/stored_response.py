"""The last station for stored and background responses, which it also writes to the store."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from starlette.requests import Request
from starlette.responses import Response

from quire.server.access.admission import admission_of
from quire.server.access.memory_lease import grow_request_lease, lease_of
from quire.server.durability.background import RunningAnswer
from quire.server.durability.data_dir import DataDir
from quire.server.durability.durable_request import DurableRequest
from quire.server.generation.resolved_request import GenerationRequest
from quire.server.generation.response_writers.responses import ResponsesWriter
from quire.server.http.sse import EventStream
from quire.server.pipeline.answer import begin_generation
from quire.server.pipeline.write import do_nothing, stream_events
from quire.server.resolve.other_apis.history import ENDED_STATUSES, CachedResponse, WebSocketHistory
from quire.server.runtime.server_context import get_runtime, get_server_context
from quire.server.store.response_store import ObjectToStore, ObjectWithoutItems
from quire.server.store.write_retry import retry_until_written

RESPONSE_CACHE_SCOPE_KEY = "quire.response_cache"


class ResponseCache(Protocol):
    @property
    def history(self) -> WebSocketHistory: ...

    def cache_response(self, response: CachedResponse) -> None: ...


def response_cache_of(request: Request) -> ResponseCache | None:
    """None unless the request comes from a WebSocket."""
    response_cache: ResponseCache | None = request.scope.get(RESPONSE_CACHE_SCOPE_KEY)
    return response_cache


@dataclass(frozen=True, slots=True)
class ResponseRecorder:
    data: DataDir | None
    """None if the server stores nothing."""
    owner: str
    resolved: GenerationRequest
    writer: ResponsesWriter
    response_cache: ResponseCache | None = None

    async def store_ended_response(self) -> None:
        fields, writer = self.resolved.responses_fields, self.writer
        assert fields is not None
        if self.response_cache is not None and fields.cache_for_websocket and writer.status in ENDED_STATUSES:
            previous = self.response_cache.history.previous
            earlier = () if previous is None else previous.items
            own_items = (each.data for each in (*fields.input_items, *writer.output_items))
            cached_response = CachedResponse(self.resolved.answer_id, (*earlier, *own_items), is_stored=fields.store)
            self.response_cache.cache_response(cached_response)
        if self.data is None:
            return
        if writer.final_response is None:
            writer.status = "cancelled"
        if fields.store:
            await self._put_response(writer.final_response or writer.current_response(writer.status))
        if fields.conversation_id is not None and writer.final_response is not None:
            new_items = [*fields.input_items, *writer.output_items]
            append = self.data.store.append_items
            await self.data.owner_executor.run_for_owner(
                self.owner, append, self.owner, fields.conversation_id, new_items
            )

    async def store_queued_response(self, response: bytes) -> None:
        self.writer.status = "queued"
        await self._put_response(response, unfinished=True)

    async def _put_response(self, response: bytes, *, unfinished: bool = False) -> None:
        fields, data = self.resolved.responses_fields, self.data
        assert fields is not None
        assert data is not None, "refused otherwise"
        about = {
            "status": self.writer.status,
            "background": fields.background,
            "previous": fields.previous_id,
            "events": self.writer.next_sequence_number,
            "streamed": self.resolved.stream,
        }
        stored_object = ObjectToStore(
            self.resolved.answer_id,
            ObjectWithoutItems("response", about, response),
            fields.input_items,
            unfinished=unfinished,
        )
        await data.owner_executor.run_for_owner(self.owner, data.store.put, self.owner, stored_object)


async def answer_in_background(request: Request, recorder: ResponseRecorder, durable: DurableRequest) -> Response:
    runtime = get_runtime(request)
    server = get_server_context(request)
    resolved = recorder.resolved
    writer = recorder.writer
    lease = lease_of(request.scope).move_to_new_lease()
    assert resolved.responses_fields is not None
    close = lease.release_lease
    try:
        grow_request_lease(request.scope, 2 * len(resolved.responses_fields.echoed_fields))  # copies for the caller
        running = await begin_generation(request, resolved, durable)
        close = running.close
        queued = writer.current_response("queued")
        await recorder.store_queued_response(queued)
        durable.mark_stored_unfinished(resolved)
    except BaseException:
        close()
        lease.release_lease()
        raise

    def is_leaving() -> bool:
        return server.background.is_closing or admission_of(request).is_draining

    async def store_and_forget() -> None:
        await recorder.store_ended_response()
        await durable.forget_stored_response(resolved)

    async def finish_response() -> None:
        try:
            if answer.can_restart and server.persistence is not None:
                server.persistence.schedule_response_restart(recorder.owner, resolved.answer_id)
            elif not (writer.has_ended_unfinished and is_leaving()):
                # A leaving server lets the next process continue an unfinished response.
                await retry_until_written(f"the end of {resolved.answer_id} waits", store_and_forget, is_leaving)
        finally:
            lease.release_lease()

    answer = RunningAnswer(writer, close, [] if resolved.stream else None, can_restart=durable.can_restart)
    events = stream_events(running, writer, runtime, do_nothing)
    server.background.start_answer((recorder.owner, resolved.answer_id), answer, events, finish_response)
    if resolved.stream and not durable.is_restart:
        return EventStream(
            answer.follow_events(-1),
            ignore_disconnect,
            resolved.response_headers,
            runtime.config,
            ping=writer.ping_event,
        )
    return Response(queued, 200, resolved.response_headers, "application/json")


def ignore_disconnect() -> None:
    """Does nothing, because the answer continues when one of its readers leaves."""
