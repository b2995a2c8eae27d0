"""What the router's page shows: asked of all members while somebody looks, and only then."""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import anyio
import httpx
import msgspec

from aiote.discovery import Member
from front import bounded

if TYPE_CHECKING:
    from front import Front

GIB = 1 << 30
LATELY_S = 5.0  # over which the time to the first token is a median
STATS_BYTES = 1 << 20
LOOK_S = 1.0  # how long one member may take to answer
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class Rail(msgspec.Struct):
    """What is counted here of a member's rail."""

    bytes_carried: Count


class Stats(msgspec.Struct):
    """What is counted here of a member's answer; the page shows all of it."""

    rails: Annotated[list[Rail], msgspec.Meta(max_length=64)]
    pages: Count
    pages_held: Count
    transfers: Count
    bytes_arrived: Count = 0


_stats = msgspec.json.Decoder(Stats)


class Watcher:
    """Look at the cluster; however many do, members are asked once a `period`."""

    period = 0.5

    def __init__(self, front: Front, client: httpx.AsyncClient) -> None:
        self._front, self._client = front, client
        self._turn = anyio.Lock()
        self._seen: dict[str, Any] = {}
        self._at = float("-inf")
        self._bytes: dict[tuple[str, int, int], tuple[float, int]] = {}
        self._tokens = (time.monotonic(), 0)

    async def look(self) -> dict[str, Any]:
        """Return the numbers, at most `period` old."""
        async with self._turn:
            if time.monotonic() - self._at >= self.period * 0.8:
                self._seen = await self._ask()
                self._at = time.monotonic()
            return self._seen

    async def _ask(self) -> dict[str, Any]:
        members = sorted(self._front.proven(), key=lambda member: (member.role != "prefill", member.name))
        stats: dict[str, dict[str, Any] | None] = {}
        async with anyio.create_task_group() as group:
            for member in members:
                group.start_soon(self._ask_one, member, stats)
        rows = [self._row(member, stats[member.name]) for member in members]
        here = {(member.name, member.incarnation) for member in members}
        self._bytes = {key: value for key, value in self._bytes.items() if key[:2] in here}
        return {
            "time": time.time(),
            "requests": {**self.requests(), **self._rates()},
            "members": rows,
            "totals": self._totals(rows),
        }

    async def _ask_one(self, member: Member, stats: dict[str, dict[str, Any] | None]) -> None:
        stats[member.name] = None
        try:
            url, headers = f"{member.attributes['url']}/stats", self._front.authorization(member)
            async with self._client.stream("GET", url, timeout=LOOK_S, headers=headers) as answer:
                data = await bounded(answer, STATS_BYTES)
            _stats.decode(data)
            stats[member.name] = msgspec.json.decode(data)
        except (httpx.HTTPError, ValueError, RecursionError):
            # It is starting, ending or lost, which is what the page shows of it then; or it says what cannot be.
            return

    def _row(self, member: Member, stats: dict[str, Any] | None) -> dict[str, Any]:
        loads = self._front.prefill.loads if member.role == "prefill" else self._front.decode.loads
        rails = [dict(rail) for rail in (stats or {}).get("rails", ())]
        if member.role == "prefill":
            for number, rail in enumerate(rails):
                rail["gib_s"] = self._rate((member.name, member.incarnation, number), rail["bytes_carried"])
            rate = sum(rail["gib_s"] for rail in rails) if stats else None
        else:
            rate = self._rate((member.name, member.incarnation, -1), stats.get("bytes_arrived", 0)) if stats else None
            if len(rails) == 1:
                # A NIC that is written to tells nobody: by which of several rails bytes came, the writers know.
                rails[0]["gib_s"] = rate
        state = "lost" if stats is None else "draining" if member.attributes.get("draining") else "ready"
        facts = {"name": member.name, "role": member.role, "url": member.attributes.get("url"), "state": state}
        return {**facts, "load": loads.get(member.name, 0), "gib_s": rate, "rails": rails, "stats": stats}

    def _rate(self, key: tuple[str, int, int], moved: int) -> float:
        now = time.monotonic()
        before, was = self._bytes.get(key, (now, moved))
        self._bytes[key] = now, moved
        return (moved - was) / GIB / (now - before) if now > before else 0.0

    def requests(self) -> dict[str, Any]:
        """Return the router's own numbers: counts since the start, and how it is now."""
        front = self._front
        counts = {"done": front.done, "failed": front.failed, "left": front.left, "retried": front.retried}
        return {"open": len(front.tries), "queue": front.queue, **counts, "tokens": front.tokens}

    def _rates(self) -> dict[str, Any]:
        """Return what has happened lately."""
        front = self._front
        now, before = time.monotonic(), self._tokens
        self._tokens = now, front.tokens
        lately = [seconds for at, seconds in front.first_tokens if now - at < LATELY_S]
        return {
            "tokens_s": (front.tokens - before[1]) / max(now - before[0], 1e-9),
            "first_token_s": statistics.median(lately) if lately else None,
        }

    def _totals(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        totals: dict[str, Any] = {"prefill": 0, "decode": 0, "pages": 0, "pages_held": 0, "gib_s": 0.0, "transfers": 0}
        for row in rows:
            totals[row["role"]] += 1
            stats = row["stats"] or {}
            for name in ("pages", "pages_held", "transfers"):
                totals[name] += stats.get(name, 0)
            # What prefillers write is what decoders get: it is counted once.
            totals["gib_s"] += (row["gib_s"] or 0.0) if row["role"] == "prefill" else 0.0
        return totals
