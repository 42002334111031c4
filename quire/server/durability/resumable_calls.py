"""Resumable streams and Idempotency-Key. A call is journaled (journal.py) before its first event is sent, its tokens a
moment later. A repetition, in this or the next process, has the same id, seed and time, so its events are the same
bytes.
"""

from __future__ import annotations

import asyncio
import logging
import re
import sqlite3
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request

from quire.engine.common import clock, random_source
from quire.engine.common.errors import InvalidRequest
from quire.server.durability.answer_pins import ComputeIdentity, ResumedCall, all_compute_fingerprints, input_digest
from quire.server.durability.journal import CLAIM_SECONDS, Calls, JournaledCall, PinnedReplayFields, ProgressUpdate
from quire.server.durability.peers import Peers
from quire.server.durability.progress import CallProgress
from quire.server.durability.resumable_outputs import ResumableOutputs
from quire.server.durability.write_ahead_log import WriteAheadLog
from quire.server.generation.generation import Generation, RunningGeneration
from quire.server.generation.resolved_request import GenerationRequest
from quire.server.store.database import StoreUnreachable

log = logging.getLogger("quire.server")
RESUMED_SCOPE_KEY = "quire.resumed"
CLAIMS_SCOPE_KEY = "quire.claims"
RESUMABLE_PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
IDEMPOTENCY_HEADER = "idempotency-key"
KEY_RETENTION_SECONDS = 86_400.0
"""How long an Idempotency-Key stays known after its answer has ended."""
MAX_KEY_LENGTH = 255
KEEP_ALIVE_HEADER = "x-keep-alive-seconds"
"""Request header: seconds that a stream continues without its reader."""
_MAX_RUNNING_SECONDS = 86_400.0
"""A running call's row expires this long after its last save."""
_CLAIM_POLL_SECONDS = 0.05
_SAVE_INTERVAL_SECONDS = 1.0
"""Without a write-ahead log, tokens since the last save are recomputed after a crash."""
_SAVES_PER_LOGGED_CALL = 5
"""With a write-ahead log, calls are saved only every fifth time, because only a power cut loses their unsaved tokens.
"""
_PUT_TRIES, _PUT_RETRY_SECONDS = 20, 0.5
_TAKE_OVER_TOPIC, _IS_ANSWERING_TOPIC = "take over", "answers"


@dataclass(frozen=True, eq=False, slots=True)
class Claim:
    """Reserves an Idempotency-Key until its request is journaled, or a call until it is resumed."""

    owner: str
    name: str
    expires_at: float
    """time.monotonic()."""
    attempt: int = 0
    """0 if an Idempotency-Key is claimed."""


@dataclass(eq=False, slots=True)
class RunningCall:
    progress: CallProgress
    retention_seconds: float
    """How long the call stays in the journal after its end."""
    close_generation: Callable[[], None] | None = None
    """None after the call's end."""
    num_saved_tokens: int = 0
    num_skipped_saves: int = 0
    log_number: int = 0
    """The first choice's number in the write-ahead log."""
    is_stored_response: bool = False
    ended_event: asyncio.Event = field(default_factory=asyncio.Event)

    def mark_ended(self) -> None:
        self.ended_event.set()
        self.close_generation = None  # frees memory without garbage collection


class ResumableCalls:
    def __init__(self, calls: Calls, grace_seconds: float, peers: Peers, write_ahead_log: WriteAheadLog | None) -> None:
        """`grace_seconds`: how long a stream without a reader stays resumable. Without `write_ahead_log`, a kill loses
        up to a second of sent tokens.
        """
        self._write_ahead_log = write_ahead_log
        self._calls = calls
        self._peers = peers
        peers.register_handler(_TAKE_OVER_TOPIC, self._handle_take_over)
        peers.register_handler(_IS_ANSWERING_TOPIC, self._handle_is_answering)
        self._grace_seconds = grace_seconds
        self._running: dict[tuple[str, str], RunningCall] = {}
        self._claims: dict[tuple[str, str], Claim] = {}
        self._pending_attempts: set[int] = set()
        self._abandon_tasks: set[asyncio.Task[None]] = set()
        self.num_resumed = 0
        self._save_future: asyncio.Future[None] | None = None
        self._save_task = asyncio.create_task(self._save_progress_forever())

    @property
    def has_write_ahead_log(self) -> bool:
        return self._write_ahead_log is not None

    @property
    def running_call_keys(self) -> list[tuple[str, str]]:
        """(owner, id) of each call that this process answers."""
        return list(self._running)

    @property
    def num_running(self) -> int:
        return len(self._running)

    async def close(self) -> None:
        self._save_task.cancel()
        await asyncio.gather(self._save_task, *self._abandon_tasks, return_exceptions=True)
        try:
            await self._save_progress(last=True)
            if self._write_ahead_log is not None:
                self._write_ahead_log.close_and_delete()
        except (sqlite3.OperationalError, OSError) as error:  # unsaved tokens are recomputed
            log.error("streams: data_dir cannot be written: %s", error)

    async def find_call(self, owner: str, id: str) -> JournaledCall | None:
        return await asyncio.to_thread(self._calls.find, owner, id)

    async def prepare_resume(
        self, owner: str, call: JournaledCall, seen: Sequence[int], claims: list[Claim]
    ) -> ResumedCall:
        """Appends the claim to `claims`. While another attempt has a claim, waits, and raises HTTPException after
        CLAIM_SECONDS.
        """
        attempt, ends = 1 + random_source.randbits(31), clock.monotonic() + CLAIM_SECONDS
        claim = partial(self._calls.try_claim_call, owner, call.pins.id, self._peers.process_name, attempt)
        while not await asyncio.to_thread(claim):
            if clock.monotonic() > ends:
                raise still_answering_error()
            await asyncio.sleep(_CLAIM_POLL_SECONDS)
        self._pending_attempts.add(attempt)
        claims.append(Claim(owner, call.pins.id, ends, attempt))
        try:
            call = await self._stop_and_reload_call(owner, call)
        except BaseException:
            self.release_claims(claims[-1:])
            raise
        self.num_resumed += 1
        return ResumedCall(call, seen, attempt)

    async def _stop_and_reload_call(self, owner: str, call: JournaledCall) -> JournaledCall:
        if (running := self._running.get((owner, call.pins.id))) is not None:
            return msgspec.structs.replace(call, progress=await _stop_and_get_progress(running))
        if (holder := await self._peers.find_answering_process(owner, call.pins.id)) is not None:
            call_key = msgspec.msgpack.encode((owner, call.pins.id))
            if (encoded_progress := await self._peers.ask_peer(holder, _TAKE_OVER_TOPIC, call_key)) is not None:
                return msgspec.structs.replace(
                    call, progress=msgspec.msgpack.decode(encoded_progress, type=CallProgress)
                )
        # the call or its process may have ended
        return await self.find_call(owner, call.pins.id) or call

    async def _handle_take_over(self, body: bytes) -> bytes | None:
        owner, id = msgspec.msgpack.decode(body, type=tuple[str, str])
        if (running := self._running.get((owner, id))) is None:
            return None
        progress = await _stop_and_get_progress(running)
        if self._running.pop((owner, id), None) is running:  # a later save could overwrite the other process's last one
            if self._save_future is not None:
                await asyncio.wait({self._save_future})
            note = ProgressUpdate(owner, id, progress, clock.time() + running.retention_seconds, is_complete=True)
            with suppress(sqlite3.OperationalError, OSError):  # the write-ahead log has the tokens
                await asyncio.to_thread(self._calls.update_progress, [note], self._peers.process_name)
        return msgspec.msgpack.encode(progress)

    async def _handle_is_answering(self, body: bytes) -> bytes | None:
        return b"yes" if self._is_answering(*msgspec.msgpack.decode(body, type=tuple[str, str])) else None

    def _is_answering(self, owner: str, id: str) -> bool:
        running = self._running.get((owner, id))
        return running is not None and not running.ended_event.is_set()

    async def claim_key_or_resume(
        self, request: Request, owner: str, body: bytes, *, stream: bool
    ) -> ResumedCall | None:
        """Returns None if the key is new or absent, or if the request resumes a call already. Raises HTTPException if
        the key is invalid, claimed or another request's. While the earlier call is answered, `stream` takes it over;
        otherwise raises HTTPException.
        """
        key = request.headers.get(IDEMPOTENCY_HEADER)
        if key is None or request.scope.get(RESUMED_SCOPE_KEY) is not None:
            return None
        if not 0 < len(key) <= MAX_KEY_LENGTH:
            raise HTTPException(400, f"Idempotency-Key must have 1 to {MAX_KEY_LENGTH} characters")
        now = clock.monotonic()
        if (other := self._claims.get((owner, key))) is not None and other.expires_at > now:
            raise still_answering_error()
        claim = self._claims[owner, key] = Claim(owner, key, now + CLAIM_SECONDS)
        request.scope[CLAIMS_SCOPE_KEY].append(claim)
        call = await asyncio.to_thread(self._calls.find_by_idempotency_key, owner, key)
        if call is None:
            return None  # the claim stays until `journal_call` or the request's end
        if (call.path, call.body) != (request.scope["path"], body):
            raise HTTPException(422, "Another request had this Idempotency-Key")
        if call.pins.background:  # the call may have to be started, so the claim stays
            return ResumedCall(call, (), attempt=0)
        self.release_claims([claim])
        if not stream:
            await self.check_not_answering(owner, call.pins.id)
        return await self.prepare_resume(owner, call, (), request.scope[CLAIMS_SCOPE_KEY])

    async def check_not_answering(self, owner: str, id: str) -> None:
        """Raises HTTPException while the call is answered."""
        if self._is_answering(owner, id):
            raise still_answering_error()
        if (owner, id) in self._running or (holder := await self._peers.find_answering_process(owner, id)) is None:
            return
        # A process counts as answering a call until the call's end is saved, which may be after the caller has the
        # answer.
        if await self._peers.ask_peer(holder, _IS_ANSWERING_TOPIC, msgspec.msgpack.encode((owner, id))) is not None:
            raise still_answering_error()

    def release_claims(self, claims: Iterable[Claim]) -> None:
        """Idempotent."""
        for claim in claims:
            if self._claims.get((claim.owner, claim.name)) is claim:
                del self._claims[claim.owner, claim.name]
            elif claim.attempt in self._pending_attempts:
                self._pending_attempts.discard(claim.attempt)
                self._abandon_tasks.add(task := asyncio.create_task(self._abandon_claim(claim)))
                task.add_done_callback(self._abandon_tasks.discard)

    async def _abandon_claim(self, claim: Claim) -> None:
        with suppress(sqlite3.OperationalError):  # the process that owns the store does not answer
            await asyncio.to_thread(self._calls.release_claim, claim.owner, claim.name, claim.attempt)

    async def journal_call(
        self,
        request: Request,
        body: bytes,
        owner: str,
        resolved: GenerationRequest,
        identity: ComputeIdentity,
        running: RunningGeneration[Generation],
        outputs: ResumableOutputs | None,
    ) -> None:
        """`outputs` is None for a beam search, which has no tokens before its end. An error closes `running`; but if
        the database cannot be written, and the request has no new Idempotency-Key, the error is only logged.
        """
        progress = CallProgress() if outputs is None else outputs.progress
        resumed: ResumedCall | None = request.scope.get(RESUMED_SCOPE_KEY)
        key = request.headers.get(IDEMPOTENCY_HEADER) if resumed is None else resumed.call.key
        pins = PinnedReplayFields(
            id=resolved.id,
            name=resolved.answer_identity.requested_id,
            created=resolved.created,
            seed=resolved.answer_identity.seed,
            adapter="" if resolved.adapter is None else resolved.adapter.digest,
            kernels=identity.fingerprint,
            background=resolved.responses_fields is not None and resolved.responses_fields.background,
            model=resolved.model,
            before=() if resumed is None else all_compute_fingerprints(resumed, identity)[:-1],
            given=input_digest(resolved, identity),
            cache_diagnosis=resolved.answer_identity.cache_diagnosis,
        )
        call = JournaledCall(path=request.scope["path"], body=body, pins=pins, key=key, progress=progress.copy())
        retention_seconds = self._grace_seconds if key is None else KEY_RETENTION_SECONDS
        running_call = RunningCall(progress, retention_seconds, running.close)
        running.call_at_end(running_call.mark_ended)
        self._running[owner, resolved.id] = running_call
        try:
            ends = clock.time() + _MAX_RUNNING_SECONDS
            if not await self._put_call_with_retries(owner, call, ends):
                raise still_answering_error()  # another process got the same request
        except sqlite3.OperationalError as error:
            if key is not None and resumed is None:  # a request that could not be journaled might be answered twice
                running.close()
                raise
            log.error(
                "%s is not in the journal, or not so far: data_dir cannot be written: %s", resolved.answer_id, error
            )
        except BaseException:
            running.close()
            raise
        finally:
            self._pending_attempts.discard(0 if resumed is None else resumed.attempt)
            self.release_claims(request.scope.get(CLAIMS_SCOPE_KEY, ()))
        if self._write_ahead_log is not None:
            running_call.log_number = self._write_ahead_log.log_call(owner, resolved.id, len(progress.ids))
            if outputs is not None:
                known_counts = [len(ids) for ids in call.progress.ids]
                outputs.attach_journal(self._write_ahead_log, running_call.log_number, known_counts)

    async def _put_call_with_retries(self, owner: str, call: JournaledCall, ends: float) -> bool:
        """Repeating Calls.put is harmless."""
        for _ in range(_PUT_TRIES):
            with suppress(StoreUnreachable):
                return await asyncio.to_thread(self._calls.put, owner, call, ends, self._peers.process_name)
            await asyncio.sleep(_PUT_RETRY_SECONDS)
        return await asyncio.to_thread(self._calls.put, owner, call, ends, self._peers.process_name)

    def mark_stored_unfinished(self, owner: str, id: str) -> None:
        """Prevents other processes from restarting the response before `forget_call`."""
        if (running := self._running.get((owner, id))) is not None:
            running.is_stored_response = True

    async def forget_call(self, owner: str, id: str, *, with_key: bool = True) -> None:
        """A forgotten call is not resumed. If `with_key` is False, a call with an Idempotency-Key stays known."""
        if (running := self._running.get((owner, id))) is not None:
            running.ended_event.set()
            if with_key or running.retention_seconds != KEY_RETENTION_SECONDS:
                del self._running[owner, id]
        await asyncio.to_thread(self._calls.delete, owner, id, include_keyed=with_key)

    async def _save_progress_forever(self) -> None:
        while True:
            await asyncio.sleep(_SAVE_INTERVAL_SECONDS)
            try:
                await self._save_progress()
            except (sqlite3.OperationalError, OSError) as error:
                log.error("streams: data_dir cannot be written: %s", error)

    async def _save_progress(self, *, last: bool = False) -> None:
        if self._save_future is not None:  # a cancelled save must not land after this one
            await asyncio.wait({self._save_future})
        now = clock.time()
        notes: list[ProgressUpdate] = []
        ended_calls: list[tuple[str, str, RunningCall]] = []
        is_compacting = self._write_ahead_log is not None and self._write_ahead_log.switch_half_if_filling(
            (running.log_number, *key, len(running.progress.ids)) for key, running in self._running.items()
        )
        for (owner, id), running in list(self._running.items()):
            ended = running.ended_event.is_set()
            running.num_skipped_saves += 1
            if not (
                ended
                or is_compacting
                or last
                or self._write_ahead_log is None
                or running.num_skipped_saves >= _SAVES_PER_LOGGED_CALL
            ):
                continue
            count, running.num_skipped_saves = running.progress.num_tokens, 0
            if (
                count - running.num_saved_tokens > running.num_saved_tokens // 8
                or ended
                or ((is_compacting or last) and count > running.num_saved_tokens)
            ):  # otherwise a long answer is rewritten repeatedly
                ends = now + (running.retention_seconds if ended else _MAX_RUNNING_SECONDS)
                answered = ended and not running.is_stored_response
                notes.append(ProgressUpdate(owner, id, running.progress.copy(), ends, answered))
                running.num_saved_tokens = count
            if ended:
                ended_calls.append((owner, id, running))
        if notes:
            self._save_future = asyncio.ensure_future(
                asyncio.to_thread(self._calls.update_progress, notes, self._peers.process_name)
            )
            await asyncio.shield(self._save_future)
        for owner, id, running in ended_calls:  # before the save, only this process had the calls' progress
            if self._running.get((owner, id)) is running:
                del self._running[owner, id]
        if is_compacting and self._write_ahead_log is not None:
            self._write_ahead_log.discard_other_half()


def still_answering_error() -> HTTPException:
    return HTTPException(409, "The request with this Idempotency-Key is still running", {"Retry-After": "1"})


async def _stop_and_get_progress(running: RunningCall) -> CallProgress:
    if running.close_generation is not None:
        running.close_generation()
    await running.ended_event.wait()
    return running.progress.copy()


def parse_stream_grace_header(header_value: str, max_seconds: float) -> float:
    """`max_seconds` is 0 without a data directory. Raises InvalidRequest."""
    if not max_seconds:
        raise InvalidRequest(
            f"{KEEP_ALIVE_HEADER}: this server stores no streams: see --data-dir", param=KEEP_ALIVE_HEADER
        )
    if not re.fullmatch(r"[0-9]{1,5}(\.[0-9]{1,3})?", header_value) or not float(header_value) <= max_seconds:
        raise InvalidRequest(
            f"{KEEP_ALIVE_HEADER} must be a number from 0 to {max_seconds:g} (--stream-grace)", param=KEEP_ALIVE_HEADER
        )
    return float(header_value)
