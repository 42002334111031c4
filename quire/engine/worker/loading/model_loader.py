from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from quire.engine.checkpoint.kv_cache_groups import build_kv_cache_groups, setting_requiring_full_kv
from quire.engine.checkpoint.layer_placement import split_layers_into_stages, stage_kv_cache_groups
from quire.engine.checkpoint.model_resolver import resolve_weights
from quire.engine.checkpoint.pooling import read_pooling_and_tasks
from quire.engine.common.config import EngineConfig
from quire.engine.families.base.model_config import ModelConfig
from quire.engine.layers.sublayer import BuildContext
from quire.engine.worker.device_plan import DevicePlan
from quire.engine.worker.loading.adapter_loader import make_adapter_slots
from quire.engine.worker.loading.checkpoint_weights import open_weights
from quire.engine.worker.loading.kv_scales import read_fp8_kv_scales
from quire.engine.worker.loading.model.context_length import max_fitting_context_length
from quire.engine.worker.loading.model.loaded_model import WHOLE_MODEL, LoadedModel, ModelPart
from quire.engine.worker.loading.model.offload_settings import disk_tensor_name_pattern
from quire.engine.worker.loading.model.weight_filling import check_weights_fit, fill_weights
from quire.engine.worker.loading.pooler import make_decoder_pooler_head, needs_lm_head
from quire.engine.worker.loading.transformers_support import decoder_class
from quire.engine.worker.loading.weight_check import ExpectedWeights
from quire.engine.worker.loading.weight_loader import NamedTensors
from quire.engine.worker.loading.weight_offload import make_offloader_and_scheme, weight_loading_context


def load_model(
    config: EngineConfig,
    path: Path,
    model_config: ModelConfig,
    chosen: DevicePlan,
    progress: Callable[[], None],
    tensors: NamedTensors | None = None,
    part: ModelPart = WHOLE_MODEL,
) -> LoadedModel:
    """Raises ConfigError."""
    stored = resolve_weights(config)
    device = chosen.device
    dtype = chosen.dtype
    backend = chosen.backend
    files = stored if tensors is None else None
    layers = split_layers_into_stages(chosen.spec.num_layers, config.pipeline_parallel_size)[part.stage]
    on_disk = disk_tensor_name_pattern(config, chosen.spec)
    if part.shard.rank == 0 and layers.stop == chosen.spec.num_layers:  # one rank's check suffices
        check_weights_fit(config, device, dtype, files, chosen.spec.num_layers, on_disk)
    pooling, tasks = read_pooling_and_tasks(path, model_config, config)
    length = max_fitting_context_length(config, model_config, chosen)
    weights = open_weights(config, stored, model_config, backend, dtype, tensors)
    kv_scales = read_fp8_kv_scales(config, files, chosen.kv_dtype)
    offload = make_offloader_and_scheme(config, stored, model_config, chosen, tensors)
    adapter_slots = make_adapter_slots(config, backend, dtype, device)
    groups = build_kv_cache_groups(
        chosen.spec.layer_cache_specs,
        model_config.max_position,
        backend.block_size,
        keep_all_tokens=setting_requiring_full_kv(config) is not None,
    )
    build_context = BuildContext(
        backend=backend,
        scheme=weights.scheme,
        hidden_size=chosen.spec.hidden_size,
        dtype=dtype,
        kv_dtype=chosen.kv_dtype,
        device=device,
        max_model_len=length,
        kv_scales=kv_scales,
        adapters=adapter_slots,
        shard=part.shard,
    )
    model = decoder_class(model_config, part.decoder_class)(
        chosen.spec,
        build_context,
        progress,
        head=needs_lm_head(pooling, tasks),
        groups=stage_kv_cache_groups(groups, layers),
        layers=layers,
        offload=offload,
    )
    if adapter_slots is not None:
        adapter_slots.absent_module_prefixes = model.absent_module_prefixes
    head = make_decoder_pooler_head(pooling, backend, chosen.spec.hidden_size)
    folders = tuple(each.folder for each in pooling.dense_modules)
    expected_weights = ExpectedWeights(model.parameters() | head.parameters(), folders, model.absent_module_prefixes)
    with weight_loading_context(model, config):
        read_bytes = fill_weights(
            expected_weights, config, device, model.convert_weights(weights.stream), files, on_disk
        )
    return LoadedModel(
        model, head, pooling, tasks, expected_weights, adapter_slots, weights.quantization, read_bytes, groups
    )
