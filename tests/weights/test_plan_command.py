"""`aiote plan weights`: the numbers are the plan's, files are read as they say, and a wrong one is named."""

from __future__ import annotations

import functools
import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from aiote import cli
from aiote.cli import published_models
from aiote.cli.layoutfile import read_layout, read_recipe
from aiote.cli.plan import picture, summary_of
from aiote.errors import UsageError
from aiote.weights import (
    Layout,
    Mesh,
    Recipe,
    Replicate,
    Shard,
    StridedShard,
    cat,
    packed,
    plan_update,
    quantized,
    source,
    stack,
)
from support.machine import LONG
from support.weights import published_plans
from support.weights.published_plans import LAYERS

TRAINERS = """
[[group]]
mesh = [[0, 1], [2, 3]]
[group.tensors]
"l.{i=0..1}.q" = {shape = [256, 64], dtype = "BF16", placements = ["replicate", "shard(0)"]}
"l.{i=0..1}.k" = {shape = [64, 64], dtype = "BF16", placements = ["strided(0, 2)", "shard(0)"]}
"rotary" = {shape = [8], dtype = "F32"}
[[group]]
ranks = 4
[group.tensors]
"e.{e=0..3}" = {shape = [96, 64], dtype = "BF16", placements = ["shard(0)"]}
"""
INFERENCE = {
    "ranks": 2,
    "tensors": {
        "l.{i=0..1}.qk": {"shape": [320, 64], "dtype": "BF16", "placements": ["packed(0, 256/4, 64/1)"]},
        "experts": {"shape": [4, 64, 128], "dtype": "F8_E4M3", "placements": ["shard(0)"]},
        "scales": {"shape": [4, 1, 1], "dtype": "F32", "placements": ["shard(0)"]},
    },
}
RECIPE = """
unused = ["rotary"]
[targets]
"l.{i=0..1}.qk" = {cat = ["l.{i}.q", "l.{i}.k"]}
[targets.experts]
stack = [{source = "e.{e=0..3}", transpose = true, pad = {dim = 1, to = 128}}]
quantized = {scale = "scales"}
"""


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    found = {"sources": tmp_path / "a.toml", "targets": tmp_path / "b.json", "recipe": tmp_path / "r.toml"}
    found["sources"].write_text(TRAINERS)
    found["targets"].write_text(json.dumps(INFERENCE))
    found["recipe"].write_text(RECIPE)
    return found


def made_by_hand() -> tuple[Layout, Layout, Recipe]:
    mesh, four, two = Mesh.of([[0, 1], [2, 3]]), Mesh.of(range(4)), Mesh.of(range(2))
    sources = Layout.merge(
        [
            Layout.over(
                mesh,
                {
                    "l.0.q": ((256, 64), "BF16", (Replicate(), Shard(0))),
                    "l.1.q": ((256, 64), "BF16", (Replicate(), Shard(0))),
                    "l.0.k": ((64, 64), "BF16", (StridedShard(0, 2), Shard(0))),
                    "l.1.k": ((64, 64), "BF16", (StridedShard(0, 2), Shard(0))),
                    "rotary": ((8,), "F32", (Replicate(), Replicate())),
                },
            ),
            Layout.over(four, {f"e.{e}": ((96, 64), "BF16", Shard(0)) for e in range(4)}),
        ]
    )
    fused = packed(0, 2, (256, 4), (64, 1))
    targets = Layout.over(
        two,
        {
            "l.0.qk": ((320, 64), "BF16", fused),
            "l.1.qk": ((320, 64), "BF16", fused),
            "experts": ((4, 64, 128), "F8_E4M3", Shard(0)),
            "scales": ((4, 1, 1), "F32", Shard(0)),
        },
    )
    experts = stack(*(source(f"e.{e}").transpose().pad(1, to=128) for e in range(4)))
    rules: dict[str, Any] = {f"l.{i}.qk": cat(f"l.{i}.q", f"l.{i}.k") for i in range(2)}
    return sources, targets, Recipe({**rules, "experts": quantized(experts, scale="scales")}, unused=("rotary",))


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = cli.main(["plan", "weights", *map(str, arguments)])
    out, err = capsys.readouterr()
    return code, out, err


def options(files: dict[str, Path]) -> list[object]:
    return [word for name, path in files.items() for word in (f"--{name}", path)]


@pytest.mark.parametrize("gather", ["auto", "always"])
def test_files_make_the_plan_that_they_say(files, capsys, gather):
    plan = plan_update(*made_by_hand(), gather=gather)
    code, out, err = run(capsys, *options(files), "--json", "--gather", gather)
    assert (code, err) == (0, "")
    shown = json.loads(out)
    assert shown["digest"] == plan.digest.hex()
    for name in ("sent", "received", "gathered"):
        assert {int(rank): size for rank, size in shown[name].items()} == getattr(plan.traffic, name)
    assert max(plan.traffic.sent.values()) >= shown["bound"] > 0
    assert sum(one["bytes"] for one in shown["gathers"]) == sum(plan.traffic.gathered.values())
    assert {one["tensors"] for one in shown["gathers"]} >= {"experts"}


def test_a_layout_that_a_program_described_is_read(tmp_path):
    sources = made_by_hand()[0]
    (tmp_path / "a.json").write_text(json.dumps(sources.describe()))
    assert read_layout(tmp_path / "a.json").digest() == sources.digest()


def test_a_person_sees_tables_bars_and_reasons(files, capsys):
    code, out, _ = run(capsys, *options(files))
    assert code == 0
    text = " ".join(out.split())
    for words in (
        "weight update: a.toml to b.json",
        "4 ranks, 9 tensors",
        "load bound",
        "the least that the busiest source could send",
        "of it",
        "hottest NIC",
        "at its speed",
        "sent by source ranks",
        "received by target ranks",
        "blocks of 128x128 cross edges between",
        "e.* has 24x64 on a rank",
    ):
        assert words in text, out


@pytest.mark.parametrize(("ranks_per_nic", "nic", "ranks"), [(1, "target 0", "0"), (2, "target 0", "0-1")])
def test_the_hottest_nic_is_that_of_the_ranks_that_share_it(ranks_per_nic, nic, ranks):
    sources = Layout.over(range(4), {"w": ((64, 64), "F32", Shard(0))})
    targets = Layout.over(range(2), {"w": ((64, 64), "F32", Replicate())})
    summary = summary_of("w", plan_update(sources, targets), ranks_per_nic, 8.0)
    assert (summary.hottest_nic, summary.hottest_ranks) == (nic, ranks)
    assert max(summary.by_nic[nic].values()) == summary.hottest_bytes
    assert sum(ways["in"] for name, ways in summary.by_nic.items() if name.startswith("target")) == sum(
        summary.received.values()
    )
    assert summary.hottest_bytes == 64 * 64 * 4 * ranks_per_nic
    assert summary.seconds == pytest.approx(summary.hottest_bytes / 1e9)
    assert summary.bound == 64 * 64 * 4 * 2 / 4


def test_what_ranks_are_read_for_others_counts_for_their_nics():
    """One rank makes a block of which four have a fourth each: three of them send it, and one receives."""
    sources = Layout.over(range(4), {"w": ((128, 128), "BF16", Shard(0))})
    shapes = {"w": ((128, 128), "F8_E4M3", Replicate()), "s": ((1, 1), "F32", Replicate())}
    plan = plan_update(sources, Layout.over([0], shapes), Recipe({"w": quantized("w", scale="s")}))
    summary = summary_of("w", plan)
    assert summary.hottest_bytes == 3 * 32 * 128 * 2 > 128 * 128 + 4
    (gathering,) = summary.gathers
    assert (gathering.units, gathering.ranks, gathering.bytes) == (1, 4, 3 * 32 * 128 * 2)
    assert gathering.why == "blocks of 128x128 cross edges between ranks: w has 32x128 on a rank"


def test_sizes_that_look_equal_share_a_bar_and_many_are_left_out():
    sources = Layout.over(range(40), {f"w{i}": ((1 + i,), "F64", Shard(0)) for i in range(40)})
    out = io.StringIO()
    picture(summary_of("many", plan_update(sources, sources)), Console(file=out, width=100))
    text = out.getvalue()
    assert "more sizes, which --json lists" in text
    assert "Nothing is gathered" in text
    assert all(len(line) <= 100 for line in text.splitlines())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "give --preset NAME, or --sources FILE"),
        (["--preset", "kimi-k2", "--sources", "x"], "has layouts and a recipe of its own"),
        (["--sources", "absent.toml", "--targets", "absent.toml"], "absent.toml: No such file"),
        (["--preset", "gpt"], "--preset"),
        (["--ranks-per-nic", "0"], "ranks-per-nic=0: expected 1 or more"),
    ],
)
def test_wrong_arguments_are_named(capsys, arguments, words):
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert words in " ".join(err.replace("│", "").split())


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("ranks = ", "this is not TOML"),
        ("group = 1", "group: expected a list of tables"),
        ("rank = 4", "rank is unknown, expected ranks"),
        ("[tensors]", "give either ranks = N"),
        ("mesh = [0, 0]\ntensors = {}", "the mesh is wrong"),
        ("ranks = 2\ntensors = 1", "tensors is 1, expected a table"),
        ("ranks = 2\ntensors.w = 1", "w: it is 1, expected {shape"),
        ("ranks = 2\ntensors.w = {dtype = 'F32'}", "w: shape is missing"),
        ("ranks = 2\ntensors.w = {shape = 'a', dtype = 'F32'}", "w: shape is 'a'"),
        ("ranks = 2\ntensors.w = {shape = [2], dtype = 'F5'}", "w: dtype is 'F5'"),
        (
            "ranks = 2\ntensors.w = {shape = [2], dtype = 'F32', placements = ['shard']}",
            "w: placement 'shard': expected replicate",
        ),
        ("ranks = 2\ntensors.w = {shape = [2], dtype = 'F32', placements = ['packed(0, 3/2)']}", "w: a part of 3"),
        ("ranks = 2\ntensors.w = {shape = [2], dtype = 'F32', placements = []}", "w: 0 placements for a mesh of 1"),
        ("ranks = 2\ntensors.w = {shape = [2], dtype = 'F32', sharding = 1}", "w: sharding is unknown"),
        ("ranks = 2\ntensors.'w{i=3..1}' = {shape = [2], dtype = 'F32'}", "{i=3..1} is not a range"),
    ],
)
def test_a_layout_that_is_wrong_is_refused_by_file_and_name(tmp_path, text, words):
    path = tmp_path / "layout.toml"
    path.write_text(text)
    with pytest.raises(UsageError) as caught:
        read_layout(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("target = {}", "target is unknown, expected targets, unused, untouched"),
        ("unused = 'x'", "unused is 'x', expected a list of texts"),
        ("targets.x = 1", "x: 1 is not a rule"),
        ("targets.x = {cat = ['a'], source = 'b'}", "x: expected one of source, cat and stack"),
        ("targets.x = {cat = 'a'}", "x: cat is 'a', expected a list"),
        ("targets.x = {source = 'a', quantized = 1}", "x: quantized is 1"),
        ("targets.x = {source = 'a', quantized = {scale = 's', blocks = 1}}", "x: blocks is unknown"),
        ("targets.x = {source = 'a', pad = {dims = 1}}", "x: pad is {'dims': 1}"),
        ("targets.x = {source = 'a', cast = 'F5'}", "x: dtype is 'F5'"),
        ("targets.x = {source = 'a', twist = 1}", "x: twist is unknown"),
    ],
)
def test_a_recipe_that_is_wrong_is_refused_by_file_and_name(tmp_path, text, words):
    path = tmp_path / "recipe.toml"
    path.write_text(text)
    with pytest.raises(UsageError) as caught:
        read_recipe(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert words in str(caught.value)


def test_a_file_that_is_no_json_is_named(tmp_path):
    (tmp_path / "a.json").write_text("{")
    with pytest.raises(UsageError, match=r"a\.json: this is not JSON"):
        read_layout(tmp_path / "a.json")
    (tmp_path / "a.json").write_text("[]")
    with pytest.raises(UsageError, match=r"a\.json: expected a table, got list"):
        read_layout(tmp_path / "a.json")


def test_published_updates_are_there(capsys, monkeypatch):
    received = max(published_plans.plan("qwen3_235b", "auto").traffic.received.values())
    if not LONG:
        model = functools.partial(published_models.qwen3_235b, layers=LAYERS["qwen3_235b"][1])
        monkeypatch.setattr(published_models, "qwen3_235b", model)
    code, out, err = run(capsys, "--preset", "qwen3-235b")
    assert code == 0
    assert "11.476 GB" in out
    assert f"{received / 1e9:.3f} GB" in out
    assert "takes some seconds" in err
