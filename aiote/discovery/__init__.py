"""Discovery: members of a cluster announce themselves, and registries keep the list of members.

A `Registry` is either embedded (a `RegistryServer` on one of the engines, an `EmbeddedRegistry` on each of the others)
or an `etcd.EtcdRegistry`, which needs the extra `etcd`. It must not know what the members serve.
"""

from .embedded import EmbeddedRegistry
from .members import Members
from .membership import Member, MemberEvent, MemberRegistration, Registry, RegistryError, Watch
from .registry_server import RegistryServer

__all__ = [
    "EmbeddedRegistry",
    "Member",
    "MemberEvent",
    "MemberRegistration",
    "Members",
    "Registry",
    "RegistryError",
    "RegistryServer",
    "Watch",
]
