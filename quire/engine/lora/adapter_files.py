"""Reads adapters in PEFT's format from folders that may be hostile. Does not import torch."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypedDict

from msgspec import Meta

from quire.engine.architecture.decoder import EMBED_TOKENS
from quire.engine.checkpoint.tensor_headers import TensorHeader, read_file_headers, text_tensor_name
from quire.engine.common.errors import AdapterError, ModelError
from quire.engine.common.folder_reader import convert_parsed_json, read_json_if_present
from quire.engine.families.base.weight_names import LAYER_MODULE_PATTERN
from quire.engine.lora.target_modules import ModuleShapes

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
MAX_RANK = 256
MAX_SCALE = 1024.0
"""Trained scales are below 100. Far higher scales overflow results."""
_MAX_CONFIG_BYTES = 2**20
_FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")
_HALF_OF_SUFFIX = {
    ".lora_A.weight": "down",
    ".lora_B.weight": "up",
    ".lora_embedding_A": "down",
    ".lora_embedding_B": "up",
}
_BASE_WEIGHT_SUFFIXES = (".base_layer.weight",)
_MODULE_PATTERN = re.compile(r"\^?[\w.\\]+\$?")
_BASE_CHANGING_INITS = ("pissa", "olora", "corda", "loftq", "lora_ga")


class _AdapterConfig(TypedDict, total=False):
    peft_type: str | None
    r: Annotated[int, Meta(ge=1, le=2**20)] | None
    lora_alpha: Annotated[float, Meta(ge=-1e6, le=1e6)] | None
    use_rslora: bool | None
    use_dora: bool | None
    lora_bias: bool | None
    bias: str | None
    init_lora_weights: bool | str | None
    rank_pattern: dict[str, Annotated[int, Meta(ge=1, le=2**20)]] | None
    alpha_pattern: dict[str, Annotated[float, Meta(ge=-1e6, le=1e6)]] | None
    modules_to_save: list[str] | None
    layer_replication: list[Any] | None
    trainable_token_indices: list[Any] | dict[str, Any] | None
    target_parameters: list[str] | None
    alora_invocation_tokens: list[int] | None
    use_qalora: bool | None


_UNSUPPORTED_FIELDS = (
    "use_dora",
    "lora_bias",
    "modules_to_save",
    "layer_replication",
    "trainable_token_indices",
    "target_parameters",
    "alora_invocation_tokens",
    "use_qalora",
)


@dataclass(frozen=True, slots=True)
class AdapterModuleSpec:
    lora_a: str
    """[rank, in_features]."""
    lora_b: str
    """[out_features, rank]."""
    rank: int
    scale: float
    """lora_alpha / r; with use_rslora lora_alpha / sqrt(r)."""


def read_adapter_specs(
    folder: Path, modules: ModuleShapes, max_rank: int, *, embedding: bool = True
) -> dict[str, AdapterModuleSpec]:
    """Raises AdapterError."""
    try:
        config = _read_config(folder)
        headers = read_file_headers(folder / WEIGHTS_FILE)
    except ModelError as error:
        raise AdapterError(error.message.removeprefix("model: ")) from None
    if headers is None:
        raise AdapterError(f"there is no {WEIGHTS_FILE} in {folder.name}; pickled files (.bin) are not read")
    tensor_names = _tensor_names_by_module(headers, modules)
    if not tensor_names:
        raise AdapterError(f"{WEIGHTS_FILE} holds no adapter's tensors")
    if EMBED_TOKENS in tensor_names and not embedding:
        raise AdapterError(
            f"{WEIGHTS_FILE}: {tensor_names[EMBED_TOKENS].get('down')}: adapters of embeddings are served only on CPUs"
        )
    return {
        name: _make_module_spec(name, each, headers, config, modules, max_rank) for name, each in tensor_names.items()
    }


def _read_config(folder: Path) -> _AdapterConfig:
    content = read_json_if_present(folder / CONFIG_FILE, _MAX_CONFIG_BYTES)
    if content is None:
        raise AdapterError(f"there is no {CONFIG_FILE} in {folder.name}")
    config = convert_parsed_json(content, _AdapterConfig, CONFIG_FILE)
    kind = config.get("peft_type")
    if kind != "LORA":
        raise AdapterError(f"{CONFIG_FILE}: peft_type: only LORA is served, got {str(kind)[:40]!r}")
    if config.get("r") is None:
        raise AdapterError(f"{CONFIG_FILE}: r: is missing")
    for name in _UNSUPPORTED_FIELDS:
        if config.get(name):
            raise AdapterError(f"{CONFIG_FILE}: {name}: is not served")
    if (bias := config.get("bias")) not in (None, "none"):
        raise AdapterError(f"{CONFIG_FILE}: bias: only none is served, got {bias[:40]!r}")
    initialized = str(config.get("init_lora_weights") or "").lower()
    if initialized.startswith(_BASE_CHANGING_INITS):
        raise AdapterError(
            f"{CONFIG_FILE}: init_lora_weights: {initialized[:40]!r} changes the base model's weights; save it "
            "converted to plain LoRA"
        )
    for name, patterns in (
        ("rank_pattern", config.get("rank_pattern")),
        ("alpha_pattern", config.get("alpha_pattern")),
    ):
        for pattern in patterns or ():
            if not _MODULE_PATTERN.fullmatch(pattern):
                raise AdapterError(f"{CONFIG_FILE}: {name}: {pattern[:60]!r} is not the name of a module")
    return config


def _tensor_names_by_module(headers: Mapping[str, TensorHeader], modules: ModuleShapes) -> dict[str, dict[str, str]]:
    """Returns names by module, then by half (down or up)."""
    tensor_names: dict[str, dict[str, str]] = {}
    for tensor_name in headers:
        suffix = next((each for each in (*_HALF_OF_SUFFIX, *_BASE_WEIGHT_SUFFIXES) if tensor_name.endswith(each)), None)
        module = None if suffix is None else _find_module(tensor_name.removesuffix(suffix), modules)
        if module is None and ".experts." in tensor_name:
            raise AdapterError(f"{WEIGHTS_FILE}: {tensor_name[:120]!r}: adapters of experts are not served")
        if module is None and ".kv_b_proj." in tensor_name:
            raise AdapterError(
                f"{WEIGHTS_FILE}: {tensor_name[:120]!r}: adapters of the MLA up-projection (kv_b_proj) are not served"
            )
        if module is None or suffix is None:
            raise AdapterError(f"{WEIGHTS_FILE}: {tensor_name[:120]!r} is not a LoRA tensor of a module of this model")
        if suffix in _HALF_OF_SUFFIX:
            half = _HALF_OF_SUFFIX[suffix]
            if half in tensor_names.setdefault(module, {}):
                raise AdapterError(f"{WEIGHTS_FILE}: {tensor_name[:120]!r} appears twice")
            tensor_names[module][half] = tensor_name
    return tensor_names


def find_base_weights_in_adapter(folder: Path, modules: ModuleShapes) -> dict[str, str]:
    headers = read_file_headers(folder / WEIGHTS_FILE) or {}
    module_of_tensor = {
        tensor_name: _find_module(tensor_name.removesuffix(_BASE_WEIGHT_SUFFIXES[0]), modules)
        for tensor_name in headers
        if tensor_name.endswith(_BASE_WEIGHT_SUFFIXES)
    }
    return {tensor_name: module for tensor_name, module in module_of_tensor.items() if module is not None}


def _find_module(name: str, modules: ModuleShapes) -> str | None:
    plain = name.removeprefix("base_model.").removeprefix("model.")
    text = text_tensor_name(plain) or ""
    inner = LAYER_MODULE_PATTERN.sub(r"model.layers.\1.\2", text)
    return next((each for each in (plain, inner, f"model.{inner}", text) if each in modules), None)


def _make_module_spec(
    module: str,
    tensor_names: Mapping[str, str],
    headers: Mapping[str, TensorHeader],
    config: _AdapterConfig,
    modules: ModuleShapes,
    max_rank: int,
) -> AdapterModuleSpec:
    for half, letter in (("down", "A"), ("up", "B")):
        if half not in tensor_names:
            raise AdapterError(f"{WEIGHTS_FILE}: {module}: lora_{letter} is missing")
    ranks, alphas = config.get("rank_pattern") or {}, config.get("alpha_pattern") or {}
    rank = _value_for_module(ranks, module, config["r"])
    if rank > min(max_rank, MAX_RANK):
        where = "rank_pattern" if ranks else "r"
        raise AdapterError(f"{CONFIG_FILE}: {where}: {module} has rank {rank}, --max-lora-rank is {max_rank}")
    in_features, out_features = modules[module]
    for half, expected in (("down", (rank, in_features)), ("up", (out_features, rank))):
        header = headers[tensor_names[half]]
        where = f"{WEIGHTS_FILE}: {tensor_names[half][:120]}"
        if header.dtype not in _FLOAT_DTYPES:
            raise AdapterError(f"{where}: is stored as {header.dtype[:20]}, not as floating-point numbers")
        if header.shape != expected:
            raise AdapterError(f"{where}: has shape {list(header.shape)[:4]}, this model and r need {list(expected)}")
    alpha = config.get("lora_alpha")
    alpha = float(_value_for_module(alphas, module, 8.0 if alpha is None else alpha))
    scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    if abs(scale) > MAX_SCALE:
        where = "alpha_pattern" if alphas else "lora_alpha"
        raise AdapterError(f"{CONFIG_FILE}: {where}: {module} is scaled by {scale:g}; at most {MAX_SCALE:g} is served")
    return AdapterModuleSpec(tensor_names["down"], tensor_names["up"], rank, scale)


def _value_for_module(pattern: Mapping[str, Any], name: str, default: Any) -> Any:
    """Returns the value of the first pattern that equals the module's name or the end of it, as in PEFT."""
    for key, value in pattern.items():
        plain = key.removeprefix("^").removesuffix("$").replace("\\", "")
        if name == plain or name.endswith(f".{plain}") or f"base_model.model.{name}" == plain:
            return value
    return default
