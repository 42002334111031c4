from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Unpack

from quire.engine.client.replicated_client import processes
from quire.engine.client.weights import Mode
from quire.engine.common.errors import EngineError, InvalidRequest
from quire.engine.common.request_params import PoolingParams
from quire.engine.common.types import EngineInfo
from quire.engine.lora.local_adapters import LoRARequest, resolve_lora_requests
from quire.engine.offline.offline_model import (
    EncodedPrompt,
    LLMBase,
    Message,
    OfflineModel,
    Prompt,
    check_request_id_unused,
)
from quire.engine.offline.options import EngineArgsLike, EngineOptions, make_engine_config, with_config_docs
from quire.engine.offline.outputs import RequestOutput
from quire.engine.offline.params import SamplingParams
from quire.engine.offline.pooling_outputs import PoolingRequestOutput, check_pooling_params, pool_prompts
from quire.engine.offline.task_outputs import stream_outputs


class AsyncLLM(LLMBase):
    """Streams without a server: `async for output in AsyncLLM(model).generate(prompt, SamplingParams(...))`.

    The engine has its own process, which starts when the object is created. All calls must come from one event loop.
    `start()` or the first call waits until the engine is ready. If its process dies, it is replaced, and open streams
    continue with no token lost or changed. Close the object with `await llm.close()` or `async with`.
    """

    @with_config_docs
    def __init__(self, model: str | Path | None = None, **options: Unpack[EngineOptions]) -> None:
        """`model` is a local folder, a .gguf file or a hub id; default: the embedded story-teller. QUIRE_* variables
        set options that are not passed. Raises ConfigError for a bad option or an unreadable model.

        Options:
        """
        config = make_engine_config(model, options)
        super().__init__(OfflineModel(config), processes(config))
        self._open_request_ids: set[str] = set()
        self._start_future: asyncio.Future[EngineInfo] | None = None
        self._close_future: asyncio.Future[None] | None = None
        self._client.engine_core.launch()

    @classmethod
    def from_engine_args(cls, args: EngineArgsLike) -> AsyncLLM:
        return cls(args.model, **args.options)

    async def start(self) -> EngineInfo:
        """Wait until the engine is ready.

        Raises:
            ConfigError: The engine cannot start with these options.
            EngineError: The engine ended, or this object was closed.
        """
        if self._close_future is not None:
            raise EngineError("this AsyncLLM was closed")
        if self._start_future is None:
            self._start_future = asyncio.ensure_future(self._client.engine_core.start())
        info = await asyncio.shield(self._start_future)  # one of several waiters may be cancelled
        self._input_processor.pass_engine_info_to_adapters(info)
        return info

    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        lora_request: LoRARequest | None = None,
    ) -> AsyncGenerator[RequestOutput]:
        """Answer one prompt, a text or token ids. Closing the iterator or leaving the loop aborts the answer.

        Args:
            sampling_params: Default: `get_default_sampling_params()`. Its output_kind decides what is yielded.
            request_id: Must not be in use; default: a counter.

        Raises:
            InvalidRequest: The request cannot be served.
            EngineError: The engine failed the request.
        """
        return self._stream_request(
            partial(self._input_processor.encode_prompt, prompt), sampling_params, request_id, lora_request
        )

    def chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        lora_request: LoRARequest | None = None,
        chat_template: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> AsyncGenerator[RequestOutput]:
        """Answer one conversation, rendered as by `LLM.chat`. Yields and raises what `generate` does."""
        rendered = partial(
            self._input_processor.encode_chats,
            [messages],
            chat_template=chat_template,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            variables=chat_template_kwargs,
        )
        return self._stream_request(lambda: rendered()[0], sampling_params, request_id, lora_request)

    async def encode(
        self,
        prompt: Prompt,
        pooling_params: PoolingParams | None = None,
        *,
        lora_request: LoRARequest | None = None,
    ) -> PoolingRequestOutput:
        """Return the model's vector of a prompt in `.outputs.data`. Raises what `generate` does."""
        info, params = await self.start(), pooling_params or PoolingParams()
        encoded = self._input_processor.keep_first_prompt_tokens(
            self._input_processor.encode_prompt(prompt), None, info
        )
        self._input_processor.check_prompt(encoded.token_ids, info, min_free_tokens=0)
        check_pooling_params([params], info, self._input_processor.pooling)
        adapters = resolve_lora_requests(self._input_processor.adapters, lora_request, 1)
        (pooling_output,) = await pool_prompts(
            self._client, [encoded[:2]], [params], adapters, lambda: None, self._input_processor.pooling
        )
        return pooling_output

    async def abort(self, request_id: str) -> None:
        """End a request if it is open. Its reader gets a last output with the finish_reason "abort"."""
        self._client.cancel(request_id)

    async def reset_prefix_cache(self) -> bool:
        """Empty the prefix cache. Always returns True."""
        await self.start()
        self._client.reset_prefix_cache()
        return True

    async def sleep(self, level: int = 1, mode: Mode = "keep") -> None:
        """Free weights and KV cache until `wake_up`; level 2 also ends the engine's process. New requests wait. Open
        requests wait and then continue ("keep"), finish first ("wait"), or are aborted ("abort").
        """
        await self.start()
        await self._weights.sleep(level, mode)

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Load weights and KV cache again. vLLM's `tags` are ignored. If loading fails, raises ConfigError and stays
        asleep.
        """
        await self.start()
        await self._weights.wake_up()

    async def is_sleeping(self) -> bool:
        return self._client.engine_core.asleep

    async def update_weights(
        self, path: str | os.PathLike[str], mode: Mode = "keep", *, version: str | None = None
    ) -> str:
        """Switch to the weights in a folder or GGUF file, and return their version. The tensors must have the shapes of
        the model's. `mode`: see `sleep`. If the weights cannot be served, raises InvalidRequest or ConfigError and
        changes nothing.
        """
        await self.start()
        return await self._weights.update(os.fspath(path), mode, version)

    async def check_health(self) -> None:
        """Raise EngineError if the engine has ended for good."""
        await self.start()
        if not self._client.alive:
            raise EngineError("the engine ended and could not be restarted")

    async def close(self) -> None:
        """End the engine. Open streams fail with EngineError, and the object is unusable afterwards."""
        self.shutdown()
        assert self._close_future is not None
        await self._close_future

    def shutdown(self) -> None:
        """Start `close` without waiting for it. Call inside the event loop."""
        if self._close_future is None:
            self._close_future = asyncio.ensure_future(self._stop_engine())

    async def _stop_engine(self) -> None:
        if self._start_future is not None:
            self._start_future.cancel()
            await asyncio.gather(self._start_future, return_exceptions=True)
        self._client.engine_core.failure_callbacks.clear()
        await self._client.engine_core.stop()

    async def __aenter__(self) -> AsyncLLM:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _stream_request(
        self,
        encode: Callable[[], EncodedPrompt],
        params: SamplingParams | None,
        request_id: str | None,
        lora_request: LoRARequest | None,
    ) -> AsyncGenerator[RequestOutput]:
        info, prompt = await self.start(), encode()
        free = (str(number) for number in self._counter if str(number) not in self._open_request_ids)
        name = next(free) if request_id is None else request_id
        check_request_id_unused(name, self._open_request_ids)
        if params is not None and not isinstance(params, SamplingParams):
            raise InvalidRequest(f"sampling_params must be SamplingParams, got {params!r}", param="sampling_params")
        (adapter,) = resolve_lora_requests(self._input_processor.adapters, lora_request, 1)
        task = self._input_processor.make_generation_task(
            name, prompt, params or self.get_default_sampling_params(), info, adapter=adapter
        )
        self._input_processor.check_prompt(task.prompt.token_ids, info)
        self._open_request_ids.add(name)
        try:
            async with aclosing(stream_outputs(self._client, self.tokenizer, task)) as outputs:
                async for output in outputs:
                    yield output
        finally:
            self._open_request_ids.discard(name)
