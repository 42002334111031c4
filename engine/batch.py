"""One step: what the scheduler decides, and what comes back. Structs, so that a process per device can be sent them."""

from __future__ import annotations

import msgspec

from quire.engine.types import PoolingParams, SamplingParams, TokenLogprob


class Admission(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A slot of the device gets a new owner: its tokens so far, and how to pick others or to make a vector of them."""

    slot: int
    token_ids: list[int]
    num_prompt: int
    params: SamplingParams | PoolingParams
    seed: int


class Row(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One sequence's share of a step: tokens start to start + count of its slot, whose token ids the device holds.

    `new_blocks` extend the slot's block table (an admitted slot starts with an empty one). A row that samples picks a
    token after its last one; the device writes it to the slot, so a later row may compute it before the host knows it.

    `draft_ids` are guesses of the tokens that follow the known ones: they are the last of the row's `count` tokens, and
    the device writes them to the slot first. It then picks a token before each of them too. The row accepts the drafts
    up to the first that differs from its pick, and that pick; what was computed for the others is overwritten later.
    """

    request_id: str
    slot: int
    start: int
    count: int
    new_blocks: list[int]
    sample: bool
    """Tokens are wanted after the row's last one. Never for PoolingParams: of these the device makes the vector in the
    row that ends with the prompt."""
    draft_ids: list[int] = []


class PageCopy(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The keys and values of the first `tokens` tokens of page `source` go to page `target` too, in every layer."""

    source: int
    target: int
    tokens: int


class Batch(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What one step computes. The scheduler decides it, an executor computes it; it never reaches the API process."""

    rows: list[Row]
    admissions: list[Admission] = []
    copies: list[PageCopy] = []
    """Made in this order, before any row is computed."""
    preempted: list[str] = []
    """Requests that had to give up their pages for it."""

    @property
    def admitted_ids(self) -> list[str]:
        """The requests that are in a step for the first time, or again after a preemption."""
        slots = {admission.slot for admission in self.admissions}
        return [row.request_id for row in self.rows if row.slot in slots] if slots else []


class StepOutput(msgspec.Struct, frozen=True, array_like=True):
    """What a step computed, by request id."""

    token_ids: dict[str, list[int]]
    """For each row that samples the tokens it accepts: one, and one more for each accepted draft."""
    logprobs: dict[str, list[TokenLogprob]] = {}
    """One per accepted token, where the request asks for them."""
    prompt_logprobs: dict[str, list[TokenLogprob]] = {}
    """For the prompt tokens of this step's chunk: the log probability of the token after each."""
    errors: dict[str, str] = {}
    """Why a request cannot be served: it ends."""
    vectors: dict[str, list[float]] = {}
    """Of the requests whose prompt is computed and that asked for one: they end."""
