"""Filters that few requests use, in plain PyTorch for any device. A request with one of them takes all filters from
here, one row at a time, in llama.cpp's order: top-n-sigma, top-k, typical, top-p, min-p, XTC. The temperature comes
first, as in vLLM, and each filter sees the probabilities of what the filters before it kept.

Equal logits are kept or dropped together.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from quire.engine.common.request_params import SamplingParams

_ONE = 2.0**44
"""1 in fixed point, in which the order of summands does not matter."""
_CANDIDATES = 1024
"""All tokens are sorted if these do not have the wanted probability."""
_MAX_XTC_THRESHOLD = 0.5
"""No two tokens have more."""


def has_rare_filters(params: SamplingParams) -> bool:
    has_xtc = params.xtc_probability > 0 and params.xtc_threshold <= _MAX_XTC_THRESHOLD
    return not params.is_greedy and (params.top_n_sigma > 0 or params.typical_p < 1 or has_xtc)


def drop_filtered_tokens(logits: Tensor, params: SamplingParams, sigma: Tensor | None, xtc_draw: float) -> None:
    """Sets logits [vocab] of filtered tokens to -inf, in place. `sigma`: see standard_deviation; `xtc_draw`: uniform
    in [0, 1).
    """
    if sigma is not None:
        logits.masked_fill_(~keep_top_n_sigma(logits, params.top_n_sigma, sigma), -torch.inf)
    scaled = logits / params.temperature
    for kept in _filter_steps(scaled, params, xtc_draw):
        scaled.masked_fill_(~kept, -torch.inf)
    logits.masked_fill_(scaled == -torch.inf, -torch.inf)


def _filter_steps(scaled: Tensor, params: SamplingParams, xtc_draw: float) -> Iterator[Tensor]:
    """Each step's kept tokens; the caller drops the others from `scaled` before the next step."""
    if 0 < params.top_k < len(scaled):
        yield scaled >= torch.topk(scaled, params.top_k).values[-1]
    if params.typical_p < 1:
        yield keep_typical(scaled, params.typical_p)
    if params.top_p < 1:
        probs = torch.softmax(scaled, dim=-1)
        yield _keep_until_mass(probs, -probs, params.top_p)
    if params.min_p > 0:
        probs = torch.softmax(scaled, dim=-1)
        yield probs >= params.min_p * probs.amax()
    if xtc_draw < params.xtc_probability:
        yield keep_without_top_choices(torch.softmax(scaled, dim=-1), params.xtc_threshold)


def standard_deviation(logits: Tensor) -> Tensor:
    """Of the model's own logits [vocab]: bans and large penalties would make top-n-sigma keep more."""
    finite = logits > -torch.inf
    count = finite.sum()
    mean = torch.where(finite, logits, 0.0).sum(dtype=torch.float64) / count
    return (torch.where(finite, logits - mean, 0.0).square().sum() / count).sqrt()


def keep_top_n_sigma(logits: Tensor, n: float, sigma: Tensor) -> Tensor:
    """Tang et al., 2024, "Top-nσ: Not All Logits Are You Need". Temperatures do not change it."""
    return logits >= logits.amax() - n * sigma


def keep_typical(scaled: Tensor, mass: float) -> Tensor:
    """Meister et al., 2022, "Locally Typical Sampling"."""
    logprobs = torch.log_softmax(scaled, dim=-1)
    probs = logprobs.exp()
    information = torch.where(probs > 0, -logprobs.double(), 0.0)
    entropy = (probs * information * _ONE).long().sum() / _ONE
    deviation = torch.where(probs > 0, (information - entropy).abs(), torch.inf)
    return _keep_until_mass(probs, deviation, mass)


def keep_without_top_choices(probs: Tensor, threshold: float) -> Tensor:
    """XTC ("exclude top choices"), by p-e-w (2024, pull request 6335 of text-generation-webui)."""
    is_top_choice = (probs >= threshold) & (probs > 0)  # a threshold of 0 must not choose tokens that were dropped
    least_top_choice = torch.where(is_top_choice, probs, torch.inf).amin()
    return probs <= least_top_choice


def _keep_until_mass(probs: Tensor, keys: Tensor, share: float) -> Tensor:
    """The tokens with the smallest keys, until they have this share of the probability."""
    masses = (probs.double() * _ONE).long()
    target = share * masses.sum().double()
    order = torch.topk(keys, min(len(keys), _CANDIDATES), largest=False).indices if keys.device.type == "cpu" else None
    if order is None or masses[order].sum().double() < target:  # on a GPU the host would wait for this comparison
        order = keys.argsort()
    last = (masses[order].cumsum(0).double() < target).sum().clamp(max=len(order) - 1)
    return keys <= keys[order].gather(0, last[None])
