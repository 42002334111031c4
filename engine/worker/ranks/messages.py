"""What the first rank tells the others, and what they answer: frames in pipes."""

from __future__ import annotations

from typing import BinaryIO, Literal

import msgspec
import numpy as np
import torch
from torch import Tensor

from quire.engine.batch import Batch
from quire.engine.nodes.greeting import FRAME_LENGTH, Ended
from quire.engine.types import Adapter
from quire.kernels.backend import AttentionMetadata, LinearContext


class Array(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A tensor of the host."""

    dtype: str
    shape: tuple[int, ...]
    content: bytes


class Start(msgspec.Struct, frozen=True, tag=True):
    """Load your part of the model. Answered by Loaded or Failed."""

    config: str
    """The engine's, as JSON."""
    rank: int
    descriptors: list[int]
    """Of the memory that all ranks share; or of the pipes that a stage writes to and, but for the first one, reads."""
    cores: list[int]
    """To stay on; none: all."""
    key: bytes = b""
    """Of several machines' ranks: what these show each other. Of ranks that run the same steps: under what they meet.
    Empty: other ranks of one machine."""
    spmd: bool = False
    """It runs the same steps as the first one, which else tells it every call; they meet by the descriptor."""


class Meet(msgspec.Struct, frozen=True, tag=True):
    """Connect with the ranks of all machines."""

    places: list[tuple[str, int]]
    """Where each can be reached, in their order."""


class Measure(msgspec.Struct, frozen=True, tag=True):
    """Run the largest step. Answered by Measured or Failed."""


class Allocate(msgspec.Struct, frozen=True, tag=True):
    """Make room for so many pages, of which there will be no more and no fewer."""

    num_blocks: int
    max_model_len: int = 0
    """Of a rank that runs whole steps."""


class Step(msgspec.Struct, frozen=True, tag=True):
    """Executor.launch."""

    batch: Batch


Preparation = Literal["warm_up", "warm_sampler", "warm_prompts"]


class Prepare(msgspec.Struct, frozen=True, tag=True):
    """A method of Runner."""

    what: Preparation


class Forward(msgspec.Struct, frozen=True, tag=True):
    """Decoder.forward_tapped."""

    token_ids: Array
    rows: Array
    taps: tuple[int, ...]
    metadata: tuple[Array, ...]
    """The tensors of AttentionMetadata, and the block tables and slots of its others."""
    lengths: tuple[int, int]
    """Its longest query and context."""
    whole: bool
    adapters: Array | None


class Logits(msgspec.Struct, frozen=True, tag=True):
    """Decoder.logits."""

    hidden: Array | None
    """None: what the last forward pass gave."""
    adapters: Array | None


class Embed(msgspec.Struct, frozen=True, tag=True):
    """Decoder.embed."""

    token_ids: Array


class LoadAdapter(msgspec.Struct, frozen=True, tag=True):
    """Begin to read an adapter for a slot."""

    slot: int
    adapter: Adapter
    files: dict[str, bytes] = {}
    """For a rank on another machine, which has no such folder: its files. Empty: it got them before."""


class UseAdapter(msgspec.Struct, frozen=True, tag=True):
    """The next passes may be of this slot's adapter, or never will be where it could not be loaded."""

    slot: int
    failed: bool


ToRank = Start | Meet | Measure | Allocate | Step | Prepare | Forward | Logits | Embed | LoadAdapter | UseAdapter


class Loaded(msgspec.Struct, frozen=True, tag=True):
    weight_bytes: int
    """As read; a stage's, as held."""
    table: dict[str, tuple[tuple[int, ...], str]] = {}
    """A stage's weights: shape and type, by name in the checkpoint."""
    free: int | None = None
    """Of a rank on another machine: bytes that are left there for keys and values."""


class Measured(msgspec.Struct, frozen=True, tag=True):
    """Bytes that the rank's device has for the KV cache."""

    available: int


class Failed(msgspec.Struct, frozen=True, tag=True):
    """A QuireError ended the start."""

    message: str
    param: str | None


class Progress(msgspec.Struct, frozen=True, tag=True):
    """A part of a stage's step is done."""


class Reached(msgspec.Struct, frozen=True, tag=True):
    """A rank of several machines can be reached there. Answered by Meet."""

    host: str
    port: int
    weights: str = ""
    """As loading.samples tells them."""


FromRank = Loaded | Measured | Failed | Progress | Reached | Ended


class Passed(msgspec.Struct, frozen=True, tag=True):
    """What a stage has computed, for the next one, which adds the two."""

    x: Array
    residual: Array


_encode = msgspec.msgpack.Encoder().encode
decode_to_rank = msgspec.msgpack.Decoder(ToRank).decode
decode_from_rank = msgspec.msgpack.Decoder(FromRank).decode
decode_passed = msgspec.msgpack.Decoder(Passed).decode


def frame(message: ToRank | FromRank | Passed) -> bytes:
    encoded = _encode(message)
    return FRAME_LENGTH.pack(len(encoded)) + encoded


def read_frame(pipe: BinaryIO) -> bytes | None:
    """The next frame's content; None where the pipe has ended."""
    head = pipe.read(FRAME_LENGTH.size)
    if len(head) < FRAME_LENGTH.size:
        return None
    content = pipe.read(length := FRAME_LENGTH.unpack(head)[0])
    return content if len(content) == length else None


def array(tensor: Tensor) -> Array:
    numbers = tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor  # which NumPy does not have
    return Array(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), numbers.numpy().tobytes())


def tensor(array: Array) -> Tensor:
    dtype = getattr(torch, array.dtype)
    if not array.content:
        return torch.empty(array.shape, dtype=dtype)
    return torch.from_numpy(np.frombuffer(bytearray(array.content), dtype=np.uint8)).view(dtype).view(array.shape)


def adapters_of(context: LinearContext) -> Array | None:
    return None if context.adapters is None else array(context.adapters)


def context_of(adapters: Array | None) -> LinearContext:
    return LinearContext(None if adapters is None else tensor(adapters))


def forward(token_ids: Tensor, metadata: AttentionMetadata, rows: Tensor, taps: tuple[int, ...]) -> Forward:
    lengths = (metadata.query_start, metadata.context_lens, metadata.key_start)
    tables = [tensor for each in metadata.others for tensor in (each.block_table, each.slots)]
    tensors = (*lengths, metadata.block_table, metadata.positions, metadata.slots, *tables)
    return Forward(
        token_ids=array(token_ids),
        rows=array(rows),
        taps=taps,
        metadata=tuple(array(each) for each in tensors),
        lengths=(metadata.max_query_len, metadata.max_context_len),
        whole=metadata.whole,
        adapters=adapters_of(metadata.linear),
    )


def metadata_of(message: Forward) -> AttentionMetadata:
    starts, contexts, keys, table, positions, slots, *others = (tensor(each) for each in message.metadata)
    first = AttentionMetadata(
        query_start=starts,
        context_lens=contexts,
        key_start=keys,
        block_table=table,
        positions=positions,
        slots=slots,
        max_query_len=message.lengths[0],
        max_context_len=message.lengths[1],
        linear=context_of(message.adapters),
        whole=message.whole,
    )
    return first.grouped([table, *others[::2]], [slots, *others[1::2]])
