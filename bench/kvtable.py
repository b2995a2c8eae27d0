"""The figures of the KV-cache service as tables of Markdown, so that notes can quote the terminal's output."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvlatency import FirstToken, PagesBack
from kvservice import Line

from aiote.bench.order_statistics import Spread
from aiote.bench.record_table import size_text

__all__ = ["first_tokens", "pages_back", "service", "service_latency"]


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _ratio(spread: Spread | None) -> str:
    return "-" if spread is None else f"{spread.median:.2f} ({spread.least:.2f}-{spread.most:.2f})"


def _work(line: Line) -> str:
    return f"{line.provider}, {line.pages} x {size_text(line.size)}, {line.window}"


def _grouped(lines: Sequence[Line]) -> dict[str, dict[str, Line]]:
    groups: dict[str, dict[str, Line]] = {}
    for line in lines:
        groups.setdefault(_work(line), {})[line.contestant] = line
    return groups


def _names(lines: Sequence[Line]) -> list[str]:
    return list(dict.fromkeys(line.contestant for line in lines))


def service(lines: Sequence[Line]) -> str:
    """Return medians in GiB/s, a column for each contestant, and the ratios of ours to the best peer."""
    names = _names(lines)
    rows = []
    for work, group in _grouped(lines).items():
        cells = [f"{group[name].value.median:.2f}" if name in group and group[name].runs else "-" for name in names]
        ours = [line for line in group.values() if line.ratio is not None]
        best = ours[0].best if ours else "-"
        rows.append([work, *cells, best, *(_ratio(line.ratio) for line in ours)])
    heads = ["pages, under way", *names, "best peer"]
    heads += [f"{name} / best" for name in dict.fromkeys(line.contestant for line in lines if line.ratio)]
    return _table(heads, rows)


def service_latency(lines: Sequence[Line]) -> str:
    """Return p50 / p99 of a request in milliseconds, and CPU seconds for each GiB (decode + prefill side)."""
    names = _names(lines)
    rows = []
    for work, group in _grouped(lines).items():
        rows.append([work, *(_times(group[name]) if name in group else "-" for name in names)])
    return _table(["pages, under way", *names], rows)


def _times(line: Line) -> str:
    if not line.runs:
        return "-"
    cpu = (line.cpu_decode + line.cpu_prefill) / line.value.median
    return f"{line.p50_us / 1000:.2f} / {line.p99_us / 1000:.2f}, {cpu:.2f}"


def first_tokens(found: Sequence[FirstToken]) -> str:
    """Return the time that is added to the first token, beside its bound."""
    heads = ["pages", "layers", "in one process, ms", "added, ms", "round trip, ms", "GiB/s", "bound, ms"]
    heads += ["added / bound"]
    rows = [
        [
            f"{one.provider}, {one.contestant}, {one.pages} x {size_text(one.size)}",
            f"{one.layers} of {one.layer_us / 1000:g} ms, {one.computing}",
            f"{one.alone_us.median / 1000:.1f}",
            f"{one.added_us.median / 1000:.2f}",
            f"{one.trip_us.median / 1000:.2f}",
            f"{one.gib_s.median:.2f}",
            f"{one.bound_us.median / 1000:.2f}",
            _ratio(one.ratio),
        ]
        for one in found
    ]
    return _table(heads, rows)


def pages_back(found: Sequence[PagesBack]) -> str:
    """Return the time until cancelled requests' pages were free."""
    rows = [
        [
            f"{one.provider}, {one.contestant}, {one.pages} x {size_text(one.size)}",
            one.prefiller,
            str(one.count),
            *(f"{value:.2f}" for value in (one.p50_ms, one.p99_ms, one.max_ms)),
        ]
        for one in found
    ]
    return _table(["pages", "the prefiller", "cancelled", "p50, ms", "p99, ms", "longest, ms"], rows)
