"""A device without a model, for tests of the scheduler. It runs batches in order and asserts that each computed token
finds the KV of its predecessors in its request's blocks.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

from quire.engine.common.request_params import PoolingParams
from quire.engine.common.scheduler_output import ModelRunnerOutput, NewRequestData, SchedulerOutput
from quire.engine.common.types import TokenLogprob
from quire.engine.core.drafter import Draft, Drafter, RequestsToDraft
from quire.engine.core.request import Request

BLOCK = 4
NUM_BLOCKS = 12


def next_token(tokens: list[int]) -> int:
    """The fake model's next token, a function of the tokens so far alone."""
    return zlib.crc32(repr(tokens).encode()) % 16


def fake_vector(tokens: list[int]) -> bytes:
    return repr(tokens).encode()


@dataclass
class FakeDrafter(Drafter):
    """Proposes some tokens that will be accepted, then some that will not; the tokens decide how many. Proposes more
    than is useful.
    """

    right: int
    wrong: int

    def propose(self, asked: RequestsToDraft, tokens: int) -> list[Draft]:
        return [Draft(self._propose(seq)) for seq, _ in asked]

    def _propose(self, seq: Request) -> list[int]:
        assert not seq.num_tokens_in_flight, "a draft after a token that is not known"
        tokens, chance = list(seq.token_ids), zlib.crc32(repr(seq.token_ids[::-1]).encode())
        for _ in range(chance % (self.right + 1)):
            tokens.append(next_token(tokens))
        for _ in range(chance // 64 % (self.wrong + 1)):
            tokens.append((next_token(tokens) + 1) % 16)
        return tokens[len(seq.token_ids) :]


DRAFTERS = {"none": None, "right": FakeDrafter(6, 0), "wrong": FakeDrafter(0, 4), "mixed": FakeDrafter(3, 3)}


class FakeDevice:
    """Slots with token ids and block tables, blocks with the tokens whose KV they hold."""

    def __init__(self, block: int = BLOCK, windows: tuple[int | None, ...] = (None,)) -> None:
        """`windows`: one per KV cache group; each group has its own blocks."""
        self.block = block
        self.windows = windows
        self.pages: dict[int, list[tuple[int, ...] | None]] = {
            b: [None] * block for b in range(NUM_BLOCKS * len(windows))
        }
        self.tokens: dict[int, list[int]] = {}
        self.tables: dict[int, list[int]] = {}
        self.owners: dict[int, NewRequestData] = {}

    def page(self, table: list[int], position: int, group: int) -> list[tuple[int, ...] | None]:
        return self.pages[table[position // self.block * len(self.windows) + group]]

    def execute(self, batch: SchedulerOutput) -> ModelRunnerOutput:
        for admission in batch.new_requests:
            self.tokens[admission.slot] = list(admission.token_ids)
            self.tables[admission.slot] = []
            self.owners[admission.slot] = admission
        for copy in batch.block_copies:
            assert 0 < copy.num_tokens < self.block
            assert None not in self.pages[copy.source][: copy.num_tokens], "a copy of what is not there yet"
            self.pages[copy.target][: copy.num_tokens] = self.pages[copy.source][: copy.num_tokens]
        assert len({row.slot for row in batch.scheduled_requests}) == len(batch.scheduled_requests), (
            "two rows in one slot"
        )
        for row in batch.scheduled_requests:
            assert row.num_tokens > 0
            table, tokens = self.tables[row.slot], self.tokens[row.slot]
            table += row.new_block_ids
            if row.draft_token_ids:
                assert row.should_sample
                assert row.start + row.num_tokens == len(tokens) + len(row.draft_token_ids), (
                    "drafts after a token not computed"
                )
                tokens += row.draft_token_ids
            for position in range(row.start, row.start + row.num_tokens):
                for group in range(len(self.windows)):
                    self.page(table, position, group)[position % self.block] = (group, *tokens[: position + 1])
        picked, prompt_logprobs, vectors = {}, {}, {}
        for row in batch.scheduled_requests:
            table, tokens = self.tables[row.slot], self.tokens[row.slot]
            end = row.start + row.num_tokens
            for group, window in enumerate(self.windows):
                first = 0 if window is None else max(row.start - window + 1, 0)
                for position in range(first, end):  # after the step exactly the KV of all visible tokens is in place
                    there = self.page(table, position, group)[position % self.block]
                    assert there == (group, *tokens[: position + 1]), f"{row.request_id}: wrong KV at {position}"
            prompt_logprobs[row.request_id] = [
                TokenLogprob(token, 0.0, 1, [])
                for token in tokens[row.start + 1 : min(end + 1, self.owners[row.slot].num_prompt_tokens)]
            ]
            if row.should_sample:
                assert end == len(tokens), "sampling before the last token"
                known = len(tokens) - len(row.draft_token_ids)
                picks = [next_token(tokens[:length]) for length in range(known, end + 1)]
                picked[row.request_id] = accepted(row.draft_token_ids, picks)
                tokens[known:] = picked[row.request_id]
            if isinstance(self.owners[row.slot].params, PoolingParams):
                assert not row.should_sample
                if end == len(tokens):
                    vectors[row.request_id] = fake_vector(tokens)
        return ModelRunnerOutput(picked, {}, prompt_logprobs, {}, vectors)


def accepted(drafts: list[int], picks: list[int]) -> list[int]:
    """The sampled tokens up to the first that differs from its draft."""
    right = next((at for at, draft in enumerate(drafts) if picks[at] != draft), len(drafts))
    return picks[: right + 1]
