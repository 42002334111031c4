"""Answers that can be asked for again: streams that go on where their reader was cut off, and Idempotency-Key.

What a call is stands in the journal (store/calls.py) before its first event is sent, the tokens that it has a moment
later. Whoever asks for it again, in this process or in the next one, has the same request computed with the same id,
seed and time, so that the events are the same to the byte; those that were seen are left out.
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

from quire.engine import clock, random_source
from quire.engine.errors import InvalidRequest
from quire.server.again import Here, Resumed, computed_by, given
from quire.server.generation.generation import Generation
from quire.server.generation.spec import GenerationSpec
from quire.server.peers import Peers, Unanswered
from quire.server.store.calls import CLAIM_SECONDS, Call, Calls, Note, Pins
from quire.server.store.progress import Progress
from quire.server.store.tail import Tail

log = logging.getLogger("quire.server")
RESUMED = "quire.resumed"
"""The scope's key of a Resumed: the call is made again."""
CLAIMS = "quire.claims"
"""The scope's key of a list of the Claims that the request has."""
BODY = "quire.kept_body"
"""The scope's key of a body that may go into the journal."""
PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
"""What can be asked for again."""
KEY = "idempotency-key"
KEPT_KEYS = 86_400.0
"""Seconds that an answer with an Idempotency-Key can be asked for again, from its begin."""
MAX_KEY = 255
KEEP_ALIVE = "x-keep-alive-seconds"
"""The header that lets a stream go on for a while when its reader has left."""
_RUNNING_SECONDS = 86_400.0
"""So long a call may run; then its row ends."""
_CLAIM_LOOK_SECONDS = 0.05
"""Between two looks whether another attempt has begun to answer a call, and can be taken over."""
_NOTE_SECONDS = 1.0
"""Between two notes of what calls have: what they lack is computed again."""
_NOTES_BESIDE_TAIL = 5
"""A call with its tokens in a tail is part of each fifth note until it ends: only a power cut takes what it lacks."""
_PUT_TRIES, _PUT_SECONDS = 20, 0.5
"""To put a call into the journal, where nobody answers."""
_TAKE_OVER, _ANSWERS = "take over", "answers"
"""What an API process asks another that answers a call: to stop, and whether it still does."""


@dataclass(frozen=True, eq=False, slots=True)
class Claim:
    """An Idempotency-Key whose request is about to be in the journal, or a call that is about to be answered again."""

    owner: str
    name: str
    """The key, or the call's id."""
    until: float
    """Of time.monotonic(): how long it is waited for."""
    attempt: int = 0
    """Of the call; 0: it is a key."""


@dataclass(eq=False, slots=True)
class Running:
    progress: Progress
    ends_after: float
    """Seconds for which it is kept once it has ended."""
    close: Callable[[], None] = lambda: None
    noted: int = 0
    """Tokens in the journal."""
    passed: int = 0
    """Notes of other calls since the last one of this."""
    number: int = 0
    """Of its first choice in its tail."""
    stored: bool = False
    """Whether it is a response that is stored as one that has not ended; see `stored`."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class Streams:
    """The calls that can be asked for again, of one process."""

    def __init__(self, calls: Calls, grace: float, peers: Peers, tail: Tail | None) -> None:
        """`grace`: seconds for which a stream without a reader can be resumed. `tail`: None where there is no place for
        one; then what was sent in the last second before the process is killed is not in the journal."""
        self._tail = tail
        self._calls = calls
        self._peers = peers
        peers.answering(_TAKE_OVER, self._say_taken_over)
        peers.answering(_ANSWERS, self._say_answers)
        self._grace = grace
        self._running: dict[tuple[str, str], Running] = {}
        self._claims: dict[tuple[str, str], Claim] = {}
        """By owner and key."""
        self._attempts: set[int] = set()
        """To answer a call again, which have not begun."""
        self._giving_up: set[asyncio.Task[None]] = set()
        self.resumptions = 0
        """Calls that were made again."""
        self._noting: asyncio.Future[None] | None = None
        """What is written into the journal."""
        self._task = asyncio.create_task(self._note_always())

    @property
    def keeps_all(self) -> bool:
        """Whether each token is in the journal before it is sent."""
        return self._tail is not None

    @property
    def running(self) -> list[tuple[str, str]]:
        """Owners and ids of the calls that this process answers."""
        return list(self._running)

    @property
    def num_running(self) -> int:
        """Calls whose progress goes into the journal."""
        return len(self._running)

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, *self._giving_up, return_exceptions=True)
        try:
            await self._note(last=True)
            if self._tail is not None:
                self._tail.close()
        except (sqlite3.OperationalError, OSError) as error:  # what was not noted is computed again
            log.error("streams: data_dir cannot be written: %s", error)

    async def find(self, owner: str, id: str) -> Call | None:
        return await asyncio.to_thread(self._calls.find, owner, id)

    async def resumed(self, owner: str, call: Call, seen: Sequence[int], claims: list[Claim]) -> Resumed:
        """A call to be made again, which nobody else answers any more; with the tokens that it has by now. `claims`:
        where its claim is put. Of several that ask for it at once, each waits until the one before it has begun, and
        takes it over. Raises HTTPException where that one takes long."""
        attempt, ends = 1 + random_source.randbits(31), clock.monotonic() + CLAIM_SECONDS
        claim = partial(self._calls.claim, owner, call.pins.id, self._peers.process, attempt)
        while not await asyncio.to_thread(claim):
            if clock.monotonic() > ends:
                raise busy()
            await asyncio.sleep(_CLAIM_LOOK_SECONDS)
        self._attempts.add(attempt)
        claims.append(Claim(owner, call.pins.id, ends, attempt))
        try:
            call = await self._taken_over(owner, call)
        except BaseException:
            self.release(claims[-1:])
            raise
        self.resumptions += 1
        return Resumed(call, seen, attempt)

    async def _taken_over(self, owner: str, call: Call) -> Call:
        """A call that nobody answers any more, with the tokens that it has by now."""
        if (running := self._running.get((owner, call.pins.id))) is not None:
            return msgspec.structs.replace(call, progress=await _stopped(running))
        if (holder := await self._peers.holder(owner, call.pins.id)) is not None:
            asked = msgspec.msgpack.encode((owner, call.pins.id))
            if (said := await self._peers.ask(holder, _TAKE_OVER, asked)) is not None:
                return msgspec.structs.replace(call, progress=msgspec.msgpack.decode(said, type=Progress))
        # Its end may have been noted since the call was found, or its process has ended.
        return await self.find(owner, call.pins.id) or call

    async def _say_taken_over(self, body: bytes) -> bytes | None:
        """What a call has so far that another process goes on with."""
        owner, id = msgspec.msgpack.decode(body, type=tuple[str, str])
        if (running := self._running.get((owner, id))) is None:
            return None
        progress = await _stopped(running)
        if self._running.pop((owner, id), None) is running:  # a later note could come behind the other's last one
            if self._noting is not None:
                await asyncio.wait({self._noting})
            note = Note(owner, id, progress, clock.time() + running.ends_after, answered=True)
            with suppress(sqlite3.OperationalError, OSError):  # it is in the tail
                await asyncio.to_thread(self._calls.note, [note], self._peers.process)
        return msgspec.msgpack.encode(progress)

    async def _say_answers(self, body: bytes) -> bytes | None:
        return b"yes" if self._answers(*msgspec.msgpack.decode(body, type=tuple[str, str])) else None

    def _answers(self, owner: str, id: str) -> bool:
        running = self._running.get((owner, id))
        return running is not None and not running.ended.is_set()

    async def claimed(self, request: Request, owner: str, body: bytes, *, stream: bool) -> Resumed | None:
        """The call that had the request's Idempotency-Key before; None where it is new, or there is none.

        Raises HTTPException for a key that cannot be, that another request had, or whose request is being answered.
        """
        key = request.headers.get(KEY)
        if key is None or request.scope.get(RESUMED) is not None:
            return None
        if not 0 < len(key) <= MAX_KEY:
            raise HTTPException(400, f"Idempotency-Key must have 1 to {MAX_KEY} characters")
        now = clock.monotonic()
        if (other := self._claims.get((owner, key))) is not None and other.until > now:
            raise busy()
        claim = self._claims[owner, key] = Claim(owner, key, now + CLAIM_SECONDS)
        request.scope[CLAIMS].append(claim)
        call = await asyncio.to_thread(self._calls.of_key, owner, key)
        if call is None:
            return None  # `begin` takes the claim away, or the request's end
        if (call.path, call.body) != (request.scope["path"], body):
            raise HTTPException(422, "Another request had this Idempotency-Key")
        if call.pins.background:  # which may have to be begun: the claim stays
            return Resumed(call, (), attempt=0)
        self.release([claim])
        if not stream:
            await self.check_free(owner, call.pins.id)
        return await self.resumed(owner, call, (), request.scope[CLAIMS])

    async def check_free(self, owner: str, id: str) -> None:
        """Raises HTTPException while a call is answered."""
        if self._answers(owner, id):
            raise busy()
        if (owner, id) in self._running or (holder := await self._peers.holder(owner, id)) is None:
            return
        # It holds an answer until the end is noted, some time after the caller has it.
        if await self._peers.ask(holder, _ANSWERS, msgspec.msgpack.encode((owner, id))) is not None:
            raise busy()

    def release(self, claims: Iterable[Claim]) -> None:
        """Nobody needs to wait for them any more. Does nothing the second time."""
        for claim in claims:
            if self._claims.get((claim.owner, claim.name)) is claim:
                del self._claims[claim.owner, claim.name]
            elif claim.attempt in self._attempts:
                self._attempts.discard(claim.attempt)
                self._giving_up.add(task := asyncio.create_task(self._give_up(claim)))
                task.add_done_callback(self._giving_up.discard)

    async def _give_up(self, claim: Claim) -> None:
        with suppress(sqlite3.OperationalError):  # the process that has the calls does not answer, or is gone
            await asyncio.to_thread(self._calls.give_up, claim.owner, claim.name, claim.attempt)

    async def begin(
        self,
        request: Request,
        owner: str,
        spec: GenerationSpec,
        here: Here,
        generation: Generation,
        close: Callable[[], None],
    ) -> Callable[[], None]:
        """Put a call into the journal. Returns what ends it: `close`, and its journal goes on from there."""
        progress = generation.progress
        body = request.scope.pop(BODY)
        resumed: Resumed | None = request.scope.get(RESUMED)
        key = request.headers.get(KEY) if resumed is None else resumed.call.key
        pins = Pins(
            id=spec.id,
            name=spec.name,
            created=spec.created,
            seed=spec.params.seed,
            adapter="" if spec.adapter is None else spec.adapter.digest,
            kernels=here.fingerprint,
            background=spec.response is not None and spec.response.background,
            model=spec.model,
            before=() if resumed is None else computed_by(resumed, here)[:-1],
            given=given(spec, here),
        )
        call = Call(path=request.scope["path"], body=body, pins=pins, key=key, progress=progress.copy())
        running = Running(progress, self._grace if key is None else KEPT_KEYS)
        running.close = partial(_end, running, close)
        self._running[owner, spec.id] = running
        try:
            ends = clock.time() + _RUNNING_SECONDS
            if not await self._put(owner, call, ends):
                raise busy()  # another process was asked at the same time
        except sqlite3.OperationalError as error:
            if key is not None and resumed is None:  # else it would be answered twice
                _end(running, close)
                raise
            log.error("%s is not in the journal, or not so far: data_dir cannot be written: %s", spec.answer_id, error)
        except BaseException:
            _end(running, close)
            raise
        finally:
            self._attempts.discard(0 if resumed is None else resumed.attempt)
            self.release(request.scope.get(CLAIMS, ()))
        if self._tail is not None:
            running.number = self._tail.begin(owner, spec.id, len(progress.ids))
            generation.keep(self._tail, running.number, [*map(len, call.progress.ids)])
        return running.close

    async def _put(self, owner: str, call: Call, ends: float) -> bool:
        """As Calls.put, which may be done twice. While who has the calls is replaced, a stream waits to begin."""
        for _ in range(_PUT_TRIES):
            with suppress(Unanswered):
                return await asyncio.to_thread(self._calls.put, owner, call, ends, self._peers.process)
            await asyncio.sleep(_PUT_SECONDS)
        return await asyncio.to_thread(self._calls.put, owner, call, ends, self._peers.process)

    def stored(self, owner: str, id: str) -> None:
        """A response is stored as one that has not ended: until `forget`, when its end is stored, no other process
        takes it for one that nobody works on."""
        if (running := self._running.get((owner, id))) is not None:
            running.stored = True

    async def forget(self, owner: str, id: str, *, with_key: bool = True) -> None:
        """It shall not be made again. `with_key`: one with an Idempotency-Key neither; else its key stays known."""
        if (running := self._running.get((owner, id))) is not None:
            running.ended.set()
            if with_key or running.ends_after != KEPT_KEYS:
                del self._running[owner, id]
        await asyncio.to_thread(self._calls.delete, owner, id, named=with_key)

    async def _note_always(self) -> None:
        while True:
            await asyncio.sleep(_NOTE_SECONDS)
            try:
                await self._note()
            except (sqlite3.OperationalError, OSError) as error:
                log.error("streams: data_dir cannot be written: %s", error)

    async def _note(self, *, last: bool = False) -> None:
        """Write down what has come since the last time, and forget those that have ended. `last`: leave nothing out."""
        if self._noting is not None:  # of one that was cancelled: what it writes must not come behind this
            await asyncio.wait({self._noting})
        now, notes, over = clock.time(), list[Note](), list[tuple[str, str, Running]]()
        turned = self._tail is not None and self._tail.turn(
            (running.number, *key, len(running.progress.ids)) for key, running in self._running.items()
        )
        for (owner, id), running in list(self._running.items()):
            ended = running.ended.is_set()
            running.passed += 1
            if not (ended or turned or last or self._tail is None or running.passed >= _NOTES_BESIDE_TAIL):
                continue
            count, running.passed = running.progress.count, 0
            if (
                count - running.noted > running.noted // 8 or ended or ((turned or last) and count > running.noted)
            ):  # else a long answer is written over and over
                ends = now + (running.ends_after if ended else _RUNNING_SECONDS)
                answered = ended and not running.stored
                notes.append(Note(owner, id, running.progress.copy(), ends, answered))
                running.noted = count
            if ended:
                over.append((owner, id, running))
        if notes:
            self._noting = asyncio.ensure_future(asyncio.to_thread(self._calls.note, notes, self._peers.process))
            await asyncio.shield(self._noting)
        for owner, id, running in over:  # until now it is asked here what they have, for it is nowhere else
            if self._running.get((owner, id)) is running:
                del self._running[owner, id]
        if turned and self._tail is not None:
            self._tail.settle()


def busy() -> HTTPException:
    """Another request with the same Idempotency-Key goes on with the answer."""
    return HTTPException(409, "The request with this Idempotency-Key is still answered", {"Retry-After": "1"})


def _nothing() -> None:
    pass


async def _stopped(running: Running) -> Progress:
    """What a call has whose answer is ended here."""
    running.close()
    await running.ended.wait()
    return running.progress.copy()


def _end(running: Running, close: Callable[[], None]) -> None:
    close()
    running.ended.set()
    running.close = _nothing  # no circle: the spec goes with its last reference, not at a collection


def keep_alive(request: Request, most: float) -> float:
    """Seconds for which a stream goes on without its reader; 0: it does not. `most`: --stream-grace, or 0 where nothing
    is kept. Raises InvalidRequest."""
    given = request.headers.get(KEEP_ALIVE)
    if given is None:
        return 0.0
    if not most:
        raise InvalidRequest(f"{KEEP_ALIVE}: this server keeps no streams: see --data-dir", param=KEEP_ALIVE)
    if not re.fullmatch(r"[0-9]{1,5}(\.[0-9]{1,3})?", given) or not float(given) <= most:
        raise InvalidRequest(f"{KEEP_ALIVE} must be a number from 0 to {most:g} (--stream-grace)", param=KEEP_ALIVE)
    return float(given)
