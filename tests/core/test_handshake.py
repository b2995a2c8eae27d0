from __future__ import annotations

import contextlib
import hashlib
import hmac
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiote.core.control_frames import Challenge, ControlError, Hello, Proof, Refused, Seal, Welcome, encode
from aiote.core.handshake import (
    OLDEST,
    VERSION,
    Acceptor,
    Established,
    HandshakeConfig,
    Initiator,
    RefusalCode,
    make_refusal,
)
from aiote.errors import UsageError
from support.engines.control_peers import U64S, address, config, nonces

KEY = b"a cluster key of many bytes"


def challenge_of(initiator: Initiator, acceptor: Acceptor) -> Challenge:
    assert acceptor.receive_hello(initiator.hello) is None
    return acceptor.challenge()


def pair(key: bytes | None = KEY) -> tuple[Initiator, Acceptor]:
    return Initiator(config(1, key=key), address(2), nonces(1)), Acceptor(config(2, key=key), nonces(2))


def code_of(outcome: Any) -> int | None:
    return outcome.code if isinstance(outcome, Refused) else None


@pytest.mark.parametrize("key", [None, KEY])
def test_both_sides_agree_on_the_session(key: bytes | None) -> None:
    initiator, acceptor = pair(key)
    proof = initiator.receive_challenge(challenge_of(initiator, acceptor))
    assert isinstance(proof, Proof)
    outcome = acceptor.receive_proof(proof)
    assert isinstance(outcome, tuple)
    welcome, theirs = outcome
    ours = initiator.receive_welcome(welcome)
    assert isinstance(ours, Established)
    assert ours.key == theirs.key
    assert (ours.identity, theirs.identity) == (b"\2" * 16, b"\1" * 16)
    assert ours.version == theirs.version == VERSION
    assert len({ours.key, proof.hmac, welcome.hmac}) == 3


def test_the_proofs_are_the_documented_hmacs() -> None:
    initiator, acceptor = pair()
    challenge = challenge_of(initiator, acceptor)
    digest = hashlib.sha256(b"aiote control transcript")
    for body in (encode(initiator.hello), encode(challenge)):
        digest.update(len(body).to_bytes(4, "big"))
        digest.update(body)
    proof = initiator.receive_challenge(challenge)
    assert proof == Proof(hmac.new(KEY, b"aiote initiator" + digest.digest(), "sha256").digest())
    outcome = acceptor.receive_proof(Proof(proof.hmac))
    assert isinstance(outcome, tuple)
    assert outcome[0] == Welcome(hmac.new(KEY, b"aiote acceptor" + digest.digest(), "sha256").digest())
    assert outcome[1].key == hmac.new(KEY, b"aiote session" + digest.digest(), "sha256").digest()


@pytest.mark.parametrize(("left", "right"), [(KEY, b"another"), (b"another", KEY)])
def test_a_wrong_key_is_refused_without_a_proof(left: bytes, right: bytes) -> None:
    initiator, acceptor = Initiator(config(1, key=left), None, nonces(1)), Acceptor(config(2, key=right), nonces(2))
    proof = initiator.receive_challenge(challenge_of(initiator, acceptor))
    assert isinstance(proof, Proof)
    assert acceptor.receive_proof(proof) == make_refusal(RefusalCode.WRONG_KEY)


@given(st.binary(min_size=32, max_size=32))
def test_a_welcome_of_an_impostor_is_refused(guess: bytes) -> None:
    initiator, acceptor = pair()
    initiator.receive_challenge(challenge_of(initiator, acceptor))
    assert code_of(initiator.receive_welcome(Welcome(guess))) == RefusalCode.WRONG_KEY


@pytest.mark.parametrize("key", [None, KEY])
def test_our_own_proof_is_no_welcome(key: bytes | None) -> None:
    initiator, acceptor = pair(key)
    proof = initiator.receive_challenge(challenge_of(initiator, acceptor))
    assert isinstance(proof, Proof)
    assert code_of(initiator.receive_welcome(Welcome(proof.hmac))) == RefusalCode.WRONG_KEY


@pytest.mark.parametrize(
    ("initiator_key", "acceptor_key", "code"),
    [
        (None, KEY, RefusalCode.KEY_REQUIRED),
        (KEY, None, RefusalCode.KEY_UNEXPECTED),
        (None, None, None),
        (KEY, KEY, None),
    ],
)
def test_each_side_refuses_by_itself_what_is_keyed_otherwise(
    initiator_key: bytes | None, acceptor_key: bytes | None, code: int | None
) -> None:
    initiator = Initiator(config(1, key=initiator_key), None, nonces(1))
    acceptor = Acceptor(config(2, key=acceptor_key), nonces(2))
    assert code_of(acceptor.receive_hello(initiator.hello)) == code
    # The initiator does not depend on the acceptor having looked.
    acceptor.receive_hello(replace(initiator.hello, keyed=acceptor_key is not None))
    assert code_of(initiator.receive_challenge(acceptor.challenge())) == code


def test_flags_changed_on_the_way_do_not_let_an_unkeyed_side_in() -> None:
    for left, right in ((None, KEY), (KEY, None)):
        initiator, acceptor = Initiator(config(1, key=left), None, nonces(1)), Acceptor(config(2, key=right), nonces(2))
        assert acceptor.receive_hello(replace(initiator.hello, keyed=right is not None)) is None
        proof = initiator.receive_challenge(replace(acceptor.challenge(), keyed=left is not None))
        assert isinstance(proof, Proof)
        assert code_of(acceptor.receive_proof(proof)) == RefusalCode.WRONG_KEY


CHANGES: dict[str, st.SearchStrategy[Any]] = {
    "version_max": st.integers(VERSION, 9),
    "version_min": st.integers(0, VERSION),
    "nonce": st.binary(min_size=32, max_size=32),
    "identity": st.binary(min_size=16, max_size=16),
    "incarnation": U64S,
    "target_identity": st.just(bytes(16)),
    "target_incarnation": U64S,
}


@given(st.sampled_from(sorted(CHANGES)), st.data())
def test_a_hello_changed_on_the_way_gives_no_session(name: str, data: st.DataObject) -> None:
    initiator, acceptor = pair()
    hello = replace(initiator.hello, **{name: data.draw(CHANGES[name])})
    if hello == initiator.hello or acceptor.receive_hello(hello) is not None:
        return
    proof = initiator.receive_challenge(acceptor.challenge())
    if isinstance(proof, Proof):
        assert code_of(acceptor.receive_proof(proof)) == RefusalCode.WRONG_KEY


@given(st.sampled_from(["nonce", "identity", "incarnation"]), st.data())
def test_a_challenge_changed_on_the_way_gives_no_session(name: str, data: st.DataObject) -> None:
    acceptor = Acceptor(config(2, key=KEY), nonces(2))
    initiator = Initiator(config(1, key=KEY), None, nonces(1))
    sent = challenge_of(initiator, acceptor)
    challenge = replace(sent, **{name: data.draw(CHANGES[name])})
    if challenge == sent:
        return
    proof = initiator.receive_challenge(challenge)
    if isinstance(proof, Proof):
        assert code_of(acceptor.receive_proof(proof)) == RefusalCode.WRONG_KEY


def test_a_proof_of_another_connection_is_refused() -> None:
    initiator, acceptor = pair()
    proof = initiator.receive_challenge(challenge_of(initiator, acceptor))
    later = Acceptor(config(2, key=KEY), nonces(3))
    assert later.receive_hello(initiator.hello) is None
    later.challenge()
    assert isinstance(proof, Proof)
    assert code_of(later.receive_proof(proof)) == RefusalCode.WRONG_KEY


def test_our_own_identity_and_nonce_are_refused_when_they_come_back() -> None:
    initiator, acceptor = pair()
    hello, challenge = initiator.hello, challenge_of(initiator, acceptor)
    ours = Acceptor(config(1, key=KEY), nonces(9))
    assert (
        code_of(ours.receive_hello(replace(hello, target_identity=bytes(16), target_incarnation=0)))
        == RefusalCode.REFLECTED
    )
    assert code_of(Acceptor(config(2, key=KEY), nonces(1)).receive_hello(hello)) == RefusalCode.REFLECTED
    assert code_of(initiator.receive_challenge(replace(challenge, nonce=hello.nonce))) == RefusalCode.REFLECTED
    assert code_of(initiator.receive_challenge(replace(challenge, identity=hello.identity))) == RefusalCode.REFLECTED


def test_an_identity_of_zeros_is_refused() -> None:
    initiator, acceptor = pair()
    assert code_of(acceptor.receive_hello(replace(initiator.hello, identity=bytes(16)))) == RefusalCode.MALFORMED
    challenge = challenge_of(initiator, acceptor)
    anyone = Initiator(config(1, key=KEY), address(0), nonces(1))
    assert code_of(anyone.receive_challenge(replace(challenge, identity=bytes(16)))) == RefusalCode.MALFORMED


@pytest.mark.parametrize(
    ("wanted", "incarnation", "code", "words"),
    [
        (2, 7, None, ""),
        (0, 0, None, ""),
        (3, 7, RefusalCode.WRONG_IDENTITY, "another engine"),
        (2, 6, RefusalCode.WRONG_INCARNATION, "this is a newer incarnation"),
        (2, 8, RefusalCode.WRONG_INCARNATION, "this is another incarnation"),
    ],
)
def test_both_sides_insist_on_the_engine_that_is_meant(
    wanted: int, incarnation: int, code: int | None, words: str
) -> None:
    initiator = Initiator(config(1), address(wanted, incarnation) if wanted else None, nonces(1))
    acceptor = Acceptor(config(2), nonces(2))
    refusal = acceptor.receive_hello(initiator.hello)
    assert code_of(refusal) == code
    assert words in (refusal.text if refusal else "")
    acceptor.receive_hello(replace(initiator.hello, target_identity=bytes(16), target_incarnation=0))
    assert code_of(initiator.receive_challenge(acceptor.challenge())) == code


@given(st.tuples(st.integers(1, 6), st.integers(1, 6)), st.tuples(st.integers(1, 6), st.integers(1, 6)))
def test_the_highest_common_version_is_chosen(left: tuple[int, int], right: tuple[int, int]) -> None:
    ours, theirs = (min(left), max(left)), (min(right), max(right))
    common = set(range(ours[0], ours[1] + 1)) & set(range(theirs[0], theirs[1] + 1))
    initiator = Initiator(config(1, versions=ours), None, nonces(1))
    acceptor = Acceptor(config(2, versions=theirs), nonces(2))
    refusal = acceptor.receive_hello(initiator.hello)
    if common:
        assert refusal is None
        assert acceptor.challenge().version == max(common)
    else:
        assert code_of(refusal) == RefusalCode.VERSION


def test_engines_of_the_versions_that_this_one_still_speaks_are_let_in() -> None:
    for version in range(OLDEST, VERSION + 1):
        only: dict[str, Any] = {"key": KEY, "versions": (version, version)}
        initiator, acceptor = pair()[0], Acceptor(config(2, **only), nonces(2))
        assert isinstance(initiator.receive_challenge(challenge_of(initiator, acceptor)), Proof)
        initiator, acceptor = Initiator(config(1, **only), None, nonces(1)), pair()[1]
        assert challenge_of(initiator, acceptor).version == version


def test_a_version_that_was_not_offered_is_refused() -> None:
    initiator, acceptor = pair()
    for version in (OLDEST - 1, VERSION + 1):
        answer = initiator.receive_challenge(replace(challenge_of(initiator, acceptor), version=version))
        assert code_of(answer) == RefusalCode.VERSION
    backwards = replace(initiator.hello, version_min=2, version_max=1)
    assert code_of(acceptor.receive_hello(backwards)) == RefusalCode.VERSION


def test_steps_out_of_order_are_refused() -> None:
    initiator, acceptor = pair()
    with pytest.raises(ControlError, match="before the Challenge"):
        initiator.receive_welcome(Welcome(bytes(32)))
    with pytest.raises(ControlError, match="before the Hello"):
        acceptor.challenge()
    assert acceptor.receive_hello(initiator.hello) is None
    with pytest.raises(ControlError, match="before the Challenge"):
        acceptor.receive_proof(Proof(bytes(32)))


def test_nonces_are_fresh_by_default() -> None:
    from aiote.core.control import ControlProtocol, Role

    sent = {ControlProtocol(Role.INITIATOR, config(1)).data_to_send() for _ in range(8)}
    assert len(sent) == 8


@pytest.mark.parametrize(
    ("parts", "complaint"),
    [
        ({"identity": b"short"}, "identity: expected exactly 16"),
        ({"identity": bytes(16)}, "identity: all zeros mean any engine"),
        ({"incarnation": -1}, "incarnation"),
        ({"cluster_key": b""}, "cluster_key"),
        ({"cluster_key": "text"}, "cluster_key"),
        ({"versions": (2, 1)}, "versions"),
        ({"versions": (0, 1)}, "versions"),
    ],
)
def test_a_malformed_config_is_named(parts: dict[str, Any], complaint: str) -> None:
    whole: dict[str, Any] = {"identity": b"i" * 16, "incarnation": 1} | parts
    with pytest.raises(UsageError, match=complaint):
        HandshakeConfig(**whole)


@pytest.mark.parametrize("drawn", [b"", bytes(31), "x" * 32])
def test_a_source_of_too_short_nonces_is_refused(drawn: Any) -> None:
    with pytest.raises(UsageError, match="nonce"):
        Initiator(config(1), None, lambda count: drawn)


def test_secrets_are_not_shown() -> None:
    assert "cluster" not in repr(config(1, key=b"s3cret"))
    assert "s3cret" not in repr(config(1, key=b"s3cret"))
    assert "s3cret" not in repr(Established(b"i" * 16, 1, 1, b"s3cret"))


def test_every_refusal_says_something_of_its_own() -> None:
    sentences = [code.sentence for code in RefusalCode]
    assert len(set(sentences)) == len(sentences)
    for code in RefusalCode:
        assert make_refusal(code).text == code.sentence
        assert make_refusal(code, "because").text == "because"
    assert make_refusal(999) == Refused(999, "")
    assert isinstance(encode(make_refusal(max(RefusalCode))), bytes)


def test_the_hello_names_the_target() -> None:
    hello = Initiator(config(1), address(2, 99), nonces(1)).hello
    assert isinstance(hello, Hello)
    assert (hello.target_identity, hello.target_incarnation) == (b"\2" * 16, 99)


@pytest.mark.parametrize("equal", [True, False])
def test_what_the_key_made_is_compared_in_constant_time(equal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing but `compare_digest` decides on a proof, a welcome and a tag."""
    initiator, acceptor = pair()
    proof = initiator.receive_challenge(challenge_of(initiator, acceptor))
    assert isinstance(proof, Proof)
    asked = []
    monkeypatch.setattr(hmac, "compare_digest", lambda *both: asked.append(both) or equal)
    assert isinstance(acceptor.receive_proof(Proof(bytes(32)) if equal else proof), Refused) is not equal
    assert isinstance(initiator.receive_welcome(Welcome(bytes(32))), Refused) is not equal
    sealed = Seal(KEY, 0).tag(b"body")
    with contextlib.nullcontext() if equal else pytest.raises(ControlError, match="wrong tag"):
        assert Seal(KEY, 0).open(b"body" + (bytes(16) if equal else sealed)) == b"body"
    assert len(asked) == 3
