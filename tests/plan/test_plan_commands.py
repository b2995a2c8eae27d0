"""`aiote plan kvcache|moe|weights`: they print the plan, a picture is a picture, and wrong arguments are named."""

from __future__ import annotations

import importlib.util
import json
from typing import Any

import pytest

from aiote import cli
from aiote.errors import UsageError
from aiote.plan import KV_SHAPES, kv_shape, moe_shape, nics_of
from aiote.plan.kvcache import PUBLISHED_LAYER_MS, Computation, KvScenario
from aiote.testing import CONNECTX7_400G

pytestmark = pytest.mark.blocking_allowed("a command has a loop of its own")

KV = ("kvcache", "--model", "qwen3-235b", "--layers", "8", "--tokens", "1024")
MOE = ("moe", "--experts", "16", "--top-k", "2", "--hidden", "512", "--tokens", "16", "--node", "2", "--ranks", "4")


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = cli.main(["plan", *map(str, arguments)])
    return code, *capsys.readouterr()


def test_a_plan_of_a_cache_is_shown(capsys, tmp_path):
    picture = tmp_path / "kv.png"
    code, out, err = run(capsys, *KV, "--decode-tp", 2, "--rate", 2, "--plot", picture)
    assert code == 0, err
    text = " ".join(out.split())
    for words in (
        "KV cache of qwen3-235b, TP1 to TP2",
        "8 layers, 2048 bytes a token and layer (config.json of Qwen/Qwen3-235B-A22B",
        "2 x EFA 200G a rank, 364 Gbit/s together (arXiv 2510.27656",
        "published for Qwen3-235B, TP4, H200",
        "16.777 MB",
        "prefill 0, sends",
        "decode 1, gets",
        "pay off for the first token",
        "of the time at 2 prompts a second; full at",
    ):
        assert words in text, out
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_plan_of_a_cache_is_json(capsys):
    code, out, _ = run(capsys, *KV, "--json", "--tokens", 2048, "--layer-ms", "1,2", "--nics", "connectx-7")
    assert code == 0
    found = json.loads(out)
    assert [prompt["tokens"] for prompt in found["prompts"]] == [1024, 2048]
    first, second = found["prompts"]
    assert second["sent"] == {"0": 2 * first["sent"]["0"]} == {"0": 2048 * 2048 * 8}
    assert second["alone_ms"] == pytest.approx(8 * 2048 / 16384)
    assert second["first_token_ms"] == pytest.approx(second["alone_ms"] + second["added_ms"])
    assert list(found["by_nics"]) == ["1", "2", "4", "8"]
    assert str(found["nics_that_pay_off"]) in found["by_nics"]
    assert found["nics"]["model"]["name"] == "ConnectX-7 400G"


def test_a_plan_of_a_round_is_shown_and_is_json(capsys, tmp_path):
    picture = tmp_path / "moe.svg"
    code, out, err = run(capsys, *MOE, "--plot", picture)
    assert code == 0, err
    text = " ".join(out.split())
    for words in ("16 experts, 2 of a token, hidden 512 (the command line)", "dispatch 17 us, combine 13.8 us",
                  "calibrated on published cells", "bytes of a round, 4 ranks", "pay off"):  # fmt: skip
        assert words in text, out
    assert picture.read_text().lstrip().startswith("<?xml")
    code, out, _ = run(capsys, *MOE, "--ranks", 8, "--json", "--constant-us", "1,2", "--nics", "efa-100g")
    found = json.loads(out)
    assert code == 0
    assert [one["ranks"] for one in found["rounds"]] == [4, 8]
    assert found["rounds"][0]["constant_us"] == {"dispatch": 1, "combine": 2}
    assert found["rounds"][0]["constant_is_calibrated"] is False
    assert [len(row) for row in found["rounds"][0]["sent"]] == [4] * 4
    hottest = found["rounds"][0]["hottest_nic"]
    sides = (found["rounds"][0]["sent"], found["rounds"][0]["received"])
    assert hottest["bytes"] == max(size for side in sides for row in side for size in row)


def test_an_update_is_timed(capsys, tmp_path):
    layout = {"ranks": 2, "tensors": {"w": {"shape": [4096, 4096], "dtype": "BF16", "placements": ["shard(0)"]}}}
    for name in ("a.json", "b.json"):
        (tmp_path / name).write_text(json.dumps(layout))
    files = ("weights", "--sources", tmp_path / "a.json", "--targets", tmp_path / "b.json")
    code, out, err = run(capsys, *files, "--calls", "free", "--gbits", 8, "--plot", tmp_path / "w.png")
    assert code == 0, err
    assert "a trainer's calls cost nothing" in " ".join(out.split())
    assert (tmp_path / "w.png").read_bytes().startswith(b"\x89PNG")
    code, out, _ = run(capsys, *files, "--calls", "free", "--gbits", 8, "--json")
    found = json.loads(out)
    # 16 MiB of each rank to the other side's, at 1 byte in a nanosecond.
    assert found["limits"]["sending"]["ms"] == pytest.approx((1 << 24) / 1e6)
    assert found["update_ms"]["1"]["total"] == pytest.approx((1 << 24) / 1e6)
    assert found["update_ms"]["2"]["total"] == pytest.approx((1 << 23) / 1e6)
    code, out, _ = run(capsys, *files, "--json", "--nics", "efa-200g")
    assert json.loads(out)["update_ms"]["2"]["total"] > found["update_ms"]["2"]["total"] / 50


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("kvcache",), "give a model, or all of layers, kv-heads"),
        (("kvcache", "--model", "gpt-7"), "model='gpt-7': expected one of qwen3-235b"),
        ((*KV, "--layers", "9999"), "layers=9999: expected from 1 to 1024"),
        ((*KV, "--tokens", "0"), "tokens=0: expected from 1 to 1.04858e+06"),
        ((*KV, "--prefill-tp", "3"), "prefill-tp=3: expected a divisor or a multiple of the 4 key-value heads"),
        ((*KV, "--prefill-pp", "9"), "prefill-pp=9: expected from 1 to 8"),
        ((*KV, "--chunk", "1000"), "chunk=1000: expected a multiple of page-tokens=128"),
        ((*KV, "--nics", "token-ring"), "nics='token-ring': expected one of efa-100g, efa-200g"),
        ((*KV, "--nics-per-rank", "9"), "nics per rank=9: expected from 1 to 8"),
        ((*KV, "--layer-ms", "fast"), "layer-ms='fast': expected one or two numbers of milliseconds from 0"),
        ((*KV, "--host-us", "-1"), "host-us=-1: expected from 0 to 1e+06"),
        ((*KV, "--rate", "-1"), "rate=-1: expected from 0 to 1e+06"),
        ((*KV, "--rate", "nan"), "rate=nan: expected from 0 to 1e+06"),
        ((*KV, "--hold-s", "-1"), "hold-s=-1: expected from 0 to 1e+06"),
        ((*KV, "--nics", "efa-200g,"), "nics='efa-200g,': expected one of efa-100g"),
        ((*KV, "--nics", f"{__file__},no.json"), "there is no file no.json; write it with `aiote bench --json`"),
        ((*KV, "--nics", __file__), "is not a file of `aiote bench --json`: JSONDecodeError"),
        ((*KV, "--nics-per-rank", "-1"), "nics per rank=-1: expected from 1 to 8"),
        ((*KV, "--decode-tp", "6"), "decode-tp=6: expected a divisor or a multiple of the 4 key-value heads"),
        ((*KV, "--decode-pp", "0"), "decode-pp=0: expected from 1 to 8"),
        (("moe",), "give a model, or all of experts, top-k and hidden"),
        ((*MOE, "--ranks", "5"), "ranks=5: expected a multiple of node=2"),
        ((*MOE, "--ranks", "999"), "ranks=999: expected from 2 to 511"),
        ((*MOE, "--ranks", "200", "--how", "engines"), "ranks=200: expected from 2 to 128 with how=engines"),
        ((*MOE, "--node", "-1"), "node=-1: expected from 1 to 1"),
        ((*MOE, "--tokens", "-1"), "tokens=-1: expected from 1 to 4096"),
        ((*MOE, "--private", "-1"), "private"),
        ((*MOE, "--top-k", "17"), "top-k=17: expected from 1 to 16"),
        ((*MOE, "--top-k", "9"), "expected more ranks, or a smaller node"),
        ((*MOE, "--zipf", "9"), "zipf=9: expected from 0 to 4"),
        ((*MOE, "--constant-us", "5"), "constant-us='5': expected two numbers of microseconds"),
        ((*MOE, "--dtype", "float9"), "dtype='float9': expected one of"),
        (("weights", "--preset", "kimi-k2", "--nics", "x"), "nics='x': expected one of"),
        (("weights",), "give --preset NAME, or --sources FILE and --targets FILE"),
        (("weights", "--preset", "kimi-k2", "--sources", "a.toml"), "give either --preset or files"),
        (("weights", "--sources", "a.toml", "--targets", "b.toml"), "a.toml"),
        (("weights", "--preset", "llama"), "'qwen3-235b', 'kimi-k2'"),
        (("weights", "--preset", "kimi-k2", "--gbits", "-1"), "gbits=-1: expected 0.001 or more"),
        (("weights", "--preset", "kimi-k2", "--ranks-per-nic", "0"), "ranks-per-nic=0: expected 1 or more"),
    ],
)
def test_wrong_arguments_get_a_sentence(capsys, arguments, said):
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert said in " ".join(err.split())


def test_a_picture_needs_matplotlib(capsys, monkeypatch, tmp_path):
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else real(name))
    code, _, err = run(capsys, *KV, "--plot", tmp_path / "a.png")
    assert code == 2
    assert 'a plot needs matplotlib; install with: pip install "aiote[plot]"' in err


# NICs and shapes.


def records(*changes: dict[str, Any]) -> str:
    usual = {"contestant": "aiote", "provider": "verbs", "library": "", "size": 8, "runs": 3}
    return json.dumps({"format": 1, "records": [{**usual, **change} for change in changes]})


def test_nics_are_fitted_to_what_was_measured(tmp_path):
    file = tmp_path / "mine.json"
    file.write_text(
        records(
            {"op": "write", "size": 1 << 20, "value": {"median": 40.0}},
            {"op": "write", "size": 1 << 16, "value": {"median": 20.0}},
            {"op": "write", "contestant": "raw", "value": {"median": 99.0}},
            {"op": "latency", "value": {"median": 10.0}},
            {"op": "rate", "value": {"median": 2e6}},
        )
    )
    nics = nics_of(str(file), 2)
    assert nics.model.gbps == pytest.approx(40 * 2**30 * 8 / 1e9)
    assert (nics.model.operation_us, nics.model.latency_us, nics.per_rank) == (0.5, 4.5, 2)
    assert nics.source == f"measured, {file}"
    assert nics.as_one().gbps == pytest.approx(2 * nics.model.gbps)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[]", "is not a file of `aiote bench --json`"),
        ("{", "is not a file of `aiote bench --json`"),
        (records({"op": "write", "value": {"median": -1}}), "is not a file of `aiote bench --json`: ValueError"),
        (records({"op": "write", "value": {"median": 1}}), "needs records of `latency`"),
        (
            records(
                {"op": "write", "value": {"median": 1}}, {"op": "latency", "provider": "tcp", "value": {"median": 1}}
            ),
            "figures of 2 providers and libraries",
        ),
    ],
)
def test_a_file_that_is_no_measurement_is_refused(tmp_path, text, said):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(UsageError) as raised:
        nics_of(str(tmp_path / "a.json"))
    assert said in str(raised.value)


def test_several_files_are_put_together(tmp_path):
    (tmp_path / "write.json").write_text(records({"op": "write", "value": {"median": 2.0}}))
    (tmp_path / "latency.json").write_text(records({"op": "latency", "value": {"median": 8.0}}))
    nics = nics_of(f"{tmp_path}/write.json, {tmp_path}/latency.json")
    assert nics.model.gbps == pytest.approx(2 * 2**30 * 8 / 1e9)
    assert (nics.model.latency_us, nics.model.operation_us, nics.model.name) == (4.0, 0.0, "write")


def test_published_nics_are_those_of_a_gpu():
    assert nics_of("connectx-7").model is CONNECTX7_400G
    assert [nics_of(name).per_rank for name in ("efa-100g", "efa-200g", "efa-400g")] == [4, 2, 1]
    assert nics_of("efa-200g", 8).gbps == 8 * 182


def test_shapes_are_changed_by_what_is_given():
    assert KV_SHAPES["qwen3-235b"].token_bytes == 2048
    assert kv_shape("deepseek-v3").token_bytes == 1152
    assert kv_shape("deepseek-v3", heads=2, head_bytes=64).token_bytes == 256
    changed = kv_shape("qwen3-235b", heads=0, head_bytes=100)
    assert (changed.token_bytes, changed.fields) == (100, ("kv",))
    assert changed.source.endswith("changed by the command line")
    assert moe_shape("kimi-k2", top_k=4)[1:4] == (384, 4, 7168)


def test_the_published_computation_is_that_of_one_node():
    for tokens, alone in ((4096, 214), (16384, 929), (65536, 5681), (131072, 16735)):
        several = Computation.published(tokens).chunks(tokens, KvScenario.chunk)
        assert several[-1] == pytest.approx(PUBLISHED_LAYER_MS[tokens])
        assert 94 * sum(several) == pytest.approx(alone, rel=0.02)
    assert sum(Computation.published(1024).chunks(1024, 16384)) == pytest.approx(2.267 / 4)
