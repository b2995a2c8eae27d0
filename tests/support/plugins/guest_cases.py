"""A pytest plugin: what has nothing to do with RDMA devices is tried with one value on them, where each test is dear.

`verbs_once("host", ...)` names parameters of which tests over verbs have the first value alone in the guest. On a
machine with devices of its own, and over every other provider, they have all.
"""

from __future__ import annotations

import pytest

from support.machine import SLOWER


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if SLOWER == 1:
        return
    first: dict[object, pytest.Item] = {}
    spared = {item for item in items if (case := _case(item)) is not None and first.setdefault(case, item) is not item}
    config.hook.pytest_deselected(items=list(spared))
    items[:] = [item for item in items if item not in spared]


def _case(item: pytest.Item) -> object:
    """Return what a marked test over verbs has in common with those that differ in the named parameters alone."""
    mark, call = item.get_closest_marker("verbs_once"), getattr(item, "callspec", None)
    if mark is None or call.params["provider"] != "verbs":
        return None
    others = sorted((name, repr(value)) for name, value in call.params.items() if name not in mark.args)
    return item.nodeid.partition("[")[0], tuple(others)
