"""The interface to what computes the scheduler's batches: one device (engine/worker/model_runner.py), or a fake in
tests."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from quire.engine.common.errors import EngineError, InvalidRequest
from quire.engine.common.scheduler_output import ModelRunnerOutput, SchedulerOutput
from quire.engine.common.types import Adapter


class PendingOutput(Protocol):
    """A step under way."""

    def result(self) -> ModelRunnerOutput:
        """What the step computed; waits for it. Called once, and for all steps in the order of their launch."""


class AdapterLoader(Protocol):
    """Puts adapters into slots of the device, beside the steps: nothing waits for it."""

    def load_adapter(self, slot: int, adapter: Adapter) -> None:
        """Begin to put an adapter into a slot. No row of a step may be in this slot until it is
        `install_finished_loads`."""

    def install_finished_loads(self) -> list[tuple[int, str | None]]:
        """The slots that were filled since the last call, each with None, or with why it could not be filled."""

    def wait_for_any_load(self, seconds: float) -> None:
        """Wait until a load has ended, or as long."""


class BlockMover(Protocol):
    """Copies KV pages between the device and the host's memory. `read_block` and `write_block` may be called by any
    thread, and return when the copy is made."""

    block_bytes: int
    """Of a page in all layers together."""
    layout: str
    """What the bytes of a page are: their shapes, types and order, and what computes them."""

    def announce_block_writes(self, blocks: Sequence[int]) -> None:
        """These pages are going to be written; called by the engine's loop before they are."""

    def read_block(self, block: int) -> memoryview:
        """A copy of a page as the batches launched so far leave it. No batch launched before this returns may write to
        the page."""

    def write_block(self, block: int, content: bytes | memoryview) -> None:
        """Fill a page, which no batch may use that is launched before this returns."""


RPC_METHODS = ("describe", "parameters")
"""What may be called on a rank by name: methods of RankWorker in engine/worker/ranks/rank_rpc.py, without arguments."""
CollectiveRPC = Callable[[bytes], list[bytes]]
"""Runs a call from `encode_call` on every rank. Returns each rank's result, for `decode_results`."""


def encode_call(method: str | Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> bytes:
    """A call as it goes to other processes, which import the function by its name, from where this one can. Raises
    InvalidRequest where they cannot, or for arguments that cannot be sent."""
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
    except Exception as error:  # whatever a user's object raises
        why = "a function must be one of a module's, and arguments such as can be pickled"
        raise InvalidRequest(f"method: {why}: {error}", param="method") from error


def decode_results(encoded_results: Sequence[bytes]) -> list[Any]:
    """What each rank gave, the first one's first. Raises EngineError where one of them failed."""
    results = [pickle.loads(each) for each in encoded_results]
    if failed := [why for _, why in results if why is not None]:
        raise EngineError("; ".join(failed))
    return [value for value, _ in results]


class Executor(Protocol):
    """Computes batches in the order in which they are launched."""

    def launch(self, batch: SchedulerOutput) -> PendingOutput:
        """Start computing a batch. A later batch may be launched before this one's result is asked for."""

    def warm_up_next(self) -> bool:
        """Prepare one thing that a later step will need, in less than a second or so; False when all is ready."""

    def make_block_mover(self) -> BlockMover | None:
        """What copies its KV pages, for tiers of them; None: it keeps none."""

    def make_state_offload_mover(self) -> BlockMover | None:
        """The same of slots (Sublayer.slot_tensor_specs), by their numbers."""

    def preload_grammar_compiler(self) -> None:
        """Begin to load what grammars need, in the background; without this call it is loaded for the first one."""
