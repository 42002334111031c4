from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from quire.engine.common.request_params import SamplingParams, ThinkingBudget
from quire.engine.worker.sampling.dry import DryRule, make_dry_rule, penalize_repetitions
from quire.engine.worker.sampling.random_draws import xtc_draw
from quire.engine.worker.sampling.rare_filters import MAX_XTC_THRESHOLD, drop_filtered_tokens, standard_deviation
from quire.engine.worker.sampling.slot_grammars import GrammarBitmask
from quire.kernels.gpu.host_transfer import upload_arrays


@dataclass(frozen=True, slots=True)
class RequestSamplingRules:
    """The fields from `allowed_token_ids` on, then params.thinking, change logits in this order."""

    params: SamplingParams
    num_logprobs: int | None
    """The number of tokens reported in addition to the sampled one; None reports no logprobs at all."""
    logprob_token_ids: np.ndarray | None
    """int64. If given, these ids are reported instead of the most likely tokens."""
    keeps_logits_unchanged: bool
    is_greedy_only: bool
    allowed_token_ids: np.ndarray | None
    """int64."""
    biases: dict[int, float]
    """Bad words of a single token have -inf."""
    biases_before_min_tokens: dict[int, float]
    """`biases`, and -inf for tokens that end the answer. They apply until there are min_tokens."""
    bad_words: tuple[tuple[int, ...], ...]
    """Each has two or more tokens."""
    penalties: tuple[float, float, float] | None
    """Repetition, presence and frequency penalty."""
    dry: DryRule | None
    has_rare_filters: bool
    """If True, rare_filters.py applies all filters."""

    @property
    def can_ban_all_tokens(self) -> bool:
        added = self.biases_before_min_tokens if self.params.min_tokens else self.biases
        return self.allowed_token_ids is not None or bool(self.bad_words) or -np.inf in added.values()

    def kernel_filters(self, vocab: int) -> tuple[int, float, float]:
        if self.has_rare_filters:
            return vocab, 1.0, 0.0
        top_k = self.params.top_k
        return top_k if 0 < top_k < vocab else vocab, self.params.top_p, self.params.min_p


def make_request_sampling_rules(params: SamplingParams, eos_token_ids: tuple[int, ...]) -> RequestSamplingRules:
    biases = (params.logit_bias or {}) | {word[0]: -np.inf for word in params.bad_words_ids if len(word) == 1}
    end_token_ids = [*params.stop_token_ids, *(() if params.ignore_eos and params.grammar is None else eos_token_ids)]
    bad_words = tuple(word for word in params.bad_words_ids if len(word) > 1)
    penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
    allowed_token_ids = params.allowed_token_ids
    listed_ids = tuple(dict.fromkeys(params.logprob_token_ids or ()))
    logit_changes = (
        allowed_token_ids,
        biases,
        params.min_tokens and end_token_ids,
        bad_words,
        penalties != (1.0, 0.0, 0.0),
        params.has_dry,
        params.thinking,
    )
    return RequestSamplingRules(
        params=params,
        num_logprobs=len(listed_ids) or params.logprobs,
        logprob_token_ids=np.array(listed_ids, dtype=np.int64) if listed_ids else None,
        keeps_logits_unchanged=not any(logit_changes),
        is_greedy_only=is_plain_greedy_request(params),
        allowed_token_ids=None if allowed_token_ids is None else np.array(allowed_token_ids, dtype=np.int64),
        biases=biases,
        biases_before_min_tokens=biases | dict.fromkeys(end_token_ids, -np.inf),
        bad_words=bad_words,
        penalties=penalties if penalties != (1.0, 0.0, 0.0) else None,
        dry=make_dry_rule(params) if params.has_dry else None,
        has_rare_filters=has_rare_filters(params),
    )


def has_rare_filters(params: SamplingParams) -> bool:
    has_xtc = params.xtc_probability > 0 and params.xtc_threshold <= MAX_XTC_THRESHOLD
    return not params.is_greedy and (params.top_n_sigma > 0 or params.typical_p < 1 or has_xtc)


def is_plain_greedy_request(params: SamplingParams) -> bool:
    reported = (params.grammar, params.logprobs, params.logprob_token_ids or None)
    changed = (params.thinking, params.allowed_token_ids, params.logit_bias or None, params.bad_words_ids or None)
    penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
    plain = params.min_tokens == 0 and penalties == (1.0, 0.0, 0.0) and not params.has_dry
    return params.is_greedy and plain and all(each is None for each in (*reported, *changed))


def pad_logprob_token_ids(rules: Sequence[RequestSamplingRules], device: torch.device) -> Tensor | None:
    """Returns [R, L] int64, in which rows without listed ids start with -1."""
    longest = max((len(each.logprob_token_ids) for each in rules if each.logprob_token_ids is not None), default=0)
    if not longest:
        return None
    table = np.zeros((len(rules), longest), dtype=np.int64)
    for row, each in zip(table, rules, strict=True):
        if each.logprob_token_ids is None:
            row[0] = -1
        else:
            row[: len(each.logprob_token_ids)] = each.logprob_token_ids
    return upload_arrays([table], device)[0]


class SamplingRow(NamedTuple):
    """A NamedTuple, because a frozen dataclass takes three times as long, and each step makes hundreds."""

    rules: RequestSamplingRules
    seed: int
    position: int
    num_prompt_tokens: int
    token_table: Tensor
    """[slots, max tokens] int32, on the logits' device."""
    slot: int

    @property
    def token_ids(self) -> Tensor:
        """[position] int32: the tokens before the sampled one."""
        return self.token_table[self.slot, : self.position]

    @property
    def num_output_tokens(self) -> int:
        return self.position - self.num_prompt_tokens


NO_TOKEN_LEFT = -2
IndexedRow = tuple[int, SamplingRow]


class LogitsProcessor(Protocol):
    """Changes logits, which are [R, vocab] float32, in place."""

    def add_biases(self, logits: Tensor, rows: Tensor, token_ids: Tensor, values: Tensor) -> None:
        """No pair (row, token id) occurs twice."""

    def ban_words(self, logits: Tensor, words: list[tuple[int, SamplingRow, list[tuple[int, ...]]]]) -> None:
        """`words`: row index, row, and words."""

    def apply_penalties(self, logits: Tensor, rows: list[IndexedRow]) -> None:
        """All `rows` have penalties."""

    def apply_bitmask(self, logits: Tensor, mask: GrammarBitmask, unmodified: Tensor | None) -> None:
        """If a request's bans (min_tokens, allowed_token_ids, bad words) leave no token that the grammar allows, the
        row uses its `unmodified` logits [R, vocab], which are None if nothing is banned.
        """


def process_logits_and_find_exhausted(
    logits: Tensor, rows: list[SamplingRow], mask: GrammarBitmask | None, processor: LogitsProcessor
) -> Tensor | None:
    """Change logits [R, vocab] float32 in place. Return [R] bool, True for rows without a token left, or None if every
    row has tokens.
    """
    filtered_rows = [(index, row) for index, row in enumerate(rows) if row.rules.has_rare_filters]
    sigmas = {
        index: standard_deviation(logits[index]) for index, row in filtered_rows if row.rules.params.top_n_sigma > 0
    }
    constrained_rows = [(index, row) for index, row in enumerate(rows) if not row.rules.keeps_logits_unchanged]
    unmodified = logits.clone() if constrained_rows and mask is not None else None
    _apply_rules(logits, constrained_rows, processor)
    if mask is not None:
        processor.apply_bitmask(logits, mask, unmodified)
    for index, row in filtered_rows:
        drop_filtered_tokens(logits[index], row.rules.params, sigmas.get(index), xtc_draw(row.seed, row.position))
    if mask is None and not any(row.rules.can_ban_all_tokens for _, row in constrained_rows):
        return None
    return logits.amax(-1) == -torch.inf


def _apply_rules(logits: Tensor, rows: list[IndexedRow], processor: LogitsProcessor) -> None:
    for index, row in rows:
        if row.rules.allowed_token_ids is not None:
            (ids,) = upload_arrays([row.rules.allowed_token_ids], logits.device)
            values = logits[index, ids]
            logits[index].fill_(-torch.inf)
            logits[index].index_copy_(0, ids, values)
    bias_entries = [(index, token, value) for index, row in rows for token, value in _row_biases(row).items()]
    if bias_entries:
        places = np.array([(index, token) for index, token, _ in bias_entries], dtype=np.int64)
        amounts = np.array([value for _, _, value in bias_entries], dtype=np.float32)
        processor.add_biases(logits, *upload_arrays([places[:, 0], places[:, 1], amounts], logits.device))
    bad_word_rows = [(index, row, _bad_words_within_output_length(row)) for index, row in rows if row.rules.bad_words]
    if any(words for _, _, words in bad_word_rows):
        processor.ban_words(logits, bad_word_rows)
    penalized = [(index, row) for index, row in rows if row.rules.penalties is not None]
    if penalized:
        processor.apply_penalties(logits, penalized)
    for index, row in rows:
        if row.rules.dry is not None:
            penalize_repetitions(logits[index], row.token_ids, row.rules.dry)
    for index, row in rows:
        if (budget := row.rules.params.thinking) is not None:
            _force_end_of_thinking(logits[index], row, budget)


def _row_biases(row: SamplingRow) -> dict[int, float]:
    return (
        row.rules.biases_before_min_tokens if row.num_output_tokens < row.rules.params.min_tokens else row.rules.biases
    )


def _bad_words_within_output_length(row: SamplingRow) -> list[tuple[int, ...]]:
    """Bad words may not begin in the prompt, as in vLLM."""
    return [word for word in row.rules.bad_words if len(word) - 1 <= row.num_output_tokens]


def _force_end_of_thinking(logits: Tensor, row: SamplingRow, budget: ThinkingBudget) -> None:
    answer = row.token_ids[row.num_prompt_tokens :]
    if len(answer) - (budget.begin_id is not None) < budget.tokens:
        return
    must_end = ~(answer == budget.end_id).any()
    if budget.begin_id is not None:  # counts from the begin token, inclusive
        must_end &= (answer == budget.begin_id).cumsum(0).bool().sum() > budget.tokens
    end = torch.full_like(logits, -torch.inf)
    end[budget.end_id].fill_(0.0)  # assigning one element would copy from the host and wait
    torch.where(must_end, end, logits, out=logits)
