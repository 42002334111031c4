"""Calls users' functions, or methods of RankWorker by name, on every rank between steps."""

from __future__ import annotations

import pickle
import sys
from dataclasses import dataclass

import torch

from quire.engine.models.decoder import Decoder
from quire.engine.processes.procfs import resident_bytes


@dataclass(frozen=True, slots=True)
class RankWorker:
    """A rank, as the first argument of users' functions."""

    rank: int
    world_size: int
    model: Decoder
    """After changing the model's weights, call `reset_prefix_cache`."""

    def describe(self) -> dict[str, object]:
        description = {"rank": self.rank, "world_size": self.world_size, "device": str(self.model.device)}
        return {**description, "threads": torch.get_num_threads(), "resident_bytes": resident_bytes()}

    def parameters(self) -> dict[str, list[object]]:
        """Returns shapes and dtypes by checkpoint name."""
        table = self.model.parameters()
        return {name: [list(each.shape), str(each.dtype).removeprefix("torch.")] for name, each in table.items()}


def run_rank_call(worker: RankWorker, content: bytes) -> bytes:
    """Returns a pickled pair: (value, None), or (None, error message) if the call fails."""
    try:
        path, call = pickle.loads(content)
        sys.path += [each for each in path if each not in sys.path]
        try:
            method, args, kwargs = pickle.loads(call)
        except (AttributeError, ImportError) as error:
            raise ImportError(
                f"the function must be importable from a module other than the program's main file: {error}"
            ) from error
        function = getattr(RankWorker, method) if isinstance(method, str) else method
        value = function(worker, *args, **kwargs)
        return pickle.dumps((value, None))
    except (Exception, SystemExit) as error:  # user code may raise anything; sys.exit() ends the call only
        return pickle.dumps((None, f"rank {worker.rank}: {type(error).__name__}: {error}"))
