"""The README and the docs say what the code does: code runs, links lead somewhere, tables are whole, names exist."""

from __future__ import annotations

import ast
import dataclasses
import itertools
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import aiote
from aiote import FabricError
from aiote.core import control_frames as frames
from aiote.core import striping
from aiote.rails.contract import NEVER_RUN, PROVEN, is_proven
from aiote.rails.libfabric import efa_lacks
from aiote.rails.library import DEFAULTS
from aiote_native.channels.peers import pool_bytes

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
HOW_TO = sorted((ROOT / "docs" / "howto").glob("*.md"))
README = PAGES[0].read_text()
SETTINGS = (ROOT / "docs" / "settings.md").read_text()
TROUBLES = (ROOT / "docs" / "troubleshooting.md").read_text()
HARDWARE = (ROOT / "docs" / "hardware.md").read_text()
PROVIDERS = (ROOT / "docs" / "providers.md").read_text()
SOURCES = sorted((ROOT / "aiote").rglob("*.py"))
NATIVE = sorted((ROOT / "aiote_native").rglob("*.pyx")) + sorted((ROOT / "aiote_native").rglob("*.pxd"))

LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def prose(page: Path) -> str:
    return BLOCK.sub("", page.read_text())


def blocks(page: Path, language: str) -> list[str]:
    return [text for name, text in BLOCK.findall(page.read_text()) if name == language]


def rows(text: str, heading: str) -> list[list[str]]:
    """Return the cells of the table whose first line begins with `heading`."""
    lines = text[text.index(f"| {heading} |") :].splitlines()
    table = list(itertools.takewhile(lambda line: line.startswith("|"), lines))
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table[2:]]


def anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", [*PAGES, *HOW_TO], ids=lambda page: f"{page.parent.name}/{page.name}")
def test_python_blocks_compile(page):
    for text in blocks(page, "python"):
        ast.parse(text)


@pytest.mark.libfabric
def test_the_readme_s_program_runs():
    (program,) = blocks(PAGES[0], "python")
    done = subprocess.run(
        [sys.executable, "-P", "-W", "error", "-"], input=program, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.splitlines() == ["straight into the other side's memory", "thanks"]
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("page", [*PAGES, *HOW_TO], ids=lambda page: f"{page.parent.name}/{page.name}")
def test_links_lead_somewhere(page):
    for link in LINK.findall(prose(page)):
        if link.startswith("https://"):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name} links to {link}"
        if anchor:
            assert anchor in anchors(target), f"{page.name} links to {link}"


def test_every_page_is_linked_from_the_readme():
    links = set(LINK.findall(README))
    assert {f"docs/{page.name}" for page in PAGES[1:] if page.name != "index.md"} <= links
    assert {f"examples/{path.name}" for path in (ROOT / "examples").glob("*.py")} <= links


def test_every_page_is_in_the_site():
    """Sphinx warns of a page that nobody lists, but only when the site is built."""
    index = (ROOT / "docs" / "index.md").read_text()
    listed = {
        line.strip() for text in re.findall(r"```{toctree}\n(.*?)```", index, re.DOTALL) for line in text.splitlines()
    }
    assert {page.stem for page in PAGES[1:]} - {"index"} <= listed


def test_the_glossary_explains_each_term_once_in_order():
    table = rows((ROOT / "docs" / "glossary.md").read_text(), "Term")
    terms = [row[0].replace("`", "").casefold() for row in table]
    assert terms == sorted(set(terms))
    for term, meaning, explained in table:
        assert meaning.endswith("."), term
        assert LINK.findall(explained), term


def test_every_how_to_page_is_in_its_index():
    index = HOW_TO[0].parent / "index.md"
    listed = set(re.findall(r"^\| \[[^\]]*\]\(([\w-]+)\.md\)", index.read_text(), re.MULTILINE))
    in_tree = set(index.read_text().partition("```{toctree}")[2].split("```")[0].split()[1:])
    assert listed == in_tree == {page.stem for page in HOW_TO} - {"index"}


def test_the_reference_has_every_public_package():
    packages = {row[0].strip("`") for row in rows((ROOT / "docs" / "api.md").read_text(), "Package")}
    pages = (ROOT / "docs" / "reference").glob("*.md")
    told = {name for page in pages for name in re.findall(r"automodule:: (\S+)", page.read_text())}
    assert told == packages - {"aiote.demo"}  # for the demo and the examples alone


@pytest.fixture
def config(monkeypatch) -> aiote.EngineConfig:
    for name in [name for name in os.environ if name.startswith("AIOTE_")]:
        monkeypatch.delenv(name)
    return aiote.EngineConfig()


def test_the_table_of_settings_is_whole(config):
    table = rows(SETTINGS, "Field")
    fields = [item.name for item in dataclasses.fields(aiote.EngineConfig)]
    assert [row[0].strip("`") for row in table] == fields
    for name, _, default, meaning in table:
        assert value_of(default) == getattr(config, name.strip("`")), name
        assert meaning


def value_of(default: str) -> object:
    """Return the value that a table's cell names."""
    text = default.strip("`")
    return aiote.VerbsConfig() if text == "VerbsConfig()" else ast.literal_eval(text)


def test_the_table_of_verbs_settings_is_whole(config):
    table = rows(SETTINGS, "Of `VerbsConfig`")
    assert [row[0].strip("`") for row in table] == [item.name for item in dataclasses.fields(aiote.VerbsConfig)]
    for name, _, default, meaning in table:
        assert value_of(default) == getattr(config.verbs, name.strip("`")), name
        assert meaning


NOT_IN_A_RANGE = {"cluster_key", "host", "identity", "ssl_server", "ssl_client", "verbs", "libfabric", "libcuda"}
"""Secrets, names and paths."""


def ranges() -> dict[str, str]:
    return {row[0].strip("`"): row[1] for row in rows(SETTINGS, "Setting")}


def test_every_setting_has_a_range_and_a_reason():
    fields = {item.name for item in dataclasses.fields(aiote.EngineConfig)} - NOT_IN_A_RANGE
    assert set(ranges()) == fields | {f"verbs.{item.name}" for item in dataclasses.fields(aiote.VerbsConfig)}
    assert all(len(row) == 3 and row[2] for row in rows(SETTINGS, "Setting"))


def made(setting: str, value: object) -> object:
    """Return the value that a config has after it was made with it."""
    kind, name = (aiote.VerbsConfig, setting[6:]) if setting.startswith("verbs.") else (aiote.EngineConfig, setting)
    beside = {"heartbeat_interval": {"heartbeat_timeout": 60}, "heartbeat_timeout": {"heartbeat_interval": 0.01}}
    return getattr(kind(**{name: value}, **beside.get(name, {})), name)


@pytest.mark.parametrize("setting", ranges())
def test_a_value_is_taken_within_its_range_and_refused_outside(setting, config):
    text = ranges()[setting]
    if found := re.fullmatch(r"(-?\d+) to (\d+)", text):
        least, most = map(int, found.groups())
        inside, outside = [least, most], [least - 1, most + 1]
    elif text.startswith(("from", "above")):
        number = re.match(r"(?:from|above) ([\d.]+)", text)
        bound = float(number[1]) if number else 0.01  # of heartbeat_timeout: the interval that it is made with
        first = text.startswith("from")
        inside, outside = [bound if first else bound + 0.005], [bound - 0.005 if first else bound, float("inf")]
    else:
        inside = list(ast.literal_eval(f"[{text.replace('`', '')}]"))
        outside = [object()]
    for value in inside:
        assert made(setting, value) == value
    for value in outside:
        with pytest.raises(aiote.UsageError):
            made(setting, value)


OTHER_VALUES = {
    "cluster_key": ("k" * 16, b"k" * 16),
    "host": ("127.0.0.9", "127.0.0.9"),
    "identity": ("07" * 16, bytes([7] * 16)),
    "progress": ("thread", "thread"),
    "schedule": ("round-robin", "round-robin"),
    "status_page": ("off", False),
    "libfabric": ("/a/path", "/a/path"),
    "libcuda": ("/a/path", "/a/path"),
    "gpu_sharing": ("off", False),
    "fallback": ("off", False),
    "message_bytes": ("4096", 4096),
    "heartbeat_interval": ("0.5", 0.5),
    "ring_bytes": ("1048576", 1 << 20),
    "gpu_staging_bytes": ("4194304", 4 << 20),
    "verbs_mtu": ("1024", 1024),
    "verbs_srq_depth": ("128", 128),
}
"""What a variable is set to, and what that is as a setting; other variables are set to 7."""


@pytest.mark.parametrize(("kind", "prefix"), [("EngineConfig", ""), ("VerbsConfig", "verbs_")])
def test_every_setting_has_the_variable_of_its_name(kind, prefix, monkeypatch, config):
    table = rows(SETTINGS, "Field" if not prefix else "Of `VerbsConfig`")
    for row in table:
        name, variable = row[0].strip("`"), row[1].strip("`")
        assert variable == ("" if name in ("ssl_server", "ssl_client", "verbs") else f"AIOTE_{prefix}{name}".upper())
        if variable:
            text, value = OTHER_VALUES.get(prefix + name, ("7", 7))
            with monkeypatch.context() as patch:
                patch.setenv(variable, text)
                assert getattr(getattr(aiote, kind)(), name) == value


def test_auto_takes_no_kind_that_the_page_on_hardware_says_was_never_run():
    """Any other kind that the page names may be taken; what `aiote prove cuda` runs on is no kind of rail."""
    ran = {name.strip(): row[2] for row in rows(HARDWARE, "`WHAT`") for name in row[0].replace("`", "").split(",")}
    never = {name for name, text in ran.items() if "never" in text}
    assert never == {"efa", "cxi"} == {name for name in ran if not is_proven(name)} - {"cuda"}
    assert set(ran) | {"shm"} >= PROVEN
    assert is_proven("verbs;ofi_rxm")
    assert f"`efa` and `cxi` were {NEVER_RUN.removeprefix('was ')}" in PROVIDERS


def test_the_how_to_of_efa_has_the_figures_of_the_page_that_compares_all():
    kinds = {"single write": "one write at a time,", "paged writes": "pages of"}
    expected = []
    for cell, published, ours, *_ in rows((ROOT / "docs" / "paper.md").read_text(), "Cell"):
        kind, nics, size = cell.split(", ")
        if "EFA" in nics:
            expected.append([f"{kinds[kind]} {size[:-1]} {size[-1]}iB", published, ours])
    assert expected
    assert rows((ROOT / "docs" / "howto" / "efa.md").read_text(), "Gbit/s") == expected


def test_the_how_to_of_efa_quotes_what_the_engine_says_without_a_nic():
    library = SimpleNamespace(version=(2, 5), path=".../libfabric.so.1")
    error = FabricError(95, efa_lacks(library), operation="open rail")
    (quoted,) = blocks(ROOT / "docs" / "howto" / "efa.md", "text")
    assert quoted.split() == f"FabricError: {error}".split()


def test_the_table_of_errors_is_whole():
    named = {re.match(r"`(\w+)`", row[0])[1] for row in rows(TROUBLES, "Error")}
    raised = {name for name in aiote.__all__ if isinstance(getattr(aiote, name), type)}
    assert named == {n for n in raised if issubclass(getattr(aiote, n), aiote.AioteError)} - {"AioteError"}


def test_the_table_of_extras_is_whole():
    project = (ROOT / "pyproject.toml").read_text()
    section = project.partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    extras = re.findall(r"^(\w+) = \[", section, re.MULTILINE)
    assert [row[0].strip("`") for row in rows(README, "Extra")] == extras


def test_every_event_is_named():
    emitted = {name for path in SOURCES for name in re.findall(r'\.emit\(\s*"([\w.]+)"', path.read_text())}
    assert emitted
    assert emitted == set(
        re.findall(r"`(engine\.(?:opened|closed)|(?:peer|connection|rail|memory)\.[a-z]+)`", TROUBLES)
    )


def test_what_libfabric_is_told_is_named():
    for name, value in DEFAULTS.items():
        assert f"`{name}={value}`" in SETTINGS


def test_the_table_of_frames_is_whole():
    page = (ROOT / "docs" / "control-plane.md").read_text()
    table = {int(row[0]): row[1].strip("`") for row in rows(page, "Type")}
    assert table == {number: kind.__name__ for number, kind in frames._TYPES.items()}


def test_the_numbers_of_the_pages_are_the_code_s(config):
    pages = {page.name: page.read_text() for page in PAGES}
    assert f"UNITS = lcm(1, 2, ..., {striping.MAX_COUNTED})" in pages["immediates.md"]
    assert f"Before authentication a frame has at most {frames.PLAIN_LIMIT >> 10} KiB" in pages["control-plane.md"]
    assert f"afterwards {frames.SEALED_LIMIT >> 10} KiB" in pages["control-plane.md"]
    pool = pool_bytes(config.message_pool, config.message_bytes, config.message_pool, config.message_bytes)
    assert f"that is {pool / 1024:.0f} KiB for each peer" in pages["messages.md"]


def test_the_names_in_the_pages_exist():
    """Files, functions and structures that the pages name are in the source."""
    examples = (ROOT / "examples").rglob("*.py")
    words = {word for path in [*SOURCES, *NATIVE, *examples] for word in re.findall(r"\w+", path.read_text())}
    for page in {*PAGES[1:], *HOW_TO} - {ROOT / "docs" / "renamed.md"}:  # whose names are gone: test_renamed.py
        for path in re.findall(r"`((?:aiote|aiote_native|programs|tests)/[\w/]+\.\w+)`", prose(page)):
            assert (ROOT / path).exists(), f"{page.name}: {path}"
        for name in re.findall(r"`([a-z]+_[a-z_]+|[A-Z][a-z]+[A-Z]\w+)`", prose(page)):
            assert name in words or name in KNOWN, f"{page.name}: {name}"


KNOWN = {"TransferNotify", "fi_trywait", "fi_writemsg", "epoll_wait", "write_pages", "call_soon", "max_restarts"}
