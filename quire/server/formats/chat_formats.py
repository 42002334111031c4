"""Chooses how to read answers: by flag, by how the chat template renders, or by the template's text."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

from quire.engine.common.request_params import Task
from quire.engine.text.conversation.chat_template import ChatRenderer
from quire.server.config import ServerConfig
from quire.server.formats.call_forms.call_form import CallForm
from quire.server.formats.call_forms.slots import TAG, last_tag
from quire.server.formats.content_delimiters import ContentDelimiters
from quire.server.formats.reasoning_parser import REASONING_FORMATS as REASONING
from quire.server.formats.reasoning_parser import ReasoningFormat, find_reasoning_format
from quire.server.formats.template_inference.call_inference import can_read_back, infer_call_form
from quire.server.formats.template_inference.template_prober import TemplateInferenceError, TemplateProber
from quire.server.formats.template_inference.turn_inference import AssistantTurnForm, infer_turn_form
from quire.server.formats.thinking_switch import NO_SWITCH, ThinkingSwitch
from quire.server.formats.tools.named_formats import TOOL_FORMATS, find_tool_format
from quire.server.formats.tools.tool_parser import ToolFormat

GENERIC_FORMAT = "hermes"


class TemplateSource(Protocol):
    """A tokenizer, or what its files say of templates."""

    @property
    def chat_templates(self) -> Mapping[str, str]: ...

    @property
    def special_tokens(self) -> Mapping[str, str]: ...


@dataclass(frozen=True, slots=True)
class ChatFormats:
    template_text: str
    renderer: ChatRenderer
    reasoning_format: ReasoningFormat | None
    tool_format: ToolFormat | None
    """None if the operator has disabled tool calls."""
    content_delimiters: ContentDelimiters | None = None
    tools_source: str = ""
    thinking_switch: ThinkingSwitch = NO_SWITCH
    reads_code_blocks: bool = False
    """Calls in code blocks do not count if a grammar constrains the answer."""

    @classmethod
    def from_config(cls, config: ServerConfig, tokenizer: TemplateSource) -> ChatFormats:
        renderer = ChatRenderer(
            tokenizer.chat_templates,
            tokenizer.special_tokens,
            allow_unknown_roles=config.allow_unknown_roles,
            variables=config.default_chat_template_kwargs,
            content_format=config.chat_template_content_format,
            adapt_conversations=config.adapt_conversations == "auto",
        )
        template = "\n".join(tokenizer.chat_templates.values())
        prober = TemplateProber(renderer)
        turn = _infer_turn_form_or_none(prober)
        reasoning = _choose_reasoning_format(config.reasoning_parser, template, turn)
        choice = config.tool_call_parser
        tools, source, shown = _choose_tool_format_with_source(renderer, template, turn)
        if choice != "auto":
            tools = find_tool_format(choice, "")
            source = f"{choice}, by --tool-call-parser"
            shown = renderer.capabilities.shows_tools
        if tools is not None:
            renderer = renderer.renderer_with_described_tools(tools.example, always=not shown)
        in_blocks = renderer.capabilities.shows_tools and not config.strict_tool_calls
        thinking = ThinkingSwitch.from_template(renderer, template)
        return cls(
            template, renderer, reasoning, tools, _build_content_delimiters(turn, tools), source, thinking, in_blocks
        )


def list_capabilities(tasks: Collection[Task], formats: ChatFormats, *, accepts_images: bool) -> list[str]:
    """In Ollama's words."""
    generates = "generate" in tasks
    present = {
        "completion": generates,
        "tools": generates and formats.tool_format is not None,
        "thinking": generates and formats.reasoning_format is not None,
        "vision": accepts_images,
        "embedding": "embed" in tasks,
    }
    return [name for name, is_present in present.items() if is_present]


def _infer_turn_form_or_none(prober: TemplateProber) -> AssistantTurnForm | None:
    try:
        prober.learn_generation_prompt()
        return infer_turn_form(prober)
    except TemplateInferenceError:
        return None


def _choose_tool_format_with_source(
    renderer: ChatRenderer, template: str, turn: AssistantTurnForm | None
) -> tuple[ToolFormat | None, str, bool]:
    """Returns the format, its source in words, and whether the template describes it to the model."""
    known = find_tool_format("auto", template)
    name = next((row.name for row in TOOL_FORMATS if row.format is known), "")
    form: CallForm | None = None
    reason = "it does not render an assistant's turn"
    try:
        if turn is not None:
            form = infer_call_form(renderer, turn)
    except TemplateInferenceError as error:
        reason = str(error)
    if (
        form is not None
        and turn is not None
        and (form.allows_many or known is None or not can_read_back(known, renderer, turn))
    ):
        return form, "derived from the chat template", renderer.capabilities.shows_tools
    if known is not None:
        return known, f"{name}, by the chat template's text", renderer.capabilities.shows_tools
    source = f"{GENERIC_FORMAT}, described in the system message, as the chat template has no tool calls: {reason}"
    return find_tool_format(GENERIC_FORMAT, ""), source, False


def _choose_reasoning_format(choice: str, template: str, turn: AssistantTurnForm | None) -> ReasoningFormat | None:
    if choice != "auto" or turn is None or not turn.reasoning_begin:
        return find_reasoning_format(choice, template)
    for row in REASONING:
        if (row.begin, row.end) == (turn.reasoning_begin, turn.reasoning_end):
            return row
    later = (
        turn.generation_prompt.lstrip() + turn.reasoning_space + turn.reasoning_begin
        if turn.repeats_generation_prompt
        else ""
    )
    lead = turn.generation_prompt.strip() if later else ""
    return ReasoningFormat("template", turn.reasoning_begin, turn.reasoning_end, turn.reasoning_space, lead, later)


def _build_content_delimiters(turn: AssistantTurnForm | None, tools: ToolFormat | None) -> ContentDelimiters | None:
    if turn is None:
        return None
    form = tools if isinstance(tools, CallForm) else None
    if not turn.content_begin.strip():
        # If the text that ends a turn also begins calls, the parser needs that special token.
        tag = TAG.search(turn.end)
        shown = tag is not None and form is not None and tag[0] in form.opening
        return ContentDelimiters("", (), (), (turn.end.strip(),), "") if shown else None
    prompt_head = form.prompt_head if form is not None else ""
    lead = prompt_head or (turn.generation_prompt.lstrip() if turn.repeats_generation_prompt else "")
    later_begin = lead + turn.content_begin if lead or TAG.search(turn.content_begin) else ""
    end, last = turn.end.strip(), last_tag(turn.end)
    close = end[: end.rindex(last)].strip() if last else ""
    ends = tuple(one for one in (turn.content_end.strip(), end, close) if TAG.search(one))
    others = (turn.content_begin.replace("final", "commentary"),) if "<|channel|>final" in turn.content_begin else ()
    later_begins = tuple(
        later_begin.replace(turn.content_begin, one).strip() for one in (turn.content_begin, *others) if later_begin
    )
    if turn.repeats_generation_prompt:
        ends = (*ends, turn.reasoning_end)
    return ContentDelimiters(turn.content_begin, others, later_begins, ends, turn.content_end + close)
