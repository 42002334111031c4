"""The processes that compute a model together, as the first of them sees the others."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from quire.engine.common.executor import AdapterLoader, CollectiveRPC
from quire.engine.models.decoder import Decoder
from quire.engine.processes.utility_calls import make_notification
from quire.engine.worker.draft_head_runner import DraftHeadRunner
from quire.engine.worker.loading.model_loader import LoadedModel
from quire.engine.worker.model_runner import ModelRunner
from quire.engine.worker.ranks.rank_messages import RankCommand, RankMethods


class RankGroup(ABC):
    """This process is one of them, the leader; the others are its followers. A class given by --executor-cls derives
    from an implementation and overrides `runner`."""

    note: str | None = None
    """Which processes there are, for the log."""

    @abstractmethod
    def load_model(self, load_part: Callable[..., LoadedModel]) -> tuple[LoadedModel, int]:
        """Load this process' part of the model with `load_part`, and wait until all have theirs. Returns the part, and
        the bytes of what other stages hold. Its `read_bytes` are those of all ranks that divide every layer."""

    @abstractmethod
    def measure_total_kv_bytes(self, measure: Callable[[], int]) -> int:
        """Bytes for the KV cache in all processes; `measure` finds this process'."""

    @abstractmethod
    def allocate_on_followers(self, num_blocks: int, max_model_len: int, sequences: int, snapshots: int) -> None:
        """See RankMethods.allocate_cache. Raises ConfigError if a follower has too little memory."""

    @abstractmethod
    def send_to_followers(self, message: RankCommand) -> None:
        """Send to all followers. They read it when they have done what earlier messages asked."""

    def make_follower_runners(self, *, captures_mixed_batches: bool) -> None:
        """See RankMethods.make_runner."""
        self.send_to_followers(
            make_notification(RankMethods.make_runner, captures_mixed_batches=captures_mixed_batches)
        )

    @abstractmethod
    def runner(self, *parts: Any) -> ModelRunner:
        """This process' model runner, which leads the others'. `parts`: a ModelRunner's arguments."""

    @abstractmethod
    def make_leader_draft_head_runner(self, *parts: Any) -> DraftHeadRunner:
        """`parts`: a DraftHeadRunner's arguments."""

    @abstractmethod
    def wrap_adapter_loader(self, loader: AdapterLoader) -> AdapterLoader:
        """The loader of adapters on all processes; `loader`: on this one."""

    @abstractmethod
    def make_collective_rpc(self, model: Decoder) -> CollectiveRPC | None:
        """What calls a function on all processes; None if they take no calls. `model`: this process' part."""

    @abstractmethod
    def stop_ranks(self) -> None:
        """End the followers."""
