from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import version
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quire.engine.common.config import EngineConfig
from quire.engine.common.errors import ConfigError, ModelError, refuse_setting_if
from quire.engine.families.base.model_config import ModelConfig
from quire.engine.models.decoder import Decoder, KVCache
from quire.kernels.backend import AttentionMetadata, Backend

if TYPE_CHECKING:
    from quire.engine.models.transformers_backend.decoder import TransformersDecoder

_TRIAL_LENGTHS = (5, 21, 40, 13)
"""In tokens."""
_MAX_DEVIATION = {torch.float32: 0.05}
"""By dtype, the largest difference that rounding explains, in standard deviations of the logits."""
_DEFAULT_MAX_DEVIATION = 0.5


def import_transformers_decoder() -> type[TransformersDecoder]:
    """The import takes seconds."""
    decoder_type: type[TransformersDecoder] = import_module(
        "quire.engine.models.transformers_backend.decoder"
    ).TransformersDecoder
    return decoder_type


def decoder_class(model: ModelConfig, default: type[Decoder] = Decoder) -> type[Decoder]:
    return default if model.transformers_config is None else import_transformers_decoder()


def check_transformers_settings(config: EngineConfig, model: ModelConfig) -> None:
    """Raises ConfigError."""
    if model.transformers_config is None:
        return
    speculative = config.speculative_config
    unsupported = {
        "pipeline_parallel_size": config.pipeline_parallel_size > 1,
        "speculative_config": speculative is not None and speculative.uses_hidden_states,
        "classifier_from_token": bool(config.classifier_from_token),
        "runner": config.runner == "pooling",
    }
    why = f"a {model.model_type} is computed by transformers' class, which is not served with it"
    for name, value in unsupported.items():
        refuse_setting_if(name, value and why)


def transformers_description_suffix(model: Decoder) -> str:
    """Another class may produce other tokens."""
    return f"; {model.transformers_class} of transformers {version('transformers')}" if model.transformers_class else ""


def transformers_batch_invariance_and_notes(
    config: EngineConfig, model: Decoder, backend: Backend, batch_invariant: bool
) -> tuple[bool, list[str]]:
    """Raises ConfigError if --deterministic requires invariance that the model lacks, and the errors of
    is_batch_invariant.
    """
    if not model.transformers_class:
        return batch_invariant, []
    costs = "slower than by a file of Quire's; without stages, heads that draft, vectors and CUDA graphs"
    notes = [f"transformers' {model.transformers_class} computes it, with Quire's KV cache: {costs}"]
    assert isinstance(model, import_transformers_decoder())
    model.reduces_results = False  # each rank tries its part alone, because sums do not mix rows
    is_invariant = is_batch_invariant(model, backend)  # always run, because it finds classes that ignore positions
    model.reduces_results = True
    wrong = None if is_invariant else "in a trial, a request's bits depended on the rest of its batch"
    if foreign := model.unreplaced_matmuls:
        wrong = wrong or f"PyTorch's own products multiply by {foreign[0]}{' and others' if len(foreign) > 1 else ''}"
    if batch_invariant and wrong is not None:
        notes.append(f"batch-dependent: transformers' {model.transformers_class}: {wrong}")
        if config.deterministic:
            raise ConfigError(
                f"deterministic: transformers' {model.transformers_class}: {wrong}", param="deterministic"
            )
    return batch_invariant and wrong is None, notes


@torch.inference_mode()
def is_batch_invariant(model: Decoder, backend: Backend) -> bool:
    """Raises ModelError if the logits differ by more than rounding explains, because transformers' class then ignores
    positions.
    """
    trial = _BatchTrial(model, backend, [min(each, model.max_model_len) for each in _TRIAL_LENGTHS])
    alone = torch.cat([trial.compute_logits([(row, 0, length)])[row] for row, length in enumerate(trial.lengths)])
    logits_by_row = dict[int, list[Tensor]]()
    for step in trial.make_chunked_steps():
        for row, logits in trial.compute_logits(step).items():
            logits_by_row.setdefault(row, []).append(logits)
    batched = torch.cat([piece for _, pieces in sorted(logits_by_row.items()) for piece in pieces])
    if torch.equal(alone, batched):
        return True
    if not (difference := (alone - batched).abs().max() / alone.std()) <= _MAX_DEVIATION.get(
        model.dtype, _DEFAULT_MAX_DEVIATION
    ):
        raise ModelError(
            "model: transformers' class gives different logits if a prompt is chunked or batched with others: "
            f"they differ by {difference:.2g} of their standard deviation, so it ignores the positions it is given"
        )
    return False


class _BatchTrial:
    def __init__(self, model: Decoder, backend: Backend, lengths: Sequence[int]) -> None:
        self._model = model
        self._block_size = backend.block_size
        self.lengths = lengths
        device, vocab = model.device, model.spec.vocab_size
        self._token_ids = [
            torch.arange(length, device=device) * (7 + row) % vocab for row, length in enumerate(lengths)
        ]
        blocks_per_seq = -(-max(lengths) // backend.block_size)
        self._block_table = torch.arange(len(lengths) * blocks_per_seq, dtype=torch.int32, device=device).view(
            -1, blocks_per_seq
        )
        page_tensors = model.block_tensor_specs(len(lengths) * blocks_per_seq * model.groups.num_groups)
        self._kv_cache: KVCache = [
            tuple(torch.zeros(tensor.shape, dtype=tensor.dtype, device=device) for tensor in place)
            for place in page_tensors
        ]

    def make_chunked_steps(self) -> list[list[tuple[int, int, int]]]:
        """Returns steps of (row, start, count). Sequence n starts at step n and takes three steps."""
        steps: list[list[tuple[int, int, int]]] = [[] for _ in range(len(self.lengths) + 2)]
        for row, length in enumerate(self.lengths):
            cuts = [third * (length - 1) // 3 for third in range(4)]
            for third, (begin, end) in enumerate(pairwise(cuts)):
                steps[row + third] += [(row, begin, end - begin)] if end > begin else []
        last = [(row, length - 1, 1) for row, length in enumerate(self.lengths)]
        return [*(step for step in steps if step), last]

    def compute_logits(self, rows: Sequence[tuple[int, int, int]]) -> dict[int, Tensor]:
        ids = torch.cat([self._token_ids[row][start : start + count] for row, start, count in rows])
        hidden = self._model.forward(
            ids, self._attention_metadata(rows), self._kv_cache, torch.arange(len(ids), device=ids.device)
        )
        parts = self._model.compute_logits(hidden).split([count for _, _, count in rows])
        return {row: part for (row, _, _), part in zip(rows, parts, strict=True)}

    def _attention_metadata(self, rows: Sequence[tuple[int, int, int]]) -> AttentionMetadata:
        device, size = self._block_table.device, self._block_size
        starts = torch.tensor([0, *accumulate(count for _, _, count in rows)], dtype=torch.int32, device=device)
        ends = torch.tensor([start + count for _, start, count in rows], dtype=torch.int32, device=device)
        positions = torch.cat([torch.arange(start, start + count, device=device) for _, start, count in rows])
        table = self._block_table[[row for row, _, _ in rows]]
        rows_of_tokens = torch.repeat_interleave(torch.tensor([count for _, _, count in rows], device=device))
        tables = [table + group * self._block_table.numel() for group in range(self._model.groups.num_groups)]
        slots = [each[rows_of_tokens, positions // size].long() * size + positions % size for each in tables]
        keys = torch.nn.functional.pad(ends.cumsum(0, dtype=torch.int32), (1, 0))
        max_lens = max(count for _, _, count in rows), int(ends.max())
        return AttentionMetadata(starts, ends, keys, tables[0], positions, slots[0], *max_lens).with_block_tables(
            tables, slots
        )
