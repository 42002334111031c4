"""Which tiers a configuration asks for."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

from quire.engine import clock
from quire.engine.checkpoint.files import ModelConfig
from quire.engine.checkpoint.kv_folder import open_root
from quire.engine.checkpoint.kv_plan import GIB
from quire.engine.config import EngineConfig
from quire.engine.core.executor import PageMover
from quire.engine.core.no_tiers import NoTiers
from quire.engine.errors import ConfigError, refuse
from quire.engine.tiers.costs import Costs
from quire.engine.tiers.disk import DiskTier
from quire.engine.tiers.host import HostTier
from quire.engine.tiers.identity import WeightFiles, identity_of
from quire.engine.tiers.outside import OutsideTier
from quire.engine.tiers.tier import Tier
from quire.engine.tiers.tiers import Size, Tiers

_ROUNDS = 3


def asked_for(config: EngineConfig) -> list[str]:
    """The settings that ask for tiers."""
    return [key for key in ("kv_offload_memory", "kv_offload_dir", "kv_offload_tier") if getattr(config, key)]


def check_tiers(config: EngineConfig, *, encoder: bool) -> None:
    """Raise ConfigError where there can be no tiers, though some are asked for, and for a size of none."""
    lacks_folder = config.kv_offload_disk is not None and config.kv_offload_dir is None
    refuse("kv_offload_disk", lacks_folder and "says how much --kv-offload-dir DIR may take, which is not given")
    if not (asked := asked_for(config)):
        return
    names = ("tensor_parallel_size", "pipeline_parallel_size")
    divided = [name for name in names if getattr(config, name) > 1]
    refuse(
        asked[0],
        encoder and "encoders keep no KV cache",
        not config.enable_prefix_caching and "pages are found as cached prefixes: it needs prefix caching",
        divided != [] and f"pages of several ranks ({divided[0]}) are not kept beside their cache yet",
    )


def choose_tiers(
    config: EngineConfig,
    model: ModelConfig,
    make_mover: Callable[[], PageMover | None],
    files: WeightFiles | None,
    page_tokens: int,
    make_states: Callable[[], PageMover | None] | None = None,
    make_tiers: Callable[..., Tiers] = Tiers,
) -> tuple[NoTiers, list[str]]:
    """The tiers, and notes on them. `files`: those of the weights that were loaded; None: they are in no file, so no
    later engine could know whether they are the same. `make_states`: what copies slots, where prefixes need
    snapshots. `make_tiers`: makes them of what Tiers takes."""
    if not (asked := asked_for(config)):
        return NoTiers(), []
    if (mover := make_mover()) is None:
        raise ConfigError(f"{asked[0]}: what computes here has no pages that can be copied", param=asked[0])
    states = None if make_states is None else make_states()
    layout = mover.layout if states is None else f"{mover.layout}; {states.layout}"
    tiers: list[Tier] = []
    sizes: dict[str, Size] = {}
    notes = []
    costs = Costs(page_tokens)
    if config.kv_offload_memory is not None:
        host = HostTier(int(config.kv_offload_memory * GIB))
        tiers.append(host)
        sizes[host.name] = lambda: host.size
        costs.fetched(host.name, _ROUNDS, _copy_seconds(mover))
    if config.kv_offload_dir is not None or config.kv_offload_tier is not None:
        memory = None if config.kv_offload_dir is None else open_root(config.kv_offload_dir)
        weights = None if files is None else files.hash(memory)
        if weights is None:
            why = "are in no file" if files is None else "changed on the disk while they were loaded"
            notes.append(f"no KV is kept outside this process: the weights {why}")
        else:
            identity = identity_of(config, model, weights, layout)
            if config.kv_offload_dir is not None:
                disk = DiskTier(config.kv_offload_dir, int(config.disk_gib * GIB), identity)
                tiers.append(OutsideTier(disk, identity))
                sizes[disk.name] = lambda: disk.size
            if config.kv_offload_tier is not None:
                tiers.append(OutsideTier(_imported(config.kv_offload_tier, identity), identity))
    if not tiers:
        return NoTiers(), notes
    bounds = {"host": config.kv_offload_memory, "disk": config.disk_gib}
    room = [_room(tier.name, bounds.get(tier.name), mover.page_bytes, page_tokens) for tier in tiers]
    return make_tiers(tiers, mover, costs, sizes, f"; below it {', '.join(room)}", states), notes


def _room(name: str, bound: float | None, page_bytes: int, page_tokens: int) -> str:
    if bound is None:
        return name
    return f"{name} {bound:g} GiB = {int(bound * GIB) // max(page_bytes, 1) * page_tokens:,} tokens"


def _imported(name: str, identity: bytes) -> Tier:
    """What somebody's own function, named as module:function, makes for pages of an identity."""
    module, _, function = name.partition(":")
    try:
        made: Tier = getattr(import_module(module), function)(identity)
        if made.name in ("host", "disk"):
            raise ValueError(f"its name is {made.name!r}, as that of another tier")
    except Exception as error:
        wrong = f"{name!r} makes no tier: {type(error).__name__}: {error}"
        raise ConfigError(f"kv_offload_tier: {wrong}", param="kv_offload_tier") from error
    return made


def _copy_seconds(mover: PageMover) -> float:
    """To copy a page to the device a few times, which nobody uses yet."""
    mover.claim([0])
    page = mover.read(0)
    began = clock.monotonic()
    for _ in range(_ROUNDS):
        mover.write(0, page)
    return clock.monotonic() - began
