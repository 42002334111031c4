"""Streams Markdown: prints finished blocks permanently, and redraws the current one."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from rich.console import Console
from rich.live import Live
from rich.markdown import Markdown
from rich.spinner import Spinner

FENCE = re.compile(r"^ {0,3}(```+|~~~+)")
_CONTINUATION = re.compile(r"\s|[-*+>|]|\d+[.)]")
"""A line that begins like this may continue a list, quotation or table after a blank line."""
_REFRESHES_PER_SECOND = 12


def split_finished_blocks(text: str) -> tuple[list[str], str]:
    blocks = []
    lines = list[str]()
    blank = False
    for line, before, after in _lines_with_fence_state(text.split("\n")[:-1]):
        if not before and blank and lines and line.strip() and not _CONTINUATION.match(line):
            blocks.append("\n".join(lines))
            lines = []
        blank = not after and not line.strip()
        lines.append(line)
    return blocks, "\n".join([*lines, text.rpartition("\n")[2]])


def _lines_with_fence_state(lines: Iterable[str]) -> Iterator[tuple[str, bool, bool]]:
    fence = ""
    for line in lines:
        before, mark = fence, FENCE.match(line)
        if mark and not fence:
            fence = mark[1]
        elif mark and line.strip().startswith(fence) and not line.strip().strip(fence[0]):
            fence = ""
        yield line, bool(before), bool(fence)


def to_rich_markdown(text: str) -> Markdown:
    """Keeps single line breaks, which Markdown would turn into spaces."""
    lines = [
        line if before or after else line.rstrip() + "  "
        for line, before, after in _lines_with_fence_state(text.split("\n"))
    ]
    return Markdown("\n".join(lines))


def print_stream(console: Console, pieces: Iterable[str], waiting: str = "") -> None:
    """If `pieces` raises an error, everything before it is printed first."""
    text, printed = "", 0
    live = Live(
        Spinner("dots", waiting, style="dim"),
        console=console,
        refresh_per_second=_REFRESHES_PER_SECOND,
        transient=True,
        vertical_overflow="crop",
        redirect_stdout=False,
        redirect_stderr=False,
    )
    try:
        with live:
            for piece in pieces:
                text += piece
                blocks, rest = split_finished_blocks(text)
                for block in blocks:
                    _print_block(console, block, first=printed == 0)
                    printed += 1
                text = rest
                live.update(to_rich_markdown(_last_lines(text, console.height - 2)))
    finally:
        if text.strip():
            _print_block(console, text, first=printed == 0)


def _print_block(console: Console, block: str, *, first: bool) -> None:
    if not first:
        console.print()
    console.print(to_rich_markdown(block.strip("\n")))


def _last_lines(text: str, height: int) -> str:
    lines = text.split("\n")
    if len(lines) <= height:
        return text
    opening = FENCE.match(lines[0])
    return "\n".join([*([opening[0]] if opening else []), *lines[-height + 1 :]])
