"""Install the libraries that `make bench-peers` measures, each in an environment of its own, and list what there is.

usage: install_peers.py install [NAME...] [--folder .venv-peers]
       install_peers.py list [--job transfers|kvcache|service|weights|moe] [--folder .venv-peers]

An environment is stamped with what was asked of it once its library has been imported there; a second run starts no
pip. What cannot be had is reported at the end and does not hold up the others: `install` fails only if it has nothing.
`list` prints one JSON object for each way of using a peer: its name, the interpreter, the worker with its arguments,
and the providers that it can be compared over.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "tools"))

from environment import ROOT, exact

WORKERS = ROOT / "bench" / "peers"
FOLDER = ROOT / ".venv-peers"
STAMP = ".installed"

# NIXL's libfabric plugin is linked to the NVIDIA driver's library, and calls it for GPU memory alone. Where there is no
# driver, this takes its place and says so to whoever calls: 100 is CUDA_ERROR_NO_DEVICE.
DRIVER = "libcuda.so.1"
STAND_IN = """
int cuCtxSetCurrent(void *context) { return 100; }
int cuDeviceGetPCIBusId(char *id, int length, int device) { return 100; }
int cuPointerGetAttributes(unsigned count, void *attributes, void **data, unsigned long long pointer) { return 100; }
int cuGetErrorString(int error, const char **text) { *text = "no NVIDIA driver"; return 0; }
"""


@dataclass(frozen=True)
class Way:
    """One way of using a peer: what `list` shows."""

    name: str
    providers: tuple[str, ...]
    variant: str = ""


@dataclass(frozen=True)
class Peer:
    """One environment: what pip and the system must bring, and what tells that it works."""

    worker: str
    check: str
    ways: tuple[Way, ...]
    requirements: tuple[str, ...]
    alone: tuple[str, ...] = ()  # requirements without theirs: NIXL asks for torch and both CUDAs, and needs neither
    libraries: tuple[tuple[str, str], ...] = ()  # what is loaded from the system, and Debian's packages of it
    kvcache: str = ""  # the worker of the KV-cache service, where it has one
    service: str = ""  # the worker of the service of calls, where it has one
    weights: str = ""  # the worker of the updates of weights, where it has one
    moe: str = ""  # the worker of dispatch and combine, where it has one
    driver: bool = False  # is linked to the NVIDIA driver's library


BOTH = ("tcp", "shm")
JOBS = ("kvcache", "service", "weights", "moe")
NUMPY = "numpy>=1.26"
# torch for the CPU alone is a tenth of what PyPI has for Linux.
TORCH_INDEX = "--extra-index-url=https://download.pytorch.org/whl/cpu"
PEERS = {
    "nixl": Peer(
        "nixl_peer.py",
        "import nixl; nixl.nixl_agent('check')",
        (Way("nixl-ucx", BOTH, "ucx"), Way("nixl-ucx-copy", ("shm",), "ucx-copy")),
        (NUMPY,),
        ("nixl>=1.5.1", "nixl-cu12>=1.5.1"),
        kvcache="kvcache_nixl.py",
    ),
    # The plugin of NIXL 1.5 wants a libfabric newer than any on PyPI or in Debian; that of 1.4 takes the mpich wheel's.
    "nixl-libfabric": Peer(
        "nixl_peer.py",
        "import nixl; nixl.nixl_agent('check', nixl.nixl_agent_config(backends=[]))",
        (Way("nixl-libfabric", ("tcp",), "libfabric"),),
        (NUMPY, "mpich>=5.0", "nvidia-cuda-runtime-cu12>=12.6"),
        ("nixl==1.4.1", "nixl-cu12==1.4.1"),
        (("libhwloc.so.15", "libhwloc15"),),
        driver=True,
    ),
    "ucxx": Peer(
        "ucxx_peer.py",
        "import ucxx; from ucxx._lib import libucxx; libucxx.UCXWorker(libucxx.UCXContext())",
        (Way("ucxx-core", BOTH, "core"), Way("ucxx-asyncio", BOTH, "asyncio")),
        (NUMPY, "ucxx-cu12>=0.50"),
        kvcache="kvcache_ucxx.py",
    ),
    # The wheel for machines without CUDA: the other one wants the driver and the runtime to be imported at all.
    "mooncake": Peer(
        "mooncake_peer.py",
        "from mooncake.engine import TransferEngine",
        (Way("mooncake", ("tcp",)),),
        (NUMPY, "mooncake-transfer-engine-non-cuda>=0.3.13"),
        libraries=(("libibverbs.so.1", "libibverbs1"), ("libnuma.so.1", "libnuma1"), ("libcurl.so.4", "libcurl4")),
    ),
    "pyzmq": Peer(
        "pyzmq_peer.py",
        "import zmq, msgspec",
        (Way("pyzmq", BOTH),),
        (NUMPY, "pyzmq>=26.4", "msgspec>=0.21"),
        kvcache="kvcache_pyzmq.py",
        service="service_pyzmq.py",
    ),
    "sockets": Peer(
        "sockets_peer.py",
        "import uvloop, msgspec",
        (Way("sockets-uvloop", BOTH, "uvloop"), Way("sockets-asyncio", BOTH, "asyncio")),
        (NUMPY, "uvloop>=0.20", "msgspec>=0.21"),
        kvcache="kvcache_sockets.py",
        service="service_sockets.py",
    ),
    # These three move no bytes of their own: they take part in `make bench-service` alone.
    "grpc": Peer("", "import grpc.aio", (Way("grpc.aio", BOTH),), (NUMPY, "grpcio>=1.66"), service="service_grpc.py"),
    "http": Peer(
        "",
        "import fastapi, httpx, uvicorn",
        (Way("fastapi-httpx", BOTH),),
        (NUMPY, "fastapi>=0.115", "httpx>=0.27", "uvicorn>=0.32"),
        service="service_http.py",
    ),
    "ray": Peer(
        "",
        "import ray",
        (Way("ray", ("shm",)),),
        (NUMPY, "ray>=2.40"),
        service="service_ray.py",
        weights="weights_ray.py",
    ),
    # gloo is torch's; MPICH brings mpiexec. One environment, for both pack and sum by torch.
    "collectives": Peer(
        "",
        "import torch.distributed, mpi4py.MPI",
        (Way("collectives", BOTH),),
        (NUMPY, "mpich>=5.0", "mpi4py>=4.0", TORCH_INDEX, "torch==2.13.0+cpu"),
        moe="moe_torch.py",
    ),
}


class InstallError(Exception):
    """A peer cannot be had here; the text says why."""


def say(text: str) -> None:
    print(f"--- {text}", flush=True)


def run(*command: str | Path, env: dict[str, str] | None = None) -> None:
    """Run a command quietly; on failure raise with the end of what it said."""
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, text=True, env=env
    )
    if done.returncode:
        lines = "\n".join(line for line in done.stdout.splitlines()[-12:] if line.strip())
        raise InstallError(f"{' '.join(map(str, command))} ended with status {done.returncode}:\n{lines}")


def loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def missing_packages(names: list[str]) -> list[str]:
    wanted = {package for name in names for library, package in PEERS[name].libraries if not loads(library)}
    return sorted(wanted)


def install_packages(names: list[str]) -> None:
    """Install what Debian has of the system's libraries, if we may; what stays missing fails the peer's own check."""
    if not (packages := missing_packages(names)):
        return
    prefix = [] if os.geteuid() == 0 else ["sudo", "-n"]
    if not shutil.which("apt-get") or (prefix and not shutil.which("sudo")):
        print(
            f"these Debian packages are missing, and cannot be installed from here: {' '.join(packages)}",
            file=sys.stderr,
        )
        return
    say(f"installing the Debian packages that are missing: {' '.join(packages)}")
    get = [*prefix, "env", "DEBIAN_FRONTEND=noninteractive", "apt-get"]
    try:
        run(*get, "update", "-qq")
        run(*get, "install", "-qq", "-y", "--no-install-recommends", *packages)
    except InstallError as error:
        print(error, file=sys.stderr)


def stamp_of(peer: Peer, venv: Path) -> str:
    """Return what an environment was made for, and where: its scripts name it by its full path."""
    version = ".".join(map(str, sys.version_info[:2]))
    return "\n".join([version, str(venv), *peer.requirements, *peer.alone, peer.check])


def installed(name: str, folder: Path) -> bool:
    venv = folder / name
    stamp = venv / STAMP
    return stamp.exists() and stamp.read_text() == stamp_of(PEERS[name], venv)


def build_stand_in(venv: Path) -> None:
    if loads(DRIVER):
        return
    compiler = os.environ.get("CC", "cc")
    if not shutil.which(compiler):
        raise InstallError(f"a C compiler is needed to stand in for {DRIVER}")
    folder = venv / "lib" / "stand-ins"
    folder.mkdir(parents=True, exist_ok=True)
    source = folder / "driver.c"
    source.write_text(STAND_IN)
    run(compiler, "-shared", "-fPIC", f"-Wl,-soname,{DRIVER}", "-o", folder / DRIVER, source)


def install(name: str, folder: Path) -> None:
    """Make a peer's environment anew, and import its library there."""
    peer, venv = PEERS[name], folder / name
    say(f"installing {', '.join([*peer.alone, *peer.requirements])} into {venv}")
    run(sys.executable, "-m", "venv", "--clear", venv)
    python = venv / "bin" / "python"
    # a wheel or nothing: to build one of these from its source takes a tool chain that nobody has by chance
    pip = [str(python), "-m", "pip", "install", "--quiet", "--no-input", "--disable-pip-version-check"]
    pip.append("--only-binary=:all:")
    env = exact() if any("==" in each for each in (*peer.requirements, *peer.alone)) else None
    run(*pip, *peer.requirements, env=env)
    if peer.alone:
        run(*pip, "--no-deps", *peer.alone, env=env)
    if peer.driver:
        build_stand_in(venv)
    # NIXL's agent crashes in its destructor when the interpreter ends; that it was made is what counts
    run(python, "-c", f"{peer.check}\nimport os\nos._exit(0)")
    (venv / STAMP).write_text(stamp_of(peer, venv))


def install_all(names: list[str], folder: Path) -> int:
    wanted = [name for name in names if not installed(name, folder)]
    if wanted:
        install_packages(wanted)
    failed: dict[str, str] = {}
    for name in wanted:
        try:
            install(name, folder)
        except InstallError as error:
            failed[name] = str(error)
    for name, why in failed.items():
        print(f"\n*** PEER NOT INSTALLED, and so not measured: {name}\n{why}", file=sys.stderr)
    return int(len(failed) == len(names))


def ways_of(job: str = "transfers", folder: str | Path = "") -> Iterator[dict[str, Any]]:
    """Yield the ways of the peers that are installed and have a worker for a job; say which are missing."""
    environments = Path(folder or FOLDER).absolute()
    for name, peer in PEERS.items():
        worker = getattr(peer, job) if job in JOBS else peer.worker
        if not worker:
            continue
        if not installed(name, environments):
            print(f"not installed: {name} (python bench/install_peers.py install {name})", file=sys.stderr)
            continue
        # The service over sockets is for one loop, the quicker.
        for way in peer.ways[:1] if job == "service" else peer.ways:
            yield {
                "name": way.name,
                "python": str(environments / name / "bin" / "python"),
                "worker": str(WORKERS / worker),
                "args": ["--variant", way.variant] if way.variant else [],
                "providers": list(way.providers),
            }


def main() -> int:
    parser = argparse.ArgumentParser(description="Install the peers of the benchmark, or list what is installed.")
    commands = parser.add_subparsers(dest="command", required=True)
    for command in (commands.add_parser("install"), commands.add_parser("list")):
        command.add_argument("--folder", type=Path, default=FOLDER, help="of the environments")
    commands.choices["list"].add_argument("--job", choices=("transfers", *JOBS), default="transfers")
    commands.choices["install"].add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(PEERS)}; or all")
    arguments = parser.parse_args()
    folder = arguments.folder.absolute()
    if arguments.command == "list":
        for way in ways_of(arguments.job, folder):
            print(json.dumps(way))
        return 0
    if unknown := set(arguments.names) - set(PEERS):
        parser.error(f"no such peer: {', '.join(sorted(unknown))}; there are {', '.join(PEERS)}")
    return install_all(arguments.names or list(PEERS), folder)


if __name__ == "__main__":
    sys.exit(main())
