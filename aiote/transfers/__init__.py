"""Transfers: memory regions and the peers that may use them, and how a request is made, awaited and counted.

It must not know how peers are found or kept. `owner` defines the interface to peers; `aiote.links` implements it.
"""

from .barrier import barrier
from .counter import Counter, CounterRow, Counters
from .immediates import ImmediateBlock
from .inbox import Inbox, Message, Messages, writable
from .lease import Lease
from .moves import Move, PreparedMoves
from .owner import Destination, PeerFinder, TransferOwner, drain
from .pages import Pages
from .peer import Peer, one_engine
from .prepared import PreparedPages, PreparedScatter
from .regions import Access, LeaseGranter, Region, Regions, RemoteRegion, as_integer
from .registrations import Registrations, SharedRegistration
from .requests import Requests
from .scatter import PeerGroup, ScatterTarget, group_room, make_group, submit_scatter
from .shared import SharedMemory
from .transfer import Launch, Transfer
from .watch import Changes, watch

__all__ = [
    "Access",
    "Changes",
    "Counter",
    "CounterRow",
    "Counters",
    "Destination",
    "ImmediateBlock",
    "Inbox",
    "Launch",
    "Lease",
    "LeaseGranter",
    "Message",
    "Messages",
    "Move",
    "Pages",
    "Peer",
    "PeerFinder",
    "PeerGroup",
    "PreparedMoves",
    "PreparedPages",
    "PreparedScatter",
    "Region",
    "Regions",
    "Registrations",
    "RemoteRegion",
    "Requests",
    "ScatterTarget",
    "SharedMemory",
    "SharedRegistration",
    "Transfer",
    "TransferOwner",
    "as_integer",
    "barrier",
    "drain",
    "group_room",
    "make_group",
    "one_engine",
    "submit_scatter",
    "watch",
    "writable",
]
