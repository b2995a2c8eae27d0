"""What happens while a native lock is held: nothing of Python's, nothing that may raise, and it is given back.

A lock is taken as the first statement of a `with nogil:` block and given back as its last one, so that Cython itself
refuses whatever needs the interpreter in between; or within a function that never has the GIL. Nothing leaves such a
block half-way, and what runs without the GIL cannot raise. The engine's lock is taken only after a look at whether the
engine is still open and this process's own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

NATIVE = Path(__file__).parents[2] / "aiote_native"
PAIRS = {"lock": "unlock", "pthread_mutex_lock": "pthread_mutex_unlock"}
TAKES = re.compile(r"^(lock|pthread_mutex_lock)\((.*)\)$")
FUNCTION = re.compile(r"^(?:cdef|cpdef|def) [^=]*\(")
LEAVES = re.compile(r"^(return\b|raise\b|with gil|assert\b|yield\b)")
PINS = re.compile(r"\b(fi_mr_reg|reg_mr|reg_mr_iova2|reg_dmabuf_mr)\(")
LOOKS = re.compile(r"\b(alive|usable|channel_of)\(")


def indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def code(text: str) -> list[str]:
    """Return the lines of a source without what is blank, a comment or a text; of C, nothing either."""
    text = re.sub(r'"""(.|\n)*?"""', "pass", text)
    lines = [re.sub(r"\s+#.*$", "", line).rstrip() for line in text.splitlines()]
    return [line for line in lines if line.strip() and not line.lstrip().startswith("#")]


def function_of(lines: list[str], at: int) -> int:
    """Return the line in which the function around a line begins."""
    while at and not (FUNCTION.match(lines[at].strip()) and indent(lines[at]) < indent(lines[at + 1])):
        at -= 1
    return at


def header(lines: list[str], at: int) -> str:
    whole = lines[at].strip()
    while not whole.endswith(":"):
        at += 1
        whole += " " + lines[at].strip()
    return whole


def block_at(lines: list[str], at: int) -> list[str]:
    """Return the rest of the block that a line is in."""
    end = at
    while end < len(lines) and indent(lines[end]) >= indent(lines[at]):
        end += 1
    return lines[at:end]


def is_left(block: list[str]) -> bool:
    """Whether a block is left before its end; a loop within it may be."""
    loops: list[int] = []
    for line in block:
        loops = [loop for loop in loops if loop < indent(line)]
        statement = line.strip()
        if LEAVES.match(statement) or (statement in ("break", "continue") and not loops):
            return True
        if statement.startswith(("for ", "while ")):
            loops.append(indent(line))
    return False


def faults(text: str) -> Iterator[str]:
    """Yield what is wrong with the locks of one source."""
    lines = code(text)
    for at, line in enumerate(lines):
        statement = line.strip()
        if FUNCTION.match(statement) and " nogil" in header(lines, at) and "noexcept" not in header(lines, at):
            yield f"a function without the GIL may raise: {statement}"
        taken = TAKES.match(statement)
        if taken is None:
            continue
        start = function_of(lines, at)
        if taken[1] == "lock" and not any(LOOKS.search(before) for before in lines[start:at]):
            yield f"nobody has looked whether the engine is usable: {lines[start].strip()}"
        if lines[at - 1].strip() == "with nogil:":
            block = block_at(lines, at)
            if block[-1].strip() != f"{PAIRS[taken[1]]}({taken[2]})" or is_left(block):
                yield f"the lock is not given back at the end of its block: {lines[start].strip()}"
        elif not header(lines, start).endswith("noexcept nogil:"):
            yield f"the lock is taken with the GIL: {lines[start].strip()}"


def pins_with_gil(text: str) -> Iterator[str]:
    """Yield the calls that have the kernel pin memory, for seconds it may be, and hold the GIL."""
    lines = code(text)
    for at, line in enumerate(lines):
        if not PINS.search(line):
            continue
        around = [before for before in lines[function_of(lines, at) : at] if indent(before) < indent(line)]
        if not any(before.strip() == "with nogil:" for before in around):
            yield line.strip()


@pytest.mark.parametrize("path", sorted(NATIVE.rglob("*.pyx")), ids=lambda path: path.stem)
def test_nothing_of_pythons_happens_under_a_lock(path):
    assert list(faults(path.read_text())) == []


def test_nobody_pins_with_the_gil():
    sources = [path.read_text() for path in NATIVE.rglob("*.pyx")]
    assert sum(bool(PINS.search(line)) for text in sources for line in code(text)) == 4
    assert [call for text in sources for call in pins_with_gil(text)] == []
    held = "def pin(self):\n    if self.open:\n        code = fi_mr_reg(domain)\n"
    assert list(pins_with_gil(held)) == ["code = fi_mr_reg(domain)"]
    assert list(pins_with_gil(held.replace("if self.open:", "with nogil:"))) == []


GOOD = """
def ack_counts(self, items):
    usable(self.engine)
    with nogil:
        lock(self.engine)
        for i in range(n):
            if add(i):
                break
        unlock(self.engine)
    return items
"""


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("    usable(self.engine)\n", "", "nobody has looked"),
        ("    with nogil:\n        lock", "    if True:\n        lock", "taken with the GIL"),
        ("        unlock(self.engine)\n", "", "not given back"),
        ("unlock(self.engine)", "unlock(other)", "not given back"),
        ("                break", "                return", "not given back"),
        ("        for i in range(n):\n", "        if n:\n", "not given back"),
        ("def ack_counts(self, items):", "cdef int ack_counts(self) nogil:", "may raise"),
        ("lock(self.engine)\n        for", "pthread_mutex_lock(&it)\n        for", "not given back"),
    ],
)
def test_a_fault_is_found(old, new, fault):
    assert list(faults(GOOD)) == []
    assert GOOD.count(old) == 1 or old in ("unlock(self.engine)",)
    assert any(fault in found for found in faults(GOOD.replace(old, new, 1)))
