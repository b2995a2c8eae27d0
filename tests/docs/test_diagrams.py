"""The pictures of the pages are those that docs/diagrams.py draws, fit their columns, and are shown."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from xml.etree import ElementTree

DOCS = Path(__file__).parents[2] / "docs"
SPEC = importlib.util.spec_from_file_location("diagrams", DOCS / "diagrams.py")
diagrams = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(diagrams)


def test_the_pictures_are_drawn_by_the_script():
    # bench/measured.py draws sizes.svg, and test_measured.py compares it with its record.
    drawn = {path.stem for path in (DOCS / "_static").glob("*.svg")} - {"favicon", "sizes"}
    assert drawn == set(diagrams.PICTURES)
    for name, picture in diagrams.PICTURES.items():
        text = (DOCS / "_static" / f"{name}.svg").read_text()
        assert text == diagrams.draw(*picture), f"python docs/diagrams.py has not been run since {name} was changed"
        ElementTree.fromstring(text)


def test_every_step_fits_between_its_columns():
    """A letter is 7 units wide on average; a step that only concerns one column has that column's width."""
    for _, columns, steps in diagrams.PICTURES.values():
        for start, end, text in steps:
            assert max(start, end) < len(columns)
            assert 7 * len(text) <= diagrams.GAP * max(1, abs(end - start)), text


def test_every_picture_is_shown_with_a_text():
    pages = "\n".join(page.read_text() for page in DOCS.glob("*.md"))
    for name in diagrams.PICTURES:
        assert f"](_static/{name}.svg)" in pages, name
    assert "![](" not in pages
