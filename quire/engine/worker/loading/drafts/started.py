"""What guesses tokens with weights of its own, as the engine knows it: a model or heads, with their pages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from quire.engine.config import EngineConfig
from quire.engine.worker.graphs.capture import Captured
from quire.engine.worker.loading.drafts.spare import SparePages
from quire.engine.worker.loading.room import Room
from quire.engine.worker.memory import Paged

if TYPE_CHECKING:
    from quire.engine.worker.draft_runner import DraftRunner
    from quire.engine.worker.heads import Heads


class DraftGraphs(Protocol):
    """CUDA graphs of guesses."""

    @property
    def captured(self) -> Captured[Any]: ...

    @property
    def progress(self) -> str: ...


class Drafting(Protocol):
    """A model or heads that draft, started."""

    @property
    def graphs(self) -> DraftGraphs | None:
        """None: guesses run without."""

    def warm_up(self) -> bool:
        """As Executor.warm_up."""

    def launch_every_kind(self, step_tokens: int) -> None:
        """Launch every kind of kernel that guesses, and what follows steps of up to so many tokens, may launch. What it
        computes is nothing, under `recorded`."""


class LoadedDraft(Protocol):
    """A model or heads that draft, before there are pages."""

    on_all_ranks: ClassVar[bool]
    """Whether each rank of the served model has it whole; else the first one alone does."""

    @property
    def paged(self) -> Paged: ...

    @property
    def weight_bytes(self) -> int: ...

    def state_bytes(self, config: EngineConfig) -> int:
        """Of what layers keep of sequences beside pages."""

    def start(self, config: EngineConfig, room: Room, num_blocks: int, make_heads: Callable[..., Heads]) -> DraftWorker:
        """With pages for as many tokens as the served model has pages for, and some for drafts beyond these. `room`:
        the served model's. `make_heads`: where it is heads, of what Heads takes."""


@dataclass(frozen=True, slots=True)
class DraftWorker:
    source: Drafting
    pages: SparePages
    step_costs: list[tuple[int, float]]
    """What one guess more costs, by the number of sequences."""
    heads: Heads | None = None
    """The same, where it runs beside every step,"""
    model: DraftRunner | None = None
    """or is a model."""
