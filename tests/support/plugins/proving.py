"""A pytest plugin for `aiote prove`: `--prove PROVIDER` leaves the tests that have that provider as a parameter.

Of rails with memory of a GPU (a stand-in) none is left: they are about no device here.
"""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--prove", metavar="PROVIDER", help="only tests that have this provider as a parameter")


def is_about(item: pytest.Item, provider: str) -> bool:
    """Tell whether a test has a provider, or a kind of rail of it, as a parameter."""
    call = getattr(item, "callspec", None)
    if call is None:
        return False
    kind = call.params.get("kind")
    about = call.params.get("provider") == provider or getattr(kind, "provider", None) == provider
    return about and getattr(kind, "memory", "host") == "host"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Choose before others do, who try each test with a few of its parameters alone."""
    provider = config.getoption("--prove")
    if provider is None:
        return
    others = [item for item in items if not is_about(item, provider)]
    items[:] = [item for item in items if is_about(item, provider)]
    config.hook.pytest_deselected(items=others)
