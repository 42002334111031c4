"""From a chat request to the spec of its generation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgspec

from quire.server.config import ServerConfig
from quire.server.formats.chat_formats import ChatFormats
from quire.server.formats.message import MessageFormat
from quire.server.formats.reasoning import thinking_budget
from quire.server.formats.thinking_switch import ALIASES, NO_SWITCH
from quire.server.generation.answers.chunks import ChatWriter
from quire.server.generation.answers.writer import MakesWriter
from quire.server.generation.spec import Prompt
from quire.server.protocol.chat import ChatRequest
from quire.server.protocol.common import adapted_header, ignored_header
from quire.server.resolve.answer_grammar import AnswerGrammar
from quire.server.resolve.checks import check_logprobs
from quire.server.resolve.common import Resolved, clipped_header, resolved, sampling_params
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
    tools = tool_use(body, model.formats.tools, close=config.disable_additional_properties)
    ignored = [*ignored, *body.ignored_params(), *ignored_by_template(body, model.formats)]
    headers = ignored_header(ignored, config.strict)
    check_logprobs("top_logprobs", body.top_logprobs, config.max_logprobs, model.vocab_size)
    check_logprobs("prompt_logprobs", body.prompt_logprobs, config.max_logprobs, model.vocab_size)
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    headers |= clipped_header(max_tokens, model)
    params = sampling_params(
        body,
        model,
        config,
        max_tokens=max_tokens,
        max_tokens_name="max_tokens" if body.max_completion_tokens is None else "max_completion_tokens",
        logprobs=body.top_logprobs if body.logprobs else None,
        prompt_logprobs=body.prompt_logprobs,
    )
    prompt = chat_prompt(body, model, tools.shown, trusted=config.trust_request_chat_template)
    headers |= adapted_header(prompt.adapted)
    message = message_format(body, tools, prompt, model)
    begun = None if message is None else message.begun
    thinking = thinking_budget(body.thinking_token_budget, model.formats.reasoning, begun, model.tokenizer)
    answer = AnswerGrammar(replace(tools, shown=None), asked_grammar(body, config), message)
    grammars = answer.grammars(model)
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
        headers={**headers, **(answer.headers() if grammars else {})},
        config=config,
        message=message,
        grammars=grammars,
        answer=answer if grammars else None,
        echo=body.echo,
    )


def ignored_by_template(body: ChatRequest, formats: ChatFormats) -> list[str]:
    """Names of parameters that the template does not use: the request's own template, or the model's."""
    template = body.chat_template or formats.template
    switched = formats.thinking if body.chat_template is None else NO_SWITCH
    known = ALIASES if switched.works else ()
    names = [name for name in body.chat_template_kwargs if name not in template and name not in known]
    ignored = [f"chat_template_kwargs.{name}" for name in names]
    if body.documents and "documents" not in template:
        ignored.append("documents")
    works = switched.works or switched.efforts or any(name in template for name in body.implied_variables)
    if not works and body.reasoning_effort is not None:
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
        custom=tools.custom,
        parallel=tools.parallel,
        calls_only=bool(tools.must_call),
        frame=frame,
    )
