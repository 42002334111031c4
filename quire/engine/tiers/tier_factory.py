from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

from quire.engine.checkpoint.kv_cache_plan import GIB
from quire.engine.checkpoint.kv_offload_dir import open_kv_dir
from quire.engine.common import clock
from quire.engine.common.config import EngineConfig
from quire.engine.common.errors import ConfigError, refuse_setting_if
from quire.engine.common.executor import BlockMover
from quire.engine.core.kv_offload import KVOffloader
from quire.engine.families.base.model_config import ModelConfig
from quire.engine.tiers.disk_tier import DiskTier
from quire.engine.tiers.guarded_tier import GuardedTier
from quire.engine.tiers.host_tier import HostTier
from quire.engine.tiers.kv_identity import WeightFiles, compute_identity
from quire.engine.tiers.load_costs import LoadCosts
from quire.engine.tiers.tier import Tier
from quire.engine.tiers.tiered_offloader import TieredKVOffloader, TierUsage

_NUM_TRIAL_COPIES = 3


def requested_tier_setting_names(config: EngineConfig) -> list[str]:
    return [key for key in ("kv_offload_memory", "kv_offload_dir", "kv_offload_tier") if getattr(config, key)]


def check_tiers(config: EngineConfig, *, is_encoder: bool) -> None:
    """Raises ConfigError."""
    has_no_folder = config.kv_offload_disk is not None and config.kv_offload_dir is None
    refuse_setting_if("kv_offload_disk", has_no_folder and "is the limit of --kv-offload-dir DIR, which is not given")
    if not (settings := requested_tier_setting_names(config)):
        return
    names = ("tensor_parallel_size", "pipeline_parallel_size")
    parallel_settings = [name for name in names if getattr(config, name) > 1]
    refuse_setting_if(
        settings[0],
        is_encoder and "encoders have no KV cache",
        not config.enable_prefix_caching and "offloaded blocks are found through the prefix cache, which is off",
        parallel_settings != [] and f"blocks of several ranks ({parallel_settings[0]}) cannot be offloaded yet",
    )


def make_kv_offloader(
    config: EngineConfig,
    model: ModelConfig,
    make_block_mover: Callable[[], BlockMover | None],
    weight_files: WeightFiles | None,
    block_tokens: int,
    make_state_offload_mover: Callable[[], BlockMover | None] | None = None,
    make_tiered_offloader: Callable[..., TieredKVOffloader] = TieredKVOffloader,
) -> tuple[KVOffloader | None, list[str]]:
    """`weight_files` is None if no file has the weights; then blocks go only to host memory, because a later engine
    could not verify others. Raises ConfigError.
    """
    if not (settings := requested_tier_setting_names(config)):
        return None, []
    if (mover := make_block_mover()) is None:
        raise ConfigError(f"{settings[0]}: this executor has no KV blocks that can be copied", param=settings[0])
    state_mover = None if make_state_offload_mover is None else make_state_offload_mover()
    layout = mover.layout if state_mover is None else f"{mover.layout}; {state_mover.layout}"
    tiers: list[Tier] = []
    sizes: dict[str, TierUsage] = {}
    notes = []
    costs = LoadCosts(block_tokens)
    if config.kv_offload_memory is not None:
        host = HostTier(int(config.kv_offload_memory * GIB))
        tiers.append(host)
        sizes[host.name] = lambda: host.num_blocks_and_bytes
        costs.record_load(host.name, _NUM_TRIAL_COPIES, _measure_copy_seconds(mover))
    if config.kv_offload_dir is not None or config.kv_offload_tier is not None:
        weights, reason_without = _hash_weights(config, weight_files)
        if weights is None:
            notes.append(f"KV blocks are not offloaded: the weights {reason_without}")
        else:
            identity = compute_identity(config, model, weights, layout)
            tiers += _make_persistent_tiers(config, identity, sizes)
    if not tiers:
        return None, notes
    bounds = {"host": config.kv_offload_memory, "disk": config.kv_disk_gib}
    capacities = [_capacity_text(tier.name, bounds.get(tier.name), mover.block_bytes, block_tokens) for tier in tiers]
    return make_tiered_offloader(tiers, mover, costs, sizes, f"; below it {', '.join(capacities)}", state_mover), notes


def _hash_weights(config: EngineConfig, weight_files: WeightFiles | None) -> tuple[bytes | None, str]:
    """Returns a hash of the weights' content, or None and why there is none. Raises ConfigError if the folder for
    hashes is unusable.
    """
    kv_folder = None if config.kv_offload_dir is None else open_kv_dir(config.kv_offload_dir)
    if weight_files is None:
        return None, "are in no file"
    return weight_files.content_hash(kv_folder), "changed on disk while they were loaded"


def _make_persistent_tiers(config: EngineConfig, identity: bytes, sizes: dict[str, TierUsage]) -> list[Tier]:
    """Adds the disk tier's usage to `sizes`."""
    tiers: list[Tier] = []
    if config.kv_offload_dir is not None:
        disk = DiskTier(config.kv_offload_dir, int(config.kv_disk_gib * GIB), identity)
        tiers.append(GuardedTier(disk, identity))
        sizes[disk.name] = lambda: disk.num_blocks_and_bytes
    if config.kv_offload_tier is not None:
        tiers.append(GuardedTier(_make_custom_tier(config.kv_offload_tier, identity), identity))
    return tiers


def _capacity_text(name: str, max_gib: float | None, block_bytes: int, block_tokens: int) -> str:
    if max_gib is None:
        return name
    return f"{name} {max_gib:g} GiB = {int(max_gib * GIB) // max(block_bytes, 1) * block_tokens:,} tokens"


def _make_custom_tier(name: str, identity: bytes) -> Tier:
    """`name`: module:function of a user."""
    module, _, function = name.partition(":")
    try:
        tier: Tier = getattr(import_module(module), function)(identity)
        if tier.name in ("host", "disk"):
            raise ValueError(f"its name {tier.name!r} is already that of another tier")
    except Exception as error:
        problem = f"{name!r} creates no tier: {type(error).__name__}: {error}"
        raise ConfigError(f"kv_offload_tier: {problem}", param="kv_offload_tier") from error
    return tier


def _measure_copy_seconds(mover: BlockMover) -> float:
    """For _NUM_TRIAL_COPIES copies. Rewrites block 0, so no request may use the device yet."""
    mover.announce_block_writes([0])
    content = mover.read_block(0)
    began = clock.monotonic()
    for _ in range(_NUM_TRIAL_COPIES):
        mover.write_block(0, content)
    return clock.monotonic() - began
