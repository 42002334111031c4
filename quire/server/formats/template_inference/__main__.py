"""`python -m quire.server.formats.template_inference FILE.jinja ...` prints what chat templates reveal."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from quire.engine.text.conversation.chat_template import ChatRenderer
from quire.server.formats.call_forms.argument_forms import JsonArguments, LiteralArguments
from quire.server.formats.call_forms.call_form import CallForm
from quire.server.formats.call_forms.slots import ID_SLOT, INDEX_SLOT, KEY_SLOT, NAME_SLOT
from quire.server.formats.call_forms.tagged_arguments import TaggedArguments
from quire.server.formats.template_inference.call_inference import infer_call_form
from quire.server.formats.template_inference.template_prober import TemplateInferenceError, TemplateProber
from quire.server.formats.template_inference.turn_inference import infer_turn_form
from quire.server.formats.tools.named_formats import TOOL_FORMATS, find_tool_format

SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
SLOT_NAMES = {NAME_SLOT: "NAME", ID_SLOT: "ID", INDEX_SLOT: "INDEX", KEY_SLOT: "KEY"}


def main(paths: Sequence[str]) -> None:
    print("| template | a call | arguments | reasoning | proof |\n|---|---|---|---|---|")
    for path in map(Path, paths):
        print(inference_table_row(path.stem, path.read_text(encoding="utf-8")))


def inference_table_row(name: str, template: str) -> str:
    renderer = ChatRenderer({"default": template}, SPECIAL_TOKENS)
    began = time.perf_counter()
    thought = ""
    try:
        prober = TemplateProber(renderer)
        prober.learn_generation_prompt()
        turn = infer_turn_form(prober)
        thought = (
            f"{markdown_code(turn.reasoning_begin)} {markdown_code(turn.reasoning_end)}" if turn.reasoning_begin else ""
        )
        form = infer_call_form(renderer, turn)
    except TemplateInferenceError as error:
        known = find_tool_format("auto", template)
        used = next(
            (each.name for each in TOOL_FORMATS if each.format is known), "hermes, described in the system message"
        )
        return f"| {name} | {used} | | {thought} | none: {escape_table_cell(str(error))} |"
    milliseconds = (time.perf_counter() - began) * 1000
    proof = f"read back in {milliseconds:.0f} ms" + ("" if form.allows_many else "; one call a turn")
    return f"| {name} | {markdown_code(format_call(form))} | {describe_arguments(form)} | {thought} | {proof} |"


def format_call(form: CallForm) -> str:
    text = form.begin + form.head + "…" + form.tail + form.end
    for slot, name in SLOT_NAMES.items():
        text = text.replace(slot, name)
    return text


def describe_arguments(form: CallForm) -> str:
    match form.arguments:
        case JsonArguments(is_json_string=True):
            return "JSON in a string"
        case JsonArguments():
            return "JSON"
        case LiteralArguments() as written_arguments:
            return "literals: " + markdown_code(
                f"{written_arguments.before_key}KEY{written_arguments.colon}{written_arguments.syntax.quote}…{written_arguments.syntax.quote}"
            )
        case TaggedArguments() as written_arguments:
            end = written_arguments.end.replace(KEY_SLOT, "KEY")
            typed = ", typed" if len(set(written_arguments.infixes.values())) > 1 else ""
            return f"tags{typed}: " + markdown_code(
                f"{written_arguments.before_key}KEY{written_arguments.infixes['string']}…{end}"
            )
    return ""


def markdown_code(text: str) -> str:
    return f"`{escape_table_cell(text)}`"


def escape_table_cell(text: str) -> str:
    return text.replace("\n", "↵").replace("|", "\\|").replace("`", "'")


if __name__ == "__main__":
    main(sys.argv[1:])
