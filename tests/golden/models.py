"""Sections without a server: help texts, plans, specs, and greedy tokens of tiny random models of every family."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from tests.golden.masks import mask
from tests.golden.tree import Tree

INSIDE = Path(__file__).with_name("inside.py")
GPUS = ("h100", "rtx4090")
_COMMAND = re.compile(r"^  ([a-z][a-z-]*)  ", re.MULTILINE)
Captured = dict[str, str]
"""The name of each thing, and its text."""


def write_models(folder: Path, names: Iterable[str] | None = None) -> dict[str, Path]:
    """Write a tiny random model of each family of the tests, which both trees read. Returns their folders."""
    from transformers.utils import logging

    from tests import texts, tiny_encoders, tiny_models, vision_families

    logging.disable_progress_bar()
    makers: dict[str, Callable[[Path], Path]] = {}
    for family in tiny_models.FAMILIES:
        makers[family] = partial(tiny_models.save_tiny_model, family=family)
    for family in vision_families.FAMILIES:
        makers[f"images-{family}"] = partial(vision_families.save_family, name=family)
    for family in tiny_encoders.ENCODERS:
        makers[f"encoder-{family}"] = partial(tiny_encoders.save_tiny_encoder, family=family)
    folders = {}
    for name in makers if names is None else names:
        path = folder / name
        path.mkdir(parents=True)
        makers[name](path)
        if not (path / "tokenizer.json").exists():
            texts.pair_tokenizer().tokenizer.backend.save(str(path / "tokenizer.json"))
        folders[name] = path
    return folders


def capture_help(tree: Tree) -> Captured:
    overview = tree.run(["-m", "quire", "--help"]).stdout
    helps = {"quire": overview}
    for command in _COMMAND.findall(overview):
        helps[command] = tree.run(["-m", "quire", command, "--help=all"]).stdout
        if not helps[command]:
            helps[command] = tree.run(["-m", "quire", command, "--help"]).stdout
    return helps


def capture_plans(tree: Tree, folders: dict[str, Path], work: Path) -> Captured:
    """Plans of every config of the catalogue on two GPUs, and of every tiny model in 24 GiB."""
    wanted: list[tuple[str, object]] = []
    for number, (name, row) in enumerate(_catalog(tree).items()):
        path = work / f"{number}" / "config.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(row["config"]), encoding="utf-8")
        wanted += [(f"{name} on {gpu}", [str(path), "--gpu", gpu, "--json"]) for gpu in GPUS]
    for name, path in folders.items():
        wanted.append((name, [str(path), "--memory", "24", "--bandwidth", "1000", "--tflops", "100", "--json"]))
    return _inside(tree, "plans", wanted, folders)


def capture_specs(tree: Tree, folders: dict[str, Path]) -> Captured:
    decoders = [(name, str(path)) for name, path in folders.items() if not name.startswith("encoder-")]
    return _inside(tree, "specs", decoders, folders)


def capture_tokens(tree: Tree, folders: dict[str, Path]) -> Captured:
    return _inside(tree, "tokens", [(name, str(path)) for name, path in folders.items()], folders)


def _catalog(tree: Tree) -> dict[str, Any]:
    (path,) = (tree.root / "quire" / "engine").glob("*/catalog.toml")
    return tomllib.loads(path.read_text(encoding="utf-8"))


def _inside(tree: Tree, what: str, wanted: Iterable[tuple[str, object]], folders: dict[str, Path]) -> Captured:
    process = tree.run([str(INSIDE), what], json.dumps(list(wanted)))
    if process.returncode != 0:
        raise SystemExit(f"golden: {what} of {tree.name} failed:\n{process.stderr[-4000:]}")
    replacements = {str(path): f"FOLDER/{name}" for name, path in folders.items()}
    return {name: mask(text, replacements) for name, text in json.loads(process.stdout).items()}
