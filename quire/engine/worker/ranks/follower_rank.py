from __future__ import annotations

import gc
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import astuple, replace
from functools import partial
from pathlib import Path

from quire.engine.checkpoint.kv_cache_groups import apply_context_settings
from quire.engine.checkpoint.kv_cache_plan import StateSlotCounts
from quire.engine.checkpoint.overrides import load_model_config, resolve_model_with_overrides
from quire.engine.common.config import EngineConfig
from quire.engine.common.scheduler_output import HeadDraftRequest, SchedulerOutput
from quire.engine.common.types import Adapter
from quire.engine.layers.shard import ModelShard
from quire.engine.lora.adapter_files import CONFIG_FILE, WEIGHTS_FILE
from quire.engine.processes.cpu_cores import stay_on
from quire.engine.processes.utility_calls import invoke, make_result
from quire.engine.text.grammar_compiler import GrammarCompiler
from quire.engine.worker.device_memory import (
    explain_weights_out_of_memory,
    measure_available_memory,
    release_cached_memory,
)
from quire.engine.worker.device_plan import choose_device_plan, configure_cpu
from quire.engine.worker.draft_head_runner import DraftHeadRunner
from quire.engine.worker.images.tower_loader import LoadedTower, load_tower
from quire.engine.worker.loading.adapter_loader import make_adapter_loader
from quire.engine.worker.loading.drafts.draft_head_loader import LoadedDraftHead
from quire.engine.worker.loading.drafts.mtp_loader import load_head_drafter
from quire.engine.worker.loading.kv_allocation import RunnerResources, allocate_runner_resources
from quire.engine.worker.loading.model.loaded_model import LoadedModel, ModelPart
from quire.engine.worker.loading.model.weight_sizes import weight_bytes_in_memory
from quire.engine.worker.loading.model_loader import load_model
from quire.engine.worker.loading.pooler import make_pooler
from quire.engine.worker.loading.weight_digest import compute_weight_digest
from quire.engine.worker.model_runner import ModelRunner
from quire.engine.worker.ranks.pipeline import StageRunner
from quire.engine.worker.ranks.pipeline_stage import PipelineStage
from quire.engine.worker.ranks.rank_adapters import FollowerAdapterLoader
from quire.engine.worker.ranks.rank_messages import (
    KernelVariantFields,
    LoadedPart,
    RankMethods,
    RankReply,
    RankStart,
    SampledTokens,
    StepCommand,
    decode_command,
)
from quire.engine.worker.ranks.rank_rpc import RankWorker, run_rank_call
from quire.engine.worker.ranks.remote_ranks import RankAssignment
from quire.engine.worker.ranks.rendezvous import check_connection, join_group
from quire.engine.worker.sampling.slot_grammars import SlotGrammars
from quire.kernels.device.error_messages import describe_kernel_error
from quire.kernels.distributed import DistributedCollective


class FollowerRank(RankMethods):
    """The constructor loads this rank's part of the model. Raises QuireError."""

    setting: str
    loaded_part: LoadedPart
    _allocation: tuple[RunnerResources, int]
    _runner: ModelRunner
    _head_runner: DraftHeadRunner
    _tower: LoadedTower

    def __init__(
        self, config: EngineConfig, start: RankStart, progress: Callable[[], None], assignment: RankAssignment | None
    ) -> None:
        """`assignment` is None for ranks on the first machine."""
        stay_on(set(start.cores if assignment is None else assignment.cores))
        if assignment is not None:
            config = config.model_copy(update=assignment.settings)
        self._config = config
        self._assignment = assignment
        self._rank = start.rank
        self._path = resolve_model_with_overrides(config)
        self._model_config = apply_context_settings(load_model_config(config, self._path), config)
        configure_cpu(config)
        self._device_plan = choose_device_plan(config, self._model_config, backend_tried=True)
        load_part = partial(load_model, config, self._path, self._model_config, self._device_plan)
        with explain_weights_out_of_memory(self._device_plan.backend):
            self._group = join_group(
                start, config, self._device_plan, config.master_addr if assignment is None else assignment.address
            )
            self._loaded_model = self._load_part(load_part, progress)
        self._adapters: FollowerAdapterLoader | None = None
        if self._loaded_model.adapter_slots is not None:
            self._adapters = FollowerAdapterLoader(
                make_adapter_loader(
                    config, self._model_config, self._device_plan.spec, self._loaded_model.adapter_slots
                )
            )

    @abstractmethod
    def _load_part(self, load_part: Callable[..., LoadedModel], progress: Callable[[], None]) -> LoadedModel: ...

    @abstractmethod
    def _make_runner(
        self, allocation: RunnerResources, num_blocks: int, *, captures_mixed_batches: bool
    ) -> ModelRunner: ...

    def _run_step(self, scheduler_output: SchedulerOutput, sampled_tokens: list[SampledTokens]) -> None:
        self._runner.launch(scheduler_output)

    def close_group(self) -> None:
        """Unblocks other ranks that wait for this one."""
        self._group.abort_collectives()

    def handle_and_get_reply(self, content: bytes) -> RankReply | None:
        """Raises QuireError, and RankEnded or BrokenPipeError if another rank has ended."""
        command = decode_command(content)
        if isinstance(command, StepCommand):
            self._run_step(command.scheduler_output, command.sampled_tokens)
            return None
        value = invoke(RankMethods, self, command)
        return None if command.id is None else make_result(command.id, value)

    def measure_memory(self) -> int:
        check_connection(self._group, self._device_plan.device, self.setting)
        about = self._model_config, self._device_plan.backend, self._config
        return measure_available_memory(self._loaded_model.model, *about, self._tower.encoding_bytes).kv_bytes

    def allocate_cache(self, num_blocks: int, max_model_len: int, sequences: int, snapshots: int) -> None:
        shares = StateSlotCounts(sequences, snapshots)
        about = self._config, self._device_plan, self._loaded_model
        self._allocation = allocate_runner_resources(*about, num_blocks, max_model_len, shares), num_blocks

    def make_runner(self, *, captures_mixed_batches: bool) -> None:
        self._runner = self._make_runner(*self._allocation, captures_mixed_batches=captures_mixed_batches)

    def release_cache(self) -> None:
        del self._allocation, self._runner
        vars(self).pop("_head_runner", None)
        gc.collect()  # runners have reference cycles
        release_cached_memory()

    def warm_up_next(self) -> None:
        self._runner.warm_up_next()

    def warm_sampler(self) -> None:
        self._runner.warm_sampler()

    def warm_prompts(self) -> None:
        self._runner.warm_prompts()

    def find_kernel_variants(self, step_tokens: int) -> list[KernelVariantFields] | str:
        try:
            return [astuple(kind) for kind in self._runner.kernel_variants(step_tokens)]
        except Exception as error:
            return describe_kernel_error(error)

    def draft_tokens(self, rows: list[HeadDraftRequest]) -> None:
        self._head_runner.draft_tokens(rows)

    def run_dummy_draft(self, num_sequences: int) -> None:
        self._head_runner.run_dummy_draft(num_sequences)

    def load_adapter(self, slot: int, adapter: Adapter, files: dict[str, bytes]) -> None:
        assert self._adapters is not None
        self._adapters.load_adapter(slot, _save_adapter_locally(adapter, files, self._assignment))

    def await_adapter(self, slot: int, *, failed: bool) -> None:
        assert self._adapters is not None
        self._adapters.await_adapter(slot, failed=failed)

    def run_collective_rpc(self, content: bytes) -> bytes:
        worker = RankWorker(self._rank, self._config.world_size, self._loaded_model.model)
        return run_rank_call(worker, content)


class TensorParallelRank(FollowerRank):
    """Has the whole vision tower, because all ranks compute the same image features."""

    setting = "tensor_parallel_size"
    _draft_head: LoadedDraftHead | None = None

    def _load_part(self, load: Callable[..., LoadedModel], progress: Callable[[], None]) -> LoadedModel:
        config, chosen = self._config, self._device_plan
        loaded = load(
            _no_progress,
            part=ModelPart(
                shard=ModelShard(self._rank, self._group.world_size, self._group, config.uses_context_parallel)
            ),
        )
        if config.speculative_config is not None and config.speculative_config.uses_hidden_states:
            self._draft_head = load_head_drafter(config, self._model_config, chosen.backend, loaded.model)
        self._tower = load_tower(config, self._path, self._model_config, chosen, _no_progress)
        digest = compute_weight_digest(config) if config.nnodes > 1 else ""
        self.loaded_part = LoadedPart(loaded.read_bytes + self._tower.weight_bytes, weight_digest=digest)
        return loaded

    def _make_runner(
        self, allocation: RunnerResources, num_blocks: int, *, captures_mixed_batches: bool
    ) -> ModelRunner:
        loaded = self._loaded_model
        config = self._config
        head_runner = None
        if self._draft_head is not None:
            head_runner = self._head_runner = self._draft_head.make_draft_head_runner(config, allocation, num_blocks)
        pooler = make_pooler(config, self._path, loaded)
        return ModelRunner(
            loaded.model,
            allocation,
            SlotGrammars(_refuse_grammars),
            self._model_config.eos_token_ids,
            pooler,
            head_runner,
            self._tower.encoder_cache,
            captures_mixed_batches,
        )


class PipelineStageRank(FollowerRank):
    setting = "pipeline_parallel_size"
    _runner: StageRunner

    def _load_part(self, load: Callable[..., LoadedModel], progress: Callable[[], None]) -> LoadedModel:
        loaded = load(progress, part=ModelPart(decoder_class=PipelineStage, stage=self._rank - 1))
        assert isinstance(loaded.model, PipelineStage)
        assert isinstance(self._group, DistributedCollective)
        if self._rank > 1:
            loaded.model.set_previous_stage_rank(self._group, self._rank - 1)
        held_bytes_total = weight_bytes_in_memory(
            loaded.model.parameters(), self._config, self._device_plan.backend, loaded.read_bytes
        )
        tower_arguments = self._config, self._path, self._model_config, self._device_plan
        self._tower = load_tower(*tower_arguments, progress, stage=self._rank - 1)
        held_bytes_total += self._tower.weight_bytes
        table = loaded.expected_weights.parameter_table.items()
        self.loaded_part = LoadedPart(held_bytes_total, {name: (each.shape, str(each.dtype)) for name, each in table})
        return loaded

    def _make_runner(
        self, allocation: RunnerResources, num_blocks: int, *, captures_mixed_batches: bool
    ) -> ModelRunner:
        assert isinstance(self._group, DistributedCollective)
        return StageRunner(
            self._group,
            self._loaded_model.model,
            replace(allocation, capture=None),
            SlotGrammars(_refuse_grammars),
            self._model_config.eos_token_ids,
            None,
            None,
            self._tower.encoder_cache,
        )

    def _run_step(self, scheduler_output: SchedulerOutput, picked: list[SampledTokens]) -> None:
        self._runner.compute_and_send_stage(scheduler_output, picked)


def _save_adapter_locally(adapter: Adapter, files: Mapping[str, bytes], assignment: RankAssignment | None) -> Adapter:
    if assignment is None:
        return adapter
    folder = Path(assignment.adapter_folder) / adapter.digest
    folder.mkdir(exist_ok=True)
    for name in files.keys() & {CONFIG_FILE, WEIGHTS_FILE}:
        (folder / name).write_bytes(files[name])
    return Adapter(adapter.name, adapter.digest, str(folder))


def _no_progress() -> None:
    pass


def _refuse_grammars() -> GrammarCompiler:
    raise AssertionError("the first rank has the grammars")
