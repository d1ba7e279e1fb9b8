"""Cached tokens are read from answers in pieces of any size, and nothing else is taken for them."""

from __future__ import annotations

import pytest
from tests.router.mock_engine import stream_events

from skymemory.router.request_account import TAIL_BYTES, Usage, UsageReader

USAGE = {"prompt_tokens": 32, "prompt_tokens_details": {"cached_tokens": 16}}


@pytest.mark.parametrize("piece_bytes", [1, 7, 100, 1_000_000])
@pytest.mark.parametrize("events", [1, 500])
def test_of_a_stream(piece_bytes: int, events: int) -> None:
    stream = b"".join(stream_events(events, USAGE))
    reader = UsageReader(b"text/event-stream; charset=utf-8")
    for at in range(0, len(stream), piece_bytes):
        reader.add(stream[at : at + piece_bytes])
    assert reader.usage() == Usage(32, 16) and reader.between_events


def test_of_an_answer_in_one() -> None:
    reader = UsageReader(b"application/json")
    reader.add(b'{"usage": {"prompt_tokens": 32, "prompt_tokens_')
    reader.add(b'details": {"cached_tokens": 0}}, "choices": []}')
    assert reader.usage() == Usage(32, 0)


@pytest.mark.parametrize(
    ("kind", "packed", "body"),
    [
        (
            b"application/json",
            b"gzip",
            b'{"usage": {"prompt_tokens": 3, "prompt_tokens_details": {"cached_tokens": 1}}}',
        ),
        (b"text/html", b"", b'{"usage": {"prompt_tokens": 3, "prompt_tokens_details": {"cached_tokens": 1}}}'),
        (b"application/json", b"", b'{"usage": null}'),
        (b"application/json", b"", b'{"usage"'),
        (b"application/json", b"", b"\xff" * 9),
        (
            b"text/event-stream",
            b"",
            b'data: {"choices": [{"text": "\\"usage\\": {\\"cached_tokens\\": 7}"}]}\n\ndata: [DONE]\n\n',
        ),
    ],
)
def test_where_nothing_is_said(kind: bytes, packed: bytes, body: bytes) -> None:
    reader = UsageReader(kind, packed)
    reader.add(body)
    assert reader.usage() is None


@pytest.mark.parametrize("cached", ['{"cached_tokens": 4}', '{"cached_tokens": -1}', "null", "{}"])
def test_what_is_impossible_or_not_reported_is_left_out(cached: str) -> None:
    reader = UsageReader(b"application/json")
    reader.add(b'{"usage": {"prompt_tokens": 3, "completion_tokens": 9, "prompt_tokens_details": ')
    reader.add(cached.encode() + b"}}")
    assert reader.usage() == Usage(3, None, 9)


def test_little_is_kept_of_much() -> None:
    reader = UsageReader(b"text/event-stream")
    for _ in range(100):
        reader.add(b"data: {}\n\n" * 1000)
    assert len(reader._tail) <= TAIL_BYTES
    reader = UsageReader(b"application/json")
    for _ in range(40):
        reader.add(b"x" * 65536)
    assert reader._json_pieces is None


def test_where_an_event_of_ours_can_be_put() -> None:
    reader = UsageReader(b"text/event-stream")
    for piece, between in (
        (b"", True),
        (b"data: a", False),
        (b"\n", False),
        (b"\n", True),
        (b"data", False),
        (b": b\r\n\r\n", True),
    ):
        reader.add(piece)
        assert reader.between_events is between
