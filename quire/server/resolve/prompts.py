from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from quire.engine.common.errors import ContextLengthExceeded, InvalidRequest
from quire.engine.images.multimodal_prompt import RequestImage
from quire.engine.text.conversation.chat_messages import normalize_message
from quire.engine.text.conversation.chat_template import ChatRenderer
from quire.engine.text.conversation.conversation_renderer import RenderedConversation
from quire.engine.text.conversation.literal_encoding import encode_with_literal_texts
from quire.engine.text.token_offsets import decode_with_offsets, find_token_offsets
from quire.engine.text.tokenizer import Tokenizer
from quire.server.generation.resolved_request import Prompt
from quire.server.images.image_parts import check_images_rendered, collect_images, has_images
from quire.server.protocol.chat import ChatMessage, ChatRequest, TextPart
from quire.server.protocol.completions import DEFAULT_MAX_TOKENS, CompletionRequest
from quire.server.protocol.field_limits import MAX_PROMPTS
from quire.server.protocol.request_bodies import MAX_ADAPTATIONS, GenerationBody
from quire.server.resolve.checks import NeedsWorker, check_no_surrogates, check_prompt_length, check_token_ids
from quire.server.served_model import ServedModel

SLICE_CHARACTERS = 16_000
"""Number of characters tokenized at once to see whether a long text fits."""
INFILL_TOKENS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>"),  # DeepSeek-Coder
    ("\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>"),  # Code Llama
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM-4.5
)
"""Marks of prefix, suffix and middle, in this order."""
CODESTRAL_INFILL_TOKENS = ("[SUFFIX]", "[PREFIX]")
"""Marks of suffix and prefix; the prompt comes last."""


def build_completion_prompts(body: CompletionRequest, model: ServedModel) -> list[Prompt]:
    prompt = body.prompt
    if body.transferred_prompt_ids and (
        body.suffix or not (isinstance(prompt, str) or isinstance(next(iter(prompt), 0), int))
    ):
        message = "kv_transfer_params: prompt_token_ids are those of one prompt, without a suffix"
        raise InvalidRequest(message, param="kv_transfer_params")
    inputs = list_inputs(body.transferred_prompt_ids or prompt, "prompt")
    check_num_inputs(len(inputs), "prompt", "prompts")
    texts = [one for one in inputs if isinstance(one, str)]
    special = body.add_special_tokens and not body.suffix
    encoded = iter(
        check_and_encode_texts(model, texts, special, "prompt", will_truncate=body.truncate_prompt_tokens is not None)
    )
    prompts = []
    for one in inputs:
        if isinstance(one, str):
            prompts.append(Prompt(next(encoded), one))
        else:
            check_token_ids(one, model.vocab_size, "kv_transfer_params" if body.transferred_prompt_ids else "prompt")
            prompts.append(Prompt(one))
    if body.suffix:
        # SentencePiece would add a space before the suffix, but none belongs after a mark.
        lead = "\u263a" if model.tokenizer.strips_first_space else ""
        lead_ids, suffix = check_and_encode_texts(model, [lead, lead + body.suffix], False, "suffix")
        suffix = suffix[len(lead_ids) :]
        begin = body.add_special_tokens
        filled = [build_infill_ids(model.tokenizer, each.ids, suffix, add_special_tokens=begin) for each in prompts]
        prompts = [Prompt(ids) for ids in filled]
    prompts = [
        truncate_prompt(each, body, max_prompt_tokens(body.max_tokens, DEFAULT_MAX_TOKENS, model), model)
        for each in prompts
    ]
    for each in prompts:
        check_prompt_length(each.ids, model.context_length, "prompt")
    if not body.echo:
        return [Prompt(each.ids) for each in prompts]
    return add_echo_texts(prompts, body, model.tokenizer)


def list_inputs(field_value: str | Sequence[int | str | list[int]], param: str) -> list[str | list[int]]:
    """Raises InvalidRequest if there are none."""
    if isinstance(field_value, str):
        return [field_value]
    ids = [one for one in field_value if isinstance(one, int)]
    inputs: list[str | list[int]] = (
        [ids] if ids and isinstance(field_value[0], int) else [one for one in field_value if not isinstance(one, int)]
    )
    if not inputs:
        raise InvalidRequest(f"{param} cannot be empty", param=param)
    return inputs


def check_num_inputs(count: int, param: str, what: str = "inputs") -> None:
    if count > MAX_PROMPTS:
        raise InvalidRequest(f"{param} takes at most {MAX_PROMPTS} {what}, got {count}", param=param)


def add_echo_texts(prompts: Sequence[Prompt], body: CompletionRequest, tokenizer: Tokenizer) -> list[Prompt]:
    echo_prompts = []
    for each in prompts:
        text, offsets = each.text, list[int]()
        if text is None:
            text, offsets = decode_with_offsets(tokenizer, each.ids)
        elif body.logprobs is not None:
            offsets = find_token_offsets(tokenizer, text, add_special_tokens=body.add_special_tokens)
        echo_prompts.append(Prompt(each.ids, text, offsets))
    return echo_prompts


def build_infill_ids(
    tokenizer: Tokenizer,
    prompt_ids: Sequence[int],
    suffix_ids: Sequence[int],
    *,
    add_special_tokens: bool,
    extra_ids: Sequence[int] = (),
    param: str = "suffix",
) -> list[int]:
    """Fill in the middle (Bavarian et al., 2022). `prompt_ids` and `suffix_ids` have no special tokens. `extra_ids` are
    those of other files, which come first. Raises InvalidRequest if the tokenizer lacks the marks.
    """
    begin = [*tokenizer.encode("", add_special_tokens=add_special_tokens), *extra_ids]
    for marks in (*INFILL_TOKENS, CODESTRAL_INFILL_TOKENS):
        match [token_id for mark in marks if (token_id := tokenizer.backend.token_to_id(mark)) is not None]:
            case [before, between, middle]:
                return [*begin, before, *prompt_ids, between, *suffix_ids, middle]
            case [before, between] if marks is CODESTRAL_INFILL_TOKENS:
                return [*begin, before, *suffix_ids, between, *prompt_ids]
    raise InvalidRequest(
        f"{param} is not supported: this model's tokenizer has no fill-in-the-middle tokens", param=param
    )


def build_chat_prompt(
    body: ChatRequest, model: ServedModel, tools: Sequence[dict[str, Any]] | None, *, trusted: bool
) -> Prompt:
    longest = model.context_length
    if len(body.messages) > longest:  # Each message takes at least a token, and templates are slow.
        raise ContextLengthExceeded(
            f"{len(body.messages)} messages do not fit in this model's context of {longest} tokens",
            param="messages",
        )
    images = requested_images(body.messages, model)
    if body.transferred_prompt_ids:
        return build_prompt_from_ids(body, model, images)
    conversation = render_chat(body, model, tools, trusted=trusted)
    adapted = adaptation_summary(conversation)
    if images:
        assert model.multimodal_prompt_builder is not None
        check_images_rendered(conversation.text, model.multimodal_prompt_builder.template_image_token, body.messages)
        return replace(build_multimodal_chat_prompt(body, model, conversation, images), adaptations=adapted)
    cut = body.truncate_prompt_tokens is not None
    ids = encode_rendered_conversation(model, conversation, body.add_special_tokens, will_truncate=cut)
    prompt = truncate_chat_ids(ids, body, model)
    return Prompt(prompt.ids, final_message_text(body, conversation.text) if body.echo else None, adaptations=adapted)


def build_prompt_from_ids(body: ChatRequest, model: ServedModel, images: Sequence[RequestImage]) -> Prompt:
    """Another server computed `kv_transfer_params.prompt_token_ids` from the messages. Raises InvalidRequest."""
    if images or body.echo:
        message = "kv_transfer_params: prompt_token_ids are not available with images or echo"
        raise InvalidRequest(message, param="kv_transfer_params")
    check_token_ids(body.transferred_prompt_ids, model.vocab_size, "kv_transfer_params")
    return truncate_chat_ids(body.transferred_prompt_ids, body, model)


def truncate_chat_ids(ids: list[int], body: ChatRequest, model: ServedModel) -> Prompt:
    """Raises InvalidRequest if the prompt is too long."""
    prompt = truncate_prompt(
        Prompt(ids), body, max_prompt_tokens(body.max_completion_tokens or body.max_tokens, 1, model), model
    )
    check_prompt_length(prompt.ids, model.context_length, "messages")
    return prompt


def build_multimodal_chat_prompt(
    body: ChatRequest, model: ServedModel, conversation: RenderedConversation, images: Sequence[RequestImage]
) -> Prompt:
    if body.truncate_prompt_tokens is not None:
        raise InvalidRequest(
            "truncate_prompt_tokens: a prompt with images cannot be truncated", param="truncate_prompt_tokens"
        )
    assert model.multimodal_prompt_builder is not None

    def encode_text(text: str) -> list[int]:
        ids = encode_rendered_conversation(model, replace(conversation, text=text), body.add_special_tokens)
        check_prompt_length(ids, model.context_length, "messages")
        return ids

    expanded = model.multimodal_prompt_builder.make_multimodal_prompt(conversation.text, images, encode_text)
    echo_text = final_message_text(body, conversation.text) if body.echo else None
    return Prompt(expanded.token_ids, echo_text, spans=expanded.spans, images=expanded.images)


def build_dual_encoder_prompt(body: ChatRequest, model: ServedModel) -> Prompt:
    """Accepts exactly one text or image."""
    parts = [part for each in body.messages for part in _message_texts(each)]
    if len(parts) != 1:
        wrong = f"this model embeds one text or one image, and these are {len(parts)}"
        raise InvalidRequest(f"messages: {wrong}: send each in its own request", param="messages")
    if body.truncate_prompt_tokens is not None:
        raise InvalidRequest("truncate_prompt_tokens: it is for `input` here", param="truncate_prompt_tokens")
    if images := requested_images(body.messages, model):
        assert model.multimodal_prompt_builder is not None
        expanded = model.multimodal_prompt_builder.make_image_only_prompt(images[0])
        return Prompt(expanded.token_ids, spans=expanded.spans, images=expanded.images)
    (ids,) = check_and_encode_texts(model, [parts[0]], True, "messages")
    return Prompt(ids)


def _message_texts(message: ChatMessage) -> list[str]:
    """Contains "" for each image."""
    if message.content is None or isinstance(message.content, str):
        return [message.content or ""]
    return [part.text if isinstance(part, TextPart) else "" for part in message.content]


def expand_image_placeholders_in_text(text: str, messages: Sequence[ChatMessage], model: ServedModel) -> str:
    images = requested_images(messages, model)
    if not images:
        return text
    assert model.multimodal_prompt_builder is not None
    check_images_rendered(text, model.multimodal_prompt_builder.template_image_token, messages)
    return model.multimodal_prompt_builder.expand_text(text, images)


def requested_images(messages: Sequence[ChatMessage], model: ServedModel) -> list[RequestImage]:
    """Raises the errors of collect_images, and NeedsWorker because image files may be hostile."""
    if all(message.content is None or isinstance(message.content, str) for message in messages):
        return []
    if model.multimodal_prompt_builder is not None and not model.expendable and has_images(messages):
        raise NeedsWorker
    return collect_images(messages, model)


def render_chat(
    body: ChatRequest, model: ServedModel, tools: Sequence[dict[str, Any]] | None, *, trusted: bool
) -> RenderedConversation:
    """Raises InvalidRequest, NeedsWorker."""
    return select_renderer(body.chat_template, model, trusted=trusted).render_conversation(
        [message.to_template_message() for message in body.messages],
        tools=tools,
        documents=body.documents,
        add_generation_prompt=body.add_generation_prompt and not body.continue_final_message,
        continue_final_message=body.continue_final_message,
        variables={**body.reasoning_template_variables, **thinking_variables(body, model), **body.chat_template_kwargs},
    )


def thinking_variables(body: ChatRequest, model: ServedModel) -> dict[str, Any]:
    is_default = body.reasoning_effort is None and not body.chat_template_kwargs
    if is_default or body.chat_template is not None:
        return {}
    return model.chat_formats.thinking_switch.request_variables(
        body.reasoning_effort, body.chat_template_kwargs, model.chat_formats.template_text
    )


def final_message_text(body: ChatRequest, text: str) -> str:
    final = str(normalize_message(body.messages[-1].to_template_message())["content"])
    return final if text.endswith(final) else final.strip()


def select_renderer(chat_template: str | None, model: ServedModel, *, trusted: bool) -> ChatRenderer:
    """Raises InvalidRequest for a request's own template unless it is `trusted`, and NeedsWorker because such a
    template may never end or may fill the memory.
    """
    if chat_template is None:
        return model.chat_formats.renderer
    if not trusted:
        raise InvalidRequest(
            "chat_template is not allowed in requests; the server's operator may pass --trust-request-chat-template",
            param="chat_template",
        )
    if not model.expendable:
        raise NeedsWorker
    return model.chat_formats.renderer.with_template(chat_template)


def max_prompt_tokens(max_tokens: int | None, default: int, model: ServedModel) -> int:
    return max(1, model.context_length - max(1, default if max_tokens is None else max_tokens))


def truncate_prompt(prompt: Prompt, body: GenerationBody, max_tokens: int, model: ServedModel) -> Prompt:
    """truncate_prompt_tokens -1 stands for `max_tokens`."""
    limit = resolve_truncation_limit(body.truncate_prompt_tokens, model.context_length, max_tokens)
    if limit is None or len(prompt.ids) <= limit:
        return prompt
    return Prompt(truncate_ids(prompt.ids, limit, body.truncation_side))


def resolve_truncation_limit(limit: int | None, context_length: int, auto_limit: int) -> int | None:
    """None means no limit. `auto_limit` replaces -1."""
    if limit == 0 or (limit or 0) > context_length:
        raise InvalidRequest(
            f"truncate_prompt_tokens must be -1 or from 1 to the context length, {context_length}; got {limit}",
            param="truncate_prompt_tokens",
        )
    return auto_limit if limit == -1 else limit


def truncate_ids(ids: list[int], limit: int, side: str) -> list[int]:
    return ids[:limit] if side == "right" or len(ids) <= limit else ids[-limit:]


def check_and_encode_texts(
    model: ServedModel, texts: Sequence[str], add_special_tokens: bool, param: str, *, will_truncate: bool = False
) -> list[list[int]]:
    """Raises InvalidRequest for too long texts, unless `will_truncate`."""
    for text in texts:
        check_no_surrogates(text, param)
        if not will_truncate:
            check_text_fits(model, text, param)
    return model.tokenizer.encode_batch(texts, add_special_tokens=add_special_tokens)


def encode_rendered_conversation(
    model: ServedModel, conversation: RenderedConversation, add_special_tokens: bool, *, will_truncate: bool = False
) -> list[int]:
    """Special tokens in moved texts become plain text."""
    if not conversation.moved_texts:
        return check_and_encode_texts(
            model, [conversation.text], add_special_tokens, "messages", will_truncate=will_truncate
        )[0]
    check_no_surrogates(conversation.text, "messages")
    if not will_truncate:
        check_text_fits(model, conversation.text, "messages")
    text, literal_spans = conversation.text, conversation.moved_texts
    return encode_with_literal_texts(model.tokenizer, text, literal_spans, add_special_tokens=add_special_tokens)


def adaptation_summary(conversation: RenderedConversation) -> str:
    """The header's value, such as `developer->system at messages[0]; ...`."""
    adaptations = conversation.adaptations
    labels = [f"{each.label} at messages[{each.index}]" for each in adaptations[:MAX_ADAPTATIONS]]
    if len(adaptations) > MAX_ADAPTATIONS:
        labels.append(f"and {len(adaptations) - MAX_ADAPTATIONS} more")
    return re.sub(r"[^ -~]", "?", "; ".join(labels))  # callers can invent roles


def check_text_fits(model: ServedModel, text: str, param: str) -> None:
    """Rejects much too long texts early. Slices together have about as many tokens as the text. Raises
    ContextLengthExceeded if they exceed the context by over 10 % and one token per slice, more than the cuts can add.
    """
    if len(text) <= SLICE_CHARACTERS:
        return
    longest = model.context_length
    tokens = 0
    read = 0
    for piece in split_into_slices(text):
        tokens += len(model.tokenizer.encode(piece, add_special_tokens=False))
        read += len(piece)
        if tokens > longest + longest // 10 + len(text) // SLICE_CHARACTERS:
            raise ContextLengthExceeded(
                f"This model's maximum context length is {longest} tokens, but {param} came to about "
                f"{tokens * len(text) // read} tokens. Please shorten it",
                param=param,
            )


def split_into_slices(text: str) -> Iterator[str]:
    start = 0
    while len(text) - start > SLICE_CHARACTERS:
        space = text.rfind(" ", start + SLICE_CHARACTERS // 2, start + SLICE_CHARACTERS)
        end = start + SLICE_CHARACTERS if space < 0 else space
        yield text[start:end]
        start = end
    yield text[start:]
