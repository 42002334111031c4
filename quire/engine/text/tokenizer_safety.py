"""Finds tokenizer patterns that take exponential time. The tokenizers library backtracks, cannot be interrupted, and
panics after ten million steps. So a separate process tries patterns, and is killed if one takes too long.
"""

from __future__ import annotations

import json
import math
import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from quire.engine.common.errors import ModelError

if TYPE_CHECKING:
    import tokenizers

_MAX_CPU_SECONDS = 2.0
"""Limit for all patterns together. Usual patterns take milliseconds."""
_TIMEOUT_SECONDS = 30.0
"""Wall-clock time, long enough for a busy machine."""
_MAX_MEMORY_BYTES = 2 << 30
_PROBE_LENGTHS = (16, 48, 400)
"""The first two reveal exponential time, the last a high power of the length."""
_ESCAPE = re.compile(r"\\(?:[pP]\{[^}]*\}|x\{[^}]*\}|.)", re.DOTALL)
_CHARACTER_CLASS = re.compile(r"\[\^?\]?[^\[\]]*\]")
_REPEATED_GROUP = re.compile(r"\)(?:[*+]|\{[\d,]*\})")
_REPEAT = re.compile(r"(?:[*+]|\{\d*,\d*\})[+?]?")
_MAX_SAFE_REPEATS = 2
"""A pattern with at most this many repeats is safe: time grows at most with this power of the length."""
_MAX_GROWTH = 1024
_MAX_PROBE_CHARACTERS = 24


def check_regexes(backend: tokenizers.Tokenizer) -> None:
    """Raises ModelError for a regular expression that is slow on short texts."""
    suspects = [pattern for pattern in _find_regexes(backend) if is_suspicious_regex(pattern)]
    if not suspects:
        return
    command = [sys.executable, "-P", "-m", "quire.engine.text.tokenizer_safety"]
    suspects_json, environment = (
        json.dumps(suspects).encode(),
        os.environ | {"RUST_BACKTRACE": "0"},
    )
    try:
        done = subprocess.run(
            command, input=suspects_json, capture_output=True, check=False, env=environment, timeout=_TIMEOUT_SECONDS
        )
    except subprocess.TimeoutExpired:
        raise ModelError(
            f"model: tokenizer.json: its patterns could not be checked within {_TIMEOUT_SECONDS:g} s"
        ) from None
    num_started = len(done.stdout.splitlines())
    if done.returncode and not num_started:
        raise ModelError(
            "model: tokenizer.json: its patterns could not be checked: the process that checks them did not start"
        )
    if done.returncode:
        which = suspects[num_started - 1][:80]
        raise ModelError(f"model: tokenizer.json: the pattern {which!r} takes too long on some short texts")


def check_normalizer_growth(backend: tokenizers.Tokenizer) -> None:
    """Raises ModelError if normalization can lengthen texts over _MAX_GROWTH times."""
    if backend.normalizer is None:
        return
    texts = _keys_and_string_values(json.loads(backend.normalizer.__getstate__()))
    growth = math.prod(max(len(text), 1) for key, text in texts if key in ("content", "prepend"))  # inserted texts
    if growth > _MAX_GROWTH:
        raise ModelError(
            f"model: tokenizer.json: its normalizer can make a text {min(growth, 10**30):.0e} times longer"
        )


def _keys_and_string_values(state: Any) -> Iterator[tuple[str, str]]:
    if isinstance(state, dict):
        yield from ((key, value) for key, value in state.items() if isinstance(value, str))
    for value in state.values() if isinstance(state, dict) else state if isinstance(state, list) else ():
        yield from _keys_and_string_values(value)


def is_rust_panic(error: BaseException) -> bool:
    """The panic's type derives from BaseException and cannot be imported."""
    return type(error).__name__ == "PanicException"


def is_suspicious_regex(pattern: str) -> bool:
    plain = _ESCAPE.sub("e", pattern)
    while plain != (shorter := _CHARACTER_CLASS.sub("c", plain)):
        plain = shorter
    return bool(_REPEATED_GROUP.search(plain)) or any(
        len(_REPEAT.findall(branch)) > _MAX_SAFE_REPEATS for branch in plain.split("|")
    )


def make_probe_texts(pattern: str, length: int) -> Iterator[str]:
    """Yields texts that repeat one or two characters and then break the match. Some texts contain every character of
    the pattern, because the library skips texts that lack a required character.
    """
    literal_characters = dict.fromkeys(character for character in _ESCAPE.sub("", pattern) if character.isalnum())
    characters = [*"a1 \n!é", *list(literal_characters)[:_MAX_PROBE_CHARACTERS]]
    pieces = [*characters, *(one + other for one in characters[:8] for other in characters[:8] if one != other)]
    for piece in pieces:
        for end in "\0", "!", "\0" + "".join(literal_characters):
            yield piece * (length // len(piece)) + end


def _find_regexes(backend: tokenizers.Tokenizer) -> Sequence[str]:
    parts = [part for part in (backend.normalizer, backend.pre_tokenizer, backend.decoder) if part is not None]
    regexes = (
        text
        for part in parts
        for key, text in _keys_and_string_values(json.loads(part.__getstate__()))
        if key == "Regex"
    )
    return list(dict.fromkeys(regexes))


def main() -> None:
    """Prints a line before it tries each pattern of a JSON list. A slow pattern ends the process."""
    import tokenizers  # imported here, because the module's other users need no tokenizers

    resource.setrlimit(resource.RLIMIT_AS, (_MAX_MEMORY_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1]))
    signal.setitimer(signal.ITIMER_PROF, _MAX_CPU_SECONDS)  # this kills the process even while Rust code runs
    for pattern in json.loads(sys.stdin.buffer.read()):
        print(flush=True)
        split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
        for length in _PROBE_LENGTHS:
            for text in make_probe_texts(pattern, length):
                split.pre_tokenize_str(text)


if __name__ == "__main__":
    main()
