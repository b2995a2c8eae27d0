"""Helpers of the tests, in rooms by what they are about: `from support.engines.opening import opened`.

`TESTS` is on the path of every test (pyproject.toml); a program that uses helpers puts it on its own.
"""

from pathlib import Path

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent
