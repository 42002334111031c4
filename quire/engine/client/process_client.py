"""Runs the engine in its own process, and replaces the process when it ends."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress
from types import MappingProxyType

from quire.engine.client import messages
from quire.engine.client.engine_core_client import ExclusiveClient
from quire.engine.client.engine_process import (
    EngineProcess,
    KilledDuringStart,
    Launcher,
    engine_json,
    reset_prefix_cache,
)
from quire.engine.client.messages import EngineCoreMethods
from quire.engine.client.replay import Replay
from quire.engine.client.weights import Change
from quire.engine.common import clock
from quire.engine.common.config import EngineConfig, capacity_settings_from_info
from quire.engine.common.errors import ConfigError, EngineError, Overloaded, QuireError, RequestQuarantined
from quire.engine.common.types import EngineCoreRequest, EngineInfo, Image
from quire.engine.core.stats import BlockTableView, EngineStats, EngineView
from quire.engine.processes.exit_cause import ExitCause
from quire.engine.processes.utility_calls import START, UtilityCall, UtilityCalls, UtilityResult, make_call

log = logging.getLogger("quire.supervisor")

_END_SECONDS = 60.0


class ProcessClient(ExclusiveClient):
    def __init__(
        self,
        config: EngineConfig,
        number: int = 0,
        cores: Set[int] = frozenset(),
        launcher: Launcher | None = None,
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """With empty `cores`, the engine may run on any core. `environment` is added to this process's environment."""
        super().__init__()
        self._launcher = launcher or Launcher(EngineProcess)
        self.number = number
        self._cores = cores
        self._environment = environment
        self._config = config
        self._process: EngineProcess | None = None
        self.ready = False
        self._replay = Replay()
        self._earlier_stats: EngineStats | None = None
        """Counters of ended engines; None until one has ended."""
        self._exit: asyncio.Task[ExitCause] | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._failures = 0
        """Number of successive processes that failed to start or crashed without a request."""
        self._fitted: dict[str, int] = {}
        """Settings that the first engine derived from the free memory."""
        self._content = ""
        self._change: Change | None = None
        self._wakes = asyncio.Event()
        """Set when a change of the weights needs a process, but the engine sleeps and its process has ended."""
        self._ending = False
        """True if the process was asked to end because the engine sleeps."""
        self._calls = UtilityCalls(self._send_call)

    def launch(self) -> None:
        try:
            self._process = self._launcher.start(self._config, self._replay.begin, self._environment)
        except OSError as error:
            raise EngineError(f"no engine process could be started: {error.strerror}") from error
        if self._cores:
            with suppress(OSError):  # the process has ended, or something else has changed its cores
                os.sched_setaffinity(self._process.pid, self._cores)

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def responsive(self) -> bool:
        process = self._process
        return self.ready and process is not None and process.silence < self._config.engine_heartbeat_timeout

    @property
    def healthy(self) -> bool:
        if (process := self._process) is None:
            return self.failure is None and self.asleep
        return (self.ready or self.changing) and process.silence < self._config.engine_heartbeat_timeout

    @property
    def changing(self) -> bool:
        return self.asleep or self._change is not None

    @property
    def free(self) -> bool:
        return self.ready and not self._replay.isolating

    async def rest(self, level: int) -> None:
        call = make_call(EngineCoreMethods.sleep, self._calls.number())
        await self._exchange(call, self._config, self.weights_version, self._on_asleep)
        if level == 2 and self._process is not None:
            assert self._exit is not None
            self._ending = True
            self._process.end()
            await self._process.wait_until_ended(self._exit, _END_SECONDS)

    async def check(self, weights: str) -> None:
        if not self.asleep:
            config = engine_json(self._with(weights))
            call = make_call(EngineCoreMethods.check_weights, self._calls.number(), config)
            await self._exchange(call, self._config, self.weights_version, self._on_checked)

    async def shorten(self, max_model_len: int) -> None:
        self._fitted["max_model_len"] = max_model_len
        await self.load(None, self.weights_version)

    async def load(self, weights: str | None, version: str) -> None:
        config = self._with(weights)
        call = make_call(EngineCoreMethods.load_weights, self._calls.number(), engine_json(config))
        await self._exchange(call, config, version, self._on_rebuilt_engine)

    def _with(self, weights: str | None) -> EngineConfig:
        update = {} if weights is None else {"weights": weights, "load_format": "auto"}
        return self._config.model_copy(update=self._fitted | {"warmup_seconds": 0.0} | update)

    async def _exchange(
        self, call: UtilityCall, config: EngineConfig, version: str, take_result: Callable[[UtilityResult], None]
    ) -> None:
        """Raises the change's error."""
        if self.failure is not None:
            raise self.failure
        if not self.ready and not self.asleep:
            raise Overloaded("the engine is being replaced; please try again")
        assert call.id is not None
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._change = change = Change(config, version, call.id, take_result, done)
        self.ready = False
        if self._process is None or self._ending:
            self._wakes.set()
        else:
            self._process.send(call)
        try:
            await change.done
        finally:
            self._change = None

    async def start(self) -> EngineInfo:
        try:
            info = await self._start_engine(tries=1)
        except BaseException:
            await self.stop()
            raise
        # A rebuilt engine gets the same context length and number of KV blocks, however much memory is free by then.
        self._fitted, self._content = capacity_settings_from_info(info), info.content
        self._supervisor = asyncio.create_task(self._supervise_or_fail())
        return info

    async def stop(self) -> None:
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.gather(self._supervisor, return_exceptions=True)
        if self._exit is not None:
            self._exit.cancel()
            await asyncio.gather(self._exit, return_exceptions=True)
        if self._process is not None:
            process = self._process
            self._process = None
            self.ready = False
            await process.stop()
        self.die("the engine was stopped")

    def die(self, message: str) -> None:
        super().die(message)
        self._give_up_change(EngineError(message))
        self._calls.end(EngineError(message))

    def send(self, requests: Sequence[EngineCoreRequest]) -> None:
        for request in requests:
            self._replay.add(request.id)
        self._submit_ready()

    def leave(self) -> list[str]:
        """Suspects stay until a new engine has cleared them, so that they cannot end another engine."""
        return self._replay.take_unsuspected()

    def abort(self, request_id: str) -> None:
        self._replay.end(request_id)
        if self._process is not None and self._process.is_connected:
            self._process.send(messages.Abort([request_id]))
        self._submit_ready()

    async def snapshot(self) -> EngineView | None:
        if self._process is None or not self.ready:
            return None
        try:
            return await self._calls.begin(EngineCoreMethods.take_snapshot)
        except EngineError:
            return None

    async def get_block_table(self, request_id: str) -> BlockTableView | None:
        if self._process is None or not self.ready:
            return None
        try:
            return await self._calls.begin(EngineCoreMethods.get_block_table, request_id)
        except EngineError:
            return None

    async def call(self, content: bytes) -> list[bytes] | None:
        if self._process is None or not self.ready:
            return None
        try:
            return await self._calls.begin(EngineCoreMethods.run_collective_rpc, content)
        except EngineError:
            return None

    def reset_prefix_cache(self) -> None:
        reset_prefix_cache(self._process, self._config)

    def _send_call(self, call: UtilityCall) -> None:
        assert self._process is not None
        self._process.send(call)

    def _submit_ready(self) -> None:
        if not self.ready or self._process is None:
            return
        if ready := self._replay.take_ready():
            requests, images = [self.owner.request(each) for each in ready], list[Image]()
            if any(request.images for request in requests):
                requests, images = messages.detach_images(requests)
            self._process.send(messages.Submit(requests, images))
        self.owner.handle_engine_change(self.number)

    async def _start_engine(self, tries: int) -> EngineInfo:
        """After `tries` failures in a row, raises the last error: ConfigError for a refused configuration, EngineError
        with the last lines of standard error. Starts killed from outside do not count.
        """
        while True:
            await asyncio.sleep(self._launcher.backoff[min(self._failures, len(self._launcher.backoff) - 1)])
            try:
                if self._process is None:
                    self.launch()
                return await self._until_ready()
            except KilledDuringStart as error:
                log.warning("%s; starting another", error)
            except (ConfigError, EngineError) as error:
                self._failures += 1
                if self._failures >= tries:
                    raise
                log.error("engine start %d of %d failed: %s", self._failures, tries, error)
            await self._discard_process()

    async def _until_ready(self) -> EngineInfo:
        process = self._process
        assert process is not None
        process.connect()
        self._exit = exited = asyncio.create_task(process.wait_for_exit())
        message = await process.first_message(exited)
        assert isinstance(message, UtilityResult)
        if message.error is not None:
            raise ConfigError(message.error.message, param=message.error.param)
        self.ready = True
        return messages.decode_started(message.value).info

    async def _discard_process(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            assert self._exit is not None
            await process.wait_until_ended(self._exit, _END_SECONDS)
            process.close()

    async def _supervise_or_fail(self) -> None:
        """If supervising fails, all streams end with an error, so that none waits forever."""
        try:
            await self._supervise()
        except (ConfigError, EngineError) as error:
            log.error("the engine could not be restarted: %s", error)
            # Clients see this message. The engine's standard error is left out because it would show them paths.
            self.die("the engine could not be restarted")
        except Exception as error:
            log.exception("the supervisor failed")
            self.die(f"the engine's supervisor failed: {type(error).__name__}")

    async def _supervise(self) -> None:
        while True:
            self._submit_ready()
            cause = await self._serve_until_exit()
            if not self._ending:
                self._on_engine_exit(cause)
            if self._failures >= self._config.max_engine_starts:
                raise EngineError(f"it {cause.description} while idle, {self._failures} times in a row")
            await self._discard_process()
            self._ending = False
            if self.asleep:
                await self._sleep_without_process()
                continue
            began = clock.monotonic()
            # Open streams wait for this engine, so it captures decode graphs only when steps need them.
            self._config = self._config.model_copy(update=self._fitted | {"warmup_seconds": 0.0})
            if (await self._start_engine(self._config.max_engine_starts)).content != self._content:
                raise EngineError("the model's files have changed since the start: restart the server")
            log.warning("a new engine is ready after %.1f s", clock.monotonic() - began)

    async def _sleep_without_process(self) -> None:
        while self.asleep:
            await self._wakes.wait()
            self._wakes.clear()
            change, before = self._change, self._config
            if change is None:
                continue
            self._config = change.config
            try:
                self._content = (await self._start_engine(tries=1)).content
            except (ConfigError, EngineError) as error:
                self._config, self._failures = before, 0
                await self._discard_process()
                self._give_up_change(error)
            else:
                self._finish_change()

    async def _serve_until_exit(self) -> ExitCause:
        process, exited = self._process, self._exit
        assert process is not None
        assert exited is not None
        receiving = asyncio.create_task(self._receive(process))
        try:
            await asyncio.wait((exited, receiving), return_when=asyncio.FIRST_COMPLETED)
            if receiving.done():
                receiving.result()
            return await exited
        finally:
            receiving.cancel()

    async def _receive(self, process: EngineProcess) -> None:
        while True:
            message = await process.receive()
            if isinstance(message, messages.Stepped):
                self._deliver_step(message)
            else:
                self._take_result(message)

    def _take_result(self, result: UtilityResult) -> None:
        change = self._change
        if result.id == START:
            assert result.error is not None
            log.error("the engine could not be rebuilt: %s", result.error.message)
        elif change is None or result.id != change.call_id:
            if isinstance(value := self._calls.resolve(result), EngineView):
                self._set_stats(value.stats)
        elif result.error is not None:
            self.ready = not self.asleep
            self._give_up_change(ConfigError(result.error.message, param=result.error.param))
            self._submit_ready()
        else:
            change.take_result(result)

    def _on_asleep(self, result: UtilityResult) -> None:
        self._on_engine_gone(external=True)
        self.asleep = True
        self._finish_change()

    def _on_checked(self, result: UtilityResult) -> None:
        self.ready = True
        self._finish_change()
        self._submit_ready()

    def _deliver_step(self, message: messages.Stepped) -> None:
        for output in message.outputs:
            ended = output.finish_reason is not None
            self._replay.progress(output.id, len(output.new_ids), ended=ended)
        self._failures = 0
        self._submit_ready()
        self._set_stats(message.stats)
        self.owner.deliver(message.outputs, message.step, self.number)

    def _set_stats(self, stats: EngineStats) -> None:
        self.stats = stats if self._earlier_stats is None else stats.add_earlier(self._earlier_stats)

    def _on_rebuilt_engine(self, result: UtilityResult) -> None:
        started = messages.decode_started(result.value)
        self._on_engine_gone(external=True)
        self.ready, self._content = True, started.info.content
        if started.failure is None:
            self._finish_change()
        else:
            self._give_up_change(ConfigError(f"{started.failure}; the previous weights were restored"))
        self._submit_ready()

    def _finish_change(self) -> None:
        change = self._change
        assert change is not None
        if self.ready:
            self._config = change.config
            self.weights_version = change.version
            self.asleep = False
        if not change.done.done():
            change.done.set_result(None)

    def _give_up_change(self, error: QuireError) -> None:
        if self._change is not None and not self._change.done.done():
            self._change.done.set_exception(error)

    def _on_engine_exit(self, cause: ExitCause) -> None:
        self.ready = False
        self.deaths += 1
        if not cause.external and not self.changing and self._replay.idle:
            self._failures += 1  # a crash while idle counts as a failed start
        self._on_engine_gone(external=cause.external or self.changing)
        self.replays += len(self._replay)
        log.warning("the engine %s; %d open requests continue on a new one", cause.description, len(self._replay))
        self._give_up_change(Overloaded(f"the engine {cause.description} before its weights changed; please try again"))
        self.owner.handle_engine_change(self.number)

    def _on_engine_gone(self, *, external: bool) -> None:
        """If `external`, the cause was outside the engine, so no request becomes a suspect."""
        self._calls.end(EngineError("the engine ended before it answered"))
        self._earlier_stats = self.stats = self.stats.without_gauges()
        self.owner.handle_engine_loss(self.number)
        for request_id in self._replay.engine_exited(external=external):
            self.quarantined += 1
            error = RequestQuarantined("this request crashed the engine each time it ran by itself, so it was given up")
            log.error("request %s: %s", request_id, error)
            self.owner.give_up(request_id, error)
