"""A host arena and its processes: owners and clients that are killed, stopped, replaced and forked."""

from __future__ import annotations

import gc
import math
import os
import signal
import socket
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.contract.store_contract import key, value
from tests.soak.host import HostSoak

from skymemory.errors import InvalidInput, SkyMemoryError
from skymemory.kv.block import Place, places_in
from skymemory.reasons import Miss
from skymemory.store.host import messages
from skymemory.store.host.client import HostStore
from skymemory.store.host.owner import ArenaStore
from skymemory.store.host.server import ServedArena
from skymemory.testbed.open_store import open_store

BUDGET_BYTES = 4 << 20
BLOCK = [Place(0)]
"""Place of a block: named values go through no slot."""

_CLIENT = """
import sys, time
from pathlib import Path
from skymemory.kv.block import Place
from skymemory.reasons import Miss
from skymemory.store.host import messages
from skymemory.store.host.client import HostStore
store = HostStore(Path(sys.argv[1]))
key = lambda number: number.to_bytes(4, "big") * 8
{work}
"""


@contextmanager
def a_client(folder: Path, work: str) -> Iterator[subprocess.Popen[str]]:
    """Another process with ``store``, which has said a line when this begins."""
    process = subprocess.Popen(
        [sys.executable, "-c", _CLIENT.format(work=work), str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None and process.stdout.readline()
        yield process
    finally:
        process.kill()
        process.wait()


def in_time(is_so: Callable[[], bool], limit_s: float = 10.0) -> None:
    until_s = time.monotonic() + limit_s
    while not is_so():
        assert time.monotonic() < until_s, "not in time"
        time.sleep(0.01)


@pytest.fixture
def owner(folder: Path) -> Iterator[ServedArena]:
    with ServedArena(folder, BUDGET_BYTES) as store:
        yield store


def flood(store: ServedArena, rounds: int = 3) -> bool:
    """Store more than the budget. True if no room is quarantined afterwards."""
    for number in range(rounds * BUDGET_BYTES // 100_000):
        store.put_many([(key(10_000 + number), value(number % 7, 100_000))])
    return store.stats()["quarantined_bytes"] == 0


def test_what_another_process_holds_stays_as_it_is_until_it_ends(owner: ServedArena) -> None:
    owner.put_many([(key(1), value(1, 50_000))])
    with a_client(
        owner.folder, "(view,) = store.get_many([key(1)])\nprint(len(view), flush=True)\ntime.sleep(60)"
    ) as other:
        assert owner.delete([key(1)]) == [True]
        assert owner.stats()["quarantined_bytes"] > 0
        free_bytes = owner.stats()["free_bytes"]
        os.kill(other.pid, signal.SIGSTOP)
        assert not flood(owner), "of one that is stopped, too"
        os.kill(other.pid, signal.SIGKILL)
        other.wait()
    in_time(lambda: flood(owner, 1))
    assert owner.stats()["free_bytes"] <= free_bytes


def test_room_that_a_killed_client_had_is_given_out_again(owner: ServedArena) -> None:
    before = owner.stats()
    work = (
        "tickets = [store.prepare_store([(key(n), bytes(200_000))]) for n in range(8)]\n"
        "print(1, flush=True)\n"
        "time.sleep(60)"
    )
    with a_client(owner.folder, work):
        assert before["free_bytes"] - owner.stats()["free_bytes"] >= 8 * 200_000
    in_time(lambda: owner.stats()["clients"] == before["clients"])
    assert owner.stats()["free_bytes"] == before["free_bytes"]


def test_without_its_owner_a_client_reads_on_and_writes_are_refused(folder: Path) -> None:
    owner = ServedArena(folder, BUDGET_BYTES, keep=True)
    with HostStore(folder) as client:
        assert client.put_many([(key(1), value(1))]) == [True]
        (before,) = client.get_many([key(1)])
        owner.close()
        assert client.get_many([key(1)]) == [value(1)] and before == value(1)
        ticket = client.prepare_store([(key(2), value(2))])
        assert client.complete_store(ticket) == [False] and ticket.unanswered == {key(2)}
        with ServedArena(folder, BUDGET_BYTES) as successor:
            assert successor.get_many([key(1)]) == [value(1)], "what was kept is there"
            in_time(lambda: client.put_many([(key(2), value(2))]) == [True])
            assert client.get_many([key(1), key(2)]) == [value(1), value(2)] and before == value(1)


def test_an_owner_with_another_size_begins_again_and_clients_find_it(folder: Path) -> None:
    with ServedArena(folder, BUDGET_BYTES), HostStore(folder) as client:
        client.put_many([(key(1), value(1))])
        (before,) = client.get_many([key(1)])
    assert not (folder / "values").exists()
    with ServedArena(folder, BUDGET_BYTES, keep=True):
        client = HostStore(folder)
        client.put_many([(key(1), value(1))])
    with ServedArena(folder, 2 * BUDGET_BYTES) as owner, client:
        owner.put_many([(key(3), value(3))])
        in_time(lambda: client.get_many([key(3)]) == [value(3)])
        assert client.get_many([key(1)]) == [None] and before == value(1), "the old one is mapped while it is in use"


def test_a_value_that_was_damaged_is_a_miss_and_goes(folder: Path) -> None:
    with ServedArena(folder, BUDGET_BYTES, keep=True) as owner:
        owner.put_many([(key(number), value(number, 5_000)) for number in range(3)])
    with open(folder / "values", "r+b") as values:
        at = values.read().find(value(1, 5_000))
        assert at >= 0
        values.seek(at + 17)
        values.write(b"\x00" if value(1, 5_000)[17] else b"\x01")
    with ServedArena(folder, BUDGET_BYTES) as owner, HostStore(folder) as client:
        assert client.get_many([key(number) for number in range(3)]) == [value(0, 5_000), None, value(2, 5_000)]
        assert owner.lookup([key(1)])[0].name == "MISS" and client.stats()["corrupt_total"] == 1


def test_a_lifetime_goes_on_with_the_next_owner(folder: Path) -> None:
    with ServedArena(folder, BUDGET_BYTES, keep=True) as owner:
        owner.put_many([(key(number), value(number)) for number in range(3)])
        assert owner.expire([key(0), key(1)], 60.0) == [True, True] and owner.expire([key(1)], math.inf) == [True]
        assert owner.expire([key(2)], 0.2) == [True]
    time.sleep(0.2)
    with ServedArena(folder, BUDGET_BYTES) as owner:
        assert [presence.name for presence in owner.lookup([key(0), key(1), key(2)])] == ["HIT", "HIT", "MISS"]
        left_s = owner.left_s([key(0), key(1), key(2)])
        assert 50.0 < left_s[0] < 59.9 and left_s[1:] == [math.inf, math.inf]
        assert owner.stats()["used_bytes"] == len(value(0)) + len(value(1))


def test_a_lifetime_of_another_boot_ends_its_value(folder: Path) -> None:
    """Of a folder on a disk: the monotonic clock has begun again."""
    with ServedArena(folder, BUDGET_BYTES, keep=True) as owner:
        owner.put_many([(key(0), value(0)), (key(1), value(1))])
        owner.expire([key(0)], 60.0)
    with open(folder / "directory", "r+b") as directory:
        directory.seek(80)
        directory.write(b"another boot's..")
    with ServedArena(folder, BUDGET_BYTES) as owner:
        assert [presence.name for presence in owner.lookup([key(0), key(1)])] == ["MISS", "HIT"]


def test_an_expired_value_is_a_miss_at_once_without_its_owner(folder: Path) -> None:
    owner = ServedArena(folder, BUDGET_BYTES, keep=True)
    with HostStore(folder) as client, HostStore(folder) as other:
        assert client.put_many([(key(1), value(1)), (key(2), value(2))]) == [True, True]
        assert client.expire([key(1)], 0.5) == [True]
        (view,) = other.get_many([key(1)])
        owner.close()
        assert other.sizes([key(1), key(2)]) == [len(value(1)), len(value(2))]
        time.sleep(0.5)
        for store in (client, other):
            assert store.get_many([key(1), key(2)]) == [None, value(2)] and store.prefix([key(2), key(1)]) == 1
        assert view == value(1), "what is read stays"


def test_a_named_value_is_seen_by_all_once_it_is_stored(owner: ServedArena) -> None:
    with HostStore(owner.folder) as client, HostStore(owner.folder) as other:
        client.put_many([(key(0), bytes(16))], BLOCK)  # it has room for as large values from now on
        for number in range(300):
            data = number.to_bytes(16, "big")
            assert client.put_many([(key(1), data)]) == [True]
            assert other.get_many([key(1)]) == [data], number


def test_room_of_a_connection_that_broke_is_written_no_more(owner: ServedArena) -> None:
    with HostStore(owner.folder) as client, HostStore(owner.folder) as other:
        ticket = client.prepare_store([(key(1), value(1, 200_000))])
        assert client._sock is not None
        client._sock.shutdown(socket.SHUT_RDWR)
        assert client.pin([key(9)], 1.0) == [False]
        in_time(lambda: client.stats()["reconnects_total"] == 1)
        assert other.put_many([(key(2), value(2, 200_000))]) == [True], "into that room"
        assert client.complete_store(ticket) == [False]
        assert other.get_many([key(2)]) == [value(2, 200_000)]


def test_a_client_of_another_arena_gets_a_page_of_its_own(folder: Path) -> None:
    with ServedArena(folder, BUDGET_BYTES) as owner, HostStore(folder) as first, HostStore(folder) as second:
        for client in (first, second):
            assert client._sock is not None
            client._sock.shutdown(socket.SHUT_RDWR)
        in_time(lambda: owner.stats()["clients"] == 1)
        number = first._mapping.number
        assert owner.connect(number, owner.instance).number == number, "the same client again"
        number = second._mapping.number
        assert owner.connect(number, bytes(16)).number != number


def test_values_outlive_their_store_while_they_are_in_use(owner: ServedArena) -> None:
    client = HostStore(owner.folder)
    client.put_many([(key(1), value(1, 30_000))])
    (view,) = client.get_many([key(1)])
    client.close()
    del client
    gc.collect()
    owner.delete([key(1)])
    flood(owner)
    assert view == value(1, 30_000)
    del view
    gc.collect()
    in_time(lambda: flood(owner, 1))


def test_memory_of_an_ended_owner_is_given_back_though_a_client_maps_it(folder: Path) -> None:
    owner = ServedArena(folder, 32 << 20)
    client = HostStore(folder)
    client.put_many([(key(number), value(number, 1_000_000)) for number in range(20)])
    (view,) = client.get_many([key(7)])
    with open(folder / "values", "rb") as values:
        assert os.fstat(values.fileno()).st_blocks * 512 >= 32 << 20
        owner.close()
        assert os.fstat(values.fileno()).st_blocks * 512 < 4 << 20
        assert view == value(7, 1_000_000) and client.get_many([key(6)]) == [None]
    client.close()


def test_a_store_that_is_closed_maps_nothing(folder: Path) -> None:
    def mapped() -> int:
        return Path("/proc/self/maps").read_text().count(str(folder))

    owner, client = ServedArena(folder, BUDGET_BYTES), HostStore(folder)
    client.put_many([(key(1), value(1))])
    (view,) = client.get_many([key(1)])
    assert mapped() > 0
    owner.close()
    client.close()
    assert view == value(1)
    del view
    assert mapped() == 0


def test_nothing_is_evicted_for_a_value_that_would_not_fit_then_either(folder: Path) -> None:
    with ArenaStore(folder, 8 << 20) as store:
        keys = [key(number) for number in range(20)]
        for each in keys:  # no chain
            store.put_many([(each, value(1, 400_000))])
        assert all(store.pin([keys[number]], 60.0) == [True] for number in range(1, 20, 3))
        before = store.stored_keys()
        assert store.put_many([(key(99), bytes(3_000_000))]) == [False]
        assert store.stored_keys() == before
        assert store.put_many([(key(98), bytes(700_000))]) == [True]
        assert len(before) + 1 - len(store.stored_keys()) <= 3


def test_a_second_owner_and_a_client_without_an_owner_are_refused(owner: ServedArena, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="another process serves it"):
        open_store(f"host://1MiB?at={owner.folder}")
    with pytest.raises(SkyMemoryError, match="no owner answers"):
        open_store(f"host://{tmp_path}")
    (tmp_path / "open").mkdir(mode=0o777)
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(InvalidInput, match="no other user may write"):
        open_store(f"host://1MiB?at={tmp_path}/open")


def test_by_their_addresses(folder: Path) -> None:
    with open_store(f"host://4MiB?at={folder}&keep=no") as owner, open_store(f"host://{folder}?name=near") as client:
        assert client.put_many([(key(1), value(1))]) == [True] and owner.get_many([key(1)]) == [value(1)]
        assert client.name == "near" and owner.name == "host"


@pytest.mark.slow
@pytest.mark.seeded
@pytest.mark.timeout(300)
def test_kills_and_stops_of_clients_and_owners_cost_no_byte() -> None:
    outcome = HostSoak(faults=60, owners=8, seed=3).run()
    assert outcome.is_sound, outcome


def test_an_owner_of_another_size_costs_a_busy_client_nothing(folder: Path) -> None:
    work = (
        "seen = set()\n"
        "print(1, flush=True)\n"
        "while True:\n"
        "    store.put_many([(key(1), b'a' * 70_000)])\n"
        "    for view in store.get_many([key(1), key(2)]):\n"
        "        assert view is None or bytes(view) in (b'a' * 70_000, b'b' * 70_000), 'wrong'\n"
    )
    owner = ServedArena(folder, BUDGET_BYTES, keep=True)
    with a_client(folder, work) as client:
        for size in (8, 2, 16, 3):
            owner.close()
            owner = ServedArena(folder, size << 20, keep=True)
            owner.put_many([(key(2), b"b" * 70_000)])
            in_time(lambda owner=owner: owner.lookup([key(1)])[0].name == "HIT")  # type: ignore[misc]
        assert client.poll() is None
    owner.close()


def test_who_asks_about_farther_tiers_and_is_gone_ends_no_server(owner: ServedArena) -> None:
    for _ in range(20):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            sock.connect(str(owner.folder / "socket"))
            sock.send(messages.BELOW.pack(messages.HostOp.BELOW, messages.VERSION))
    with HostStore(owner.folder) as client:
        assert client.put_many([(key(1), value(1))]) == [True]


def test_whatever_stands_in_a_clients_page_the_next_owner_begins(folder: Path) -> None:
    with ServedArena(folder, BUDGET_BYTES, keep=True) as owner, HostStore(folder) as client:
        owner.put_many([(key(number), value(number, 100_000)) for number in range(4)])
        with open(folder / "pages" / str(client._mapping.number), "r+b") as page:
            page.seek(24)
            page.write((6).to_bytes(8, "little"))
            page.seek(4096)
            for offset in (50, 100_400, 1 << 40, (1 << 64) - 2, 3 << 20, 64):
                page.write((offset + 1).to_bytes(8, "little"))
        owner.close()
        with ServedArena(folder, BUDGET_BYTES) as successor:
            assert successor.get_many([key(number) for number in range(4)]) == [value(n, 100_000) for n in range(4)]


def test_an_expired_value_is_read_no_more_though_the_owner_is_idle(owner: ServedArena) -> None:
    with HostStore(owner.folder) as client:
        client.put_many([(key(1), value(1))])
        assert client.expire([key(1)], 0.2) == [True]
        in_time(lambda: client.get_many([key(1)]) == [None], 5.0)


def test_with_a_stopped_owner_reads_go_on_at_once(folder: Path) -> None:
    command = [sys.executable, "-m", "skymemory", "store", "serve", f"host://4MiB?at={folder}"]
    command += ["--listen", f"unix://{folder}/redis.sock"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stdout.readline()
        with HostStore(folder, timeout_s=1.0) as client:
            client.put_many([(key(1), value(1))], BLOCK)
            os.kill(process.pid, signal.SIGSTOP)
            os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
            assert client.put_many([(key(2), value(2, 200_000))]) == [False]
            assert client.put_many([(key(3), value(3))]) == [False], "a named value"
            assert client.put_many([(key(3), value(3))], BLOCK) == [True] and client.get_many([key(3)]) == [value(3)]
            until_s = time.monotonic() + 3.0
            while time.monotonic() < until_s:
                began_s = time.monotonic()
                assert client.get_many([key(1)]) == [value(1)]
                assert time.monotonic() - began_s < 0.8
            os.kill(process.pid, signal.SIGCONT)
            in_time(lambda: client.put_many([(key(2), value(2, 200_000))]) == [True])
            with HostStore(folder) as other:
                in_time(lambda: other.get_many([key(3)]) == [value(3)])
    finally:
        process.kill()
        process.communicate()


def test_a_fault_of_the_owner_ends_one_connection_and_is_counted(
    owner: ServedArena, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(keys: object) -> None:
        raise RuntimeError("a fault")

    with HostStore(owner.folder) as client, HostStore(owner.folder) as other:
        monkeypatch.setattr(owner, "touch", fail)
        client.touch([key(1)])
        assert other.put_many([(key(1), value(1))]) == [True]
        in_time(lambda: client.put_many([(key(2), value(2))]) == [True])
        assert owner.stats()["faults_total"] == 1


POSTING = (
    "store.put_many([(key(0), bytes(1_000))], [Place(0)])\n"  # from then on it has room for such values
    "print(1, flush=True)\n"
    "sys.stdin.readline()\n"
    "print(store.put_many([(key(n), bytes([n]) * 1_000) for n in range(1, 21)], [Place(0)] * 20), flush=True)\n"
    "time.sleep(60)"
)


@contextmanager
def stopped_owner(folder: Path) -> Iterator[tuple[subprocess.Popen[str], subprocess.Popen[str]]]:
    """An owner that is stopped, and a client that has stored 20 values since then."""
    command = [sys.executable, "-m", "skymemory", "store", "serve", f"host://4MiB?at={folder}&keep=yes"]
    command += ["--listen", f"unix://{folder}/redis.sock"]
    owner = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert owner.stdout is not None and owner.stdout.readline()
        with a_client(folder, POSTING) as client:
            assert client.stdin is not None and client.stdout is not None
            os.kill(owner.pid, signal.SIGSTOP)
            os.waitid(os.P_PID, owner.pid, os.WSTOPPED | os.WNOWAIT)
            client.stdin.write("\n")
            client.stdin.flush()
            assert client.stdout.readline().count("True") == 20, "without an answer"
            yield owner, client
    finally:
        owner.kill()
        owner.communicate()


def test_what_was_stored_while_the_owner_was_stopped_outlives_it(folder: Path) -> None:
    with stopped_owner(folder) as (owner, _):
        owner.kill()
        owner.wait()
        with ServedArena(folder, BUDGET_BYTES) as successor, HostStore(folder) as client:
            keys = [key(number) for number in range(1, 21)]
            assert client.get_many(keys) == [bytes([number]) * 1_000 for number in range(1, 21)]
            successor.delete([*keys, key(0)])
            stats = successor.stats()
            assert stats["free_bytes"] + stats["slot_bytes"] == stats["arena_bytes"]


@pytest.mark.parametrize("counted", [True, False])
def test_what_a_client_stored_outlives_it(folder: Path, counted: bool) -> None:
    with stopped_owner(folder) as (owner, client):
        client.kill()
        client.wait()
        if not counted:  # it was killed before it could count them
            (path,) = [each for each in (folder / "pages").iterdir() if each.read_bytes()[48:56] > bytes(8)]
            with open(path, "r+b") as page:
                entered = page.read(72)[64:]
                page.seek(48)
                page.write(entered)
        os.kill(owner.pid, signal.SIGCONT)
        with HostStore(folder) as other:
            keys = [key(number) for number in range(1, 21)]
            in_time(lambda: other.get_many(keys) == [bytes([number]) * 1_000 for number in range(1, 21)])
            other.delete([*keys, key(0)])
            in_time(lambda: (stats := other.stats())["free_bytes"] + stats["slot_bytes"] == stats["arena_bytes"])


def test_room_in_slots_is_taken_back_when_memory_is_short(folder: Path) -> None:
    with ServedArena(folder, 8 << 20) as owner, HostStore(folder) as client:
        client.put_many([(key(0), bytes(4_000))], BLOCK)
        assert owner.stats()["slot_bytes"] > 100_000
        owner.put_many([(key(1), bytes(3 << 20))])
        view = owner.get_many([key(1)])
        owner.delete([key(1)])
        assert owner.stats()["quarantined_bytes"] >= 3 << 20
        while owner.put_many([(key(2 + len(owner.stored_keys())), bytes(100_000))]) == [True]:
            if owner.stats()["slot_bytes"] == 0:
                break
        assert owner.stats()["slot_bytes"] == 0 and len(view) == 1
        assert client.put_many([(key(0), bytes(4_000))]) == [True]


def test_values_in_slots_that_follow_one_another_are_a_chain(folder: Path) -> None:
    with ServedArena(folder, 8 << 20) as owner, HostStore(folder) as client:
        client.put_many([(key(0), bytes(4_000))], BLOCK)
        owner.delete([key(0)])
        chain = [key(number) for number in range(1, 6)]
        assert client.put_many([(each, bytes(4_000)) for each in chain], places_in(chain, range(5))) == [True] * 5
        assert owner.pin(chain[-1:], 60.0) == [True], "and all before it"
        for number in range(100, 200):
            owner.put_many([(key(number), bytes(400_000))])
        assert owner.prefix(chain) == 5


def test_others_see_a_value_in_a_slot_soon_though_its_owner_slept(folder: Path) -> None:
    with ServedArena(folder, 64 << 20), HostStore(folder) as client, HostStore(folder) as other:
        client.put_many([(key(0), b"x" * 1_000)], BLOCK)
        for number in range(1, 6):
            time.sleep(0.1)  # it sleeps again
            client.put_many([(key(number), b"x" * 1_000)], BLOCK)
            in_time(lambda number=number: other.get_many([key(number)]) == [b"x" * 1_000], 0.5)  # type: ignore[misc]


def test_what_a_client_reads_is_not_evicted_for_a_leases_time(owner: ServedArena) -> None:
    with HostStore(owner.folder) as client:
        owner.put_many([(key(1), value(1, 100_000))])
        (view,) = client.get_many([key(1)])
        flood(owner)
        assert owner.lookup([key(1)])[0].name == "HIT" and owner.stats()["quarantined_bytes"] == 0
        del view
        flood(owner)
        assert owner.lookup([key(1)])[0].name == "MISS"


def test_a_client_checks_what_the_owner_has_not_checked_yet(owner: ServedArena) -> None:
    with HostStore(owner.folder) as client:
        owner.end_sharing()
        for number, crc in ((1, 12345), (2, zlib.crc32(bytes(1_000)))):
            writer = owner.connect()
            reserved, (offset,) = owner.reserve(writer, [(key(number), 1_000)], [None])
            assert offset is not None and owner.commit(writer, reserved, [crc]) == [True]
        ticket = client.prepare_load([key(1), key(2)])
        assert client.complete_load(ticket)[0] is None and ticket.report is not None
        assert ticket.report.keys[0].reason is Miss.CORRUPT


def test_of_two_clients_values_the_later_stays(owner: ServedArena) -> None:
    """Whichever page the owner reads first."""
    with HostStore(owner.folder) as first, HostStore(owner.folder) as second:
        for client in (first, second):
            client.put_many([(key(0), bytes(1_000))], BLOCK)  # from then on it has room for such values
        owner.enter_posts()
        with owner._lock:  # it cannot look into slots meanwhile
            for number, clients in ((1, (first, second)), (2, (second, first))):
                for at, client in enumerate(clients):
                    assert client.put_many([(key(number), bytes([at]) * 1_000)], BLOCK) == [True]
        owner.enter_posts()
        assert owner.get_many([key(1), key(2)]) == [b"\1" * 1_000] * 2


def test_a_damaged_page_costs_its_client_alone(owner: ServedArena) -> None:
    with HostStore(owner.folder) as client, HostStore(owner.folder) as other:
        client.put_many([(key(1), bytes(1_000))])
        path = owner.folder / "pages" / str(client._mapping.number)
        with open(path, "r+b") as page:
            page.write(b"\xa5" * path.stat().st_size)
        client.close()
        for number in range(20):
            assert other.put_many([(key(2 + number), bytes(1_000)), (key(50), bytes(300_000))]) == [True, True]
        assert owner.stats()["faults_total"] == 0 if "faults_total" in owner.stats() else True


def test_an_arena_larger_than_memory_is_refused_before_any_is_taken(folder: Path) -> None:
    with pytest.raises(InvalidInput, match="are free"):
        ServedArena(folder, 1 << 50)
    assert not (folder / "values").exists()


def test_memory_missing_for_a_clients_page_costs_no_later_owner_its_start(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ServedArena(folder, BUDGET_BYTES, keep=True) as owner:
        owner.put_many([(key(1), value(1))])
        with monkeypatch.context() as full:
            full.setattr(os, "posix_fallocate", lambda *_: os.pwrite(-1, b"", 0))
            with pytest.raises(SkyMemoryError, match="no page for a client: Bad file descriptor"):
                HostStore(folder)
        with HostStore(folder) as client:
            assert client.get_many([key(1)]) == [value(1)]
    (folder / "pages" / "99.new").touch()  # of an owner that was killed
    with ServedArena(folder, BUDGET_BYTES) as owner, HostStore(folder) as client:
        assert client.get_many([key(1)]) == [value(1)]
        assert not [*(folder / "pages").glob("*.new")]


def test_an_owner_whose_folder_was_taken_away_removes_no_file_of_the_next(folder: Path) -> None:
    """As when a user's last session ends (logind's RemoveIPC)."""
    owner = ServedArena(folder, BUDGET_BYTES)
    for path in sorted(folder.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    with ServedArena(folder, BUDGET_BYTES) as successor:
        successor.put_many([(key(1), value(1))])
        owner.close()
        with HostStore(folder) as client:
            assert client.get_many([key(1)]) == [value(1)]


def test_clients_of_a_hierarchy_know_of_farther_tiers_from_the_first(folder: Path, tmp_path: Path) -> None:
    arena = ServedArena(folder, BUDGET_BYTES, is_nearest=True)
    with pytest.raises(SkyMemoryError, match="no owner answers"):
        HostStore(folder)
    arena.close()
    address = f"tiers:?tier=host://4MiB?at={folder}&tier=disk://{tmp_path}/values?budget=64MiB"
    with open_store(address), HostStore(folder) as client:
        assert client._has_below


def test_a_value_stored_just_before_the_owner_sleeps_is_entered_at_once(
    owner: ServedArena, monkeypatch: pytest.MonkeyPatch
) -> None:
    with HostStore(owner.folder) as client:
        client.put_many([(key(0), bytes(1_000))], BLOCK)
        sleep, stored = owner.sleep, list[float]()

        def sleep_after_a_store() -> bool:
            if not stored:
                owner.wake()  # so that the client wakes no thread
                assert client.put_many([(key(1), b"x" * 1_000)], BLOCK) == [True]
                stored.append(time.monotonic())
            return sleep()

        monkeypatch.setattr(owner, "sleep", sleep_after_a_store)
        with HostStore(owner.folder) as other:
            in_time(lambda: bool(stored), 3.0)
            in_time(lambda: other.get_many([key(1)]) == [b"x" * 1_000], 3.0)
            assert time.monotonic() - stored[0] < 0.3
