"""A continuous batcher in 100 lines: requests join and leave between steps, and share one pool of KV blocks.

Run it: python examples/inside/tiny.py. docs/learn.md starts here and shows what Quire adds. The model is a toy of one
attention layer with random weights. It reads keys through the block table, so a wrong table gives wrong tokens.
"""

from collections import deque
from dataclasses import dataclass, field

import numpy as np

BLOCK_SIZE, NUM_BLOCKS, TOKEN_BUDGET, VOCAB, DIM = 4, 8, 8, 50, 16


@dataclass(eq=False)
class Request:
    id: str
    token_ids: list[int]  # the prompt, then the tokens that were sampled
    max_total_tokens: int
    num_computed_tokens: int = 0  # their keys and values are in the cache
    block_ids: list[int] = field(default_factory=list)  # the block table

    @property
    def num_pending_tokens(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens


class ToyModel:
    def __init__(self) -> None:
        random = np.random.default_rng(0)
        self.embedding, self.position = random.standard_normal((2, VOCAB, DIM))
        self.query, self.key, self.value = random.standard_normal((3, DIM, DIM))
        self.k_cache, self.v_cache = np.full((2, NUM_BLOCKS, BLOCK_SIZE, DIM), np.nan)

    def compute_chunk(self, request: Request, count: int) -> int:
        """Compute the next `count` tokens, and return the most likely token after them."""
        positions = request.num_computed_tokens + np.arange(count)
        end, table = positions[-1] + 1, np.array(request.block_ids)
        x = self.embedding[request.token_ids[end - count : end]] + self.position[positions]
        slots = table[positions // BLOCK_SIZE], positions % BLOCK_SIZE  # the slot mapping
        self.k_cache[slots], self.v_cache[slots] = x @ self.key, x @ self.value
        keys, values = (cache[table].reshape(-1, DIM)[:end] for cache in (self.k_cache, self.v_cache))
        scores = keys @ (x[-1] @ self.query) / DIM
        return int(np.argmax(self.embedding @ (np.exp(scores - scores.max()) @ values)))


class Batcher:
    def __init__(self, requests: list[Request]) -> None:
        self.model, self.waiting, self.free_blocks = ToyModel(), deque(requests), deque(range(NUM_BLOCKS))
        self.running: list[Request] = []

    def step(self) -> list[tuple[str, int, int]]:
        """Every request catches its computed count up to its token count, decodes first, within the token budget."""
        budget, counts = TOKEN_BUDGET, dict[Request, int]()
        for request in sorted(self.running, key=lambda each: each.num_pending_tokens > 1):
            count = min(request.num_pending_tokens, budget)
            while request in self.running and not self.allocate(request, request.num_computed_tokens + count):
                counts.pop(self.running[-1], None)
                self.preempt(self.running[-1])  # the last that came gives way
            if request in self.running and count:
                counts[request], budget = count, budget - count
        while self.waiting and budget and self.allocate(self.waiting[0], len(self.waiting[0].token_ids)):
            self.running.append(request := self.waiting.popleft())
            counts[request] = min(request.num_pending_tokens, budget)
            budget -= counts[request]
        chunks = [(request.id, request.num_computed_tokens, count) for request, count in counts.items()]
        for request, count in counts.items():
            token = self.model.compute_chunk(request, count)
            request.num_computed_tokens += count
            if request.num_pending_tokens == 0:
                request.token_ids.append(token)
            if len(request.token_ids) == request.max_total_tokens:
                self.free(request)
        return chunks

    def allocate(self, request: Request, num_tokens: int) -> bool:
        missing = -(-num_tokens // BLOCK_SIZE) - len(request.block_ids)
        if fits := missing <= len(self.free_blocks):
            request.block_ids += [self.free_blocks.popleft() for _ in range(missing)]
        return fits

    def free(self, request: Request) -> None:
        self.running.remove(request)
        self.free_blocks.extend(request.block_ids)
        request.block_ids = []

    def preempt(self, request: Request) -> None:
        """Give its blocks back, and let it wait with nothing computed."""
        self.free(request)
        request.num_computed_tokens = 0
        self.waiting.appendleft(request)


if __name__ == "__main__":
    prompts = {"a": [1, 2, 3], "b": list(range(10, 21)), "c": [5, 5]}
    for names in ("abc", "a", "b", "c"):  # together, then each alone: the same tokens
        batcher = Batcher(requests := [Request(name, list(prompts[name]), 18) for name in names])
        while batcher.running or batcher.waiting:
            print(*batcher.step())  # (request, first token, tokens) of each chunk
        print(*(f"{request.id}: {request.token_ids}" for request in requests), sep="\n", end="\n\n")
