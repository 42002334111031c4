from __future__ import annotations

import math
from html import escape
from pathlib import Path

from quire.engine.checkpoint.kv_cache_plan import CUDA_CONTEXT_BYTES, GIB
from quire.server.cli.plan.estimate import Estimate
from quire.server.cli.plan.machine import ENGINE_HOST_BYTES

WIDTH, HEIGHT = 760, 430
LEFT, RIGHT = 70, 730
BAR_TOP, BAR_HEIGHT = 64, 44
TOP, BOTTOM = 190, 380
BAR_COLORS = {"weights": "#2a6f97", "overhead": "#8d99ae", "KV cache": "#52b788", "left free": "#e9ecef"}
TEXT_COLOR, MARK_COLOR = "#333333", "#c1440e"


def draw_estimate_svg(estimate: Estimate, name: str) -> str:
    title = f"{Path(name).name}, {estimate.dtype}, on {estimate.machine.count} x {estimate.machine.name}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        f'font-size="12" fill="{TEXT_COLOR}" role="img" aria-label="{escape(title)}">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        _draw_text(LEFT, 28, title, size=15),
        *_draw_memory_bar(estimate),
        *(
            _draw_fit_curve(estimate)
            if estimate.fits
            else [_draw_text(LEFT, TOP, "does not fit: " + reason) for reason in estimate.reasons]
        ),
        "</svg>",
    ]
    return "\n".join(parts)


def memory_bytes_by_use(estimate: Estimate) -> dict[str, int]:
    machine = estimate.machine
    weights = estimate.weight_bytes // machine.count
    overhead = CUDA_CONTEXT_BYTES if machine.gpu else ENGINE_HOST_BYTES
    cache = estimate.num_blocks * estimate.block_bytes
    return {
        "weights": weights,
        "overhead": overhead,
        "KV cache": cache,
        "left free": max(machine.memory - weights - overhead - cache, 0),
    }


def _draw_memory_bar(estimate: Estimate) -> list[str]:
    bytes_by_use = memory_bytes_by_use(estimate)
    scale = (RIGHT - LEFT) / max(sum(bytes_by_use.values()), 1)
    parts, x = [], float(LEFT)
    for index, (label, size) in enumerate(bytes_by_use.items()):
        width, fill = size * scale, BAR_COLORS[label]
        parts.append(f'<rect x="{x:.1f}" y="{BAR_TOP}" width="{width:.1f}" height="{BAR_HEIGHT}" fill="{fill}"/>')
        x += width
        key = LEFT + index * 165
        parts.append(f'<rect x="{key}" y="{BAR_TOP + 58}" width="10" height="10" fill="{fill}"/>')
        parts.append(_draw_text(key + 15, BAR_TOP + 67, f"{label} {size / GIB:,.2f} GiB"))
    limit = LEFT + estimate.machine.memory * scale
    if limit < RIGHT - 1:
        parts.append(f'<path d="M{limit:.1f} {BAR_TOP - 8}v{BAR_HEIGHT + 16}" stroke="{MARK_COLOR}" stroke-width="2"/>')
        parts.append(_draw_text(limit - 4, BAR_TOP - 10, "memory ends here", anchor="end", fill=MARK_COLOR))
    return parts


def _draw_fit_curve(estimate: Estimate) -> list[str]:
    contexts = [math.log2(context) for context, _ in estimate.fitting]
    counts = [math.log2(count) for _, count in estimate.fitting]
    low = contexts[0]
    high = max(contexts[-1], contexts[0] + 1)
    most = max(counts[0], 1.0)

    def to_point(context: float, count: float) -> tuple[float, float]:
        return LEFT + (context - low) / (high - low) * (RIGHT - LEFT), BOTTOM - count / most * (BOTTOM - TOP)

    points = [to_point(context, count) for context, count in zip(contexts, counts, strict=True)]
    parts = [
        _draw_text(LEFT, TOP - 18, "requests at once (up) over tokens of each (right)"),
        f'<path d="M{LEFT} {TOP}V{BOTTOM}H{RIGHT}" fill="none" stroke="{BAR_COLORS["overhead"]}"/>',
        '<polyline fill="none" stroke="#2a6f97" stroke-width="2" points="'
        + " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        + '"/>',
    ]
    for (context, count), (x, y) in zip(estimate.fitting, points, strict=True):
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{MARK_COLOR}"/>')
        parts.append(_draw_text(x, y - 8, f"{count:,}", anchor="middle", fill=MARK_COLOR))
        parts.append(_draw_text(x, BOTTOM + 18, f"{context:,}", anchor="middle"))
    return parts


def _draw_text(x: float, y: float, text: str, *, size: int = 12, anchor: str = "start", fill: str = TEXT_COLOR) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" fill="{fill}">{escape(text)}</text>'
    )
