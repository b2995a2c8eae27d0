"""What a soak does to a KV cache's cluster: see `chaos`; besides, prefillers stall, drain, and lose their registry."""

from __future__ import annotations

import random
from typing import Any

from chaos import LONG_S, SHORT_S, Chaos, Mishap
from members import Member

PREFILLERS = (2, 3)
DECODERS = 2


class KvChaos(Chaos):
    """A registry, some prefillers and decoders, and their mishaps."""

    def roles(self) -> list[str]:
        prefillers = random.Random(self._seed).choice(PREFILLERS)
        return ["decode"] * DECODERS + ["prefill"] * prefillers + ["registry"]

    def mishaps(self) -> list[tuple[int, Mishap, str]]:
        return [
            (6, self._cancel, "decode"),
            (3, self._stall, "prefill"),
            (2, self._replace_in_order, "prefill"),
            (1, self._replace_in_order, "decode"),
            (1, self._reopen, "prefill"),
            (1, self._reopen, "decode"),
            (1, self._kill, "registry"),
            *self._hardships("prefill"),
            *self._hardships("decode"),
        ]

    def settings(self, role: str) -> dict[str, Any]:
        return {**super().settings(role), "max_transfers": self.rng.choice((4, 16384))}

    async def _introduce(self) -> None:
        """Tell everyone where the registry is."""
        registries = {str(m.life): m.address for m in self._members if m.role == "registry" and m.life}
        for member in self._members:
            self._spawn(self._tell_of(member, registries))

    async def _stall(self, member: Member) -> None:
        """Let a prefiller's model stand still while its engine lives."""
        self.tally["prefillers that stood still"] += 1
        await self._ask(member, "stall", seconds=self.rng.uniform(*self.rng.choice((SHORT_S, LONG_S))))
