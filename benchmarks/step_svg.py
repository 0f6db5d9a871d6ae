# SPDX-License-Identifier: Apache-2.0
"""The picture of one step: a row for each role and stage, a bar for each kernel. Equal input gives equal bytes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

WIDTH, LEFT, RIGHT, TOP = 1280.0, 150.0, 20.0, 60.0
ROW, BAR, LEGEND = 52.0, 34.0, 22.0
MAX_TICKS = 12

#: What a kernel belongs to, its colour, and how the names of its ops begin.
GROUPS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("attention work (stand-in)", "#b8b8b8", ("delay",)),
    ("route", "#8e6bbf", ("gate", "top_k")),
    ("dispatch", "#2f74c0", ("plan", "small_plan", "pack", "dispatch")),
    ("wait", "#f1efe7", ("wait",)),
    ("combine", "#2a9d8f", ("combine",)),
    ("arrival", "#e0a100", ("enter", "merge")),
    ("experts", "#d1495b", ("up", "down")),
    ("reply", "#e8833a", ("reply", "leave")),
)
OTHER = ("other", "#555555")


def draw(trace: Mapping[str, Any]) -> str:
    """The SVG of ``{"title": str, "spans": [{name, start_us, dur_us, role, stage}, …]}``, times in µs.

    Time 0 is the left edge: what began before it is cut there. Raises ``ValueError`` where there is nothing to draw.
    """
    spans = [span for span in trace["spans"] if span["start_us"] + span["dur_us"] > 0]
    if not spans:
        raise ValueError("spans is empty after time 0; allowed: at least one kernel; record the step again")
    rows = sorted({(span["role"], span["stage"]) for span in spans})
    end = max(span["start_us"] + span["dur_us"] for span in spans)
    scale, bottom = (WIDTH - LEFT - RIGHT) / end, TOP + ROW * len(rows)
    used = _used(spans)
    height = bottom + 34 + LEGEND * (1 + (len(used) - 1) // 5) + 8
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH:g} {height:g}" role="img" '
        'aria-labelledby="title desc" font-family="system-ui, sans-serif" font-size="13">',
        f'<title id="title">{escape(trace["title"])}</title>',
        f'<desc id="desc">{escape(describe(spans, rows, end))}</desc>',
        '<defs><pattern id="waiting" width="7" height="7" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
        f'<rect width="7" height="7" fill="{_colour("wait")}"/><rect width="1.6" height="7" fill="#cfcabb"/>'
        "</pattern></defs>",
        f'<rect width="{WIDTH:g}" height="{height:g}" fill="#ffffff"/>',
        f'<text x="{LEFT:g}" y="24" font-size="16" fill="#222222">{escape(trace["title"])}</text>',
    ]
    parts += _axis(end, scale, bottom)
    for index, row in enumerate(rows):
        parts += _row(row, [s for s in spans if (s["role"], s["stage"]) == row], TOP + ROW * index, scale)
    return "\n".join([*parts, *_legend(used, bottom + 34), "</svg>"]) + "\n"


def describe(spans: Sequence[Mapping[str, Any]], rows: Sequence[tuple[str, int]], end: float) -> str:
    """The picture in words: for each row how long it worked and how long it waited."""
    told = []
    for role, stage in rows:
        mine = [span for span in spans if (span["role"], span["stage"]) == (role, stage)]
        waited = sum(_clipped(span)[1] for span in mine if group_of(span["name"]) == "wait")
        worked = sum(_clipped(span)[1] for span in mine) - waited
        told.append(f"{_label(role, stage)} works for {worked:.0f} µs and waits for {waited:.0f} µs")
    return f"Gantt chart of {end:.0f} µs. " + "; ".join(told) + "."


def group_of(op: str) -> str:
    """The group in the legend that an op belongs to."""
    return next((group for group, _, begins in GROUPS if op.startswith(begins)), OTHER[0])


def tick_step(end: float) -> float:
    """µs between ticks: 1, 2 or 5 times a power of ten, for at most ``MAX_TICKS`` of them up to ``end``."""
    step, factors = 1.0, (2.0, 2.5, 2.0)
    count = 0
    while end / step > MAX_TICKS:
        step *= factors[count % 3]
        count += 1
    return step


def _used(spans: Iterable[Mapping[str, Any]]) -> list[str]:
    """Groups that occur, in the order of ``GROUPS``."""
    found = {group_of(span["name"]) for span in spans}
    return [group for group, *_ in (*GROUPS, OTHER) if group in found]


def _colour(group: str) -> str:
    return next(colour for name, colour, *_ in (*GROUPS, OTHER) if name == group)


def _label(role: str, stage: int) -> str:
    return f"{'FFN' if role == 'ffn' else role}, stage {stage}"


def _clipped(span: Mapping[str, Any]) -> tuple[float, float]:
    """Start and duration after time 0."""
    start = max(0.0, span["start_us"])
    return start, span["start_us"] + span["dur_us"] - start


def _axis(end: float, scale: float, bottom: float) -> list[str]:
    step = tick_step(end)
    parts = []
    for index in range(int(end / step) + 1):
        x = LEFT + index * step * scale
        parts.append(f'<line x1="{x:.2f}" y1="{TOP - 10:g}" x2="{x:.2f}" y2="{bottom:g}" stroke="#e4e4e4"/>')
        parts.append(
            f'<text x="{x:.2f}" y="{TOP - 16:g}" fill="#666666" text-anchor="middle" font-size="11">'
            f"{index * step:g}{' µs' if index == 0 else ''}</text>"
        )
    return parts


def _row(row: tuple[str, int], spans: Sequence[Mapping[str, Any]], top: float, scale: float) -> list[str]:
    y = top + (ROW - BAR) / 2
    at = f'x="{LEFT - 10:g}" y="{top + ROW / 2 + 4:g}"'
    parts = [f'<text {at} fill="#222222" text-anchor="end">{_label(*row)}</text>']
    for span in sorted(spans, key=lambda s: (s["start_us"], s["name"])):
        start, duration = _clipped(span)
        if duration <= 0:
            continue
        group = group_of(span["name"])
        fill = "url(#waiting)" if group == "wait" else _colour(group)
        inset = 8 if group == "wait" else 0
        parts.append(
            f'<rect x="{LEFT + start * scale:.2f}" y="{y + inset:g}" width="{max(duration * scale, 0.6):.2f}" '
            f'height="{BAR - 2 * inset:g}" fill="{fill}"><title>{escape(span["name"])}: {span["start_us"]:.1f} … '
            f"{span['start_us'] + span['dur_us']:.1f} µs</title></rect>"
        )
    return parts


def _legend(groups: Sequence[str], top: float) -> list[str]:
    parts = []
    for index, group in enumerate(groups):
        x, y = LEFT + 205 * (index % 5), top + LEGEND * (index // 5)
        fill = "url(#waiting)" if group == "wait" else _colour(group)
        parts.append(f'<rect x="{x:g}" y="{y - 11:g}" width="14" height="14" fill="{fill}" stroke="#bbbbbb"/>')
        parts.append(f'<text x="{x + 20:g}" y="{y:g}" fill="#222222">{escape(group)}</text>')
    return parts
