"""The pages of a prefill server: lent, kept, found again, and never two prompts' at a time."""

from __future__ import annotations

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiote.demo.prefixes import PrefixPages
from support.engines.opening import PATIENCE_S

PAGE, CHUNK, PAGES = 2, 4, 12


prompts = st.lists(st.integers(0, 1), min_size=1, max_size=14)


@given(st.data())
def test_pages_kept_for_a_prefix_hold_what_was_computed(data):
    """Write each prompt's tokens into its pages, and find in those that are said to be computed what belongs there."""

    async def story() -> None:
        pages, memory, lent = PrefixPages(PAGES, PAGE, CHUNK), [()] * PAGES, []
        for _ in range(data.draw(st.integers(1, 30))):
            if lent and data.draw(st.booleans()):
                context, tokens, table = lent.pop(data.draw(st.integers(0, len(lent) - 1)))
                assert [memory[page] for page in table] == blocks(tokens)
                if data.draw(st.booleans()):
                    pages.keep(tokens, table)
                await context.__aexit__(None, None, None)
            else:
                tokens = data.draw(prompts)
                context = pages.borrow(tokens)
                with anyio.move_on_after(0):
                    table, cached = await context.__aenter__()
                    assert cached % CHUNK == 0
                    assert cached < len(tokens)
                    assert [memory[page] for page in table[: cached // PAGE]] == blocks(tokens)[: cached // PAGE]
                    for page, block in list(zip(table, blocks(tokens), strict=True))[cached // PAGE :]:
                        memory[page] = block
                    lent.append((context, tokens, table))
            assert pages.used == len({page for _, _, table in lent for page in table})
        for context, _, _ in lent:
            await context.__aexit__(None, None, None)
        assert pages.used == 0
        assert len(pages._free) + pages.kept == PAGES

    anyio.run(story)


def blocks(tokens):
    return [tuple(tokens[start : start + PAGE]) for start in range(0, len(tokens), PAGE)]


def test_a_prompt_waits_for_pages_and_one_too_long_is_refused():
    async def story() -> None:
        pages, got = PrefixPages(PAGES, PAGE, CHUNK), []

        async def second() -> None:
            async with pages.borrow([1] * PAGE):
                got.append(pages.used)

        with anyio.fail_after(PATIENCE_S):
            async with anyio.create_task_group() as group:
                async with pages.borrow([0] * PAGE * PAGES):
                    group.start_soon(second)
                    await anyio.wait_all_tasks_blocked()
                    assert got == []
            assert got == [1]
            with pytest.raises(ValueError, match="needs 13 pages, and the cache has 12"):
                async with pages.borrow([0] * PAGE * (PAGES + 1)):
                    pass

    anyio.run(story)
