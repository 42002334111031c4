"""docs/internals/lab-notes/published-claims.md matches benchmarks.claims in rows that are equal on every machine."""

from __future__ import annotations

import re

import pytest

from benchmarks.claims.memory import waste
from benchmarks.claims.plan import plans
from tests.tree import ROOT

DOCUMENT = (ROOT / "docs/internals/lab-notes/published-claims.md").read_text(encoding="utf-8")


def cells(claim: str) -> list[str]:
    """Cells of a claim's row: measured, without the feature, claimed."""
    (row,) = re.findall(rf"^\| {re.escape(claim)} \| (.+) \|$", DOCUMENT, re.MULTILINE)
    return [cell.strip() for cell in row.split(" | ")]


@pytest.mark.slow
def test_memory_rows_of_benchmarks_page_match_program() -> None:
    small, large, running = waste()
    share, reserved = (re.findall(r"[\d.]+", text)[0] for text in (small.measured, small.beside))
    assert cells("KV memory reserved but unused, blocks of 16")[0] == f"{share} %"
    assert f"{reserved} %" in cells("KV memory reserved but unused, blocks of 16")[1]
    assert cells("the same, blocks of 256")[0] == f"{re.findall(r'[0-9.]+', large.measured)[0]} %"
    assert cells("sequences at once in 65,536 tokens")[:2] == [running.measured, running.beside.split()[0]]


@pytest.mark.slow
def test_plan_rows_of_benchmarks_page_match_program() -> None:
    coder, tiny = plans()
    page, context = coder.measured.split("; ")
    assert cells("a block of 16 tokens of deepseek-coder-6.7b, per layer")[0] == page
    assert cells("its context of 16,384 tokens")[0] == context
    pages, _, host = re.fullmatch(r"([\d,]+) in ([\d.]+) GiB, ([\d,]+) of the host's", tiny.measured).groups()  # type: ignore[union-attr]
    assert cells("TinyLlama on a T4")[0] == f"{pages} blocks"
    assert cells("its 4 GiB of host memory")[0] == f"{host} blocks"
