"""Values written where they stay: room of a host arena, and what makes it void."""

from __future__ import annotations

import gc
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.contract.store_contract import key, value
from tests.store.host.test_host_processes import BUDGET_BYTES, a_client, flood, in_time

from skymemory.errors import InvalidInput, ValueTooLarge, WrongProcess
from skymemory.kv.block import places_in
from skymemory.store.base import InPlace, Presence, StoreTicket
from skymemory.store.host.client import HostStore
from skymemory.store.host.server import ServedArena
from skymemory.store.memory import MemoryStore


@pytest.fixture
def owner(folder: Path) -> Iterator[ServedArena]:
    with ServedArena(folder, BUDGET_BYTES) as store:
        yield store


@pytest.fixture
def client(owner: ServedArena) -> Iterator[HostStore]:
    with HostStore(owner.folder) as store:
        yield store


def fill(ticket: StoreTicket, at: int, data: bytes) -> None:
    room = ticket.rooms[at]
    assert room is not None and not room.readonly
    room[:] = data


def test_what_is_written_into_rooms_is_stored(owner: ServedArena, client: HostStore) -> None:
    assert isinstance(client, InPlace) and not isinstance(owner, InPlace) and not isinstance(MemoryStore(1), InPlace)
    sizes = [1, 0, 70_000, 300_001]
    ticket = client.prepare_rooms(
        [(key(n), size) for n, size in enumerate(sizes)], places_in([key(n) for n in range(4)], range(4))
    )
    assert client.lookup([key(2)]) == [Presence.PENDING] and client.get_many([key(2)]) == [None]
    for at, size in enumerate(sizes):
        fill(ticket, at, value(at, size))
    assert client.complete_store(ticket) == [True] * 4 and ticket.rooms == []
    assert client.get_many([key(n) for n in range(4)]) == [value(n, size) for n, size in enumerate(sizes)]
    assert owner.get_many([key(3)]) == [value(3, 300_001)], "its owner has compared it with its checksum"
    with pytest.raises(InvalidInput, match="completed once"):
        client.complete_store(ticket)


def test_a_room_lies_in_the_memory_of_all_values(client: HostStore) -> None:
    ticket = client.prepare_rooms([(key(1), 5_000)])
    fill(ticket, 0, value(1, 5_000))
    assert client.memory is client.memory and bytes(client.memory).count(value(1, 5_000)) == 1


def test_a_new_value_replaces_the_old_one_whose_views_stay(client: HostStore) -> None:
    client.put_many([(key(1), value(1, 9_000))])
    (before,) = client.get_many([key(1)])
    ticket = client.prepare_rooms([(key(1), 8_000)])
    fill(ticket, 0, value(2, 8_000))
    assert client.get_many([key(1)]) == [value(1, 9_000)]
    assert client.complete_store(ticket) == [True]
    assert client.get_many([key(1)]) == [value(2, 8_000)] and before == value(1, 9_000)


def test_room_that_is_given_up_is_free_again(owner: ServedArena, client: HostStore) -> None:
    before = owner.stats()["free_bytes"]
    ticket = client.prepare_rooms([(key(n), 200_000) for n in range(3)])
    fill(ticket, 1, value(1, 200_000))
    assert before - owner.stats()["free_bytes"] >= 600_000
    ticket.rooms[0] = ticket.rooms[2] = None
    assert client.complete_store(ticket) == [False, True, False]
    gc.collect()
    assert client.delete([key(1)]) == [True] and owner.stats()["free_bytes"] == before


def test_room_that_is_still_written_is_given_to_no_other(owner: ServedArena, client: HostStore) -> None:
    ticket = client.prepare_rooms([(key(1), 200_000)])
    (room,) = ticket.rooms
    ticket.rooms[0] = None
    assert room is not None and client.complete_store(ticket) == [False]
    assert not flood(owner), "a copy into it may be under way"
    room[:] = bytes(200_000)
    assert all(view is None or view == value(n % 7, 100_000) for n, view in enumerate(stored(owner)))
    del room
    gc.collect()
    in_time(lambda: flood(owner, 1))


def stored(owner: ServedArena) -> list[memoryview | None]:
    return owner.get_many([key(10_000 + number) for number in range(3 * BUDGET_BYTES // 100_000)])


def test_what_does_not_fit_gets_no_room(client: HostStore) -> None:
    with pytest.raises(ValueTooLarge, match="does not fit"):
        client.prepare_rooms([(key(1), 3 * BUDGET_BYTES)])
    held = client.prepare_rooms([(key(n), 1 << 20) for n in range(6)])
    assert [room is not None for room in held.rooms].count(False) >= 2
    granted = [room is not None for room in held.rooms]
    for at, ok in enumerate(granted):
        if ok:
            fill(held, at, value(at, 1 << 20))
    assert client.complete_store(held) == granted


def test_room_of_an_owner_before_is_void(folder: Path) -> None:
    owner = ServedArena(folder, BUDGET_BYTES, keep=True)
    with HostStore(folder) as client:
        ticket = client.prepare_rooms([(key(1), 200_000), (key(2), 200_000)])
        fill(ticket, 0, value(1, 200_000))
        owner.close()
        with ServedArena(folder, BUDGET_BYTES) as successor:
            flood(successor)
            fill(ticket, 1, value(2, 200_000))
            assert client.complete_store(ticket) == [False, False] and ticket.unanswered == {key(1), key(2)}
            assert all(view is None or view == value(n % 7, 100_000) for n, view in enumerate(stored(successor)))
            in_time(lambda: client.put_many([(key(3), value(3))]) == [True])
            gc.collect()
            in_time(lambda: flood(successor, 1))


def test_room_of_another_arena_is_void_and_the_memory_is_another(folder: Path) -> None:
    owner = ServedArena(folder, BUDGET_BYTES)
    with HostStore(folder) as client:
        ticket, before = client.prepare_rooms([(key(1), 200_000)]), client.memory
        owner.close()
        with ServedArena(folder, 2 * BUDGET_BYTES):
            in_time(lambda: client.put_many([(key(2), value(2))]) == [True])
            fill(ticket, 0, value(1, 200_000))
            assert client.complete_store(ticket) == [False]
            assert client.memory is not before and len(client.memory) > len(before)
            assert client.get_many([key(1), key(2)]) == [None, value(2)]


def test_room_of_a_connection_that_broke_is_void(owner: ServedArena, client: HostStore) -> None:
    ticket = client.prepare_rooms([(key(1), 200_000)])
    assert client._sock is not None
    client._sock.shutdown(socket.SHUT_RDWR)
    assert client.pin([key(9)], 1.0) == [False]
    in_time(lambda: client.stats()["reconnects_total"] == 1)
    flood(owner)
    fill(ticket, 0, value(1, 200_000))
    assert client.complete_store(ticket) == [False]
    assert all(view is None or view == value(n % 7, 100_000) for n, view in enumerate(stored(owner)))


def test_without_an_owner_there_is_no_room(folder: Path) -> None:
    owner = ServedArena(folder, BUDGET_BYTES, keep=True)
    with HostStore(folder) as client:
        owner.close()
        ticket = client.prepare_rooms([(key(1), 100)])
        assert ticket.rooms == [None] and client.complete_store(ticket) == [False]
        assert ticket.unanswered == {key(1)}


def test_the_room_of_a_client_that_was_killed_while_it_wrote_is_given_out_again(owner: ServedArena) -> None:
    before = owner.stats()["free_bytes"]
    work = (
        "ticket = store.prepare_rooms([(key(1), 400_000)])\n"
        "print(1, flush=True)\n"
        "while True:\n"
        "    ticket.rooms[0][:] = bytes(400_000)\n"
    )
    with a_client(owner.folder, work) as other:
        os.kill(other.pid, signal.SIGSTOP)
        assert before - owner.stats()["free_bytes"] >= 400_000
        os.kill(other.pid, signal.SIGKILL)
        other.wait()
    in_time(lambda: owner.stats()["clients"] == 1)
    assert owner.stats()["free_bytes"] == before and owner.lookup([key(1)]) == [Presence.MISS]


def test_a_forked_child_may_not_write_and_ends_no_hold(owner: ServedArena, client: HostStore) -> None:
    ticket = client.prepare_rooms([(key(1), 50_000)])
    fill(ticket, 0, value(1, 50_000))
    (view,) = ticket.rooms
    assert view is not None
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            said = "crc" if view.obj.crc(None) is not None else ""  # type: ignore[attr-defined]
            try:
                memoryview(view.obj)
                said += "buffer"
            except BufferError:
                pass
            try:
                client.complete_store(ticket)
                said += "stored"
            except WrongProcess:
                pass
            os.write(writing, said.encode() or b"nothing")
        finally:
            os._exit(0)
    os.close(writing)
    assert os.read(reading, 100) == b"nothing"
    os.close(reading)
    os.waitpid(child, 0)
    assert client.stats()["held_values"] == 1 and client.complete_store(ticket) == [True]
    assert client.get_many([key(1)]) == [value(1, 50_000)]
