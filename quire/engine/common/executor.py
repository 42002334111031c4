from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from quire.engine.common.errors import EngineError, InvalidRequest
from quire.engine.common.scheduler_output import ModelRunnerOutput, SchedulerOutput
from quire.engine.common.types import Adapter


class PendingOutput(Protocol):
    def sample_tokens(self) -> None:
        """Launch the step's sampling, if `launch` launched only its forward pass.

        `launch` does so if a grammar depends on a token of the step before that the host has not read yet. Call this
        method once the result of the step before is read, and before the next launch. Does nothing if sampling is
        already launched.
        """

    def result(self) -> ModelRunnerOutput:
        """Wait for the step's output. Call once per step, in launch order."""


class AdapterLoader(Protocol):
    """Loads LoRA adapters into slots in the background."""

    def load_adapter(self, slot: int, adapter: Adapter) -> None:
        """No scheduled request may use the slot before `install_finished_loads` reports it."""

    def install_finished_loads(self) -> list[tuple[int, str | None]]:
        """Return the slots whose load has ended since the last call, each with None or an error message."""

    def wait_for_any_load(self, seconds: float) -> None:
        """Return when any load has ended, or after `seconds`."""


class BlockMover(Protocol):
    """`read_block` and `write_block` are thread-safe, and return when the copy is done."""

    block_bytes: int
    layout: str
    """Identifies the meaning of a block's bytes: shapes, dtypes, order, and what computed them."""

    def announce_block_writes(self, blocks: Sequence[int]) -> None:
        """The engine's loop calls this before other threads write the blocks."""

    def read_block(self, block: int) -> memoryview:
        """Return the block's content after the batches launched so far. The caller must launch no batch that writes the
        block before this returns.
        """

    def write_block(self, block: int, content: bytes | memoryview) -> None:
        """The caller must launch no batch that uses the block before this returns."""


RPC_METHODS = ("describe", "parameters")
CollectiveRPC = Callable[[bytes], list[bytes]]


def encode_call(method: str | Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> bytes:
    """Other processes import the function by name. Raises InvalidRequest if they cannot, or if arguments cannot be
    pickled.
    """
    if isinstance(method, str) and method not in RPC_METHODS:
        raise InvalidRequest(f"method: there is no {method!r}, but {' and '.join(RPC_METHODS)}", param="method")
    for field, arguments in (("args", args), ("kwargs", kwargs)):
        if isinstance(method, str) and arguments:
            raise InvalidRequest(f"{field}: {method} takes none", param=field)
    if not isinstance(method, str) and not callable(method):
        raise InvalidRequest(f"method: must be a name or a function, got {method!r}", param="method")
    try:
        path = [] if isinstance(method, str) else sys.path
        return pickle.dumps((path, pickle.dumps((method, tuple(args), dict(kwargs or {})))))
    except Exception as error:  # raised by a user's object
        why = "a function must be importable from a module, and its arguments must be picklable"
        raise InvalidRequest(f"method: {why}: {error}", param="method") from error


def decode_results(encoded_results: Sequence[bytes]) -> list[Any]:
    """Return the ranks' results in rank order. Raises EngineError if a rank failed."""
    results = [pickle.loads(each) for each in encoded_results]
    if failed := [why for _, why in results if why is not None]:
        raise EngineError("; ".join(failed))
    return [value for value, _ in results]


class Executor(Protocol):
    def launch(self, batch: SchedulerOutput) -> PendingOutput:
        """Begin to compute a step. Earlier steps' results need not have been read."""

    def warm_up_next(self) -> bool:
        """Prepare one thing in at most about a second. Return False if nothing is left to prepare."""

    def make_block_mover(self) -> BlockMover | None:
        """Return None if the model has no KV blocks."""

    def make_state_offload_mover(self) -> BlockMover | None:
        """Return a mover for slots (Sublayer.slot_tensor_specs); None if no layer is recurrent."""

    def preload_grammar_compiler(self) -> None:
        """Begin to load the compiler in the background, so that the first grammar need not wait for it."""
