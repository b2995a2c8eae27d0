"""What a soak finds: violations of aiote's promises, and errors of its own, which say nothing about aiote.

An error that nobody expects is aiote's where it came out of aiote's code, and the soak's own elsewhere: a command of
the system that fails, a process that does not start, a bug in these files. The first finding decides the exit status.
"""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Iterable

import aiote

VIOLATED, FAILED_ITSELF = 1, 2
SHOWN = 20
OURS = {"aiote", "aiote_native"}


def leaves(error: BaseException) -> list[BaseException]:
    """Return the errors of a group, however deep they lie; of another error itself."""
    if not isinstance(error, BaseExceptionGroup):
        return [error]
    return [leaf for inner in error.exceptions for leaf in leaves(inner)]


def of_aiote(error: BaseException) -> bool:
    """Tell whether an error is aiote's: one of its kinds, or any that came out of its code."""
    if isinstance(error, BaseExceptionGroup):
        return any(of_aiote(leaf) for leaf in leaves(error))
    names = (str(frame.f_globals.get("__name__")) for frame, _line in traceback.walk_tb(error.__traceback__))
    return isinstance(error, aiote.AioteError) or any(name.partition(".")[0] in OURS for name in names)


def status_of(turns: Iterable[int]) -> int:
    """Return the exit status of several turns: a violation stands, whatever became of the other turns."""
    told = set(turns)
    return next((status for status in (VIOLATED, FAILED_ITSELF) if status in told), 0)


class Findings:
    """Where findings are reported to."""

    def violation(self, text: str) -> None:
        """Report that aiote broke a promise."""
        raise NotImplementedError

    def failure(self, text: str) -> None:
        """Report an error of the soak's own."""
        raise NotImplementedError

    def unexpected(self, error: BaseException, where: str) -> None:
        """Report an error that nobody expects, with where it came from."""
        text = f"{where}: {error!r}\n{''.join(traceback.format_exception(error)).rstrip()}"
        (self.violation if of_aiote(error) else self.failure)(text)


class Verdict(Findings):
    """The findings of one turn, printed as they come. `ended` is set with the first one."""

    def __init__(self, repeat: str) -> None:
        self.violations: list[str] = []
        self.failures: list[str] = []
        self.ended = asyncio.Event()
        self._repeat = repeat

    @property
    def status(self) -> int:
        """The exit status: 0, VIOLATED or FAILED_ITSELF."""
        return VIOLATED if self.violations else FAILED_ITSELF if self.failures else 0

    def violation(self, text: str) -> None:
        """Report that aiote broke a promise; what follows an error of the soak's own is its consequence."""
        if self.failures:
            self.failure(f"after that, {text}")
            return
        self.violations.append(text)
        self._print("VIOLATION", text, len(self.violations))

    def failure(self, text: str) -> None:
        self.failures.append(text)
        self._print("THE SOAK ITSELF FAILED", text, len(self.failures))

    def _print(self, kind: str, text: str, count: int) -> None:
        self.ended.set()
        if count <= SHOWN:
            print(f"\n{kind}: {text}\nTo repeat: {self._repeat}", flush=True)
