from collections.abc import Callable
from typing import Any, overload

from aiote_native.channels.failover import ChannelSet
from aiote_native.engine.provider import NativeEndpoint
from aiote_native.requests.operations import LocalMemory
from aiote_native.system.wakeups import PeerWakeup

class PeerLink(ChannelSet):
    tag: object
    peer: Any
    ready: bool
    unfinished: int
    limit: int
    on_room: Callable[[], object] | None
    is_room_due: bool
    message_limit: int
    leftover: list[bytes]
    @property
    def failed(self) -> int: ...
    @property
    def failed_rail(self) -> int: ...
    @property
    def messages(self) -> int: ...
    @property
    def mailbox_channel(self) -> int: ...
    def move_mailbox(self, number: int) -> None: ...
    def release_mailbox(self) -> None: ...
    @property
    def quiet(self) -> bool: ...
    @property
    def unsettled(self) -> bool: ...
    def add_channel(
        self,
        endpoint: NativeEndpoint,
        rail: int,
        remote_rail: int,
        *,
        imm_key: int,
        imm_address: int,
        scratch: LocalMemory,
        largest: int = 0,
        least: int = 0,
        wakeup: PeerWakeup | None = None,
        slot: int = -1,
        peer_slot: int = -1,
        peer_generation: int = 0,
        number: int = -1,
        speed_mbps: int = 0,
    ) -> None: ...
    def record_greeting(self) -> None: ...
    def open_mailbox(
        self, memory: LocalMemory, slots: int, message_bytes: int, peer_slots: int, peer_message_bytes: int
    ) -> None: ...
    @overload
    def take_message(self, buffer: None = None) -> bytes | None: ...
    @overload
    def take_message(self, buffer: memoryview | None) -> bytes | int | None: ...
    def fail(self, errnum: int) -> None: ...
    def close(self, errnum: int = 5) -> None: ...

def deliver(data: bytes, buffer: memoryview | None) -> bytes | int: ...
def pool_bytes(slots: int, message_bytes: int, peer_slots: int, peer_message_bytes: int) -> int: ...
