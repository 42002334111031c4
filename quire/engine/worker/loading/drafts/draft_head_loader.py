"""Loads draft heads in the formats in which they are published.

EAGLE (https://github.com/SafeAILab/EAGLE) has config.json and Llama layers; EAGLE-3 has `midlayer` instead of layers.
Medusa (https://github.com/FasterDecoding/Medusa) has a file medusa_lm_head, or the tensor names of vLLM's conversion.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from quire.engine.architecture.draft_heads import EagleSpec, MedusaSpec
from quire.engine.checkpoint.family_spec import build_eagle_spec
from quire.engine.checkpoint.model_resolver import DRAFT_HEAD_FILE_PATTERNS, read_model_config, resolve_model
from quire.engine.checkpoint.tensor_headers import find_weight_files
from quire.engine.common.config import EngineConfig, SpeculativeConfig
from quire.engine.common.errors import ModelError
from quire.engine.layers.schemes import QuantizationScheme, UnquantizedScheme
from quire.engine.layers.schemes.online_quantization import OnlineQuantizedScheme
from quire.engine.models.decoder import Decoder
from quire.engine.models.heads.draft_head import DraftHead
from quire.engine.models.heads.eagle import Eagle3Head, EagleHead
from quire.engine.models.heads.medusa import MedusaHead
from quire.engine.worker.device_memory import allocate_kv_blocks
from quire.engine.worker.draft_head_runner import DraftHeadRunner
from quire.engine.worker.loading.drafts.device_drafter import StartedDrafter
from quire.engine.worker.loading.drafts.spare_blocks import SpareBlockLayout, num_spare_blocks_per_slot
from quire.engine.worker.loading.kv_allocation import RunnerResources
from quire.engine.worker.loading.weight_loader import (
    iter_file_tensors,
    load_weights,
    read_pickled_tensors,
    require_shards,
)
from quire.kernels.backend import Backend

_MEDUSA = "medusa_lm_head"
_PICKLED = f"{_MEDUSA}.pt"
_MAX_HEADS = 32
_UNUSED_TENSORS = ("embed_tokens.weight", "t2d")
"""The first is a copy of the decoder's embedding, the second a mask of the tokens that can be drafted."""


@dataclass(frozen=True, slots=True)
class LoadedDraftHead:
    kv_module: DraftHead
    weight_bytes: int
    decoder: Decoder
    is_on_all_ranks: ClassVar[bool] = True

    def total_slot_state_bytes(self, config: EngineConfig) -> int:
        return 0

    def start_drafter(
        self,
        config: EngineConfig,
        allocation: RunnerResources,
        num_blocks: int,
        make_runner: Callable[..., DraftHeadRunner],
    ) -> StartedDrafter:
        heads = self.make_draft_head_runner(config, allocation, num_blocks, make_runner)
        return StartedDrafter(heads, heads.spare_blocks, heads.measure_draft_costs(), head_runner=heads)

    def make_draft_head_runner(
        self,
        config: EngineConfig,
        allocation: RunnerResources,
        num_blocks: int,
        make_runner: Callable[..., DraftHeadRunner] = DraftHeadRunner,
    ) -> DraftHeadRunner:
        assert config.speculative_config is not None
        input_batch, has_scratch_block = (
            allocation.input_batch,
            allocation.capture is not None,
        )  # the scratch block has the same id as the served model's
        spare_blocks = SpareBlockLayout(
            num_blocks + has_scratch_block,
            num_spare_blocks_per_slot(config, input_batch.block_size),
            self.decoder.max_model_len,
        )
        kv_tensors = allocate_kv_blocks(
            self.kv_module, spare_blocks.first_spare_block + spare_blocks.spare_per_slot * config.max_num_seqs
        )
        max_drafts = config.speculative_config.max_draft_tokens
        return make_runner(
            self.kv_module, self.decoder, kv_tensors, input_batch, spare_blocks, max_drafts, allocation.capture
        )


def load_draft_head(config: EngineConfig, backend: Backend, decoder: Decoder) -> LoadedDraftHead:
    """Raises QuireError and ValueError."""
    speculative = config.speculative_config
    assert speculative is not None
    assert speculative.model is not None
    scheme: QuantizationScheme = UnquantizedScheme(backend, decoder.dtype)
    if config.online_quantization is not None:
        scheme = OnlineQuantizedScheme(backend, decoder.dtype, config.online_quantization)
    path = resolve_model(speculative.model, patterns=DRAFT_HEAD_FILE_PATTERNS)
    if not path.is_dir():
        raise ModelError("model: a head is a folder with config.json and its weights")
    tensors = read_head_tensors(path)
    head = _make_head(speculative, path, tensors, scheme, decoder, backend)
    with torch.inference_mode():
        size = load_weights(head.parameters(), iter(tensors.items()), device=decoder.device)
    return LoadedDraftHead(head, size, decoder)


def _make_head(
    speculative: SpeculativeConfig,
    path: Path,
    tensors: dict[str, Tensor],
    scheme: QuantizationScheme,
    decoder: Decoder,
    backend: Backend,
) -> DraftHead:
    if speculative.method == "medusa":
        spec = MedusaSpec(*medusa_shape(tensors), decoder.spec.hidden_size, decoder.spec.vocab_size)
        return MedusaHead(spec, scheme, decoder, backend)
    is_eagle3 = speculative.method == "eagle3"
    eagle = eagle_spec(path, tensors, decoder, is_eagle3=is_eagle3)
    return (Eagle3Head if is_eagle3 else EagleHead)(eagle, scheme, decoder, backend)


def medusa_shape(tensors: dict[str, Tensor]) -> tuple[int, int]:
    """Returns the number of heads, and the number of linears before each head's last one. Raises ModelError."""
    places = [match for name in tensors if (match := re.fullmatch(r"(\d{1,4})\.(\d{1,4})(\..*)", name))]
    heads = {int(match[1]) for match in places}
    blocks = {int(match[2]) for match in places if match[3] == ".linear.weight"}
    if not 0 < len(heads) <= _MAX_HEADS or len(blocks) > _MAX_HEADS:
        raise ModelError(f"model: its tensors are those of {len(heads)} Medusa heads; 1 to {_MAX_HEADS} can be served")
    return len(heads), len(blocks)


def eagle_spec(path: Path, tensors: dict[str, Tensor], decoder: Decoder, *, is_eagle3: bool) -> EagleSpec:
    model, served = read_model_config(path), decoder.spec
    for what, own_value, theirs in (
        ("hidden size", model.hidden_size, served.hidden_size),
        ("vocabulary", model.vocab_size, served.vocab_size),
    ):
        if own_value != theirs:
            raise ModelError(f"model: its {what} is {own_value}, the served model's {theirs}")
    return build_eagle_spec(model, served.num_layers, tensors, is_eagle3=is_eagle3)


def read_head_tensors(path: Path) -> dict[str, Tensor]:
    tensors = {_canonical_name(name): tensor for name, tensor in _read_stored_tensors(path).items()}
    blocks = len([name for name in tensors if re.fullmatch(r"0\.\d+\.linear\.weight", name)])
    last_linear = re.compile(r"lm_heads\.(\d+)\.weight")
    return {
        last_linear.sub(lambda match: f"{match[1]}.{blocks}.weight", name): tensor
        for name, tensor in tensors.items()
        if name not in _UNUSED_TENSORS
    }


def _canonical_name(stored: str) -> str:
    """EAGLE may have a module prefix, and EAGLE-3 a `midlayer`. Medusa nests lists of modules; vLLM's conversion has
    `blocks` and `lm_heads` instead.
    """
    name = re.sub(r"^(model|medusa_heads?)\.", "", stored)
    name = re.sub(r"^midlayer\.", "layers.0.", name)
    return re.sub(r"^blocks\.(\d+)\.layers\.(\d+)\.", r"\1.\2.linear.", name)


def _read_stored_tensors(path: Path) -> dict[str, Tensor]:
    for files in (find_weight_files(path), [path / f"{_MEDUSA}.safetensors"]):
        if files[0].is_file():
            return {name: each for file in require_shards(files) for name, each in iter_file_tensors(file)}
    if (path / _PICKLED).is_file():
        return read_pickled_tensors(path / _PICKLED)
    names = f"model.safetensors, pytorch_model.bin, {_MEDUSA}.safetensors and {_PICKLED}"
    raise ModelError(f"model: {path.name} lacks {names}")
