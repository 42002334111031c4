"""SmoothQuant (Xiao et al., 2023). Each input is divided by a factor, max|input|^a / max|weight|^(1 - a). The preceding
norm's weights absorb the division, and the linear's weights for that input are multiplied by the factor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from quire.engine.checkpoint.model_resolver import read_model_config
from quire.engine.checkpoint.tensor_headers import text_tensor_name
from quire.engine.common.config import EngineConfig
from quire.engine.common.errors import ModelError
from quire.engine.families.base.model_config import ModelConfig
from quire.engine.layers.sublayer import SmoothableNorm, Sublayer
from quire.engine.worker.loading.forward_pass import compute_hidden_states, load_standalone_model_and_backend
from quire.engine.worker.loading.weight_loader import checkpoint_stream
from quire.engine.worker.loading.weight_mapper import WeightMapper


@dataclass(frozen=True, slots=True)
class ActivationRange:
    norm: str
    offset: float
    """What the model adds to the stored norm weights."""
    linears: tuple[str, ...]
    max_abs: Tensor
    """[in] float32: the largest absolute value of each input."""


@torch.inference_mode()
def record_activation_ranges(path: Path, samples: Sequence[Sequence[int]]) -> list[ActivationRange]:
    """Raises ConfigError."""
    model_config = read_model_config(path)
    longest = min(max(map(len, samples)), model_config.max_position)
    config = EngineConfig(model=str(path), device="cpu", max_model_len=longest)
    loaded, backend = load_standalone_model_and_backend(config)
    model = loaded.model
    norms = [each for layer in model.layers_of_all_stages for each in _smoothable_norms(layer)]
    largest: list[Tensor | None] = [None] * len(norms)

    def record_max(at: int, x: Tensor) -> None:
        peak, before = x.abs().amax(0).float(), largest[at]
        largest[at] = peak if before is None else torch.maximum(peak, before)

    for at, each in enumerate(norms):
        for linear in each.linears:
            linear.watch_inputs(partial(record_max, at))
    for ids in samples:
        compute_hidden_states(
            model, backend.block_size, torch.tensor(ids[:longest], dtype=torch.int32), len(ids[:longest])
        )
    names = [tuple(name for linear in each.linears for name in linear.part_names) for each in norms]
    return [
        ActivationRange(each.norm_name, each.weight_offset, linear_names, norm_max)
        for each, linear_names, norm_max in zip(norms, names, largest, strict=True)
        if norm_max is not None
    ]


def _smoothable_norms(layer: Sequence[Sublayer]) -> list[SmoothableNorm]:
    norms = dict[str, SmoothableNorm]()
    for part in layer:
        for each in part.smoothable_norms():
            linears = norms[each.norm_name].linears if each.norm_name in norms else ()
            norms[each.norm_name] = replace(each, linears=(*linears, *each.linears))
    other_readers = {
        name
        for part in layer
        for name in part.parameters().keys() - {f"{n.norm_name}.weight" for n in part.smoothable_norms()}
    }
    return [each for each in norms.values() if f"{each.norm_name}.weight" not in other_readers]


class Smoothing:
    def __init__(self, config: ModelConfig, factors: dict[str, Tensor], norms: dict[str, Tensor]) -> None:
        """`factors`: float32 [in] by module name. They multiply linears' weights and divide norms' biases. `norms`: the
        norms' new float32 weights.
        """
        self._weight_mapper = WeightMapper(config)
        self._factors = factors
        self._norm_weights = norms

    @classmethod
    @torch.inference_mode()
    def from_ranges(cls, path: Path, ranges: Iterable[ActivationRange], strength: float) -> Smoothing:
        """`strength`: the exponent a, from 0 (the weights alone decide) to 1 (the inputs alone). Raises ModelError."""
        config = read_model_config(path)
        factors = dict[str, Tensor]()
        norms = dict[str, Tensor]()
        norm_weights, widest = _read_norms_and_column_maxima(path, WeightMapper(config))
        for each in ranges:
            weights = [widest[name] for name in each.linears if name in widest]
            if each.norm not in norm_weights or len(weights) != len(each.linears):
                continue  # the checkpoint lacks the weights, or they are already quantized
            heaviest = torch.stack(weights).amax(0)
            factor_wanted = each.max_abs**strength / heaviest ** (1 - strength)
            usable = (each.max_abs > 0) & (heaviest > 0) & factor_wanted.isfinite() & (factor_wanted > 0)
            norm_gain = norm_weights[each.norm] + each.offset
            # The divided norm is rounded to bfloat16, which every dtype can represent. The factor is then recomputed
            # from the rounded norm, because norm and linears must agree to the last bit.
            divided = (norm_gain / torch.where(usable, factor_wanted, 1.0) - each.offset).bfloat16().float()
            factor = norm_gain / (divided + each.offset)
            usable &= factor.isfinite() & (factor > 0)
            norms[each.norm] = torch.where(usable, divided, norm_weights[each.norm])
            factors |= dict.fromkeys((each.norm, *each.linears), torch.where(usable, factor, 1.0))
        return cls(config, factors, norms)

    @property
    def num_norms(self) -> int:
        return len(self._norm_weights)

    def smooth_tensor(self, name: str, tensor: Tensor) -> Tensor:
        """Linears' weights become float32. Norms keep their dtype, and other tensors are unchanged."""
        module, _, kind = (text_tensor_name(name) or "").rpartition(".")
        module_name = self._weight_mapper.map_module_name(module)[0] if module else ""
        if module_name not in self._factors:
            return tensor
        if module_name in self._norm_weights:
            return (
                self._norm_weights[module_name] if kind == "weight" else tensor.float() / self._factors[module_name]
            ).to(tensor.dtype)
        return tensor.float() * self._factors[module_name] if kind == "weight" else tensor


def _read_norms_and_column_maxima(path: Path, arrangement: WeightMapper) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Returns two dicts by module name, both float32: one-dimensional weights [n], and for each matrix the largest
    absolute weight of each column [in].
    """
    vectors, columns = dict[str, Tensor](), dict[str, Tensor]()
    for name, tensor in _iter_module_weights(path):
        for own in arrangement.map_module_name(name):
            if tensor.ndim == 1:
                vectors[own] = tensor.float()
            elif tensor.ndim == 2:
                columns[own] = torch.maximum(tensor.amax(0), -tensor.amin(0)).float()
    return vectors, columns


def _iter_module_weights(path: Path) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in checkpoint_stream(path):
        module, _, kind = name.rpartition(".")
        if kind == "weight" and tensor.is_floating_point():
            yield module, tensor


def fit_smoothing(path: Path, samples: Sequence[Sequence[int]], strength: float) -> Smoothing:
    """Raises ConfigError and ModelError."""
    smoother = Smoothing.from_ranges(path, record_activation_ranges(path, samples), strength)
    if not smoother.num_norms:
        raise ModelError("model: each of its norms feeds something other than linears, so nothing can be smoothed")
    return smoother
