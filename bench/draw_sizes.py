"""Draw the rate of single writes by size as an SVG: one panel for each provider, one line for each library."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

__all__ = ["picture"]

WIDTH, HEIGHT, LEFT, TOP, GAP = 340, 220, 50, 40, 40
COLOURS = ("#0b6e4f", "#c8553d", "#3d5a80", "#8d6a9f", "#b08900", "#555555", "#1b9aaa", "#a23b72")
"""The first is aiote's."""
NAMES = {"nixl-ucx": "NIXL (UCX)", "nixl-ucx-copy": "NIXL (UCX, copying)", "sockets": "plain sockets"}

Series = dict[str, list[tuple[int, float]]]


def series_of(rows: Sequence[dict[str, Any]], provider: str) -> Series:
    """Return sizes and GB/s of each library over one provider; libraries that cannot do a size have no point there."""
    found: Series = {}
    for row in sorted((row for row in rows if row["provider"] == provider), key=lambda row: int(row["bytes"])):
        for name, us in row["alone_us"].items():
            if us and math.isfinite(us):
                found.setdefault(name, []).append((row["bytes"], row["bytes"] / us / 1e3))
    return found


def picture(rows: Sequence[dict[str, Any]]) -> str:
    """Return the picture. rows: `bytes`, `provider` and `alone_us`, microseconds by library. Raises ValueError."""
    panels = {provider: series_of(rows, provider) for provider in dict.fromkeys(row["provider"] for row in rows)}
    names = list(dict.fromkeys(name for series in panels.values() for name in series))
    if not names:
        raise ValueError("no library has a figure")
    width, height = len(panels) * (LEFT + WIDTH) + GAP, TOP + HEIGHT + GAP + 18 * len(names)
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif">']
    parts.append(f'<rect width="{width}" height="{height}" fill="white"/>')
    top = max(rate for series in panels.values() for line in series.values() for _, rate in line) * 1.1
    for number, (provider, series) in enumerate(panels.items()):
        parts += panel(LEFT + number * (WIDTH + LEFT), provider, series, names, top)
    for number, name in enumerate(names):
        y = TOP + HEIGHT + GAP + 18 * number
        parts.append(f'<rect x="{LEFT}" y="{y - 8}" width="20" height="4" fill="{COLOURS[number % len(COLOURS)]}"/>')
        parts.append(f'<text x="{LEFT + 28}" y="{y}" font-size="12">{NAMES.get(name, name)}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def panel(x: int, provider: str, series: Series, names: list[str], top: float) -> list[str]:
    """Return the frame, the axes and the lines of one provider; `top` is the rate at the upper edge."""
    sizes = sorted({nbytes for line in series.values() for nbytes, _ in line})
    first, last = math.log2(sizes[0]), max(math.log2(sizes[-1]), math.log2(sizes[0]) + 1)

    def place(nbytes: int, rate: float) -> tuple[float, float]:
        return x + WIDTH * (math.log2(nbytes) - first) / (last - first), TOP + HEIGHT * (1 - rate / top)

    parts = [f'<rect x="{x}" y="{TOP}" width="{WIDTH}" height="{HEIGHT}" fill="none" stroke="#999"/>']
    parts.append(f'<text x="{x}" y="{TOP - 12}" font-size="13">{provider}: GB/s of a write, by size</text>')
    for quarter in range(5):
        y, rate = TOP + HEIGHT * (1 - quarter / 4), top * quarter / 4
        parts.append(f'<text x="{x - 6}" y="{y + 4:.0f}" font-size="11" text-anchor="end">{rate:.1f}</text>')
    for nbytes in sizes:
        label = f"{nbytes >> 20} MiB" if nbytes >= 1 << 20 else f"{nbytes >> 10} KiB"
        at = place(nbytes, 0)[0]
        parts.append(f'<text x="{at:.0f}" y="{TOP + HEIGHT + 16}" font-size="11" text-anchor="middle">{label}</text>')
    for name, line in series.items():
        points = " ".join("{:.1f},{:.1f}".format(*place(*point)) for point in line)
        colour = COLOURS[names.index(name) % len(COLOURS)]
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for point in line:
            cx, cy = place(*point)
            parts.append(f'<circle cx="{cx:.1f}" cy="{cy:.1f}" r="3" fill="{colour}"/>')
    return parts
