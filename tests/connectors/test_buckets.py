"""Tensors laid into buckets and taken out of them: every byte once, in order, and alike at every sender."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiote.connectors import buckets
from aiote.connectors.buckets import ALIGNMENT, BucketPiece, Joiner, Splitter, slots_of

BUCKET = 4 * ALIGNMENT
sizes = st.lists(st.one_of(st.integers(0, 3 * BUCKET), st.sampled_from([0, 1, BUCKET - 1, BUCKET, BUCKET + 1])))


@given(sizes)
def test_what_comes_out_is_what_went_in(sizes):
    splitter, joiner = Splitter(BUCKET), Joiner()
    contents = [np.random.default_rng(number).integers(0, 256, size, np.uint8) for number, size in enumerate(sizes)]
    filled: dict[int, tuple[np.ndarray, list[BucketPiece]]] = {}
    for number, content in enumerate(contents):
        for bucket, piece in splitter.split(str(number), "uint8", content.shape, content.nbytes):
            memory, pieces = filled.setdefault(bucket, (np.zeros(BUCKET, np.uint8), []))
            assert piece.offset % ALIGNMENT == 0
            assert not pieces or piece.offset >= pieces[-1].offset + pieces[-1].length
            memory[piece.offset : piece.offset + piece.length] = content[piece.start : piece.start + piece.length]
            pieces.append(piece)
    assert list(filled) == list(range(splitter.describe_end().buckets))
    out = []
    for memory, pieces in filled.values():
        for piece in pieces:
            assert piece.length == piece.nbytes or piece.nbytes > BUCKET, "split, although it fits"
            whole, copy = joiner.add(piece, memory)
            if copy is not None:
                copy[0][:] = copy[1]
            if whole is not None:
                out.append(whole.copy())
    assert joiner.unfinished_name == ""
    assert len(out) == len(contents)
    assert all(np.array_equal(one, other) for one, other in zip(out, contents, strict=True))


def test_a_bucket_has_no_more_pieces_than_a_message_describes(monkeypatch):
    monkeypatch.setattr(buckets, "MOST_PIECES", 3)
    splitter = Splitter(BUCKET)
    numbers = [number for index in range(7) for number, _ in splitter.split(str(index), "uint8", (0,), 0)]
    assert numbers == [0, 0, 0, 1, 1, 1, 2]


def test_the_digest_tells_tensors_apart():
    def digest(*tensors: tuple[str, str, tuple[int, ...]]) -> bytes:
        splitter = Splitter(BUCKET)
        for name, dtype, shape in tensors:
            list(splitter.split(name, dtype, shape, 4))
        return splitter.describe_end().digest

    a, b = ("a", "float32", (1,)), ("b", "float32", (1,))
    digests = [digest(), digest(a), digest(a, b), digest(b, a), digest(("a", "int32", (1,)), b)]
    assert len({*digests, digest(("a", "float32", (1, 1)), b)}) == 6
    assert digest(a, b) == digest(a, b)


@pytest.mark.parametrize(
    "pieces",
    [
        [BucketPiece("a", "uint8", (9,), 9, 4, 5, 0)],
        [BucketPiece("a", "uint8", (9,), 9, 0, 4, 0), BucketPiece("a", "uint8", (9,), 9, 5, 4, 0)],
        [BucketPiece("a", "uint8", (9,), 9, 0, 4, 0), BucketPiece("b", "uint8", (9,), 9, 4, 5, 0)],
        [BucketPiece("a", "uint8", (9,), 9, 0, 4, 0), BucketPiece("b", "uint8", (2,), 2, 0, 2, 0)],
        [BucketPiece("a", "uint8", (9,), 9, 0, 9, BUCKET - 4)],
    ],
    ids=["begins late", "a gap", "another tensor", "a whole one between", "outside"],
)
def test_pieces_that_do_not_fit_are_refused(pieces):
    joiner = Joiner()
    with pytest.raises(ValueError, match=r"[ab] (comes|arrived|leaves its bucket)"):
        for piece in pieces:
            joiner.add(piece, np.zeros(BUCKET, np.uint8))


@pytest.mark.parametrize("senders", [1, 2, 3, 8, 100])
@pytest.mark.parametrize("nbytes", [64, 1 << 20, 100 << 20, 2 << 30])
def test_slots_are_within_twice_the_bucket_size(nbytes, senders):
    slots, size = slots_of(nbytes, senders)
    assert slots % senders == 0
    assert 0 < size <= min(nbytes, buckets.LARGEST_BUCKET)
    assert size % ALIGNMENT == 0
    assert slots * size <= max(2 * nbytes, 2 * senders * buckets.SMALLEST_BUCKET)
