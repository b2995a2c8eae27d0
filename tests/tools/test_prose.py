"""`tools/prose.py`: which sentences it lists, where it looks for them, and when it fails."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "tools"))

from prose import COMPILED, ROOT, search, texts

TOOL = ROOT / "tools" / "prose.py"


@pytest.mark.parametrize(
    ("text", "pattern"),
    [
        ("What is sent lies there.", "'what' as a subject"),
        ("It ends, and nobody waits.", "nobody, nothing, none as the actor"),
        ("the core, who reads it", "'who' for a thing"),
        ("Take note that a call has ended.", "'Take note', 'Have it', 'Let it'"),
        ("the table of which it is a row", "'one that', 'of which'"),
        ("It sleeps, for it is idle.", "'for' as because"),
    ],
)
def test_a_sentence_is_listed(text, pattern):
    assert COMPILED[pattern].search(text)


@pytest.mark.parametrize(
    "text", ["Record that a call has ended.", "The engine sleeps because it is idle.", "for the NIC"]
)
def test_a_plain_sentence_is_not(text):
    assert not any(one.search(text) for one in COMPILED.values())


@pytest.mark.parametrize(
    ("name", "source", "found"),
    [
        ("a.py", '"""One."""\nx = "what is"  # two\n', [(1, "One."), (2, "two")]),
        ("a.pyx", 'cdef int x  # one\ndef f():\n    """Two."""\n', [(1, "one"), (3, 'Two."""')]),
        ("a.cuh", "int x; // one\n/* two */\n", [(1, "one"), (2, "two */")]),
        ("a.md", "one\n```\nwhat is code\n```\ntwo\n", [(1, "one"), (5, "two")]),
    ],
)
def test_prose_is_found_in_each_kind_of_file(name, source, found, tmp_path):
    path = tmp_path / name
    path.write_text(source)
    assert list(texts(path)) == found
    assert search([tmp_path])[1] == sum(len(text.split()) for _, text in found)


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", TOOL, *map(str, arguments)], capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize(("most", "status"), [(167, 0), (166, 1)])
def test_too_many_places_fail(tmp_path, most, status):
    path = tmp_path / "a.py"
    path.write_text("# Take note.\n# One more thing.\n# 1\n")
    done = run("--most", most, tmp_path)
    assert (done.returncode, done.stderr) == (status, "")
    assert f"{path}:1: ['Take note', 'Have it', 'Let it'] Take note." in done.stdout
    assert "1 places in 6 words: 166.7 in a thousand" in done.stdout


def test_a_path_that_is_not_there_is_said(tmp_path):
    done = run(tmp_path / "nowhere")
    assert done.returncode == 2
    assert "there is no" in done.stderr
