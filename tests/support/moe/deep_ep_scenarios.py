"""What ranks of `deep_ep.Buffer` do in tests, each in a process of its own: see `torch_ranks`.

`published` has the logic of DeepEP's tests/test_low_latency.py in our own words: each token carries the number of its
rank and its own, so that what arrives says where it comes from; experts return what they get; and the weighted sum is
then the token times the sum of its weights.
"""

from __future__ import annotations

import itertools
import os
import threading
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed

import aiote
from aiote import bridge
from aiote.moe import deep_ep, fp8
from support.checkout.page_blocks import block

PATIENCE_S = 60
LOW = (1 << 32) - 1


class Sizes(NamedTuple):
    """The shape of dispatches."""

    tokens: int
    hidden: int
    experts: int
    top_k: int


SMALL = Sizes(20, 1024, 24, 4)


def difference(x: Tensor, y: Tensor) -> float:
    """Return how far two tensors differ as DeepEP measures it: one minus their similarity, both moved by one."""
    x, y = x.double() + 1, y.double() + 1
    return 1 - float(2 * (x * y).sum() / (x * x + y * y).sum())


def back(rows: Tensor, scales: Tensor) -> Tensor:
    """Return bfloat16 of fp8 rows (..., hidden) and their scales, also of scales that are packed exponents."""
    if scales.dtype == torch.int32:
        scales = (scales.contiguous().view(torch.uint8).int() << 23).view(torch.float32)
    blocks = rows.float().view(*rows.shape[:-1], -1, 128) * scales.unsqueeze(-1)
    return blocks.view(rows.shape).to(torch.bfloat16)


def made(ranks: int, sizes: Sizes, **settings: Any) -> deep_ep.Buffer:
    hint = deep_ep.Buffer.get_low_latency_rdma_size_hint(sizes.tokens, sizes.hidden, ranks, sizes.experts)
    group = distributed.group.WORLD if "members" not in settings else None
    return deep_ep.Buffer(
        group, num_rdma_bytes=hint, low_latency_mode=True, num_qps_per_rank=1, explicitly_destroy=True, **settings
    )


def chosen(rank: int, sizes: Sizes, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Return the experts of a rank's tokens, some of them none, and the weights."""
    dice = torch.Generator().manual_seed(1000 * seed + rank)
    ids = torch.rand(sizes.tokens, sizes.experts, generator=dice).topk(sizes.top_k, 1)[1]
    ids[torch.rand(ids.shape, generator=dice) < 0.1] = -1
    return ids, torch.randn(ids.shape, generator=dice).abs()


def tokens_of(rank: int, sizes: Sizes, kind: str) -> Tensor:
    if kind == "numbered":
        x = torch.full((sizes.tokens, sizes.hidden), float(rank - 128), dtype=torch.bfloat16)
        x[:, -128:] = torch.arange(sizes.tokens).bfloat16()[:, None]
        return x
    dice = torch.Generator().manual_seed(77 + rank)
    return (torch.randn(sizes.tokens, sizes.hidden, generator=dice) * 0.1).bfloat16()


def sums(rows: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """Return the weighted sums where each expert returns the token's row: float32, in the order of k, rounded once."""
    total = torch.zeros(rows.shape)
    for slot in range(ids.shape[1]):
        total += torch.where(ids[:, slot, None] >= 0, weights[:, slot, None] * rows.float(), 0.0)
    return total.bfloat16()


class Rank:
    """A rank, its buffer, and what it knows of all ranks' tokens."""

    def __init__(self, me: int, ranks: int, sizes: Sizes, **settings: Any) -> None:
        self.rank, self.ranks, self.sizes = me, ranks, sizes
        self.local = sizes.experts // ranks
        self.all_ids = torch.stack([chosen(one, sizes)[0] for one in range(ranks)])
        self.ids, self.weights = chosen(me, sizes)
        self.lost: set[int] = set()
        self.buffer = made(ranks, sizes, **settings)

    def dispatch(self, x: Tensor, **how: Any) -> Any:
        return self.buffer.low_latency_dispatch(x, self.ids, self.sizes.tokens, self.sizes.experts, **how)

    def combine(self, y: Tensor, handle: Any, **how: Any) -> Any:
        return self.buffer.low_latency_combine(y, self.ids, self.weights, handle, **how)

    def check_received(self, kind: str, x: Any, count: Tensor, handle: Any, round_scale: bool) -> None:
        """What arrived are the rows of each rank's tokens, in order, as that rank would cast them, bit for bit."""
        source, ranges = handle[:2]
        for here in range(self.local):
            expert = self.rank * self.local + here
            begin = 0
            for sender in range(self.ranks):
                named = (self.all_ids[sender] == expert).any(1).nonzero().view(-1)
                if sender in self.lost:
                    named = named[:0]
                assert int(ranges[here, sender]) >> 32 == begin
                assert int(ranges[here, sender]) & LOW == len(named)
                rows = slice(begin, begin + len(named))
                assert torch.equal(source[here, rows].long(), named)
                sent = tokens_of(sender, self.sizes, kind)[named]
                if isinstance(x, Tensor):
                    assert torch.equal(x[here, rows], sent)
                elif len(named):
                    cast, scales = fp8.cast(sent, round_scale)
                    found = x[1][here, rows]
                    packed = found.dtype == torch.int32
                    assert torch.equal(x[0][here, rows].view(torch.uint8), cast.view(torch.uint8))
                    assert torch.equal(found, fp8.exponents(scales) if packed else scales)
                begin += len(named)
            assert int(count[here]) == begin

    def returned(self, x: Any) -> Tensor:
        """What experts make of what they got: the same."""
        return back(*x) if isinstance(x, tuple) else x.clone()

    def expected(self, x: Tensor, how: dict[str, bool]) -> Tensor:
        if how.get("use_fp8"):
            x = back(*fp8.cast(x, how.get("round_scale", False)))
        owner = self.ids // self.local
        gone = torch.isin(owner, torch.tensor(sorted(self.lost), dtype=torch.int64)) & (self.ids >= 0)
        return sums(x, self.weights, self.ids.masked_fill(gone, -1))


WAYS = [{"use_fp8": False}, {"use_fp8": True}]
WAYS += [{"use_fp8": True, "round_scale": True, "use_ue8m0": packed} for packed in (False, True)]


def published(rank: int, ranks: int) -> int:
    """All ways to dispatch, once or twice, and for each both ways to combine."""
    me = Rank(rank, ranks, SMALL)
    turns = 0
    for kind, hook, how in itertools.product(("numbered", "random"), (False, True), WAYS):
        turns += 1
        x = tokens_of(rank, SMALL, kind)
        waits = {"return_recv_hook": hook, "async_finish": not hook}
        for _ in range(turns % 2 + 1):
            stats = torch.zeros(me.local, dtype=torch.int32)
            given = x.clone()
            got, count, handle, event, finish = me.dispatch(
                given, cumulative_local_expert_recv_stats=stats, **how, **waits
            )
            given.fill_(float("nan"))
            finish() if hook else event.current_stream_wait()
        me.check_received(kind, got, count, handle, how.get("round_scale", False))
        assert torch.equal(stats, count)
        y = me.returned(got)
        for zero_copy in (False, True):
            if zero_copy:
                me.buffer.get_next_low_latency_combine_buffer(handle)[:] = y
            out = torch.empty(SMALL.tokens, SMALL.hidden, dtype=torch.bfloat16)
            sent = torch.zeros(0) if zero_copy else y.clone()
            found, event, finish = me.combine(sent, handle, zero_copy=zero_copy, out=out, **waits)
            sent.fill_(float("nan"))
            finish() if hook else event.current_stream_wait()
            assert found is out
            assert torch.equal(out, me.expected(x, how))
            alike = x * me.weights.masked_fill(me.ids < 0, 0).sum(1)[:, None]
            assert difference(alike, out) < (0.007 if how.get("round_scale") else 9e-4 if how["use_fp8"] else 1e-5)
    me.buffer.destroy()
    return turns


def of_the_page(rank: int, ranks: int) -> None:
    """The functions of docs/moe.md give the sums of what experts return."""
    names: dict[str, Any] = {}
    exec(block("moe", 2), names)
    me, x = Rank(rank, ranks, SMALL), tokens_of(rank, SMALL, "random")
    buffer = names["buffer_of"](distributed.group.WORLD, SMALL.tokens, SMALL.hidden, SMALL.experts)
    given = (x, me.ids, me.weights, SMALL.tokens, SMALL.experts)
    out = names["layer"](buffer, *given, lambda got, count: me.returned(got))
    assert torch.equal(out, me.expected(x, {"use_fp8": True}))
    buffer.destroy()
    me.buffer.destroy()


def order(rank: int, ranks: int) -> None:
    """Two dispatches before their combines, hooks in another thread and out of order, handles that were passed over."""
    me = Rank(rank, ranks, SMALL)
    xs = [(tokens_of(rank, SMALL, "random") * factor).bfloat16() for factor in (1, 2, 3)]
    how = {"use_fp8": False}
    began = [me.dispatch(x, return_recv_hook=True, **how) for x in xs[:2]]
    threads = [threading.Thread(target=one[4]) for one in reversed(began)]
    for thread in threads:
        thread.start()
        thread.join()
    outs = [me.combine(one[0], one[2], return_recv_hook=True) for one in reversed(began)]
    for out, _, finish in outs:
        finish()
        finish()
    assert [torch.equal(out[0], me.expected(x, how)) for out, x in zip(outs, (xs[1], xs[0]), strict=True)] == [True] * 2
    # Three dispatches of which the first has no lane any more when it is combined; no hook is called before.
    late = [me.dispatch(x, return_recv_hook=True, **how) for x in xs]
    for one, x in zip(late, xs, strict=True):
        one[4]()
        assert torch.equal(me.combine(one[0], one[2])[0], me.expected(x, how))
    # Once more with one of them, of whose ids some are passed over now, which no infinity can bring back.
    one, kept = late[0], me.ids.clone()
    y = one[0].clone()
    me.ids[:, 1] = -1
    weights, me.weights = me.weights, me.weights.clone()
    me.weights[:, 1] = float("inf")
    assert torch.equal(me.combine(y, one[2])[0], me.expected(xs[0], how))
    me.ids, me.weights = kept, weights
    # Ranks without tokens, then all have some.
    here = 0 if rank else SMALL.tokens
    for how in WAYS:
        got = me.buffer.low_latency_dispatch(xs[0][:here], me.ids[:here], SMALL.tokens, SMALL.experts, **how)
        y = me.returned(got[0])
        out, _, _ = me.buffer.low_latency_combine(y, me.ids[:here], me.weights[:here], got[2])
        assert torch.equal(out, me.expected(xs[0], how)[:here])
    me.buffer.destroy()


def refusals(rank: int, ranks: int) -> None:
    """What cannot be had says so, before anything is sent: the next call works. A second buffer and shape work too."""
    me, x = Rank(rank, ranks, SMALL), tokens_of(rank, SMALL, "random")
    got = me.dispatch(x, use_fp8=False)
    waits = torch.zeros(ranks, dtype=torch.int64)
    for wrong in (
        lambda: deep_ep.Buffer(distributed.group.WORLD),
        lambda: me.dispatch(x, dispatch_wait_recv_cost_stats=waits),
        lambda: me.dispatch(x, async_finish=True, return_recv_hook=True),
        lambda: me.dispatch(x, use_ue8m0=True),
        lambda: me.dispatch(x[:, :200].contiguous()),
        lambda: me.dispatch(x.float()),
        lambda: me.buffer.low_latency_dispatch(x, me.ids.double(), SMALL.tokens, SMALL.experts, use_fp8=False),
        lambda: me.combine(got[0], got[2], use_logfmt=True),
        lambda: me.combine(got[0], got[2], combine_wait_recv_cost_stats=waits),
        lambda: me.combine(got[0], tuple(got[2])),
        lambda: me.combine(got[0], got[2], out=torch.empty(1, 1)),
        lambda: me.buffer.low_latency_combine(got[0], me.ids.roll(1, 0), me.weights, got[2]),
        lambda: me.buffer.low_latency_query_mask_buffer(torch.zeros(ranks, dtype=torch.int32)),
        lambda: me.buffer.low_latency_dispatch(x, me.ids, 100 * SMALL.tokens, SMALL.experts),
        lambda: deep_ep.Buffer.set_num_sms(3),
    ):
        try:
            wrong()
        except aiote.UsageError:
            continue
        raise AssertionError("nothing was refused")
    assert torch.equal(me.combine(got[0], got[2])[0], me.expected(x, {}))
    deep_ep.Buffer.capture().current_stream_wait()
    other = Rank(rank, ranks, Sizes(8, 256, 6, 2))
    for one in (me, other, me):
        y = tokens_of(rank, one.sizes, "random")
        got = one.dispatch(y)
        assert torch.equal(one.combine(back(*got[0]), got[2])[0], one.expected(y, {"use_fp8": True}))
    # A smaller shape takes the place of the one that filled the buffer.
    me.buffer.clean_low_latency_buffer(4, 128, 12)
    me.sizes = Sizes(4, 128, 12, 2)
    me.ids, me.weights = chosen(rank, me.sizes)
    got = me.dispatch(tokens_of(rank, me.sizes, "random"), use_fp8=False)
    assert len(got[1]) == 12 // ranks
    other.buffer.destroy()
    other.buffer.destroy()
    me.buffer.destroy()
    try:
        me.dispatch(x)
    except aiote.ClosedError:
        return
    raise AssertionError("a destroyed buffer works")


def until_masked(me: Rank, lost: set[int]) -> None:
    status = torch.full((me.ranks,), 7, dtype=torch.int32)
    me.buffer.low_latency_query_mask_buffer(status)
    assert set(status.nonzero().view(-1).tolist()) == lost, status
    me.lost = lost


def shrinking(rank: int, ranks: int) -> int:
    """Rank 1 dies before its first dispatch, rank 3 before its first combine; the others go on and say who is gone."""
    me = Rank(rank, ranks, SMALL, enable_shrink=True)
    x, how = tokens_of(rank, SMALL, "random"), {"use_fp8": True}
    distributed.barrier()
    if rank == 1:
        os._exit(9)
    got, count, handle, _, _ = me.dispatch(x, **how)
    until_masked(me, {1})
    me.check_received("random", got, count, handle, False)
    if rank == 3:
        os._exit(9)
    out, _, _ = me.combine(me.returned(got), handle)
    until_masked(me, {1, 3})
    assert torch.equal(out, me.expected(x, how))
    me.buffer.clean_low_latency_buffer(SMALL.tokens, SMALL.hidden, SMALL.experts)
    for turn in range(3):
        # The second is of another group, which nobody waits for the lost ones to open.
        how = {"use_fp8": turn != 1}
        got, count, handle, _, finish = me.dispatch(x, return_recv_hook=True, **how)
        finish()
        me.check_received("random", got, count, handle, False)
        assert torch.equal(me.combine(me.returned(got), handle)[0], me.expected(x, how))
    for unmask in (me.buffer.low_latency_clean_mask_buffer, lambda: me.buffer.low_latency_update_mask_buffer(3)):
        try:
            unmask()
        except aiote.UsageError:
            continue
        raise AssertionError("a rank that is gone is back")
    me.buffer.destroy()
    return len(me.lost)


def told_to_mask(rank: int, ranks: int) -> None:
    """A rank that lives is masked by the others, between two rounds; it takes part no more."""
    me = Rank(rank, ranks, SMALL, enable_shrink=True)
    me.buffer.low_latency_clean_mask_buffer()
    me.buffer.low_latency_update_mask_buffer((rank + 1) % ranks, False)
    x, how = tokens_of(rank, SMALL, "random"), {"use_fp8": True}
    got = me.dispatch(x, **how)
    assert torch.equal(me.combine(me.returned(got[0]), got[2])[0], me.expected(x, how))
    distributed.barrier()
    if rank < 2:
        me.buffer.low_latency_update_mask_buffer(2, True)
        until_masked(me, {2})
        for how in WAYS[:2]:
            got = me.dispatch(x, **how)
            assert torch.equal(me.combine(me.returned(got[0]), got[2])[0], me.expected(x, how))
    distributed.barrier()
    me.buffer.destroy()


def losing(rank: int, ranks: int) -> str:
    """Without shrinking a rank that dies ends the buffer of the others, who make one of their own without it."""
    me, x = Rank(rank, ranks, SMALL), tokens_of(rank, SMALL, "random")
    got = me.dispatch(x, use_fp8=False)
    distributed.barrier()
    if rank == 2:
        os._exit(9)
    text = ""
    for call in (lambda: me.combine(got[0], got[2]), lambda: me.dispatch(x, use_fp8=False)):
        try:
            call()
        except aiote.AioteError as error:
            text = text or f"{type(error).__name__}: {error}"
        else:
            raise AssertionError("a call works without rank 2")
    # Two users of one engine: the addresses stay what they are.
    with bridge.acquire():
        members = me.buffer.members[:2]
        me.buffer.destroy()
        two = Rank(rank, 2, SMALL, members=members, rank=rank)
        got = two.dispatch(x, use_fp8=False)
        assert torch.equal(two.combine(got[0], got[2])[0], two.expected(x, {}))
        two.buffer.destroy()
    return text
