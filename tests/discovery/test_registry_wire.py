"""What is said between the registry's clients and its server, and stands in etcd: read back, or refused."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import anyio
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiote import service
from aiote.discovery.embedded import EmbeddedRegistry
from aiote.discovery.membership import Member
from aiote.discovery.registry_server import MEMBERS_EACH, Keeping, RegistryServer, Watching
from aiote.discovery.wire import MemberRecord, RosterUpdate, decode_member, encode_member
from support.engines.opening import opened, pair
from support.service.registries import client, member, until_told

WORDS = st.integers(0, (1 << 64) - 1)
RUNS = st.integers(0, (1 << 63) - 1)


def texts(limit: int, least: int = 0) -> st.SearchStrategy[str]:
    letters = st.characters(exclude_categories=("Cs", "Cc"))
    return st.text(letters, min_size=least, max_size=limit).filter(lambda text: len(text.encode()) <= limit)


VALUES = st.one_of(
    st.booleans(), st.integers(-(1 << 63), (1 << 63) - 1), st.floats(allow_nan=False, allow_infinity=False), texts(128)
)
MEMBERS = st.builds(
    Member,
    texts(128, least=1),
    texts(32, least=1),
    st.binary(max_size=512),
    WORDS,
    st.dictionaries(texts(32), VALUES, max_size=4),
)
UPDATES = st.builds(
    RosterUpdate,
    RUNS,
    st.booleans(),
    st.lists(texts(128, least=1), max_size=2),
    st.lists(st.tuples(st.floats(0.1, 600), MEMBERS.map(MemberRecord.of)), max_size=2),
)


@given(UPDATES)
def test_an_encoded_update_decodes_to_itself(update):
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(update), type=RosterUpdate) == update


@given(MEMBERS)
def test_an_encoded_member_decodes_to_itself(one):
    found = decode_member(encode_member(one))
    assert found == one
    assert [type(value) for value in found.attributes.values()] == [type(value) for value in one.attributes.values()]


@given(MEMBERS, st.binary(max_size=100), st.data())
def test_arbitrary_bytes_decode_to_a_member_or_a_value_error(one, noise, data):
    damaged = bytearray(encode_member(one))
    damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    for content in (noise, bytes(damaged), b"[" * 100_000, b'{"x":' * 100_000):
        try:
            found = decode_member(content)
        except ValueError:
            continue
        assert decode_member(encode_member(found)) == found


def test_the_bytes_in_etcd_are_fixed():
    small = Member("n", "decode", b"ad", 7, {"a": True, "b": -1, "c": 1.0, "d": "x"})
    assert encode_member(small) == (
        b'{"name":"n","role":"decode","address":"YWQ=","incarnation":7,"attributes":{"a":true,"b":-1,"c":1.0,"d":"x"}}'
    )
    assert decode_member(encode_member(small)[:-1] + b',"later":[1]}') == small


def plain(one: Member, **other: object) -> dict[str, object]:
    """Return a member as a liar may say it, whom nothing checks."""
    return {**msgspec.structs.asdict(MemberRecord.of(one)), **other}


LIES = {
    "a name of controls": (1, 1, 3.0, [plain(member("a"), name="a\nb")]),
    "no name": (1, 1, 3.0, [plain(member("a"), name="")]),
    "a long role": (1, 1, 3.0, [plain(member("a"), role="x" * 33)]),
    "a long address": (1, 1, 3.0, [plain(member("a"), address=bytes(513))]),
    "a negative incarnation": (1, 1, 3.0, [plain(member("a"), incarnation=-1)]),
    "many attributes": (1, 1, 3.0, [plain(member("a"), attributes={str(number): 0 for number in range(17)})]),
    "no number": (1, 1, 3.0, [plain(member("a"), attributes={"load": float("nan")})]),
    "no attribute": (1, 1, 3.0, [plain(member("a"), attributes={"load": [1]})]),
    "a short lease": (1, 1, 0.01, []),
    "a long lease": (1, 1, 1e9, []),
    "a lease that is no number": (1, 1, float("nan"), []),
    "too many members": (1, 1, 3.0, [plain(member(f"m{number}")) for number in range(MEMBERS_EACH + 1)]),
    "no members": (1, 1, 3.0, None),
    "a text for a session": ("1", 1, 3.0, []),
}


class Liar(service.Service):
    """What a peer says that is no client of ours: the same method, whose arguments nobody has checked."""

    name = Keeping.name

    @service.method
    async def keep(self, session: Any, number: Any, lease_s: Any, records: Any) -> dict[str, str]:
        raise NotImplementedError


@pytest.mark.anyio
async def test_lies_of_a_client_are_refused_and_harm_no_other():
    async with pair("sim") as (liar, there), RegistryServer(there) as server, client(server.address) as honest:
        lying = service.client(liar, server.address, Liar)
        async with honest.join(member("honest", 5)):
            for lie in LIES.values():
                with pytest.raises(service.InvalidCallError, match="keep"):
                    await lying.keep(*lie)
            assert [one.name for one in server.members()] == ["honest"]
            # Nor does it help to know the session of another engine.
            for number in (1 << 60, (1 << 63) - 1):
                refused = await lying.keep(honest._session, number, 3.0, [plain(member("honest", 5))])
                assert "another connected engine" in refused["honest"]
                await lying.keep(honest._session, number, 3.0, [])
            await until_told(honest.watch(), ("joined", "honest"))
            assert [one.name for one in server.members()] == ["honest"]


class Storyteller(service.Service):
    """A server of the registry that tells what it likes."""

    name = Watching.name

    def __init__(self, *updates: Any) -> None:
        self.updates = updates

    @service.method
    async def watch(self) -> AsyncIterator[Any]:
        for update in self.updates:
            yield update
        await anyio.sleep_forever()


class Polite(service.Service):
    """Answers as that server would."""

    name = Keeping.name

    @service.method
    async def keep(self, session: Any, number: Any, lease_s: Any, records: Any) -> dict[str, str]:
        return {}


STORIES: dict[str, tuple[Any, ...]] = {
    "no update": ([],),
    "a member that is none": (
        {"run": 1, "complete": True, "gone": [], "present": [(3.0, plain(member("a"), role=""))]},
    ),
    "a lease that is none": ({"run": 1, "complete": True, "gone": [], "present": [(0.0, plain(member("a")))]},),
    "nothing": (),
    "never all": ({"run": 1, "complete": False, "gone": ["x"], "present": []},),
}


@pytest.mark.anyio
@pytest.mark.parametrize("story", STORIES)
async def test_a_server_that_tells_nonsense_is_left_for_another(story):
    async with pair("sim") as (liar, there), RegistryServer(there) as server, opened("sim") as engine:
        async with (
            service.serve(liar, Storyteller(*STORIES[story]), Polite()),
            server.join(member("honest")),
            EmbeddedRegistry(engine, [liar.address, server.address], lease_s=0.5) as registry,
        ):
            await until_told(registry.watch(), ("joined", "honest"))
            assert registry.in_touch
            assert "ValidationError" in registry.failure or "sent no list" in registry.failure, registry.failure
            assert [one.name for one in registry.members()] == ["honest"]
