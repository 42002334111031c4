"""What the first rank tells the others, and what they answer: frames in pipes.

Steps flow, each in a message of its own. For all else there are utility calls (engine/processes/utility_calls.py), and
the start is a call of its configuration.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import msgspec

from quire.engine.common.scheduler_output import HeadDraftRequest, SchedulerOutput
from quire.engine.common.types import Adapter
from quire.engine.processes.heartbeat import Alive
from quire.engine.processes.utility_calls import UtilityCall, UtilityResult


class RankStart(msgspec.Struct, frozen=True):
    """The first message to a rank: load your part of the model. The result of START is a LoadedPart."""

    config: str
    """The engine's, as JSON."""
    rank: int
    descriptors: list[int]
    """Of the memory that all ranks share, if they do."""
    cores: list[int]
    """To stay on; none: all."""
    store: tuple[str, int] | None = None
    """The address of the store where ranks find each other (torch.distributed's TCPStore); None: they share memory."""


class LoadedPart(msgspec.Struct, frozen=True):
    weight_bytes: int
    """As read; a stage's, as held."""
    weight_shapes: dict[str, tuple[tuple[int, ...], str]] = {}
    """A stage's weights: shape and type, by name in the checkpoint."""
    weight_digest: str = ""
    """Of the weights, as loading.samples tells them, where there are several machines."""


class SampledTokens(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a step picked, by the slots of its rows and the positions of the picks."""

    slots: list[int]
    positions: list[int]
    token_ids: list[int]


class StepCommand(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Executor.launch."""

    scheduler_output: SchedulerOutput
    sampled_tokens: list[SampledTokens] = []
    """Of a stage, which cannot hear it from a collective: what was picked since the step before."""


class RankExit(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A rank on another machine has ended, with this return code, as subprocess says it."""

    code: int


KernelVariantFields = tuple[str, str, str, tuple[str, int | str, int]]
"""Those of kernels/gpu/kernel_variant.py."""


class RankMethods(ABC):
    """What ranks but the first answer. A rank that fails says so as the result of START, and ends."""

    @abstractmethod
    def measure_memory(self) -> int:
        """Reach all other ranks, and on a GPU run the largest step. Returns the bytes that the rank's device, or its
        machine, has for the KV cache."""

    @abstractmethod
    def allocate_cache(self, num_blocks: int, max_model_len: int, sequences: int, snapshots: int) -> None:
        """Make room for so many pages, slots of sequences and slots of snapshots, of which there will be no more and no
        fewer."""

    @abstractmethod
    def make_runner(self, *, captures_mixed_batches: bool) -> None:
        """Be ready for steps, in the room that was made. `captures_mixed_batches`: whether small ones with prompts
        become graphs, as the first rank has tried it."""

    @abstractmethod
    def warm_up_next(self) -> None:
        """See ModelRunner, as the next three."""

    @abstractmethod
    def warm_sampler(self) -> None: ...

    @abstractmethod
    def warm_prompts(self) -> None: ...

    @abstractmethod
    def find_kernel_variants(self, step_tokens: int) -> list[KernelVariantFields] | str:
        """A text: why they could not be found."""

    @abstractmethod
    def draft_tokens(self, rows: list[HeadDraftRequest]) -> None:
        """See DraftHeadRunner, as the next one."""

    @abstractmethod
    def run_dummy_draft(self, num_sequences: int) -> None: ...

    @abstractmethod
    def load_adapter(self, slot: int, adapter: Adapter, files: dict[str, bytes]) -> None:
        """Begin to read an adapter for a slot. `files`: for a rank on another machine, which has no such folder. Empty:
        it got them before, or has the folder."""

    @abstractmethod
    def await_adapter(self, slot: int, *, failed: bool) -> None:
        """The next passes may be of this slot's adapter, or never will be where it could not be loaded."""

    @abstractmethod
    def run_collective_rpc(self, content: bytes) -> bytes:
        """Call something, as `encode_call` of engine/common/executor.py writes it."""


RankCommand = StepCommand | UtilityCall
RankReply = UtilityResult | Alive | RankExit

decode_start = msgspec.msgpack.Decoder(RankStart).decode
decode_loaded_part = msgspec.msgpack.Decoder(LoadedPart).decode
decode_command = msgspec.msgpack.Decoder(RankCommand).decode
decode_reply = msgspec.msgpack.Decoder(RankReply).decode
