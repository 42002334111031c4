"""The engine: scheduler, executor and steps put together, and the process that runs it.

Only this module imports both halves, the torch-free control half and the worker; so only what starts an engine imports
it.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence

import msgspec
import zmq

from quire.engine.checkpoint.families import ENCODERS
from quire.engine.checkpoint.files import stored_at
from quire.engine.checkpoint.kv_folder import forget_pages
from quire.engine.checkpoint.overrides import model_path, read_configured
from quire.engine.checkpoint.page_groups import as_configured
from quire.engine.checkpoint.parts.states import PIECE
from quire.engine.config import EngineConfig, fitted
from quire.engine.core.drafter import Drafter, StepwiseDrafter
from quire.engine.core.executor import Executor
from quire.engine.core.no_tiers import NoTiers
from quire.engine.core.scheduler import Scheduler
from quire.engine.core.snapshot import take_snapshot
from quire.engine.core.state_snapshots import SnapshotPlan
from quire.engine.core.stats import EngineStats, EngineView, StepRecord
from quire.engine.core.steps import Steps
from quire.engine.drafting.choose import choose_drafter
from quire.engine.drafting.heads import HeadDrafter
from quire.engine.drafting.model import DraftPages, ModelDrafter
from quire.engine.errors import EngineError, InvalidRequest, QuireError
from quire.engine.link.engine_messages import (
    Abort,
    Asleep,
    Call,
    Called,
    Check,
    Checked,
    Failed,
    FromEngine,
    Load,
    Ready,
    Refused,
    ResetPrefixCache,
    Sleep,
    SnapshotRequest,
    SnapshotTaken,
    Stepped,
    Submit,
    decode_to_engine,
    encode,
    together,
)
from quire.engine.lora.queue import AdapterQueue
from quire.engine.processes.heartbeat import Heartbeat, NoHeartbeat
from quire.engine.settings.classes import import_class
from quire.engine.tiers.choose import check_tiers, choose_tiers
from quire.engine.tiers.identity import WeightFiles, code_hash, content_of
from quire.engine.tiers.tiers import Tiers
from quire.engine.types import EngineCoreOutput, EngineCoreRequest
from quire.engine.worker.device import for_card
from quire.engine.worker.encoder_startup import start_encoder
from quire.engine.worker.loading.check import check_meaning, check_weights
from quire.engine.worker.loading.forward import ForwardPass, Logprobs
from quire.engine.worker.loading.loader import Tensors
from quire.engine.worker.memory import return_memory
from quire.engine.worker.runner import ModelRunner
from quire.engine.worker.startup import Worker, start_worker
from quire.engine.worker.warmup import warm_up

_LAST_WORDS_MS = 30_000
"""For which a process that cannot start waits until its parent, which has much to import, listens to why."""


class EngineCore:
    """A model, its KV cache and a scheduler. Raises ConfigError for a configuration it cannot start with."""

    def __init__(
        self,
        config: EngineConfig,
        heartbeat: NoHeartbeat | None = None,
        tensors: Tensors | None = None,
        *,
        make_drafter: Callable[[Worker, EngineConfig], Drafter | None] | None = None,
        steps_ahead: int | None = None,
        make_tiers: Callable[..., Tiers] = Tiers,
    ) -> None:
        """tensors: weights under their names in the checkpoint, instead of those in files. make_drafter: makes what
        guesses tokens; by default drafter_of. steps_ahead: see Steps; by default what pays on the device. make_tiers:
        see choose_tiers."""
        began = time.perf_counter()
        path = model_path(config)
        model = as_configured(read_configured(config, path), config)
        config = config.of_checkpoint((model.raw.get("quantization_config") or {}).get("quant_method"))
        config = for_card(config)
        if config.weights is not None:
            check_meaning(model, stored_at(config), path)
        heartbeat = heartbeat or NoHeartbeat()
        encoder = model.model_type in ENCODERS and model.given is None
        check_tiers(config, encoder=encoder)
        files = WeightFiles(config) if tensors is None else None
        start = start_encoder if encoder else start_worker
        worker = start(config, path, model, heartbeat.progress, tensors, heartbeat.rank_ended)
        self._drafting = None if worker.draft is None else worker.draft.source
        prepared = warm_up(worker.runner, config.warmup_seconds, config.step_tokens, self._drafting)
        plan = worker.plan
        movers = (worker.runner.mover, files, plan.block_size, worker.runner.state_mover if plan.snapshots else None)
        tiers, kept = choose_tiers(config, model, *movers, make_tiers)
        self.runner: Executor = worker.runner
        drafter = (make_drafter or drafter_of)(worker, config)
        self.scheduler = scheduler_of(config, worker, model.eos_token_ids, drafter, tiers)
        self.add, self.abort = self.scheduler.add, self.scheduler.abort
        if config.scheduling_policy == "fcfs":
            self.add = self._add_as_it_came
        self._config, self._model, self._checkpoint = config, model, worker.checkpoint
        self._heartbeat = heartbeat
        self._everywhere, self._offloaded = worker.everywhere, worker.offloaded
        ahead = worker.steps_ahead if steps_ahead is None else steps_ahead
        self._steps = Steps(self.scheduler, self.runner, ahead, heartbeat)
        seconds = time.perf_counter() - began
        self.info = msgspec.structs.replace(
            worker.info,
            load_seconds=seconds,
            content=content_of(model, files),
            code=code_hash().hex(),
            arithmetic=worker.info.arithmetic + tiers.room,
            notes=[*worker.info.notes, *prepared, *kept],
        )

    def _add_as_it_came(self, engine_request: EngineCoreRequest) -> None:
        self.scheduler.add(msgspec.structs.replace(engine_request, priority=0))

    @property
    def busy(self) -> bool:
        return self._steps.busy

    @property
    def stats(self) -> EngineStats:
        stats = self.scheduler.stats()
        if self._offloaded is None:
            return stats
        read, kept, guessed, right, read_bytes = self._offloaded()
        guesses = {"experts_guessed": guessed, "experts_guessed_right": right}
        return msgspec.structs.replace(stats, experts_read=read, experts_kept=kept, disk_bytes=read_bytes, **guesses)

    def snapshot(self) -> EngineView:
        return take_snapshot(self.scheduler)

    def prepare(self) -> bool:
        """Do one unit of idle warm-up; False when none is left."""
        self._heartbeat.begin_step([])  # so that a warm-up that hangs is noticed as a step is
        more = self.runner.warm_up() or (self._drafting is not None and self._drafting.warm_up())
        self._heartbeat.end_step()
        return more

    def reset_prefix_cache(self) -> None:
        self.scheduler.prefixes.reset()
        self.scheduler.tiers.reset()

    def call(self, content: bytes) -> list[bytes]:
        """Run a call on every rank: see engine/core/executor.py. Raises InvalidRequest where none takes any."""
        if self._everywhere is None:
            raise InvalidRequest("collective_rpc: encoders and stages (pipeline_parallel_size) take no calls")
        self._heartbeat.begin_step([])  # so that a call that hangs is noticed as a step is
        found = self._everywhere(content)
        self._heartbeat.end_step()
        return found

    def logprobs(self, token_ids: Sequence[int], *, full_vocabulary: bool) -> Logprobs:
        """By a forward pass beside all requests. Raises EngineError for a model that other processes compute too, and
        InvalidRequest for token ids that are no sequence of the model's."""
        if not isinstance(self.runner, ModelRunner) or self._config.ranks > 1:
            raise EngineError("a forward pass is computed by one process alone, this model by several")
        forward = ForwardPass(self.runner.model, self.info.block_size)
        return forward.logprobs(token_ids, full_vocabulary=full_vocabulary)

    def close(self) -> None:
        """Before it is let go: end what runs beside it."""
        self.scheduler.tiers.close()

    def check_weights(self, config: EngineConfig) -> None:
        """Raise ConfigError where an engine of `config` could not load its weights."""
        if config.weights is not None:
            # Against the model's own: the files of the weights before this may be gone by now.
            own = model_path(config)
            check_weights(self._checkpoint, self._model, stored_at(config), own)

    @property
    def last_step(self) -> StepRecord | None:
        """The record of the step that the last call of step() learnt from, if it learnt from one."""
        return self._steps.last

    def step(self) -> list[EngineCoreOutput]:
        """Run one step, if there is one. Returns the outputs of it, and of adds and aborts."""
        return self._steps.step()


def scheduler_of(
    config: EngineConfig, worker: Worker, eos_token_ids: tuple[int, ...], drafter: Drafter | None, tiers: NoTiers
) -> Scheduler:
    """For what the worker has allocated. Raises ConfigError."""
    plan = worker.plan
    return scheduler_class(config)(
        num_blocks=plan.group_pages,
        block_size=plan.block_size,
        windows=plan.windows,
        max_model_len=plan.max_model_len,
        max_num_seqs=plan.sequences,
        max_num_batched_tokens=max(config.step_tokens, plan.max_model_len * worker.whole_prompts),
        long_prefill_token_threshold=None if worker.whole_prompts else config.long_prefill_token_threshold,
        eos_token_ids=eos_token_ids,
        enable_prefix_caching=worker.caches_prefixes,
        hash_block_size=None if worker.whole_prompts else min(plan.block_size, PIECE),
        whole_prompts=worker.whole_prompts,
        pools_all=worker.pooling.kind != "last",
        tasks=worker.info.tasks,
        waiting=None if worker.adapters is None else AdapterQueue(worker.adapters, config.max_loras),
        drafter=drafter,
        tiers=tiers,
        micro_batches=worker.micro_batches,
        snapshots=SnapshotPlan(plan.snapshots, config.snapshot_tokens) if plan.snapshots else None,
    )


def scheduler_class(config: EngineConfig) -> type[Scheduler]:
    """Quire's own, or the one that --scheduler-cls names. Raises ConfigError."""
    if config.scheduler_cls is None:
        return Scheduler
    return import_class("scheduler_cls", config.scheduler_cls, Scheduler, "scheduler")


def drafter_of(worker: Worker, config: EngineConfig) -> Drafter | None:
    """What guesses tokens, if somebody does: by default what grammars force, though not on a GPU, where nothing was
    measured."""
    asked = config.speculative_config
    if "generate" not in worker.info.tasks or (asked is None and worker.info.device != "cpu"):
        return None
    return choose_drafter(asked, worker.step_costs, model_drafter(worker, config), worker.compiler)


def model_drafter(
    worker: Worker, config: EngineConfig
) -> tuple[Drafter | StepwiseDrafter, list[tuple[int, float]]] | None:
    """What asks the model or the heads that draft, if there are some, and what one guess more costs them."""
    if (draft := worker.draft) is None:
        return None
    size = worker.plan.block_size
    pages = DraftPages(size, min(size, PIECE), *draft.pages)
    if draft.heads is not None:
        return HeadDrafter(draft.heads, pages), draft.step_costs
    assert draft.model is not None
    return ModelDrafter(draft.model, pages, config.step_tokens), draft.step_costs


def serve(config: EngineConfig, address: str, heartbeat: Heartbeat) -> int:
    """Serve the parent over the socket at `address`, until the process ends with the parent. Returns only where the
    engine cannot start."""
    context = zmq.Context()
    socket: zmq.Socket[bytes] = context.socket(zmq.PAIR)
    socket.set(zmq.SNDHWM, 0)
    socket.set(zmq.RCVHWM, 0)
    socket.set(zmq.LINGER, 1000)
    socket.connect(address)
    try:
        engine, failure = EngineCore(config, heartbeat), None
        # One that is built anew has the same context and pages, whatever memory is free then.
        config = config.model_copy(update=fitted(engine.info))
        while True:
            _send(socket, Ready(engine.info, failure))
            engine.runner.load_grammars()
            gc.freeze()  # exempts what lives as long as the engine from garbage collection
            change = _compute(engine, socket)
            engine.close()
            del engine
            gc.unfreeze()
            let_go()
            if isinstance(change, Sleep):
                _send(socket, Asleep())
                (config, engine), failure = _slept(config, socket, heartbeat), None
            else:
                config, engine, failure = _built_anew(config, change, heartbeat)
    except QuireError as error:
        _send(socket, Failed(error.message, error.param))
        socket.close(linger=_LAST_WORDS_MS)
        context.term()  # waits for that; the end of the process alone would not
        return 1


def _compute(engine: EngineCore, socket: zmq.Socket[bytes]) -> Sleep | EngineConfig:
    """Compute until the engine is to be let go: to sleep, or for one of another configuration."""
    while True:
        if (change := _receive(engine, socket)) is not None:
            return change
        outputs = engine.step()
        if outputs or engine.last_step is not None:
            _send(socket, Stepped(outputs, engine.stats, engine.last_step))


def _receive(engine: EngineCore, socket: zmq.Socket[bytes]) -> Sleep | EngineConfig | None:
    """Handle all messages that have arrived. With nothing to compute, warm up, or wait for a message. Returns what the
    engine is to be let go for."""
    idle = not engine.busy
    while idle or socket.poll(0):
        if idle and not socket.poll(0) and engine.prepare():
            continue
        match decode_to_engine(socket.recv()):
            case Submit(requests, images):
                idle = False
                for request in together(requests, images):
                    engine.add(request)
            case Abort(ids):
                idle = False
                for request_id in ids:
                    engine.abort(request_id)
            case SnapshotRequest():  # leaves the engine idle
                _send(socket, SnapshotTaken(engine.snapshot()))
            case ResetPrefixCache():
                engine.reset_prefix_cache()
            case Call(content):
                try:
                    _send(socket, Called(engine.call(content)))
                except InvalidRequest as error:
                    _send(socket, Called([], error.message))
            case Sleep() as sleep:
                return sleep
            case (Load(text) | Check(text)) as asked:
                config = EngineConfig.model_validate_json(text)
                try:
                    engine.check_weights(config)
                except QuireError as error:
                    _send(socket, Refused(error.message, error.param))
                else:
                    if isinstance(asked, Load):
                        return config
                    _send(socket, Checked())
    return None


def _slept(config: EngineConfig, socket: zmq.Socket[bytes], heartbeat: Heartbeat) -> tuple[EngineConfig, EngineCore]:
    """Wait without an engine until there is one again."""
    while True:
        message = decode_to_engine(socket.recv())
        if isinstance(message, ResetPrefixCache) and config.kv_offload_dir is not None:
            forget_pages(config.kv_offload_dir)
        if isinstance(message, Load):  # others are of before the sleep
            config = EngineConfig.model_validate_json(message.config)
            try:
                return config, EngineCore(config, heartbeat)
            except QuireError as error:
                refused = Refused(error.message, error.param)
            let_go()
            _send(socket, refused)


def _built_anew(
    before: EngineConfig, config: EngineConfig, heartbeat: NoHeartbeat
) -> tuple[EngineConfig, EngineCore, str | None]:
    """An engine of `config`, or where it cannot start one of `before`, and why; with its configuration. The engine
    before must have been let go. Raises ConfigError where neither can start."""
    try:
        return config, EngineCore(config, heartbeat), None
    except QuireError as error:
        failure = error.message
    let_go()
    return before, EngineCore(before, heartbeat), failure


def let_go() -> None:
    """Free the memory of an engine that nobody holds any more."""
    gc.collect()  # an engine has reference cycles
    return_memory()


def _send(socket: zmq.Socket[bytes], message: FromEngine) -> None:
    socket.send(encode(message))
