"""Page-locking of a store's memory: in pieces, never a copy across two, and after a change other memory."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from skymemory.engine.page_locked import LockedMemory

PIECE = 1000


class Registrar:
    """A device that may refuse, or lock only when it may."""

    def __init__(self, most: int = 1 << 30) -> None:
        self.locked: dict[int, int] = {}
        self.most = most
        self.go = threading.Event()
        self.go.set()
        self.settled = 0

    def lock_pages(self, address: int, size_bytes: int) -> None:
        assert self.go.wait(10)
        if len(self.locked) >= self.most:
            raise RuntimeError("out of memory")
        self.locked[address] = size_bytes

    def unlock_pages(self, address: int) -> None:
        del self.locked[address]

    def settle(self) -> None:
        self.settled += 1

    def holds(self, part: Any) -> bool:
        """Whether a single piece has all of a tensor's bytes."""
        begin, end = part.data_ptr(), part.data_ptr() + len(part)
        return any(at <= begin and end <= at + size for at, size in self.locked.items())


def memory_of(size_bytes: int) -> memoryview:
    return memoryview(bytearray(at % 251 for at in range(size_bytes)))


def a_store(size_bytes: int = 3500) -> Any:
    return SimpleNamespace(memory=memory_of(size_bytes), prepare_rooms=None)


def in_time(is_so: Callable[[], bool]) -> None:
    for _ in range(1000):
        if is_so():
            return
        threading.Event().wait(0.01)
    raise AssertionError("not in time")


def test_copies_are_cut_where_a_piece_ends() -> None:
    device, store = Registrar(), a_store()
    locked = LockedMemory(store, device, PIECE)
    assert locked.wait(10) and locked.is_whole and sorted(device.locked.values()) == [500, 1000, 1000, 1000]
    for begin, end, count in ((0, 1000, 1), (0, 1001, 2), (999, 3001, 4), (1000, 2000, 1), (3000, 3500, 1), (5, 6, 1)):
        with locked.parts(store.memory[begin:end].toreadonly()) as parts:
            assert len(parts) == count and all(map(device.holds, parts))
            assert b"".join(bytes(part.tolist()) for part in parts) == store.memory[begin:end]
            parts[0][0] += 1
            assert parts[0][0] == store.memory[begin]
    for other in (memory_of(10), store.memory[5:5], memoryview(b"abc")):
        with locked.parts(other) as parts:
            assert parts == []
    locked.close()
    assert not device.locked and device.settled == 1 and not locked.is_whole
    with locked.parts(store.memory[:10]) as parts:
        assert parts == []


def test_a_value_beyond_what_is_locked_so_far_is_not_found() -> None:
    device, store = Registrar(), a_store()
    device.go.clear()
    locked = LockedMemory(store, device, PIECE)
    with locked.parts(store.memory[:10]) as parts:
        assert parts == [] and not locked.wait(0.01)
    device.go.set()
    assert locked.wait(10)
    locked.close()


def test_a_refusal_is_logged_once_and_what_is_locked_is_used(caplog: pytest.LogCaptureFixture) -> None:
    device, store = Registrar(most=2), a_store()
    locked = LockedMemory(store, device, PIECE)
    in_time(lambda: len(caplog.records) == 1)
    assert "out of memory" in caplog.text and not locked.is_whole
    for begin, end, count in ((0, 2000, 2), (1500, 2001, 0), (2500, 2600, 0)):
        with locked.parts(store.memory[begin:end]) as parts:
            assert len(parts) == count
    locked.close()
    assert not device.locked and len(caplog.records) == 1


def test_other_memory_is_locked_once_no_copy_from_that_before_is_under_way() -> None:
    device, store = Registrar(), a_store()
    locked = LockedMemory(store, device, PIECE)
    assert locked.wait(10)
    before, store_before = store.memory, set(device.locked)
    with locked.parts(before[:1500]) as parts:
        store.memory = memory_of(1200)
        assert not locked.is_whole
        threading.Event().wait(0.2)
        assert set(device.locked) == store_before and len(parts) == 2, "a copy is being queued"
        with locked.parts(before[:10]) as late:
            assert late == []
    assert locked.wait(10) and sorted(device.locked.values()) == [200, 1000] and device.settled == 1
    with locked.parts(store.memory[100:]) as parts:
        assert len(parts) == 2 and all(map(device.holds, parts))
    locked.close()
    assert not device.locked
