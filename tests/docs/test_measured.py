"""Tables and the picture of measurements say what their records say."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "bench"))
SPEC = importlib.util.spec_from_file_location("measured", ROOT / "bench" / "measured.py")
tool = importlib.util.module_from_spec(SPEC)
sys.modules[SPEC.name] = tool
SPEC.loader.exec_module(tool)
MIB = 1 << 20


def cell(rate, cpu=0.5):
    return {"rate": rate, "low": rate - 0.5, "high": rate + 0.5, "cpu": cpu}


FOUND = {
    "torch": [{"verb": verb, "bytes": MIB, "aiote": cell(2), "nixl": cell(3)} for verb in ("write", "read")],
    "ray": [{"bytes": MIB, "store": cell(1), "aiote": cell(4, 0.25), "nixl": cell(3)}],
    "idle": [{"backend": "nixl", "load": 1.0, "initiator": [8.25, 0.5], "target": [7, 3]}],
}
LINES = {
    "torch": "| 1 MiB | 2.00 (1.50-2.50) | 3.00 (2.50-3.50) | 2.00 (1.50-2.50) | 3.00 (2.50-3.50) |",
    "ray": "| 1 MiB | 1.00 (0.50-1.50); 0.50 | 4.00 (3.50-4.50); 0.25 | 3.00 (2.50-3.50); 0.50 |",
    "idle": "| NIXL | 8.25 %, 0.5 | 7.00 %, 3.0 |",
}
SIZES = [
    {"row": "write", "provider": provider, "bytes": nbytes, "alone_us": {"aiote": nbytes / 4000, "ucxx": None}}
    for provider in ("local", "socket")
    for nbytes in (65536, MIB)
]


def test_the_pages_are_as_the_records_say():
    assert [str(path) for path, text in tool.made().items() if path.read_text() != text] == []


@pytest.fixture
def checkout(monkeypatch, tmp_path):
    """A checkout with the pages, and no records."""
    (tmp_path / "docs" / "_static").mkdir(parents=True)
    for name in {page for page, _ in tool.PARTS.values()}:
        kinds = [kind for kind, (page, _) in tool.PARTS.items() if page == name]
        places = "".join(f"<!-- measured: {kind} -->\n{tool.END}between\n" for kind in kinds)
        (tmp_path / name).write_text(f"before\n{places}after\n")
    monkeypatch.setattr(tool, "ROOT", tmp_path)
    return tmp_path


def added(checkout, kind, found):
    path = checkout / "found.json"
    path.write_text(json.dumps(found))
    return tool.main(["add", kind, str(path), "--command", "make it", "--library", "aiote=0.1.0"])


@pytest.mark.parametrize("kind", FOUND)
def test_a_record_becomes_a_table_that_check_compares(checkout, kind, capsys):
    assert tool.main(["check"]) == 0
    assert added(checkout, kind, {"load": [0.5, 1.5], "rows": FOUND[kind]}) == 0
    assert tool.main(["check"]) == 0
    page = checkout / "docs/connectors.md"
    text = page.read_text()
    assert LINES[kind] in text
    assert "load 0.5 before and 1.5 after; aiote 0.1.0: `make it`." in text
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    page.write_text(text.replace("| 1 MiB |", "| 2 MiB |").replace("8.25", "8.26"))
    assert tool.main(["check"]) == 1
    assert tool.main(["write"]) == 0
    assert page.read_text() == text
    capsys.readouterr()


def test_sizes_become_a_picture_with_a_line_for_each_library_that_has_figures(checkout, capsys):
    assert added(checkout, "sizes", [{"row": "a floor", "us": 3}, *SIZES]) == 0
    picture = checkout / "docs/_static/sizes.svg"
    root = ElementTree.fromstring(picture.read_text())
    lines = [one for one in root.iter() if one.tag.endswith("polyline")]
    assert len(lines) == 2
    texts = [one.text for one in root.iter() if one.tag.endswith("text")]
    assert {"aiote", "64 KiB", "1 MiB"} <= set(texts)
    assert "ucxx" not in texts
    # Both sizes are at 4 GB/s, so both ends of a line are equally high.
    first, last = lines[0].attrib["points"].split()
    assert first.split(",")[1] == last.split(",")[1]
    assert "_static/sizes.svg" in (checkout / "docs/comparison.md").read_text()
    picture.write_text("other")
    assert tool.main(["check"]) == 1
    capsys.readouterr()


@pytest.mark.parametrize(
    "found", [{"load": [1, 2], "rows": []}, {"load": [1, 2], "rows": [{"bytes": 1}]}, {"rows": 3}, {}], ids=range(4)
)
def test_what_is_no_record_is_refused(checkout, found, capsys):
    assert added(checkout, "torch", found) == 1
    assert "measured:" in capsys.readouterr().err


def test_a_page_without_a_place_for_a_record_is_named(checkout, capsys):
    (checkout / "docs/comparison.md").write_text("nothing here\n")
    assert tool.main(["write"]) == 1
    assert "comparison.md: no <!-- measured: sizes -->" in capsys.readouterr().err
