from __future__ import annotations

import queue
from collections import deque
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, Literal

from quire.engine.checkpoint.kv_cache_plan import GIB
from quire.engine.common.errors import InvalidRequest
from quire.engine.common.request_params import PoolingParams
from quire.engine.common.types import Adapter
from quire.engine.lora.local_adapters import LoRARequest, resolve_lora_requests
from quire.engine.offline.offline_model import EncodedPrompt, Prompt, check_request_id_unused
from quire.engine.offline.options import EngineArgsLike, make_engine_config
from quire.engine.offline.outputs import RequestOutput
from quire.engine.offline.params import RequestOutputKind, SamplingParams
from quire.engine.offline.pooling_outputs import PoolingRequestOutput, check_pooling_params, pool_prompts
from quire.engine.offline.running_engine import RunningEngine
from quire.engine.offline.task_outputs import stream_outputs


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
    """Tokens per KV block."""
    num_gpu_blocks: int
    """Blocks on any device, despite the name."""
    enable_prefix_caching: bool
    num_cpu_blocks: int
    """Number of KV blocks that fit in --kv-offload-memory."""
    gpu_memory_utilization: float
    cache_dtype: str


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    max_num_seqs: int
    max_num_batched_tokens: int
    """Maximum number of tokens in one step."""
    max_model_len: int
    long_prefill_token_threshold: int
    """Maximum number of tokens of a prompt per step; 0 means no limit."""
    policy: Literal["priority", "fcfs"]
    enable_chunked_prefill: bool = True
    """Always True: long prompts are computed in chunks."""


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    tensor_parallel_size: int
    pipeline_parallel_size: int
    data_parallel_size: int
    decode_context_parallel_size: int
    enable_expert_parallel: bool

    @property
    def world_size(self) -> int:
        """Number of processes of one replica."""
        return self.tensor_parallel_size * self.pipeline_parallel_size


RequestOrPoolingOutput = RequestOutput | PoolingRequestOutput


@dataclass(frozen=True, slots=True, eq=False)
class _OpenRequestHandle:
    """Distinguishes successive requests with the same id."""

    id: str
    wants_deltas: bool


_OutputQueue = queue.SimpleQueue[tuple[_OpenRequestHandle, RequestOrPoolingOutput | Exception]]


class LLMEngine:
    """vLLM's LLMEngine: call `add_request`, then `step` as long as `has_unfinished_requests`. `from_engine_args` raises
    what LLM's constructor does.

    The engine has its own thread, so a step returns everything since the last step, maybe several tokens of a request.
    Use this object from one thread. `step` returns only outputs of requests from `add_request`, not those of
    `LLM.generate` and other methods of an LLM that shares the engine.
    """

    def __init__(self, running_engine: RunningEngine) -> None:
        config = running_engine.config
        info = running_engine.info
        model = running_engine.input_processor
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
        self._running_engine = running_engine
        self._open_requests: dict[str, tuple[_OpenRequestHandle, Future[None]]] = {}
        self._output_queue: _OutputQueue = queue.SimpleQueue()
        """Filled by the engine's thread."""
        self._unread_outputs: deque[tuple[_OpenRequestHandle, RequestOrPoolingOutput | Exception]] = deque()
        self._request_numbers = count()
        """Makes ids unique, because an aborted request may still be ending when another takes its id."""

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgsLike) -> LLMEngine:
        return cls(RunningEngine(make_engine_config(engine_args.model, engine_args.options)))

    @property
    def vllm_config(self) -> LLMEngine:
        """This object, because vLLM has one object with all configs."""
        return self

    @property
    def tokenizer(self) -> Any:
        return self.get_tokenizer()

    def get_tokenizer(self) -> Any:
        return self._running_engine.input_processor.tokenizer.to_transformers()

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
        """Submit a prompt, which is a text or token ids, and return the request's id.

        Args:
            params: `output_kind` decides what `step` returns.
            arrival_time: Ignored.
            priority: Lower goes first.

        Raises:
            InvalidRequest: The request cannot be served, or its id is in use.
        """
        self._running_engine.check_awake()
        check_request_id_unused(request_id, self._open_requests)
        if not isinstance(params, SamplingParams | PoolingParams):
            message = f"params must be SamplingParams or PoolingParams, got {params!r}"
            raise InvalidRequest(message, param="params")
        model, info = self._running_engine.input_processor, self._running_engine.info
        encoded = model.encode_prompt(prompt)
        (adapter,) = resolve_lora_requests(model.adapters, lora_request, 1)
        own_id = f"{request_id}.{next(self._request_numbers)}"
        work: AsyncIterator[RequestOrPoolingOutput]
        if isinstance(params, SamplingParams):
            task = model.make_generation_task(own_id, encoded, params, info, adapter=adapter, priority=priority)
            model.check_prompt(task.prompt.token_ids, info)
            work = stream_outputs(self._running_engine.client, model.tokenizer, task)
        else:
            encoded = model.keep_first_prompt_tokens(encoded, None, info)
            model.check_prompt(encoded.token_ids, info, min_free_tokens=0)
            check_pooling_params([params], info, model.pooling)
            work = _stream_pooling_output(self._running_engine, own_id, encoded, params, adapter)
        deltas = isinstance(params, SamplingParams) and params.output_kind is RequestOutputKind.DELTA
        request = _OpenRequestHandle(request_id, deltas)
        self._open_requests[request_id] = (
            request,
            self._running_engine.start_coroutine(_queue_outputs(self._output_queue, request, work)),
        )
        return request_id

    def step(self) -> list[RequestOrPoolingOutput]:
        """Wait for new outputs and return them, or [] if no request is open. If a request's outputs are cumulative,
        only the latest is returned; deltas are all returned, in order. Raises EngineError for a request that the engine
        failed, which is then closed.
        """
        outputs: dict[object, RequestOrPoolingOutput] = {}
        while self._open_requests and not outputs:
            while not self._unread_outputs or not self._output_queue.empty():
                self._unread_outputs.append(self._output_queue.get())
            while self._unread_outputs:
                request, output = self._unread_outputs[0]
                if isinstance(output, Exception) and outputs:
                    break
                self._unread_outputs.popleft()
                if self._open_requests.get(request.id, (None,))[0] is not request:
                    continue  # aborted
                if isinstance(output, Exception):
                    del self._open_requests[request.id]
                    raise output
                if output.finished:
                    del self._open_requests[request.id]
                outputs[len(outputs) if request.wants_deltas else request] = output
        return list(outputs.values())

    def abort_request(self, request_ids: str | Sequence[str]) -> None:
        """End requests without further outputs. Ids that are not open are ignored."""
        for request_id in [request_ids] if isinstance(request_ids, str) else request_ids:
            if request_id in self._open_requests:
                _, work = self._open_requests.pop(request_id)
                work.cancel()

    def get_num_unfinished_requests(self) -> int:
        """Number of requests that no step has reported as finished."""
        return len(self._open_requests)

    def has_unfinished_requests(self) -> bool:
        return self.get_num_unfinished_requests() > 0


async def _queue_outputs(
    output_queue: _OutputQueue, request: _OpenRequestHandle, work: AsyncIterator[RequestOrPoolingOutput]
) -> None:
    try:
        async for output in work:
            output_queue.put((request, replace(output, request_id=request.id)))
    except Exception as error:  # an exception in this task would otherwise be lost
        output_queue.put((request, error))


async def _stream_pooling_output(
    running_engine: RunningEngine,
    request_id: str,
    prompt: EncodedPrompt,
    params: PoolingParams,
    adapter: Adapter | None,
) -> AsyncIterator[PoolingRequestOutput]:
    pool_arguments = [prompt[:2]], [params], [adapter]
    (output,) = await pool_prompts(
        running_engine.client, *pool_arguments, lambda: None, running_engine.input_processor.pooling
    )
    yield replace(output, request_id=request_id)
