"""Filters that few requests use, in plain PyTorch for any device.

If a request uses one of them, this module applies all its filters, one row at a time, in llama.cpp's order:
top-n-sigma, top-k, typical, top-p, min-p, XTC. The temperature comes first, as in vLLM. Each filter sees the
probabilities of the tokens that earlier filters kept, and keeps or drops equal logits together.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from quire.engine.common.request_params import SamplingParams

_FIXED_POINT_ONE = 2.0**44
"""Scale of fixed-point sums. Unlike sums of floats, they do not depend on the order of summands."""
_NUM_CANDIDATES = 1024
"""Only this many tokens are sorted, or all tokens if these have too little probability together."""
MAX_XTC_THRESHOLD = 0.5
"""A higher threshold never drops a token: two tokens cannot both have more probability, and XTC always keeps one."""


def drop_filtered_tokens(logits: Tensor, params: SamplingParams, sigma: Tensor | None, xtc_draw: float) -> None:
    """Sets logits [vocab] of filtered tokens to -inf, in place. `xtc_draw`: uniform in [0, 1)."""
    if sigma is not None:
        logits.masked_fill_(~_top_n_sigma_mask(logits, params.top_n_sigma, sigma), -torch.inf)
    scaled = logits / params.temperature
    for mask in _filter_masks(scaled, params, xtc_draw):
        scaled.masked_fill_(~mask, -torch.inf)
    logits.masked_fill_(scaled == -torch.inf, -torch.inf)


def _filter_masks(scaled: Tensor, params: SamplingParams, xtc_draw: float) -> Iterator[Tensor]:
    """The caller applies each mask to `scaled` before it takes the next one."""
    if 0 < params.top_k < len(scaled):
        yield scaled >= torch.topk(scaled, params.top_k).values[-1]
    if params.typical_p < 1:
        yield _typical_mask(scaled, params.typical_p)
    if params.top_p < 1:
        probs = torch.softmax(scaled, dim=-1)
        yield _probability_mass_mask(probs, -probs, params.top_p)
    if params.min_p > 0:
        probs = torch.softmax(scaled, dim=-1)
        yield probs >= params.min_p * probs.amax()
    if xtc_draw < params.xtc_probability:
        yield _xtc_mask(torch.softmax(scaled, dim=-1), params.xtc_threshold)


def standard_deviation(logits: Tensor) -> Tensor:
    """Ignores infinite logits. Call with the model's own logits [vocab], because bans and large penalties would make
    top-n-sigma keep more tokens.
    """
    finite = logits > -torch.inf
    count = finite.sum()
    mean = torch.where(finite, logits, 0.0).sum(dtype=torch.float64) / count
    return (torch.where(finite, logits - mean, 0.0).square().sum() / count).sqrt()


def _top_n_sigma_mask(logits: Tensor, n: float, sigma: Tensor) -> Tensor:
    """Tang et al., 2024, "Top-nσ: Not All Logits Are You Need". The temperature has no effect."""
    return logits >= logits.amax() - n * sigma


def _typical_mask(scaled: Tensor, mass: float) -> Tensor:
    """Meister et al., 2022, "Locally Typical Sampling"."""
    logprobs = torch.log_softmax(scaled, dim=-1)
    probs = logprobs.exp()
    information = torch.where(probs > 0, -logprobs.double(), 0.0)
    entropy = (probs * information * _FIXED_POINT_ONE).long().sum() / _FIXED_POINT_ONE
    deviation = torch.where(probs > 0, (information - entropy).abs(), torch.inf)
    return _probability_mass_mask(probs, deviation, mass)


def _xtc_mask(probs: Tensor, threshold: float) -> Tensor:
    """XTC ("exclude top choices"), by p-e-w (2024, pull request 6335 of text-generation-webui)."""
    is_top_choice = (probs >= threshold) & (probs > 0)  # a threshold of 0 must not choose tokens that were dropped
    least_top_choice = torch.where(is_top_choice, probs, torch.inf).amin()
    return probs <= least_top_choice


def _probability_mass_mask(probs: Tensor, keys: Tensor, share: float) -> Tensor:
    """Keeps the tokens with the smallest keys, until they together have this share of the probability."""
    masses = (probs.double() * _FIXED_POINT_ONE).long()
    target = share * masses.sum().double()
    order = None
    if keys.device.type == "cpu":  # on a GPU the host would wait for the comparison below
        order = torch.topk(keys, min(len(keys), _NUM_CANDIDATES), largest=False).indices
    if order is None or masses[order].sum().double() < target:
        order = keys.argsort()
    last = (masses[order].cumsum(0).double() < target).sum().clamp(max=len(order) - 1)
    return keys <= keys[order].gather(0, last[None])
