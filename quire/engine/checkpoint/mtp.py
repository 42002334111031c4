"""The layer that a checkpoint has beside its model's, to guess tokens with (multi-token prediction; DeepSeek-V3, 2024):
what it is called, and what config.json would say of a model that is this layer alone. No torch.

Three layouts are published: the layer behind the model's last one, with the next number (DeepSeek, GLM, and all GGUF
files), a layer 0 of its own below `mtp.` (Qwen), and several there that are one part each (Nemotron 3: vLLM's
nemotron_h_mtp.py). Here they are the layers of a model of their own, with DeepSeek's names in layer 0.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.engine.checkpoint.safetensors import is_of_text, read_tensor_headers
from quire.engine.errors import ModelError
from quire.engine.families.base.moe_fields import sparse_layers
from quire.engine.gguf.model_files import read_gguf_header

BELOW = "mtp."
"""What the names of such a layer begin with, where it is not the model's next one."""
LAYER = "model.layers.0"
EMBEDDING_NORM, HIDDEN_NORM, JOIN, END = (
    f"{LAYER}.{name}" for name in ("enorm", "hnorm", "eh_proj", "shared_head.norm")
)
"""Its modules beside those of every layer: the norms of an embedding and of a hidden state, the linear that makes one
of both, and the norm at the end."""
_OF_QWEN = {"pre_fc_norm_embedding": EMBEDDING_NORM, "pre_fc_norm_hidden": HIDDEN_NORM, "fc": JOIN, "norm": END}
"""The same below `mtp.`."""
_NEMOTRON_END = "final_layernorm"
"""What Nemotron 3 calls the last of these, in the last of its layers."""
_SHARED = ("embed_tokens.", "shared_head.head.", "nextn.embed_tokens.", "nextn.shared_head_head.")
"""Copies of the model's own embedding and head, as DeepSeek's README_WEIGHTS says."""
_PLACE = re.compile(r"(?P<layers>model\.layers|mtp\.layers|blk)\.(?P<number>\d+)\.(?P<inside>.+)")
_LEFT_OUT = (
    "text_config",
    "llm_config",
    "language_config",
    "num_nextn_predict_layers",
    "sliding_window_pattern",
    "mlp_layer_types",
    "mlp_only_layers",
    "decoder_sparse_step",
    "moe_layer_end_index",
    "hybrid_override_pattern",
    "layers_block_type",
)
"""Fields that say which of a model's layers is what, and where its text part is."""


@dataclass(frozen=True, slots=True)
class MtpNames:
    """Which of a checkpoint's tensors such a layer has; where there are several layers, the first."""

    layers: int
    """The model's."""
    below: bool
    """Whether it is below `mtp.`."""
    parts: int = 1
    """How many layers there are one, each of one part."""

    def own(self, stored: str) -> str | None:
        """The name here of one of its tensors, in a GGUF file that of one of layer 0 there; None for all others, and
        for copies of what the model has."""
        place = _PLACE.fullmatch(stored)
        if place is None:
            module, _, kind = stored.removeprefix(BELOW).rpartition(".")
            ours = self.below and stored.startswith(BELOW)
            return f"{_OF_QWEN.get(module, module)}.{kind}" if ours else None
        number, first = int(place["number"]), 0 if self.below else self.layers
        ours = (place["layers"] == "mtp.layers") == self.below and first <= number < first + self.parts
        if not ours or place["inside"].startswith(_SHARED):
            return None
        if place["inside"].startswith(f"{_NEMOTRON_END}."):
            return place["inside"].replace(_NEMOTRON_END, END)
        return f"{'blk' if place['layers'] == 'blk' else 'model.layers'}.{number - first}.{place['inside']}"

    def stored(self, own: str) -> str:
        """What the checkpoint calls one of its modules."""
        of_qwen = {name: f"{BELOW}{stored}" for stored, name in _OF_QWEN.items()}
        if self.parts > 1:
            return own.replace("model.", BELOW, 1)
        if self.below:
            return of_qwen.get(own, own.replace("model.", BELOW, 1))
        return own.replace(LAYER, f"model.layers.{self.layers}", 1)


def find_mtp(path: Path, layers: int) -> MtpNames:
    """How the checkpoint at `path`, a directory or a GGUF file, names it, beside so many layers of the model's. Raises
    ModelError where it has none."""
    names: Iterable[str] = read_tensor_headers(path, str) if path.is_dir() else read_gguf_header(path).tensors
    if below := [name for name in names if name.startswith(BELOW)]:
        ends = [place for name in below if (place := _PLACE.fullmatch(name)) and _NEMOTRON_END in place["inside"]]
        return MtpNames(layers, below=True, parts=1 + min((int(place["number"]) for place in ends), default=0))
    if any(name.endswith("eh_proj.weight") and drafts(name, layers) for name in names):
        return MtpNames(layers, below=False)
    raise ModelError(
        f"model: {path.name} has no layer that guesses tokens: neither tensors below {BELOW} nor eh_proj in a layer "
        f"behind the model's {layers}"
    )


def drafts(stored: str, layers: int) -> bool:
    """Whether a tensor is of such a layer, beside so many of the model's."""
    place = _PLACE.fullmatch(stored)
    return stored.startswith(BELOW) or (place is not None and int(place["number"]) >= layers)


def without_mtp(layers: int) -> Callable[[str], bool]:
    """Which tensors are the text model's own, by their stored names; it has so many layers."""
    return lambda name: is_of_text(name) and not drafts(name, layers)


def mtp_fields(text: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """What a config.json would say of a model of such a layer alone, `text` being what it says of the text of one with
    so many: the layer is like the last of these, but attends to all tokens; Nemotron 3
    says what its layers are."""
    sparse = sparse_layers(text, layers)[-1:] == [True]
    found = {name: value for name, value in text.items() if name not in _LEFT_OUT}
    found |= {"num_hidden_layers": 1, "first_k_dense_replace": 0 if sparse else 1, "sliding_window": None}
    if kinds := text.get("mtp_layers_block_type"):
        return found | {"layer_types": list(kinds), "num_hidden_layers": len(kinds)}
    return found | ({"layer_types": ["full_attention"]} if text.get("layer_types") else {})
