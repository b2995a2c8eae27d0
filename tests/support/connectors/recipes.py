"""The code of docs/connectors.md, as a reader would copy it."""

from __future__ import annotations

import textwrap

from support import ROOT

PAGE = ROOT / "docs" / "connectors.md"


def recipe(heading: str) -> str:
    """Return the first code below a heading of that page, indented or between fences."""
    section = PAGE.read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]
    if "```" in section:
        return section.split("```")[1].split("\n", 1)[1]
    lines = section.split("\n")
    start = next(at for at, line in enumerate(lines) if line.startswith("    "))
    end = next(at for at in range(start, len(lines)) if lines[at] and not lines[at].startswith("    "))
    return textwrap.dedent("\n".join(lines[start:end]))
