"""Values received where they are wanted: the same bytes and reports, and a miss where they cannot be."""

from __future__ import annotations

import os
import zlib

import numpy as np
from tests.contract.rows import rows_of
from tests.store.conftest import simulated, store_over

from skymemory.native import Rows
from skymemory.store.sky.shared_index import SharedIndex

KEYS = [bytes([number]) * 32 for number in range(1, 5)]
HEAD_BYTES, COUNT, ROW_BYTES, STRIDE = 100, 9, 3000, 4000
VALUES = [os.urandom(HEAD_BYTES + COUNT * ROW_BYTES) for _ in KEYS]


def rows_for(values: int) -> list[Rows]:
    room = memoryview(bytearray(b"\xaa" * (COUNT * STRIDE)))
    heads = [memoryview(bytearray(HEAD_BYTES)) for _ in range(values)]
    rooms = [room] + [memoryview(bytearray(b"\xaa" * (COUNT * STRIDE))) for _ in heads[1:]]
    return [Rows(head, its, 500, COUNT, ROW_BYTES, STRIDE) for head, its in zip(heads, rooms, strict=True)]


def content(rows: Rows) -> bytes:
    return bytes(rows.head) + rows_of(rows).tobytes()


def test_values_are_in_their_rows_and_their_heads_are_returned() -> None:
    store = store_over(simulated(), 1, SharedIndex())
    assert all(store.put_many(list(zip(KEYS, VALUES, strict=True))))
    ticket = store.prepare_load(KEYS)
    rows = rows_for(4)
    too_small = rows[2]._replace(row_count=COUNT - 1)
    ticket.rows = [rows[0], None, too_small, rows[3]._replace(room=rows[3].room.toreadonly())]
    values = store.complete_load(ticket)
    assert ticket.placed == {0: zlib.crc32(VALUES[0])}
    assert content(rows[0]) == VALUES[0] and values[0] == VALUES[0][:HEAD_BYTES]
    assert [bytes(value) for value in values[1:] if value is not None] == VALUES[1:]
    assert not any(rows[2].head) and not any(rows[3].head)
    beside = np.frombuffer(rows[0].room, np.uint8)
    assert (beside[:500] == 0xAA).all() and (beside[500 + ROW_BYTES : STRIDE] == 0xAA).all()
    assert ticket.report is not None and ticket.report.size_bytes == 4 * len(VALUES[0])
    store.release(ticket)
    assert content(rows[0]) == VALUES[0]


def test_a_key_that_comes_twice_is_in_neither_of_its_rows() -> None:
    store = store_over(simulated(), 1, SharedIndex())
    assert all(store.put_many(list(zip(KEYS, VALUES, strict=True))))
    ticket = store.prepare_load([KEYS[0], KEYS[1], KEYS[0]])
    ticket.rows = rows_for(3)
    values = store.complete_load(ticket)
    assert set(ticket.placed) == {1} and content(ticket.rows[1]) == VALUES[1]
    assert values[0] == values[2] == VALUES[0] and values[1] == VALUES[1][:HEAD_BYTES]
    assert not any(ticket.rows[0].head) and not any(ticket.rows[2].head)


def test_a_value_with_a_chunk_that_is_gone_is_a_miss_and_not_placed() -> None:
    sky = simulated()
    store = store_over(sky, 1, SharedIndex())
    assert all(store.put_many(list(zip(KEYS, VALUES, strict=True))))
    holder = next(one for one in sky.satellites.values() if KEYS[1] in one.store.shares)
    holder.store.remove_key(KEYS[1])
    ticket = store.prepare_load(KEYS[:3])
    ticket.rows = rows_for(3)
    values = store.complete_load(ticket)
    assert values[1] is None and set(ticket.placed) == {0, 2}
    assert [content(ticket.rows[at] or rows_for(1)[0]) for at in (0, 2)] == [VALUES[0], VALUES[2]]
