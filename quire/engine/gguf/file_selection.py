"""Selects a GGUF model by its tag, which is the quantization in a file's name."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import PurePosixPath

from quire.engine.common.errors import ModelError
from quire.engine.gguf.file_names import GGUF_SUFFIX, PART_PATTERN

_QUANT_PATTERN = r"(?:UD-)?(?:I?Q\d(?:_[A-Z0-9]+)*|TQ\d_\d|BF16|F16|F32|FP16|FP32|MXFP4(?:_MOE)?|NVFP4)"
_TAG_PATTERN = re.compile(rf"(?:^|[-_. ])({_QUANT_PATTERN})$", re.IGNORECASE)
_NON_MODEL_PREFIXES = ("mmproj", "imatrix")
PREFERRED_TAG = "Q4_K_M"
_TAG_PREFERENCE = (
    PREFERRED_TAG,
    "Q4_K_S",
    "Q4_K_L",
    "Q4_K_XL",
    "Q4_0",
    "Q4_1",
    "IQ4_XS",
    "IQ4_NL",
    "MXFP4",
    "MXFP4_MOE",
    "NVFP4",
    "Q4_K",
    "Q5_K_M",
    "Q5_K_S",
    "Q5_K_L",
    "Q5_K_XL",
    "Q5_K",
    "Q5_0",
    "Q5_1",
    "Q6_K",
    "Q6_K_L",
    "Q6_K_XL",
    "Q3_K_XL",
    "Q3_K_L",
    "Q3_K_M",
    "Q3_K",
    "Q3_K_S",
    "IQ3_M",
    "IQ3_S",
    "IQ3_XS",
    "IQ3_XXS",
    "Q8_0",
    "Q8_K_XL",
    "Q2_K_XL",
    "Q2_K_L",
    "Q2_K",
    "Q2_K_S",
    "IQ2_M",
    "IQ2_S",
    "IQ2_XS",
    "IQ2_XXS",
    "BF16",
    "F16",
    "FP16",
    "F32",
    "FP32",
    "TQ2_0",
    "TQ1_0",
    "IQ1_M",
    "IQ1_S",
)
"""Most preferred first: four bits, slightly more, fewer, many more, then fewer than two."""


def file_tag(path: str) -> str:
    """Return Q4_K_M for model-q4_k_m-00001-of-00002.gguf, or the stem without a known tag."""
    stem = PART_PATTERN.sub("", PurePosixPath(path).name)
    stem = stem[: -len(GGUF_SUFFIX)] if stem.lower().endswith(GGUF_SUFFIX) else stem
    match = _TAG_PATTERN.search(stem)
    return stem if match is None else match[1].upper()


def group_models_by_tag(paths: Iterable[str]) -> dict[str, list[list[str]]]:
    """Omits incomplete models. The parts of split models are sorted."""
    models: dict[str, list[str]] = {}
    for path in sorted(paths):
        name = PurePosixPath(path).name
        if name.lower().endswith(GGUF_SUFFIX) and not name.lower().startswith(_NON_MODEL_PREFIXES):
            models.setdefault(PART_PATTERN.sub("", path), []).append(path)
    models_by_tag: dict[str, list[list[str]]] = {}
    for files in models.values():
        part = PART_PATTERN.search(files[0])
        if part is None or len(files) == int(part[2]):
            models_by_tag.setdefault(file_tag(files[0]), []).append(files)
    return models_by_tag


def select_files(models: Mapping[str, list[list[str]]], tag: str | None, repo: str) -> list[str]:
    """Without a tag, the one nearest to Q4_K_M counts. Raises ModelError naming available tags."""
    if not models:
        raise ModelError(f"model: {repo} has no GGUF files")
    key = _match_available_tag(models, tag) if tag is not None else _preferred_tag(models)
    if key is None:
        raise ModelError(f"model: {repo} has no GGUF file {tag}; it has {', '.join(models)}")
    if len(models[key]) > 1:
        names = ", ".join(f"{repo}/{files[0]}" for files in models[key][:8])
        raise ModelError(f"model: {repo} has several GGUF files {key}, give one of them: {names}")
    return models[key][0]


def _match_available_tag(models: Mapping[str, list[list[str]]], tag: str) -> str | None:
    """Ignores case. If only a file with Unsloth's UD- prefix exists, it matches too."""
    wanted = tag.upper()
    return next((key for form in (wanted, f"UD-{wanted}") for key in models if key.upper() == form), None)


def _preferred_tag(models: Mapping[str, list[list[str]]]) -> str:
    near = (_match_available_tag(models, tag) for tag in _TAG_PREFERENCE)
    return next((key for key in near if key is not None), next(iter(models)))
