"""Check the site that `make docs` has built, as a reader meets it.

Each link between its pages leads to a page and to a heading that is there; links that leave the site are counted by
host. `--outside` lists them and checks nothing: nothing here asks the network for them. Where Chromium is installed,
the search finds a name of the API, and pages fit a wide and a narrow window without an error; `--screenshots FOLDER`
keeps what was seen.
"""

from __future__ import annotations

import argparse
import base64
import functools
import http.server
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "tests"))

from support.checkout.browser import Browser  # noqa: E402

SOUGHT = "write_imm"
WIDTHS = {"wide": 1280, "narrow": 400}
PLAIN = ["index.html", "tutorial.html", "reference/aiote.html", "comparison.html", "settings.html"]
SEEN = [*PLAIN, f"search.html?q={SOUGHT}"]
# What a page holds besides its own text may be a pixel wider than the window, by rounding.
SLACK_PX = 1


class Page(HTMLParser):
    """Collect what a page links to, and what can be linked to in it."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.anchors |= {value for key in ("id", "name") if (value := given.get(key))}
        link = given.get("src" if tag in ("img", "script") else "href")
        if link and tag in ("a", "img", "script", "link"):
            self.links.append(link)


def dead_links(site: Path, pages: dict[Path, Page]) -> list[str]:
    """Return a sentence for each link within the site that leads nowhere."""
    found = []
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            if not target.exists():
                found.append(f"{path.relative_to(site)} links to {link}, which is not there")
            elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].anchors:
                found.append(f"{path.relative_to(site)} links to {link}, a heading that is not there")
    return found


def outside(pages: dict[Path, Page]) -> dict[str, set[str]]:
    """Return the links that leave the site, by host."""
    hosts: dict[str, set[str]] = {}
    for page in pages.values():
        for link in page.links:
            if (parts := urlsplit(link)).scheme in ("http", "https"):
                hosts.setdefault(parts.netloc, set()).add(link)
    return hosts


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Say nothing of each request."""


@contextmanager
def served(site: Path) -> Iterator[str]:
    """Serve a folder on loopback, and yield its address."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(site))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()


def looked_at(page: Browser, screenshots: Path | None, name: str) -> list[str]:
    """Look at the page that is open in each width, and return what is wrong with it."""
    wrong = []
    for width_name, width in WIDTHS.items():
        page.tell("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        needed = page.value("document.documentElement.scrollWidth")
        if needed > width + SLACK_PX:
            wrong.append(f"{name} needs {needed} pixels in a window of {width}")
        if screenshots:
            data = page.tell("Page.captureScreenshot", format="png")["data"]
            picture = screenshots / f"{name.partition('.')[0].replace('/', '-')}-{width_name}.png"
            picture.write_bytes(base64.b64decode(data))
    return wrong


def browsed(site: Path, screenshots: Path | None) -> list[str]:
    """Return what is wrong in a browser: pages that do not fit, errors, a search that finds nothing."""
    wrong: list[str] = []
    with tempfile.TemporaryDirectory() as folder, served(site) as address, Browser(Path(folder)) as page:
        for name in SEEN:
            page.open(f"{address}/{name}")
            page.until(f"location.href.endsWith({name!r}) && document.readyState === 'complete'")
            if "?q=" in name:
                page.until("document.querySelector('#search-results .search-summary')?.textContent.match(/[0-9]/)")
                hits = page.value("[...document.querySelectorAll('#search-results li a')].map(a => a.href)")
                if not any("reference/aiote.html" in hit for hit in hits):
                    wrong.append(f"the search for {SOUGHT} does not find its reference, but {hits}")
            wrong += looked_at(page, screenshots, name)
        wrong += page.errors
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("site", type=Path, nargs="?", default=ROOT / "docs" / "_build" / "html")
    parser.add_argument("--outside", action="store_true", help="only list the links that leave the site")
    parser.add_argument("--screenshots", type=Path, help="a folder for pictures of the pages, in two widths")
    arguments = parser.parse_args()
    site = arguments.site.resolve()
    if not (site / "index.html").exists():
        parser.error(f"{arguments.site} has no index.html: build the site with `make docs`")
    pages = {path: Page(path) for path in sorted(site.rglob("*.html"))}
    hosts = outside(pages)
    if arguments.outside:
        print(*sorted(link for found in hosts.values() for link in found), sep="\n")
        return 0
    wrong = dead_links(site, pages)
    links = sum(len(page.links) for page in pages.values())
    print(f"{len(pages)} pages with {links} links; {sum(map(len, hosts.values()))} lead outside, to {len(hosts)} hosts")
    if arguments.screenshots:
        arguments.screenshots.mkdir(parents=True, exist_ok=True)
    if shutil.which("chromium"):
        wrong += browsed(site, arguments.screenshots)
        print(f"{len(SEEN)} pages looked at in {len(WIDTHS)} widths, and searched")
    else:
        print("NOT LOOKED AT IN A BROWSER: no chromium (Debian: apt-get install chromium)")
    for sentence in wrong:
        print(sentence)
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
