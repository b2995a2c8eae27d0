"""The command without a run: what it refuses, what it prints, and that a wrong token is an exit status."""

from __future__ import annotations

import importlib.util
import io
import json
import subprocess
import sys

import anyio.lowlevel
import pytest
from rich.console import Console

from aiote import cli
from aiote.cli import kvcache
from aiote.cli.report import Bars, difference
from aiote.demo import tokens
from aiote.demo.one_process import LocalResult
from aiote.demo.run import ChildReport, RequestTrace, RunFailed, RunResult
from aiote.errors import PeerError, UsageError


class Rail:
    name, provider, speed_mbps, library = "lo", "tcp", 1000, "libfabric 2.5.1"


def result(*answers: tuple[int, ...]) -> RunResult:
    traces = tuple(
        RequestTrace(n, (256, 65), asked_s=1.0 + n, first_s=1.5 + n, last_s=2.0 + n, pages=6, tokens=list(answer))
        for n, answer in enumerate(answers)
    )
    reports = {"prefill": ChildReport(0, 8, 7, 2**20, 1e-3), "decode": ChildReport(0, 8)}
    return RunResult(traces, reports, (Rail(),), {"router": 1, "prefill": 2, "decode": 3})


@pytest.fixture
def faked(monkeypatch):
    """Replace the run and its reference by what the test says; an exception is raised instead."""

    def fake(run_gives, reference_gives=()):
        async def run(settings, prompts, watch, *, kill_prefiller_after=None):
            await anyio.lowlevel.checkpoint()
            if isinstance(run_gives, BaseException):
                raise run_gives
            return run_gives

        async def reference(settings, prompts, each):
            await anyio.lowlevel.checkpoint()
            return [LocalResult(n, list(answer), 0, 0.25, 0.5 + n) for n, answer in enumerate(reference_gives)]

        monkeypatch.setattr(kvcache.runs, "run", run)
        monkeypatch.setattr(kvcache, "run_reference", reference)

    return fake


RUN = ["demo", "kvcache", "some text"]


def test_equal_tokens_are_success(faked, capsys):
    faked(result((65, 66), (67, 68)), ((65, 66), (67, 68)))
    assert cli.main([*RUN, "--requests", "2"]) == 0
    out, err = capsys.readouterr()
    assert "All 4 tokens equal" in out
    for wanted in ("500.0 ms disaggregated", "250.0 ms in one process", "12 of", "1048576 (1.0 MiB)", "0.98 (over 1.0"):
        assert wanted in out
    for wanted in ("libfabric 2.5.1", "lo (tcp)", "decoder 0, prefiller 0", "AB"):
        assert wanted in out
    assert err == ""


@pytest.mark.parametrize(
    ("answer", "says"),
    [((65, 67), "token 2 is 67, but 66 in one process"), ((65,), "token 2 is missing"), ((65, 66, 1), "token 3 is 1")],
)
def test_one_wrong_token_fails_the_run(faked, capsys, answer, says):
    faked(result((65, 66), answer), ((65, 66), (65, 66)))
    assert cli.main([*RUN, "--requests", "2"]) == 1
    out, err = capsys.readouterr()
    assert f"request 2: {says}" in err
    assert "equal those" not in out
    assert cli.main([*RUN, "--requests", "2", "--json"]) == 1
    shown = json.loads(capsys.readouterr().out)
    assert (shown["ok"], shown["tokens_equal"]) == (False, False)
    assert [request["tokens_equal"] for request in shown["requests"]] == [True, False]
    assert says in shown["error"]


def test_a_wrong_page_that_changed_no_token_fails_the_run(faked, capsys):
    run = result((65, 66))
    run.traces[0].checksum = 0xABC
    faked(run, ((65, 66),))
    assert cli.main([*RUN, "--requests", "1", "--json"]) == 1
    shown = json.loads(capsys.readouterr().out)
    assert (shown["ok"], shown["tokens_equal"], shown["cache_equal"]) == (False, True, False)
    assert "keys and values of the prompt are not (CRC-32 00000abc, 00000000" in shown["error"]


def test_json_is_one_object_and_nothing_else(faked, capsys):
    faked(result((65, 66)), ((65, 66),))
    assert cli.main([*RUN, "--requests", "1", "--json"]) == 0
    out, err = capsys.readouterr()
    shown = json.loads(out)
    assert err == ""
    assert shown["ok"] is True
    assert shown["ttft_p50_s"] == {"one_process": 0.25, "disaggregated": 0.5}
    assert shown["elapsed_s"] == {"one_process": 0.5, "disaggregated": 1.0}
    assert shown["transfer"]["gib_per_s"] == pytest.approx(2**20 / 1e-3 / 2**30)
    assert shown["requests"][0]["text"] == "AB"
    assert shown["rails"] == [{"name": "lo", "provider": "tcp", "speed_mbps": 1000, "library": "libfabric 2.5.1"}]


@pytest.mark.parametrize(
    ("error", "code", "details"),
    [
        (RunFailed("the prefiller (pid 7) died", {"pages_held": 0}), 1, {"pages_held": 0}),
        (ExceptionGroup("g", [PeerError("a:1", "refused"), PeerError("a:1", "refused")]), 1, {}),
        (UsageError("provider 'foo' is unknown"), 2, {}),
    ],
)
def test_an_error_that_ends_a_run_is_one_line(faked, capsys, error, code, details):
    faked(error)
    assert cli.main([*RUN, "--json"]) == code
    out, err = capsys.readouterr()
    shown = json.loads(out)
    assert shown["ok"] is False
    assert details.items() <= shown.items()
    assert err == f"aiote: {shown['error']}\n"


def test_an_unforeseen_error_is_not_hidden(faked):
    faked(ZeroDivisionError("a defect"))
    with pytest.raises(ZeroDivisionError):
        cli.main(RUN)


def test_an_interrupt_exits_with_130(faked, capsys):
    faked(KeyboardInterrupt())
    assert cli.main(RUN) == 130
    assert "aiote: interrupted" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--requests", "0"], "--requests"),
        (["--concurrency", "none"], "--concurrency"),
        (["--kill-prefiller-after", "2"], "--kill-prefiller-after"),
        (["--chunk-tokens", "100"], "--chunk-tokens 100 is not a whole number of pages of 16 tokens; try 112"),
        (["--prompt-file", "absent"], "--prompt-file absent: No such file"),
        (["text", "--prompt-file", "-"], "give one of them"),
        ([""], "the prompt is empty"),
        (["--weights", "absent.safetensors"], "absent.safetensors: no such file"),
        (["--weights", "x", "--seed", "1"], "--seed"),
        (["--frobnicate"], "--frobnicate"),
    ],
)
def test_bad_arguments_are_named(faked, capsys, arguments, says):
    faked(AssertionError("the run began"))
    assert cli.main(["demo", "kvcache", *arguments]) == 2
    assert says in " ".join(capsys.readouterr().err.replace("│", "").split())


@pytest.mark.parametrize("arguments", [["--help"], ["demo", "--help"], ["demo", "kvcache", "--help"], ["--version"]])
def test_help_and_version_are_printed(capsys, arguments):
    assert cli.main(arguments) == 0
    out, err = capsys.readouterr()
    assert "aiote" in out
    assert err == ""


def test_a_missing_extra_is_named(monkeypatch, capsys):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "rich" else find(name, *a))
    assert cli.main(["--help"]) == 2
    assert 'needs rich; install with: pip install "aiote[cli]"' in capsys.readouterr().err


def test_children_need_no_extra():
    code = "import sys, aiote.demo.child, aiote.demo.prefiller, aiote.demo.decoder; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert not {"typer", "rich"} & set(done.stdout.split())


def test_weights_are_overwritten_only_by_force(tmp_path, capsys):
    path = tmp_path / "w.safetensors"
    assert cli.main(["demo", "weights", str(path), "--layers", "1"]) == 0
    assert f"1 layers, {path.stat().st_size} bytes" in " ".join(capsys.readouterr().out.split())
    before = path.read_bytes()
    assert cli.main(["demo", "weights", str(path), "--layers", "1", "--seed", "1"]) == 1
    assert "--force" in capsys.readouterr().err
    assert path.read_bytes() == before
    assert cli.main(["demo", "weights", str(path), "--layers", "1", "--seed", "1", "--force"]) == 0
    assert path.read_bytes() != before


def test_the_first_difference_is_told():
    references = [LocalResult(0, [1, 2, 3], 0, 0.1, 0.2)]
    assert difference(result((1, 2, 3)), references) == ""
    assert "request 1: token 2 is 9, but 2" in difference(result((1, 9, 4)), references)


def test_bars_are_shown_on_terminals_alone():
    for terminal in (False, True):
        out = io.StringIO()
        with Bars(Console(file=out, force_terminal=terminal), 2) as bars:
            bars.started(10, 4)
            bars.pages(3)
            bars.token()
            bars.reference_started()
            bars.reference()
        assert bool(out.getvalue()) is terminal
        assert ("3/10" in out.getvalue()) is terminal


def test_text_that_would_move_the_cursor_is_not_printed(faked, capsys):
    faked(result((27, 91, 50, 74)), ((27, 91, 50, 74),))
    assert cli.main([*RUN, "--requests", "1"]) == 0
    assert "\x1b[2J" not in capsys.readouterr().out
    assert tokens.readable((27, 91)) == "\N{REPLACEMENT CHARACTER}["
