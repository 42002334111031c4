"""Draws faults by a seed, and knows those that change nothing."""

from __future__ import annotations

import random
import tomllib
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from tests.mutants.faults import Fault, Statement, is_valid

EQUIVALENTS = Path(__file__).with_name("equivalents.toml")


@dataclass(frozen=True)
class Equivalent:
    """A fault that no test should notice. `line` becomes `mutated`, both as `Fault.lines` gives them."""

    file: str
    function: str
    operator: str
    line: str
    mutated: str
    reason: str

    def is_of(self, fault: Fault, source: str) -> bool:
        key = (fault.file, fault.function, fault.operator, *fault.lines(source))
        return key == (self.file, self.function, self.operator, self.line, self.mutated)


def read_equivalents(path: Path = EQUIVALENTS) -> list[Equivalent]:
    return [Equivalent(**each) for each in tomllib.loads(path.read_text(encoding="utf-8")).get("equivalent", [])]


def room_of(file: str) -> str:
    """`server/routes` of quire/server/routes/web_pages.py."""
    return "/".join(PurePosixPath(file).with_suffix("").parts[1:3])


def draw(statements: Sequence[Statement], count: int, seed: int, source_of: Callable[[str], str]) -> list[Fault]:
    """One fault in each of `count` equally long parts of the statements, which are ordered by rooms and files. So
    every room has its share. A part in which nothing can be made wrong has none.
    """
    ordered = sorted(statements, key=lambda each: (room_of(each.file), each.file, each.lines.start))
    chance = random.Random(seed)
    count = min(count, len(ordered))
    faults = []
    for i in range(count):
        part = ordered[len(ordered) * i // count : len(ordered) * (i + 1) // count]
        chance.shuffle(part)
        fault = next(filter(None, (_draw_one(each, chance, source_of) for each in part)), None)
        if fault is not None:
            faults.append(fault)
    return faults


def _draw_one(statement: Statement, chance: random.Random, source_of: Callable[[str], str]) -> Fault | None:
    """First an operator, then one of the places where it applies: else most faults would be in constants."""
    by_operator: dict[str, list[Fault]] = defaultdict(list)
    for fault in statement.faults:
        by_operator[fault.operator].append(fault)
    operators = sorted(by_operator)
    chance.shuffle(operators)
    for operator in operators:
        faults = by_operator[operator]
        chance.shuffle(faults)
        for fault in faults:
            if is_valid(fault, source_of(fault.file)):
                return fault
    return None
