"""The device sampler against engine/worker/sampling/sampler.py: the same tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.engine.common.request_params import SamplingParams, ThinkingBudget
from quire.engine.worker.sampling.device_sampler import sample_on_device
from quire.engine.worker.sampling.random_draws import uniform_draws
from quire.engine.worker.sampling.sampler import sample_token_ids
from quire.engine.worker.sampling.sampling_rules import NO_TOKEN_LEFT, SamplingRow, make_request_sampling_rules
from quire.engine.worker.sampling.slot_grammars import GrammarBitmask
from quire.kernels.gpu.triton_sampling import _uniform
from tests.kernels.triton.conftest import INTERPRETED

EOS = (2,)
KINDS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.3},
    {"top_k": 3},
    {"top_k": 1},
    {"top_p": 0.4},
    {"top_p": 0.999},
    {"min_p": 0.2},
    {"top_p": 0.95, "top_k": 200},
    {"temperature": 0.5, "top_p": 0.8, "top_k": 20, "min_p": 0.05},
    {"top_k": 10**6, "temperature": 2.0},
    {"top_p": 0.000001},
    {"top_n_sigma": 1.0, "top_p": 0.9},
    {"typical_p": 0.7, "min_p": 0.01, "xtc_probability": 0.6},
]


def random_logits(rows: int, vocab: int, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(vocab + rows)) * scale


def check(
    logits: torch.Tensor,
    params: list[dict[str, Any]],
    history: torch.Tensor | None = None,
    mask: GrammarBitmask | None = None,
) -> list[int]:
    """Run both samplers on rows of these parameters, row i owning slot i of the history. Returns the tokens."""
    table = torch.zeros((len(params), 40), dtype=torch.int32) if history is None else history
    positions = [table.shape[1] - 3 - index % 4 for index in range(len(params))]

    def rows(where: torch.Tensor) -> list[SamplingRow]:
        return [
            SamplingRow(
                make_request_sampling_rules(SamplingParams(**each), EOS),
                index * 7919 - 3,
                position,
                position // 2,
                where,
                index,
            )
            for index, (each, position) in enumerate(zip(params, positions, strict=True))
        ]

    device = torch.device("cpu" if INTERPRETED else "cuda")
    there = table.to(device)
    got = sample_on_device(logits.to(device, copy=True), rows(there), mask).tolist()
    assert got == sample_token_ids(logits.clone(), rows(table), mask).tolist()
    return got


@pytest.mark.parametrize(("vocab", "scale"), [(50, 3.0), (4097, 3.0), (9001, 1.0)])
def test_device_sampler_equals_host_sampler(vocab: int, scale: float) -> None:
    check(random_logits(2 * len(KINDS), vocab, scale), KINDS * 2)


def test_device_sampler_cuts_flat_distributions() -> None:
    """More tokens are above the cut than the candidate list holds."""
    logits = random_logits(2, 8300, 0.01)
    check(logits, [{"top_p": 0.9, "top_k": 7000}, {"top_p": 0.5}])


def test_equal_logits_stay_together_and_greedy_picks_first() -> None:
    logits = torch.zeros(6, 5000)
    logits[:, [700, 4500, 4999]] = 5.0
    kinds = [
        {"temperature": 0.0},
        {"top_k": 1},
        {"top_k": 2},
        {"top_p": 0.01},
        {"min_p": 1.0},
        {"top_k": 3, "top_p": 0.5},
    ]
    assert check(logits, kinds)[0] == 700


def test_sampled_token_does_not_depend_on_batch() -> None:
    logits = random_logits(6, 5000)
    table = torch.zeros((6, 8), dtype=torch.int32)
    rows = [
        SamplingRow(make_request_sampling_rules(SamplingParams(**KINDS[-6:][i]), EOS), i, 5, 2, table, i)
        for i in range(6)
    ]
    device = torch.device("cpu" if INTERPRETED else "cuda")
    together = sample_on_device(logits.to(device, copy=True), rows).tolist()
    assert together == [int(sample_on_device(logits[i : i + 1].to(device, copy=True), [rows[i]])) for i in range(6)]


def test_thinking_budget_forces_end_token() -> None:
    budgets = [ThinkingBudget(3, end_id=9, begin_id=None), ThinkingBudget(3, end_id=9, begin_id=5)]
    assert check(random_logits(2, 50), [{"thinking": budget} for budget in budgets])[0] == 9


def test_penalties_biases_and_bans_equal_host_sampler() -> None:
    history = torch.randint(0, 30, (13, 40), generator=torch.Generator().manual_seed(1)).to(torch.int32)
    tails = [tuple(history[i, 37 - i % 4 - 2 : 37 - i % 4].tolist()) for i in range(12)]
    kinds = [
        {"repetition_penalty": 1.5, "temperature": 0.0},
        {"repetition_penalty": 0.6},
        {"presence_penalty": 1.5, "frequency_penalty": 0.5},
        {"repetition_penalty": 1.2, "presence_penalty": -1.0, "frequency_penalty": -0.5, "top_k": 5},
        {"logit_bias": {3: 100.0, 4: -100.0}, "temperature": 0.0},
        {"logit_bias": {3: 5.0, 7: 5.0}, "bad_words_ids": ((3,),), "min_tokens": 30, "max_tokens": 40},
        {"allowed_token_ids": (1, 5, 29), "logit_bias": {5: 2.0}},
        {"bad_words_ids": tuple((*tails[7], token) for token in range(25)), "temperature": 0.0},
        {"bad_words_ids": tuple((token, tails[8][1], 3) for token in range(30)), "logit_bias": {3: 50.0}},
        {"min_tokens": 30, "max_tokens": 40, "stop_token_ids": (4, 5), "logit_bias": {2: 60.0, 4: 60.0}},
        {"min_tokens": 30, "max_tokens": 40, "ignore_eos": True, "logit_bias": {2: 60.0}},
        {"bad_words_ids": (tuple(range(30)),)},
        {"dry_multiplier": 2.0, "dry_allowed_length": 1, "dry_sequence_breaker_ids": ((1,), (2, 3))},
    ]
    got = check(random_logits(13, 30), kinds, history)
    assert got[4] == 3
    assert got[7] >= 25
    assert got[8] != 3
    assert got[10] == 2


def test_grammar_bitmask_equals_host_sampler() -> None:
    """A row whose own bans exclude every token of the grammar samples from its unmodified logits."""
    words = np.array([[1 << 4 | 1 << 9, 1 << 17 | -(1 << 31)], [1 << 7, 0]], dtype=np.int32)  # 49 too, and 63
    kinds = [{}, {"temperature": 0.8}, {"allowed_token_ids": (3,), "temperature": 1.3}]
    got = check(random_logits(3, 50), kinds, mask=GrammarBitmask([1, 2], words))
    assert got[1] in (4, 9, 49)
    assert got[2] == 7


def test_sampler_returns_no_token_left_when_all_are_forbidden() -> None:
    table = torch.zeros((1, 8), dtype=torch.int32)
    device = torch.device("cpu" if INTERPRETED else "cuda")
    for params in ({"temperature": 0.0}, {}, {"top_p": 0.5}, {"top_k": 3}):
        rules = make_request_sampling_rules(
            SamplingParams(**params, allowed_token_ids=(4,), bad_words_ids=((4,),)), EOS
        )
        rows = [SamplingRow(rules, 0, 5, 2, table, 0)]
        assert int(sample_on_device(random_logits(1, 10).to(device), rows)) == NO_TOKEN_LEFT


@settings(max_examples=12, deadline=None)
@given(
    vocab=st.integers(1, 6000),
    scale=st.sampled_from([0.1, 1.0, 5.0, 30.0]),
    params=st.lists(
        st.fixed_dictionaries(
            {
                "temperature": st.sampled_from([0.0, 0.1, 0.7, 1.0, 2.0]),
                "top_k": st.sampled_from([0, 1, 2, 40, 3000]),
                "top_p": st.sampled_from([1e-9, 0.1, 0.9, 0.99, 1.0]),
                "min_p": st.sampled_from([0.0, 0.0, 0.1, 1.0]),
            }
        ),
        min_size=1,
        max_size=4,
    ),
)
def test_random_sampling_parameters_equal_host_sampler(vocab: int, scale: float, params: list[dict[str, Any]]) -> None:
    check(random_logits(len(params), vocab, scale), params)


def test_device_uniform_draws_equal_host_draws() -> None:
    import triton
    import triton.language as tl

    @triton.jit
    def draw(out, seeds, positions):
        i = tl.program_id(0)
        tl.store(out + i, _uniform(tl.load(seeds + i), tl.load(positions + i)))

    table = torch.zeros((1, 1), dtype=torch.int32)
    keys = [(0, 0), (1, 0), (-1, 7), (2**63 - 1, 10**6), (-(2**63), 1)]
    rows = [
        SamplingRow(make_request_sampling_rules(SamplingParams(), EOS), seed, position, 0, table, 0)
        for seed, position in keys
    ]
    device = torch.device("cpu" if INTERPRETED else "cuda")
    out = torch.empty(len(keys), dtype=torch.float64, device=device)
    draw[len(keys),](out, *(torch.tensor(part, device=device) for part in zip(*keys, strict=True)))
    assert out.tolist() == uniform_draws([row.seed for row in rows], [row.position for row in rows]).tolist()
