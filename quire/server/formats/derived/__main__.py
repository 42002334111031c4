"""`python -m quire.server.formats.derived FILE.jinja ...` prints what is found out from chat templates, as a table."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from quire.engine.text.chat_template import ChatRenderer
from quire.server.formats.derived.derive import derive_calls
from quire.server.formats.derived.probes import NotDerived, Prober
from quire.server.formats.derived.turn import infer_turn
from quire.server.formats.forms.arguments import JsonArguments, LiteralArguments
from quire.server.formats.forms.form import CallForm
from quire.server.formats.forms.slots import ID, INDEX, KEY, NAME
from quire.server.formats.forms.tagged import TaggedArguments
from quire.server.formats.tools.table import TABLE, tool_format

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
SLOT_NAMES = {NAME: "NAME", ID: "ID", INDEX: "INDEX", KEY: "KEY"}


def main(paths: Sequence[str]) -> None:
    print("| template | a call | arguments | reasoning | proof |\n|---|---|---|---|---|")
    for path in map(Path, paths):
        print(row(path.stem, path.read_text(encoding="utf-8")))


def row(name: str, template: str) -> str:
    """What is found out from one template, and how long that takes."""
    renderer = ChatRenderer({"default": template}, SPECIAL)
    began = time.perf_counter()
    thought = ""
    try:
        prober = Prober(renderer)
        prober.begin()
        turn = infer_turn(prober)
        thought = f"{code(turn.thought_begin)} {code(turn.thought_end)}" if turn.thought_begin else ""
        form = derive_calls(renderer, turn)
    except NotDerived as error:
        known = tool_format("auto", template)
        used = next((each.name for each in TABLE if each.format is known), "hermes, described in the system message")
        return f"| {name} | {used} | | {thought} | none: {escaped(str(error))} |"
    milliseconds = (time.perf_counter() - began) * 1000
    proof = f"read back in {milliseconds:.0f} ms" + ("" if form.many else "; one call a turn")
    return f"| {name} | {code(shown(form))} | {arguments(form)} | {thought} | {proof} |"


def shown(form: CallForm) -> str:
    """A turn with one call."""
    text = form.begin + form.head + "…" + form.tail + form.end
    for slot, name in SLOT_NAMES.items():
        text = text.replace(slot, name)
    return text


def arguments(form: CallForm) -> str:
    match form.arguments:
        case JsonArguments(in_string=True):
            return "JSON in a string"
        case JsonArguments():
            return "JSON"
        case LiteralArguments() as found:
            return "literals: " + code(f"{found.before_key}KEY{found.colon}{found.syntax.quote}…{found.syntax.quote}")
        case TaggedArguments() as found:
            end = found.end.replace(KEY, "KEY")
            typed = ", typed" if len(set(found.infixes.values())) > 1 else ""
            return f"tags{typed}: " + code(f"{found.before_key}KEY{found.infixes['string']}…{end}")
    return ""


def code(text: str) -> str:
    return f"`{escaped(text)}`"


def escaped(text: str) -> str:
    return text.replace("\n", "↵").replace("|", "\\|").replace("`", "'")


if __name__ == "__main__":
    main(sys.argv[1:])
