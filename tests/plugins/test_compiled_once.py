"""What many runs of pytest use is compiled once, and again as soon as anything that it is made of has changed."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from support.checkout import compiled

COMPILER = """
echo >>{log}
while [ "$1" != -o ]; do all="$all $1"; shift; done
sleep 0.2
cat $all >"$2"
"""


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a compiler that puts its sources together, takes a while, and writes down that it ran."""
    monkeypatch.setattr(compiled, "CACHE", tmp_path / "cache")
    script = tmp_path / "compiler"
    script.write_text(COMPILER.format(log=tmp_path / "log"))
    return ["sh", str(script)]


def runs(folder: Path) -> int:
    return len((folder / "log").read_text().splitlines())


def test_what_has_not_changed_is_compiled_once(tmp_path, compiler):
    source, header = tmp_path / "a.c", tmp_path / "a.h"
    source.write_text("one\n"), header.write_text("header\n")
    first = compiled.kept("a.so", [*compiler, source], [header])
    assert first.read_text() == "one\n"
    assert compiled.kept("a.so", [*compiler, source], [header]) == first
    assert runs(tmp_path) == 1
    assert sorted(path.name for path in first.parent.iterdir()) == ["a.so", "lock"]


def test_what_has_changed_is_compiled_again(tmp_path, compiler):
    source, header = tmp_path / "a.c", tmp_path / "a.h"
    source.write_text("one\n"), header.write_text("header\n")
    found = [compiled.kept("a.so", [*compiler, source], [header])]
    source.write_text("two\n")
    found.append(compiled.kept("a.so", [*compiler, source], [header]))
    header.write_text("another\n")
    found.append(compiled.kept("a.so", [*compiler, source], [header]))
    found.append(compiled.kept("a.so", [*compiler, source, source], [header]))
    assert len(set(found)) == runs(tmp_path) == 4
    assert [path.read_text() for path in found] == ["one\n", "two\n", "two\n", "two\ntwo\n"]


def test_many_who_need_it_at_a_time_wait_for_one(tmp_path, compiler):
    source = tmp_path / "a.c"
    source.write_text("one\n")
    with ThreadPoolExecutor(4) as pool:
        found = {*pool.map(lambda _: compiled.kept("a.so", [*compiler, source]), range(4))}
    assert len(found) == runs(tmp_path) == 1


def test_what_could_not_be_compiled_is_tried_again(tmp_path, compiler):
    source = tmp_path / "a.c"
    with pytest.raises(FileNotFoundError):
        compiled.kept("a.so", [*compiler, source])
    source.write_text("one\n")
    with pytest.raises(compiled.subprocess.CalledProcessError):
        compiled.kept("a.so", ["false", source])
    assert compiled.kept("a.so", [*compiler, source]).exists()
