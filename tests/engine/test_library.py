"""A libfabric that is not there, is none, or is another one: what the error says."""

from __future__ import annotations

import pytest

from support.engines.opening import run_script

pytestmark = pytest.mark.libfabric

MISSING = """
    import asyncio, aiote

    async def main():
        try:
            await aiote.open_engine("tcp")
        except aiote.FabricError as error:
            print(type(error).__name__, error.errno, error)

    asyncio.run(main())
"""


def test_a_missing_libfabric_is_an_error_that_says_how_to_install_one():
    """The error names what was looked for, and the command that installs one; importing and configuring work."""
    done = run_script(MISSING, AIOTE_LIBFABRIC="/nonexistent/libfabric.so.1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("FabricError 2 load libfabric: no libfabric was found. Looked for: /nonexistent/lib")
    assert "AIOTE_LIBFABRIC" in done.stdout
    assert "apt-get install libfabric1" in done.stdout
    assert 'pip install "aiote[libfabric]"' in done.stdout
    assert done.stderr == ""


def test_a_file_that_is_no_libfabric_is_named_in_the_error(tmp_path):
    """A file that is no library, and a library that is another."""
    text = tmp_path / "libfabric.so.1"
    text.write_text("not a library")
    for path in (str(text), "libm.so.6"):
        done = run_script(MISSING, AIOTE_LIBFABRIC=path)
        assert done.returncode == 0, done.stderr
        assert "no libfabric was found. Looked for: " in done.stdout
        assert path in done.stdout
        assert "apt-get install libfabric1" in done.stdout
