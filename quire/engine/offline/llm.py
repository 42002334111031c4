from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, Unpack

import msgspec

from quire.engine.common.errors import EngineError, InvalidRequest, check_task
from quire.engine.common.executor import decode_results, encode_call
from quire.engine.common.request_params import PoolingParams, PoolingTask
from quire.engine.common.types import Adapter
from quire.engine.lora.local_adapters import LoRARequest, LoRARequests, resolve_lora_requests
from quire.engine.offline.beam_search import beam_search_prompt
from quire.engine.offline.in_process_client import InProcessClient
from quire.engine.offline.llm_engine import LLMEngine
from quire.engine.offline.offline_model import EncodedPrompt, GenerationTask, LLMBase, Message, Prompt
from quire.engine.offline.options import EngineOptions, make_engine_config, with_config_docs
from quire.engine.offline.outputs import BeamSearchOutput, RequestOutput
from quire.engine.offline.params import (
    BeamSearchParams,
    RequestOutputKind,
    SamplingParams,
    params_per_prompt,
    priority_per_prompt,
)
from quire.engine.offline.pooling_outputs import (
    PoolingRequestOutput,
    check_pooling_params,
    cosine_similarity,
    encode_pairs_with_pooling_params,
    pool_prompts,
)
from quire.engine.offline.receipt_maker import ReceiptMaker, parse_receipt
from quire.engine.offline.running_engine import RunningEngine, progress_bar
from quire.engine.offline.task_outputs import stream_outputs
from quire.engine.receipts.receipt import Receipt
from quire.engine.receipts.receipt_replay import ReplayVerdict

if TYPE_CHECKING:
    from quire.engine.engine_core import Logprobs, NamedTensors

_T = TypeVar("_T")
_W = TypeVar("_W")


class LLM(LLMBase):
    """Generation without a server, with vLLM's names: `LLM(model).generate(prompts, SamplingParams(...))`.

    The engine runs in this process or, with `multiprocessing` or several replicas (data_parallel_size), in other
    processes, which are replaced when they die. It has its own thread and event loop, so LLM works in notebooks. On a
    CPU, OMP_WAIT_POLICY=passive can make sampled batches faster, and other PyTorch code in this process slower.
    """

    @with_config_docs
    def __init__(
        self, model: str | Path | None = None, *, multiprocessing: bool = False, **options: Unpack[EngineOptions]
    ) -> None:
        """`model` is a local folder, a .gguf file or a hub id; default: the embedded story-teller. With
        `multiprocessing` the engine has its own process, and an open call continues if that process dies. QUIRE_*
        variables set options that are not passed. Raises ConfigError, and errors of the engine's start.

        Options:
        """
        self._running_engine = RunningEngine(make_engine_config(model, options), multiprocessing=multiprocessing)
        super().__init__(self._running_engine.input_processor, self._running_engine.client)
        self._run_coroutine = self._running_engine.run_coroutine
        self.info = self._running_engine.info
        self.close = self._running_engine.close
        """Stops the engine; the object is unusable afterwards. Also called at garbage collection and interpreter exit.
        """
        self.llm_engine = LLMEngine(self._running_engine)
        """For programs that add requests one by one and call `step` themselves."""
        self._receipts = ReceiptMaker(self._running_engine)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        lora_request: LoRARequests = None,
        priority: Sequence[int] | None = None,
        receipts: bool = False,
    ) -> list[RequestOutput]:
        """Answer one or several prompts, in order. Each is a text or token ids.

        Args:
            sampling_params: One for all prompts, or a list; default: `get_default_sampling_params()`.
            lora_request: An adapter for all prompts, or a list with an adapter or None for each.
            priority: One per prompt; lower goes first. Does not change an answer's tokens.
            receipts: Attach a `receipt` to each result, for `replay` or the command `quire replay`.

        Raises:
            InvalidRequest: A prompt cannot be served; nothing was generated.
        """
        encoded = self._input_processor.encode_prompts(prompts)
        return self._generate_all(encoded, sampling_params, use_tqdm, lora_request, priority, receipts=receipts)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        lora_request: LoRARequests = None,
        chat_template: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        receipts: bool = False,
    ) -> list[RequestOutput]:
        """Answer one or several conversations, rendered by the model's chat template or `chat_template`.

        Tools that the template does not render are described in the system message. Tool calls are not parsed from
        answers. For the other arguments see `generate`.
        """
        prompts = self._input_processor.encode_chats(
            messages,
            chat_template=chat_template,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            variables=chat_template_kwargs,
        )
        return self._generate_all(prompts, sampling_params, use_tqdm, lora_request, receipts=receipts)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        *,
        lora_request: LoRARequests = None,
        use_tqdm: bool = False,
    ) -> list[BeamSearchOutput]:
        """Find the most likely answers to each prompt: `[0].sequences`, best first. Raises InvalidRequest."""
        encoded = self._input_processor.encode_prompts(prompts)
        self._check_prompts(encoded)
        max_model_len = self.info.max_model_len
        check_task("generate", self.info.tasks)

        async def search_one(
            prompt_and_adapter: tuple[EncodedPrompt, Adapter | None], done: Callable[[], None]
        ) -> BeamSearchOutput:
            output = await beam_search_prompt(
                self._client, self.tokenizer, self._next_request_id(), *prompt_and_adapter, params, max_model_len
            )
            done()
            return output

        adapters = resolve_lora_requests(self._input_processor.adapters, lora_request, len(encoded))
        return self._run_concurrently(list(zip(encoded, adapters, strict=True)), search_one, "searching", use_tqdm)

    def logprobs(self, token_ids: Sequence[int], *, full_vocabulary: bool = False) -> Logprobs:
        """See `quire.Forward.logprobs`. Raises InvalidRequest unless the engine runs in this process."""
        engine_core = self._client.engine_core
        if not isinstance(engine_core, InProcessClient):
            message = (
                "logprobs are computed by an engine in this process: not available with multiprocessing or replicas"
            )
            raise InvalidRequest(message, param="multiprocessing")
        return self._run_coroutine(engine_core.compute_logprobs(token_ids, full_vocabulary=full_vocabulary))

    def replay(
        self,
        receipt: Receipt | Mapping[str, Any] | str | bytes,
        *,
        images: Sequence[Any] = (),
        lora_request: LoRARequests = None,
    ) -> ReplayVerdict:
        """Compute a receipt's answers again.

        Args:
            receipt: A receipt, or an answer that has one, as an object or JSON.
            images: Pillow images of its prompts.

        Returns:
            Whether the answers are equal, with the first difference, or why the replay was refused.

        Raises:
            InvalidRequest: `receipt` is not a receipt, or one of `images` is not an image.
        """
        parsed_receipt = parse_receipt(receipt)
        self._running_engine.check_awake()
        return self._run_coroutine(
            self._receipts.replay_receipt(
                parsed_receipt, resolve_lora_requests(self._input_processor.adapters, lora_request, 1), images
            )
        )

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call a method or function on every rank, between two steps.

        Args:
            method: `describe`, `parameters`, or a function, which gets a RankWorker and the arguments. Ranks in other
                processes import the function by name.
            timeout: Seconds for all ranks together.

        Returns:
            Results in rank order.

        Raises:
            EngineError: A rank failed, or the timeout passed.
            InvalidRequest: `method` cannot be called.
        """

        async def call_ranks() -> list[bytes] | None:
            async with asyncio.timeout(timeout):
                return await self._client.engine_core.call(encode_call(method, args, kwargs))

        try:
            results = self._run_coroutine(call_ranks())
        except TimeoutError:
            raise EngineError(f"not all ranks answered in {timeout:g} s") from None
        self._running_engine.check_awake()
        if results is None:
            raise EngineError("the engine ended before it answered")
        return decode_results(results)

    def reset_prefix_cache(self) -> bool:
        """Empty the prefix cache. Always returns True."""
        self._run_coroutine(_call_as_coroutine(self._client.reset_prefix_cache))
        return True

    @property
    def weights_version(self) -> str:
        """Version of the weights for the next token: "1" at first, then a counter or the name that a change gave."""
        return self._client.engine_core.weights_version

    def is_sleeping(self) -> bool:
        return self._client.engine_core.asleep

    def sleep(self, level: int = 1) -> None:
        """Free weights and KV cache until `wake_up`. Unlike in vLLM, both levels do the same."""
        self._run_coroutine(self._weights.sleep(level))

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Load weights and KV cache again; vLLM's `tags` are ignored. Raises ConfigError if that fails, or if the
        weights came from `load_weights`.
        """
        self._run_coroutine(self._weights.wake_up())

    def load_weights(self, tensors: NamedTensors | Mapping[str, Any], *, version: str | None = None) -> str:
        """Switch to other weights of the same shape, and wake a sleeping model. Returns their version.

        Args:
            tensors: All tensors by checkpoint name, such as a PyTorch model's `state_dict()` or its items. They are
                copied, cast, quantized and packed like those in files.

        Raises:
            ModelError: Tensors are missing, unknown or of another shape. After this error, or one of the iterator, the
                previous weights are restored if a file has them; otherwise the model sleeps until it gets tensors.
        """
        engine_core = self._client.engine_core
        if not isinstance(engine_core, InProcessClient):
            message = "load_weights needs an engine in this process, without multiprocessing or replicas"
            raise InvalidRequest(f"{message}, but update_weights takes a folder", param="multiprocessing")
        stream = tensors.items() if isinstance(tensors, Mapping) else tensors
        return self._register_version_for_receipts(
            self._run_coroutine(self._weights.change(partial(engine_core.load_tensors, stream), version=version))
        )

    def update_weights(self, path: str | os.PathLike[str], *, version: str | None = None) -> str:
        """Do the same as `load_weights` with a folder of safetensors files or a GGUF file. Errors in the files' headers
        raise InvalidRequest or ModelError before the current weights are freed.
        """
        return self._register_version_for_receipts(
            self._run_coroutine(self._weights.update(os.fspath(path), version=version))
        )

    def _register_version_for_receipts(self, version: str) -> str:
        self._running_engine.hashes.remember_weight_files(version)
        return version

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling_params: PoolingParams | None = None,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool = True,
        lora_request: LoRARequests = None,
    ) -> list[PoolingRequestOutput]:
        """Compute an embedding of each prompt: `[0].outputs.embedding`.

        Args:
            truncate_prompt_tokens: Maximum tokens of a text; -1: the model's context.

        Raises:
            InvalidRequest: The prompt cannot be served, or the model makes no embeddings.
        """
        params = msgspec.structs.replace(pooling_params or PoolingParams(), task="embed")
        return self._pool_prompts(
            self._encode_truncated(prompts, truncate_prompt_tokens), params, use_tqdm, lora_request
        )

    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling_params: PoolingParams | None = None,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool = True,
        lora_request: LoRARequests = None,
    ) -> list[PoolingRequestOutput]:
        """Compute label probabilities of each prompt: `[0].outputs.probs`. For arguments and errors see `embed`."""
        params = msgspec.structs.replace(pooling_params or PoolingParams(), task="classify")
        return self._pool_prompts(
            self._encode_truncated(prompts, truncate_prompt_tokens), params, use_tqdm, lora_request
        )

    def reward(self, prompts: Prompt | Sequence[Prompt], *, use_tqdm: bool = True) -> list[PoolingRequestOutput]:
        """Score each prompt by a reward model, a classifier with one label: `[0].outputs.score`, which may be any
        number.
        """
        return self.classify(prompts, pooling_params=PoolingParams(activation=False), use_tqdm=use_tqdm)

    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | None = None,
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool = True,
        lora_request: LoRARequests = None,
        pooling_task: PoolingTask | None = None,
    ) -> list[PoolingRequestOutput]:
        """Compute a vector of each prompt: `[0].outputs.data`. `pooling_task` chooses its kind; None: the model's
        default. For other arguments and errors see `embed`.
        """
        if pooling_task not in (None, "embed", "classify"):
            message = f"pooling_task must be embed or classify, the vectors of whole prompts, got {pooling_task!r}"
            raise InvalidRequest(message, param="pooling_task")
        task = pooling_task or ("classify" if "classify" in self.info.tasks else "embed")
        params = msgspec.structs.replace(pooling_params or PoolingParams(), task=task)
        return self._pool_prompts(
            self._encode_truncated(prompts, truncate_prompt_tokens), params, use_tqdm, lora_request
        )

    def score(
        self,
        text_1: str | Sequence[str],
        text_2: str | Sequence[str],
        *,
        instruction: str | None = None,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool = True,
        lora_request: LoRARequest | None = None,
    ) -> list[PoolingRequestOutput]:
        """Score one text against each of several, or two lists of texts pair by pair: `[0].outputs.score`. For
        arguments and errors see `embed`.
        """
        firsts, seconds = ([each] if isinstance(each, str) else list(each) for each in (text_1, text_2))
        if len(firsts) not in (1, len(seconds)):
            message = f"text_1 has {len(firsts)} texts and text_2 {len(seconds)}: give one text or equally many"
            raise InvalidRequest(message, param="text_1")
        pairs = [(firsts[0] if len(firsts) == 1 else firsts[i], second) for i, second in enumerate(seconds)]
        limit = self.info.max_model_len if truncate_prompt_tokens == -1 else truncate_prompt_tokens
        if "classify" in self.info.tasks:
            prompts, params = encode_pairs_with_pooling_params(
                self.tokenizer, self._input_processor.pooling, pairs, instruction, limit
            )
            return self._pool_prompts([EncodedPrompt(None, ids) for ids in prompts], params, use_tqdm, lora_request)
        if self._input_processor.pooling.pooling_type == "none":
            raise InvalidRequest("score needs one vector of each text, not of each token (pooling_type)", param="model")
        texts = list(dict.fromkeys(text for pair in pairs for text in pair))
        vectors = self.embed(texts, truncate_prompt_tokens=limit, use_tqdm=use_tqdm, lora_request=lora_request)
        vectors_by_text = dict(zip(texts, vectors, strict=True))
        return [
            PoolingRequestOutput(None, [], cosine_similarity(vectors_by_text[a].outputs, vectors_by_text[b].outputs))
            for a, b in pairs
        ]

    def _encode_truncated(self, prompts: Prompt | Sequence[Prompt], truncate: int | None) -> list[EncodedPrompt]:
        return [
            self._input_processor.keep_first_prompt_tokens(prompt, truncate, self.info)
            for prompt in self._input_processor.encode_prompts(prompts)
        ]

    def _pool_prompts(
        self,
        prompts: Sequence[EncodedPrompt],
        params: PoolingParams | Sequence[PoolingParams],
        show_progress: bool,
        lora_request: LoRARequests,
    ) -> list[PoolingRequestOutput]:
        each = [params] * len(prompts) if isinstance(params, PoolingParams) else params
        self._check_prompts(prompts, min_free_tokens=0)
        check_pooling_params(each, self.info, self._input_processor.pooling)
        adapters = resolve_lora_requests(self._input_processor.adapters, lora_request, len(prompts))
        with progress_bar("reading", len(prompts), show_progress) as done:
            texts_and_ids = [prompt[:2] for prompt in prompts]
            return self._run_coroutine(
                pool_prompts(self._client, texts_and_ids, each, adapters, done, self._input_processor.pooling)
            )

    def _generate_all(
        self,
        prompts: Sequence[EncodedPrompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        show_progress: bool,
        lora_request: LoRARequests,
        priority: Sequence[int] | None = None,
        *,
        receipts: bool = False,
    ) -> list[RequestOutput]:
        defaults = self.get_default_sampling_params
        params_list, priorities = (
            params_per_prompt(params, len(prompts), defaults),
            priority_per_prompt(priority, len(prompts)),
        )
        adapters = resolve_lora_requests(self._input_processor.adapters, lora_request, len(prompts))
        task = partial(self._input_processor.make_generation_task, info=self.info, kind=RequestOutputKind.FINAL_ONLY)
        tasks = [
            task(self._next_request_id(), prompt, one, adapter=adapter, priority=first)
            for prompt, one, adapter, first in zip(prompts, params_list, adapters, priorities, strict=True)
        ]
        self._check_prompts([task.prompt for task in tasks])
        answer = partial(self._generate_one, receipts=self._receipts if receipts else None)
        return self._run_concurrently(tasks, answer, "generating", show_progress)

    async def _generate_one(
        self, task: GenerationTask, done: Callable[[], None], receipts: ReceiptMaker | None
    ) -> RequestOutput:
        (final_output,) = [output async for output in stream_outputs(self._client, self.tokenizer, task, receipts)]
        done()
        return final_output

    def _run_concurrently(
        self,
        items: Sequence[_W],
        run_one: Callable[[_W, Callable[[], None]], Coroutine[Any, Any, _T]],
        description: str,
        show_progress: bool,
    ) -> list[_T]:
        """Results are in the order of items."""

        async def run_everything(done: Callable[[], None]) -> list[_T]:
            tasks = [asyncio.create_task(run_one(each, done)) for each in items]
            try:
                return await asyncio.gather(*tasks)
            finally:  # after a failure nobody reads the other results
                for task in tasks:
                    task.cancel()

        with progress_bar(description, len(items), show_progress) as done:
            return self._run_coroutine(run_everything(done))

    def _check_prompts(self, prompts: Sequence[EncodedPrompt], min_free_tokens: int = 1) -> None:
        self._running_engine.check_awake()
        for index, prompt in enumerate(prompts):
            self._input_processor.check_prompt(prompt.token_ids, self.info, f"prompt {index}", min_free_tokens)

    def _next_request_id(self) -> str:
        return str(next(self._counter))


async def _call_as_coroutine(function: Callable[[], None]) -> None:
    function()
