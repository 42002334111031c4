"""From a chat request to the spec of its generation."""

from __future__ import annotations

import msgspec

from quire.engine.types import Grammar, SamplingParams
from quire.server.access.tenants import Tenant
from quire.server.config import ServerConfig
from quire.server.formats.grammars import after_thinking, either
from quire.server.formats.message import MessageFormat
from quire.server.formats.reasoning import thinking_budget
from quire.server.generation.spec import GenerationSpec, Prompt
from quire.server.protocol.chat import ChatRequest
from quire.server.protocol.common import ignored_header
from quire.server.resolve.checks import check_logprobs
from quire.server.resolve.common import resolved
from quire.server.resolve.prompts import chat_prompt
from quire.server.resolve.sampling_params import sampling_params
from quire.server.resolve.structured import asked_grammar
from quire.server.resolve.tools import ToolUse, tool_use
from quire.server.served_model import ServedModel

PROMPT_END = 32
"""How many tokens at a prompt's end are decoded to see whether it ends with a mark of thinking."""


async def chat_spec(body: ChatRequest, model: ServedModel, tenant: Tenant, config: ServerConfig) -> GenerationSpec:
    """Raises ModelNotFound, and InvalidRequest naming the parameter."""
    name = model.answer_name(body.model)
    tools = tool_use(body, model.formats.tools)
    ignored = [*body.ignored_params(), *ignored_by_template(body, tools, model.formats.template)]
    headers = ignored_header(ignored, config.strict)
    check_logprobs("top_logprobs", body.top_logprobs, config.max_logprobs)
    check_logprobs("prompt_logprobs", body.prompt_logprobs, config.max_logprobs)
    params = sampling_params(
        body,
        model,
        max_tokens=body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens,
        max_tokens_name="max_tokens" if body.max_completion_tokens is None else "max_completion_tokens",
        logprobs=body.top_logprobs if body.logprobs else None,
        prompt_logprobs=body.prompt_logprobs,
    )
    prompt = await chat_prompt(body, model, tools.shown, trusted=config.trust_request_chat_template)
    message = message_format(body, tools, prompt, model)
    return resolved(
        body,
        tenant,
        id_prefix="chatcmpl",
        model=name,
        prompts=[prompt],
        params=await _constrained(params, body, tools, message, model),
        logprobs=body.logprobs,
        headers=headers,
        message=message,
    )


def ignored_by_template(body: ChatRequest, tools: ToolUse, template: str) -> list[str]:
    """Names of parameters that the template does not use: the request's own template, or the model's."""
    template = body.chat_template or template
    ignored = [f"chat_template_kwargs.{name}" for name in body.chat_template_kwargs if name not in template]
    if body.documents and "documents" not in template:
        ignored.append("documents")
    if tools.shown and "tools" not in template:
        ignored.append("tools")
    if not any(name in template for name in body.implied_variables) and body.reasoning_effort is not None:
        ignored.append("reasoning_effort")
    return ignored


def message_format(body: ChatRequest, tools: ToolUse, prompt: Prompt, model: ServedModel) -> MessageFormat | None:
    """How to read the answers; None when all of their text is content."""
    reasoning = model.formats.reasoning
    if reasoning is None and tools.format is None:
        return None
    end = model.tokenizer.decode(prompt.ids[-PROMPT_END:], skip_special_tokens=False)
    return MessageFormat(
        reasoning=reasoning,
        begun=None if reasoning is None else reasoning.begun(end),
        include_reasoning=body.include_reasoning,
        tools=tools.format,
        known=tools.known,
        parallel=tools.parallel,
    )


async def _constrained(
    params: SamplingParams, body: ChatRequest, tools: ToolUse, message: MessageFormat | None, model: ServedModel
) -> SamplingParams:
    """`params`, with the answer's grammar and its thinking budget filled in."""
    grammar = await answer_grammar(body, tools, message, model)
    begun = None if message is None else message.begun
    thinking = thinking_budget(body.thinking_token_budget, model.formats.reasoning, begun, model.tokenizer)
    return msgspec.structs.replace(params, grammar=grammar, thinking=thinking)


async def answer_grammar(
    body: ChatRequest, tools: ToolUse, message: MessageFormat | None, model: ServedModel
) -> Grammar | None:
    """The grammar that answers must match; None: any text.

    If the model must call tools, there is no content, so a requested format is ignored. If it may call tools and a
    format is requested, an answer is either calls or content in that format.
    """
    asked = asked_grammar(body)
    call = tools.grammar(model.tokenizer, alone=asked is not None)
    if call is not None:
        if asked is not None and not tools.must_call:
            # Checked by itself first, so that an error names its parameter and not `tools`.
            await model.grammars.checked(asked)
            call = either(asked[1], call)
        asked = "tools", call
    if asked is not None and message is not None and message.reasoning is not None:
        asked = asked[0], after_thinking(asked[1], message.reasoning, message.begun, model.tokenizer)
    return await model.grammars.checked(asked)
