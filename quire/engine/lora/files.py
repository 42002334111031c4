"""Reads an adapter's folder in PEFT's format: adapter_config.json and the headers of adapter_model.safetensors.

The folder may be broken, hostile, or made for another model. Every error is one line that names the file and the field.
This module does not import torch, so a server can refuse an adapter before its engine sees it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypedDict

from msgspec import Meta

from quire.engine.checkpoint.layouts import LAYER
from quire.engine.checkpoint.safetensors import TensorHeader, read_file_headers, text_tensor
from quire.engine.errors import AdapterError, ModelError
from quire.engine.folder import checked, read_json
from quire.engine.lora.modules import EMBEDDING, Modules

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MOST_RANK = 256
MOST_SCALE = 1024.0
"""The largest factor of the product. Adapters are trained with less than 100; far above, numbers become infinite."""
_CONFIG_BYTES = 2**20
_FLOATS = ("F64", "F32", "F16", "BF16")
_HALVES = {
    ".lora_A.weight": "down",
    ".lora_B.weight": "up",
    ".lora_embedding_A": "down",
    ".lora_embedding_B": "up",
}
"""The endings of the names of a module's two tensors."""
_WHOLE = (".base_layer.weight",)
"""The endings of the model's own weights, which PEFT saves beside the adapter of an embedding."""
_PLAIN = re.compile(r"\^?[\w.\\]+\$?")
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Initializations that change the model's own weights. The adapter fits only those changed weights."""


class _Fields(TypedDict, total=False):
    """The fields of adapter_config.json that are read. The tensors say the rest."""

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


_REFUSED = (
    *("use_dora", "lora_bias", "modules_to_save", "layer_replication", "trainable_token_indices"),
    *("target_parameters", "alora_invocation_tokens", "use_qalora"),
)
"""Fields that must be empty, because nothing that they ask for is served."""


@dataclass(frozen=True, slots=True)
class AdapterPart:
    """The two tensors of one module."""

    down: str
    """The name of a tensor [rank, in_features] in the file."""
    up: str
    """The name of a tensor [out_features, rank]."""
    rank: int
    scale: float
    """The factor of their product: lora_alpha / r, or with use_rslora lora_alpha / sqrt(r)."""


def read_adapter(folder: Path, modules: Modules, max_rank: int, *, embedding: bool = True) -> dict[str, AdapterPart]:
    """The parts of the adapter in `folder`, by module. `embedding`: whether an embedding may have a part.

    Raises AdapterError.
    """
    try:
        fields = _read_fields(folder)
        headers = read_file_headers(folder / WEIGHTS)
    except ModelError as error:
        raise AdapterError(error.message.removeprefix("model: ")) from None
    if headers is None:
        raise AdapterError(f"there is no {WEIGHTS} in {folder.name}; pickled files (.bin) are not read")
    halves = _halves(headers, modules)
    if not halves:
        raise AdapterError(f"{WEIGHTS} holds no adapter's tensors")
    if EMBEDDING in halves and not embedding:
        raise AdapterError(
            f"{WEIGHTS}: {halves[EMBEDDING].get('down')}: adapters of embeddings are served on CPUs alone"
        )
    return {name: _part(name, each, headers, fields, modules, max_rank) for name, each in halves.items()}


def _read_fields(folder: Path) -> _Fields:
    content = read_json(folder / CONFIG, _CONFIG_BYTES)
    if content is None:
        raise AdapterError(f"there is no {CONFIG} in {folder.name}")
    fields = checked(content, _Fields, CONFIG)
    kind = fields.get("peft_type")
    if kind != "LORA":
        raise AdapterError(f"{CONFIG}: peft_type: only LORA is served, got {str(kind)[:40]!r}")
    if fields.get("r") is None:
        raise AdapterError(f"{CONFIG}: r: is missing")
    for name in _REFUSED:
        if fields.get(name):
            raise AdapterError(f"{CONFIG}: {name}: is not served")
    if (bias := fields.get("bias")) not in (None, "none"):
        raise AdapterError(f"{CONFIG}: bias: only none is served, got {bias[:40]!r}")
    initialized = str(fields.get("init_lora_weights") or "").lower()
    if initialized.startswith(_CHANGES_BASE):
        raise AdapterError(
            f"{CONFIG}: init_lora_weights: {initialized[:40]!r} changes the model's own weights; save the adapter "
            "converted to plain LoRA"
        )
    for name, patterns in (
        ("rank_pattern", fields.get("rank_pattern")),
        ("alpha_pattern", fields.get("alpha_pattern")),
    ):
        for pattern in patterns or ():
            if not _PLAIN.fullmatch(pattern):
                raise AdapterError(f"{CONFIG}: {name}: {pattern[:60]!r} is not the name of a module")
    return fields


def _halves(headers: Mapping[str, TensorHeader], modules: Modules) -> dict[str, dict[str, str]]:
    """The tensors' names, by module and by half (down or up)."""
    found: dict[str, dict[str, str]] = {}
    for stored in headers:
        suffix = next((each for each in (*_HALVES, *_WHOLE) if stored.endswith(each)), None)
        module = None if suffix is None else _module(stored.removesuffix(suffix), modules)
        if module is None and ".experts." in stored:
            raise AdapterError(f"{WEIGHTS}: {stored[:120]!r}: adapters of experts are not served")
        if module is None and ".kv_b_proj." in stored:
            raise AdapterError(f"{WEIGHTS}: {stored[:120]!r}: adapters of what expands latents are not served")
        if module is None or suffix is None:
            raise AdapterError(f"{WEIGHTS}: {stored[:120]!r} is no adapter's tensor of a module of this model")
        if suffix in _HALVES:
            half = _HALVES[suffix]
            if half in found.setdefault(module, {}):
                raise AdapterError(f"{WEIGHTS}: {stored[:120]!r} is there twice")
            found[module][half] = stored
    return found


def base_weights(folder: Path, modules: Modules) -> dict[str, str]:
    """The model's own weights in an adapter's file: their names there, and the modules that they are of."""
    headers = read_file_headers(folder / WEIGHTS) or {}
    found = {stored: _module(stored.removesuffix(_WHOLE[0]), modules) for stored in headers if stored.endswith(_WHOLE)}
    return {stored: module for stored, module in found.items() if module is not None}


def _module(name: str, modules: Modules) -> str | None:
    """The model's module that PEFT calls `name`; None: the model has no such module."""
    plain = name.removeprefix("base_model.").removeprefix("model.")
    text = text_tensor(plain) or ""
    inner = LAYER.sub(r"model.layers.\1.\2", text)
    return next((each for each in (plain, inner, f"model.{inner}", text) if each in modules), None)


def _part(
    name: str,
    halves: Mapping[str, str],
    headers: Mapping[str, TensorHeader],
    fields: _Fields,
    modules: Modules,
    max_rank: int,
) -> AdapterPart:
    for half, letter in (("down", "A"), ("up", "B")):
        if half not in halves:
            raise AdapterError(f"{WEIGHTS}: {name}: lora_{letter} is missing")
    ranks, alphas = fields.get("rank_pattern") or {}, fields.get("alpha_pattern") or {}
    rank = _matching(ranks, name, fields["r"])
    if rank > min(max_rank, MOST_RANK):
        where = "rank_pattern" if ranks else "r"
        raise AdapterError(f"{CONFIG}: {where}: {name} has rank {rank}, --max-lora-rank is {max_rank}")
    inner, outs = modules[name]
    for half, expected in (("down", (rank, inner)), ("up", (outs, rank))):
        header = headers[halves[half]]
        where = f"{WEIGHTS}: {halves[half][:120]}"
        if header.dtype not in _FLOATS:
            raise AdapterError(f"{where}: is stored as {header.dtype[:20]}, not as floating-point numbers")
        if header.shape != expected:
            raise AdapterError(f"{where}: has shape {list(header.shape)[:4]}, this model and r need {list(expected)}")
    alpha = fields.get("lora_alpha")
    alpha = float(_matching(alphas, name, 8.0 if alpha is None else alpha))
    scale = alpha / (math.sqrt(rank) if fields.get("use_rslora") else rank)
    if abs(scale) > MOST_SCALE:
        where = "alpha_pattern" if alphas else "lora_alpha"
        raise AdapterError(f"{CONFIG}: {where}: {name} is scaled by {scale:g}; at most {MOST_SCALE:g} is served")
    return AdapterPart(halves["down"], halves["up"], rank, scale)


def _matching(pattern: Mapping[str, Any], name: str, default: Any) -> Any:
    """The value of the first pattern that equals the module's name or its end. PEFT matches in the same way."""
    for key, value in pattern.items():
        plain = key.removeprefix("^").removesuffix("$").replace("\\", "")
        if name == plain or name.endswith(f".{plain}") or f"base_model.model.{name}" == plain:
            return value
    return default
