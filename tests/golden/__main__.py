"""Captures the golden set of two trees and prints the differences: `python -m tests.golden BASE`.

Exit status: 0 if nothing differs, otherwise 1.
"""

from __future__ import annotations

import argparse
import difflib
import shutil
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable
from pathlib import Path

import httpx

from tests.golden import disk, models, serving
from tests.golden.code import capture_code
from tests.golden.masks import rename
from tests.golden.models import Captured
from tests.golden.tree import Tree, check_out
from tests.tree import ROOT

SECTIONS = ("help", "plans", "specs", "tokens", "http", "agents", "disk")
OF_RENAMES = "code"
"""A section for commits that change nothing but names; of others it is the whole change."""
_DIFF_LINES = 40
_DIFF_COLUMNS = 400
"""What is printed of one difference at most; `--out` has all of it."""


def main() -> int:
    arguments = _arguments()
    work = Path(tempfile.mkdtemp(prefix="golden-"))
    try:
        base = check_out(arguments.base, work / "tree")
        return compare(base, Tree("head", ROOT), arguments, work)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.golden", description=__doc__)
    parser.add_argument("base", help="the commit to compare this checkout with")
    parser.add_argument("--only", nargs="+", choices=(*SECTIONS, OF_RENAMES), default=SECTIONS, help="sections")
    parser.add_argument("--families", nargs="+", help="tiny families; default: all")
    parser.add_argument("--renames", type=Path, help="TOML file of class names and modules' paths: old = 'new'")
    parser.add_argument("--out", type=Path, help="folder for both trees' captured texts")
    return parser.parse_args()


def compare(base: Tree, head: Tree, arguments: argparse.Namespace, work: Path) -> int:
    """Capture each section of both trees and print the differences. Returns the exit status."""
    renames = tomllib.loads(arguments.renames.read_text(encoding="utf-8")) if arguments.renames else {}
    captures = _captures(base, arguments, work)
    number_of_differences = 0
    for section in arguments.only:
        began = time.monotonic()
        before, after = captures[section](base), _capture_head(captures[section], head)
        if arguments.out:
            _write(arguments.out / "base" / section, before)
            _write(arguments.out / "head" / section, after)
        before = {rename(name, renames): rename(text, renames) for name, text in before.items()}
        differences = differences_of(before, after)
        number_of_differences += len(differences)
        for name, lines in differences.items():
            print(f"\n{section}: {name}")
            print("\n".join(line[:_DIFF_COLUMNS] for line in lines[:_DIFF_LINES]))
            if len(lines) > _DIFF_LINES:
                print(f"... {len(lines) - _DIFF_LINES} more lines")
        seconds = time.monotonic() - began
        print(f"golden {section}: {len(before)} texts, {len(differences)} differ, {seconds:.0f} s", flush=True)
    print(f"golden: {number_of_differences or 'no'} differences")
    return 1 if number_of_differences else 0


def _capture_head(capture: Callable[[Tree], Captured], head: Tree) -> Captured:
    """A head that does not start, or does not know what the base does, is a difference, too."""
    try:
        return capture(head)
    except (AssertionError, SystemExit, KeyError, ValueError, OSError, httpx.HTTPError) as error:
        return {"the head failed": f"{type(error).__name__}: {error}"}


def differences_of(before: Captured, after: Captured) -> dict[str, list[str]]:
    """A unified diff of each text that differs, by name. A text that one tree alone has differs from nothing."""
    differences = {}
    for name in sorted({*before, *after}):
        if before.get(name) != after.get(name):
            old, new = before.get(name, "").splitlines(), after.get(name, "").splitlines()
            differences[name] = list(difflib.unified_diff(old, new, "base", "head", lineterm="", n=1))
    return differences


def _captures(base: Tree, arguments: argparse.Namespace, work: Path) -> dict[str, Callable[[Tree], Captured]]:
    """How each section is captured of a tree. What both share is made at the first need."""
    shared: dict[str, object] = {}

    def folders() -> dict[str, Path]:
        if "folders" not in shared:
            shared["folders"] = models.write_models(work / "models", arguments.families)
        return shared["folders"]  # type: ignore[return-value]

    def agents_model() -> Path:
        if "agents" not in shared:
            shared["agents"] = serving.write_agents_model(work / "agents-model")
        return shared["agents"]  # type: ignore[return-value]

    def capture_disk(of: Tree) -> Captured:
        if "writer" not in shared:
            (work / "written").mkdir()
            shared["writer"] = disk.write_data(base, work / "written")
        writer: disk.Writer = shared["writer"]  # type: ignore[assignment]
        return disk.capture_disk(of, work / "written", _folder(work, f"disk-{of.name}"), writer)

    return {
        "help": models.capture_help,
        "plans": lambda of: models.capture_plans(of, folders(), _folder(work, f"plans-{of.name}")),
        "specs": lambda of: models.capture_specs(of, folders()),
        "tokens": lambda of: models.capture_tokens(of, folders()),
        "http": lambda of: serving.capture_http(of, _folder(work, f"http-{of.name}")),
        "agents": lambda of: serving.capture_agents(of, _folder(work, f"agents-{of.name}"), agents_model()),
        "disk": capture_disk,
        OF_RENAMES: capture_code,
    }


def _folder(work: Path, name: str) -> Path:
    (work / name).mkdir(exist_ok=True)
    return work / name


def _write(folder: Path, texts: Captured) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (folder / f"{name.replace('/', '_')}.txt").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
