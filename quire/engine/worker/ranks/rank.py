"""A rank but the first: it loads its part of the model, and runs the same program on each batch that it is sent."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import astuple
from functools import partial
from pathlib import Path

from quire.engine.checkpoint.kv_plan import StateShares
from quire.engine.checkpoint.overrides import model_path, read_configured
from quire.engine.checkpoint.page_groups import as_configured
from quire.engine.config import EngineConfig
from quire.engine.core.scheduler_output import SchedulerOutput
from quire.engine.layers.shard import Shard
from quire.engine.lora.files import CONFIG, WEIGHTS
from quire.engine.replicas.cores import stay_on
from quire.engine.text.grammar import GrammarCompiler
from quire.engine.types import Adapter
from quire.engine.worker.device import choose, set_up_cpu
from quire.engine.worker.heads import Heads
from quire.engine.worker.images.load import LoadedTower, load_tower
from quire.engine.worker.loading.adapters import adapter_loader
from quire.engine.worker.loading.checkpoint import held_bytes
from quire.engine.worker.loading.drafts.head import LoadedHead
from quire.engine.worker.loading.drafts.mtp import load_head
from quire.engine.worker.loading.model import LoadedModel, load_model
from quire.engine.worker.loading.pooler import choose_pooler
from quire.engine.worker.loading.room import Room, make_room
from quire.engine.worker.loading.samples import sampled
from quire.engine.worker.memory import available_bytes, explained_weights
from quire.engine.worker.ranks.adapters import RankAdapters
from quire.engine.worker.ranks.calls import RankWorker, called
from quire.engine.worker.ranks.meeting import check_connection, meet
from quire.engine.worker.ranks.messages import (
    Allocate,
    Allocated,
    Begin,
    Call,
    Called,
    Draft,
    FindKinds,
    FromRank,
    Kinds,
    LoadAdapter,
    Loaded,
    Measure,
    Measured,
    Picked,
    Prepare,
    Start,
    Step,
    TryGuess,
    UseAdapter,
    decode_to_rank,
)
from quire.engine.worker.ranks.pipeline import StageRunner
from quire.engine.worker.ranks.remote import Joined
from quire.engine.worker.ranks.stages import Stage
from quire.engine.worker.runner import ModelRunner
from quire.engine.worker.sampling.grammar import SlotGrammars
from quire.kernels.distributed import DistributedCollective
from quire.kernels.gpu.faults import fault


class Rank(ABC):
    """Loads its part of the model when constructed. Raises QuireError."""

    setting: str
    """That asks for it."""
    loaded: Loaded
    _room: tuple[Room, int]
    """And how many pages it has."""
    _runner: ModelRunner
    _heads: Heads
    _tower: LoadedTower

    def __init__(self, config: EngineConfig, start: Start, progress: Callable[[], None], here: Joined | None) -> None:
        """`progress` is called after each part of a stage's step. `here`: of a machine but the first."""
        stay_on(set(start.cores if here is None else here.cores))
        if here is not None:
            config = config.model_copy(update=here.settings)
        self._config, self._here, self._number = config, here, start.rank
        self._path = model_path(config)
        self._model_config = as_configured(read_configured(config, self._path), config)
        set_up_cpu(config)
        self._chosen = choose(config, self._model_config, tried=True)
        load = partial(load_model, config, self._path, self._model_config, self._chosen)
        with explained_weights():
            self._group = meet(start, config, self._chosen, config.master_addr if here is None else here.address)
            self._part = self._load(load, progress)
        self._adapters: RankAdapters | None = None
        if self._part.adapters is not None:
            self._adapters = RankAdapters(
                adapter_loader(config, self._model_config, self._chosen.spec, self._part.adapters)
            )

    @abstractmethod
    def _load(self, load: Callable[..., LoadedModel], progress: Callable[[], None]) -> LoadedModel: ...

    @abstractmethod
    def _make_runner(self, room: Room, pages: int, *, prompts: bool) -> ModelRunner: ...

    def _step(self, batch: SchedulerOutput, picked: list[Picked]) -> None:
        self._runner.launch(batch)

    def close(self) -> None:
        """Compute nothing any more, and let no other rank wait."""
        self._group.close()

    def do(self, content: bytes) -> FromRank | None:
        """What a message says; returns what is to be answered. Raises QuireError, and RankEnded or BrokenPipeError
        where another rank has ended."""
        model = self._part.model
        match decode_to_rank(content):
            case Step(batch, picked):
                self._step(batch, picked)
            case Draft(rows):
                self._heads.draft(rows)
            case Prepare(what):
                getattr(self._runner, what)()
            case TryGuess(count):
                self._heads.try_guess(count)
            case FindKinds(step_tokens):
                return _kinds(self._runner, step_tokens)
            case Measure():
                check_connection(self._group, self._chosen.device, self.setting)
                about = self._model_config, self._chosen.backend, self._config
                return Measured(available_bytes(model, *about, self._tower.step_bytes))
            case Call(content):
                return Called(called(RankWorker(self._number, self._config.ranks, model), content))
            case Allocate(pages, max_model_len, sequences, snapshots):
                shares = StateShares(sequences, snapshots)
                self._room = make_room(self._config, self._chosen, self._part, pages, max_model_len, shares), pages
                return Allocated()
            case Begin(prompts):
                self._runner = self._make_runner(*self._room, prompts=prompts)
            case LoadAdapter(slot, adapter, files):
                assert self._adapters is not None
                self._adapters.load(slot, _copied(adapter, files, self._here))
            case UseAdapter(slot, failed):
                assert self._adapters is not None
                self._adapters.use(slot, failed=failed)
            case other:
                raise AssertionError(f"{other} is for other ranks")
        return None


class TensorRank(Rank):
    """Has a part of every layer, and the whole tower: each rank makes the same features of an image."""

    setting = "tensor_parallel_size"
    _head: LoadedHead | None = None

    def _load(self, load: Callable[..., LoadedModel], progress: Callable[[], None]) -> LoadedModel:
        config, chosen = self._config, self._chosen
        loaded = load(_nothing, shard=Shard(self._number, self._group.count, self._group, config.divides_tokens))
        if config.speculative_config is not None and config.speculative_config.hidden_states:
            self._head = load_head(config, self._model_config, chosen.backend, loaded.model)
        self._tower = load_tower(config, self._path, self._model_config, chosen, _nothing)
        digest = sampled(config) if config.nnodes > 1 else ""
        self.loaded = Loaded(loaded.read_bytes + self._tower.weight_bytes, digest=digest)
        return loaded

    def _make_runner(self, room: Room, pages: int, *, prompts: bool) -> ModelRunner:
        part, config, heads = self._part, self._config, None
        if self._head is not None:
            heads = self._heads = self._head.heads(config, room, pages)
        pooler = choose_pooler(config, self._path, part)
        eos = self._model_config.eos_token_ids
        made, grammars = (room.pages, room.slots), SlotGrammars(_no_grammars)
        features = self._tower.features
        return ModelRunner(part.model, *made, grammars, eos, room.capture, pooler, heads, features, prompts)


class StageRank(Rank):
    """Has some of the layers."""

    setting = "pipeline_parallel_size"
    _runner: StageRunner

    def _load(self, load: Callable[..., LoadedModel], progress: Callable[[], None]) -> LoadedModel:
        loaded = load(progress, kind=Stage, stage=self._number - 1)
        assert isinstance(loaded.model, Stage)
        assert isinstance(self._group, DistributedCollective)
        if self._number > 1:
            loaded.model.follow(self._group, self._number - 1)
        held = held_bytes(loaded.model.parameters(), self._config, self._chosen.backend, loaded.read_bytes)
        about = self._config, self._path, self._model_config, self._chosen
        self._tower = load_tower(*about, progress, stage=self._number - 1)
        held += self._tower.weight_bytes
        table = loaded.checkpoint.table.items()
        self.loaded = Loaded(held, {name: (each.shape, str(each.dtype)) for name, each in table})
        return loaded

    def _make_runner(self, room: Room, pages: int, *, prompts: bool) -> ModelRunner:
        assert isinstance(self._group, DistributedCollective)
        grammars, eos = SlotGrammars(_no_grammars), self._model_config.eos_token_ids
        features = self._tower.features
        return StageRunner(
            self._group, self._part.model, room.pages, room.slots, grammars, eos, None, None, None, features
        )

    def _step(self, batch: SchedulerOutput, picked: list[Picked]) -> None:
        self._runner.compute(batch, picked)


def _kinds(runner: ModelRunner, step_tokens: int) -> Kinds:
    try:
        return Kinds([astuple(kind) for kind in runner.kinds(step_tokens)])
    except Exception as error:  # as in compile_ahead (warmup.py)
        return Kinds([], fault(error))


def _copied(adapter: Adapter, files: Mapping[str, bytes], here: Joined | None) -> Adapter:
    """The adapter as this machine has it."""
    if here is None:
        return adapter
    folder = Path(here.copies) / adapter.digest
    folder.mkdir(exist_ok=True)
    for name in files.keys() & {CONFIG, WEIGHTS}:
        (folder / name).write_bytes(files[name])
    return Adapter(adapter.name, adapter.digest, str(folder))


def _nothing() -> None:
    pass


def _no_grammars() -> GrammarCompiler:
    raise AssertionError("the first rank has the grammars")
