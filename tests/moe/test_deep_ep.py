"""`aiote.moe.deep_ep.Buffer` between processes that find each other by torch.distributed; see `deep_ep_scenarios`."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from support.connectors import torch_ranks

pytestmark = pytest.mark.needs_torch


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_published_logic_passes(tmp_path, ranks):
    assert torch_ranks.run("support.moe.deep_ep_scenarios.published", ranks, tmp_path) == [16] * ranks


def test_the_functions_of_the_page_give_what_experts_return(tmp_path):
    torch_ranks.run("support.moe.deep_ep_scenarios.of_the_page", 2, tmp_path)


def test_calls_may_overlap_be_repeated_and_passed_over(tmp_path):
    torch_ranks.run("support.moe.deep_ep_scenarios.order", 2, tmp_path)


def test_what_cannot_be_had_is_refused_and_harms_nothing(tmp_path):
    torch_ranks.run("support.moe.deep_ep_scenarios.refusals", 3, tmp_path)


def test_with_shrinking_the_others_go_on_without_the_ranks_that_died(tmp_path):
    assert torch_ranks.run("support.moe.deep_ep_scenarios.shrinking", 4, tmp_path, gone=(1, 3)) == [2, None, 2, None]


def test_a_rank_that_lives_is_masked(tmp_path):
    torch_ranks.run("support.moe.deep_ep_scenarios.told_to_mask", 3, tmp_path)


def test_without_shrinking_a_lost_rank_is_an_error_that_names_it(tmp_path):
    first, second, _ = torch_ranks.run("support.moe.deep_ep_scenarios.losing", 3, tmp_path, gone=(2,))
    for text in (first, second):
        # Who hears of it from the other rank sooner than from the network is told by that one.
        assert text.startswith(("PeerLostError: ", "GroupBrokenError: "))
        assert "rank 2 of the group" in text


def scalar_cast(values: list[float], round_scale: bool) -> tuple[np.float32, list[Any]]:
    """Return the scale of one block and its values divided by it, before they are rounded to fp8: number by number."""
    most = np.float32(max([1e-4, *(abs(one) for one in values if not math.isnan(one))]))
    inverse = most * np.float32(1 / 448)
    scale = np.float32(448) / most
    if round_scale:
        fraction, exponent = math.frexp(float(inverse))
        exponent -= fraction == 0.5
        inverse, scale = np.float32(2.0**exponent), np.float32(2.0**-exponent)
    return inverse, [np.clip(np.float32(one) * scale, np.float32(-448), np.float32(448)) for one in values]


@pytest.mark.parametrize("round_scale", [False, True])
def test_blocks_are_cast_as_number_by_number(round_scale):
    import torch

    from aiote.moe import fp8

    dice = torch.Generator().manual_seed(3)
    x = torch.randn(12, 256, generator=dice) * torch.logspace(-6, 4, 12)[:, None]
    x[0] = 0
    x[1, :128] = 448
    x[2, 5] = float("nan")
    x[3, :128] = 2.0**-9
    x = x.bfloat16()
    rows, scales = fp8.cast(x, round_scale)
    for row in range(12):
        for block in range(2):
            part = slice(128 * block, 128 * (block + 1))
            inverse, values = scalar_cast(x[row, part].float().tolist(), round_scale)
            wanted = torch.tensor(np.array(values, np.float32)).to(torch.float8_e4m3fn)
            assert float(scales[row, block]) == float(inverse)
            assert torch.equal(rows[row, part].view(torch.uint8), wanted.view(torch.uint8))
    if round_scale:
        packed = fp8.exponents(torch.cat((scales, scales), 1))
        found = (packed.view(torch.uint8).int() << 23).view(torch.float32)
        assert torch.equal(found[:, :2], scales)
