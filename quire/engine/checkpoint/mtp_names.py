"""Names of a multi-token prediction layer's tensors (DeepSeek-V3, 2024).

Three layouts exist: the layer after the model's last (DeepSeek, GLM, all GGUF files), layer 0 below `mtp.` (Qwen), and
several one-sublayer layers there (Nemotron 3). Here they become a separate model with DeepSeek's names in layer 0.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.engine.architecture.draft_heads import EH_PROJ, EMBEDDING_NORM, HIDDEN_NORM, MTP_LAYER, OUTPUT_NORM
from quire.engine.checkpoint.tensor_headers import is_text_tensor, read_tensor_headers
from quire.engine.common.errors import ModelError
from quire.engine.families.base.moe_fields import moe_layer_mask
from quire.engine.families.base.schema.config_schema import TEXT_CONFIG_KEYS
from quire.engine.gguf.model_files import read_gguf_header

MTP_PREFIX = "mtp."
_MODULES_BELOW_PREFIX = {
    "pre_fc_norm_embedding": EMBEDDING_NORM,
    "pre_fc_norm_hidden": HIDDEN_NORM,
    "fc": EH_PROJ,
    "norm": OUTPUT_NORM,
}
_LAST_SUBLAYER_NORM = "final_layernorm"
_SHARED_TENSOR_PREFIXES = ("embed_tokens.", "shared_head.head.", "nextn.embed_tokens.", "nextn.shared_head_head.")
"""Copies of the model's embedding and head (DeepSeek's README_WEIGHTS)."""
_LAYER_TENSOR_PATTERN = re.compile(r"(?P<layers>model\.layers|mtp\.layers|blk)\.(?P<number>\d+)\.(?P<inside>.+)")
_PER_LAYER_FIELDS = (
    *TEXT_CONFIG_KEYS,
    "num_nextn_predict_layers",
    "sliding_window_pattern",
    "mlp_layer_types",
    "mlp_only_layers",
    "decoder_sparse_step",
    "moe_layer_end_index",
    "hybrid_override_pattern",
    "layers_block_type",
)


@dataclass(frozen=True, slots=True)
class MTPTensorNames:
    num_main_layers: int
    has_mtp_prefix: bool
    """If False, the layer's index is num_main_layers."""
    num_sublayers: int = 1

    def mtp_name_from_checkpoint(self, checkpoint_name: str) -> str | None:
        """None for the main model's tensors and copies of them. GGUF names refer to layer 0."""
        layer_match = _LAYER_TENSOR_PATTERN.fullmatch(checkpoint_name)
        if layer_match is None:
            module, _, parameter = checkpoint_name.removeprefix(MTP_PREFIX).rpartition(".")
            is_mtp = self.has_mtp_prefix and checkpoint_name.startswith(MTP_PREFIX)
            return f"{_MODULES_BELOW_PREFIX.get(module, module)}.{parameter}" if is_mtp else None
        number, first = int(layer_match["number"]), 0 if self.has_mtp_prefix else self.num_main_layers
        is_mtp = (
            layer_match["layers"] == "mtp.layers"
        ) == self.has_mtp_prefix and first <= number < first + self.num_sublayers
        if not is_mtp or layer_match["inside"].startswith(_SHARED_TENSOR_PREFIXES):
            return None
        if layer_match["inside"].startswith(f"{_LAST_SUBLAYER_NORM}."):
            return layer_match["inside"].replace(_LAST_SUBLAYER_NORM, OUTPUT_NORM)
        return f"{'blk' if layer_match['layers'] == 'blk' else 'model.layers'}.{number - first}.{layer_match['inside']}"

    def checkpoint_name_from_mtp(self, module: str) -> str:
        prefixed_names = {name: f"{MTP_PREFIX}{stored}" for stored, name in _MODULES_BELOW_PREFIX.items()}
        if self.num_sublayers > 1:
            return module.replace("model.", MTP_PREFIX, 1)
        if self.has_mtp_prefix:
            return prefixed_names.get(module, module.replace("model.", MTP_PREFIX, 1))
        return module.replace(MTP_LAYER, f"model.layers.{self.num_main_layers}", 1)


def find_mtp_names(path: Path, num_main_layers: int) -> MTPTensorNames:
    """Raises ModelError if the checkpoint has no MTP layers."""
    names: Iterable[str] = read_tensor_headers(path, str) if path.is_dir() else read_gguf_header(path).tensors
    if mtp_tensors := [name for name in names if name.startswith(MTP_PREFIX)]:
        output_norms = [
            place
            for name in mtp_tensors
            if (place := _LAYER_TENSOR_PATTERN.fullmatch(name)) and _LAST_SUBLAYER_NORM in place["inside"]
        ]
        return MTPTensorNames(
            num_main_layers,
            has_mtp_prefix=True,
            num_sublayers=1 + min((int(place["number"]) for place in output_norms), default=0),
        )
    if any(name.endswith("eh_proj.weight") and is_mtp_tensor(name, num_main_layers) for name in names):
        return MTPTensorNames(num_main_layers, has_mtp_prefix=False)
    raise ModelError(
        f"model: {path.name} has no MTP layer: neither tensors below {MTP_PREFIX} nor eh_proj in a layer "
        f"after the model's {num_main_layers}"
    )


def is_mtp_tensor(checkpoint_name: str, num_main_layers: int) -> bool:
    layer_match = _LAYER_TENSOR_PATTERN.fullmatch(checkpoint_name)
    return checkpoint_name.startswith(MTP_PREFIX) or (
        layer_match is not None and int(layer_match["number"]) >= num_main_layers
    )


def make_main_model_filter(num_main_layers: int) -> Callable[[str], bool]:
    return lambda name: is_text_tensor(name) and not is_mtp_tensor(name, num_main_layers)


def mtp_layer_config(text_config: Mapping[str, Any], num_main_layers: int) -> dict[str, Any]:
    """The MTP layer is like the main model's last, with full attention, unless Nemotron 3 lists layer types."""
    is_moe = moe_layer_mask(text_config, num_main_layers)[-1:] == [True]
    fields = {name: value for name, value in text_config.items() if name not in _PER_LAYER_FIELDS}
    fields |= {"num_hidden_layers": 1, "first_k_dense_replace": 0 if is_moe else 1, "sliding_window": None}
    if layer_types := text_config.get("mtp_layers_block_type"):
        return fields | {"layer_types": list(layer_types), "num_hidden_layers": len(layer_types)}
    return fields | ({"layer_types": ["full_attention"]} if text_config.get("layer_types") else {})
