"""Picks tokens on a GPU as engine/worker/sampling/sampler.py does, for all rows at once. The host never waits for it.

The parameters of all rows are uploaded in one copy, and each kind of change to logits that some row asks for needs one
copy more; everything else is done by kernels (kernels/gpu/triton_logits.py, kernels/gpu/triton_sampling.py).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec

import numpy as np
import torch
from torch import Tensor

from quire.engine.worker.sampling.grammar import GrammarMask
from quire.engine.worker.sampling.sampler import sample
from quire.engine.worker.sampling.sampling_rules import NOTHING_LEFT, Numbered, SamplingRow, change_logits
from quire.kernels.collective import Collective
from quire.kernels.gpu.others import is_other
from quire.kernels.gpu.transfer import upload

Sampler = Callable[[Tensor, list[SamplingRow], GrammarMask | None], Tensor]
"""As `sampler.sample`: logits, rows, the grammars' mask."""


def choose_sampler(
    device: torch.device,
    argmax: Callable[[Tensor], Tensor],
    draw: Callable[[Tensor, Tensor, Tensor], Tensor],
    group: Collective | None = None,
) -> Sampler:
    """The one for this device; `argmax` and `draw` are the backend's, `group` the model's ranks."""
    triton = device.type == "cuda" and find_spec("triton") is not None
    sampler: Sampler = sample_on_device if triton else partial(sample, argmax=argmax, draw=draw)
    if is_other(device):
        sampler = sample_on_host
    return sampler if group is None else partial(_sample_once, sampler, group)


def sample_on_host(logits: Tensor, rows: list[SamplingRow], mask: GrammarMask | None = None) -> Tensor:
    """As `sample`, for devices that may have no float64, by which tokens are drawn: logits are copied to the host, and
    the picks back."""
    here = [row if row.rules.plain else row._replace(table=row.table[row.slot].cpu()[None], slot=0) for row in rows]
    return sample(logits.cpu(), here, mask).to(logits.device)


def _sample_once(
    sampler: Sampler, group: Collective, logits: Tensor, rows: list[SamplingRow], mask: GrammarMask | None
) -> Tensor:
    """What the first rank picks, on all of them: no two can differ, and it alone has grammars, seeds and penalties."""
    if group.rank == 0:
        return group.share(sampler(logits, rows, mask))
    return group.share(torch.empty(len(logits), dtype=torch.int64, device=logits.device))


def sample_on_device(logits: Tensor, rows: list[SamplingRow], mask: GrammarMask | None = None) -> Tensor:
    """Token ids [R] int64 for contiguous logits [R, vocab] float32, which may be overwritten; NOTHING_LEFT as in
    `sample`."""
    from quire.kernels.gpu.triton_sampling import MOST_TOKENS, pick

    if logits.shape[1] > MOST_TOKENS:
        return sample(logits, rows, mask)
    empty = change_logits(logits, rows, mask, DeviceChanges())
    asked, vocab = [row.rules.params for row in rows], logits.shape[1]
    top_k = [each.top_k if 0 < each.top_k < vocab else vocab for each in asked]
    arrays: list[np.ndarray] = [
        np.array([0.0 if each.greedy else each.temperature for each in asked], dtype=np.float32),
        np.array(top_k, dtype=np.int32),
        np.array([each.top_p for each in asked], dtype=np.float64),
        np.array([each.min_p for each in asked], dtype=np.float32),
        np.array([row.seed & 0xFFFFFFFFFFFFFFFF for row in rows], dtype=np.uint64).view(np.int64),
        np.array([row.position for row in rows], dtype=np.int64),
    ]
    drawn = [(k, each.top_p) for k, each in zip(top_k, asked, strict=True) if not each.greedy]
    filtered = any(k < vocab or top_p < 1 for k, top_p in drawn)
    picks = pick(logits, *upload(arrays, logits.device), drawn=bool(drawn), filtered=filtered)
    return picks if empty is None else picks.masked_fill(empty, NOTHING_LEFT)


class DeviceChanges:
    """LogitChanges that wait for nothing, most of them Triton kernels."""

    def add(self, logits: Tensor, rows: Tensor, token_ids: Tensor, values: Tensor) -> None:
        from quire.kernels.gpu.triton_logits import add

        add(logits, rows, token_ids, values)

    def ban(self, logits: Tensor, words: list[tuple[int, SamplingRow, list[tuple[int, ...]]]]) -> None:
        from quire.kernels.gpu.triton_logits import ban

        each = [(index, row, word) for index, row, begun in words for word in begun]
        of = np.array([(index, row.slot, row.position) for index, row, _ in each], dtype=np.int64)
        tokens = np.concatenate([word for _, _, word in each]).astype(np.int32)
        ends = np.cumsum([0, *(len(word) for _, _, word in each)]).astype(np.int32)
        arrays: list[np.ndarray] = [of[:, 0], of[:, 1], of[:, 2], tokens, ends]
        ban(logits, words[0][1].table, *upload(arrays, logits.device))

    def penalize(self, logits: Tensor, rows: list[Numbered]) -> None:
        from quire.kernels.gpu.triton_logits import penalize

        of = [(index, row.slot, row.position, row.num_prompt) for index, row in rows]
        index, slot, position, num_prompt = np.array(of, dtype=np.int64).T
        by = np.array([row.rules.penalties for _, row in rows], dtype=np.float32).T
        there = upload([index, slot, position, num_prompt, *by], logits.device)
        penalize(logits, rows[0][1].table, *there, longest=int(position.max()))

    def constrain(self, logits: Tensor, mask: GrammarMask, unmodified: Tensor | None) -> None:
        rows, words = upload([np.array(mask.rows), mask.words], logits.device)
        places = torch.arange(8, dtype=torch.uint8, device=words.device)
        bits = words.view(torch.uint8)[:, :, None].bitwise_right_shift(places).bitwise_and_(1)
        allowed = bits.flatten(1).view(torch.bool)[:, : logits.shape[1]]
        found = logits[rows].masked_fill(~allowed, -torch.inf)  # torch.where copies a number to the GPU, and waits
        if unmodified is not None:
            stuck = found.amax(-1, keepdim=True) == -torch.inf
            found = torch.where(stuck & allowed, unmodified[rows], found)
        logits[rows] = found
