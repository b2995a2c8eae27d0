"""Put made parts into pages of the docs, between two marks that stay."""

from __future__ import annotations

__all__ = ["put_between"]


def put_between(text: str, start: str, end: str, part: str) -> str:
    """Return the text with `part` in place of what lies between its marks. Raises ValueError where it has not both."""
    before, found, rest = text.partition(start)
    _, last, after = rest.partition(end)
    if not found or not last:
        raise ValueError(f"no {start.strip()} and {end.strip()}")
    return f"{before}{start}{part}{end}{after}"
