"""Heads that guess tokens from hidden states: their shape and weights, from the layouts in which they are published.

EAGLE (https://github.com/SafeAILab/EAGLE): config.json, and the tensors of a few layers as in a Llama, or `midlayer`.
Medusa (https://github.com/FasterDecoding/Medusa): medusa_lm_head, whose tensors say all; or as vLLM converts it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from quire.engine.checkpoint.files import HEAD_FILES, read_model_config, resolve_model
from quire.engine.checkpoint.safetensors import weight_files
from quire.engine.config import EngineConfig, SpeculativeConfig
from quire.engine.errors import ModelError
from quire.engine.layers.attention import AttentionSpec
from quire.engine.layers.quantize import AtLoad
from quire.engine.layers.schemes import Scheme, Unquantized
from quire.engine.models.decoder import Decoder
from quire.engine.models.heads.eagle import Eagle, Eagle3, EagleSpec
from quire.engine.models.heads.head import DraftHead
from quire.engine.models.heads.medusa import Medusa
from quire.engine.models.spec import base_spec
from quire.engine.worker.heads import Heads
from quire.engine.worker.loading.drafts.spare import SparePages, spare_pages
from quire.engine.worker.loading.drafts.started import DraftWorker
from quire.engine.worker.loading.loader import load_weights, present, stored_tensors, unpickled
from quire.engine.worker.loading.room import Room
from quire.engine.worker.memory import allocate_pages
from quire.kernels.backend import Backend

_MEDUSA = "medusa_lm_head"
_PICKLED = f"{_MEDUSA}.pt"
_MOST_HEADS = 32
_UNUSED = ("embed_tokens.weight", "t2d")
"""A copy of the decoder's embedding, which it does not change; which of the decoder's tokens it can say."""


@dataclass(frozen=True, slots=True)
class LoadedHead:
    paged: DraftHead
    weight_bytes: int
    decoder: Decoder
    on_all_ranks: ClassVar[bool] = True

    def state_bytes(self, config: EngineConfig) -> int:
        return 0

    def start(self, config: EngineConfig, room: Room, num_blocks: int, make_heads: Callable[..., Heads]) -> DraftWorker:
        heads = self.heads(config, room, num_blocks, make_heads)
        return DraftWorker(heads, heads.drafts, heads.measure_costs(), heads=heads)

    def heads(self, config: EngineConfig, room: Room, num_blocks: int, make: Callable[..., Heads] = Heads) -> Heads:
        """Allocate pages for as many tokens as the served model has pages for, and some for drafts beyond these."""
        assert config.speculative_config is not None
        slots, nobodys = room.slots, room.capture is not None  # the served model's scratch page has its number here too
        drafts = SparePages(num_blocks + nobodys, spare_pages(config, slots.block_size), self.decoder.max_model_len)
        pages = allocate_pages(self.paged, drafts.first_spare + drafts.spare * config.max_num_seqs)
        most = config.speculative_config.num_speculative_tokens
        return make(self.paged, self.decoder, pages, slots, drafts, most, room.capture)


def load_draft_head(config: EngineConfig, backend: Backend, decoder: Decoder) -> LoadedHead:
    """The head that the configuration names, on the decoder's device and in its type; quantized where all weights are
    quantized at load. Raises QuireError and ValueError for one that does not fit the decoder."""
    speculative = config.speculative_config
    assert speculative is not None
    assert speculative.model is not None
    scheme: Scheme = Unquantized(backend, decoder.dtype)
    if config.at_load is not None:
        scheme = AtLoad(backend, decoder.dtype, config.at_load)
    path = resolve_model(speculative.model, patterns=HEAD_FILES)
    if not path.is_dir():
        raise ModelError("model: a head is a folder with config.json and its weights")
    tensors = read_tensors(path)
    head = _head(speculative, path, tensors, scheme, decoder, backend)
    with torch.inference_mode():
        size = load_weights(head.parameters(), iter(tensors.items()), device=decoder.device)
    return LoadedHead(head, size, decoder)


def _head(
    speculative: SpeculativeConfig,
    path: Path,
    tensors: dict[str, Tensor],
    scheme: Scheme,
    decoder: Decoder,
    backend: Backend,
) -> DraftHead:
    if speculative.method == "medusa":
        heads, blocks = medusa_shape(tensors)
        return Medusa(scheme, decoder, heads, blocks)
    third = speculative.method == "eagle3"
    spec = eagle_spec(path, tensors, decoder, third=third)
    return (Eagle3 if third else Eagle)(spec, scheme, decoder, backend)


def medusa_shape(tensors: dict[str, Tensor]) -> tuple[int, int]:
    """(heads, linears of each before its last one)."""
    places = [match for name in tensors if (match := re.fullmatch(r"(\d{1,4})\.(\d{1,4})(\..*)", name))]
    heads = {int(match[1]) for match in places}
    blocks = {int(match[2]) for match in places if match[3] == ".linear.weight"}
    if not 0 < len(heads) <= _MOST_HEADS or len(blocks) > _MOST_HEADS:
        raise ModelError(f"model: its tensors are those of {len(heads)} Medusa heads; 1 to {_MOST_HEADS} can be served")
    return len(heads), len(blocks)


def eagle_spec(path: Path, tensors: dict[str, Tensor], decoder: Decoder, *, third: bool) -> EagleSpec:
    model, served = read_model_config(path), decoder.spec
    for what, own, theirs in (
        ("hidden size", model.hidden_size, served.hidden_size),
        ("vocabulary", model.vocab_size, served.vocab_size),
    ):
        if own != theirs:
            raise ModelError(f"model: its {what} is {own}, the served model's {theirs}")
    if (activation := model.raw.get("hidden_act")) not in (None, "silu"):
        raise ModelError(f"model: hidden_act {activation!r} is not supported in a head")
    third_only: dict[str, Any] = {}
    if third:
        third_only = {
            "taps": _taps(model.raw.get("eagle_config") or {}, served.num_layers),
            "norm_before_residual": bool(model.raw.get("norm_before_residual")),
            "draft_vocab_size": model.raw.get("draft_vocab_size") or model.vocab_size,
            "maps_tokens": "d2t" in tensors,
        }
    base = base_spec(model).having(AttentionSpec, qkv_bias="layers.0.self_attn.q_proj.bias" in tensors)
    read = 2 * model.hidden_size if third else model.hidden_size
    (first, *_), *others = base.having(AttentionSpec, input_norm=False, input_size=read).layers, *base.layers[1:]
    return EagleSpec((first, *others), base.hidden_size, base.norm, "fc.bias" in tensors, **third_only)


def _taps(given: Any, layers: int) -> tuple[int, ...]:
    """The layers whose inputs EAGLE-3 reads: an early, a middle and a late one, or those that config.json names."""
    name = "eagle_aux_hidden_state_layer_ids"
    if given.get("use_aux_hidden_state") is False:
        raise ModelError("model: config.json: eagle_config: use_aux_hidden_state: false is not supported")
    taps = tuple(given.get(name) or (2, layers // 2, layers - 3))
    if list(taps) != sorted(set(taps)) or taps[-1] >= layers:
        raise ModelError(f"model: config.json: eagle_config: {name}: {list(taps)} are no layers of the served {layers}")
    return taps


def read_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a head's folder but those that are not needed, by one name each in all layouts."""
    found = {_name(name): tensor for name, tensor in _stored(path).items()}
    blocks = len([name for name in found if re.fullmatch(r"0\.\d+\.linear\.weight", name)])
    last = re.compile(r"lm_heads\.(\d+)\.weight")
    return {
        last.sub(lambda match: f"{match[1]}.{blocks}.weight", name): tensor
        for name, tensor in found.items()
        if name not in _UNUSED
    }


def _name(stored: str) -> str:
    """EAGLE's tensors are published with and without the name of the module around them, and its one layer of the
    third kind as `midlayer`; Medusa's as a list of lists, and by vLLM as `blocks` and `lm_heads`."""
    name = re.sub(r"^(model|medusa_heads?)\.", "", stored)
    name = re.sub(r"^midlayer\.", "layers.0.", name)
    return re.sub(r"^blocks\.(\d+)\.layers\.(\d+)\.", r"\1.\2.linear.", name)


def _stored(path: Path) -> dict[str, Tensor]:
    for files in (weight_files(path), [path / f"{_MEDUSA}.safetensors"]):
        if files[0].is_file():
            return {name: each for file in present(files) for name, each in stored_tensors(file)}
    if (path / _PICKLED).is_file():
        return unpickled(path / _PICKLED)
    names = f"model.safetensors, pytorch_model.bin, {_MEDUSA}.safetensors and {_PICKLED}"
    raise ModelError(f"model: {path.name} lacks {names}")
