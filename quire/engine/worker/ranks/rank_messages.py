"""What the first rank tells the others, and what they answer: frames in pipes."""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any, BinaryIO, Literal

import msgspec

from quire.engine.common.scheduler_output import HeadDraftRequest, SchedulerOutput
from quire.engine.common.types import Adapter

FRAME_HEADER = struct.Struct("<Q")
"""Before each message in a pipe."""


class StartCommand(msgspec.Struct, frozen=True, tag=True):
    """Load your part of the model. Answered by Loaded or Failed."""

    config: str
    """The engine's, as JSON."""
    rank: int
    descriptors: list[int]
    """Of the memory that all ranks share, if they do."""
    cores: list[int]
    """To stay on; none: all."""
    store: tuple[str, int] | None = None
    """The address of the store where ranks find each other (torch.distributed's TCPStore); None: they share memory."""


class MeasureMemoryCommand(msgspec.Struct, frozen=True, tag=True):
    """Reach all other ranks, and on a GPU run the largest step. Answered by Measured or Failed."""


class AllocateCommand(msgspec.Struct, frozen=True, tag=True):
    """Make room for so many pages and slots, of which there will be no more and no fewer. Answered by Allocated or
    Failed."""

    num_blocks: int
    max_model_len: int
    sequences: int
    """Slots of sequences, and those of snapshots."""
    snapshots: int


class MakeRunnerCommand(msgspec.Struct, frozen=True, tag=True):
    """Be ready for steps, in the room that was made."""

    captures_mixed_batches: bool
    """Whether small ones with prompts become graphs, as the first rank has tried it."""


class SampledTokens(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a step picked, by the slots of its rows and the positions of the picks."""

    slots: list[int]
    positions: list[int]
    token_ids: list[int]


class StepCommand(msgspec.Struct, frozen=True, tag=True):
    """Executor.launch."""

    scheduler_output: SchedulerOutput
    sampled_tokens: list[SampledTokens] = []
    """Of a stage, which cannot hear it from a collective: what was picked since the step before."""


WarmUpMethod = Literal["warm_up_next", "warm_sampler", "warm_prompts"]


class WarmUpCommand(msgspec.Struct, frozen=True, tag=True):
    """A method of Runner."""

    method: WarmUpMethod


class FindKernelVariantsCommand(msgspec.Struct, frozen=True, tag=True):
    """ModelRunner.kernel_variants. Answered by Kinds."""

    step_tokens: int


class DraftCommand(msgspec.Struct, frozen=True, tag=True):
    """Heads.draft."""

    rows: list[HeadDraftRequest]


class DummyDraftCommand(msgspec.Struct, frozen=True, tag=True):
    """Heads.run_dummy_draft."""

    num_sequences: int


class LoadAdapterCommand(msgspec.Struct, frozen=True, tag=True):
    """Begin to read an adapter for a slot."""

    slot: int
    adapter: Adapter
    files: dict[str, bytes] = {}
    """For a rank on another machine, which has no such folder: its files. Empty: it got them before."""


class AwaitAdapterCommand(msgspec.Struct, frozen=True, tag=True):
    """The next passes may be of this slot's adapter, or never will be where it could not be loaded."""

    slot: int
    failed: bool


class CallCommand(msgspec.Struct, frozen=True, tag=True):
    """Call something, as `encode_call` of engine/common/executor.py writes it. Answered by Called."""

    content: bytes


_StartupCommand = StartCommand | MeasureMemoryCommand | AllocateCommand | MakeRunnerCommand
RankCommand = (
    _StartupCommand
    | StepCommand
    | WarmUpCommand
    | FindKernelVariantsCommand
    | DraftCommand
    | DummyDraftCommand
    | LoadAdapterCommand
    | AwaitAdapterCommand
    | CallCommand
)


class LoadReply(msgspec.Struct, frozen=True, tag=True):
    weight_bytes: int
    """As read; a stage's, as held."""
    weight_shapes: dict[str, tuple[tuple[int, ...], str]] = {}
    """A stage's weights: shape and type, by name in the checkpoint."""
    weight_digest: str = ""
    """Of the weights, as loading.samples tells them, where there are several machines."""


class MemoryReply(msgspec.Struct, frozen=True, tag=True):
    """Bytes that the rank's device, or its machine, has for the KV cache."""

    available_bytes: int


class KernelVariantsReply(msgspec.Struct, frozen=True, tag=True):
    """Kinds of Triton's kernels, or why they could not be found."""

    variants: list[tuple[str, str, str, tuple[str, int | str, int]]]
    """The fields of each, as kernels/gpu/kernel_variant.py has them."""
    error: str = ""


class AllocationReply(msgspec.Struct, frozen=True, tag=True):
    """There is room."""


class FailureReply(msgspec.Struct, frozen=True, tag=True):
    """A QuireError ended the start."""

    message: str
    param: str | None


class ProgressReply(msgspec.Struct, frozen=True, tag=True):
    """A part of a stage's step is done; or the machine of a rank is there."""


class RankEndReply(msgspec.Struct, frozen=True, tag=True):
    """A rank on another machine has ended, with this return code, as subprocess says it."""

    code: int


class CallReply(msgspec.Struct, frozen=True, tag=True):
    content: bytes
    """What the call gave."""


RankReply = (
    LoadReply
    | MemoryReply
    | AllocationReply
    | KernelVariantsReply
    | FailureReply
    | ProgressReply
    | RankEndReply
    | CallReply
)


encode_message: Callable[[Any], bytes] = msgspec.msgpack.Encoder().encode
decode_command = msgspec.msgpack.Decoder(RankCommand).decode
decode_reply = msgspec.msgpack.Decoder(RankReply).decode


def encode_frame(message: RankCommand | RankReply) -> bytes:
    encoded = encode_message(message)
    return FRAME_HEADER.pack(len(encoded)) + encoded


def read_frame_bytes(pipe: BinaryIO) -> bytes | None:
    """The next frame's content; None where the pipe has ended."""
    head = pipe.read(FRAME_HEADER.size)
    if len(head) < FRAME_HEADER.size:
        return None
    content = pipe.read(length := FRAME_HEADER.unpack(head)[0])
    return content if len(content) == length else None


class Inbox:
    """Messages that a thread reads as they come, so that who sends them never waits for who takes them."""

    def __init__(self, read: Callable[[], bytes | None]) -> None:
        """`read`: the next message; None: there is none any more."""
        self._messages: SimpleQueue[bytes | None] = SimpleQueue()
        threading.Thread(target=_pump_messages, args=(read, self._messages), name="inbox", daemon=True).start()

    def get_message(self, seconds: float | None = None) -> bytes | None:
        """Wait for the next message; None where there is none any more. Raises TimeoutError after so many seconds."""
        try:
            content = self._messages.get(timeout=seconds)
        except Empty as error:
            raise TimeoutError from error
        if content is None:
            self._messages.put(None)
        return content


def _pump_messages(read: Callable[[], bytes | None], messages: SimpleQueue[bytes | None]) -> None:
    while (content := read()) is not None:
        messages.put(content)
    messages.put(None)
