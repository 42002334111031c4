"""The names of Quire that tests, benchmarks and documents import or patch exist. Much of this code runs rarely, so a
rename could break it unnoticed.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from functools import cache

from tests.tree import ROOT, source_files

_IMPORT = re.compile(r"^[ \t]*from (quire[\w.]*) import (\([^)]*\)|[^\n]*)", re.MULTILINE)
_PATCHED_PATH = re.compile(r"""setattr\(\s*["'](quire\.[\w.]+)["']""")
_FILES_WITH_EXAMPLES = ("test_architecture.py", "test_stale_names.py")
_PATCHED_NAME = re.compile(r"""[sg]etattr\(\s*(\w+), ["'](\w+)["']""")


def stale_names(text: str) -> Iterator[str]:
    """Names that `text`, Python or Markdown, imports from quire or sets with monkeypatch, and that do not exist."""
    modules = {}
    for source, imported in _IMPORT.findall(text):
        names = re.sub(r"#[^\n]*", "", imported).strip("() \n`").replace("\n", " ")
        for name, _, alias in (entry.strip().partition(" as ") for entry in names.split(",") if entry.strip()):
            path = f"{source}.{name}"
            modules[alias or name] = path
            if not is_defined(path):
                yield path
    for path in _PATCHED_PATH.findall(text):
        if not is_defined(path):
            yield path
    for variable, name in _PATCHED_NAME.findall(text):
        if variable in modules and not is_defined(f"{modules[variable]}.{name}"):
            yield f"{modules[variable]}.{name}"


@cache
def is_defined(path: str) -> bool:
    """True for a module, or an attribute or annotated field of one or of its classes."""
    parts = path.split(".")
    for count in range(len(parts), 0, -1):
        try:
            value = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        for name in parts[count:]:
            if name in getattr(value, "__annotations__", {}):
                return True
            try:
                value = getattr(value, name)
            except AttributeError:
                return False
            except ImportError:  # quire.sampling_params raises it for names that vLLM renamed
                return True
        return True
    return False


def test_imported_and_patched_names_exist() -> None:
    stale = []
    for path in source_files():
        if path.suffix in (".py", ".md") and path.parts[0] != "quire" and path.name not in _FILES_WITH_EXAMPLES:
            stale += [f"{path}: {name}" for name in stale_names((ROOT / path).read_text())]
    assert not stale


def test_stale_names_are_found_however_they_are_imported_or_patched() -> None:
    text = """
    from quire.engine import VERSION, no_version
    from quire.engine.core import (  # scheduling
        no_module as other,
        request,
    )
    patch.setattr("quire.engine.core.request.Request", None)
    patch.setattr("quire.engine.core.request.Requests", None)
    patch.setattr(request, "Requests", None)
    """
    assert list(stale_names(text)) == [
        "quire.engine.no_version",
        "quire.engine.core.no_module",
        "quire.engine.core.request.Requests",
        "quire.engine.core.request.Requests",
    ]
