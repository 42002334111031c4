"""Hides differences between two runs of one version: ids, times, ports, paths."""

from __future__ import annotations

import re
from collections.abc import Mapping

_ID = re.compile(
    r"\b(chatcmpl|cmpl|resp|msg|rs|fc|ctc|call|toolu|conv|file|batch|batch_req|req|modelperm|stream|explain|tok|score|embd|pool"
    r"|rerank|classify|dec|beam|trace|sess)([-_])[0-9a-zA-Z]{8,}\b"
)
_UUID = re.compile(r"\b[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b")
_LONG_HEX = re.compile(r"(?<![.\w])(?=[0-9]*[a-f])[0-9a-f]{16,}\b")
_FINGERPRINT = re.compile(r'("(?:system_fingerprint|fingerprint|digest|x-computed-by)":\s*)"[^"]*"')
_TIME_FIELD = re.compile(
    r'("(?:created|created_at|modified_at|completed_at|in_progress_at|finalizing_at|expires_at|cancelled_at|failed_at'
    r"|started_at|missed_seconds|at|age|uptime|total_duration|load_duration|prompt_eval_duration|eval_duration|updated|retry_after"
    r'|openai-processing-ms|retry-after|date|server-timing)":\s*)("[^"]*"|[-\d.e+]+)'
)
_ISO_TIME = re.compile(r"\b\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?")
_NUMBER = re.compile(r"(?<![\w.])\d+(?:[.,]\d+)*(?![\w])")


def mask(text: str, replacements: Mapping[str, str] | None = None) -> str:
    """`text` without what two runs of the same code write differently. `replacements`: this run's own strings, such as
    its folder and its port, and what to write instead of them."""
    for own, shared in sorted((replacements or {}).items(), key=lambda pair: -len(pair[0])):
        text = text.replace(own, shared)
    text = _FINGERPRINT.sub(r'\1"FINGERPRINT"', text)
    text = _TIME_FIELD.sub(r"\1TIME", text)
    text = _ISO_TIME.sub("TIME", text)
    text = _UUID.sub("UUID", text)
    text = _ID.sub(r"\1\2ID", text)
    return _LONG_HEX.sub("HEX", text)


def mask_log_line(line: str, replacements: Mapping[str, str] | None = None) -> str:
    """A log line without its times, sizes and process ids."""
    return _NUMBER.sub("#", mask(line, replacements)).strip()


def rename(text: str, renames: Mapping[str, str]) -> str:
    """`text` with whole identifiers replaced, for class names that a commit renames on purpose."""
    if not renames:
        return text
    pattern = re.compile(r"\b(" + "|".join(map(re.escape, renames)) + r")\b")
    return pattern.sub(lambda match: renames[match[1]], text)
