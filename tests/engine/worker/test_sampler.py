"""Tests the sampler against transformers' logits processors, and its samples against the distribution."""

from typing import Any

import pytest
import torch
from transformers import (
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from quire.engine.common.errors import InvalidRequest
from quire.engine.common.request_params import Grammar, SamplingParams, ThinkingBudget
from quire.engine.worker.sampling.random_draws import uniform_draws
from quire.engine.worker.sampling.sampler import (
    HostLogitsProcessor,
    include_sampled_token,
    logprob_tensors,
    sample_token_ids,
    token_logprobs,
)
from quire.engine.worker.sampling.sampling_rules import (
    NO_TOKEN_LEFT,
    SamplingRow,
    is_plain_greedy_request,
    make_request_sampling_rules,
    pad_logprob_token_ids,
    process_logits_and_find_exhausted,
)
from quire.kernels.reference import logits_to_filtered_probs, sample_inverse_cdf

EOS = (2,)


def row(
    position: int = 5, seed: int = 0, tokens: list[int] | None = None, prompt: int = 3, **params: object
) -> SamplingRow:
    ids = torch.tensor(tokens if tokens is not None else list(range(position)), dtype=torch.int32)
    return SamplingRow(make_request_sampling_rules(SamplingParams(**params), EOS), seed, len(ids), prompt, ids[None], 0)


def process_row(logits: torch.Tensor, row: SamplingRow) -> None:
    """Process the logits [vocab] of one row, in place."""
    process_logits_and_find_exhausted(logits[None], [row], None, HostLogitsProcessor())


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1)) * 3


def filters(params: list[SamplingParams], vocab: int) -> torch.Tensor:
    rows = [(p.temperature, p.top_k if 0 < p.top_k < vocab else vocab, p.top_p, p.min_p) for p in params]
    return torch.tensor(rows, dtype=torch.float64)


@pytest.mark.parametrize("vocab", [50, 5000])
@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.7},
        {"top_k": 5},
        {"top_p": 0.6},
        {"top_p": 0.999},
        {"min_p": 0.1},
        {"temperature": 1.5, "top_k": 30, "top_p": 0.9, "min_p": 0.05},
        {"top_k": 10**6, "top_p": 1.0},
    ],
)
def test_filtered_probs_equal_transformers(params: dict[str, float], vocab: int) -> None:
    logits = noise(6, vocab)
    p = SamplingParams(**params)
    expected = TemperatureLogitsWarper(p.temperature)(None, logits) if p.temperature != 1 else logits
    if p.top_k:
        expected = TopKLogitsWarper(p.top_k)(None, expected)
    if p.top_p < 1:
        expected = TopPLogitsWarper(p.top_p)(None, expected)
    if p.min_p:
        expected = MinPLogitsWarper(p.min_p)(None, expected)
    actual = logits_to_filtered_probs(logits.clone(), filters([p] * 6, vocab))
    assert torch.equal(actual > 0, expected > -torch.inf)
    torch.testing.assert_close(actual / actual.sum(-1, keepdim=True), expected.softmax(-1))


@pytest.mark.parametrize("temperature", [1e-6, 1e-20, 1e-40, 1e-300])
def test_tiny_temperature_samples_greedily(temperature: float) -> None:
    """Logits divided by such temperatures are infinite, so that any token was sampled."""
    rows = [row(temperature=temperature, seed=seed, logprobs=0) for seed in range(6)]
    logits = noise(6, 500)
    actual = sample_token_ids(logits.clone(), rows)
    assert torch.equal(actual, logits.argmax(-1))
    assert is_plain_greedy_request(SamplingParams(temperature=temperature))


@pytest.mark.parametrize("penalty", [1e-6, 1e6])
def test_extreme_repetition_penalty_keeps_logits_finite(penalty: float) -> None:
    actual = torch.tensor([0.0, 30.0, -30.0, 1.0])
    process_row(actual, row(tokens=[0, 1, 2], repetition_penalty=penalty))
    assert actual.isfinite().all()
    for wrong in (penalty**2, 0.0, float("inf"), float("nan")):
        with pytest.raises(InvalidRequest, match="repetition_penalty must be in"):
            SamplingParams(repetition_penalty=wrong)


def test_top_p_of_flat_distribution_keeps_enough_candidates() -> None:
    params = [SamplingParams(top_p=0.9), SamplingParams(top_p=0.5, top_k=100)]
    probs = logits_to_filtered_probs(noise(2, 8000) * 0.01, filters(params, 8000))
    assert 6500 < int((probs[0] > 0).sum()) < 7300
    assert 45 <= int((probs[1] > 0).sum()) <= 55


def test_penalties_equal_transformers_and_openai_formula() -> None:
    logits = noise(1, 40)
    tokens = [3, 3, 4, 9, 9, 9, 10]
    actual = logits[0].clone()
    process_row(actual, row(tokens=tokens, prompt=3, repetition_penalty=1.4))
    expected = RepetitionPenaltyLogitsProcessor(1.4)(torch.tensor([tokens]), logits.clone())
    torch.testing.assert_close(actual, expected[0])

    actual = logits[0].clone()
    process_row(actual, row(tokens=tokens, prompt=3, presence_penalty=0.5, frequency_penalty=0.25))
    expected = logits[0].clone()
    expected[9] -= 0.5 + 3 * 0.25
    expected[10] -= 0.5 + 0.25
    torch.testing.assert_close(actual, expected)


def test_logit_bias_and_min_tokens_change_logits() -> None:
    actual = torch.zeros(20)
    process_row(actual, row(position=4, prompt=3, logit_bias={5: 7.0, 6: -100.0}, min_tokens=2, stop_token_ids=(8,)))
    expected = torch.zeros(20)
    expected[5], expected[6], expected[2], expected[8] = 7.0, -100.0, -torch.inf, -torch.inf
    assert torch.equal(actual, expected)
    process_row(actual := torch.zeros(20), row(position=5, prompt=3, min_tokens=2))
    assert torch.equal(actual, torch.zeros(20))


@pytest.mark.parametrize(
    ("answer", "begin", "ends"),
    [
        ([7, 7], None, False),
        ([7, 7, 7], None, True),
        ([7, 7, 7, 7], None, True),
        ([7, 9, 7, 7], None, False),
        ([7, 7, 7, 9, 7], None, False),
        ([8, 7, 7], 8, False),
        ([8, 7, 7, 7], 8, True),
        ([7, 8, 7, 7], 8, False),
        ([7, 8, 7, 7, 7], 8, True),
        ([8, 7, 9, 7, 7], 8, False),
        ([7, 7, 7, 7, 7], 8, False),
        ([], None, False),
    ],
)
def test_thinking_budget_forces_end_token(answer: list[int], begin: int | None, ends: bool) -> None:
    budget = ThinkingBudget(3, end_id=9, begin_id=begin)
    expected = noise(20)
    process_row(
        actual := expected.clone(), row(tokens=[8, 9, 9, *answer], prompt=3, thinking=budget, logit_bias={9: -99})
    )
    assert (actual > -torch.inf).nonzero().flatten().tolist() == ([9] if ends else list(range(20)))


@pytest.mark.parametrize(("answer", "begin", "ends"), [([], None, True), ([], 8, False), ([8], 8, True)])
def test_zero_thinking_budget_forces_end_token(answer: list[int], begin: int | None, ends: bool) -> None:
    thinking = ThinkingBudget(0, end_id=9, begin_id=begin)
    process_row(actual := noise(20), row(tokens=[8, 9, 9, *answer], prompt=3, thinking=thinking))
    assert ((actual > -torch.inf).sum() == 1) == ends


def test_allowed_token_ids_mask_all_others() -> None:
    actual = noise(30)
    expected = torch.full((30,), -torch.inf)
    expected[[3, 9]] = actual[[3, 9]]
    process_row(actual, row(allowed_token_ids=(3, 9)))
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("tokens", [[1], [4, 5], [5, 4], [9, 4, 5], [4, 5, 6], [6, 7, 6]])
def test_bad_words_equal_transformers(tokens: list[int]) -> None:
    words = ((3,), (4, 5), (5, 6), (4, 5, 6), (6, 7, 6, 8), (4, 5, 9))
    logits = noise(1, 20)
    processor = NoBadWordsLogitsProcessor([list(word) for word in words], eos_token_id=2)
    expected = processor(torch.tensor([tokens]), logits.clone())
    actual = logits[0].clone()
    process_row(actual, row(tokens=tokens, prompt=0, bad_words_ids=words))
    assert torch.equal(actual, expected[0])


def test_bad_word_does_not_begin_in_prompt() -> None:
    for prompt, kept in ((2, True), (1, False)):
        process_row(actual := torch.zeros(10), row(tokens=[1, 4], prompt=prompt, bad_words_ids=((4, 5),)))
        assert bool(actual[5] == 0) is kept


def test_sampler_returns_no_token_left_when_all_are_banned() -> None:
    rows = [row(temperature=t, allowed_token_ids=(4,), bad_words_ids=((4,),)) for t in (0.0, 1.0)]
    picks = sample_token_ids(noise(3, 10), [rows[0], row(allowed_token_ids=(4,)), rows[1]]).tolist()
    assert picks == [NO_TOKEN_LEFT, 4, NO_TOKEN_LEFT]


def test_samples_follow_distribution_and_depend_on_seed_and_position() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, -torch.inf])
    rows = [row(position=position, seed=seed) for seed in range(100) for position in range(1, 101)]
    picks = sample_token_ids(logits.repeat(len(rows), 1), rows)
    counts = torch.bincount(picks, minlength=5).double()
    expected = logits.softmax(-1).double() * len(rows)
    chi_squared = ((counts - expected)[:4] ** 2 / expected[:4]).sum()
    assert counts[4] == 0
    assert chi_squared < 16.3  # 99.9 % of samples, 3 degrees of freedom; the samples are fixed, so this cannot flake
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0)).tolist()
    assert sample_token_ids(logits.repeat(len(rows), 1), [rows[i] for i in order]).tolist() == picks[order].tolist()
    assert len({u.item() for u in uniform_draws([row.seed for row in rows], [row.position for row in rows])}) == len(
        rows
    )


def test_sampled_token_does_not_depend_on_other_rows() -> None:
    kinds = [{}, {"top_k": 3}, {"top_p": 0.4}, {"temperature": 0.0}, {"min_p": 0.2}, {"top_p": 0.95, "top_k": 2000}]
    logits = noise(60, 3000)
    rows = [row(seed=i, **kinds[i % len(kinds)]) for i in range(60)]
    together = sample_token_ids(logits.clone(), rows).tolist()
    assert together == [int(sample_token_ids(logits[i : i + 1].clone(), [rows[i]])) for i in range(60)]


def test_inverse_cdf_sampling_at_ends_of_unit_interval() -> None:
    probs = torch.tensor([[0.0, 0.5, 0.0, 0.5, 0.0]] * 3)
    u = torch.tensor([0.0, 0.5, 1 - 2.0**-53], dtype=torch.float64)
    assert sample_inverse_cdf(probs, u).tolist() == [1, 3, 3]


@pytest.mark.parametrize("vocab", [30, 5000])
def test_top_logprobs_of_ties_do_not_depend_on_count(vocab: int) -> None:
    logits = noise(3, vocab).round()
    expected = [sorted(range(vocab), key=lambda token: (-row[token], token)) for row in logits.tolist()]
    for most in (0, 1, 2, 7, 20):
        actual = logprob_tensors(logits, torch.zeros(3, dtype=torch.int64), most)
        assert actual[3].tolist() == [each[:most] for each in expected]
        assert torch.equal(actual[2], logits.log_softmax(-1).gather(-1, actual[3]))


def test_logprobs_rank_and_top_equal_log_softmax() -> None:
    logits = noise(2, 30)
    tensors = logprob_tensors(logits, torch.tensor([4, 5]), 3)
    first, second = token_logprobs([4, 5], tensors, [0, 3])
    expected = logits.log_softmax(-1)
    assert first.logprob == pytest.approx(expected[0, 4].item())
    assert first.top == []
    assert [token for token, _ in second.top] == expected[1].topk(3).indices.tolist()
    assert second.rank == int((expected[1] > expected[1, 5]).sum()) + 1


def test_logprob_token_ids_replace_top_logprobs() -> None:
    logits = noise(4, 30)
    picked = torch.tensor([4, 5, 6, 7])
    params = [{"logprobs": 2}, {"logprob_token_ids": (9, 5, 9, 0)}, {"logprobs": 0}, {"logprob_token_ids": (1,)}]
    rules = [make_request_sampling_rules(SamplingParams(**each), ()) for each in params]
    tensors = logprob_tensors(logits, picked, 2, pad_logprob_token_ids(rules, logits.device))
    actual = token_logprobs(picked.tolist(), tensors, [each.num_logprobs or 0 for each in rules])
    expected = logits.log_softmax(-1)
    assert [token for token, _ in actual[0].top] == expected[0].topk(2).indices.tolist()
    assert actual[2].top == []
    for row, ids in ((1, {9, 5, 0}), (3, {1, 7})):
        exact = include_sampled_token(actual[row])
        assert dict(exact.top) == pytest.approx({token: expected[row, token].item() for token in ids})
        assert [value for _, value in exact.top] == sorted((value for _, value in exact.top), reverse=True)
        assert (exact.token_id, exact.logprob) == (int(picked[row]), pytest.approx(expected[row, picked[row]].item()))


@pytest.mark.parametrize(
    "asked",
    [
        {"temperature": 0.5},
        {"logprobs": 0},
        {"logprob_token_ids": (3,)},
        {"logit_bias": {1: 1.0}},
        {"allowed_token_ids": (1,)},
        {"bad_words_ids": ((1, 2),)},
        {"min_tokens": 1},
        {"frequency_penalty": 0.1},
        {"dry_multiplier": 0.1},
        {"thinking": ThinkingBudget(4, end_id=3, begin_id=None)},
        {"grammar": Grammar("regex", "a")},
    ],
    ids=lambda asked: next(iter(asked)),
)
def test_only_plain_greedy_requests_need_argmax_alone(asked: dict[str, Any]) -> None:
    assert is_plain_greedy_request(
        SamplingParams(temperature=0.0, prompt_logprobs=1, seed=3, stop=("a",), logprob_token_ids=())
    )
    assert not is_plain_greedy_request(SamplingParams(**{"temperature": 0.0} | asked))
