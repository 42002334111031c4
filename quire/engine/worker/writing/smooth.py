"""SmoothQuant (Xiao et al., 2023): what a linear reads has a few inputs that are many times the others, so that 8 bits
for a token leave little for these. Each input that a norm gives is divided by a factor, which the norm's weights take
in, and the weights that read it are multiplied by the same: the model computes the same numbers, and its activations
fit 8 bits better.

The factor of an input is (its largest number)^a / (the largest weight that reads it)^(1 - a).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from quire.engine.checkpoint.files import ModelConfig, read_model_config
from quire.engine.checkpoint.safetensors import text_tensor
from quire.engine.config import EngineConfig
from quire.engine.errors import ModelError
from quire.engine.layers.part import Normed, Sublayer
from quire.engine.worker.loading.forward import computed, load_alone
from quire.engine.worker.loading.layout import Arrangement
from quire.engine.worker.loading.loader import checkpoint_stream


@dataclass(frozen=True, slots=True)
class Seen:
    """A norm whose result nothing but linears read."""

    norm: str
    """By the name that parts of layers give it, as the linears."""
    offset: float
    """Added to its weights."""
    linears: tuple[str, ...]
    largest: Tensor
    """[in] float32: of each of their inputs the largest absolute number in the samples."""


@torch.inference_mode()
def watch(path: Path, samples: Sequence[Sequence[int]]) -> list[Seen]:
    """What the norms of the model at `path` give for these token ids, each list by itself. Raises ConfigError."""
    model_config = read_model_config(path)
    longest = min(max(map(len, samples)), model_config.max_position)
    config = EngineConfig(model=str(path), device="cpu", max_model_len=longest)
    loaded, backend = load_alone(config)
    model = loaded.model
    found = [each for layer in model.every_layer for each in _read_by_linears_alone(layer)]
    largest: list[Tensor | None] = [None] * len(found)

    def note(at: int, x: Tensor) -> None:
        peak, before = x.abs().amax(0).float(), largest[at]
        largest[at] = peak if before is None else torch.maximum(peak, before)

    for at, each in enumerate(found):
        for linear in each.linears:
            linear.watch(partial(note, at))
    for ids in samples:
        computed(model, backend.block_size, torch.tensor(ids[:longest], dtype=torch.int32), len(ids[:longest]))
    names = [tuple(name for linear in each.linears for name in linear.names) for each in found]
    return [
        Seen(each.norm, each.offset, own, peak)
        for each, own, peak in zip(found, names, largest, strict=True)
        if peak is not None
    ]


def _read_by_linears_alone(layer: Sequence[Sublayer]) -> list[Normed]:
    """The norms of a layer of which every part that has them says which linears read them."""
    found = dict[str, Normed]()
    for part in layer:
        for each in part.normed():
            linears = found[each.norm].linears if each.norm in found else ()
            found[each.norm] = replace(each, linears=(*linears, *each.linears))
    silent = {name for part in layer for name in part.parameters().keys() - {f"{n.norm}.weight" for n in part.normed()}}
    return [each for each in found.values() if f"{each.norm}.weight" not in silent]


class Smoothing:
    """What becomes of a checkpoint's tensors."""

    def __init__(self, config: ModelConfig, factors: dict[str, Tensor], norms: dict[str, Tensor]) -> None:
        """`factors`: of the inputs of linears, [in] float32, and of norms, whose biases are divided by them; `norms`:
        their new weights, in float32. By the names that parts of layers give them."""
        self._arrangement, self._factors, self._norms = Arrangement(config), factors, norms

    @classmethod
    @torch.inference_mode()
    def of(cls, path: Path, seen: Iterable[Seen], strength: float) -> Smoothing:
        """For the checkpoint at `path`. strength: a above; from 0, where weights alone decide, to 1. Raises
        ModelError."""
        config, factors, norms = read_model_config(path), dict[str, Tensor](), dict[str, Tensor]()
        gains, widest = _stored_sizes(path, Arrangement(config))
        for each in seen:
            weights = [widest[name] for name in each.linears if name in widest]
            if each.norm not in gains or len(weights) != len(each.linears):
                continue  # a norm without weights, or linears that the files have in a form of their own
            heaviest = torch.stack(weights).amax(0)
            wanted = each.largest**strength / heaviest ** (1 - strength)
            usable = (each.largest > 0) & (heaviest > 0) & wanted.isfinite() & (wanted > 0)
            gain = gains[each.norm] + each.offset
            # Rounded as every type of weights holds it; the factor is then what the division has come to, so that
            # norm and linears agree to the last bit.
            divided = (gain / torch.where(usable, wanted, 1.0) - each.offset).bfloat16().float()
            factor = gain / (divided + each.offset)
            usable &= factor.isfinite() & (factor > 0)
            norms[each.norm] = torch.where(usable, divided, gains[each.norm])
            factors |= dict.fromkeys((each.norm, *each.linears), torch.where(usable, factor, 1.0))
        return cls(config, factors, norms)

    @property
    def count(self) -> int:
        """How many norms take factors in."""
        return len(self._norms)

    def applied(self, name: str, tensor: Tensor) -> Tensor:
        """The tensor that takes the place of this one, by its stored name: of linears in float32."""
        module, _, kind = (text_tensor(name) or "").rpartition(".")
        own = self._arrangement.modules(module)[0] if module else ""
        if own not in self._factors:
            return tensor
        if own in self._norms:
            return (self._norms[own] if kind == "weight" else tensor.float() / self._factors[own]).to(tensor.dtype)
        return tensor.float() * self._factors[own] if kind == "weight" else tensor


def _stored_sizes(path: Path, arrangement: Arrangement) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(weights of norms, and of whatever else is [n], in float32; of each matrix's columns the largest absolute
    number), by the names that parts of layers give them."""
    vectors, columns = dict[str, Tensor](), dict[str, Tensor]()
    for name, tensor in _weights(path):
        for own in arrangement.modules(name):
            if tensor.ndim == 1:
                vectors[own] = tensor.float()
            elif tensor.ndim == 2:
                columns[own] = torch.maximum(tensor.amax(0), -tensor.amin(0)).float()
    return vectors, columns


def _weights(path: Path) -> Iterator[tuple[str, Tensor]]:
    """By module, those of text. Raises ModelError."""
    for name, tensor in checkpoint_stream(path):
        module, _, kind = name.rpartition(".")
        if kind == "weight" and tensor.is_floating_point():
            yield module, tensor


def smoothing(path: Path, samples: Sequence[Sequence[int]], strength: float) -> Smoothing:
    """Raises ModelError for a model in which no norm is read by linears alone, ConfigError for what `watch` refuses."""
    found = Smoothing.of(path, watch(path, samples), strength)
    if not found.count:
        raise ModelError("model: none of its norms is read by linears alone, so nothing can be smoothed")
    return found
