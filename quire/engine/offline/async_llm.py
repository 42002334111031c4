"""Streams without a server: `async for output in AsyncLLM(model).generate(prompt, SamplingParams(...))`."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Unpack

from quire.engine.errors import EngineError, InvalidRequest
from quire.engine.link.weights import Mode
from quire.engine.lora.offline import LoRARequest, adapters_for
from quire.engine.offline.generate import generate
from quire.engine.offline.model import Encoded, Message, Model, Prompt, Serving, check_id
from quire.engine.offline.options import EngineOptions, ModelWithOptions, documented, engine_config
from quire.engine.offline.outputs import RequestOutput
from quire.engine.offline.params import SamplingParams
from quire.engine.offline.vectors import Pooled, check_params, pool_all
from quire.engine.replicas.replicas import processes
from quire.engine.types import EngineInfo, PoolingParams


class AsyncLLM(Serving):
    """A model in a process of its own, for one event loop. That process is replaced when it ends, and open streams go
    on with no token lost or changed, as the server's do.

    Its process starts when the object is made; `start()`, or the first call, waits until it is ready. End it with
    `await llm.close()` or `async with`; it ends with this process at the latest.
    """

    @documented
    def __init__(self, model: str | Path | None = None, **options: Unpack[EngineOptions]) -> None:
        """`model`: a local folder, a .gguf file or a hub id; the embedded story-teller unless given. QUIRE_* variables
        set the options that are not given. Raises ConfigError for a bad one and for a model that cannot be read.

        Options:"""
        config = engine_config(model, options)
        super().__init__(Model(config), processes(config))
        self._open: set[str] = set()
        self._starting: asyncio.Future[EngineInfo] | None = None
        self._ending: asyncio.Future[None] | None = None
        self._client.link.launch()

    @classmethod
    def from_engine_args(cls, args: ModelWithOptions) -> AsyncLLM:
        return cls(args.model, **args.options)

    async def start(self) -> EngineInfo:
        """Wait until the engine is ready. Raises ConfigError for options that it cannot start with, EngineError when it
        ends while it starts."""
        if self._ending is not None:
            raise EngineError("this AsyncLLM was closed")
        if self._starting is None:
            self._starting = asyncio.ensure_future(self._client.link.start())
        info = await asyncio.shield(self._starting)  # one of several that wait may be cancelled
        self._model.learn(info)
        return info

    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        lora_request: LoRARequest | None = None,
    ) -> AsyncGenerator[RequestOutput]:
        """Answer one prompt, a text or token ids; yields what sampling_params.output_kind says, the last one finished.

        Leaving the loop aborts the answer when the iterator is closed. sampling_params: None is
        `get_default_sampling_params()`. Raises InvalidRequest for what cannot be served, EngineError when the engine
        fails it.
        """
        return self._answers(partial(self._model.encode, prompt), sampling_params, request_id, lora_request)

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
        """Answer one conversation, rendered as by `LLM.chat`; yields and raises as `generate`."""
        rendered = partial(
            self._model.rendered,
            [messages],
            chat_template=chat_template,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            variables=chat_template_kwargs,
        )
        return self._answers(lambda: rendered()[0], sampling_params, request_id, lora_request)

    async def encode(
        self,
        prompt: Prompt,
        pooling_params: PoolingParams | None = None,
        *,
        lora_request: LoRARequest | None = None,
    ) -> Pooled:
        """The vector that the model makes of a prompt: `.outputs.data`. Raises as `generate`."""
        info, params = await self.start(), pooling_params or PoolingParams()
        encoded = self._model.cut(self._model.encode(prompt), None, info)
        self._model.check(encoded.ids, info, room=0)
        check_params([params], info, self._model.pooling)
        adapters = adapters_for(self._model.adapters, lora_request, 1)
        (found,) = await pool_all(self._client, [encoded[:2]], [params], adapters, lambda: None, self._model.pooling)
        return found

    async def abort(self, request_id: str) -> None:
        """End a request: its reader gets a last output with the finish_reason "abort". Nothing where none is open."""
        self._client.cancel(request_id)

    async def reset_prefix_cache(self) -> bool:
        """Let later prompts find no cached prefix. True: it always succeeds."""
        await self.start()
        self._client.reset_prefix_cache()
        return True

    async def sleep(self, level: int = 1, mode: Mode = "keep") -> None:
        """Let weights and KV cache go, until `wake_up`; at level 2 the engine's process too. `mode`: what becomes of
        open requests: they wait and go on, end first, or end at once. New ones wait."""
        await self.start()
        await self._weights.sleep(level, mode)

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Take weights and KV cache back, whatever vLLM's `tags` say. Raises ConfigError where they are not to be had;
        then it sleeps on."""
        await self.start()
        await self._weights.wake_up()

    async def is_sleeping(self) -> bool:
        return self._client.link.asleep

    async def update_weights(
        self, path: str | os.PathLike[str], mode: Mode = "keep", *, version: str | None = None
    ) -> str:
        """Compute with the weights in another folder, or GGUF file, of the model's shape; open requests as in `sleep`.
        Returns their version. Raises InvalidRequest or ConfigError for what cannot be served: then nothing changes."""
        await self.start()
        return await self._weights.update(os.fspath(path), mode, version)

    async def check_health(self) -> None:
        """Raises EngineError when the engine is gone for good."""
        await self.start()
        if not self._client.alive:
            raise EngineError("the engine ended and could not be brought back")

    async def close(self) -> None:
        """End the engine; open streams fail with EngineError. The object cannot be used afterwards."""
        self.shutdown()
        assert self._ending is not None
        await self._ending

    def shutdown(self) -> None:
        """Begin to end the engine, from inside the event loop; `close` waits for it too."""
        if self._ending is None:
            self._ending = asyncio.ensure_future(self._end())

    async def _end(self) -> None:
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.gather(self._starting, return_exceptions=True)
        self._client.link.failure_callbacks.clear()
        await self._client.link.stop()

    async def __aenter__(self) -> AsyncLLM:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _answers(
        self,
        encode: Callable[[], Encoded],
        params: SamplingParams | None,
        request_id: str | None,
        lora_request: LoRARequest | None,
    ) -> AsyncGenerator[RequestOutput]:
        info, prompt = await self.start(), encode()
        free = (str(number) for number in self._counter if str(number) not in self._open)
        name = next(free) if request_id is None else request_id
        check_id(name, self._open)
        if params is not None and not isinstance(params, SamplingParams):
            raise InvalidRequest(f"sampling_params must be SamplingParams, got {params!r}", param="sampling_params")
        (adapter,) = adapters_for(self._model.adapters, lora_request, 1)
        task = self._model.task(name, prompt, params or self.get_default_sampling_params(), info, adapter=adapter)
        self._model.check(task.prompt.ids, info)
        self._open.add(name)
        try:
            async with aclosing(generate(self._client, self.tokenizer, task)) as outputs:
                async for output in outputs:
                    yield output
        finally:
            self._open.discard(name)
