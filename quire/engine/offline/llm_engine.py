"""vLLM's LLMEngine: requests are given one by one, and `step` tells what is new of them."""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, Literal

from quire.engine.checkpoint.kv_plan import GIB
from quire.engine.errors import InvalidRequest
from quire.engine.lora.offline import LoRARequest, adapters_for
from quire.engine.offline.generate import generate
from quire.engine.offline.model import Encoded, Prompt, check_id
from quire.engine.offline.options import ModelWithOptions, engine_config
from quire.engine.offline.outputs import RequestOutput
from quire.engine.offline.params import RequestOutputKind, SamplingParams
from quire.engine.offline.running import RunningEngine
from quire.engine.offline.vectors import Pooled, check_params, pool_all
from quire.engine.types import Adapter, PoolingParams


@dataclass(frozen=True, slots=True)
class ModelConfig:
    model: str
    tokenizer: str
    dtype: str
    max_model_len: int
    vocab_size: int

    def get_vocab_size(self) -> int:
        return self.vocab_size


@dataclass(frozen=True, slots=True)
class CacheConfig:
    block_size: int
    """Tokens of a page."""
    num_gpu_blocks: int
    """Pages, on whichever device."""
    enable_prefix_caching: bool
    num_cpu_blocks: int
    """Pages of earlier prompts that the host's memory has room for (kv_offload_memory)."""
    gpu_memory_utilization: float
    cache_dtype: str


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    max_num_seqs: int
    max_num_batched_tokens: int
    """Of one step."""
    max_model_len: int
    long_prefill_token_threshold: int
    """Tokens of one prompt in a step; 0: as many as fit."""
    policy: Literal["priority", "fcfs"]
    enable_chunked_prefill: bool = True
    """Always: long prompts are computed in parts."""


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    tensor_parallel_size: int
    pipeline_parallel_size: int
    data_parallel_size: int
    decode_context_parallel_size: int
    enable_expert_parallel: bool

    @property
    def world_size(self) -> int:
        """Processes that compute one replica of the model together."""
        return self.tensor_parallel_size * self.pipeline_parallel_size


Output = RequestOutput | Pooled


@dataclass(frozen=True, slots=True, eq=False)
class _Request:
    """One of those that may have had the same id, one after the other."""

    id: str
    deltas: bool


_News = queue.SimpleQueue[tuple[_Request, Output | Exception]]
"""What is new of a request, or why it failed."""


class LLMEngine:
    """`add_request`, then `step` as long as `has_unfinished_requests`. The engine computes meanwhile, on a thread of
    its own: a step gives what has come since the one before it, which may be several tokens of a request.

    For one thread. Of requests of an LLM's own methods it tells nothing.
    """

    def __init__(self, running: RunningEngine) -> None:
        config, info, model = running.config, running.info, running.model
        self.model_config = ModelConfig(
            config.model, config.tokenizer or config.model, info.dtype, info.max_model_len, model.vocab_size
        )
        page_bytes = info.kv_bytes // max(info.num_blocks, 1)
        self.cache_config = CacheConfig(
            info.block_size,
            info.num_blocks,
            config.enable_prefix_caching,
            num_cpu_blocks=int((config.kv_offload_memory or 0) * GIB) // max(page_bytes, 1) if page_bytes else 0,
            gpu_memory_utilization=config.gpu_memory_utilization,
            cache_dtype=info.kv_cache_dtype,
        )
        self.scheduler_config = SchedulerConfig(
            config.max_num_seqs,
            info.step_tokens,
            info.max_model_len,
            config.long_prefill_token_threshold or 0,
            config.scheduling_policy,
        )
        self.parallel_config = ParallelConfig(
            config.tensor_parallel_size,
            config.pipeline_parallel_size,
            config.data_parallel_size,
            config.decode_context_parallel_size,
            config.enable_expert_parallel,
        )
        self._running = running
        self._open: dict[str, tuple[_Request, Future[None]]] = {}
        self._news: _News = queue.SimpleQueue()
        """From the engine's thread."""
        self._unread: deque[tuple[_Request, Output | Exception]] = deque()
        """Taken from there by a step, and left to the next one."""
        self._numbers = count()
        """Of requests: one that was aborted may still be ending when another has its id."""

    @classmethod
    def from_engine_args(cls, engine_args: ModelWithOptions) -> LLMEngine:
        """Raises as LLM does."""
        return cls(RunningEngine(engine_config(engine_args.model, engine_args.options)))

    @property
    def vllm_config(self) -> LLMEngine:
        """vLLM keeps its configs in one; here it is this object."""
        return self

    @property
    def tokenizer(self) -> Any:
        return self.get_tokenizer()

    def get_tokenizer(self) -> Any:
        """As `LLM.get_tokenizer`."""
        return self._running.model.tokenizer.for_transformers()

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | PoolingParams,
        arrival_time: float | None = None,
        lora_request: LoRARequest | None = None,
        *,
        priority: int = 0,
    ) -> str:
        """Give the engine a prompt, a text or token ids. `params.output_kind` says what `step` gives of it; lower
        priorities go first; `arrival_time` is not read. Returns the id. Raises InvalidRequest for what is not served.
        """
        self._running.check_awake()
        check_id(request_id, self._open)
        if not isinstance(params, SamplingParams | PoolingParams):
            message = f"params must be SamplingParams or PoolingParams, got {params!r}"
            raise InvalidRequest(message, param="params")
        model, info = self._running.model, self._running.info
        encoded = model.encode(prompt)
        (adapter,) = adapters_for(model.adapters, lora_request, 1)
        own_id = f"{request_id}.{next(self._numbers)}"
        work: AsyncIterator[Output]
        if isinstance(params, SamplingParams):
            task = model.task(own_id, encoded, params, info, adapter=adapter, priority=priority)
            model.check(task.prompt.ids, info)
            work = generate(self._running.client, model.tokenizer, task)
        else:
            encoded = model.cut(encoded, None, info)
            model.check(encoded.ids, info, room=0)
            check_params([params], info, model.pooling)
            work = _pool(self._running, own_id, encoded, params, adapter)
        deltas = isinstance(params, SamplingParams) and params.output_kind is RequestOutputKind.DELTA
        request = _Request(request_id, deltas)
        self._open[request_id] = request, self._running.begin(_tell(self._news, request, work))
        return request_id

    def step(self) -> list[Output]:
        """What is new of the requests, waiting for something of one; nothing where none is open. Of a request whose
        outputs hold all so far there is the latest alone; deltas are all there, in their order.

        Raises EngineError for a request that the engine failed, which is then no longer open.
        """
        found: dict[object, Output] = {}
        while self._open and not found:
            while not self._unread or not self._news.empty():
                self._unread.append(self._news.get())
            while self._unread:
                request, news = self._unread[0]
                if isinstance(news, Exception) and found:
                    break  # the next step raises it
                self._unread.popleft()
                if self._open.get(request.id, (None,))[0] is not request:
                    continue  # it was aborted
                if isinstance(news, Exception):
                    del self._open[request.id]
                    raise news
                if news.finished:
                    del self._open[request.id]
                found[len(found) if request.deltas else request] = news
        return list(found.values())

    def abort_request(self, request_ids: str | Sequence[str]) -> None:
        """End requests, of which `step` gives no more. Nothing where none is open."""
        for request_id in [request_ids] if isinstance(request_ids, str) else request_ids:
            if request_id in self._open:
                _, work = self._open.pop(request_id)
                work.cancel()

    def get_num_unfinished_requests(self) -> int:
        """Those whose end no step has told yet."""
        return len(self._open)

    def has_unfinished_requests(self) -> bool:
        return self.get_num_unfinished_requests() > 0


async def _tell(news: _News, request: _Request, work: AsyncIterator[Output]) -> None:
    try:
        async for output in work:
            news.put((request, replace(output, request_id=request.id)))
    except Exception as error:  # which would be lost in this task
        news.put((request, error))


async def _pool(
    running: RunningEngine, request_id: str, prompt: Encoded, params: PoolingParams, adapter: Adapter | None
) -> AsyncIterator[Pooled]:
    asked = [prompt[:2]], [params], [adapter]
    (found,) = await pool_all(running.client, *asked, lambda: None, running.model.pooling)
    yield replace(found, request_id=request_id)
