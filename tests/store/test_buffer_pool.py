"""Memory that values are received into: aligned, used again, and never more than a few buffers of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.contract.store_contract import key, value

from skymemory.store.base import ALIGNED, BufferPool, aligned_buffer, aligned_bytes
from skymemory.store.disk import DiskStore


def address(view: memoryview) -> int:
    return np.frombuffer(view, np.uint8).ctypes.data


@pytest.mark.parametrize("size_bytes", [0, 1, 63, 64, 65, 3000, 1 << 20, (1 << 20) + 7, 23_000_001])
def test_memory_begins_at_a_line_and_is_long_enough(size_bytes: int) -> None:
    rooms = [aligned_buffer(size_bytes) for _ in range(3)]
    for room in rooms:
        assert len(room) >= max(1, size_bytes) and not room.ctypes.data % ALIGNED
    assert size_bytes <= aligned_bytes(size_bytes) < size_bytes + ALIGNED and not aligned_bytes(size_bytes) % ALIGNED


def test_every_value_of_a_load_begins_at_a_line(tmp_path: Path) -> None:
    store = DiskStore(tmp_path / "disk", 1 << 20)
    items = [(key(number), value(number, size)) for number, size in enumerate((1, 1000, 64, 4097, 0, 333))]
    store.put_many(items)
    got = store.get_many([one for one, _ in items])
    assert got == [data for _, data in items]
    assert all(view is not None and not address(view) % ALIGNED for view in got if view)
    store.close()


def test_the_largest_few_are_kept_and_handed_out_again() -> None:
    rooms = BufferPool()
    given = [rooms.take(size) for size in (100, 200, 300, 400, 500, 600)]
    for room in given:
        rooms.give_back(room)
    assert rooms.take(600) is given[5]
    assert all(rooms.take(1) is not room for room in given[:2]), "the two smallest were let go"


def test_a_buffer_handed_out_is_not_shared_until_it_is_given_back() -> None:
    rooms = BufferPool()
    rooms.give_back(rooms.take(1000))
    held = [rooms.take(size) for size in (1000, 1000, 500)]
    assert not any(np.shares_memory(one, other) for at, one in enumerate(held) for other in held[:at])


def test_values_that_were_handed_out_do_not_change_while_others_are_loaded(tmp_path: Path) -> None:
    store = DiskStore(tmp_path / "disk", 1 << 20)
    items = [(key(number), value(number, 1000)) for number in range(4)]
    store.put_many(items)
    tickets = [store.prepare_load([one]) for one, _ in items]
    got = [store.complete_load(ticket)[0] for ticket in tickets]
    assert got == [data for _, data in items]
    store.release(tickets[0])
    assert store.get_many([items[3][0]]) == [items[3][1]] and got[1:] == [data for _, data in items[1:]]
    store.close()
