"""Sphinx's configuration of the site that `make docs` builds; the pages are those that a checkout shows."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import aiote

HERE = Path(__file__).parent

project = "aiote"
author = "the aiote developers"
version = release = aiote.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx_copybutton"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_favicon = "_static/favicon.svg"
html_title = f"aiote {version}"
html_theme_options = {"source_directory": "docs/"}
html_copy_source = False
html_show_copyright = False

# A link names a heading as a checkout's viewer does: its text in lower case, with hyphens.
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
# Docstrings are prose with `code` in single backticks, as a terminal's `help()` shows it best.
default_role = "code"
copybutton_exclude = ".linenos, .gp, .go"

# Pages of the checkout's own folder, and what the site calls them.
ROOT_PAGES = {
    "README.md": "start.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "vulnerabilities.md",
    "CHANGELOG.md": "changelog.md",
}
LINK = re.compile(r"\[([^\]]*)\]\(((?:\.\./)*)([\w./-]+)(#[\w-]+)?\)")


def inside(text: str, here: Path) -> str:
    """Have links to pages of the checkout lead to those of the site; of other files it has the names alone."""

    def replace(match: re.Match[str]) -> str:
        label, up, path, anchor = match[1], match[2], match[3], match[4] or ""
        target = (here / (up + path)).resolve()
        if HERE in target.parents:
            return f"[{label}](../{target.relative_to(HERE)}{anchor})" if here == HERE.parent else match[0]
        if target.parent == HERE.parent and target.name in ROOT_PAGES:
            folder = "../" * len(here.relative_to(HERE).parts) + "_generated/" if here != HERE.parent else ""
            return f"[{label}]({folder}{ROOT_PAGES[target.name]}{anchor})"
        return f"{label} (`{target.relative_to(HERE.parent)}`)" if target.exists() else match[0]

    return LINK.sub(replace, text)


def lead_inside(app: object, docname: str, source: list[str]) -> None:
    """Rewrite the links of a page in this folder; those of the pages that are written here lead inside already."""
    page = HERE / docname
    if page.parent.name != "_generated":
        source[0] = inside(source[0], page.parent)


def as_rst(app: object, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Let a docstring's indented blocks be code, as they are in the checkout's pages."""
    rewritten: list[str] = []
    for at, line in enumerate(lines):
        begins = line.startswith("    ") and (at == 0 or not lines[at - 1].strip())
        if begins and rewritten and not any(other.startswith("    ") for other in lines[max(0, at - 2) : at]):
            rewritten += ["::", ""]
        rewritten.append(line)
    lines[:] = rewritten


def plain_types(
    app: object, what: str, name: str, obj: object, options: object, text: str | None, returns: str | None
) -> tuple[str | None, str | None]:
    """Leave out of a signature how its values are checked."""
    plain = re.compile(r"~?typing\.Annotated\[([\w.]+), <[^>]*>\]")
    return text and plain.sub(r"\1", text), returns and plain.sub(r"\1", returns)


def write_pages(app: object) -> None:
    """Write what the site takes from elsewhere: the checkout's own pages, and the commands from their own texts."""
    for name, page in ROOT_PAGES.items():
        write(page, inside((HERE.parent / name).read_text(), HERE.parent))
    command = [sys.executable, "-P", "-m", "typer", "aiote.cli", "utils", "docs", "--name", "aiote"]
    write("cli.md", subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def write(name: str, text: str) -> None:
    """Write a page unless it is the same: a page that is untouched is not built again."""
    page = HERE / "_generated" / name
    page.parent.mkdir(exist_ok=True)
    if not page.exists() or page.read_text() != text:
        page.write_text(text)


def setup(app: object) -> None:
    app.connect("builder-inited", write_pages)  # type: ignore[attr-defined]
    app.connect("source-read", lead_inside)  # type: ignore[attr-defined]
    app.connect("autodoc-process-docstring", as_rst)  # type: ignore[attr-defined]
    app.connect("autodoc-process-signature", plain_types)  # type: ignore[attr-defined]
