"""A rank but the first of those that all run the same steps (spmd.py)."""

from __future__ import annotations

from quire.engine.checkpoint.files import read_model_config, resolve_model
from quire.engine.config import EngineConfig
from quire.engine.layers.shard import Shard
from quire.engine.text.grammar import GrammarCompiler
from quire.engine.worker.device import choose, set_up_cpu
from quire.engine.worker.loading.adapters import adapter_loader
from quire.engine.worker.loading.model import load_model
from quire.engine.worker.loading.pooler import choose_pooler
from quire.engine.worker.loading.room import make_room
from quire.engine.worker.memory import available_bytes, explained_weights
from quire.engine.worker.ranks.adapters import RankAdapters
from quire.engine.worker.ranks.messages import (
    Allocate,
    FromRank,
    LoadAdapter,
    Loaded,
    Measure,
    Measured,
    Prepare,
    Start,
    Step,
    UseAdapter,
    decode_to_rank,
)
from quire.engine.worker.ranks.spmd import check_connection, in_order
from quire.engine.worker.runner import Runner
from quire.engine.worker.sampling.grammar import SlotGrammars
from quire.kernels.distributed import join_ranks


class SpmdRank:
    """Loads its part of the model when constructed. Raises QuireError."""

    is_stage = False

    def __init__(self, start: Start) -> None:
        self._config = config = EngineConfig.model_validate_json(start.config)
        self._path = resolve_model(config.model)
        self._model_config = read_model_config(self._path)
        set_up_cpu(config)
        self._chosen = chosen = choose(config, self._model_config, tried=True)
        count, ordered = config.tensor_parallel_size, in_order(config, chosen.device)
        (memory,) = start.descriptors
        self._group = join_ranks(memory, start.key, start.rank, count, chosen.device, in_order=ordered)
        shard = Shard(start.rank, count, self._group)
        with explained_weights():
            self._model = load_model(config, self._path, self._model_config, chosen, lambda: None, shard=shard)
        self.loaded = Loaded(self._model.read_bytes)
        self._adapters: RankAdapters | None = None
        if self._model.adapters is not None:
            self._adapters = RankAdapters(adapter_loader(config, self._model_config, self._model.adapters))
        self._runner: Runner | None = None

    def do(self, content: bytes) -> FromRank | None:
        """What a message says; returns what is to be answered. Raises QuireError, and RankEnded where another rank
        has ended."""
        match decode_to_rank(content):
            case Step(batch):
                self._ready.launch(batch)
            case Prepare(what):
                getattr(self._ready, what)()
            case Measure():
                check_connection(self._group, self._chosen.device)
                model, backend = self._model.model, self._chosen.backend
                return Measured(available_bytes(model, self._model_config, backend, self._config))
            case Allocate(num_blocks, max_model_len):
                self._runner = self._make_runner(num_blocks, max_model_len)
            case LoadAdapter(slot, adapter):
                assert self._adapters is not None
                self._adapters.load(slot, adapter)
            case UseAdapter(slot, failed):
                assert self._adapters is not None
                self._adapters.use(slot, failed=failed)
            case other:
                raise AssertionError(f"{other} is for other ranks")
        return None

    def close(self) -> None:
        """Let no other rank wait."""
        self._group.close()

    @property
    def _ready(self) -> Runner:
        assert self._runner is not None, "it has no pages yet"
        return self._runner

    def _make_runner(self, num_blocks: int, max_model_len: int) -> Runner:
        loaded, config = self._model, self._config
        room = make_room(config, self._chosen, loaded, num_blocks, max_model_len)
        pooler = choose_pooler(config, self._path, loaded)
        eos = self._model_config.eos_token_ids
        return Runner(loaded.model, room.pages, room.slots, SlotGrammars(_no_grammars), eos, room.capture, pooler)


def _no_grammars() -> GrammarCompiler:
    raise AssertionError("the first rank has the grammars")
