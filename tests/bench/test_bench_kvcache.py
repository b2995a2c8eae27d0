"""The benchmark of the KV-cache service: its arithmetic, its workload, and a whole run of it at a tiny size."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from aiote.bench.measure import RunPlan
from aiote.bench.order_statistics import Spread
from aiote.bench.sides import BenchError

sys.path.append(str(Path(__file__).parents[2] / "bench"))

import kvtable
from kvlatency import FirstToken, PagesBack, RoundTimes
from kvservice import Line, ServiceEntry, ServiceRun, Workload, best_of, do, measure_service, round_to_windows

ROOT = Path(__file__).parents[2]
PEERS = ROOT / "bench" / "peers"
SMALL = Workload(4096, 3, 2, 2)


class FakePair:
    """A pair that answers at once; `speed` is in GiB/s."""

    def __init__(self, name: str, speed: float, verified: bool = True) -> None:
        self.name = name
        self.library = f"{name} 1.0"
        self.speed = speed
        self.verified = verified
        self.lines: list[str] = []

    def run(self, line):
        self.lines.append(line)
        told = dict(word.split("=") for word in line.split()[1:])
        moved = int(told["count"]) * int(told["layers"]) * int(told["pages"]) * int(told["size"])
        answer = {"seconds": moved / self.speed / (1 << 30), "cpu": 0.001, "verified": self.verified}
        return answer | {"p50_us": 10.0, "p99_us": 20.0}, answer


def measured(*pairs: FakePair) -> list[Line]:
    return measure_service([ServiceEntry(pair.name, pair) for pair in pairs], "shm", SMALL, RunPlan(3, 0.001))


def test_a_workload_knows_its_bytes():
    workload = Workload(16384, 64, 4)
    assert workload.layer_bytes == 1 << 20
    assert workload.request_bytes == 16 << 20
    assert workload.arena == 64 << 20
    assert str(workload) == "64 x 16K"
    assert Workload(4096, 1).arena == 2 << 20  # whole huge pages


def test_every_line_has_bytes_of_its_own():
    first, second = (SMALL.line("service", 4) for _ in range(2))
    assert first.startswith("run op=service size=4096 pages=3 window=2 layers=2 count=4 seed=")
    assert first != second


@pytest.mark.parametrize(("count", "wanted"), [(0.2, 2), (3.1, 4), (9.0, 8), (10.9, 10)])
def test_requests_fill_the_window(count, wanted):
    assert round_to_windows(SMALL, count) == wanted


def test_a_run_says_its_rate_and_cpu_use():
    served = ServiceRun.of(
        Workload(1 << 20, 64, 1, 16), 2, {"seconds": 2, "p50_us": 5, "p99_us": 6, "cpu": 1}, {"cpu": 4}
    )
    assert (served.gib_s, served.cpu_decode, served.cpu_prefill) == (1.0, 0.5, 2.0)


def test_ours_are_compared_with_the_best_peer_of_the_line():
    ours, slow, fast = measured(FakePair("aiote-asyncio", 6.0), FakePair("slow", 1.0), FakePair("fast", 4.0))
    assert (ours.best, ours.ratio.median) == ("fast", pytest.approx(1.5))
    assert (slow.ratio, fast.ratio) == (None, None)
    assert fast.value.median == pytest.approx(4.0)
    assert ours.runs == 3


def test_the_first_run_of_each_is_the_checked_one():
    pair = FakePair("aiote", 1.0)
    measured(pair)
    assert "check=1" in pair.lines[0]
    assert not any("check=1" in line for line in pair.lines[1:])


def test_a_peer_that_fails_is_left_out_and_the_library_may_not():
    ours, wrong = measured(FakePair("aiote-uvloop", 2.0), FakePair("wrong", 9.0, verified=False))
    assert (ours.ratio, ours.best) == (None, "")
    assert "the data are wrong" in wrong.note
    assert wrong.runs == 0
    with pytest.raises(BenchError, match="the data are wrong"):
        measured(FakePair("aiote-uvloop", 2.0, verified=False))


def test_the_best_of_no_peers_is_none():
    assert best_of([]) is None


def test_wrong_data_name_the_side():
    with pytest.raises(BenchError, match="decode side"):
        do(FakePair("one", 1.0, verified=False), SMALL.line("service", 1))


def test_the_bound_of_the_first_token_is_what_computing_cannot_hide():
    one = RoundTimes(alone_us=80_000, together_us=81_500, trip_us=500, gib_s=2.0)
    assert one.added_us == 1500
    workload, layer = Workload(16384, 128), 1e6 / 1024
    assert one.bound_us(workload, 5000) == pytest.approx(500 + layer)
    assert one.bound_us(workload, 900) == pytest.approx(500 + layer + 15 * (layer - 900))  # the wire lags behind
    found = FirstToken.of("shm", "aiote", workload, 5000, False, [one, one])
    assert found.ratio.median == pytest.approx(1500 / one.bound_us(workload, 5000))
    assert found.computing == "asleep"


def test_tables_have_a_row_for_each_line_and_a_dash_for_what_is_missing():
    lines = measured(FakePair("aiote", 3.0), FakePair("peer", 2.0), FakePair("bad", 1.0, verified=False))
    table = kvtable.service(lines).splitlines()
    assert table[0] == "| pages, under way | aiote | peer | bad | best peer | aiote / best |"
    assert table[2] == "| shm, 3 x 4K, 2 | 3.00 | 2.00 | - | peer | 1.50 (1.50-1.50) |"
    assert "0.01 / 0.02" in kvtable.service_latency(lines)
    back = PagesBack(
        provider="tcp",
        contestant="aiote",
        size=65536,
        pages=8,
        prefiller="killed",
        count=3,
        p50_ms=1,
        p99_ms=2,
        max_ms=3,
    )
    assert "| tcp, aiote, 8 x 64K | killed | 3 | 1.00 | 2.00 | 3.00 |" in kvtable.pages_back([back])


@pytest.fixture
def service(monkeypatch):
    """The workload as the workers have it."""
    monkeypatch.syspath_prepend(str(PEERS))
    import common

    import kvcache

    yield lambda **more: kvcache.Cache(
        common.Arena(1 << 20), kvcache.ServiceTask("service", 4096, 3, 2, 2, 4, 7, **more)
    )
    for name in ("common", "kvcache"):
        sys.modules.pop(name)


def deliver(there, here, request) -> bool:
    """Move a request as a worker should, and return what the last layer's arrival said."""
    for layer in range(2):
        here.bytes[layer][request.pages] = there.bytes[layer][there.ours(request.number)]
        last = here.arrived(request)
    return last


def test_the_check_sees_whether_every_page_is_where_it_belongs(service):
    there, here = service(), service()
    there.fill()
    here.clear()
    while here.more:
        request = here.begin()
        assert deliver(there, here, request)
        here.end(request)
    assert here.verified()
    assert len(here.times) == 4
    here.bytes[1, request.pages[0], 100] ^= 1
    assert not here.verified()


def test_a_layer_that_counts_too_early_is_seen(service):
    there, here = service(), service(check=1)
    there.fill()
    here.clear()
    assert deliver(there, here, here.begin())
    with pytest.raises(ValueError, match="layer 0 of request 1 was counted before it was there"):
        here.arrived(here.begin())


def test_pages_are_scattered_on_both_sides_and_no_two_alike(service):
    there = service()
    there.fill()
    assert len({page.tobytes() for layer in there.bytes for page in layer}) == 12
    taken = there.begin().pages
    assert len(set(taken)) == 3
    assert sorted(np.concatenate([there.ours(0), there.ours(1)])) == list(range(6))


@pytest.mark.libfabric
@pytest.mark.one_library
@pytest.mark.blocking_allowed("the processes are the driver's")
def test_a_whole_run_beside_sockets_is_recorded(tmp_path):
    file, peers = tmp_path / "records.json", tmp_path / "peers.jsonl"
    worker = {"python": sys.executable, "worker": str(PEERS / "kvcache_sockets.py"), "args": ["--variant", "uvloop"]}
    peers.write_text(json.dumps({"name": "sockets", "providers": ["shm"], **worker}) + "\n")
    arguments = ["--provider", "shm", "--workloads", "16Kx4", "--windows", "2", "--layers", "3", "--runs", "2"]
    arguments += ["--seconds", "0.01", "--parts", "service,cancel", "--cancels", "5", "--deaths", "0"]
    tool = [sys.executable, str(ROOT / "bench" / "run.py"), "kvcache", *arguments, "--json", str(file)]
    tool += ["--with", str(peers), "--only", "aiote-uvloop,sockets"]
    done = subprocess.run(tool, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    told = json.loads(file.read_text())
    lines = {line["contestant"]: line for line in told["service"]}
    assert set(lines) == {"aiote-uvloop", "sockets"}
    for line in lines.values():
        assert line["runs"] == 2
        assert line["value"]["median"] > 0
    assert Spread(**lines["aiote-uvloop"]["ratio"]).median > 0
    assert [back["count"] for back in told["cancel"]] == [5]
    assert "| shm, 4 x 16K, 2 |" in done.stdout
