"""Draws the pictures of docs/_static: sequences of messages between columns, in colours that follow light and dark.

`python docs/diagrams.py` writes them again; a test compares. A picture is a list of columns, and of steps from the
top to the bottom.
"""

from __future__ import annotations

import itertools
from html import escape
from pathlib import Path

STATIC = Path(__file__).parent / "_static"
STEP, HEAD, GAP = 34, 56, 240
STYLE = """
  text { font: 13px system-ui, sans-serif; fill: #1f2933; }
  .paper { fill: #ffffff; }
  .head { font-weight: 600; }
  .box { fill: #eef2f7; stroke: #52606d; }
  .line, .arrow { stroke: #52606d; fill: none; }
  .line { stroke-dasharray: 3 4; }
  .tip { fill: #52606d; }
  @media (prefers-color-scheme: dark) {
    text { fill: #e4e7eb; }
    .paper { fill: #14181d; }
    .box { fill: #2b3440; stroke: #9aa5b1; }
    .line, .arrow { stroke: #9aa5b1; }
    .tip { fill: #9aa5b1; }
  }
"""

# A step: (from, to, text) is an arrow between columns; (at, at, text) is what a column does by itself.
Step = tuple[int, int, str]
PICTURES: dict[str, tuple[str, list[str], list[Step]]] = {
    "write": (
        "Life of a write",
        ["Coroutine", "Sender's engine", "Rails", "Receiver's engine", "Coroutine"],
        [
            (4, 3, "counter(7).wait(1)"),
            (0, 1, "await write_imm(src, dst, 7)"),
            (1, 1, "checks bounds, splits into stripes"),
            (1, 2, "posts each stripe"),
            (2, 3, "bytes into memory"),
            (2, 3, "then the immediate, per stripe"),
            (3, 3, "all stripes came: counts 1"),
            (3, 4, "wakes: the bytes are in place"),
            (2, 1, "completion of each stripe"),
            (1, 0, "the await returns"),
        ],
    ),
    "failover": (
        "Failover: a channel dies",
        ["Engine A", "Channel 1", "Engine B"],
        [
            (0, 1, "writes with immediates"),
            (1, 1, "dies: some arrived"),
            (0, 0, "shuts its endpoint"),
            (0, 2, "RailDown"),
            (2, 2, "shuts its endpoint"),
            (2, 0, "RailDown"),
            (2, 0, "Arrivals: how many came"),
            (0, 2, "Arrivals"),
            (0, 2, "the bytes again, over channel 2, without immediates"),
            (0, 2, "the immediates that did not come"),
            (0, 2, "Reopen: a new endpoint for channel 1"),
        ],
    ),
    "services": (
        "The three services: who writes to whom",
        ["aiote.kvcache", "aiote.weights", "aiote.moe"],
        [
            (0, 0, "decode rank names its pages"),
            (1, 1, "both describe shards, once"),
            (2, 2, "ranks exchange counts of rows"),
            (0, 0, "prefill rank writes each layer"),
            (1, 1, "trainers write shard to shard"),
            (2, 2, "each rank writes rows to experts"),
            (0, 0, "decode rank counts, per layer"),
            (1, 1, "inference ranks take the version"),
            (2, 2, "experts write answers back"),
        ],
    ),
    "sleep": (
        "Sleeping and waking",
        ["Event loop", "Engine", "Kernel"],
        [
            (1, 1, "polls while something happens"),
            (1, 1, "after spin_us: arms the rails"),
            (1, 1, "polls once more"),
            (1, 2, "sleeps on one descriptor"),
            (2, 2, "no CPU is used"),
            (2, 0, "a rail, a peer's wake-up or a timer"),
            (0, 1, "runs the engine's turn"),
            (1, 0, "wakes every task that is ready"),
        ],
    ),
}


def arrow(step: Step, y: int) -> list[str]:
    """Draw one step: an arrow with its text above, or a box in its column."""
    start, end, text = step
    x1, x2 = (GAP // 2 + GAP * column for column in (start, end))
    if start == end:
        width = GAP - 12
        box = f'<rect class="box" x="{x1 - width // 2}" y="{y - 16}" width="{width}" height="23" rx="4"/>'
        return [box, f'<text x="{x1}" y="{y}" text-anchor="middle">{escape(text)}</text>']
    tip = x2 - 8 if x2 > x1 else x2 + 8
    return [
        f'<path class="arrow" d="M{x1} {y + 5}H{tip}"/>',
        f'<path class="tip" d="M{x2} {y + 5}L{tip} {y + 1}V{y + 9}Z"/>',
        f'<text x="{(x1 + x2) // 2}" y="{y}" text-anchor="middle">{escape(text)}</text>',
    ]


def numbered(steps: list[Step]) -> list[int]:
    """Return each step's row: what a column does by itself shares that of a column to its left."""
    rows = [0]
    for (before, reached, _), (start, end, _) in itertools.pairwise(steps):
        rows.append(rows[-1] + (not before == reached < start == end))
    return rows


def draw(title: str, columns: list[str], steps: list[Step]) -> str:
    """Return a picture as SVG."""
    rows = numbered(steps)
    width, height = GAP * len(columns), HEAD + STEP * (rows[-1] + 1)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">',
        f"<title>{escape(title)}</title>",
        f"<style>{STYLE}</style>",
        f'<rect class="paper" width="{width}" height="{height}" rx="6"/>',
    ]
    for number, name in enumerate(columns):
        x = GAP // 2 + GAP * number
        lines.append(f'<text class="head" x="{x}" y="22" text-anchor="middle">{escape(name)}</text>')
        lines.append(f'<path class="line" d="M{x} 30V{height - 6}"/>')
    for row, step in zip(rows, steps, strict=True):
        lines += arrow(step, HEAD + 6 + STEP * row)
    return "\n".join([*lines, "</svg>", ""])


if __name__ == "__main__":
    for name, picture in PICTURES.items():
        (STATIC / f"{name}.svg").write_text(draw(*picture))
