"""What tests of killed and stopped processes share."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session", autouse=True)
def library_is_loaded(library_loaded: None) -> None:
    """Load the libraries of rails before the first test."""
