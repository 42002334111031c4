"""What a chat template shows of tool calls: the texts around calls, names and arguments."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

from quire.server.formats.call_forms.argument_forms import ArgumentsForm
from quire.server.formats.call_forms.slots import NAME_SLOT, SLOT_PATTERN, TAG, TAG_START, split_into_atoms
from quire.server.formats.tools.json_calls import JsonCallKeys

DISTINCT_MARK = re.compile(rf"{TAG.pattern}|<\w|[A-Z_]{{3}}\]")
"""What tells that a marker is none by chance: a tag, or how one begins."""

NAME_TAG_OPENING = re.compile(rf"<[^<>\s{NAME_SLOT}]*(?:[=>]|\s[^<>{NAME_SLOT}]*[\"'=]){NAME_SLOT}")
"""How a tag that holds a call's name begins: <function=…, <invoke name="…"""


@dataclass(frozen=True)
class CallFormTexts:
    """What stands where in a turn with calls. Texts may hold the characters for a call's NAME, ID and INDEX."""

    begin: str
    """Before the first call."""
    head: str
    """From the beginning of each call to its arguments."""
    arguments: ArgumentsForm
    tail: str
    """From the arguments to the end of each call."""
    between: str
    """Between two calls."""
    end: str
    """Behind the last call."""
    allows_many: bool = True
    """False: the template shows one call in a turn."""
    prompt_head: str = ""
    """The part of the first call's head that the prompt ends with."""
    turn_end: str = ""
    """What ends a turn with calls; a model may write it, or stop before it."""
    json_keys: JsonCallKeys | None = None
    """If a call is a JSON object with its name and arguments: how that names them. It is read in any order of keys."""
    content_begin: str = ""
    content_end: str = ""
    """What the model writes around content."""
    named_ids: bool = False
    """The name stands in the id and nowhere else: `functions.name:0`."""
    short_ids: bool = False
    """The template refuses ids that are not nine letters and digits."""
    first_index: int = 0
    unwrapped_heads: tuple[str, ...] = ()
    """Heads without the tag around them, which models forget. They are read if the name is a tool's."""
    other_heads: tuple[str, ...] = ()
    """Heads that are read too, and that a grammar does not allow."""

    @cached_property
    def opening(self) -> str:
        """What stands before the first slot of the first call."""
        return self.begin + self.fixed_head

    @cached_property
    def fixed_head(self) -> str:
        """The part of the head before its first slot."""
        return SLOT_PATTERN.split(self.head)[0]

    @cached_property
    def texts_after_head_slot(self) -> list[str]:
        """What may follow a head that ends with a slot."""
        first_atoms = [
            split_into_atoms(one.strip())[:1] for one in (self.arguments.before_key, self.tail, self.end, self.turn_end)
        ]
        return [one[0] for one in first_atoms if one] or ["{"]

    @cached_property
    def opening_after_prompt(self) -> str:
        """What the model writes before the first slot of the first call."""
        return self.opening.removeprefix(self.prompt_head)

    @cached_property
    def has_distinct_marker(self) -> bool:
        """Whether calls begin with a mark that other text will not have. If not, names must be those of tools."""
        marker = marker_prefix(self.opening_after_prompt)
        return DISTINCT_MARK.search(marker) is not None or (self.json_keys is not None and num_letters(marker) > 4)


def marker_prefix(literal: str) -> str:
    """The beginning of a literal that tells it from other text: a tag, or all up to white space or a slot."""
    joined = SLOT_PATTERN.split(literal)[0].strip()
    if (group := re.match(TAG_START, joined)) is not None:
        return group[0]
    cut = re.split(r"\s", joined)[0]
    return joined.split("\n")[0] if cut.startswith("<") else cut


def num_letters(text: str) -> int:
    return sum(map(str.isalpha, text))


def non_space_atoms(literal: str) -> list[str]:
    """The atoms of a literal that are not white space."""
    return [atom for atom in split_into_atoms(literal) if atom.strip()]
