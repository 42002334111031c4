"""The tensors of a checkpoint under the names, and with the rows, that parts of layers have: what a family has several
linears in is taken apart, and the rows of queries and keys are put in the order that rotations of halves need."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.engine.checkpoint.files import ModelConfig
from quire.engine.checkpoint.layouts import LAYER, Layout, head_order, layout_of, own_modules, stored_module
from quire.engine.checkpoint.safetensors import TensorHeader, text_tensor
from quire.engine.errors import ModelError
from quire.engine.layers.recurrent.delta_net import DeltaNetSpec
from quire.engine.layers.recurrent.selective_scan import SelectiveScanSpec
from quire.engine.layers.recurrent.state_space import StateSpaceSpec
from quire.engine.models import decoder_spec
from quire.engine.worker.loading.loader import TensorStream

_BY_COLUMNS = ("qweight", "qzeros", "scales")
"""Of GPTQ and AWQ, whose outputs are columns."""
_TURNED = {f"self_attn.{name}_proj" for name in "qk"}
_HEAD_NORMS = {f"self_attn.{name}_norm" for name in "qk"}


@dataclass(frozen=True, slots=True)
class _Piece:
    """Some of a stored module's outputs: a linear."""

    index: Tensor
    """Which ones, in its order."""
    of: int
    """How many there are."""

    def of_tensor(self, tensor: Tensor, axis: int, name: str) -> Tensor:
        """The part of a tensor whose places along the axis have as many outputs each. Raises ModelError."""
        if tensor.ndim <= axis or not tensor.shape[axis] or self.of % tensor.shape[axis]:
            raise _cannot(name)
        unit, first, count = self.of // tensor.shape[axis], int(self.index[0]), len(self.index)
        if torch.equal(self.index, torch.arange(first, first + count)) and first % unit == count % unit == 0:
            return tensor.narrow(axis, first // unit, count // unit)
        if unit != 1:
            raise _cannot(name)
        return tensor.index_select(axis, self.index.to(tensor.device))


class Arrangement:
    """How one model's checkpoint is arranged."""

    def __init__(self, config: ModelConfig, *, gguf: bool = False) -> None:
        self._config, self._layout = config, layout_of(config.model_type, gguf=gguf)
        self._order = head_order(config.rope, config.head_dim, neighbours=self._layout.neighbours)
        self._has_more = bool(config.raw.get("num_nextn_predict_layers"))
        self._is_ours = self._layout == Layout() and self._order is None and not self._has_more
        self._pieces: dict[str, list[_Piece | None]] = {}
        """By the stored name of a layer's module, of each linear that it is; None: all of it."""

    def arranged(self, stream: TensorStream) -> TensorStream:
        return stream if self._is_ours else (each for item in stream for each in self._apart(*item))

    def headers(self, headers: Mapping[str, TensorHeader]) -> Mapping[str, TensorHeader]:
        """What the headers of a checkpoint's files would say of these tensors."""
        if self._is_ours:
            return headers
        return {
            own: TensorHeader(header.dtype, tuple(tensor.shape))
            for name, header in headers.items()
            for own, tensor in self._apart(name, torch.empty(header.shape, dtype=torch.uint8, device="meta"))
        }

    def modules(self, name: str) -> tuple[str, ...]:
        """What a checkpoint's module is here."""
        return own_modules(self._layout, name)

    def stored(self, linear: str) -> str:
        """What the checkpoint calls a linear of a layer, or what it is part of."""
        return stored_module(self._layout, linear)

    def outputs(self, module: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """A tensor whose first axis is a stored module's outputs, by the linears that the module is."""
        for own, piece in zip(self.modules(module), self._pieces_of(module), strict=True):
            yield own, tensor if piece is None else piece.of_tensor(tensor, 0, module)

    def _apart(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        module, _, kind = name.rpartition(".")
        modules, place = self.modules(module), LAYER.fullmatch(module)
        if place is None:
            skipped = self._layout.before_positions if modules == ("model.embed_positions",) else 0
            yield f"{modules[0]}.{kind}", tensor[skipped:] if skipped else tensor
        elif int(place[1]) >= self._config.num_layers and self._has_more:
            return  # those that draft tokens
        elif f"{place[2]}.{kind}" not in self._layout.unused:
            if kind == "weight" and place[2] in self._layout.transposed:
                tensor = tensor.t()
            for own, piece in zip(modules, self._pieces_of(module), strict=True):
                yield f"{own}.{kind}", self._part(own, kind, piece, tensor)

    def _part(self, own: str, kind: str, piece: _Piece | None, tensor: Tensor) -> Tensor:
        size = self._config.head_dim
        if own.endswith(tuple(_HEAD_NORMS)) and tensor.numel() % size == 0:  # of one head, or of each
            heads = tensor.reshape(-1, size)
            return heads.flatten() if self._order is None else heads[:, self._order].flatten()
        if piece is None or kind == "g_idx" or tensor.numel() == 1:
            return tensor
        if kind == "weight_shape":
            return tensor.clone().index_fill_(0, torch.tensor([0], device=tensor.device), len(piece.index))
        return piece.of_tensor(tensor, 1 if kind in _BY_COLUMNS else 0, f"{own}.{kind}")

    def _pieces_of(self, module: str) -> list[_Piece | None]:
        inside = place[2] if (place := LAYER.fullmatch(module)) is not None else module
        if inside not in self._pieces:
            self._pieces[inside] = self._made(inside)
        return self._pieces[inside]

    def _made(self, stored: str) -> list[_Piece | None]:
        layout, config = self._layout, self._config
        own = layout.inside.get(stored, stored)
        if isinstance(own, str):
            if self._order is None or own not in _TURNED:
                return [None]
            count = config.num_heads if own == "self_attn.q_proj" else config.num_kv_heads
            every = torch.arange(count * config.head_dim)
            return [_Piece(self._turned(every), len(every))]
        if own[0].startswith("linear_attn."):
            return self._of_delta_net(own)
        if ".mamba." in f".{own[0]}":
            spec = decoder_spec(self._config)
            spaces: list[StateSpaceSpec | SelectiveScanSpec] = [*spec.parts(StateSpaceSpec)]
            outputs = [*spaces, *spec.parts(SelectiveScanSpec)][0].outputs
            sizes = [outputs[name.rpartition(".")[2]] for name in own]
            return [_Piece(part, sum(sizes)) for part in torch.arange(sum(sizes)).split(sizes)]
        if own[-1] == "self_attn.gate_proj":
            every = torch.arange(2 * config.num_heads * config.head_dim)
            queries, gates = (part.flatten() for part in every.view(-1, 2, config.head_dim).unbind(1))
            return [_Piece(self._turned(queries), len(every)), _Piece(gates, len(every))]
        if len(own) == 2:
            shared = own[0].startswith("shared_mlp.")
            width = config.raw.get("shared_intermediate_size") if shared else config.intermediate_size
            every = torch.arange(2 * (width or 0))
            return [_Piece(half, len(every)) for half in every.chunk(2)]
        if own[0].startswith("conv."):
            every = torch.arange(3 * config.hidden_size)
            return [_Piece(third, len(every)) for third in every.chunk(3)]
        groups = config.num_kv_heads if layout.by_groups else 1
        each = config.num_kv_heads // groups
        every = torch.arange((config.num_heads + 2 * config.num_kv_heads) * config.head_dim)
        heads = every.view(groups, -1, config.head_dim).split((config.num_heads // groups, each, each), dim=1)
        queries, keys, values = (part.flatten() for part in heads)
        return [_Piece(rows, len(every)) for rows in (self._turned(queries), self._turned(keys), values)]

    def _of_delta_net(self, own: tuple[str, ...]) -> list[_Piece | None]:
        """What a delta net projects: linears one behind the other, or the key heads' parts of all of them."""
        net = next(each for each in decoder_spec(self._config).parts(DeltaNetSpec))
        keys, values = net.key_heads * net.key, net.heads * net.value
        sizes = {"q": keys, "k": keys, "v": values, "z": values, "b": net.heads, "a": net.heads}
        groups = net.key_heads if self._layout.by_groups else 1
        each = [sizes[name[-1]] // groups for name in own]
        every = torch.arange(sum(each) * groups)
        return [_Piece(part.flatten(), len(every)) for part in every.view(groups, -1).split(each, dim=1)]

    def _turned(self, rows: Tensor) -> Tensor:
        """Those of queries or keys in their heads' order."""
        return rows if self._order is None else rows.view(-1, self._config.head_dim)[:, self._order].flatten()


def names_in_files(headers: Iterable[str]) -> Callable[[str], str]:
    """Gives a module's whole name in a checkpoint's files by what Arrangement.stored calls it. headers: the names of
    all tensors."""
    found, root = dict[str, str](), "model."
    for module in (name.rpartition(".")[0] for name in headers):
        if (text := text_tensor(module)) is None:
            continue
        name = LAYER.sub(r"model.layers.\1.\2", text)
        found[name] = module
    layer = next((name for name in found if name.startswith("model.layers.")), None)
    if layer is not None and found[layer].endswith(inner := layer.removeprefix("model.")):
        root = found[layer].removesuffix(inner)
    return lambda name: found.get(name, f"{root}{name.removeprefix('model.')}" if "model.layers." in name else name)


def _cannot(name: str) -> ModelError:
    return ModelError(
        f"model: {name[:100]}: its checkpoint has it joined with others, or its heads in another order, in a format "
        "that cannot be taken apart; serve the weights that are not quantized, with --quantization"
    )
