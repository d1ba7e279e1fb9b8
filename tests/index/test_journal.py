"""The journal: a log cut anywhere replays to what was whole, and forged bytes are never believed."""

from __future__ import annotations

import struct
import zlib
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.index.records import records_of

from skymemory.errors import InvalidInput, MalformedPacket
from skymemory.index.journal import (
    JournalState,
    Record,
    RecordOp,
    decode_records,
    encode_record,
    pack_groups,
    replay,
    replay_all,
)
from skymemory.index.radix import BlockInfo, Groups, RadixIndex

HASHES = [bytes([n]) * 32 for n in range(1, 6)]
INFOS = [BlockInfo(n, n * 100, n, float(n), n, -n, ("hop", "rotation")[n % 2], 9, bytes([n % 2])) for n in range(5)]
RECORDS = [
    Record(RecordOp.ADD, tuple(HASHES), tuple(INFOS)),
    Record(RecordOp.REMOVE, (HASHES[2], HASHES[4])),
    Record(RecordOp.ADD, (HASHES[2],), (INFOS[0],), 2, HASHES[1]),
    Record(RecordOp.REMOVE_CONTEXT, context=b"\1"),
    Record(RecordOp.CLEAR),
    Record(RecordOp.ADD),
    Record(RecordOp.REMOVE),
    Record(RecordOp.BORN),
    Record(RecordOp.LOST),
    Record(RecordOp.PROBED, probed=(12, 3)),
]


LOG = [encode_record(record) for record in RECORDS]


def test_every_cut_of_the_log_keeps_the_whole_records_before_it() -> None:
    log = b"".join(LOG)
    ends = [sum(map(len, LOG[: n + 1])) for n in range(len(LOG))]
    for cut in range(len(log) + 1):
        whole = sum(end <= cut for end in ends)
        assert decode_records(log[:cut]) == (RECORDS[:whole], ends[whole - 1] if whole else 0)


@given(st.integers(0, sum(map(len, LOG)) * 8 - 1), st.binary(max_size=40))
def test_a_flipped_bit_and_a_torn_tail_end_the_log_there(bit: int, tail: bytes) -> None:
    log = bytearray(b"".join(LOG) + tail)
    log[bit // 8] ^= 1 << bit % 8
    records, consumed = decode_records(log)
    assert consumed <= bit // 8
    assert records == RECORDS[: len(records)]


@given(st.binary(max_size=100))
def test_garbage_is_an_empty_log(garbage: bytes) -> None:
    assert decode_records(garbage) == ([], 0)


def test_replaying_gives_the_same_index() -> None:
    direct, replayed = RadixIndex(), RadixIndex()
    direct.add(HASHES, INFOS)
    direct.remove(HASHES[2])
    direct.remove(HASHES[4])
    direct.add([HASHES[2]], [INFOS[0]], 2, HASHES[1])
    for record in RECORDS[:3]:
        replay(record, replayed)
    assert records_of(replayed) == records_of(direct)
    assert replayed.longest_prefix(HASHES) == 4
    replay(RECORDS[3], replayed)
    assert sorted(replayed) == sorted([HASHES[0], HASHES[2]])
    replay(RECORDS[4], replayed)
    assert len(replayed) == 0


def test_a_journal_says_whether_it_is_complete() -> None:
    standing = JournalState()
    assert not standing.complete
    for record, complete in zip(RECORDS, [False] * 7 + [True, False, False], strict=True):
        standing.apply(record)
        assert standing.complete is complete
    assert (standing.keys_probed, standing.values_adopted) == (12, 3)
    index = RadixIndex()
    index.add(HASHES, INFOS)
    for record in RECORDS[-3:]:
        replay(record, index)
    assert len(index) == 5


def framed(op: int, body: bytes, version: int = 1) -> bytes:
    blank = struct.pack("<BBHII", 0x5B, op, version, len(body), 0)
    return blank[:8] + struct.pack("<I", zlib.crc32(blank + body)) + body


def add_body(start: int, blocks: int, groups: int, parent: bytes, rest: bytes) -> bytes:
    return struct.pack("<III32s", start, blocks, groups, parent) + rest


SHARED = Groups()
ROW = SHARED.pack(INFOS[0])
GROUPS = pack_groups(SHARED.listed)


@pytest.mark.parametrize(
    "record",
    [framed(1, b"", version=3), framed(2, b"", version=2), framed(0, b""), framed(9, b""), framed(255, b"x" * 70)],
)
def test_intact_records_of_a_later_release_are_passed_over(record: bytes) -> None:
    records, taken = decode_records(record + encode_record(Record(RecordOp.REMOVE, HASHES)))
    assert [one.op for one in records] == [RecordOp.UNKNOWN, RecordOp.REMOVE] and taken > len(record)
    index, standing = RadixIndex(), JournalState(complete=True)
    assert replay_all(record + encode_record(Record(RecordOp.REMOVE, HASHES)), index, standing) == taken
    assert len(index) == 0 and not standing.complete and standing.unknown_records == 1


@pytest.mark.parametrize(
    "record",
    [
        framed(1, b"short"),
        framed(1, add_body(0, 1, 1, bytes(32), GROUPS + HASHES[0] + ROW[:-1])),
        framed(1, add_body(0, 2, 1, bytes(32), GROUPS + HASHES[0] + ROW)),
        framed(1, add_body(0, 2**32 - 1, 1, bytes(32), GROUPS + HASHES[0] + ROW)),
        framed(1, add_body(0, 1, 2, bytes(32), GROUPS + HASHES[0] + ROW)),
        framed(1, add_body(0, 1, 2**32 - 1, bytes(32), GROUPS + HASHES[0] + ROW)),
        framed(1, add_body(0, 1, 0, bytes(32), HASHES[0] + ROW)),
        framed(1, add_body(0, 1, 1, HASHES[1], GROUPS + HASHES[0] + ROW)),
        framed(1, add_body(2**32 - 1, 1, 1, HASHES[1], GROUPS + HASHES[0] + ROW)),
        framed(1, add_body(0, 1, 1, bytes(32), b"\1\0\0\0\0\0\0\xff" + HASHES[0] + ROW)),
        framed(1, add_body(0, 1, 1, bytes(32), b"\xff\0\0")),
        framed(1, add_body(0, 1, 1, bytes(32), b"\xff\xff\xff\0\0\0\0")),
        framed(2, HASHES[0] + b"x"),
        framed(7, bytes(7)),
    ],
)
def test_intact_records_that_contradict_themselves_are_malformed(record: bytes) -> None:
    with pytest.raises(MalformedPacket):
        decode_records(LOG[0] + record)
    index = RadixIndex()
    with pytest.raises(MalformedPacket):
        replay_all(LOG[0] + record, index, JournalState())
    assert len(index) == 5


@pytest.mark.parametrize(
    ("op", "fields"),
    [
        (RecordOp.ADD, {"hashes": HASHES, "infos": INFOS[:1]}),
        (RecordOp.ADD, {"hashes": HASHES, "infos": INFOS, "start": 1}),
        (RecordOp.ADD, {"hashes": HASHES[:1], "infos": INFOS[:1], "start": 1, "parent": b"short"}),
        (RecordOp.REMOVE, {"hashes": [b"short"]}),
    ],
)
def test_records_that_cannot_be_are_not_written(op: RecordOp, fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput):
        encode_record(Record(op, **fields))


def test_the_size_of_chunks_is_kept_and_said_only_where_it_must_be() -> None:
    """A record with one entry that says so is of version 2; all others are as they were."""
    sizes = [0, 4096, 0, 65_000, 4096]
    infos = [replace(info, chunk_bytes=size) for info, size in zip(INFOS, sizes, strict=True)]
    record = encode_record(Record(RecordOp.ADD, HASHES, infos))
    (read,), taken = decode_records(record)
    assert read.infos == tuple(infos) and taken == len(record)
    index = RadixIndex()
    index.add(HASHES, infos)
    again = RadixIndex()
    replay_all(b"".join(records_of(index)), again, JournalState())
    assert [again.get(key) for key in HASHES] == infos
    assert [
        int.from_bytes(encode_record(Record(RecordOp.ADD, HASHES, its))[2:4], "little") for its in (infos, INFOS)
    ] == [2, 1]
