"""The seeds of the fuzz targets: real frames, one of every message type, in every place where it may come.

They are made from the registry of messages and from the table of the control connection, so a new message has its
seeds by itself. `python tools/fuzz.py --seeds` writes them to `tests/malformed_bytes/corpus`.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any, get_type_hints

from aiote.core import control_frames as frames
from aiote.core import fields
from aiote.core.address import Address
from aiote.core.control import SESSION, Role, State
from aiote.core.control_frames import encode, frame
from aiote.core.descriptor import RailKey, RegionDescriptor, SharedDescriptor
from support.fuzz.discovery import discovery_seeds
from support.fuzz.kvcache import kvcache_seeds
from support.fuzz.service import service_seeds
from support.fuzz.targets import HERE, Step, program

PATH = [State.GREETED, State.OFFERED, State.MAPPED, State.READY]
"""The states of a session in the order in which a conversation comes through them."""

GREETING = [(Step.GREET, b""), (Step.DECIDE, b""), (Step.PROVE, b"")]


def value(field: fields.Field[Any]) -> Any:
    """Return some value of a field."""
    match field:
        case fields.Constant():
            return field.value
        case fields.Fixed():
            return bytes(range(1, field.size + 1))
        case fields.Blob():
            return b"some bytes"[: field.limit]
        case fields.Unsigned():
            return 3
        case fields.Signed():
            return -3
        case fields.Flag():
            return False
        case fields.Text():
            return "text"
        case fields.Many():
            return (example(field._record.kind),) * 2
        case fields.Converted():
            return {Address: HERE, RegionDescriptor: described()}[field._kind]
    raise AssertionError(f"no value for {field}")


def example(kind: type[Any]) -> Any:
    """Return a record with some values."""
    hints = get_type_hints(kind, include_extras=True)
    given = [item.name for item in dataclasses.fields(kind) if item.init]
    return kind(**{name: value(fields._field_of(hints[name])) for name in given})


def described() -> RegionDescriptor:
    values = {"owner": HERE, "keys": (RailKey(1, 2), RailKey(3, 4)), "length": 4096}
    hints = get_type_hints(RegionDescriptor, include_extras=True)
    rest = {item.name for item in dataclasses.fields(RegionDescriptor) if item.init} - set(values)
    return RegionDescriptor(**values, **{name: value(fields._field_of(hints[name])) for name in rest})


def opening(state: State) -> list[bytes]:
    """Return the bodies that lead a session to a state."""
    bodies = []
    for here, there in itertools.pairwise(PATH):
        if here is state:
            break
        bodies.append(next(encode(example(kind)) for kind, leads in SESSION[here].items() if leads is there))
    return bodies


def conversations() -> dict[str, bytes]:
    """Return programs that say each message wherever it may be said, and the tested side answers in kind."""
    found = {}
    for state in PATH:
        said = opening(state)
        for kind in SESSION[state]:
            for role in Role:
                steps = [(Step.SEALED, body) for body in said] + [(Step.SEND, body) for body in said]
                last = encode(example(kind))
                name = f"{role.name.lower()}-{state.name.lower()}-{kind.__name__}".lower()
                steps += [(Step.SEALED, last), (Step.SEND, last)]
                found[name] = program(role, state is State.READY, *GREETING, *steps)
    return found


def handshakes() -> dict[str, bytes]:
    """Return programs that go wrong, or that end early."""
    found = {}
    ways: dict[str, list[tuple[Step, bytes]]] = {
        "refused-by-us": [(Step.GREET, b""), (Step.DECIDE, b"\1\0\7no")],
        "refused-by-them": [(Step.PLAIN, encode(frames.Refused(6, "no")))],
        "without-proof": [(Step.GREET, b""), (Step.DECIDE, b""), (Step.PLAIN, encode(example(frames.Proof)))],
        "impostor": [(Step.GREET, b""), (Step.PLAIN, encode(example(frames.Welcome)))],
        "nobody-s-hello": [(Step.PLAIN, encode(example(frames.Hello)))],
        "challenge": [(Step.PLAIN, encode(example(frames.Challenge))), (Step.PROVE, b"")],
        "raw": [(Step.RAW, frame(encode(example(frames.Hello)))), (Step.END, b"")],
        "long": [(Step.RAW, b"\xff\xff\xff\xff")],
        "again": [*GREETING, (Step.SEALED, encode(frames.Heartbeat())), (Step.AGAIN, b"")],
        "unsealed": [*GREETING, (Step.PLAIN, encode(frames.Heartbeat()))],
        "slowly": [*GREETING, (Step.SLOWLY, encode(frames.Heartbeat())), (Step.END, b"")],
        "bye": [*GREETING, (Step.SEALED, encode(frames.Bye("done"))), (Step.END, b"")],
    }
    for name, steps in ways.items():
        for role in Role:
            found[f"{role.name.lower()}-{name}"] = program(role, True, *steps)
    return found


def seeds() -> dict[str, dict[str, bytes]]:
    """Return all seeds: target, name, bytes."""
    bodies = {kind.__name__.lower(): encode(example(kind)) for kind in frames._NUMBERS}
    places = ["host:4000", "[::1]:1", str(HERE), str(Address("h", 1)), "aiote://[fe80::1%eth0]:9"]
    whole = described()
    return (
        {
            "control": conversations() | handshakes(),
            "message": bodies,
            "stream": {name: b"\7" + frame(body) * 2 for name, body in bodies.items()},
            "descriptor": {"whole": bytes(whole), "slice": bytes(whole.slice(5, 9))},
            "shared": {"whole": bytes(SharedDescriptor(HERE, 3, 4096))},
            "address": {f"text-{n}": place.encode() for n, place in enumerate(places)}
            | {f"bytes-{n}": bytes(Address.parse(place)) for n, place in enumerate(places)},
            "service": service_seeds(),
        }
        | discovery_seeds()
        | kvcache_seeds()
    )
