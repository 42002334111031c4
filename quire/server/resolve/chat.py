from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgspec

from quire.engine.text.structured_outputs import GrammarWithOpenObjects
from quire.server.config import ServerConfig
from quire.server.formats.chat_formats import ChatFormats
from quire.server.formats.message_parser import RequestMessageFormat
from quire.server.formats.reasoning_parser import make_engine_thinking_budget
from quire.server.formats.thinking_switch import NO_SWITCH, SWITCH_ALIASES
from quire.server.generation.resolved_request import Prompt
from quire.server.generation.response_writers.completion_chunks import ChatWriter
from quire.server.protocol.chat import ChatRequest
from quire.server.protocol.request_bodies import build_adapted_header, ignored_params_header
from quire.server.resolve.answer_grammar import AnswerGrammar
from quire.server.resolve.checks import check_logprobs
from quire.server.resolve.other_apis.chat_conversion import CallerFields, rename_adaptation_fields
from quire.server.resolve.parse import parse_body
from quire.server.resolve.prompts import build_chat_prompt
from quire.server.resolve.requested_grammar import requested_grammar
from quire.server.resolve.resolved_generation import (
    AnswerForm,
    AnswerOptions,
    RequestGrammars,
    ResolvedGeneration,
    build_generation,
)
from quire.server.resolve.sampling_fields import clipped_header, resolve_sampling_params
from quire.server.resolve.tool_use import NO_TOOLS, RequestTools, resolve_request_tools
from quire.server.served_model import ServedModel

PROMPT_TAIL_TOKENS = 32
"""Number of last tokens that show whether the prompt opens thinking."""


CHAT_FORM = AnswerForm(ChatWriter, "chatcmpl-")


def resolve_chat(body_bytes: bytes, model: ServedModel, config: ServerConfig) -> ResolvedGeneration:
    return resolve_chat_request(parse_body(body_bytes, ChatRequest), model, config)


def resolve_chat_request(
    body: ChatRequest,
    model: ServedModel,
    config: ServerConfig,
    form: AnswerForm = CHAT_FORM,
    *,
    ignored: Sequence[str] = (),
    caller_fields: CallerFields | None = None,
) -> ResolvedGeneration:
    name = model.resolve_model_name(body.model)
    tools = NO_TOOLS
    if body.tools or body.tool_choice != "auto":
        tools = resolve_request_tools(
            body,
            model.chat_formats.tool_format,
            close=config.disable_additional_properties,
            strict_level=config.tool_strict_level,
        )
    ignored_by_template = params_ignored_by_template(body, model.chat_formats)
    ignored = [*ignored, *body.check_params_and_list_ignored(), *ignored_by_template]
    headers = ignored_params_header(ignored, config.strict)
    max_tokens_name, max_tokens = body.token_limit
    check_logprobs("top_logprobs", body.top_logprobs, config.max_logprobs, model.vocab_size)
    check_logprobs("prompt_logprobs", body.prompt_logprobs, config.max_logprobs, model.vocab_size)
    prompt_only = (max_tokens_name, max_tokens) == ("n_predict", 0)
    headers |= clipped_header(max_tokens, model)
    params = resolve_sampling_params(
        body,
        model,
        config,
        max_tokens=1 if prompt_only else max_tokens,
        max_tokens_name=max_tokens_name,
        logprobs=body.top_logprobs if body.logprobs else None,
        prompt_logprobs=body.prompt_logprobs,
    )
    prompt = build_chat_prompt(body, model, tools.template_tools, trusted=config.trust_request_chat_template)
    if prompt.adaptations:
        headers |= build_adapted_header(rename_adaptation_fields(prompt.adaptations, caller_fields or {}))
    message = build_message_format(body, tools, prompt, model)
    if body.thinking_token_budget is not None:
        begun = None if message is None else message.starts_in_thinking
        thinking = make_engine_thinking_budget(
            body.thinking_token_budget, model.chat_formats.reasoning_format, begun, model.tokenizer
        )
        params = msgspec.structs.replace(params, thinking=thinking)
    grammars = _build_request_grammars(requested_grammar(body, config, model.tokenizer), tools, message, model)
    if message is not None and not grammars.to_check:  # otherwise a grammar defines calls
        message = replace(message, reads_code_blocks=model.chat_formats.reads_code_blocks)
    options = AnswerOptions(
        headers=headers, logprobs=body.logprobs, message_format=message, echo=body.echo, prompt_only=prompt_only
    )
    return build_generation(body, form, config, name, [prompt], params, options, grammars)


def _build_request_grammars(
    requested_format: tuple[str, GrammarWithOpenObjects] | None,
    tools: RequestTools,
    message: RequestMessageFormat | None,
    model: ServedModel,
) -> RequestGrammars:
    if not tools.tools_by_name and requested_format is None:
        return RequestGrammars()
    answer = AnswerGrammar(replace(tools, template_tools=None), requested_format, message)
    to_check = answer.build_grammars(model)
    return RequestGrammars(
        to_check=to_check, weakenable=answer if to_check else None, schema_headers=answer.schema_headers()
    )


def params_ignored_by_template(body: ChatRequest, formats: ChatFormats) -> list[str]:
    template = body.chat_template or formats.template_text
    switched = formats.thinking_switch if body.chat_template is None else NO_SWITCH
    known = SWITCH_ALIASES if switched.is_switchable else ()
    names = [name for name in body.chat_template_kwargs if name not in template and name not in known]
    ignored = [f"chat_template_kwargs.{name}" for name in names]
    if body.documents and "documents" not in template:
        ignored.append("documents")
    works = (
        switched.is_switchable
        or switched.effort_words
        or any(name in template for name in body.reasoning_template_variables)
    )
    if not works and body.reasoning_effort is not None:
        ignored.append("reasoning_effort")
    return ignored


def build_message_format(
    body: ChatRequest, tools: RequestTools, prompt: Prompt, model: ServedModel
) -> RequestMessageFormat | None:
    """Returns None if all text is content."""
    reasoning, delimiters = model.chat_formats.reasoning_format, model.chat_formats.content_delimiters
    if reasoning is None and tools.tool_format is None and delimiters is None:
        return None
    end = model.tokenizer.decode(prompt.ids[-PROMPT_TAIL_TOKENS:], skip_special_tokens=False)
    return RequestMessageFormat(
        reasoning_format=reasoning,
        starts_in_thinking=None if reasoning is None else reasoning.starts_in_thinking(end),
        include_reasoning=body.include_reasoning,
        tool_format=tools.tool_format,
        tools_by_name=tools.tools_by_name,
        custom_tool_names=tools.custom_tool_names,
        allows_parallel_calls=tools.allows_parallel,
        calls_only=bool(tools.required_tools),
        content_delimiters=delimiters,
    )
