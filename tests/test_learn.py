"""The snippets of docs/learn.md print the blocks below them, and its tiny batcher generates the tokens that the page
shows.
"""

from __future__ import annotations

import io
import re
import subprocess
import sys
from contextlib import redirect_stdout

import pytest

from tests.test_snippets import Snippet, snippets
from tests.tree import ROOT

PAGE = "docs/learn.md"
TINY = "examples/inside/tiny.py"
MAX_WORDS = 3600
MAX_SNIPPET_LINES = 20


def snippets_with_output() -> list[tuple[Snippet, str]]:
    """Each Python snippet of the page with the block that follows it."""
    blocks = [snippet for snippet in snippets() if snippet.place.startswith(PAGE)]
    return [
        (block, blocks[index + 1].text if blocks[index + 1].language == "text" else "")
        for index, block in enumerate(blocks[:-1])
        if block.language == "python"
    ]


CASES = snippets_with_output()


@pytest.mark.parametrize(("snippet", "output"), CASES, ids=[snippet.place for snippet, _ in CASES])
def test_snippet_prints_output_block_below(snippet: Snippet, output: str) -> None:
    assert len(snippet.text.splitlines()) <= MAX_SNIPPET_LINES
    printed = io.StringIO()
    with redirect_stdout(printed):
        exec(compile(snippet.text, snippet.place, "exec"), {"__name__": "__main__"})
    assert printed.getvalue() == output != ""


def test_scheduler_snippet_runs_without_torch() -> None:
    program, output = next((snippet.text, output) for snippet, output in CASES if "Scheduler(" in snippet.text)
    command = [sys.executable, "-c", f"import sys\nsys.modules['torch'] = None\n{program}"]
    completed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, timeout=120)
    assert completed.stdout == output


def test_learn_page_is_short_and_its_anchors_exist() -> None:
    text = (ROOT / PAGE).read_text(encoding="utf-8")
    assert len(text.split()) <= MAX_WORDS
    slugs = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in re.findall(r"^#+ (.*)$", text, re.M)}
    anchors = re.findall(r"\]\(#([\w-]+)\)", text)
    assert len(anchors) == 8
    assert set(anchors) <= slugs


def test_tiny_batcher_generates_same_tokens_batched_and_alone() -> None:
    program = (ROOT / TINY).read_text(encoding="utf-8")
    assert len(program.splitlines()) <= 100
    printed = io.StringIO()
    with redirect_stdout(printed):
        exec(compile(program, TINY, "exec"), {"__name__": "__main__"})
    together, *alone = printed.getvalue().strip().split("\n\n")
    tokens = [line for line in together.splitlines() if not line.startswith("(")]
    assert len(tokens) == len(alone) == 3
    assert tokens == [each.splitlines()[-1] for each in alone]
    shown = re.findall(r"^ step (\d+) +(\(.*?\))  ", (ROOT / PAGE).read_text(encoding="utf-8"), re.MULTILINE)
    assert len(shown) == 5
    assert [together.splitlines()[int(number) - 1] for number, _ in shown] == [chunks for _, chunks in shown]
