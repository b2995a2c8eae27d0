"""Decide which engines may call a service. A cluster key proves that an engine belongs to the cluster, not its role."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeAlias

import aiote

from .running import current_call

__all__ = ["Callers", "CallersLike", "ForeignCallerError"]

CallersLike: TypeAlias = Iterable[aiote.Address | str] | Callable[[aiote.Peer], bool] | None
"""The engines that may call: their addresses, compared by identity; or a predicate of a peer; or "first".

"first" is the first engine that calls; when it is no longer connected, the next one that calls. None means "first" for
an engine without a cluster key, because only its own host can reach it; for an engine with a key, None is an error.
"""

FIRST = "first"


class ForeignCallerError(aiote.AioteError):
    """The caller does not have the role that the method requires. The method has had no effect."""


class Callers:
    """The engines that have a role on this engine. `role` is the name of the role, for error messages.

    Raises UsageError if no engines are given, or an address without an identity.
    """

    def __init__(self, engine: aiote.Engine, allowed: CallersLike, role: str) -> None:
        self._role = role
        self._first: aiote.Peer | None = None
        self._predicate: Callable[[aiote.Peer], bool] = self._is_first
        if allowed is None and engine.config.cluster_key is not None:
            raise aiote.UsageError(
                f"{role}s: the engine has a cluster key, so you must say which engines may call: give their addresses, "
                f'a predicate of a peer, or "first" for the first engine of the cluster that calls'
            )
        if callable(allowed):
            self._predicate = allowed
        elif allowed is not None and allowed != FIRST:
            places = [allowed] if isinstance(allowed, aiote.Address | str) else allowed
            known = [aiote.Address.parse(one) if isinstance(one, str) else one for one in places]
            if not known or any(one.identity == bytes(16) for one in known):
                raise aiote.UsageError(
                    f"{role}: expected addresses with an identity, such as str(engine.address), got {known}"
                )
            identities = {one.identity for one in known}
            self._predicate = lambda peer: peer.address.identity in identities

    def _is_first(self, peer: aiote.Peer) -> bool:
        if self._first is None or (self._first.lost and self._first is not peer):
            self._first = peer
        return self._first.address.identity == peer.address.identity

    def require(self) -> None:
        """Raise ForeignCallerError unless the engine that made the current call has the role."""
        peer = current_call().peer
        if not self._predicate(peer):
            raise ForeignCallerError(
                f"{peer.address} is not the {self._role} of this engine, and only the {self._role} may call this"
            )
