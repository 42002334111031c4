"""Ranks that divide every layer, and all run the same program, each on its part (SPMD: Darema et al., 1988). The first
one is the engine: it sends each batch, and what else its runner is asked for, before it does the same. So every rank
makes its tensors on its own device, captures the same decode graphs in the same order, and launches a step before the
last one's picks are read. What is picked the first rank decides (choose_sampler), and the others hear it by their
collective."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from dataclasses import replace as replace_fields
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from quire.engine.core.executor import PendingOutput
from quire.engine.core.scheduler_output import DraftRequest, ModelRunnerOutput, NewRequestData, SchedulerOutput
from quire.engine.errors import ConfigError
from quire.engine.layers.shard import Shard
from quire.engine.types import SamplingParams
from quire.engine.worker.heads import Heads
from quire.engine.worker.loading.model import LoadedModel
from quire.engine.worker.loading.samples import sampled
from quire.engine.worker.ranks.messages import Draft, FindKinds, Kinds, Loaded, Prepare, Step, TryGuess
from quire.engine.worker.ranks.processes import Ranks
from quire.engine.worker.ranks.remote import Remote
from quire.engine.worker.runner import ModelRunner
from quire.engine.worker.sampling.sampling_rules import only_largest

if TYPE_CHECKING:
    from quire.kernels.gpu.kinds import Kind

KINDS_SECONDS = 600.0
"""So long the first rank waits for the others' kinds of kernels, which they find without waiting for anybody."""


class SpmdRanks(Ranks):
    """The processes of the ranks but the first, on this machine and on others."""

    setting, called = "tensor_parallel_size", "ranks"

    def load(self, load: Callable[..., LoadedModel]) -> tuple[LoadedModel, int]:
        own = load(shard=Shard(0, self.count, self.group, self._config.divides_tokens))
        others = self.read(Loaded)
        digest = sampled(self._config) if self._config.nnodes > 1 else ""
        for process, each in zip(self._processes, others, strict=True):
            if each.digest != digest:
                where = f"the machine at {process.host}" if isinstance(process, Remote) else "a rank"
                raise ConfigError(f"model: {where} has other weights than machine 0", param="model")
        return replace_fields(own, read_bytes=own.read_bytes + sum(each.weight_bytes for each in others)), 0

    def runner(self, *parts: Any) -> ModelRunner:
        return SpmdRunner(self, *parts)

    def heads(self, *parts: Any) -> Heads:
        return SpmdHeads(self, *parts)


class SpmdRunner(ModelRunner):
    """The first rank's."""

    def __init__(self, ranks: SpmdRanks, *parts: Any) -> None:
        """`parts`: a Runner's."""
        super().__init__(*parts)
        self._ranks = ranks

    def launch(self, batch: SchedulerOutput) -> PendingOutput:
        with self._ranks.told(Step(for_others(batch))):
            return _Watched(self._ranks, super().launch(batch))

    def warm_up(self) -> bool:
        with self._ranks.told(Prepare("warm_up")):
            return super().warm_up()

    def warm_sampler(self) -> None:
        with self._ranks.told(Prepare("warm_sampler")):
            super().warm_sampler()

    def warm_prompts(self) -> None:
        with self._ranks.told(Prepare("warm_prompts")):
            super().warm_prompts()

    def kinds(self, step_tokens: int) -> list[Kind]:
        """Those of all ranks, each of which knows its own parts of layers; so what they would all compile is compiled
        once. Meanwhile none meets another. Raises RuntimeError where one of them fails to find its own."""
        from quire.kernels.gpu.kinds import Kind

        self._ranks.send(FindKinds(step_tokens))
        try:
            found = dict.fromkeys(super().kinds(step_tokens))
        finally:
            others = self._ranks.read(Kinds, KINDS_SECONDS)  # else they would be what the next one asks for
        for rank, each in enumerate(others, 1):
            if each.why_not:
                raise RuntimeError(f"rank {rank}: {each.why_not}")
            found |= dict.fromkeys(Kind(*fields) for fields in each.found)
        return list(found)


class SpmdHeads(Heads):
    """The first rank's. All ranks have whole heads, which ask the decoder that the ranks share for embeddings and
    logits."""

    def __init__(self, ranks: SpmdRanks, *parts: Any) -> None:
        """`parts`: those of Heads."""
        super().__init__(*parts)
        self._ranks = ranks

    def draft(self, rows: Sequence[DraftRequest]) -> list[list[int]]:
        with self._ranks.told(Draft(list(rows))):
            return super().draft(rows)

    def try_guess(self, count: int) -> None:
        with self._ranks.told(TryGuess(count)):
            super().try_guess(count)


@dataclass(frozen=True, slots=True)
class _Watched:
    """A step under way."""

    ranks: SpmdRanks
    own: PendingOutput

    def result(self) -> ModelRunnerOutput:
        with self.ranks.watched():
            output = self.own.result()
            self.ranks.group.check()
            return output


def for_others(batch: SchedulerOutput) -> SchedulerOutput:
    """What ranks that answer nobody need of a batch. How tokens are picked is not theirs to know, not even grammars;
    but whether it is by the largest logit alone, which all ranks find together."""
    admissions = [_computed(each) for each in batch.new_requests]
    return SchedulerOutput(
        batch.scheduled_requests,
        admissions,
        batch.block_copies,
        freed_slots=batch.freed_slots,
        slot_copies=batch.slot_copies,
    )


def _computed(admission: NewRequestData) -> NewRequestData:
    if not isinstance(admission.params, SamplingParams):
        return admission
    temperature = 0.0 if only_largest(admission.params) else 1.0
    params = SamplingParams(temperature=temperature, prompt_logprobs=admission.params.prompt_logprobs)
    return replace(admission, params=params)
