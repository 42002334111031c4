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
from quire.engine.config import EngineConfig, capacity_settings
from quire.engine.core.drafter import Drafter, StepwiseDrafter
from quire.engine.core.engine_view import take_engine_view
from quire.engine.core.executor import Executor
from quire.engine.core.kv_offload import KVOffloader
from quire.engine.core.scheduler import Scheduler
from quire.engine.core.scheduler_config import SchedulerConfig
from quire.engine.core.state_snapshots import SnapshotPlan
from quire.engine.core.stats import EngineStats, EngineView, StepRecord
from quire.engine.core.step_runner import StepRunner
from quire.engine.drafting.drafter_factory import choose_drafter
from quire.engine.drafting.head_drafter import HeadDrafter
from quire.engine.drafting.model_drafter import DraftBlocks, ModelDrafter
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
from quire.engine.lora.adapter_queue import AdapterQueue
from quire.engine.processes.heartbeat import Heartbeat, NoHeartbeat
from quire.engine.settings.class_import import import_class
from quire.engine.tiers.kv_identity import WeightFiles, code_hash, content_digest
from quire.engine.tiers.tier_factory import check_tiers, choose_tiers
from quire.engine.tiers.tiered_offloader import TieredKVOffloader
from quire.engine.types import EngineCoreOutput, EngineCoreRequest
from quire.engine.worker.device_memory import release_cached_memory
from quire.engine.worker.device_plan import apply_gpu_defaults
from quire.engine.worker.encoder_startup import start_encoder
from quire.engine.worker.loading.forward_pass import ForwardPass, Logprobs
from quire.engine.worker.loading.weight_check import check_same_model, check_weights
from quire.engine.worker.loading.weight_loader import NamedTensors
from quire.engine.worker.model_runner import ModelRunner
from quire.engine.worker.startup import StartedWorker, start_worker
from quire.engine.worker.warmup import warm_up_runner

_ERROR_LINGER_MS = 30_000
"""For which a process that cannot start waits until its parent, which has much to import, listens to why."""


class EngineCore:
    """A model, its KV cache and a scheduler. Raises ConfigError for a configuration it cannot start with."""

    def __init__(
        self,
        config: EngineConfig,
        heartbeat: NoHeartbeat | None = None,
        tensors: NamedTensors | None = None,
        *,
        make_drafter: Callable[[StartedWorker, EngineConfig], Drafter | None] | None = None,
        steps_ahead: int | None = None,
        make_tiers: Callable[..., TieredKVOffloader] = TieredKVOffloader,
    ) -> None:
        """tensors: weights under their names in the checkpoint, instead of those in files. make_drafter: makes what
        guesses tokens; by default make_default_drafter. steps_ahead: see Steps; by default what pays on the device.
        make_tiers: see choose_tiers."""
        began = time.perf_counter()
        path = model_path(config)
        model = as_configured(read_configured(config, path), config)
        config = config.without_redundant_quantization((model.raw.get("quantization_config") or {}).get("quant_method"))
        config = apply_gpu_defaults(config)
        if config.weights is not None:
            check_same_model(model, stored_at(config), path)
        heartbeat = heartbeat or NoHeartbeat()
        is_encoder = model.model_type in ENCODERS and model.given is None
        check_tiers(config, is_encoder=is_encoder)
        weight_files = WeightFiles(config) if tensors is None else None
        start = start_encoder if is_encoder else start_worker
        worker = start(config, path, model, heartbeat.progress, tensors, heartbeat.rank_ended)
        self._draft_source = None if worker.draft_worker is None else worker.draft_worker.drafter
        warmup_notes = warm_up_runner(
            worker.executor, config.warmup_seconds, config.max_step_tokens, self._draft_source
        )
        plan = worker.kv_plan
        movers = (
            worker.executor.make_block_mover,
            weight_files,
            plan.block_size,
            worker.executor.make_state_mover if plan.snapshots else None,
        )
        tiers, tier_notes = choose_tiers(config, model, *movers, make_tiers)
        self.executor: Executor = worker.executor
        drafter = (make_drafter or make_default_drafter)(worker, config)
        self.scheduler = make_scheduler(config, worker, model.eos_token_ids, drafter, tiers)
        self.add_request, self.abort_request = self.scheduler.add_request, self.scheduler.abort_request
        if config.scheduling_policy == "fcfs":
            self.add_request = self._add_without_priority
        self._config, self._model, self._checkpoint = config, model, worker.expected_weights
        self._heartbeat = heartbeat
        self._collective_rpc, self._expert_counts = worker.collective_rpc, worker.get_offload_counts
        num_steps_ahead = worker.steps_ahead if steps_ahead is None else steps_ahead
        self._step_runner = StepRunner(self.scheduler, self.executor, num_steps_ahead, heartbeat)
        seconds = time.perf_counter() - began
        self.info = msgspec.structs.replace(
            worker.engine_info,
            load_seconds=seconds,
            content=content_digest(model, weight_files),
            code=code_hash().hex(),
            arithmetic=worker.engine_info.arithmetic + tiers.capacity_text,
            notes=[*worker.engine_info.notes, *warmup_notes, *tier_notes],
        )

    def _add_without_priority(self, engine_request: EngineCoreRequest) -> None:
        self.scheduler.add_request(msgspec.structs.replace(engine_request, priority=0))

    @property
    def has_work(self) -> bool:
        return self._step_runner.has_work

    @property
    def engine_stats(self) -> EngineStats:
        stats = self.scheduler.make_stats()
        if self._expert_counts is None:
            return stats
        num_read, num_kept, num_guessed, num_right, read_bytes = self._expert_counts()
        guess_counts = {"experts_guessed": num_guessed, "experts_guessed_right": num_right}
        return msgspec.structs.replace(
            stats, experts_read=num_read, experts_kept=num_kept, disk_bytes=read_bytes, **guess_counts
        )

    def take_view(self) -> EngineView:
        return take_engine_view(self.scheduler)

    def warm_up_once(self) -> bool:
        """Do one unit of idle warm-up; False when none is left."""
        self._heartbeat.begin_step([])  # so that a warm-up that hangs is noticed as a step is
        more = self.executor.warm_up() or (self._draft_source is not None and self._draft_source.capture_next_graph())
        self._heartbeat.end_step()
        return more

    def reset_prefix_cache(self) -> None:
        self.scheduler.kv_cache_manager.reset_prefix_cache()
        self.scheduler.kv_offloader.clear_tiers()

    def run_collective_rpc(self, content: bytes) -> list[bytes]:
        """Run a call on every rank: see engine/core/executor.py. Raises InvalidRequest where none takes any."""
        if self._collective_rpc is None:
            raise InvalidRequest("collective_rpc: encoders and stages (pipeline_parallel_size) take no calls")
        self._heartbeat.begin_step([])  # so that a call that hangs is noticed as a step is
        results = self._collective_rpc(content)
        self._heartbeat.end_step()
        return results

    def compute_logprobs(self, token_ids: Sequence[int], *, full_vocabulary: bool) -> Logprobs:
        """By a forward pass beside all requests. Raises EngineError for a model that other processes compute too, and
        InvalidRequest for token ids that are no sequence of the model's."""
        if not isinstance(self.executor, ModelRunner) or self._config.world_size > 1:
            raise EngineError("a forward pass is computed by one process alone, this model by several")
        forward = ForwardPass(self.executor.model, self.info.block_size)
        return forward.compute_logprobs(token_ids, full_vocabulary=full_vocabulary)

    def shut_down(self) -> None:
        """Before it is let go: end what runs beside it."""
        self.scheduler.kv_offloader.close_tiers()

    def check_weights(self, config: EngineConfig) -> None:
        """Raise ConfigError where an engine of `config` could not load its weights."""
        if config.weights is not None:
            # Against the model's own: the files of the weights before this may be gone by now.
            model_files = model_path(config)
            check_weights(self._checkpoint, self._model, stored_at(config), model_files)

    @property
    def last_step(self) -> StepRecord | None:
        """The record of the step that the last call of step() learnt from, if it learnt from one."""
        return self._step_runner.last_record

    def step(self) -> list[EngineCoreOutput]:
        """Run one step, if there is one. Returns the outputs of it, and of adds and aborts."""
        return self._step_runner.run_step()


def make_scheduler(
    config: EngineConfig,
    worker: StartedWorker,
    eos_token_ids: tuple[int, ...],
    drafter: Drafter | None,
    tiers: KVOffloader,
) -> Scheduler:
    """For what the worker has allocated. Raises ConfigError."""
    plan = worker.kv_plan
    return resolve_scheduler_class(config)(
        SchedulerConfig(
            num_blocks=plan.group_pages,
            block_size=plan.block_size,
            windows=plan.windows,
            max_model_len=plan.max_model_len,
            max_num_seqs=plan.sequences,
            max_num_batched_tokens=max(config.max_step_tokens, plan.max_model_len * worker.needs_whole_prompts),
            long_prefill_token_threshold=None if worker.needs_whole_prompts else config.long_prefill_token_threshold,
            eos_token_ids=eos_token_ids,
            enable_prefix_caching=worker.caches_prefixes,
            hash_block_size=None if worker.needs_whole_prompts else min(plan.block_size, PIECE),
            whole_prompts=worker.needs_whole_prompts,
            pools_all=worker.pooling.kind != "last",
            tasks=worker.engine_info.tasks,
            micro_batches=worker.micro_batches,
            snapshots=SnapshotPlan(plan.snapshots, config.snapshot_tokens) if plan.snapshots else None,
        ),
        waiting=None if worker.adapter_loader is None else AdapterQueue(worker.adapter_loader, config.max_loras),
        drafter=drafter,
        tiers=tiers,
    )


def resolve_scheduler_class(config: EngineConfig) -> type[Scheduler]:
    """Quire's own, or the one that --scheduler-cls names. Raises ConfigError."""
    if config.scheduler_cls is None:
        return Scheduler
    return import_class("scheduler_cls", config.scheduler_cls, Scheduler, "scheduler")


def make_default_drafter(worker: StartedWorker, config: EngineConfig) -> Drafter | None:
    """What guesses tokens, if somebody does: by default what grammars force, though not on a GPU, where nothing was
    measured."""
    speculative = config.speculative_config
    if "generate" not in worker.engine_info.tasks or (speculative is None and worker.engine_info.device != "cpu"):
        return None
    return choose_drafter(
        speculative, worker.step_costs, make_model_drafter(worker, config), worker.get_grammar_compiler
    )


def make_model_drafter(
    worker: StartedWorker, config: EngineConfig
) -> tuple[Drafter | StepwiseDrafter, list[tuple[int, float]]] | None:
    """What asks the model or the heads that draft, if there are some, and what one guess more costs them."""
    if (draft := worker.draft_worker) is None:
        return None
    size = worker.kv_plan.block_size
    pages = DraftBlocks(size, min(size, PIECE), *draft.spare_blocks)
    if draft.head_runner is not None:
        return HeadDrafter(draft.head_runner, pages), draft.step_costs
    assert draft.model_runner is not None
    return ModelDrafter(draft.model_runner, pages, config.max_step_tokens), draft.step_costs


def run_engine_core(config: EngineConfig, address: str, heartbeat: Heartbeat) -> int:
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
        config = config.model_copy(update=capacity_settings(engine.info))
        while True:
            _send_message(socket, Ready(engine.info, failure))
            engine.executor.load_grammars()
            gc.freeze()  # exempts what lives as long as the engine from garbage collection
            change = _run_until_change(engine, socket)
            engine.shut_down()
            del engine
            gc.unfreeze()
            free_engine_memory()
            if isinstance(change, Sleep):
                _send_message(socket, Asleep())
                (config, engine), failure = _sleep_until_load(config, socket, heartbeat), None
            else:
                config, engine, failure = _rebuild_engine(config, change, heartbeat)
    except QuireError as error:
        _send_message(socket, Failed(error.message, error.param))
        socket.close(linger=_ERROR_LINGER_MS)
        context.term()  # waits for that; the end of the process alone would not
        return 1


def _run_until_change(engine: EngineCore, socket: zmq.Socket[bytes]) -> Sleep | EngineConfig:
    """Compute until the engine is to be let go: to sleep, or for one of another configuration."""
    while True:
        if (change := _handle_messages(engine, socket)) is not None:
            return change
        outputs = engine.step()
        if outputs or engine.last_step is not None:
            _send_message(socket, Stepped(outputs, engine.engine_stats, engine.last_step))


def _handle_messages(engine: EngineCore, socket: zmq.Socket[bytes]) -> Sleep | EngineConfig | None:
    """Handle all messages that have arrived. With nothing to compute, warm up, or wait for a message. Returns what the
    engine is to be let go for."""
    idle = not engine.has_work
    while idle or socket.poll(0):
        if idle and not socket.poll(0) and engine.warm_up_once():
            continue
        match decode_to_engine(socket.recv()):
            case Submit(requests, images):
                idle = False
                for request in together(requests, images):
                    engine.add_request(request)
            case Abort(ids):
                idle = False
                for request_id in ids:
                    engine.abort_request(request_id)
            case SnapshotRequest():  # leaves the engine idle
                _send_message(socket, SnapshotTaken(engine.take_view()))
            case ResetPrefixCache():
                engine.reset_prefix_cache()
            case Call(content):
                try:
                    _send_message(socket, Called(engine.run_collective_rpc(content)))
                except InvalidRequest as error:
                    _send_message(socket, Called([], error.message))
            case Sleep() as sleep:
                return sleep
            case (Load(text) | Check(text)) as message:
                config = EngineConfig.model_validate_json(text)
                try:
                    engine.check_weights(config)
                except QuireError as error:
                    _send_message(socket, Refused(error.message, error.param))
                else:
                    if isinstance(message, Load):
                        return config
                    _send_message(socket, Checked())
    return None


def _sleep_until_load(
    config: EngineConfig, socket: zmq.Socket[bytes], heartbeat: Heartbeat
) -> tuple[EngineConfig, EngineCore]:
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
            free_engine_memory()
            _send_message(socket, refused)


def _rebuild_engine(
    previous: EngineConfig, config: EngineConfig, heartbeat: NoHeartbeat
) -> tuple[EngineConfig, EngineCore, str | None]:
    """An engine of `config`, or where it cannot start one of `previous`, and why; with its configuration. The engine
    before must have been let go. Raises ConfigError where neither can start."""
    try:
        return config, EngineCore(config, heartbeat), None
    except QuireError as error:
        failure = error.message
    free_engine_memory()
    return previous, EngineCore(previous, heartbeat), failure


def free_engine_memory() -> None:
    """Free the memory of an engine that nobody holds any more."""
    gc.collect()  # an engine has reference cycles
    release_cached_memory()


def _send_message(socket: zmq.Socket[bytes], message: FromEngine) -> None:
    socket.send(encode(message))
