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
    @property
    def graph_set(self) -> GraphSet[Any]: ...

    @property
    def capture_progress(self) -> str: ...

    @property
    def num_missing(self) -> int: ...


class DeviceDrafter(Protocol):
    @property
    def graphs(self) -> DraftGraphs | None:
        """None if drafting runs eagerly."""

    def capture_next_graph(self) -> bool:
        """Returns False if no graph is left to capture."""

    def launch_kernel_variants(self, step_tokens: int) -> None:
        """A dry run computes nothing."""


class LoadedDrafter(Protocol):
    is_on_all_ranks: ClassVar[bool]
    """False if the drafter is on the first rank only."""

    @property
    def kv_module(self) -> KVModule: ...

    @property
    def weight_bytes(self) -> int: ...

    def total_slot_state_bytes(self, config: EngineConfig) -> int:
        """Excludes KV blocks."""

    def start_drafter(
        self,
        config: EngineConfig,
        allocation: RunnerResources,
        num_blocks: int,
        make_runner: Callable[..., DraftHeadRunner],
    ) -> StartedDrafter:
        """Allocate KV blocks for as many tokens as the served model's KV cache holds, and spare blocks for draft
        tokens.
        """


@dataclass(frozen=True, slots=True)
class StartedDrafter:
    drafter: DeviceDrafter
    spare_blocks: SpareBlockLayout
    step_costs: list[tuple[int, float]]
    """Pairs (number of sequences, seconds per draft token)."""
    head_runner: DraftHeadRunner | None = None
    model_runner: DraftModelRunner | None = None
