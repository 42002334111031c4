"""Generation without a server, with vLLM's names: `LLM(model).generate(prompts, SamplingParams(...))`."""

from __future__ import annotations

import asyncio
import operator
import os
import secrets
import threading
import weakref
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from quire.engine.checkpoint.files import read_generation_defaults, resolve_model
from quire.engine.config import EngineConfig, load
from quire.engine.errors import EngineError, InvalidRequest
from quire.engine.in_process import InProcessClient
from quire.engine.text.chat_template import ChatRenderer
from quire.engine.text.detokenizer import TextStream
from quire.engine.text.tokenizer import Tokenizer
from quire.engine.types import FinishReason, Request, RequestOutput, SamplingParams, TokenLogprob

Prompt = str | Sequence[int] | Mapping[str, Any]
Message = dict[str, Any]
_Encoded = tuple[str | None, list[int]]
_T = TypeVar("_T")


@dataclass(slots=True)
class Completion:
    """One answer."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The stop string or the id of stop_token_ids that ended it."""


@dataclass(slots=True)
class Generation:
    """A prompt with its n answers."""

    prompt: str | None
    """None where the prompt was given as token ids."""
    prompt_token_ids: list[int]
    outputs: list[Completion]
    prompt_logprobs: list[TokenLogprob | None] | None = None
    num_cached_tokens: int = 0


class LLM:
    """A model in this process. `options` are EngineConfig's fields; QUIRE_* variables set those that are not given.

    Raises ConfigError for a bad option, and what starting the engine raises. Works in scripts and notebooks alike,
    because the engine has a thread and an event loop of its own. On a CPU the environment variable
    OMP_WAIT_POLICY=passive can make sampled batches faster, and other PyTorch code in this process slower.
    """

    def __init__(self, model: str | None = None, **options: Any) -> None:
        given = options if model is None else {"model": model, **options}
        config = load(EngineConfig, given, origin="argument {key}")
        folder = resolve_model(config.tokenizer or config.model, config.revision)
        self.tokenizer = Tokenizer.load(folder, config.chat_template)
        recommended = read_generation_defaults(resolve_model(config.model, config.revision))
        self.default_sampling_params = msgspec.convert(recommended, SamplingParams)
        """The model's generation_config.json, for calls without sampling_params."""
        self._renderer = ChatRenderer(self.tokenizer.chat_templates, self.tokenizer.special_tokens)
        self._pid = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="quire-engine", daemon=True)
        self._thread.start()
        self._client = InProcessClient(config)
        self.close = weakref.finalize(self, _end, self._client, self._loop, self._thread, self._pid)
        """Stop the engine; the object cannot be used afterwards. Also called when the object is collected or the
        interpreter exits."""
        self.info = self._run(self._client.start())

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[Generation]:
        """Answer one prompt or several, each a text or token ids. Results are in the order of the prompts.

        sampling_params: one for all prompts, or a list with one for each.
        Raises InvalidRequest for a prompt that cannot be served, before anything is generated.
        """
        alone = isinstance(prompts, str | Mapping) or (len(prompts) > 0 and isinstance(prompts[0], int))
        many: list[Any] = [prompts] if alone else list(prompts)
        return self._answer([self._encode(each, index) for index, each in enumerate(many)], sampling_params, use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        tools: Sequence[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[Generation]:
        """Answer one conversation or several, rendered by the model's chat template. Tool calls are not parsed."""
        many: list[Any] = [messages] if messages and isinstance(messages[0], dict) else list(messages)
        texts = [
            self._renderer.render(
                talk,
                tools=tools,
                add_generation_prompt=add_generation_prompt and not continue_final_message,
                continue_final_message=continue_final_message,
                variables=chat_template_kwargs,
            )
            for talk in many
        ]
        encoded = self.tokenizer.encode_batch(texts, add_special_tokens=False)
        return self._answer(list(zip(texts, encoded, strict=True)), sampling_params, use_tqdm)

    def _encode(self, prompt: Any, index: int) -> _Encoded:
        """Returns (text or None, token ids). Also takes vLLM's {"prompt": ...} and {"prompt_token_ids": ...}."""
        if isinstance(prompt, Mapping):
            prompt = prompt.get("prompt_token_ids", prompt.get("prompt"))
        if isinstance(prompt, str):
            return prompt, self.tokenizer.encode(prompt)
        try:
            return None, [operator.index(token) for token in prompt]  # accepts numpy's and torch's integers
        except TypeError:
            message = f"prompt {index} must be a text or a list of token ids, got {type(prompt).__name__}"
            raise InvalidRequest(message, param="prompts") from None

    def _answer(
        self, prompts: Sequence[_Encoded], params: SamplingParams | Sequence[SamplingParams] | None, show_progress: bool
    ) -> list[Generation]:
        if params is None or isinstance(params, SamplingParams):
            params = [params or self.default_sampling_params] * len(prompts)
        params = [_type_checked(each) for each in params]
        if len(params) != len(prompts):
            raise InvalidRequest(f"sampling_params: {len(params)} for {len(prompts)} prompts", param="sampling_params")
        self._check([ids for _, ids in prompts])
        columns = (TextColumn("generating"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        progress = Progress(*columns, console=Console(stderr=True), disable=not show_progress)
        with progress:
            task = progress.add_task("", total=len(prompts))
            return self._run(self._generate_all(prompts, params, lambda: progress.advance(task)))

    def _check(self, prompts: Sequence[list[int]]) -> None:
        longest, vocab = self.info.max_model_len, self.tokenizer.vocab_size
        for index, ids in enumerate(prompts):
            wrong = "is empty" if not ids else ""
            if len(ids) >= longest:
                wrong = f"has {len(ids)} tokens, the context is {longest}"
            elif outside := [token for token in ids if not 0 <= token < vocab]:
                wrong = f"has token id {outside[0]}, which is outside the vocabulary"
            if wrong:
                raise InvalidRequest(f"prompt {index} {wrong}", param="prompts")

    async def _generate_all(
        self, prompts: Sequence[_Encoded], params: Sequence[SamplingParams], done: Callable[[], None]
    ) -> list[Generation]:
        return await asyncio.gather(*[self._generate(*each, done) for each in zip(prompts, params, strict=True)])

    async def _generate(self, prompt: _Encoded, params: SamplingParams, done: Callable[[], None]) -> Generation:
        text, ids = prompt
        name = secrets.token_hex(8)
        names = [f"{name}-{index}" for index in range(params.n)]
        requests = [
            Request(id=each, prompt_ids=ids, params=params, seed=params.choice_seed(index))
            for index, each in enumerate(names)
        ]
        answers = {each: _Answer(self.tokenizer, ids, params, index) for index, each in enumerate(names)}
        generation = Generation(text, ids, [answer.completion for answer in answers.values()])
        stream = self._client.submit(requests)
        try:
            async for outputs in stream:
                for output in outputs:
                    if output.error is not None:
                        raise EngineError(output.error)
                    generation.prompt_logprobs = output.prompt_logprobs or generation.prompt_logprobs
                    generation.num_cached_tokens = max(generation.num_cached_tokens, output.cached_tokens)
                    if answers[output.id].add(output):
                        stream.abort(output.id)
        finally:
            stream.close()
        done()
        return generation

    def _run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Run a coroutine on the engine's loop and wait for it; an interrupt of the waiting thread cancels it."""
        if not self.close.alive or self._pid != os.getpid():
            work.close()
            raise EngineError("this LLM was closed" if not self.close.alive else "this LLM is another process's")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise


def _type_checked(params: SamplingParams) -> SamplingParams:
    """Raise InvalidRequest for values of wrong types. Over HTTP pydantic checks them; here a float in place of an int
    would crash the engine."""
    try:
        return msgspec.convert(msgspec.to_builtins(params), SamplingParams)
    except (msgspec.ValidationError, TypeError) as error:
        raise InvalidRequest(f"sampling_params: {error}", param="sampling_params") from None


def _end(client: InProcessClient, loop: asyncio.AbstractEventLoop, thread: threading.Thread, pid: int) -> None:
    if pid != os.getpid():  # a forked process has no engine, because threads are not forked
        return
    asyncio.run_coroutine_threadsafe(client.stop(), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()


class _Answer:
    """Builds one Completion from the engine's outputs."""

    def __init__(self, tokenizer: Tokenizer, prompt_ids: list[int], params: SamplingParams, index: int) -> None:
        self.completion = Completion(index)
        self._text = TextStream(
            tokenizer,
            prompt_ids=prompt_ids,
            stop=params.stop,
            include_stop=params.include_stop_str_in_output,
            skip_special_tokens=params.skip_special_tokens,
            min_tokens=params.min_tokens,
        )

    def add(self, output: RequestOutput) -> bool:
        """Append an output. True when a stop string ended the answer while the engine still generates."""
        completion = self.completion
        delta = self._text.push_output(output)
        completion.text += delta.text
        completion.token_ids += output.new_ids[: delta.used]
        if output.logprobs is not None:
            completion.logprobs = (completion.logprobs or []) + output.logprobs[: delta.used]
        if delta.stop_string is not None:
            completion.finish_reason, completion.stop_reason = "stop", delta.stop_string
            return output.finish_reason is None
        completion.finish_reason, completion.stop_reason = output.finish_reason, output.stop_reason
        return False
