"""What programs and operators call on every rank, between two steps: a function of theirs, or a method by its name."""

from __future__ import annotations

import pickle
import sys
from dataclasses import dataclass

import torch

from quire.engine.models.decoder import Decoder
from quire.engine.processes.procfs import resident_bytes


@dataclass(frozen=True, slots=True)
class RankWorker:
    """A rank, as such a function sees it. Its methods are what may be called by name: METHODS of
    engine/common/executor.py."""

    rank: int
    world_size: int
    """How many ranks compute the model together."""
    model: Decoder
    """This rank's part of it. Who changes its weights should have prefixes forgotten (`reset_prefix_cache`)."""

    def describe(self) -> dict[str, object]:
        """Which rank it is, on what, and the memory of its process."""
        description = {"rank": self.rank, "world_size": self.world_size, "device": str(self.model.device)}
        return {**description, "threads": torch.get_num_threads(), "resident_bytes": resident_bytes()}

    def parameters(self) -> dict[str, list[object]]:
        """Shape and type of each weight, by its name in the checkpoint."""
        table = self.model.parameters()
        return {name: [list(each.shape), str(each.dtype).removeprefix("torch.")] for name, each in table.items()}


def run_rank_call(worker: RankWorker, content: bytes) -> bytes:
    """What a call, as `encode_call` of engine/common/executor.py writes it, gives on this rank, or why it failed."""
    try:
        path, call = pickle.loads(content)
        sys.path += [each for each in path if each not in sys.path]  # for the function's module, and what it imports
        try:
            method, args, kwargs = pickle.loads(call)
        except (AttributeError, ImportError) as error:
            raise ImportError(
                f"the function must be one of a module's, not of the program's own file: {error}"
            ) from error
        function = getattr(RankWorker, method) if isinstance(method, str) else method
        value = function(worker, *args, **kwargs)
        return pickle.dumps((value, None))
    except (Exception, SystemExit) as error:  # whatever a user's function raises; sys.exit() too ends the call alone
        return pickle.dumps((None, f"rank {worker.rank}: {type(error).__name__}: {error}"))
