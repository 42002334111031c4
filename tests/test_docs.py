"""Files and headings that documents and comments name exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.tree import ROOT, source_files

DOCS = (
    "README.md",
    "CONTRIBUTING.md",
    "deploy/README.md",
    *(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")),
)
NAMED = re.compile(r"`([\w.-]+/[\w./-]+)`|\]\(([\w./-]+)\)")
IN_CODE = re.compile(
    r"(?<![\w/.-])((?:quire|server|engine|kernels|configs|deploy|tests|benchmarks)/[\w./-]+\.[a-z]+)\b"
)
LINK = re.compile(r"\]\(([\w./-]*)#([\w-]+)\)")


@pytest.mark.parametrize("name", DOCS)
def test_files_named_in_docs_exist(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    paths = [Path(one or other) for one, other in NAMED.findall(text)]
    missing = [path for path in paths if not any((base / path).exists() for base in (ROOT, (ROOT / name).parent))]
    assert [path for path in missing if path.parts[0] not in (".venv", "OWNER", "DIR")] == []


def test_files_named_in_code_comments_exist() -> None:
    code = [path for path in source_files() if path.suffix in (".py", ".cpp", ".h", ".js", ".toml", ".yaml", ".yml")]
    missing = [
        f"{path}:{text.count(chr(10), 0, found.start()) + 1} {found[1]}"
        for path in code
        for text in [(ROOT / path).read_text(encoding="utf-8")]
        for found in IN_CODE.finditer(text)
        if not any((base / found[1]).exists() for base in (ROOT, ROOT / "quire"))
    ]
    assert missing == []


@pytest.mark.parametrize("name", DOCS)
def test_page_ends_with_one_newline(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    assert text.endswith("\n")
    assert not text.endswith("\n\n")


def test_readme_has_at_most_600_words() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= 600


@pytest.mark.parametrize("name", DOCS)
def test_linked_headings_exist(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    missing = [
        f"{page or name}#{anchor}"
        for page, anchor in LINK.findall(text)
        if anchor not in anchors(ROOT / name if not page else (ROOT / name).parent / page)
    ]
    assert missing == []


def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings in GitHub's form."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    texts = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in headings]
    return {re.sub(r"[^\w -]", "", text).replace(" ", "-") for text in texts}
