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
    """A class named by --executor-cls must be a subclass of an implementation, and may override `runner`."""

    note: str | None = None

    @abstractmethod
    def load_model(self, load_part: Callable[..., LoadedModel]) -> tuple[LoadedModel, int]:
        """Wait until all processes have loaded their parts. The int is the bytes of the other pipeline stages'
        weights.
        """

    @abstractmethod
    def measure_total_kv_bytes(self, measure: Callable[[], int]) -> int:
        """`measure` returns this process's bytes."""

    @abstractmethod
    def allocate_on_followers(self, num_blocks: int, max_model_len: int, sequences: int, snapshots: int) -> None:
        """Raises ConfigError if a follower has too little memory."""

    @abstractmethod
    def send_to_followers(self, message: RankCommand) -> None:
        """Followers read the message after completing earlier ones."""

    def make_follower_runners(self, *, captures_mixed_batches: bool) -> None:
        self.send_to_followers(
            make_notification(RankMethods.make_runner, captures_mixed_batches=captures_mixed_batches)
        )

    def release_followers_caches(self) -> None:
        self.send_to_followers(make_notification(RankMethods.release_cache))

    @abstractmethod
    def runner(self, *parts: Any) -> ModelRunner:
        """`parts` are ModelRunner's arguments."""

    @abstractmethod
    def make_leader_draft_head_runner(self, *parts: Any) -> DraftHeadRunner:
        """`parts` are DraftHeadRunner's arguments."""

    @abstractmethod
    def wrap_adapter_loader(self, loader: AdapterLoader) -> AdapterLoader:
        """`loader` loads only on this rank."""

    @abstractmethod
    def make_collective_rpc(self, model: Decoder) -> CollectiveRPC | None:
        """Returns None if the ranks take no calls."""

    @abstractmethod
    def stop_ranks(self) -> None: ...
