"""Renders, encodes and checks the prompts of programs."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, NotRequired, TypedDict

from quire.engine.checkpoint.model_resolver import resolve_model
from quire.engine.checkpoint.overrides import load_model_config, read_sampling_defaults, resolve_model_with_overrides
from quire.engine.checkpoint.pooling import read_pooling_and_tasks
from quire.engine.client.engine_client import EngineClient
from quire.engine.client.weights import Weights
from quire.engine.common import request_params, types
from quire.engine.common.config import EngineConfig
from quire.engine.common.errors import EngineError, InvalidRequest, check_task
from quire.engine.common.types import EngineInfo
from quire.engine.images.multimodal_prompt import RequestImage, make_multimodal_prompt_builder
from quire.engine.lora.local_adapters import LocalAdapters
from quire.engine.offline.metrics import Metric, make_engine_metrics
from quire.engine.offline.params import RequestOutputKind, SamplingParams
from quire.engine.offline.prompt_images import message_images, multi_modal_images
from quire.engine.text.conversation.chat_messages import IMAGE_PART_TYPES
from quire.engine.text.conversation.chat_template import ChatRenderer
from quire.engine.text.conversation.literal_encoding import encode_with_literal_texts
from quire.engine.text.null_tokenizer import check_text_params, load_tokenizer
from quire.engine.text.pooling_inputs import encode_truncated


class TextPrompt(TypedDict):
    prompt: str
    multi_modal_data: NotRequired[Mapping[str, Any]]
    """vLLM's format: `image` is a Pillow image, or a list with one image per placeholder in the text."""


class TokensPrompt(TypedDict):
    prompt_token_ids: Sequence[int]
    prompt: NotRequired[str]
    """Ignored."""


Prompt = str | Sequence[int] | TextPrompt | TokensPrompt
PromptType = Prompt
"""vLLM's name of this type."""
Message = Mapping[str, Any]


class EncodedPrompt(NamedTuple):
    text: str | None
    """None if the prompt was token ids."""
    token_ids: list[int]
    spans: tuple[types.MediaSpan, ...] = ()
    images: tuple[types.Image, ...] = ()


@dataclass(frozen=True, slots=True)
class GenerationTask:
    id: str
    prompt: EncodedPrompt
    params: request_params.SamplingParams
    output_kind: RequestOutputKind
    detokenize: bool
    adapter: types.Adapter | None = None
    priority: int = 0


class OfflineModel:
    """Raises ModelError."""

    def __init__(self, config: EngineConfig) -> None:
        path = resolve_model_with_overrides(config)
        model_config = load_model_config(config, path)
        folder = resolve_model(config.tokenizer, config.revision) if config.tokenizer else path
        self.name = config.model
        self.vocab_size = model_config.vocab_size
        self.pooling, _ = read_pooling_and_tasks(path, model_config, config)
        skip = config.skip_tokenizer_init
        eos_token_ids = model_config.eos_token_ids
        self.tokenizer = load_tokenizer(folder, config.chat_template, self.vocab_size, eos_token_ids, skip=skip)
        self.renderer = ChatRenderer(
            self.tokenizer.chat_templates,
            self.tokenizer.special_tokens,
            adapt_conversations=config.adapt_conversations == "auto",
        )
        self.adapters = LocalAdapters(config, model_config) if config.enable_lora else None
        self.multimodal_prompt_builder = make_multimodal_prompt_builder(path, self.tokenizer)
        self._default_sampling = read_sampling_defaults(config)

    def pass_engine_info_to_adapters(self, info: types.EngineInfo) -> None:
        """Call once the engine is ready."""
        if self.adapters is not None:
            self.adapters.use_engine_modules(info)

    def default_sampling_params(self) -> SamplingParams:
        """Returns a new object with the defaults of generation_config.json."""
        return SamplingParams(**self._default_sampling)  # type: ignore[arg-type]

    def encode_prompts(self, prompts: Prompt | Sequence[Prompt]) -> list[EncodedPrompt]:
        """Raises InvalidRequest."""
        return [self.encode_prompt(each, f"prompt {index}") for index, each in enumerate(as_prompt_list(prompts))]

    def encode_prompt(self, prompt: Any, name: str = "prompt") -> EncodedPrompt:
        """Raises InvalidRequest."""
        if isinstance(prompt, Mapping):
            more = sorted(set(prompt) - {"prompt", "prompt_token_ids", "multi_modal_data"})
            if more:
                raise InvalidRequest(f"{name} has {', '.join(more)}, which is not supported", param="prompts")
            request_images = multi_modal_images(prompt.get("multi_modal_data") or {}, name)
            if request_images and isinstance(prompt.get("prompt"), str):
                return self._encode_with_images(prompt["prompt"], request_images, add_special_tokens=True)
            if request_images:
                raise InvalidRequest(f"{name}: multi_modal_data needs a text prompt, not token ids", param="prompts")
            prompt = prompt.get("prompt_token_ids", prompt.get("prompt"))
        if isinstance(prompt, str):
            return EncodedPrompt(prompt, self.tokenizer.encode(prompt))
        try:
            if isinstance(prompt, bytes) or not hasattr(prompt, "__len__"):
                raise TypeError
            return EncodedPrompt(
                None, [operator.index(token) for token in prompt]
            )  # accepts numpy's and torch's integers
        except TypeError:
            message = f"{name} must be a text or a list of token ids, got {type(prompt).__name__}"
            raise InvalidRequest(message, param="prompts") from None

    def encode_chats(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        *,
        chat_template: str | None,
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        continue_final_message: bool,
        variables: Mapping[str, Any] | None,
    ) -> list[EncodedPrompt]:
        """Raises InvalidRequest."""
        renderer = self.renderer if chat_template is None else self.renderer.with_template(chat_template)
        tool_list = _tools_to_dicts(tools)
        message_lists = _as_conversation_list(messages)
        conversations = [
            renderer.render_conversation(
                message_list,
                tools=tool_list,
                add_generation_prompt=add_generation_prompt and not continue_final_message,
                continue_final_message=continue_final_message,
                variables=variables,
            )
            for message_list in message_lists
        ]
        texts = [conversation.text for conversation in conversations]
        encoded = self.tokenizer.encode_batch(texts, add_special_tokens=False)
        prompts = []
        for message_list, conversation, ids in zip(message_lists, conversations, encoded, strict=True):
            text, moved_texts = conversation.text, conversation.moved_texts
            if request_images := message_images(message_list):
                prompts.append(
                    self._encode_with_images(text, request_images, moved_texts=moved_texts, add_special_tokens=False)
                )
            elif moved_texts:
                prompts.append(
                    EncodedPrompt(
                        text, encode_with_literal_texts(self.tokenizer, text, moved_texts, add_special_tokens=False)
                    )
                )
            else:
                prompts.append(EncodedPrompt(text, ids))
        return prompts

    def _encode_with_images(
        self,
        text: str,
        request_images: list[RequestImage],
        *,
        moved_texts: Sequence[str] = (),
        add_special_tokens: bool,
    ) -> EncodedPrompt:
        """`moved_texts`: see RenderedConversation. Raises InvalidRequest naming the field."""
        if self.multimodal_prompt_builder is None:
            raise InvalidRequest(f"{request_images[0].field_path}: {types.NO_IMAGES_REASON}", param="prompts")
        encode = partial(
            encode_with_literal_texts, self.tokenizer, moved=moved_texts, add_special_tokens=add_special_tokens
        )
        prompt = self.multimodal_prompt_builder.make_multimodal_prompt(text, request_images, encode)
        return EncodedPrompt(text, prompt.token_ids, prompt.spans, prompt.images)

    def keep_first_prompt_tokens(self, prompt: EncodedPrompt, length: int | None, info: EngineInfo) -> EncodedPrompt:
        """Keep the first `length` tokens, including those that the tokenizer adds around a text. If `length` is None,
        all are kept; -1 means the context length. Raises InvalidRequest for a prompt with images.
        """
        text, ids = prompt.text, prompt.token_ids
        if prompt.spans:
            raise InvalidRequest("multi_modal_data: embeddings are computed only from text", param="prompts")
        length = info.max_model_len if length == -1 else length
        if length is None or len(ids) <= length:
            return prompt
        truncated = ids[:length] if text is None else encode_truncated(self.tokenizer, [text], length, "right")[0]
        return EncodedPrompt(text, truncated)

    def make_generation_task(
        self,
        id: str,
        prompt: EncodedPrompt,
        params: SamplingParams,
        info: EngineInfo,
        kind: RequestOutputKind | None = None,
        *,
        adapter: types.Adapter | None,
        priority: int = 0,
    ) -> GenerationTask:
        """`kind` overrides the output kind of `params`. Raises InvalidRequest. Only `check_prompt` checks the prompt's
        token ids and length.
        """
        check_task("generate", info.tasks)
        engine_params = params.for_model(self.tokenizer, self.vocab_size)
        check_text_params(self.tokenizer, stop=engine_params.stop, structured_outputs=engine_params.grammar)
        if prompt.spans and info.no_images:
            raise InvalidRequest(f"multi_modal_data: {info.no_images}", param="prompts")
        if prompt.spans and params.truncate_prompt_tokens is not None:
            message = "truncate_prompt_tokens: a prompt with images cannot be truncated"
            raise InvalidRequest(message, param="truncate_prompt_tokens")
        if params.truncate_prompt_tokens is not None:
            max_tokens = (
                info.max_model_len - 1 if params.truncate_prompt_tokens == -1 else params.truncate_prompt_tokens
            )
            prompt = prompt._replace(token_ids=prompt.token_ids[-max_tokens:])
        return GenerationTask(
            id, prompt, engine_params, kind or params.output_kind, params.detokenize, adapter, priority
        )

    def check_prompt(
        self, ids: Sequence[int], info: EngineInfo, name: str = "prompt", min_free_tokens: int = 1
    ) -> None:
        """Raises InvalidRequest for a prompt that the engine would refuse, or that leaves no room for
        `min_free_tokens`.
        """
        problem = "is empty" if not ids else ""
        if len(ids) + min_free_tokens > info.max_model_len:
            problem = f"has {len(ids)} tokens, the context is {info.max_model_len}"
        elif outside := [token for token in ids if not 0 <= token < self.vocab_size]:
            problem = f"has token id {outside[0]}, which is out of vocabulary"
        if problem:
            raise InvalidRequest(f"{name} {problem}", param="prompts")


_WEIGHT_UPDATE_HINT = "load_weights takes tensors and update_weights a folder, while requests are open"
_VLLM_ALTERNATIVES = {
    "apply_model": "LLM.collective_rpc(function) calls a function with each rank's part of the model",
    "get_world_size": "LLM.collective_rpc('describe') tells it",
    **dict.fromkeys(("start_profile", "stop_profile"), "`quire trace` records the engine of a running server"),
    **dict.fromkeys(("enqueue", "enqueue_chat", "wait_for_completion"), "llm_engine has add_request and step"),
    **dict.fromkeys(
        ("init_weight_transfer_engine", "start_weight_update", "finish_weight_update"), _WEIGHT_UPDATE_HINT
    ),
}


class LLMBase:
    if not TYPE_CHECKING:  # with __getattr__, type checkers would accept every name

        def __getattr__(self, name: str) -> object:
            hint = f": {_VLLM_ALTERNATIVES[name]}" if name in _VLLM_ALTERNATIVES else ""
            raise AttributeError(f"{type(self).__name__} has no {name}{hint}", name=name, obj=self)

    def __init__(self, input_processor: OfflineModel, client: EngineClient) -> None:
        self._input_processor, self._client = input_processor, client
        self.tokenizer = input_processor.tokenizer
        self._counter = itertools.count()
        self._weights = Weights(client)

    def get_tokenizer(self) -> Any:
        """The tokenizer as transformers' PreTrainedTokenizerFast; `llm.tokenizer` is Quire's."""
        return self.tokenizer.to_transformers()

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the defaults of generation_config.json, which calls without sampling_params use."""
        return self._input_processor.default_sampling_params()

    def register_failure_callback(self, callback: Callable[[EngineError], None]) -> None:
        """Call `callback` with the error when the engine has ended for good, except by closing. The callback runs on
        the engine's event loop, which an LLM runs in another thread.
        """
        self._client.engine_core.failure_callbacks.append(callback)

    def get_metrics(self) -> list[Metric]:
        """Return the engine's metrics under vLLM's names."""
        return make_engine_metrics(self._client.engine_core.stats)


def check_request_id_unused(request_id: object, open_ids: Container[str]) -> None:
    """Raises InvalidRequest."""
    if not isinstance(request_id, str) or request_id in open_ids:
        what = "is in use" if isinstance(request_id, str) else "must be a text"
        raise InvalidRequest(f"request_id {request_id!r} {what}", param="request_id")


def as_prompt_list(prompts: Any) -> list[Any]:
    """Raises InvalidRequest."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    sized = hasattr(prompts, "__len__") and hasattr(prompts, "__getitem__") and getattr(prompts, "ndim", 1) != 0
    if isinstance(prompts, bytes) or not sized:
        advice = (
            "; convert it with list(...)" if hasattr(prompts, "__iter__") and not isinstance(prompts, bytes) else ""
        )
        message = f"prompts must be a text, token ids, or a list of these, got {type(prompts).__name__}{advice}"
        raise InvalidRequest(message, param="prompts")
    prompt_list = list(prompts)  # also accepts a table's column
    return [prompts] if prompt_list and _is_integer_like(prompt_list[0]) else prompt_list


def _is_integer_like(value: object) -> bool:
    try:
        operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return False
    return True


def _as_conversation_list(messages: Any) -> list[list[dict[str, Any]]]:
    if isinstance(messages, Mapping) or not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        kind = type(messages).__name__
        raise InvalidRequest(f"messages must be a list of messages, or of such lists, got {kind}", param="messages")
    talks = [messages] if messages and isinstance(messages[0], Mapping) else messages
    return [
        [_check_message(message) for message in (talk if isinstance(talk, list | tuple) else [talk])] for talk in talks
    ]


def _check_message(message: Any) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise InvalidRequest(f"a message must be an object with a role, got {message!r}", param="messages")
    content = message.get("content")
    parts = content if isinstance(content, list | tuple) else []
    for part in [content] if not isinstance(content, str | list | tuple | None) else parts:
        if isinstance(part, Mapping) and part.get("type") in IMAGE_PART_TYPES and part.get(part["type"]) is not None:
            continue
        if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise InvalidRequest(f"a message's content must be text or images, got {kind}", param="messages")
    return dict(message)


def _tools_to_dicts(tools: Any) -> list[dict[str, Any]] | None:
    if tools is None:
        return None
    if not isinstance(tools, list | tuple) or not all(isinstance(tool, Mapping) for tool in tools):
        raise InvalidRequest(f"tools must be a list of objects, got {tools!r}", param="tools")
    return [dict(tool) for tool in tools]
