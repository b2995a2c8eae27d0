"""`aiote demo moe` as people run it: real processes, a real kill, and every bit compared."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from aiote import cli
from aiote.demo.moe_run import RankState, difference

PATIENCE_S = 60.0  # a guard against hangs only
DEMO = [sys.executable, "-P", "-W", "error", "-m", "aiote", "demo", "moe"]


def test_a_rank_is_killed_and_replaced_and_all_bits_are_those_of_one_process():
    done = subprocess.run([*DEMO, "--tokens", "8", "--layers", "2", "--kill", "1"], capture_output=True, timeout=100)
    assert (done.returncode, done.stderr) == (0, b""), done
    opened, whole, killed, masked, *without, replaced, again = done.stdout.decode().splitlines()
    equal = "tokens and all bits of their logits equal those of one process"
    assert opened == "4 ranks are open, each with 4 of 16 experts"
    assert whole == f"four ranks: 32 {equal}"
    pid = re.fullmatch(r"rank 1 \(pid (\d+)\) was killed \(SIGKILL\) during step 4", killed)[1]
    assert re.fullmatch(rf"three ranks: (27|28) {equal} without the experts of rank 1", masked)
    assert [line.partition(" from step ")[0] for line in without] == [f"  rank {n}: without rank 1" for n in (0, 2, 3)]
    assert all(re.search(r" from step [45], layer [12] on; ", line) for line in without)
    successor = re.fullmatch(r"rank 1 is another process now, pid (\d+); the group is in epoch 2", replaced)[1]
    assert successor != pid
    assert again == f"four ranks again: 32 {equal}"


def test_an_interrupt_leaves_no_process_and_no_traceback():
    run = subprocess.Popen([*DEMO, "--tokens", "256", "--layers", "1"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    children = Path(f"/proc/{run.pid}/task/{run.pid}/children")
    assert run.stdout.readline()
    pids = [int(pid) for pid in children.read_text().split()]
    assert len(pids) == 5
    run.send_signal(signal.SIGINT)
    _, said = run.communicate(timeout=PATIENCE_S)
    assert (run.returncode, said) == (130, b"aiote: interrupted\n")
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--tokens", "7"], "'--tokens'"),
        (["--kill", "4"], "'--kill'"),
        (["--layers", "none"], "'--layers'"),
        (["--provider", "nope"], "aiote: provider='nope': "),
        (["a text"], "(a text)"),
    ],
)
def test_bad_arguments_are_named(capsys, arguments, says):
    assert cli.main(["demo", "moe", *arguments]) == 2
    assert says in " ".join(capsys.readouterr().err.replace("│", "").split())


def test_one_wrong_bit_is_found():
    texts = [[(65, 1), (66, 2)], [(67, 3), (68, 4)]]
    ranks = [RankState(number, None, tokens=list(text)) for number, text in enumerate(texts)]
    assert difference(ranks, texts) == ""
    ranks[1].tokens.pop()
    assert difference(ranks, texts) == "", "it was killed"
    ranks[1].tokens[0] = (67, 2)
    assert difference(ranks, texts) == "token 1 of rank 1 is 67 (logits 00000002), but 67 (00000003)"
