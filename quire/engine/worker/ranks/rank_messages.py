"""Messages between the first rank and followers, as frames in pipes. Steps have their own message; everything else is a
utility call (engine/processes/utility_calls.py), including the start.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import msgspec

from quire.engine.common.scheduler_output import HeadDraftRequest, SchedulerOutput
from quire.engine.common.types import Adapter
from quire.engine.processes.heartbeat import Alive
from quire.engine.processes.utility_calls import UtilityCall, UtilityResult


class RankStart(msgspec.Struct, frozen=True):
    """First message: load your part. The result of START is a LoadedPart."""

    config: str
    """JSON."""
    rank: int
    descriptors: list[int]
    """Of shared memory, if used."""
    cores: list[int]
    """To pin to; empty: all."""
    store: tuple[str, int] | None = None
    """Address of the TCPStore where ranks meet; None with shared memory."""


class LoadedPart(msgspec.Struct, frozen=True):
    weight_bytes: int
    """As read; for a pipeline stage, as held."""
    weight_shapes: dict[str, tuple[tuple[int, ...], str]] = {}
    """Pipeline stages: shape and dtype by checkpoint name."""
    weight_digest: str = ""
    """From compute_weight_digest; "" on a single machine."""


class SampledTokens(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Of one step."""

    slots: list[int]
    positions: list[int]
    token_ids: list[int]


class StepCommand(msgspec.Struct, frozen=True, tag=True, array_like=True):
    scheduler_output: SchedulerOutput
    sampled_tokens: list[SampledTokens] = []
    """For pipeline stages, which have no collective: sampled since the previous command."""


class RankExit(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A remote rank ended, with a return code as in subprocess."""

    code: int


KernelVariantFields = tuple[str, str, str, tuple[str, int | str, int]]
"""Of KernelVariant (kernels/gpu/kernel_variant.py)."""


class RankMethods(ABC):
    """Methods of followers. A rank that fails reports it as the result of START, and ends."""

    @abstractmethod
    def measure_memory(self) -> int:
        """Contact all ranks, and on a GPU run the largest step. Returns bytes for the KV cache on this rank's device or
        machine.
        """

    @abstractmethod
    def allocate_cache(self, num_blocks: int, max_model_len: int, sequences: int, snapshots: int) -> None:
        """Allocate exactly these KV blocks, request slots and snapshot slots."""

    @abstractmethod
    def make_runner(self, *, captures_mixed_batches: bool) -> None:
        """`captures_mixed_batches`: as tried by the first rank."""

    @abstractmethod
    def warm_up_next(self) -> None:
        """See ModelRunner."""

    @abstractmethod
    def warm_sampler(self) -> None: ...

    @abstractmethod
    def warm_prompts(self) -> None: ...

    @abstractmethod
    def find_kernel_variants(self, step_tokens: int) -> list[KernelVariantFields] | str:
        """Returns an error message if it fails."""

    @abstractmethod
    def draft_tokens(self, rows: list[HeadDraftRequest]) -> None:
        """See DraftHeadRunner."""

    @abstractmethod
    def run_dummy_draft(self, num_sequences: int) -> None: ...

    @abstractmethod
    def load_adapter(self, slot: int, adapter: Adapter, files: dict[str, bytes]) -> None:
        """Start loading. `files`: for ranks on other machines, at the first load only."""

    @abstractmethod
    def await_adapter(self, slot: int, *, failed: bool) -> None:
        """Wait until the adapter can be used, or has failed."""

    @abstractmethod
    def run_collective_rpc(self, content: bytes) -> bytes:
        """`content`: from `encode_call` (engine/common/executor.py)."""


RankCommand = StepCommand | UtilityCall
RankReply = UtilityResult | Alive | RankExit

decode_start = msgspec.msgpack.Decoder(RankStart).decode
decode_loaded_part = msgspec.msgpack.Decoder(LoadedPart).decode
decode_command = msgspec.msgpack.Decoder(RankCommand).decode
decode_reply = msgspec.msgpack.Decoder(RankReply).decode
