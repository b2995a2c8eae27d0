"""The prompt of a run, and the variation of one text into several prompts."""

from __future__ import annotations

import sys
from importlib import resources
from pathlib import Path

from aiote.demo.faults import DemoError

__all__ = ["MOST_BYTES", "read", "vary"]

# Attention takes time and memory with the square of the length; numpy needs minutes beyond this.
MOST_BYTES = 65536


def read(text: str | None, file: str | None) -> bytes:
    """Return the prompt: the text, or the file's content ("-" is standard input), or the one that ships.

    Raises DemoError if both are given, the file cannot be read, or the prompt is empty or too long.
    """
    if text is not None and file is not None:
        raise DemoError("a prompt and --prompt-file were given; give one of them")
    if text is not None:
        prompt = text.encode("utf-8", errors="surrogateescape")
    elif file is None:
        prompt = resources.files("aiote.demo").joinpath("prompt.txt").read_bytes()
    else:
        try:
            prompt = sys.stdin.buffer.read(MOST_BYTES + 1) if file == "-" else _head(Path(file))
        except OSError as error:
            raise DemoError(f"--prompt-file {file}: {error.strerror}") from error
    if not prompt:
        raise DemoError("the prompt is empty; give at least one byte")
    if len(prompt) > MOST_BYTES:
        raise DemoError(f"the prompt is longer than {MOST_BYTES} bytes, which is the limit; shorten it")
    return prompt


def vary(prompt: bytes, count: int) -> list[bytes]:
    """Return `count` different prompts: the text itself, then rotations of it with a number in front.

    A number in front changes every later key and value; the rotation changes where page borders fall in the text.
    """
    out = [prompt]
    for number in range(2, count + 1):
        shift = (number - 1) * len(prompt) // count
        out.append(b"%d. " % number + prompt[shift:] + prompt[:shift])
    return out


def _head(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(MOST_BYTES + 1)
