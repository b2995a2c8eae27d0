"""Arrays with a mask are refused, whoever imports their module meanwhile."""

from __future__ import annotations

import sys
from types import ModuleType

import numpy as np
import pytest

import aiote
from aiote.core.masked_arrays import require_unmasked


def test_an_array_with_a_mask_is_refused():
    require_unmasked("x", np.zeros(3))
    with pytest.raises(aiote.UsageError, match=r"x: it has a mask.*array.filled"):
        require_unmasked("x", np.ma.masked_equal([1, 2, 3], 2))


def test_a_module_that_another_thread_is_importing_has_made_no_array(monkeypatch):
    monkeypatch.setitem(sys.modules, "numpy.ma", ModuleType("numpy.ma"))
    require_unmasked("x", np.zeros(3))
    monkeypatch.delitem(sys.modules, "numpy.ma")
    require_unmasked("x", np.zeros(3))
