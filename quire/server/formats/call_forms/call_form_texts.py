from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

from quire.server.formats.call_forms.argument_forms import ArgumentsForm
from quire.server.formats.call_forms.slots import NAME_SLOT, SLOT_PATTERN, TAG, TAG_START, split_into_atoms
from quire.server.formats.tools.json_calls import JsonCallKeys

DISTINCT_MARK = re.compile(rf"{TAG.pattern}|<\w|[A-Z_]{{3}}\]")
"""Text that hardly occurs outside of calls: a tag, its start, or capitals and a bracket."""

NAME_TAG_OPENING = re.compile(rf"<[^<>\s{NAME_SLOT}]*(?:[=>]|\s[^<>{NAME_SLOT}]*[\"'=]){NAME_SLOT}")
"""A tag that contains the name, such as `<function=` or `<invoke name="`, up to the name."""


@dataclass(frozen=True)
class CallFormTexts:
    """Texts of a call may contain the slots NAME, ID and INDEX."""

    begin: str
    head: str
    arguments: ArgumentsForm
    tail: str
    between: str
    end: str
    allows_many: bool = True
    """False if the template shows only one call per turn."""
    prompt_head: str = ""
    """The beginning of the first call's head, if the prompt ends with it."""
    turn_end: str = ""
    """Text after the calls, which the model may omit."""
    json_keys: JsonCallKeys | None = None
    """Set if a call is one JSON object with name and arguments."""
    content_begin: str = ""
    content_end: str = ""
    named_ids: bool = False
    """True if the name is only in the id, as in `functions.name:0`."""
    short_ids: bool = False
    """True if the template refuses ids other than nine letters and digits."""
    first_index: int = 0
    unwrapped_heads: tuple[str, ...] = ()
    """Heads without the surrounding tag, which models sometimes omit. They are read only before a tool's name."""
    other_heads: tuple[str, ...] = ()
    """Parsers read these heads; grammars do not allow them."""

    @cached_property
    def opening(self) -> str:
        return self.begin + self.fixed_head

    @cached_property
    def fixed_head(self) -> str:
        return SLOT_PATTERN.split(self.head)[0]

    @cached_property
    def texts_after_head_slot(self) -> list[str]:
        first_atoms = [
            split_into_atoms(one.strip())[:1] for one in (self.arguments.before_key, self.tail, self.end, self.turn_end)
        ]
        return [one[0] for one in first_atoms if one] or ["{"]

    @cached_property
    def opening_after_prompt(self) -> str:
        return self.opening.removeprefix(self.prompt_head)

    @cached_property
    def has_distinct_marker(self) -> bool:
        """False if ordinary text could match the marker, so that only the names of the request's tools begin a call."""
        marker = marker_prefix(self.opening_after_prompt)
        return DISTINCT_MARK.search(marker) is not None or (self.json_keys is not None and num_letters(marker) > 4)


def marker_prefix(literal: str) -> str:
    joined = SLOT_PATTERN.split(literal)[0].strip()
    if (group := re.match(TAG_START, joined)) is not None:
        return group[0]
    cut = re.split(r"\s", joined)[0]
    return joined.split("\n")[0] if cut.startswith("<") else cut


def num_letters(text: str) -> int:
    return sum(map(str.isalpha, text))


def non_space_atoms(literal: str) -> list[str]:
    return [atom for atom in split_into_atoms(literal) if atom.strip()]
