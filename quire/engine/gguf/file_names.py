from __future__ import annotations

import re
from pathlib import Path

GGUF_SUFFIX = ".gguf"
PART_PATTERN = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")


def part_paths(path: Path) -> list[Path]:
    part = PART_PATTERN.search(path.name)
    if part is None:
        return [path]
    stem, count = path.name[: part.start()], part[2]
    return [path.with_name(f"{stem}-{number:05}-of-{count}{GGUF_SUFFIX}") for number in range(1, int(count) + 1)]


def model_stem(path: Path) -> str:
    return PART_PATTERN.sub("", path.name).removesuffix(GGUF_SUFFIX)
