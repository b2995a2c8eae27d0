"""Tokens: every input has one encoding, and text for people moves no cursor."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiote.demo import prompts, tokens
from aiote.demo.faults import DemoError


@given(st.binary(max_size=300))
def test_encoding_round_trips(text):
    encoded = tokens.encode(text)
    assert encoded[0] == tokens.BEGIN
    assert len(encoded) == len(text) + 1
    assert all(0 <= token < tokens.VOCABULARY for token in encoded)
    assert tokens.decode(encoded) == text
    assert tokens.decode([*encoded, tokens.END]) == text


@pytest.mark.parametrize("token", [-1, tokens.VOCABULARY, 1 << 40])
def test_a_foreign_token_is_named(token):
    with pytest.raises(ValueError, match=str(token)):
        tokens.decode([65, token])


@given(st.lists(st.integers(0, tokens.VOCABULARY - 1), max_size=100))
def test_readable_text_is_printable(sequence):
    assert all(c.isprintable() or c in "\n\t" for c in tokens.readable(sequence))


def test_readable_text_replaces_control_characters_alone():
    assert (
        tokens.readable(tokens.encode("ä line\n\tand \x1b[2J".encode())) == "ä line\n\tand \N{REPLACEMENT CHARACTER}[2J"
    )


@given(st.binary(min_size=1, max_size=200), st.integers(1, 40))
def test_varied_prompts_differ_in_their_first_page(prompt, count):
    varied = prompts.vary(prompt, count)
    assert len(varied) == count
    assert varied[0] == prompt
    assert all(
        sorted(other.partition(b". ")[2]) == sorted(prompt) and other.startswith(b"%d. " % number)
        for number, other in enumerate(varied[1:], start=2)
    )
    assert len(set(varied[1:])) == count - 1


def test_a_prompt_comes_from_text_or_a_file_and_not_from_both(tmp_path):
    file = tmp_path / "prompt"
    file.write_bytes(b"\xff raw bytes")
    assert prompts.read(None, str(file)) == b"\xff raw bytes"
    assert prompts.read("text", None) == b"text"
    assert len(prompts.read(None, None).split()) > 200
    with pytest.raises(DemoError, match="give one of them"):
        prompts.read("text", str(file))


def test_a_bad_prompt_is_refused_with_the_reason(tmp_path):
    with pytest.raises(DemoError, match="empty"):
        prompts.read("", None)
    with pytest.raises(DemoError, match=r"absent.*No such file"):
        prompts.read(None, str(tmp_path / "absent"))
    with pytest.raises(DemoError, match="directory"):
        prompts.read(None, str(tmp_path))
    long = tmp_path / "long"
    long.write_bytes(b"a" * (prompts.MOST_BYTES + 1))
    with pytest.raises(DemoError, match=str(prompts.MOST_BYTES)):
        prompts.read(None, str(long))
