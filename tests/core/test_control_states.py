"""The state table against a model of it: what was said so far in one direction decides what may be said next."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from aiote.core.control import ControlError, ControlProtocol, MessageReceived
from aiote.core.control_frames import (
    AckCounts,
    Arrivals,
    Bye,
    Channel,
    EngineOffer,
    Failed,
    Heartbeat,
    Joined,
    MailboxMoved,
    Mapped,
    RailDown,
    Ready,
    Revoke,
    Revoked,
    ShareRefused,
    ShareRequest,
    encode,
    frame,
)
from aiote.errors import ClosedError, UsageError
from support.engines.control_peers import SESSION_KINDS, Pair, config, messages

SIDES = st.sampled_from(["left", "right"])
LAST_MESSAGES = (Bye, Failed)
# A last message comes rarely, so that the states before it are seen for a while.
KINDS = st.sampled_from([kind for kind in SESSION_KINDS if kind not in LAST_MESSAGES] * 4 + [*LAST_MESSAGES])
OPENING = (EngineOffer, Mapped, Ready)
ABOUT_CHANNELS = (AckCounts, RailDown, Arrivals, Joined, MailboxMoved, ShareRequest, ShareRefused)


def may_follow(kind: type[Any], said: list[type[Any]]) -> bool:
    """The rules in words: see the branches."""
    if Bye in said or Failed in said:
        return False
    if kind in (Heartbeat, Bye, Failed):
        return True
    if kind is EngineOffer:
        return EngineOffer not in said
    if kind is Mapped:
        return EngineOffer in said and Mapped not in said
    if kind is Ready:
        return Mapped in said and Ready not in said
    if kind in ABOUT_CHANNELS or (kind is Channel and Mapped in said):
        return Ready in said
    assert kind in (Channel, Revoke, Revoked)
    return EngineOffer in said


class Conversation(RuleBasedStateMachine):
    """Two peers, bytes in flight between them, and what each has said and heard."""

    @initialize(key=st.sampled_from([None, b"key"]))
    def meet(self, key: bytes | None) -> None:
        both = Pair(config(1, key=key), config(2, key=key)).shake()
        self.sides = {"left": both.left, "right": both.right}
        self.said: dict[str, list[Any]] = {"left": [], "right": []}
        self.got: dict[str, list[Any]] = {"left": [], "right": []}
        self.flight: dict[str, bytes] = {"left": b"", "right": b""}
        self.broken = False

    def other(self, side: str) -> str:
        return "right" if side == "left" else "left"

    def kinds(self, side: str) -> list[type[Any]]:
        return [type(message) for message in self.said[side]]

    @precondition(lambda self: not self.broken)
    @rule(side=SIDES, data=st.data(), kind=KINDS)
    def say(self, side: str, data: st.DataObject, kind: type[Any]) -> None:
        message = data.draw(messages(kind))
        if may_follow(kind, self.kinds(side)):
            self.sides[side].send(message)
            self.said[side].append(message)
            self.flight[side] += self.sides[side].data_to_send()
        else:
            over = Bye in self.kinds(side) or Failed in self.kinds(side)
            with pytest.raises(ClosedError if over else UsageError):
                self.sides[side].send(message)
            assert self.sides[side].data_to_send() == b""

    @precondition(lambda self: not self.broken)
    @rule(side=SIDES, data=st.data())
    def say_what_opens_the_next_state(self, side: str, data: st.DataObject) -> None:
        """Chance alone says a last message before it has come through the opening."""
        for kind in OPENING:
            if may_follow(kind, self.kinds(side)):
                self.say(side, data, kind)
                break

    @precondition(lambda self: not self.broken)
    @rule(side=SIDES, share=st.floats(0, 1))
    def deliver(self, side: str, share: float) -> None:
        count = round(len(self.flight[side]) * share)
        data, self.flight[side] = self.flight[side][:count], self.flight[side][count:]
        events = self.sides[self.other(side)].receive(data)
        assert all(isinstance(event, MessageReceived) for event in events)
        self.got[side] += [event.message for event in events if isinstance(event, MessageReceived)]

    @precondition(lambda self: not self.broken)
    @rule(side=SIDES, data=st.data(), kind=KINDS)
    def say_what_may_not_be_said(self, side: str, data: st.DataObject, kind: type[Any]) -> None:
        """A peer with the right key that breaks the order: the receiver notices, whatever was in flight."""
        if may_follow(kind, self.kinds(side)):
            return
        rogue, receiver = self.sides[side], self.sides[self.other(side)]
        forged = frame(encode(data.draw(messages(kind))), rogue._seal_out)
        with pytest.raises(ControlError, match=r"out of order|last message") as caught:
            receiver.receive(self.flight[side] + forged)
        self.got[side] += [event.message for event in caught.value.events]
        assert self.got[side] == self.said[side]
        self.check_the_end(receiver)

    @precondition(lambda self: self.broken)
    @rule(key=st.sampled_from([None, b"key"]))
    def meet_again(self, key: bytes | None) -> None:
        self.meet(key)

    def check_the_end(self, receiver: ControlProtocol) -> None:
        self.broken = True
        assert receiver.is_over
        for data in (b"", b"x"):
            with pytest.raises(ControlError, match="over"):
                receiver.receive(data)
        with pytest.raises(ClosedError):
            receiver.send(Heartbeat())

    @invariant()
    def what_was_heard_was_said(self) -> None:
        for side in self.sides:
            assert self.got[side] == self.said[side][: len(self.got[side])]
            if not self.broken and not self.flight[side]:
                assert self.got[side] == self.said[side]

    @invariant()
    def a_connection_is_over_when_both_have_said_their_last_message(self) -> None:
        if self.broken:
            return
        for side, protocol in self.sides.items():
            last = [
                message
                for message in (*self.said[side], *self.got[self.other(side)])
                if isinstance(message, Bye | Failed)
            ]
            assert protocol.is_over == (len(last) == 2)


Conversation.TestCase.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)
TestConversation = Conversation.TestCase
