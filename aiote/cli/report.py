"""The output of a run of the demo: progress on standard error, results on standard output, as text or as a dict."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType

import rich.box
from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from aiote.demo import tokens
from aiote.demo.children import NAMES
from aiote.demo.model import ModelConfig
from aiote.demo.one_process import LocalResult
from aiote.demo.run import RunResult
from aiote.demo.settings import Settings

__all__ = ["Bars", "RunSummary", "difference", "summarize"]

_SAMPLE = 2
_SHOWN = 160


@dataclass(frozen=True, slots=True)
class RunSummary:
    """A finished run, its comparison, and how to show them."""

    settings: Settings
    config: ModelConfig
    result: RunResult
    references: tuple[LocalResult, ...]
    wrong: str

    @property
    def ttft_s(self) -> tuple[float, float]:
        """The medians of the times to first token: in one process, disaggregated."""
        return (
            statistics.median(reference.ttft_s for reference in self.references),
            statistics.median(trace.first_s - trace.asked_s for trace in self.result.traces),
        )

    @property
    def elapsed_s(self) -> tuple[float, float]:
        """The times from the first request's admission to the last token: in one process, disaggregated."""
        traces = self.result.traces
        return (
            max(reference.finished_s for reference in self.references),
            max(trace.last_s for trace in traces) - min(trace.asked_s for trace in traces),
        )

    @property
    def pages(self) -> int:
        """The number of pages that were written."""
        return sum(trace.pages for trace in self.result.traces)

    @property
    def gib_per_s(self) -> float:
        """The written bytes by the time in which at least one write was in flight, on the prefiller's clock."""
        report = self.result.reports["prefill"]
        return report.bytes / max(report.busy_s, 1e-9) / 2**30

    def as_dict(self) -> dict[str, object]:
        """Return everything for a program; times in seconds, sizes in bytes."""
        report, settings = self.result.reports["prefill"], self.settings
        one_process, disaggregated = self.ttft_s
        return {
            "ok": not self.wrong,
            "error": self.wrong or None,
            "provider": settings.provider,
            "rails": [
                {
                    "name": rail.name,
                    "provider": rail.provider,
                    "speed_mbps": rail.speed_mbps,
                    "library": str(rail.library),
                }
                for rail in self.result.rails
            ],
            "model": {name: getattr(self.config, name) for name in ModelConfig.__slots__},
            "page_tokens": settings.page_tokens,
            "chunk_tokens": settings.chunk_tokens,
            "concurrency": settings.concurrency,
            "tokens_equal": all(map(self._tokens_equal, range(len(self.references)))),
            "cache_equal": all(map(self._cache_equal, range(len(self.references)))),
            "ttft_p50_s": {"one_process": one_process, "disaggregated": disaggregated},
            "elapsed_s": dict(zip(("one_process", "disaggregated"), self.elapsed_s, strict=True)),
            "transfer": {
                "pages": self.pages,
                "bytes": report.bytes,
                "writes": report.writes,
                "in_flight_s": report.busy_s,
                "gib_per_s": self.gib_per_s,
            },
            "pages_held": {role: each.pages_held for role, each in self.result.reports.items()},
            "pids": dict(self.result.pids),
            "requests": [self._request(number) for number in range(len(self.references))],
        }

    def _tokens_equal(self, number: int) -> bool:
        return self.result.traces[number].tokens == self.references[number].tokens

    def _cache_equal(self, number: int) -> bool:
        return self.result.traces[number].checksum == self.references[number].checksum

    def _request(self, number: int) -> dict[str, object]:
        trace, reference = self.result.traces[number], self.references[number]
        return {
            "request": number + 1,
            "prompt_tokens": len(trace.prompt),
            "pages": trace.pages,
            "tokens": trace.tokens,
            "text": tokens.decode(trace.tokens).decode(errors="replace"),
            "tokens_equal": self._tokens_equal(number),
            "cache_equal": self._cache_equal(number),
            "ttft_s": {"one_process": reference.ttft_s, "disaggregated": trace.first_s - trace.asked_s},
        }

    def show(self, console: Console) -> None:
        """Print a sample of the text, and the table."""
        for trace in self.result.traces[:_SAMPLE]:
            cut = "…" if len(trace.prompt) > _SHOWN else ""
            prompt = tokens.readable(trace.prompt[-_SHOWN:])
            sample = Text.assemble((cut + prompt, "dim"), (tokens.readable(trace.tokens), "bold"))
            console.print(Panel(sample, title=f"request {trace.request + 1}", title_align="left", expand=False))
        console.print(self._table())
        if self.wrong:
            return
        count = sum(len(trace.tokens) for trace in self.result.traces)
        console.print(f"All {count} tokens equal those of the one-process generation.", style="green")
        console.print("So do the keys and values of every prompt, bit by bit (CRC-32).", style="green")

    def _table(self) -> Table:
        table = Table(box=rich.box.SIMPLE, show_header=False, title="aiote demo kvcache", title_justify="left")
        table.add_column(style="cyan", no_wrap=True)
        table.add_column()
        for name, value in (*self._times(), *self._transfers()):
            table.add_row(name, value)
        return table

    def _times(self) -> list[tuple[str, str]]:
        settings, config = self.settings, self.config
        prompt = sum(len(trace.prompt) for trace in self.result.traces)
        heads = f"{config.heads} heads over {config.kv_heads} of size {config.head_size}"
        weights = settings.weights or f"seed {settings.seed}"
        return [
            ("requests", f"{len(self.result.traces)}, {settings.concurrency} at a time, {prompt} prompt tokens"),
            ("model", f"{config.layers} layers, {heads}, {weights}"),
            ("time to first token, p50", f"{self.ttft_s[0] * 1e3:.1f} ms in one process"),
            ("", f"{self.ttft_s[1] * 1e3:.1f} ms disaggregated"),
            ("all requests", f"{self.elapsed_s[0]:.2f} s in one process"),
            ("", f"{self.elapsed_s[1]:.2f} s disaggregated"),
        ]

    def _transfers(self) -> list[tuple[str, str]]:
        report = self.result.reports["prefill"]
        libraries = ", ".join(dict.fromkeys(str(rail.library) for rail in self.result.rails))
        held = (f"{NAMES[role]} {each.pages_held}" for role, each in sorted(self.result.reports.items()))
        page_bytes = 2 * self.config.kv_heads * self.settings.page_tokens * self.config.head_size * 4
        return [
            ("pages written", f"{self.pages} of {page_bytes} bytes, in {report.writes} writes"),
            ("bytes written", f"{report.bytes} ({report.bytes / 2**20:.1f} MiB)"),
            ("GiB/s while a write was in flight", f"{self.gib_per_s:.2f} (over {report.busy_s * 1e3:.1f} ms)"),
            ("provider", f"{self.settings.provider}; {libraries}"),
            ("rails", ", ".join(f"{rail.name} ({rail.provider})" for rail in self.result.rails)),
            ("pages held at the end", ", ".join(held)),
        ]


def difference(result: RunResult, references: Sequence[LocalResult]) -> str:
    """Say where a run differs from the reference in its tokens or its cache, or return an empty text.

    A page that got lost need not change a greedy choice, so the checksums are compared as well.
    """
    for trace, reference in zip(result.traces, references, strict=True):
        if trace.tokens == reference.tokens:
            if trace.checksum == reference.checksum:
                continue
            return (
                f"request {trace.request + 1}: the tokens are equal, but the keys and values of the prompt are not "
                f"(CRC-32 {trace.checksum:08x}, {reference.checksum:08x} in one process)"
            )
        pairs = zip(trace.tokens, reference.tokens, strict=False)
        place = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(trace.tokens), len(reference.tokens)))
        return (
            f"request {trace.request + 1}: token {place + 1} is {_at(trace.tokens, place)}, "
            f"but {_at(reference.tokens, place)} in one process; so the transferred cache differs from the computed one"
        )
    return ""


def _at(sequence: Sequence[int], place: int) -> str:
    return str(sequence[place]) if place < len(sequence) else "missing"


def summarize(
    settings: Settings, config: ModelConfig, result: RunResult, references: Sequence[LocalResult]
) -> RunSummary:
    """Compare a run with its reference."""
    return RunSummary(settings, config, result, tuple(references), difference(result, references))


class Bars:
    """Progress bars on a terminal, nothing elsewhere. A `run.Observer`."""

    def __init__(self, console: Console, requests: int) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._pages: TaskID = self._progress.add_task("pages written", total=None, start=False)
        self._tokens: TaskID = self._progress.add_task("tokens generated", total=None, start=False)
        self._reference: TaskID = self._progress.add_task("one process", total=requests, start=False)

    def __enter__(self) -> Bars:
        if not self._progress.disable:  # rich 13.7 writes an empty line at the end of a disabled one
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._progress.disable:
            self._progress.stop()

    def started(self, pages: int, tokens: int) -> None:
        """Show how much there is to do."""
        for task, total in ((self._pages, pages), (self._tokens, tokens)):
            self._progress.update(task, total=total)
            self._progress.start_task(task)

    def pages(self, count: int) -> None:
        """Show more pages."""
        self._progress.advance(self._pages, count)

    def token(self) -> None:
        """Show one more token."""
        self._progress.advance(self._tokens)

    def reference_started(self) -> None:
        """Show that the comparison begins."""
        self._progress.start_task(self._reference)

    def reference(self) -> None:
        """Show one more request of the comparison."""
        self._progress.advance(self._reference)
