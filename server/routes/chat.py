"""POST /v1/chat/completions."""

from __future__ import annotations

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from quire.engine.types import Grammar
from quire.server.access.admission import GenerationRoute
from quire.server.generation.answers.chat import ChatWriter
from quire.server.generation.answers.head import Head, new_id
from quire.server.generation.choice import Job
from quire.server.generation.message import MessageFormat
from quire.server.generation.prompts import Prompt, chat_prompt
from quire.server.generation.reasoning import thinking_budget
from quire.server.generation.sampling_params import check_logprobs, sampling_params
from quire.server.generation.structured import after_thinking, asked_grammar, either
from quire.server.generation.tools.request import ToolUse, tool_use
from quire.server.protocol.chat import ChatRequest
from quire.server.protocol.common import ignored_header
from quire.server.routes.reply import reply
from quire.server.served_model import Serving, serving_of

router = APIRouter(route_class=GenerationRoute)
PROMPT_END = 32
"""Tokens among which the last mark of a prompt's thinking is."""


@router.post("/v1/chat/completions", response_model=None)
async def create_chat_completion(body: ChatRequest, request: Request) -> Response:
    """Answer a conversation."""
    serving = serving_of(request)
    model = serving.model_name(body.model)
    tools = tool_use(body, serving.formats.tools)
    ignored = [*body.ignored_params(), *ignored_by_template(body, tools, serving.formats.template)]
    headers = ignored_header(ignored, serving.config.strict)
    check_logprobs("top_logprobs", body.top_logprobs, serving.config.max_logprobs)
    check_logprobs("prompt_logprobs", body.prompt_logprobs, serving.config.max_logprobs)
    params = sampling_params(
        body,
        serving,
        max_tokens=body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens,
        max_tokens_name="max_tokens" if body.max_completion_tokens is None else "max_completion_tokens",
        logprobs=body.top_logprobs if body.logprobs else None,
        prompt_logprobs=body.prompt_logprobs,
    )
    prompt = await chat_prompt(body, serving, tools.shown)
    message = message_format(body, tools, prompt, serving)
    grammar = await answer_grammar(body, tools, message, serving)
    begun = None if message is None else message.begun
    thinking = thinking_budget(body.thinking_token_budget, serving.formats.reasoning, begun, serving.tokenizer)
    params = msgspec.structs.replace(params, grammar=grammar, thinking=thinking)
    head = Head(new_id("chatcmpl"), model, serving.fingerprint)
    job = Job(head.id, body, [prompt], params, message=message)
    writer = ChatWriter(head, serving.tokenizer, body, logprobs=body.logprobs)
    return await reply(request, serving, job, writer, headers)


def ignored_by_template(body: ChatRequest, tools: ToolUse, template: str) -> list[str]:
    """Names of parameters that the template makes nothing of, the model's or the request's own."""
    template = body.chat_template or template
    ignored = [f"chat_template_kwargs.{name}" for name in body.chat_template_kwargs if name not in template]
    if body.documents and "documents" not in template:
        ignored.append("documents")
    if tools.shown and "tools" not in template:
        ignored.append("tools")
    if not any(name in template for name in body.implied_variables) and body.reasoning_effort is not None:
        ignored.append("reasoning_effort")
    return ignored


async def answer_grammar(
    body: ChatRequest, tools: ToolUse, message: MessageFormat | None, serving: Serving
) -> Grammar | None:
    """What the answer must match: calls that must be made, which leave no content to format; or, where the model may
    call tools and the content has a format, either of the two."""
    asked = asked_grammar(body)
    call = tools.grammar(serving.tokenizer, alone=asked is not None)
    if call is not None:
        if asked is not None and not tools.must_call:
            # Tried out by itself first, so that an error names the parameter that is wrong.
            await serving.grammars.checked(asked)
            call = either(asked[1], call)
        asked = "tools", call
    if asked is not None and message is not None and message.reasoning is not None:
        asked = asked[0], after_thinking(asked[1], message.reasoning, message.begun, serving.tokenizer)
    return await serving.grammars.checked(asked)


def message_format(body: ChatRequest, tools: ToolUse, prompt: Prompt, serving: Serving) -> MessageFormat | None:
    """How to read the answers; None when all of them is content."""
    reasoning = serving.formats.reasoning
    if reasoning is None and tools.format is None:
        return None
    end = serving.tokenizer.decode(prompt.ids[-PROMPT_END:], skip_special_tokens=False)
    return MessageFormat(
        reasoning=reasoning,
        begun=None if reasoning is None else reasoning.begun(end),
        include_reasoning=body.include_reasoning,
        tools=tools.format,
        known=tools.known,
        parallel=tools.parallel,
    )
