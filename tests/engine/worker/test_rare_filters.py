"""Top-n-sigma, typical, XTC and DRY against plain formulations in NumPy, and as parts of the sampler."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from quire.engine.common.request_params import SamplingParams
from quire.engine.worker.sampling.dry import make_dry_rule, penalize_repetitions
from quire.engine.worker.sampling.random_draws import uniform_draws, xtc_draw
from quire.engine.worker.sampling.rare_filters import drop_filtered_tokens, standard_deviation
from quire.engine.worker.sampling.sampler import HostLogitsProcessor, sample_token_ids
from quire.engine.worker.sampling.sampling_rules import (
    SamplingRow,
    is_plain_greedy_request,
    make_request_sampling_rules,
    process_logits_and_find_exhausted,
)

RARE: list[dict[str, Any]] = [
    {"top_n_sigma": 1.0},
    {"typical_p": 0.6},
    {"xtc_probability": 0.5, "xtc_threshold": 0.05},
    {"dry_multiplier": 0.8},
    {"top_n_sigma": 2.0, "top_k": 40, "typical_p": 0.9, "top_p": 0.8, "min_p": 0.02, "xtc_probability": 1.0},
    {"temperature": 0.0, "dry_multiplier": 0.8, "dry_sequence_breaker_ids": ((3,), (4, 5))},
    {},
]


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1)) * 3


def make_row(seed: int = 0, tokens: list[int] | None = None, **params: Any) -> SamplingRow:
    ids = torch.tensor(tokens or [1, 2, 3, 1, 2], dtype=torch.int32)
    rules = make_request_sampling_rules(SamplingParams(**params), (2,))
    return SamplingRow(rules, seed, len(ids), 1, ids[None], 0)


def kept_tokens(logits: torch.Tensor, draw: float = 0.0, **params: Any) -> list[int]:
    parsed = SamplingParams(**params)
    sigma = standard_deviation(logits) if parsed.top_n_sigma > 0 else None
    drop_filtered_tokens(left := logits.clone(), parsed, sigma, draw)
    return (left > -torch.inf).nonzero().flatten().tolist()


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def typical_tokens(probs: np.ndarray, mass: float) -> set[int]:
    """Meister et al., 2022, eq. 4: the smallest sum of |entropy - information| that reaches the mass."""
    information = np.array([-np.log(p) if p else np.inf for p in probs])
    entropy = sum(p * each for p, each in zip(probs, information, strict=True) if p)
    tokens: set[int] = set()
    for token in sorted(range(len(probs)), key=lambda token: abs(entropy - information[token])):
        if sum(probs[list(tokens)]) >= mass:
            break
        tokens.add(token)
    return tokens


def tokens_after_xtc(probs: np.ndarray, threshold: float) -> set[int]:
    """As the author describes it: of all tokens with at least the threshold, only the least likely one stays."""
    top_choices = sorted((token for token in range(len(probs)) if probs[token] >= threshold), key=lambda t: probs[t])
    return set(range(len(probs))) - set(top_choices[1:])


def dry_penalties(tokens: list[int], vocab: int, params: SamplingParams) -> np.ndarray:
    """By llama.cpp's documentation, with a loop over everything."""
    last = tokens if params.dry_penalty_last_n < 0 else tokens[max(0, len(tokens) - params.dry_penalty_last_n) :]
    limit = len(last)
    for breaker in params.dry_sequence_breaker_ids:
        for end in range(len(breaker), len(last) + 1):
            if tuple(last[end - len(breaker) : end]) == breaker:
                limit = min(limit, len(last) - end)
    penalties = np.zeros(vocab)
    for end in range(1, len(last)):
        length = 0
        while length < min(end, limit) and last[end - 1 - length] == last[len(last) - 1 - length]:
            length += 1
        if length >= params.dry_allowed_length:
            penalty = params.dry_multiplier * params.dry_base ** (length - params.dry_allowed_length)
            penalties[last[end]] = max(penalties[last[end]], penalty)
    return penalties


@pytest.mark.parametrize("n", [0.3, 1.0, 2.5])
def test_top_n_sigma_equals_formula_at_any_temperature(n: float) -> None:
    logits = noise(500)
    values = logits.double().numpy()
    expected = np.flatnonzero(values >= values.max() - n * values.std())
    for temperature in (0.5, 1.0, 1.7):
        assert kept_tokens(logits, top_n_sigma=n, temperature=temperature) == expected.tolist()


def test_top_n_sigma_uses_deviation_of_unconstrained_logits() -> None:
    logits = noise(500)
    few = logits.topk(9).indices.tolist()
    expected = {token for token in few if logits[token] >= logits.max() - logits.double().std(correction=0)}
    processed = logits.clone()
    process_logits_and_find_exhausted(
        processed[None], [make_row(top_n_sigma=1.0, allowed_token_ids=tuple(few))], None, HostLogitsProcessor()
    )
    assert set((processed > -torch.inf).nonzero().flatten().tolist()) == expected


@pytest.mark.parametrize("mass", [0.05, 0.4, 0.9])
@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.8])
def test_typical_equals_paper_and_transformers(mass: float, temperature: float) -> None:
    logits = noise(300)
    actual = kept_tokens(logits, typical_p=mass, temperature=temperature)
    assert set(actual) == typical_tokens(softmax(logits.double().numpy() / temperature), mass)
    theirs = transformers.TypicalLogitsWarper(mass)(None, logits[None] / temperature)[0]
    assert actual == (theirs > -torch.inf).nonzero().flatten().tolist()


@pytest.mark.parametrize("threshold", [0.0, 0.02, 0.1, 0.5])
def test_xtc_keeps_only_least_likely_top_choice(threshold: float) -> None:
    logits = noise(100)
    actual = kept_tokens(logits, xtc_probability=0.3, xtc_threshold=threshold, draw=0.29)
    assert set(actual) == tokens_after_xtc(softmax(logits.double().numpy()), threshold)
    assert len(kept_tokens(logits, xtc_probability=0.3, xtc_threshold=threshold, draw=0.3)) == 100


@pytest.mark.parametrize("dropped", [-torch.inf, -1e4])
def test_xtc_of_threshold_zero_keeps_least_likely_token_that_is_left(dropped: float) -> None:
    logits = torch.full((50,), dropped)
    logits[10:20] = noise(10)
    least = 10 + int(logits[10:20].argmin())
    kept = kept_tokens(logits, top_k=10, xtc_probability=1.0, xtc_threshold=0.0)
    assert kept == [least]


def test_filters_see_probabilities_of_what_earlier_filters_kept() -> None:
    logits = noise(200)
    values = logits.double().numpy() / 1.3
    tokens = np.argsort(-values)[:50]
    tokens = tokens[list(typical_tokens(softmax(values[tokens]), 0.9))]
    tokens = tokens[np.argsort(-values[tokens])]
    tokens = tokens[: np.searchsorted(softmax(values[tokens]).cumsum(), 0.8) + 1]
    probs = softmax(values[tokens])
    tokens = tokens[probs >= 0.1 * probs.max()]
    tokens = tokens[list(tokens_after_xtc(softmax(values[tokens]), 0.08))]
    chain = {"top_k": 50, "typical_p": 0.9, "top_p": 0.8, "min_p": 0.1, "xtc_probability": 1.0, "xtc_threshold": 0.08}
    assert kept_tokens(logits, temperature=1.3, **chain) == sorted(tokens.tolist())


def test_filters_keep_equal_logits_together() -> None:
    logits = torch.tensor([2.0, 1.0, 2.0, 1.0, 0.0])
    assert kept_tokens(logits, typical_p=0.01) in ([0, 2], [1, 3])
    assert kept_tokens(logits, xtc_probability=1.0, xtc_threshold=0.1) == [1, 3, 4]
    assert kept_tokens(torch.zeros(4), xtc_probability=1.0) == [0, 1, 2, 3]


@pytest.mark.parametrize("case", range(12))
def test_dry_equals_its_definition(case: int) -> None:
    random = np.random.default_rng(case)
    params = SamplingParams(
        dry_multiplier=float(random.choice([0.5, 0.8])),
        dry_base=float(random.choice([1.0, 1.1, 1.75])),
        dry_allowed_length=int(random.integers(1, 5)),
        dry_penalty_last_n=int(random.choice([-1, 5, 30])),
        dry_sequence_breaker_ids=[(), ((0,),), ((0,), (1, 2, 1), (3, 3)), ((4, 4), (1, 2), (2,) * 80)][case % 4],
    )
    phrase = random.integers(0, 5, size=int(random.integers(2, 20))).tolist()
    tokens = [*random.integers(0, 5, size=int(random.integers(0, 60))).tolist(), *phrase, 5, *phrase]
    rule = make_dry_rule(params)
    assert rule is not None
    penalize_repetitions(logits := torch.zeros(6), torch.tensor(tokens, dtype=torch.int32), rule)
    np.testing.assert_allclose(-logits.numpy(), dry_penalties(tokens, 6, params), rtol=1e-5)


@pytest.mark.parametrize("tokens", [[1], [1, 1], [1] * 3000])
def test_dry_penalty_stays_finite(tokens: list[int]) -> None:
    rule = make_dry_rule(SamplingParams(dry_multiplier=100.0, dry_base=100.0, dry_allowed_length=1))
    assert rule is not None
    penalize_repetitions(logits := torch.zeros(6), torch.tensor(tokens, dtype=torch.int32), rule)
    assert logits.isfinite().all()
    assert (logits[1] < -1e9) == (len(tokens) > 2)


def test_dry_with_thousands_of_long_breakers_is_quick() -> None:
    breakers = tuple((token, *range(100)) for token in range(8000))
    rule = make_dry_rule(SamplingParams(dry_multiplier=1.0, dry_allowed_length=1024, dry_sequence_breaker_ids=breakers))
    assert rule is not None
    tokens = torch.arange(3000, dtype=torch.int32) % 500
    started = time.process_time()
    penalize_repetitions(torch.zeros(500), tokens, rule)
    assert time.process_time() - started < 0.5


@pytest.mark.parametrize("off", [{"dry_multiplier": 0.0}, {"dry_multiplier": 1.0, "dry_penalty_last_n": 0}])
def test_dry_changes_nothing_when_off(off: dict[str, Any]) -> None:
    params = SamplingParams(temperature=0.0, dry_base=3.0, dry_sequence_breaker_ids=((1,),), **off)
    assert not params.has_dry
    assert is_plain_greedy_request(params)
    assert not is_plain_greedy_request(SamplingParams(temperature=0.0, dry_multiplier=0.5))


def test_token_with_rare_filters_does_not_depend_on_other_rows() -> None:
    logits = noise(42, 3000)
    rows = [make_row(seed=i, **RARE[i % len(RARE)]) for i in range(42)]

    def sample(indices: list[int]) -> list[int]:
        return sample_token_ids(logits[indices].clone(), [rows[i] for i in indices]).tolist()

    together = sample(list(range(42)))
    assert together == [sample([i])[0] for i in range(42)]
    order = torch.randperm(42, generator=torch.Generator().manual_seed(0)).tolist()
    assert sample(order) == [together[i] for i in order]


def test_rare_path_samples_same_tokens_as_kernels_if_no_rare_filter_acts() -> None:
    kinds: list[dict[str, Any]] = [{"top_k": 7}, {"top_p": 0.7}, {"min_p": 0.1}, {"top_k": 90, "top_p": 0.9}]
    logits = noise(40, 2000)
    usual = [make_row(seed=i, temperature=1.2, **kinds[i % 4]) for i in range(40)]
    rare = [make_row(seed=i, temperature=1.2, xtc_probability=1e-9, **kinds[i % 4]) for i in range(40)]
    assert sample_token_ids(logits.clone(), usual).tolist() == sample_token_ids(logits.clone(), rare).tolist()


def test_xtc_draws_follow_probability_and_do_not_repeat_token_draws() -> None:
    places = [(seed, position) for seed in range(50) for position in range(1, 41)]
    draws = np.array([xtc_draw(*place) for place in places])
    assert abs((draws < 0.3).mean() - 0.3) < 0.03
    assert abs(np.corrcoef(draws, uniform_draws(*zip(*places, strict=True)).numpy())[0, 1]) < 0.05


def test_filters_do_not_change_greedy_rows() -> None:
    logits = torch.tensor([[3.0, 2.9, 0.0]])
    assert sample_token_ids(logits, [make_row(temperature=0.0, xtc_probability=1.0, typical_p=0.1)]).tolist() == [0]
