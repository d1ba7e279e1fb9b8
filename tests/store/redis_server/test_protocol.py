"""The parser of requests: what redis-py wrote, split anywhere, is read as it was; hostile bytes are refused."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.connection import Connection

from skymemory.store.redis_server.protocol import (
    LARGE_BYTES,
    MAX_LINE_BYTES,
    Framed,
    LargeArgument,
    NeedData,
    ProtocolError,
    RequestParser,
    Word,
    error,
)

LIMIT = 1 << 20


def read(data: bytes, cuts: list[int]) -> list[list[Word]]:
    """All requests in ``data``, which arrives in the pieces that ``cuts`` give."""
    parser = RequestParser(LIMIT)
    requests: list[list[Word]] = []
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    pieces = [data[a:b] for a, b in pairwise(edges)]
    while True:
        step = parser.next()
        if isinstance(step, NeedData):
            if not pieces:
                assert parser.idle
                return requests
            parser.feed(pieces.pop(0))
        elif isinstance(step, LargeArgument):
            missing = step.size_bytes - len(step.head)
            rest = b"".join(pieces)
            pieces = [rest[missing:]]
            parser.deliver(step.head + rest[:missing])
        else:
            requests.append(step)


@given(
    st.lists(st.lists(st.binary(max_size=40), min_size=1, max_size=5), max_size=5),
    st.lists(st.integers(0, 1 << 16), max_size=8),
)
def test_it_reads_what_redis_py_writes(requests: list[list[bytes]], cuts: list[int]) -> None:
    requests = [[b"VERB", *words] for words in requests]  # redis-py splits a first word at its spaces
    data = b"".join(b"".join(Connection().pack_command(*words)) for words in requests)
    assert read(data, cuts) == requests


@pytest.mark.parametrize("size", [LARGE_BYTES - 1, LARGE_BYTES, LARGE_BYTES + 1, 200_000])
@pytest.mark.parametrize("cuts", [[], [3], [20], [35], [40_000], list(range(60)), [LARGE_BYTES + 34, LARGE_BYTES + 35]])
def test_large_values_are_read_in_place(size: int, cuts: list[int]) -> None:
    value = random.Random(size).randbytes(size)
    data = b"".join(Connection().pack_command(b"SET", b"key", value, b"EX", b"30"))
    data += b"".join(Connection().pack_command(b"MSET", b"a", value, b"b", value)) + b"PING\r\n"
    assert read(data, cuts) == [
        [b"SET", b"key", value, b"EX", b"30"],
        [b"MSET", b"a", value, b"b", value],
        [b"PING"],
    ]


def test_inline_commands() -> None:
    assert read(b"PING\r\n\r\n  get  k \nQUIT\r\n", [4]) == [[b"PING"], [], [b"get", b"k"], [b"QUIT"]]


@pytest.mark.parametrize(
    "data",
    [
        b"*1000000\r\n",
        b"*x\r\n",
        b"*1\r\n:1\r\n",
        b"*1\r\n$-1\r\n",
        b"*1\r\n$%d\r\n" % (LIMIT + 1),
        b"*1\r\n$99999999999999\r\n",
        b"*1\r\n$3\r\nabcde",
        b"x" * MAX_LINE_BYTES,
        b"*" + b"1" * MAX_LINE_BYTES,
    ],
)
def test_what_is_no_request_is_refused_before_anything_is_allocated(data: bytes) -> None:
    parser = RequestParser(LIMIT)
    parser.feed(data)
    with pytest.raises(ProtocolError):
        parser.next()


def test_a_framed_value_is_passed_on_as_it_is() -> None:
    parser = RequestParser(LIMIT)
    parser.feed(b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$40000\r\nabc")
    step = parser.next()
    assert step == LargeArgument((b"SET", b"k"), 40_000, b"abc") and parser.next() is step
    parser.deliver(Framed(b"header and value"))
    assert isinstance(parser.next(), NeedData)
    parser.feed(b"\r\n")
    assert parser.next() == [b"SET", b"k", Framed(b"header and value")]


def test_an_error_is_one_line() -> None:
    assert error("a\r\n+OK\n b") == b"-ERR a +OK b\r\n"


@pytest.mark.parametrize("late", [0, 10, 40_000, 49_999, 50_000, 50_001, 50_002, 50_005])
def test_a_large_argument_may_come_on_while_its_owner_does_something_else(late: int) -> None:
    """What is fed before it is received, of it and of what follows it."""
    text = bytes(range(250)) * 200
    rest = text + b"\r\n" + b"*1\r\n$4\r\nPING\r\n"
    parser = RequestParser(1 << 20)
    parser.feed(b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$50000\r\n" + rest[:5])
    large = parser.next()
    assert isinstance(large, LargeArgument) and large.head == text[:5]
    parser.feed(rest[5 : 5 + late])
    assert parser.bytes_behind(large) == max(0, 5 + late - 50_000)
    head = parser.head_of(large)
    assert head == text[: 5 + late]
    if len(head) < len(text):
        parser.deliver(text, rest[50_000:50_002])
        parser.feed(rest[50_002:])
    else:
        parser.deliver(text)
        parser.feed(rest[5 + late :])
    assert parser.next() == [b"SET", b"k", text] and parser.next() == [b"PING"]
