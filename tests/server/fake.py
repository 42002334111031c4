"""An engine without a model: one token per step, from a script or from a hash of the tokens before."""

from __future__ import annotations

import asyncio
import hashlib
import pickle
from collections.abc import Callable, Sequence
from itertools import count
from time import monotonic

import msgspec

from quire.engine.client.engine_client import EngineClient
from quire.engine.client.engine_core_client import ExclusiveClient
from quire.engine.common.types import (
    EngineCoreOutput,
    EngineCoreRequest,
    EngineInfo,
    ErrorCause,
    FinishReason,
    TokenLogprob,
)
from quire.engine.core.stats import BlockTableView, EngineStats, EngineView, MemoryView, RequestView, StepRecord

MODEL = "fake"
Script = Callable[[EngineCoreRequest, int], int]


def hashed(ids: Sequence[int]) -> Script:
    """Picks from these ids by prompt, seed and position, as a sampler does."""

    def pick(request: EngineCoreRequest, position: int) -> int:
        key = repr((request.prompt_ids, request.seed, position)).encode()
        return ids[int.from_bytes(hashlib.blake2b(key, digest_size=4).digest(), "big") % len(ids)]

    return pick


def scripted(ids: Sequence[int], eos: int) -> Script:
    """Picks these ids, then end of sequence."""
    return lambda request, position: ids[position] if position < len(ids) else eos


class FakeEngine(ExclusiveClient):
    """Supports max_tokens, stop ids, eos, abort and logprobs.

    `fail_at` fails requests at that position, for `cause`. `burst` steps arrive at once, as for a slow reader. The
    first step sets `sent`.
    """

    owner: EngineClient

    def __init__(
        self,
        pick: Script,
        *,
        eos: Sequence[int] = (),
        max_model_len: int = 512,
        step_seconds: float = 0.0,
        fail_at: int | None = None,
        cause: ErrorCause = "engine",
        burst: int = 1,
    ) -> None:
        super().__init__()
        self.pick = pick
        self.eos = frozenset(eos)
        self.max_model_len = max_model_len
        self.step_seconds = step_seconds
        self.fail_at = fail_at
        self.cause: ErrorCause = cause
        self.burst = burst
        self.sent = asyncio.Event()
        self.running: dict[str, EngineCoreRequest] = {}
        self.waiting: list[EngineCoreRequest] = []
        """Requests that came while the engine was asleep."""
        self.positions: dict[str, int] = {}
        self.seen: list[EngineCoreRequest] = []
        self.aborted: list[str] = []
        self.generated = 0
        self.looks = 0
        self.silent = False
        """True to answer no request for a snapshot, as during a long step."""
        self._work = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> EngineInfo:
        self._task = asyncio.create_task(self._run())
        return EngineInfo(
            model=MODEL,
            dtype="float32",
            device="cpu",
            backend="none",
            max_model_len=self.max_model_len,
            num_blocks=100,
            block_size=16,
            kv_bytes=0,
            weight_bytes=0,
            load_seconds=0.0,
            arithmetic="none",
            context_pages=-(-self.max_model_len // 16),
            deterministic=True,
        )

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
        self.die("the engine was stopped")

    def reset_prefix_cache(self) -> None:
        """There is no cache."""

    async def rest(self, level: int) -> None:
        self.asleep = True

    async def check(self, weights: str) -> None:
        """Accepts any weights."""

    async def load(self, weights: str | None, version: str) -> None:
        self.asleep, self.weights_version = False, version
        waiting, self.waiting = self.waiting, []
        self.send([request for request in waiting if request.id not in self.aborted])

    def send(self, requests: Sequence[EngineCoreRequest]) -> None:
        if self.asleep:
            self.waiting += requests
            return
        for request in requests:
            self.seen.append(request)
            self.running[request.id] = request
            self.positions[request.id] = len(request.emitted_ids)
        self._work.set()

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)
        self.running.pop(request_id, None)

    async def call(self, content: bytes) -> list[bytes]:
        """Return the call itself as the only rank's result."""
        _, call = pickle.loads(content)
        method, args, kwargs = pickle.loads(call)
        return [pickle.dumps(([method, *args, kwargs], None))]

    async def snapshot(self) -> EngineView:
        self.looks += 1
        if self.silent:
            await asyncio.Event().wait()
        memory = [MemoryView(1000, 300, 200, 100, 50, 150, 200)]
        return EngineView(self.stats, [self._seen(each) for each in self.running.values()], b"", 0, 0.0, memory)

    async def get_block_table(self, request_id: str) -> BlockTableView | None:
        if self.silent:
            await asyncio.Event().wait()
        return BlockTableView(16, 1, 20, 2, [7, 3], [2, 1], [True, False]) if request_id in self.running else None

    @property
    def responsive(self) -> bool:
        return True

    @property
    def healthy(self) -> bool:
        return True

    def _seen(self, request: EngineCoreRequest) -> RequestView:
        return RequestView(
            id=request.id,
            phase="decode",
            prompt_tokens=len(request.prompt_ids),
            cached_tokens=0,
            computed_tokens=0,
            output_tokens=self.positions[request.id],
            limit=request.params.max_tokens or 0,
            blocks=1,
            shared_blocks=0,
            priority=request.priority,
        )

    async def _run(self) -> None:
        for step in count(1):
            await self._work.wait()
            if not self.running:
                self._work.clear()
                continue
            began = monotonic()
            outputs = [self._step(request) for request in list(self.running.values())]
            for output in outputs:
                if output.finish_reason is not None:
                    self.running.pop(output.id, None)
            self.generated += sum(len(output.new_ids) for output in outputs)
            stats = EngineStats(running=len(self.running), used_blocks=25, total_blocks=100)
            self.stats = msgspec.structs.replace(stats, generation_tokens=self.generated)
            times, new = (began, began, monotonic(), monotonic()), sum(len(output.new_ids) for output in outputs)
            self.owner.deliver(
                outputs, StepRecord(step, *times, len(outputs), len(outputs), (), (), num_generated_tokens=new)
            )
            self.sent.set()
            if step % self.burst == 0:
                await asyncio.sleep(self.step_seconds)

    def _step(self, request: EngineCoreRequest) -> EngineCoreOutput:
        position = self.positions[request.id]
        self.positions[request.id] += 1
        if position == self.fail_at:
            why = "the engine tripped"
            return EngineCoreOutput(id=request.id, new_ids=[], finish_reason="error", error=why, cause=self.cause)
        params = request.params
        token = self.pick(request, position)
        reason: FinishReason | None = None
        stop_reason = None
        longest = self.max_model_len - len(request.prompt_ids)
        longest = longest if params.max_tokens is None else min(params.max_tokens, longest)
        if position + 1 > params.min_tokens and token in self.eos and not params.ignore_eos:
            reason = "stop"
        elif position + 1 > params.min_tokens and token in params.stop_token_ids:
            reason, stop_reason = "stop", token
        elif position + 1 == longest:
            reason = "length"
        return EngineCoreOutput(
            id=request.id,
            new_ids=[token],
            logprobs=None if params.logprobs is None else [logprob(token, params.logprobs, params.logprob_token_ids)],
            prompt_logprobs=self._prompt_logprobs(request) if position == 0 else None,
            finish_reason=reason,
            stop_reason=stop_reason,
            cached_tokens=len(request.prompt_ids) // 2,
        )

    def _prompt_logprobs(self, request: EngineCoreRequest) -> list[TokenLogprob | None] | None:
        top = request.params.prompt_logprobs
        if top is None:
            return None
        return [None, *(logprob(token, top) for token in request.prompt_ids[1:])]


def logprob(token: int, top: int, listed: Sequence[int] | None = None) -> TokenLogprob:
    """The picked token first, then its neighbors or the listed tokens."""
    others = [token + i for i in range(top)] if listed is None else dict.fromkeys([token, *listed])
    return TokenLogprob(token, -0.5, 1, [(other, -0.5 - i) for i, other in enumerate(others)])
