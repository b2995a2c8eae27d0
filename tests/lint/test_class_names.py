"""A class name means one class: no two modules of `aiote` and `aiote_native` define classes of the same name.

A reader who meets a name in a traceback or a search then knows the class without looking at the imports.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
CLASS = re.compile(r"^[ \t]*(?:cdef[ \t]+)?class[ \t]+(\w+)", re.MULTILINE)


def sources() -> dict[str, str]:
    """Return the text of each module by its path. A stub repeats the classes of its `.pyx`, so it does not count."""
    found = [*ROOT.glob("aiote/**/*.py"), *ROOT.glob("aiote_native/**/*.py"), *ROOT.glob("aiote_native/**/*.pyx")]
    return {str(path.relative_to(ROOT)): path.read_text() for path in sorted(found)}


def repeated(texts: Mapping[str, str]) -> set[tuple[str, ...]]:
    """Return each class name that several modules define, followed by the modules."""
    modules: dict[str, set[str]] = defaultdict(set)
    for module, text in texts.items():
        for name in CLASS.findall(text):
            modules[name].add(module)
    return {(name, *sorted(where)) for name, where in modules.items() if len(where) > 1}


def test_a_class_name_means_one_class() -> None:
    texts = sources()
    assert len(texts) > 300
    found = repeated(texts)
    assert found == set(), "give one of the classes another name"


def test_repeated_names_are_found() -> None:
    texts = {
        "a.py": "class One:\n    class Inner: ...\n",
        "b.pyx": "cdef class One:\n    pass\n@cython.final\ncdef class Two(One):\n    pass\n",
        "c.py": "def make():\n    class Inner(Base): ...\nclass Three[T]: ...\n# class Two\ntext = 'no class Three'\n",
    }
    assert repeated(texts) == {("One", "a.py", "b.pyx"), ("Inner", "a.py", "c.py")}
