"""`code_of` distinguishes commits that only rename from commits that change behavior."""

from __future__ import annotations

import pytest

from tests.golden.code import capture_code, code_of
from tests.golden.tree import Tree
from tests.tree import ROOT

BEFORE = '''"""A module."""
from __future__ import annotations
import os
from dataclasses import dataclass

@dataclass(frozen=True)
class Row:
    slot: int
    """Its place."""
    def behind(self, count: int, *, given: Row | None = None) -> list[int]:
        """What stands behind it."""
        found = [self.slot + i for i in range(count)]
        total = sum(found)
        def inner() -> int:
            return total + self.slot
        try:
            import json
        except ImportError as error:
            raise KeyError(f"{error!r}") from None
        match given:
            case Row(slot=1):
                return self.behind(count=inner(), given=given)
        return found
'''
RENAMED = (
    BEFORE.replace("Row", "ScheduledRequest")
    .replace("behind", "tokens_after")
    .replace("found", "positions")
    .replace("given", "last_request")
    .replace("What stands", "Return what comes")
    .replace("import os\n", "import abc\nimport os\n")
)


def test_code_of_ignores_consistent_renames() -> None:
    assert BEFORE != RENAMED
    assert code_of(BEFORE) == code_of(RENAMED)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("total = sum(positions)", "positions = sum(positions)"),
        ("return total + self.slot", "return count + self.slot"),
        ("range(count)", "range(count + 1)"),
        ("count: int, *, last_request: ScheduledRequest", "last_request: int, *, count: ScheduledRequest"),
        ('f"{error!r}"', 'f"{error!s}"'),
    ],
)
def test_code_of_differs_when_behavior_changes(old: str, new: str) -> None:
    assert old in RENAMED
    assert code_of(RENAMED.replace(old, new)) != code_of(BEFORE)


@pytest.mark.slow
def test_capture_code_reads_every_module() -> None:
    modules = capture_code(Tree("head", ROOT))
    assert {
        "quire/engine/engine_core.py",
        "quire/server/app.py",
        "quire/kernels/backend_selection.py",
        "quire/__init__.py",
    } <= modules.keys()
    assert len(modules) == len(list((ROOT / "quire").rglob("*.py")))
