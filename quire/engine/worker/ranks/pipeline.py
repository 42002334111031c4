"""Pipeline parallelism. The engine is the last stage. It schedules steps, sends them to all stages, and samples.
Meanwhile earlier stages compute later steps of other requests.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from quire.engine.common.config import EngineConfig
from quire.engine.common.scheduler_output import ModelRunnerOutput, SchedulerOutput
from quire.engine.models.decoder import Decoder
from quire.engine.worker.device_plan import DevicePlan
from quire.engine.worker.draft_head_runner import DraftHeadRunner
from quire.engine.worker.loading.model.loaded_model import LoadedModel, ModelPart
from quire.engine.worker.model_runner import ModelRunner
from quire.engine.worker.pending_step import PendingStep, PreparedBatch
from quire.engine.worker.ranks.pipeline_stage import PipelineStage
from quire.engine.worker.ranks.rank_messages import SampledTokens, StepCommand
from quire.engine.worker.ranks.rank_processes import MultiProcessRanks
from quire.engine.worker.ranks.spmd import redact_for_followers
from quire.kernels.distributed import DistributedCollective


class Stages(MultiProcessRanks):
    """The followers are all stages except the last, in order."""

    setting, process_noun = "pipeline_parallel_size", "stages"
    can_share_memory = False

    def __init__(
        self,
        config: EngineConfig,
        chosen: DevicePlan,
        progress: Callable[[], None],
        on_end: Callable[[int], None] | None = None,
    ) -> None:
        """A thread calls `progress` after each layer that another stage computes. Raises ConfigError."""
        super().__init__(config, chosen, on_end)
        self._progress = progress

    def load_model(self, load: Callable[..., LoadedModel]) -> tuple[LoadedModel, int]:
        own = load(part=ModelPart(decoder_class=PipelineStage))
        assert isinstance(own.model, PipelineStage)
        assert isinstance(self.group, DistributedCollective)
        own.model.set_previous_stage_rank(self.group, self.count - 1)
        others = self.read_loaded_parts()
        checkpoint = own.expected_weights.merge_stages(each.weight_shapes for each in others)
        return replace(own, expected_weights=checkpoint), sum(each.weight_bytes for each in others)

    def allocate_on_followers(self, num_blocks: int, max_model_len: int, sequences: int, snapshots: int) -> None:
        super().allocate_on_followers(num_blocks, max_model_len, sequences, snapshots)
        for read in self._answer_readers:
            reporter_arguments = (partial(read, None), self._progress)
            threading.Thread(target=_report_progress, args=reporter_arguments, name="progress", daemon=True).start()

    def runner(self, *parts: Any) -> ModelRunner:
        return LastStageRunner(self, *parts)

    def make_leader_draft_head_runner(self, *parts: Any) -> DraftHeadRunner:
        return DraftHeadRunner(*parts)

    def make_collective_rpc(self, model: Decoder) -> None:
        """Returns None, because loaded stages answer no calls."""


def _report_progress(read: Callable[[], bytes | None], progress: Callable[[], None]) -> None:
    while read() is not None:
        progress()


class LastStageRunner(ModelRunner):
    """Computes a step's last stage when the step's result is requested."""

    def __init__(self, stages: Stages, *parts: Any) -> None:
        super().__init__(*parts)
        self._stages = stages
        self._in_flight: deque[_InFlightStep] = deque()
        self._unsent_samples: list[SampledTokens] = []

    @torch.inference_mode()
    def launch(self, scheduler_output: SchedulerOutput) -> _InFlightStep:
        """The step must not need a token that a step in flight has yet to sample."""
        new_slots = {admission.slot for admission in scheduler_output.new_requests}
        if any(
            row.slot in new_slots
            for step in self._in_flight
            for row in step.prepared.scheduler_output.scheduled_requests
        ):
            self.finish_steps_through(self._in_flight[-1])  # their sampling needs the slot's previous request
        self._stages.send_to_followers(StepCommand(redact_for_followers(scheduler_output), self._unsent_samples))
        self._unsent_samples = []
        self._in_flight.append(step := _InFlightStep(self, self._prepare_batch(scheduler_output)))
        return step

    @torch.inference_mode()
    def finish_steps_through(self, step: _InFlightStep) -> PendingStep:
        """Compute this step and all steps before it."""
        while step.pending_step is None:
            first = self._in_flight.popleft()
            with self._stages.rank_failures_as_engine_errors():
                pending_step = self._compute_and_sample_batch(first.prepared)
            assert isinstance(pending_step, PendingStep), "a grammar lacks a token"
            first.pending_step = pending_step
            sample_targets, sampled_ids = first.prepared.sample_targets, first.pending_step.download.wait_for_copy()[0]
            self._unsent_samples.append(
                SampledTokens(sample_targets.slots.tolist(), sample_targets.positions.tolist(), sampled_ids.tolist())
            )
        return step.pending_step


@dataclass(slots=True)
class _InFlightStep:
    runner: LastStageRunner
    prepared: PreparedBatch
    pending_step: PendingStep | None = None

    def sample_tokens(self) -> None:
        """Does nothing, because `result` computes the step."""

    def result(self) -> ModelRunnerOutput:
        return self.runner.finish_steps_through(self).result()


class StageRunner(ModelRunner):
    def __init__(self, group: DistributedCollective, *parts: Any) -> None:
        super().__init__(*parts)
        self._group = group

    @torch.inference_mode()
    def compute_and_send_stage(self, scheduler_output: SchedulerOutput, sampled_tokens: list[SampledTokens]) -> None:
        """Raises RankEnded if the next stage has ended."""
        for each in sampled_tokens:
            at = torch.tensor([each.slots, each.positions], dtype=torch.int64)
            self._input_batch.token_ids[at[0], at[1]] = torch.tensor(each.token_ids, dtype=torch.int32)
        prepared = self._prepare_batch(scheduler_output)
        self._apply_copies(scheduler_output)
        if (inputs := prepared.inputs) is not None:
            for passed in self._model.forward_stage(
                inputs.token_ids, inputs.metadata, self._kv_cache, prepared.features
            ):
                self._group.send_tensor(passed, (self._group.rank + 1) % self._group.world_size)
