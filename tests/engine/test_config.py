"""Settings: what is checked, where they come from, and that they are obeyed."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import socket
from pathlib import Path

import pytest

import aiote
from aiote.rails import libfabric
from support.engines.opening import opened, pair

KEY = b"a secret of sixteen bytes or more"
VARIABLES = (
    "AIOTE_CLUSTER_KEY",
    "AIOTE_HOST",
    "AIOTE_PORT",
    "AIOTE_SPIN_US",
    "AIOTE_HEARTBEAT_TIMEOUT",
    "AIOTE_CONNECT_TIMEOUT",
)


@pytest.fixture(autouse=True)
def no_settings_from_outside(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def test_defaults_are_valid_and_frozen():
    config = aiote.EngineConfig()
    assert (config.host, config.port, config.cluster_key, config.progress) == (None, 0, None, "adaptive")
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.port = 5
    with pytest.raises(TypeError):
        aiote.EngineConfig("tcp")


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"port": -1}, "port=-1: expected an integer from 0 to 65535"),
        ({"port": 65536}, "port=65536: expected an integer from 0 to 65535"),
        ({"port": "80"}, "port='80': expected an integer"),
        ({"spin_us": -1}, "spin_us=-1: expected an integer from 0"),
        ({"spin_us": 0.5}, "spin_us=0.5: expected an integer"),
        ({"message_bytes": 63}, "message_bytes=63: expected an integer from 64"),
        ({"message_bytes": 1 << 21}, "message_bytes=2097152: expected"),
        ({"message_pool": 1}, "message_pool=1: expected an integer from 2"),
        ({"stripe_bytes": 0}, "stripe_bytes=0: expected an integer from 1"),
        ({"largest_message": -1}, "largest_message=-1: expected an integer from 0"),
        ({"ring_bytes": 1 << 16}, "ring_bytes=65536: expected an integer from 131072 to 4194304"),
        ({"ring_bytes": 3 << 18}, "ring_bytes=786432: expected a power of two"),
        (
            {"gpu_staging_bytes": (4 << 20) - 1},
            "gpu_staging_bytes=4194303: expected an integer from 4194304 to 67108864",
        ),
        ({"gpu_staging_bytes": (64 << 20) + 1}, "gpu_staging_bytes=67108865: expected an integer from 4194304"),
        ({"max_counters": 0}, "max_counters=0: expected an integer from 1"),
        ({"max_mapped_bytes": -1}, "max_mapped_bytes=-1: expected an integer from 0"),
        ({"thread_cpu": -2}, "thread_cpu=-2: expected an integer from -1"),
        ({"heartbeat_interval": 0}, "heartbeat_interval=0: expected a positive number of seconds"),
        ({"heartbeat_interval": "1"}, "heartbeat_interval='1': expected a positive number"),
        ({"heartbeat_timeout": float("inf")}, "heartbeat_timeout=inf: expected a positive number"),
        ({"connect_timeout": 0}, "connect_timeout=0: expected a positive number of seconds"),
        ({"drain_timeout": float("nan")}, "drain_timeout=nan: expected a positive number"),
        ({"heartbeat_interval": 3.0, "heartbeat_timeout": 3.0}, "must be smaller than heartbeat_timeout=3.0"),
        ({"progress": "polling"}, "progress='polling': expected 'adaptive', 'loop' or 'thread'"),
        ({"identity": b"short"}, "identity has 5 bytes, expected 16"),
        ({"cluster_key": b"short"}, "cluster_key has 5 bytes: expected at least 16"),
        ({"cluster_key": KEY.decode()}, "cluster_key must be bytes, got str"),
        ({"identity": "0123456789abcdef"}, "identity must be bytes, got str"),
        ({"host": "0.0.0.0"}, "host='0.0.0.0' without a cluster_key: .*listens on loopback only.*AIOTE_CLUSTER_KEY"),
        ({"host": "192.0.2.7"}, "without a cluster_key"),
        ({"host": 5}, "host must be text, got int"),
        ({"libfabric": b"/a/path"}, "libfabric must be text, got bytes"),
    ],
)
def test_wrong_settings_are_refused_with_the_reason(settings, says):
    with pytest.raises(aiote.UsageError, match=says):
        aiote.EngineConfig(**settings)


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.0.0.2", "::1"])
def test_loopback_needs_no_key(host):
    assert aiote.EngineConfig(host=host).host == host


def test_a_key_opens_other_hosts_and_is_not_shown():
    config = aiote.EngineConfig(host="192.0.2.7", cluster_key=KEY)
    assert KEY.decode() not in repr(config)


def test_settings_come_from_the_environment_unless_given(monkeypatch):
    for name, value in zip(VARIABLES, (KEY.decode(), "192.0.2.7", "4711", "0", "7.5", "8.5"), strict=True):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AIOTE_LIBFABRIC", "/somewhere/libfabric.so.1")
    config = aiote.EngineConfig()
    assert (config.cluster_key, config.host, config.port, config.spin_us) == (KEY, "192.0.2.7", 4711, 0)
    assert config.libfabric == "/somewhere/libfabric.so.1"
    assert (config.heartbeat_timeout, config.connect_timeout) == (7.5, 8.5)
    other = b"another secret of sixteen bytes or more"
    explicit = aiote.EngineConfig(
        cluster_key=other,
        host="127.0.0.1",
        port=0,
        spin_us=7,
        libfabric="/elsewhere",
        heartbeat_timeout=2,
        connect_timeout=4,
    )
    assert (explicit.cluster_key, explicit.host, explicit.port, explicit.spin_us) == (other, "127.0.0.1", 0, 7)
    assert explicit.libfabric == "/elsewhere"
    assert (explicit.heartbeat_timeout, explicit.connect_timeout) == (2, 4)


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("AIOTE_PORT", "http", "AIOTE_PORT='http': expected an integer"),
        ("AIOTE_SPIN_US", "1.5", "AIOTE_SPIN_US='1.5': expected an integer"),
        ("AIOTE_PORT", "70000", "port=70000: expected an integer from 0 to 65535"),
        ("AIOTE_CLUSTER_KEY", "short", "cluster_key has 5 bytes"),
        ("AIOTE_HEARTBEAT_TIMEOUT", "soon", "AIOTE_HEARTBEAT_TIMEOUT='soon': expected a number of seconds"),
        ("AIOTE_HEARTBEAT_TIMEOUT", "nan", "heartbeat_timeout=nan: expected a positive number of seconds"),
        ("AIOTE_HEARTBEAT_TIMEOUT", "0.5", "heartbeat_interval=1.0 must be smaller than heartbeat_timeout=0.5"),
        ("AIOTE_CONNECT_TIMEOUT", "never", "AIOTE_CONNECT_TIMEOUT='never': expected a number of seconds"),
        ("AIOTE_IDENTITY", "zz", "AIOTE_IDENTITY=.zz.: expected hexadecimal digits"),
        ("AIOTE_VERBS_MTU", "big", "AIOTE_VERBS_MTU=.big.: expected an integer"),
        ("AIOTE_HOST", "0.0.0.0", "without a cluster_key"),
    ],
)
def test_wrong_variables_are_refused_with_the_reason(monkeypatch, name, value, says):
    monkeypatch.setenv(name, value)
    with pytest.raises(aiote.UsageError, match=says):
        aiote.EngineConfig()


@pytest.mark.parametrize("name", VARIABLES)
def test_empty_variables_count_as_unset(monkeypatch, name):
    before = aiote.EngineConfig()
    monkeypatch.setenv(name, "")
    assert aiote.EngineConfig() == before


@pytest.mark.libfabric
async def test_host_and_port_are_where_it_listens(monkeypatch):
    async with opened("tcp", host="localhost") as first:
        assert first.address.host == "127.0.0.1"
        port = first.address.port
    monkeypatch.setenv("AIOTE_PORT", str(port))
    async with opened("tcp") as second:
        assert second.address.port == port
        with pytest.raises(aiote.FabricError, match=f"cannot listen on 127.0.0.1 port {port}") as caught:
            await opened("tcp")
        assert caught.value.errno == errno.EADDRINUSE
        assert caught.value.operation == "open control port"
        assert isinstance(caught.value, OSError)


@pytest.mark.libfabric
async def test_loopback_is_there_where_no_nic_has_an_ipv4_address(monkeypatch):
    """glibc then refuses 127.0.0.1 to who asks for the families that the machine has."""
    resolve = socket.getaddrinfo

    def without_ipv4(*arguments, **named):
        flags = named.get("flags", arguments[5] if len(arguments) > 5 else 0)
        if flags & socket.AI_ADDRCONFIG:
            raise socket.gaierror(socket.EAI_ADDRFAMILY, "Address family for hostname not supported")
        return resolve(*arguments, **named)

    monkeypatch.setattr(socket, "getaddrinfo", without_ipv4)
    async with opened("tcp") as left, opened("tcp") as right:
        await right.send(left.address, b"x")
        assert (await left.recv()).data == b"x"


@pytest.mark.libfabric
async def test_an_engine_on_another_loopback_address_is_reached():
    async with opened("tcp", host="127.0.0.2") as left, opened("tcp") as right:
        assert left.address.host == "127.0.0.2"
        await right.send(left.address, b"x")
        assert (await left.recv()).data == b"x"


def with_loopback_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the library list no other NIC, as on a machine whose network is not up yet."""
    listed = libfabric.discover
    monkeypatch.setattr(
        libfabric,
        "discover",
        lambda provider: [offer for offer in listed(provider) if libfabric.source_host(offer) == "127.0.0.1"],
    )


@pytest.mark.libfabric
async def test_an_address_that_no_rail_leads_to_is_refused(monkeypatch):
    """On loopback, which once was taken silently, whoever connected would have written to a process of its own host."""
    with_loopback_alone(monkeypatch)
    with pytest.raises(aiote.UsageError, match=r"host='192.0.2.7': no rail leads there.*loopback \(127.0.0.1\)"):
        async with opened("tcp", host="192.0.2.7", cluster_key=KEY):
            pass


@pytest.mark.libfabric
@pytest.mark.parametrize("host", ["0.0.0.0", "127.0.0.2", "::1", "localhost"])
async def test_any_other_host_takes_the_loopback_rail_where_there_is_no_other(monkeypatch, host):
    with_loopback_alone(monkeypatch)
    async with opened("tcp", host=host, cluster_key=KEY) as engine:
        assert [rail.name for rail in engine.rails] == ["lo"]


@pytest.mark.libfabric
async def test_an_identity_is_kept_and_an_incarnation_is_not():
    incarnations = set()
    for _ in range(2):
        async with opened("tcp", identity=b"sixteen bytes id") as engine:
            assert engine.address.identity == b"sixteen bytes id"
            incarnations.add(engine.address.incarnation)
    assert len(incarnations) == 2


@pytest.mark.libfabric
async def test_identities_are_drawn_at_random():
    async with pair("tcp") as (left, right):
        assert left.address.identity != right.address.identity
        assert left.config.identity is None


def tasks() -> dict[str, str]:
    """Return the processors that each thread of this process may run on."""
    found = {}
    for path in Path("/proc/self/task").iterdir():
        # One that is listed may have ended by now.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            lines = (path / "status").read_text().splitlines()
            found[path.name] = next(line.split()[1] for line in lines if line.startswith("Cpus_allowed_list:"))
    return found


@pytest.mark.libfabric
async def test_the_native_thread_is_pinned():
    processor = max(os.sched_getaffinity(0))
    before = tasks()
    async with pair("tcp", progress="thread", thread_cpu=processor):
        new = [allowed for name, allowed in tasks().items() if name not in before]
        # Beside the two engines' own there may be one that resolves names.
        assert new.count(str(processor)) >= 2


@pytest.mark.libfabric
async def test_a_processor_that_is_not_there_is_refused():
    config = aiote.EngineConfig(progress="thread", thread_cpu=4095)
    with pytest.raises(aiote.FabricError, match="native thread on processor 4095, which thread_cpu asks for"):
        async with aiote.open_engine("tcp", config=config):
            pass


@pytest.mark.libfabric
async def test_a_second_libfabric_in_one_process_is_refused(tmp_path):
    async with opened("tcp"):
        with pytest.raises(aiote.UsageError, match=r"libfabric is open from .* a process can use one"):
            await opened("tcp", libfabric=str(tmp_path / "libfabric.so.1"))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("gid_index", -1),
        ("gid_index", 256),
        ("pkey_index", 65536),
        ("service_level", 16),
        ("traffic_class", 256),
        ("mtu", 1500),
        ("timeout", 0),
        ("timeout", 32),
        ("retries", 8),
        ("srq_depth", 63),
        ("srq_depth", "many"),
    ],
)
def test_verbs_settings_out_of_range_are_refused(field, value):
    with pytest.raises(aiote.UsageError, match=f"{field}={value!r}"):
        aiote.VerbsConfig(**{field: value})


def test_verbs_settings_come_from_a_verbs_config_or_the_environment(monkeypatch):
    with pytest.raises(aiote.UsageError, match="verbs must be a VerbsConfig, got dict"):
        aiote.EngineConfig(verbs={"mtu": 1024})
    monkeypatch.setenv("AIOTE_VERBS_GID_INDEX", "3")
    assert aiote.VerbsConfig().gid_index == 3
    assert aiote.VerbsConfig(gid_index=1).gid_index == 1


def test_a_setting_of_none_counts_as_not_given(monkeypatch):
    """A program hands its own options on, which are None where nobody gave them."""
    monkeypatch.setenv("AIOTE_HOST", "127.0.0.5")
    monkeypatch.setenv("AIOTE_SPIN_US", "7")
    config = aiote.EngineConfig(host=None, port=None, spin_us=None, cluster_key=None, libfabric=None)
    assert (config.host, config.port, config.spin_us, config.cluster_key) == ("127.0.0.5", 0, 7, None)
    assert isinstance(config.libfabric, str)
