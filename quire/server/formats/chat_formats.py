"""Chooses how to read a model's answers: by flag, from its chat template's rendering, or from the template's text."""

from __future__ import annotations

from dataclasses import dataclass

from quire.engine.text.chat_template import ChatRenderer
from quire.engine.text.tokenizer import Tokenizer
from quire.server.config import ServerConfig
from quire.server.formats.derived.derive import derive_calls, reads_back
from quire.server.formats.derived.probes import NotDerived, Prober
from quire.server.formats.derived.turn import Turn, infer_turn
from quire.server.formats.forms.form import CallForm
from quire.server.formats.forms.slots import TAG, last_tag
from quire.server.formats.frame import ContentFrame
from quire.server.formats.reasoning import TABLE as REASONING
from quire.server.formats.reasoning import ReasoningFormat, reasoning_format
from quire.server.formats.thinking_switch import NO_SWITCH, ThinkingSwitch
from quire.server.formats.tools.format import ToolFormat
from quire.server.formats.tools.table import TABLE, tool_format

GENERIC = "hermes"
"""The name of the format for templates that know no tools."""


@dataclass(frozen=True, slots=True)
class ChatFormats:
    """How the model writes the parts of an answer, and how its template is told of tools."""

    template: str
    """The text of all its chat templates."""
    renderer: ChatRenderer
    reasoning: ReasoningFormat | None
    tools: ToolFormat | None
    """None: the operator wants none looked for."""
    frame: ContentFrame | None = None
    tools_from: str = ""
    """Where the format of tool calls is from, in words for the operator."""
    thinking: ThinkingSwitch = NO_SWITCH
    in_blocks: bool = False
    """Code blocks with calls are calls too, where the model decides whether it calls."""

    @classmethod
    def chosen(cls, config: ServerConfig, tokenizer: Tokenizer) -> ChatFormats:
        renderer = ChatRenderer(
            tokenizer.chat_templates,
            tokenizer.special_tokens,
            any_role=config.allow_unknown_roles,
            variables=config.default_chat_template_kwargs,
            content=config.chat_template_content_format,
            adapts=config.adapt_conversations == "auto",
        )
        template = "\n".join(tokenizer.chat_templates.values())
        prober = Prober(renderer)
        turn = _turn(prober)
        reasoning = _reasoning(config.reasoning_parser, template, turn)
        choice = config.tool_call_parser
        tools, source, shown = _tools(renderer, template, turn)
        if choice != "auto":
            tools, source, shown = tool_format(choice, ""), f"{choice}, by --tool-call-parser", renderer.shows.tools
        if tools is not None:
            renderer = renderer.describing_tools(tools.example, always=not shown)
        in_blocks = renderer.shows.tools and not config.strict_tool_calls
        thinking = ThinkingSwitch.of(renderer, template)
        return cls(template, renderer, reasoning, tools, _frame(turn, tools), source, thinking, in_blocks)


def _turn(prober: Prober) -> Turn | None:
    try:
        prober.begin()
        return infer_turn(prober)
    except NotDerived:
        return None


def _tools(renderer: ChatRenderer, template: str, turn: Turn | None) -> tuple[ToolFormat | None, str, bool]:
    """The format of tool calls, where it is from, and whether the template tells the model of it."""
    known = tool_format("auto", template)
    name = next((row.name for row in TABLE if row.format is known), "")
    form: CallForm | None = None
    reason = "it does not show an assistant's turn"
    try:
        if turn is not None:
            form = derive_calls(renderer, turn)
    except NotDerived as error:
        reason = str(error)
    if form is not None and turn is not None and (form.many or known is None or not reads_back(known, renderer, turn)):
        return form, "derived from the chat template", renderer.shows.tools
    if known is not None:
        return known, f"{name}, by the chat template's text", renderer.shows.tools
    source = f"{GENERIC}, described in the system message, for the chat template has no form of its own: {reason}"
    return tool_format(GENERIC, ""), source, False


def _reasoning(choice: str, template: str, turn: Turn | None) -> ReasoningFormat | None:
    """The marks of thinking: those that the template writes, or else those that its text has."""
    if choice != "auto" or turn is None or not turn.thought_begin:
        return reasoning_format(choice, template)
    for row in REASONING:
        if (row.begin, row.end) == (turn.thought_begin, turn.thought_end):
            return row
    later = turn.lead.lstrip() + turn.thought_space + turn.thought_begin if turn.repeats else ""
    lead = turn.lead.strip() if later else ""
    return ReasoningFormat("template", turn.thought_begin, turn.thought_end, turn.thought_space, lead, later)


def _frame(turn: Turn | None, tools: ToolFormat | None) -> ContentFrame | None:
    if turn is None:
        return None
    form = tools if isinstance(tools, CallForm) else None
    if not turn.content_begin.strip():
        # If calls begin with what ends a turn, their parser has to see it, and it is not dropped as a special token.
        tag = TAG.search(turn.end)
        shown = tag is not None and form is not None and tag[0] in form.opening
        return ContentFrame("", (), (), (turn.end.strip(),), "") if shown else None
    given = form.given if form is not None else ""
    lead = given or (turn.lead.lstrip() if turn.repeats else "")
    again = lead + turn.content_begin if lead or TAG.search(turn.content_begin) else ""
    end, last = turn.end.strip(), last_tag(turn.end)
    close = end[: end.rindex(last)].strip() if last else ""
    ends = tuple(one for one in (turn.content_end.strip(), end, close) if TAG.search(one))
    others = (turn.content_begin.replace("final", "commentary"),) if "<|channel|>final" in turn.content_begin else ()
    agains = tuple(again.replace(turn.content_begin, one).strip() for one in (turn.content_begin, *others) if again)
    if turn.repeats:
        ends = (*ends, turn.thought_end)  # what ends a part of an answer
    return ContentFrame(turn.content_begin, others, agains, ends, turn.content_end + close)
