"""A byte-level tokenizer: a token below 256 is that byte; the next two mark the beginning and the end.

Every input has an encoding, and every encoding stands for one input, so that no text of a user fails here.
"""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["BEGIN", "END", "VOCABULARY", "decode", "encode", "readable"]

BEGIN = 256
END = 257
VOCABULARY = 258


def encode(text: bytes) -> list[int]:
    """Return the tokens of a text: the begin mark, then one token a byte."""
    return [BEGIN, *text]


def decode(tokens: Iterable[int]) -> bytes:
    """Return the bytes that the tokens stand for, without the marks.

    Raises ValueError if a token is not of this vocabulary.
    """
    out = bytearray()
    for token in tokens:
        if not 0 <= token < VOCABULARY:
            raise ValueError(f"token {token} is not in 0..{VOCABULARY - 1}")
        if token < BEGIN:
            out.append(token)
    return bytes(out)


def readable(tokens: Iterable[int]) -> str:
    """Return the tokens as text for people; invalid UTF-8 and control characters become a replacement mark."""
    text = decode(tokens).decode("utf-8", errors="replace")
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)
