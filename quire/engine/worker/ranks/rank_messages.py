"""Frames between the first rank and followers. All but steps are utility calls."""

from __future__ import annotations

from abc import ABC, abstractmethod

import msgspec

from quire.engine.common.scheduler_output import HeadDraftRequest, SchedulerOutput
from quire.engine.common.types import Adapter
from quire.engine.processes.heartbeat import Alive
from quire.engine.processes.utility_calls import UtilityCall, UtilityResult


class RankStart(msgspec.Struct, frozen=True):
    """The first message. The result of START is a LoadedPart."""

    config: str
    rank: int
    descriptors: list[int]
    cores: list[int]
    """Empty: no pinning."""
    store: tuple[str, int] | None = None
    """TCPStore address; None with shared memory."""


class LoadedPart(msgspec.Struct, frozen=True):
    weight_bytes: int
    """Bytes as read or, for pipeline stages, in memory."""
    weight_shapes: dict[str, tuple[tuple[int, ...], str]] = {}
    """Shape and dtype, for pipeline stages."""
    weight_digest: str = ""
    """Empty on a single machine."""


class SampledTokens(msgspec.Struct, frozen=True, array_like=True, gc=False):
    slots: list[int]
    positions: list[int]
    token_ids: list[int]


class StepCommand(msgspec.Struct, frozen=True, tag=True, array_like=True):
    scheduler_output: SchedulerOutput
    sampled_tokens: list[SampledTokens] = []
    """Tokens sampled since the last command, for pipeline stages, which have no collective."""


class RankExit(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A remote rank has ended. `code` is as in subprocess."""

    code: int


KernelVariantFields = tuple[str, str, str, tuple[str, int | str, int]]


class RankMethods(ABC):
    """A follower that fails reports it as the result of START, and ends."""

    @abstractmethod
    def measure_memory(self) -> int:
        """Contact all ranks. On a GPU, run the largest step. Return bytes on this rank's device or machine."""

    @abstractmethod
    def allocate_cache(self, num_blocks: int, max_model_len: int, sequences: int, snapshots: int) -> None:
        """Allocate exactly these blocks and slots."""

    @abstractmethod
    def make_runner(self, *, captures_mixed_batches: bool) -> None:
        """The first rank tries whether to capture mixed batches."""

    @abstractmethod
    def release_cache(self) -> None:
        """Free blocks and runner. A smaller allocation follows."""

    @abstractmethod
    def warm_up_next(self) -> None:
        """See ModelRunner."""

    @abstractmethod
    def warm_sampler(self) -> None: ...

    @abstractmethod
    def warm_prompts(self) -> None: ...

    @abstractmethod
    def find_kernel_variants(self, step_tokens: int) -> list[KernelVariantFields] | str:
        """Returns an error message on failure."""

    @abstractmethod
    def draft_tokens(self, rows: list[HeadDraftRequest]) -> None:
        """See DraftHeadRunner."""

    @abstractmethod
    def run_dummy_draft(self, num_sequences: int) -> None: ...

    @abstractmethod
    def load_adapter(self, slot: int, adapter: Adapter, files: dict[str, bytes]) -> None:
        """`files`: sent once to other machines."""

    @abstractmethod
    def await_adapter(self, slot: int, *, failed: bool) -> None:
        """Wait until the adapter is usable or has failed."""

    @abstractmethod
    def run_collective_rpc(self, content: bytes) -> bytes:
        """`content`: from `encode_call`."""


RankCommand = StepCommand | UtilityCall
RankReply = UtilityResult | Alive | RankExit

decode_start = msgspec.msgpack.Decoder(RankStart).decode
decode_loaded_part = msgspec.msgpack.Decoder(LoadedPart).decode
decode_command = msgspec.msgpack.Decoder(RankCommand).decode
decode_reply = msgspec.msgpack.Decoder(RankReply).decode
