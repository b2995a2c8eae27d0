"""List sentences of docstrings and comments that a reader has to read twice.

usage: prose.py [--most N] [PATH ...]     (default: aiote aiote_native)

Each line is a place to look, no verdict: a file, a line, a pattern and the sentence. The last line counts the places in
a thousand words. With `--most` the program fails where there are more than N in a thousand, which `make lint` asks for.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
SUFFIXES = {".py", ".pyi", ".pyx", ".pxd", ".h", ".c", ".cuh", ".md"}
_AFTER = r"(?:^|[.;:] |, |and |or |but |than |of |for |that )"
_VERBS = "is was has had does did comes came goes went takes needs cannot can may must"
_SUBJECTS = "it they we a an the of no nobody others one"
_WAYS = "is has waits asks holds takes may must can gets wants comes reads writes opens closes"
PATTERNS = {
    "'what' as a subject": rf"{_AFTER}[Ww]hat (?:{'|'.join([*_VERBS.split(), *_SUBJECTS.split()])}|\w+s) ",
    "nobody, nothing, none as the actor": r"\b(?:[Nn]obody|[Nn]o one|[Nn]othing|[Nn]one)\b "
    r"(?:\w+s|\w+ed|is|has|may|can|will|else)\b",
    "'who' for a thing": rf"\bwho (?:{'|'.join(_WAYS.split())})\b",
    "'so many', 'so long'": r"\b[Ss]o (?:many|long|much) (?:of|it|they|a|the)\b",
    "'Take note', 'Have it', 'Let it'": r"^(?:Take note|Have (?:it|them|its|somebody)|Let (?:it|them|go))\b",
    "'one that', 'of which'": r"\b(?:of those (?:that|which|who)|one that it|that of (?:the|its|a)|"
    r"(?:to|of|by|from) which|in which it)\b",
    "inverted 'where ... is'": r"^(?:Where|Of|In|By|From|To) \w+[^,.]{3,60}, (?:\w+ )?(?:is|are|was|there)\b",
    "'for' as because": r"[,;] for (?:it|they|the|a|no|its|there)\b",
}
COMPILED = {name: re.compile(text) for name, text in PATTERNS.items()}
NATIVE = re.compile(r'(?:^\s*"""|#|//|/\*|^\s*\*)\s?(.*)')
DOCUMENTED = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef


class Place(NamedTuple):
    """A sentence to look at."""

    path: Path
    line: int
    pattern: str
    text: str


def python_texts(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line numbers and lines of docstrings and comments. Raises SyntaxError."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, DOCUMENTED) and (text := ast.get_docstring(node, clean=False)):
            for offset, line in enumerate(text.splitlines()):
                yield node.body[0].lineno + offset, line.strip()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.lstrip("# ")


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the line numbers and lines of a file that are prose."""
    source = path.read_text(errors="replace")
    if path.suffix in (".py", ".pyi"):
        yield from python_texts(source)
        return
    fenced = False
    for number, line in enumerate(source.splitlines(), 1):
        if path.suffix == ".md":
            fenced ^= line.startswith("```")
            if not fenced and not line.startswith("```"):
                yield number, line.strip()
        elif found := NATIVE.search(line):
            yield number, found.group(1).strip()


def files(roots: list[Path]) -> Iterator[Path]:
    """Yield the files with prose below some folders, or these files themselves."""
    for root in roots:
        found = [root] if root.is_file() else sorted(root.rglob("*"))
        yield from (path for path in found if path.suffix in SUFFIXES)


def search(roots: list[Path]) -> tuple[list[Place], int]:
    """Return the places below some folders, and how many words were read."""
    places, words = list[Place](), 0
    for path in files(roots):
        for number, text in texts(path):
            words += len(text.split())
            places += [Place(path, number, name, text) for name, one in COMPILED.items() if one.search(text)]
    return places, words


def main() -> int:
    parser = argparse.ArgumentParser(description="List sentences that a reader has to read twice.")
    parser.add_argument("paths", nargs="*", type=Path, default=[ROOT / "aiote", ROOT / "aiote_native"])
    parser.add_argument("--most", type=float, help="places in a thousand words that there may be")
    given = parser.parse_args()
    if missing := [str(path) for path in given.paths if not path.exists()]:
        parser.error(f"there is no {', '.join(missing)}")
    places, words = search(given.paths)
    for place in places:
        print(f"{place.path}:{place.line}: [{place.pattern}] {place.text[:140]}")
    density = 1000 * len(places) / max(words, 1)
    print(f"{len(places)} places in {words} words: {density:.1f} in a thousand")
    return int(given.most is not None and density > given.most)


if __name__ == "__main__":
    sys.exit(main())
