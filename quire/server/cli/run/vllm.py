"""`quire run-batch`: `quire run FILE.jsonl -o OUT.jsonl` with vLLM's name and flags."""

from __future__ import annotations

from collections.abc import Sequence

from quire.engine.common.errors import ConfigError
from quire.server.cli.run import main as run

_IGNORED_FLAGS = {
    "--output-tmp-dir": 1,
    "--response-role": 1,
    "--enable-metrics": 0,
    "--host": 1,
    "--port": 1,
    "--url": 1,
}
"""Values are the number of a flag's arguments."""
_INPUT_FLAGS, _OUTPUT_FLAGS = ("-i", "--input-file"), ("-o", "--output-file")


def main(argv: Sequence[str], started: float) -> int:
    return run(translate_arguments(argv), started)


def translate_arguments(argv: Sequence[str]) -> list[str]:
    """Raises ConfigError for remote files."""
    rest, arguments = list(argv), []
    while rest:
        argument = rest.pop(0)
        flag, equals, value = argument.partition("=")
        flag = flag.replace("_", "-") if flag.startswith("--") else flag
        if flag in _IGNORED_FLAGS:
            del rest[: _IGNORED_FLAGS[flag] * (not equals)]
            continue
        if flag not in (*_INPUT_FLAGS, *_OUTPUT_FLAGS):
            arguments.append(argument)
            continue
        value = value if equals else rest.pop(0) if rest else ""
        if "://" in value:
            raise ConfigError(
                f"{flag}: {value} is not a local file: download it first, and upload the results yourself"
            )
        arguments += [value] if flag in _INPUT_FLAGS else ["--output", value]
    return arguments
