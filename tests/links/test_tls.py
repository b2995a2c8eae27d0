"""TLS on the control connection, with a certificate authority of the test's own."""

from __future__ import annotations

import contextlib
import re
import socket
import ssl
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import pytest

import aiote
from support.engines.opening import PATIENCE_S, each_provider, opened, until
from support.engines.raw_clients import Stranger, refusals

pytestmark = [pytest.mark.libfabric, pytest.mark.one_library]

NEVER_S = 1000.0
"""A limit that no test waits for: what ends sooner did not end by it."""


def openssl(*arguments: str) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True, stdin=subprocess.DEVNULL, timeout=60)


NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2")
EXPIRED = "-1"


def strict(context: ssl.SSLContext) -> ssl.SSLContext:
    """Have every Python demand of certificates what Python 3.13 and later do by themselves."""
    context.verify_flags |= ssl.VERIFY_X509_STRICT
    return context


@dataclass
class Authority:
    """A private CA in a folder."""

    folder: Path
    name: str

    def __post_init__(self) -> None:
        key, certificate = str(self.path("key")), str(self.path("pem"))
        may = ("-addext", "keyUsage=critical,keyCertSign,cRLSign")
        openssl("req", "-x509", *NEW_KEY, *may, "-keyout", key, "-out", certificate, "-subj", f"/CN={self.name}")

    def path(self, kind: str) -> Path:
        return self.folder / f"{self.name}.{kind}"

    def issue(self, host: str, days: str = "2") -> tuple[str, str]:
        """Return the files of a certificate for an IP address or a name, and of its key."""
        stem = self.folder / f"{self.name}-{host}-{days}"
        certificate, key, request, extra = (f"{stem}.{kind}" for kind in ("pem", "key", "req", "ext"))
        Path(extra).write_text(
            f"subjectAltName={'IP' if host[0].isdigit() else 'DNS'}:{host}\nauthorityKeyIdentifier=keyid\n"
        )
        openssl("req", *NEW_KEY, "-keyout", key, "-out", request, "-subj", "/CN=engine")
        signer = ("-CA", str(self.path("pem")), "-CAkey", str(self.path("key")), "-CAcreateserial")
        openssl("x509", "-req", "-in", request, *signer, "-days", days, "-extfile", extra, "-out", certificate)
        return certificate, key

    def client(self) -> ssl.SSLContext:
        """Return a context that trusts this authority and nobody else."""
        return strict(ssl.create_default_context(cafile=self.path("pem")))


def serving(files: tuple[str, str]) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(*files)
    return context


@dataclass
class Papers:
    """Two authorities and what the first one issued."""

    ours: Authority
    theirs: Authority
    here: tuple[str, str]
    elsewhere: tuple[str, str]
    named: tuple[str, str]
    expired: tuple[str, str]
    strangers: tuple[str, str]


@pytest.fixture(scope="module")
def papers(tmp_path_factory: pytest.TempPathFactory) -> Papers:
    folder = tmp_path_factory.mktemp("ca")
    ours = Authority(folder, "ours")
    theirs = Authority(folder, "theirs")
    return Papers(
        ours,
        theirs,
        here=ours.issue("127.0.0.1"),
        elsewhere=ours.issue("127.0.0.9"),
        named=ours.issue("engine.example.org"),
        expired=ours.issue("127.0.0.1", EXPIRED),
        strangers=theirs.issue("127.0.0.1"),
    )


async def refused(config: dict[str, Any], other: dict[str, Any]) -> tuple[str, str]:
    """Have an engine connect in vain to another one, at once; return its error and what the other told its listeners.

    The other one goes on serving those that come as they should.
    """
    told: list[aiote.Event] = []
    with anyio.fail_after(PATIENCE_S / 2):
        async with opened("tcp", connect_timeout=NEVER_S, **config) as left:
            async with opened("tcp", connect_timeout=NEVER_S, **other) as right:
                right.listen_events(told.append)
                with pytest.raises(aiote.PeerError) as caught:
                    await left.connect(right.address)
                await until(lambda: told)
                assert left.peers == right.peers == ()
    assert told[0].name == "connection.refused"
    return str(caught.value), str(told[0].details["reason"])


@pytest.mark.anyio
@each_provider
async def test_engines_of_one_authority_connect(provider, papers):
    config = {"ssl_server": serving(papers.here), "ssl_client": papers.ours.client(), "cluster_key": b"k" * 32}
    with anyio.fail_after(PATIENCE_S):
        async with opened(provider, host="127.0.0.1", **config) as left:
            async with opened(provider, host="127.0.0.1", **config) as right:
                await left.send(right.address, b"over TLS")
                assert (await right.recv()).data == b"over TLS"
                await right.aclose()
                # The goodbye passed through TLS as well.
                await until(lambda: not left.peers)


@pytest.fixture
def of_the_page(tmp_path: Path) -> dict[str, Any]:
    """The contexts that docs/security.md makes, of the certificates that its commands make."""
    page = (Path(__file__).parents[2] / "docs" / "security.md").read_text()
    ((_, commands), (_, program)) = re.findall(r"^```(sh|python)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    subprocess.run(["sh", "-eu", "-c", commands], cwd=tmp_path, check=True, capture_output=True, timeout=60)
    made: dict[str, Any] = {"ssl": ssl}
    with contextlib.chdir(tmp_path):
        exec(program, made)
    return {"ssl_server": made["ssl_server"], "ssl_client": strict(made["ssl_client"])}


async def test_every_python_accepts_what_the_page_makes(of_the_page):
    with anyio.fail_after(PATIENCE_S):
        async with opened("tcp", host="127.0.0.1", **of_the_page) as left:
            async with opened("tcp", host="127.0.0.1", **of_the_page) as right:
                await left.send(right.address, b"over TLS")
                assert (await right.recv()).data == b"over TLS"


async def test_the_wire_is_encrypted(papers):
    """What an engine sends to a TLS server begins with a TLS record, and nothing of the protocol shows."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        async with opened("tcp", ssl_client=papers.ours.client(), connect_timeout=NEVER_S) as engine:
            async with anyio.create_task_group() as group:

                async def connect() -> None:
                    with pytest.raises(aiote.PeerError, match="TLS handshake with it failed: it hung up"):
                        await engine.connect(f"127.0.0.1:{server.getsockname()[1]}")

                group.start_soon(connect)
                await anyio.wait_readable(server)
                stream, _ = server.accept()
                stream.setblocking(False)
                with stream:
                    await anyio.wait_readable(stream)
                    data = stream.recv(65536)
    assert data[:2] == b"\x16\x03"
    assert engine.address.identity not in data


async def test_silent_connections_beyond_the_limit_make_room_for_an_engine(papers):
    """Those that never begin their TLS handshake count, too: the oldest make room, and a real engine gets through."""
    config = {"ssl_server": serving(papers.here), "ssl_client": papers.ours.client(), "heartbeat_timeout": NEVER_S}
    with anyio.fail_after(PATIENCE_S), contextlib.ExitStack() as stack:
        async with opened("socket", **config) as left, opened("socket", **config) as right:
            reasons = refusals(right)
            for _ in range(300):
                one = Stranger()
                stack.enter_context(one.socket)
                await one.dial(right.address)
            await left.send(right.address, b"past them all")
            assert (await right.recv()).data == b"past them all"
            await until(lambda: len(reasons) >= 44)
            assert set(reasons) == {"too many connections that have not proven themselves"}


async def test_an_unknown_authority_is_refused(papers):
    error, told = await refused({"ssl_client": papers.theirs.client()}, {"ssl_server": serving(papers.here)})
    assert "certificate verify failed" in error
    assert "TLS" in told


@pytest.mark.parametrize(
    ("which", "complaint"),
    [
        ("elsewhere", "IP address mismatch"),
        ("named", "IP address mismatch"),
        ("expired", "certificate has expired"),
        ("strangers", "certificate verify failed"),
    ],
)
async def test_a_wrong_certificate_is_refused(papers, which, complaint):
    """Of another address, of a name, no longer valid, of another authority."""
    server = serving(getattr(papers, which))
    error, told = await refused({"ssl_client": papers.ours.client()}, {"ssl_server": server})
    assert complaint in error
    assert "TLS" in told


async def test_a_key_counts_under_tls_as_well(papers):
    config = {"ssl_server": serving(papers.here), "ssl_client": papers.ours.client(), "host": "127.0.0.1"}
    left, right = ({**config, "cluster_key": key * 32} for key in (b"k", b"l"))
    for said in await refused(left, right):
        assert "cluster keys differ" in said


async def test_a_client_without_tls_is_refused(papers):
    error, told = await refused({}, {"ssl_server": serving(papers.here)})
    assert "TLS" in error
    assert "TLS" in told


async def test_a_server_without_tls_is_refused(papers):
    error, told = await refused({"ssl_client": papers.ours.client()}, {})
    assert "TLS" in error
    assert "TLS" in told


@pytest.mark.parametrize("shown", ["a good one", "none", "a stranger's", "one that has expired"])
async def test_only_a_client_with_a_good_certificate_connects(papers, shown):
    server = serving(papers.here)
    server.verify_mode = ssl.CERT_REQUIRED
    server.load_verify_locations(papers.ours.path("pem"))
    client = papers.ours.client()
    if shown == "a good one":
        client.load_cert_chain(*papers.here)
        async with opened("tcp", ssl_client=client) as left, opened("tcp", ssl_server=server) as right:
            await left.connect(right.address)
        return
    if shown == "a stranger's":
        client.load_cert_chain(*papers.strangers)
    if shown == "one that has expired":
        client.load_cert_chain(*papers.expired)
    error, told = await refused({"ssl_client": client}, {"ssl_server": server})
    assert "TLS" in error
    assert "certificate" in told
