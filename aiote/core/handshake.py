"""Mutual authentication of two engines that may share a cluster key.

    initiator                                acceptor
      Hello: versions, nonce, who, whom  ->
                                         <-  Challenge: version, nonce, who      (or Refused)
      Proof: HMAC(key, initiator, T)     ->                                      (or Refused)
                                         <-  Welcome: HMAC(key, acceptor, T)     (or Refused)

T is SHA-256 over the Hello and the Challenge as sent, so both proofs cover both nonces, names, versions and the keyed
flags: none of these can be changed on the way. The session's key is a third HMAC over T.

The initiator proves first. An acceptor that rejects the proof says so and proves nothing itself, so an engine that can
merely connect learns nothing with which to guess the key. The two proofs carry different labels, a peer with our own
identity or nonce is refused, and a proof answers one fresh challenge, so no message can be sent back or used again. A
side with a key refuses a side without, and the reverse: there is no downgrade. The cluster key should be random and of
32 bytes or more, because a listener that plays the acceptor can try guesses on the Proof it gets.

Names (identity and incarnation) in a Hello are claims until the Proof has been verified. Among holders of the key they
stay claims: the key proves membership of the cluster, not which member.

The two classes take messages and return messages. They know neither bytes nor the order of calls; `control` does.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum

from ..errors import UsageError
from .address import ANYONE, IDENTITY_BYTES, Address
from .control_frames import NONCE_BYTES, Challenge, ControlError, Hello, Proof, Refused, Welcome, encode
from .fields import U64, FieldError, Fixed

__all__ = [
    "DEFAULT_NONCE",
    "OLDEST",
    "VERSION",
    "Acceptor",
    "Established",
    "HandshakeConfig",
    "Initiator",
    "RefusalCode",
    "make_refusal",
]

VERSION, OLDEST = 6, 5
"""The newest and the oldest version that this side speaks.

Since 2 an immediate may count for several pages of one message, since 3 Arrivals may be several frames, since 4 each
channel has a socket for the descriptors of the wake-up page and the ring, since 5 the counts in Arrivals have a sign,
since 6 an engine may ask for shared memory (`control.SINCE`).
"""
DEFAULT_NONCE: Callable[[int], bytes] = secrets.token_bytes


class RefusalCode(IntEnum):
    """Why a handshake was refused; `sentence` explains it in words."""

    VERSION = 1
    WRONG_IDENTITY = 2
    WRONG_INCARNATION = 3
    KEY_REQUIRED = 4
    KEY_UNEXPECTED = 5
    WRONG_KEY = 6
    SIMULTANEOUS = 7
    REFLECTED = 8
    MALFORMED = 9
    BUSY = 10
    CLOSING = 11

    @property
    def sentence(self) -> str:
        """Return what is wrong and what to do about it, in words."""
        return _SENTENCES[self]


_SENTENCES = {
    RefusalCode.VERSION: "no version of the control protocol is common to both sides; upgrade the older aiote",
    RefusalCode.WRONG_IDENTITY: "another engine answers at this address; ask for the engine's present address",
    RefusalCode.WRONG_INCARNATION: "the engine was restarted and is another incarnation; ask for its present address",
    RefusalCode.KEY_REQUIRED: "the acceptor has a cluster key and the initiator has none; give both the same",
    RefusalCode.KEY_UNEXPECTED: "the initiator has a cluster key and the acceptor has none; give both the same",
    RefusalCode.WRONG_KEY: "the cluster keys differ; give both sides the same",
    RefusalCode.SIMULTANEOUS: "both sides connected at once and the other connection is kept; use that one",
    RefusalCode.REFLECTED: "the engine met itself or its own words sent back; connect to another engine",
    RefusalCode.MALFORMED: "this is not the control protocol of aiote; check the address, and TLS on both sides",
    RefusalCode.BUSY: "the engine has as many peers as it admits; close some or raise the limit",
    RefusalCode.CLOSING: "the engine is closing; connect to another one",
}


def make_refusal(code: int, text: str = "") -> Refused:
    """Return the message that refuses with `code`; an empty `text` is replaced by the code's sentence."""
    if not text and code in _SENTENCES:
        text = RefusalCode(code).sentence
    return Refused(int(code), text)


@dataclass(frozen=True, slots=True)
class HandshakeConfig:
    """The part of every handshake that is the same for one engine; raises UsageError if a part is malformed.

    `identity` is 16 bytes, not all zero; `incarnation` 64 bits; `cluster_key` the shared secret or None; `versions` the
    lowest and the highest version of the protocol that this side speaks.
    """

    identity: bytes
    incarnation: int
    cluster_key: bytes | None = field(default=None, repr=False)
    versions: tuple[int, int] = (OLDEST, VERSION)

    def __post_init__(self) -> None:
        for name, layout in (("identity", Fixed(IDENTITY_BYTES)), ("incarnation", U64)):
            try:
                layout.pack(getattr(self, name))
            except FieldError as error:
                raise UsageError(f"HandshakeConfig.{name}: {error}") from error
        if self.identity == ANYONE:
            raise UsageError("HandshakeConfig.identity: all zeros mean any engine; draw a random identity")
        key: object = self.cluster_key
        if key is not None and not (isinstance(key, bytes) and key):
            raise UsageError("HandshakeConfig.cluster_key: expected bytes that are not empty, or None for no key")
        low, high = self.versions
        if not 0 < low <= high < 1 << 16:
            raise UsageError(f"HandshakeConfig.versions: expected a range within 1 to 65535, got {self.versions}")

    @property
    def has_key(self) -> bool:
        """Whether there is a cluster key."""
        return self.cluster_key is not None


@dataclass(frozen=True, slots=True)
class Established:
    """The result of a finished handshake: the peer's name, the version, and the key of the tags."""

    identity: bytes
    incarnation: int
    version: int
    key: bytes = field(repr=False)


class _Proofs:
    """The three values that the cluster key gives for one Hello and Challenge."""

    def __init__(self, cluster_key: bytes | None, hello: Hello, challenge: Challenge) -> None:
        digest = hashlib.sha256(b"aiote control transcript")
        for body in (encode(hello), encode(challenge)):
            digest.update(len(body).to_bytes(4, "big") + body)
        key, transcript = cluster_key or b"", digest.digest()
        self.initiator = hmac.digest(key, b"aiote initiator" + transcript, "sha256")
        self.acceptor = hmac.digest(key, b"aiote acceptor" + transcript, "sha256")
        self.session = hmac.digest(key, b"aiote session" + transcript, "sha256")


def _draw_nonce(nonce: Callable[[int], bytes]) -> bytes:
    try:
        return Fixed(NONCE_BYTES).pack(nonce(NONCE_BYTES))
    except FieldError as error:
        raise UsageError(f"nonce: expected a function that returns the requested number of bytes: {error}") from error


def _wrong_key(initiator_keyed: bool, acceptor_keyed: bool) -> Refused | None:
    """Return the refusal if one side has a cluster key and the other has none, otherwise None."""
    if initiator_keyed == acceptor_keyed:
        return None
    return make_refusal(RefusalCode.KEY_REQUIRED if acceptor_keyed else RefusalCode.KEY_UNEXPECTED)


def _wrong_name(wanted: tuple[bytes, int], found: tuple[bytes, int]) -> Refused | None:
    """Return the refusal if the engine found is not the one wanted, by identity and incarnation; otherwise None."""
    if wanted == (ANYONE, 0) or wanted == found:
        return None
    if wanted[0] != found[0]:
        return make_refusal(RefusalCode.WRONG_IDENTITY)
    newer = "a newer" if found[1] > wanted[1] else "another"
    return make_refusal(
        RefusalCode.WRONG_INCARNATION,
        f"this is {newer} incarnation ({found[1]:016x}) than the one asked for ({wanted[1]:016x}): the engine was "
        "restarted; ask for its present address",
    )


class Initiator:
    """The side that connected; `target` is the engine that it wants, None for any engine that answers."""

    def __init__(self, config: HandshakeConfig, target: Address | None, nonce: Callable[[int], bytes]) -> None:
        self._config = config
        self._target = (ANYONE, 0) if target is None else (target.identity, target.incarnation)
        self._proofs: _Proofs | None = None
        self._challenge: Challenge | None = None
        self.hello = Hello(
            version_min=config.versions[0],
            version_max=config.versions[1],
            nonce=_draw_nonce(nonce),
            identity=config.identity,
            incarnation=config.incarnation,
            target_identity=self._target[0],
            target_incarnation=self._target[1],
            keyed=config.has_key,
        )

    def receive_challenge(self, challenge: Challenge) -> Proof | Refused:
        """Return our proof, or the refusal of an acceptor that is not acceptable."""
        low, high = self._config.versions
        if not low <= challenge.version <= high:
            return make_refusal(RefusalCode.VERSION)
        if challenge.identity == self._config.identity or challenge.nonce == self.hello.nonce:
            return make_refusal(RefusalCode.REFLECTED)
        if challenge.identity == ANYONE:
            return make_refusal(RefusalCode.MALFORMED)
        if refusal := _wrong_key(self._config.has_key, challenge.keyed):
            return refusal
        if refusal := _wrong_name(self._target, (challenge.identity, challenge.incarnation)):
            return refusal
        self._challenge = challenge
        self._proofs = _Proofs(self._config.cluster_key, self.hello, challenge)
        return Proof(self._proofs.initiator)

    def receive_welcome(self, welcome: Welcome) -> Established | Refused:
        """Return the session, or the refusal of an acceptor whose proof is wrong.

        Raises ControlError before the Challenge.
        """
        if self._proofs is None or self._challenge is None:
            raise ControlError("a Welcome before the Challenge")
        if not hmac.compare_digest(welcome.hmac, self._proofs.acceptor):
            return make_refusal(RefusalCode.WRONG_KEY)
        peer = self._challenge
        return Established(peer.identity, peer.incarnation, peer.version, self._proofs.session)


class Acceptor:
    """The side that was connected to."""

    def __init__(self, config: HandshakeConfig, nonce: Callable[[int], bytes]) -> None:
        self._config = config
        self._nonce = _draw_nonce(nonce)
        self._hello: Hello | None = None
        self._challenge: Challenge | None = None

    def receive_hello(self, hello: Hello) -> Refused | None:
        """Return the refusal of an initiator that is not acceptable, or None if `challenge` may follow."""
        low, high = self._config.versions
        if hello.version_max < low or hello.version_min > high or hello.version_min > hello.version_max:
            return make_refusal(RefusalCode.VERSION)
        if hello.identity == self._config.identity or hello.nonce == self._nonce:
            return make_refusal(RefusalCode.REFLECTED)
        if hello.identity == ANYONE:
            return make_refusal(RefusalCode.MALFORMED)
        if refusal := _wrong_key(hello.keyed, self._config.has_key):
            return refusal
        wanted = (hello.target_identity, hello.target_incarnation)
        if refusal := _wrong_name(wanted, (self._config.identity, self._config.incarnation)):
            return refusal
        self._hello = hello
        return None

    def challenge(self) -> Challenge:
        """Return our answer to the Hello that was found acceptable. Raises ControlError before the Hello."""
        if self._hello is None:
            raise ControlError("a Challenge before the Hello")
        self._challenge = Challenge(
            version=min(self._hello.version_max, self._config.versions[1]),
            nonce=self._nonce,
            identity=self._config.identity,
            incarnation=self._config.incarnation,
            keyed=self._config.has_key,
        )
        return self._challenge

    def receive_proof(self, proof: Proof) -> tuple[Welcome, Established] | Refused:
        """Return our own proof and the session, or the refusal of a wrong proof, which reveals nothing of the key.

        Raises ControlError before the Challenge.
        """
        if self._hello is None or self._challenge is None:
            raise ControlError("a Proof before the Challenge")
        proofs = _Proofs(self._config.cluster_key, self._hello, self._challenge)
        if not hmac.compare_digest(proof.hmac, proofs.initiator):
            return make_refusal(RefusalCode.WRONG_KEY)
        peer = self._hello
        session = Established(peer.identity, peer.incarnation, self._challenge.version, proofs.session)
        return Welcome(proofs.acceptor), session
