"""Messages between the first rank and followers. All commands except steps are utility calls."""

from __future__ import annotations

from abc import ABC, abstractmethod

import msgspec

from quire.engine.common.scheduler_output import HeadDraftRequest, SchedulerOutput
from quire.engine.common.types import Adapter
from quire.engine.processes.heartbeat import Alive
from quire.engine.processes.utility_calls import UtilityCall, UtilityResult


class RankStart(msgspec.Struct, frozen=True):
    """The reply is the result of START, a LoadedPart."""

    config: str
    rank: int
    descriptors: list[int]
    cores: list[int]
    """Cores to pin the process to; empty: no pinning."""
    store: tuple[str, int] | None = None
    """TCPStore's address; None if the ranks share memory."""


class LoadedPart(msgspec.Struct, frozen=True):
    weight_bytes: int
    """Bytes of the weights in files or, for pipeline stages, in memory."""
    weight_shapes: dict[str, tuple[tuple[int, ...], str]] = {}
    """Shapes and dtypes by tensor name, for pipeline stages."""
    weight_digest: str = ""
    """Empty if all ranks are on one machine."""


class SampledTokens(msgspec.Struct, frozen=True, array_like=True, gc=False):
    slots: list[int]
    positions: list[int]
    token_ids: list[int]


class StepCommand(msgspec.Struct, frozen=True, tag=True, array_like=True):
    scheduler_output: SchedulerOutput
    sampled_tokens: list[SampledTokens] = []
    """Pipeline stages need the tokens sampled since the last command, because no collective brings them."""


class RankExit(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """`code` is a return code as in subprocess."""

    code: int


KernelVariantFields = tuple[str, str, str, tuple[str, int | str, int]]


class RankMethods(ABC):
    """A follower that fails sends the error as the result of START, and ends."""

    @abstractmethod
    def measure_memory(self) -> int:
        """Check that all ranks are connected. Return the bytes available on this rank's device or machine."""

    @abstractmethod
    def allocate_cache(self, num_blocks: int, max_model_len: int, sequences: int, snapshots: int) -> None:
        """Allocate exactly this many blocks and slots."""

    @abstractmethod
    def make_runner(self, *, captures_mixed_batches: bool) -> None:
        """Only the first rank tries whether mixed batches can be captured."""

    @abstractmethod
    def release_cache(self) -> None:
        """A smaller allocation follows."""

    @abstractmethod
    def warm_up_next(self) -> None: ...
    @abstractmethod
    def warm_sampler(self) -> None: ...

    @abstractmethod
    def warm_prompts(self) -> None: ...

    @abstractmethod
    def find_kernel_variants(self, step_tokens: int) -> list[KernelVariantFields] | str:
        """Returns the variants, or an error message on failure."""

    @abstractmethod
    def draft_tokens(self, rows: list[HeadDraftRequest]) -> None: ...
    @abstractmethod
    def run_dummy_draft(self, num_sequences: int) -> None: ...

    @abstractmethod
    def load_adapter(self, slot: int, adapter: Adapter, files: dict[str, bytes]) -> None:
        """`files`: contents by file name. They are sent to other machines only, and once per adapter."""

    @abstractmethod
    def await_adapter(self, slot: int, *, failed: bool) -> None:
        """Wait until the adapter is usable or has failed."""

    @abstractmethod
    def run_collective_rpc(self, content: bytes) -> bytes:
        """`content` comes from `encode_call`."""


RankCommand = StepCommand | UtilityCall
RankReply = UtilityResult | Alive | RankExit

decode_start = msgspec.msgpack.Decoder(RankStart).decode
decode_loaded_part = msgspec.msgpack.Decoder(LoadedPart).decode
decode_command = msgspec.msgpack.Decoder(RankCommand).decode
decode_reply = msgspec.msgpack.Decoder(RankReply).decode
