"""Tensor parallelism. All ranks run the same program on shards of every layer (SPMD: Darema et al., 1988). The first
rank, which is the engine, sends each command before executing it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from dataclasses import replace as replace_fields
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from quire.engine.common.errors import ConfigError
from quire.engine.common.executor import PendingOutput
from quire.engine.common.request_params import SamplingParams
from quire.engine.common.scheduler_output import HeadDraftRequest, ModelRunnerOutput, NewRequestData, SchedulerOutput
from quire.engine.layers.shard import ModelShard
from quire.engine.processes.utility_calls import make_notification
from quire.engine.worker.draft_head_runner import DraftHeadRunner
from quire.engine.worker.loading.model.loaded_model import LoadedModel, ModelPart
from quire.engine.worker.loading.weight_digest import compute_weight_digest
from quire.engine.worker.model_runner import ModelRunner
from quire.engine.worker.ranks.rank_messages import RankMethods, StepCommand
from quire.engine.worker.ranks.rank_processes import MultiProcessRanks
from quire.engine.worker.ranks.remote_ranks import RemoteRank
from quire.engine.worker.sampling.sampling_rules import is_plain_greedy_request

if TYPE_CHECKING:
    from quire.kernels.gpu.kernel_variant import KernelVariant

VARIANTS_TIMEOUT_SECONDS = 600.0
"""How long the first rank waits for the other ranks' kernel variants."""


class SpmdRanks(MultiProcessRanks):
    setting, process_noun = "tensor_parallel_size", "ranks"

    def load_model(self, load: Callable[..., LoadedModel]) -> tuple[LoadedModel, int]:
        own_model = load(
            part=ModelPart(shard=ModelShard(0, self.count, self.group, self._config.uses_context_parallel))
        )
        others = self.read_loaded_parts()
        digest = compute_weight_digest(self._config) if self._config.nnodes > 1 else ""
        for process, each in zip(self._processes, others, strict=True):
            if each.weight_digest != digest:
                where = f"the machine at {process.host}" if isinstance(process, RemoteRank) else "a rank"
                raise ConfigError(f"model: {where} has other weights than machine 0", param="model")
        return replace_fields(own_model, read_bytes=own_model.read_bytes + sum(each.weight_bytes for each in others)), 0

    def runner(self, *parts: Any) -> ModelRunner:
        return SpmdRunner(self, *parts)

    def make_leader_draft_head_runner(self, *parts: Any) -> DraftHeadRunner:
        return SpmdDraftHeadRunner(self, *parts)


class SpmdRunner(ModelRunner):
    def __init__(self, ranks: SpmdRanks, *parts: Any) -> None:
        super().__init__(*parts)
        self._ranks = ranks

    def launch(self, scheduler_output: SchedulerOutput) -> PendingOutput:
        with self._ranks.follower_command_context(StepCommand(redact_for_followers(scheduler_output))):
            return _WatchedStep(self._ranks, super().launch(scheduler_output))

    def warm_up_next(self) -> bool:
        with self._ranks.follower_command_context(make_notification(RankMethods.warm_up_next)):
            return super().warm_up_next()

    def warm_sampler(self) -> None:
        with self._ranks.follower_command_context(make_notification(RankMethods.warm_sampler)):
            super().warm_sampler()

    def warm_prompts(self) -> None:
        with self._ranks.follower_command_context(make_notification(RankMethods.warm_prompts)):
            super().warm_prompts()

    def kernel_variants(self, step_tokens: int) -> list[KernelVariant]:
        """Ranks do not communicate during the dry run. Raises RuntimeError if a rank fails."""
        from quire.kernels.gpu.kernel_variant import KernelVariant

        read_others = self._ranks.call_followers(RankMethods.find_kernel_variants, step_tokens)
        try:
            variants = dict.fromkeys(super().kernel_variants(step_tokens))
        finally:
            others = read_others(VARIANTS_TIMEOUT_SECONDS)  # otherwise the next call would read these results
        for rank, each in enumerate(others, 1):
            if isinstance(each, str):
                raise RuntimeError(f"rank {rank}: {each}")
            variants |= dict.fromkeys(KernelVariant(*fields) for fields in each)
        return list(variants)


class SpmdDraftHeadRunner(DraftHeadRunner):
    """The heads are replicated, but use the sharded decoder's embeddings and logits."""

    def __init__(self, ranks: SpmdRanks, *parts: Any) -> None:
        super().__init__(*parts)
        self._ranks = ranks

    def draft_tokens(self, rows: Sequence[HeadDraftRequest]) -> list[list[int]]:
        with self._ranks.follower_command_context(make_notification(RankMethods.draft_tokens, list(rows))):
            return super().draft_tokens(rows)

    def run_dummy_draft(self, count: int) -> None:
        with self._ranks.follower_command_context(make_notification(RankMethods.run_dummy_draft, count)):
            super().run_dummy_draft(count)


@dataclass(frozen=True, slots=True)
class _WatchedStep:
    ranks: SpmdRanks
    pending: PendingOutput

    def sample_tokens(self) -> None:
        """Followers know no grammars. They have launched their part already, and wait for the first rank's tokens."""
        with self.ranks.rank_failures_as_engine_errors():
            self.pending.sample_tokens()

    def result(self) -> ModelRunnerOutput:
        with self.ranks.rank_failures_as_engine_errors():
            output = self.pending.result()
            self.ranks.group.raise_if_failed()
            return output


def redact_for_followers(scheduler_output: SchedulerOutput) -> SchedulerOutput:
    """Of a request's parameters, followers need only prompt_logprobs, and whether the request is plain greedy."""
    new_requests = [_redact_request(each) for each in scheduler_output.new_requests]
    return SchedulerOutput(
        scheduler_output.scheduled_requests,
        new_requests,
        scheduler_output.block_copies,
        freed_slots=scheduler_output.freed_slots,
        slot_copies=scheduler_output.slot_copies,
    )


def _redact_request(new_request: NewRequestData) -> NewRequestData:
    if not isinstance(new_request.params, SamplingParams):
        return new_request
    temperature = 0.0 if is_plain_greedy_request(new_request.params) else 1.0
    params = SamplingParams(temperature=temperature, prompt_logprobs=new_request.params.prompt_logprobs)
    return replace(new_request, params=params)
