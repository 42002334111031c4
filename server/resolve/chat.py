"""From a chat request to the spec of its generation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgspec

from quire.engine.types import Grammar
from quire.server.config import ServerConfig
from quire.server.formats.grammars import after_thinking, either, framed
from quire.server.formats.message import MessageFormat
from quire.server.formats.reasoning import thinking_budget
from quire.server.generation.answers.chunks import ChatWriter
from quire.server.generation.answers.writer import MakesWriter
from quire.server.generation.spec import Prompt
from quire.server.protocol.chat import ChatRequest
from quire.server.protocol.common import adapted_header, ignored_header
from quire.server.resolve.checks import check_logprobs
from quire.server.resolve.common import Resolved, resolved, sampling_params
from quire.server.resolve.parse import parse
from quire.server.resolve.prompts import chat_prompt
from quire.server.resolve.structured import asked_grammar
from quire.server.resolve.tools import ToolUse, tool_use
from quire.server.served_model import ServedModel

PROMPT_END = 32
"""How many tokens at a prompt's end are decoded to see whether it ends with a mark of thinking."""


def resolve_chat(given: bytes, model: ServedModel, config: ServerConfig) -> Resolved:
    """Raises ModelNotFound, and InvalidRequest naming the parameter."""
    return chat_call(parse(given, ChatRequest), model, config)


def chat_call(
    body: ChatRequest,
    model: ServedModel,
    config: ServerConfig,
    *,
    writer: MakesWriter = ChatWriter,
    id_prefix: str = "chatcmpl-",
    ignored: Sequence[str] = (),
) -> Resolved:
    """Raises as above. `ignored`: more names of parameters without effect."""
    name = model.answer_name(body.model)
    tools = tool_use(body, model.formats.tools)
    ignored = [*ignored, *body.ignored_params(), *ignored_by_template(body, model.formats.template)]
    headers = ignored_header(ignored, config.strict)
    check_logprobs("top_logprobs", body.top_logprobs, config.max_logprobs, model.vocab_size)
    check_logprobs("prompt_logprobs", body.prompt_logprobs, config.max_logprobs, model.vocab_size)
    params = sampling_params(
        body,
        model,
        max_tokens=body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens,
        max_tokens_name="max_tokens" if body.max_completion_tokens is None else "max_completion_tokens",
        logprobs=body.top_logprobs if body.logprobs else None,
        prompt_logprobs=body.prompt_logprobs,
    )
    prompt = chat_prompt(body, model, tools.shown, trusted=config.trust_request_chat_template)
    headers |= adapted_header(prompt.adapted)
    message = message_format(body, tools, prompt, model)
    begun = None if message is None else message.begun
    thinking = thinking_budget(body.thinking_token_budget, model.formats.reasoning, begun, model.tokenizer)
    grammars = answer_grammars(body, tools, message, model)
    if message is not None and not grammars:  # else a grammar says what a call is
        message = replace(message, in_blocks=model.formats.in_blocks)
    return resolved(
        body,
        writer=writer,
        id_prefix=id_prefix,
        model=name,
        prompts=[prompt],
        params=msgspec.structs.replace(params, thinking=thinking),
        logprobs=body.logprobs,
        headers=headers,
        config=config,
        message=message,
        grammars=grammars,
        parts=tools.schemas if grammars else (),
        echo=body.echo,
    )


def ignored_by_template(body: ChatRequest, template: str) -> list[str]:
    """Names of parameters that the template does not use: the request's own template, or the model's."""
    template = body.chat_template or template
    ignored = [f"chat_template_kwargs.{name}" for name in body.chat_template_kwargs if name not in template]
    if body.documents and "documents" not in template:
        ignored.append("documents")
    if not any(name in template for name in body.implied_variables) and body.reasoning_effort is not None:
        ignored.append("reasoning_effort")
    return ignored


def message_format(body: ChatRequest, tools: ToolUse, prompt: Prompt, model: ServedModel) -> MessageFormat | None:
    """How to parse the answers. None if all of their text is content."""
    reasoning, frame = model.formats.reasoning, model.formats.frame
    if reasoning is None and tools.format is None and frame is None:
        return None
    end = model.tokenizer.decode(prompt.ids[-PROMPT_END:], skip_special_tokens=False)
    return MessageFormat(
        reasoning=reasoning,
        begun=None if reasoning is None else reasoning.begun(end),
        include_reasoning=body.include_reasoning,
        tools=tools.format,
        known=tools.known,
        parallel=tools.parallel,
        calls_only=bool(tools.must_call),
        frame=frame,
    )


def answer_grammars(
    body: ChatRequest, tools: ToolUse, message: MessageFormat | None, model: ServedModel
) -> list[tuple[str, Grammar]]:
    """Grammars to check, each with its parameter; answers must match the last one. None: they are any text.

    If the model must call tools, there is no content, so a requested format is ignored. If it may call tools and a
    format is requested, an answer is either calls or content in that format.
    """
    asked, first = asked_grammar(body), []
    call = tools.grammar(model.tokenizer, alone=asked is not None)
    if call is not None:
        if asked is not None and not tools.must_call:
            first = [asked]  # by itself, so that an error names its parameter and not `tools`
            call = either(framed(asked[1], model.formats.frame, model.tokenizer), call)
        asked = "tools", call
    elif asked is not None:
        asked = asked[0], framed(asked[1], model.formats.frame, model.tokenizer)
    if asked is None:
        return []
    if message is not None and message.reasoning is not None:
        asked = asked[0], after_thinking(asked[1], message.reasoning, message.begun, model.tokenizer)
    return [*first, asked]
