"""The queue of `make test`: which files run together, and in which order, so that no lane is left alone at the end.

An entry is some files of one kind of run (the newest libfabric, the system's, the guest), as many as take less than
two minutes; a file that takes longer has an entry of its own. Entries start in the order of their durations, longest
first, which ends all lanes at about the same time (Graham, "Bounds on Multiprocessing Timing Anomalies", 1969).
Durations are of the last run that somebody recorded (`make durations`); a file that is not among them counts as new.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
DURATIONS = ROOT / "tests" / "durations.json"
ENTRY_S = 110.0
NEW_FILE_S = 5.0
COLLECTED_S = 0.2  # what a file takes of which no test runs
STARTED_S = 2.0  # an entry's interpreter and imports

Durations = Mapping[str, Mapping[str, float]]
"""Seconds by kind of run and by file, as "engine/test_writes.py"."""


@dataclass(frozen=True)
class Entry:
    """What one pytest runs: some files of one kind of run, and how long they took the last time."""

    kind: str
    number: int
    files: tuple[str, ...]
    seconds: float

    @property
    def name(self) -> str:
        return f"{self.kind} {self.number}"

    def __str__(self) -> str:
        more = f" and {len(self.files) - 1} more" if self.files[1:] else ""
        return f"{self.files[0]}{more}"


def durations(path: Path) -> Durations:
    """Read the recorded durations; without a file everything is new."""
    return json.loads(path.read_text()) if path.exists() else {}


def entries(kind: str, files: Collection[str], recorded: Durations) -> list[Entry]:
    """Put each file into one entry: first fit, longest first (Johnson, "Near-optimal bin packing", 1973)."""
    of_kind = recorded.get(kind, {})
    known = {name for each in recorded.values() for name in each}
    # A file that ran in other runs only has no test for this one.
    seconds = {name: of_kind.get(name, COLLECTED_S if name in known else NEW_FILE_S) for name in files}
    bins: list[list[str]] = []
    sums: list[float] = []
    for name in sorted(files, key=lambda each: (-seconds[each], each)):
        place = next((place for place, total in enumerate(sums) if total + seconds[name] <= ENTRY_S), len(sums))
        if place == len(sums):
            bins.append([])
            sums.append(STARTED_S)
        bins[place].append(name)
        sums[place] += seconds[name]
    return [
        Entry(kind, number, tuple(sorted(each)), total)
        for number, (each, total) in enumerate(zip(bins, sums, strict=True), start=1)
    ]


class Queue:
    """Entries that wait for a lane, longest first; those of one kind may have to wait until it is ready."""

    def __init__(self, waiting: Iterable[Entry], *, unready: str = "", most: Mapping[str, int] | None = None) -> None:
        """Hold back the kind `unready` until `ready` is called; `most` limits how many entries of a kind run at a time.

        Limited kinds go first, because their entries have to follow one another.
        """
        self._waiting = sorted(waiting, key=lambda entry: (entry.kind not in (most or {}), -entry.seconds))
        self._unready = unready
        self._room = dict(most or {})
        self._changed = threading.Condition()

    def ready(self) -> None:
        """Give out the entries of the kind that had to wait."""
        with self._changed:
            self._unready = ""
            self._changed.notify_all()

    def drop(self, *kinds: str) -> None:
        """Give up the waiting entries of these kinds."""
        with self._changed:
            self._waiting = [entry for entry in self._waiting if entry.kind not in kinds]
            self._changed.notify_all()

    def take(self) -> Entry | None:
        """Return the longest entry that can run now, None once all are taken; wait if there is none now."""
        with self._changed:
            while self._waiting:
                for entry in self._waiting:
                    if entry.kind != self._unready and self._room.get(entry.kind, 1) > 0:
                        self._waiting.remove(entry)
                        self._make_room(entry.kind, -1)
                        return entry
                self._changed.wait()
        return None

    def ended(self, entry: Entry) -> None:
        """Let another entry of the same kind run."""
        with self._changed:
            self._make_room(entry.kind, 1)
            self._changed.notify_all()

    def _make_room(self, kind: str, by: int) -> None:
        if kind in self._room:
            self._room[kind] += by


def measured(report: Path, tests: Path) -> dict[str, float]:
    """Return the seconds of each file of a JUnit report, whose names are those of modules and classes."""
    found: dict[str, float] = {}
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        parts = str(case.get("classname")).split(".")[1:]
        names = ("/".join(parts[:end]) + ".py" for end in range(len(parts), 0, -1))
        name = next((each for each in names if (tests / each).exists()), None)
        if name is not None:
            found[name] = found.get(name, 0.0) + float(case.get("time", 0))
    return found


def record(reports: Path, tests: Path, path: Path) -> Durations:
    """Write down how long each file took in the last whole run; return it. Raises FileNotFoundError without a run."""
    new: dict[str, dict[str, float]] = {}
    for report in sorted(reports.glob("*-[0-9]*.xml")):
        for name, seconds in measured(report, tests).items():
            of_kind = new.setdefault(report.stem.rpartition("-")[0], {})
            of_kind[name] = round(of_kind.get(name, 0.0) + seconds, 1)
    if not new:
        raise FileNotFoundError(f"{reports} has no report of a run: run make test first")
    path.write_text(json.dumps(new, indent=1, sort_keys=True) + "\n")
    return new


def main() -> None:
    new = record(ROOT / "build" / "test-reports", ROOT / "tests", DURATIONS)
    for kind, files in new.items():
        print(f"{kind}: {len(files)} files, {sum(files.values()):.0f} s")


if __name__ == "__main__":
    main()
