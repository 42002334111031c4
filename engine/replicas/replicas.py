"""Several engines of one model as one client: each request is computed by one of them, and goes on with another when
that one ends.

The router (router.py) says which. Requests that no replica can compute now, because all are being replaced or sleep,
wait here for the first that can. A replica that cannot be brought back is left out; with the last one the client fails.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

import msgspec

from quire.engine.client.client import EngineClient
from quire.engine.client.history import History
from quire.engine.client.journal import Journal
from quire.engine.client.supervisor import ProcessClient
from quire.engine.config import EngineConfig
from quire.engine.errors import ConfigError, EngineError, Overloaded, QuireError
from quire.engine.replicas.replica import Replica
from quire.engine.replicas.router import Router, prefix_pieces
from quire.engine.replicas.shares import replica_config, replica_cores
from quire.engine.replicas.together import together, total
from quire.engine.stats import StepRecord
from quire.engine.types import EngineInfo, Request, RequestOutput

log = logging.getLogger("quire.replicas")
_POLL_SECONDS = 0.05


class Replicas(EngineClient):
    """Engine processes of one model, each replaced when it ends; --data-parallel-size of them.

    `launch()` starts the processes and returns at once; `start()` waits until all are ready.
    """

    def __init__(self, config: EngineConfig) -> None:
        super().__init__()
        count = config.data_parallel_size
        cores = replica_cores(count)
        self._replicas = [
            Replica(replica_config(config, number, cores), number, cores[number], self) for number in range(count)
        ]
        self._hashed = config.enable_prefix_caching
        self._router = Router(count)
        self._places: dict[str, Replica] = {}
        """By id of an open request: who computes it."""
        self._unplaced = Journal()
        """Open requests that nobody computes."""
        self._started = False
        self._merging: asyncio.Task[None] | None = None
        self.history = History(replicas=count)

    @property
    def engines(self) -> Sequence[EngineClient]:
        return self._replicas

    @property
    def pid(self) -> int | None:
        """The first engine's process id."""
        return self._replicas[0].pid

    @property
    def responsive(self) -> bool:
        return self.alive and any(each.responsive for each in self._replicas)

    @property
    def healthy(self) -> bool:
        return self.alive and any(each.healthy for each in self._replicas)

    def launch(self) -> None:
        """Start the engine processes. Raises EngineError when the system can start none."""
        for each in self._replicas:
            each.launch()

    async def start(self) -> EngineInfo:
        starts = [asyncio.create_task(each.start()) for each in self._replicas]
        try:
            infos = await asyncio.gather(*starts)
            # A request's tokens must not depend on who computes it: all have the context of the shortest.
            context = min(info.max_model_len for info in infos)
            longer = [each for each, info in zip(self._replicas, infos, strict=True) if info.max_model_len > context]
            await asyncio.gather(*(each.shorten(context) for each in longer))
        except BaseException:
            for start in starts:
                start.cancel()
            await asyncio.gather(*starts, return_exceptions=True)
            await self.stop()
            raise
        self._started = True
        note = f"{len(infos)} replicas, each with weights and a KV cache as said here"
        return msgspec.structs.replace(infos[0], max_model_len=context, notes=[*infos[0].notes, note])

    async def stop(self) -> None:
        self._fail("the engine was stopped")
        await asyncio.gather(*(each.stop() for each in self._replicas))

    async def rest(self, level: int) -> None:
        await self._change(lambda each: each.rest(level))
        self.asleep = True

    async def load(self, weights: str | None, version: str) -> None:
        await self._change(lambda each: each.load(weights, version))
        self.weights_version, self.asleep = version, False

    async def check(self, weights: str) -> None:
        await self._change(lambda each: each.check(weights))

    async def _change(self, change: Callable[[Replica], Awaitable[None]]) -> None:
        """Make a change of all replicas or, where none can make it, of none; then raise what one of them raised."""
        living = [each for each in self._replicas if each.alive]
        if self._failure is not None:
            raise self._failure
        if not all(each.settled for each in living):
            raise Overloaded("an engine is being replaced; please try again")
        found = await asyncio.gather(*(change(each) for each in living), return_exceptions=True)
        errors = [error for error in found if error is not None]
        if len(errors) == len(living):
            raise next((error for error in errors if isinstance(error, ConfigError)), errors[0])
        for each, error in zip(living, found, strict=True):
            if error is not None:
                await self._change_too(each, change)

    async def _change_too(self, replica: Replica, change: Callable[[Replica], Awaitable[None]]) -> None:
        """Make a change that others have made of one that died under it, when it is back; without it, it must go."""
        while replica.alive:
            await asyncio.sleep(_POLL_SECONDS)
            if not replica.settled:
                continue
            try:
                return await change(replica)
            except (EngineError, Overloaded):
                continue
            except QuireError as error:
                log.error("engine %d cannot do what the others did, and is given up: %s", replica.number, error)
                await replica.stop()

    def reset_prefix_cache(self) -> None:
        for each in self._replicas:
            each.reset_prefix_cache()
            self._router.forget(each.number)

    def _send(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self._unplaced.open(request)
        self._place()

    def _send_abort(self, request_id: str) -> None:
        if not self._unplaced.close(request_id) and (replica := self._forget_place(request_id)) is not None:
            replica.drop(request_id)

    def _send_snapshot_request(self) -> None:
        self._merging = asyncio.create_task(self._merge_snapshots())

    async def _merge_snapshots(self) -> None:
        pending = [each.snapshot() for each in self._replicas if each.responsive]
        if pending:
            await asyncio.wait(pending)
        found = [each.result() for each in pending if not each.cancelled()]
        self._on_snapshot(together(found) if found else None)

    def _place(self) -> None:
        """Give the requests that nobody computes to replicas that can, if one can."""
        computing = [each for each in self._replicas if each.computing]
        able = [each.number for each in computing if each.free] or [each.number for each in computing]
        if not able:
            return
        chosen: set[int] = set()
        last: Request | None = None
        pieces: list[bytes] = []
        for request in self._unplaced.requests():
            if self._hashed and not (last is not None and _alike(last, request)):
                pieces = prefix_pieces(request)
            last, number = request, self._router.place(pieces, able)
            self._places[request.id] = self._replicas[number]
            self._replicas[number].take(request.id, self._unplaced)
            chosen.add(number)
        for number in chosen:
            self._replicas[number].compute()

    def _forget_place(self, request_id: str) -> Replica | None:
        """Who computed it until now."""
        replica = self._places.pop(request_id, None)
        if replica is not None:
            self._router.ended(replica.number)
        return replica

    def stepped(self, replica: Replica, outputs: Sequence[RequestOutput], step: StepRecord | None) -> None:
        for output in outputs:
            if output.finish_reason is not None:
                self._forget_place(output.id)
        if not self.asleep:
            self.weights_version = replica.weights_version  # under a change they differ, and streams tell which it was
        self._deliver(outputs, total([each.stats for each in self._replicas]), step, replica.number)

    def able(self, replica: Replica) -> None:
        if len(self._unplaced):
            self._place()

    def emptied(self, replica: Replica) -> None:
        self._router.forget(replica.number)
        had = [request_id for request_id, place in self._places.items() if place is replica]
        self.history.engine_died(replica.number, had)
        self.stats = total([each.stats for each in self._replicas])
        self.quarantined = sum(each.quarantined for each in self._replicas)

    def ended(self, replica: Replica, *, changing: bool) -> None:
        self.deaths = sum(each.deaths for each in self._replicas)
        self.replays = sum(each.replays for each in self._replicas)
        if not changing:
            self._move(replica)

    def _move(self, replica: Replica) -> None:
        """Let others compute its requests, but for those that may have ended it."""
        leaving = replica.leave(self._unplaced)
        for request_id in leaving:
            self._forget_place(request_id)
        staying = sum(place is replica for place in self._places.values())
        log.warning("engine %d: %d requests leave it, %d wait for the next", replica.number, len(leaving), staying)
        self._place()

    def given_up(self, replica: Replica) -> None:
        if self._failure is not None or not self._started:
            return
        if not any(each.alive for each in self._replicas):
            return self._fail("the engine could not be brought back")
        log.error("engine %d is gone for good; the others go on without it", replica.number)
        self._move(replica)
        error = EngineError("the engine that this request may have ended could not be replaced")
        for request_id in [each for each, place in self._places.items() if place is replica]:
            self.end_stream(request_id, error)

    def end_stream(self, request_id: str, error: QuireError) -> None:
        if request_id in self._streams:
            self._streams[request_id].give_up(error)


def _alike(one: Request, other: Request) -> bool:
    """Whether they surely have the same pieces: those of one call do."""
    return (one.prompt_ids, one.cache_salt, one.adapter) == (other.prompt_ids, other.cache_salt, other.adapter)


Processes = ProcessClient | Replicas


def processes(config: EngineConfig) -> Processes:
    """A client whose engines are in processes of their own, as many as the configuration says."""
    return ProcessClient(config) if config.data_parallel_size == 1 else Replicas(config)
