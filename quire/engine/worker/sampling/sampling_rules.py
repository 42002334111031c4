"""What a request's SamplingParams mean for its picks, as lists of token ids and numbers.

`rules_of` makes them once per request, and `change_logits` applies them in their order, for the host's sampler
(engine/worker/sampling/sampler.py) and the device's (device_sampler.py beside it); each brings its own LogitChanges.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from quire.engine.types import SamplingParams, ThinkingBudget
from quire.engine.worker.sampling.grammar import GrammarMask
from quire.kernels.gpu.transfer import upload


@dataclass(frozen=True, slots=True)
class Rules:
    """One request's. The fields from `allowed` to `penalties`, and then params.thinking, change logits and are applied
    in this order."""

    params: SamplingParams
    logprobs: int | None
    """How many tokens to report beside each picked one: the most likely ones, or those of `listed`; None: not even the
    picked one's log probability."""
    listed: np.ndarray | None
    """[logprobs] int64: the tokens to report instead of the most likely ones."""
    plain: bool
    """Nothing changes the logits."""
    largest: bool
    """`only_largest` of the request's parameters."""
    allowed: np.ndarray | None
    """[n] int64: all that may be picked."""
    added: dict[int, float]
    """What is added to the logits of some tokens: the bias, -inf for bad words of one token."""
    added_early: dict[int, float]
    """Used instead of `added` while the answer is shorter than params.min_tokens: the same, and -inf for what ends it.
    """
    bad_words: tuple[tuple[int, ...], ...]
    """Of two tokens or more; the last one may not follow the others."""
    penalties: tuple[float, float, float] | None
    """Repetition, presence, frequency."""

    @property
    def bans(self) -> bool:
        """True if it may take every token away."""
        added = self.added_early if self.params.min_tokens else self.added
        return self.allowed is not None or bool(self.bad_words) or -np.inf in added.values()


def rules_of(params: SamplingParams, eos_token_ids: tuple[int, ...]) -> Rules:
    """`eos_token_ids` are the model's end-of-sequence tokens."""
    added = (params.logit_bias or {}) | {word[0]: -np.inf for word in params.bad_words_ids if len(word) == 1}
    ends = [*params.stop_token_ids, *(() if params.ignore_eos and params.grammar is None else eos_token_ids)]
    bad_words = tuple(word for word in params.bad_words_ids if len(word) > 1)
    penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
    allowed = params.allowed_token_ids
    listed = tuple(dict.fromkeys(params.logprob_token_ids or ()))
    changing = (allowed, added, params.min_tokens and ends, bad_words, penalties != (1.0, 0.0, 0.0), params.thinking)
    return Rules(
        params=params,
        logprobs=len(listed) or params.logprobs,
        listed=np.array(listed, dtype=np.int64) if listed else None,
        plain=not any(changing),
        largest=only_largest(params),
        allowed=None if allowed is None else np.array(allowed, dtype=np.int64),
        added=added,
        added_early=added | dict.fromkeys(ends, -np.inf),
        bad_words=bad_words,
        penalties=penalties if penalties != (1.0, 0.0, 0.0) else None,
    )


def only_largest(params: SamplingParams) -> bool:
    """Whether each pick is the first of the model's own largest logits, and nothing is told beside it."""
    asked = (params.grammar, params.logprobs, params.logprob_token_ids or None)
    changed = (params.thinking, params.allowed_token_ids, params.logit_bias or None, params.bad_words_ids or None)
    penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
    plain = params.min_tokens == 0 and penalties == (1.0, 0.0, 0.0)
    return params.greedy and plain and all(each is None for each in (*asked, *changed))


def listed_tokens(rules: Sequence[Rules], device: torch.device) -> Tensor | None:
    """The tokens that each row lists [R, L] int64, as logprob_tensors takes them; None where no row lists any."""
    longest = max((len(each.listed) for each in rules if each.listed is not None), default=0)
    if not longest:
        return None
    table = np.zeros((len(rules), longest), dtype=np.int64)
    for row, each in zip(table, rules, strict=True):
        if each.listed is None:
            row[0] = -1
        else:
            row[: len(each.listed)] = each.listed
    return upload([table], device)[0]


class SamplingRow(NamedTuple):
    """One pick to make. A tuple, because each step makes hundreds, and a frozen dataclass takes three times as long."""

    rules: Rules
    seed: int
    position: int
    """Of the token to pick, in its sequence."""
    num_prompt: int
    table: Tensor
    """[slots, most tokens] int32: every slot's tokens, on the logits' device."""
    slot: int

    @property
    def token_ids(self) -> Tensor:
        """[position] int32, the tokens so far."""
        return self.table[self.slot, : self.position]

    @property
    def num_output(self) -> int:
        return self.position - self.num_prompt


NOTHING_LEFT = -2
"""In a picked token's place: the request's constraints left no token."""
Numbered = tuple[int, SamplingRow]
"""A row, and its index in the logits."""


class LogitChanges(Protocol):
    """Ways to change logits [R, vocab] float32 in place; on a GPU none waits for it."""

    def add(self, logits: Tensor, rows: Tensor, token_ids: Tensor, values: Tensor) -> None:
        """logits[rows, token_ids] += values; every place at most once."""

    def ban(self, logits: Tensor, words: list[tuple[int, SamplingRow, list[tuple[int, ...]]]]) -> None:
        """-inf to the last token of each word whose other tokens are the row's last ones."""

    def penalize(self, logits: Tensor, rows: list[Numbered]) -> None:
        """Apply the penalties of these rows, which all have some."""

    def constrain(self, logits: Tensor, mask: GrammarMask, unmodified: Tensor | None) -> None:
        """-inf to what the mask does not allow in its rows.

        Where the request's own bans (min_tokens, allowed_token_ids, bad words) leave nothing that the grammar allows,
        the grammar wins: such a row takes its `unmodified` logits [R, vocab], which are None where nothing is banned.
        """


def change_logits(
    logits: Tensor, rows: list[SamplingRow], mask: GrammarMask | None, changes: LogitChanges
) -> Tensor | None:
    """Apply the rules of every row to its logits [R, vocab] float32, in place, then the grammars' mask. Returns which
    rows [R] have no token left; None: all have some."""
    ruled = [(index, row) for index, row in enumerate(rows) if not row.rules.plain]
    unmodified = logits.clone() if ruled and mask is not None else None
    _apply_rules(logits, ruled, changes)
    if mask is not None:
        changes.constrain(logits, mask, unmodified)
    if mask is None and not any(row.rules.bans for _, row in ruled):
        return None
    return logits.amax(-1) == -torch.inf


def _apply_rules(logits: Tensor, rows: list[Numbered], changes: LogitChanges) -> None:
    for index, row in rows:
        if row.rules.allowed is not None:
            (ids,) = upload([row.rules.allowed], logits.device)
            values = logits[index, ids]
            logits[index].fill_(-torch.inf)
            logits[index].index_copy_(0, ids, values)
    added = [(index, token, value) for index, row in rows for token, value in _additions(row).items()]
    if added:
        places = np.array([(index, token) for index, token, _ in added], dtype=np.int64)
        amounts = np.array([value for _, _, value in added], dtype=np.float32)
        changes.add(logits, *upload([places[:, 0], places[:, 1], amounts], logits.device))
    begun = [(index, row, _begun_words(row)) for index, row in rows if row.rules.bad_words]
    if any(words for _, _, words in begun):
        changes.ban(logits, begun)
    penalized = [(index, row) for index, row in rows if row.rules.penalties is not None]
    if penalized:
        changes.penalize(logits, penalized)
    for index, row in rows:
        if (budget := row.rules.params.thinking) is not None:
            _end_thinking(logits[index], row, budget)


def _additions(row: SamplingRow) -> dict[int, float]:
    return row.rules.added_early if row.num_output < row.rules.params.min_tokens else row.rules.added


def _begun_words(row: SamplingRow) -> list[tuple[int, ...]]:
    """Words that the output is long enough to have begun: tokens of the prompt do not count, as in vLLM."""
    return [word for word in row.rules.bad_words if len(word) - 1 <= row.num_output]


def _end_thinking(logits: Tensor, row: SamplingRow, budget: ThinkingBudget) -> None:
    """Leave only the token that ends the thinking, where that is under way and has used up its budget."""
    answer = row.token_ids[row.num_prompt :]
    if len(answer) - (budget.begin_id is not None) < budget.tokens:
        return
    due = ~(answer == budget.end_id).any()
    if budget.begin_id is not None:  # the beginning counts itself: tokens from it on
        due &= (answer == budget.begin_id).cumsum(0).bool().sum() > budget.tokens
    end = torch.full_like(logits, -torch.inf)
    end[budget.end_id].fill_(0.0)  # an assignment to one element copies from the host, and waits
    torch.where(due, end, logits, out=logits)
