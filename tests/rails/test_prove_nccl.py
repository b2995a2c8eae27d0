"""The link's speed by nccl-tests in the report of `aiote prove`: their output is parsed, and the programs are started.

The outputs were printed on machines of other people (issues 7, 78, 131 and 214 of NVIDIA/nccl-tests); the names of
hosts are left out. These tests need no GPU: a shell script stands for a program.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from aiote.cli import prove_nccl
from aiote.cli.prove_run import Run, Subject, parts
from aiote.testing.contract import HostMemory

SENDRECV = """\
# nThread 1 nGpus 1 minBytes 256 maxBytes 1073741824 step: 2(factor) warmup iters: 5 iters: 20 agg iters: 1
#
# Using devices
#  Rank  0 Group  0 Pid 1478709 on          a device  0 [0x31] NVIDIA A40
#  Rank  1 Group  0 Pid 1171742 on          b device  0 [0x31] NVIDIA A40
#
#                                                              out-of-place                       in-place          
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)       
         256            64     float     sum      -1    34.24    0.01    0.01      0    33.65    0.01    0.01    N/A
        2048           512     float     sum      -1    31.58    0.06    0.06      0    31.33    0.07    0.07    N/A
        4096          1024     float     sum      -1    30.74    0.13    0.13      0    30.69    0.13    0.13    N/A
"""  # noqa: W291
ALLTOALL = """\
#                                                       out-of-place                       in-place          
#       size         count      type   redop     time   algbw   busbw  error     time   algbw   busbw  error
#        (B)    (elements)                       (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)  
   268435456       1048576     float           520935    0.52    0.51  0e+00   519562    0.52    0.51  1e+00
   536870912       2097152     float          1041974    0.52    0.51  0e+00  1041299    0.52    0.51  1e+00
# Out of bounds values : 0 OK
# Avg bus bandwidth    : 0.507636 
"""  # noqa: W291
LOG = """\
a:8756:8771 [0] NCCL INFO Failed to open libibverbs.so[.1]
a:8756:8771 [0] NCCL INFO NET/Socket : Using [0]eth0:192.0.2.1<0> [1]virbr0:192.0.2.2<0>
a:8756:8771 [0] NCCL INFO Using network Socket
"""


def test_the_bandwidth_of_each_size_is_read():
    assert prove_nccl.bandwidths(SENDRECV) == {256: 0.01, 2048: 0.06, 4096: 0.13}


def test_an_old_version_with_a_blank_column_is_read():
    assert prove_nccl.bandwidths(ALLTOALL) == {268435456: 0.51, 536870912: 0.51}


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ("", "no figures"),
        ("# nThread 1 nGpus 2\nTest NCCL failure common.cu:1005 'unhandled cuda error'\n", "no figures"),
        (f"{SENDRECV}# Out of bounds values : 248 FAILED\n", "found wrong bytes"),
    ],
)
def test_output_without_a_usable_figure_is_refused(said, why):
    with pytest.raises(prove_nccl.NcclError, match=why):
        prove_nccl.bandwidths(said)


def test_the_network_that_nccl_chose_is_read():
    assert (prove_nccl.network(LOG), prove_nccl.network("")) == ("Socket", "")


def installed(folder: Path, program: str, over: str = "", status: int = 0) -> None:
    """Put a program there that prints a row for 1 MiB, too, and has NCCL's log say which network it took."""
    row = f"{1 << 20:12} {1 << 18:13} float  sum  -1    55.02   19.06   19.06      0    54.80   19.13   19.13    N/A"
    path = folder / program
    log = f'echo "a:1:2 [0] NCCL INFO Using network {over}" > "$NCCL_DEBUG_FILE"' if over else ":"
    path.write_text(f"#!/bin/sh\n{log}\ncat <<'END'\n{SENDRECV}{row}\nEND\nenv > {folder}/env\nexit {status}\n")
    path.chmod(0o755)


def outcome(what: str, *, written: float = 0.0):
    run = Run(Subject(what, what, None, None, HostMemory()))
    run.written = {1 << 20: written} if written else {}
    return prove_nccl.link(run)


@pytest.fixture
def tools(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return tmp_path


def test_without_the_programs_nothing_is_measured(tools):
    found = outcome("cuda")
    assert (found.status, found.figures) == ("not run", {})
    assert "sendrecv_perf" in found.detail


def test_between_gpus_nccl_may_choose_its_way(tools):
    installed(tools, "sendrecv_perf")
    installed(tools, "alltoall_perf")
    found = outcome("cuda")
    assert found.status == "passed"
    assert found.figures["sendrecv_perf, 1048576 B, GB/s"] == found.figures["alltoall_perf, 1048576 B, GB/s"] == 19.06
    assert "NCCL_P2P_DISABLE" not in (tools / "env").read_text()


def test_over_efa_the_bytes_cross_the_nics_and_aiote_is_compared(tools):
    installed(tools, "sendrecv_perf", over="AWS Libfabric")
    found = outcome("efa", written=10.0)
    assert (found.status, found.detail) == ("passed", "sendrecv_perf over NCCL's network AWS Libfabric")
    assert found.figures["write of 1 MiB, aiote / sendrecv_perf"] == pytest.approx(10 * 1.073741824 / 19.06)
    assert {"NCCL_P2P_DISABLE=1", "NCCL_SHM_DISABLE=1"} <= set((tools / "env").read_text().splitlines())


def test_a_link_that_is_not_the_nics_is_refused(tools):
    installed(tools, "sendrecv_perf", over="Socket")
    found = outcome("efa", written=10.0)
    assert (found.status, found.figures) == ("not run", {})
    assert "'Socket', which does not cross these NICs" in found.detail


def test_a_program_that_fails_breaks_no_promise(tools):
    installed(tools, "sendrecv_perf", status=3)
    installed(tools, "alltoall_perf")
    found = outcome("cuda")
    assert found.status == "passed"
    assert "sendrecv_perf: ended with 3" in found.detail


def test_the_link_is_a_part_of_runs_over_a_device():
    for what, has in (("efa", True), ("verbs", True), ("cuda", True), ("socket", False)):
        run = Run(Subject(what, what, None, None, HostMemory()))
        assert (prove_nccl.NAME in [part.name for part in parts(run, None, bench=True, suites=False)]) == has
        apart = Run(replace(run.subject, place=("10.0.0.1", 1)))
        assert prove_nccl.link(apart).status == "not run"
