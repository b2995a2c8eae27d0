"""What `make docs` says of the site that it has built: links that lead nowhere, and those that leave it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "tools"))

from check_site import Page, dead_links, main, outside

INDEX = """<a href="sub/page.html#title">a heading</a> <a href="sub/">a folder</a> <a href="#here">of its own</a>
<img src="picture.png" id="here"> <a href="https://example.org/x">outside</a> <a href="mailto:a@example.org">mail</a>
<a href="with%20space.html">a name with a space</a>"""


@pytest.fixture
def site(tmp_path):
    for name, text in {
        "index.html": INDEX,
        "sub/index.html": "",
        "sub/page.html": '<h1 id="title">Title</h1><a href="../index.html">back</a>',
        "picture.png": "",
        "with space.html": "",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def pages(site: Path) -> dict[Path, Page]:
    return {path: Page(path) for path in site.rglob("*.html")}


def test_a_whole_site_has_no_dead_link(site):
    assert dead_links(site, pages(site)) == []
    assert outside(pages(site)) == {"example.org": {"https://example.org/x"}}


@pytest.mark.parametrize(
    ("link", "said"),
    [
        ("gone.html", "index.html links to gone.html, which is not there"),
        ("sub/page.html#other", "index.html links to sub/page.html#other, a heading that is not there"),
        ("#gone", "index.html links to #gone, a heading that is not there"),
        ("/gone", "index.html links to /gone, which is not there"),
    ],
)
def test_a_link_that_leads_nowhere_is_told(site, link, said, monkeypatch, capsys):
    (site / "index.html").write_text(f'{INDEX}<a href="{link}">dead</a>')
    assert dead_links(site, pages(site)) == [said]
    monkeypatch.setattr(sys, "argv", ["check_site.py", str(site)])
    monkeypatch.setenv("PATH", "")  # without a browser
    assert main() == 1
    told = capsys.readouterr().out
    assert said in told
    assert "1 lead outside, to 1 hosts" in told
    assert "NOT LOOKED AT" in told


def test_links_that_leave_the_site_are_listed_alone(site, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["check_site.py", str(site), "--outside"])
    assert main() == 0
    assert capsys.readouterr().out == "https://example.org/x\n"


def test_a_folder_without_a_site_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["check_site.py", str(tmp_path)])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert "build the site with `make docs`" in capsys.readouterr().err
