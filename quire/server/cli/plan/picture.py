"""Draws an estimate as SVG: what the memory is used for, and how many requests of which context fit."""

from __future__ import annotations

import math
from html import escape
from pathlib import Path

from quire.engine.checkpoint.kv_plan import CUDA_CONTEXT_BYTES, GIB
from quire.server.cli.plan.estimate import Estimate
from quire.server.cli.plan.machine import ENGINE_HOST_BYTES

WIDTH, HEIGHT = 760, 430
LEFT, RIGHT = 70, 730
BAR_TOP, BAR_HEIGHT = 64, 44
TOP, BOTTOM = 190, 380
COLOURS = {"weights": "#2a6f97", "overhead": "#8d99ae", "KV cache": "#52b788", "left free": "#e9ecef"}
INK, MARK = "#333333", "#c1440e"


def draw(made: Estimate, name: str) -> str:
    """The SVG document, as text."""
    title = f"{Path(name).name}, {made.dtype}, on {made.machine.count} x {made.machine.name}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        f'font-size="12" fill="{INK}" role="img" aria-label="{escape(title)}">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        _text(LEFT, 28, title, size=15),
        *_bar(made),
        *(_curve(made) if made.fits else [_text(LEFT, TOP, "does not fit: " + reason) for reason in made.reasons]),
        "</svg>",
    ]
    return "\n".join(parts)


def shares(made: Estimate) -> dict[str, int]:
    """Bytes of one device by what they are used for."""
    machine = made.machine
    weights = made.weight_bytes // machine.count
    overhead = CUDA_CONTEXT_BYTES if machine.gpu else ENGINE_HOST_BYTES
    cache = made.num_blocks * made.page_bytes
    return {
        "weights": weights,
        "overhead": overhead,
        "KV cache": cache,
        "left free": max(machine.memory - weights - overhead - cache, 0),
    }


def _bar(made: Estimate) -> list[str]:
    found = shares(made)
    scale = (RIGHT - LEFT) / max(sum(found.values()), 1)
    parts, x = [], float(LEFT)
    for index, (label, size) in enumerate(found.items()):
        width, fill = size * scale, COLOURS[label]
        parts.append(f'<rect x="{x:.1f}" y="{BAR_TOP}" width="{width:.1f}" height="{BAR_HEIGHT}" fill="{fill}"/>')
        x += width
        key = LEFT + index * 165
        parts.append(f'<rect x="{key}" y="{BAR_TOP + 58}" width="10" height="10" fill="{fill}"/>')
        parts.append(_text(key + 15, BAR_TOP + 67, f"{label} {size / GIB:,.2f} GiB"))
    limit = LEFT + made.machine.memory * scale
    if limit < RIGHT - 1:  # what is needed is more than the memory
        parts.append(f'<path d="M{limit:.1f} {BAR_TOP - 8}v{BAR_HEIGHT + 16}" stroke="{MARK}" stroke-width="2"/>')
        parts.append(_text(limit - 4, BAR_TOP - 10, "memory ends here", anchor="end", fill=MARK))
    return parts


def _curve(made: Estimate) -> list[str]:
    """How many requests fit at once, by their context; both axes are logarithmic."""
    contexts = [math.log2(context) for context, _ in made.fitting]
    counts = [math.log2(count) for _, count in made.fitting]
    low, high, most = contexts[0], max(contexts[-1], contexts[0] + 1), max(counts[0], 1.0)

    def at(context: float, count: float) -> tuple[float, float]:
        return LEFT + (context - low) / (high - low) * (RIGHT - LEFT), BOTTOM - count / most * (BOTTOM - TOP)

    points = [at(context, count) for context, count in zip(contexts, counts, strict=True)]
    parts = [
        _text(LEFT, TOP - 18, "requests at once (up) over tokens of each (right)"),
        f'<path d="M{LEFT} {TOP}V{BOTTOM}H{RIGHT}" fill="none" stroke="{COLOURS["overhead"]}"/>',
        '<polyline fill="none" stroke="#2a6f97" stroke-width="2" points="'
        + " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        + '"/>',
    ]
    for (context, count), (x, y) in zip(made.fitting, points, strict=True):
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{MARK}"/>')
        parts.append(_text(x, y - 8, f"{count:,}", anchor="middle", fill=MARK))
        parts.append(_text(x, BOTTOM + 18, f"{context:,}", anchor="middle"))
    return parts


def _text(x: float, y: float, text: str, *, size: int = 12, anchor: str = "start", fill: str = INK) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" fill="{fill}">{escape(text)}</text>'
    )
