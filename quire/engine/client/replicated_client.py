"""Several engines of one model behind one client. When an engine ends, its requests continue on another; while all
sleep or restart, requests wait. A replica that cannot restart is left out. The client fails when the last one does.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

import msgspec

from quire.engine.client.engine_client import EngineClient
from quire.engine.client.engine_core_client import EngineState, ExclusiveClient
from quire.engine.client.engine_process import Launcher
from quire.engine.client.process_client import ProcessClient
from quire.engine.client.replica_router import Router, prefix_pieces
from quire.engine.client.replica_shares import describe_replicas, replica_config, replica_cores, replica_environments
from quire.engine.common.config import EngineConfig
from quire.engine.common.errors import ConfigError, EngineError, Overloaded, QuireError
from quire.engine.common.types import EngineCoreOutput, EngineCoreRequest, EngineInfo
from quire.engine.core.stats import BlockTableView, EngineView, StepRecord, sum_stats
from quire.engine.processes.gpus import VisibleGPUs, find_gpus

log = logging.getLogger("quire.replicas")
_POLL_SECONDS = 0.05


class ReplicatedClient(ExclusiveClient):
    owner: EngineClient

    def __init__(self, config: EngineConfig, launcher: Launcher | None = None, gpus: VisibleGPUs | None = None) -> None:
        """If `gpus` is None, replicas use the CPU. Raises ConfigError if there are too few GPUs."""
        super().__init__()
        count = config.data_parallel_size
        environments = replica_environments(config, gpus)
        # With GPUs, replicas are not bound to cores, because nothing tells which cores are near a GPU.
        cores = replica_cores(count) if gpus is None else [set[int]()] * count
        self._replicas = [
            ProcessClient(
                replica_config(config, number, cores, on_gpus=gpus is not None),
                number,
                cores[number],
                launcher,
                environments[number],
            )
            for number in range(count)
        ]
        self._note = describe_replicas(config, gpus)
        for each in self._replicas:
            each.owner = self
        self._hashed = config.enable_prefix_caching
        self._router = Router(count)
        self._places: dict[str, ProcessClient] = {}
        self._unplaced: dict[str, None] = {}
        """In order of submission."""
        self._started = False

    @property
    def engines(self) -> Sequence[EngineState]:
        return [state for each in self._replicas for state in each.engines]

    @property
    def pid(self) -> int | None:
        return self._replicas[0].pid

    @property
    def responsive(self) -> bool:
        return any(each.responsive for each in self._replicas)

    @property
    def healthy(self) -> bool:
        return any(each.healthy for each in self._replicas)

    def launch(self) -> None:
        for each in self._replicas:
            each.launch()

    async def start(self) -> EngineInfo:
        starts = [asyncio.create_task(each.start()) for each in self._replicas]
        try:
            infos = await asyncio.gather(*starts)
            # All replicas get the shortest context among them, so that tokens do not depend on the replica.
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
        return msgspec.structs.replace(infos[0], max_model_len=context, notes=[*infos[0].notes, self._note])

    async def stop(self) -> None:
        self.die("the engine was stopped")
        await asyncio.gather(*(each.stop() for each in self._replicas))

    async def rest(self, level: int) -> None:
        await self._change(lambda each: each.rest(level))
        self.asleep = True

    async def load(self, weights: str | None, version: str) -> None:
        await self._change(lambda each: each.load(weights, version))
        self.weights_version, self.asleep = version, False

    async def check(self, weights: str) -> None:
        await self._change(lambda each: each.check(weights))

    async def _change(self, change: Callable[[ProcessClient], Awaitable[None]]) -> None:
        living = [each for each in self._replicas if each.failure is None]
        if self.failure is not None:
            raise self.failure
        if not all(each.ready or each.asleep for each in living):
            raise Overloaded("an engine is being replaced; please try again")
        results = await asyncio.gather(*(change(each) for each in living), return_exceptions=True)
        errors = [error for error in results if error is not None]
        if len(errors) == len(living):
            raise next((error for error in errors if isinstance(error, ConfigError)), errors[0])
        for each, error in zip(living, results, strict=True):
            if error is not None:
                await self._change_too(each, change)

    async def _change_too(self, replica: ProcessClient, change: Callable[[ProcessClient], Awaitable[None]]) -> None:
        """Repeats a change that other replicas completed, once this replica is back. Gives the replica up if it refuses
        the change.
        """
        while replica.failure is None:
            await asyncio.sleep(_POLL_SECONDS)
            if not replica.ready and not replica.asleep:
                continue
            try:
                return await change(replica)
            except (EngineError, Overloaded):
                continue
            except QuireError as error:
                log.error(
                    "engine %d failed a call that the other engines completed, and is given up: %s",
                    replica.number,
                    error,
                )
                await replica.stop()

    def reset_prefix_cache(self) -> None:
        for each in self._replicas:
            each.reset_prefix_cache()
            self._router.forget(each.number)

    def send(self, requests: Sequence[EngineCoreRequest]) -> None:
        self._unplaced |= dict.fromkeys(request.id for request in requests)
        self._place()

    def abort(self, request_id: str) -> None:
        if request_id in self._unplaced:
            del self._unplaced[request_id]
        elif (replica := self._forget_place(request_id)) is not None:
            replica.abort(request_id)

    async def snapshot(self) -> EngineView | None:
        from quire.engine.core.engine_view import (
            merge_views,  # imports NumPy, which a server loads only after it has started its engine
        )

        snapshots = await asyncio.gather(*(each.snapshot() for each in self._replicas if each.responsive))
        views = [each for each in snapshots if each is not None]
        return merge_views(views) if views else None

    async def get_block_table(self, request_id: str) -> BlockTableView | None:
        replica = self._places.get(request_id)
        return await replica.get_block_table(request_id) if replica is not None and replica.responsive else None

    async def call(self, content: bytes) -> list[bytes] | None:
        replies = await asyncio.gather(*(each.call(content) for each in self._replicas))
        results = [each for each in replies if each is not None]
        return [result for each in results for result in each] if len(results) == len(replies) else None

    def _place(self) -> None:
        computing = [each for each in self._replicas if each.ready]
        able = [each.number for each in computing if each.free] or [each.number for each in computing]
        if not able:
            return
        chosen: dict[int, list[EngineCoreRequest]] = {}
        last: EngineCoreRequest | None = None
        pieces: list[bytes] = []
        unplaced, self._unplaced = self._unplaced, {}
        for request in map(self.owner.request, unplaced):
            if self._hashed and not (last is not None and _alike(last, request)):
                pieces = prefix_pieces(request)
            last, number = request, self._router.place(pieces, able)
            self._places[request.id] = self._replicas[number]
            chosen.setdefault(number, []).append(request)
        for number, requests in chosen.items():
            self._replicas[number].send(requests)

    def _forget_place(self, request_id: str) -> ProcessClient | None:
        replica = self._places.pop(request_id, None)
        if replica is not None:
            self._router.record_request_end(replica.number)
        return replica

    def _move(self, replica: ProcessClient) -> None:
        """Suspects stay."""
        leaving = replica.leave()
        for request_id in leaving:
            self._forget_place(request_id)
        self._unplaced |= dict.fromkeys(leaving)
        staying = sum(place is replica for place in self._places.values())
        log.warning(
            "engine %d: %d requests move to other engines, %d wait for its successor",
            replica.number,
            len(leaving),
            staying,
        )

    # Methods of RequestOwner

    def request(self, request_id: str) -> EngineCoreRequest:
        return self.owner.request(request_id)

    def deliver(self, outputs: Sequence[EngineCoreOutput], step: StepRecord | None = None, engine: int = 0) -> None:
        for output in outputs:
            if output.finish_reason is not None:
                self._forget_place(output.id)
        if not self.asleep:  # during a change, replicas have different versions
            self.weights_version = self._replicas[engine].weights_version
        self.stats = sum_stats([each.stats for each in self._replicas])
        self.owner.deliver(outputs, step, engine)

    def handle_engine_loss(self, engine: int = 0) -> None:
        self._router.forget(engine)
        self.stats = sum_stats([each.stats for each in self._replicas])
        had = [request_id for request_id, place in self._places.items() if place is self._replicas[engine]]
        self.owner.handle_engine_loss(engine, had)

    def handle_engine_change(self, engine: int = 0) -> None:
        self.deaths = sum(each.deaths for each in self._replicas)
        self.replays = sum(each.replays for each in self._replicas)
        self.quarantined = sum(each.quarantined for each in self._replicas)
        replica = self._replicas[engine]
        if not replica.ready and not replica.changing:
            self._move(replica)
        if self._unplaced:
            self._place()

    def give_up(self, request_id: str, error: QuireError) -> None:
        self.owner.give_up(request_id, error)

    def fail(self, error: EngineError, engine: int = 0) -> None:
        if self.failure is not None or not self._started:
            return
        if all(each.failure is not None for each in self._replicas):
            return self.die("the engine could not be restarted")
        log.error("engine %d has ended for good; the others continue without it", engine)
        self._move(self._replicas[engine])
        self._place()
        gone = EngineError("this request may have crashed its engine, which could not be replaced")
        for request_id in [each for each, place in self._places.items() if place is self._replicas[engine]]:
            self.owner.give_up(request_id, gone)


def _alike(one: EngineCoreRequest, other: EngineCoreRequest) -> bool:
    return (one.prompt_ids, one.cache_salt, one.adapter, one.spans) == (
        other.prompt_ids,
        other.cache_salt,
        other.adapter,
        other.spans,
    )


def processes(
    config: EngineConfig,
    launcher: Launcher | None = None,
    find_gpus: Callable[[str], VisibleGPUs | None] = find_gpus,
) -> EngineClient:
    """Raises ConfigError if there are fewer GPUs than replicas need."""
    if config.data_parallel_size == 1:
        return EngineClient(ProcessClient(config, launcher=launcher))
    return EngineClient(ReplicatedClient(config, launcher, find_gpus(config.device)))
