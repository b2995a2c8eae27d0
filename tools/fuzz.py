"""Fuzz what interprets bytes from outside, guided by coverage, with atheris: `make fuzz`.

Each target (`tests/support/fuzz/targets.py`) runs in a process of its own, in turn, for its share of the time, from the
corpus in `tests/malformed_bytes/corpus` and from what earlier runs found under `build/fuzz`. An input that breaks an
invariant is kept in `tests/malformed_bytes/crashes`, where every later test run meets it again; the exit status is
then 1.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
INPUTS = ROOT / "tests" / "malformed_bytes"
CORPUS, CRASHES = INPUTS / "corpus", INPUTS / "crashes"
FOUND = ROOT / "build" / "fuzz"
INPUT_S = 10
MEMORY_MB = 512

sys.path.insert(0, str(ROOT / "tests"))


def write_seeds() -> None:
    """Make the corpus anew from real frames."""
    from support.fuzz.seeds import seeds

    for target, inputs in seeds().items():
        folder = CORPUS / target
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.iterdir():
            old.unlink()
        for name, data in inputs.items():
            (folder / name).write_bytes(data)
        print(f"{folder.relative_to(ROOT)}: {len(inputs)} seeds")


def fuzz(target: str, options: list[str]) -> None:
    """Become a fuzzer of one target: libFuzzer ends the process."""
    import atheris

    with atheris.instrument_imports(include=["aiote.core", "aiote.kvcache", "aiote.service"]):
        from support.fuzz.targets import TARGETS
    atheris.Setup([target, *options], TARGETS[target])
    atheris.Fuzz()


def start(target: str, seconds: float, more: list[str]) -> int:
    """Fuzz one target in a process of its own; return its exit status."""
    found, crashes = FOUND / target, CRASHES / target
    for folder in (found, crashes):
        folder.mkdir(parents=True, exist_ok=True)
    print(f"\n--- {target}: {seconds:.0f} s, {len(list(found.iterdir()))} inputs of earlier runs", flush=True)
    options = [
        f"-max_total_time={seconds:.0f}",
        f"-artifact_prefix={crashes}/",
        f"-timeout={INPUT_S}",
        f"-rss_limit_mb={MEMORY_MB}",
        "-print_final_stats=1",
        "-verbosity=0",
        *more,
        str(found),
        str(CORPUS / target),
    ]
    status = subprocess.run([sys.executable, __file__, "--become", target, "--", *options]).returncode
    for folder in (crashes, CRASHES):
        if not any(folder.iterdir()):
            folder.rmdir()
    return status


def main() -> int:
    parser = argparse.ArgumentParser(description="Fuzz what interprets bytes from outside.")
    parser.add_argument("--seconds", type=float, default=60, help="for all targets together (default: 60)")
    parser.add_argument("--target", action="append", help="one target; may be repeated (default: all)")
    parser.add_argument("--seeds", action="store_true", help="make the seed corpus anew, and do nothing else")
    parser.add_argument("--become", help=argparse.SUPPRESS)
    parser.add_argument("libfuzzer", nargs="*", help="options of libFuzzer, behind --")
    arguments = parser.parse_args()
    if arguments.seeds:
        write_seeds()
        return 0
    if arguments.become:
        fuzz(arguments.become, arguments.libfuzzer)
    from support.fuzz.targets import SHARES

    targets = arguments.target or list(SHARES)
    if unknown := set(targets) - set(SHARES):
        parser.error(f"no target {', '.join(sorted(unknown))}; there are {', '.join(SHARES)}")
    share = arguments.seconds / sum(SHARES[target] for target in targets)
    failed = [name for name in targets if start(name, max(1.0, SHARES[name] * share), arguments.libfuzzer)]
    if failed:
        print(f"\nFAILED: {', '.join(failed)}; the inputs are in {CRASHES.relative_to(ROOT)}", flush=True)
    else:
        print(f"\nnothing found in {', '.join(targets)}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
