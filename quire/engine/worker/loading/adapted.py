"""Models by transformers' classes, in the worker: what does not go with them, and whether the batch changes their bits,
which is tried with their own weights."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import version
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quire.engine.checkpoint.files import ModelConfig
from quire.engine.config import EngineConfig
from quire.engine.errors import ConfigError, ModelError, refuse
from quire.engine.models.decoder import Decoder, KVCache
from quire.kernels.backend import AttentionMetadata, Backend

if TYPE_CHECKING:
    from quire.engine.models.adapted.decoder import AdaptedDecoder

_LENGTHS = (5, 21, 40, 13)
"""Tokens of sequences that are computed alone, and in pieces beside each other."""
_WRONG = {torch.float32: 0.05}
"""By type: differences beyond this part of the logits' deviation are no rounding. Else:"""
_WRONG_ELSE = 0.5


def adapted_kind() -> type[AdaptedDecoder]:
    """What computes such a model. Importing transformers takes seconds, so it is done for these alone."""
    kind: type[AdaptedDecoder] = import_module("quire.engine.models.adapted.decoder").AdaptedDecoder
    return kind


def decoder_kind(model: ModelConfig, otherwise: type[Decoder] = Decoder) -> type[Decoder]:
    """What computes a model; `otherwise`: where transformers' class does not."""
    return otherwise if model.given is None else adapted_kind()


def check_adapted(config: EngineConfig, model: ModelConfig) -> None:
    """Raise ConfigError for what a model that transformers' class computes is not served with."""
    if model.given is None:
        return
    speculative = config.speculative_config
    asked = {
        "pipeline_parallel_size": config.pipeline_parallel_size > 1,
        "speculative_config": speculative is not None and speculative.hidden_states,
        "classifier_from_token": bool(config.classifier_from_token),
        "runner": config.runner == "pooling",
    }
    why = f"a {model.model_type} is computed by transformers' class, which is not served with it"
    for name, value in asked.items():
        refuse(name, value and why)


def by_class(model: Decoder) -> str:
    """What is to be added to what computes a model, where a class does: other tokens may come of it; else ""."""
    return f"; {model.made_by} of transformers {version('transformers')}" if model.made_by else ""


def adapted_notes(config: EngineConfig, model: Decoder, backend: Backend, apart: bool) -> tuple[bool, list[str]]:
    """Whether no token of a loaded model depends on what else runs, where its backend's do not (`apart`); and what is
    to be known of one that transformers' class computes. Raises ConfigError where --deterministic cannot be kept."""
    if not model.made_by:
        return apart, []
    costs = "slower than by a file of Quire's; without stages, heads that draft, vectors and CUDA graphs"
    notes = [f"transformers' {model.made_by} computes it, on Quire's pages: {costs}"]
    assert isinstance(model, adapted_kind())
    model.sums = False  # of ranks this one tries its part alone: sums depend on no other rows
    same = keeps_rows_apart(model, backend)  # tried in any case: it finds what does not take positions
    model.sums = True
    wrong = None if same else "tried, it gives a request other bits beside others than alone"
    if foreign := model.foreign_products:
        wrong = wrong or f"PyTorch's own products multiply by {foreign[0]}{' and others' if len(foreign) > 1 else ''}"
    if apart and wrong is not None:
        notes.append(f"batch-dependent: transformers' {model.made_by}: {wrong}")
        if config.deterministic:
            raise ConfigError(f"deterministic: transformers' {model.made_by}: {wrong}", param="deterministic")
    return apart and wrong is None, notes


@torch.inference_mode()
def keeps_rows_apart(model: Decoder, backend: Backend) -> bool:
    """Whether a sequence has the same logits, bit for bit, alone and in pieces beside others, tried once. Raises
    ModelError where they are others altogether: then the class does not take positions as they are given."""
    trial = _Trial(model, backend, [min(each, model.max_model_len) for each in _LENGTHS])
    alone = torch.cat([trial.logits([(row, 0, length)])[row] for row, length in enumerate(trial.lengths)])
    found = dict[int, list[Tensor]]()
    for step in trial.pieces():
        for row, logits in trial.logits(step).items():
            found.setdefault(row, []).append(logits)
    together = torch.cat([piece for _, pieces in sorted(found.items()) for piece in pieces])
    if torch.equal(alone, together):
        return True
    if not (difference := (alone - together).abs().max() / alone.std()) <= _WRONG.get(model.dtype, _WRONG_ELSE):
        raise ModelError(
            "model: transformers' class gives other logits for a prompt in pieces beside others: "
            f"they differ by {difference:.2g} of their deviation, so it does not take positions as they are given"
        )
    return False


class _Trial:
    """Some sequences on pages of their own."""

    def __init__(self, model: Decoder, backend: Backend, lengths: Sequence[int]) -> None:
        self._model, self._block_size, self.lengths = model, backend.block_size, lengths
        device, vocab = model.device, model.spec.vocab_size
        self._ids = [torch.arange(each, device=device) * (7 + row) % vocab for row, each in enumerate(lengths)]
        each = -(-max(lengths) // backend.block_size)
        self._table = torch.arange(len(lengths) * each, dtype=torch.int32, device=device).view(-1, each)
        made = model.pages(len(lengths) * each * model.groups.count)
        self._pages: KVCache = [
            tuple(torch.zeros(tensor.shape, dtype=tensor.dtype, device=device) for tensor in place) for place in made
        ]

    def pieces(self) -> list[list[tuple[int, int, int]]]:
        """Steps that compute all sequences: the n-th begins with the n-th step, in thirds; then all get their last
        token at once."""
        steps: list[list[tuple[int, int, int]]] = [[] for _ in range(len(self.lengths) + 2)]
        for row, length in enumerate(self.lengths):
            cuts = [third * (length - 1) // 3 for third in range(4)]
            for third, (begin, end) in enumerate(pairwise(cuts)):
                steps[row + third] += [(row, begin, end - begin)] if end > begin else []
        last = [(row, length - 1, 1) for row, length in enumerate(self.lengths)]
        return [*(step for step in steps if step), last]

    def logits(self, rows: Sequence[tuple[int, int, int]]) -> dict[int, Tensor]:
        """By sequence, of a step's rows, each (sequence, start, count)."""
        ids = torch.cat([self._ids[row][start : start + count] for row, start, count in rows])
        hidden = self._model.forward(ids, self._metadata(rows), self._pages, torch.arange(len(ids), device=ids.device))
        parts = self._model.logits(hidden).split([count for _, _, count in rows])
        return {row: part for (row, _, _), part in zip(rows, parts, strict=True)}

    def _metadata(self, rows: Sequence[tuple[int, int, int]]) -> AttentionMetadata:
        device, size = self._table.device, self._block_size
        starts = torch.tensor([0, *accumulate(count for _, _, count in rows)], dtype=torch.int32, device=device)
        ends = torch.tensor([start + count for _, start, count in rows], dtype=torch.int32, device=device)
        positions = torch.cat([torch.arange(start, start + count, device=device) for _, start, count in rows])
        table = self._table[[row for row, _, _ in rows]]
        owner = torch.repeat_interleave(torch.tensor([count for _, _, count in rows], device=device))
        tables = [table + group * self._table.numel() for group in range(self._model.groups.count)]
        slots = [each[owner, positions // size].long() * size + positions % size for each in tables]
        keys = torch.nn.functional.pad(ends.cumsum(0, dtype=torch.int32), (1, 0))
        most = max(count for _, _, count in rows), int(ends.max())
        return AttentionMetadata(starts, ends, keys, tables[0], positions, slots[0], *most).grouped(tables, slots)
