"""What guesses tokens with weights of its own, as the engine knows it: a model or heads, with their pages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from quire.engine.common.config import EngineConfig
from quire.engine.worker.device_memory import KVModule
from quire.engine.worker.graphs.graph_capture import GraphSet
from quire.engine.worker.loading.drafts.spare_blocks import SpareBlockLayout
from quire.engine.worker.loading.kv_allocation import RunnerResources

if TYPE_CHECKING:
    from quire.engine.worker.draft_head_runner import DraftHeadRunner
    from quire.engine.worker.draft_model_runner import DraftModelRunner


class DraftGraphs(Protocol):
    """CUDA graphs of guesses."""

    @property
    def graph_set(self) -> GraphSet[Any]: ...

    @property
    def capture_progress(self) -> str: ...


class DeviceDrafter(Protocol):
    """A model or heads that draft, started."""

    @property
    def graphs(self) -> DraftGraphs | None:
        """None: guesses run without."""

    def capture_next_graph(self) -> bool:
        """As Executor.warm_up_next."""

    def launch_kernel_variants(self, step_tokens: int) -> None:
        """Launch every kind of kernel that guesses, and what follows steps of up to so many tokens, may launch. What it
        computes is nothing, under `recorded`."""


class LoadedDrafter(Protocol):
    """A model or heads that draft, before there are pages."""

    is_on_all_ranks: ClassVar[bool]
    """Whether each rank of the served model has it whole; else the first one alone does."""

    @property
    def kv_module(self) -> KVModule: ...

    @property
    def weight_bytes(self) -> int: ...

    def total_slot_state_bytes(self, config: EngineConfig) -> int:
        """Of what layers keep of sequences beside pages."""

    def start_drafter(
        self,
        config: EngineConfig,
        allocation: RunnerResources,
        num_blocks: int,
        make_runner: Callable[..., DraftHeadRunner],
    ) -> StartedDrafter:
        """With pages for as many tokens as the served model has pages for, and some for drafts beyond these.
        `allocation`: the served model's. `make_runner`: where it is heads, of what Heads takes."""


@dataclass(frozen=True, slots=True)
class StartedDrafter:
    drafter: DeviceDrafter
    spare_blocks: SpareBlockLayout
    step_costs: list[tuple[int, float]]
    """What one guess more costs, by the number of sequences."""
    head_runner: DraftHeadRunner | None = None
    """The same, where it runs beside every step,"""
    model_runner: DraftModelRunner | None = None
    """or is a model."""
